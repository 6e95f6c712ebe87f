"""Folders in an object store: whole or absent, whatever happens to the run, the store or its listing."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time

import pytest
from conftest import ROOT, tree

from common import cache, errors, leases, objects, stores
from common.stores import PART, Store

FOREVER = float("inf")


@pytest.fixture(autouse=True)
def node_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DREAMBOOTH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_used", {})
    return tmp_path / "cache"


@pytest.fixture
def uri(faulty_s3):
    return faulty_s3.uri("out")


def make(folder, files=6, size=2000, seed=0):
    """Write files of a size that differs from seed to seed in content alone; return their contents by name."""
    contents = {}
    for number in range(files):
        name = f"{'unet/' if number % 2 else ''}file-{number}.bin"
        block = hashlib.sha256(f"{seed} {number}".encode()).digest()
        contents[name] = (block * (size // 32 + 1))[:size]
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(contents[name])
    return contents


def contents(folder):
    return {name: data for name, (data, _) in tree(folder).items() if name != "manifest.json"}


def copy(uri, monkeypatch):
    """What another node reads: a copy through a cache of its own."""
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_used", {})
        patch.setenv("DREAMBOOTH_CACHE", f"{os.environ['DREAMBOOTH_CACHE']}-{time.monotonic_ns()}")
        return contents(objects.local_copy(uri))


# ---------------------------------------------------------------------------------------------------------------------
# Publishing


@pytest.mark.parametrize("fenced", [False, True])
def test_a_folder_is_published_with_its_manifest_last(fenced, uri, tmp_path, faulty_s3, monkeypatch):
    made = make(tmp_path / "made")
    before = tree(tmp_path / "made")
    if fenced:
        with leases.lease(uri) as held:
            objects.publish(tmp_path / "made", uri, held, step=7)
    else:
        objects.publish(tmp_path / "made", uri, step=7)
    writes = [each.path.partition("/out/")[2] for each in faulty_s3.seen("PUT")]
    writes = [name for name in writes if not name.startswith(".lock")]
    assert writes[0] == ".publishing" and set(writes[1:-1]) == made.keys() and writes[-1] == "manifest.json"
    assert {name for name in Store(uri).list() if name != ".lock"} == {*made, "manifest.json"}
    manifest = objects.read_manifest(uri)
    assert manifest == objects.read_manifest(uri, deep=True) == json.loads(Store(uri).read("manifest.json"))
    assert manifest["step"] == 7
    assert {name: fact["size"] for name, fact in manifest["files"].items()} == {n: len(d) for n, d in made.items()}
    assert copy(uri, monkeypatch) == made and tree(tmp_path / "made") == before


@pytest.mark.parametrize("fenced", [False, True])
def test_an_older_result_is_replaced(fenced, uri, tmp_path, faulty_s3, monkeypatch):
    make(tmp_path / "old", files=8)
    objects.publish(tmp_path / "old", uri)
    faulty_s3.clear()
    new = make(tmp_path / "new", files=5, seed=1)
    if fenced:
        with leases.lease(uri) as held:
            objects.publish(tmp_path / "new", uri, held)
    else:
        objects.publish(tmp_path / "new", uri)
    order = [each for each in faulty_s3.seen() if each.method in ("PUT", "DELETE", "POST") and ".lock" not in each.path]
    places = {"deleted": [], "put": [], "sealed": []}
    for place, each in enumerate(order):
        if "manifest.json" in each.path:
            places["sealed" if each.method == "PUT" else "deleted"].append(place)
        elif each.method == "PUT" and ".publishing" not in each.path:
            places["put"].append(place)
    assert min(places["deleted"]) < min(places["put"]) < max(places["put"]) < min(places["sealed"])
    assert {name for name in Store(uri).list() if name != ".lock"} == {*new, "manifest.json"}
    assert copy(uri, monkeypatch) == new


def test_large_and_small_files_survive_faults(uri, tmp_path, faulty_s3, monkeypatch):
    made = make(tmp_path / "made", files=4)
    made["large.bin"] = os.urandom(PART + 500_000)
    (tmp_path / "made" / "large.bin").write_bytes(made["large.bin"])
    faulty_s3.fault("503", method="PUT", path="partNumber=1", times=2)
    faulty_s3.fault("reset_request", method="PUT", path="partNumber=2", after=1000, times=2)
    faulty_s3.fault("503", method="PUT", path="unet/", times=2)
    faulty_s3.fault("reset_request", method="PUT", path="file-0", after=1000)
    faulty_s3.fault("lose_response", method="PUT", path="manifest.json")
    with leases.lease(uri) as held:
        objects.publish(tmp_path / "made", uri, held)
    assert not any(fault.times for fault in faulty_s3.faults)
    faulty_s3.fault("reset_response", method="GET", path="large", after=PART // 2, times=2)
    faulty_s3.fault("503", method="GET", path="unet/", times=2)
    assert copy(uri, monkeypatch) == made
    assert not any(fault.times for fault in faulty_s3.faults)


def test_a_store_that_goes_away_within_an_upload_is_told_and_the_next_run_completes(
    uri, tmp_path, faulty_s3, monkeypatch
):
    for name, value in {"RETRIES": 2, "RETRY_SECONDS": 1}.items():
        monkeypatch.setattr(stores, name, value)
    made = make(tmp_path / "made", files=40)
    faulty_s3.fault("503", method="PUT", path="file-2", times=FOREVER)
    began = time.monotonic()
    with pytest.raises(errors.TryAgain, match=r"/out.* does not answer"):
        objects.publish(tmp_path / "made", uri)
    assert time.monotonic() - began < 15
    assert objects.read_manifest(uri) is None
    with pytest.raises(errors.TryAgain, match="is incomplete"):
        objects.local_copy(uri)
    faulty_s3.clear()
    objects.publish(tmp_path / "made", uri)
    assert copy(uri, monkeypatch) == made


def test_a_run_that_lost_its_lease_within_an_upload_publishes_nothing(uri, tmp_path, monkeypatch):
    make(tmp_path / "made", files=20)
    with leases.lease(uri) as held:
        real = leases.Fence.write

        def write(self, name, data):
            held.lost = held.lost or "file-9" in name
            real(self, name, data)

        monkeypatch.setattr(leases.Fence, "write", write)
        with pytest.raises(errors.TryAgain, match="now belongs to another run"):
            objects.publish(tmp_path / "made", uri, held)
    assert Store(uri).read("manifest.json") is None


def test_a_worker_publishes_under_the_lease_of_its_driver(uri, faulty_s3, tmp_path, monkeypatch):
    made = make(tmp_path / "made")
    checkpoint = faulty_s3.uri("out/checkpoint-1")
    with leases.lease(uri) as held:
        objects.publish(tmp_path / "made", checkpoint, leases.Borrowed(uri, held.owner))
        assert copy(checkpoint, monkeypatch) == made
    before = Store(uri).list()
    for attempt in (
        lambda lease: objects.publish(tmp_path / "made", checkpoint, lease),
        lambda lease: objects.delete_folder(checkpoint, lease),
    ):
        with pytest.raises(errors.TryAgain, match="now belongs to another run"):
            attempt(leases.Borrowed(uri, held.owner))
    assert Store(uri).list() == before


def test_a_folder_is_deleted_but_its_lock(uri, tmp_path):
    make(tmp_path / "made")
    with leases.lease(uri) as held:
        objects.publish(tmp_path / "made", uri, held)
        objects.delete_folder(uri, held)
        held.confirm()
    assert list(Store(uri).list()) == [".lock"]
    objects.publish(tmp_path / "made", uri)
    objects.delete_folder(uri)
    assert list(Store(uri).list()) == [".lock"]


# ---------------------------------------------------------------------------------------------------------------------
# Manifests


def test_a_manifest_counts_only_with_its_objects(uri, tmp_path):
    assert objects.read_manifest(uri) is None
    made = make(tmp_path / "made")
    objects.publish(tmp_path / "made", uri)
    store = Store(uri)
    store.write("file-0.bin", b"shorter")
    assert objects.read_manifest(uri) is None
    store.write("file-0.bin", b"x" * 2000)
    assert objects.read_manifest(uri) is not None and objects.read_manifest(uri, deep=True) is None
    store.write("file-0.bin", made["file-0.bin"])
    assert objects.read_manifest(uri, deep=True) is not None
    store.delete("unet/file-1.bin")
    assert objects.read_manifest(uri) is None
    for data in (b"", b"{", b"[]", b'{"files": {"a": 1}}', b'{"files": []}'):
        store.write("manifest.json", data)
        assert objects.read_manifest(uri) is None


def test_a_manifest_takes_one_listing_and_no_request_for_each_object(uri, tmp_path, faulty_s3):
    make(tmp_path / "made", files=30)
    objects.publish(tmp_path / "made", uri)
    faulty_s3.clear()
    assert objects.read_manifest(uri)
    assert len(faulty_s3.seen()) == 2


def test_a_late_listing_damages_nothing(uri, tmp_path, faulty_s3, monkeypatch):
    faulty_s3.late_listing = 60
    make(tmp_path / "old")
    objects.publish(tmp_path / "old", uri)
    new = make(tmp_path / "new", seed=1, size=3000)
    objects.publish(tmp_path / "new", uri)
    assert Store(uri).list() == {}
    assert objects.read_manifest(uri, deep=True) is not None
    assert copy(uri, monkeypatch) == new


# ---------------------------------------------------------------------------------------------------------------------
# Local copies


def test_a_path_is_its_own_copy(tmp_path):
    assert objects.local_copy(tmp_path) == tmp_path and objects.local_copy(str(tmp_path / "none")) == tmp_path / "none"


def test_a_copy_is_downloaded_once(uri, tmp_path, faulty_s3):
    made = make(tmp_path / "made")
    objects.publish(tmp_path / "made", uri)
    folder = objects.local_copy(uri)
    assert (
        contents(folder) == made and json.loads((folder / "manifest.json").read_text())["files"].keys() == made.keys()
    )
    faulty_s3.clear()
    cache._used.clear()
    assert objects.local_copy(uri) == folder
    assert [each for each in faulty_s3.seen("GET") if "file-" in each.path] == []
    make(tmp_path / "made", seed=1)
    objects.publish(tmp_path / "made", uri)
    assert objects.local_copy(uri) != folder and contents(folder) == made


def test_a_plain_folder_is_copied_too(uri, faulty_s3):
    store = Store(uri)
    for name in ("a.png", "sub/b.png", "empty", ".lock", ".hidden/c.png"):
        store.write(name, b"" if name == "empty" else name.encode())
    folder = objects.local_copy(uri)
    assert contents(folder) == {"a.png": b"a.png", "sub/b.png": b"sub/b.png", "empty": b""}
    store.write("a.png", b"other")
    other = objects.local_copy(uri)
    assert (
        other != folder and (other / "a.png").read_bytes() == b"other" and (folder / "a.png").read_bytes() == b"a.png"
    )


def test_nothing_is_bad_input(uri):
    Store(uri).write(".lock", b"")
    with pytest.raises(errors.BadInput, match=r"s3://.*/out.* does not exist or is empty"):
        objects.local_copy(uri)


@pytest.mark.parametrize("name", ["file-0.bin", "unet/file-1.bin"])
def test_a_corrupted_object_fails_its_check(name, uri, tmp_path, faulty_s3, node_cache):
    """On its way, then in the store, then missing."""
    made = make(tmp_path / "made")
    objects.publish(tmp_path / "made", uri)
    match = rf"s3://.*/out/{name}\?.* does not match its manifest.json"
    faulty_s3.fault("corrupt", method="GET", path=name)
    with pytest.raises(errors.CheckFailed, match=match):
        objects.local_copy(uri)
    Store(uri).write(name, made[name][::-1])
    with pytest.raises(errors.CheckFailed, match=match):
        objects.local_copy(uri)
    Store(uri).delete(name)
    with pytest.raises(errors.CheckFailed, match=match):
        objects.local_copy(uri)
    assert not [path for path in node_cache.iterdir() if path.is_dir()]
    Store(uri).write(name, made[name])
    assert contents(objects.local_copy(uri)) == made


def test_a_folder_that_is_replaced_while_it_is_read_is_read_again(uri, tmp_path, monkeypatch):
    """Neither a mixture nor a damaged folder."""
    make(tmp_path / "old")
    objects.publish(tmp_path / "old", uri)
    new = make(tmp_path / "new", seed=1)
    real = objects._download

    def replaced(store, wanted, folder):
        monkeypatch.setattr(objects, "_download", real)
        objects.publish(tmp_path / "new", uri)
        return real(store, wanted, folder)

    monkeypatch.setattr(objects, "_download", replaced)
    with pytest.raises(errors.TryAgain, match="changed while it was read"):
        objects.local_copy(uri)
    assert contents(objects.local_copy(uri)) == new


def test_a_plain_folder_that_is_published_while_it_is_read_is_read_again(uri, tmp_path, monkeypatch):
    Store(uri).write("plain.png", b"1")
    real = objects._download

    def publish(store, wanted, folder):
        objects.publish(make_folder, uri)
        return real(store, wanted, folder)

    make_folder = tmp_path / "made"
    make(make_folder)
    monkeypatch.setattr(objects, "_download", publish)
    with pytest.raises(errors.TryAgain, match="changed while it was read"):
        objects.local_copy(uri)


COPY = "import sys\nfrom common.objects import local_copy\nprint(local_copy(sys.argv[1]))"


def test_eight_processes_of_a_node_fetch_each_object_once(uri, tmp_path, faulty_s3):
    made = make(tmp_path / "made", files=10)
    objects.publish(tmp_path / "made", uri)
    faulty_s3.clear()
    faulty_s3.fault("delay", method="GET", path="file-0", seconds=1)
    command = [sys.executable, "-c", COPY, uri]
    children = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    folders = {child.communicate(timeout=60)[0].strip() for child in children}
    assert len(folders) == 1 and contents(folders.pop()) == made
    for name in made:
        assert len(faulty_s3.seen("GET", f"/out/{name}")) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Kills

PUBLISH = """
import sys
import boto3, obstore.store
from common import leases, objects
print("ready", flush=True)
if sys.stdin.readline():
    with leases.lease(sys.argv[1], 1) as held:
        objects.publish(sys.argv[2], sys.argv[1], held, number=int(sys.argv[3]))
"""


@contextlib.contextmanager
def uploads(uri, tmp_path):
    """Give a function that returns a process which publishes folder 0 or 1 after a line on its stdin.

    The next one imports its modules while the last one runs.
    """

    def start(number):
        command = [sys.executable, "-c", PUBLISH, uri, str(tmp_path / f"made-{number}"), str(number)]
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def get(number):
        child, waiting[number] = waiting[number], start(number)
        assert child.stdout.readline()
        return child

    waiting = {number: start(number) for number in (0, 1)}
    yield get
    for child in waiting.values():
        child.communicate("")


def kill_uploads(uri, tmp_path, faulty_s3, monkeypatch, kills):
    """Kill runs that replace a result, each after another number of requests; some end before."""
    faulty_s3.fault("delay", method="PUT", seconds=0.01, times=FOREVER)
    made = {number: make(tmp_path / f"made-{number}", files=6, seed=number) for number in (0, 1)}
    seen = {"whole": 0, "incomplete": 0, "absent": 0}
    with uploads(uri, tmp_path) as start:
        for number in range(kills):
            child = start(number % 2)
            faulty_s3.requests.clear()
            child.stdin.write("\n")
            child.stdin.flush()
            while len(faulty_s3.requests) < 3 + 11 * number % 50 and child.poll() is None:
                time.sleep(0.001)
            child.kill()
            child.communicate()
            Store(uri).write(".lock", b"")  # the lease has expired
            seen[what_readers_take(uri, made, monkeypatch)] += 1
    assert seen["whole"] and seen["incomplete"], "kills came before, within and after the uploads"
    with leases.lease(uri) as held:
        objects.publish(tmp_path / "made-1", uri, held, number=1)
    assert what_readers_take(uri, made, monkeypatch) == "whole"


def what_readers_take(uri, made, monkeypatch):
    """Return "whole", "incomplete" or "absent"; raise AssertionError unless a whole folder holds what was made."""
    manifest = objects.read_manifest(uri)
    if manifest is not None:
        assert copy(uri, monkeypatch) == made[manifest["number"]]
        return "whole"
    with pytest.raises((errors.TryAgain, errors.BadInput)) as error:
        copy(uri, monkeypatch)
    if "is incomplete" in str(error.value):
        return "incomplete"
    assert not [name for name in Store(uri).list() if not name.startswith(".lock")]
    return "absent"


def test_a_killed_upload_is_never_taken_for_whole(uri, tmp_path, faulty_s3, monkeypatch):
    kill_uploads(uri, tmp_path, faulty_s3, monkeypatch, kills=20)


@pytest.mark.faults
def test_two_hundred_killed_uploads_are_never_taken_for_whole(uri, tmp_path, faulty_s3, monkeypatch):
    kill_uploads(uri, tmp_path, faulty_s3, monkeypatch, kills=200)
