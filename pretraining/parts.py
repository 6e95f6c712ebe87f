"""The parts of a data set of latents: one Parquet file per chunk of `rows_per_file` rows of a source."""

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from common.folders import check_on_node
from common.storage import Folder, is_remote, open_parquet
from pretraining.columns import to_parquet
from pretraining.latents import FOOTER_THREADS, LatentEncoder
from pretraining.loader import Loader
from pretraining.raw_data import Source, read_rows

# {name: (number of good rows, [key, reason] of each bad row, {reason: number of rows that filters left out})}
Parts = dict[str, tuple[int, list[list[str]], dict[str, int]]]


def part_name(source_number: int, chunk_number: int) -> str:
    """Return the name of the file for a chunk of a source; names sort in the order of the rows."""
    return f"part-{source_number:06d}-{chunk_number:04d}.parquet"


def written_parts(folder: Folder) -> Parts:
    """Return the Parts in a folder."""
    names = [name for name in folder.names(".parquet") if re.fullmatch(r"part-\d{6,}-\d{4,}\.parquet", name)]
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        return dict(zip(names, pool.map(partial(_read_notes, folder), names), strict=True))


def _read_notes(folder: Folder, name: str) -> tuple[int, list[list[str]], dict[str, int]]:
    with open_parquet(folder, name) as parquet:
        notes = parquet.schema_arrow.metadata or {}
        bad, filtered = (json.loads(notes.get(note, "[]")) for note in (b"bad_rows", b"filtered_rows"))
        return parquet.metadata.num_rows, bad, dict(filtered)


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
    Adjacent chunks are read in one pass.
    """
    source = Source(**item["source"])
    missing = [
        chunk
        for chunk in range(-(-source.num_rows // rows_per_file))
        if part_name(item["number"], chunk) not in item["done"]
    ]
    for _, adjacent in itertools.groupby(enumerate(missing), key=lambda pair: pair[1] - pair[0]):
        chunks = [chunk for _, chunk in adjacent]
        rows = read_rows(source, chunks[0] * rows_per_file, len(chunks) * rows_per_file)
        for chunk in chunks:
            some = list(itertools.islice(rows, rows_per_file))
            yield {"name": part_name(item["number"], chunk), **loader.load(source, some, chunk * rows_per_file)}


class PartWriter:
    """Encodes chunks and writes each as a part of the data set; runs in an actor.

    encoder_options: of LatentEncoder.
    """

    def __init__(self, output_dir: str, **encoder_options: Any) -> None:
        if not is_remote(output_dir):
            check_on_node(output_dir, "--output_dir")  # which the driver has made: else a part would stay on this node
        self.encoder, self.folder = LatentEncoder(**encoder_options), Folder(output_dir)

    def __call__(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Write a chunk, whole or not at all, and return {"name", "rows", "bad", "filtered"}."""
        columns = self.encoder(chunk) if chunk["keys"] else {}
        self.folder.write(chunk["name"], to_parquet(chunk, columns))
        notes = {name: chunk[name] for name in ("name", "bad", "filtered")}
        return {"rows": len(chunk["keys"]), **notes}
