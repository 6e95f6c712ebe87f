"""The parts of a data set of latents: one Parquet file per chunk of `rows_per_file` rows of a source."""

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from common.folders import check_on_node
from common.outages import patient
from common.storage import Folder, is_remote, open_parquet, read_footer
from pretraining.columns import row_number, to_parquet
from pretraining.index import (
    FILE,
    PART,
    PARTS_PER_FILE,
    THREADS,
    Index,
    IndexWriter,
    Record,
    describe_part,
    own_notes,
    part_name,
    read_index,
    read_records,
)
from pretraining.latents import LatentEncoder
from pretraining.loader import Batch, Loader
from pretraining.pictures import choose_rows, thumbnails
from pretraining.rows import read_rows
from pretraining.sources import Chunks, Source, Sources
from pretraining.statistics import Statistics

MOST_ITEMS = 10_000  # an item takes the driver some kilobytes

Item = dict[str, Any]  # see _make_items


def resume(folder: Folder) -> tuple[Index, IndexWriter]:
    """Return (the parts that are written, the writer of further records) of a data set that is not finished.

    Parts that are not in the index, because a run was killed, are read for it; records of parts that are missing or of
    another size do not count.
    """
    sizes = folder.names(".parquet")
    files = [name for name in sizes if FILE.fullmatch(name)]
    index = read_index(folder, files)
    names = list(map(index.name, range(len(index))))
    is_there = np.array([sizes.get(name) for name in names], float) == index.bytes  # nan, which equals nothing: missing
    index, listed = index.only(is_there), set(itertools.compress(names, is_there))
    newest = [record for name in files[-1:] for record in read_records(folder, name)]
    is_full = len(newest) >= PARTS_PER_FILE
    newest = [] if is_full else [each for each in newest if part_name(each["source"], each["chunk"]) in listed]
    writer = IndexWriter(folder, len(files) - bool(files and not is_full), newest)
    missing = [name for name in sizes if PART.fullmatch(name) and name not in listed]
    if not missing:
        return index, writer
    with ThreadPoolExecutor(THREADS) as pool, writer:
        for record in pool.map(partial(read_part, folder), missing):
            writer.add(record)
    return resume(folder)


@patient
def read_part(folder: Folder, name: str) -> Record:
    """Return the record of a part from its content; raise CheckFailed if it is damaged."""
    read_footer(folder, name)  # says what is wrong
    return describe_part(name, folder.read(name) or b"")


def missing_parts(sources: Sources, index: Index, rows_per_file: int) -> list[Item]:
    """Return the items of load_chunks for all chunks that have no part.

    They also have "shown": {number of a source: numbers of its rows that are for the contact sheet}.
    """
    chunks = Chunks(sources.rows, rows_per_file)
    is_asked = np.ones(len(chunks), bool)
    is_asked[chunks.numbers(index.source, index.chunk)] = False
    items, shown = _make_items(sources, chunks, is_asked), choose_rows(sources.rows)
    for item in items:
        item["shown"] = {number: shown[number] for number in set(item["numbers"].tolist()) & shown.keys()}
    return items


def parts_to_complete(sources: Sources, index: Index, rows_per_file: int) -> list[Item]:
    """Return the items of load_again for all parts with rows to fetch again."""
    chunks, parts = Chunks(sources.rows, rows_per_file), index.only(index.later > 0)
    is_asked = np.zeros(len(chunks), bool)
    is_asked[chunks.numbers(parts.source, parts.chunk)] = True
    return _make_items(sources, chunks, is_asked)


def _make_items(sources: Sources, chunks: Chunks, is_asked: np.ndarray) -> list[Item]:
    """Return items, at most MOST_ITEMS, for some of all chunks; is_asked: which, [N].

    An item is {"sources": some Sources, "numbers": their numbers, [S], "is_asked": which of their chunks to load, [N]}.
    """
    is_wanted = np.logical_or.reduceat(is_asked, chunks.ends - chunks.counts)  # of the sources
    is_asked = is_asked[np.repeat(is_wanted, chunks.counts)]
    groups = np.array_split(np.flatnonzero(is_wanted), min(max(1, is_wanted.sum()), MOST_ITEMS))
    ends = np.cumsum([chunks.counts[group].sum() for group in groups])
    return [
        {"sources": sources.only(group), "numbers": group, "is_asked": asked}
        for group, asked in zip(groups, np.split(is_asked, ends[:-1]), strict=True)
        if len(group)
    ]


def _sources_of(item: Item, rows_per_file: int) -> Iterator[tuple[int, Source, list[int]]]:
    """Yield (its number, source, its chunks to load) of each source of an item."""
    ends = Chunks(item["sources"].rows, rows_per_file).ends
    asked = np.split(item["is_asked"], ends[:-1])
    for number, source, chunks in zip(item["numbers"].tolist(), item["sources"], asked, strict=True):
        yield number, source, np.flatnonzero(chunks).tolist()


def load_chunks(item: Item, loader: Loader, rows_per_file: int) -> Iterator[dict[str, Any]]:
    """Yield the chunks that an item asks for, each as returned by Loader.

    Each has also the "name" of its part, and "shown": numbers of its rows that are for the contact sheet.
    """
    for number, source, missing in _sources_of(item, rows_per_file):
        chunks = loader.load_all(source, _batches(source, missing, rows_per_file))
        for chunk, loaded in zip(missing, chunks, strict=True):
            shown = [row for row in item["shown"].get(number, []) if row // rows_per_file == chunk]
            yield {"name": part_name(number, chunk), "shown": shown, **loaded}


def _batches(source: Source, chunks: list[int], rows_per_file: int) -> Iterator[Batch]:
    """Yield (numbers of its rows, its rows) of each chunk; adjacent chunks are read in one pass."""
    for _, adjacent in itertools.groupby(enumerate(chunks), key=lambda pair: pair[1] - pair[0]):
        some = [chunk for _, chunk in adjacent]
        read = _Reader(source, some[-1] * rows_per_file + rows_per_file).read
        for first in (chunk * rows_per_file for chunk in some):
            rows = read(first, rows_per_file)
            yield range(first, first + len(rows)), rows


class _Reader:
    """Reads rows of a source one after the other, up to row `end`; begins anew where a store did not answer."""

    def __init__(self, source: Source, end: int) -> None:
        self.source, self.end = source, end
        self.rows: Iterator[dict[str, Any]] | None = None

    @patient
    def read(self, first: int, count: int) -> list[dict[str, Any]]:
        """Return `count` rows from row `first` on, the one after the last that was read."""
        rows = self.rows or read_rows(self.source, first, self.end - first)
        self.rows = None
        some = list(itertools.islice(rows, count))
        if not (some and "damaged" in some[-1]):  # the next rows are what another run would find there
            self.rows = rows
        return some


def load_again(item: Item, loader: Loader, rows_per_file: int, output_dir: str) -> Iterator[dict[str, Any]]:
    """Yield chunks of the rows that could not be fetched, with the "name" of their part and "is_rest".

    The parts that an item asks for are in the folder `output_dir`; each lists such rows.
    """
    if not is_remote(output_dir):
        check_on_node(output_dir, "--output_dir")
    for number, source, chunks in _sources_of(item, rows_per_file):
        left = {chunk: _later_rows(output_dir, part_name(number, chunk)) for chunk in chunks}
        loaded = loader.load_all(source, _rest(source, left, rows_per_file))
        for chunk, rest in zip(left, loaded, strict=True):
            yield {"name": part_name(number, chunk), "is_rest": True, **rest}


def _rest(source: Source, left: dict[int, list[int]], rows_per_file: int) -> Iterator[Batch]:
    """Yield (numbers of its rows, its rows) of chunks of a source, of some rows; left: {chunk: numbers of the rows}."""
    batches = _batches(source, list(left), rows_per_file)
    for (numbers, rows), wanted in zip(batches, left.values(), strict=True):
        yield wanted, [row for number, row in zip(numbers, rows, strict=True) if number in wanted]


@patient
def _later_rows(output_dir: str, name: str) -> list[int]:
    """Return the numbers of the rows of a part that could not be fetched."""
    with open_parquet(Folder(output_dir), name) as parquet:
        notes = (parquet.schema_arrow.metadata or {}).get(b"later_rows", "[]")
    return list(map(row_number, json.loads(notes)))


class PartWriter:
    """Encodes chunks and writes each as a part of the data set; runs in an actor.

    encoder_options: of LatentEncoder.
    """

    def __init__(self, output_dir: str, **encoder_options: Any) -> None:
        if not is_remote(output_dir):
            check_on_node(output_dir, "--output_dir")  # which the driver has made: else a part would stay on this node
        self.encoder, self.folder = LatentEncoder(**encoder_options), Folder(output_dir)

    def __call__(self, chunk: dict[str, Any]) -> Record:
        """Write a chunk, whole or not at all, and return the record of its part; one of load_again is added to it."""
        name = chunk["name"]
        data = self.folder.read(name) if chunk.get("is_rest") else None
        if data is None or chunk["keys"] or chunk["bad"] or chunk["filtered"]:
            columns = self.encoder(chunk) if chunk["keys"] else {}
            data = to_parquet({**chunk, "notes": self._describe(chunk, data)}, columns, data)
            self.folder.write(name, data)
        return describe_part(name, data)

    def _describe(self, chunk: dict[str, Any], part: bytes | None) -> dict[str, Any]:
        """Return index.own_notes of a chunk, with those of the part that it is added to."""
        notes = own_notes(part) if part else {}
        if not chunk["keys"]:
            return notes
        tokens, resolutions = self.encoder.count_tokens(chunk["captions"]), self.encoder.resolutions
        statistics = Statistics.of(chunk["crops"], resolutions, chunk["captions"], *tokens)
        if "statistics" in notes:
            statistics.add(notes["statistics"])
        notes["statistics"] = statistics.to_note()
        if chunk.get("shown"):
            notes["pictures"] = thumbnails(chunk, max(resolutions))
        return notes
