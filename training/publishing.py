"""The result of a training: a whole pipeline with a model card and sample images."""

import json
import shutil
from pathlib import Path

from common import folders
from common.errors import one_line
from pipelines import loading
from pipelines.configs import base_license, base_name, components, read_index
from pipelines.model_folder import TRAINING_LOG, copy_component
from training import validation
from training.checkpoints import write_module
from training.logs import LOG
from utils import image_seed


def publish_pipeline(config, step, device, weights, prompts, card):
    """Publish the base pipeline with the modules in `weights` in --output_dir, with a model card and sample images.

    What was not trained is copied: the same files for the libraries that read the base, the same latents.
    weights: a checkpoint's folder; prompts: one for each sample; card(samples): the text of the card.
    """
    import torch

    base = Path(config["model_dir"])
    pipeline = loading.load_pipeline(config["model_dir"], torch.float32, weights)
    with folders.staging(config["output_dir"]) as beside:
        shutil.copyfile(base / "model_index.json", beside / "model_index.json")
        for name in components(read_index(base)):
            if Path(weights, name).is_dir():
                write_module(beside / name, getattr(pipeline, name))
            else:
                copy_component(base / name, beside / name)
        sampler = validation.sampler_of(config)
        pipeline.to(device)
        (beside / "samples").mkdir()
        for prompt in dict.fromkeys(prompts):  # those of one prompt at once
            numbers = [number for number, each in enumerate(prompts) if each == prompt]
            seeds = [image_seed(config["seed"], number) for number in numbers]
            drawn = loading.draw_images(pipeline, [prompt] * len(seeds), seeds, **sampler)
            for number, image, flag in zip(numbers, *drawn, strict=True):
                if not flag:
                    image.save(beside / "samples" / f"{number}.png")
        shutil.copy(Path(config["work_dir"]) / LOG, beside / TRAINING_LOG)
        text = card(config, step, sorted((beside / "samples").iterdir())) + validation.copy_to_card(config, beside)
        (beside / "README.md").write_text(text, encoding="utf-8")
        folders.publish(beside, config["output_dir"], step=step, settings=config["settings"])


def _table(settings):
    shown = {name: json.dumps(value).replace("|", "\\|") for name, value in sorted(settings.items())}
    rows = "\n".join(f"| {name} | {value} |" for name, value in shown.items())
    return f"| setting | value |\n|---|---|\n{rows}"


def _pictures(samples):
    return " ".join(f"![{path.stem}](samples/{path.name})" for path in samples)


def _usage(prompt):
    """Return how to draw with the folder, wherever it lies; the type is given as its parts may be stored in several."""
    return f"""## Use

```python
import torch
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("path/to/this/folder", torch_dtype=torch.float32)
image = pipeline({json.dumps(prompt, ensure_ascii=False)}).images[0]
```"""


def dreambooth_card(config, step, samples):
    """Return the README.md of a tuned pipeline, with the front matter of the model hub."""
    base, licence = base_name(config["model_dir"]), base_license(config["model_dir"])
    skipped = one_line(", ".join(config["skipped_images"]))
    left_out = f"\nImages left out, as they could not be read: {skipped}.\n" if skipped else ""
    prompt = one_line(config["instance_prompt"].replace("`", "'"))
    return f"""---
base_model: {json.dumps(base)}
instance_prompt: {json.dumps(config["instance_prompt"], ensure_ascii=False)}
library_name: diffusers
license: {licence}
pipeline_tag: text-to-image
tags: [dreambooth, stable-diffusion, text-to-image]
---

# {prompt}

`{base}`, taught one subject with DreamBooth (arXiv 2208.12242). Name the subject as the prompt it learned
does: `{prompt}`.

{_pictures(samples)}

Licence: that of the base model ({licence}); the photos are their owner's.
{left_out}
{_usage(one_line(config["instance_prompt"]))}

{_table({**config["settings"], "max_train_steps": step})}
"""


def pretraining_card(config, step, samples):
    """Return the README.md of a pre-trained pipeline, with the front matter of the model hub."""
    base = base_name(config["model_dir"])
    captions = "\n".join(f"- {one_line(prompt)}" for prompt in config["sample_prompts"])
    return f"""---
library_name: diffusers
license: other
pipeline_tag: text-to-image
tags: [stable-diffusion, text-to-image]
---

# {Path(config["output_dir"]).name}

A UNet trained for {step} steps of {config["rows_per_step"]} images; its VAE and text encoder are those of `{base}`.

{_pictures(samples)}

{captions}

{_usage(one_line((config["sample_prompts"] or ["a caption like those it learned"])[0]))}

{_table({**config["settings"], "max_train_steps": step})}
"""
