"""parts.py: the names of the parts, which of them are missing, and the chunks that are loaded for them."""

from conftest import make_raw_data
from raw_files import write_parquet
from tiny_models import RESOLUTION

from common.storage import Folder
from pretraining.columns import to_parquet
from pretraining.loader import Loader
from pretraining.parts import load_again, load_chunks, missing_parts, part_name, parts_to_complete, written_parts
from pretraining.raw_data import list_sources

LOADER = Loader((RESOLUTION,), random_crop=False, random_flip=False, seed=0, timeout=1.0, retries=0)


def test_names_sort_in_the_order_of_the_rows():
    names = [part_name(source, chunk) for source in (0, 1, 20) for chunk in (0, 2, 10)]
    assert names == sorted(names) and names[0] == "part-000000-0000.parquet"


def test_only_parts_are_written_parts(tmp_path):
    folder = Folder(tmp_path)
    chunk = {"keys": ["a:0"], "captions": ["one"], "bad": [["a:1", "no image"]], "filtered": {"side < 9": 2}}
    for name in (part_name(0, 1), part_name(0, 0), "other.parquet"):
        folder.write(name, to_parquet(chunk, {}))
    notes = (1, [["a:1", "no image"]], [], {"side < 9": 2})
    assert list(written_parts(folder).items()) == [(part_name(0, i), notes) for i in range(2)]


def test_missing_parts_name_those_that_are_written(tmp_path):
    sources = 2 * list_sources(str(make_raw_data(tmp_path, 10)))
    assert [item["done"] for item in missing_parts(sources, {}, 4)] == [[], []]
    written = dict.fromkeys([*(part_name(0, chunk) for chunk in range(3)), part_name(1, 1)])
    (item,) = missing_parts(sources, written, 4)
    assert (item["number"], item["done"], item["source"]) == (1, [part_name(1, 1)], vars(sources[1]))


def test_the_chunks_of_missing_parts_are_loaded(tmp_path):
    sources = list_sources(str(make_raw_data(tmp_path, 10)))
    for done, rows in (([], [range(4), range(4, 8), range(8, 10)]), ([1], [range(4), range(8, 10)])):
        (item,) = missing_parts(sources, dict.fromkeys(part_name(0, chunk) for chunk in done), 4)
        chunks = list(load_chunks(item, LOADER, 4))
        assert [chunk["name"] for chunk in chunks] == [part_name(0, i) for i in range(3) if i not in done]
        assert [chunk["keys"] for chunk in chunks] == [[f"metadata.jsonl:0:{row}" for row in part] for part in rows]


def test_rows_that_cannot_be_fetched_are_loaded_again_without_the_others(web, tmp_path):
    kinds = ["good", "503", "good", "404", "good", "good", "good", "silent", "good", "good"]
    urls = [f"{web.address}/{kind}/{row}" for row, kind in enumerate(kinds)]
    write_parquet(tmp_path / "x.parquet", urls, ["x"] * 10, image_column="url")
    sources = list_sources(str(tmp_path))
    (item,) = missing_parts(sources, {}, 4)
    chunks = list(load_chunks(item, LOADER, 4))
    assert [[key for key, _ in chunk["later"]] for chunk in chunks] == [["x.parquet:0:1"], ["x.parquet:0:7"], []]
    assert [len(chunk["keys"]) for chunk in chunks] == [2, 3, 2] and len(chunks[0]["bad"]) == 1
    written = {chunk["name"]: (len(chunk["keys"]), chunk["bad"], chunk["later"]) for chunk in chunks}
    (item,) = parts_to_complete(sources, written, 4)
    assert item["left"] == {0: [1], 1: [7]}
    web.hits.clear()
    web.down["503"] = "good"
    again = list(load_again(item, LOADER, 4))
    assert web.hits == ["/503/1", "/silent/7"] and [chunk["name"] for chunk in again] == [
        part_name(0, 0),
        part_name(0, 1),
    ]
    assert [(chunk["keys"], len(chunk["later"])) for chunk in again] == [(["x.parquet:0:1"], 0), ([], 1)]
