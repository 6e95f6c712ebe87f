"""train.py's own step in a bare PyTorch loop: no Ray, no checkpoints, no resuming. The difference is what those cost.

Takes the cache of latents and the settings that a run of train.py left in its work folder.

    python benchmarks/bare.py --work_dir data/tuned.work --model_dir M --max_train_steps 40 --log log.jsonl
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from common import ROOT

sys.path.insert(0, str(ROOT))

import torch
from diffusers import DDPMScheduler

from checkpoint import read_json, read_manifest
from dataset import Batches, Pairs
from model_folder import read_config, tokenize
from train import join_modules, training_step
from utils import load_models, set_up_torch


def main(args):
    """Train, and log every few steps."""
    set_up_torch("cpu", args.num_threads)
    settings = read_json(Path(args.work_dir) / "run.json")["settings"]
    modules = load_models(args.model_dir, ("text_encoder", "unet"), torch.float32)
    modules["unet"].to(memory_format=torch.channels_last)
    model = join_modules(*(modules[name].train() for name in ("text_encoder", "unet")))
    noise_scheduler = DDPMScheduler.from_pretrained(args.model_dir, subfolder="scheduler")
    rows = read_manifest(Path(args.work_dir) / "posteriors")["images"]
    num_class = sum(variant is None for _, variant in rows)
    num_instance = len({path for path, variant in rows if variant is not None})
    pairs = Pairs(num_instance, num_class, settings["max_variants"], settings["seed"])
    ids = [
        torch.tensor(row) for row in tokenize(args.model_dir, [settings["instance_prompt"], settings["class_prompt"]])
    ]
    timesteps = noise_scheduler.config.num_train_timesteps
    batches = Batches(Path(args.work_dir) / "posteriors", pairs, *ids, settings["seed"], timesteps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"], fused=True)
    step_losses = partial(
        training_step,
        model,
        noise_scheduler=noise_scheduler,
        vae_config=read_config(args.model_dir, "vae"),
        num_instance=1,
        prior_loss_weight=settings["prior_loss_weight"],
    )
    for step in range(args.max_train_steps):
        loss, *_ = step_losses(batch=batches(step, 0, 1, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % args.log_every == 0:
            with open(args.log, "a") as file:
                file.write(json.dumps({"step": step + 1, "loss": loss.item()}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work_dir", required=True, help="of a run of train.py with prior preservation")
    parser.add_argument("--model_dir", required=True, help="its base model")
    parser.add_argument("--max_train_steps", type=int, default=40, help="steps of one pair")
    parser.add_argument("--log_every", type=int, default=5, help="steps between lines of the log")
    parser.add_argument("--log", required=True, help="file for them")
    parser.add_argument("--num_threads", type=int, default=2, help="of PyTorch")
    main(parser.parse_args())
