"""How workers share the weights of a training: DDP, FSDP, and the exponential moving average of the weights."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from training.workers import Place

if TYPE_CHECKING:
    import torch

SHARDINGS = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")
RESHARDED = ("FULL_SHARD", "HYBRID_SHARD")  # gathered weights are freed after each use


def wrap(
    module: Any,
    place: Place,
    strategy: str = "ddp",
    sharding: str = "FULL_SHARD",
    dtype: torch.dtype | None = None,
    reduce_dtype: str = "fp32",
) -> Any:
    """Return the callable that trains `module` on all workers: the module itself if there is one worker.

    dtype: data type in which FSDP gathers weights and computes. reduce_dtype: data type in which gradients are
    averaged, `fp32` or `bf16`; FSDP also adds up those of the batches of a step in it.
    """
    import torch

    if place.world_size == 1:
        return module
    if strategy == "fsdp":
        copy_from_first(module)
        shard(module, place, sharding, dtype, torch.bfloat16 if reduce_dtype == "bf16" else torch.float32)
        return module
    options = {"gradient_as_bucket_view": True, "forward_sync_buffers": False}  # the buffers are constants
    model = torch.nn.parallel.DistributedDataParallel(module, **options)
    if reduce_dtype == "bf16":
        model.register_comm_hook(None, reduce_in_bf16)
    return model


def copy_from_first(module: Any) -> None:
    """Give every worker the weights of rank 0, which alone reads a checkpoint; DDP does so by itself."""
    import torch
    import torch.distributed as dist

    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor, src=0)


def shard(module: Any, place: Place, sharding: str, dtype: torch.dtype | None, reduce_dtype: torch.dtype) -> None:
    """Shard the weights of a UNet in place with FSDP, block by block; dtype: of gathered weights and of computing."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {
        "mesh": make_mesh(place, sharding),
        "reshard_after_forward": sharding in RESHARDED,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype),
    }
    blocks = unet_blocks(module)
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(module, **options)
    for block, following in itertools.pairwise(blocks):  # gather the weights of the next block meanwhile
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def reduce_in_bf16(group, bucket):  # without annotations: DDP would compare them with types of its own
    """Average a bucket of gradients in bfloat16: half the bytes to send, 8 bits of precision."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return bf16_compress_hook(group, bucket)


def unet_blocks(unet: Any) -> list[Any]:
    """Return the parts of a UNet that FSDP gathers one after another, in the order of the forward pass."""
    return [*unet.down_blocks, unet.mid_block, *unet.up_blocks]


def compile_modules(modules: Mapping[str, Any]) -> None:
    """Compile {"unet": module, ...} in place with torch.compile; of a UNet each block, between which FSDP gathers.

    As one graph a UNet has gradients of zero in its inner blocks (PyTorch 2.13 on a CPU), with the losses of the first
    step as they should be.
    """
    for name, module in modules.items():
        for part in unet_blocks(module) if name == "unet" else [module]:
            part.compile(dynamic=False)  # blocks share code, and inductor fails on their sizes as symbols


def count_shards(sharding: str, world_size: int, local_world_size: int) -> int:
    """Return over how many workers a sharding spreads each weight."""
    return {"NO_SHARD": 1, "HYBRID_SHARD": local_world_size}.get(sharding, world_size)


def make_mesh(place: Place, sharding: str) -> Any:
    """Return the device mesh of a sharding: weights are split along its last dimension, replicated along its first."""
    from torch.distributed.device_mesh import init_device_mesh

    if sharding in ("FULL_SHARD", "SHARD_GRAD_OP"):
        return init_device_mesh(place.device.type, (place.world_size,))
    shards = count_shards(sharding, place.world_size, place.local_world_size)
    shape = (place.world_size // shards, shards)
    return init_device_mesh(place.device.type, shape, mesh_dim_names=("replicate", "shard"))


@contextlib.contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """Keep the gradients of a batch on each worker; they are averaged with the last batch of the step."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        with model.no_sync():
            yield


def is_sharded(module: torch.nn.Module) -> bool:
    """Return whether FSDP spreads the weights over the workers."""
    return hasattr(next(module.parameters()), "device_mesh")


def reshard(module: torch.nn.Module) -> None:
    """Free the gathered weights that FSDP keeps after a forward pass for a backward pass; here none follows."""
    for part in module.modules():
        if hasattr(part, "reshard"):
            part.reshard()  # type: ignore[operator]


def local(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this worker's part of each tensor, a view of it."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def place_like(tensor: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return a whole tensor the way this worker holds `parameter`: the same part, device and memory layout.

    A tensor of another shape, such as a count of steps, is moved to the same device.
    """
    import torch

    if tensor.shape != parameter.shape:
        return tensor.to(parameter.device, copy=True)
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        tensor = tensor.to(parameter.device)
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)


class Ema:
    """The exponential moving average of parameters (arXiv 2006.11239, section 4), sharded and typed as they are.

    Step n uses min(decay, (1 + n) / (10 + n)), so that the average soon forgets the first weights.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], decay: float) -> None:
        self.parameters, self.decay = list(parameters), decay
        self.averages = [parameter.detach().clone() for parameter in self.parameters]

    def update(self, step: int) -> None:
        """Add the weights after `step` steps to the average."""
        import torch

        decay = min(self.decay, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(local(self.averages), local(self.parameters), 1 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the averages into the model for the duration of a with block."""
        import torch

        kept = [tensor.clone() for tensor in local(self.parameters)]
        with torch.no_grad():
            torch._foreach_copy_(local(self.parameters), local(self.averages))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(local(self.parameters), kept)
