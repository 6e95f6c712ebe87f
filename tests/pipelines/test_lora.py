"""LoRA files: every spelling is read as Diffusers reads it; what does not fit a model is refused before it loads."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import RANK, SPELLINGS, random_lora, write_lora

import export
import run_model
from common import errors
from pipelines import loading, lora
from pipelines.configs import read_config
from pipelines.families import find_family
from pipelines.model_folder import LORA_FILE, digest_model
from pipelines.names import unet_name

NAMES = r"lora_(unet|te|te1|te2)_[a-z0-9_]+\.(lora_down\.weight|lora_up\.weight|alpha)"


def draw(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 2, "guidance_scale": 3.0, "output_type": "pt"}
    generator = torch.Generator().manual_seed(0)
    height = pipeline.vae_scale_factor * 8
    return pipeline(["a dog"], generator=[generator], height=height, width=height, **options).images


def ours(model_dir, path, scale=1.0):
    pipeline = loading.load_pipeline(model_dir, torch.float32)
    lora.fuse(lora.read(path, model_dir), pipeline.components, scale)
    return draw(pipeline)


def theirs(model_dir, path, scale=None):
    pipeline = loading.load_pipeline(model_dir, torch.float32)
    pipeline.load_lora_weights(path.parent, weight_name=path.name, use_safetensors=True, local_files_only=True)
    if scale is not None:
        pipeline.set_adapters(pipeline.get_active_adapters(), scale)
    return draw(pipeline)


def difference(one, other):
    return (one - other).abs().max().item()


# ---------------------------------------------------------------------------------------------------------------------
# Read as Diffusers reads it


@pytest.mark.parametrize("name", ["sd", "sdxl", "sd3", "flux"])
def test_a_lora_is_fused_as_diffusers_applies_it(name, tiny_families, tmp_path):
    folder = tiny_families[name]
    path = write_lora(random_lora(folder), tmp_path / LORA_FILE)
    fused, base = ours(folder, path), draw(loading.load_pipeline(folder, torch.float32))
    assert difference(fused, theirs(folder, path)) <= 1e-5 and difference(fused, base) > 0.01


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_each_spelling_is_the_same_lora(name, spelling, tiny_families, tmp_path):
    folder = tiny_families[name]
    made = random_lora(folder)
    found = lora.read(write_lora(made, tmp_path / "one.safetensors", spelling, folder), folder)
    assert lora.diffusers_tensors(found).keys() == lora.diffusers_tensors(made).keys()
    for key, tensor in lora.diffusers_tensors(made).items():
        assert torch.equal(lora.diffusers_tensors(found)[key], tensor), key


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_names_of_the_original_code_are_the_same_lora(name, tiny_families, tmp_path):
    """As kohya's scripts write them for SDXL: lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q."""
    folder = tiny_families[name]
    config = dict(read_config(folder, "unet"))
    made = {"unet": random_lora(folder)["unet"]}
    as_kohya = {unet_name(module, config): pair for module, pair in made["unet"].items()}
    tensors = lora.webui_tensors({"unet": as_kohya}, find_family(folder).webui)
    place = "input_blocks_1_1" if name == "sd" else "input_blocks_3_1"
    assert f"lora_unet_{place}_transformer_blocks_0_attn1_to_q.lora_down.weight" in tensors
    save_file(tensors, tmp_path / "one.safetensors")
    found = lora.diffusers_tensors(lora.read(tmp_path / "one.safetensors", folder))
    expected = lora.diffusers_tensors(made)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


def test_names_without_text_model_are_read_too(tiny_model, tmp_path):
    """transformers 5 drops the prefix; LoRAs that were made with it lack it."""
    made = random_lora(tiny_model)
    path = write_lora(made, tmp_path / "one.safetensors")
    save_file({key.replace("text_model.", ""): each for key, each in load_file(path).items()}, path)
    assert lora.read(path, tiny_model).keys() == made.keys()


@pytest.mark.parametrize("scale", [0.0, 0.5, -1.0])
def test_the_scale(scale, tiny_model, tmp_path):
    path = write_lora(random_lora(tiny_model), tmp_path / LORA_FILE)
    assert difference(ours(tiny_model, path, scale), theirs(tiny_model, path, scale)) <= 1e-5
    if not scale:
        assert torch.equal(ours(tiny_model, path, 0.0), draw(loading.load_pipeline(tiny_model, torch.float32)))


@pytest.mark.parametrize("alpha", [1.0, 4.0, 8.0])
@pytest.mark.parametrize("rslora", [False, True])
def test_alpha_in_metadata(alpha, rslora, tiny_model, tmp_path):
    """As Diffusers' scripts write it, which differs from the rank more often than not."""
    facts = {"r": RANK, "lora_alpha": alpha, "use_rslora": rslora}
    own = {f"{part}.{name}": value for part in ("unet", "text_encoder") for name, value in facts.items()}
    path = write_lora(random_lora(tiny_model), tmp_path / LORA_FILE, metadata={lora.FACTS: json.dumps(own)})
    weights = load_file(path)
    key = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.lora_B.weight"
    factor = alpha / (math.sqrt(RANK) if rslora else RANK)
    up = lora.read(path, tiny_model)["unet"][key.removeprefix("unet.").removesuffix(".lora_B.weight")][1]
    assert torch.allclose(up, weights[key] * factor)


@pytest.mark.parametrize("alpha", [1.0, 8.0])
def test_alpha_in_tensors(alpha, tiny_model, tmp_path):
    path = write_lora(random_lora(tiny_model), tmp_path / LORA_FILE, "webui", tiny_model, alpha=alpha)
    assert difference(ours(tiny_model, path), theirs(tiny_model, path)) <= 1e-5


def test_two_loras_add_up(tiny_model, tmp_path):
    made = random_lora(tiny_model)
    path, half = write_lora(made, tmp_path / LORA_FILE), loading.load_pipeline(tiny_model, torch.float32)
    for _ in range(2):
        lora.fuse(lora.read(path, tiny_model), half.components, 0.5)
    assert difference(draw(half), ours(tiny_model, path)) <= 1e-5


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_the_names_for_web_uis_are_read_back_by_diffusers(name, tiny_families, tmp_path):
    folder = tiny_families[name]
    made = random_lora(folder)
    tensors = lora.webui_tensors(made, find_family(folder).webui)
    assert all(re.fullmatch(NAMES, key) for key in tensors)
    save_file(tensors, tmp_path / "one_webui.safetensors")
    path = write_lora(made, tmp_path / "x.safetensors")
    assert difference(theirs(folder, tmp_path / "one_webui.safetensors"), ours(folder, path)) <= 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# Refused


def damaged(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_lora_of_another_family_is_refused(tiny_families, tmp_path):
    path = write_lora(random_lora(tiny_families["sdxl"]), tmp_path / LORA_FILE)
    with pytest.raises(errors.BadInput, match=r"is a LoRA of another kind of model than .*: \d+ of its \d+ weights"):
        lora.read(path, tiny_families["sd"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda each: each.pop(min(each)), "lacks its down weight"),
        (lambda each: each.update({min(each): torch.zeros(RANK, 3)}), "sizes 4x3 and"),
        (
            lambda each: each.update({min(each).replace("lora_A", "lora_B"): torch.zeros(16, 3)}),
            "do not fit a weight of",
        ),
        (lambda each: each.update({min(each): torch.zeros(())}), "has the sizes  and"),
        (lambda each: each.update({min(each): each[min(each)].to(torch.int8)}), "is of type torch.int8"),
        (lambda each: each.update({"unet.conv_in.dora_scale": torch.zeros(1)}), "which is no weight of a LoRA"),
        (lambda each: each.clear(), "is a LoRA of another kind of model"),
    ],
)
def test_what_does_not_fit_is_refused(change, said, tiny_model, tmp_path):
    path = write_lora(random_lora(tiny_model), tmp_path / LORA_FILE)
    damaged(path, change)
    with pytest.raises(errors.BadInput, match=said):
        lora.read(path, tiny_model)


def test_damage_is_refused(tiny_model, tmp_path):
    path = write_lora(random_lora(tiny_model), tmp_path / LORA_FILE)
    damaged(path, lambda each: each[min(each)].fill_(float("nan")))
    with pytest.raises(errors.CheckFailed, match="is not finite"):
        lora.read(path, tiny_model)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(errors.CheckFailed, match="is damaged"):
        lora.read(path, tiny_model)


@pytest.mark.parametrize("facts", ["{", "[]", '{"unet.lora_alpha": "4"}', '{"unet.lora_alpha": NaN}'])
def test_damaged_metadata_are_refused(facts, tiny_model, tmp_path):
    path = write_lora(random_lora(tiny_model), tmp_path / LORA_FILE, metadata={lora.FACTS: facts})
    with pytest.raises(errors.CheckFailed, match="has damaged metadata"):
        lora.read(path, tiny_model)


def test_an_alpha_of_several_numbers_is_refused(tiny_model, tmp_path):
    path = write_lora(random_lora(tiny_model), tmp_path / LORA_FILE, "webui", tiny_model, alpha=[1.0, 2.0])
    with pytest.raises(errors.BadInput, match="has an alpha of 2 numbers"):
        lora.read(path, tiny_model)


def test_weights_of_8_bits_are_read(tiny_model, tmp_path):
    path = write_lora(random_lora(tiny_model), tmp_path / LORA_FILE)
    small = {key: each.to(torch.float8_e4m3fn) for key, each in load_file(path).items()}
    save_file(small, path)
    for key, each in lora.diffusers_tensors(lora.read(path, tiny_model)).items():
        assert torch.equal(each, small[key].float())


@pytest.fixture(params=["family", "partner", "shape", "nan", "pickle", "pickle by name", "truncated"])
def bad_file(request, tiny_model, tiny_families, tmp_path):
    """(exit code, a file that is no LoRA of the tiny model)."""
    model_dir = tiny_families["flux"] if request.param == "family" else tiny_model
    path = write_lora(random_lora(model_dir), tmp_path / LORA_FILE)
    if request.param == "partner":
        damaged(path, lambda each: each.pop(min(each)))
    if request.param == "shape":
        damaged(path, lambda each: each.update({min(each): torch.zeros(RANK, 3)}))
    if request.param == "nan":
        damaged(path, lambda each: each[min(each)].fill_(float("nan")))
    if request.param == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    if request.param.startswith("pickle"):
        path = tmp_path / ("x.bin" if request.param == "pickle" else "x.safetensors")
        torch.save({}, path)
    return 5 if request.param in ("nan", "pickle by name", "truncated") else 3, path


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (run_model, ["--output_dir", "out", "--prompts", "a cat", "--num_workers", "0"]),
        (export, ["--output_file", "out.safetensors"]),
    ],
)
def test_scripts_tell_it_in_one_line_before_weights_are_loaded(
    script, flags, bad_file, tiny_model, tmp_path, monkeypatch
):
    code, path = bad_file
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "load_models", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(errors.ToolError) as caught:
        script.main(script.parse_args(["--model_dir", str(tiny_model), "--lora", str(path), *flags]))
    found, line = errors.describe_error(caught.value)
    assert found == code and "\n" not in line and str(path) in line
    assert not list(tmp_path.glob("out*"))


def test_a_file_is_found(tmp_path):
    def find(name):
        return lora.find_file(str(tmp_path / name))

    for name in ("empty", "two", "one", "ours"):
        (tmp_path / name).mkdir()
    for name in (
        "two/a.safetensors",
        "two/b.safetensors",
        "one/a.safetensors",
        f"ours/{LORA_FILE}",
        "ours/x_webui.safetensors",
    ):
        (tmp_path / name).touch()
    (tmp_path / "pickle.bin").touch()
    assert find("one").name == "a.safetensors" and find("ours").name == LORA_FILE and find("two/a.safetensors")
    for name, said in (
        ("empty", "has no pytorch_lora"),
        ("two", "has 2"),
        ("x", "does not exist"),
        ("pickle.bin", "pickle"),
    ):
        with pytest.raises(errors.BadInput, match=said):
            find(name)


def test_a_lora_in_a_store(tiny_model, tmp_path, s3):
    from common import objects

    (tmp_path / "lora").mkdir()
    path = write_lora(random_lora(tiny_model), tmp_path / "lora" / "one.safetensors")
    objects.upload_folder(tmp_path / "lora", s3("loras"))
    for name in ("loras", "loras/one.safetensors"):
        assert lora.find_file(s3(name)).read_bytes() == path.read_bytes()
    with pytest.raises(errors.BadInput, match="does not exist or is empty"):
        lora.find_file(s3("loras/other.safetensors"))


def test_another_base_is_told(tiny_model, tiny_v_model, tmp_path, capsys):
    path = write_lora(random_lora(tiny_model), tmp_path / LORA_FILE, metadata={lora.BASE: digest_model(tiny_model)})
    loras = lora.describe([(str(path), 1.0)])
    lora.check(loras, tiny_model)
    assert not capsys.readouterr().err
    lora.check(loras, tiny_v_model)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_replaced_file_is_not_used(tiny_model, tmp_path):
    path = write_lora(random_lora(tiny_model), tmp_path / LORA_FILE)
    loras = lora.describe([(str(path), 1.0)])
    write_lora(random_lora(tiny_model, "attention"), path)
    with pytest.raises(errors.TryAgain, match="was replaced"):
        lora.fuse_all(loras, tiny_model, loading.load_pipeline(tiny_model, torch.float32))


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("data/tuned", ("data/tuned", 1.0)),
        ("data/tuned:0.5", ("data/tuned", 0.5)),
        ("s3://bucket/tuned", ("s3://bucket/tuned", 1.0)),
        ("s3://bucket/tuned:-1", ("s3://bucket/tuned", -1.0)),
        ("C:/x.safetensors:2e-1", ("C:/x.safetensors", 0.2)),
    ],
)
def test_the_flag(text, parsed):
    assert lora.parse_flag(text) == parsed
