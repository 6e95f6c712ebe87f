"""statistics.py: histograms that are added up part by part, and reasons without what is special about a row."""

import json
from collections import Counter

import numpy as np
import pytest

from pretraining import statistics
from pretraining.statistics import (
    LARGEST,
    NUM_BINS,
    OTHER,
    QUANTILES,
    QUANTITIES,
    Statistics,
    add_bounded,
    count_reasons,
    find_bins,
    general,
    smallest_values,
)


def test_a_bin_holds_values_that_differ_by_a_sixteenth_at_most():
    values = np.arange(LARGEST + 1)
    bins = find_bins(values)
    smallest = smallest_values(bins)
    assert sorted(set(np.diff(bins).tolist())) == [0, 1] and bins[0] == 0 and bins[-1] == NUM_BINS - 1
    assert (smallest <= values).all() and (values - smallest <= values / 16).all()
    assert (smallest[:32] == values[:32]).all() and (find_bins(smallest) == bins).all()
    usual = np.array([256, 480, 512, 640, 768, 800, 1024, 1280, 1920, 4096])
    assert (smallest_values(find_bins(usual)) == usual).all()
    assert find_bins(np.array([-1, 10**9])).tolist() == [0, NUM_BINS - 1]


def crops_of(sizes):
    return np.array([(width, height, 0, 0, 1, 1, 0) for width, height in sizes], np.int64).reshape(-1, 7)


SIZES = [(640, 480), (480, 640), (1024, 1024), (200, 256), (1920, 1080)]
CAPTIONS = ["", "  ", "a cat", "犬", "x" * 70]


def test_what_is_counted_by_hand():
    found = Statistics.of(crops_of(SIZES), (256, 512), CAPTIONS, [2, 2, 4, 5, 78], 77)
    assert found.rows == 5 and found.cut == 1 and found.enlarged == {"256": 1, "512": 3} and found.empty_captions == 2
    assert found.quantiles("width") == dict(zip(QUANTILES, [200, 200, 480, 640, 1024, 1920, 1920], strict=True))
    assert found.histogram("shortest_side") == [[200, 1], [480, 2], [1024, 2]]  # 1080 is in the bin of 1024
    assert found.histogram("aspect_ratio") == [[0.75, 1], [0.78125, 1], [1.0, 1], [1.3125, 1], [1.75, 1]]
    assert found.histogram("characters") == [[0, 2], [1, 1], [5, 1], [68, 1]]
    assert found.quantiles("tokens")["largest"] == 76
    assert Statistics().quantiles("width") == {} and Statistics().histogram("width") == []


def test_parts_add_up_to_the_whole_through_plain_json():
    rng = np.random.default_rng(0)
    sizes, tokens = rng.integers(16, 5000, (300, 2)), rng.integers(2, 100, 300).tolist()
    captions = ["x" * length for length in rng.integers(0, 400, 300)]
    whole, total = Statistics.of(crops_of(sizes), (512,), captions, tokens, 77), Statistics()
    for part in (slice(0, 7), slice(7, 7), slice(7, 300)):
        some = Statistics.of(crops_of(sizes[part]), (512,), captions[part], tokens[part], 77)
        total.add(json.loads(json.dumps(some.to_note())))
    assert (total.counts == whole.counts).all() and total.counts.sum() == len(QUANTITIES) * 300
    assert (total.rows, total.cut, total.enlarged) == (whole.rows, whole.cut, whole.enlarged)


def test_a_count_of_the_largest_part_fits():
    found = Statistics.of(crops_of([(64, 64)] * 70_000), (64,), ["x"] * 70_000, [3] * 70_000, 77)
    total = Statistics()
    total.add(found.to_note())
    assert total.histogram("width") == [[64, 70_000]]


@pytest.mark.parametrize(
    ("reason", "what"),
    [
        ("only 12x8 pixels", "only NxN pixels"),
        ("cannot be fetched: HTTP 404", "cannot be fetched: HTTP 404"),
        ("images/a cat 12.JPG: not an image", "not an image"),
        ("http://host/a%20b.jpg?size=1: empty file", "empty file"),
        ("https://host/image: not an image", "not an image"),
        (".DS_Store: not an image", "not an image"),
        ("damaged: cut (12 bytes not processed)", "damaged: cut (N bytes not processed)"),
        ("cannot be read: [Errno 13] Permission denied: '/a b/c'", "cannot be read: [Errno N] Permission denied: ..."),
        ("damaged: cannot identify <_io.BytesIO object at 0x7f12>", "damaged: cannot identify ..."),
        ("cannot be fetched: slower than 2.5 s", "cannot be fetched: slower than N s"),
        ("no caption", "no caption"),
    ],
)  # fmt: skip
def test_a_reason_is_told_without_what_is_special_about_a_row(reason, what):
    assert general(reason) == what


def test_reasons_are_counted_up_to_a_number_of_different_ones(monkeypatch):
    assert count_reasons(["only 1x2 pixels", "only 3x4 pixels", "no image"]) == {"only NxN pixels": 2, "no image": 1}
    monkeypatch.setattr(statistics, "MOST_REASONS", 2)
    total = Counter()
    for counts in ({"a": 1, "b": 2}, {"c": 3, "a": 4}, {"d": 5}):
        add_bounded(total, counts)
    assert total == {"a": 5, "b": 2, OTHER: 8}
