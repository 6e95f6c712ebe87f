"""Random draws and losses, against numbers worked by hand."""

import numpy as np
import pytest
import torch

from utils import (
    CLASS_NOISE,
    CROP,
    DROPOUT,
    IMAGE,
    INSTANCE_NOISE,
    ORDER,
    draw_noise,
    image_seed,
    prior_preserving_loss,
    row_rng,
    step_seed,
)

# ---------------------------------------------------------------------------------------------------------------------
# Random draws


def raw(*key, count=2):
    return tuple(int(number) for number in row_rng(*key).bit_generator.random_raw(count))


def uniform(count):
    return lambda rng: int(rng.integers(count))


def test_every_part_of_the_key_gives_other_numbers():
    keys = [
        (seed, stream, step, row)
        for seed in (0, 1, 2**40)
        for stream in (INSTANCE_NOISE, CLASS_NOISE, CROP, ORDER, IMAGE, DROPOUT)
        for step in (0, 1, 2, 400)
        for row in (0, 1, 2, 63)
    ]
    assert len({raw(*key) for key in keys}) == len(keys)
    assert len({number for key in keys for number in raw(*key, count=16)}) == 16 * len(keys)


def test_the_same_key_gives_the_same_numbers_whatever_was_drawn_before():
    row_rng(3, CROP, 1, 2).standard_normal(1000)
    np.random.seed(1)
    first = raw(3, CROP, 1, 2)
    np.random.seed(2)
    assert raw(3, CROP, 1, 2) == first


def test_the_generator_is_pinned():
    """Another generator would give a resumed run, and a redrawn image, other numbers: a decision, not an accident."""
    assert raw(0, INSTANCE_NOISE, 0, 0) == (213000021201967259, 4455796210202625458)
    assert raw(7, CLASS_NOISE, 400, 3) == (16056301126472626982, 15965086865758411064)
    assert [image_seed(0, index) for index in range(3)] == [1943096641, 347685185, 1777197667]
    assert (image_seed(42, 7), image_seed(42, 7, attempt=1)) == (59872231, 1336010240)
    assert step_seed(0, 0, 0) == 954712299
    noise, posterior_noise, timestep = draw_noise(0, INSTANCE_NOISE, 0, 0, (4, 8, 8), uniform(1000))
    assert noise.ravel()[:3] == pytest.approx([0.05991104, 0.01555963, -1.1644385])
    assert posterior_noise.ravel()[:3] == pytest.approx([0.80624443, 0.8897767, -1.2396923])
    assert timestep == 932


def test_image_and_step_seeds_are_distinct_and_fit_torch():
    images = {image_seed(seed, index, attempt) for seed in range(3) for index in range(50) for attempt in range(3)}
    steps = {step_seed(seed, step, rank) for seed in range(3) for step in range(50) for rank in range(4)}
    assert len(images) == 450 and len(steps) == 600
    assert all(0 <= seed < 2**31 for seed in images | steps)
    assert not images & steps


def test_noise_is_normal_and_timesteps_are_uniform():
    draws = [draw_noise(1, INSTANCE_NOISE, step, 0, (4, 8, 8), uniform(4)) for step in range(200)]
    noise = np.stack([draw[:2] for draw in [(a, b) for a, b, _ in draws]])
    assert noise.shape == (200, 2, 4, 8, 8) and noise.dtype == np.float32
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
    assert abs((noise[:, 0] * noise[:, 1]).mean()) < 0.02
    counts = np.bincount([timestep for _, _, timestep in draws])
    assert len(counts) == 4 and counts.min() > 25
    assert isinstance(draws[0][2], int)


# ---------------------------------------------------------------------------------------------------------------------
# Losses


def rows_of(*values):
    """A tensor [B, 1, 2, 2] whose row b is filled with values[b]."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None, None].repeat(1, 1, 2, 2)


def loss_of(errors, num_instance, weight, row_weights=None, dtype=torch.float32, num_pairs=None):
    """The three losses of rows whose prediction is off by `errors`."""
    target = rows_of(*[0.5] * len(errors))
    parts = prior_preserving_loss(
        (target + rows_of(*errors)).to(dtype), target.to(dtype), num_instance, weight, row_weights, num_pairs
    )
    assert all(part.dtype == torch.float32 and part.shape == () for part in parts)
    return [part.item() for part in parts]


@pytest.mark.parametrize("weight", [0, 0.5, 1])
@pytest.mark.parametrize(
    ("errors", "num_instance", "instance", "other"),
    [
        ([1, 2], 1, 1, 4),
        ([1, 2, 3, 0], 2, 2.5, 4.5),
        ([1, 2, 3, 0, 2, 4], 3, 14 / 3, 20 / 3),
        ([2, 1, 3, 5], 1, 4, 35 / 3),  # one instance row, three class rows
        ([1, 2, 3], 2, 2.5, 9),  # two and one: what chunk(2) would get right by chance
        ([1, 2, 3], 1, 1, 6.5),  # and wrong
    ],
)
def test_the_loss_is_the_instance_mean_and_the_weighted_class_mean(errors, num_instance, instance, other, weight):
    assert loss_of(errors, num_instance, weight) == pytest.approx([instance + weight * other, instance, other])


@pytest.mark.parametrize("errors", [[2], [1, 2], [1, 2, 3]])
def test_without_class_rows_the_loss_is_the_plain_mean(errors):
    mean = sum(error**2 for error in errors) / len(errors)
    assert loss_of(errors, len(errors), 1) == pytest.approx([mean, mean, 0])


def test_the_losses_of_the_passes_of_a_batch_add_up_to_its_own():
    """Three pairs in passes of two instance rows, of one instance and two class rows, and of one class row."""
    whole = loss_of([1, 2, 3, 0, 2, 4], 3, 0.5)
    parts = [loss_of(errors, count, 0.5, num_pairs=3) for errors, count in (([1, 3], 2), ([2, 0, 4], 1), ([2], 0))]
    assert [sum(each) for each in zip(*parts, strict=True)] == pytest.approx(whole) == [14 / 3 + 10 / 3, 14 / 3, 20 / 3]


def test_row_weights_apply_to_their_own_row_of_each_half():
    weights = torch.tensor([1, 0.5, 0.25, 2])
    # rows 1, 4, 9, 16: instance (1 * 1 + 4 * 0.5) / 2, class (9 * 0.25 + 16 * 2) / 2
    assert loss_of([1, 2, 3, 4], 2, 0.5, weights) == pytest.approx([1.5 + 0.5 * 17.125, 1.5, 17.125])
    assert loss_of([1, 2], 1, 1, torch.tensor([3.0, 0.5])) == pytest.approx([5, 3, 2])
    assert loss_of([1, 2, 3], 3, 1, torch.tensor([3, 0, 1])) == pytest.approx([4, 4, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    """The square of 300 is no float16, and 4,096 bf16 numbers would sum to a multiple of 256."""
    assert loss_of([300, 200], 1, 1, dtype=torch.float16)[1] == pytest.approx(90_000, rel=5e-3)
    error = torch.full((1, 1, 64, 64), 0.1, dtype=dtype)
    loss = prior_preserving_loss(error, torch.zeros_like(error), 1, 1)[0]
    assert loss.item() == pytest.approx(error[0, 0, 0, 0].item() ** 2, rel=1e-5)


def test_the_gradient_of_each_half_is_its_own_mean():
    prediction = rows_of(1.0, 1.0, 1.0).requires_grad_()
    prior_preserving_loss(prediction, rows_of(0, 0, 0), 1, 0.5)[0].backward()
    assert prediction.grad[:, 0, 0, 0].tolist() == pytest.approx([2 / 4, 0.5 * 2 / 8, 0.5 * 2 / 8])
