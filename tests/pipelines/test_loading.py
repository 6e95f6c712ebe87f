"""Loading of models and pipelines, data types, latents, drawing, samplers."""

import os
import pickle
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common import errors
from pipelines import loading
from pipelines.loading import compute_dtype, draw_images, encode_posterior, load_models, scale_latents, set_up_torch


def rows_of(*values):
    """A tensor [B, 1, 2, 2] whose row b is filled with values[b]."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None, None].repeat(1, 1, 2, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Latents


def test_latents_are_shifted_and_scaled_by_the_configuration():
    latents = rows_of(1.0, -2.0)
    assert torch.allclose(scale_latents(latents, {"scaling_factor": 0.5}), rows_of(0.5, -1.0))
    assert torch.allclose(scale_latents(latents, {"scaling_factor": 0.5, "shift_factor": None}), rows_of(0.5, -1.0))
    assert torch.allclose(scale_latents(latents, {"scaling_factor": 0.5, "shift_factor": 0.2}), rows_of(0.4, -1.1))


def test_the_posterior_is_unscaled(tiny_model):
    vae = load_models(tiny_model, ("vae",), torch.float32)["vae"]
    pixel_values = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        mean, std = encode_posterior(vae, pixel_values)
        moments = vae.quant_conv(vae.encoder(pixel_values))
    assert mean.shape == std.shape == (2, 4, 8, 8)
    assert torch.allclose(mean, moments[:, :4]) and torch.allclose(std, (moments[:, 4:].clamp(-30, 20) / 2).exp())


# ---------------------------------------------------------------------------------------------------------------------
# Types and models


def test_auto_computes_in_bf16_on_a_gpu_and_in_fp32_on_a_cpu():
    assert compute_dtype("auto", "cpu") == compute_dtype("no", "cpu") == compute_dtype("no", "cuda") == torch.float32
    assert compute_dtype("bf16", "cuda") == compute_dtype("bf16", "cpu") == torch.bfloat16
    assert compute_dtype("fp16", "cuda") == torch.float16
    with pytest.raises(errors.BadInput, match="--mixed_precision fp16"):
        compute_dtype("fp16", "cpu")


@pytest.mark.parametrize(("has_bf16", "others_lack_it", "dtype"), [
    (True, False, torch.bfloat16), (False, False, torch.float16), (True, True, torch.float16),
])  # fmt: skip
def test_auto_is_fp16_on_gpus_without_bf16_units_and_says_so(monkeypatch, capsys, has_bf16, others_lack_it, dtype):
    """PyTorch counts what it emulates as supported, unless it is asked not to; all workers take the same type."""
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16 or including_emulation
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert compute_dtype("auto", "cuda", lambda lacks: lacks or others_lack_it) == dtype
    said = capsys.readouterr().err
    expected = "Tesla T4 has no bf16 units: --mixed_precision auto uses fp16\n"
    assert said == ("" if dtype == torch.bfloat16 else expected)
    assert compute_dtype("bf16", "cuda") == torch.bfloat16


@pytest.mark.parametrize(("mixed_precision", "expected"), [("no", False), ("auto", True), ("bf16", True)])
def test_tf32_is_off_where_float32_is_asked_for(mixed_precision, expected):
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = not expected
        set_up_torch("cuda", mixed_precision=mixed_precision)
        assert (matmul.allow_tf32, cudnn.allow_tf32) == (expected, expected)
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


WITH_WEIGHTS = ("text_encoder", "unet", "vae")


def change_weights(model_dir, part, change):
    path = next((model_dir / part).glob("*.safetensors"))
    tensors = load_file(path)
    tensors = change(tensors) or tensors
    save_file(tensors, path, metadata={"format": "pt"})


def first_parameter(module):
    return next(parameter for _, parameter in sorted(module.named_parameters()))


@pytest.fixture
def model(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


def test_models_come_back_as_they_were_saved(tiny_model):
    models = load_models(tiny_model, (*WITH_WEIGHTS, "tokenizer", "scheduler"), torch.float32)
    for name in WITH_WEIGHTS:
        saved = load_file(next((tiny_model / name).glob("*.safetensors")))
        loaded = models[name].state_dict()
        assert all(torch.equal(loaded[key], value) for key, value in saved.items())
        assert {parameter.device.type for parameter in models[name].parameters()} == {"cpu"}
    assert models["tokenizer"]("a").input_ids and models["scheduler"].config.num_train_timesteps == 1000


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_a_model_saved_in_fp16_comes_back_in_fp32(tiny_model, tmp_path, variant):
    """transformers would keep the type of the file, diffusers would not: a model of two types."""
    pipeline = loading.load_pipeline(tiny_model, torch.float16)
    pipeline.save_pretrained(tmp_path, variant=variant)
    saved = load_file(next((tmp_path / "text_encoder").glob("*.safetensors")))
    assert {value.dtype for value in saved.values() if value.is_floating_point()} == {torch.float16}
    for dtype in (torch.float32, torch.bfloat16):
        models = load_models(tmp_path, WITH_WEIGHTS, dtype)
        types = {parameter.dtype for module in models.values() for parameter in module.parameters()}
        assert types == {dtype}


def test_a_variant_that_only_some_parts_have_is_loaded(model):
    """What `cache_model.py --variant fp16` fetches of a repository whose VAE has no fp16 file."""
    whole = loading.load_pipeline(model, torch.float32)
    for name in ("unet", "text_encoder"):
        path = next((model / name).glob("*.safetensors"))
        path.rename(path.with_name(f"{path.stem}.fp16.safetensors"))
    mixed = loading.load_pipeline(model, torch.float32)
    for name in WITH_WEIGHTS:
        for one, other in zip(getattr(whole, name).parameters(), getattr(mixed, name).parameters(), strict=True):
            assert torch.equal(one, other)


def test_a_variant_in_shards_is_loaded(tiny_model, tmp_path):
    pipeline = loading.load_pipeline(tiny_model, torch.float32)
    pipeline.save_pretrained(tmp_path, variant="fp16", max_shard_size="100KB")
    assert len(list((tmp_path / "unet").glob("*.fp16-*-of-*.safetensors"))) > 1
    unet = load_models(tmp_path, ("unet",), torch.float32)["unet"]
    assert all(torch.equal(a, b) for a, b in zip(unet.parameters(), pipeline.unet.parameters(), strict=True))


@pytest.mark.parametrize("part", WITH_WEIGHTS)
def test_a_missing_weight_fails_the_check(model, part):
    key = sorted(load_file(next((model / part).glob("*.safetensors"))))[0]
    change_weights(model, part, lambda tensors: {name: value for name, value in tensors.items() if name != key})
    with pytest.raises(errors.CheckFailed, match=rf"{part}: 1 weights .*{key}"):
        load_models(model, (part,), torch.float32)


@pytest.mark.parametrize("part", WITH_WEIGHTS)
def test_a_misshapen_weight_fails_the_check(model, part):
    tensors = load_file(next((model / part).glob("*.safetensors")))
    key = next(key for key in sorted(tensors) if tensors[key].ndim > 1)
    change_weights(model, part, lambda tensors: tensors.update({key: tensors[key][:-1].contiguous()}))
    with pytest.raises(errors.CheckFailed, match=rf"{part}: 1 weights .*{key}"):
        load_models(model, (part,), torch.float32)


@pytest.mark.parametrize("part", WITH_WEIGHTS)
def test_a_pipeline_with_a_missing_weight_fails_the_check(model, part):
    key = sorted(load_file(next((model / part).glob("*.safetensors"))))[0]
    change_weights(model, part, lambda tensors: {name: value for name, value in tensors.items() if name != key})
    with pytest.raises(errors.CheckFailed, match=key):
        loading.load_pipeline(model, torch.float32)


def test_a_checkpoints_modules_replace_the_models(tiny_model, tmp_path):
    shutil.copytree(tiny_model / "unet", tmp_path / "checkpoint" / "unet")
    change_weights(tmp_path / "checkpoint", "unet", lambda w: {key: value + 1 for key, value in w.items()})
    base = load_models(tiny_model, ("unet", "vae"), torch.float32)
    tuned = load_models(tiny_model, ("unet", "vae"), torch.float32, tmp_path / "checkpoint")
    assert torch.equal(first_parameter(tuned["unet"]), first_parameter(base["unet"]) + 1)
    assert torch.equal(first_parameter(tuned["vae"]), first_parameter(base["vae"]))
    pipeline = loading.load_pipeline(tiny_model, torch.float32, tmp_path / "checkpoint")
    assert torch.equal(first_parameter(pipeline.unet), first_parameter(tuned["unet"]))
    assert torch.equal(first_parameter(pipeline.vae), first_parameter(base["vae"]))


class Payload:
    """A pickle that makes a file when it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    ("part", "name"), [("vae", "diffusion_pytorch_model.bin"), ("text_encoder", "pytorch_model.bin")]
)
def test_code_in_a_pickle_does_not_run(model, tmp_path, part, name):
    from pipelines.model_folder import check_pipeline

    next((model / part).glob("*.safetensors")).unlink()
    (model / part / name).write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(errors.BadInput, match=f"{name}, a pickle"):
        check_pipeline(model)
    with pytest.raises(OSError):
        load_models(model, (part,), torch.float32)
    with pytest.raises(OSError):
        loading.load_pipeline(model, torch.float32)
    assert not (tmp_path / "ran").exists()
    pickle.loads((model / part / name).read_bytes())
    assert (tmp_path / "ran").exists()  # it would have run


# ---------------------------------------------------------------------------------------------------------------------
# draw_images and samplers


def test_images_are_drawn_in_one_batch_from_their_seeds():
    calls = []

    def pipeline(prompts, negative_prompt, generator, **sampler):
        calls.append((prompts, negative_prompt, [g.initial_seed() for g in generator], sampler))
        return SimpleNamespace(images=["first", "second"], nsfw_content_detected=[False, True])

    found = draw_images(pipeline, ["a, b", "c"], [3, 4], negative_prompt="", num_inference_steps=2)
    assert found == (["first", "second"], [False, True])
    draw_images(pipeline, ["a, b"] * 2, [3, 4], negative_prompt="blurred")
    assert calls == [
        (["a, b", "c"], None, [3, 4], {"num_inference_steps": 2}),
        (["a, b"] * 2, ["blurred"] * 2, [3, 4], {}),
    ]
    with pytest.raises(AssertionError, match="2 prompts for 1 images"):
        draw_images(pipeline, ["a", "b"], [3])


def test_dpm_solver_draws_as_diffusers_does_and_gives_the_scheduler_back(tiny_model):
    from diffusers import DPMSolverMultistepScheduler

    pipeline = loading.load_pipeline(tiny_model, torch.float32)
    own = pipeline.scheduler
    sampler = {"num_inference_steps": 3, "guidance_scale": 2.0}
    found = np.asarray(draw_images(pipeline, ["a cat"], [5], sampler="dpm++", **sampler)[0][0])
    assert pipeline.scheduler is own
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(own.config)
    expected = pipeline("a cat", generator=torch.Generator().manual_seed(5), **sampler).images[0]
    assert np.array_equal(found, np.asarray(expected))
    pipeline.scheduler = own
    assert not np.array_equal(found, np.asarray(draw_images(pipeline, ["a cat"], [5], **sampler)[0][0]))


def test_the_scheduler_comes_back_after_an_error():
    from diffusers import DDIMScheduler

    class Pipeline:
        scheduler = own = DDIMScheduler()

        def __call__(self, *arguments, **options):
            assert self.scheduler is not self.own
            raise KeyError("x")

    pipeline = Pipeline()
    with pytest.raises(KeyError):
        draw_images(pipeline, ["a cat"], [5], sampler="dpm++")
    assert pipeline.scheduler is pipeline.own


@pytest.mark.parametrize(
    "output", [SimpleNamespace(images=[1, 2]), SimpleNamespace(images=[1, 2], nsfw_content_detected=None)]
)
def test_without_a_safety_checker_nothing_is_flagged(output):
    assert draw_images(lambda *args, **options: output, ["a"] * 2, [1, 2]) == ([1, 2], [False, False])


@pytest.mark.parametrize(("free", "moved"), [(3000, "cuda"), (2000, "components cuda"), (1000, "leaf_level cuda")])
def test_a_pipeline_that_does_not_fit_into_a_gpu_is_moved_in_parts(free, moved, monkeypatch):
    """Two components of 1,000 bytes, in a stub, as there is no GPU."""
    unet, vae = (torch.nn.Linear(250, 1, bias=False) for _ in range(2))
    pipeline = SimpleNamespace(components={"unet": unet, "vae": vae, "scheduler": None}, said=[])
    pipeline.to = lambda device: pipeline.said.append(device) or pipeline
    pipeline.enable_model_cpu_offload = lambda device: pipeline.said.append(f"components {device}")
    pipeline.enable_group_offload = lambda device, offload_type: pipeline.said.append(f"{offload_type} {device}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 4000))
    assert loading.move_pipeline(pipeline, "cuda") is pipeline and pipeline.said == [moved]
    assert loading.move_pipeline(pipeline, "cpu").said[1:] == ["cpu"]
