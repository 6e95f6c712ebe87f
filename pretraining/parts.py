"""The parts of a data set of latents: one Parquet file per chunk of `rows_per_file` rows of a source."""

import itertools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from common.folders import check_on_node
from common.storage import Folder, is_remote, read_footer
from pretraining.columns import to_parquet
from pretraining.latents import FOOTER_THREADS, LatentEncoder
from pretraining.loader import Loader
from pretraining.raw_data import Source, read_rows


def part_name(source_number: int, chunk_number: int) -> str:
    """Return the name of the file for a chunk of a source; names sort in the order of the rows."""
    return f"part-{source_number:06d}-{chunk_number:04d}.parquet"


def written_parts(folder: Folder) -> dict[str, tuple[int, list[list[str]]]]:
    """Return {name: (number of good rows, [[key, reason] of each bad row])} of the parts in a folder."""
    names = [name for name in folder.names(".parquet") if re.fullmatch(r"part-\d{6,}-\d{4,}\.parquet", name)]
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        footers = pool.map(partial(read_footer, folder), names)
    return {name: (sum(rows for _, rows in groups), bad) for name, (_, groups, bad) in zip(names, footers, strict=True)}


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


def _batches(source: Source, chunks: list[int], rows_per_file: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield (number of its first row, its rows) of each chunk; adjacent chunks are read in one pass."""
    for _, adjacent in itertools.groupby(enumerate(chunks), key=lambda pair: pair[1] - pair[0]):
        some = [chunk for _, chunk in adjacent]
        rows = read_rows(source, some[0] * rows_per_file, len(some) * rows_per_file)
        for chunk in some:
            yield chunk * rows_per_file, list(itertools.islice(rows, rows_per_file))


class PartWriter:
    """Encodes chunks and writes each as a part of the data set; runs in an actor.

    encoder_options: of LatentEncoder.
    """

    def __init__(self, output_dir: str, **encoder_options: Any) -> None:
        if not is_remote(output_dir):
            check_on_node(output_dir, "--output_dir")  # which the driver has made: else a part would stay on this node
        self.encoder, self.folder = LatentEncoder(**encoder_options), Folder(output_dir)

    def __call__(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Write a chunk, whole or not at all, and return {"name", "rows", "bad"}."""
        columns = self.encoder(chunk) if chunk["keys"] else {}
        self.folder.write(chunk["name"], to_parquet(chunk, columns))
        return {"name": chunk["name"], "rows": len(chunk["keys"]), "bad": chunk["bad"]}
