"""SIGTERM and SIGINT while a script works: it keeps what is finished, says so and ends; the same command goes on."""

import signal
import subprocess
import sys
import time

import pytest
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
    undisturbed,
)

SECONDS = 10  # that a script may take to end


def steps_of(output_dir):
    return step_of(f"{output_dir}.work")


def images_of(output_dir):
    return count(output_dir, "*.png")


def parts_of(output_dir):
    return count(f"{output_dir}.work/parts", "part-*.parquet")


def stop(command, done, number):
    """Send a signal to a script that has done some of its work; return how much it left done."""
    with Script(command) as script:
        before = done()
        assert script.until(lambda: done() > before), script.stderr
        script.send(number)
        sent = time.monotonic()
        assert script.wait() == 128 + number, script.stderr
    assert time.monotonic() - sent < SECONDS
    assert "run the same command again" in told(script)
    return done()


@pytest.mark.parametrize(
    ("command", "done", "flags"),
    [
        (train, steps_of, {"max_train_steps": 20}),
        pytest.param(pretrain, steps_of, {"max_steps": 20}, marks=pytest.mark.faults),
        (draw, images_of, {"num_samples_per_prompt": 60}),
        pytest.param(encode, parts_of, {}, marks=pytest.mark.faults),
    ],
    ids=["train", "pretrain", "run_model", "preprocess"],
)
def test_a_script_that_is_stopped_goes_on(tmp_path, command, done, flags):
    """First by SIGTERM, then, further on, by SIGINT; nothing that was done is done again."""
    left = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        earlier, left = left, stop(command(tmp_path / "out", **flags), lambda: done(tmp_path / "out"), number)
        assert left > earlier
        no_lies(tmp_path / "out")
    finish(command(tmp_path / "out", **flags))
    assert_same(tmp_path / "out", undisturbed(command, **flags))


def test_a_signal_is_not_taken_for_a_fault_of_a_library():
    """Libraries try an import, say, and go on whatever exception it ends with: not with this one."""
    code = """
import argparse, os, signal
from common import cli
def main(args):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except Exception:
        print("went on")
cli.run(main, argparse.Namespace(debug=False))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "")


@pytest.mark.faults
@pytest.mark.ray
def test_no_actor_outlives_the_driver(tmp_path):
    with Script(draw(tmp_path / "out", num_samples_per_prompt=500, num_workers=1), cold=True) as script:
        assert script.until(lambda: images_of(tmp_path / "out") > 1, 300), script.stderr
        assert len(script.processes()) > 3
        script.send(signal.SIGTERM)
        sent = time.monotonic()
        assert script.wait() == 128 + signal.SIGTERM, script.stderr
        assert time.monotonic() - sent < SECONDS
        while (left := script.processes()) and time.monotonic() - sent < 2 * SECONDS:
            time.sleep(0.1)
        assert not left
    assert "run the same command again" in told(script)
    assert no_lies(tmp_path / "out") > 0
