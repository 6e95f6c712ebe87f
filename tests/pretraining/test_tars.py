"""tars.py: samples of WebDataset tars, on a disk and in a store, and the requests that they take."""

import pytest
from conftest import noise_png
from raw_files import make_tar

from common import errors, storage, stores
from common.storage import Folder
from pretraining import tars

COUNT = 40


@pytest.fixture
def tar():
    """The bytes of a tar of COUNT samples of three files."""
    return make_tar(
        (f"{i:04d}.{kind}", data)
        for i in range(COUNT)
        for kind, data in (("png", noise_png(i)), ("txt", f"caption {i}".encode()), ("json", b"{}"))
    )


@pytest.fixture(params=["disk", "store"])
def place(request, tar, tmp_path):
    """A folder with x.tar."""
    place = request.getfixturevalue("s3")("tars") if request.param == "store" else str(tmp_path)
    Folder(place).write("x.tar", tar)
    return place


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(stores, "RETRIES", 1)
    monkeypatch.setattr(stores, "RETRY_SECONDS", 1)


def captions(place, size, first, last):
    return [sample["txt"].decode() for sample in tars.read_samples(place, "x.tar", size, first, last)]


def test_samples_are_counted_and_read_in_blocks_of_any_size(place, tar, monkeypatch):
    for block in (1000, 10_000, storage.READ_AHEAD):
        monkeypatch.setattr(storage, "READ_AHEAD", block)
        assert tars.count_samples(place, "x.tar", len(tar)) == COUNT
        samples = list(tars.read_samples(place, "x.tar", len(tar), 0, COUNT))
        assert [sample.keys() for sample in samples] == COUNT * [{"png", "txt", "json"}]
        assert [sample["png"] for sample in samples] == [noise_png(i) for i in range(COUNT)]
        assert captions(place, len(tar), 7, 9) == ["caption 7", "caption 8"]


def test_a_tar_in_a_store_is_one_request_per_block(faulty_s3, tar, monkeypatch):
    place = faulty_s3.uri("tars")
    Folder(place).write("x.tar", tar)
    for block, blocks in ((storage.READ_AHEAD, 1), (len(tar) // 2, 2)):
        monkeypatch.setattr(storage, "READ_AHEAD", block)
        for read in (lambda: tars.count_samples(place, "x.tar", len(tar)), lambda: captions(place, len(tar), 0, COUNT)):
            faulty_s3.clear()
            assert read()
            assert len(faulty_s3.requests) <= blocks + 1  # the last block may begin within a file that is skipped


def test_a_store_that_is_away_is_no_damage(faulty_s3, tar, hasty):
    place = faulty_s3.uri("tars")
    Folder(place).write("x.tar", tar)
    faulty_s3.fault("503", method="GET", times=float("inf"))
    with pytest.raises(errors.TryAgain, match="does not answer"):
        captions(place, len(tar), 0, COUNT)


def test_samples_that_are_not_there_are_damage(place, tar):
    with pytest.raises(errors.CheckFailed, match=rf"x\.tar.* is damaged \(it holds {COUNT} samples, not {COUNT + 1}\)"):
        captions(place, len(tar), 0, COUNT + 1)
    with pytest.raises(errors.CheckFailed, match=r"y\.tar.* was removed"):
        list(tars.read_samples(place, "y.tar", len(tar), 0, 1))
