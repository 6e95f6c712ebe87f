"""import_model.py: files of other programs become folders; what does not fit is refused and leaves nothing."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import last_json, run_script, tree
from PIL import Image
from safetensors.torch import load_file, save_file
from test_export import assert_equal, draw, read_by_diffusers
from tiny_models import random_lora, write_lora

import export
import import_model
import run_model
from common import errors, folders, objects
from pipelines import loading, lora
from pipelines.model_folder import LORA_FILE, check_model, check_pipeline


@pytest.fixture(scope="session")
def files(single_file_families, tmp_path_factory):
    """{name: single file} of the tiny models, in float32."""
    folder = tmp_path_factory.mktemp("files")
    for name, model_dir in single_file_families.items():
        words = ["--model_dir", str(model_dir), "--output_file", str(folder / f"{name}.safetensors")]
        export.main(export.parse_args([*words, "--save_dtype", "fp32"]))
    return {name: folder / f"{name}.safetensors" for name in single_file_families}


@pytest.fixture
def bring(tmp_path):
    """Return a function that imports a file into the folder `out`, and returns the folder."""

    def run(path, model_dir, *words, output_dir=tmp_path / "out"):
        flags = {"from_file": path, "model_dir": model_dir, "output_dir": output_dir}
        given = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        import_model.main(import_model.parse_args([*given, *words]))
        return output_dir

    return run


@pytest.fixture
def changed(files, tmp_path):
    """Return a function that writes a file of SDXL after a change of its tensors."""

    def write(change, name="sdxl", to="changed.safetensors"):
        tensors = load_file(files[name])
        change(tensors)
        save_file(tensors, tmp_path / to)
        return tmp_path / to

    return write


def zero_base(model_dir, folder):
    """Copy a model and set its weights to zero, so that nothing of it is taken for the file's."""
    shutil.copytree(model_dir, folder)
    for path in folder.rglob("*.safetensors"):
        save_file({name: torch.zeros_like(each) for name, each in load_file(path).items()}, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["sd", "sd2", "sdxl"])
def test_the_model_of_a_file(name, files, single_file_families, bring, tmp_path, capsys):
    """Its weights equal those that Diffusers reads from the file; the base gives only its configurations."""
    base = zero_base(single_file_families[name], tmp_path / "base")
    out = bring(files[name], base)
    assert last_json(capsys.readouterr().out) == {"output_dir": str(out), "kind": "model"}
    own = loading.load_pipeline(out, torch.float32)
    assert_equal(own, read_by_diffusers(files[name], base), base)
    assert_equal(own, loading.load_pipeline(single_file_families[name], torch.float32), base)
    assert torch.equal(draw(own), draw(loading.load_pipeline(single_file_families[name], torch.float32)))
    check_pipeline(out)
    check_model(out)
    assert folders.read_manifest(out, deep=True)["settings"]["from_file"] == folders.sha256_file(files[name])
    assert f"imported from the file `{name}.safetensors`" in (out / "README.md").read_text()
    text = load_file(out / "text_encoder" / "model.safetensors")
    assert all(key.startswith("text_model.") for key in text)
    before, left = tree(out), sorted(path.name for path in tmp_path.iterdir())
    bring(files[name], base)
    assert tree(out) == before and left == ["base", "out"] and "nothing to do" in capsys.readouterr().err


def test_types_stay_and_what_other_files_have_more_is_left_out(changed, single_file_families, bring, capsys):
    def change(tensors):
        for key in list(tensors):
            tensors[key] = tensors[key].half()
            if ".mid.attn_1." in key and tensors[key].ndim == 4:
                tensors[key] = tensors[key][:, :, 0, 0]  # as later programs write it
            if key.startswith("first_stage_model."):
                del tensors[key]
        tensors["conditioner.embedders.1.model.logit_scale"] = torch.ones(())
        tensors["conditioner.embedders.0.transformer.text_model.embeddings.position_ids"] = torch.arange(16)[None]
        tensors["alphas_cumprod"] = torch.ones(1000)

    base = single_file_families["sdxl"]
    out = bring(changed(change), base)
    assert "has no vae: that of" in capsys.readouterr().err
    weights = load_file(out / "unet" / "diffusion_pytorch_model.safetensors")
    expected = load_file(base / "unet" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(weights[key], expected[key].half()) for key in expected)
    vae = "vae/diffusion_pytorch_model.safetensors"
    assert (out / vae).read_bytes() == (base / vae).read_bytes()


def test_convolutions_written_as_matrices_are_read(changed, single_file_families, bring):
    def change(tensors):
        for key in [key for key in tensors if ".mid.attn_1." in key and tensors[key].ndim == 4]:
            tensors[key] = tensors[key][:, :, 0, 0].clone()

    base = single_file_families["sdxl"]
    out = bring(changed(change), base)
    assert_equal(loading.load_pipeline(out, torch.float32), loading.load_pipeline(base, torch.float32), base)


# ---------------------------------------------------------------------------------------------------------------------
# LoRAs


@pytest.mark.parametrize("name", ["sd", "sdxl", "sd3", "flux"])
def test_the_lora_of_a_file(name, tiny_families, bring, tmp_path):
    folder = tiny_families[name]
    spelling, alpha = ("webui", 2.0) if name in ("sd", "sdxl") else ("peft", None)
    path = write_lora(random_lora(folder), tmp_path / "style.safetensors", spelling, folder, alpha=alpha)
    out = bring(path, folder)
    assert {each.name for each in out.iterdir()} == {LORA_FILE, "README.md", "manifest.json"}
    found, expected = (lora.diffusers_tensors(lora.read(each, folder)) for each in (out / LORA_FILE, path))
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    assert "lora" in (out / "README.md").read_text() and folders.read_manifest(out, deep=True)


def test_run_model_draws_the_same_with_the_file_and_the_folder(tiny_families, bring, tmp_path):
    folder = tiny_families["sdxl"]
    path = write_lora(random_lora(folder), tmp_path / "style.safetensors", "webui", folder, alpha=2.0)
    pictures = []
    for place, flags in (("a", ["--lora", path]), ("b", ["--lora", bring(path, folder)]), ("c", [])):
        words = ["--model_dir", folder, "--output_dir", tmp_path / place, "--prompts", "a dog", *flags]
        words += ["--num_samples_per_prompt", 1, "--num_inference_steps", 2, "--num_workers", 0]
        run_model.main(run_model.parse_args([str(word) for word in words]))
        (image,) = (tmp_path / place).glob("*.png")
        pictures.append(np.asarray(Image.open(image)))
    assert np.array_equal(pictures[0], pictures[1]) and not np.array_equal(pictures[0], pictures[2])


# ---------------------------------------------------------------------------------------------------------------------
# Refused


def refuse(bring, path, base, kind, said):
    with pytest.raises(kind, match=said):
        bring(path, base)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (
            lambda each: each.pop("model.diffusion_model.out.2.bias"),
            errors.BadInput,
            r"incomplete: 1 weights are missing, starting with .*\.out\.2\.bias",
        ),
        (
            lambda each: each.update({"model.diffusion_model.more": torch.zeros(1)}),
            errors.BadInput,
            r"1 of its weights have no place there, starting with model\.diffusion_model\.more",
        ),
        (
            lambda each: each.update({"model.diffusion_model.out.2.bias": torch.zeros(5)}),
            errors.BadInput,
            r"out\.2\.bias has the size 5, which does not fit a weight of 4",
        ),
        (
            lambda each: each["model.diffusion_model.out.2.bias"].fill_(float("nan")),
            errors.CheckFailed,
            r"out\.2\.bias is not finite",
        ),
        (
            lambda each: each.update({"model.diffusion_model.out.2.bias": torch.zeros(4).to(torch.float8_e4m3fn)}),
            errors.BadInput,
            r"out\.2\.bias is of type torch\.float8_e4m3fn",
        ),
        (lambda each: each.update(v_pred=torch.zeros(0)), errors.BadInput, "is a model of v-prediction"),
    ],
)
def test_a_file_that_does_not_fit_leaves_nothing(change, kind, said, changed, single_file_families, bring, tmp_path):
    refuse(bring, changed(change), single_file_families["sdxl"], kind, said)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_other_kinds_of_models_are_refused(files, single_file_families, tiny_families, bring, tmp_path):
    for name, base in (("sd", "sdxl"), ("sdxl", "sd"), ("sd2", "sd")):
        refuse(bring, files[name], single_file_families[base], errors.BadInput, "is another kind of model than")
    for base in ("sd3", "flux"):
        refuse(bring, files["sd"], tiny_families[base], errors.BadInput, "supported: StableDiffusionPipeline")
    path = write_lora(random_lora(tiny_families["flux"]), tmp_path / "flux.safetensors")
    refuse(bring, path, tiny_families["sdxl"], errors.BadInput, "is a LoRA of another kind of model")
    assert not (tmp_path / "out").exists()


def test_pickles_and_damaged_files_are_refused(files, single_file_families, bring, tmp_path):
    base = single_file_families["sd"]
    for name in ("model.ckpt", "model.pt"):
        (tmp_path / name).touch()
        refuse(bring, tmp_path / name, base, errors.BadInput, "may be a pickle, which can run code")
    (tmp_path / "cut.safetensors").write_bytes(files["sd"].read_bytes()[:-100])
    refuse(bring, tmp_path / "cut.safetensors", base, errors.CheckFailed, "is damaged")
    refuse(bring, tmp_path / "none.safetensors", base, errors.BadInput, "is not a file")


def test_folders_of_others_stay(files, single_file_families, bring, tmp_path):
    base = single_file_families["sd"]
    out = bring(files["sd"], base)
    before = tree(out)
    refuse(bring, files["sd2"], single_file_families["sd2"], errors.BadInput, r"exists: .* --overwrite")
    assert tree(out) == before
    bring(files["sd2"], single_file_families["sd2"], "--overwrite")
    assert json.loads((out / "unet" / "config.json").read_text())["cross_attention_dim"] == 1024
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.png").touch()
    with pytest.raises(errors.BadInput, match="is not an output of this toolkit"):
        bring(files["sd"], base, "--overwrite", output_dir=tmp_path / "mine")


def test_a_model_goes_into_a_store(files, single_file_families, bring, tmp_path, s3):
    base = single_file_families["sd"]
    out, uri = bring(files["sd"], base), bring(files["sd"], base, output_dir=s3("imported"))
    for path in out.rglob("*.safetensors"):
        assert (objects.local_copy(uri) / path.relative_to(out)).read_bytes() == path.read_bytes()


def test_the_script(files, tmp_path):
    words = ["--from_file", files["sd"], "--model_dir", tmp_path, "--output_dir", tmp_path / "out"]
    done = run_script("import_model.py", *words)
    assert done.returncode == 3 and done.stderr.count("\n") == 1 and "has no model_index.json" in done.stderr
