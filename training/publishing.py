"""The result of a training: a whole pipeline with a model card and sample images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import targets
from common.errors import one_line
from pipelines import loading, lora
from pipelines.configs import base_license, base_name, base_revision, components, read_index
from pipelines.families import find_family
from pipelines.model_folder import LORA_FILE, TRAINING_LOG, copy_component
from training import adapters, validation
from training.checkpoints import write_module
from training.task import ALL_WEIGHTS, Adapters, Images, Output
from training.work_folder import LOG, scratch
from utils import image_seed

if TYPE_CHECKING:
    import torch


def publish_pipeline(
    output: Output,
    images: Images,
    step: int,
    device: torch.device,
    weights: Path,
    prompts: list[str],
    card: Callable[[list[Path]], str],
    settings: Adapters = ALL_WEIGHTS,
    dtype: torch.dtype | None = None,
) -> None:
    """Publish what was trained as --output_dir, with a model card and sample images: a pipeline, or a LoRA.

    weights: the folder of a checkpoint. prompts: one for each sample. card(samples): returns the model card.
    settings: of a LoRA, if that was trained. dtype: in which a LoRA draws its samples, as a GPU that trains one may not
    hold its base in float32, the default.
    """
    import torch

    is_whole = settings.merge or not settings.lora
    dtype = dtype if dtype and settings.lora else torch.float32
    pipeline = loading.load_pipeline(output.model_dir, torch.float32 if is_whole else dtype, weights)
    with targets.staging(output.output_dir) as beside:
        if settings.lora:
            base = output.settings["model"]
            adapters.write_result(weights, beside, base_name(output.output_dir), settings, output.model_dir, base)
        if is_whole:
            write_pipeline(pipeline, output.model_dir, beside, trained_parts(weights, output.model_dir))
        if is_whole and dtype != torch.float32:
            pipeline = loading.load_pipeline(output.model_dir, dtype, weights)
        pipeline = loading.move_pipeline(pipeline, device)
        draw_samples(pipeline, beside / "samples", prompts, images)
        shutil.copy(scratch(output.work_dir) / LOG, beside / TRAINING_LOG)
        text = card(sorted((beside / "samples").iterdir()))
        text += validation.copy_to_card(images.validation_prompts, output.work_dir, beside)
        (beside / "README.md").write_text(text, encoding="utf-8")
        targets.publish(beside, output.output_dir, output.held, step=step, settings=output.settings)


def trained_parts(weights: Path, model_dir: str) -> set[str]:
    """Return the components of a model that a checkpoint replaces, or whose weights its LoRA changes."""
    if Path(weights, LORA_FILE).is_file():
        return set(lora.read(weights / LORA_FILE, model_dir))
    return {path.name for path in weights.iterdir() if path.is_dir()}


def write_pipeline(pipeline: Any, model_dir: str, folder: Path, trained: set[str]) -> None:
    """Write the trained components of a pipeline to a model folder.

    The others are copied from the base model byte for byte, so that libraries which read it read them too.
    """
    shutil.copyfile(Path(model_dir, "model_index.json"), folder / "model_index.json")
    for name in components(read_index(model_dir)):
        if name in trained:
            write_module(folder / name, getattr(pipeline, name))
        else:
            copy_component(Path(model_dir, name), folder / name)


def draw_samples(pipeline: Any, folder: Path, prompts: list[str], images: Images) -> None:
    """Draw one image for each prompt, 0.png to N.png, without those that the safety checker flags."""
    folder.mkdir()
    for prompt in dict.fromkeys(prompts):  # equal prompts in one batch
        numbers = [number for number, each in enumerate(prompts) if each == prompt]
        seeds = [image_seed(images.seed, number) for number in numbers]
        drawn = loading.draw_images(pipeline, [prompt] * len(seeds), seeds, **validation.sampler_of(images))
        for number, image, flag in zip(numbers, *drawn, strict=True):
            if not flag:
                image.save(folder / f"{number}.png")


# ---------------------------------------------------------------------------------------------------------------------
# Model cards: README.md with the front matter of the model Hub


def _table(settings: dict[str, Any]) -> str:
    shown = {name: json.dumps(value).replace("|", "\\|") for name, value in sorted(settings.items())}
    rows = "\n".join(f"| {name} | {value} |" for name, value in shown.items())
    return f"| setting | value |\n|---|---|\n{rows}"


def _pictures(samples: list[Path]) -> str:
    return " ".join(f"![{path.stem}](samples/{path.name})" for path in samples)


def _usage(prompt: str, base: str | None = None) -> str:
    """Return how to draw with the model; the data type is given because components may be stored in several.

    base: of a LoRA, the name or folder of the model that it was trained on.
    """
    place = '"path/to/this/folder"  # or, if this page is on the Hugging Face Hub, its ORGANISATION/NAME'
    name = json.dumps(base) if base else "model"
    load = f"pipeline = DiffusionPipeline.from_pretrained({name}, torch_dtype=torch.float32)"
    load += "\npipeline.load_lora_weights(model)" if base else ""
    return f"""## Use

```python
import torch
from diffusers import DiffusionPipeline

model = {place}
{load}
image = pipeline({json.dumps(prompt, ensure_ascii=False)}).images[0]
```"""


def dreambooth_card(
    samples: list[Path],
    model_dir: str,
    instance_prompts: list[str],
    skipped_images: list[str],
    settings: dict[str, Any],
) -> str:
    """Return the model card of what train.py tuned.

    instance_prompts: one for each subject; skipped_images: names of photos that were left out.
    """
    base, licence, rank = base_name(model_dir), base_license(model_dir), settings.get("lora")
    tags = ["dreambooth", *(["lora"] if rank else []), find_family(model_dir).name, "text-to-image"]
    # The Hub takes the value for a name on the Hub and refuses cards where it cannot be one.
    base_model = f"base_model: {json.dumps(base)}\n" if base_revision(model_dir) else ""
    loaded = base if base_model else f"path/to/{base}"
    base_model += "base_model_relation: adapter\n" if base_model and rank else ""
    made = f"A LoRA of rank {rank} of `{base}`, trained" if rank else f"`{base}`, fine-tuned"
    left_out = ""
    if skipped_images:
        left_out = f"\nImages left out, as they could not be read: {one_line(', '.join(skipped_images))}.\n"
    prompts = [one_line(prompt.replace("`", "'")) for prompt in instance_prompts]
    learned = "one subject" if len(prompts) == 1 else f"{len(prompts)} subjects"
    named = "the subject" if len(prompts) == 1 else "the subjects"
    return f"""---
{base_model}instance_prompt: {json.dumps(instance_prompts[0], ensure_ascii=False)}
library_name: diffusers
license: {licence}
pipeline_tag: text-to-image
tags: [{", ".join(tags)}]
---

# {", ".join(prompts)}

{made} on {learned} with DreamBooth (arXiv 2208.12242). Name {named} in prompts as in training:
{", ".join(f"`{prompt}`" for prompt in prompts)}.

{_pictures(samples)}

Licence: that of the base model ({licence}); the photos belong to their owner.
{left_out}
{_usage(one_line(instance_prompts[0]), loaded if rank else None)}

{_table(settings)}
"""


def pretraining_card(
    samples: list[Path],
    model_dir: str,
    output_dir: str,
    sample_prompts: list[str],
    rows_per_step: int,
    settings: dict[str, Any],
) -> str:
    """Return the model card of a pipeline whose UNet pretrain.py trained; settings: with `max_train_steps`."""
    base = base_name(model_dir)
    captions = "\n".join(f"- {one_line(prompt)}" for prompt in sample_prompts)
    return f"""---
library_name: diffusers
license: other
pipeline_tag: text-to-image
tags: [{find_family(model_dir).name}, text-to-image]
---

# {Path(output_dir).name}

A UNet trained for {settings["max_train_steps"]} steps of {rows_per_step} images. Its other components are those of
`{base}`.

{_pictures(samples)}

{captions}

{_usage(one_line((sample_prompts or ["a caption like those in the training data"])[0]))}

{_table(settings)}
"""
