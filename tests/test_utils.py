"""Random draws, targets and losses, against numbers worked by hand."""

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler

from common import errors
from utils import (
    CLASS_NOISE,
    CROP,
    DROPOUT,
    IMAGE,
    INSTANCE_NOISE,
    ORDER,
    draw_noise,
    get_target,
    image_seed,
    min_snr_weights,
    prior_preserving_loss,
    row_rng,
    step_seed,
)

# ---------------------------------------------------------------------------------------------------------------------
# Random draws


def raw(*key, count=2):
    return tuple(int(number) for number in row_rng(*key).bit_generator.random_raw(count))


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
    noise, posterior_noise, timestep = draw_noise(0, INSTANCE_NOISE, 0, 0, (4, 8, 8), 1000)
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
    draws = [draw_noise(1, INSTANCE_NOISE, step, 0, (4, 8, 8), 4) for step in range(200)]
    noise = np.stack([draw[:2] for draw in [(a, b) for a, b, _ in draws]])
    assert noise.shape == (200, 2, 4, 8, 8) and noise.dtype == np.float32
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
    assert abs((noise[:, 0] * noise[:, 1]).mean()) < 0.02
    counts = np.bincount([timestep for _, _, timestep in draws])
    assert len(counts) == 4 and counts.min() > 25
    assert isinstance(draws[0][2], int)


# ---------------------------------------------------------------------------------------------------------------------
# Targets

# Cumulative products 0.64 and 0.36: square roots 0.8 and 0.6.
BETAS = [0.36, 0.4375]


def make_scheduler(prediction_type, betas=BETAS, **options):
    return DDPMScheduler(
        num_train_timesteps=len(betas), trained_betas=betas, prediction_type=prediction_type, **options
    )


def rows_of(*values):
    """A tensor [B, 1, 2, 2] whose row b is filled with values[b]."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None, None].repeat(1, 1, 2, 2)


def test_the_target_of_epsilon_is_the_noise():
    noise = rows_of(3.0, -1.0)
    assert torch.equal(get_target(make_scheduler("epsilon"), rows_of(1, 2), noise, torch.tensor([0, 1])), noise)


def test_the_target_of_v_prediction_is_the_velocity():
    """v = sqrt(abar) noise - sqrt(1 - abar) x0: 0.8 * 3 - 0.6 * 1 and 0.6 * -1 - 0.8 * 2."""
    target = get_target(make_scheduler("v_prediction"), rows_of(1.0, 2.0), rows_of(3.0, -1.0), torch.tensor([0, 1]))
    assert torch.allclose(target, rows_of(1.8, -2.2))


def test_the_velocity_and_the_noisy_latents_give_the_latents_back():
    scheduler = make_scheduler("v_prediction")
    latents, noise, timesteps = rows_of(0.7, -0.2), rows_of(1.1, 0.4), torch.tensor([0, 1])
    noisy_latents = scheduler.add_noise(latents, noise, timesteps)
    velocity = get_target(scheduler, latents, noise, timesteps)
    signal = scheduler.alphas_cumprod[timesteps].sqrt()[:, None, None, None]
    assert torch.allclose(signal * noisy_latents - (1 - signal**2).sqrt() * velocity, latents, atol=1e-6)


def test_another_prediction_type_is_bad_input():
    with pytest.raises(errors.BadInput, match="'sample'"):
        get_target(make_scheduler("sample"), rows_of(1), rows_of(1), torch.tensor([0]))


# ---------------------------------------------------------------------------------------------------------------------
# Losses


def loss_of(errors, num_instance, weight, row_weights=None, dtype=torch.float32):
    """The three losses of rows whose prediction is off by `errors`."""
    target = rows_of(*[0.5] * len(errors))
    parts = prior_preserving_loss(
        (target + rows_of(*errors)).to(dtype), target.to(dtype), num_instance, weight, row_weights
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


# ---------------------------------------------------------------------------------------------------------------------
# min-SNR

SNR_BETAS = [0.1, 4 / 9, 0.8]  # cumulative products 0.9, 0.5 and 0.1: signal to noise 9, 1 and 1/9


@pytest.mark.parametrize(
    ("prediction_type", "gamma", "weights"),
    [
        ("epsilon", 5, [5 / 9, 1, 1]),
        ("epsilon", 0.5, [0.5 / 9, 0.5, 1]),
        ("v_prediction", 5, [5 / 10, 1 / 2, 0.1]),
        ("v_prediction", 0.5, [0.5 / 10, 0.5 / 2, 0.1]),
    ],
)
def test_min_snr_weights(prediction_type, gamma, weights):
    scheduler = make_scheduler(prediction_type, SNR_BETAS)
    found = min_snr_weights(scheduler, torch.tensor([0, 1, 2]), gamma)
    assert found.tolist() == pytest.approx(weights, rel=1e-5)
    assert min_snr_weights(scheduler, torch.tensor([2, 0, 2]), gamma).tolist() == pytest.approx(
        [weights[2], weights[0], weights[2]], rel=1e-5
    )


def test_min_snr_weights_are_finite_at_zero_terminal_snr():
    scheduler = DDPMScheduler(
        beta_schedule="scaled_linear", prediction_type="v_prediction", rescale_betas_zero_snr=True
    )
    assert scheduler.alphas_cumprod[-1] == 0
    weights = min_snr_weights(scheduler, torch.arange(1000), 5)
    assert torch.isfinite(weights).all() and (weights >= 0).all() and (weights <= 5 / 6 + 1e-6).all()
    latents, noise = torch.randn(2, 1000, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    target = get_target(scheduler, latents, noise, torch.arange(1000))
    assert all(torch.isfinite(part) for part in prior_preserving_loss(noise, target, 500, 1, weights))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_min_snr_and_prior_preservation_together(size):
    """Each half is weighed by its own timesteps: a loss that halves the prediction alone fails at B = 2."""
    timesteps = torch.tensor([0] * size + [2] * size)
    weights = min_snr_weights(make_scheduler("v_prediction", SNR_BETAS), timesteps, 5)
    losses = loss_of([1] * size + [2] * size, size, 1, weights)
    assert losses == pytest.approx([0.5 + 0.4, 0.5, 0.4], rel=1e-5)
