"""Read and write folders on a local disk or in an object store (s3://, gs://); pyarrow reads at random places."""

import contextlib
import functools
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import stores, uris
from common.errors import CheckFailed, Damaged, ToolError
from common.folders import write_bytes
from common.outages import patient

if TYPE_CHECKING:
    import pyarrow.fs
    import pyarrow.parquet

CONNECT_TIMEOUT, REQUEST_TIMEOUT, ATTEMPTS = 5, 10, 3  # seconds, seconds, attempts before a store is unavailable
READ_AHEAD = 32 << 20  # bytes of one request when an object is read from front to back
STORE_SPOKE = re.compile(r"AWS Error|google::cloud|curlCode")
STORE_IS_AWAY = re.compile(
    r"NETWORK_CONNECTION|UNAVAILABLE|TIMEOUT|SLOW_DOWN|INTERNAL_FAILURE|curlCode|HTTP status (5\d\d|429)"
)


def is_remote(location: str | Path) -> bool:
    """Return whether a location is a URI of an object store rather than a path."""
    return "://" in str(location)


def absolute(location: str | Path) -> str:
    """Return a path as an absolute path and a URI unchanged; workers run in other working directories."""
    return str(location) if is_remote(location) else str(Path(location).resolve())


def split(location: str | Path) -> tuple[str, str]:
    """Return (folder, name) of a file; the query options of a URI stay with the folder."""
    path, *options = str(location).split("?", 1) if is_remote(location) else (str(location),)
    folder, _, name = path.rpartition("/")
    return "?".join([folder or "/", *options]), name


def join(folder: str, name: str) -> str:
    """Return the location of a file in a folder; the query options of a URI stay at its end."""
    path, *options = folder.split("?", 1) if is_remote(folder) else (folder,)
    return "?".join([f"{path}/{name}", *options])


def _store_error(location: str, error: Exception) -> ToolError:
    """Return the ToolError for an error of pyarrow with an object store or the network."""
    return (uris.away if STORE_IS_AWAY.search(str(error)) else uris.refused)(location, str(error))


class Folder:
    """A folder given by path or URI, such as s3://bucket/data?region=eu-west-1. File names are relative, with `/`."""

    def __init__(self, location: str | Path):
        self.location = str(location)
        self.filesystem, self.path = _open_filesystem(self.location)

    @functools.cached_property
    def store(self) -> stores.Store:
        """The store of a URI."""
        return stores.Store(self.location)

    def _full(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def names(self, *suffixes: str) -> dict[str, int]:
        """Return {name: size in bytes}, sorted by name, of all files at any depth with one of the suffixes.

        Names that start with a dot are left out.
        """
        if is_remote(self.location):
            names = {name: found.size for name, found in self.store.list().items()}
        else:
            from pyarrow.fs import FileSelector

            found = self.filesystem.get_file_info(FileSelector(self.path, recursive=True))
            names = {info.path[len(self.path) + 1 :]: info.size for info in found if info.is_file}
        return {name: names[name] for name in sorted(names) if name.lower().endswith(suffixes) and name[0] != "."}

    @patient
    def sizes(self, names: Iterable[str]) -> list[int | None]:
        """Return the size in bytes of each file, None for one that is missing; asks for all of them at once."""
        from pyarrow.fs import FileType

        with self._told():
            found = self.filesystem.get_file_info([self._full(name) for name in names])
        return [info.size if info.type == FileType.File else None for info in found]

    @patient
    def kind(self) -> str | None:
        """Return "file" or "folder", or None if the location does not exist."""
        from pyarrow.fs import FileType

        with self._told():
            found = self.filesystem.get_file_info(self.path).type
        return {FileType.File: "file", FileType.Directory: "folder"}.get(found)

    @patient
    def open(self, name: str = "") -> "pyarrow.NativeFile":
        """Open a file for random-access reading."""
        with self._told():
            return self.filesystem.open_input_file(self._full(name))

    @patient
    def read(self, name: str = "") -> bytes | None:
        """Return the content of a file, or None if it is missing."""
        if name and is_remote(self.location):
            return self.store.read(name)
        try:
            with self.open(name) as file, self._told():
                return file.read()
        except FileNotFoundError:
            return None

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return bytes `start` to `end` of a file, from a store in one request; FileNotFoundError if it is missing."""
        if is_remote(self.location):
            return self.store.read_range(name, start, end)
        with open(self._full(name), "rb", buffering=0) as file:
            file.seek(start)
            return file.read(end - start)

    def open_range(self, name: str, start: int, end: int) -> io.BufferedReader:
        """Open bytes `start` to `end` of a file for sequential reading, from a store with a request per READ_AHEAD."""
        buffer = READ_AHEAD if is_remote(self.location) else io.DEFAULT_BUFFER_SIZE
        raw = _Range(functools.partial(self.read_range, name), start, end)
        return io.BufferedReader(raw, max(1, min(buffer, end - start)))

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        if not is_remote(self.location):
            Path(self._full(name)).parent.mkdir(parents=True, exist_ok=True)
            return write_bytes(self._full(name), data)
        self.store.write(name, data)

    def delete(self, name: str) -> None:
        """Delete a file."""
        if is_remote(self.location):
            self.store.delete(name)
        else:
            self.filesystem.delete_file(self._full(name))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Convert the errors of an object store to ToolErrors that name the location."""
        try:
            yield
        except (FileNotFoundError, ToolError):
            raise
        except OSError as error:
            if not is_remote(self.location):
                raise
            raise _store_error(self.location, error) from None


class _Range(io.RawIOBase):
    """Bytes `start` to `end` of a file as a file of its own; read: a function of the first byte and the end."""

    def __init__(self, read: Callable[[int, int], bytes], start: int, end: int):
        self.read_bytes, self.start, self.size, self.position = read, start, end - start, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        end = min(self.position + len(buffer), self.size)
        data = self.read_bytes(self.start + self.position, self.start + end) if end > self.position else b""
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def _open_filesystem(location: str) -> "tuple[pyarrow.fs.FileSystem, str]":
    """Return (file system, path) of a location; the only request made is for the region of an S3 bucket."""
    import pyarrow.fs

    if not is_remote(location):
        return pyarrow.fs.LocalFileSystem(), str(Path(location).resolve())
    address = uris.parse(location)
    path = f"{address.bucket}/{address.path}".rstrip("/")
    try:
        if address.scheme == "gs":
            limit = timedelta(seconds=2 * CONNECT_TIMEOUT)
            return pyarrow.fs.GcsFileSystem(retry_time_limit=limit, **address.options), path
        return pyarrow.fs.S3FileSystem(
            connect_timeout=CONNECT_TIMEOUT,
            request_timeout=REQUEST_TIMEOUT,
            retry_strategy=pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
            **address.options,
        ), path
    except (TypeError, ValueError) as error:
        raise uris.not_valid(location, error) from None


@contextlib.contextmanager
def open_parquet(folder: Folder, name: str, request: int = 0) -> "Iterator[pyarrow.parquet.ParquetFile]":
    """Open a Parquet file of a folder; raise Damaged if it turns out to be damaged, also while it is read.

    request: bytes to read of a column at a time; 0 reads all of a row group before its first row. CheckFailed is raised
    if the system cannot read the file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        options = {"buffer_size": request, "pre_buffer": not request, "page_checksum_verification": True}
        with folder.open(name) as file, pq.ParquetFile(file, **options) as parquet:
            yield parquet
    except (pa.ArrowInvalid, OSError) as error:
        if STORE_SPOKE.search(str(error)):
            raise _store_error(folder.location, error) from None
        kind = CheckFailed if getattr(error, "errno", None) else Damaged
        raise kind(f"{join(folder.location, name)} is damaged ({error}): create it again") from None


def read_footer(folder: Folder, name: str) -> tuple[list[str], list[list[int]], list]:
    """Return (columns, [[row group, number of rows]], bad rows) of a Parquet file; only its footer is read."""
    with open_parquet(folder, name) as parquet:
        groups = [[i, parquet.metadata.row_group(i).num_rows] for i in range(parquet.num_row_groups)]
        bad = json.loads((parquet.schema_arrow.metadata or {}).get(b"bad_rows", "[]"))
        return parquet.schema_arrow.names, groups, bad
