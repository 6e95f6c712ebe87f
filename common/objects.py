"""Folders in object stores that are whole or absent, as common.folders has them on a disk, and local copies of them.

A folder is sealed with a manifest.json (size and SHA-256 of every object), which is written last and deleted first.
While objects are written, the object `.publishing` tells readers that a folder without a manifest is not a plain one.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from common import cache, folders
from common.errors import BadInput, CheckFailed, ToolError, TryAgain
from common.folders import MANIFEST
from common.storage import is_remote, join, split
from common.stores import PARALLEL, PART, Object, Store, Writer
from common.uris import Conflict, parse, shown

if TYPE_CHECKING:
    from common.leases import Borrowed, Lease

MARKER = ".publishing"
Item = TypeVar("Item")
Facts = dict[str, dict[str, Any]]  # {name: {"size": bytes, "sha256": hex digits}}
_copied: dict[Path, str] = {}  # the URIs of the local copies that this process uses


def _in_parallel(function: Callable[[Item], Any], items: Iterable[Item]) -> list[Any]:
    """Return the function's results in the order of the items; after an error, items that wait are not begun."""
    pool = ThreadPoolExecutor(PARALLEL)
    try:
        return list(pool.map(function, items))
    finally:
        pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def _writer(uri: str, lease: "Lease | Borrowed | None") -> Writer:
    return lease.writer(uri) if lease else Writer(uri)


def upload_folder(folder: str | Path, uri: str, lease: "Lease | Borrowed | None" = None) -> None:
    """Write all files of a folder to a URI: large ones one after the other in parallel parts, the others in parallel.

    lease: the one under which the objects are written. Objects at the URI that the folder lacks stay as they are.
    """
    writer = _writer(uri, lease)
    sizes = {path: path.stat().st_size for path in sorted(Path(folder).rglob("*")) if path.is_file()}

    def write(path: Path) -> None:
        writer.write(path.relative_to(folder).as_posix(), path)

    for path, size in sizes.items():
        if size > PART:
            write(path)
    _in_parallel(write, [path for path, size in sizes.items() if size <= PART])


def publish(
    folder: str | Path,
    uri: str,
    lease: "Lease | Borrowed | None" = None,
    others: Callable[[], Facts] | None = None,
    **facts: Any,
) -> None:
    """Upload a folder and seal it with a manifest of its files and additional `facts`; replace what is at the URI.

    An older manifest is deleted first and the older objects that the folder lacks are deleted last, so that readers
    see the older folder, none, or the new one. The folder on the disk stays as it is. lease: the one under which the
    objects are written; raises TryAgain if it is lost. others: called after the upload, returns the facts of objects
    at the URI that belong to the folder too.
    """
    folder, writer = Path(folder), _writer(uri, lease)
    files = folders.describe_files(folder)
    assert MANIFEST not in files, f"{folder} is published already"
    writer.write(MARKER, b"")
    writer.delete(MANIFEST)
    upload_folder(folder, uri, lease)
    files |= others() if others else {}
    writer.write(MANIFEST, (json.dumps({**facts, "files": files}, indent=2, sort_keys=True) + "\n").encode())
    older = [name for name in writer.store.list() if name not in files and name not in (MANIFEST, MARKER)]
    _in_parallel(writer.delete, filter(_is_content, older))
    writer.delete(MARKER)


def delete_folder(uri: str, lease: "Lease | Borrowed | None" = None) -> None:
    """Delete all objects at a URI but its lock, the manifest first; readers see the whole folder or none."""
    writer = _writer(uri, lease)
    writer.write(MARKER, b"")
    writer.delete(MANIFEST)
    _in_parallel(writer.delete, [name for name in writer.store.list() if _is_content(name) and name != MARKER])
    writer.delete(MARKER)


def _is_content(name: str) -> bool:
    return not name.startswith(folders.LOCK)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_manifest(uri: str, deep: bool = False) -> dict[str, Any] | None:
    """Return the manifest of a URI, or None if it is missing or does not match the objects.

    Compares the size of every object, which takes one listing, and, if `deep`, the SHA-256 by reading all of them.
    """
    store = Store(uri)
    manifest = _parse_manifest(store.read(MANIFEST))
    if manifest is None:
        return None
    files = manifest["files"]
    found = _find(store, files)
    if len(found) < len(files):
        return None
    if deep and any(_in_parallel(lambda name: _sha256(store, name, found[name]) != files[name]["sha256"], files)):
        return None
    return manifest


def _parse_manifest(data: bytes | None) -> dict[str, Any] | None:
    """Return the JSON object of a manifest, or None if it is not one of this toolkit."""
    try:
        manifest = json.loads(data or b"")
        return manifest if all(fact["size"] >= 0 and fact["sha256"] for fact in manifest["files"].values()) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _find(store: Store, files: Facts) -> dict[str, Object]:
    """Return what the store tells of each object of a manifest that exists and has the manifest's size.

    A listing can be late in some stores: it counts only where it agrees with the manifest.
    """
    found: dict[str, Object | None] = dict(store.list())

    def fits(name: str) -> bool:
        each = found.get(name)
        return each is not None and each.size == files[name]["size"]

    doubtful = [name for name in files if not fits(name)]
    found |= zip(doubtful, _in_parallel(store.head, doubtful), strict=True)
    return {name: each for name in files if fits(name) and (each := found[name])}


def _sha256(store: Store, name: str, found: Object) -> str | None:
    """Return the SHA-256 of an object, or None if it changed or went while it was read."""
    digest = hashlib.sha256()
    try:
        for _, read in store.read_parts(name, found):
            digest.update(read())
    except (Conflict, FileNotFoundError):
        return None
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Local copies


def local_copy(location: str | Path) -> Path:
    """Return a folder on this node's disk with the files of a path or a URI; it stays until this process ends.

    A path is returned as it is. A URI's objects are downloaded into the cache (common.cache) once for all processes of
    the node: a published folder's are named by its manifest and must match it, a plain folder's are those that the
    store lists, without hidden ones. Of the URI of a single object the copy's path is returned. Do not write to it.
    Raises BadInput if there is nothing at the URI, CheckFailed if an object does not match the manifest, TryAgain if
    the folder is incomplete or changes while it is read.
    """
    if not is_remote(location):
        return Path(location)
    copy = _local_copy(Store(str(location)))
    _copied[copy] = str(location)
    return copy


def same_copy(location: str | Path, flag: str, copy: str | Path | None = None) -> Path:
    """Return `local_copy(location)` for a worker; copy: that of its driver, if it has looked.

    Raises BadInput if a path does not exist on the worker's node, TryAgain if the URI holds another folder by now.
    """
    found = local_copy(location)
    if not is_remote(location):
        folders.check_on_node(location, flag)
    elif copy and Path(copy).name != found.name:
        raise TryAgain(f"{flag} {location} was replaced while this run uses it: run the same command again")
    return found


@contextlib.contextmanager
def uris_in_errors() -> Iterator[None]:
    """Let ToolErrors name the URIs of files, without secrets, not the paths of their local copies.

    It is for all that a script does, and for all that a worker does: only its own process knows a worker's copies, and
    Ray writes the errors of workers to its logs.
    """
    try:
        yield
    except ToolError as error:
        text = str(error)
        for copy, uri in _copied.items():
            path = re.compile(rf"{re.escape(str(copy))}(?:/([^\s,:()]+))?")
            text = path.sub(lambda found, uri=uri: join(uri, found[1]) if found[1] else uri, text)
        error.args = (shown(text), *error.args[1:]) if shown(text) != str(error) else error.args
        raise


def _local_copy(store: Store) -> Path:
    unfinished = store.head(MARKER)  # read before the manifest: a folder that is published in between has one
    data = store.read(MANIFEST)
    manifest = _parse_manifest(data)
    if manifest is not None and data is not None:
        size = sum(fact["size"] for fact in manifest["files"].values())
        fill = functools.partial(_fill_published, store, manifest["files"], data)
        return cache.get(hashlib.sha256(data).hexdigest(), size, fill, store.uri)
    if unfinished:
        raise TryAgain(f"{store.uri} is incomplete: wait until its publishing ends, or run it again if it was stopped")
    objects = {name: found for name, found in store.list().items() if name[0] != "."}
    if not objects:
        return _copy_of_object(store.uri)
    key = folders.digest_named((name, f"{each.size} {each.tag['e_tag']}") for name, each in objects.items())
    size = sum(each.size for each in objects.values())
    return cache.get(key, size, functools.partial(_fill_plain, store, objects), store.uri)


def _copy_of_object(uri: str) -> Path:
    """Return the file of a single object; raise BadInput if there is none."""
    folder, name = split(uri)
    store = Store(folder) if parse(uri).path and name else None
    found = store.head(name) if store else None
    if store is None or found is None:
        raise BadInput(f"{uri} does not exist or is empty: check the URI")

    def fill(folder: Path) -> None:
        if _download(store, {name: found}, folder):
            raise TryAgain(f"{uri} changed while it was read: run the same command again")

    key = folders.digest_named([(name, f"{found.size} {found.tag['e_tag']}")])
    return cache.get(key, found.size, fill, uri) / name


def _fill_published(store: Store, files: Facts, data: bytes, folder: Path) -> None:
    """Download a published folder, whose manifest is `data`, and verify it."""
    found = _find(store, files)
    damaged = [name for name in files if name not in found]
    if not damaged:
        changed = _download(store, found, folder)
        _download(store, {name: each for name in changed if (each := store.head(name))}, folder)
        digests = folders.sha256_files(folder / name for name in files)
        damaged = [name for name, digest in zip(files, digests, strict=True) if digest != files[name]["sha256"]]
    if damaged:
        if store.read(MANIFEST) != data:
            raise TryAgain(f"{store.uri} changed while it was read: run the same command again")
        raise CheckFailed(f"{join(store.uri, damaged[0])} does not match its manifest.json: create the folder again")
    folders.write_bytes(folder / MANIFEST, data)


def _fill_plain(store: Store, objects: dict[str, Object], folder: Path) -> None:
    """Download a folder without a manifest."""
    if (
        _download(store, objects, folder)
        or store.head(MARKER)
        or ("manifest.json" not in objects and store.head(MANIFEST))
    ):
        raise TryAgain(f"{store.uri} changed while it was read: run the same command again")


def _download(store: Store, objects: dict[str, Object], folder: Path) -> set[str]:
    """Download objects in parallel parts; return the names of those that were replaced or deleted meanwhile."""
    changed = set()

    def fetch(part: tuple[str, int, Callable[[], bytes]]) -> None:
        name, start, read = part
        try:
            content = read()
        except (Conflict, FileNotFoundError):
            changed.add(name)
            return
        with open(folder / name, "r+b") as file:
            os.pwrite(file.fileno(), content, start)

    for name in objects:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    parts = [(name, *part) for name, found in objects.items() for part in store.read_parts(name, found)]
    _in_parallel(fetch, parts)
    for name in objects:
        folders.sync(folder / name)
    return changed
