"""Run train.py's step in a bare PyTorch loop without Ray, checkpoints and resuming, to measure their overhead.

Reads the latent cache and the settings in the work folder of a run of train.py. --without disables optimizations:
`cache` encodes the images at every step, `channels_last` uses the contiguous memory layout, `sdpa` uses unfused
attention, `fused` uses unfused AdamW. The losses are equal up to rounding (see agree.py).

    python -m benchmarks.bare --work_dir data/tuned.work --model_dir M --max_train_steps 40 --log log.jsonl
"""

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
from diffusers.models.attention_processor import AttnProcessor

from common.folders import read_json, read_manifest
from dataset import Batches, Pairs
from pipelines.conditions import encode_prompts
from pipelines.configs import read_config
from pipelines.families import find_family
from pipelines.loading import encode_posterior, load_models, set_up_torch
from pipelines.posteriors import PosteriorEncoder
from train import training_step
from training.modules import join_modules

SWITCHES = ("cache", "channels_last", "sdpa", "fused")


class Encoded:
    """Replaces the latent cache: encodes the mean (part 0) or standard deviation (part 1) of a row on access."""

    def __init__(self, encoder, rows, pairs, part):
        self.encoder, self.rows, self.pairs, self.part = encoder, rows, pairs, part

    def __getitem__(self, row):
        path, variant = self.rows[row]
        pixel_values, _ = self.encoder.read(path, row // self.pairs.num_variants, variant)
        with torch.inference_mode():
            return encode_posterior(self.encoder.vae, torch.from_numpy(pixel_values)[None])[self.part][0].clone()


def make_batches(args, settings, family, draw_time):
    """Return the dataset.Batches of a run of train.py."""
    rows = read_manifest(Path(args.work_dir) / "posteriors")["images"]
    num_class = sum(variant is None for _, variant in rows)
    num_instance = len({path for path, variant in rows if variant is not None})
    pairs = Pairs(num_instance, num_class, settings["max_variants"], settings["seed"])
    prompts = [settings["instance_prompt"], settings["class_prompt"]]
    fields = encode_prompts(family, args.model_dir, prompts, family.trained(True), torch.device("cpu"), torch.float32)
    fields = [fields[0]] * num_instance + [fields[1]] * num_class
    batches = Batches(Path(args.work_dir) / "posteriors", pairs, fields, settings["seed"], draw_time)
    if "cache" in args.without:
        options = {name: settings[name] for name in ("resolution", "random_crop", "random_flip", "seed")}
        encoder = PosteriorEncoder(args.model_dir, **options)
        batches.places = np.arange(pairs.num_rows)[None]
        batches.caches = [{name: Encoded(encoder, rows, pairs, part) for part, name in enumerate(("mean", "std"))}]
    return batches


def main(args):
    """Train and log the loss."""
    set_up_torch("cpu", args.num_threads)
    settings = read_json(Path(args.work_dir) / "run.json")["settings"]
    family = find_family(args.model_dir)
    modules = load_models(args.model_dir, ("text_encoder", "unet"), torch.float32)
    if "channels_last" not in args.without:
        modules["unet"].to(memory_format=torch.channels_last)
    if "sdpa" in args.without:
        modules["unet"].set_attn_processor(AttnProcessor())
        modules["text_encoder"].set_attn_implementation("eager")
    model = join_modules(family, {name: module.train() for name, module in modules.items()})
    fused = {"foreach": False} if "fused" in args.without else {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"], **fused)
    objective = family.objective(args.model_dir)
    batches = make_batches(args, settings, family, objective.draw_time)
    step_losses = partial(
        training_step,
        model,
        objective=objective,
        vae_config=read_config(args.model_dir, "vae"),
        prior_loss_weight=settings["prior_loss_weight"],
    )
    for step in range(args.max_train_steps):
        (whole,) = batches(step, 0, 1, 1)
        loss, *_ = step_losses(**whole)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % args.log_every == 0:
            with open(args.log, "a") as file:
                file.write(json.dumps({"step": step + 1, "loss": loss.item()}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work_dir", required=True, help="work folder of a run of train.py with prior preservation")
    parser.add_argument("--model_dir", required=True, help="base model of that run")
    parser.add_argument("--max_train_steps", type=int, default=40, help="optimizer steps, of one pair each")
    parser.add_argument("--log_every", type=int, default=5, help="steps between lines of the log")
    parser.add_argument("--log", required=True, help="file to append the losses to")
    parser.add_argument("--num_threads", type=int, default=2, help="threads of PyTorch")
    parser.add_argument("--without", nargs="*", choices=SWITCHES, default=[], help="optimizations to disable")
    main(parser.parse_args())
