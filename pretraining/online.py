"""Raw data that is encoded during training, and one interface to read it or stored latents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np

from common.actors import map_on_actors
from common.errors import Away, BadInput
from common.outages import patient
from pretraining.batches import hold_out
from pretraining.columns import as_floats
from pretraining.latents import LatentEncoder, LatentFiles, PieceReader, caption_fields, image_fields
from pretraining.loader import Loader, likely_bad
from pretraining.sources import Chunks, Source, Sources
from pretraining.streams import Arrays, Load, Piece

# What fingerprints hold in place of the flags: the defaults, which the fingerprints of earlier runs hold.
PATIENCE = {"timeout": 10, "retries": 2}


@dataclass(frozen=True)
class RawImages:
    """Raw data that is encoded on the fly, as plain values, in the same chunks as preprocess.py writes.

    sources: the values of Sources by name; loader, encoder: options of Loader and LatentEncoder. held_out: number of
    rows at the end for validation. flag: the one that gave the location.
    """

    sources: dict
    rows_per_chunk: int
    loader: dict
    encoder: dict
    max_bad_fraction: float
    held_out: int = 0
    flag: str = "--data"
    has_texts: ClassVar[bool] = False  # the captions are encoded with the images

    @cached_property
    def _sources(self) -> Sources:
        return Sources(**self.sources)

    @cached_property
    def _chunks(self) -> Chunks:
        return Chunks(self._sources.rows, self.rows_per_chunk)

    @property
    def fingerprint(self) -> Iterator[Any]:
        """Values that determine the rows, whatever the location and the patience with servers."""
        names = ("name", "size", "first", "num_rows", "image_column", "caption_column")
        yield from ([facts[name] for name in names] for facts in self._sources.facts())
        yield from (self.rows_per_chunk, {**self.loader, **PATIENCE})

    @cached_property
    def chunk_rows(self) -> np.ndarray:
        """Number of rows in each chunk, good or bad, [N]."""
        return self._chunks.rows

    @cached_property
    def _kept_rows(self) -> np.ndarray:
        return hold_out(self.chunk_rows, self.held_out)[0]

    def locate(self, piece: Piece) -> dict[str, Any]:
        """Return a piece with the "source" of its chunk, as a dict, and what the chunk is in it.

        "offset": its first row; "rows": their number; "kept": the number of those that are not held out.
        """
        number = piece["chunk"]
        source, place = self._chunks.place(number)
        rows, kept = int(self.chunk_rows[number]), int(self._kept_rows[number])
        at = {"offset": place * self.rows_per_chunk, "rows": rows, "kept": kept}
        return {**piece, **at, "source": vars(self._sources[source])}


@dataclass(frozen=True)
class PieceLoader:
    """Loads pieces of RawImages, located; runs in Ray tasks, or in a worker.

    loader: options of Loader. flag: the one that gave the location.
    """

    loader: dict
    max_bad_fraction: float
    flag: str = "--data"

    def __call__(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the rows of a piece as a chunk of Loader; good rows are repeated in place of bad ones.

        They are of the piece, or else of its chunk, and never held out from training where the piece is not.

        Raises BadInput if there is no good row, or if more rows are bad than `max_bad_fraction` makes likely; Away if
        some of these are rows that cannot be fetched now.
        """
        yield patient(self._load)(item)

    def _load(self, item):
        source, count = Source(**item["source"]), item["last"] - item["first"]
        load = partial(Loader(**self.loader), source, epoch=item["epoch"])
        chunk = load(item["offset"] + item["first"], count)
        bad, later = chunk["bad"] + chunk["later"], chunk["later"]
        if not chunk["keys"]:  # a short piece of bad rows: use the rest of its chunk
            kept = item["kept"]
            start, end = (0, kept) if item["first"] < kept else (kept, item["rows"])
            chunk = load(item["offset"] + start, end - start)
        if not chunk["keys"] or len(bad) > likely_bad(count, self.max_bad_fraction):
            if later:
                key, reason = later[0]
                raise Away(
                    f"{self.flag}: {len(later)} of {count} rows of {source.name} cannot be fetched now; the first is "
                    f"{key}: {reason}: try again later or pass a larger --max_bad_fraction"
                )
            raise BadInput(
                f"{len(bad)} of {count} rows of {source.name} are bad, more than --max_bad_fraction "
                f"{self.max_bad_fraction:g} allows; the first is {bad[0][0]}: {bad[0][1]}"
            )
        if bad:
            rows = np.arange(count) % len(chunk["keys"])
            chunk = {
                name: values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]
                for name, values in chunk.items()
                if name not in ("bad", "later", "filtered")
            }
        return chunk


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
    """Return load(pieces), which yields the rows of each piece, {field: [B, ...]}, in order: see PieceReader.

    pool: num_workers and the placement options of map_on_actors.
    """
    options = {"ordered": True, **pool}
    if isinstance(data, RawImages):
        prepare: Any = PieceLoader(data.loader, data.max_bad_fraction, data.flag)
        worker = partial(map_on_actors, PieceEncoder, data.encoder, prepare=prepare, **options)
    else:
        reader = PieceReader(data.location, data.fields, data.flag)
        worker = partial(map_on_actors, None, {}, prepare=reader, **options)
    return lambda pieces: worker(list(map(data.locate, pieces)))
