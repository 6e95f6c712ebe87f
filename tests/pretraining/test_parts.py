"""parts.py: the names of the parts, which of them are missing, and the chunks that are loaded for them."""

import itertools
import json

import numpy as np
import pytest
from conftest import make_raw_data, noise_png
from raw_files import make_tar, write_parquet
from tiny_models import RESOLUTION

from common import errors
from common.storage import Folder
from pretraining import parts, tars
from pretraining.columns import to_parquet
from pretraining.index import Index, IndexWriter, describe_part, part_name, read_notes
from pretraining.loader import Loader
from pretraining.parts import PartWriter, load_again, load_chunks, missing_parts, parts_to_complete, resume
from pretraining.raw_data import list_sources
from pretraining.statistics import Statistics

LOADER = Loader((RESOLUTION,), random_crop=False, random_flip=False, seed=0, timeout=1.0, retries=0)


def make_index(parts):
    """An index of (source, chunk) pairs."""
    source, chunk = np.array(parts, np.int32).reshape(-1, 2).T
    return Index(source, chunk, *([np.empty(0)] * 6))


def test_names_sort_in_the_order_of_the_rows():
    names = [part_name(source, chunk) for source in (0, 1, 20) for chunk in (0, 2, 10)]
    assert names == sorted(names) and names[0] == "part-000000-0000.parquet"


def write_part(folder, source, chunk, bad=1):
    """Write a part of one row; return its record."""
    rows = {"keys": [f"a:{chunk}"], "captions": ["one"], "bad": [["a:9", "no image"]] * bad}
    rows["filtered"] = {"side < 9": 2}
    data = to_parquet(rows, {})
    folder.write(part_name(source, chunk), data)
    return describe_part(part_name(source, chunk), data)


def test_parts_of_a_killed_run_come_into_the_index(tmp_path):
    """Two are in it, one was written after it, one was changed and one deleted since."""
    folder = Folder(tmp_path)
    records = [write_part(folder, 0, chunk) for chunk in range(4)]
    with IndexWriter(folder, 0) as writer:
        for record in records[:1] + records[2:]:
            writer.add(record)
    folder.delete(part_name(0, 3))
    folder.write(part_name(0, 2), b"cut")
    (tmp_path / part_name(0, 2)).unlink()
    other = write_part(folder, 0, 2, bad=3)
    folder.write("other.parquet", b"not a part")
    index, writer = resume(folder)
    assert index.chunk.tolist() == [0, 1, 2] and index.bad.tolist() == [1, 1, 3]
    assert index.filtered.tolist() == [2, 2, 2] and index.rows.tolist() == [1, 1, 1]
    assert (writer.number, len(writer.pending)) == (0, 3)
    assert bytes(index.sha256[2]).hex() == other["sha256"] and index.bytes[2] == other["bytes"]
    again, writer = resume(folder)
    assert again.digest == index.digest and (writer.number, len(writer.pending)) == (0, 3)


def test_a_damaged_part_of_a_killed_run_is_named(tmp_path):
    folder = Folder(tmp_path)
    write_part(folder, 0, 0)
    folder.write(part_name(0, 1), b"cut")
    with pytest.raises(errors.CheckFailed, match=part_name(0, 1)):
        resume(folder)


def test_missing_parts_are_the_chunks_without_a_part(tmp_path):
    """In items of neighbouring sources, without the sources of which all parts are written."""
    for name in "abcde":
        write_parquet(tmp_path / f"{name}.parquet", [b"x"] * 10, ["x"] * 10, row_group_size=5)
    sources = list_sources(str(tmp_path))
    index = make_index([(0, 0), (0, 1), (3, 1), (4, 0), (4, 1), (9, 0)])
    items = missing_parts(sources, index, 4)
    assert [item["numbers"].tolist() for item in items] == [[1], [2], [3], [5], [6], [7], [8], [9]]
    assert [item["is_asked"].tolist() for item in items] == [
        [number != 9, number != 3] for number in (1, 2, 3, 5, 6, 7, 8, 9)
    ]
    assert [source for item in items for source in item["sources"]] == [sources[i] for i in (1, 2, 3, 5, 6, 7, 8, 9)]
    assert missing_parts(sources, make_index([(i, j) for i in range(10) for j in range(2)]), 4) == []


def test_there_are_few_items_for_many_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "MOST_ITEMS", 3)
    for name in "abcd":
        write_parquet(tmp_path / f"{name}.parquet", [b"x"] * 10, ["x"] * 10, row_group_size=5)
    sources = list_sources(str(tmp_path))
    items = missing_parts(sources, make_index([(3, 0), (3, 1), (5, 0)]), 4)
    assert [item["numbers"].tolist() for item in items] == [[0, 1, 2], [4, 5], [6, 7]]
    names = [chunk["name"] for item in items for chunk in load_chunks(item, LOADER, 4)]
    assert names == [part_name(i, j) for i in range(8) for j in range(2) if i != 3 and (i, j) != (5, 0)]


def test_the_chunks_of_missing_parts_are_loaded(tmp_path):
    sources = list_sources(str(make_raw_data(tmp_path, 10)))
    for done, rows in (([], [range(4), range(4, 8), range(8, 10)]), ([1], [range(4), range(8, 10)])):
        (item,) = missing_parts(sources, make_index([(0, chunk) for chunk in done]), 4)
        chunks = list(load_chunks(item, LOADER, 4))
        assert [chunk["name"] for chunk in chunks] == [part_name(0, i) for i in range(3) if i not in done]
        assert [chunk["keys"] for chunk in chunks] == [[f"metadata.jsonl:0:{row}" for row in part] for part in rows]


def test_damage_in_the_middle_costs_the_rows_after_it_in_its_chunk(tmp_path):
    """Of a tar whose index gives the place of the next chunk; in one pass as after a restart."""
    pairs = [((f"{i}.png", noise_png(i)), (f"{i}.txt", b"x")) for i in range(12)]
    (tmp_path / "x.tar").write_bytes(make_tar(itertools.chain.from_iterable(pairs)))
    sources = list_sources(str(tmp_path))
    offsets = tars.find_offsets(str(tmp_path), "x.tar", (tmp_path / "x.tar").stat().st_size)
    with open(tmp_path / "x.tar", "r+b") as file:
        file.seek(offsets[6])
        file.write(b"\xff" * 512)
    for done in ([], [0]):
        (item,) = missing_parts(sources, make_index([(0, chunk) for chunk in done]), 4)
        chunks = {chunk["name"]: chunk for chunk in load_chunks(item, LOADER, 4)}
        middle, last = (chunks[part_name(0, chunk)] for chunk in (1, 2))
        assert [key[-1] for key in middle["keys"]] in (["4"], ["4", "5"])
        assert len(middle["keys"] + middle["bad"]) == 4 and "x.tar is damaged" in middle["bad"][-1][1]
        assert last["keys"] == [f"x.tar:0:{row}" for row in range(8, 12)]


def test_rows_that_cannot_be_fetched_are_loaded_again_without_the_others(web, tmp_path):
    kinds = ["good", "503", "good", "404", "good", "good", "good", "silent", "good", "good"]
    urls = [f"{web.address}/{kind}/{row}" for row, kind in enumerate(kinds)]
    write_parquet(tmp_path / "x.parquet", urls, ["x"] * 10, image_column="url")
    sources = list_sources(str(tmp_path))
    (item,) = missing_parts(sources, make_index([]), 4)
    chunks = list(load_chunks(item, LOADER, 4))
    assert [[key for key, _ in chunk["later"]] for chunk in chunks] == [["x.parquet:0:1"], ["x.parquet:0:7"], []]
    assert [len(chunk["keys"]) for chunk in chunks] == [2, 3, 2] and len(chunks[0]["bad"]) == 1
    (tmp_path / "out").mkdir()
    folder = Folder(tmp_path / "out")
    for chunk in chunks:
        folder.write(chunk["name"], to_parquet(chunk, {}))
    index, _ = resume(folder)
    (item,) = parts_to_complete(sources, index, 4)
    assert item["is_asked"].tolist() == [True, True, False]
    web.hits.clear()
    web.down["503"] = "good"
    again = list(load_again(item, LOADER, 4, str(folder.location)))
    assert sorted(web.hits) == ["/503/1", "/silent/7"]
    assert [chunk["name"] for chunk in again] == [part_name(0, 0), part_name(0, 1)]
    assert [(chunk["keys"], len(chunk["later"])) for chunk in again] == [(["x.parquet:0:1"], 0), ([], 1)]


def test_a_part_has_its_notes_in_it_and_they_grow_with_rows_that_are_fetched_again(web, tmp_path, tiny_model):
    urls = [f"{web.address}/{kind}/{row}" for row, kind in enumerate(["good", "503", "good"])]
    write_parquet(tmp_path / "x.parquet", urls, ["a cat", "a red dog", ""], image_column="url")
    (tmp_path / "out").mkdir()
    options = {"resolutions": (RESOLUTION,), "batch_size": 4, "mixed_precision": "no"}
    writer, sources = PartWriter(str(tmp_path / "out"), model_dir=str(tiny_model), **options), list_sources(tmp_path)
    (item,) = missing_parts(sources, make_index([]), 4)
    assert item["shown"] == {0: [0, 1, 2]}
    (record,) = map(writer, load_chunks(item, LOADER, 4))
    web.down["503"] = "good"
    index, _ = resume(writer.folder)  # from the part itself: a killed run has no record of it
    (item,) = parts_to_complete(sources, index, 4)
    (again,) = map(writer, load_again(item, LOADER, 4, str(tmp_path / "out")))
    (found,) = [notes for _, notes in read_notes(writer.folder, ["_index-00000.parquet"], index)]
    assert found == json.loads(record["notes"]) and len(found["pictures"]) == 2
    notes = json.loads(again["notes"])
    assert notes["pictures"] == found["pictures"] and (again["rows"], again["later"]) == (3, 0)
    counted = [Statistics(), Statistics()]
    for statistics, note in zip(counted, (found, notes), strict=True):
        statistics.add(note["statistics"])
    assert [each.rows for each in counted] == [2, 3]
    assert [each.quantiles("characters")["largest"] for each in counted] == [5, 9]
