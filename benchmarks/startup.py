"""The seconds between a command and its first image or step, part by part, with Ray and without.

Seen from outside: when Ray's first process is there, when the worker or actor is, when the first image or log line is.

    python benchmarks/startup.py --repeats 5
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
from common import ROOT

SUBJECT, PROMPT = "assets/subject", "a 3d emoji of a cat"
PARTS = ("python, flags, checks", "Ray", "worker or here: imports, model, the first")


def is_there(process, name):
    """Return whether a child of a process has `name` in its command line."""
    for child in process.children(recursive=True):
        try:
            if name in " ".join(child.cmdline()):
                return True
        except psutil.Error:
            continue
    return False


def watch(command, worker, done):
    """Run a command until `done()`; return the seconds of each of PARTS; without Ray the second is 0."""
    start, marks = time.monotonic(), {}
    with psutil.Popen([sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL) as running:
        while not done():
            if running.poll() is not None:
                sys.exit(f"{command} ended with {running.returncode}")
            for name in ("raylet", worker):
                if name and name not in marks and is_there(running, name):
                    marks[name] = time.monotonic()
            time.sleep(0.02)
        end = time.monotonic()
        running.terminate()
        running.wait()
    begun = marks.get("raylet", start)
    ready = marks.get(worker, begun)
    return begun - start, ready - begun, end - ready


def commands(folder, model_dir):
    """Yield (name, command, the name of its worker, whether its first image or step is there)."""
    for num_workers in (1, 0):
        suffix = "on Ray" if num_workers else "here"
        out = folder / f"images-{num_workers}"
        command = ["run_model.py", "--model_dir", model_dir, "--output_dir", out, "--prompts", PROMPT]
        command += ["--num_samples_per_prompt", 100, "--num_inference_steps", 1, "--num_workers", num_workers]
        yield f"run_model.py {suffix}", command, "ray::MapWorker", lambda out=out: any(out.glob("*.png"))
        out = folder / f"tuned-{num_workers}"
        command = ["train.py", "--model_dir", model_dir, "--output_dir", out, "--instance_images_dir", SUBJECT]
        command += ["--class_images_dir", SUBJECT, "--instance_prompt", "a 3d emoji of a unqtkn cat", "--class_prompt"]
        command += [PROMPT, "--max_train_steps", 500, "--log_every", 1, "--num_workers", num_workers]
        log = Path(f"{out}.work/log.jsonl")
        yield f"train.py {suffix}", command, "RayTrainWorker", lambda log=log: log.exists() and log.stat().st_size


def main(args):
    """Measure all in turn; print a table of medians, then one JSON line."""
    seconds = {}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            for name, command, worker, done in commands(Path(folder), args.model_dir):
                seconds.setdefault(name, []).append(watch(command, worker, done))
                print(f"{name:20s} {'  '.join(f'{each:5.1f}' for each in seconds[name][-1])}", file=sys.stderr)
    medians = {name: [statistics.median(part) for part in zip(*runs, strict=True)] for name, runs in seconds.items()}
    for name, parts in medians.items():
        told = "  ".join(f"{part}: {each:.1f} s" for part, each in zip(PARTS, parts, strict=True))
        print(f"{name:20s} {sum(parts):5.1f} s  {told}")
    print(json.dumps({"medians": medians, "repeats": args.repeats}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="of each command")
    parser.add_argument("--model_dir", default="models/emoji-64", help="model that draws and learns")
    main(parser.parse_args())
