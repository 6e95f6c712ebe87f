"""Folders on a disk and in an object store: a local S3, and stores that do not answer."""

import socket
import time

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from conftest import tree

from common import errors, folders, storage
from common.storage import Folder, absolute, is_remote, join, open_parquet, read_footer, split


def fill(folder, *names):
    for name in names:
        folder.write(name, name.encode())
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Locations


def test_a_path_becomes_absolute_and_a_uri_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute("data/x") == str(tmp_path / "data" / "x")
    assert absolute("data/../x/") == str(tmp_path / "x")
    for uri in ("s3://bucket/data/../x", "gs://bucket/data/?anonymous=true"):
        assert absolute(uri) == uri and is_remote(uri)
    assert not is_remote("data/x") and not is_remote(tmp_path)


@pytest.mark.parametrize(
    ("location", "folder", "name"),
    [
        ("/data/x.tar", "/data", "x.tar"),
        ("/x.tar", "/", "x.tar"),
        ("/data/what?.tar", "/data", "what?.tar"),
        ("s3://bucket/data/x.tar", "s3://bucket/data", "x.tar"),
        ("s3://bucket/x.tar?region=eu", "s3://bucket?region=eu", "x.tar"),
        ("s3://bucket/a/x.tar?endpoint_override=http://h:1", "s3://bucket/a?endpoint_override=http://h:1", "x.tar"),
    ],
)
def test_a_file_is_split_from_its_folder_whose_options_stay(location, folder, name):
    assert split(location) == (folder, name)
    assert join(folder, name).replace("//x", "/x") == location


@pytest.mark.parametrize("location", ["ftp://host/data", "file:///data", "https://host/data", "hdfs://host/data"])
def test_an_unknown_kind_of_store_is_bad_input(location):
    with pytest.raises(errors.BadInput, match=f"{location}: .* is not supported: use a path, s3:// or gs://"):
        Folder(location)


@pytest.mark.parametrize(
    "location", ["s3://bucket/data?colour=red", "gs://bucket/data?anonymous=true&colour=red", "s3://[bucket/data"]
)
def test_an_option_that_a_store_does_not_have_is_bad_input(location, s3_keys):
    with pytest.raises(errors.BadInput, match="not a valid URI"):
        Folder(location + "&region=eu-west-1" if "?" in location else location)


def test_a_bucket_whose_region_nobody_knows_is_bad_input(monkeypatch):
    def resolve(bucket):
        raise OSError(f"Bucket '{bucket}' not found")

    monkeypatch.setattr(pyarrow.fs, "resolve_s3_region", resolve)
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(errors.BadInput, match=r"s3://nowhere/data refuses .*'nowhere' not found.*region="):
        Folder("s3://nowhere/data")


# ---------------------------------------------------------------------------------------------------------------------
# A local folder


def test_the_names_below_a_folder_are_sorted_with_their_sizes(tmp_path):
    folder = fill(Folder(tmp_path), "b.tar", "a/c.TAR", "a/b/d.tar", "a.json", "tar")
    assert folder.names(".tar") == {"a/b/d.tar": 9, "a/c.TAR": 7, "b.tar": 5}
    assert list(folder.names(".tar")) == sorted(folder.names(".tar"))
    assert list(folder.names(".tar", ".json")) == ["a.json", "a/b/d.tar", "a/c.TAR", "b.tar"]
    assert list(folder.names("")) == ["a.json", "a/b/d.tar", "a/c.TAR", "b.tar", "tar"]


def test_hidden_files_are_no_names(tmp_path):
    fill(Folder(tmp_path), ".x.tar", ".cache/y.tar", "z.tar")
    assert list(Folder(tmp_path).names(".tar")) == ["z.tar"]


def test_a_location_is_a_file_a_folder_or_nothing(tmp_path):
    fill(Folder(tmp_path), "a/b.tar")
    assert Folder(tmp_path / "a").kind() == "folder"
    assert Folder(tmp_path / "a" / "b.tar").kind() == "file"
    assert Folder(tmp_path / "b").kind() is None


def test_a_file_that_is_not_there_is_none(tmp_path):
    folder = fill(Folder(tmp_path), "a/b.tar", "empty")
    folder.write("empty", b"")
    assert folder.read("a/b.tar") == b"a/b.tar" == Folder(tmp_path / "a" / "b.tar").read()
    assert folder.read("empty") == b""
    assert folder.read("a/c.tar") is None and Folder(tmp_path / "none").read("x") is None
    with pytest.raises(FileNotFoundError):
        folder.open("a/c.tar")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = fill(Folder(tmp_path / "new" / "folder"), "a/b.tar")
    folder.write("a/b.tar", b"other")
    assert folder.read("a/b.tar") == b"other"
    before = tree(tmp_path)

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        folder.write("a/b.tar", b"half")
    assert tree(tmp_path) == before


def test_a_deleted_file_is_gone(tmp_path):
    folder = fill(Folder(tmp_path), "a.tar", "b.tar")
    folder.delete("a.tar")
    assert list(folder.names("")) == ["b.tar"]


# ---------------------------------------------------------------------------------------------------------------------
# S3


def test_an_object_store_is_a_folder_too(s3):
    folder = Folder(s3("data"))
    assert folder.kind() is None and folder.read("a.json") is None
    fill(folder, "b.tar", "a/c.tar", ".x.tar", "a.json")
    folder.write("empty", b"")
    assert folder.names(".tar") == {"a/c.tar": 7, "b.tar": 5}
    assert folder.kind() == "folder" and Folder(s3("data/a/c.tar")).kind() == "file"
    assert folder.read("a/c.tar") == b"a/c.tar" and folder.read("empty") == b"" and folder.read("c") is None
    with folder.open("a/c.tar") as file:
        file.seek(2)
        assert file.read() == b"c.tar"
    folder.write("a/c.tar", b"other")
    folder.delete("b.tar")
    assert Folder(s3("data")).names("tar") == {"a/c.tar": 5}
    assert Folder(s3("data/")).read("a/c.tar") == b"other"


def test_the_endpoint_comes_from_the_uri_or_the_environment(s3, s3_server, monkeypatch):
    uri, _, _ = s3("data").partition("?")
    fill(Folder(s3("data")), "a.tar")
    host = s3_server.removeprefix("http://")
    assert list(Folder(f"{uri}?endpoint_override={host}&scheme=http&region=eu-west-1").names("")) == ["a.tar"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    assert list(Folder(uri).names("")) == ["a.tar"]


def test_a_bucket_that_is_not_there_is_bad_input(s3, s3_server):
    folder = Folder(f"s3://nobody-made-it/data?endpoint_override={s3_server}")
    assert folder.kind() is None
    for request in (lambda: folder.read("x"), lambda: folder.names(""), lambda: folder.write("x", b"data")):
        with pytest.raises(errors.BadInput, match=r"nobody-made-it.* refuses access .*NoSuchBucket"):
            request()


@pytest.fixture
def closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return port


@pytest.mark.parametrize("request_", ["kind", "names", "read", "write"])
def test_a_store_that_is_not_there_is_told_soon(request_, closed_port, s3_keys, monkeypatch):
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    folder = Folder(f"s3://bucket/x?endpoint_override=http://127.0.0.1:{closed_port}")
    arguments = {"write": ("a", b"data"), "read": ("a",), "names": ("",)}.get(request_, ())
    began = time.monotonic()
    with pytest.raises(errors.TryAgain, match=r"s3://bucket/x.* does not answer") as error:
        getattr(folder, request_)(*arguments)
    assert time.monotonic() - began < 15
    assert "\n" not in errors.describe_error(error.value)[1]


def test_a_store_that_takes_the_call_and_is_silent_is_told_soon(s3_keys, monkeypatch):
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    monkeypatch.setattr(storage, "REQUEST_TIMEOUT", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        folder = Folder(f"s3://bucket/x?endpoint_override=http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(errors.TryAgain, match="does not answer"):
            folder.kind()
    assert time.monotonic() - began < 15


# ---------------------------------------------------------------------------------------------------------------------
# Parquet


def write_parquet(folder, name, rows, metadata=None, **options):
    table = pa.table({"key": [str(i) for i in range(rows)], "value": [b"x" * 100 + bytes([i]) for i in range(rows)]})
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(metadata), sink, **options)
    folder.write(name, sink.getvalue().to_pybytes())


@pytest.mark.parametrize("remote", [False, True])
def test_a_footer_says_columns_row_groups_and_bad_rows(remote, tmp_path, request):
    folder = Folder(request.getfixturevalue("s3")("data") if remote else tmp_path)
    write_parquet(folder, "a.parquet", 10, row_group_size=4)
    write_parquet(folder, "b.parquet", 3, {"bad_rows": '[["k", "reason"]]'})
    assert read_footer(folder, "a.parquet") == (["key", "value"], [[0, 4], [1, 4], [2, 2]], [])
    assert read_footer(folder, "b.parquet") == (["key", "value"], [[0, 3]], [["k", "reason"]])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: b"no Parquet at all",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-40] + b"\xff" * 32 + data[-8:],  # thrift that says nothing
        lambda data: data[:-8] + b"\xff\xff\xff\x7f" + data[-4:],  # a footer longer than the file
    ],
)
def test_a_damaged_footer_fails_the_check_with_the_files_name(spoil, tmp_path):
    folder = Folder(tmp_path)
    write_parquet(folder, "a.parquet", 10)
    folder.write("a.parquet", spoil(folder.read("a.parquet")))
    with pytest.raises(errors.CheckFailed, match=r"a\.parquet is damaged") as error:
        read_footer(folder, "a.parquet")
    assert "\n" not in errors.describe_error(error.value)[1]


def test_damaged_pages_fail_the_check_with_the_files_name(tmp_path):
    folder = Folder(tmp_path)
    write_parquet(folder, "a.parquet", 50, compression="none", use_dictionary=False)
    data = folder.read("a.parquet")
    folder.write("a.parquet", data.replace(b"x" * 100, b"\xff" * 100))
    with open_parquet(folder, "a.parquet") as parquet:
        assert parquet.read().num_rows == 50  # bytes are bytes
    start = data.index(b"x" * 100)
    folder.write("a.parquet", data[: start - 4] + b"\xff\xff\xff\x7f" + data[start:])  # the length of the first value
    with (
        pytest.raises(errors.CheckFailed, match=r"a\.parquet is damaged"),
        open_parquet(folder, "a.parquet") as parquet,
    ):
        parquet.read()
