"""export.py: Diffusers reads its files as the model they were made of; files appear whole or not at all."""

import importlib
import json
import shutil
import stat

import diffusers
import pytest
import torch
from conftest import last_json, run_script
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import random_lora, write_lora

import export
from common import errors, folders
from pipelines import loading, lora
from pipelines.configs import components, read_index
from pipelines.model_folder import LORA_FILE

KINDS = ["sd", "sd2", "sdxl"]


def run(*words):
    export.main(export.parse_args([str(word) for word in words]))


@pytest.fixture
def export_to(tmp_path):
    """Return a function that exports a model to out.safetensors and returns the file's path."""

    def write(model_dir, *words, name="out.safetensors"):
        run("--model_dir", model_dir, "--output_file", tmp_path / name, *words)
        return tmp_path / name

    return write


def weights_of(pipeline, names):
    return {(name, key): each for name in names for key, each in getattr(pipeline, name).state_dict().items()}


def assert_equal(one, other, model_dir):
    names = [name for name in components(read_index(model_dir)) if name in ("unet", "vae") or "text_enc" in name]
    one, other = weights_of(one, names), weights_of(other, names)
    assert one.keys() == other.keys() and len(names) >= 3
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


def draw(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 2, "guidance_scale": 3.0, "output_type": "pt", "height": 16, "width": 16}
    return pipeline(["a dog"], generator=[torch.Generator().manual_seed(0)], **options).images


def read_by_diffusers(path, model_dir):
    kind = getattr(diffusers, read_index(model_dir)["_class_name"])
    return kind.from_single_file(str(path), config=str(model_dir), local_files_only=True)


@pytest.mark.parametrize("name", KINDS)
def test_diffusers_reads_the_model_back(name, single_file_families, export_to, capsys):
    folder = single_file_families[name]
    path = export_to(folder, "--save_dtype", "fp32", name="new/out.safetensors")
    theirs, own = read_by_diffusers(path, folder), loading.load_pipeline(folder, torch.float32)
    assert_equal(theirs, own, folder)
    assert torch.allclose(draw(theirs), draw(own), rtol=0, atol=1e-6)  # of equal weights; their memory is not alike
    said = last_json(capsys.readouterr().out)
    assert said == {"output_file": str(path), "bytes": path.stat().st_size, "sha256": folders.sha256_file(path)}
    assert not stat.S_IMODE(path.stat().st_mode) & 0o111 and path.stat().st_mode & stat.S_IRGRP


@pytest.mark.parametrize("name", KINDS)
def test_shapes_and_metadata(name, single_file_families, export_to):
    with safe_open(export_to(single_file_families[name]), "pt") as file:
        keys, facts = set(file.keys()), file.metadata()
        assert {file.get_tensor(key).dtype for key in keys} == {torch.float16}
        for half in ("encoder", "decoder"):
            assert file.get_slice(f"first_stage_model.{half}.mid.attn_1.q.weight").get_shape() == [8, 8, 1, 1]
        stacked = {
            "sd2": ("cond_stage_model.model.", [3 * 1024, 1024]),
            "sdxl": ("conditioner.embedders.1.model.", [3 * 48, 48]),
        }.get(name)
        if stacked:
            key = f"{stacked[0]}transformer.resblocks.0.attn.in_proj_weight"
            assert file.get_slice(key).get_shape() == stacked[1]
        if name == "sdxl":
            assert file.get_slice(f"{stacked[0]}text_projection").get_shape() == [48, 52]
    kinds = {"sd": "stable-diffusion-v1", "sd2": "stable-diffusion-v2-512", "sdxl": "stable-diffusion-xl-v1-base"}
    assert facts["modelspec.architecture"] == kinds[name] and facts["modelspec.title"] == "out"
    assert facts["modelspec.prediction_type"] == "epsilon" and facts["modelspec.resolution"] == "16x16"
    assert not any("transformer.encoder" in key for key in keys)


def test_what_a_v_model_predicts_is_told(single_file_families, tiny_v_model, tmp_path, export_to, capsys):
    folder = shutil.copytree(single_file_families["sdxl"], tmp_path / "v")
    config = json.loads((folder / "scheduler/scheduler_config.json").read_text())
    config |= {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps(config))
    with safe_open(export_to(folder), "pt") as file:
        assert {"v_pred", "ztsnr"} <= set(file.keys()) and file.metadata()["modelspec.prediction_type"] == "v"
    assert capsys.readouterr().err == ""
    export_to(tiny_v_model, name="v1.safetensors")
    assert "take the file for a model of epsilon" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# LoRAs and checkpoints


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_loras_are_fused_in_the_file(name, tiny_families, export_to, tmp_path):
    folder = tiny_families[name]
    path = write_lora(random_lora(folder), tmp_path / LORA_FILE)
    file = export_to(folder, "--lora", f"{path}:0.5", "--lora", f"{path}:0.25", "--save_dtype", "fp32")
    own = loading.load_pipeline(folder, torch.float32)
    for scale in (0.5, 0.25):
        lora.fuse(lora.read(path, folder), own.components, scale)
    assert_equal(read_by_diffusers(file, folder), own, folder)


def test_a_checkpoint_replaces_components(tiny_model, export_to, tmp_path):
    """One of all weights, and one of a LoRA."""
    changed = diffusers.UNet2DConditionModel.from_pretrained(tiny_model / "unet")
    with torch.no_grad():
        changed.conv_in.weight.add_(1)
    changed.save_pretrained(tmp_path / "whole" / "unet")
    (tmp_path / "lora").mkdir()
    write_lora(random_lora(tiny_model), tmp_path / "lora" / LORA_FILE)
    for name in ("whole", "lora"):
        file = export_to(
            tiny_model, "--checkpoint", tmp_path / name, "--save_dtype", "fp32", name=f"{name}.safetensors"
        )
        own = loading.load_pipeline(tiny_model, torch.float32, tmp_path / name)
        assert_equal(read_by_diffusers(file, tiny_model), own, tiny_model)


@pytest.mark.parametrize("name", ["sd", "sdxl", "sd3", "flux"])
def test_a_lora_alone(name, tiny_families, export_to, tmp_path):
    """Diffusers reads it as the LoRA at that scale."""
    folder = tiny_families[name]
    made = random_lora(folder)
    path = write_lora(made, tmp_path / LORA_FILE)
    file = export_to(folder, "--lora", f"{path}:0.5", "--lora_only", "--save_dtype", "fp32")
    found = lora.read(file, folder)
    assert found.keys() == made.keys()
    for component, modules in made.items():
        for module, (down, up) in modules.items():
            assert torch.equal(found[component][module][0], down) and torch.equal(found[component][module][1], up / 2)
    starts = ("lora_unet_", "lora_te") if name in ("sd", "sdxl") else ("transformer.", "text_encoder")
    assert all(key.startswith(starts) for key in load_file(file))
    kind = getattr(diffusers, read_index(folder)["_class_name"])
    assert kind.lora_state_dict(str(file), use_safetensors=True, local_files_only=True)
    with safe_open(file, "pt") as opened:
        facts = opened.metadata()
    assert facts["ss_network_dim"] == "4" and facts["modelspec.architecture"].endswith("/lora")
    assert facts.get("ss_base_model_version") == ("sdxl_base_v1-0" if name == "sdxl" else None)


# ---------------------------------------------------------------------------------------------------------------------
# Refused, before weights are loaded


@pytest.fixture
def no_loading(monkeypatch):
    monkeypatch.setattr(loading, "load_models", lambda *_: pytest.fail("weights were loaded"))


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_other_families_are_refused(name, tiny_families, export_to, tmp_path, no_loading):
    said = "supported: StableDiffusionPipeline, StableDiffusionXLPipeline"
    with pytest.raises(errors.BadInput, match=said):
        export_to(tiny_families[name])
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_replaced_only_with_overwrite(tiny_model, export_to, tmp_path, monkeypatch):
    path = export_to(tiny_model)
    before = path.read_bytes()
    with monkeypatch.context() as patched, pytest.raises(errors.BadInput, match=r"exists: .* --overwrite"):
        patched.setattr(loading, "load_models", lambda *_: pytest.fail("weights were loaded"))
        export_to(tiny_model, "--save_dtype", "fp32")
    assert path.read_bytes() == before
    export_to(tiny_model, "--save_dtype", "fp32", "--overwrite")
    assert path.stat().st_size > len(before) and list(tmp_path.iterdir()) == [path]


def test_places_that_cannot_be_written(tiny_model, export_to, tmp_path, no_loading, monkeypatch):
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "file").touch()
    for name, said in (("folder.safetensors", "is a folder"), ("file/x.safetensors", "is not a folder")):
        with pytest.raises(errors.BadInput, match=said):
            export_to(tiny_model, name=name)
    with pytest.raises(errors.BadInput, match="is a URI"):
        run("--model_dir", tiny_model, "--output_file", "s3://bucket/x.safetensors")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(errors.OutOfResource, match=r"--output_file .* are needed"):
        export_to(tiny_model)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output_file", "x.ckpt"], "must end in .safetensors"),
        (["--output_file", "x.safetensors", "--lora_only"], "--lora_only needs one --lora"),
        (["--output_file", "x.safetensors", "--lora_only", "--lora", "a", "--lora", "b"], "needs one --lora"),
        (["--output_file", "x.safetensors", "--lora_only", "--lora", "a", "--checkpoint", "b"], "no --checkpoint"),
    ],
)
def test_flags_that_do_not_fit(words, said, capsys):
    with pytest.raises(SystemExit) as exit_:
        export.parse_args(["--model_dir", "m", *words])
    assert exit_.value.code == 2 and said in capsys.readouterr().err


def test_weights_that_the_data_type_cannot_hold(tiny_model, export_to, tmp_path):
    made = random_lora(tiny_model)
    (module,) = list(made["unet"])[:1]
    down, up = made["unet"][module]
    made["unet"][module] = down * 1e4, up * 1e4
    path = write_lora(made, tmp_path / LORA_FILE)
    with pytest.raises(errors.BadInput, match=r"model\.diffusion_model\..* that --save_dtype fp16 cannot hold"):
        export_to(tiny_model, "--lora", path)
    assert list(tmp_path.iterdir()) == [path]
    export_to(tiny_model, "--lora", path, "--save_dtype", "bf16")


def test_a_file_that_cannot_be_finished_is_removed(tiny_model, export_to, tmp_path, monkeypatch):
    def fill(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(importlib.import_module("safetensors.torch"), "save_file", fill)
    with pytest.raises(OSError) as raised:
        export_to(tiny_model)
    assert errors.as_tool_error(raised.value).exit_code == 4 and list(tmp_path.iterdir()) == []


def test_the_script(tmp_path):
    done = run_script("export.py", "--model_dir", tmp_path, "--output_file", tmp_path / "y.safetensors")
    assert done.returncode == 3 and done.stderr.count("\n") == 1 and "has no model_index.json" in done.stderr
