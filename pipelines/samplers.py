"""Samplers: their flags, and which scheduler a pipeline draws with."""

import contextlib

from common.cli import non_negative_float, positive_int

SAMPLER = ("sampler", "num_inference_steps", "guidance_scale", "negative_prompt", "height", "width")


def add_sampler_flags(group):
    """Add the flags of SAMPLER."""
    help_text = "model: the model's own; dpm++: DPM-Solver++, good with 20 to 25 steps"
    group.add_argument("--sampler", choices=("model", "dpm++"), default="model", help=help_text)
    group.add_argument("--num_inference_steps", type=positive_int, default=50, help="denoising steps an image")
    group.add_argument("--guidance_scale", type=non_negative_float, default=7.5, help="weight of the prompt")
    group.add_argument("--negative_prompt", default="", help="what not to draw")
    group.add_argument("--height", type=positive_int, help="pixels; default: the model's own")
    group.add_argument("--width", type=positive_int, help="pixels; default: the model's own")


@contextlib.contextmanager
def use_sampler(pipeline, sampler):
    """Let a pipeline draw with another scheduler for a while.

    sampler: `model`, the scheduler that the pipeline has, or `dpm++`, DPM-Solver++ of second order (arXiv 2211.01095)
    on the same noise schedule, which needs half the steps or fewer.
    """
    own = getattr(pipeline, "scheduler", None)
    if sampler == "dpm++":
        from diffusers import DPMSolverMultistepScheduler

        pipeline.scheduler = DPMSolverMultistepScheduler.from_config(own.config)
    try:
        yield
    finally:
        pipeline.scheduler = own
