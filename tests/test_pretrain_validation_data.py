"""pretrain.py --validation_data: the validation loss on rows of a data set of their own."""

import json
import shutil

import pytest
from conftest import last_json, make_latents

from common import errors, folders
from pretraining import inputs
from training import logs

NOTHING_MOVES = {"lr": 1e-12, "adam_weight_decay": 0, "ema_decay": 0, "max_steps": 1}


@pytest.fixture
def command(pretrain_command):
    return pretrain_command


@pytest.fixture(scope="module")
def apart(raw_data, tiny_model, tmp_path_factory):
    """(images and captions of the last three of 23 rows, their latents)."""
    folder = tmp_path_factory.mktemp("apart")
    lines = (raw_data / "metadata.jsonl").read_text().splitlines()[-3:]
    (folder / "raw").mkdir()
    for line in lines:
        shutil.copy(raw_data / json.loads(line)["file_name"], folder / "raw")
    (folder / "raw" / "metadata.jsonl").write_text("\n".join(lines))
    return folder / "raw", make_latents(folder / "latents", folder / "raw", tiny_model)


def log_of(folder):
    return folders.read_json_lines(folder / logs.LOG)


@pytest.fixture
def validate(command, tmp_path):
    """A function from the flags of a run to its last validation loss."""

    def run(name, **flags):
        command(output_dir=tmp_path / name, **NOTHING_MOVES, **flags)
        return log_of(tmp_path / f"{name}.work")[-1]["validation_loss"]

    return run


def test_the_loss_is_that_of_the_same_rows_held_out(validate, apart, raw_data):
    raw, latents = apart
    held_out = validate("held-out", num_validation_rows=3)
    assert validate("apart", validation_data=latents) == pytest.approx(held_out, abs=1e-6)
    online = {"data": raw_data, "online": True, "rows_per_file": 5}
    assert validate("online", validation_data=raw, **online) == pytest.approx(held_out, abs=1e-6)


def test_the_first_rows_of_it(validate, apart, latents):
    two = validate("two", validation_data=apart[1], num_validation_rows=2)
    assert two != pytest.approx(validate("three", validation_data=apart[1], num_validation_rows=3), abs=1e-6)
    assert validate("all", validation_data=latents, num_validation_rows=0) == pytest.approx(
        validate("as many", validation_data=latents, num_validation_rows=23), abs=1e-7
    )


def test_all_rows_of_the_data_are_trained_on_as_without_it(command, apart, tmp_path, capsys):
    flags = {"max_steps": None, "max_epochs": 2, "validation_steps": 2}
    command(output_dir=tmp_path / "with", validation_data=apart[1], num_validation_rows=2, **flags)
    assert last_json(capsys.readouterr().out)["steps"] == 12  # 2 x 23 rows by 4
    command(output_dir=tmp_path / "without", **flags)
    one, other = log_of(tmp_path / "with.work"), log_of(tmp_path / "without.work")
    assert [line["loss"] for line in one] == [line["loss"] for line in other]
    assert [line["step"] for line in one if "validation_loss" in line] == [2, 4, 6, 8, 10, 12]
    assert "validation_data" not in folders.read_manifest(tmp_path / "without")["settings"]


def test_a_run_does_not_go_on_with_other_validation_data(command, apart, latents, tmp_path):
    command(validation_data=apart[1], max_steps=1)
    moved = shutil.copytree(apart[1], tmp_path / "moved")
    command(validation_data=moved, max_steps=2)
    with pytest.raises(errors.BadInput, match=r"validation_data was '[0-9a-f]{64}', now '[0-9a-f]{64}'"):
        command(validation_data=latents, max_steps=3)
    with pytest.raises(errors.BadInput, match=r"validation_data was '[0-9a-f]{64}', now None"):
        command(max_steps=3)


def test_what_does_not_fit_ends_before_a_model_is_loaded(refused, apart, raw_data, tiny_model, monkeypatch, tmp_path):
    latents = apart[1]
    assert "--validation_data /nowhere is not a folder" in refused(validation_data="/nowhere")
    assert "--validation_data /nowhere does not exist" in refused(
        data=raw_data, online=True, validation_data="/nowhere"
    )
    assert f"--num_validation_rows 4: --validation_data {latents} holds 3 rows" in refused(
        validation_data=latents, num_validation_rows=4
    )
    metadata = json.loads((latents / "metadata.json").read_text())
    other = shutil.copytree(latents, tmp_path / "other")
    for changes, words in (
        ({"resolutions": [32]}, f"--validation_data {other} holds latents of 32 pixels, not of --resolution 16"),
        ({"encoders": "0"}, f"--validation_data {other} was encoded with the VAE or text encoder of another model"),
    ):
        (other / "metadata.json").write_text(json.dumps(metadata | changes))
        assert words in refused(validation_data=other)
    monkeypatch.setattr(inputs, "MOST_VALIDATION_ROWS", 2)
    assert "holds 3 rows, which the workers would keep in memory: pass --num_validation_rows" in refused(
        validation_data=latents
    )
