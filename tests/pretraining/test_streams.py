"""The rows that pre-training sees: each once an epoch, in an order that any step can be continued from."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from fake_rows import fake_load

from pretraining import streams
from pretraining.streams import Order, batch_rows, count_streams, pick_rows, read_pieces


def sequence(order, position, num_rows, seen=None):
    """Return the numbers of a worker's rows `position` to `position + num_rows`."""
    pieces = read_pieces(order, fake_load(order.chunk_rows, seen), position, num_rows)
    batches = [batch["mean"].ravel() for batch in batch_rows(order, pieces, position, num_rows, 1)]
    assert next(pieces, None) is None  # all that was read was needed
    return np.concatenate([np.empty(0), *batches]).astype(int)


def global_rows(order, world_size, first, last):
    """Return rows `first` to `last` of the sequence, as `world_size` workers take them; both divide by it."""
    share = (last - first) // world_size
    workers = [replace(order, rank=rank, world_size=world_size) for rank in range(world_size)]
    return np.stack([sequence(each, first // world_size, share) for each in workers], axis=1).ravel()


def orders(count, seed=0):
    """Yield orders of one worker, of many sizes; some chunks are empty."""
    rng = np.random.default_rng(seed)
    for case in range(count):
        chunk_rows = tuple(rng.integers(0, 9, size=rng.integers(1, 12)).tolist())
        for num_streams in (1, 2, 3, 4, 12):
            if sum(chunk_rows):
                yield Order(chunk_rows, 0, 1, num_streams, seed=case)


# ---------------------------------------------------------------------------------------------------------------------
# The order


def test_each_epoch_shows_each_row_once_however_many_workers_there_are():
    count = 0
    for order in orders(9):
        total = sum(order.chunk_rows)
        whole = sequence(order, 0, 12 * total)
        for epoch in whole.reshape(12, total):
            assert sorted(epoch.tolist()) == list(range(total))
        for world_size in (2, 3, 4, 6):
            assert np.array_equal(global_rows(order, world_size, 0, 12 * total), whole)
            count += 1
    assert count > 100


def test_from_any_position_any_number_of_workers_goes_on_with_the_next_row():
    for order in orders(2, seed=2):
        length = 12 * (2 * sum(order.chunk_rows) // 12 + 1)
        whole = sequence(order, 0, length)
        for world_size in (1, 2, 3, 4):
            for position in range(0, length, world_size):
                last = position + (length - position) // world_size * world_size
                assert np.array_equal(global_rows(order, world_size, position, last), whole[position:last])


def test_an_epoch_that_8_then_4_then_16_workers_train_shows_each_row_once():
    """The batches of a step have 64 rows, of 16, 8, or 4 per worker; steps change hands in the middle of the epoch."""
    rng = np.random.default_rng(0)
    chunk_rows = np.append(rng.integers(200, 257, 63), 7)
    total = int(chunk_rows.sum())
    order = Order(chunk_rows, 0, 1, count_streams(4, [16, 8, 4], len(chunk_rows)), seed=1)
    assert order.num_streams == 64
    turns = [0, 100 * 64, 150 * 64, 2 * total // 64 * 64]
    rows = [global_rows(order, size, *turn) for size, turn in zip((8, 4, 16), itertools.pairwise(turns), strict=True)]
    rows = np.concatenate(rows)
    assert sorted(rows[:total].tolist()) == list(range(total))
    assert len(set(rows[total:].tolist())) == len(rows) - total > total - 64


def test_epochs_and_seeds_are_permuted_differently():
    order = Order((20, 20, 20), 0, 1, 3, seed=0)
    epochs = sequence(order, 0, 120).reshape(2, 60)
    other = sequence(replace(order, seed=1), 0, 60)
    assert not np.array_equal(epochs[0], epochs[1]) and not np.array_equal(epochs[0], other)
    assert np.array_equal(np.sort(epochs[0]), np.sort(epochs[1])) and not np.array_equal(np.sort(epochs[0]), epochs[0])
    assert (np.abs(np.diff(epochs[0][::3])) != 1).sum() > 10  # a stream's rows are shuffled too


def test_a_batch_mixes_as_many_chunks_as_there_are_streams():
    rows = sequence(Order((50,) * 40, 0, 1, 8, seed=0), 0, 2000) // 50
    distinct = [len(set(batch.tolist())) for batch in rows.reshape(-1, 8)]
    assert min(distinct) == max(distinct) == 8
    assert len(set((sequence(Order((50,) * 4, 0, 1, 1, seed=0), 0, 50) // 50).tolist())) == 1


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_a_worker_reads_its_share_of_the_chunks_only(world_size):
    for rank in range(world_size):
        order, seen = Order((10,) * 80, rank, world_size, 8, seed=0), []
        sequence(order, 0, 2 * 800 // world_size, seen)
        assert sum(seen) == 2 * 80 // world_size


def test_streams_are_shared_by_every_number_of_workers_that_a_run_may_have():
    assert count_streams(16, [1], 10_000) == 16
    assert count_streams(16, [8], 10_000) == 128
    assert count_streams(16, [16, 8, 4], 10_000) == 256
    assert count_streams(16, [6, 4], 10_000) == 96
    assert count_streams(16, [8], 20) == 16  # no more than chunks
    assert count_streams(16, [8], 3) == 8  # but one for each worker


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_pieces_are_given_in_portions_and_the_rows_are_the_same(monkeypatch, most):
    order = Order((3, 5, 4, 2, 6), 1, 2, 2, seed=3)
    whole = sequence(order, 5, 40)
    monkeypatch.setattr(streams, "MOST_PIECES", most)
    seen = []
    assert np.array_equal(sequence(order, 5, 40, seen), whole)
    assert len(seen) > 1 and max(seen) <= most


def test_no_more_is_read_than_is_needed():
    order = Order((10,) * 10, 0, 1, 2, seed=0)
    for num_rows, pieces in ((1, 1), (2, 2), (20, 2), (21, 3), (100, 10), (101, 11)):
        seen = []
        sequence(order, 0, num_rows, seen)
        assert sum(seen) == pieces


def test_a_piece_is_dropped_after_its_last_row():
    order, held = Order((10,) * 10, 0, 1, 2, seed=0), []
    pieces = read_pieces(order, fake_load(order.chunk_rows), 0, 100)

    def count(pieces):
        for piece in pieces:
            held.append(piece)
            yield piece

    most = 0
    rows = batch_rows(order, count(pieces), 0, 100, 2)
    for _ in rows:
        most = max(most, len(rows.gi_frame.f_locals["opened"]))
    assert len(held) == 10 and most == 2 and not rows.gi_frame


def test_the_fields_of_a_row_stay_together_and_an_incomplete_batch_is_dropped():
    order = Order((3, 5, 4), 0, 1, 2, seed=0)
    batches = list(batch_rows(order, read_pieces(order, fake_load(order.chunk_rows), 2, 30), 2, 30, 4))
    assert len(batches) == 7
    for batch in batches:
        assert batch["mean"].shape == (4, 1, 1, 1)
        assert np.array_equal(batch["mean"].ravel(), -batch["std"])
        assert np.array_equal(batch["mean"].ravel(), batch["prompt"].ravel())


def test_rows_of_pieces_of_two_types_are_picked_as_the_wider_one():
    half, full = ({"mean": np.arange(3, dtype=kind)} for kind in ("f2", "f4"))
    assert pick_rows([(half, 2), (half, 0)])["mean"].dtype == np.float16
    both = pick_rows([(half, 2), (full, 1)])["mean"]
    assert both.dtype == np.float32 and both.tolist() == [2, 1]
