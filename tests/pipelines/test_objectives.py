"""What a denoiser learns, against numbers worked by hand."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from pipelines.objectives import Flow
from utils import INSTANCE_NOISE, row_rng


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
