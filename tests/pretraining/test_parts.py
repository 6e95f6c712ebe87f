"""parts.py: the names of the parts, which of them are missing, and the chunks that are loaded for them."""

import numpy as np
import pytest
from conftest import make_raw_data
from raw_files import write_parquet
from tiny_models import RESOLUTION

from common import errors
from common.storage import Folder
from pretraining.columns import to_parquet
from pretraining.index import Index, IndexWriter, describe_part, part_name
from pretraining.loader import Loader
from pretraining.parts import load_again, load_chunks, missing_parts, parts_to_complete, resume
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
    index, writer = resume(folder)
    (item,) = parts_to_complete(writer, sources, index)
    assert item["left"] == {0: [1], 1: [7]}
    web.hits.clear()
    web.down["503"] = "good"
    again = list(load_again(item, LOADER, 4))
    assert sorted(web.hits) == ["/503/1", "/silent/7"]
    assert [chunk["name"] for chunk in again] == [part_name(0, 0), part_name(0, 1)]
    assert [(chunk["keys"], len(chunk["later"])) for chunk in again] == [(["x.parquet:0:1"], 0), ([], 1)]
