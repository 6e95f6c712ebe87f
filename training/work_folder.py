"""The work folder of a run: on a disk as it is, of a URI a scratch folder on this node that is copied to the store.

Rank 0 alone writes the log, TensorBoard's files and the validation images. Checkpoints go to the store by themselves.
"""

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

from common import cache
from common.storage import is_remote
from common.stores import Store
from common.targets import Files, Held
from pipelines.model_folder import VALIDATION_STRIP

LOG = "log.jsonl"
TENSORBOARD = "tensorboard"
VALIDATION, STRIP = VALIDATION_STRIP.split("/")  # the images of some steps, and one image of all of them
RAY = "ray"  # what Ray Train writes for itself
COPIED = (LOG, TENSORBOARD, VALIDATION)  # what a store gets of the scratch folder


def scratch(work_dir: str | Path) -> Path:
    """Return the folder on this node for the log and images of a run: `work_dir`, or one that stands for a URI."""
    if not is_remote(work_dir):
        return Path(work_dir)
    return cache.root() / "work" / hashlib.sha256(str(work_dir).encode()).hexdigest()[:16]


def fetch(work_dir: str | Path) -> None:
    """Make the scratch folder of a URI anew, with what the store has of it; nothing for a folder on a disk."""
    if not is_remote(work_dir):
        return
    folder, store = scratch(work_dir), Store(str(work_dir))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in store.list():
        if name.split("/")[0] in COPIED and (data := store.read(name)) is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)


class Copier:
    """Copies what has changed in the scratch folder of a URI to the store, under the run's lock."""

    def __init__(self, held: Held) -> None:
        self.held, self.copied = held, {}
        self.writer = held.lease().writer(held.location) if is_remote(held.location) else None

    def copy(self) -> None:
        """Copy the files that have changed since the last call; nothing for a folder on a disk."""
        if self.writer is None:
            return
        folder = scratch(self.held.location)
        for name, version in _versions(folder):
            if self.copied.get(name) != version and (data := Files(folder).read(name)) is not None:
                self.writer.write(name, data)
                self.copied[name] = version


def _versions(folder: Path) -> list[tuple[str, tuple[int, int]]]:
    """Return [(name, (size, time of the last write))] of the files to copy; hidden ones are not whole yet.

    Another thread may write, rename and remove files meanwhile.
    """
    found = []
    for path in (Path(parent, name) for parent, _, names in os.walk(folder) for name in names):
        parts = path.relative_to(folder).parts
        if parts[0] in COPIED and not any(part.startswith(".") for part in parts):
            with contextlib.suppress(FileNotFoundError):
                facts = path.stat()
                found.append(("/".join(parts), (facts.st_size, facts.st_mtime_ns)))
    return sorted(found)
