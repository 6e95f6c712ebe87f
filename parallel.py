"""The weights of a training over its workers: DDP or FSDP, their average over the steps, and what a checkpoint holds.

Under FSDP each worker writes and reads its own share of whole tensors, in the layout of the model hub's sharded files:
a checkpoint opens under any number of workers, and in Diffusers as it is.
"""

import contextlib
import itertools
import json
from pathlib import Path

from cli import CheckFailed

WEIGHTS = "diffusion_pytorch_model"  # Diffusers' name of a module's files
CLIP_TEXT_MODELS = ("CLIPTextModel", "CLIPTextModelWithProjection")  # classes of transformers
SHARDINGS = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")


# ---------------------------------------------------------------------------------------------------------------------
# DDP and FSDP


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


# ---------------------------------------------------------------------------------------------------------------------
# What a checkpoint holds


def named_parameters(modules):
    """Yield (name, parameter) of the trainable weights of {"unet": module, ...}."""
    for folder, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                yield f"{folder}.{name}", parameter


def write_state(folder, modules, optimizer, place=None):
    """Write modules and optimizer, {"unet": module, ...} of Diffusers or Transformers modules, each in its folder.

    place: of this worker, where FSDP shards the modules; all workers call this.
    """
    for name, module in modules.items():
        write_module(Path(folder) / name, module, place)
    import torch

    tensors = {}
    for name, parameter in named_parameters(modules):
        for key, value in optimizer.state[parameter].items():
            # Of an 8-bit optimizer the steps are a plain number, and all weights share their tables of 256 values.
            tensors[f"{name}:{key}"] = value.clone() if key.startswith("qmap") else torch.as_tensor(value)
    write_share(folder, "optimizer", tensors, place)


def write_module(folder, module, place=None):
    """Write a module as Diffusers does; of one that is sharded this worker's share, and all workers call this.

    A text encoder of CLIP is written with the names that all releases of transformers read. The configuration does not
    say where the module was loaded from: a folder of the one who trains.
    """
    if is_sharded(module):
        Path(folder).mkdir(parents=True, exist_ok=True)
        if place.rank == 0:
            module.save_config(folder)
        write_share(folder, WEIGHTS, module.state_dict(), place)
    elif type(module).__name__ in CLIP_TEXT_MODELS:
        module.save_pretrained(folder, state_dict=clip_text_weights(module), save_original_format=False)
    else:
        module.save_pretrained(folder, safe_serialization=True)
    path = Path(folder) / "config.json"
    if (place is None or place.rank == 0) and path.is_file():
        config = json.loads(path.read_text())
        if config.pop("_name_or_path", None):
            path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def clip_text_weights(module):
    """Return the named weights of CLIPTextModel or CLIPTextModelWithProjection as releases before transformers 5 do.

    transformers 5 drops the prefix `text_model.` from those of CLIPTextModel; it reads both, older releases make new
    random weights for names without it.
    """
    return {
        name if name.startswith(("text_model.", "text_projection.")) else f"text_model.{name}": tensor
        for name, tensor in module.state_dict().items()
    }


def write_share(folder, stem, tensors, place=None):
    """Write this worker's share of some named tensors as one file of as many as there are workers, with an index.

    A tensor that is spread over the workers is gathered for it; where none is, there is one file and no index.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    if not any(hasattr(tensor, "full_tensor") for tensor in tensors.values()):
        whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}  # no copy of all on a GPU
        save_file(whole, folder / f"{stem}.safetensors")
        return
    files = [f"{stem}-{rank + 1:05d}-of-{place.world_size:05d}.safetensors" for rank in range(place.world_size)]
    share, index, sizes = {}, {}, dict.fromkeys(files, 0)
    for name, tensor in tensors.items():
        file = min(sizes, key=sizes.get)  # all workers choose the same
        sizes[file] += tensor.nbytes
        index[name] = file
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if file == files[place.rank]:
            share[name] = whole.cpu().contiguous()
    save_file(share, folder / files[place.rank], metadata={"format": "pt"})
    if place.rank == 0:
        facts = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")


def read_shares(folder, stem):
    """Return the named tensors of all workers' files, whole."""
    from safetensors.torch import load_file

    tensors = {}
    for path in sorted(Path(folder).glob(f"{stem}*.safetensors")):
        tensors |= load_file(path)
    return tensors


def restore_optimizer(folder, modules, optimizer):
    """Put the optimizer's state of a checkpoint back, under whatever number of workers wrote it."""
    tensors = read_shares(folder, "optimizer")
    state = {}
    for name, parameter in named_parameters(modules):
        found = {key.rpartition(":")[2]: key for key in tensors if key.rpartition(":")[0] == name}
        if not found:
            raise CheckFailed(f"{folder}/optimizer.safetensors has no state of {name}: remove this checkpoint")
        state[parameter] = {key: place_like(tensors[full], parameter) for key, full in found.items()}
        if not state[parameter]["step"].is_floating_point():  # as an 8-bit optimizer has it
            state[parameter]["step"] = state[parameter]["step"].item()
    optimizer.state.update(state)


def restore_averages(folder, module, ema):
    """Put the averages of a checkpoint's module back."""
    tensors = read_shares(folder, WEIGHTS)
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    ema.averages = [place_like(tensors[name], parameter) for name, parameter in zip(names, ema.parameters, strict=True)]
