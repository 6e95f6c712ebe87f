"""Sampler flags, and the scheduler that a pipeline draws with."""

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from common.cli import non_negative_float, positive_int

SAMPLER = ("sampler", "num_inference_steps", "guidance_scale", "negative_prompt", "height", "width")


def add_sampler_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags in SAMPLER."""
    help_text = "scheduler to draw with; model: the model's own; dpm++: DPM-Solver++, which needs only 20 to 25 steps"
    group.add_argument("--sampler", choices=("model", "dpm++"), default="model", help=help_text)
    help_text = "denoising steps per image; default: by the model, 50 for Stable Diffusion, 28 for SD 3 and FLUX"
    group.add_argument("--num_inference_steps", type=positive_int, help=help_text)
    help_text = "guidance scale; default: by the model, 7.5 for Stable Diffusion, 5 for SDXL, 7 for SD 3, 3.5 for FLUX"
    group.add_argument("--guidance_scale", type=non_negative_float, help=help_text)
    group.add_argument("--negative_prompt", default="", help="prompt for what the images should not show")
    group.add_argument("--height", type=positive_int, help="image height in pixels; default: the model's own")
    group.add_argument("--width", type=positive_int, help="image width in pixels; default: the model's own")


@contextlib.contextmanager
def use_sampler(pipeline: Any, sampler: str) -> Iterator[None]:
    """Temporarily replace the scheduler of a pipeline.

    sampler: `model` keeps the pipeline's own; `dpm++` is second-order DPM-Solver++ (arXiv 2211.01095) on the same
    noise schedule, which needs at most half the steps.
    """
    own: Any = getattr(pipeline, "scheduler", None)
    if sampler == "dpm++":
        from diffusers import DPMSolverMultistepScheduler

        pipeline.scheduler = DPMSolverMultistepScheduler.from_config(own.config)
    try:
        yield
    finally:
        pipeline.scheduler = own
