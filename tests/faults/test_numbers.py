"""Numbers that are not finite: their steps are skipped, a few in a row end the run, and nothing of it is published."""

import os
import shutil

import numpy as np
import pytest
from injection import finish, no_lies, told, train
from safetensors.numpy import load_file, save_file

from common import folders
from training import checkpoints, logs, optimizer

FLAGS = {"checkpointing_steps": 1, "checkpoints_total_limit": 2}


def spoil_cache(work_dir, rows):
    """Make some cached latents NaN, sealed as if the VAE had made them so."""
    folder = work_dir / "posteriors"
    facts = {name: fact for name, fact in folders.read_manifest(folder).items() if name != "files"}
    arrays = load_file(folder / "posteriors.safetensors")
    place = arrays.pop("place").clip(0)  # all rows, also those that a longer run would add
    arrays = {name: array[place] for name, array in arrays.items()}
    arrays["mean"][rows, 0, 0, 0] = np.nan
    arrays["place"] = np.arange(len(place))
    with folders.staging(folder) as beside:
        save_file(arrays, beside / "posteriors.safetensors")
        folders.publish(beside, folder, **facts)


def skipped(work_dir):
    """The steps that were logged without a gradient norm: it was not finite."""
    return [line["step"] for line in folders.read_json_lines(work_dir / logs.LOG) if line["grad_norm"] is None]


def are_finite(files):
    return all(np.isfinite(array).all() for path in files for array in load_file(path).values())


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-steps")
    finish(train(folder / "out", max_train_steps=2, **FLAGS))
    return folder


@pytest.fixture
def begun(two_steps, tmp_path):
    """A folder with the output `out` of two steps and its work folder."""
    return shutil.copytree(two_steps, tmp_path, symlinks=True, dirs_exist_ok=True)


@pytest.mark.faults
def test_a_row_that_is_not_finite_costs_its_steps(begun):
    """An epoch has eight pairs, one of which holds the class image of the last row."""
    spoil_cache(begun / "out.work", -1)
    finish(train(begun / "out", max_train_steps=18, **FLAGS))
    steps = skipped(begun / "out.work")
    assert 1 <= len(steps) <= 3 and are_finite((begun / "out").rglob("*.safetensors"))


def test_rows_that_are_not_finite_end_the_run(begun):
    """The checkpoints that stay hold the last good weights; what was published before is left alone."""
    before = folders.read_manifest(begun / "out")
    spoil_cache(begun / "out.work", slice(None))
    failed = finish(train(begun / "out", max_train_steps=20, **FLAGS), code=5)
    assert "diverged" in told(failed)
    assert len(skipped(begun / "out.work")) <= optimizer.MAX_BAD_STEPS
    assert folders.read_manifest(begun / "out", deep=True) == before
    assert are_finite(begun.glob("out.work/checkpoint-*/*/*.safetensors"))
    assert checkpoints.newest_checkpoint(begun / "out.work")[0] >= 2 and no_lies(begun / "out") > 0


@pytest.mark.faults
def test_a_run_that_diverged_is_not_finished_by_asking_again(begun):
    """Whatever was saved among the skipped steps: a few more each time must not add up to the end."""
    before = folders.read_manifest(begun / "out")
    spoil_cache(begun / "out.work", slice(None))
    for _ in range(2):
        assert "diverged" in told(finish(train(begun / "out", max_train_steps=16, **FLAGS), code=5))
        assert folders.read_manifest(begun / "out", deep=True) == before


@pytest.mark.parametrize("lr", [1e30, 1e38])
def test_a_learning_rate_that_overflows(tmp_path, lr):
    """The losses, or the weights themselves, are not finite after the first step."""
    failed = finish(train(tmp_path / "out", max_train_steps=20, lr=lr, **FLAGS), code=5)
    assert "diverged" in told(failed) and "--lr" in told(failed)
    assert os.listdir(tmp_path) == ["out.work"]
    saved = list(tmp_path.glob("out.work/checkpoint-*/*/*.safetensors"))
    assert are_finite(saved) if lr < 1e38 else not saved  # the weights are not finite after the first step
