"""The work folder of a training: is its run done, can it continue."""

import os

import pytest

from common import errors, folders
from common.targets import Held
from training import checkpoints, logs, resuming
from training.resuming import recorded_workers

SETTINGS = {"lr": 0.1, "seed": 0}


def publish(folder, step, settings=None):
    folder.mkdir(parents=True)
    (folder / "model.txt").write_text("weights")
    folders.publish(folder, folder.with_name("out"), step=step, settings=settings or SETTINGS)
    return folder.with_name("out")


def test_an_output_is_finished_when_settings_and_steps_are_these(tmp_path):
    assert not resuming.is_finished(tmp_path / "out", SETTINGS, 4, False)
    (tmp_path / "out").mkdir()
    assert not resuming.is_finished(tmp_path / "out", SETTINGS, 4, False)
    (tmp_path / "out").rmdir()
    output = publish(tmp_path / "staging", 4)
    assert resuming.is_finished(output, SETTINGS, 4, False) and resuming.is_finished(output, SETTINGS, 4, True)
    assert not resuming.is_finished(output, SETTINGS, 5, False)
    with pytest.raises(errors.BadInput, match="is trained for 4 steps, more than 3"):
        resuming.is_finished(output, SETTINGS, 3, False)
    with pytest.raises(errors.BadInput, match=r"lr was 0\.1, now 0\.2"):
        resuming.is_finished(output, {**SETTINGS, "lr": 0.2}, 4, False)
    assert not resuming.is_finished(output, {**SETTINGS, "lr": 0.2}, 3, True)


def test_an_output_that_is_not_ours_or_damaged_is_in_the_way(tmp_path):
    output = publish(tmp_path / "staging", 4)
    (output / "model.txt").write_text("less")
    with pytest.raises(errors.BadInput, match="a damaged output of this toolkit: pass --overwrite"):
        resuming.is_finished(output, SETTINGS, 4, False)
    assert not resuming.is_finished(output, SETTINGS, 4, True)
    (tmp_path / "file").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(errors.BadInput, match="not an output of this toolkit"):
            resuming.is_finished(tmp_path / "file", SETTINGS, 4, overwrite)


def add_checkpoint(work_dir):
    def write(folder):
        (folder / "weights").write_text("1")

    checkpoints.save_checkpoint(work_dir, 2, write, {}, keep=1)


def make_record(**changed):
    return {"settings": SETTINGS, "steps": 4, "num_workers": 0, "keep_checkpoints": True, **changed}


def test_a_checkpoint_past_the_length_of_a_run_is_not_taken_for_its_end(tmp_path):
    resuming.open_work_dir(Held(str(tmp_path), ""), make_record(steps=2), False)
    add_checkpoint(tmp_path)  # of step 2
    resuming.open_work_dir(Held(str(tmp_path), ""), make_record(steps=2), False)
    with pytest.raises(
        errors.BadInput, match=r"checkpoint of step 2, more than 1: train for 2 or more steps, or delete it"
    ):
        resuming.open_work_dir(Held(str(tmp_path), ""), make_record(steps=1), False)
    assert checkpoints.newest_checkpoint(tmp_path)[0] == 2
    resuming.open_work_dir(Held(str(tmp_path), ""), make_record(steps=1), True)
    assert checkpoints.newest_checkpoint(tmp_path) == (0, None)


def test_a_work_folder_is_kept_for_the_same_settings(tmp_path):
    work_dir = tmp_path / "work"
    work_dir.mkdir()
    assert recorded_workers(work_dir) is None
    resuming.open_work_dir(Held(str(work_dir), ""), make_record(num_workers=2), False)
    assert recorded_workers(work_dir) == 2
    add_checkpoint(work_dir)
    resuming.open_work_dir(Held(str(work_dir), ""), make_record(), False)
    assert recorded_workers(work_dir) == 0 and checkpoints.newest_checkpoint(work_dir)[0] == 2
    with pytest.raises(errors.BadInput, match="seed was 0, now 1"):
        resuming.open_work_dir(Held(str(work_dir), ""), make_record(settings={**SETTINGS, "seed": 1}), False)
    assert checkpoints.newest_checkpoint(work_dir)[0] == 2
    resuming.open_work_dir(Held(str(work_dir), ""), make_record(settings={**SETTINGS, "seed": 1}), True)
    assert os.listdir(work_dir) == [resuming.RECORD]


def test_a_work_folder_without_checkpoints_is_no_loss(tmp_path):
    resuming.open_work_dir(Held(str(tmp_path), ""), make_record(), False)
    (tmp_path / logs.LOG).write_text("")
    resuming.open_work_dir(Held(str(tmp_path), ""), make_record(settings={**SETTINGS, "seed": 1}), False)
    assert os.listdir(tmp_path) == [resuming.RECORD]
