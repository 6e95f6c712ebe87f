"""What train.py and pretrain.py check before they train, in the driver and within seconds."""

import argparse
import importlib.util
from collections.abc import Sequence
from typing import Any

from common import cli, targets
from common.buckets import bucket_sizes
from common.errors import BadInput
from pipelines.configs import check_resolution, components, read_index
from pipelines.families import FAMILIES, find_family
from pipelines.family import Family, Sizes
from pipelines.model_folder import check_pipeline, digest_model


def check_inputs(
    args: argparse.Namespace,
    settings: Sequence[str],
    prompts: str,
    supported: Sequence[str] = tuple(FAMILIES),
    **inputs: str | None,
) -> dict[str, Any]:
    """Check the model, the resolution, the prompts and the folders; return the settings that decide the weights.

    Flags that are None are set to the defaults of the model. settings: names of flags; the model's digest is added.
    prompts: the flag of the prompts to draw. supported: classes of pipelines. inputs: folders by flag that --output_dir
    must not replace.
    """
    check_packages(args)
    check_pipeline(args.model_dir)
    family = find_family(args.model_dir, supported)
    missing = {family.denoiser, *family.encoders} - components(read_index(args.model_dir)).keys()
    if missing:
        raise BadInput(f"--model_dir {args.model_dir} has no {min(missing)}, without which it cannot be trained")
    sizes = family.sizes(args.model_dir)
    use_defaults(args, family, sizes)
    check_resolution(args.model_dir, "--resolution", args.resolution, sizes.multiple)
    for prompt in getattr(args, prompts):
        cli.check_text(f"--{prompts}", prompt)
    targets.check_apart(args.output_dir, work_dir=args.work_dir, model_dir=args.model_location, **inputs)
    for name in ("output_dir", "work_dir"):
        targets.check_writable(getattr(args, name), f"--{name}")
    return {name: getattr(args, name) for name in settings} | {"model": digest_model(args.model_dir)}


def check_packages(args: argparse.Namespace) -> None:
    """Raise BadInput if a flag asks for a package that is not installed."""
    asked = [name for name in ("use_8bit_adam", "base_bits") if getattr(args, name, None)]
    if asked and not importlib.util.find_spec("bitsandbytes"):
        raise BadInput(f"--{asked[0]} requires bitsandbytes: python -m pip install bitsandbytes")


def use_defaults(args: argparse.Namespace, family: Family, sizes: Sizes) -> None:
    """Set the flags that a script has and that are None to the defaults of a family."""
    defaults = {
        "resolution": sizes.resolution,
        "lr": family.lora_lr if getattr(args, "lora", None) else family.lr,
        "guidance_scale": family.guidance_scale,
        "train_text_encoder": family.trains_text_encoders,
    }
    for name, value in defaults.items():
        if getattr(args, name, value) is None:
            setattr(args, name, value)


def check_method(args: argparse.Namespace) -> None:
    """Raise BadInput unless the model can be trained in the way that the flags of train.py ask for."""
    family = find_family(args.model_dir)
    if not args.lora and not family.trains_whole:
        raise BadInput(f"--model_dir {args.model_dir}: all weights of {family.name} are too many: pass --lora RANK")
    if args.train_text_encoder and not family.trainable:
        raise BadInput(f"--train_text_encoder: the text encoders of {family.name} cannot be trained: leave it out")
    if args.text_encoder_lr and not args.train_text_encoder:
        raise BadInput("--text_encoder_lr has no effect without --train_text_encoder: leave it out")
    if args.buckets:
        bucket_sizes(args.resolution, family.sizes(args.model_dir).multiple)
    if args.snr_gamma is not None:
        family.objective(args.model_dir, args.snr_gamma)
