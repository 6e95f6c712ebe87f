"""Checks before an evaluation draws anything: related models, enough images, comparable class images."""

import argparse
from typing import Any

from common.errors import BadInput
from evaluation.measures import FEWEST_PHOTOS, SMALLEST_SET
from pipelines.configs import read_config, read_index
from pipelines.image_folder import read_metadata

FAMILY = {  # settings that two models must share for the weights of one to fit the other
    "unet": ("in_channels", "block_out_channels", "down_block_types", "layers_per_block", "cross_attention_dim"),
    "text_encoder": ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"),
    "vae": ("latent_channels", "block_out_channels"),
}


def check_family(base: str, tuned: str) -> None:
    """Raise BadInput if one model cannot be tuned from the other; a setting that only one of them states is ignored."""
    facts = []
    for folder in (base, tuned):
        index = read_index(folder)
        found = {"the pipeline": index["_class_name"]}
        for part, names in FAMILY.items():
            config = read_config(folder, part) if part in index else {}
            found |= {f"{part}'s {name}": config[name] for name in names if config.get(name) is not None}
        facts.append(found)
    for name in facts[0]:
        if facts[0][name] != facts[1].get(name, facts[0][name]):
            raise BadInput(
                f"--model_dir {tuned} and --base_model_dir {base} are of different families ({name} is "
                f"{facts[1][name]} and {facts[0][name]}): give the model that --model_dir was tuned from"
            )


def check_counts(args: argparse.Namespace, num_photos: int, num_class_images: int, num_prompts: int) -> None:
    """Raise BadInput if there are too few images for a measure."""
    counts = (
        (f"--instance_images_dir {args.instance_images_dir}", num_photos, FEWEST_PHOTOS, "fidelity"),
        (f"--class_images_dir {args.class_images_dir}", num_class_images, SMALLEST_SET, "diversity"),
        ("--num_class_images", args.num_class_images, SMALLEST_SET, "diversity"),
        ("--num_samples_per_prompt", num_prompts * args.num_samples_per_prompt, SMALLEST_SET, "fidelity"),
    )
    for flag, found, needed, measured in counts:
        if found < needed:
            raise BadInput(f"{flag}: {found} images are too few, measuring {measured} needs at least {needed}")


def compare_class_images(class_images_dir: str, wanted: dict[str, Any]) -> list[str]:
    """Return a warning for each setting in which the class images are known to differ from those drawn here.

    wanted: {name: value} as in the records of metadata.jsonl.
    """
    records, notes = read_metadata(class_images_dir).values(), []
    for name, value in wanted.items():
        others = {record[name] for record in records if name in record} - {value}
        if others:
            drawn = "another model" if name == "model" else f"{name} {min(map(str, others))} instead of {value}"
            notes.append(f"The base model's class images were drawn with {drawn}: they may not be comparable.")
    return notes
