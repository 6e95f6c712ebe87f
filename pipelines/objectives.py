"""What a denoiser learns to predict: the noise of a diffusion, or the velocity of a flow.

An objective draws the time of a training row, as an index into the scheduler's own table, and gives for a batch of
indices the noisy latents, the time that the denoiser is told, the target and the weight of each row in the loss.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from common.errors import BadInput

if TYPE_CHECKING:
    import numpy as np
    import torch


class Diffusion:
    """Denoising diffusion (arXiv 2006.11239): predict the noise, or the velocity of arXiv 2202.00512, appendix D.

    noise_scheduler: a DDPMScheduler. snr_gamma: of the min-SNR weights (arXiv 2303.09556), None for equal weights.
    """

    def __init__(self, noise_scheduler: Any, snr_gamma: float | None = None) -> None:
        self.scheduler, self.snr_gamma = noise_scheduler, snr_gamma
        self.num_train_timesteps: int = noise_scheduler.config.num_train_timesteps

    def draw_time(self, rng: np.random.Generator) -> int:
        """Return a timestep, uniform in [0, num_train_timesteps)."""
        return int(rng.integers(self.num_train_timesteps))

    def noisy(
        self, latents: torch.Tensor, noise: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (noisy latents [B, c, h, w], time [B]); index: timesteps [B]."""
        return self.scheduler.add_noise(latents, noise, index), index

    def target(self, latents: torch.Tensor, noise: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the target of the prediction, [B, c, h, w], by the scheduler's `prediction_type`."""
        prediction_type = self.scheduler.config.prediction_type
        if prediction_type == "epsilon":
            return noise
        if prediction_type == "v_prediction":
            return self.scheduler.get_velocity(latents, noise, index)
        raise BadInput(f"the scheduler's prediction_type {prediction_type!r} is not epsilon or v_prediction")

    def row_weights(self, index: torch.Tensor) -> torch.Tensor | None:
        """Return the min-SNR weight of each row [B] (arXiv 2303.09556, section 3.4), or None for equal weights."""
        if self.snr_gamma is None:
            return None
        alphas_cumprod = self.scheduler.alphas_cumprod.to(index.device)[index]
        snr = alphas_cumprod / (1 - alphas_cumprod)
        if self.scheduler.config.prediction_type == "v_prediction":
            return snr.clamp(max=self.snr_gamma) / (snr + 1)
        return snr.clamp(max=self.snr_gamma) / snr


class Flow:
    """Rectified flow (arXiv 2403.03206, sections 2 and 3.1): predict the velocity from the latents to the noise.

    noise_scheduler: a FlowMatchEulerDiscreteScheduler as loaded, whose table still has all `num_train_timesteps` rows,
    from noise to latents. Sigmas and times are float32: in bf16 neighbouring times would be equal.
    """

    def __init__(self, noise_scheduler: Any) -> None:
        self.sigmas, self.timesteps = noise_scheduler.sigmas.float(), noise_scheduler.timesteps.float()
        self.num_train_timesteps: int = noise_scheduler.config.num_train_timesteps
        assert len(self.timesteps) == self.num_train_timesteps, "the scheduler's table was replaced by set_timesteps"

    def draw_time(self, rng: np.random.Generator) -> int:
        """Return an index in [0, num_train_timesteps), of logit-normal density (section 3.1)."""
        return int(self.num_train_timesteps / (1 + math.exp(-rng.standard_normal())))

    def noisy(
        self, latents: torch.Tensor, noise: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (noisy latents [B, c, h, w], time [B] float32)."""
        sigmas = self.sigmas.to(index.device)[index][:, None, None, None]
        return (1 - sigmas) * latents + sigmas * noise, self.timesteps.to(index.device)[index]

    def target(self, latents: torch.Tensor, noise: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the velocity, [B, c, h, w]: the same at all times."""
        return noise - latents

    def row_weights(self, index: torch.Tensor) -> None:
        """Return None: all rows weigh the same, as the density of the times is the weighting."""
        return None


Objective = Diffusion | Flow
