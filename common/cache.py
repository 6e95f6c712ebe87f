"""A cache of folders on the node's own disk: whole or absent, shared by the node's processes, bounded in size.

It lies in $DREAMBOOTH_CACHE, by default $XDG_CACHE_HOME/ray-dreambooth or ~/.cache/ray-dreambooth. $DREAMBOOTH_CACHE_GB
is the most that it holds, in GB (default: 50); the folders that were not used for longest are removed first, never one
that a running process uses.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

from common import folders
from common.errors import BadInput, TryAgain

DEFAULT_GB = 50.0
_used: dict[Path, IO] = {}  # shared file locks of the entries that this process uses, until it ends


def root() -> Path:
    """Return the folder of the cache."""
    place = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DREAMBOOTH_CACHE") or Path(place) / "ray-dreambooth").absolute()


def limit() -> float:
    """Return how many bytes the cache may hold; raise BadInput if the environment has no number."""
    text = os.environ.get("DREAMBOOTH_CACHE_GB") or str(DEFAULT_GB)
    try:
        return float(text) * 1e9
    except ValueError:
        raise BadInput(f"DREAMBOOTH_CACHE_GB is {text!r}: set it to a number of gigabytes") from None


def get(key: str, size: int, fill: Callable[[Path], object], source: str) -> Path:
    """Return the cached folder `key`, which stays until this process ends; `fill(folder)` writes it if it is missing.

    One process fills it while the others wait. size: bytes that `fill` writes. source: where they come from, for
    messages. Raises OutOfResource if the disk has no room for it.
    """
    folder = root() / key
    if folder in _used:
        return folder
    with folders.lock(root() / f"{key}.fetch", wait_while=f"downloads {source}"):
        used = open(root() / f"{key}.use", "a")  # noqa: SIM115
        fcntl.flock(used, fcntl.LOCK_SH)
        if not folder.exists():
            _make_room(size)
            folders.check_space([("DREAMBOOTH_CACHE", root(), size)])
            with folders.staging(folder) as beside:
                fill(beside)
                os.rename(beside, folder)
            folders.sync(folder.parent)
        os.utime(folder)
        _used[folder] = used
    return folder


def _make_room(size: int) -> None:
    """Remove what killed processes left, then the oldest unused entries until `size` bytes more fit into the limit."""
    for left in [*root().glob(".*.staging"), *root().glob(".*.removed")]:
        with contextlib.suppress(TryAgain), folders.lock(root() / f"{left.name.split('.')[1]}.fetch"):
            shutil.rmtree(left, ignore_errors=True)
    entries = [path for path in root().iterdir() if path.is_dir() and path.name[0] != "."]
    sizes = {path: sum(file.lstat().st_size for file in path.rglob("*")) for path in entries}
    for path in sorted(sizes, key=lambda path: path.stat().st_mtime):
        if sum(sizes.values()) + size <= limit():
            return
        with contextlib.suppress(TryAgain), folders.lock(path.with_name(f"{path.name}.use")):
            removed = path.with_name(f".{path.name}.removed")
            os.rename(path, removed)
            shutil.rmtree(removed, ignore_errors=True)
            del sizes[path]
