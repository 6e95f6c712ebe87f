"""The frozen weights under a LoRA in 8 bits (LLM.int8, arXiv 2208.07339) or 4 (NF4, arXiv 2305.14314), by bitsandbytes.

The linear layers of a loaded model are replaced, on a CPU as on a GPU. (`quantization_config` of Diffusers' loading
refuses a CPU.) Nothing quantised is written: a LoRA is saved and published as over any other base.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OUTLIER = 6.0  # inputs beyond it are multiplied in 16 bits (arXiv 2208.07339, section 3.2)
BLOCK, BLOCK_OF_SCALES = 64, 256  # weights with one scale in NF4; scales of 8 bits with one scale of their own


def quantize(module: Any, bits: int, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the linear layers of a module by frozen ones of `bits` bits on `device`, which compute in `dtype`."""
    for name, linear in list(linear_layers(module)):
        layer = _layer_of_8_bits(linear) if bits == 8 else _layer_of_4_bits(linear, dtype)
        layer.weight = layer.weight.to(device)  # quantises
        layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(dtype), *inputs[1:]))  # as autocast casts them
        module.set_submodule(name, layer)
    setattr(module, f"is_loaded_in_{bits}bit", True)  # by which peft chooses the class of the adapters


def linear_layers(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    """Yield (name, layer) of the linear layers of a module, which are what is quantised."""
    import torch

    return ((name, part) for name, part in module.named_modules() if isinstance(part, torch.nn.Linear))


def saved_bytes(module: torch.nn.Module, bits: int) -> int:
    """Return the bytes that `quantize` saves of a module whose weights have 16 bits."""
    saved = 0
    for _, linear in linear_layers(module):
        count = linear.weight.numel()
        scales = 4 * linear.out_features if bits == 8 else count / BLOCK + 4 * count / BLOCK / BLOCK_OF_SCALES
        saved += int(count * (2 - bits / 8) - scales)
    return saved


@functools.cache
def _class_of_8_bits() -> Any:
    """Return a layer that keeps nothing of its inputs for the backward pass, which needs the frozen weight alone.

    bitsandbytes keeps the inputs of its own layer where gradient checkpointing cannot free them.
    """
    import bitsandbytes
    import torch

    class Frozen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: torch.Tensor, layer: Any) -> torch.Tensor:
            ctx.layer = layer
            return bitsandbytes.nn.Linear8bitLt.forward(layer, inputs)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
            (grad_output,), state = grad_outputs, ctx.layer.state
            weight = bitsandbytes.functional.int8_vectorwise_dequant(state.CB, state.SCB)
            return grad_output @ weight.to(grad_output.dtype), None

    class Layer(bitsandbytes.nn.Linear8bitLt):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Frozen.apply(x, self)

    return Layer


def _layer_of_8_bits(linear: torch.nn.Linear) -> Any:
    import bitsandbytes

    sizes = linear.in_features, linear.out_features
    layer = _class_of_8_bits()(*sizes, has_fp16_weights=False, threshold=OUTLIER, device="meta")
    layer.weight = bitsandbytes.nn.Int8Params(linear.weight.data, requires_grad=False)
    layer.bias = linear.bias
    return layer


def _layer_of_4_bits(linear: torch.nn.Linear, dtype: torch.dtype) -> Any:
    import bitsandbytes

    sizes = linear.in_features, linear.out_features
    layer = bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=dtype, quant_type="nf4", device="meta")
    layer.weight = bitsandbytes.nn.Params4bit(linear.weight.data, quant_type="nf4")
    layer.bias = linear.bias
    layer.support_avx512bf16_for_cpu = False  # else drawing repacks the weights, which then train no more
    return layer
