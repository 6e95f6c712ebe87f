"""batches.py: noise, captions, held-out rows, and batches made ahead."""

import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from diffusers import DDPMScheduler
from fake_rows import fake_load

from common import errors
from pipelines.objectives import Diffusion
from pretraining.batches import Batching, ahead, choose_rows, hold_out, training_batches, validation_batches
from pretraining.streams import Order

# ---------------------------------------------------------------------------------------------------------------------
# Batches

CHUNK_ROWS = (5, 4, 7, 3, 6)
BATCHING = Batching(
    batch_size=2,
    gradient_accumulation_steps=2,
    caption_dropout=0.3,
    seed=5,
    objective=Diffusion(DDPMScheduler()),
)
NO_CAPTION = {"prompt": np.full((1, 1), -1, np.float16)}


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


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 2), (4, 1), (1, 4)])
def test_the_rows_of_a_step_and_their_noise_do_not_depend_on_the_number_of_workers(world_size, accumulation):
    import torch

    options = {"gradient_accumulation_steps": accumulation}
    workers = [batches_of(0, 9, rank, world_size, **options) for rank in range(world_size)]
    whole = batches_of(0, 9, batch_size=8, gradient_accumulation_steps=1)
    for step, batch in enumerate(whole):
        own = slice(step * accumulation, (step + 1) * accumulation)
        for name, values in batch.items():
            shares = [torch.cat([part[name] for part in worker[own]]) for worker in workers]
            assert torch.stack(shares, dim=1).flatten(0, 1).equal(values)


def test_noise_depends_on_the_seed_and_no_two_rows_share_it():
    import torch

    one = batches_of(0, 4, batch_size=4)
    noise = torch.cat([batch["noise"].ravel() for batch in one] + [batch["posterior_noise"].ravel() for batch in one])
    assert len(set(noise.tolist())) == len(noise) == 64
    other = torch.cat([batch["noise"].ravel() for batch in batches_of(0, 4, batch_size=4, seed=6)])
    assert not set(noise.tolist()) & set(other.tolist())


def test_every_row_without_its_caption_or_none():
    for batch in batches_of(0, 10, caption_dropout=0.0):
        assert batch["prompt"].ravel().equal(batch["mean"].ravel())
    for batch in batches_of(0, 10, caption_dropout=1.0):
        assert (batch["prompt"] == -1).all()


def test_all_fields_of_a_caption_are_dropped_together():
    load = fake_load(CHUNK_ROWS)
    both = lambda pieces: ({**part, "pooled": part["mean"].reshape(-1, 1)} for part in load(pieces))  # noqa: E731
    no_caption = {**NO_CAPTION, "pooled": np.full(1, -1, np.float16)}
    order = Order(CHUNK_ROWS, 0, 1, 2, BATCHING.seed)
    batches = list(training_batches(order, both, 0, 20, BATCHING, no_caption))
    dropped = [(batch["prompt"].ravel() == -1).tolist() for batch in batches]
    assert {False, True} == {each for row in dropped for each in row}
    for batch in batches:
        assert batch["pooled"].ravel().equal(batch["prompt"].ravel())


def test_a_share_of_the_rows_has_no_caption_whoever_takes_them():
    import torch

    size = {"batch_size": 8}
    prompts = torch.cat([batch["prompt"].ravel() for batch in batches_of(0, 100, **size)])
    rows = torch.cat([batch["mean"].ravel() for batch in batches_of(0, 100, **size)])
    dropped = prompts == -1
    assert prompts[~dropped].equal(rows[~dropped])
    assert abs(dropped.float().mean() - 0.3) < 0.05
    halves = [batches_of(0, 100, rank, 2, batch_size=4) for rank in range(2)]
    both = torch.cat(
        [torch.stack([one["prompt"], other["prompt"]], 1).ravel() for one, other in zip(*halves, strict=True)]
    )
    assert (both == -1).equal(dropped)


# ---------------------------------------------------------------------------------------------------------------------
# Validation


def test_the_last_rows_are_held_out():
    kept, pieces = hold_out(np.array((3, 4, 5)), 0)
    assert kept.tolist() == [3, 4, 5] and pieces == []
    piece = {"chunk": 2, "first": 3, "last": 5, "epoch": 0}
    kept, pieces = hold_out(np.array((3, 4, 5)), 2)
    assert kept.tolist() == [3, 4, 3] and pieces == [piece]
    for num_rows in range(12):
        kept, pieces = hold_out((3, 4, 5), num_rows)
        assert sum(kept) == 12 - num_rows
        assert sum(piece["last"] - piece["first"] for piece in pieces) == num_rows
        for chunk, rows in enumerate(kept):
            lengths = [(piece["first"], piece["last"]) for piece in pieces if piece["chunk"] == chunk]
            assert lengths == ([(rows, (3, 4, 5)[chunk])] if rows < (3, 4, 5)[chunk] else [])


def test_the_first_rows_of_another_data_set_take_none_from_training():
    rows = np.array((3, 4, 5))
    assert [pieces for _, pieces in (choose_rows(rows, 2), hold_out(rows, 2))] == [hold_out(rows, 2)[1]] * 2
    for num_rows, ends in ((0, [2, 6]), (8, [2, 6]), (1, [1]), (3, [2, 1])):
        kept, pieces = choose_rows(rows, num_rows, np.array((2, 6)))
        assert kept.tolist() == [3, 4, 5]
        assert pieces == [{"chunk": i, "first": 0, "last": last, "epoch": 0} for i, last in enumerate(ends)]


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
