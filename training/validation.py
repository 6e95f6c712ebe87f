"""Pictures while a model trains: drawn from the weights of a step with fixed seeds, and a strip of them, a row a step.

They do not change the run: the modules keep their mode and type, and nothing is drawn from torch's own generator.
"""

import contextlib
import io
import shutil
from pathlib import Path

import numpy as np

from common import folders
from common.errors import one_line
from common.images import read_image
from pipelines import loading
from training.loop import is_due, stop_asked
from utils import image_seed

FOLDER = "validation"  # in the work folder
STRIP = "strip.png"
RECORD = "validation.json"
NUM_INFERENCE_STEPS = 30  # of the model's own sampler, here and for the card's samples
STRIP_SIDE = 128  # pixels of a picture's longer side on the strip, at most
MARGIN, LABEL = 4, 48  # pixels between pictures, and of the step's number beside a row


class Painter:
    """Draws `num_images` of each prompt at a step, with the modules in training and the model's other parts."""

    def __init__(self, config, modules, place, dtype):
        self.config, self.modules, self.place, self.dtype = config, modules, place, dtype
        self.folder = Path(config["work_dir"]) / FOLDER

    def draw(self, step):
        """Draw step `step` where it is one to draw; return {prompt: its pictures in a row, [H, W, 3]}, or {}."""
        config = self.config
        is_asked = config["validation_prompts"] and is_due(step, config["validation_steps"], config["max_train_steps"])
        if not is_asked:
            return {}
        self._open_folder()
        target = self.folder / step_name(step)
        if not folders.read_manifest(target):
            with folders.staging(target) as beside:
                if not self._draw_in(beside):
                    return {}
                folders.check_owner(Path(config["work_dir"]) / folders.LOCK, config["owner"])
                folders.publish(beside, target, step=step)
        count, rows = config["num_validation_images"], read_rows(self.folder)
        strip = io.BytesIO()
        make_strip(rows, count).save(strip, "PNG")
        folders.write_bytes(self.folder / STRIP, strip.getvalue())
        pictures = [np.asarray(read_image(path)) for path in rows[step]]
        prompts = enumerate(config["validation_prompts"])
        return {prompt: np.concatenate(pictures[i * count : (i + 1) * count], axis=1) for i, prompt in prompts}

    def _open_folder(self):
        """Make the folder one of these pictures: rows of other prompts would not line up with theirs."""
        names = ("validation_prompts", "num_validation_images", "guidance_scale", "seed", "resolution")
        asked = {name: self.config[name] for name in names}
        if folders.read_json(self.folder / RECORD) != asked:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            folders.write_json(self.folder / RECORD, asked)

    def _draw_in(self, folder):
        """Draw all prompts in `folder`; return whether no signal came in between."""
        import torch

        config, device = self.config, self.place.device
        pipeline = loading.load_pipeline(config["model_dir"], torch.float32, safety_checker=False, modules=self.modules)
        pipeline.vae.to(device)
        seeds = [image_seed(config["seed"], index) for index in range(config["num_validation_images"])]
        with evaluating(self.modules), torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            for i, prompt in enumerate(config["validation_prompts"]):
                if stop_asked(config):
                    return False
                images, _ = loading.draw_images(pipeline, [prompt] * len(seeds), seeds, **sampler_of(config))
                for j, image in enumerate(images):
                    image.save(folder / f"{i}-{j}.png")
        return True


@contextlib.contextmanager
def evaluating(modules):
    """Put modules in evaluation mode for a while, and each of their parts back in the mode it had."""
    parts = [part for module in modules.values() for part in module.modules()]
    modes = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode


def sampler_of(config):
    """Return how the pictures of a training are drawn, here and on its card, as draw_images takes it."""
    side = config["resolution"]
    steps, scale = NUM_INFERENCE_STEPS, config["guidance_scale"]
    return {"num_inference_steps": steps, "guidance_scale": scale, "height": side, "width": side}


def step_name(step):
    """Return the name of the folder of a step's pictures."""
    return f"step-{step:06d}"


def read_rows(folder):
    """Return {step: paths of its pictures, prompt by prompt} of the steps that lie whole in `folder`, in order."""
    rows = {}
    for path in sorted(Path(folder).glob("step-*")):
        manifest = folders.read_manifest(path)
        if manifest:
            rows[manifest["step"]] = [path / name for name in sorted(manifest["files"], key=place_of)]
    return rows


def place_of(name):
    """Return (prompt, picture) of a file name: (1, 10) of "1-10.png"."""
    return tuple(map(int, Path(name).stem.split("-")))


def make_strip(rows, num_images):
    """Return a picture of all pictures: a row a step, the `num_images` of a prompt side by side."""
    from PIL import Image, ImageDraw, ImageFont

    paths = list(rows.values())
    with Image.open(paths[0][0]) as first:
        width, height = (max(1, side * STRIP_SIDE // max(STRIP_SIDE, *first.size)) for side in first.size)
    gaps = (len(paths[0]) - 1) // num_images  # prompts stand a margin further apart
    size = (LABEL + len(paths[0]) * (width + MARGIN) + gaps * MARGIN, MARGIN + len(paths) * (height + MARGIN))
    strip = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(strip), ImageFont.load_default(12)
    for row, (step, pictures) in enumerate(rows.items()):
        y = MARGIN + row * (height + MARGIN)
        draw.text((LABEL - MARGIN, y + height // 2), str(step), "black", font, anchor="rm")
        for i, path in enumerate(pictures):
            x = LABEL + i * (width + MARGIN) + i // num_images * MARGIN
            with Image.open(path) as picture:
                strip.paste(picture.resize((width, height), Image.Resampling.LANCZOS), (x, y))
    return strip


def copy_to_card(config, folder):
    """Copy the last pictures and the strip to `folder`/validation; return Markdown that shows them, "" for none."""
    rows = read_rows(Path(config["work_dir"]) / FOLDER) if config.get("validation_prompts") else {}
    if not rows:
        return ""
    (folder / FOLDER).mkdir()
    shutil.copy(Path(config["work_dir"]) / FOLDER / STRIP, folder / FOLDER)
    lines = []
    for path in rows[max(rows)]:
        shutil.copy(path, folder / FOLDER)
        prompt, number = place_of(path.name)
        if number == 0:
            lines.append(f"\n{one_line(config['validation_prompts'][prompt])}\n")
        lines.append(f"![{number + 1}]({FOLDER}/{path.name})")
    steps = ", ".join(map(str, rows))
    pictures = "\n".join(lines)
    return f"\n## While it learned\n\n![Steps {steps}]({FOLDER}/{STRIP})\n\nAfter step {max(rows)}:\n{pictures}\n"
