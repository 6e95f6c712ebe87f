"""What pretrain.py refuses: in one line, with an exit code, before a model is loaded."""

import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import make_raw_data, noise_png

from common import errors, folders


@pytest.fixture
def command(pretrain_command):
    return pretrain_command


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"batch_size_per_worker": 24}, "holds 23 rows, a step takes 24"),
        ({"batch_size_per_worker": 4, "gradient_accumulation_steps": 6}, "holds 23 rows, a step takes 24"),
        ({"num_validation_rows": 20}, "holds 3 rows, a step takes 4"),
        ({"num_validation_rows": 23}, "--num_validation_rows 23 leaves none of 23 rows to train on"),
        ({"num_validation_rows": 99}, "--num_validation_rows 99 leaves none of 23 rows to train on"),
        ({"resolution": 32}, "holds latents of 16 pixels, not of --resolution 32"),
        ({"resolution": 17}, "--resolution 17 is not a multiple of 8"),
        ({"data": "/nowhere"}, "--data /nowhere is not a folder"),
        ({"data": "/nowhere", "online": True}, "--data /nowhere does not exist"),
        ({"model_dir": "/nowhere"}, "--model_dir /nowhere"),
        ({"output_dir": "/dev/null/out"}, "--output_dir"),
        ({"latents_column": "x"}, "has no column x"),
        ({"unet_config": "/nowhere"}, "--unet_config /nowhere"),
    ],
)
def test_bad_input(refused, flags, words):
    assert words in refused(**flags)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting property name"),
        ("[1, 2]", "is not a UNet configuration"),
        ("{}", "has cross_attention_dim 1280, but --model_dir "),
        ('{"in_channels": 4, "out_channels": 4, "cross_attention_dim": 32}', "cross_attention_dim 32"),
        ('{"in_channels": 3, "out_channels": 4, "cross_attention_dim": 16}', "in_channels 3"),
    ],
)
def test_a_bad_unet_configuration(refused, tmp_path, text, words):
    (tmp_path / "unet.json").write_text(text)
    line = refused(unet_config=tmp_path / "unet.json")
    assert line.startswith("--unet_config ") and words in line


def test_bad_data(refused, latents, tiny_model, tmp_path):
    copy = shutil.copytree(latents, tmp_path / "copy")
    other = shutil.copytree(tiny_model, tmp_path / "other")
    (other / "vae" / "config.json").write_text((other / "vae" / "config.json").read_text() + "\n")
    assert "of another model (tiny)" in refused(model_dir=other)
    (copy / "metadata.json").rename(copy / "run.json")
    assert "is not finished" in refused(data=copy)
    for path in copy.glob("*.parquet"):
        path.unlink()
    assert "is not finished" in refused(data=copy)
    (copy / "run.json").unlink()
    assert "holds no rows" in refused(data=copy, prescaled_latents=True)
    folder = make_raw_data(tmp_path / "raw", 0)
    assert "holds no rows" in refused(data=folder, online=True)


def test_a_damaged_file_online(refused, command, tmp_path, capsys):
    """Skipped files are a setting: a run does not continue when they are repaired."""
    table = pa.table({"image": [noise_png(i) for i in range(10)], "caption": ["x"] * 10})
    (tmp_path / "raw").mkdir()
    for name in "ab":
        pq.write_table(table, tmp_path / "raw" / f"{name}.parquet")
    data, spoiled = {"data": tmp_path / "raw", "online": True}, tmp_path / "raw" / "a.parquet"
    whole = spoiled.read_bytes()
    spoiled.write_bytes(b"cut")
    with pytest.raises(errors.CheckFailed, match=r"a\.parquet is damaged .*, or pass --max_bad_files"):
        command(**data)
    command(**data, max_bad_files=1, max_steps=1, rows_per_file=5)
    said = capsys.readouterr().err
    assert "warning: skipped a file: " in said and "row groups" not in said
    spoiled.write_bytes(whole)
    assert "bad_files was 1, now None" in refused(**data, max_bad_files=1, max_steps=2, rows_per_file=5)


def test_large_row_groups_online_are_told(command, tmp_path, capsys):
    (tmp_path / "raw").mkdir()
    table = pa.table({"image": [noise_png(i) for i in range(10)], "caption": ["x"] * 10})
    pq.write_table(table, tmp_path / "raw" / "a.parquet")
    for rows_per_file, is_told in ((1, True), (5, False)):
        command(data=tmp_path / "raw", online=True, rows_per_file=rows_per_file, dry_run=True)
        assert ("--data has row groups of up to 10 rows, and any 1 of them" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize("flag", ["where", "min_side", "max_aspect"])
def test_the_filters_of_preprocess_are_refused(flag, command, capsys):
    with pytest.raises(SystemExit) as stop:
        command(online=True, **{flag: 3})
    assert stop.value.code == 2
    assert f"--{flag} is a flag of preprocess.py: filter with it, and train on its latents" in capsys.readouterr().err


def test_what_is_in_the_way_is_not_touched(refused, command):
    command.output_dir.mkdir()
    (command.output_dir / "thesis.tex").write_text("mine")
    with pytest.raises(errors.BadInput, match="not an output of this toolkit"):
        command()
    assert (command.output_dir / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize(
    "flags",
    [
        {"online": True, "prescaled_latents": True},
        {"unet_config": "x", "init_from_pretrained": True},
        {"lr_scheduler": "constant", "lr_warmup_steps": 5},
        {"strategy": "x"},
        {"fsdp_sharding": "x"},
        {"ema_decay": 1.5},
        {"lr": 0},
        {"num_workers": -1},
        {"max_steps": 0},
        {"data": None},
        {"accelerator_type": "A100", "data_loading_accelerator_type": "A10G"},
        {"accelerator_type": "A100", "data_loading_accelerator_type": "A100", "online": True},
        {"data_loading_accelerator_type": "A10G", "online": True},
    ],
)
def test_usage_errors(command, flags):
    with pytest.raises(SystemExit) as stop:
        command(**flags)
    assert stop.value.code == 2


def test_two_commands_at_once(command):
    with folders.lock(command.work_dir / ".lock"), pytest.raises(errors.TryAgain, match=str(os.getpid())) as caught:
        command()
    assert errors.describe_error(caught.value)[0] == 75
