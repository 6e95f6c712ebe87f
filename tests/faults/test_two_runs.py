"""Two runs on one output: the second is sent away at once, and the lock of one that was killed is taken over."""

import signal
import time

import pytest
from injection import Script, assert_same, count, draw, encode, finish, step_of, told, train, undisturbed

SECONDS = 10  # until a second run has been sent away


@pytest.mark.parametrize(
    ("command", "begun", "flags"),
    [
        pytest.param(train, lambda out: step_of(f"{out}.work"), {"max_train_steps": 20}, marks=pytest.mark.faults),
        pytest.param(draw, lambda out: count(out, "*.png"), {"num_samples_per_prompt": 20}, marks=pytest.mark.faults),
        (encode, lambda out: count(f"{out}.work/parts", "part-*.parquet"), {}),
    ],
    ids=["train", "run_model", "preprocess"],
)
def test_the_second_is_sent_away_and_takes_over(tmp_path, command, begun, flags):
    words = command(tmp_path / "out", **flags)
    with Script(words) as first:
        assert first.until(lambda: begun(tmp_path / "out")), first.stderr
        first.send(signal.SIGSTOP)
        began = time.monotonic()
        second = finish(words, code=75, cold=True)
        assert time.monotonic() - began < SECONDS
        assert f"process {first.pid} " in told(second)
        first.send(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
    finish(words)
    assert_same(tmp_path / "out", undisturbed(command, **flags))


def test_another_work_folder_is_the_same_output(tmp_path):
    with Script(train(tmp_path / "out", max_train_steps=20)) as first:
        assert first.until(lambda: step_of(f"{tmp_path}/out.work")), first.stderr
        first.send(signal.SIGSTOP)
        second = finish(train(tmp_path / "out", work_dir=tmp_path / "other"), code=75)
        assert f"process {first.pid} " in told(second)
