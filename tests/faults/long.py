"""Inject faults for about forty minutes on two cores, and print a table of the results.

Each row is kept in --results as soon as it is known. Run again to continue: scenarios without a row, with a row of
other code, or with FAILED are run. The exit code is 1 if any failed.

    PYTHONPATH=. python tests/faults/long.py
    PYTHONPATH=. python tests/faults/long.py --only driver saves --scale 0.1

The tests beside it inject each fault a few times: a short set runs with all tests, all of them with

    ./run.sh test -m "" tests/faults
"""

import ast
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

from common import folders
from common.cli import make_parser
from common.errors import one_line
from common.messages import say
from training import checkpoints

STEPS = 20
PAGE = 4096  # bytes: what a tmpfs counts in
COLUMNS = ("promise", "fault", "what was injected", "times", "what happened", "minutes")


def parse_args(argv=None):
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, help="scenarios, of all these")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the injections to make")
    parser.add_argument("--results", type=Path, default="data/faults.json", help="file that keeps the rows")
    return parser.parse_args(argv)


def note(text):
    """Say with the time of day how far it is."""
    say(f"{time.strftime('%T')} {text}")


def times(number, scale):
    """Return how often to inject what is injected so many times at --scale 1."""
    return max(1, round(number * scale))


# ---------------------------------------------------------------------------------------------------------------------
# A kill at each step


def steps_of(out):
    return step_of(f"{out}.work")


def each_step(scale):
    """Return the steps at which to kill: all of them, or fewer evenly spaced."""
    number = times(STEPS, scale)
    return [-(-STEPS * (2 * i + 1) // (2 * number)) for i in range(number)]


def driver(folder, rng, scale):
    """3: a SIGKILL of the driver loses at most the work since the last checkpoint"""
    flags = {"max_train_steps": STEPS, "checkpointing_steps": 5}
    finish(train(folder / "whole", **flags))
    for step in each_step(scale):
        out = folder / f"killed-{step}"
        with Script(train(out, **flags)) as script:
            assert script.until(lambda out=out, step=step: steps_of(out) >= step), script.stderr
            script.send(signal.SIGKILL)
            assert script.wait() == -signal.SIGKILL
        assert no_lies(out) > 0 and steps_of(out) >= step
        finish(train(out, **flags))
        assert_same(out, folder / "whole")
        note(f"killed at step {step} and completed")
    injected = f"train.py killed at each of {STEPS} steps, a checkpoint every 5, and run again"
    return "SIGKILL of the driver", injected, len(each_step(scale)), "each result bit-equal to the undisturbed one"


def workers_of(pid):
    """Return the processes of Ray Train's workers below a driver."""
    children = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in children if "RayTrainWorker" in " ".join(child.cmdline())]


def kill_workers(command, flags, folder, rng, scale):
    """Kill workers of runs with two of them on Ray, at most four times a run; return (times, what happened)."""
    flags = {"checkpointing_steps": 5, "num_workers": 2, "cpus_per_worker": 0.5, **flags}
    finish(command(folder / "whole" / "out", **flags), seconds=600, cold=True)
    note("the undisturbed run is done")
    steps, restarts = each_step(scale), 0
    runs = max(1, len(steps) // 4)
    for first in range(runs):
        out = folder / f"killed-{first}" / "out"  # pretrain.py's model card has the folder's name
        with Script(command(out, max_failures=len(steps), **flags), cold=True) as script:
            for step in steps[first::runs]:
                assert script.until(lambda out=out, step=step: steps_of(out) >= step, 600), script.stderr
                os.kill(rng.choice(workers_of(script.pid)), signal.SIGKILL)
                note(f"killed one at step {step}")
            assert script.wait(600) == 0, script.stderr
        restarts += script.stderr.count("restarting the workers")
        assert no_lies(out) > 0
        assert_same(out, folder / "whole" / "out")
    return len(steps), f"{restarts} times started again, each result bit-equal to the undisturbed one"


def worker(folder, rng, scale):
    """3: a SIGKILL of a worker loses at most the work since the last checkpoint"""
    found = kill_workers(train, {"max_train_steps": STEPS}, folder, rng, scale)
    injected = f"one of two Ray workers of train.py killed, four times a run, at each of {STEPS} steps"
    return "SIGKILL of a worker", injected, *found


def pretraining_worker(folder, rng, scale):
    """3: a SIGKILL of a worker loses at most the work since the last checkpoint"""
    found = kill_workers(pretrain, {"max_steps": STEPS}, folder, rng, scale / 5)
    return "SIGKILL of a worker", f"one of two Ray workers of pretrain.py killed in a run of {STEPS} steps", *found


# ---------------------------------------------------------------------------------------------------------------------
# Kills at random moments


def half_written(folder):
    """Return what a kill left of what was being written."""
    return [path for path in folder.rglob(".*") if path.name != folders.LOCK]


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
            note(f"kill {made} of {kills}, {done(out)} done")
            continue
        assert code == 0, script.stderr
        assert_same(out, whole)
        ends += 1
        note(f"run {ends} completed")
        for path in (out, Path(f"{out}.work")):
            shutil.rmtree(path, ignore_errors=True)
    happened = f"{hits} hit a write; {looked_at} folders and files read, none that is not whole was taken for it; "
    return made, happened + f"{ends} runs completed, bit-equal to the undisturbed one"


def saves(folder, rng, scale):
    """1: what a reader takes for whole is whole; an older checkpoint goes after the newer is there"""
    flags = {"max_train_steps": 60, "checkpointing_steps": 1, "checkpoints_total_limit": 1}
    found = kill_on_and_on(train, flags, steps_of, folder, rng, times(200, scale), 0.5)
    return "SIGKILL while checkpoints are saved", "train.py, which saves at each step, at random moments", *found


def pretraining(folder, rng, scale):
    """1: what a reader takes for whole is whole"""
    flags = {"max_steps": 60, "checkpointing_steps": 1}
    found = kill_on_and_on(pretrain, flags, steps_of, folder, rng, times(50, scale), 0.5)
    return "SIGKILL while checkpoints are saved", "pretrain.py, which saves at each step, at random moments", *found


def images(folder, rng, scale):
    """3: a SIGKILL loses at most the image that is being drawn"""
    flags = {"num_samples_per_prompt": 120}
    found = kill_on_and_on(draw, flags, lambda out: count(out, "*.png"), folder, rng, times(100, scale), 0.5)
    return "SIGKILL while images are drawn", "run_model.py, at random moments", *found


def parts(folder, rng, scale):
    """3: a SIGKILL loses at most the part that is being written"""
    found = kill_on_and_on(encode, {}, lambda out: count(f"{out}.work/parts", "part-*.parquet"), folder, rng,
                           times(50, scale), 0.3)  # fmt: skip
    return "SIGKILL while latents are written", "preprocess.py, at random moments", *found


def publishing(folder, rng, scale):
    """1: a folder that is published is whole or absent"""
    out, absent, kills = folder / "out", 0, times(50, scale)
    beside = folders.staging_path(out)
    with Script(train(out)) as script:
        script.until(beside.exists)
        began = time.monotonic()
        assert script.wait() == 0, script.stderr
    longest = 1.3 * (time.monotonic() - began)
    whole = out.rename(folder / "whole")
    for i in range(kills):
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
        note(f"kill {i + 1} of {kills}, {absent} times absent")
    finish(train(out))
    assert_same(out, whole)
    happened = f"{absent} times absent, {kills - absent} times whole; the last run bit-equal to the undisturbed one"
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
    number = times(50, scale)
    command = train(folder / "disk" / "out", max_train_steps=6, **flags)
    with small_disk(folder / "disk") as resize:
        for i in range(number):
            shutil.copytree(folder / "half", folder / "disk", symlinks=True, dirs_exist_ok=True)
            fill_during_a_save(command, folder / "disk" / "out", resize, i * pages // number * PAGE)
            finish(command)
            assert_same(folder / "disk" / "out", folder / "whole" / "out")
            for path in (folder / "disk").iterdir():
                shutil.rmtree(path)
            note(f"full {i + 1} of {number} times")
    injected = f"a tmpfs full at {number} bytes, evenly spaced over the {pages * PAGE} of a checkpoint of train.py"
    happened = "exit 4 in one line, the older checkpoint and result whole; with room bit-equal to the undisturbed run"
    return "full disk", injected, number, happened


def fill_during_a_save(command, out, resize, free):
    """Leave `free` bytes on the disk after the step before a save, which fails; look at what is left."""
    before = steps_of(out)
    with Script(command) as script:
        assert script.until(lambda: steps_of(out) > before), script.stderr
        script.send(signal.SIGSTOP)
        resize(free)
        script.send(signal.SIGCONT)
        assert script.wait() == 4, script.stderr
    assert "disk full" in told(script)
    assert no_lies(out) > 2 and not half_written(out.parent)
    assert checkpoints.newest_checkpoint(f"{out}.work")[0] == before
    assert folders.read_manifest(out, deep=True)["step"] == before
    resize(None)


# ---------------------------------------------------------------------------------------------------------------------
# The tests beside it, and the table


def tests(promise, name, fault, injected, keyword="test"):
    """Return a scenario that runs the tests of a file: those whose names have the keyword."""
    path = next((ROOT / "tests").rglob(f"test_{name}.py"))

    def run(folder, rng, scale):
        options = ["-m", "", "-vv", "-k", keyword, "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
        command, said = [sys.executable, "-m", "pytest", *options, path], ""
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as pytest:
            try:
                for line in pytest.stdout:
                    said += line
                    if line.endswith("%]\n"):
                        note(line.strip())
            finally:
                pytest.send_signal(signal.SIGINT)
        assert pytest.returncode == 0, said
        return fault, injected, int(re.search(r"(\d+) passed", said)[1]), f"all as promised: {path.name}"

    sentence = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0].rstrip(".")
    run.__name__, run.__doc__ = path.stem, f"{promise}: {sentence}"
    return run


LONG = (driver, worker, pretraining_worker, saves, pretraining, images, parts, publishing, disk)
SHORT = (
    tests(2, "again", "the same command again", "each script, asked again for what it finished"),
    tests(3, "signals", "SIGTERM and SIGINT", "each script, stopped twice and completed; a Ray actor of run_model.py"),
    tests(3, "cache_model", "SIGKILL, SIGTERM and SIGINT", "cache_model.py, in the middle of a file", "signal_stops"),
    tests(3, "evaluate", "SIGKILL and SIGTERM", "evaluate.py, among its pictures", "killed_evaluation"),
    tests(4, "two_runs", "two runs on one output", "a second run beside one that is halted; then that one is killed"),
    tests(
        3,
        "two_hosts",
        "two hosts on one output in an object store",
        "the first is halted past its lease, with and without Ray workers, or killed; the second is started again and "
        "again",
    ),
    tests(
        6,
        "weights",
        "damage, pickles",
        "bits, NaN, missing, misshapen and unknown tensors, pickles at all levels",
    ),
    tests(7, "numbers", "NaN and overflow", "cached latents that are NaN, learning rates of 1e30 and 1e38"),
    tests(8, "bad_images", "bad photos", "decompression bombs, cut, empty, foreign and flipped files"),
    tests(9, "names", "odd names", "prompts, tokens, class names, outputs and links, in each script and run.sh"),
    tests(10, "cluster", "open clusters", "no token, an older Ray, other hosts", "token or older or listens"),
)
SCENARIOS = {each.__name__: each for each in (*LONG, *SHORT)}


def judge(name, args):
    """Run a scenario in a folder of its own; return {"row": its row of the table, "kept": whether the promise was}."""
    began, kept = time.monotonic(), True
    note(f"== {name}, promise {SCENARIOS[name].__doc__}")
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        try:
            row = SCENARIOS[name](Path(folder), random.Random(f"{args.seed} {name}"), args.scale)
        except Skipped as reason:
            row = (name, "", 0, f"skipped: {reason}")
        except Exception as error:
            traceback.print_exc()
            row, kept = (name, "", "", f"FAILED: {one_line(str(error), 300)}"), False
    return {"row": (SCENARIOS[name].__doc__, *row, f"{(time.monotonic() - began) / 60:.1f}"), "kept": kept}


def show(row, file=None):
    """Print a row of the table."""
    print("|", " | ".join(str(cell).replace("|", "/") for cell in row), "|", file=file, flush=True)


def main(args):
    """Run the scenarios that are not done, keep each row as soon as it is there, and print the table."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is killed and the folders go
    packages = ("common", "pipelines", "training", "pretraining", "evaluation")
    code = [*ROOT.glob("*.py"), *(path for package in packages for path in (ROOT / package).glob("*.py"))]
    scripts = folders.digest_values([[str(path.relative_to(ROOT)), folders.sha256_file(path)] for path in sorted(code)])
    names, results = args.only or list(SCENARIOS), folders.read_json(args.results)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        made_with = {"scripts": scripts, "seed": args.seed, "scale": args.scale}
        if results.get(name, {}).get("kept") and results[name]["made_with"] == made_with:
            note(f"== {name}: done before, in {args.results}")
            continue
        results[name] = {"made_with": made_with, **judge(name, args)}
        folders.write_json(args.results, results)
        show(results[name]["row"], file=sys.stderr)
    for row in (COLUMNS, ["---"] * len(COLUMNS), *(results[name]["row"] for name in names)):
        show(row)
    sys.exit(not all(results[name]["kept"] for name in names))


if __name__ == "__main__":
    main(parse_args())
