"""index.py: the records of parts, written while a run goes on and read as arrays."""

import hashlib
import json

import numpy as np
import pytest

from common import errors
from common.storage import Folder
from pretraining import index
from pretraining.columns import to_parquet
from pretraining.index import FILE, IndexWriter, describe_part, part_name, read_index, read_notes


def records(count, rows=4):
    """Records of parts in a random order, with three chunks a source and one bad row in each part."""
    made = []
    for number in np.random.default_rng(0).permutation(count).tolist():
        chunk = {"keys": list("a" * rows), "captions": list("b" * rows), "bad": [[f"a:{number}", "no image"]]}
        made.append(describe_part(part_name(number // 3, number % 3), to_parquet(chunk, {})))
    return made


def index_files(folder):
    return [name for name in folder.names(".parquet") if FILE.fullmatch(name)]


def write(folder, made, first=0):
    with IndexWriter(Folder(folder), first) as writer:
        for record in made:
            writer.add(record)
    assert writer.files == index_files(Folder(folder))
    return Folder(folder)


def test_an_index_comes_back_sorted_whatever_the_order_of_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "PARTS_PER_FILE", 4)
    (tmp_path / "two").mkdir()
    one, two = write(tmp_path, records(10)), write(tmp_path / "two", records(10)[::-1])
    files = index_files(one)[:3]
    assert files == ["_index-00000.parquet", "_index-00001.parquet", "_index-00002.parquet"]
    found, other = read_index(one, files), read_index(two, index_files(two))
    sizes = [each["bytes"] for each in sorted(records(10), key=lambda each: (each["source"], each["chunk"]))]
    assert [found.name(part) for part in range(10)] == [part_name(number // 3, number % 3) for number in range(10)]
    assert found.rows.tolist() == [4] * 10 and found.bad.tolist() == [1] * 10 and found.bytes.tolist() == sizes
    assert bytes(found.sha256[4]).hex() == next(
        each["sha256"] for each in records(10) if each["source"] == each["chunk"] == 1
    )
    assert found.digest == other.digest
    noted = {part: notes["bad"] for part, notes in read_notes(one, files, found)}
    assert noted == {number: [[f"a:{number}", "no image"]] for number in range(10)}
    rest = read_index(one, files, ("source", "chunk", "rows"))
    assert (
        rest.rows.tolist() == found.rows.tolist() and len(rest.sha256) == 0 and rest.only(rest.rows > 4).rows.size == 0
    )


def test_the_later_record_of_a_part_counts(tmp_path):
    made = records(3)
    folder = write(tmp_path, made)
    write(tmp_path, [{**made[0], "rows": 1, "sha256": "00" * 32}], first=1)
    found, name = read_index(folder, index_files(folder)), made[0]["chunk"]
    assert len(found) == 3 and found.rows[name] == 1 and not found.sha256[name].any()
    notes = list(read_notes(folder, index_files(folder), found))
    assert sorted(part for part, _ in notes) == [0, 1, 2] and notes[-1][0] == name  # that of the second file
    one = read_index(folder, ["_index-00000.parquet"])
    assert one.digest != found.digest and one.rows.tolist() == [4, 4, 4]


def test_records_are_in_the_index_soon(tmp_path, monkeypatch):
    writer = IndexWriter(Folder(tmp_path), 0)
    made = records(3)
    writer.add(made[0])
    assert index_files(Folder(tmp_path)) == []
    monkeypatch.setattr(index, "FLUSH_EVERY", 0.0)
    writer.add(made[1])
    writer.add(made[2])
    assert len(read_index(Folder(tmp_path), ["_index-00000.parquet"])) == 3


def test_an_index_without_parts(tmp_path):
    found = read_index(write(tmp_path, []), [])
    assert len(found) == 0 and found.digest == hashlib.sha256().hexdigest()


@pytest.mark.parametrize("content", [None, b"cut", json.dumps([]).encode()])
def test_a_file_that_is_missing_or_damaged_is_named(tmp_path, content):
    folder = write(tmp_path, records(2))
    folder.delete("_index-00000.parquet")
    if content is not None:
        folder.write("_index-00000.parquet", content)
    with pytest.raises(errors.CheckFailed, match=r"_index-00000\.parquet is damaged"):
        read_index(folder, ["_index-00000.parquet"])
