"""The parts of a data set of latents: one Parquet file per chunk of `rows_per_file` rows of a source."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from common.folders import check_on_node
from common.storage import Folder, is_remote, read_footer
from pretraining.columns import to_parquet
from pretraining.index import (
    FILE,
    PART,
    PARTS_PER_FILE,
    THREADS,
    Index,
    IndexWriter,
    Record,
    describe_part,
    part_name,
    read_index,
    read_records,
)
from pretraining.latents import LatentEncoder
from pretraining.loader import Loader
from pretraining.raw_data import Source, read_rows


def resume(folder: Folder) -> tuple[Index, IndexWriter]:
    """Return (the parts that are written, the writer of further records) of a data set that is not finished.

    Parts that are not in the index, because a run was killed, are read for it; records of parts that are missing or of
    another size do not count.
    """
    sizes = folder.names(".parquet")
    files = [name for name in sizes if FILE.fullmatch(name)]
    index = read_index(folder, files)
    index = index.only(np.array([sizes.get(index.name(part)) == index.bytes[part] for part in range(len(index))], bool))
    listed = {index.name(part) for part in range(len(index))}
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


def read_part(folder: Folder, name: str) -> Record:
    """Return the record of a part from its content; raise CheckFailed if it is damaged."""
    _, groups, bad = read_footer(folder, name)
    return describe_part(name, folder.read(name) or b"", sum(rows for _, rows in groups), bad)


def missing_parts(sources: list[Source], index: Index, rows_per_file: int) -> list[dict[str, Any]]:
    """Return the items of load_chunks for all sources that have a part that is not written."""
    items = []
    for number, source in enumerate(sources):
        done = index.chunks_of(number)
        if len(done) < -(-source.num_rows // rows_per_file):
            items.append({"source": vars(source), "number": number, "done": sorted(done)})
    return items


def load_chunks(item: dict[str, Any], loader: Loader, rows_per_file: int) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a source that are not written, each as returned by Loader, with the "name" of its part.

    item: {"source": a Source as a dict, "number": its number, "done": chunks whose parts are written}.
    Adjacent chunks are read in one pass.
    """
    source = Source(**item["source"])
    missing = sorted(set(range(-(-source.num_rows // rows_per_file))) - set(item["done"]))
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

    def __call__(self, chunk: dict[str, Any]) -> Record:
        """Write a chunk, whole or not at all, and return the record of its part."""
        data = to_parquet(chunk, self.encoder(chunk) if chunk["keys"] else {})
        self.folder.write(chunk["name"], data)
        return describe_part(chunk["name"], data, len(chunk["keys"]), chunk["bad"])
