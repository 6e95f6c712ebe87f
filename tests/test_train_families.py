"""train.py with a tiny model of each family: LoRA and all weights, frozen and trained text encoders."""

import weakref

import numpy as np
import pytest
import torch
from conftest import last_json, make_photos
from safetensors.torch import load_file
from test_train import command, losses, no_card_images  # noqa: F401
from test_train_lora import adapters_of, assert_equal_adapters, assert_equal_optimizers, draw  # noqa: F401
from tiny_models import make_tiny_clip, make_tiny_dino, random_lora, write_lora

import evaluate
from common import folders
from pipelines import loading
from pipelines.families import find_family
from pipelines.model_folder import LORA_FILE
from utils import draw_noise

ALL = ["sd", "sdxl", "sd3", "flux"]
WHOLE = ["sd", "sdxl"]
SIDE = {"flux": {"resolution": 16}}  # the model itself draws 256 pixels


@pytest.fixture
def tune(command, tiny_families):  # noqa: F811
    """Return a function that trains a family on one photo without class images."""

    def run(name, **flags):
        alone = {"class_images_dir": None, "class_prompt": None, "prior_loss_weight": 0}
        command(model_dir=tiny_families[name], lr=1e-2, **{**alone, **SIDE.get(name, {}), **flags})

    run.output_dir, run.work_dir = command.output_dir, command.work_dir
    return run


@pytest.fixture
def learn(tune, monkeypatch, tmp_path):
    """Return a function that takes eight steps on one batch, and fails unless its loss falls."""
    one = {"instance_images_dir": make_photos(tmp_path / "one", 1), "random_crop": False, "random_flip": False}

    def same_noise(seed, stream, step, row, *rest):
        return draw_noise(seed, stream, 0, row, *rest)

    def run(name, **flags):
        monkeypatch.setattr("dataset.draw_noise", same_noise)
        tune(name, max_train_steps=8, **one, **flags)
        found = losses(tune.work_dir)
        assert np.isfinite(found).all() and found[-1] < found[0], found

    return run


@pytest.mark.parametrize("name", ALL)
def test_a_lora_learns(name, learn, tune, draw, tiny_families):  # noqa: F811
    """And is drawn, on the base model, by another script."""
    learn(name, lora=4)
    family = find_family(tiny_families[name])
    parts = {key.split(".")[0] for key in adapters_of(tune.output_dir)}
    assert parts == set(family.trained(family.trains_text_encoders))
    assert (tune.output_dir / "out_webui.safetensors").is_file() is bool(family.webui)
    sides = ["--height", "16", "--width", "16"]
    base = draw("base", *sides, model_dir=tiny_families[name])[0]
    tuned = draw("tuned", "--lora", tune.output_dir, *sides, model_dir=tiny_families[name])[0]
    assert np.abs(tuned - base).max() > 1


@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_a_lora_of_the_text_encoders_learns_too(name, learn, tune, tiny_families):
    learn(name, lora=4, train_text_encoder=True)
    found = adapters_of(tune.output_dir)
    for part in find_family(tiny_families[name]).trained(True):
        assert all(value.any() for key, value in found.items() if key.startswith(f"{part}."))
    assert not any("layers.2." in key for key in found if name == "sdxl" and key.startswith("text_encoder."))
    assert not any("transformer_blocks.1.attn.add_q_proj" in key for key in found)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ALL)
def test_a_lora_learns_over_a_quantised_base(name, bits, learn, tiny_families):
    """As on a GPU: in bf16, with gradient checkpointing."""
    trains = bool(find_family(tiny_families[name]).trainable)
    flags = {"train_text_encoder": trains, "gradient_checkpointing": True, "mixed_precision": "bf16"}
    learn(name, lora=4, base_bits=bits, **flags)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", WHOLE)
def test_all_weights_learn(name, trains, learn, tune, tiny_families):
    learn(name, train_text_encoder=trains)
    for part in find_family(tiny_families[name]).encoders:
        (one,), (base,) = ((folder / part).glob("*.safetensors") for folder in (tune.output_dir, tiny_families[name]))
        assert (one.read_bytes() == base.read_bytes()) is not trains


@pytest.mark.parametrize("name", ["sdxl", "sd3", "flux"])
def test_with_class_images_and_a_resumed_run_is_bit_equal(name, command, tiny_families, tmp_path):  # noqa: F811
    """SD with dropout: tests/test_train_lora.py."""
    flags = {"model_dir": tiny_families[name], "lr": 1e-2, "lora": 4, "save_dtype": "fp32", **SIDE.get(name, {})}
    flags |= {"checkpointing_steps": 1}
    command(**flags, output_dir=tmp_path / "whole")
    for steps in (1, 3, 4):
        command(**flags, max_train_steps=steps)
    assert_equal_adapters(command.output_dir, tmp_path / "whole")
    assert_equal_optimizers(command.work_dir, tmp_path / "whole.work")


@pytest.mark.faults  # a minute; SD's two workers are in every run, and so are the parameters without a gradient
@pytest.mark.ray
def test_both_encoders_of_sdxl_on_two_workers(tune, tiny_families, tmp_path, ray_session):
    """What no prediction depends on stays as it was, without an error of DDP; all else has an optimizer state."""
    flags = {"train_text_encoder": True, "max_train_steps": 2, "mixed_precision": "no"}
    tune("sdxl", num_workers=2, **flags)
    tune("sdxl", num_workers=0, train_batch_size=2, output_dir=tmp_path / "one", **flags)
    assert losses(tune.work_dir) == pytest.approx(losses(tmp_path / "one.work"), abs=1e-5)
    state = {name.rpartition(":")[0] for name in load_file(tune.work_dir / "checkpoint-000002/optimizer.safetensors")}
    for part in find_family(tiny_families["sdxl"]).trained(True):
        folders = (tune.output_dir / part, tiny_families["sdxl"] / part)
        tuned, base = (load_file(next(folder.glob("*.safetensors"))) for folder in folders)
        plain = {key.removeprefix("text_model."): value for key, value in base.items()}
        for key, value in tuned.items():
            is_unused = part == "text_encoder" and ("layers.2." in key or "final_layer_norm" in key)
            assert torch.equal(value, plain[key.removeprefix("text_model.")]) is is_unused, key
            assert any(f"{part}.{each}" in state for each in (key, key.removeprefix("text_model."))) is not is_unused


def test_the_time_ids_of_crops(command, tiny_families, tmp_path):  # noqa: F811
    """A photo of 40x20 is resized to 32x16, so that a crop of 16 has 0 to 16 pixels on its left; class images: none."""
    make_photos(tmp_path / "wide", 1, (40, 20))
    command(model_dir=tiny_families["sdxl"], lora=4, instance_images_dir=tmp_path / "wide", max_train_steps=8)
    ids = load_file(command.work_dir / "posteriors" / "posteriors.safetensors")["time_ids"]
    assert ids.dtype == torch.int32
    rows = {tuple(row) for row in ids.tolist()}
    of_photo = {row for row in rows if row[:2] == (20, 40)}
    assert rows - of_photo == {(16, 16, 0, 0, 16, 16)}
    assert len(of_photo) > 2 and all(row[2:] == (0, row[3], 16, 16) and 0 <= row[3] <= 16 for row in of_photo)


@pytest.mark.parametrize("name", ALL)
def test_validation_pictures_without_a_text_encoder_in_memory(name, command, tiny_families, monkeypatch):  # noqa: F811
    """Those that are not trained leave it before the next one, the denoiser, or a pipeline that draws is loaded."""
    encoders, real, held, loads = find_family(tiny_families[name]).encoders, loading.load_models, [], []

    def load(model_dir, names, *rest):
        assert not [each for each in held if each() is not None]
        found = real(model_dir, names, *rest)
        loads.append([part for part in found if part in encoders])
        held.extend(weakref.ref(found[part]) for part in loads[-1])
        return found

    monkeypatch.setattr(loading, "load_models", load)
    flags = {"validation_prompts": "a cat", "num_validation_images": 1, "max_train_steps": 1, **SIDE.get(name, {})}
    command(model_dir=tiny_families[name], lora=4, train_text_encoder=False, **flags)
    assert (command.output_dir / "validation" / "strip.png").is_file()
    *alone, whole = filter(None, loads)
    assert alone == [[each] for each in encoders] and sorted(whole) == sorted(encoders)  # the last: of the model card


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("sd3", {}, "all weights of stable-diffusion-3 are too many: pass --lora RANK"),
        ("flux", SIDE["flux"], "all weights of flux are too many: pass --lora RANK"),
        ("flux", {"lora": 4, "train_text_encoder": True, **SIDE["flux"]}, "--train_text_encoder"),
        ("sd3", {"lora": 4, "snr_gamma": 5}, "--snr_gamma weighs the timesteps of a diffusion"),
        ("flux", {"lora": 4, "resolution": 18}, "is not a multiple of 4"),
        ("sd3", {"lora": 4, "resolution": 64}, "is larger than 32, the largest side"),
    ],
)
def test_what_a_family_cannot_do_is_refused(name, flags, said, refused, tiny_families):
    assert said in refused(model_dir=tiny_families[name], **flags)


@pytest.mark.parametrize("name", ["sdxl", "sd3", "flux"])
def test_a_lora_is_evaluated(name, tiny_families, tiny_model, photos, class_images, tmp_path, capsys):
    """SD has tests of its own."""
    model_dir = tiny_families[name]
    path = write_lora(random_lora(model_dir), tmp_path / "lora.safetensors")
    encoders = (make_tiny_clip(tmp_path / "clip", tiny_model / "tokenizer"), make_tiny_dino(tmp_path / "dino"))
    flags = {"model_dir": model_dir, "base_model_dir": model_dir, "lora": path, "output_dir": tmp_path / "out"}
    flags |= {"instance_images_dir": photos, "class_images_dir": class_images, "num_workers": 0}
    flags |= {"instance_prompt": "a unqtkn cat", "class_prompt": "a cat", "num_samples_per_prompt": 3}
    flags |= {"num_class_images": 4, "num_inference_steps": 1, "height": 16, "width": 16}
    flags |= {"clip_model": encoders[0], "dino_model": encoders[1]}
    words = [str(word) for flag, value in flags.items() for word in (f"--{flag}", value)]
    evaluate.main(evaluate.parse_args(words))
    measures = last_json(capsys.readouterr().out)["measures"]
    assert measures["subject_clip"]["tuned"]["value"] != measures["subject_clip"]["base"]["value"]


@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_a_dry_run_says_what_the_run_will_do(name, command, tiny_families, capsys):  # noqa: F811
    """And writes nothing; the run itself then trains as many weights and writes files of that size."""
    flags = {"model_dir": tiny_families[name], "lora": 4, "max_train_steps": 2, **SIDE.get(name, {})}
    command(**flags, dry_run=True)
    said = last_json(capsys.readouterr().out)
    assert said["dry_run"] and said["steps"] == 2 and said["settings"]["lr"] == 1e-4
    assert not command.output_dir.exists() and not command.work_dir.exists()
    assert all(said["gpu_bytes_in_bf16"].values())
    command(**flags)
    count = sum(value.numel() for value in adapters_of(command.output_dir).values())
    extra = 4 * (16 + 16) if name == "sd3" else 0  # the queries of the text in the last block, which have no adapter
    assert said["trained_weights"] == count + extra
    optimizer = command.work_dir / "checkpoint-000002" / "optimizer.safetensors"
    written = optimizer.stat().st_size + (optimizer.parent / LORA_FILE).stat().st_size
    assert said["disk_bytes"]["checkpoint"] == pytest.approx(written, rel=0.8)  # tiny tensors have large headers
    assert folders.read_manifest(command.output_dir)["settings"] == said["settings"]
