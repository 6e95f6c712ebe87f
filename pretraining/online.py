"""Raw data that is encoded during training, and one interface to read it or stored latents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from common.actors import map_on_actors
from common.errors import BadInput
from pretraining.columns import as_floats
from pretraining.latents import LatentEncoder, LatentFiles, PieceReader, caption_fields, image_fields
from pretraining.loader import Loader
from pretraining.raw_data import Source

if TYPE_CHECKING:
    pass

from pretraining.streams import Arrays, Load, Piece


@dataclass(frozen=True)
class RawImages:
    """Raw data that is encoded on the fly, as plain values, in the same chunks as preprocess.py writes.

    sources: Sources as dicts; loader, encoder: options of Loader and LatentEncoder.
    """

    sources: tuple
    rows_per_chunk: int
    loader: dict
    encoder: dict
    max_bad_fraction: float

    @cached_property
    def chunks(self) -> list[tuple[int, int, int]]:
        """(source number, first row, number of rows) of each chunk."""
        size = self.rows_per_chunk
        return [
            (number, first, min(size, source["num_rows"] - first))
            for number, source in enumerate(self.sources)
            for first in range(0, source["num_rows"], size)
        ]

    @property
    def fingerprint(self) -> list:
        """Values that determine the rows, whatever the location."""
        facts = ("name", "size", "first", "num_rows", "image_column", "caption_column")
        return [[source[fact] for fact in facts] for source in self.sources] + [self.rows_per_chunk, self.loader]

    @property
    def chunk_rows(self) -> np.ndarray:
        """Number of rows in each chunk, good or bad, [N]."""
        return np.array([rows for _, _, rows in self.chunks], np.int32)

    def __call__(self, item: Piece) -> Iterator[dict[str, Any]]:
        """Yield the rows of a piece as a chunk of Loader; good rows are repeated in place of bad ones.

        Raises BadInput if there is no good row, or if more rows are bad than `max_bad_fraction` makes likely.
        """
        number, first, chunk_rows = self.chunks[item["chunk"]]
        source, count = Source(**self.sources[number]), item["last"] - item["first"]
        load = partial(Loader(**self.loader), source, epoch=item["epoch"])
        chunk = load(first + item["first"], count)
        bad = chunk["bad"]
        expected = self.max_bad_fraction * count
        if not chunk["keys"]:  # a short piece of bad rows: use the rest of its chunk
            chunk = load(first, chunk_rows)
        limit = max(1, expected + 4 * expected**0.5)  # four standard deviations: the share varies between pieces
        if not chunk["keys"] or len(bad) > limit:
            raise BadInput(
                f"{len(bad)} of {count} rows of {source.name} are bad, more than --max_bad_fraction "
                f"{self.max_bad_fraction:g} allows; the first is {bad[0][0]}: {bad[0][1]}"
            )
        if bad:
            rows = np.arange(count) % len(chunk["keys"])
            chunk = {
                name: values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]
                for name, values in chunk.items()
                if name != "bad"
            }
        yield chunk


class PieceEncoder:
    """Encodes the loaded chunk of a piece; runs in an actor. options: of LatentEncoder."""

    def __init__(self, **options: Any) -> None:
        self.encoder, (resolution,) = LatentEncoder(**options), options["resolutions"]
        family, model_dir = self.encoder.family, self.encoder.model_dir
        self.fields = image_fields(family, model_dir, resolution) | caption_fields(family, model_dir)

    def __call__(self, chunk: dict[str, Any]) -> Arrays:
        """Return the rows that PieceReader yields, {field: [B, ...] float16 or float32}."""
        columns = self.encoder(chunk)
        return {field: as_floats(columns[column]) for field, (column, _) in self.fields.items()}


def make_load(data: LatentFiles | RawImages, pool: dict[str, Any]) -> Load:
    """Return load(pieces), which yields the rows of each piece, {field: [B, ...] float16 or float32}, in order.

    pool: num_workers and the placement options of map_on_actors.
    """
    options = {"ordered": True, **pool}
    if isinstance(data, RawImages):
        return lambda pieces: map_on_actors(PieceEncoder, data.encoder, pieces, prepare=data, **options)
    reader = PieceReader(data.location, data.fields)
    return lambda pieces: map_on_actors(None, {}, list(map(data.locate, pieces)), prepare=reader, **options)
