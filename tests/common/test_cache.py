"""The cache of a node: whole or absent, filled once, bounded, nothing removed that is in use."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, tree

from common import cache, errors


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("DREAMBOOTH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_used", {})
    return tmp_path / "cache"


def fill(size=1000):
    return lambda folder: (folder / "data").write_bytes(b"x" * size)


def get(key, size=1000):
    return cache.get(key, size, fill(size), "s3://bucket/x")


def leave(monkeypatch):
    """What the end of this process does to the entries that it uses."""
    for file in cache._used.values():
        file.close()
    monkeypatch.setattr(cache, "_used", {})


def entries(root):
    return {path.name for path in root.iterdir() if path.is_dir()}


def test_where_the_cache_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("DREAMBOOTH_CACHE", "XDG_CACHE_HOME", "DREAMBOOTH_CACHE_GB"):
        monkeypatch.delenv(name, raising=False)
    assert cache.root() == tmp_path / ".cache" / "ray-dreambooth" and cache.limit() == 50e9
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.root() == Path("/xdg/ray-dreambooth")
    monkeypatch.setenv("DREAMBOOTH_CACHE", "/node/cache")
    assert cache.root() == Path("/node/cache")
    monkeypatch.setenv("DREAMBOOTH_CACHE_GB", "0.5")
    assert cache.limit() == 0.5e9
    monkeypatch.setenv("DREAMBOOTH_CACHE_GB", "much")
    with pytest.raises(errors.BadInput, match="DREAMBOOTH_CACHE_GB is 'much'"):
        cache.limit()


def test_an_entry_is_filled_once(root, monkeypatch):
    folder = get("a")
    assert folder == root / "a" and (folder / "data").stat().st_size == 1000
    before = tree(folder)
    leave(monkeypatch)
    assert cache.get("a", 1000, lambda folder: pytest.fail("filled again"), "s3://bucket/x") == folder
    assert tree(folder) == before


def test_an_entry_that_could_not_be_filled_is_absent(root, monkeypatch):
    def fail(folder):
        (folder / "half").write_bytes(b"x")
        raise errors.CheckFailed("damaged")

    with pytest.raises(errors.CheckFailed):
        cache.get("a", 1000, fail, "s3://bucket/x")
    assert entries(root) == set()
    get("a")
    (root / ".b.staging").mkdir()  # a process that was killed
    (root / ".b.staging" / "half").write_bytes(b"x" * 1000)
    get("c")
    assert {path.name for path in root.iterdir() if path.is_dir()} == {"a", "c"}


def test_a_disk_without_room_is_told_before_anything_is_downloaded(root):
    with pytest.raises(errors.OutOfResource, match=r"DREAMBOOTH_CACHE .*cache: .* are needed"):
        cache.get("a", 10**18, lambda folder: pytest.fail("filled"), "s3://bucket/x")


def test_the_oldest_entries_that_nobody_uses_are_removed(root, monkeypatch):
    monkeypatch.setenv("DREAMBOOTH_CACHE_GB", "0.000004")  # four of 1000 bytes
    for age, key in enumerate(["a", "b", "c", "d"]):
        get(key)
        os.utime(root / key, (time.time() - 100 + age,) * 2)
    leave(monkeypatch)
    get("a")  # used again
    leave(monkeypatch)
    get("e")
    assert entries(root) == {"a", "c", "d", "e"}
    get("f", 2000)
    assert entries(root) == {"a", "e", "f"}
    get("g", 9000)  # does not fit; those in use stay, also in this process
    assert entries(root) == {"e", "f", "g"}


USE = """
import sys, time
from common import cache
cache.get(sys.argv[1], 1000, lambda folder: (folder / "data").write_bytes(b"y" * 1000), "s3://bucket/x")
print("ready", flush=True)
sys.stdin.read()
"""


def test_what_another_process_uses_stays_until_that_ends(root, monkeypatch):
    monkeypatch.setenv("DREAMBOOTH_CACHE_GB", "0.000001")
    child = subprocess.Popen(
        [sys.executable, "-c", USE, "a"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    get("b")
    assert entries(root) == {"a", "b"} and (root / "a" / "data").read_bytes() == b"y" * 1000
    child.kill()
    child.communicate()
    leave(monkeypatch)
    get("c")
    assert entries(root) == {"c"}


def test_another_process_waits_and_says_so(root):
    command = [sys.executable, "-c", USE, "a"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def slow(folder):
        child.append(subprocess.Popen(command, cwd=ROOT, **pipes))
        said.append(child[0].stderr.readline())
        fill()(folder)

    child, said = [], []
    cache.get("a", 1000, slow, "s3://bucket/x")
    out, _ = child[0].communicate("", timeout=20)
    assert out == "ready\n" and (root / "a" / "data").read_bytes() == b"x" * 1000
    assert said[0].startswith("waiting while process ") and said[0].endswith(" downloads s3://bucket/x\n")
