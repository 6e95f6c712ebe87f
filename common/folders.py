"""Atomic files and folders: manifests, publishing, file locks, digests, checks of output folders.

A folder is written next to its target, sealed with a manifest.json (size and SHA-256 of every file), synced to disk and
renamed. Readers accept a folder only if its files match its manifest. Nothing here uses pickle.
"""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.errors import BadInput, OutOfResource, TryAgain
from common.messages import say

MANIFEST = "manifest.json"
SHA256 = re.compile(r"[0-9a-f]{64}")
HASH_THREADS = 4  # files that are hashed at the same time
LOCK = ".lock"


# ---------------------------------------------------------------------------------------------------------------------
# Files


def sha256_file(path: str | Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_files(paths: Iterable[str | Path]) -> list[str]:
    """Return the SHA-256 of each file, in order; several files are read in parallel."""
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return list(pool.map(sha256_file, paths))


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield the path of a temporary file to write; it is then synced to disk and renamed to `path`, or removed."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield beside
        sync(beside)
        os.replace(beside, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # the error of a full disk names no file
        raise
    finally:
        beside.unlink(missing_ok=True)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file atomically: to a temporary file that is synced to disk, then renamed."""
    with replacing(path) as beside:
        beside.write_bytes(data)


def make_readable(path: Path) -> None:
    """Give a file the usual permissions: safetensors creates files that only the owner can read."""
    os.umask(umask := os.umask(0))
    path.chmod(0o666 & ~umask)


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON with sorted keys, atomically."""
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if the file is missing or damaged."""
    try:
        return json.loads(Path(path).read_text())
    except (FileNotFoundError, ValueError):
        return {}


def read_json_lines(path: str | Path) -> list[Any]:
    """Return the JSON values of a file with one per line; damaged lines and a missing file are ignored."""
    try:
        return parse_json_lines(Path(path).read_bytes())
    except FileNotFoundError:
        return []


def parse_json_lines(data: bytes) -> list[Any]:
    """Return the JSON values in the content of a file with one per line; damaged lines are ignored."""
    values = []
    for line in data.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            values.append(json.loads(line))
    return values


def sync(path: Path) -> None:
    """Wait until a file or a folder's list of names is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------------
# Checks of output folders


def _existing(folder: str | Path) -> Path:
    """Return `folder`, or its nearest parent that exists."""
    folder = Path(folder)
    return next(place for place in (folder, *folder.parents) if place.exists())


def check_writable(folder: str | Path, flag: str) -> None:
    """Raise BadInput unless `folder`, or its nearest parent that exists, is a writable folder."""
    place = _existing(folder)
    if not place.is_dir():
        raise BadInput(f"{flag} {folder}: {place} is not a folder: choose another one")
    if not os.access(place, os.W_OK | os.X_OK):
        raise BadInput(f"{flag} {folder}: no permission to write in {place}; choose another folder")


def check_ours(folder: str | Path, flag: str) -> None:
    """Raise BadInput if `folder` is a file or holds files without a manifest; --overwrite does not replace these."""
    folder = Path(folder)
    if not (folder / MANIFEST).is_file() and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{flag} {folder} exists and is not an output of this toolkit: choose another folder")


def check_apart(output_dir: str | Path, **others: str | Path | None) -> None:
    """Raise BadInput if replacing `output_dir` would remove another folder; others: absolute paths by flag name."""
    for name, path in others.items():
        if path and Path(path).is_relative_to(output_dir):
            raise BadInput(f"--output_dir {output_dir} would replace --{name} {path}: choose separate folders")


def check_on_node(path: str | Path, flag: str = "") -> None:
    """Raise BadInput unless a path of the driver exists on this worker's node too; flag: the one that gave the path."""
    if not Path(path).exists():
        named = f"{flag} {path}".lstrip()
        remedy = "use a folder that all nodes share, or a URI"
        raise BadInput(f"{named} does not exist on node {socket.gethostname()}: {remedy}")


def check_space(needs: list[tuple[str, str | Path, float]]) -> None:
    """Raise OutOfResource unless all planned output fits on its disks; needs: (flag, folder, bytes) of each output."""
    for device in {os.stat(_existing(folder)).st_dev for _, folder, _ in needs}:
        here = [need for need in needs if os.stat(_existing(need[1])).st_dev == device]
        need, free = sum(need[2] for need in here), shutil.disk_usage(_existing(here[0][1])).free
        if need > free:
            raise OutOfResource(
                f"{here[0][0]} {here[0][1]}: about {need / 1e9:.3g} GB are needed, but only {free / 1e9:.3g} GB are "
                "free on the disk: free some space or use another disk"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Publishing folders with manifests


def staging_path(target: str | Path) -> Path:
    """Return the folder next to `target` that `staging` creates."""
    return Path(target).with_name(f".{Path(target).name}.staging")


@contextlib.contextmanager
def staging(target: str | Path) -> Iterator[Path]:
    """Create a folder next to `target` to fill and `publish`; remove it afterwards, and one that a killed run left.

    The caller must hold the output's lock: another run's staging folder would be removed too.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = staging_path(target)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def describe_files(folder: Path, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return {name: {"size": bytes, "sha256": hex digits}} of files of a folder, sorted by path.

    names: of these files; default: all files at any depth.
    """
    found = folder.rglob("*") if names is None else (folder / name for name in names)
    paths = sorted(path for path in found if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, sha256_files(paths), strict=True)
    }


def publish(folder: str | Path, target: str | Path, names: Iterable[str] | None = None, /, **facts: Any) -> None:
    """Write a manifest of `folder`'s files with additional `facts`, sync all to disk, and rename it to `target`.

    names: of the files that the manifest lists; the others must be on disk already. Default: all files.
    A folder that exists at `target` is removed only after that; `recover` restores it if the run is killed in between.
    """
    folder, target = Path(folder), Path(target)
    files = describe_files(folder, names)
    for name in files:
        make_readable(folder / name)
        sync(folder / name)
    write_json(folder / MANIFEST, {**facts, "files": files})
    for path in [path for path in folder.rglob("*") if path.is_dir()] + [folder]:
        sync(path)
    replaced = _aside(target)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(target, replaced)
    os.rename(folder, target)
    sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(target: str | Path) -> None:
    """Restore the folder that `publish` was replacing when it was killed."""
    replaced = _aside(target)
    if replaced.exists() and not Path(target).exists():
        os.rename(replaced, target)


def _aside(target: str | Path) -> Path:
    return Path(target).with_name(f".{Path(target).name}.replaced")


def read_manifest(folder: str | Path, deep: bool = False) -> dict[str, Any] | None:
    """Return the manifest of a folder, or None if it is missing or does not match the files.

    Compares the size of every file and, if `deep`, its SHA-256.
    """
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        facts = {folder / name: fact for name, fact in manifest["files"].items()}
        if any(path.stat().st_size != fact["size"] for path, fact in facts.items()):
            return None
        if deep and sha256_files(facts) != [fact["sha256"] for fact in facts.values()]:
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest


# ---------------------------------------------------------------------------------------------------------------------
# File locks


@contextlib.contextmanager
def lock(path: str | Path, wait_while: str | None = None) -> Iterator[str]:
    """Hold the file lock `path` and yield the line that names its owner.

    If another run holds it, raise TryAgain or, if `wait_while` says what it does, say that and wait for it. The kernel
    releases the lock when its process ends, however it ends.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadInput(f"{path} is a symbolic link: remove it") from None
        raise
    with open(descriptor, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another run"
            if wait_while is None:
                raise TryAgain(f"{path.parent} is in use by {holder}: wait until it ends") from None
            say(f"waiting while {holder} {wait_while}")
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
        file.truncate(0)
        owner = name_owner()
        file.write(owner + "\n")
        file.flush()
        os.fsync(file.fileno())  # on a network file system other nodes see it only then
        yield owner


def name_owner() -> str:
    """Return a line that names this process and that no other run has."""
    return f"process {os.getpid()} on {socket.gethostname()}, {time.strftime('%F %T')}, run {secrets.token_hex(4)}"


def check_owner(path: str | Path, owner: str) -> None:
    """Raise TryAgain unless `owner` still holds a lock: workers can outlive their driver by a few seconds."""
    check_on_node(path)
    if Path(path).read_text().strip() != owner:
        raise TryAgain(f"{Path(path).parent} now belongs to another run: this run stops")


# ---------------------------------------------------------------------------------------------------------------------
# Digests and settings of a run


def digest_files(paths: Iterable[str | Path], known: dict[Path, str] | None = None) -> str:
    """Return one SHA-256 of files' names and contents; their folders and order do not matter.

    known: {path: SHA-256} of files that need not be read.
    """
    known = known or {}
    return digest_named((path.name, known.get(path) or sha256_file(path)) for path in map(Path, paths))


def digest_named(pairs: Iterable[tuple[str, str]]) -> str:
    """Return one SHA-256 of (name, SHA-256) pairs; their order does not matter."""
    lines = sorted(f"{name} {digest}" for name, digest in pairs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest_values(values: Any) -> str:
    """Return one SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def digest_list(values: Iterable[Any]) -> str:
    """Return the digest_values of the list of all values, of which a thousand at a time are in memory."""
    digest, values, separator = hashlib.sha256(b"["), iter(values), b""
    while some := list(itertools.islice(values, 1000)):
        digest.update(separator + json.dumps(some, sort_keys=True)[1:-1].encode())
        separator = b", "
    digest.update(b"]")
    return digest.hexdigest()


def check_same_settings(settings: dict[str, Any], earlier: dict[str, Any], place: str) -> None:
    """Raise BadInput that names each setting in which a run differs from the `earlier` run in `place`."""
    changed = [name for name in sorted(settings.keys() | earlier.keys()) if settings.get(name) != earlier.get(name)]
    if changed:
        differences = ", ".join(f"{name} was {earlier.get(name)!r}, now {settings.get(name)!r}" for name in changed)
        raise BadInput(f"{place} holds a run with other settings ({differences}): use another folder or --overwrite")
