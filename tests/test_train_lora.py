"""train.py --lora run whole on a tiny model; its result is drawn with run_model.py and with plain Diffusers."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import last_json, run_script
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from test_train import command, losses, no_card_images  # noqa: F401

import run_model
from common import errors, folders
from pipelines import loading
from pipelines.model_folder import LORA_FILE


@pytest.fixture
def tune(command):  # noqa: F811
    """Return a function that trains a LoRA of rank 4 at a rate that a tiny model shows after four steps."""

    def run(**flags):
        command(**{"lora": 4, "lr": 1e-2, **flags})

    run.output_dir, run.work_dir, run.arguments = command.output_dir, command.work_dir, command.arguments
    return run


@pytest.fixture
def draw(tiny_model, tmp_path):
    """Return a function that draws one image with run_model.py and returns (its pixels, its record)."""

    def run(name, *flags, model_dir=tiny_model):
        words = ["--model_dir", str(model_dir), "--output_dir", str(tmp_path / name), "--prompts", "unqtkn dog"]
        sampler = ["--num_samples_per_prompt", "1", "--num_inference_steps", "2", "--num_workers", "0"]
        run_model.main(run_model.parse_args([*words, *sampler, *map(str, flags)]))
        (path,) = (tmp_path / name).glob("*.png")
        return np.asarray(Image.open(path), dtype=int), json.loads(Image.open(path).text["record"])

    return run


def adapters_of(folder):
    return load_file(folder / LORA_FILE)


def assert_equal_adapters(one, other):
    import torch

    one, other = adapters_of(one), adapters_of(other)
    assert one.keys() == other.keys() and one and all(torch.equal(one[key], other[key]) for key in one)


def assert_equal_optimizers(*work_dirs):
    one, other = (load_file(each / "checkpoint-000004" / "optimizer.safetensors") for each in work_dirs)
    assert one.keys() == other.keys() and one and all((one[key] == other[key]).all() for key in one)


def test_files_card_and_names(tune, capsys):
    tune(checkpointing_steps=2)
    assert last_json(capsys.readouterr().out)["trained"] == 4
    files = {"README.md", "manifest.json", LORA_FILE, "out_webui.safetensors", "samples", "training_log.jsonl"}
    assert {path.name for path in tune.output_dir.iterdir()} == files
    card = (tune.output_dir / "README.md").read_text()
    for part in ("A LoRA of rank 4 of `tiny`, trained", "load_lora_weights", "lora, stable-diffusion", "samples/0.png"):
        assert part in card
    keys = adapters_of(tune.output_dir).keys()
    assert all("lora" in key and key.startswith(("unet.", "text_encoder.text_model.")) for key in keys)
    with safe_open(tune.output_dir / "out_webui.safetensors", "pt") as file:
        names = r"lora_(unet|te)_\w+\.(lora_down\.weight|lora_up\.weight|alpha)"
        assert all(re.fullmatch(names, key) for key in file.keys())  # noqa: SIM118
        assert file.metadata()["ss_network_dim"] == "4" and "ss_v2" not in file.metadata()


def test_the_text_encoder_can_stay_as_it_is(tune):
    tune(train_text_encoder=False)
    assert all(key.startswith("unet.") for key in adapters_of(tune.output_dir))


def test_a_resumed_run_is_bit_equal(tune, tmp_path):
    """After each step, with dropout; the others without it, tests/test_train_families.py."""
    flags = {"lora_dropout": 0.1, "checkpointing_steps": 1, "save_dtype": "fp32", "max_failures": 0}
    tune(**flags, output_dir=tmp_path / "whole")
    for steps in (1, 2, 3, 4):
        tune(**flags, max_train_steps=steps)
    assert_equal_adapters(tune.output_dir, tmp_path / "whole")
    assert_equal_optimizers(tune.work_dir, tmp_path / "whole.work")


@pytest.mark.parametrize("bits", [8, 4])
def test_over_a_quantised_base_a_resumed_run_is_bit_equal_whether_it_draws_or_not(bits, tune, tmp_path):
    flags = {"base_bits": bits, "checkpointing_steps": 1, "save_dtype": "fp32", "max_failures": 0}
    tune(**flags, output_dir=tmp_path / "whole")
    for steps in (2, 4):
        tune(**flags, max_train_steps=steps, validation_prompts="a cat", num_validation_images=1, validation_steps=1)
    assert_equal_adapters(tune.output_dir, tmp_path / "whole")
    tune(output_dir=tmp_path / "plain")
    assert losses(tune.work_dir) == losses(tmp_path / "whole.work") != losses(tmp_path / "plain.work")
    assert losses(tune.work_dir) == pytest.approx(losses(tmp_path / "plain.work"), rel=0.1)
    of_run, of_plain = (folders.read_manifest(place)["settings"] for place in (tune.output_dir, tmp_path / "plain"))
    assert of_run["base_bits"] == bits and "base_bits" not in of_plain


def test_what_is_merged_is_the_base_as_it_was(tune, draw):
    tune(merge=True, base_bits=4)
    one, other = draw("merged", model_dir=tune.output_dir)[0], draw("lora", "--lora", tune.output_dir)[0]
    assert np.abs(one - other).max() <= 1


@pytest.mark.faults  # half a minute; two workers that train all weights are in every run (tests/test_train.py)
@pytest.mark.ray
def test_two_workers_train_what_one_does(tune, tmp_path, ray_session):
    flags = {"save_dtype": "fp32", "mixed_precision": "no"}
    tune(**flags, train_batch_size=2, output_dir=tmp_path / "one")
    tune(**flags, num_workers=2)
    one, other = losses(tmp_path / "one.work"), losses(tune.work_dir)
    assert one == pytest.approx(other, abs=1e-5)


DRAW = """
import sys, torch
from diffusers import DiffusionPipeline
from utils import image_seed
model_dir, *files = sys.argv[1:]
for file in files:
    pipeline = DiffusionPipeline.from_pretrained(model_dir)
    pipeline.load_lora_weights(file.rpartition("/")[0], weight_name=file.rpartition("/")[2])
    generator = [torch.Generator().manual_seed(image_seed(0, 0))]
    pipeline(["unqtkn dog"], num_inference_steps=2, generator=generator).images[0].save(f"{file}.png")
"""


def test_plain_diffusers_draws_the_same(tune, draw, tiny_model, tmp_path):
    """In a process of its own, from both files, whatever alpha is."""
    base, drawn = draw("base")[0], {}
    for name, flags in {"1": {"lora_alpha": 1}, "8": {"lora_alpha": 8}, "rs": {"rslora": True}}.items():
        output_dir = tmp_path / name
        tune(**flags, lora_layers="all", save_dtype="fp32", output_dir=output_dir)
        pixels, _ = draw(f"drawn-{name}", "--lora", output_dir)
        assert np.abs(pixels - base).max() > 3
        drawn |= {output_dir / LORA_FILE: pixels, output_dir / f"{name}_webui.safetensors": pixels}
    words = [sys.executable, "-c", DRAW, str(tiny_model), *map(str, drawn)]
    subprocess.run(words, check=True, capture_output=True, timeout=240)
    for path, pixels in drawn.items():
        assert np.abs(np.asarray(Image.open(f"{path}.png"), dtype=int) - pixels).max() <= 1, path


def test_merged_drawn_and_in_a_checkpoint_it_is_the_same(tune, draw, tiny_model):
    tune(merge=True, save_dtype="fp32")
    fused, record = draw("lora", "--lora", tune.output_dir)
    latest = tune.work_dir / "checkpoint-000004"
    others = [draw("merged", model_dir=tune.output_dir)]
    others += [draw("checkpoint", "--checkpoint", latest), draw("adapters", "--lora", latest)]
    for pixels, _ in others:
        assert np.abs(pixels - fused).max() <= 1
    assert np.abs(draw("half", "--lora", f"{tune.output_dir}:0.5")[0] - fused).max() > 1
    digest = folders.sha256_file(tune.output_dir / LORA_FILE)
    assert record["model"].endswith(f"+1*{digest}")


@pytest.mark.parametrize(
    ("flags", "kinds"), [({}, ["bfloat16"]), ({"merge": True}, ["float32", "bfloat16"]), ({"lora": None}, ["float32"])]
)
def test_samples_of_a_lora_are_drawn_in_the_type_of_the_training(flags, kinds, tune, monkeypatch):
    """A GPU that trains a LoRA of FLUX in bf16 cannot hold the model in float32."""
    real, loaded = loading.load_pipeline, []
    monkeypatch.setattr(loading, "load_pipeline", lambda *args: loaded.append(str(args[1])) or real(*args))
    tune(**flags, max_train_steps=1, mixed_precision="bf16")
    assert loaded == [f"torch.{kind}" for kind in kinds]
    assert len(list((tune.output_dir / "samples").iterdir())) == 1


def test_an_image_folder_is_not_continued_with_another_lora(tune, draw):
    tune()
    draw("images", "--lora", tune.output_dir)
    for flags in ([], ["--lora", f"{tune.output_dir}:0.5"]):
        with pytest.raises(errors.BadInput, match="other settings"):
            draw("images", *flags)


def test_another_rank_on_the_same_work_folder_is_refused(tune):
    tune(max_train_steps=2)
    with pytest.raises(errors.BadInput, match="lora"):
        tune(lora=8)


def test_rates_of_both_parts(tune, tmp_path):
    import torch

    tune(lr=1e-9, text_encoder_lr=1e-2, save_dtype="fp32")
    found = adapters_of(tune.output_dir)
    change = {
        part: max(v.abs().max() for k, v in found.items() if k.startswith(part) and "lora_B" in k)
        for part in ("unet", "text")
    }
    assert change["unet"] < 1e-6 < 1e-3 < change["text"]
    tune(lr=1e-2, text_encoder_lr=1e-2, output_dir=tmp_path / "two", save_dtype="fp32")
    tune(lr=1e-2, output_dir=tmp_path / "one", save_dtype="fp32")
    one, two = adapters_of(tmp_path / "one"), adapters_of(tmp_path / "two")
    assert all(torch.allclose(one[key], two[key], atol=1e-6) for key in one)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"lora_alpha": "8"}, "--lora_alpha has no effect without --lora"),
        ({"merge": True}, "--merge has no effect without --lora"),
        ({"base_bits": "8"}, "--base_bits has no effect without --lora"),
        ({"base_bits": "8", "lora": "4", "compile": True}, "--base_bits and --compile do not work together"),
        ({"lora": "0"}, "--lora"),
        ({"lora": "4", "lora_dropout": "1"}, "--lora_dropout 1 drops all inputs"),
        ({"lora": "4", "train_text_encoder": False, "text_encoder_lr": "1e-3"}, "--text_encoder_lr has no effect"),
    ],
)
def test_flags_that_cannot_be_are_told(flags, said, command):  # noqa: F811
    done = run_script("train.py", *command.arguments(**flags))
    assert done.returncode in (2, 3) and said in done.stderr.splitlines()[-1]


def test_defaults_are_those_of_the_family(tune):
    tune(lr=None)
    settings = folders.read_manifest(tune.output_dir)["settings"]
    assert (settings["lr"], settings["lora_alpha"], settings["train_text_encoder"]) == (1e-4, 4.0, True)
