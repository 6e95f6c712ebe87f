"""What train.py and pretrain.py check before they train, in the driver and within seconds."""

import argparse
from collections.abc import Sequence
from typing import Any

from common import cli, targets
from pipelines.configs import check_resolution
from pipelines.families import find_family
from pipelines.model_folder import check_pipeline, digest_model

PIPELINES = ("StableDiffusionPipeline",)  # classes of the models that can be trained


def check_inputs(
    args: argparse.Namespace, settings: Sequence[str], prompts: str, **inputs: str | None
) -> dict[str, Any]:
    """Check the model, the resolution, the prompts and the folders; return the settings that decide the weights.

    Without --resolution, sets it to the model's own. settings: names of flags; the digest of the model is added.
    prompts: the flag of the prompts to draw. inputs: folders by flag that --output_dir must not replace.
    """
    check_pipeline(args.model_dir)
    sizes = find_family(args.model_dir, PIPELINES).sizes(args.model_dir)
    args.resolution = args.resolution or sizes.resolution
    check_resolution(args.model_dir, "--resolution", args.resolution, sizes.multiple)
    for prompt in getattr(args, prompts):
        cli.check_text(f"--{prompts}", prompt)
    targets.check_apart(args.output_dir, work_dir=args.work_dir, model_dir=args.model_location, **inputs)
    for name in ("output_dir", "work_dir"):
        targets.check_writable(getattr(args, name), f"--{name}")
    return {name: getattr(args, name) for name in settings} | {"model": digest_model(args.model_dir)}
