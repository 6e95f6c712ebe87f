"""The rows that pre-training sees: each once an epoch, in an order that any step can be continued from."""

import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import make_raw_data
from tiny_models import RESOLUTION

from common import errors
from pretraining import streams
from pretraining.raw_data import list_sources
from pretraining.streams import (
    Batching,
    Order,
    RawImages,
    ahead,
    hold_out,
    make_load,
    rebatch,
    stream_rows,
    training_batches,
    validation_batches,
)


def fake_load(chunk_rows, seen=None):
    """Return load(pieces) of rows that hold their number in the data; `seen` gets the length of each call's pieces."""
    starts = np.cumsum([0, *chunk_rows])

    def load(pieces):
        if seen is not None:
            seen.append(len(pieces))
        for piece in pieces:
            assert 0 <= piece["first"] < piece["last"] <= chunk_rows[piece["chunk"]]
            numbers = (np.arange(piece["first"], piece["last"]) + starts[piece["chunk"]]).astype(np.float32)
            yield {"mean": numbers[:, None, None, None], "std": -numbers, "prompt": numbers[:, None, None]}

    return load


def sequence(order, position, num_rows):
    """Return the numbers of rows `position` to `position + num_rows` of an order."""
    windows = list(stream_rows(order, fake_load(order.chunk_rows), position, num_rows))
    return np.concatenate([window["mean"].ravel() for window in windows])[:num_rows].astype(int)


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
    assert np.array_equal(np.concatenate([window["mean"].ravel() for window in windows])[:40], whole)
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
    windows = [{"mean": part, "prompt": part} for part in np.split(numbers, np.cumsum(sizes)[:-1])]
    batches = list(rebatch(windows, 4))
    assert [batch["mean"].tolist() for batch in batches] == numbers[: len(numbers) // 4 * 4].reshape(-1, 4).tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Batches

CHUNK_ROWS = (5, 4, 7, 3, 6)
BATCHING = Batching(
    batch_size=2,
    gradient_accumulation_steps=2,
    caption_dropout=0.3,
    seed=5,
    num_train_timesteps=1000,
)
NO_CAPTION = np.full((1, 1), -1, np.float32)


def batches_of(first, last, rank=0, world_size=1, **changes):
    order = Order(CHUNK_ROWS, rank, world_size, 2, BATCHING.seed)
    load = fake_load(CHUNK_ROWS)
    return list(training_batches(order, load, first, last, replace(BATCHING, **changes), NO_CAPTION))


def assert_same(one, other):
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_batches_have_all_fields_in_their_types():
    import torch

    (batch, *rest) = batches_of(0, 3)
    assert len(rest) == 5
    shapes = {name: tuple(value.shape) for name, value in batch.items()}
    images = dict.fromkeys(("mean", "noise", "posterior_noise"), (2, 1, 1, 1))
    assert shapes == {**images, "prompt": (2, 1, 1), "std": (2,), "timesteps": (2,)}
    assert batch.pop("timesteps").dtype == torch.int64
    assert {value.dtype for value in batch.values()} == {torch.float32}
    assert batch["mean"].is_contiguous() and batch["prompt"].is_contiguous()


def test_from_any_step_the_batches_are_those_of_a_run_from_the_start():
    for world_size, rank in ((1, 0), (2, 1), (3, 0)):
        whole = batches_of(0, 20, rank, world_size)
        assert len(whole) == 40
        for step in range(20):
            rest = batches_of(step, 20, rank, world_size)
            assert len(rest) == 40 - 2 * step
            for one, other in zip(whole[2 * step :], rest, strict=True):
                assert_same(one, other)


def test_a_longer_run_begins_with_the_same_batches():
    for one, other in zip(batches_of(0, 3), batches_of(0, 9), strict=False):
        assert_same(one, other)


def test_noise_depends_on_seed_step_and_global_row_alone():
    import torch

    two = [batches_of(0, 4, rank, 2) for rank in range(2)]
    one = batches_of(0, 4, batch_size=4)
    for micro, batch in enumerate(one):
        for name in ("noise", "posterior_noise", "timesteps"):
            assert torch.cat([worker[micro][name] for worker in two]).equal(batch[name])
    noise = torch.cat([batch["noise"].ravel() for batch in one] + [batch["posterior_noise"].ravel() for batch in one])
    assert len(set(noise.tolist())) == len(noise) == 64
    other = torch.cat([batch["noise"].ravel() for batch in batches_of(0, 4, batch_size=4, seed=6)])
    assert not set(noise.tolist()) & set(other.tolist())


def test_every_row_without_its_caption_or_none():
    for batch in batches_of(0, 10, caption_dropout=0.0):
        assert batch["prompt"].ravel().equal(batch["mean"].ravel())
    for batch in batches_of(0, 10, caption_dropout=1.0):
        assert (batch["prompt"] == -1).all()


def test_a_share_of_the_rows_has_no_caption_whoever_takes_them():
    import torch

    size = {"batch_size": 8}
    prompts = torch.cat([batch["prompt"].ravel() for batch in batches_of(0, 100, **size)])
    rows = torch.cat([batch["mean"].ravel() for batch in batches_of(0, 100, **size)])
    dropped = prompts == -1
    assert prompts[~dropped].equal(rows[~dropped])
    assert abs(dropped.float().mean() - 0.3) < 0.05
    halves = [batches_of(0, 100, rank, 2, batch_size=4) for rank in range(2)]
    both = torch.cat([torch.cat([one["prompt"], other["prompt"]]).ravel() for one, other in zip(*halves, strict=True)])
    assert (both == -1).equal(dropped)


# ---------------------------------------------------------------------------------------------------------------------
# Validation


def test_the_last_rows_are_held_out():
    assert hold_out((3, 4, 5), 0) == ((3, 4, 5), [])
    piece = {"chunk": 2, "first": 3, "last": 5, "epoch": 0}
    assert hold_out((3, 4, 5), 2) == ((3, 4, 3), [piece])
    for num_rows in range(12):
        kept, pieces = hold_out((3, 4, 5), num_rows)
        assert sum(kept) == 12 - num_rows
        assert sum(piece["last"] - piece["first"] for piece in pieces) == num_rows
        for chunk, rows in enumerate(kept):
            lengths = [(piece["first"], piece["last"]) for piece in pieces if piece["chunk"] == chunk]
            assert lengths == ([(rows, (3, 4, 5)[chunk])] if rows < (3, 4, 5)[chunk] else [])


@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 11])
def test_workers_share_the_held_out_rows_whatever_their_number(num_rows):
    _, pieces = hold_out((3, 4, 5), num_rows)
    shared = {}
    for world_size in (1, 2, 3):
        places = [SimpleNamespace(rank=rank, world_size=world_size) for rank in range(world_size)]
        batches = [validation_batches(pieces, fake_load((3, 4, 5)), place, BATCHING) for place in places]
        assert len({len(each) for each in batches}) == 1
        rows, total = {}, 0.0
        for batch, weights in itertools.chain.from_iterable(batches):
            total += weights.sum().item()
            assert len(weights) == 2
            for i, weight in enumerate(weights.tolist()):
                fields = (batch[name][i].item() for name in ("noise", "posterior_noise", "timesteps"))
                if weight:
                    assert batch["mean"][i].item() not in rows
                    rows[batch["mean"][i].item()] = (weight, *fields)
        assert total == pytest.approx(1)
        shared[world_size] = rows
    assert shared[1] == shared[2] == shared[3]
    assert sorted(shared[1]) == list(range(12 - num_rows, 12))
    assert [fields[2] for fields in shared[1].values()] == [0.0] * num_rows
    timesteps = [fields[3] for fields in shared[1].values()]
    assert timesteps == [int((i + 0.5) / num_rows * 1000) for i in range(num_rows)]


# ---------------------------------------------------------------------------------------------------------------------
# Ahead


@pytest.mark.parametrize("count", [0, 1, 3, 20])
def test_ahead_gives_what_the_iterator_does(count):
    assert list(ahead(iter(range(10)), count)) == list(range(10))
    assert list(ahead(iter([]), count)) == []


def test_ahead_works_some_items_ahead():
    done = []
    fourth = threading.Event()

    def work():
        for item in range(10):
            done.append(item)
            if item == 3:
                fourth.set()
            yield item

    iterator = ahead(work(), 3)
    assert next(iterator) == 0
    assert fourth.wait(10) and len(done) == 4
    iterator.close()


def test_ahead_passes_an_exception_on_at_its_place():
    def work():
        yield from range(3)
        raise errors.BadInput("row 3")

    iterator = ahead(work(), 2)
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(errors.BadInput, match="row 3"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_ahead_can_be_closed_early():
    iterator = ahead(itertools.count(), 3)
    next(iterator)
    closing = threading.Thread(target=iterator.close)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    unused = ahead(itertools.count(), 3)
    unused.close()


# ---------------------------------------------------------------------------------------------------------------------
# Raw data


def raw_images(folder, tiny_model, max_bad_fraction=0.25, random_crop=False):
    loader = {"resolutions": (RESOLUTION,), "random_crop": random_crop, "random_flip": False}
    loader |= {"seed": 0, "timeout": 1.0, "retries": 0}
    encoder = {"model_dir": str(tiny_model), "resolutions": (RESOLUTION,), "batch_size": 4, "mixed_precision": "no"}
    sources = tuple(map(vars, list_sources(str(folder))))
    return RawImages(sources, 4, loader, encoder, max_bad_fraction)


def piece(chunk, first, last, epoch=0):
    return {"chunk": chunk, "first": first, "last": last, "epoch": epoch}


def test_raw_data_comes_in_the_chunks_that_preprocess_writes(raw_data, tiny_model):
    data = raw_images(raw_data, tiny_model)
    assert data.chunk_rows == (4, 4, 4, 4, 4, 3)
    (chunk,) = data(piece(1, 1, 3))
    assert [key.rpartition(":")[2] for key in chunk["keys"]] == ["5", "6"]
    assert chunk["captions"] == ["picture 0", "picture 1"] and chunk["pixels_16"].shape == (2, 16, 16, 3)
    (whole,) = data(piece(1, 0, 4))
    assert np.array_equal(whole["pixels_16"][1:3], chunk["pixels_16"])


def test_random_crops_differ_by_epoch_and_not_by_piece(raw_data, tiny_model):
    data = raw_images(raw_data, tiny_model, random_crop=True)
    crops = [next(data(piece(1, 0, 4, epoch)))["pixels_16"] for epoch in (0, 1)]
    assert not np.array_equal(*crops)
    assert np.array_equal(next(data(piece(1, 2, 4, 1)))["pixels_16"], crops[1][2:])


def test_other_rows_stand_in_for_a_bad_one(tmp_path, tiny_model):
    folder = make_raw_data(tmp_path / "raw", 8)
    (folder / "01.png").write_text("no image")
    data = raw_images(folder, tiny_model)
    (chunk,) = data(piece(0, 0, 4))
    assert [key.rpartition(":")[2] for key in chunk["keys"]] == ["0", "2", "3", "0"]
    assert chunk["captions"] == ["picture 0", "picture 2", "picture 3", "picture 0"]
    assert np.array_equal(chunk["pixels_16"][0], chunk["pixels_16"][3]) and len(chunk["pixels_16"]) == 4
    (arrays,) = make_load(data, {"num_workers": 0})([piece(0, 0, 4)])
    assert {name: len(values) for name, values in arrays.items()} == {"mean": 4, "std": 4, "prompt": 4}


def test_too_many_bad_rows_are_bad_input(tmp_path, tiny_model):
    folder = make_raw_data(tmp_path / "raw", 8)
    for name in ("01.png", "02.png"):
        (folder / name).write_text("no image")
    words = r"2 of 4 rows of metadata\.jsonl are bad, more than --max_bad_fraction 0\.01 allows; the first is .*:1: "
    with pytest.raises(errors.BadInput, match=words):
        list(raw_images(folder, tiny_model, 0.01)(piece(0, 0, 4)))
    assert len(next(raw_images(folder, tiny_model, 0.5)(piece(0, 0, 4)))["keys"]) == 4
    (chunk,) = raw_images(folder, tiny_model, 0.5)(piece(0, 1, 3))  # a piece without a good row takes its chunk's
    assert chunk["captions"] == ["picture 0", "picture 3"]
    for name in ("00.png", "03.png"):
        (folder / name).unlink()
    with pytest.raises(errors.BadInput, match="4 of 4 rows"):
        list(raw_images(folder, tiny_model, 1.0)(piece(0, 0, 4)))
