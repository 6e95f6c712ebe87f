"""A training whose folders are all in an object store: no disk is shared between its runs."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from conftest import ROOT, last_json, make_photos, run_script
from test_train import assert_equal_weights

import train
from common import cache, errors, objects, stores, targets
from training import checkpoints, loop, work_folder

FLAGS = ["--instance_prompt", "cat", "--prior_loss_weight", "0", "--num_workers", "0"]
FLAGS += ["--max_train_steps", "6", "--checkpointing_steps", "2"]


@pytest.fixture
def store(s3, tiny_model, tmp_path, monkeypatch):
    """Return a function from a name to its URI in a store with a model and photos; caches are folders of the test."""
    monkeypatch.setenv("DREAMBOOTH_CACHE", str(tmp_path / "cache"))
    objects.upload_folder(tiny_model, s3("model"))
    objects.upload_folder(make_photos(tmp_path / "photos", 3), s3("photos"))
    return s3


def words(store, **flags):
    places = {"model_dir": store("model"), "instance_images_dir": store("photos"), "output_dir": store("tuned")}
    flags = {**places, **flags}
    return [*FLAGS, *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]


def run(store, **flags):
    train.main(train.parse_args(words(store, **flags)))


@pytest.fixture
def on_disk(store, tiny_model, tmp_path):
    """The same run on a disk."""
    run(store, model_dir=tiny_model, instance_images_dir=tmp_path / "photos", output_dir=tmp_path / "tuned")
    return tmp_path / "tuned"


def test_a_run_in_a_store_equals_one_on_a_disk(store, on_disk, capsys, tmp_path):
    run(store)
    found = objects.local_copy(store("tuned"))
    assert_equal_weights(on_disk, found)
    assert last_json(capsys.readouterr().out)["output_dir"] == store("tuned")
    names = {name.split("/")[0] for name in stores.Store(store("tuned.work")).list()}
    assert names >= {"log.jsonl", "run.json", "tensorboard"}
    assert not any(name.startswith("checkpoint") for name in names)
    before = {name: found.tag for name, found in stores.Store(store("tuned")).list().items()}
    run(store)
    assert {name: found.tag for name, found in stores.Store(store("tuned")).list().items()} == before
    assert "nothing to do" in capsys.readouterr().err


def test_a_run_that_is_cut_short_goes_on_from_the_store_alone(store, on_disk, power_cut, tmp_path):
    with power_cut():
        run(store)
    shutil.rmtree(cache.root())  # as on another machine
    cache._used.clear()
    assert checkpoints.newest_checkpoint(store("tuned.work"))[0] == 2
    assert stores.Store(store("tuned.work")).read("latest") == b"checkpoint-000002\n"
    run(store)
    assert_equal_weights(on_disk, objects.local_copy(store("tuned")))
    log = [json.loads(line) for line in stores.Store(store("tuned.work")).read("log.jsonl").decode().splitlines()]
    assert log[-1]["step"] == 6


def test_a_longer_run_goes_on_and_replaces_the_result(store, tmp_path):
    train.main(train.parse_args([*words(store, max_train_steps=4), "--keep_checkpoints"]))
    train.main(train.parse_args([*words(store), "--keep_checkpoints"]))
    assert objects.read_manifest(store("tuned"), deep=True)["step"] == 6


def test_two_runs_on_one_store_exclude_each_other(store, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "train.py"), *words(store, max_train_steps=100000)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
        try:
            while not stores.Store(store("tuned.work")).head("run.json"):
                assert first.poll() is None
                time.sleep(0.1)
            second = run_script("train.py", *words(store))
        finally:
            first.kill()
    assert second.returncode == errors.TryAgain.exit_code and "is in use by process" in second.stderr


def test_a_folder_of_others_in_a_store_is_not_replaced(store):
    stores.Store(store("tuned")).write("thesis.txt", b"mine")
    with pytest.raises(errors.BadInput, match="is not an output of this toolkit"):
        run(store)


def test_only_what_has_changed_is_copied_to_the_store(faulty_s3, node_cache):
    uri = faulty_s3.uri("work")
    folder = work_folder.scratch(uri)
    for name in ("log.jsonl", "tensorboard/events", "validation/step-000002/0-0.png", "other.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1")
    (folder / "validation/.step-000004.staging").mkdir()
    (folder / "validation/.step-000004.staging/0-0.png").write_text("not whole yet")

    def copied():
        faulty_s3.clear()
        copier.copy()
        return [each.path.partition("/work/")[2] for each in faulty_s3.seen("PUT")]

    with targets.lock(uri) as held:
        copier = work_folder.Copier(held)
        assert copied() == ["log.jsonl", "tensorboard/events", "validation/step-000002/0-0.png"]
        assert copied() == []
        (folder / "log.jsonl").write_text("12")
        assert copied() == ["log.jsonl"] and stores.Store(uri).read("log.jsonl") == b"12"


def test_a_copy_that_fails_ends_the_run(store, tiny_model, tmp_path, monkeypatch):
    failures, steps = [errors.TryAgain("the store does not answer")], []
    real = loop.take_step

    def copy(copier):
        while failures:
            raise failures.pop()

    monkeypatch.setattr(work_folder.Copier, "copy", copy)
    monkeypatch.setattr(loop, "take_step", lambda run, step, *rest: steps.append(step) or real(run, step, *rest))
    with pytest.raises(errors.TryAgain, match="does not answer"):
        run(store, model_dir=tiny_model, instance_images_dir=tmp_path / "photos", output_dir=tmp_path / "tuned")
    assert max(steps) < 4 and not (tmp_path / "tuned").exists()
