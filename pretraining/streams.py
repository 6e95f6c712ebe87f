"""The order in which each worker sees the rows, and reading them in that order.

A chunk is a row group of latents, or up to `rows_per_chunk` rows of raw data that are encoded on the fly. A piece is a
range of the rows of a chunk in an epoch: {"chunk", "first", "last", "epoch"}. The order is computed here, not by Ray
Data, so that training can resume at any step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from utils import SHUFFLE, row_rng

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


class Window:
    """The rows of several pieces in the order of a permutation, which are picked from the pieces when they are needed.

    parts: {field: [B, ...]} of each piece. order: numbers of the rows, counted over all parts.
    """

    def __init__(self, parts: list[Arrays], order: np.ndarray) -> None:
        self.parts, self.order = parts, order
        self.starts = np.cumsum([0, *(len(part["mean"]) for part in parts)])

    def __len__(self) -> int:
        return len(self.order)

    def take(self, first: int, last: int) -> Arrays:
        """Return copies of the rows `first` to `last - 1`."""
        return self.pick(self.order[first:last])

    def pick(self, numbers: np.ndarray) -> Arrays:
        """Return copies of rows by their numbers over all parts."""
        places = np.searchsorted(self.starts, numbers, "right") - 1
        rows = {
            field: np.empty((len(numbers), *values.shape[1:]), np.result_type(*(part[field] for part in self.parts)))
            for field, values in self.parts[0].items()
        }
        for place in np.unique(places).tolist():
            own = places == place
            for field, values in rows.items():
                values[own] = self.parts[place][field][numbers[own] - self.starts[place]]
        return rows


def stream_rows(order: Order, load: Load, position: int, num_rows: int) -> Iterator[Window]:
    """Yield the windows that hold rows `position` to `position + num_rows` of an order.

    The last window may hold further rows. load: see make_load.
    """
    windows, left = [], num_rows
    for window in order.windows(position):
        windows.append(window)
        left -= len(window[1]) - window[2]
        if left <= 0 or sum(len(pieces) for pieces, _, _ in windows) >= MOST_PIECES:
            arrays = load([piece for pieces, _, _ in windows for piece in pieces])
            for pieces, permutation, skip in windows:
                yield Window(list(itertools.islice(arrays, len(pieces))), permutation[skip:])
            windows = []
        if left <= 0:
            return


def rebatch(windows: Iterable[Window], batch_size: int) -> Iterator[Arrays]:
    """Yield the rows of windows, in order, as arrays [batch_size, ...]; an incomplete last batch is dropped."""
    held: list[Arrays] = []  # the rows of a batch that runs over windows
    count = 0  # of them
    for window in windows:
        first = 0
        while count + len(window) - first >= batch_size:
            held.append(window.take(first, first + batch_size - count))
            first, count = first + batch_size - count, 0
            yield held[0] if len(held) == 1 else {key: np.concatenate([part[key] for part in held]) for key in held[0]}
            held = []
        if first < len(window):
            held.append(window.take(first, len(window)))
            count += len(window) - first
