"""Read and write folders on a local disk or in an object store (s3://, gs://), through pyarrow's file systems."""

import contextlib
import json
import os
import re
import urllib.parse
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import BadInput, CheckFailed, ToolError, TryAgain
from common.folders import write_bytes

if TYPE_CHECKING:
    import pyarrow.fs
    import pyarrow.parquet

CONNECT_TIMEOUT, REQUEST_TIMEOUT, ATTEMPTS = 5, 10, 3  # seconds, seconds, attempts before a store is unavailable
STORE_SPOKE = re.compile(r"AWS Error|google::cloud|curlCode")
STORE_IS_AWAY = re.compile(r"NETWORK_CONNECTION|UNAVAILABLE|TIMEOUT|SLOW_DOWN|INTERNAL_FAILURE|curlCode")


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
    """Return the ToolError for an error of an object store or of the network."""
    if STORE_IS_AWAY.search(str(error)):
        return TryAgain(f"{location} does not answer ({error}): try again later or check the address")
    remedy = "check the name and the credentials, or add ?region=... to the URI"
    return BadInput(f"{location} refuses access ({error}): {remedy}")


class Folder:
    """A folder given by path or URI, such as s3://bucket/data?region=eu-west-1. File names are relative, with `/`."""

    def __init__(self, location: str | Path):
        self.location = str(location)
        self.filesystem, self.path = _open_filesystem(self.location)

    def _full(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def names(self, *suffixes: str) -> dict[str, int]:
        """Return {name: size in bytes}, sorted by name, of all files at any depth with one of the suffixes.

        Names that start with a dot are left out.
        """
        from pyarrow.fs import FileSelector

        with self._told():
            found = self.filesystem.get_file_info(FileSelector(self.path, recursive=True))
        names = {info.path[len(self.path) + 1 :]: info.size for info in found if info.is_file}
        return {name: names[name] for name in sorted(names) if name.lower().endswith(suffixes) and name[0] != "."}

    def kind(self) -> str | None:
        """Return "file" or "folder", or None if the location does not exist."""
        from pyarrow.fs import FileType

        with self._told():
            found = self.filesystem.get_file_info(self.path).type
        return {FileType.File: "file", FileType.Directory: "folder"}.get(found)

    def open(self, name: str = "") -> "pyarrow.NativeFile":
        """Open a file for random-access reading."""
        with self._told():
            return self.filesystem.open_input_file(self._full(name))

    def read(self, name: str = "") -> bytes | None:
        """Return the content of a file, or None if it is missing."""
        try:
            with self.open(name) as file, self._told():
                return file.read()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        if not is_remote(self.location):
            Path(self._full(name)).parent.mkdir(parents=True, exist_ok=True)
            return write_bytes(self._full(name), data)
        with self._told(), self.filesystem.open_output_stream(self._full(name)) as file:
            file.write(data)  # the object becomes visible when the stream is closed

    def delete(self, name: str) -> None:
        """Delete a file."""
        with self._told():
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


def _open_filesystem(location: str) -> "tuple[pyarrow.fs.FileSystem, str]":
    """Return (file system, path) of a location; the only request made is for the region of an S3 bucket."""
    import pyarrow.fs

    if not is_remote(location):
        return pyarrow.fs.LocalFileSystem(), str(Path(location).resolve())
    try:
        return _open_store(location)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{location} is not a valid URI ({error}): use the form s3://bucket/folder?region=...") from None


def _open_store(location: str) -> "tuple[pyarrow.fs.FileSystem, str]":
    import pyarrow.fs

    parts = urllib.parse.urlsplit(location)
    path = f"{parts.netloc}{parts.path}".rstrip("/")
    options: dict[str, Any] = dict(urllib.parse.parse_qsl(parts.query))
    if parts.scheme in ("gs", "gcs"):
        options["anonymous"] = options.get("anonymous") == "true"
        return pyarrow.fs.GcsFileSystem(retry_time_limit=timedelta(seconds=2 * CONNECT_TIMEOUT), **options), path
    if parts.scheme != "s3":
        raise BadInput(f"{location}: {parts.scheme}:// is not supported: use a path, s3:// or gs://")
    options["anonymous"] = options.get("anonymous") == "true"
    endpoint = options.get("endpoint_override") or os.environ.get("AWS_ENDPOINT_URL")
    region = options.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        options.setdefault("endpoint_override", endpoint)
    elif not region:
        try:
            options["region"] = pyarrow.fs.resolve_s3_region(parts.netloc)
        except OSError as error:
            raise _store_error(location, error) from None
    return pyarrow.fs.S3FileSystem(
        connect_timeout=CONNECT_TIMEOUT,
        request_timeout=REQUEST_TIMEOUT,
        retry_strategy=pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        **options,
    ), path


@contextlib.contextmanager
def open_parquet(folder: Folder, name: str) -> "Iterator[pyarrow.parquet.ParquetFile]":
    """Open a Parquet file of a folder; raise CheckFailed if it turns out to be damaged, also while it is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with folder.open(name) as file, pq.ParquetFile(file, page_checksum_verification=True) as parquet:
            yield parquet
    except (pa.ArrowInvalid, OSError) as error:
        if STORE_SPOKE.search(str(error)):
            raise _store_error(folder.location, error) from None
        raise CheckFailed(f"{join(folder.location, name)} is damaged ({error}): create it again") from None


def read_footer(folder: Folder, name: str) -> tuple[list[str], list[list[int]], list]:
    """Return (columns, [[row group, number of rows]], bad rows) of a Parquet file; only its footer is read."""
    with open_parquet(folder, name) as parquet:
        groups = [[i, parquet.metadata.row_group(i).num_rows] for i in range(parquet.num_row_groups)]
        bad = json.loads((parquet.schema_arrow.metadata or {}).get(b"bad_rows", "[]"))
        return parquet.schema_arrow.names, groups, bad
