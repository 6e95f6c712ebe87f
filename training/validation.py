"""Validation images: drawn at some steps with fixed seeds, and collected in a strip with one row for each step.

Drawing does not change the run: modules keep their mode and data type, and torch's own generator is not used.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common import board, folders
from common.errors import one_line
from common.images import read_image
from pipelines import loading
from pipelines.conditions import read_condition
from pipelines.family import Family
from training.loop import is_due
from training.task import Images, Task
from training.work_folder import STRIP, VALIDATION, scratch
from training.workers import Place
from utils import image_seed

if TYPE_CHECKING:
    import torch
    from PIL import Image

RECORD = "validation.json"  # what decides the images of the folder
NUM_INFERENCE_STEPS = 30  # of the model's own sampler, for validation images and for samples on the model card
STRIP_SIDE = 128  # pixels of an image's longer side on the strip, at most
MARGIN, LABEL = 4, 48  # pixels between images; width of the step number at the left of a row


class Painter:
    """Draws the validation images with the modules in training and the other components of the base model.

    prompts: the fields (pipelines.conditions) of no prompt and of each validation prompt.
    """

    def __init__(
        self,
        task: Task,
        family: Family,
        modules: dict[str, Any],
        prompts: Sequence[dict[str, torch.Tensor]],
        place: Place,
        dtype: torch.dtype,
    ) -> None:
        self.task, self.family, self.modules, self.prompts = task, family, modules, prompts
        self.place, self.dtype = place, dtype
        self.folder = scratch(task.output.work_dir) / VALIDATION

    def draw(self, step: int) -> dict[str, np.ndarray]:
        """Return {prompt: its images in a row, [H, W, 3] uint8} of `step`, or {} if no images are due."""
        images, schedule = self.task.images, self.task.schedule
        is_asked = images.validation_prompts and is_due(step, schedule.validation_steps, schedule.max_train_steps)
        if not is_asked:
            return {}
        self._open_folder()
        target = self.folder / step_name(step)
        if not folders.read_manifest(target):
            with folders.staging(target) as beside:
                if not self._draw_in(beside):
                    return {}
                self.task.output.held.check()
                folders.publish(beside, target, step=step)
        count, rows = images.num_validation_images, read_rows(self.folder)
        strip = io.BytesIO()
        make_strip(rows, count).save(strip, "PNG")
        folders.write_bytes(self.folder / STRIP, strip.getvalue())
        drawn = [np.asarray(read_image(path)) for path in rows[step]]
        prompts = enumerate(images.validation_prompts)
        return {prompt: np.concatenate(drawn[i * count : (i + 1) * count], axis=1) for i, prompt in prompts}

    def _open_folder(self) -> None:
        """Empty the folder if it holds images of other prompts or settings: their rows would not line up."""
        asked = asdict(self.task.images) | {"validation_prompts": list(self.task.images.validation_prompts)}
        if folders.read_json(self.folder / RECORD) != asked:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            folders.write_json(self.folder / RECORD, asked)

    def _draw_in(self, folder: Path) -> bool:
        """Draw all prompts to `folder`; return False if the run is asked to stop meanwhile."""
        import torch

        images, output, device = self.task.images, self.task.output, self.place.device
        parts = dict.fromkeys(self.family.encoders) | {self.family.denoiser: self.modules[self.family.denoiser]}
        pipeline = loading.load_pipeline(output.model_dir, torch.float32, safety_checker=False, modules=parts)
        pipeline.vae.to(device)
        seeds = [image_seed(images.seed, index) for index in range(images.num_validation_images)]
        with evaluating(self.modules), torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            empty, *conditions = self._read_prompts()
            empty = self.family.unconditional(output.model_dir, empty)
            for i, condition in enumerate(conditions):
                if board.current().stop_asked():
                    return False
                inputs: dict[str, Any] = {**self.family.pipeline_inputs(condition, empty)}
                inputs = {name: value.repeat_interleave(len(seeds), 0) for name, value in inputs.items()}
                drawn, _ = loading.draw_images(pipeline, None, seeds, **inputs, **sampler_of(images))
                for j, image in enumerate(drawn):
                    image.save(folder / f"{i}-{j}.png")
        return True

    def _read_prompts(self) -> list[dict[str, torch.Tensor]]:
        """Return the condition of each prompt, of one row."""
        import torch

        rows = [{name: value[None].to(self.place.device) for name, value in each.items()} for each in self.prompts]
        with torch.no_grad():
            return [read_condition(self.family, row, self.modules) for row in rows]


@contextlib.contextmanager
def evaluating(modules: dict[str, torch.nn.Module]) -> Iterator[None]:
    """Put modules in evaluation mode for the duration of a with block, then restore the mode of each submodule."""
    parts = [part for module in modules.values() for part in module.modules()]
    modes = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode


def sampler_of(images: Images) -> dict[str, Any]:
    """Return the options of loading.draw_images for the images of a training."""
    side = images.resolution
    steps, scale = NUM_INFERENCE_STEPS, images.guidance_scale
    return {"num_inference_steps": steps, "guidance_scale": scale, "height": side, "width": side}


def step_name(step: int) -> str:
    """Return the name of the folder with the images of a step."""
    return f"step-{step:06d}"


def read_rows(folder: str | Path) -> dict[int, list[Path]]:
    """Return {step: paths of its images, prompt by prompt} of the steps that are whole in `folder`, in order."""
    rows = {}
    for path in sorted(Path(folder).glob("step-*")):
        manifest = folders.read_manifest(path)
        if manifest:
            rows[manifest["step"]] = [path / name for name in sorted(manifest["files"], key=place_of)]
    return rows


def place_of(name: str) -> tuple[int, int]:
    """Return (prompt, image) of a file name: (1, 10) of "1-10.png"."""
    prompt, image = Path(name).stem.split("-")
    return int(prompt), int(image)


def make_strip(rows: dict[int, list[Path]], num_images: int) -> Image.Image:
    """Return one image of all images: a row for each step, the `num_images` of a prompt side by side."""
    from PIL import Image, ImageDraw, ImageFont

    paths = list(rows.values())
    with Image.open(paths[0][0]) as first:
        width, height = (max(1, side * STRIP_SIDE // max(STRIP_SIDE, *first.size)) for side in first.size)
    gaps = (len(paths[0]) - 1) // num_images  # between prompts there is a wider gap
    size = (LABEL + len(paths[0]) * (width + MARGIN) + gaps * MARGIN, MARGIN + len(paths) * (height + MARGIN))
    strip = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(strip), ImageFont.load_default(12)
    for row, (step, images) in enumerate(rows.items()):
        y = MARGIN + row * (height + MARGIN)
        draw.text((LABEL - MARGIN, y + height // 2), str(step), "black", font, anchor="rm")
        for i, path in enumerate(images):
            x = LABEL + i * (width + MARGIN) + i // num_images * MARGIN
            with Image.open(path) as image:
                strip.paste(image.resize((width, height), Image.Resampling.LANCZOS), (x, y))
    return strip


def copy_to_card(prompts: tuple[str, ...], work_dir: str, folder: Path) -> str:
    """Copy the last images and the strip to `folder`/validation; return Markdown that shows them, "" without images."""
    rows = read_rows(scratch(work_dir) / VALIDATION) if prompts else {}
    if not rows:
        return ""
    (folder / VALIDATION).mkdir()
    shutil.copy(scratch(work_dir) / VALIDATION / STRIP, folder / VALIDATION)
    lines = []
    for path in rows[max(rows)]:
        shutil.copy(path, folder / VALIDATION)
        prompt, number = place_of(path.name)
        if number == 0:
            lines.append(f"\n{one_line(prompts[prompt])}\n")
        lines.append(f"![{number + 1}]({VALIDATION}/{path.name})")
    steps, shown = ", ".join(map(str, rows)), "\n".join(lines)
    return f"\n## Validation images\n\n![Steps {steps}]({VALIDATION}/{STRIP})\n\nAfter step {max(rows)}:\n{shown}\n"
