"""Parquet columns of tensors: writes the rows of a chunk, and reads a column of any list or tensor type."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import CheckFailed

if TYPE_CHECKING:
    import pyarrow as pa

TEXT = "caption"  # the column of the captions, and the field of those that are not encoded
Fields = dict[str, tuple[str, tuple[int, ...]]]  # {field of a batch: (its column, shape of a row)}


def to_parquet(chunk: dict[str, Any], columns: dict[str, np.ndarray], part: bytes | None = None) -> bytes:
    """Return a chunk as the bytes of a Parquet file with one row group.

    A row of numbers is one value of a fixed number of bytes: such columns are read at the speed of memory, lists and
    tensors a tenth as fast. The metadata of their fields has the data type and the shape of a row. That of the schema
    lists the bad rows, and those of "later", counts those that filters left out, and has the chunk's "notes". part: the
    bytes of an earlier file, whose rows stay, in the order of their numbers; the chunk's "later" takes the place of the
    file's.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    notes = {"bad_rows": chunk["bad"], **chunk.get("notes", {})}
    notes |= {f"{name}_rows": chunk[name] for name in ("later", "filtered") if chunk.get(name)}
    fields = [pa.field("key", pa.string()), pa.field(TEXT, pa.string())]
    arrays = [pa.array(chunk["keys"], pa.string()), pa.array(chunk["captions"], pa.string())]
    for name, values in columns.items():
        row, facts = values[0], {"dtype": str(values.dtype), "shape": json.dumps(values.shape[1:])}
        fields.append(pa.field(name, pa.binary(row.nbytes), metadata=facts))
        arrays.append(pa.Array.from_buffers(fields[-1].type, len(values), [None, pa.py_buffer(values.tobytes())]))
    table = pa.table(arrays, pa.schema(fields))
    if part is not None:
        earlier = pq.read_table(pa.BufferReader(part))
        notes["bad_rows"] = sorted(json.loads(earlier.schema.metadata[b"bad_rows"]) + chunk["bad"], key=row_number)
        filtered = Counter(json.loads(earlier.schema.metadata.get(b"filtered_rows", "{}")))
        filtered.update(chunk.get("filtered", {}))
        notes |= {"filtered_rows": dict(filtered)} if filtered else {}
        table = _merge([each for each in (earlier.replace_schema_metadata(), table) if len(each)] or [table])
    table = table.replace_schema_metadata({name: json.dumps(rows) for name, rows in notes.items()})
    options = {"compression": "zstd", "use_dictionary": [TEXT], "write_page_checksum": True}
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, row_group_size=max(1, len(table)), **options)
    return buffer.getvalue().to_pybytes()


def row_number(row: Sequence[str]) -> int:
    """Return the number in its source of a row whose first value is its key."""
    return int(row[0].rpartition(":")[2])


def _merge(tables: list[pa.Table]) -> pa.Table:
    """Return the rows of tables of the same columns, in the order of their numbers."""
    import pyarrow as pa

    table = pa.concat_tables(tables).combine_chunks()
    return table.take(np.argsort([row_number([key]) for key in table["key"].to_pylist()]))


def read_columns(table: pa.Table, fields: Fields, place: str) -> dict[str, np.ndarray]:
    """Return the columns of a table that `fields` names: {field: [B, *shape]}, float16 or float32; see from_column.

    Those of TEXT are str objects [B].
    """
    found = {}
    for field, (column, shape) in fields.items():
        where = f"{place}: column {column}"
        if field == TEXT:
            found[field] = to_texts(table[column], where)
        else:
            found[field] = from_column(table[column], shape, where, table.schema.field(column).metadata)
    return found


def to_texts(column: pa.ChunkedArray, place: str) -> np.ndarray:
    """Return a column of strings as objects [B]; raise CheckFailed if there are nulls, or if it holds others."""
    import pyarrow as pa

    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise CheckFailed(f"{place} holds {column.type}, not text: choose another column")
    if column.null_count:
        raise CheckFailed(f"{place} holds {column.null_count} null values: remove these rows")
    return np.array(column.to_pylist(), object)


def from_column(
    column: pa.Array | pa.ChunkedArray, shape: Sequence[int], place: str, facts: Mapping[bytes, bytes] | None = None
) -> np.ndarray:
    """Return a column of any list or tensor type, or of to_parquet, as [B, *shape]: float16 as it is, else float32.

    place: file and column, for error messages. facts: the metadata of its field. Raises CheckFailed if there are nulls
    or values that are not finite, or if rows differ in shape from each other or from `shape`.
    """
    import pyarrow as pa

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    count = len(array)
    if facts and pa.types.is_fixed_size_binary(array.type):
        values, found, nulls = _bytes(array, facts)
    else:
        inner, found, nulls = _innermost(array, place)
        values = inner.to_numpy(zero_copy_only=False)
    if nulls:
        raise CheckFailed(f"{place} holds {nulls} null values: remove these rows")
    values = as_floats(values)
    if len(found) > 1 and found != tuple(shape):
        raise CheckFailed(f"{place} holds rows of shape {found}, but the model takes {shape}: encode the data for it")
    if values.size != count * int(np.prod(shape)):
        size = values.size // max(count, 1)
        raise CheckFailed(f"{place} holds {size} values per row, but the model takes {shape}: encode the data for it")
    if not np.isfinite(values).all():
        raise CheckFailed(f"{place} holds values that are not finite: encode the data again")
    return values.reshape(count, *shape)


def as_floats(values: np.ndarray) -> np.ndarray:
    """Return numbers as float32, float16 as it is: half the memory until it is on the device."""
    return values if values.dtype == np.float16 else values.astype(np.float32)


def _bytes(array, facts):
    """Return (values of a column of to_parquet, shape of a row, number of nulls)."""
    width, (_, data), dtype = array.type.byte_width, array.buffers(), np.dtype(facts[b"dtype"].decode())
    values = np.frombuffer(data, dtype, len(array) * width // dtype.itemsize, array.offset * width)
    return values, tuple(json.loads(facts[b"shape"])), array.null_count


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
