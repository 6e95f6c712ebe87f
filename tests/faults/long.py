"""Kill, fill and damage for three quarters of an hour on two cores; print a table of what became of each promise.

Reads nothing but the project; exits 1 where a promise was broken, and says on stderr how.

    PYTHONPATH=. python tests/faults/long.py
    PYTHONPATH=. python tests/faults/long.py --only driver saves --scale 0.1
"""

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import psutil
from injection import (
    ROOT,
    Script,
    assert_same,
    count,
    draw,
    encode,
    finish,
    no_lies,
    pretrain,
    step_of,
    told,
    train,
)

import checkpoint

STEPS = 20
PAGE = 4096  # bytes: what a tmpfs counts in
COLUMNS = ("promise", "fault", "what was injected", "times", "what happened", "minutes")


def parse_args(argv=None):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, help="scenarios; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the injections to make")
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------------------------------------------------
# A kill at each step


def each_step(scale):
    """Return the steps at which to kill: all of them, or fewer evenly spaced."""
    number = max(1, round(STEPS * scale))
    return [STEPS * (i + 1) // number for i in range(number)]


def driver(folder, rng, scale):
    """3: a SIGKILL of the driver loses at most the work since the last checkpoint"""
    flags = {"max_train_steps": STEPS, "checkpointing_steps": 5}
    finish(train(folder / "whole", **flags))
    for step in each_step(scale):
        out = folder / f"killed-{step}"
        with Script(train(out, **flags)) as script:
            assert script.until(lambda out=out, step=step: step_of(f"{out}.work") >= step), script.stderr
            script.send(signal.SIGKILL)
            assert script.wait() == -signal.SIGKILL
        assert no_lies(out) > 0 and step_of(f"{out}.work") >= step
        finish(train(out, **flags))
        assert_same(out, folder / "whole")
    injected = f"train.py killed at each of {STEPS} steps, a checkpoint every 5, and run again"
    return "SIGKILL of the driver", injected, len(each_step(scale)), "each result bit-equal to the undisturbed one"


def workers_of(pid):
    """Return the processes of Ray Train's workers below a driver."""
    children = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in children if "RayTrainWorker" in " ".join(child.cmdline())]


def worker(folder, rng, scale):
    """3: a SIGKILL of a worker loses at most the work since the last checkpoint"""
    flags = {"max_train_steps": STEPS, "checkpointing_steps": 5, "num_workers": 2, "cpus_per_worker": 0.5}
    finish(train(folder / "whole", **flags), seconds=600, cold=True)
    kills = restarts = 0
    for first in range(1, max(1, round(5 * scale)) + 1):
        out = folder / f"killed-{first}"
        steps = range(first, STEPS + 1, 5)
        with Script(train(out, max_failures=len(steps), **flags), cold=True) as script:
            for step in steps:
                assert script.until(lambda out=out, step=step: step_of(f"{out}.work") >= step, 600), script.stderr
                os.kill(rng.choice(workers_of(script.pid)), signal.SIGKILL)
                kills += 1
            assert script.wait(600) == 0, script.stderr
        restarts += script.stderr.count("starting the workers again")
        assert no_lies(out) > 0
        assert_same(out, folder / "whole")
    injected = f"one of two Ray workers of train.py killed, four times a run, at each of {STEPS} steps"
    happened = f"{restarts} times started again, each result bit-equal to the undisturbed one"
    return "SIGKILL of a worker", injected, kills, happened


# ---------------------------------------------------------------------------------------------------------------------
# Kills at random moments


def half_written(folder):
    """Return what a kill left of what was being written."""
    return [path for path in folder.rglob(".*") if path.name != checkpoint.LOCK]


def kill_on_and_on(command, flags, done, folder, rng, kills, longest):
    """Kill runs of a command, each going on where the one before it was killed, at most `longest` seconds after it did.

    done: counts the work in an output folder. A run that ends before is compared with an undisturbed one, and all
    begins anew. Return (times, what happened).
    """
    out, whole = folder / "out", folder / "whole" / "out"
    finish(command(whole, **flags))
    made = hits = ends = looked_at = 0
    while made < kills or out.exists() or done(out):
        with Script(command(out, **flags)) as script:
            before = done(out)
            if made < kills and script.until(lambda before=before: done(out) > before):
                time.sleep(rng.uniform(0, longest))
                script.send(signal.SIGKILL)
            code = script.wait()
        looked_at += no_lies(out)
        if code == -signal.SIGKILL:
            made += 1
            hits += bool(half_written(folder))
            continue
        assert code == 0, script.stderr
        assert_same(out, whole)
        ends += 1
        for path in (out, Path(f"{out}.work")):
            shutil.rmtree(path, ignore_errors=True)
    happened = f"{hits} hit a write; {looked_at} folders and files read, none that is not whole was taken for it; "
    return made, happened + f"{ends} runs completed, bit-equal to the undisturbed one"


def steps_of(out):
    return step_of(f"{out}.work")


def saves(folder, rng, scale):
    """1: what a reader takes for whole is whole; an older checkpoint goes after the newer is there"""
    flags = {"max_train_steps": 60, "checkpointing_steps": 1, "checkpoints_total_limit": 1}
    found = kill_on_and_on(train, flags, steps_of, folder, rng, round(200 * scale), 0.5)
    return "SIGKILL while checkpoints are saved", "train.py, which saves at each step, at random moments", *found


def pretraining(folder, rng, scale):
    """1: what a reader takes for whole is whole"""
    flags = {"max_steps": 60, "checkpointing_steps": 1}
    found = kill_on_and_on(pretrain, flags, steps_of, folder, rng, round(50 * scale), 0.5)
    return "SIGKILL while checkpoints are saved", "pretrain.py, which saves at each step, at random moments", *found


def images(folder, rng, scale):
    """3: a SIGKILL loses at most the image that is being drawn"""
    flags = {"num_samples_per_prompt": 120}
    found = kill_on_and_on(draw, flags, lambda out: count(out, "*.png"), folder, rng, round(100 * scale), 0.5)
    return "SIGKILL while images are drawn", "run_model.py, at random moments", *found


def parts(folder, rng, scale):
    """3: a SIGKILL loses at most the part that is being written"""
    found = kill_on_and_on(encode, {}, lambda out: count(f"{out}.work/parts", "part-*.parquet"), folder, rng,
                           round(50 * scale), 0.3)  # fmt: skip
    return "SIGKILL while latents are written", "preprocess.py, at random moments", *found


def publishing(folder, rng, scale):
    """1: a folder that is published is whole or absent"""
    out, absent, kills = folder / "out", 0, round(50 * scale)
    beside = checkpoint.staging_path(out)
    with Script(train(out)) as script:
        script.until(beside.exists)
        began = time.monotonic()
        assert script.wait() == 0, script.stderr
    longest = 1.3 * (time.monotonic() - began)
    whole = out.rename(folder / "whole")
    for _ in range(kills):
        for path in (out, beside):
            shutil.rmtree(path, ignore_errors=True)
        with Script(train(out)) as script:
            script.until(beside.exists)
            time.sleep(rng.uniform(0, longest))
            script.send(signal.SIGKILL)
            assert script.wait() in (0, -signal.SIGKILL), script.stderr
        absent += not out.exists()
        assert no_lies(out) > 0
        if out.exists():
            assert_same(out, whole)
    finish(train(out))
    assert_same(out, whole)
    happened = (
        f"{absent} times absent, {kills - absent} times whole; then a run completed, bit-equal to the undisturbed"
    )
    return "SIGKILL while the result is published", "train.py after its last step, at random moments", kills, happened


# ---------------------------------------------------------------------------------------------------------------------
# A full disk


class Skipped(Exception):
    """This machine does not let a fault be injected."""


@contextlib.contextmanager
def small_disk(folder):
    """Give a function that leaves so many bytes free on a tmpfs at `folder`; None: plenty."""
    folder.mkdir()

    def resize(free):
        disk = os.statvfs(folder)
        size = 2**28 if free is None else (disk.f_blocks - disk.f_bfree) * disk.f_frsize + free
        subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True)

    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={2**28}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        raise Skipped(f"no tmpfs can be mounted here ({mounted.stderr.decode().strip()})")
    try:
        yield resize
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def pages_of(folder):
    """Return how many pages the files of a folder take."""
    return sum(-(-path.stat().st_size // PAGE) for path in folder.rglob("*") if path.is_file())


def disk(folder, rng, scale):
    """5: a disk that is full in the middle of a save leaves what is older intact and removes the half-written"""
    flags = {"checkpointing_steps": 3}
    finish(train(folder / "half" / "out", max_train_steps=3, **flags))
    finish(train(folder / "whole" / "out", max_train_steps=6, **flags))
    pages = pages_of(folder / "half" / "out.work" / "checkpoint-000003")
    number = max(1, round(50 * scale))
    command = train(folder / "disk" / "out", max_train_steps=6, **flags)
    with small_disk(folder / "disk") as resize:
        for i in range(number):
            shutil.copytree(folder / "half", folder / "disk", symlinks=True, dirs_exist_ok=True)
            fill_during_a_save(command, folder / "disk" / "out", resize, i * pages // number * PAGE)
            finish(command)
            assert_same(folder / "disk" / "out", folder / "whole" / "out")
            for path in (folder / "disk").iterdir():
                shutil.rmtree(path)
    injected = f"a tmpfs full at {number} bytes, evenly spaced over the {pages * PAGE} of a checkpoint of train.py"
    happened = (
        "exit 4 in one line, the previous checkpoint and result whole; with room bit-equal to the undisturbed run"
    )
    return "full disk", injected, number, happened


def fill_during_a_save(command, out, resize, free):
    """Leave `free` bytes on the disk after the step before a save, which fails; look at what is left."""
    before = step_of(f"{out}.work")
    with Script(command) as script:
        assert script.until(lambda: step_of(f"{out}.work") > before), script.stderr
        script.send(signal.SIGSTOP)
        resize(free)
        script.send(signal.SIGCONT)
        assert script.wait() == 4, script.stderr
    assert "disk full" in told(script)
    assert no_lies(out) > 2 and not half_written(out.parent)
    assert checkpoint.newest_checkpoint(f"{out}.work")[0] == before
    assert checkpoint.read_manifest(out, deep=True)["step"] == before
    resize(None)


# ---------------------------------------------------------------------------------------------------------------------
# What the short tests inject


SHORT = {
    "signals": (
        "3: a signal ends a script within ten seconds, what is finished is safe, no process is left",
        "SIGTERM and SIGINT",
        "each script, stopped twice and then run to its end; run_model.py with a Ray actor",
    ),
    "two_runs": (
        "4: a second run on an output is sent away, the lock of a dead one is taken over",
        "two runs on one output",
        "train.py, run_model.py, preprocess.py; the first killed, the second run again",
    ),
    "weights": (
        "6: damaged weights are refused by name, a pickle's code never runs",
        "damaged weights, pickles",
        "flipped bits, cut files, NaN, missing, misshapen and unknown tensors, pickles at each level, in each script",
    ),
    "numbers": (
        "7: a step that is not finite is skipped, a few in a row end the run, nothing is published",
        "NaN and overflow",
        "cached latents that are NaN, learning rates of 1e30 and 1e38",
    ),
    "images": (
        "8: bad files are told together, a bomb takes less than 100 MB",
        "bad photos",
        "decompression bombs, cut, empty, foreign and flipped files",
    ),
    "names": (
        "9: whatever the names, nothing outside the output is touched",
        "odd names",
        "prompts, tokens, class names, output folders and links, in each script and run.sh",
    ),
}


def run_tests(name, folder):
    """Run the tests of a file; return (fault, what was injected, times, what happened)."""
    path = Path("tests", "faults", f"test_{name}.py")
    options = ["-m", "faults", "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, path], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    return *SHORT[name][1:], passed, f"all as promised: {path.name}"


# ---------------------------------------------------------------------------------------------------------------------
# The table

LONG = {each.__name__: each for each in (driver, worker, saves, pretraining, images, parts, publishing, disk)}
SCENARIOS = [*LONG, *(f"test_{name}" for name in SHORT)]


def judge(name, args):
    """Run a scenario in a folder of its own; return (its row of the table, whether the promise was kept)."""
    began = time.monotonic()
    promise = LONG[name].__doc__ if name in LONG else SHORT[name.removeprefix("test_")][0]
    kept = True
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        try:
            if name in LONG:
                row = LONG[name](Path(folder), random.Random(f"{args.seed} {name}"), args.scale)
            else:
                row = run_tests(name.removeprefix("test_"), folder)
        except Skipped as reason:
            row = (name, "", 0, f"skipped: {reason}")
        except Exception as error:
            traceback.print_exc()
            row, kept = (name, "", "", f"BROKEN: {' '.join(str(error).split())[:300]}"), False
    return (promise, *row, f"{(time.monotonic() - began) / 60:.1f}"), kept


def show(row, file=None):
    """Print a row of the table."""
    print("|", " | ".join(str(cell).replace("|", "/") for cell in row), "|", file=file, flush=True)


def main(args):
    """Run the scenarios, say each row as soon as it is there, and print the table."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is killed and the folders go
    judged = []
    for name in args.only or SCENARIOS:
        judged.append(judge(name, args))
        show(judged[-1][0], file=sys.stderr)
    for row in (COLUMNS, ["---"] * len(COLUMNS), *(row for row, _ in judged)):
        show(row)
    sys.exit(not all(kept for _, kept in judged))


if __name__ == "__main__":
    main(parse_args())
