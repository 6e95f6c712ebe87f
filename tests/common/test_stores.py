"""Requests to object stores: options, errors, conditions, large files, and what faults of a store do to them."""

import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
from conftest import ROOT
from test_storage import closed_port  # noqa: F401

from common import errors, stores, uris
from common.storage import Folder
from common.stores import PART, Store
from common.uris import Conflict

FOREVER = float("inf")


@pytest.fixture
def store(faulty_s3):
    return Store(faulty_s3.uri("data"))


@pytest.fixture
def hasty(monkeypatch):
    """Few and short retries, so that a store that stays away is told in a second."""
    for name, value in {"RETRIES": 2, "RETRY_SECONDS": 1, "REQUEST_TIMEOUT": 2}.items():
        monkeypatch.setattr(stores, name, value)


@pytest.fixture
def large(tmp_path):
    """A file of two parts, the last one short."""
    path = tmp_path / "large"
    path.write_bytes(os.urandom(PART + 1000))
    return path


# ---------------------------------------------------------------------------------------------------------------------
# URIs


def test_obstore_is_imported_when_a_store_is_opened():
    """Nor boto3 or pyarrow: a script on a disk does not wait for them."""
    code = "import sys, common.objects, common.leases; print({'obstore', 'boto3', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "set()\n"


def test_the_options_of_a_uri_reach_the_store(s3_keys, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    config = Store("s3://bucket/a/b/?region=eu-west-1").objects.config
    assert (config["region"], "endpoint_url_s3" in config) == ("eu-west-1", False)
    assert (
        Store("s3://bucket/a?endpoint_override=host:1&scheme=http").objects.config["endpoint_url_s3"] == "http://host:1"
    )
    assert Store("s3://bucket/a?endpoint_override=host:1").objects.config["endpoint_url_s3"] == "https://host:1"
    config = Store("s3://bucket/a?region=r&access_key=key&secret_key=secret").objects.config
    assert (config["access_key_id"], config["secret_access_key"]) == ("key", "secret")
    assert Store("s3://bucket/a?region=r&anonymous=true").objects.config["skip_signature"] in (True, "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://from-the-environment:1")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    config = Store("s3://bucket/a").objects.config
    assert (config["endpoint_url_s3"], config["region"]) == ("http://from-the-environment:1", "eu-central-1")
    config = Store("gs://bucket/a?endpoint_override=http://host:1&anonymous=true").objects.config
    assert config["base_url"] == "http://host:1" and config["skip_signature"] in (True, "true")


@pytest.mark.parametrize("uri", ["s3://bucket/a?region=r&colour=red", "gs://bucket/a?colour=red", "s3://[bucket/a"])
def test_an_unknown_option_is_bad_input(uri, s3_keys):
    with pytest.raises(errors.BadInput, match="not a valid URI"):
        Store(uri)


def test_keys_come_from_the_profile_of_the_aws_tools_too(s3_server, s3, tmp_path, monkeypatch):
    Store(s3("data")).write("a", b"1")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    remedy = r"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, .* anonymous=true"
    missing = rf"/data\?\S+: no credentials .* on node {re.escape(socket.gethostname())}: {remedy}"
    with pytest.raises(errors.BadInput, match=missing):
        Store(s3("data"))
    Store(f"{s3('data')}&anonymous=true")
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    assert Store(s3("data")).read("a") == b"1"


# ---------------------------------------------------------------------------------------------------------------------
# Objects


def test_objects_are_written_listed_read_and_deleted(store):
    began = datetime.now(UTC)
    names = ["a b#é%20~.png", "sub/deep/c.txt", ".hidden", "empty"]
    for name in names:
        store.write(name, b"" if name == "empty" else name.encode())
    listed = store.list()
    assert list(listed) == sorted(names)
    assert store.read("sub/deep/c.txt") == b"sub/deep/c.txt" and store.read("empty") == b""
    assert store.read("none") is None and store.head("none") is None
    for name in names:
        found = store.head(name)
        assert found == listed[name] and found.size == len(store.read(name))
        assert abs((found.modified - began).total_seconds()) < 30
    store.delete("empty")
    store.delete("none")
    assert list(store.list()) == sorted(set(names) - {"empty"})
    assert Store(store.uri.replace("/data", "/data/sub")).list().keys() == {"deep/c.txt"}
    assert Store(store.uri.replace("/data", "/dat")).list() == {}, "a name is a prefix of another"


def test_what_shows_a_folder_in_other_tools_is_no_object(store):
    store.s3.put_object(**store.key("sub/"), Body=b"")
    store.write("sub/a", b"1")
    assert list(store.list()) == ["sub/a"]


@pytest.mark.parametrize("data", [b"small", pytest.param("large", id="large")])
def test_only_one_creates_an_object(store, data, large):
    data = large if data == "large" else data
    tag = store.write("a", data, only_if_absent=True)
    assert store.head("a").tag == tag
    with pytest.raises(Conflict):
        store.write("a", data, only_if_absent=True)
    assert store.list().keys() == {"a"} and not store.s3.list_multipart_uploads(Bucket=store.address.bucket).get(
        "Uploads"
    )


def test_a_write_under_a_tag_meets_that_version_or_writes_nothing(store):
    first = store.write("a", b"1", only_if_absent=True)
    second = store.write("a", b"2", only_if_tag=first)
    with pytest.raises(Conflict):
        store.write("a", b"3", only_if_tag=first)
    assert store.read_tagged("a")[0] == b"2" and store.head("a").tag == second
    with pytest.raises(Conflict):
        store.delete("a", only_if_tag=first)
    store.delete("a", only_if_tag=second)
    store.delete("a", only_if_tag=second)
    with pytest.raises(Conflict):
        store.write("a", b"3", only_if_tag=second)
    assert store.list() == {}


def test_a_large_file_goes_and_comes_in_parts(store, large, faulty_s3):
    store.write("a", large)
    assert len([each for each in faulty_s3.seen("PUT") if "partNumber" in each.path]) == 2
    parts = list(store.read_parts("a", store.head("a")))
    assert [start for start, _ in parts] == [0, PART]
    assert b"".join(read() for _, read in parts) == large.read_bytes()
    store.write("a", b"other")
    with pytest.raises(Conflict):
        parts[1][1]()
    store.delete("a")
    with pytest.raises(FileNotFoundError):
        parts[1][1]()


def test_a_store_whose_parts_know_no_conditions_copies_under_one(store, large):
    """As on Google Cloud Storage; here in memory."""
    from obstore.store import MemoryStore

    store.objects = MemoryStore()
    store.address = uris.Address("gs", "bucket", "data", {})
    store.write("a", large, only_if_absent=True)
    with pytest.raises(Conflict):
        store.write("a", large, only_if_absent=True)
    assert store.read("a") == large.read_bytes() and list(store.list()) == ["a"]


# ---------------------------------------------------------------------------------------------------------------------
# Faults


@pytest.mark.parametrize("kind", ["503", "500", "reset_request", "lose_response"])
@pytest.mark.parametrize("condition", [{}, {"only_if_absent": True}, {"only_if_tag": True}])
def test_a_write_survives_a_fault(kind, condition, store, faulty_s3):
    """Also where the store acted and its answer was lost: the repeated request then fails its condition."""
    if "only_if_tag" in condition:
        condition = {"only_if_tag": store.write("a", b"0")}
    faulty_s3.fault(kind, method="PUT", after=2)
    tag = store.write("a", b"12345", **condition)
    assert store.read("a") == b"12345" and store.head("a").tag == tag
    assert not faulty_s3.faults[-1].times, "the fault was met"


@pytest.mark.parametrize(
    ("kind", "method", "path"),
    [
        ("503", "PUT", "partNumber=2"),
        ("reset_request", "PUT", "partNumber=1"),
        ("lose_response", "PUT", "partNumber=1"),
        ("503", "POST", "uploads"),
        ("lose_response", "POST", "uploadId"),
    ],
)
def test_a_large_file_survives_a_fault(kind, method, path, store, large, faulty_s3):
    faulty_s3.fault(kind, method=method, path=path, after=PART // 2, times=2 if method == "PUT" else 1)
    tag = store.write("a", large, only_if_absent=True)
    assert store.read("a") == large.read_bytes() and store.head("a").tag == tag
    assert not faulty_s3.faults[-1].times, "the fault was met"


@pytest.mark.parametrize("kind", ["503", "reset_response"])
def test_a_read_survives_a_fault(kind, store, large, faulty_s3):
    store.write("a", large)
    found = store.head("a")
    faulty_s3.fault(kind, method="GET", path="/a", after=PART // 2, times=2)
    assert b"".join(read() for _, read in store.read_parts("a", found)) == large.read_bytes()


def test_the_end_of_an_upload_whose_answer_was_lost_is_recognized(store, large, faulty_s3):
    """Some stores no longer know the upload when its end is repeated, or take its object for another's."""
    faulty_s3.fault("lose_response", method="POST", path="uploadId")
    faulty_s3.fault("412", method="POST", path="uploadId")
    tag = store.write("a", large, only_if_absent=True)
    assert store.read("a") == large.read_bytes() and store.head("a").tag == tag
    assert not any(fault.times for fault in faulty_s3.faults)
    faulty_s3.fault("412", method="POST", path="uploadId")
    with pytest.raises(Conflict):
        store.write("a", large, only_if_absent=True)


def test_a_slow_link_is_no_silent_store(faulty_s3, hasty):
    store = Store(faulty_s3.uri("data"))
    store.write("a", bytes(500_000))
    faulty_s3.fault("slow", method="GET", path="/a", seconds=0.4)
    began = time.monotonic()
    assert store.read("a") == bytes(500_000)
    assert time.monotonic() - began > 1.5 * stores.REQUEST_TIMEOUT and len(faulty_s3.seen("GET", "/a")) == 1


@pytest.mark.parametrize("place", ["a b/é%20~", "a//b/", "+&=%"])
def test_obstore_boto3_and_pyarrow_mean_the_same_objects(place, faulty_s3, large):
    folder = Folder(faulty_s3.uri(place))
    folder.write("small", b"1")
    folder.store.write("large", large, only_if_absent=True)
    assert folder.names("") == {"large": large.stat().st_size, "small": 1}
    with folder.open("large") as file:
        assert file.read(10) == large.read_bytes()[:10]
    folder.store.delete("large", only_if_tag=folder.store.head("large").tag)
    assert folder.names("") == {"small": 1} and folder.read("small") == b"1"


def requests(store, path):
    yield lambda: store.list()
    yield lambda: store.head("a")
    yield lambda: store.read("a")
    yield lambda: store.write("a", b"1")
    yield lambda: store.write("a", b"1", only_if_absent=True)
    yield lambda: store.write("a", path)
    yield lambda: store.delete("a")


@pytest.mark.parametrize("kind", ["503", "reset_request"])
def test_a_store_that_always_fails_is_told_within_bounds(kind, faulty_s3, hasty, large):
    store = Store(faulty_s3.uri("data"))
    faulty_s3.fault(kind, times=FOREVER)
    with ThreadPoolExecutor(8) as pool:
        began = time.monotonic()
        answers = [pool.submit(request) for request in requests(store, large)]
        for answer in answers:
            with pytest.raises(errors.TryAgain, match=r"s3://.*/data.* does not answer") as error:
                answer.result()
            assert "\n" not in str(error.value) and len(str(error.value)) < 500
    assert time.monotonic() - began < 15


def test_a_store_that_is_not_there_or_silent_is_told_within_bounds(closed_port, faulty_s3, hasty):  # noqa: F811
    faulty_s3.fault("delay", seconds=3, times=FOREVER)
    for uri in (f"s3://bucket/data?endpoint_override=http://127.0.0.1:{closed_port}", faulty_s3.uri("data")):
        began = time.monotonic()
        with pytest.raises(errors.TryAgain, match="does not answer"):
            Store(uri).write("a", b"1", only_if_absent=True)
        assert time.monotonic() - began < 12


def test_the_bounds_of_a_run():
    """A request ends within half a minute."""
    assert stores.RETRY_SECONDS + stores.REQUEST_TIMEOUT <= 30


def test_a_store_that_refuses_is_bad_input(store, faulty_s3, large):
    faulty_s3.fault("403", times=FOREVER)
    for request in requests(store, large):
        with pytest.raises(errors.BadInput, match=r"/data.* refuses access .*(403|AccessDenied|Forbidden)"):
            request()


def test_a_bucket_that_is_not_there_is_bad_input(s3_server, s3_keys, large):
    store = Store(f"s3://nobody-made-it/data?endpoint_override={s3_server}")
    for request in (
        lambda: store.write("a", b"1"),
        lambda: store.write("a", large),
        store.list,
        lambda: store.read("a"),
    ):
        with pytest.raises(errors.BadInput, match=r"nobody-made-it.* refuses access .*NoSuchBucket"):
            request()


def test_a_store_without_conditional_writes_is_bad_input(faulty_s3, hasty):
    store = Store(faulty_s3.uri("data"))
    faulty_s3.fault("501", method="PUT", times=FOREVER)
    with pytest.raises(errors.BadInput, match="lacks conditional writes"):
        store.write("a", b"1", only_if_absent=True)
