"""Measure train.py --compile: seconds per step with and without it, and the steps after which it pays off.

Prints the times, then one JSON line.

    python -m benchmarks.compile --model_dir models/emoji-64
"""

import argparse
import json
import os
import statistics
import time

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # compile from scratch, whatever an earlier run has cached

import torch

from pipelines.configs import read_config
from pipelines.families import find_family
from pipelines.loading import load_models, set_up_torch
from training.modules import join_modules
from training.parallel import compile_modules


def step_seconds(model, batch, count):
    """Return the seconds of each of `count` forward and backward passes."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        model(*batch).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None
        seconds.append(time.perf_counter() - start)
    return seconds


def main(args):
    """Measure, print the times, then one JSON line."""
    set_up_torch("cpu")
    family = find_family(args.model_dir)
    modules = load_models(args.model_dir, ("text_encoder", "unet"), torch.float32)
    modules["unet"].to(memory_format=torch.channels_last)
    model = join_modules(family, {name: module.train() for name, module in modules.items()})
    side = read_config(args.model_dir, "unet")["sample_size"]
    ids = family.tokenize(args.model_dir, ["a cat", "a dog"])["text_encoder"]
    batch = (torch.randn(2, 4, side, side), torch.tensor([1, 2]), {"text_encoder.ids": ids})
    plain = statistics.median(step_seconds(model, batch, args.steps + 1)[1:])
    compile_modules(modules)
    first, *others = step_seconds(model, batch, args.steps + 3)
    compiled = statistics.median(others[2:])
    pays = first / (plain - compiled) if compiled < plain else None
    print(f"a step: {plain:.3f} s, compiled {compiled:.3f} s, ratio {plain / compiled:.2f}")
    print(f"compiling takes {first:.0f} s; it pays after {pays and round(pays)} steps")
    print(json.dumps({"plain": plain, "compiled": compiled, "compiling": first, "pays_after_steps": pays}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir", default="models/emoji-64", help="model to train")
    parser.add_argument("--steps", type=int, default=15, help="steps to measure with and without compilation")
    main(parser.parse_args())
