"""The weights of a training over its workers: DDP, FSDP, and their exponential moving average."""

import contextlib
import itertools

SHARDINGS = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")


def wrap(module, place, strategy="ddp", sharding="FULL_SHARD", dtype=None, reduce_dtype="fp32"):
    """Return what is called to train `module` on all workers; FSDP shards it in place. One worker needs neither.

    dtype: in which FSDP gathers weights and computes; it averages gradients in float32.
    reduce_dtype: in which DDP averages them, `fp32` or `bf16`.
    """
    import torch

    if place.world_size == 1:
        return module
    if strategy == "ddp":
        options = {"gradient_as_bucket_view": True, "forward_sync_buffers": False}  # the buffers are constants
        model = torch.nn.parallel.DistributedDataParallel(module, **options)
        if reduce_dtype == "bf16":
            model.register_comm_hook(None, reduce_in_bf16)
        return model
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {
        "mesh": make_mesh(place, sharding),
        "reshard_after_forward": sharding in ("FULL_SHARD", "HYBRID_SHARD"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    }
    blocks = [*module.down_blocks, module.mid_block, *module.up_blocks]
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(module, **options)
    for block, following in itertools.pairwise(blocks):  # gather the next block's weights meanwhile
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    return module


def reduce_in_bf16(group, bucket):
    """Average a bucket of gradients in bfloat16: half the bytes on the wire, 8 bits of precision."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return bf16_compress_hook(group, bucket)


def make_mesh(place, sharding):
    """Return the device mesh of a sharding: weights are split along its last dimension, repeated along the first."""
    from torch.distributed.device_mesh import init_device_mesh

    shards = {"NO_SHARD": 1, "HYBRID_SHARD": place.local_world_size}.get(sharding)
    if shards is None:
        return init_device_mesh(place.device.type, (place.world_size,))
    shape = (place.world_size // shards, shards)
    return init_device_mesh(place.device.type, shape, mesh_dim_names=("replicate", "shard"))


@contextlib.contextmanager
def no_sync(model):
    """Keep gradients on each worker: those of a step are averaged with its last batch."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        with model.no_sync():
            yield


def is_sharded(module):
    """Return whether the weights are spread over the workers by FSDP."""
    return hasattr(next(module.parameters()), "device_mesh")


def reshard(module):
    """Let go of the whole weights that FSDP may keep after a forward pass, until a backward pass that does not come."""
    for part in module.modules():
        if hasattr(part, "reshard"):
            part.reshard()


def local(tensors):
    """Return this worker's part of each tensor: memory of the tensors themselves."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def place_like(tensor, parameter):
    """Return a whole tensor as this worker holds `parameter`: the same part, device and memory layout.

    One of another shape, say a count of steps, is on the same device.
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
    """The exponential moving average of some parameters (arXiv 2006.11239, section 4), in their own parts and type.

    Step n averages with min(decay, (1 + n) / (10 + n)), so that the first weights are soon forgotten.
    """

    def __init__(self, parameters, decay):
        self.parameters, self.decay = list(parameters), decay
        self.averages = [parameter.detach().clone() for parameter in self.parameters]

    def update(self, step):
        """Take in the weights after `step` steps."""
        import torch

        decay = min(self.decay, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(local(self.averages), local(self.parameters), 1 - decay)

    @contextlib.contextmanager
    def in_place(self):
        """Let the model hold the averages for a while."""
        import torch

        kept = [tensor.clone() for tensor in local(self.parameters)]
        with torch.no_grad():
            torch._foreach_copy_(local(self.parameters), local(self.averages))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(local(self.parameters), kept)
