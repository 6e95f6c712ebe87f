"""Output folders by path or URI through one interface: locks, publishing whole or not at all, small files.

On a disk this is common.folders, in an object store common.objects and common.leases.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import folders, leases, objects
from common.errors import BadInput
from common.storage import is_remote, join
from common.stores import Store, Writer


@dataclass(frozen=True)
class Held:
    """A lock that a run holds: the folder that it locks, and the line that names its owner."""

    location: str
    owner: str

    def check(self) -> None:
        """Raise TryAgain unless the run still holds the lock: workers can outlive their driver by seconds."""
        if is_remote(self.location):
            self.lease().check()
        else:
            folders.check_owner(Path(self.location) / folders.LOCK, self.owner)

    def lease(self) -> leases.Borrowed:
        """Return the lease under which objects are written, for a lock in an object store."""
        return leases.borrow(self.location, self.owner)


@contextlib.contextmanager
def lock(location: str | Path) -> Iterator[Held]:
    """Hold the lock of a folder; raise TryAgain if another run holds it."""
    if is_remote(location):
        with leases.lease(str(location)) as held:
            yield Held(str(location), held.owner)
    else:
        with folders.lock(Path(location) / folders.LOCK) as owner:
            yield Held(str(location), owner)


@contextlib.contextmanager
def staging(location: str | Path) -> Iterator[Path]:
    """Yield an empty folder on this node's disk to fill and `publish`; it is removed afterwards."""
    if not is_remote(location):
        with folders.staging(location) as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="dreambooth-") as folder:
        yield Path(folder)


def _lease(held: Held | None) -> leases.Borrowed | None:
    return held.lease() if held else None


def publish(
    folder: Path,
    location: str | Path,
    held: Held | None = None,
    others: Callable[[], objects.Facts] | None = None,
    **facts: Any,
) -> None:
    """Publish a folder of `staging` with a manifest of its files and additional `facts`; it replaces what is there.

    held: the lock under which objects are written; a folder on a disk needs none. others: returns the facts of the
    objects that other workers upload to the same location, once they have.
    """
    if is_remote(location):
        objects.publish(folder, str(location), _lease(held), others, **facts)
    else:
        folders.publish(folder, location, **facts)


def read_manifest(location: str | Path, deep: bool = False) -> dict[str, Any] | None:
    """Return the manifest of a folder, or None if it is missing or does not match the files (`deep`: their SHA-256)."""
    if not is_remote(location):
        return folders.read_manifest(location, deep)
    return objects.read_manifest(str(location), deep)


def recover(location: str | Path) -> None:
    """Restore the folder that `publish` was replacing when it was killed; a store has nothing to restore."""
    if not is_remote(location):
        folders.recover(location)


def read_json(location: str | Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of a folder, or {} if it is missing or damaged."""
    if not is_remote(location):
        return folders.read_json(Path(location) / name)
    with contextlib.suppress(ValueError):
        return json.loads(Files(location).read(name) or "{}")
    return {}


class Files:
    """Reads and writes the files of a folder one by one, by names relative to it.

    held: the lock under which objects are written, TryAgain is raised if it is lost; a folder on a disk needs none.
    """

    def __init__(self, location: str | Path, held: Held | None = None):
        self.location, self.writer = str(location), None
        if is_remote(location):
            self.writer = held.lease().writer(self.location) if held else Writer(self.location)

    def versions(self) -> dict[str, Any]:
        """Return {name: what changes with the content} of the files that are neither hidden nor in subfolders."""
        if self.writer:
            found = {name: each.tag for name, each in self.writer.store.list().items() if "/" not in name}
        else:
            found = {}
            with contextlib.suppress(FileNotFoundError):
                facts = {each.name: each.stat() for each in os.scandir(self.location) if each.is_file()}
                found = {name: (fact.st_size, fact.st_mtime_ns) for name, fact in facts.items()}
        return {name: version for name, version in found.items() if name[0] != "."}

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it is missing."""
        if self.writer:
            return self.writer.store.read(name)
        with contextlib.suppress(FileNotFoundError):
            return Path(self.location, name).read_bytes()
        return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        if self.writer:
            return self.writer.write(name, data)
        Path(self.location).mkdir(parents=True, exist_ok=True)
        folders.write_bytes(Path(self.location, name), data)

    def delete(self, name: str) -> None:
        """Delete a file; one that is missing is no error."""
        if self.writer:
            return self.writer.delete(name)
        Path(self.location, name).unlink(missing_ok=True)


def write_text(location: str | Path, name: str, text: str, held: Held | None = None) -> None:
    """Write a file of a folder, atomically."""
    Files(location, held).write(name, text.encode())


def write_json(location: str | Path, name: str, value: Any, held: Held | None = None) -> None:
    """Write `value` as indented JSON with sorted keys to a file of a folder, atomically."""
    write_text(location, name, json.dumps(value, indent=2, sort_keys=True) + "\n", held)


def delete(location: str | Path, held: Held | None = None) -> None:
    """Delete a folder, if it exists; readers see it whole or not at all."""
    if not is_remote(location):
        shutil.rmtree(location, ignore_errors=True)
        return
    objects.delete_folder(str(location), _lease(held))


def remove(location: str | Path, name: str, held: Held | None = None) -> None:
    """Delete a file, a link or a folder in a folder."""
    if not is_remote(location):
        path = Path(location, name)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        return
    Files(location, held).delete(name)
    delete(join_name(location, name), held)


def names(location: str | Path) -> set[str]:
    """Return the names of the files, links and folders in a folder."""
    if not is_remote(location):
        return {path.name for path in Path(location).glob("*")}
    return {name.split("/")[0] for name in Store(str(location)).list()}


def is_empty(location: str | Path) -> bool:
    """Return whether a folder is missing or holds nothing but a lock."""
    return not {name for name in names(location) if not (is_remote(location) and name.startswith(folders.LOCK))}


def check_writable(location: str | Path, flag: str) -> None:
    """Raise BadInput unless a folder, or its nearest parent that exists, is a writable folder; a store tells later."""
    if not is_remote(location):
        folders.check_writable(location, flag)


def check_apart(output_dir: str, **others: str | None) -> None:
    """Raise BadInput if replacing `output_dir` would remove another folder; others: locations by flag name."""
    if not is_remote(output_dir):
        folders.check_apart(output_dir, **{name: path for name, path in others.items() if path and not is_remote(path)})
        return
    output = output_dir.split("?")[0].rstrip("/")
    for name, location in others.items():
        if location and f"{location.split('?')[0].rstrip('/')}/".startswith(f"{output}/"):
            raise BadInput(f"--output_dir {output_dir} would replace --{name} {location}: choose separate folders")


def check_ours(location: str | Path, flag: str) -> None:
    """Raise BadInput if there is a file, or a folder with files and without a manifest; nothing replaces these."""
    if not is_remote(location):
        folders.check_ours(location, flag)
        return
    found = [name for name in names(location) if not name.startswith((folders.LOCK, "."))]
    if not found or folders.MANIFEST in found or read_json(location, folders.MANIFEST):
        return
    if Store(str(location)).head(objects.MARKER) is None:  # else a publishing of ours was stopped there
        raise BadInput(f"{flag} {location} exists and is not an output of this toolkit: choose another folder")


def beside(location: str | Path, ending: str) -> str:
    """Return the location of a folder next to another one, with an ending added to its name."""
    if not is_remote(location):
        return f"{str(location).rstrip('/')}{ending}"
    path, *options = str(location).split("?", 1)
    return "?".join([f"{path.rstrip('/')}{ending}", *options])


def join_name(location: str | Path, name: str) -> str:
    """Return the location of a file or folder in a folder."""
    return join(str(location), name) if is_remote(location) else str(Path(location) / name)
