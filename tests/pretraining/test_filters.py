"""filters.py: conditions on the columns of Parquet files."""

import argparse

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import noise_png
from raw_files import make_tar, write_parquet

from common import errors
from pretraining.filters import check_columns, columns_of, condition, meets
from pretraining.loader import Loader
from pretraining.raw_data import list_sources
from pretraining.rows import read_rows

TABLE = pa.table(
    {
        "score": [5.5, 4.0, None, 9.0],
        "unsafe": [0.0, 0.5, 0.0, 0.2],
        "license": ["cc", "by", None, "cc"],
        "is_good": [True, False, None, True],
    }
)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("score >= 5 and unsafe < 0.1", [0]),
        ("not score >= 5", [1]),  # of a missing value nothing is known
        ("score > 5 or license == 'by'", [0, 1, 3]),
        ("unsafe < 1 or score > 5", [0, 1, 2, 3]),
        ("0.1 <= unsafe < 0.5", [3]),
        ("-unsafe < 0", [1, 3]),
        ('license != "cc"', [1]),
        ("is_good and (score == 9 or score == 5.5)", [0, 3]),
    ],
)
def test_a_condition_chooses_rows(text, rows):
    check_columns(condition(text), TABLE.schema, "x")
    for table in (TABLE, TABLE.to_batches()[0]):
        assert [row for row, is_met in enumerate(meets(text, table, "x")) if is_met] == rows


@pytest.mark.parametrize(
    "text",
    [
        *("", "score >", "score\0", "__import__('os').system('true') == 0", "score.real > 1", "score in (1, 2)"),
        *("score + 1 > 2", "lambda: 1", "score is None", "b'' < score", "[score]", "f'{score}' > 'x'", "(s := 1) > 0"),
    ],
)
def test_what_is_no_condition_is_a_usage_error(text):
    with pytest.raises(argparse.ArgumentTypeError):
        condition(text)


@pytest.mark.parametrize("text", ["license > 5", "5", "1 < 2", "score", "score and is_good", "-license > 1"])
def test_a_condition_that_does_not_fit_the_types_is_bad_input(text):
    with pytest.raises(errors.BadInput, match=r"--where .* does not fit the columns of x\.parquet"):
        check_columns(condition(text), TABLE.schema, "x.parquet")


def test_a_column_that_is_missing_is_bad_input():
    assert columns_of("b > 1 and a < b") == ["a", "b"]
    with pytest.raises(errors.BadInput, match="x has no column b of --where: its columns are score, unsafe"):
        check_columns("b > 1 and score < b", TABLE.schema, "x")


def test_rows_that_do_not_meet_the_condition_keep_their_number(tmp_path):
    """In any range of rows, also without another column than those of the condition."""
    write_parquet(tmp_path / "x.parquet", [str(i) for i in range(200)], [f"caption {i % 3}" for i in range(200)])
    (source,) = list_sources(str(tmp_path), where="caption != 'caption 1'")
    whole = list(read_rows(source, 0, 200))
    assert [row["image"] for row in whole] == [str(i) if i % 3 != 1 else None for i in range(200)]
    assert [row.get("filtered") for row in whole] == ["--where" if i % 3 == 1 else None for i in range(200)]
    assert list(read_rows(source, 60, 70)) == whole[60:130]


def test_a_condition_is_for_parquet_files(tmp_path):
    (tmp_path / "x.tar").write_bytes(make_tar([("a.txt", b"x")]))
    with pytest.raises(errors.BadInput, match=r"--where is for the columns of Parquet files, --input .* holds none"):
        list_sources(str(tmp_path), where="a > 1")


def test_filtered_rows_are_counted_by_reason_and_are_not_bad(tmp_path):
    sizes = [(112, 80), (160, 40), (36, 36), (40, 44), (240, 240)]
    images = [noise_png(0, *size) for size in sizes] + [b"no image"]
    table = pa.table({"image": images, "caption": list("abcdef"), "score": [5, 5, 5, 5, 1, 5]})
    pq.write_table(table, tmp_path / "x.parquet")
    (source,) = list_sources(str(tmp_path), where="score > 1")
    crops = {"resolutions": (16,), "random_crop": False, "random_flip": False, "seed": 0}
    chunk = Loader(**crops, timeout=5, retries=0, min_side=40, max_aspect=2.0)(source, 0, 9)
    assert chunk["captions"] == ["a", "d"] and [key for key, _ in chunk["bad"]] == ["x.parquet:0:5"]
    assert chunk["filtered"] == {"aspect > 2": 1, "side < 40": 1, "--where": 1}
    assert len(chunk["pixels_16"]) == len(chunk["crops"]) == 2
    assert Loader(**crops, timeout=5, retries=0)(source, 0, 4)["filtered"] == {}
