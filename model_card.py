"""The result of a training: a whole pipeline with a model card and sample images."""

import json
import re
import shutil
from pathlib import Path

import checkpoint
from training import LOG

CARD_IMAGES, CARD_STEPS = 4, 30  # sample images, and the sampler's steps for them


def publish_pipeline(config, step, device):
    """Publish the base pipeline with the modules of the last checkpoint in --output_dir, with a model card."""
    import torch

    from utils import draw_images, image_seed, load_pipeline

    folder = checkpoint.checkpoint_path(config["work_dir"], step)
    pipeline = load_pipeline(config["model_dir"], torch.float32, folder)
    with checkpoint.staging(config["output_dir"]) as beside:
        pipeline.save_pretrained(beside, safe_serialization=True)
        drop_local_paths(beside)
        seeds = [image_seed(config["seed"], index) for index in range(CARD_IMAGES)]
        sampler = {"num_inference_steps": CARD_STEPS, "height": config["resolution"], "width": config["resolution"]}
        images, flags = draw_images(pipeline.to(device), config["instance_prompt"], seeds, **sampler)
        (beside / "samples").mkdir()
        for index, (image, flag) in enumerate(zip(images, flags, strict=True)):
            if not flag:
                image.save(beside / "samples" / f"{index}.png")
        shutil.copy(Path(config["work_dir"]) / LOG, beside / "training_log.jsonl")
        (beside / "README.md").write_text(model_card(config, step, sorted((beside / "samples").iterdir())))
        checkpoint.publish(beside, config["output_dir"], step=step, settings=config["settings"])


def drop_local_paths(folder):
    """Remove from the configurations of a pipeline where its parts were loaded from: folders of the one who trained."""
    for path in [folder / "model_index.json", *folder.glob("*/config.json")]:
        config = json.loads(path.read_text())
        if config.pop("_name_or_path", None):
            path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def base_name(model_dir):
    """Return a name for a base model: the hub's where it lies in a hub cache, else its folder's."""
    hub = re.search(r"models--([^/]+)--([^/]+)/snapshots/", f"{model_dir}/")
    return f"{hub[1]}/{hub[2]}" if hub else Path(model_dir).name


def base_license(model_dir):
    """Return the licence that a base model's README.md names in its front matter, or `other`."""
    readme = Path(model_dir) / "README.md"
    found = readme.is_file() and re.search(r"^license: *(\S+)", readme.read_text(errors="replace"), re.MULTILINE)
    return found[1] if found else "other"


def model_card(config, step, samples):
    """Return the README.md of the tuned pipeline, with the front matter of the model hub."""
    base, licence = base_name(config["model_dir"]), base_license(config["model_dir"])
    settings = {**config["settings"], "max_train_steps": step}
    rows = "\n".join(f"| {name} | {json.dumps(value)} |" for name, value in sorted(settings.items()))
    pictures = " ".join(f"![{path.stem}](samples/{path.name})" for path in samples)
    return f"""---
base_model: {json.dumps(base)}
instance_prompt: {json.dumps(config["instance_prompt"])}
library_name: diffusers
license: {licence}
pipeline_tag: text-to-image
tags: [dreambooth, stable-diffusion, text-to-image]
---

# {config["instance_prompt"]}

`{base}`, taught one subject with DreamBooth (arXiv 2208.12242). Name the subject as the prompt it learned
does: `{config["instance_prompt"]}`.

{pictures}

Licence: that of the base model ({licence}); the photos are their owner's.

| setting | value |
|---|---|
{rows}
"""
