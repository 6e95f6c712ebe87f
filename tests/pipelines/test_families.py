"""Families: their parts against those of the pipelines of Diffusers, with tiny models of random weights."""

import importlib
import inspect
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import RESOLUTION, make_tiny_flux

from common import errors
from pipelines import loading
from pipelines.families import FAMILIES, SDXL, find_family, say_what_is_cut
from pipelines.family import CLIP_LORA, Sizes
from pipelines.objectives import Diffusion, Flow

NAMES = ["sd", "sdxl", "sd3", "flux"]
CELLS = RESOLUTION // 2


@pytest.fixture(params=NAMES)
def model_dir(request, tiny_families, one_thread):
    return tiny_families[request.param]


@pytest.fixture
def family(model_dir):
    return find_family(model_dir)


@pytest.fixture
def pipeline(model_dir):
    return loading.load_pipeline(model_dir, torch.float32)


def condition_of(family, model_dir, pipeline, prompts):
    """The family's condition of prompts, through each text encoder apart."""
    ids = family.tokenize(model_dir, prompts)
    said = {name: family.read(name, getattr(pipeline, name).eval(), ids[name]) for name in family.encoders}
    return family.condition(said)


def find_method(pipeline, name):
    return getattr(importlib.import_module("diffusers"), pipeline).__dict__[name]


# ---------------------------------------------------------------------------------------------------------------------
# Which family


def test_each_class_has_its_family(tiny_families):
    assert {name: find_family(folder).name for name, folder in tiny_families.items()} == {
        "sd": "stable-diffusion",
        "sdxl": "stable-diffusion-xl",
        "sd3": "stable-diffusion-3",
        "flux": "flux",
    }


def test_an_unknown_class_is_refused_in_one_line(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "KandinskyPipeline"}))
    names = "StableDiffusionPipeline, StableDiffusionXLPipeline, StableDiffusion3Pipeline, FluxPipeline"
    with pytest.raises(errors.BadInput, match=rf"^--model_dir .* is a KandinskyPipeline; supported: {names}$"):
        find_family(tmp_path)
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(errors.BadInput, match=r"is a pipeline of no class; supported: StableDiffusionPipeline$"):
        find_family(tmp_path, ["StableDiffusionPipeline"])


def test_sizes(tiny_families):
    expected = {
        "sd": Sizes(RESOLUTION, 8, 2, 4),
        "sdxl": Sizes(RESOLUTION, 8, 2, 4),
        "sd3": Sizes(RESOLUTION, 4, 2, 16),
        "flux": Sizes(256, 4, 2, 16),
    }
    assert {name: find_family(folder).sizes(folder) for name, folder in tiny_families.items()} == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_the_pipeline(name):
    defaults = inspect.signature(inspect.unwrap(find_method(name, "__call__"))).parameters
    family = FAMILIES[name]
    assert family.guidance_scale == defaults["guidance_scale"].default
    assert family.num_inference_steps == defaults["num_inference_steps"].default
    if family.tokens:
        assert list(family.tokens.values()) == [defaults["max_sequence_length"].default]


# ---------------------------------------------------------------------------------------------------------------------
# Condition


def test_the_condition_is_what_the_pipeline_encodes(family, model_dir, pipeline):
    """Bit for bit, also of a prompt that is cut off, and through the text encoders in any order."""
    prompts = ["a cat", "a dog on a red mat, with a very long tail and two ears"]
    found = condition_of(family, model_dir, pipeline, prompts)
    options = {name: prompts for name in ("prompt_2", "prompt_3")}
    options |= {"device": torch.device("cpu"), "num_images_per_prompt": 1, "do_classifier_free_guidance": False}
    known = inspect.signature(pipeline.encode_prompt).parameters
    output = pipeline.encode_prompt(prompts, **{name: value for name, value in options.items() if name in known})
    pooled = {4: output[2], 3: output[1]}.get(len(output)) if "pooled" in found else None
    assert torch.equal(found["prompt"], output[0]) and found["prompt"].shape[0] == 2
    assert not torch.equal(found["prompt"][0], found["prompt"][1])
    if pooled is not None:
        assert torch.equal(found["pooled"], pooled)


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_the_shapes_of_captions_are_those_of_what_is_read(name, tiny_families, one_thread):
    family, folder = find_family(tiny_families[name]), tiny_families[name]
    shapes = {}
    for encoder, ids in family.tokenize(folder, ["a cat"]).items():
        module = loading.load_models(folder, (encoder,), torch.float32)[encoder]
        shapes |= {
            f"{encoder}.{key}": (1, *value.shape[1:]) for key, value in family.read(encoder, module, ids).items()
        }
    assert {field: (1, *shape) for field, shape in family.caption_shapes(folder).items()} == shapes


@pytest.mark.parametrize("is_zero", [True, False])
def test_the_unconditional_embedding_of_sdxl(tiny_families, one_thread, tmp_path, is_zero):
    """Zeros, not the encoding of "", unless the model says otherwise."""
    pipeline, family = loading.load_pipeline(tiny_families["sdxl"], torch.float32), SDXL()
    index = json.loads((tiny_families["sdxl"] / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"force_zeros_for_empty_prompt": is_zero}))
    pipeline.register_to_config(force_zeros_for_empty_prompt=is_zero)
    found = family.unconditional(tmp_path, condition_of(family, tiny_families["sdxl"], pipeline, [""]))
    _, prompt, _, pooled = pipeline.encode_prompt("a cat")
    assert torch.equal(found["prompt"], prompt) and torch.equal(found["pooled"], pooled)
    assert bool(found["prompt"].any()) is not is_zero


def test_drawn_from_embeddings_without_text_encoders_is_the_same_picture(family, model_dir, pipeline):
    """Two prompts at once, with guidance."""
    prompts, sides = ["a cat", "a red dog"], {"height": RESOLUTION, "width": RESOLUTION}
    options = {**sides, "num_inference_steps": 2, "guidance_scale": 3.0, "output_type": "np"}
    expected = pipeline(prompts, generator=torch.Generator().manual_seed(0), **options).images
    with torch.no_grad():
        condition = condition_of(family, model_dir, pipeline, prompts)
        empty = condition_of(family, model_dir, pipeline, ["", ""])
    inputs = family.pipeline_inputs(condition, family.unconditional(model_dir, empty))
    for encoder in family.encoders:
        setattr(pipeline, encoder, None)
        setattr(pipeline, encoder.replace("text_encoder", "tokenizer"), None)
    found = pipeline(**inputs, generator=torch.Generator().manual_seed(0), **options).images
    assert np.array_equal(found, expected) and found.std() > 0.01


# ---------------------------------------------------------------------------------------------------------------------
# Geometry


def test_time_ids_of_a_photo_cropped_to_a_bucket():
    """4032x3024 to 1152x896: 896/3024 of its height, and 3888 of its 4032 pixels wide, of which 72 are on the left."""
    found = SDXL().geometry((4032, 3024), (72, 0, 3960, 3024), (1152, 896))
    assert found == {"time_ids": [3024, 4032, 0, 21, 896, 1152]}


def test_time_ids_of_a_mirrored_crop_count_from_the_other_side():
    """Half of a photo of 40x20, 10 pixels from its left and 10 from its right; then 4 from the left, 16 from the right.

    Resized to half, these are 5, 5, 2 and 8.
    """
    geometry = SDXL().geometry
    for is_mirrored, left in ((False, 5), (True, 5)):
        assert geometry((40, 20), (10, 0, 30, 20), (10, 10), is_mirrored)["time_ids"] == [20, 40, 0, left, 10, 10]
    for is_mirrored, left in ((False, 2), (True, 8)):
        assert geometry((40, 20), (4, 0, 24, 20), (10, 10), is_mirrored)["time_ids"] == [20, 40, 0, left, 10, 10]


def test_time_ids_of_a_square_and_of_a_tall_photo():
    assert SDXL().geometry((600, 600), (0, 0, 600, 600), (512, 512), True)["time_ids"] == [600, 600, 0, 0, 512, 512]
    assert SDXL().geometry((300, 900), (0, 60, 300, 360), (100, 100))["time_ids"] == [900, 300, 20, 0, 100, 100]


def test_the_others_are_told_nothing_of_the_crop():
    for family in FAMILIES.values():
        assert bool(family.geometry((40, 20), (10, 0, 30, 20), (10, 10))) is (family.name == "stable-diffusion-xl")


# ---------------------------------------------------------------------------------------------------------------------
# Prediction


def first_step(pipeline):
    """Return (input, time, output) of the denoiser in the first step of a drawing without guidance."""
    seen, denoiser = [], getattr(pipeline, "unet", None) or pipeline.transformer
    sides = {"height": RESOLUTION, "width": 2 * RESOLUTION}

    def remember(module, args, options, output):
        time = pipeline.scheduler.timesteps[0].expand(2)
        seen.append((args[0] if args else options["hidden_states"], time, output[0]))

    with denoiser.register_forward_hook(remember, with_kwargs=True):
        generator = torch.Generator().manual_seed(0)
        pipeline(["a cat", "a red dog"], num_inference_steps=3, guidance_scale=1.0, generator=generator, **sides)
    noisy, time, output = seen[0]
    if hasattr(pipeline, "_unpack_latents"):
        noisy, output = (pipeline._unpack_latents(each, *sides.values(), 2) for each in (noisy, output))
    return noisy, time, output


def check_prediction(model_dir):
    family, pipeline = find_family(model_dir), loading.load_pipeline(model_dir, torch.float32)
    noisy, time, expected = first_step(pipeline)
    assert noisy.shape == expected.shape == (2, family.sizes(model_dir).channels, CELLS, 2 * CELLS)
    size = (2 * RESOLUTION, RESOLUTION)
    geometry = family.geometry(size, (0, 0, *size), size)
    with torch.no_grad():
        condition = condition_of(family, model_dir, pipeline, ["a cat", "a red dog"])
        condition |= {name: torch.tensor([values] * 2) for name, values in geometry.items()}
        found = family.predict(getattr(pipeline, family.denoiser), noisy, time, condition)
        swapped = {name: value.flip(0) for name, value in condition.items()}
        other = family.predict(getattr(pipeline, family.denoiser), noisy, time, swapped)
    assert (found - expected).abs().max() <= 1e-6
    assert (other - expected).abs().max() > 1e-5  # the prompt counts


def test_the_prediction_is_the_first_step_of_the_pipeline(model_dir):
    check_prediction(model_dir)


def test_the_prediction_of_a_flux_without_guidance_embedding(tmp_path, one_thread):
    check_prediction(make_tiny_flux(tmp_path / "flux", guidance_embeds=False))


def test_time_ids_reach_the_denoiser_as_whole_numbers():
    """FSDP casts floats among the arguments, and in bf16 1001 pixels are 1000."""
    told = []

    def denoiser(noisy, time, prompt, added_cond_kwargs):
        told.append(added_cond_kwargs["time_ids"])
        return SimpleNamespace(sample=noisy)

    condition = {"prompt": torch.zeros(1, 2, 3), "pooled": torch.zeros(1, 4)}
    condition["time_ids"] = torch.tensor([[1001.0, 4032, 0, 21, 896, 1152]])
    SDXL().predict(denoiser, torch.zeros(1, 4, 2, 2), torch.tensor([3]), condition)
    assert not told[0].is_floating_point() and told[0].tolist() == [[1001, 4032, 0, 21, 896, 1152]]


# ---------------------------------------------------------------------------------------------------------------------
# Training


def loss_of(family, model_dir, pipeline):
    """The mean squared error of a batch of two, through all parts of the model."""
    objective, generator = family.objective(model_dir), torch.Generator().manual_seed(0)
    channels, index = family.sizes(model_dir).channels, torch.tensor([300, 800])
    latents, noise = torch.randn(2, 2, channels, CELLS, CELLS, generator=generator)
    condition = condition_of(family, model_dir, pipeline, ["a cat", "a red dog"])
    condition["time_ids"] = torch.tensor([[20, 40, 0, 5, 16, 16], [16, 16, 0, 0, 16, 16]])
    noisy, time = objective.noisy(latents, noise, index)
    pred = family.predict(getattr(pipeline, family.denoiser), noisy, time, condition)
    return (pred - objective.target(latents, noise, index)).square().mean()


def test_all_parameters_learn_but_those_named_as_unused(family, model_dir, pipeline):
    parts = {name: getattr(pipeline, name).train() for name in (family.denoiser, *family.encoders)}
    loss_of(family, model_dir, pipeline).backward()
    for component, module in parts.items():
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        without = {name for name, gradient in gradients.items() if gradient is None or not gradient.any()}
        assert without == set(family.unused(component, module)), component
    assert bool(family.unused("text_encoder", pipeline.text_encoder)) is (family.name == "stable-diffusion-xl")


def test_the_objective_is_that_of_the_scheduler(family, model_dir):
    objective = family.objective(model_dir)
    assert isinstance(objective, Diffusion if family.denoiser == "unet" else Flow)
    assert objective.num_train_timesteps == 1000


def test_a_flow_has_no_min_snr_weights(tiny_families):
    for name in ("sd3", "flux"):
        with pytest.raises(errors.BadInput, match=r"^--snr_gamma .* learns a flow: leave it out$"):
            find_family(tiny_families[name]).objective(tiny_families[name], snr_gamma=5.0)
    for name in ("sd", "sdxl"):
        assert (
            find_family(tiny_families[name])
            .objective(tiny_families[name], snr_gamma=5.0)
            .row_weights(torch.tensor([1]))
            <= 1
        )


def test_the_modules_that_get_an_adapter_exist(family, pipeline):
    """Each name is the end of the names of some linear layers or convolutions, and of nothing else."""
    named = {part: CLIP_LORA for part in family.trainable}
    for layers in family.lora.values():
        for component, ends in (named | {family.denoiser: layers}).items():
            modules = dict(getattr(pipeline, component).named_modules())
            for end in ends:
                found = [module for name, module in modules.items() if name.endswith(f".{end}")]
                assert found and all(isinstance(each, torch.nn.Linear | torch.nn.Conv2d) for each in found), end


def test_t5_is_not_trained(family, pipeline):
    assert family.trained(train_text_encoders=False) == (family.denoiser,)
    assert family.trained(train_text_encoders=True) == (family.denoiser, *family.trainable)
    for encoder in family.encoders:
        is_t5 = getattr(pipeline, encoder).config.model_type == "t5"
        assert is_t5 is (encoder in family.tokens) and not (is_t5 and encoder in family.trainable)


def test_what_is_cut_is_what_no_encoder_reads(tiny_families, capsys):
    """The CLIPs of the tiny models read 16 tokens, a letter each; T5 reads 256, and FLUX's 512."""
    for name, longest in (("sd", 22), ("sdxl", 14), ("sd3", 255), ("flux", 511)):
        say_what_is_cut(tiny_families[name], ["x" * (longest - 1)])
        assert not capsys.readouterr().err, name
        say_what_is_cut(tiny_families[name], ["x" * (longest + 1)])
        assert "is ignored" in capsys.readouterr().err, name
