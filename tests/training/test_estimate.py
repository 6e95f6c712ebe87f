"""The memory that a training is estimated to take, against numbers worked by hand."""

from dataclasses import replace

import pytest
import torch
from test_adapters import load

from pipelines import loading, lora
from pipelines.families import find_family
from training.estimate import device_bytes
from training.task import Adapters

NAMES = ["sd", "sdxl", "sd3", "flux"]


def estimate(model_dir, rows=2, trains=False, is_recomputed=False, side=16, **flags):
    return device_bytes(find_family(model_dir), model_dir, rows, (side, side), trains, is_recomputed, **flags)


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_those_of_the_files(name, tiny_families):
    """All weights: 4 bytes each, gradients as many, two averages; a LoRA: 2 bytes of the base, 4 of its own."""
    family, folder = find_family(tiny_families[name]), tiny_families[name]
    count = sum(each.numel() for each in loading.empty_model(folder, family.denoiser).parameters())
    found = estimate(folder)
    assert (found["weights"], found["gradients"], found["adam"], found["copies"]) == (
        4 * count,
        4 * count,
        8 * count,
        2 * count,
    )
    shapes = lora.module_shapes(folder)[family.denoiser]
    names = [
        each
        for each in family.adapted(family.denoiser, shapes, "attention")
        if name != "sd3" or "1.attn.add_q" not in each
    ]
    learned = sum(4 * (shapes[each][0] + shapes[each][1]) for each in names)
    found = estimate(folder, settings=Adapters(lora=4, lora_alpha=4.0))
    assert (found["weights"], found["gradients"], found["adam"]) == (2 * count + 4 * learned, 4 * learned, 8 * learned)


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_in_8_bits_are_those_of_the_modules(name, tiny_families):
    found, settings = load(tiny_families[name], trains=False, dtype=torch.bfloat16, base_bits=8)
    (module,) = found.values()
    parameters = list(module.parameters())
    scales = sum(each.SCB.nbytes for each in parameters if hasattr(each, "SCB"))
    expected = sum(each.nbytes for each in parameters) + scales
    weights = estimate(tiny_families[name], settings=settings)["weights"]
    assert weights == expected < estimate(tiny_families[name], settings=replace(settings, base_bits=None))["weights"]


@pytest.mark.parametrize("name", NAMES)
def test_activations_grow_with_the_rows_and_shrink_when_they_are_recomputed(name, tiny_families):
    one, two = (estimate(tiny_families[name], rows)["activations"] for rows in (2, 4))
    assert two == pytest.approx(2 * one, rel=0.1)
    assert estimate(tiny_families[name], is_recomputed=True)["activations"] < one


def test_attention_is_counted_as_fused(tiny_model):
    """Four times as many tokens: four times the activations, not sixteen times as with a matrix of all pairs."""
    small, large = (estimate(tiny_model, side=side)["activations"] for side in (64, 128))
    assert large == pytest.approx(4 * small, rel=0.1)
