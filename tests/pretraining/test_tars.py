"""tars.py: samples of WebDataset tars, on a disk and in a store, and the requests that they take."""

import json
import tarfile

import numpy as np
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


def count(place, tar, records=None, **options):
    return tars.count_samples(place, "x.tar", len(tar), records or {}, **options)


def captions(place, tar, first, last, count=COUNT):
    return [sample["txt"].decode() for sample in tars.read_samples(place, "x.tar", len(tar), count, first, last)]


def index(place):
    return Folder(place).read("x.tar.idx")


def test_samples_are_counted_and_read_in_blocks_of_any_size(place, tar, monkeypatch):
    for block in (1000, 10_000, storage.READ_AHEAD):
        monkeypatch.setattr(storage, "READ_AHEAD", block)
        assert count(place, tar) == COUNT
        samples = list(tars.read_samples(place, "x.tar", len(tar), COUNT, 0, COUNT))
        assert [sample.keys() for sample in samples] == COUNT * [{"png", "txt", "json"}]
        assert [sample["png"] for sample in samples] == [noise_png(i) for i in range(COUNT)]
        assert captions(place, tar, 7, 9) == ["caption 7", "caption 8"] and captions(place, tar, 9, 9) == []


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("has_index", [True, False])
def test_an_index_finds_every_range(format, has_index, tmp_path):
    """Also where a sample begins with a header for its long name, after a folder or a hidden file."""
    members = [(name, str(i).encode()) for i in range(5) for name in (f"{'long' * 40}{i}.txt", f"{i}.txt", f".{i}")]
    tar = make_tar([("folder", None), *members], format)
    (tmp_path / "x.tar").write_bytes(tar)
    assert count(str(tmp_path), tar, keep=has_index) == 10
    assert (index(tmp_path) is not None) == has_index
    tars.find_offsets.cache_clear()
    expected = [str(i // 2) for i in range(10)]
    for first in range(10):
        for last in range(first, 11):
            assert captions(str(tmp_path), tar, first, last, 10) == expected[first:last]


def test_the_index_is_the_place_of_each_sample(tmp_path):
    """As Megatron Energon has it: the place of the first header of each sample, then of the end."""
    tar = make_tar([("a.jpg", b"x" * 600), ("a.txt", b"x"), ("b.txt", b"x")])
    (tmp_path / "x.tar").write_bytes(tar)
    assert count(str(tmp_path), tar) == 2
    assert np.frombuffer(index(tmp_path), "<u8").tolist() == [0, 5 * 512, 7 * 512]


def test_an_index_is_counted_without_a_request_and_made_once(faulty_s3, tar):
    place = faulty_s3.uri("tars")
    Folder(place).write("x.tar", tar)
    Folder(place).write("x_stats.json", json.dumps({"successes": COUNT}).encode())
    stats, both = {"x_stats.json": 9}, {"x.tar.idx": 8 * (COUNT + 1), "x_stats.json": 9}
    assert count(place, tar, stats) == COUNT and index(place) is None
    assert count(place, tar, stats, indexed=True, keep=False) == COUNT and index(place) is None
    assert count(place, tar, stats, indexed=True) == COUNT and len(index(place)) == both["x.tar.idx"]
    faulty_s3.clear()
    assert count(place, tar, both) == count(place, tar, both, indexed=True) == COUNT and not faulty_s3.requests


def test_a_folder_that_cannot_be_written_keeps_no_index(faulty_s3, tar, tmp_path):
    place = faulty_s3.uri("tars")
    Folder(place).write("x.tar", tar)
    faulty_s3.fault("403", method="PUT")
    assert count(place, tar) == COUNT and index(place) is None
    assert captions(place, tar, 3, 5) == ["caption 3", "caption 4"]
    (tmp_path / "x.tar").write_bytes(tar)
    (tmp_path / "x.tar.idx").mkdir()
    assert count(str(tmp_path), tar) == COUNT


def test_requests_of_a_tar_in_a_store_do_not_grow_with_its_samples(faulty_s3, tar, monkeypatch):
    place = faulty_s3.uri("tars")
    Folder(place).write("x.tar", tar)

    def requests(read):
        faulty_s3.clear()
        assert read()
        return len(faulty_s3.requests)

    tars.find_offsets.cache_clear()
    assert requests(lambda: count(place, tar)) == 2  # a block and the index, which is written
    assert requests(lambda: captions(place, tar, 0, COUNT)) == 1
    assert requests(lambda: captions(place, tar, 30, 40)) == 2  # the index and a range
    assert requests(lambda: captions(place, tar, 10, 20)) == 1
    monkeypatch.setattr(storage, "READ_AHEAD", len(tar) // 2)
    assert requests(lambda: captions(place, tar, 0, COUNT)) <= 3  # the last block may begin within a file


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda tar: make_tar([("other.txt", b"x")]), "it does not hold the 40 samples that a file beside it states"),
        (lambda tar: make_tar([("folder", None)])[:512] + tar, ".*"),
    ],
)
def test_an_index_of_another_tar_is_not_believed(spoil, reason, tar, tmp_path):
    (tmp_path / "x.tar").write_bytes(tar)
    assert count(str(tmp_path), tar) == COUNT
    other = spoil(tar)
    (tmp_path / "x.tar").write_bytes(other)
    tars.find_offsets.cache_clear()
    with pytest.raises(errors.CheckFailed, match=rf"x\.tar is damaged \({reason}\): .* delete x\.tar\.idx if"):
        captions(str(tmp_path), other, 20, 30)


def test_a_store_that_is_away_is_no_damage(faulty_s3, tar, hasty):
    place = faulty_s3.uri("tars")
    Folder(place).write("x.tar", tar)
    faulty_s3.fault("503", method="GET", times=float("inf"))
    with pytest.raises(errors.TryAgain, match="does not answer"):
        captions(place, tar, 0, COUNT)


@pytest.mark.parametrize("wrong", [COUNT - 1, COUNT + 1])
def test_another_number_of_samples_than_a_record_states_is_damage(wrong, place, tar):
    for first in (0, 3):
        with pytest.raises(errors.CheckFailed, match=rf"x\.tar.* does not hold the {wrong} samples"):
            captions(place, tar, first, wrong, wrong)
    with pytest.raises(errors.CheckFailed, match=r"y\.tar.* was removed"):
        list(tars.read_samples(place, "y.tar", len(tar), 1, 0, 1))
