"""columns.py: tensors to Parquet and back from every type of column, and columns that are refused."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common import errors
from common.storage import Folder, read_footer
from pretraining.columns import from_column, to_parquet

SHAPE = (4, 2, 3)


def numbers(rows=3, shape=SHAPE, dtype=np.float32):
    return np.arange(rows * int(np.prod(shape)), dtype=dtype).reshape(rows, *shape)


def ray_tensors(values):
    """What Ray Data writes tensors of one shape as."""
    from ray.data.extensions import ArrowTensorArray

    return ArrowTensorArray.from_numpy(values)


def ray_ragged_tensors(values):
    """What Ray Data writes tensors of several shapes as."""
    from ray.data.extensions import ArrowVariableShapedTensorArray

    rows = np.empty(len(values), dtype=object)
    rows[:] = list(values)
    return ArrowVariableShapedTensorArray.from_numpy(rows)


def flat(values):
    return list(values.reshape(len(values), -1))


COLUMNS = {
    "tensors": pa.FixedShapeTensorArray.from_numpy_ndarray,
    "half tensors": lambda values: pa.FixedShapeTensorArray.from_numpy_ndarray(values.astype(np.float16)),
    "lists": lambda values: pa.array(flat(values), pa.list_(pa.float32())),
    "large lists": lambda values: pa.array(flat(values), pa.large_list(pa.float32())),
    "lists of one size": lambda values: pa.array(flat(values), pa.list_(pa.float32(), 24)),
    "half lists": lambda values: pa.array(flat(values.astype(np.float16)), pa.list_(pa.float16(), 24)),
    "nested lists": lambda values: pa.array(values.tolist()),  # of float64
    "ray's tensors": ray_tensors,
    "ray's ragged tensors": ray_ragged_tensors,
}


@pytest.mark.parametrize("make", COLUMNS.values(), ids=COLUMNS)
def test_numbers_come_out_of_every_type_of_column(make):
    values = numbers()
    array = make(values)
    column = pa.chunked_array([array.slice(0, 1), array.slice(1)])
    for given in (array, column):
        found = from_column(given, SHAPE, "x")
        assert found.dtype in (np.float32, np.float16) and found.shape == values.shape
        assert np.array_equal(found, values)
    assert np.array_equal(from_column(column.slice(1, 1), SHAPE, "x"), values[1:2])


@pytest.mark.parametrize("make", COLUMNS.values(), ids=COLUMNS)
def test_numbers_come_back_from_a_file(make, tmp_path):
    values = numbers()
    pq.write_table(pa.table({"column": make(values)}), tmp_path / "file.parquet")
    column = pq.read_table(tmp_path / "file.parquet")["column"]
    assert np.array_equal(from_column(column.slice(1), SHAPE, "x"), values[1:])


def test_whole_numbers_come_out_as_floats():
    values = np.array([[3024, 4032, 0, 21, 896, 1001]], np.int32)
    found = from_column(pa.FixedShapeTensorArray.from_numpy_ndarray(values), (6,), "x")
    assert found.dtype == np.float32 and np.array_equal(found, values)


ROW = [1.0] * 24
BAD_COLUMNS = {
    "a null row": (pa.array([ROW, None, ROW]), "x holds 1 null values"),
    "a null number": (pa.array([ROW, [None, *ROW[1:]]]), "x holds 1 null values"),
    "a null row of one size": (pa.array([ROW, None], pa.list_(pa.float32(), 24)), "x holds 1 null values"),
    "other sizes": (pa.array([ROW[1:], ROW[1:]]), r"x holds 23 values per row, but the model takes \(4, 2, 3\)"),
    "rows of several sizes": (pa.array([ROW[1:], [*ROW, 1.0]]), "x holds rows of different lengths"),
    "one empty row": (pa.array([[*ROW, *ROW], []]), "x holds rows of different lengths"),
    "another order": (pa.FixedShapeTensorArray.from_numpy_ndarray(numbers(2, (2, 3, 4))), r"of shape \(2, 3, 4\), but"),
    "another order in lists": (pa.array(numbers(2, (2, 3, 4)).tolist()), r"of shape \(2, 3, 4\), but the model takes"),
    "not a number": (pa.array([[*ROW[1:], float("nan")]]), "x holds values that are not finite"),
    "infinity in float16": (pa.array([np.full(24, np.inf, np.float16)]), "x holds values that are not finite"),
    "text": (pa.array(["a", "b"]), "x holds string, not numbers"),
    "structs": (pa.array([{"bytes": "a"}]), "x holds struct<bytes: string>, not numbers"),
    "ray's tensors of another order": (pa.array([{"data": ROW, "shape": [2, 3, 4]}]), "rows of shape"),
    "lists of text": (pa.array([["a"] * 24]), "x holds string, not numbers"),
}


@pytest.mark.parametrize(("column", "words"), BAD_COLUMNS.values(), ids=BAD_COLUMNS)
def test_bad_columns_fail_the_check_in_one_line(column, words):
    with pytest.raises(errors.CheckFailed, match=words) as caught:
        from_column(column, SHAPE, "x")
    assert "\n" not in str(caught.value)


def test_a_part_is_one_row_group_and_knows_its_bad_rows(tmp_path):
    values = numbers(3).astype(np.float16)
    chunk = {"keys": ["a:0", "a:1", "a:2"], "captions": ["one", "zwei, drei", "четыре"], "bad": [["a:3", "no image"]]}
    columns = {"image_latents_16": values, "image_latents_16_std": values / 2, "caption_latents": numbers(3, (5, 2))}
    (tmp_path / "part.parquet").write_bytes(to_parquet(chunk, columns))
    names, groups, bad = read_footer(Folder(tmp_path), "part.parquet")
    assert names == ["key", "caption", *columns] and groups == [[0, 3]] and bad == chunk["bad"]
    table = pq.read_table(tmp_path / "part.parquet")
    assert table["key"].to_pylist() == chunk["keys"] and table["caption"].to_pylist() == chunk["captions"]
    for name, values in columns.items():
        facts = table.schema.field(name).metadata
        assert table[name].type == pa.binary(values[0].nbytes) and facts[b"dtype"].decode() == str(values.dtype)
        found = from_column(table[name], values.shape[1:], name, facts)
        assert np.array_equal(found, values) and found.dtype == values.dtype
        assert np.array_equal(from_column(table[name].slice(1, 1), values.shape[1:], name, facts), values[1:2])
        with pytest.raises(errors.CheckFailed, match="but the model takes"):
            from_column(table[name], (values[0].size + 1,), name, facts)


def test_a_part_of_bad_rows_alone_is_a_file_too(tmp_path):
    chunk = {"keys": [], "captions": [], "bad": [["a:0", "no image"]]}
    (tmp_path / "part.parquet").write_bytes(to_parquet(chunk, {}))
    assert read_footer(Folder(tmp_path), "part.parquet") == (["key", "caption"], [[0, 0]], chunk["bad"])


def test_rows_are_added_to_a_part_in_their_order(tmp_path):
    def chunk(numbers, bad=(), later=()):
        rows = {"keys": [f"x:0:{number}" for number in numbers], "captions": [f"row {number}" for number in numbers]}
        return {**rows, "bad": [[f"x:0:{n}", "bad"] for n in bad], "later": [[f"x:0:{n}", "busy"] for n in later]}

    def columns(numbers):
        return (
            {"latents": np.array(numbers, np.float16)[:, None, None] * np.ones((2, 3), np.float16)} if numbers else {}
        )

    whole = to_parquet(chunk([0, 2, 3, 9, 10], [1, 4]), columns([0, 2, 3, 9, 10]))
    for numbers in ([0, 3, 10], []):
        added = [number for number in (0, 2, 3, 9, 10) if number not in numbers]
        first = to_parquet(chunk(numbers, [4], [1, *added]), columns(numbers))
        assert to_parquet(chunk(added, [1]), columns(added), first) == whole
    part = to_parquet(chunk([0], [], [1, 2]), columns([0]))
    again = pq.read_table(pa.BufferReader(to_parquet(chunk([], [1], [2]), {}, part)))
    assert again["key"].to_pylist() == ["x:0:0"]
    assert again.schema.metadata == {b"bad_rows": b'[["x:0:1", "bad"]]', b"later_rows": b'[["x:0:2", "busy"]]'}
