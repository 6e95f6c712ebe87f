"""parts.py: the names of the parts, which of them are missing, and the chunks that are loaded for them."""

import numpy as np
import pytest
from conftest import make_raw_data, tree
from raw_files import write_parquet
from tiny_models import RESOLUTION

from common import errors
from common.storage import Folder
from pretraining.columns import to_parquet
from pretraining.index import Index, IndexWriter, describe_part, part_name
from pretraining.loader import Loader
from pretraining.parts import PartWriter, load_again, load_chunks, missing_parts, parts_to_complete, resume
from pretraining.raw_data import list_sources

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


def test_parts_of_a_killed_run_that_are_not_in_the_index_are_named(tmp_path):
    """Three are in it, of which one was changed and one deleted since; one was written after it."""
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
    index, writer, written = resume(folder)
    assert index.chunk.tolist() == [0] and written == [part_name(0, 1), part_name(0, 2)]
    assert (index.bad.tolist(), index.filtered.tolist(), index.rows.tolist()) == ([1], [2], [1])
    assert (writer.number, len(writer.pending)) == (0, 1)
    with writer:
        writer.add(records[1])
        writer.add(other)
    index, writer, written = resume(folder)
    assert index.chunk.tolist() == [0, 1, 2] and index.bad.tolist() == [1, 1, 3] and written == []
    assert (writer.number, len(writer.pending)) == (0, 3)
    assert bytes(index.sha256[2]).hex() == other["sha256"] and index.bytes[2] == other["bytes"]


def test_a_part_that_is_written_gets_a_record_and_stays_as_it_is(tmp_path, tiny_model):
    """Of the rows that are there now, those are counted that it holds; the rest of its record is of its content."""
    source = make_raw_data(tmp_path / "raw", 8)
    (source / "01.png").rename(tmp_path / "01.png")
    (item,) = missing_parts(list_sources(str(source)), make_index([]), 4)
    (tmp_path / "out").mkdir()
    options = {"resolutions": (RESOLUTION,), "batch_size": 4, "mixed_precision": "no"}
    writer = PartWriter(str(tmp_path / "out"), model_dir=str(tiny_model), **options)
    records = [writer(chunk) for chunk in load_chunks(item, LOADER, 4)]
    (tmp_path / "01.png").rename(source / "01.png")
    before = tree(tmp_path / "out")
    index, _, written = resume(writer.folder)
    (item,) = missing_parts(list_sources(str(source)), index, 4, written)
    assert item["written"] == [0, 1] and len(index) == 0
    assert [writer(chunk) for chunk in load_chunks(item, LOADER, 4)] == records
    assert tree(tmp_path / "out") == before and records[0]["bad"] == 1
    (tmp_path / "out" / part_name(0, 1)).write_bytes(b"cut")
    with pytest.raises(errors.CheckFailed, match=part_name(0, 1)):
        list(map(writer, load_chunks(item, LOADER, 4)))


def test_missing_parts_name_those_that_are_written(tmp_path):
    sources = 2 * list_sources(str(make_raw_data(tmp_path, 10)))
    assert [item["done"] for item in missing_parts(sources, make_index([]), 4)] == [[], []]
    (item,) = missing_parts(sources, make_index([(0, 0), (0, 1), (0, 2), (1, 1)]), 4)
    assert (item["number"], item["done"], item["source"]) == (1, [1], vars(sources[1]))


def test_the_chunks_of_missing_parts_are_loaded(tmp_path):
    sources = list_sources(str(make_raw_data(tmp_path, 10)))
    for done, rows in (([], [range(4), range(4, 8), range(8, 10)]), ([1], [range(4), range(8, 10)])):
        (item,) = missing_parts(sources, make_index([(0, chunk) for chunk in done]), 4)
        chunks = list(load_chunks(item, LOADER, 4))
        assert [chunk["name"] for chunk in chunks] == [part_name(0, i) for i in range(3) if i not in done]
        assert [chunk["keys"] for chunk in chunks] == [[f"metadata.jsonl:0:{row}" for row in part] for part in rows]


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
    with IndexWriter(folder) as writer:
        for chunk in chunks:
            writer.add(describe_part(chunk["name"], folder.read(chunk["name"])))
    index, writer, _ = resume(folder)
    (item,) = parts_to_complete(writer, sources, index)
    assert {chunk: part["rows"] for chunk, part in item["left"].items()} == {0: [1], 1: [7]}
    web.hits.clear()
    web.down["503"] = "good"
    again = list(load_again(item, LOADER, 4))
    assert sorted(web.hits) == ["/503/1", "/silent/7"]
    assert [chunk["name"] for chunk in again] == [part_name(0, 0), part_name(0, 1)]
    assert [(chunk["keys"], len(chunk["later"])) for chunk in again] == [(["x.parquet:0:1"], 0), ([], 1)]
