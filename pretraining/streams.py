"""The rows that pre-training sees, in an order of ours: Ray's own streams cannot be continued from the middle.

A chunk is what is read at once: a row group of latents, or some rows of raw data that are encoded on the fly. A piece
is a range of the rows of a chunk.
"""

import itertools
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from common.actors import map_on_actors
from common.errors import BadInput
from pretraining.latents import LatentEncoder
from pretraining.loader import Loader
from pretraining.raw_data import Source
from utils import NO_CAPTION, ROW_NOISE, SHUFFLE, VALIDATION, draw_noise, row_rng

MOST_PIECES = 1000  # that Ray Data is given at a time


@dataclass(frozen=True)
class Order:
    """The endless sequence of rows that one of `world_size` workers trains on, a function of the seed alone.

    Chunks are permuted each epoch, and the epoch's rows dealt out in stretches of equal length, so that every worker
    takes as many steps and reads few chunks; `window` chunks at a time are mixed.
    """

    chunk_rows: tuple
    rank: int
    world_size: int
    window: int
    seed: int

    @property
    def rows_per_epoch(self):
        """Rows that each worker takes in an epoch."""
        return sum(self.chunk_rows) // self.world_size

    def windows(self, position):
        """Yield (pieces, permutation of their rows, rows to skip) from row `position` of this worker's sequence on."""
        for epoch in itertools.count(position // self.rows_per_epoch):
            start = epoch * self.rows_per_epoch
            for number, pieces in enumerate(self._epoch(epoch)):
                length = sum(piece["last"] - piece["first"] for piece in pieces)
                if start + length > position:
                    rng = row_rng(self.seed, SHUFFLE, epoch, (self.rank << 32) + number + 1)
                    yield pieces, rng.permutation(length), max(0, position - start)
                start += length

    def _epoch(self, epoch):
        """Yield the windows of this worker's stretch of an epoch: lists of pieces."""
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


def stream_rows(order, load, position, num_rows):
    """Yield [{"mean", "std", "prompt"}] of rows `position` to `position + num_rows` of an order, a window at a time.

    load: yields the arrays of a list of pieces, in its order.
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


def rebatch(windows, batch_size):
    """Yield the rows of some windows, in their order, as dicts of arrays [batch_size, ...]."""
    held = {}
    for window in windows:
        held = {key: np.concatenate([held[key], values]) if held else values for key, values in window.items()}
        count = len(held["mean"]) // batch_size * batch_size
        for start in range(0, count, batch_size):
            yield {key: values[start : start + batch_size] for key, values in held.items()}
        held = {key: values[count:] for key, values in held.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Raw data, encoded on the fly


@dataclass(frozen=True)
class RawImages:
    """Images and captions that are encoded on the fly, as plain values, in the chunks that preprocess.py would write.

    sources: of Source, as dicts; loader, encoder: the options of Loader and LatentEncoder.
    """

    sources: tuple
    rows_per_chunk: int
    loader: dict
    encoder: dict
    max_bad_fraction: float

    @cached_property
    def chunks(self):
        """Return [(source number, first row, rows)]."""
        size = self.rows_per_chunk
        return [
            (number, first, min(size, source["num_rows"] - first))
            for number, source in enumerate(self.sources)
            for first in range(0, source["num_rows"], size)
        ]

    @property
    def fingerprint(self):
        """What decides the rows, wherever they lie."""
        facts = ("name", "size", "first", "num_rows", "image_column", "caption_column")
        return [[source[fact] for fact in facts] for source in self.sources] + [self.rows_per_chunk, self.loader]

    @property
    def chunk_rows(self):
        """Rows of each chunk, good or bad."""
        return tuple(rows for _, _, rows in self.chunks)

    def __call__(self, item):
        """Yield the loaded chunk of a piece {"chunk", "first", "last", "epoch"}; other rows stand in for bad ones."""
        number, first, chunk_rows = self.chunks[item["chunk"]]
        source, count = Source(**self.sources[number]), item["last"] - item["first"]
        load = partial(Loader(**self.loader), source, epoch=item["epoch"])
        chunk = load(first + item["first"], count)
        bad = chunk["bad"]
        expected = self.max_bad_fraction * count
        if not chunk["keys"]:  # of a short piece: the rest of its chunk stands in
            chunk = load(first, chunk_rows)
        if not chunk["keys"] or len(bad) > max(1, expected + 4 * expected**0.5):  # pieces differ by chance
            raise BadInput(
                f"{len(bad)} of {count} rows of {source.name} are bad, more than --max_bad_fraction "
                f"{self.max_bad_fraction:g}; the first is {bad[0][0]}: {bad[0][1]}"
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
    """Encodes the loaded chunk of a piece: the work of one actor."""

    def __init__(self, **options):
        self.encoder = LatentEncoder(**options)
        self.name = f"image_latents_{options['resolutions'][0]}"

    def __call__(self, chunk):
        """Return {"mean", "std", "prompt"}, float32."""
        columns = self.encoder(chunk)
        names = {"mean": self.name, "std": f"{self.name}_std", "prompt": "caption_latents"}
        return {key: columns[name].astype(np.float32) for key, name in names.items()}


def make_load(data, pool):
    """Return load(pieces), which yields the arrays of some pieces in their order.

    data: LatentFiles or RawImages; pool: num_workers and the like, of map_on_actors.
    """
    worker_class, options = (PieceEncoder, data.encoder) if isinstance(data, RawImages) else (None, {})
    return lambda pieces: map_on_actors(worker_class, options, pieces, prepare=data, ordered=True, **pool)


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def ahead(iterator, count):
    """Yield what an iterator does, which works `count` items ahead in a thread."""
    end = object()
    with ThreadPoolExecutor(1) as pool:
        pending = deque(pool.submit(next, iterator, end) for _ in range(max(1, count)))
        while (item := pending.popleft().result()) is not end:
            pending.append(pool.submit(next, iterator, end))
            yield item


@dataclass(frozen=True)
class Batching:
    """How rows become batches: rows of a batch, batches of a step, share of rows without caption, what draws noise."""

    batch_size: int
    gradient_accumulation_steps: int
    caption_dropout: float
    seed: int
    num_train_timesteps: int


def training_batches(order, load, first_step, last_step, batching, no_caption):
    """Yield this worker's batches of steps first_step ... last_step - 1, as `with_noise` returns them.

    no_caption: [L, D], the embedding of the empty caption, which a share of `caption_dropout` of the rows gets.
    """
    size, accumulation, seed = batching.batch_size, batching.gradient_accumulation_steps, batching.seed
    position = first_step * accumulation * size
    num_rows = (last_step - first_step) * accumulation * size
    batches = rebatch(stream_rows(order, load, position, num_rows), size)
    for step in range(first_step, last_step):
        for micro, batch in zip(range(accumulation), batches, strict=False):
            first_row = (micro * order.world_size + order.rank) * size  # of the global batch
            rows = range(first_row, first_row + size)
            chances = np.array([row_rng(seed, NO_CAPTION, step, row).random() for row in rows])
            prompt = np.where((chances < batching.caption_dropout)[:, None, None], no_caption, batch["prompt"])
            shape = batch["mean"].shape[1:]
            drawn = [draw_noise(seed, ROW_NOISE, step, row, shape, batching.num_train_timesteps) for row in rows]
            yield with_noise({**batch, "prompt": prompt}, drawn)


def with_noise(batch, drawn):
    """Return a batch as tensors, with what was drawn for each row: noise, the posterior's noise and the timestep.

    mean, std, noise, posterior_noise: [B, c, h, w] float32; timesteps: [B] int64; prompt: [B, L, D] float32.
    """
    import torch

    noise, posterior_noise, timesteps = (np.stack(each) for each in zip(*drawn, strict=True))
    fields = {**batch, "noise": noise, "posterior_noise": posterior_noise, "timesteps": timesteps}
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in fields.items()}


def hold_out(chunk_rows, num_rows):
    """Return (rows of each chunk left to train on, pieces of the last `num_rows` rows)."""
    kept, pieces = list(chunk_rows), []
    for chunk in reversed(range(len(kept))):
        take = min(kept[chunk], num_rows)
        if not take:
            break
        pieces.append({"chunk": chunk, "first": kept[chunk] - take, "last": kept[chunk], "epoch": 0})
        kept[chunk], num_rows = kept[chunk] - take, num_rows - take
    return tuple(kept), pieces[::-1]


def validation_batches(pieces, load, place, batching):
    """Return [(batch, weights [B])] of this worker's share of the held-out rows, with fixed noise and timesteps.

    The timesteps are spread evenly; the latents are the posterior's mean. Shares are filled up with rows of weight 0,
    so that all workers have as many batches.
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
