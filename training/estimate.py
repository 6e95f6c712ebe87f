"""How much memory of a GPU a training takes, calculated from the configurations of a model; no weights are loaded.

Counts the weights, gradients and AdamW's averages, the copies that autocast makes, and what a forward pass in bf16
saves for the backward pass, with fused attention. Not counted: norms that autocast computes in float32, buffers of
libraries, CUDA itself, fragmentation.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.images import Size
from pipelines import loading
from pipelines.families import find_family
from pipelines.family import Family
from training import adapters, parallel, quantization
from training.modules import recompute, recomputes
from training.task import ALL_WEIGHTS, Adapters

HALF, SINGLE = 2, 4  # bytes


@contextlib.contextmanager
def _fused_attention() -> Iterator[None]:
    """Replace PyTorch's attention, which on the meta device is not fused and saves a matrix of all pairs of tokens."""
    import torch

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            output = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
            ctx.save_for_backward(query, key, value, output)
            return output

    def attention(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        return Fused.apply(query, key, value)

    functional: Any = torch.nn.functional
    own, functional.scaled_dot_product_attention = functional.scaled_dot_product_attention, attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = own


def saved_bytes(family: Family, model_dir: str | Path, modules: dict[str, Any], rows: int, size: Size) -> int:
    """Return the bytes that a forward pass of `rows` images of `size` saves for the backward pass."""
    import torch

    weights = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in weights:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = (storage.nbytes(), tensor)  # the tensor, so that its address is not used again
        return tensor

    sizes = family.sizes(model_dir)
    cells = [side // sizes.cell for side in reversed(size)]  # h w
    with torch.device("meta"), _fused_attention():
        lengths = {name: family.prompt_length(model_dir, name) for name in family.encoders}
        ids = {name: torch.zeros(rows, length, dtype=torch.long) for name, length in lengths.items()}
        noisy = torch.zeros(rows, sizes.channels, *cells, dtype=torch.bfloat16)
        time = torch.zeros(rows)
        told = family.geometry(size, (0, 0, *size), size)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            said = {name: family.read(name, modules[name], ids[name]) for name in family.encoders}
            condition = family.condition(said) | {name: torch.zeros(rows, len(told[name])) for name in told}
            loss = family.predict(modules[family.denoiser], noisy, time, condition).square().mean()
    del loss
    return sum(size for size, _ in saved.values())


def device_bytes(
    family: Family,
    model_dir: str | Path,
    rows: int,
    size: Size,
    trains_text_encoders: bool,
    is_recomputed: bool,
    settings: Adapters = ALL_WEIGHTS,
    use_8bit_adam: bool = False,
    config: dict[str, Any] | None = None,
) -> dict[str, int]:
    """Return {"weights", "gradients", "adam", "copies", "activations"}: bytes on a GPU that computes in bf16.

    rows, size: of the largest forward pass, in images and pixels. is_recomputed: gradient checkpointing. config: of the
    denoiser, in place of its own.
    """
    loading.set_up_torch("cpu")
    modules = {
        name: loading.empty_model(model_dir, name, config if name == family.denoiser else None).bfloat16().train()
        for name in (family.denoiser, *family.encoders)
    }
    trained = family.trained(trains_text_encoders)
    for name, module in modules.items():
        module.requires_grad_(name in trained and not settings.lora)
        if is_recomputed and name in trained:
            recompute(module)
    base = HALF * sum(parameter.numel() for name in trained for parameter in modules[name].parameters())
    if settings.base_bits:
        base -= sum(quantization.saved_bytes(modules[name], settings.base_bits) for name in trained)
    if settings.lora:
        adapters.add_adapters(family, {name: modules[name] for name in trained}, settings, 0, None)
    learned = sum(each.numel() for name in trained for each in modules[name].parameters() if each.requires_grad)
    activations = saved_bytes(family, model_dir, modules, rows, size)
    return {
        "weights": (base if settings.lora else 0) + SINGLE * learned,
        "gradients": SINGLE * learned,
        "adam": 2 * (1 if use_8bit_adam else SINGLE) * learned,
        "copies": HALF * learned,  # by autocast, in bf16
        "activations": activations,
    }


def share_of_worker(parts: dict[str, int], unet: Any, sharding: str, shards: int, accumulated: int) -> dict[str, int]:
    """Return the bytes on the GPU of one worker under FSDP (arXiv 2304.11277, section 3.2), by parallel.shard.

    parts: bytes of all weights, by device_bytes. shards: workers that share each weight. accumulated: bytes of each
    gradient that a worker adds up over the batches of a step, of all weights; 0 for steps of one batch. The copies are
    the weights as they are gathered to compute: two blocks at a time, or all if they are kept for the backward pass.
    """
    total = sum(parameter.numel() for parameter in unet.parameters())
    blocks = [sum(each.numel() for each in block.parameters()) for block in parallel.unet_blocks(unet)]
    two = max(one + other for one, other in itertools.pairwise(blocks))
    gathered = total - sum(blocks) + two if sharding in parallel.RESHARDED else total
    own = {name: -(-size // shards) for name, size in parts.items()}
    own["gradients"] += accumulated * total
    return own | {"copies": HALF * gathered, "activations": parts["activations"]}


def pretraining_bytes(
    args: argparse.Namespace, config: dict[str, Any], workers: int, encodes_captions: bool = False
) -> dict[str, int]:
    """Return the parts of what pretrain.py takes on the GPU of each worker, by its flags; config: of the UNet.

    encodes_captions: whether it holds the text encoders too, of which the weights are counted. Workers are taken to be
    on nodes with as many GPUs as this machine, or on one node if it has none.
    """
    import torch

    family, model_dir, rows = find_family(args.model_dir), args.model_dir, args.batch_size_per_worker
    is_recomputed = recomputes(family, args.gradient_checkpointing, "cuda")
    options = {"use_8bit_adam": args.use_8bit_adam, "config": config}
    parts = device_bytes(family, model_dir, rows, (args.resolution,) * 2, False, is_recomputed, **options)
    if args.ema_decay:
        parts["average"] = parts["weights"]
    if args.strategy == "fsdp" and workers > 1:
        shards = parallel.count_shards(args.fsdp_sharding, workers, min(workers, torch.cuda.device_count() or workers))
        unet = loading.empty_model(model_dir, family.denoiser, config)
        accumulated = (args.gradient_accumulation_steps > 1) * (HALF if args.reduce_dtype == "bf16" else SINGLE)
        parts = share_of_worker(parts, unet, args.fsdp_sharding, shards, accumulated)
    if encodes_captions:
        encoders = (loading.empty_model(model_dir, name) for name in family.encoders)
        parts["text_encoders"] = HALF * sum(encoder.num_parameters() for encoder in encoders)
    return parts
