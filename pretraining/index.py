"""The index of a data set of latents: which parts it has, with their rows, sizes and SHA-256, in arrays.

preprocess.py writes it while it runs, one file `_index-NNNNN.parquet` for every PARTS_PER_FILE parts in the order in
which they are done. With it nothing has to list the parts or to open all of them: eight million take some seconds.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from common.errors import CheckFailed
from common.storage import Folder, join, open_parquet
from pretraining.statistics import count_reasons

PARTS_PER_FILE = 10_000
OWN_NOTES = ("statistics", "pictures")
FLUSH_EVERY = 60.0  # seconds after which new parts are in the index: a killed run has to read only later ones
CHECKED = 1000  # parts whose sizes are compared before they are used
THREADS = 16  # files that are opened at the same time
READERS = 2  # files of an index that are read at the same time: each thread of pyarrow's keeps the memory it has used
NOTES = 1000  # parts whose notes are in memory at a time
COUNTS = ("rows", "bad", "later", "filtered")  # rows that are good, bad, to be fetched later, left out by filters
NUMBERS = {name: "int32" for name in ("source", "chunk", *COUNTS)} | {"bytes": "int64"}  # columns and their types
PART = re.compile(r"part-(\d{6,})-(\d{4,})\.parquet")
FILE = re.compile(r"_index-\d{5,}\.parquet")

Record = dict[str, Any]  # of a part: the numbers, "sha256" (hex digits), "notes" (JSON, see describe_part)


def part_name(source: int, chunk: int) -> str:
    """Return the name of the file for a chunk of a source; names sort in the order of the rows."""
    return f"part-{source:06d}-{chunk:04d}.parquet"


def file_name(number: int) -> str:
    """Return the name of a file of the index; readers of a folder of Parquet files pass over names with _."""
    return f"_index-{number:05d}.parquet"


def describe_part(name: str, data: bytes) -> Record:
    """Return the record of a part; data: its content, of columns.to_parquet.

    Its "notes" are {"bad": [[key, reason], ...], "later": likewise, "filtered": {reason: number of rows}, "reasons":
    {general reason: number of rows in "bad" and "later"}}, and those of own_notes.
    """
    found = PART.fullmatch(name)
    assert found, name
    rows, written = _read_metadata(data)
    notes = {note: json.loads(written.get(f"{note}_rows".encode(), "[]")) for note in ("bad", "later")}
    notes["filtered"] = json.loads(written.get(b"filtered_rows", "{}"))
    if faults := notes["bad"] + notes["later"]:
        notes["reasons"] = count_reasons(reason for _, reason in faults)
    source, chunk = map(int, found.groups())
    counts = rows, len(notes["bad"]), len(notes["later"]), sum(notes["filtered"].values())
    numbers = {"source": source, "chunk": chunk, **dict(zip(COUNTS, counts, strict=True)), "bytes": len(data)}
    digest = hashlib.sha256(data).hexdigest()
    return {**numbers, "sha256": digest, "notes": json.dumps(notes | own_notes(data))}


def own_notes(data: bytes) -> dict[str, Any]:
    """Return what parts.PartWriter noted of the rows of a part: "statistics" and "pictures", if it did."""
    written = _read_metadata(data)[1]
    return {note: json.loads(written[note.encode()]) for note in OWN_NOTES if note.encode() in written}


def _read_metadata(data):
    """Return (number of rows, metadata of the schema) of a part."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(pa.BufferReader(data)) as parquet:
        return parquet.metadata.num_rows, parquet.schema_arrow.metadata or {}


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class Index:
    """The parts of a data set, sorted by source and chunk: arrays [P], sha256 [P, 32] uint8.

    Training needs the first three only; the others are empty if they were not read.
    """

    source: np.ndarray
    chunk: np.ndarray
    rows: np.ndarray
    bad: np.ndarray
    later: np.ndarray
    filtered: np.ndarray
    bytes: np.ndarray
    sha256: np.ndarray

    def __len__(self) -> int:
        return len(self.source)

    def name(self, part: int) -> str:
        """Return the name of the file of a part."""
        return part_name(int(self.source[part]), int(self.chunk[part]))

    def only(self, mask: np.ndarray) -> Index:
        """Return the parts where `mask` [P] is true."""
        arrays = (getattr(self, each.name) for each in fields(self))
        return Index(*(array[mask] if len(array) else array for array in arrays))

    @property
    def digest(self) -> str:
        """SHA-256 of the parts' names, numbers of rows and contents."""
        digest = hashlib.sha256()
        for array in (self.source, self.chunk, self.rows, self.sha256):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def read_index(folder: Folder, names: Iterable[str], columns: Iterable[str] = (*NUMBERS, "sha256")) -> Index:
    """Return the index in files of a data set; of parts that are named twice the later record counts.

    columns: those to read, at least source, chunk and rows. Raises CheckFailed if a file is missing or damaged.
    """
    names, columns = list(names), [*columns]
    with ThreadPoolExecutor(READERS) as pool:
        found = list(pool.map(partial(_read_arrays, folder, columns=("source", "chunk")), names))
        places = _find_places(found)
        arrays = {name: np.empty(0, kind) for name, kind in NUMBERS.items()} | {"sha256": np.empty((0, 32), np.uint8)}
        count = sum(int((own >= 0).sum()) for own in places)
        arrays |= {name: np.empty((count, *arrays[name].shape[1:]), arrays[name].dtype) for name in columns}

        def fill(name: str, own: np.ndarray) -> None:
            """Put the columns of a file to their places: nothing but them is in memory."""
            for column, values in _read_arrays(folder, name, tuple(columns)).items():
                arrays[column][own[own >= 0]] = values[own >= 0]

        list(pool.map(fill, names, places))
    return Index(**arrays)


def _find_places(found: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
    """Return the places in an index of the parts in each file, -1 for those that a later record replaces."""
    if not found:
        return []
    source, chunk = (np.concatenate([each[name] for each in found]) for name in ("source", "chunk"))
    order = np.lexsort((chunk, source))  # stable: later records stay behind earlier ones
    source, chunk = source[order], chunk[order]
    is_last = np.append((source[1:] != source[:-1]) | (chunk[1:] != chunk[:-1]), True)
    places = np.full(len(order), -1, np.int32)
    places[order[is_last]] = np.arange(is_last.sum())
    return np.split(places, np.cumsum([len(each["source"]) for each in found])[:-1])


def check_parts(folder: Folder, entry: Mapping[str, Any]) -> Index:
    """Return the index of a finished data set, and raise CheckFailed if it or a part of it is not as it was written.

    entry: {"files", "sha256"} of its metadata.json. The sizes of CHECKED parts, evenly spaced, are compared, so of all
    if there are not more.
    """
    index = read_index(folder, entry["files"])
    if index.digest != entry["sha256"]:
        raise CheckFailed(f"{folder.location}: metadata.json and the index beside it differ: encode the data again")
    chosen = np.unique(np.linspace(0, len(index) - 1, CHECKED).round().astype(int)) if len(index) else np.empty(0, int)
    names, sizes = list(map(index.name, chosen.tolist())), index.bytes[chosen].tolist()
    for name, found, size in zip(names, folder.sizes(names), sizes, strict=True):
        place = join(folder.location, name)
        if found is None:
            raise CheckFailed(f"{place} is missing: encode the data again")
        if found != size:
            raise CheckFailed(f"{place} is damaged, its size is not {size} bytes: encode the data again")
    return index


def read_notes(folder: Folder, names: Iterable[str], index: Index) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (part, notes) of each part of an index, in the order of its files; NOTES of them are in memory."""
    keys, is_new = (index.source.astype(np.int64) << 32) + index.chunk, np.ones(len(index), bool)
    for arrays in _read_some(folder, names if len(index) else (), ("source", "chunk", "sha256", "notes")):
        places = np.searchsorted(keys, (arrays["source"].astype(np.int64) << 32) + arrays["chunk"])
        places = np.minimum(places, len(index) - 1)
        is_wanted = is_new[places] & (index.sha256[places] == arrays["sha256"]).all(axis=1)  # no earlier record
        is_new[places[is_wanted]] = False
        for place, notes in zip(places[is_wanted].tolist(), arrays["notes"][is_wanted], strict=True):
            yield place, json.loads(notes)


def read_records(folder: Folder, name: str) -> list[Record]:
    """Return the records in a file of an index."""
    with open_parquet(folder, name) as parquet:
        rows = parquet.read().to_pylist()
    return [row | {"sha256": row["sha256"].hex()} for row in rows]


def _read_arrays(folder: Folder, name: str, columns: tuple[str, ...]) -> dict[str, np.ndarray]:
    with open_parquet(folder, name) as parquet:
        table = parquet.read(columns=list(columns))
        return _to_arrays(dict(zip(columns, (table[column].combine_chunks() for column in columns), strict=True)))


def _read_some(folder: Folder, names: Iterable[str], columns: tuple[str, ...]) -> Iterator[dict[str, np.ndarray]]:
    """Yield the columns of NOTES parts at a time, of all files."""
    for name in names:
        with open_parquet(folder, name) as parquet:
            for batch in parquet.iter_batches(NOTES, columns=list(columns)):
                yield _to_arrays({column: batch[column] for column in columns})


def _to_arrays(columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return arrays of Arrow as copies, which do not keep each other in memory."""
    found = {}
    for name, array in columns.items():
        if name == "sha256":
            digests = np.frombuffer(array.buffers()[1], np.uint8).reshape(-1, 32)
            found[name] = digests[array.offset : array.offset + len(array)].copy()
        else:
            found[name] = np.array(array.to_numpy(zero_copy_only=False))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Writing


class IndexWriter:
    """Adds records of parts to the index of a folder; it goes on with file `number`, which holds `records` so far."""

    def __init__(self, folder: Folder, number: int = 0, records: Iterable[Record] = ()) -> None:
        self.folder, self.number, self.written = folder, number, time.monotonic()
        self.pending = {(record["source"], record["chunk"]): record for record in records}

    @property
    def files(self) -> list[str]:
        """The names of all files of the index."""
        return list(map(file_name, range(self.number + bool(self.pending))))

    def add(self, record: Record) -> None:
        """Add a part that is written; it is in the index after FLUSH_EVERY at the latest."""
        self.pending[record["source"], record["chunk"]] = record
        if len(self.pending) == PARTS_PER_FILE:
            self.flush()
            self.pending, self.number = {}, self.number + 1
        elif time.monotonic() - self.written > FLUSH_EVERY:
            self.flush()

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.flush()

    def flush(self) -> None:
        """Write the newest file with all its records so far."""
        if self.pending:
            self.folder.write(file_name(self.number), to_bytes(self.pending.values()))
        self.written = time.monotonic()


def to_bytes(records: Iterable[Record]) -> bytes:
    """Return records as the content of an index file, sorted by source and chunk."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = sorted(records, key=lambda record: (record["source"], record["chunk"]))
    columns = {name: pa.array([record[name] for record in records], kind) for name, kind in NUMBERS.items()}
    columns["sha256"] = pa.array([bytes.fromhex(record["sha256"]) for record in records], pa.binary(32))
    columns["notes"] = pa.array([record["notes"] for record in records], pa.string())
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), buffer, compression="zstd", use_dictionary=False, write_page_checksum=True)
    return buffer.getvalue().to_pybytes()
