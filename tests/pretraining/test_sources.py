"""sources.py: the sources and chunks of raw data as arrays, under the numbers and digests of earlier versions."""

import pickle

import numpy as np
import pytest

from common.folders import digest_list, digest_values
from pretraining.online import RawImages
from pretraining.sources import Chunks, FileSources, Source, Sources

FILES = [("a.parquet", 100), ("b/ü.parquet", 200), ("c.parquet", 300), ("d.parquet", 2**40)]
FOUND = [
    FileSources(("image", "text"), [0, 1, 3], [5, 5, 2]),
    "b/ü.parquet is damaged",
    FileSources(("url", "caption"), [0], [7]),
    FileSources(("image", "text"), [2, 5], [1, 4]),
]


@pytest.fixture
def sources():
    """Six sources of three files; one is skipped."""
    return Sources.of(FILES, FOUND, folder="/data", kind="parquet", where="")


def test_a_source_is_made_of_arrays_when_it_is_asked_for(sources):
    assert len(sources) == 6 and sources.num_rows == 24 and sources.bad_files == [("b/ü.parquet", FOUND[1])]
    assert sources[3] == Source("/data", "c.parquet", 300, "parquet", 0, 7, "url", "caption")
    assert sources[5] == Source("/data", "d.parquet", 2**40, "parquet", 5, 4, "image", "text")
    assert [(each.name[0], each.first) for each in sources] == [
        (*"a", 0),
        ("a", 1),
        ("a", 3),
        ("c", 0),
        ("d", 2),
        ("d", 5),
    ]
    with pytest.raises(IndexError):
        sources[6]


def test_lists_of_files_are_joined_and_some_sources_taken(sources):
    halves = [
        Sources.of(FILES[low:high], FOUND[low:high], folder="/data", kind="parquet", where="")
        for low, high in ((0, 2), (2, 4))
    ]
    joined = Sources.join(halves)
    assert list(joined) == list(sources) and joined.bad_files == sources.bad_files and joined.file.dtype == np.int32
    some = pickle.loads(pickle.dumps(sources.only(np.array([1, 4, 5]))))
    assert list(some) == [sources[1], sources[4], sources[5]] and some.names == ["a.parquet", "d.parquet"]
    lines = Sources.of(
        [("x", 9)], [FileSources(("a", "b"), [0, 3], [3, 1], [(0, 6), (6, 9)])], folder="", kind="", where=""
    )
    assert [(each.start, each.end) for each in Sources.join([lines, lines]).only(np.array([0, 3]))] == [(0, 6), (6, 9)]


def test_digests_are_those_of_the_lists_of_earlier_versions(sources):
    """Which data sets and runs have recorded: the values come from the version before the arrays."""
    assert digest_list(sources.facts()) == "ae206259c32708205be936ae27e43d96aacb255d50aff0ee2eefb0e2085eb041"
    data = RawImages(vars(sources), 4, {"seed": 0, "timeout": 5, "retries": 0}, {}, 0.05)
    assert digest_list(data.fingerprint) == "b895f1fcce0ac9c236efa66caf1bd8d3cab568b2cbf6ff6ec8131982f865e222"
    for count in (0, 1, 999, 1000, 1001, 3000):
        values = [{"b": [i, "ü"], "a": None} for i in range(count)]
        assert digest_list(iter(values)) == digest_values(values)


def test_chunks_are_numbered_over_all_sources():
    chunks = Chunks(np.array([5, 8, 1, 4], np.int32), 4)
    assert len(chunks) == 6 and chunks.rows.tolist() == [4, 1, 4, 4, 1, 4]
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)]
    assert [chunks.place(number) for number in range(6)] == places
    assert chunks.numbers(*np.array(places).T).tolist() == list(range(6))
    assert Chunks(np.array([8, 8], np.int32), 2).passes == 2.5 and Chunks(np.array([5, 9], np.int32), 9).passes == 1
    assert len(Chunks(np.empty(0, np.int32), 4)) == 0
