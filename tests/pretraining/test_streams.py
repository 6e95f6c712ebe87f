"""The rows that pre-training sees: each once an epoch, in an order that any step can be continued from."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from fake_rows import fake_load

from pretraining import streams
from pretraining.streams import Order, Window, rebatch, stream_rows


def sequence(order, position, num_rows):
    """Return the numbers of rows `position` to `position + num_rows` of an order."""
    windows = list(stream_rows(order, fake_load(order.chunk_rows), position, num_rows))
    return np.concatenate([window.take(0, len(window))["mean"].ravel() for window in windows])[:num_rows].astype(int)


def orders(count, seed=0):
    """Yield lists of the orders of all workers, of many sizes; some chunks are empty."""
    rng = np.random.default_rng(seed)
    for case in range(count):
        chunk_rows = tuple(rng.integers(0, 9, size=rng.integers(1, 9)).tolist())
        for world_size, window in itertools.product((1, 2, 3, 4), (1, 2, 5, 100)):
            if sum(chunk_rows) >= world_size:
                yield [Order(chunk_rows, rank, world_size, window, seed=case) for rank in range(world_size)]


# ---------------------------------------------------------------------------------------------------------------------
# The order


def test_each_epoch_shows_each_row_at_most_once_and_every_worker_as_many():
    count = 0
    for workers in orders(25):
        length = sum(workers[0].chunk_rows) // len(workers)
        assert {worker.rows_per_epoch for worker in workers} == {length}
        epochs = [sequence(worker, 0, 3 * length).reshape(3, length) for worker in workers]
        for epoch in range(3):
            rows = np.concatenate([each[epoch] for each in epochs])
            assert len(rows) == len(set(rows.tolist())) == len(workers) * length
            assert set(rows.tolist()) <= set(range(sum(workers[0].chunk_rows)))
        count += 1
    assert count > 200


def test_no_window_crosses_an_epoch_or_holds_more_chunks_than_asked():
    for order in itertools.chain.from_iterable(orders(8, seed=1)):
        length = 0
        for pieces, permutation, skip in itertools.islice(order.windows(0), 12):
            assert len({piece["epoch"] for piece in pieces}) == 1 and skip == 0
            assert 1 <= len(pieces) <= order.window
            rows = sum(piece["last"] - piece["first"] for piece in pieces)
            assert sorted(permutation.tolist()) == list(range(rows))
            assert pieces[0]["epoch"] == length // order.rows_per_epoch
            length += rows


def test_from_any_position_the_windows_are_the_tail():
    for order in itertools.chain.from_iterable(orders(5, seed=2)):
        length = 2 * order.rows_per_epoch + 1
        whole = sequence(order, 0, length)
        for position in range(length):
            assert np.array_equal(sequence(order, position, length - position), whole[position:])


def test_epochs_and_seeds_are_permuted_differently():
    order = Order((20, 20, 20), 0, 1, 3, seed=0)
    epochs = sequence(order, 0, 120).reshape(2, 60)
    other = sequence(replace(order, seed=1), 0, 60)
    assert not np.array_equal(epochs[0], epochs[1]) and not np.array_equal(epochs[0], other)
    assert np.array_equal(np.sort(epochs[0]), np.sort(epochs[1])) and not np.array_equal(np.sort(epochs[0]), epochs[0])


def test_what_does_not_share_out_is_another_row_each_epoch():
    """Over the epochs every row is seen, though three workers never take a multiple of three of them."""
    workers = [Order((7, 6, 7), rank, 3, 2, seed=0) for rank in range(3)]
    epochs = np.concatenate([sequence(worker, 0, 12 * 6).reshape(12, 6) for worker in workers], axis=1)
    left_out = [set(range(20)) - set(epoch.tolist()) for epoch in epochs]
    assert {len(rows) for rows in left_out} == {2} and len(set(map(frozenset, left_out))) > 2
    assert set.union(*map(set, epochs.tolist())) == set(range(20))


def test_a_window_mixes_its_chunks_and_one_chunk_stays_together():
    chunks = [sequence(Order((50,) * 4, 0, 1, window, seed=0), 0, 200) // 50 for window in (1, 4)]
    changes = [(np.diff(each) != 0).sum() for each in chunks]
    assert changes[0] == 3 and changes[1] > 100


# ---------------------------------------------------------------------------------------------------------------------
# Streams


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_pieces_are_given_in_portions_and_the_rows_are_the_same(monkeypatch, most):
    order = Order((3, 5, 4, 2, 6), 1, 2, 2, seed=3)
    whole = sequence(order, 5, 40)
    monkeypatch.setattr(streams, "MOST_PIECES", most)
    seen = []
    windows = stream_rows(order, fake_load(order.chunk_rows, seen), 5, 40)
    rows = [window.take(0, len(window))["mean"].ravel() for window in windows]
    assert np.array_equal(np.concatenate(rows)[:40], whole)
    assert len(seen) > 1 and max(seen) < most + order.window


def test_no_more_is_read_than_is_needed():
    order = Order((10,) * 10, 0, 1, 2, seed=0)
    for num_rows, pieces in ((1, 2), (20, 2), (21, 4), (100, 10), (101, 12)):
        seen = []
        list(stream_rows(order, fake_load(order.chunk_rows, seen), 0, num_rows))
        assert sum(seen) == pieces


def test_the_fields_of_a_row_stay_together():
    order = Order((3, 5, 4), 0, 1, 2, seed=0)
    for batch in rebatch(stream_rows(order, fake_load(order.chunk_rows), 2, 30), 4):
        assert np.array_equal(batch["mean"].ravel(), -batch["std"])
        assert np.array_equal(batch["mean"].ravel(), batch["prompt"].ravel())


@pytest.mark.parametrize("sizes", [[3, 1, 7, 2], [1] * 13, [13], [4, 4, 4, 1], [2]])
def test_batches_run_over_windows_and_what_is_left_waits(sizes):
    numbers = np.arange(sum(sizes))
    parts = [{"mean": part, "prompt": part} for part in np.split(numbers, np.cumsum(sizes)[:-1])]
    windows = [Window([part], np.arange(len(part["mean"]))) for part in parts]
    batches = list(rebatch(windows, 4))
    assert [batch["mean"].tolist() for batch in batches] == numbers[: len(numbers) // 4 * 4].reshape(-1, 4).tolist()
