"""Parquet columns of tensors: writes the rows of a chunk, and reads a column of any list or tensor type."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import CheckFailed

if TYPE_CHECKING:
    import pyarrow as pa


def to_parquet(chunk: dict[str, Any], columns: dict[str, np.ndarray], part: bytes | None = None) -> bytes:
    """Return a chunk as the bytes of a Parquet file with one row group.

    The schema's metadata lists the bad rows, and those of "later", and counts those that filters left out. part: the
    bytes of an earlier file, whose rows stay, in the order of their numbers; the chunk's "later" takes the place of the
    file's.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    notes = {"bad_rows": chunk["bad"]}
    notes |= {f"{name}_rows": chunk[name] for name in ("later", "filtered") if chunk.get(name)}
    arrays = {"key": pa.array(chunk["keys"], pa.string()), "caption": pa.array(chunk["captions"], pa.string())}
    for name, values in columns.items():
        arrays[name] = pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(values))
    table = pa.table(arrays)
    if part is not None:
        earlier = pq.read_table(pa.BufferReader(part))
        notes["bad_rows"] = sorted(json.loads(earlier.schema.metadata[b"bad_rows"]) + chunk["bad"], key=row_number)
        filtered = Counter(json.loads(earlier.schema.metadata.get(b"filtered_rows", "{}")))
        filtered.update(chunk.get("filtered", {}))
        notes |= {"filtered_rows": dict(filtered)} if filtered else {}
        table = _merge([each for each in (earlier.replace_schema_metadata(), table) if len(each)] or [table])
    table = table.replace_schema_metadata({name: json.dumps(rows) for name, rows in notes.items()})
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd", row_group_size=max(1, len(table)), write_page_checksum=True)
    return buffer.getvalue().to_pybytes()


def row_number(row: Sequence[str]) -> int:
    """Return the number in its source of a row whose first value is its key."""
    return int(row[0].rpartition(":")[2])


def _merge(tables: list[pa.Table]) -> pa.Table:
    """Return the rows of tables of the same columns, in the order of their numbers."""
    import pyarrow as pa

    table = pa.concat_tables(tables).combine_chunks()
    return table.take(np.argsort([row_number([key]) for key in table["key"].to_pylist()]))


def from_column(column: pa.Array | pa.ChunkedArray, shape: Sequence[int], place: str) -> np.ndarray:
    """Return a column of any list or tensor type as float32 [B, *shape].

    place: file and column, for error messages. Raises CheckFailed if there are nulls or values that are not finite, or
    if rows differ in shape from each other or from `shape`.
    """
    import pyarrow as pa

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    count = len(array)
    array, found, nulls = _innermost(array, place)
    if nulls:
        raise CheckFailed(f"{place} holds {nulls} null values: remove these rows")
    values = array.to_numpy(zero_copy_only=False).astype(np.float32)
    if len(found) > 1 and found != tuple(shape):
        raise CheckFailed(f"{place} holds rows of shape {found}, but the model takes {shape}: encode the data for it")
    if values.size != count * int(np.prod(shape)):
        size = values.size // max(count, 1)
        raise CheckFailed(f"{place} holds {size} values per row, but the model takes {shape}: encode the data for it")
    if not np.isfinite(values).all():
        raise CheckFailed(f"{place} holds values that are not finite: encode the data again")
    return values.reshape(count, *shape)


def _innermost(array, place):
    """Return (values inside nested lists or tensors, shape of a row, number of nulls)."""
    import pyarrow as pa

    sides, tensor, nulls = [], None, array.null_count  # lengths of nested lists; shape of a tensor
    while not (pa.types.is_floating(array.type) or pa.types.is_integer(array.type)):
        if isinstance(array, pa.ExtensionArray):
            tensor, array = getattr(array.type, "shape", None), array.storage
        elif pa.types.is_struct(array.type) and {"data", "shape"} <= set(array.type.names):
            # Ray Data's type for tensors whose rows may differ in shape.
            tensor, array = next(iter(array.field("shape").to_pylist()), None), array.field("data")
        elif hasattr(array, "value_lengths"):
            sides, array = sides + _lengths(array, place), array.flatten()
        else:
            raise CheckFailed(f"{place} holds {array.type}, not numbers: choose another column")
        nulls += array.null_count
    return array, tuple(tensor or sides), nulls


def _lengths(array, place):
    """Return [length of the lists in an array], [] if it holds none; raise CheckFailed if their lengths differ."""
    lengths = array.value_lengths().drop_null().unique().to_pylist()
    if len(lengths) > 1:
        raise CheckFailed(f"{place} holds rows of different lengths: remove those that differ")
    return lengths
