"""Adapters: their first weights, which modules get them, what trains, and what a checkpoint holds."""

import pytest
import torch
from safetensors.torch import load_file

from common import errors
from pipelines import loading, lora
from pipelines.conditions import encode_prompts
from pipelines.families import find_family
from pipelines.model_folder import LORA_FILE
from training import adapters, checkpoints, modules
from training.task import Adapters

CPU = torch.device("cpu")


def load(model_dir, trains=True, folder=None, dtype=None, checkpointing=False, **flags):
    """Return the modules of a model with adapters."""
    family = find_family(model_dir)
    options = {"gradient_checkpointing": checkpointing, "channels_last": True, "dtype": dtype}
    options["base_bits"] = flags.get("base_bits")
    found = modules.load_modules(family, str(model_dir), None, CPU, trains, **options)
    settings = Adapters(**{"lora": 4, "lora_alpha": 4.0, **flags})
    adapters.add_adapters(family, found, settings, 0, folder)
    return found, settings


def matrices(found):
    return {key: weight.detach().clone() for key, weight in adapters.named_matrices(found)}


@pytest.mark.parametrize("layers", ["attention", "all"])
@pytest.mark.parametrize("trains", [True, False])
def test_only_the_adapters_train_and_only_where_asked(layers, trains, tiny_model):
    found, _ = load(tiny_model, trains, lora_layers=layers)
    family = find_family(tiny_model)
    names = {name for name, _ in checkpoints.named_parameters(found)}
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
    parts = family.trained(trains)
    assert {name.split(".")[0] for name in names} == set(parts)
    assert any("ff.net" in name for name in names) is (layers == "all")
    assert all("attn" in name for name in names) is (layers == "attention")
    count = sum(parameter.numel() for _, parameter in checkpoints.named_parameters(found))
    assert count == adapters.count_weights(family, tiny_model, parts, 4, layers)


def test_first_weights_are_a_function_of_the_seed(tiny_model):
    """Not of torch's generator, of the data type of the base, or of what trains beside."""
    torch.manual_seed(1)
    one = matrices(load(tiny_model)[0])
    torch.manual_seed(2)
    other = matrices(load(tiny_model, dtype=torch.bfloat16)[0])
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert all(weight.dtype == torch.float32 for weight in other.values())
    down = torch.cat([weight.flatten() for key, weight in one.items() if "lora_A" in key])
    assert down.std().item() == pytest.approx(1 / 4, rel=0.05) and abs(down.mean().item()) < 0.01
    assert all(not weight.any() for key, weight in one.items() if "lora_B" in key)
    assert len({float(weight.flatten()[0]) for key, weight in one.items() if "lora_A" in key}) == len(one) // 2


def test_the_base_is_in_the_type_asked_for_and_frozen(tiny_model):
    found, _ = load(tiny_model, dtype=torch.bfloat16)
    base = [each for module in found.values() for name, each in module.named_parameters() if ".lora_" not in name]
    assert all(each.dtype == torch.bfloat16 and not each.requires_grad for each in base)


def test_training_begins_at_the_base_model(tiny_model):
    found, _ = load(tiny_model)
    plain = loading.load_models(tiny_model, ("unet",), torch.float32)["unet"]
    plain = plain.to(memory_format=torch.channels_last)
    inputs = torch.randn(1, 4, 8, 8), torch.tensor([5]), torch.randn(1, 24, 16)
    with torch.no_grad():
        assert torch.equal(found["unet"](*inputs).sample, plain(*inputs).sample)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_adapter_gets_a_gradient(checkpointing, tiny_model):
    """With gradient checkpointing too, where the embeddings before the first layer are frozen."""
    found, _ = load(tiny_model, checkpointing=checkpointing)
    for _, weight in adapters.named_matrices(found):
        weight.data.normal_(0, 0.1)
    prompt = found["text_encoder"](torch.arange(24)[None])[0]
    found["unet"](torch.randn(1, 4, 8, 8), torch.tensor([5]), prompt).sample.square().sum().backward()
    without = [key for key, weight in adapters.named_matrices(found) if weight.grad is None or not weight.grad.any()]
    assert not without


def test_dropout_is_on_in_training_and_off_in_pictures(tiny_model):
    found, _ = load(tiny_model, lora_dropout=0.5)
    dropouts = [each for each in found["unet"].modules() if isinstance(each, torch.nn.Dropout) and each.p == 0.5]
    assert dropouts and all(each.training for each in dropouts)
    found["unet"].eval()
    assert not any(each.training for each in dropouts)


@pytest.mark.parametrize("rslora", [False, True])
def test_a_checkpoint_holds_them_as_they_are(rslora, tiny_model, tmp_path):
    found, settings = load(tiny_model, lora_alpha=2.0, rslora=rslora)
    for _, weight in adapters.named_matrices(found):
        weight.data.normal_()
    adamw = torch.optim.AdamW([weight for _, weight in checkpoints.named_parameters(found)])
    adapters.write_state(tmp_path, found, adamw, settings, "digest")
    again, _ = load(tiny_model, folder=tmp_path, lora_alpha=2.0, rslora=rslora)
    assert all(torch.equal(*pair) for pair in zip(matrices(found).values(), matrices(again).values(), strict=True))
    key = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_B.weight"
    saved, read = load_file(tmp_path / LORA_FILE), lora.read(tmp_path / LORA_FILE, tiny_model)
    factor = 2.0 / (2.0 if rslora else 4.0)
    assert torch.allclose(read["text_encoder"]["encoder.layers.0.self_attn.q_proj"][1], saved[key] * factor)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        *(("sd", flags) for flags in ({"lora_alpha": 1.0}, {"lora_alpha": 8.0}, {"rslora": True})),
        *((name, {}) for name in ("sd", "sdxl", "sd3", "flux")),
    ],
)
def test_plain_diffusers_predicts_what_the_adapters_in_memory_do(name, flags, tiny_families, one_thread, tmp_path):
    """From a checkpoint, whose metadata has alpha, and from the result, whose weights have it; text encoders too."""
    folder, prompts = tiny_families[name], ["a cat", "a red dog"]
    family = find_family(folder)
    found, settings = load(folder, lora_layers="all", save_dtype="fp32", **flags)
    for _, weight in adapters.named_matrices(found):
        weight.data.normal_(0, 0.2)
    fields = encode_prompts(family, str(folder), prompts, family.trained(True), CPU, torch.float32)
    batch = {key: torch.stack([each[key] for each in fields]) for key in fields[0]}
    batch["time_ids"] = torch.tensor([[20, 40, 0, 5, 16, 16], [16, 16, 0, 0, 16, 16]])
    noisy, time = torch.randn(2, family.sizes(folder).channels, 8, 8), torch.tensor([300, 800])

    def predict(parts):
        with torch.no_grad():
            return modules.join_modules(family, parts).eval()(noisy, time, batch)

    places = tmp_path / "checkpoint", tmp_path / "result"
    for place in places:
        place.mkdir()
    adamw = torch.optim.AdamW([weight for _, weight in checkpoints.named_parameters(found)])
    adapters.write_state(places[0], found, adamw, settings, "digest")
    adapters.write_result(places[0], places[1], "x", settings, str(folder), "digest")
    expected = predict(found)
    for place in places:
        pipeline = loading.load_pipeline(folder, torch.float32)
        parts = {part: getattr(pipeline, part) for part in found}
        assert (predict(parts) - expected).abs().max() > 1e-2
        pipeline.load_lora_weights(place, weight_name=LORA_FILE, use_safetensors=True, local_files_only=True)
        assert (predict(parts) - expected).abs().max() <= 1e-6


def test_a_checkpoint_without_some_of_them_is_refused(tiny_model, tmp_path):
    found, settings = load(tiny_model, trains=False)
    adamw = torch.optim.AdamW([weight for _, weight in checkpoints.named_parameters(found)])
    adapters.write_state(tmp_path, found, adamw, settings, "digest")
    with pytest.raises(errors.CheckFailed, match=r"has no text_encoder\.text_model"):
        load(tiny_model, folder=tmp_path)
