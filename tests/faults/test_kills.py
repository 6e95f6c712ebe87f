"""SIGKILL at moments drawn by a seed: what is left is true, and the same command ends as if nothing had been."""

import random
import signal
import time

import pytest
from injection import Script, assert_same, count, draw, finish, no_lies, step_of, train, undisturbed

from pipelines.image_folder import image_name


def kill_twice(command, output_dir, done):
    """Kill two runs of a command soon after they went on, `done()` counting what is; then let one finish."""
    rng = random.Random(0)
    for _ in range(2):
        with Script(command) as script:
            before, more = done(), rng.randint(1, 4)
            assert script.until(lambda before=before, more=more: done() >= before + more)
            time.sleep(rng.uniform(0, 0.05))
            script.send(signal.SIGKILL)
            assert script.wait() == -signal.SIGKILL
        assert no_lies(output_dir) > 0 and done() > before
    finish(command)
    no_lies(output_dir)


def test_train(tmp_path):
    command = train(tmp_path / "out", max_train_steps=20, checkpointing_steps=1)
    kill_twice(command, tmp_path / "out", lambda: step_of(tmp_path / "out.work"))
    assert_same(tmp_path / "out", undisturbed(train, max_train_steps=20))


@pytest.mark.faults
def test_run_model(tmp_path):
    command = draw(tmp_path / "out", num_samples_per_prompt=20)
    kill_twice(command, tmp_path / "out", lambda: count(tmp_path / "out", "*.png"))
    assert_same(tmp_path / "out", undisturbed(draw, num_samples_per_prompt=20))


def test_what_a_kill_left_half_written_is_removed(tmp_path):
    """An image folder has no folder beside it to be filled: its files appear one by one."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f".{image_name('a cat', 0)}.12345.tmp").write_bytes(b"half an image")
    finish(draw(tmp_path / "out"))
    assert_same(tmp_path / "out", undisturbed(draw))
