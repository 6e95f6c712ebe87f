"""The parts of a data set of latents: one Parquet file per chunk of `rows_per_file` rows of a source."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from common.folders import check_on_node
from common.outages import patient
from common.storage import Folder, is_remote, read_footer
from pretraining.columns import read_keys, row_number, to_parquet
from pretraining.index import (
    FILE,
    PART,
    PARTS_PER_FILE,
    Index,
    IndexWriter,
    Record,
    describe_part,
    part_name,
    part_numbers,
    read_index,
    read_notes,
    read_records,
)
from pretraining.latents import LatentEncoder
from pretraining.loader import Batch, Loader
from pretraining.pictures import choose_rows, thumbnails
from pretraining.raw_data import Source, read_rows
from pretraining.statistics import Statistics


def resume(folder: Folder) -> tuple[Index, IndexWriter, list[str]]:
    """Return (the parts in the index, the writer of further records, other parts) of a data set that is not finished.

    The others are not in the index because a run was killed. Records of parts that are missing or of another size do
    not count.
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
    return index, writer, [name for name in sizes if PART.fullmatch(name) and name not in listed]


@patient
def read_part(folder: Folder, name: str) -> bytes:
    """Return the content of a part; raise CheckFailed if it is damaged."""
    read_footer(folder, name)  # says what is wrong
    return folder.read(name) or b""


def missing_parts(
    sources: list[Source], index: Index, rows_per_file: int, written: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Return the items of load_chunks for all sources that have a part that is not in the index.

    written: names of such parts that are written all the same.
    """
    items, shown, left = [], choose_rows(sources), part_numbers(written)
    for number, source in enumerate(sources):
        done = index.chunks_of(number)
        if len(done) < -(-source.num_rows // rows_per_file):
            facts = {"done": sorted(done), "written": left.get(number, []), "shown": shown.get(number, [])}
            items.append({"source": vars(source), "number": number, **facts})
    return items


def load_chunks(item: dict[str, Any], loader: Loader, rows_per_file: int) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a source that are not in the index, each as returned by Loader, with the "name" of its part.

    item: {"source": a Source as a dict, "number": its number, "done": chunks in the index, "written": others whose
    parts are written, "shown": rows for the contact sheet}. A chunk has "is_written", and its own rows in "shown".
    """
    source, written = Source(**item["source"]), set(item["written"])
    missing = sorted(set(range(-(-source.num_rows // rows_per_file))) - set(item["done"]))
    chunks = loader.load_all(source, _batches(source, missing, rows_per_file))
    for chunk, loaded in zip(missing, chunks, strict=True):
        shown = [row for row in item["shown"] if row // rows_per_file == chunk]
        facts = {"shown": shown, "is_written": chunk in written}
        yield {"name": part_name(item["number"], chunk), **facts, **loaded}


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


def parts_to_complete(writer: IndexWriter, sources: list[Source], index: Index) -> list[dict[str, Any]]:
    """Return the items of load_again for all sources that have a part with rows to fetch again."""
    left: dict[int, dict[int, dict[str, Any]]] = {}
    if index.later.any():
        for part, notes in read_notes(writer.folder, writer.files, index):
            if notes["later"]:
                known = {name: notes[name] for name in ("statistics", "pictures") if name in notes}
                of_source = left.setdefault(int(index.source[part]), {})
                of_source[int(index.chunk[part])] = {"rows": list(map(row_number, notes["later"])), "known": known}
    return [{"source": vars(sources[i]), "number": i, "left": dict(sorted(left[i].items()))} for i in sorted(left)]


def load_again(item: dict[str, Any], loader: Loader, rows_per_file: int) -> Iterator[dict[str, Any]]:
    """Yield chunks of the rows of a source that could not be fetched, with the "name" of their part and "is_rest".

    item: {"source": a Source as a dict, "number": its number, "left": {number of a chunk: {"rows": numbers of its rows,
    "known": what PartWriter noted of its others}}}. A chunk has the latter too.
    """
    source, left = Source(**item["source"]), item["left"]

    def batches() -> Iterator[Batch]:
        for (numbers, rows), part in zip(_batches(source, list(left), rows_per_file), left.values(), strict=True):
            yield part["rows"], [row for number, row in zip(numbers, rows, strict=True) if number in part["rows"]]

    for (chunk, part), loaded in zip(left.items(), loader.load_all(source, batches()), strict=True):
        yield {"name": part_name(item["number"], chunk), "is_rest": True, "known": part["known"], **loaded}


def _only(chunk, keys):
    """Return a chunk with those of its rows that have one of the keys."""
    rows = [row for row, key in enumerate(chunk["keys"]) if key in keys]
    columns = {name: chunk[name] for name in chunk if name in ("keys", "captions", "crops") or name[:7] == "pixels_"}
    return chunk | {
        name: values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]
        for name, values in columns.items()
    }


class PartWriter:
    """Encodes chunks and writes each as a part of the data set; runs in an actor.

    encoder_options: of LatentEncoder.
    """

    def __init__(self, output_dir: str, **encoder_options: Any) -> None:
        if not is_remote(output_dir):
            check_on_node(output_dir, "--output_dir")  # which the driver has made: else a part would stay on this node
        self.encoder, self.folder = LatentEncoder(**encoder_options), Folder(output_dir)

    def __call__(self, chunk: dict[str, Any]) -> Record:
        """Write a chunk, whole or not at all, and return the record of its part; one of load_again is added to it.

        A part that is written stays as it is: only its record is made. The notes of the record have the "statistics" of
        the rows and, if some are "shown", their "pictures".
        """
        name = chunk["name"]
        if chunk.get("is_written"):
            data = read_part(self.folder, name)
            return describe_part(name, data, **self._describe(_only(chunk, read_keys(data))))
        data = self.folder.read(name) if chunk.get("is_rest") else None
        if data is None or chunk["keys"] or chunk["bad"] or chunk["filtered"]:
            data = to_parquet(chunk, self.encoder(chunk) if chunk["keys"] else {}, data)
            self.folder.write(name, data)
        return describe_part(name, data, **self._describe(chunk))

    def _describe(self, chunk):
        facts = dict(chunk.get("known", {}))
        if not chunk["keys"]:
            return facts
        tokens, resolutions = self.encoder.count_tokens(chunk["captions"]), self.encoder.resolutions
        statistics = Statistics.of(chunk["crops"], resolutions, chunk["captions"], *tokens)
        if "statistics" in facts:
            statistics.add(facts["statistics"])
        facts["statistics"] = statistics.to_note()
        if chunk.get("shown"):
            facts["pictures"] = thumbnails(chunk, max(resolutions))
        return facts
