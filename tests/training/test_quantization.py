"""Quantised linear layers: their numbers, their bytes, and what they keep for the backward pass."""

import weakref

import pytest
import torch
from test_adapters import CPU, load, matrices

from pipelines.families import find_family
from training import checkpoints, quantization

BITS = (8, 4)


def quantised(linear, bits, dtype=torch.float32):
    parent = torch.nn.Sequential(linear)
    quantization.quantize(parent, bits, dtype, CPU)
    return parent[0]


def stored(layer):
    """Return the tensors that a quantised layer consists of, without its bias."""
    state = layer.weight.quant_state if hasattr(layer.weight, "quant_state") else None
    if state is None:
        return [layer.weight.data, layer.weight.SCB]
    return [layer.weight.data, state.absmax, state.state2.absmax]


@pytest.mark.parametrize("bits", BITS)
def test_outputs_gradients_and_bytes(bits):
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 256)
    before = linear.weight.detach().clone()
    inputs = torch.randn(3, 5, 512, requires_grad=True)
    expected = linear(inputs)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), inputs)
    saved = quantization.saved_bytes(torch.nn.Sequential(linear), bits)
    layer = quantised(linear, bits)
    assert sum(tensor.nbytes for tensor in stored(layer)) == 2 * before.numel() - saved
    found = layer(inputs)
    (grad,) = torch.autograd.grad(found.square().sum(), inputs)
    tolerance = {8: 0.02, 4: 0.15}[bits]
    for one, other in ((found, expected), (grad, expected_grad)):
        assert 0 < (one - other).norm() / other.norm() < tolerance
    assert not any(parameter.requires_grad for name, parameter in layer.named_parameters() if name == "weight")


@pytest.mark.parametrize("bits", BITS)
def test_inputs_are_cast_as_autocast_casts_them(bits):
    layer = quantised(torch.nn.Linear(64, 64), bits, torch.bfloat16)
    assert layer(torch.randn(2, 64)).dtype == torch.bfloat16


@pytest.mark.parametrize("bits", BITS)
def test_gradient_checkpointing_frees_what_it_recomputes(bits):
    """bitsandbytes' own layer of 8 bits holds its inputs until the backward pass."""
    layer, held = quantised(torch.nn.Linear(64, 64), bits), []

    def block(inputs):
        hidden = inputs.sin()
        held.append(weakref.ref(hidden))
        return layer(hidden).sin()

    inputs = torch.randn(2, 64, requires_grad=True)
    loss = torch.utils.checkpoint.checkpoint(block, inputs, use_reentrant=False).sum()
    assert held[0]() is None
    loss.backward()
    found = inputs.grad.clone()
    inputs.grad = None
    block(inputs).sum().backward()
    assert torch.equal(found, inputs.grad)


@pytest.mark.parametrize("name", ["sd", "sdxl", "sd3", "flux"])
@pytest.mark.parametrize("bits", BITS)
def test_adapters_over_them(bits, name, tiny_families):
    """They are those over the base as it is: found, in float32, and all that trains."""
    model_dir = tiny_families[name]
    family = find_family(model_dir)
    plain = matrices(load(model_dir, bool(family.trainable))[0])
    found, _ = load(model_dir, bool(family.trainable), dtype=torch.bfloat16, base_bits=bits)
    own = matrices(found)
    assert own.keys() == plain.keys() and all(torch.equal(own[key], plain[key]) for key in own)
    assert all(weight.dtype == torch.float32 for weight in own.values())
    assert len(list(checkpoints.named_parameters(found))) == len(own)
    for component, module in found.items():
        assert all(parameter.dtype != torch.float32 for n, parameter in module.named_parameters() if "lora_" not in n)
        linears = dict(quantization.linear_layers(module))
        assert all("lora_" in n or type(part) is not torch.nn.Linear for n, part in linears.items()), component
