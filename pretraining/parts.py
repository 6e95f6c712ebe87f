"""The parts of a data set of latents: one Parquet file per chunk of `rows_per_file` rows of a source."""

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from common.folders import check_on_node
from common.outages import patient
from common.storage import Folder, is_remote, open_parquet
from pretraining.columns import row_number, to_parquet
from pretraining.latents import FOOTER_THREADS, LatentEncoder
from pretraining.loader import Batch, Loader
from pretraining.raw_data import Source, read_rows

# {name: (number of good rows, bad rows, rows that can perhaps be fetched later, {reason: number of filtered rows})};
# a row is [key, reason]
Parts = dict[str, tuple[int, list[list[str]], list[list[str]], dict[str, int]]]


def part_name(source_number: int, chunk_number: int) -> str:
    """Return the name of the file for a chunk of a source; names sort in the order of the rows."""
    return f"part-{source_number:06d}-{chunk_number:04d}.parquet"


def written_parts(folder: Folder) -> Parts:
    """Return the Parts in a folder."""
    names = [name for name in folder.names(".parquet") if re.fullmatch(r"part-\d{6,}-\d{4,}\.parquet", name)]
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        return dict(zip(names, pool.map(partial(_read_notes, folder), names), strict=True))


def _read_notes(folder: Folder, name: str) -> tuple[int, list, list, dict]:
    with open_parquet(folder, name) as parquet:
        notes = parquet.schema_arrow.metadata or {}
        bad, later = (json.loads(notes.get(note, "[]")) for note in (b"bad_rows", b"later_rows"))
        return parquet.metadata.num_rows, bad, later, json.loads(notes.get(b"filtered_rows", "{}"))


def missing_parts(sources: list[Source], written: dict[str, Any], rows_per_file: int) -> list[dict[str, Any]]:
    """Return the items of load_chunks for all sources that have a part that is not written."""
    items = []
    for number, source in enumerate(sources):
        names = [part_name(number, chunk) for chunk in range(-(-source.num_rows // rows_per_file))]
        done = [name for name in names if name in written]
        if len(done) < len(names):
            items.append({"source": vars(source), "number": number, "done": done})
    return items


def load_chunks(item: dict[str, Any], loader: Loader, rows_per_file: int) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a source that are not written, each as returned by Loader, with the "name" of its part.

    item: {"source": a Source as a dict, "number": its number, "done": names of the parts that are written}.
    """
    source = Source(**item["source"])
    missing = [
        chunk
        for chunk in range(-(-source.num_rows // rows_per_file))
        if part_name(item["number"], chunk) not in item["done"]
    ]
    chunks = loader.load_all(source, _batches(source, missing, rows_per_file))
    for chunk, loaded in zip(missing, chunks, strict=True):
        yield {"name": part_name(item["number"], chunk), **loaded}


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
        self.rows = rows
        return some


def parts_to_complete(sources: list[Source], written: Parts, rows_per_file: int) -> list[dict[str, Any]]:
    """Return the items of load_again for all sources that have a part with rows to fetch again."""
    items = []
    for number, source in enumerate(sources):
        names = [part_name(number, chunk) for chunk in range(-(-source.num_rows // rows_per_file))]
        left = {i: list(map(row_number, written[name][2])) for i, name in enumerate(names) if written[name][2]}
        if left:
            items.append({"source": vars(source), "number": number, "left": left})
    return items


def load_again(item: dict[str, Any], loader: Loader, rows_per_file: int) -> Iterator[dict[str, Any]]:
    """Yield chunks of the rows of a source that could not be fetched, with the "name" of their part and "is_rest".

    item: {"source": a Source as a dict, "number": its number, "left": {number of a chunk: numbers of its rows}}.
    """
    source, left = Source(**item["source"]), item["left"]

    def batches() -> Iterator[Batch]:
        for (numbers, rows), wanted in zip(_batches(source, list(left), rows_per_file), left.values(), strict=True):
            yield wanted, [row for number, row in zip(numbers, rows, strict=True) if number in wanted]

    for chunk, loaded in zip(left, loader.load_all(source, batches()), strict=True):
        yield {"name": part_name(item["number"], chunk), "is_rest": True, **loaded}


class PartWriter:
    """Encodes chunks and writes each as a part of the data set; runs in an actor.

    encoder_options: of LatentEncoder.
    """

    def __init__(self, output_dir: str, **encoder_options: Any) -> None:
        if not is_remote(output_dir):
            check_on_node(output_dir, "--output_dir")  # which the driver has made: else a part would stay on this node
        self.encoder, self.folder = LatentEncoder(**encoder_options), Folder(output_dir)

    def __call__(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Write a chunk, whole or not at all, and return {"name", "rows", "bad", "later", "filtered"} of
        its part.

        One of load_again is added to its part.
        """
        name = chunk["name"]
        earlier = self.folder.read(name) if chunk.get("is_rest") else None
        if earlier is None or chunk["keys"] or chunk["bad"] or chunk["filtered"]:
            columns = self.encoder(chunk) if chunk["keys"] else {}
            self.folder.write(name, to_parquet(chunk, columns, earlier))
        if earlier is None:
            return {"rows": len(chunk["keys"]), **{note: chunk[note] for note in ("name", "bad", "later", "filtered")}}
        notes = ("rows", "bad", "later", "filtered")
        return {"name": name, **dict(zip(notes, _read_notes(self.folder, name), strict=True))}
