"""What two or more scripts share: random draws and losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

# Streams of random numbers: two uses of the same (seed, step, row) draw different numbers.
INSTANCE_NOISE, CLASS_NOISE, CROP, ORDER, IMAGE, DROPOUT, SHUFFLE, ROW_NOISE, NO_CAPTION, VALIDATION = range(10)
ADAPTER = 10


# ---------------------------------------------------------------------------------------------------------------------
# Random draws


def row_rng(seed: int, stream: int, step: int, row: int) -> np.random.Generator:
    """Return the random number generator of one row: a function of these four values, on any machine of any cluster.

    Philox (Salmon et al., SC11) is counter-based: the seed and the stream are its key, step and row its counter.
    """
    return np.random.Generator(np.random.Philox(key=[seed, stream], counter=[0, 0, step, row]))


def image_seed(seed: int, index: int, attempt: int = 0) -> int:
    """Return the torch seed, below 2**31, of image `index`; `attempt` counts redraws of a flagged image."""
    return int(row_rng(seed, IMAGE, attempt, index).integers(2**31))


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the torch seed of a worker's step, for layers that use torch's own generator, such as dropout."""
    return int(row_rng(seed, DROPOUT, step, rank).integers(2**31))


def draw_noise(
    seed: int, stream: int, step: int, row: int, shape: Sequence[int], draw_time: Callable[[np.random.Generator], int]
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (noise, posterior noise, timestep) of a training row: float32 arrays of `shape`, an int.

    draw_time: of an objective.
    """
    rng = row_rng(seed, stream, step, row)
    noise, posterior_noise = rng.standard_normal((2, *shape), dtype=np.float32)
    return noise, posterior_noise, draw_time(rng)


# ---------------------------------------------------------------------------------------------------------------------
# Losses


def row_losses(model_pred: torch.Tensor, target: torch.Tensor, row_weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean squared error of each row [B], in float32; model_pred, target: [B, c, h, w].

    row_weights: [B] or None.
    """
    rows = (model_pred.float() - target.float()).square().flatten(1).mean(dim=1)  # B
    return rows if row_weights is None else rows * row_weights


def prior_preserving_loss(
    model_pred: torch.Tensor,
    target: torch.Tensor,
    num_instance: int,
    prior_loss_weight: float,
    row_weights: torch.Tensor | None = None,
    num_pairs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss, mean of the instance rows, mean of the class rows): arXiv 2208.12242, eq. 2.

    model_pred, target: [B, c, h, w], first `num_instance` instance rows, then class rows, if any. row_weights: [B] or
    None. Means are computed in float32. num_pairs: pairs in a batch whose rows are spread over several calls, whose
    results add up to its losses; default: the rows are a whole batch.
    """

    def mean(own: torch.Tensor) -> torch.Tensor:
        return own.mean() * (len(own) / (num_pairs or len(own))) if len(own) else own.sum()

    rows = row_losses(model_pred, target, row_weights)  # B
    instance_loss = mean(rows[:num_instance])
    if num_instance == len(rows):
        return instance_loss, instance_loss, instance_loss.new_zeros(())
    class_loss = mean(rows[num_instance:])
    return instance_loss + prior_loss_weight * class_loss, instance_loss, class_loss
