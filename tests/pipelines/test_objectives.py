"""What a denoiser learns, against numbers worked by hand."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

from common import errors
from pipelines.objectives import Diffusion, Flow
from utils import INSTANCE_NOISE, prior_preserving_loss, row_rng


def rows_of(*values):
    """A tensor [B, 1, 2, 2] whose row b is filled with values[b]."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None, None].repeat(1, 1, 2, 2)


@pytest.fixture
def sd3():
    return Flow(FlowMatchEulerDiscreteScheduler(shift=3.0))


@pytest.fixture
def flux():
    """Its scheduler shifts times by the size of a picture when it draws, and not in training."""
    return Flow(FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True))


# ---------------------------------------------------------------------------------------------------------------------
# Diffusion

# Cumulative products 0.64 and 0.36: square roots 0.8 and 0.6.
BETAS = [0.36, 0.4375]
SNR_BETAS = [0.1, 4 / 9, 0.8]  # cumulative products 0.9, 0.5 and 0.1: signal to noise 9, 1 and 1/9


def make_diffusion(prediction_type, betas=BETAS, snr_gamma=None):
    scheduler = DDPMScheduler(num_train_timesteps=len(betas), trained_betas=betas, prediction_type=prediction_type)
    return Diffusion(scheduler, snr_gamma)


def test_the_noisy_latents_are_told_their_timestep():
    """0.8 * 2 + 0.6 * -1 and 0.6 * 2 + 0.8 * 4."""
    index = torch.tensor([0, 1])
    noisy, time = make_diffusion("epsilon").noisy(rows_of(2.0, 2.0), rows_of(-1.0, 4.0), index)
    assert torch.allclose(noisy, rows_of(1.0, 4.4)) and torch.equal(time, index)


def test_timesteps_are_uniform():
    rng = row_rng(0, INSTANCE_NOISE, 0, 0)
    drawn = [Diffusion(DDPMScheduler(num_train_timesteps=4)).draw_time(rng) for _ in range(400)]
    counts = np.bincount(drawn)
    assert len(counts) == 4 and counts.min() > 70 and isinstance(drawn[0], int)


def test_the_target_of_epsilon_is_the_noise():
    noise = rows_of(3.0, -1.0)
    assert torch.equal(make_diffusion("epsilon").target(rows_of(1, 2), noise, torch.tensor([0, 1])), noise)


def test_the_target_of_v_prediction_is_the_velocity():
    """v = sqrt(abar) noise - sqrt(1 - abar) x0: 0.8 * 3 - 0.6 * 1 and 0.6 * -1 - 0.8 * 2."""
    target = make_diffusion("v_prediction").target(rows_of(1.0, 2.0), rows_of(3.0, -1.0), torch.tensor([0, 1]))
    assert torch.allclose(target, rows_of(1.8, -2.2))


def test_the_velocity_and_the_noisy_latents_give_the_latents_back():
    objective = make_diffusion("v_prediction")
    latents, noise, index = rows_of(0.7, -0.2), rows_of(1.1, 0.4), torch.tensor([0, 1])
    noisy, _ = objective.noisy(latents, noise, index)
    velocity = objective.target(latents, noise, index)
    signal = objective.scheduler.alphas_cumprod[index].sqrt()[:, None, None, None]
    assert torch.allclose(signal * noisy - (1 - signal**2).sqrt() * velocity, latents, atol=1e-6)


def test_another_prediction_type_is_bad_input():
    with pytest.raises(errors.BadInput, match="'sample'"):
        make_diffusion("sample").target(rows_of(1), rows_of(1), torch.tensor([0]))


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
    objective = make_diffusion(prediction_type, SNR_BETAS, gamma)
    for index in ([0, 1, 2], [2, 0, 2]):
        found = objective.row_weights(torch.tensor(index)).tolist()
        assert found == pytest.approx([weights[i] for i in index], rel=1e-5)
    assert make_diffusion(prediction_type, SNR_BETAS).row_weights(torch.tensor([0])) is None


def test_min_snr_weights_are_finite_at_zero_terminal_snr():
    scheduler = DDPMScheduler(
        beta_schedule="scaled_linear", prediction_type="v_prediction", rescale_betas_zero_snr=True
    )
    assert scheduler.alphas_cumprod[-1] == 0
    objective, index = Diffusion(scheduler, 5), torch.arange(1000)
    weights = objective.row_weights(index)
    assert torch.isfinite(weights).all() and (weights >= 0).all() and (weights <= 5 / 6 + 1e-6).all()
    latents, noise = torch.randn(2, 1000, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    target = objective.target(latents, noise, index)
    assert all(torch.isfinite(part) for part in prior_preserving_loss(noise, target, 500, 1, weights))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_min_snr_and_prior_preservation_together(size):
    """Each half is weighed by its own timesteps: a loss that halves the prediction alone fails at B = 2."""
    weights = make_diffusion("v_prediction", SNR_BETAS, 5).row_weights(torch.tensor([0] * size + [2] * size))
    losses = prior_preserving_loss(
        rows_of(*[1.0] * size, *[2.0] * size), torch.zeros(2 * size, 1, 2, 2), size, 1, weights
    )
    assert [part.item() for part in losses] == pytest.approx([0.5 + 0.4, 0.5, 0.4], rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Flow


def test_the_sigma_table_by_hand(sd3, flux):
    """From noise to latents; with shift 3, sigma = 3 s / (1 + 2 s): 0.5 becomes 0.75, 0.25 becomes 0.5."""
    ones, zeros, index = torch.ones(4, 1, 1, 1), torch.zeros(4, 1, 1, 1), torch.tensor([0, 500, 750, 999])
    for objective, sigmas in ((sd3, [1, 0.75, 0.5, 0.003 / 1.002]), (flux, [1, 0.5, 0.25, 0.001])):
        of_noise, time = objective.noisy(zeros, ones, index)
        of_latents, _ = objective.noisy(ones, zeros, index)
        assert of_noise.flatten().tolist() == pytest.approx(sigmas)
        assert of_latents.flatten().tolist() == pytest.approx([1 - sigma for sigma in sigmas])
        assert time.tolist() == pytest.approx([1000 * sigma for sigma in sigmas])


def test_each_row_has_its_own_sigma(flux):
    noisy, _ = flux.noisy(rows_of(2.0, 2.0), rows_of(-1.0, 4.0), torch.tensor([500, 750]))
    assert torch.allclose(noisy, rows_of(0.5, 2.5))


def test_all_times_differ(sd3, flux):
    """In bf16 only 353 and 506 would."""
    for objective in (sd3, flux):
        assert objective.timesteps.dtype == torch.float32 == objective.sigmas.dtype
        assert len(objective.timesteps.unique()) == 1000


def test_the_noisy_latents_without_the_velocity_are_the_latents(sd3):
    latents, noise, index = rows_of(0.7, -0.2), rows_of(1.1, 0.4), torch.tensor([100, 900])
    noisy, time = sd3.noisy(latents, noise, index)
    velocity = sd3.target(latents, noise, index)
    assert torch.allclose(noisy - (time / 1000)[:, None, None, None] * velocity, latents, atol=1e-6)
    assert sd3.row_weights(index) is None


def test_times_are_logit_normal(sd3):
    """The share of draws below an index i is the normal distribution's below logit(i / 1000)."""
    rng = row_rng(0, INSTANCE_NOISE, 0, 0)
    drawn = np.array([sd3.draw_time(rng) for _ in range(10_000)])
    assert drawn.min() >= 0 and drawn.max() < 1000 and isinstance(sd3.draw_time(rng), int)
    for index in (50, 100, 300, 500, 700, 900, 950):
        share = NormalDist().cdf(math.log(index / (1000 - index)))
        assert (drawn < index).mean() == pytest.approx(share, abs=0.02)


def test_a_table_that_drawing_has_replaced_is_refused():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(4)
    with pytest.raises(AssertionError, match="set_timesteps"):
        Flow(scheduler)
