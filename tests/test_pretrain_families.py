"""preprocess.py and pretrain.py with a tiny SDXL; other families are refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_latents
from test_pretrain import assert_equal, assert_same_state, log_of, losses, short_sampling, weights  # noqa: F401

import preprocess
import pretrain
from common import errors, folders

CROPS = {"crop": "random", "random_flip": True}  # so that time_ids differ


@pytest.fixture(scope="module")
def sdxl_latents(tmp_path_factory, raw_data, tiny_families):
    """The raw data as latents of SDXL: 23 rows in five files."""
    folder = tmp_path_factory.mktemp("latents") / "sdxl"
    words = ["--input", raw_data, "--model_dir", tiny_families["sdxl"], "--output_dir", folder, "--num_workers", 0]
    words += ["--rows_per_file", 5, "--crop", "random", "--random_flip"]
    preprocess.main(preprocess.parse_args(list(map(str, words))))
    return folder


@pytest.fixture
def command(pretrain_command, sdxl_latents, tiny_families, one_thread):
    """Return a function that pre-trains SDXL here, dropping many captions."""
    defaults = {"data": sdxl_latents, "model_dir": tiny_families["sdxl"], "caption_dropout": 0.4}

    def run(**flags):
        pretrain_command(**{**defaults, **flags})

    run.output_dir, run.work_dir = pretrain_command.output_dir, pretrain_command.work_dir
    return run


def test_it_learns_and_the_result_draws(command, tiny_families):
    from diffusers import StableDiffusionXLPipeline

    command(max_steps=40, lr=3e-3, ema_decay=0, sample_prompts="picture 1")
    found = losses(command.work_dir)
    assert sum(found[-10:]) < 0.9 * sum(found[:10])
    assert (command.output_dir / "samples" / "0.png").is_file()
    card = (command.output_dir / "README.md").read_text()
    assert "tags: [stable-diffusion-xl, text-to-image]" in card
    for part in ("text_encoder", "text_encoder_2", "vae"):
        kept, own = ({path.name: path.read_bytes() for path in (folder / part).iterdir()}
                     for folder in (command.output_dir, tiny_families["sdxl"]))  # fmt: skip
        assert kept == own
    pipeline = StableDiffusionXLPipeline.from_pretrained(command.output_dir)
    assert_equal(dict(pipeline.unet.state_dict()), weights(command.output_dir))
    pipeline.set_progress_bar_config(disable=True)
    drawn = pipeline("picture 1", num_inference_steps=2, output_type="np").images[0]
    assert drawn.shape == (16, 16, 3) and np.isfinite(drawn).all()


def test_online_and_offline_give_the_same_losses(command, raw_data, tmp_path):
    flags = {"num_validation_rows": 3, "validation_steps": 2}
    command(output_dir=tmp_path / "offline", **flags)
    command(output_dir=tmp_path / "online", data=raw_data, online=True, rows_per_file=5, **CROPS, **flags)
    offline, online = log_of(tmp_path / "offline.work"), log_of(tmp_path / "online.work")
    for name in ("loss", "validation_loss", "grad_norm"):
        pair = [[line.get(name, 0.0) for line in lines] for lines in (offline, online)]
        assert any(pair[0]) and pair[0] == pytest.approx(pair[1], abs=1e-6)


def test_resume_is_bit_equal_after_a_crash(command, tmp_path, power_cut):
    flags = {"checkpointing_steps": 2, "num_validation_rows": 3, "validation_steps": 2}
    command(output_dir=tmp_path / "whole", **flags)
    with power_cut():
        command(**flags)
    command(**flags)
    assert_equal(weights(tmp_path / "whole"), weights(command.output_dir))
    assert_same_state(tmp_path / "whole.work", command.work_dir, 4)
    assert log_of(command.work_dir) == log_of(tmp_path / "whole.work")


@pytest.mark.parametrize("field", ["text_encoder_2.pooled", "text_encoder_2.hidden", "time_ids"])
def test_every_input_counts(field, command, tmp_path, monkeypatch):
    """Another value of what only SDXL has gives another loss."""
    from pretraining.latents import PieceReader

    command(output_dir=tmp_path / "as it is", max_steps=1)
    read = PieceReader.__call__
    monkeypatch.setattr(
        PieceReader, "__call__", lambda self, item: ({**rows, field: rows[field] + 3} for rows in read(self, item))
    )
    command(output_dir=tmp_path / "changed", max_steps=1)
    assert losses(tmp_path / "changed.work") != losses(tmp_path / "as it is.work")


def test_a_unet_of_another_configuration(command, tiny_families, tmp_path):
    config = json.loads((tiny_families["sdxl"] / "unet" / "config.json").read_text())
    (tmp_path / "unet.json").write_text(json.dumps({**config, "block_out_channels": [8, 16]}))
    command(unet_config=tmp_path / "unet.json", max_steps=1)
    assert weights(command.output_dir)["conv_in.weight"].shape[0] == 8
    (tmp_path / "unet.json").write_text(json.dumps({**config, "addition_embed_type": None}))
    with pytest.raises(
        errors.BadInput, match=r"^--unet_config .* has addition_embed_type None, but .* needs text_time"
    ):
        command(unet_config=tmp_path / "unet.json", max_steps=1, overwrite=True)


@pytest.mark.faults  # a minute; SD's two workers are in every run
@pytest.mark.ray
def test_two_workers_with_fsdp_online(command, raw_data, tmp_path, ray_session, monkeypatch):
    """As this process with the batches of both workers side by side."""
    real = pretrain.make_batches

    def both(task, place, *rest):
        shares = [real(task, dataclasses.replace(place, rank=rank, world_size=2), *rest)[0] for rank in range(2)]
        pairs = zip(*shares, strict=True)
        return ({name: torch.cat([one[name], other[name]]) for name in one} for one, other in pairs), [], dict

    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "make_batches", both)
        command(output_dir=tmp_path / "one", max_steps=2)
    flags = {"num_workers": 2, "strategy": "fsdp", "data": raw_data, "online": True, "rows_per_file": 5}
    command(output_dir=tmp_path / "two", max_steps=2, **flags, **CROPS)
    assert losses(tmp_path / "two.work") == pytest.approx(losses(tmp_path / "one.work"), abs=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def test_latents_of_another_family_are_refused(refused, latents, tiny_families):
    line = refused(data=latents)
    assert "holds latents for stable-diffusion, but --model_dir" in line and "is a stable-diffusion-xl model" in line
    assert "holds latents for stable-diffusion-xl, but" in refused(model_dir=tiny_families["sd"])


def test_one_column_cannot_hold_the_captions_of_several_encoders(refused):
    assert "names one column, the model takes 3" in refused(caption_latents_column="caption_text_encoder_hidden")


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_families_that_are_not_pre_trained(name, refused, raw_data, tiny_families, tmp_path):
    words = "; supported: StableDiffusionPipeline, StableDiffusionXLPipeline"
    assert refused(model_dir=tiny_families[name]).endswith(words)
    assert refused(model_dir=tiny_families[name], data=raw_data, online=True).endswith(words)
    with pytest.raises(errors.BadInput, match=f"{words}$"):
        make_latents(tmp_path / "latents", raw_data, tiny_families[name])
    assert not (tmp_path / "latents").exists() and not (tmp_path / "latents.work").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Data sets


def test_a_finished_data_set_is_not_encoded_again(sdxl_latents, tiny_families, raw_data, tmp_path, capsys):
    copy = shutil.copytree(sdxl_latents, tmp_path / "copy")
    before = {path.name: path.stat().st_mtime_ns for path in Path(copy).iterdir()}
    words = ["--input", raw_data, "--model_dir", tiny_families["sdxl"], "--output_dir", copy, "--num_workers", 0]
    words += ["--rows_per_file", 5, "--crop", "random", "--random_flip"]
    preprocess.main(preprocess.parse_args(list(map(str, words))))
    assert "nothing to do" in capsys.readouterr().err
    assert {path.name: path.stat().st_mtime_ns for path in Path(copy).iterdir()} == before
    assert folders.read_manifest(copy, deep=True)


def test_the_metadata_of_sdxl(sdxl_latents):
    metadata = json.loads((sdxl_latents / "metadata.json").read_text())
    assert metadata["family"] == "stable-diffusion-xl"
    assert metadata["shapes"] == {
        "image_latents_16": [4, 8, 8],
        "time_ids_16": [6],
        "caption_text_encoder_hidden": [16, 32],
        "caption_text_encoder_2_hidden": [16, 48],
        "caption_text_encoder_2_pooled": [52],
    }
