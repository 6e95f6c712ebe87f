"""The order in which each worker sees the rows, and reading them in that order.

A chunk is a row group of latents, or up to `rows_per_chunk` rows of raw data that are encoded on the fly. A piece is a
range of the rows of a chunk in an epoch: {"chunk", "first", "last", "epoch"}. The order is computed here, not by Ray
Data, so that training can resume at any step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from utils import SHUFFLE, row_rng

if TYPE_CHECKING:
    pass

MOST_PIECES = 1000  # passed to Ray Data at a time

Piece = dict[str, int]
Arrays = dict[str, np.ndarray]
Load = Callable[[list[Piece]], Iterator[Arrays]]


@dataclass(frozen=True)
class Order:
    """The endless sequence of rows that one of `world_size` workers trains on; it depends on the seed only.

    Each epoch permutes the chunks and splits their rows into one contiguous range of equal length per worker, so that
    all workers take the same number of steps and each reads few chunks. Rows are shuffled within `window` pieces.
    """

    chunk_rows: np.ndarray
    rank: int
    world_size: int
    window: int
    seed: int

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows that each worker takes in an epoch."""
        return int(np.sum(self.chunk_rows, dtype=np.int64)) // self.world_size

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
        rows = np.asarray(self.chunk_rows)[order]
        order, rows = order[rows > 0], rows[rows > 0]
        ends = np.cumsum(rows, dtype=np.int64)
        first, last = (rank * self.rows_per_epoch for rank in (self.rank, self.rank + 1))
        begin, end = np.searchsorted(ends, first, "right"), np.searchsorted(ends, last) + 1
        chunks, ends, starts = order[begin:end], ends[begin:end], (ends - rows)[begin:end]
        low, high = np.maximum(first - starts, 0), np.minimum(last, ends) - starts
        for i in range(0, len(chunks), self.window):
            window = (each[i : i + self.window].tolist() for each in (chunks, low, high))
            names = ("chunk", "first", "last")
            yield [dict(zip(names, piece, strict=True)) | {"epoch": epoch} for piece in zip(*window, strict=True)]


def stream_rows(order: Order, load: Load, position: int, num_rows: int) -> Iterator[Arrays]:
    """Yield the windows that hold rows `position` to `position + num_rows` of an order, {field: [B, ...]} each.

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
