"""Batches for pre-training: the order of the rows on each worker, reading and encoding them, noise and validation.

A chunk is a row group of latents, or up to `rows_per_chunk` rows of raw data that are encoded on the fly. A piece is a
range of the rows of a chunk in an epoch: {"chunk", "first", "last", "epoch"}. The order is computed here, not by Ray
Data, so that training can resume at any step.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from common.actors import map_on_actors
from common.errors import BadInput
from pretraining.latents import LatentEncoder, LatentFiles
from pretraining.loader import Loader
from pretraining.raw_data import Source
from utils import NO_CAPTION, ROW_NOISE, SHUFFLE, VALIDATION, draw_noise, row_rng

if TYPE_CHECKING:
    import torch

MOST_PIECES = 1000  # passed to Ray Data at a time

Piece = dict[str, int]
Arrays = dict[str, np.ndarray]
Load = Callable[[list[Piece]], Iterator[Arrays]]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Order:
    """The endless sequence of rows that one of `world_size` workers trains on; it depends on the seed only.

    Each epoch permutes the chunks and splits their rows into one contiguous range of equal length per worker, so that
    all workers take the same number of steps and each reads few chunks. Rows are shuffled within `window` pieces.
    """

    chunk_rows: tuple
    rank: int
    world_size: int
    window: int
    seed: int

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows that each worker takes in an epoch."""
        return sum(self.chunk_rows) // self.world_size

    def windows(self, position: int) -> Iterator[tuple[list[Piece], np.ndarray, int]]:
        """Yield (pieces, permutation of their rows, rows to skip), from row `position` of this worker's sequence on."""
        for epoch in itertools.count(position // self.rows_per_epoch):
            start = epoch * self.rows_per_epoch
            for number, pieces in enumerate(self._epoch(epoch)):
                length = sum(piece["last"] - piece["first"] for piece in pieces)
                if start + length > position:
                    rng = row_rng(self.seed, SHUFFLE, epoch, (self.rank << 32) + number + 1)
                    yield pieces, rng.permutation(length), max(0, position - start)
                start += length

    def _epoch(self, epoch):
        """Yield the windows of this worker's range of an epoch as lists of pieces."""
        order = row_rng(self.seed, SHUFFLE, epoch, 0).permutation(len(self.chunk_rows))
        first, last = (rank * self.rows_per_epoch for rank in (self.rank, self.rank + 1))
        pieces, start = [], 0
        for chunk in order.tolist():
            rows = self.chunk_rows[chunk]
            low, high = max(first - start, 0), min(last - start, rows)
            if low < high:
                pieces.append({"chunk": chunk, "first": low, "last": high, "epoch": epoch})
            start += rows
        for i in range(0, len(pieces), self.window):
            yield pieces[i : i + self.window]


def stream_rows(order: Order, load: Load, position: int, num_rows: int) -> Iterator[Arrays]:
    """Yield the windows that hold rows `position` to `position + num_rows` of an order, {"mean", "std", "prompt"} each.

    The last window may hold further rows. load: see make_load.
    """
    windows, left = [], num_rows
    for window in order.windows(position):
        windows.append(window)
        left -= len(window[1]) - window[2]
        if left <= 0 or sum(len(pieces) for pieces, _, _ in windows) >= MOST_PIECES:
            arrays = load([piece for pieces, _, _ in windows for piece in pieces])
            for pieces, permutation, skip in windows:
                parts = list(itertools.islice(arrays, len(pieces)))
                whole = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
                yield {key: values[permutation[skip:]] for key, values in whole.items()}
            windows = []
        if left <= 0:
            return


def rebatch(windows: Iterable[Arrays], batch_size: int) -> Iterator[Arrays]:
    """Yield the rows of windows, in order, as arrays [batch_size, ...]; an incomplete last batch is dropped."""
    held: Arrays = {}
    for window in windows:
        held = {key: np.concatenate([held[key], values]) if held else values for key, values in window.items()}
        count = len(held["mean"]) // batch_size * batch_size
        for start in range(0, count, batch_size):
            yield {key: values[start : start + batch_size] for key, values in held.items()}
        held = {key: values[count:] for key, values in held.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Reading and encoding


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
    def chunk_rows(self) -> tuple[int, ...]:
        """Number of rows in each chunk, good or bad."""
        return tuple(rows for _, _, rows in self.chunks)

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
        self.encoder = LatentEncoder(**options)
        self.name = f"image_latents_{options['resolutions'][0]}"

    def __call__(self, chunk: dict[str, Any]) -> Arrays:
        """Return {"mean": [B, c, h, w], "std": [B, c, h, w], "prompt": [B, L, D]}, float32."""
        columns = self.encoder(chunk)
        names = {"mean": self.name, "std": f"{self.name}_std", "prompt": "caption_latents"}
        return {key: columns[name].astype(np.float32) for key, name in names.items()}


def make_load(data: LatentFiles | RawImages, pool: dict[str, Any]) -> Load:
    """Return load(pieces), which yields {"mean", "std", "prompt"} of each piece, in order.

    pool: num_workers and the placement options of map_on_actors.
    """
    worker_class, options = (PieceEncoder, data.encoder) if isinstance(data, RawImages) else (None, {})
    return lambda pieces: map_on_actors(worker_class, options, pieces, prepare=data, ordered=True, **pool)


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def ahead(iterator: Iterator[Item], count: int) -> Iterator[Item]:
    """Yield the items of an iterator, which runs in a thread up to `count` items ahead."""
    end: Any = object()
    with ThreadPoolExecutor(1) as pool:
        pending = deque(pool.submit(next, iterator, end) for _ in range(max(1, count)))
        while (item := pending.popleft().result()) is not end:
            pending.append(pool.submit(next, iterator, end))
            yield item


@dataclass(frozen=True)
class Batching:
    """How rows become batches.

    batch_size: rows of a worker in a batch. caption_dropout: share of the rows without caption.
    """

    batch_size: int
    gradient_accumulation_steps: int
    caption_dropout: float
    seed: int
    num_train_timesteps: int


def training_batches(
    order: Order, load: Load, first_step: int, last_step: int, batching: Batching, no_caption: np.ndarray
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this worker's batches for steps `first_step` to `last_step - 1`, as returned by with_noise.

    no_caption: [L, D], embedding of the empty caption, which replaces a share `caption_dropout` of the captions.
    """
    size, accumulation, seed = batching.batch_size, batching.gradient_accumulation_steps, batching.seed
    position = first_step * accumulation * size
    num_rows = (last_step - first_step) * accumulation * size
    batches = rebatch(stream_rows(order, load, position, num_rows), size)
    for step in range(first_step, last_step):
        for micro, batch in zip(range(accumulation), batches, strict=False):
            first_row = (micro * order.world_size + order.rank) * size  # in the global batch
            rows = range(first_row, first_row + size)
            chances = np.array([row_rng(seed, NO_CAPTION, step, row).random() for row in rows])
            prompt = np.where((chances < batching.caption_dropout)[:, None, None], no_caption, batch["prompt"])
            shape = batch["mean"].shape[1:]
            drawn = [draw_noise(seed, ROW_NOISE, step, row, shape, batching.num_train_timesteps) for row in rows]
            yield with_noise({**batch, "prompt": prompt}, drawn)


def with_noise(batch: Arrays, drawn: list[tuple[np.ndarray, np.ndarray, int]]) -> dict[str, torch.Tensor]:
    """Return a batch as tensors, with the (noise, posterior noise, timestep) drawn for each row.

    mean, std, noise, posterior_noise: [B, c, h, w] float32; timesteps: [B] int64; prompt: [B, L, D] float32.
    """
    import torch

    noise, posterior_noise, timesteps = (np.stack(each) for each in zip(*drawn, strict=True))
    fields = {**batch, "noise": noise, "posterior_noise": posterior_noise, "timesteps": timesteps}
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in fields.items()}


def hold_out(chunk_rows: tuple[int, ...], num_rows: int) -> tuple[tuple[int, ...], list[Piece]]:
    """Return (number of rows in each chunk left for training, pieces of the last `num_rows` rows)."""
    kept, pieces = list(chunk_rows), []
    for chunk in reversed(range(len(kept))):
        take = min(kept[chunk], num_rows)
        if not take:
            break
        pieces.append({"chunk": chunk, "first": kept[chunk] - take, "last": kept[chunk], "epoch": 0})
        kept[chunk], num_rows = kept[chunk] - take, num_rows - take
    return tuple(kept), pieces[::-1]


def validation_batches(
    pieces: list[Piece], load: Load, place: Any, batching: Batching
) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Return (batch, row weights [B]) of this worker's share of the held-out rows, with fixed noise and timesteps.

    Timesteps are evenly spaced; the latents are the posterior's mean. Shares are padded with rows of weight 0, so that
    all workers have the same number of batches. place: the worker's `rank` and `world_size`.
    """
    import torch

    rows = next(rebatch(load(pieces), sum(piece["last"] - piece["first"] for piece in pieces)))
    count, size = len(rows["mean"]), batching.batch_size
    share = -(-count // (place.world_size * size)) * size
    batches = []
    for start in range(place.rank * share, (place.rank + 1) * share, size):
        numbers = np.arange(start, start + size)
        drawn = []
        for number in numbers % count:
            noise = row_rng(batching.seed, VALIDATION, 0, number).standard_normal(rows["mean"].shape[1:], np.float32)
            timestep = int((number + 0.5) / count * batching.num_train_timesteps)
            drawn.append((noise, np.zeros_like(noise), timestep))
        batch = {key: values[numbers % count] for key, values in rows.items()}
        batches.append((with_noise(batch, drawn), torch.from_numpy(numbers < count).float() / count))
    return batches
