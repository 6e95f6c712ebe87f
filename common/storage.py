"""Folders on a local disk or in an object store, by path or by URI (s3://, gs://), through pyarrow's file systems."""

import contextlib
import json
import os
import re
import urllib.parse
from datetime import timedelta
from pathlib import Path

from common.errors import BadInput, CheckFailed, ToolError, TryAgain
from common.folders import write_bytes

CONNECT_TIMEOUT, REQUEST_TIMEOUT, ATTEMPTS = 5, 10, 3  # seconds, seconds, tries of a store that does not answer
STORE_SPOKE = re.compile(r"AWS Error|google::cloud|curlCode")
STORE_IS_AWAY = re.compile(r"NETWORK_CONNECTION|UNAVAILABLE|TIMEOUT|SLOW_DOWN|INTERNAL_FAILURE|curlCode")


def is_remote(location):
    """Return whether a location is a URI of an object store and not a path."""
    return "://" in str(location)


def absolute(location):
    """Return a path as an absolute one, a URI as it is: workers run in folders of their own."""
    return location if is_remote(location) else str(Path(location).resolve())


def split(location):
    """Return (folder, name) of a file; a URI's options stay with its folder."""
    path, *options = str(location).split("?", 1) if is_remote(location) else (str(location),)
    folder, _, name = path.rpartition("/")
    return "?".join([folder or "/", *options]), name


def join(folder, name):
    """Return the location of a file in a folder; a URI's options stay at its end."""
    path, *options = folder.split("?", 1) if is_remote(folder) else (folder,)
    return "?".join([f"{path}/{name}", *options])


def _store_error(location, error):
    """Return the ToolError for what a store, or the way to it, says."""
    if STORE_IS_AWAY.search(str(error)):
        return TryAgain(f"{location} does not answer ({error}): try again later, or check its address")
    return BadInput(f"{location} refuses ({error}): check its name and access, or add ?region=...")


class Folder:
    """A folder by path or URI; names in it are relative, with `/`. A URI's options: s3://bucket/data?region=eu-west-1."""

    def __init__(self, location):
        self.location = str(location)
        self.filesystem, self.path = _open_filesystem(self.location)

    def _full(self, name):
        return f"{self.path}/{name}" if name else self.path

    def names(self, *suffixes):
        """Return {name: bytes} of the files in and below the folder with one of some suffixes, sorted by name."""
        from pyarrow.fs import FileSelector

        with self._told():
            found = self.filesystem.get_file_info(FileSelector(self.path, recursive=True))
        names = {info.path[len(self.path) + 1 :]: info.size for info in found if info.is_file}
        return {name: names[name] for name in sorted(names) if name.lower().endswith(suffixes) and name[0] != "."}

    def kind(self):
        """Return "file", "folder" or None for what the location is."""
        from pyarrow.fs import FileType

        with self._told():
            found = self.filesystem.get_file_info(self.path).type
        return {FileType.File: "file", FileType.Directory: "folder"}.get(found)

    def open(self, name=""):
        """Return a seekable file to read from."""
        with self._told():
            return self.filesystem.open_input_file(self._full(name))

    def read(self, name=""):
        """Return the bytes of a file, None where there is none."""
        try:
            with self.open(name) as file, self._told():
                return file.read()
        except FileNotFoundError:
            return None

    def write(self, name, data):
        """Write a file, whole or not at all."""
        if not is_remote(self.location):
            Path(self._full(name)).parent.mkdir(parents=True, exist_ok=True)
            return write_bytes(self._full(name), data)
        with self._told(), self.filesystem.open_output_stream(self._full(name)) as file:
            file.write(data)  # an object appears when it is closed

    def delete(self, name):
        """Remove a file."""
        with self._told():
            self.filesystem.delete_file(self._full(name))

    @contextlib.contextmanager
    def _told(self):
        """Name the place in what a store says when it refuses or does not answer."""
        try:
            yield
        except (FileNotFoundError, ToolError):
            raise
        except OSError as error:
            if not is_remote(self.location):
                raise
            raise _store_error(self.location, error) from None


def _open_filesystem(location):
    """Return (file system, path) of a location; no request is made but for the region of an S3 bucket."""
    import pyarrow.fs

    if not is_remote(location):
        return pyarrow.fs.LocalFileSystem(), str(Path(location).resolve())
    try:
        return _open_store(location)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{location} is no URI of a store ({error}): take s3://bucket/folder?region=...") from None


def _open_store(location):
    import pyarrow.fs

    parts = urllib.parse.urlsplit(location)
    path = f"{parts.netloc}{parts.path}".rstrip("/")
    options = dict(urllib.parse.parse_qsl(parts.query))
    if parts.scheme in ("gs", "gcs"):
        options["anonymous"] = options.get("anonymous") == "true"
        return pyarrow.fs.GcsFileSystem(retry_time_limit=timedelta(seconds=2 * CONNECT_TIMEOUT), **options), path
    if parts.scheme != "s3":
        raise BadInput(f"{location}: {parts.scheme}:// is not read: take a path, s3:// or gs://")
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
def open_parquet(folder, name):
    """Give the pq.ParquetFile of a folder's file; raise CheckFailed where reading finds it damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with folder.open(name) as file, pq.ParquetFile(file, page_checksum_verification=True) as parquet:
            yield parquet
    except (pa.ArrowInvalid, OSError) as error:
        if STORE_SPOKE.search(str(error)):
            raise _store_error(folder.location, error) from None
        raise CheckFailed(f"{join(folder.location, name)} is damaged ({error}): make it again") from None


def read_footer(folder, name):
    """Return (columns, [[row group, rows]], bad rows) of a Parquet file; only its end is read."""
    with open_parquet(folder, name) as parquet:
        groups = [[i, parquet.metadata.row_group(i).num_rows] for i in range(parquet.num_row_groups)]
        bad = json.loads((parquet.schema_arrow.metadata or {}).get(b"bad_rows", "[]"))
        return parquet.schema_arrow.names, groups, bad
