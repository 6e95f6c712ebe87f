"""Folders that are whole or absent: manifests, publishing, locks and checkpoints.

A folder is written beside its place, its manifest.json (sizes and sha256 of every file) last, synced, and renamed in.
A reader trusts a folder only when its manifest fits. Nothing here is read through pickle.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.errors import BadInput, OutOfResource, TryAgain

MANIFEST = "manifest.json"
SHA256 = re.compile(r"[0-9a-f]{64}")
HASH_THREADS = 4  # that read the files of a folder
LOCK = ".lock"


# ---------------------------------------------------------------------------------------------------------------------
# Files and folders


def sha256_file(path):
    """Return the sha256 of a file as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_files(paths):
    """Return the sha256 of each file; several are read at a time."""
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return list(pool.map(sha256_file, paths))


def write_bytes(path, data):
    """Write a file that appears under its name only when it is whole and synced."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk's error names no file
        raise
    finally:
        beside.unlink(missing_ok=True)


def write_json(path, value):
    """Write `value` as JSON, whole or not at all."""
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def read_json(path):
    """Return the JSON object in a file, {} where there is none."""
    try:
        return json.loads(Path(path).read_text())
    except (FileNotFoundError, ValueError):
        return {}


def read_json_lines(path):
    """Return the JSON values of a file, one on each line; lines that are cut short and a missing file do not count."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    values = []
    for line in lines:
        with contextlib.suppress(ValueError):
            values.append(json.loads(line))
    return values


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _existing(folder):
    """Return `folder`, or the nearest folder above it that exists."""
    folder = Path(folder)
    return next(place for place in (folder, *folder.parents) if place.exists())


def check_writable(folder, flag):
    """Raise BadInput unless files can be written in `folder`, or in the nearest folder above it that exists."""
    place = _existing(folder)
    if not place.is_dir():
        raise BadInput(f"{flag} {folder}: {place} is not a folder; choose another place")
    if not os.access(place, os.W_OK | os.X_OK):
        raise BadInput(f"{flag} {folder}: no permission to write in {place}; choose another place")


def check_ours(folder, flag):
    """Raise BadInput where `folder` holds what we did not publish: not even --overwrite replaces that."""
    folder = Path(folder)
    if not (folder / MANIFEST).is_file() and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{flag} {folder} is in the way: it is not a result of ours; choose another place")


def check_apart(output_dir, **others):
    """Raise BadInput where replacing `output_dir` would remove another folder; others: absolute paths by flag."""
    for name, path in others.items():
        if path and Path(path).is_relative_to(output_dir):
            raise BadInput(f"--output_dir {output_dir} would replace --{name} {path}: choose a folder apart")


def check_space(needs):
    """Raise OutOfResource unless what is to be written fits on its disk; needs: [(flag, folder, bytes)]."""
    for device in {os.stat(_existing(folder)).st_dev for _, folder, _ in needs}:
        here = [need for need in needs if os.stat(_existing(need[1])).st_dev == device]
        need, free = sum(need[2] for need in here), shutil.disk_usage(_existing(here[0][1])).free
        if need > free:
            raise OutOfResource(
                f"{here[0][0]} {here[0][1]}: some {need / 1e9:.3g} GB are needed, {free / 1e9:.3g} GB of the disk are "
                "free: make room, or take another disk"
            )


def staging_path(target):
    """Return the folder beside `target` that `staging` gives."""
    return Path(target).with_name(f".{Path(target).name}.staging")


@contextlib.contextmanager
def staging(target):
    """Give a new folder beside `target` to fill and `publish`; what is left of it, or of a killed run's, is removed.

    The caller holds the output's lock, so nobody else's staging folder is in the way.
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


def publish(folder, target, **facts):
    """Seal `folder` with a manifest of its files and `facts`, sync it, and rename it to `target`.

    What stood at `target` goes only after the new folder is in place; `recover` puts it back after a kill in between.
    """
    folder, target = Path(folder), Path(target)
    files = {}
    os.umask(umask := os.umask(0))
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path, digest in zip(paths, sha256_files(paths), strict=True):
        path.chmod(0o666 & ~umask)  # safetensors writes files that others may not read
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": digest}
        _sync(path)
    write_json(folder / MANIFEST, {**facts, "files": files})
    for path in [path for path in folder.rglob("*") if path.is_dir()] + [folder]:
        _sync(path)
    replaced = _aside(target)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(target, replaced)
    os.rename(folder, target)
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(target):
    """Put back what `publish` was about to replace when it was killed."""
    replaced = _aside(target)
    if replaced.exists() and not Path(target).exists():
        os.rename(replaced, target)


def _aside(target):
    return Path(target).with_name(f".{Path(target).name}.replaced")


def read_manifest(folder, deep=False):
    """Return the manifest of a whole folder, or None where it is absent or does not fit its files.

    Sizes are compared; `deep` compares every file's sha256 too.
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


@contextlib.contextmanager
def lock(path):
    """Hold the lock file `path` and give its owner's line; raise TryAgain, naming the holder, while another run does.

    The kernel frees it with the process that holds it, so a killed run's lock never stands in the way.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadInput(f"{path} is a link: remove it") from None
        raise
    with open(descriptor, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise TryAgain(f"{path.parent} is in use by {file.read().strip() or 'another run'}: wait for it") from None
        file.truncate(0)
        owner = f"process {os.getpid()} on {socket.gethostname()}, {time.strftime('%F %T')}, run {secrets.token_hex(4)}"
        file.write(owner + "\n")
        file.flush()
        yield owner


def check_owner(path, owner):
    """Raise TryAgain where a lock is not `owner`'s any more: workers may outlive their driver for some seconds."""
    if Path(path).read_text().strip() != owner:
        raise TryAgain(f"{Path(path).parent} belongs to another run now: this one stops")


# ---------------------------------------------------------------------------------------------------------------------
# What a run was made from


def digest_files(paths, known=None):
    """Return one sha256 of files by bare name and content, wherever they lie, in any order.

    known: {path: sha256} of those that need not be read.
    """
    known = known or {}
    return digest_named((path.name, known.get(path) or sha256_file(path)) for path in map(Path, paths))


def digest_named(pairs):
    """Return one sha256 of (name, sha256) pairs, in any order."""
    lines = sorted(f"{name} {digest}" for name, digest in pairs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest_values(values):
    """Return one sha256 of plain JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def check_same_settings(settings, earlier, place):
    """Raise BadInput naming each setting in which a run differs from the `earlier` one that `place` holds."""
    changed = [name for name in sorted(settings.keys() | earlier.keys()) if settings.get(name) != earlier.get(name)]
    if changed:
        differences = ", ".join(f"{name} was {earlier.get(name)!r}, now {settings.get(name)!r}" for name in changed)
        raise BadInput(f"{place} holds a run with other settings ({differences}): another folder, or --overwrite")
