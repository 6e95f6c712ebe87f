"""Measure the time of each phase of a command, and the memory of each of its processes, with and without Ray.

Phases are observed from outside: they end when Ray's first process, an actor or worker, the latent cache, the first and
the last image or log line, or the result appears. Plots the phases as bars. Memory is measured in an additional run.

    python -m benchmarks.startup --repeats 5 --output data/startup.png
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.measuring import CLASS_PROMPT, MODEL, PROMPTS, ROOT, SUBJECT, peak_memory

IMAGES, STEPS = 40, 100


def process_named(name):
    """Return a mark: a function that tells whether a process of the command has `name` in its command line."""

    def is_there(running):
        for child in running.children(recursive=True):
            try:
                if name in " ".join(child.cmdline()):
                    return True
            except psutil.Error:
                continue
        return False

    return is_there


def files(folder, pattern, count=1):
    """Return a mark: a function that tells whether `folder` holds `count` files."""
    return lambda running: sum(1 for _ in folder.glob(pattern)) >= count


def lines(log, count):
    """Return a mark: a function that tells whether a log has `count` lines."""
    return lambda running: log.exists() and log.read_bytes().count(b"\n") >= count


RAY = {"python, flags, checks": process_named("raylet"), "Ray, an actor": process_named("ray::MapWorker")}


def watch(command, parts):
    """Run a command; return ({phase: seconds}, seconds in total); parts: {phase: mark of its end}."""
    seconds, start = {}, time.monotonic()
    with psutil.Popen([sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL) as running:
        for name, mark in parts.items():
            begin = time.monotonic()
            while running.poll() is None and not mark(running):
                time.sleep(0.05)
            seconds[name] = time.monotonic() - begin
        begin = time.monotonic()
        if running.wait():
            sys.exit(f"{command} ended with {running.returncode}")
    seconds["its end"] = time.monotonic() - begin
    return seconds, time.monotonic() - start


def drawing(folder, model_dir, num_workers):
    """Return (command, {part: mark of its end}) of run_model.py."""
    out = folder / f"images-{num_workers}"
    command = ["run_model.py", "--model_dir", model_dir, "--output_dir", out, "--prompts", CLASS_PROMPT]
    command += ["--batch_size", 10, "--num_samples_per_prompt", IMAGES, "--num_inference_steps", 20]
    parts = {"imports, model, first batch": files(out, "*.png"), "images": files(out, "*.png", IMAGES)}
    return command, (RAY | parts if num_workers else parts)


def training(folder, model_dir, num_workers):
    """Return (command, {part: mark of its end}) of train.py."""
    out, work_dir = folder / f"tuned-{num_workers}", folder / f"tuned-{num_workers}.work"
    command = ["train.py", "--model_dir", model_dir, "--output_dir", out, "--instance_images_dir", SUBJECT]
    command += ["--class_images_dir", SUBJECT, *PROMPTS, "--max_train_steps", STEPS, "--log_every", 1]
    cache = {"imports, cache of latents": files(work_dir / "posteriors", "manifest.json")}
    worker = {"a worker": process_named("RayTrainWorker")}
    parts = {
        "imports, models, first step": lines(work_dir / "log.jsonl", 1),
        "steps": lines(work_dir / "log.jsonl", STEPS),
        "checkpoint, result": files(out, "manifest.json"),
    }
    return command, (RAY | cache | worker | parts if num_workers else cache | parts)


def commands(folder, model_dir):
    """Yield (name, command, {part: mark of its end})."""
    for num_workers, place in ((1, "on Ray"), (0, "here")):
        for make in (drawing, training):
            command, parts = make(folder, model_dir, num_workers)
            yield f"{command[0]} {place}", [*command, "--num_workers", num_workers], parts


def draw(medians, path):
    """Plot a bar for each command, stacked from its phases."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(part for parts in medians.values() for part in parts))
    colours = dict(zip(names, pyplot.get_cmap("tab20").colors, strict=False))
    figure, axis = pyplot.subplots(figsize=(11, 3.4))
    for row, parts in enumerate(medians.values()):
        left = 0.0
        for name, seconds in parts.items():
            axis.barh(row, seconds, left=left, color=colours[name])
            if seconds > 1:
                axis.text(left + seconds / 2, row, f"{seconds:.0f}", ha="center", va="center", fontsize=8)
            left += seconds
    axis.set(yticks=range(len(medians)), yticklabels=list(medians), xlabel="seconds")
    axis.invert_yaxis()
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
    figure.legend(handles, names, ncols=5, fontsize=7, loc="upper center")
    figure.tight_layout(rect=(0, 0, 1, 0.88))
    figure.savefig(path, dpi=110)


def main(args):
    """Measure all commands alternately; plot the medians, and print a table of them, then one JSON line."""
    found = {}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            for name, command, parts in commands(Path(folder), args.model_dir):
                seconds, total = watch(command, parts)
                found.setdefault(name, []).append(seconds)
                print(f"{name:20s} {total:5.1f} s", file=sys.stderr)
    medians = {
        name: {part: statistics.median(run[part] for run in runs) for part in runs[0]} for name, runs in found.items()
    }
    for name, parts in medians.items():
        told = "  ".join(f"{part}: {seconds:.1f}" for part, seconds in parts.items())
        print(f"{name:20s} {sum(parts.values()):5.1f} s  {told}")
    draw(medians, args.output)
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, command, _ in commands(Path(folder), args.model_dir):
            peaks[name] = peak_memory(command)[0]
            told = "  ".join(f"{process} {size}" for process, size in peaks[name].items())
            print(f"{name:20s} {sum(peaks[name].values()):5d} MB  {told}")
    print(json.dumps({"seconds": medians, "peak_mb": peaks, "repeats": args.repeats}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each command")
    parser.add_argument("--model_dir", default=MODEL, help="model to draw with and to train")
    parser.add_argument("--output", required=True, help="image file to plot the phases to")
    main(parser.parse_args())
