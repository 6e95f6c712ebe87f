"""The order in which the rows of a data set are trained on, and reading a worker's share of them in that order.

A chunk is a row group of latents, or up to `rows_per_chunk` rows of raw data that are encoded on the fly. A piece is a
range of the rows of a chunk in an epoch: {"chunk", "first", "last", "epoch"}. The order is computed here, not by Ray
Data, so that training can resume at any step, with any number of workers.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from utils import SHUFFLE, row_rng

MOST_PIECES = 1000  # passed to Ray Data at a time

Piece = dict[str, int]
Arrays = dict[str, np.ndarray]
Load = Callable[[list[Piece]], Iterator[Arrays]]


def count_streams(window: int, sizes: Sequence[int], num_chunks: int) -> int:
    """Return the `num_streams` of an Order: about `window` for each worker, but no more than there are chunks.

    sizes: numbers of workers that the run may have, the largest first; each of them divides the result.
    """
    unit = math.lcm(*sizes)
    return unit * max(1, min(window * sizes[0], num_chunks) // unit)


@dataclass(frozen=True)
class Order:
    """The endless sequence of rows that all workers train on; worker `rank` takes every `world_size`-th of them.

    Each epoch permutes the chunks and cuts their rows into `num_streams` contiguous streams, whose lengths differ by
    one row at most. The sequence takes a row of each stream in turn, as the interleave of tf.data does, so that it
    shows each row once an epoch. It does not depend on the number of workers. A worker reads its share of the streams
    only if `world_size` divides their number. The rows of a piece are shuffled.
    """

    chunk_rows: np.ndarray
    rank: int
    world_size: int
    num_streams: int
    seed: int

    @functools.cached_property
    def rows_per_epoch(self) -> int:
        """Number of rows in an epoch, of all workers together."""
        return int(np.sum(self.chunk_rows, dtype=np.int64))

    @functools.cached_property
    def stride(self) -> int:
        """Of the rows of a stream that this worker reads, it takes each `stride`-th."""
        return self.world_size // math.gcd(self.world_size, self.num_streams)

    def pieces(self, position: int) -> Iterator[Piece]:
        """Yield the pieces with this worker's rows, from its row `position` on, in the order in which they are needed.

        Each has also "row": the number of its first such row in the sequence of all workers, "stream", and "start":
        the place of its first row in the stream.
        """
        row = self.rank + self.world_size * position
        for epoch in itertools.count(row // self.rows_per_epoch):
            yield from self._epoch(epoch, row)

    def _epoch(self, epoch, first_row):
        """Yield this worker's pieces of an epoch, from row `first_row` of the sequence on."""
        order = row_rng(self.seed, SHUFFLE, epoch, 0).permutation(len(self.chunk_rows))
        rows = np.asarray(self.chunk_rows)[order]
        order, rows = order[rows > 0], rows[rows > 0]
        ends = np.cumsum(rows, dtype=np.int64)
        before = epoch * self.rows_per_epoch
        share = math.gcd(self.world_size, self.num_streams)
        streams = range((self.rank - before) % share, self.num_streams, share)
        found = [self._stream(stream, order, rows, ends, before, first_row) for stream in streams]
        names = ("row", "stream", "start", "chunk", "first", "last")
        for piece in heapq.merge(*found):  # by "row", which no two pieces share
            yield dict(zip(names, piece, strict=True)) | {"epoch": epoch}

    def _stream(self, stream, order, rows, ends, before, first_row):
        """Yield the pieces of a stream that hold rows of this worker, as tuples of what _epoch names.

        order, rows, ends: the permuted chunks, their rows, and the sum of these. before: rows of earlier epochs.
        """
        length, longer = divmod(self.rows_per_epoch, self.num_streams)
        low, high = (number * length + min(number, longer) for number in (stream, stream + 1))
        begin, end = np.searchsorted(ends, low, "right"), np.searchsorted(ends, high, "left") + 1
        # Place p of the stream holds row `before + stream + num_streams * p` of the sequence.
        own = (place for place in range(self.stride) if self._is_own(before + stream + self.num_streams * place))
        own_place = next(own)
        resumed = max(0, -((before + stream - first_row) // self.num_streams))
        for i in range(begin, end, MOST_PIECES):
            block = slice(i, min(i + MOST_PIECES, end))
            starts = ends[block] - rows[block]
            first, last = np.maximum(starts, low), np.minimum(ends[block], high)
            place = np.maximum(first - low, resumed)
            place += (own_place - place) % self.stride
            row = before + stream + self.num_streams * place
            table = np.stack([row, np.full_like(row, stream), first - low, order[block], first - starts, last - starts])
            yield from map(tuple, table[:, place < last - low].T.tolist())

    def _is_own(self, row):
        return row % self.world_size == self.rank

    def locate(self, number: int) -> tuple[int, int]:
        """Return (stream, place in it) of this worker's row `number`."""
        row = (self.rank + self.world_size * number) % self.rows_per_epoch
        return row % self.num_streams, row // self.num_streams

    def shuffle(self, piece: Piece) -> np.ndarray:
        """Return the order in which the rows of a piece are shown: a permutation of its rows."""
        rng = row_rng(self.seed, SHUFFLE, piece["epoch"], (piece["stream"] << 32) + piece["chunk"] + 1)
        return rng.permutation(piece["last"] - piece["first"])


def read_pieces(order: Order, load: Load, position: int, num_rows: int) -> Iterator[tuple[Piece, Arrays]]:
    """Yield (piece, its rows) of the pieces with a worker's rows `position` to `position + num_rows`.

    load: see make_load.
    """
    end = order.rank + order.world_size * (position + num_rows)
    pieces = itertools.takewhile(lambda piece: piece["row"] < end, order.pieces(position))
    while portion := list(itertools.islice(pieces, MOST_PIECES)):
        yield from zip(portion, load(portion), strict=True)


def batch_rows(
    order: Order, pieces: Iterator[tuple[Piece, Arrays]], position: int, num_rows: int, batch_size: int
) -> Iterator[Arrays]:
    """Yield a worker's rows `position` to `position + num_rows`, in order, as arrays [batch_size, ...].

    pieces: of read_pieces. A piece is held from its first row to its last; of an incomplete last batch nothing is
    yielded.
    """
    opened: dict[int, tuple[Piece, Arrays, np.ndarray]] = {}
    for first in range(position, position + num_rows - batch_size + 1, batch_size):
        picked = []
        for number in range(first, first + batch_size):
            stream, place = order.locate(number)
            if stream not in opened:
                piece, rows = next(pieces)
                assert piece["stream"] == stream, (piece, stream)
                opened[stream] = piece, rows, order.shuffle(piece)
            piece, rows, shuffled = opened[stream]
            picked.append((rows, shuffled[place - piece["start"]]))
            if place + order.stride >= piece["start"] + len(shuffled):
                del opened[stream]
        yield pick_rows(picked)


def pick_rows(picked: Sequence[tuple[Arrays, int]]) -> Arrays:
    """Return copies of single rows, each given as the arrays of a piece and a number, as {field: [B, ...]}."""
    batch = {
        field: np.empty((len(picked), *values.shape[1:]), np.result_type(*{rows[field].dtype for rows, _ in picked}))
        for field, values in picked[0][0].items()
    }
    for place, (rows, number) in enumerate(picked):
        for field, values in batch.items():
            values[place] = rows[field][number]
    return batch
