"""Compare the speed of each script with its alternatives, as the ratio of two commands on the same inputs.

Each row runs its two commands alternately, --repeats times each, and prints their medians and the median and range of
the ratio. The last line is JSON. All rows take about an hour and a half on two CPU cores.

    python -m benchmarks.speed --only train_published_embedded --repeats 5
    python -m benchmarks.speed
"""

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.measuring import (
    CLASS_PROMPT,
    INSTANCE_PROMPT,
    LOG_EVERY,
    MODEL,
    PROMPTS,
    ROOT,
    SUBJECT,
    end_tree,
    follow,
    peer_command,
    rate,
    run,
)

# ---------------------------------------------------------------------------------------------------------------------
# Inputs and sides


class Inputs:
    """A model, class images that it drew, and a folder for the outputs of both sides, made on first use."""

    def __init__(self, folder, model_dir, num_class_images=20):
        self.folder, self.model_dir, self.runs = Path(folder), model_dir, 0
        self.class_images = self.folder / "class"
        run("run_model.py", "--model_dir", model_dir, "--output_dir", self.class_images, "--prompts", CLASS_PROMPT,
            "--num_samples_per_prompt", num_class_images, "--num_inference_steps", 4, "--num_workers", 0)  # fmt: skip

    def new(self):
        """Return a new path for the output of a run."""
        self.runs += 1
        return self.folder / f"run-{self.runs}"

    def training_flags(self):
        """Return the training flags that both sides share."""
        folders = ("--instance_images_dir", SUBJECT, "--class_images_dir", self.class_images)
        return ("--model_dir", self.model_dir, *folders, *PROMPTS, "--log_every", LOG_EVERY)


def train(inputs, steps, *flags):
    """Return the steps per second of train.py."""
    output = inputs.new()
    arguments = ("--output_dir", output, "--max_train_steps", steps, *inputs.training_flags(), *flags)
    keep = "--keep_checkpoints"  # and the latent cache, for the bare loop
    return rate(Path(f"{output}.work/log.jsonl"), LOG_EVERY * 2, steps, "train.py", *arguments, keep)


def train_as_published(inputs, steps, *flags):
    """Return the steps per second of the published loop."""
    output = inputs.new()
    arguments = ("train", "--output_dir", output, "--max_train_steps", steps, *inputs.training_flags(), *flags)
    return rate(output / "log.jsonl", LOG_EVERY * 2, steps, "-m", "benchmarks.published", *arguments)


def train_bare(inputs, steps, work_dir):
    """Return the steps per second of the bare loop."""
    log = Path(f"{inputs.new()}.jsonl")
    flags = ("--work_dir", work_dir, "--model_dir", inputs.model_dir, "--max_train_steps", steps, "--log", log)
    return rate(log, LOG_EVERY * 2, steps, "-m", "benchmarks.bare", *flags)


# ---------------------------------------------------------------------------------------------------------------------
# Rows: each yields (ours, theirs) once per repeat, in units per second


def train_published_embedded(args, folder):
    """Steps/s of train.py over the published loop, embedded model."""
    inputs = Inputs(folder, MODEL)
    for _ in range(args.repeats):
        ours = train(inputs, 60, "--num_workers", 1)
        theirs = train_as_published(inputs, 30, "--cpus_per_worker", 2)
        yield ours, theirs


def train_published_proportional(args, folder, *flags):
    """Steps/s of train.py over the published loop, random weights in Stable Diffusion's proportions."""
    run("-m", "benchmarks.proportional_model", "--output_dir", folder / "model")
    inputs = Inputs(folder, folder / "model")
    for _ in range(args.repeats):
        ours = train(inputs, 30, "--num_workers", 1)
        theirs = train_as_published(inputs, 30, "--cpus_per_worker", 2, *flags)
        yield ours, theirs


def train_published_silent(args, folder):
    """The same, without the published loop's report to Ray at every step, which waits up to two seconds."""
    yield from train_published_proportional(args, folder, "--report_every", 0)


def train_bare_embedded(args, folder):
    """Steps/s of train.py on one Ray worker over a bare PyTorch loop with the same step, embedded model."""
    inputs = Inputs(folder, MODEL)
    train(inputs, 20, "--num_workers", 0)
    work_dir = f"{folder}/run-{inputs.runs}.work"
    for _ in range(args.repeats):
        ours = train(inputs, 120, "--num_workers", 1)
        theirs = train_bare(inputs, 120, work_dir)
        yield ours, theirs


def lora_embedded(args, folder):
    """Steps/s of train.py --lora 8 over train.py of all weights, embedded model."""
    inputs = Inputs(folder, MODEL)
    for _ in range(args.repeats):
        ours = train(inputs, 60, "--lora", 8, "--num_workers", 0)
        theirs = train(inputs, 60, "--num_workers", 0)
        yield ours, theirs


def two_workers(args, folder):
    """Images/s of two workers of one thread over one worker of one thread, proportional model."""
    run("-m", "benchmarks.proportional_model", "--output_dir", folder / "model")
    inputs = Inputs(folder, folder / "model")
    for _ in range(args.repeats):
        two = train(inputs, 30, "--num_workers", 2, "--cpus_per_worker", 1)
        one = train(inputs, 30, "--num_workers", 1, "--cpus_per_worker", 1)
        yield 2 * two, one


def draw_rates(args, folder, *sides):
    """Yield the images/s of each of `sides`, (script, flags), once per repeat: 20 steps, without start-up."""
    sampler = ("--num_inference_steps", 20, "--guidance_scale", 3)
    for repeat in range(args.repeats):
        rates = []
        for number, (script, *flags) in enumerate(sides):
            times = []
            for count in (10, 60):
                model = ("--model_dir", MODEL, "--output_dir", folder / f"{repeat}-{number}-{count}")
                counts = ("--prompts", CLASS_PROMPT, "--num_samples_per_prompt", count)
                times.append(run(script, *flags, *model, *counts, *sampler))
            rates.append(50 / (times[1] - times[0]))
        yield tuple(rates)


def class_images(args, folder):
    """Class images/s of run_model.py in batches over the published script's one at a time; one actor, same sampler."""
    ours = ("run_model.py", "--batch_size", 10, "--num_workers", 1)
    yield from draw_rates(args, folder, ours, ("-m", "benchmarks.published", "images", "--cpus_per_worker", 2))


def class_images_single(args, folder):
    """The same over run_model.py with a batch size of 1."""
    ours = [("run_model.py", "--batch_size", size, "--num_workers", 1) for size in (10, 1)]
    yield from draw_rates(args, folder, *ours)


def whole_job(args, folder):
    """Whole jobs/s over the published scripts: start-up, 40 class images, 60 steps, 8 pictures of the subject."""
    sampler = ("--num_inference_steps", 20, "--guidance_scale", 3)
    for repeat in range(args.repeats):
        seconds = []
        for ours in (True, False):
            base = folder / f"{'ours' if ours else 'published'}-{repeat}"
            draw = ("run_model.py",) if ours else ("-m", "benchmarks.published", "images", "--cpus_per_worker", 2)
            learn = ("train.py",) if ours else ("-m", "benchmarks.published", "train", "--cpus_per_worker", 2)
            folders = ("--instance_images_dir", SUBJECT, "--class_images_dir", f"{base}-class", *PROMPTS)
            drawn_by = MODEL if not ours else f"{base}-tuned"  # the published loop saves no pipeline
            seconds.append(
                run(*draw, "--model_dir", MODEL, "--output_dir", f"{base}-class", "--prompts", CLASS_PROMPT,
                    "--num_samples_per_prompt", 40, *sampler)
                + run(*learn, "--model_dir", MODEL, "--output_dir", f"{base}-tuned", *folders,
                      "--max_train_steps", 60)
                + run(*draw, "--model_dir", drawn_by, "--output_dir", f"{base}-new", "--prompts", INSTANCE_PROMPT,
                      "--num_samples_per_prompt", 8, *sampler)
            )  # fmt: skip
        yield 1 / seconds[0], 1 / seconds[1]


class Peer:
    """Runs of a DreamBooth script of Diffusers with flags like ours; it needs a base model in float32."""

    def __init__(self, peer, inputs, *flags):
        import torch
        from diffusers import StableDiffusionPipeline

        model = inputs.folder / "float32"
        StableDiffusionPipeline.from_pretrained(ROOT / inputs.model_dir, dtype=torch.float32).save_pretrained(model)
        self.inputs = inputs
        self.command = [sys.executable, *peer_command(peer, model, inputs.class_images, inputs.folder, *flags)]

    def follow(self, steps):
        """Run it until its progress bar shows the last of `steps`; return the seconds to each of these steps."""
        flags = ("--max_train_steps", steps[-1] + LOG_EVERY, "--output_dir", self.inputs.new())
        seen, text, started = {}, "", time.monotonic()
        with psutil.Popen(
            [*map(str, (*self.command, *flags))], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as running:
            while len(seen) < len(steps):
                more = running.stderr.read1(1000).decode(errors="replace")
                if not more:
                    sys.exit(f"{self.command} ended: {text[-2000:]}")
                text = (text + more)[-3000:]
                done = max(map(int, re.findall(r"Steps:[^|]*\|[^|]*\| (\d+)/", text)), default=0)
                seen |= {step: time.monotonic() - started for step in steps if step not in seen and done >= step}
            end_tree(running)
        return [seen[step] for step in steps]


def peer_embedded(args, folder):
    """Steps/s of train.py --num_workers 0 over diffusers' train_dreambooth.py at --peer, embedded model."""
    inputs = Inputs(folder, MODEL)
    theirs = Peer(args.peer, inputs, "--resolution", 64, "--learning_rate", 5e-6)
    for _ in range(args.repeats):
        ours = train(inputs, 110, "--num_workers", 0)
        begin, end = theirs.follow((10, 110))
        yield ours, 100 / (end - begin)


def peer_proportional(args, folder):
    """The same, random weights in Stable Diffusion's proportions."""
    run("-m", "benchmarks.proportional_model", "--output_dir", folder / "model")
    inputs = Inputs(folder, folder / "model")
    theirs = Peer(args.peer, inputs, "--resolution", 128, "--learning_rate", 5e-6)
    for _ in range(args.repeats):
        ours = train(inputs, 40, "--num_workers", 0)
        begin, end = theirs.follow((10, 40))
        yield ours, 30 / (end - begin)


def peer_lora_embedded(args, folder):
    """Steps/s of train.py --lora 8 --num_workers 0 over diffusers' train_dreambooth_lora.py, beside --peer."""
    inputs = Inputs(folder, MODEL)
    script = Path(args.peer).with_name("train_dreambooth_lora.py")
    theirs = Peer(script, inputs, "--resolution", 64, "--learning_rate", 1e-4, "--rank", 8)
    for _ in range(args.repeats):
        ours = train(inputs, 110, "--lora", 8, "--num_workers", 0)
        begin, end = theirs.follow((10, 110))
        yield ours, 100 / (end - begin)


def peer_start(args, folder):
    """Steps/s of the first ten steps from the start of the command, embedded model: imports, latent cache, training."""
    inputs = Inputs(folder, MODEL)
    theirs = Peer(args.peer, inputs, "--resolution", 64, "--learning_rate", 5e-6)
    for _ in range(args.repeats):
        output = inputs.new()
        arguments = ("--output_dir", output, "--max_train_steps", 20, *inputs.training_flags(), "--num_workers", 0)
        ours = follow(Path(f"{output}.work/log.jsonl"), (10,), "train.py", *arguments)[0]
        yield 10 / ours, 10 / theirs.follow((10,))[0]


ROWS = {
    row.__name__: row
    for row in (
        train_published_embedded,
        train_published_proportional,
        train_published_silent,
        train_bare_embedded,
        lora_embedded,
        two_workers,
        class_images,
        class_images_single,
        whole_job,
        peer_embedded,
        peer_proportional,
        peer_lora_embedded,
        peer_start,
    )
}


def main(args):
    """Measure the rows, print a line for each, then one JSON line."""
    results = {}
    for name in args.only or [name for name in ROWS if not name.startswith("peer") or args.peer]:
        folder = Path(tempfile.mkdtemp(prefix="speed-"))
        pairs = []
        for pair in ROWS[name](args, folder):
            pairs.append(pair)
            print(f"  {pair[0]:.3g} / {pair[1]:.3g} = {pair[0] / pair[1]:.3g}", file=sys.stderr, flush=True)
        shutil.rmtree(folder)
        ratios = sorted(ours / theirs for ours, theirs in pairs)
        ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(ratios)
        results[name] = {"ours": ours, "theirs": theirs, "ratio": ratio, "spread": [ratios[0], ratios[-1]]}
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"{name:30s} {ours:9.3g} {theirs:9.3g}  ratio {ratio:6.2f}  ({spread})  {ROWS[name].__doc__}", flush=True)
    import diffusers
    import ray
    import torch

    versions = {module.__name__: module.__version__ for module in (torch, diffusers, ray)}
    machine = {"machine": platform.platform(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), **versions}
    print(json.dumps({"rows": results, "repeats": args.repeats, **machine}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), help="rows to measure; default: all")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each command of a row")
    parser.add_argument("--peer", help="path of diffusers' train_dreambooth.py, to measure it too")
    main(parser.parse_args())
