"""Helpers of the benchmarks: synthetic raw data, running a script, its speed from its log, and its memory."""

import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
LOG_EVERY = 5  # steps, in the runs that are measured
MODEL, SUBJECT = "models/emoji-64", "assets/subject"  # embedded
INSTANCE_PROMPT, CLASS_PROMPT = "a 3d emoji of a unqtkn cat", "a 3d emoji of a cat"
PROMPTS = ("--instance_prompt", INSTANCE_PROMPT, "--class_prompt", CLASS_PROMPT)


def write_data(folder, num_rows, size, seed=0):
    """Write Parquet files of 1,000 rows each: PNG bytes of coarse noise, `size` pixels a side, and captions."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for start in range(0, num_rows, 1000):
        images, captions = [], []
        for row in range(start, min(start + 1000, num_rows)):
            coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
            file = io.BytesIO()
            coarse.resize((size, size), Image.Resampling.BICUBIC).save(file, "PNG")
            images.append(file.getvalue())
            captions.append(f"a picture of number {row}")
        pq.write_table(pa.table({"image": images, "caption": captions}), folder / f"{start:06d}.parquet")


def run(script, *arguments):
    """Run a script of the project to its end; return the seconds it took."""
    start = time.monotonic()
    done = subprocess.run([sys.executable, script, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{script} {arguments} ended with {done.returncode}: {done.stderr[-2000:]}")
    return time.monotonic() - start


def follow(log, steps, script, *arguments):
    """Run a script until its log shows the last of `steps`, then kill it; return the seconds to each of these steps."""
    seen, started = {}, time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        running = psutil.Popen(
            [sys.executable, script, *map(str, arguments)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors
        )
        while running.poll() is None and len(seen) < len(steps):
            lines = log.read_text().splitlines() if log.exists() else []
            for step in steps:
                if step not in seen and len(lines) >= step // LOG_EVERY:
                    seen[step] = time.monotonic() - started
            time.sleep(0.02)
        if len(seen) < len(steps):
            errors.seek(0)
            sys.exit(f"{script} {arguments} ended with {running.returncode}: {errors.read()[-2000:]}")
        end_tree(running)
    return [seen[step] for step in steps]


def end_tree(process):
    """Kill a process and all its children, and wait until they have ended."""
    tree = [process, *process.children(recursive=True)]
    for each in tree:
        with contextlib.suppress(psutil.Error):
            each.kill()
    psutil.wait_procs(tree, timeout=30)


def tree_memory(process):
    """Return the memory in bytes of a process and its children, by name; shared memory is counted once (PSS)."""
    held = Counter()
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            name = (each.cmdline() or [each.name()])[0]
            held[Path(name).name if name.startswith("/") else name] += each.memory_full_info().pss
    return held


def peak_memory(command):
    """Run a script; return ({process: MB} when the process tree uses most memory, largest first, seconds)."""
    start, peak = time.monotonic(), Counter()
    running = psutil.Popen([sys.executable, *map(str, command)], stdout=subprocess.DEVNULL, cwd=ROOT)
    while running.poll() is None:
        peak = max(peak, tree_memory(running), key=Counter.total)
        time.sleep(0.5)
    if running.returncode:
        sys.exit(f"{command} ended with {running.returncode}")
    return {name: round(size / 1e6) for name, size in peak.most_common()}, time.monotonic() - start


def peer_command(peer, model_dir, class_images, folder, *flags):
    """Return the command of a DreamBooth script of Diffusers, as it is in its repository; folder: for copies.

    Class images are copied without metadata.jsonl, as the script opens all files of a folder. It needs torchvision; for
    a build of PyTorch that has none, replace its `transforms` by a module that does the same with Pillow.
    """
    pictures = folder / "class-png"
    pictures.mkdir()
    count = len([shutil.copy(path, pictures) for path in class_images.glob("*.png")])
    command = [peer, "--pretrained_model_name_or_path", model_dir, *PROMPTS, "--instance_data_dir", SUBJECT]
    command += ["--class_data_dir", pictures, "--with_prior_preservation", "--num_class_images", count]
    return [*command, "--train_batch_size", 1, "--train_text_encoder", "--lr_scheduler", "constant", *flags]


def rate(log, first, last, script, *arguments):
    """Run a script; return its steps per second between two steps in its log."""
    begin, end = follow(log, (first, last), script, *arguments)
    return (last - first) / (end - begin)
