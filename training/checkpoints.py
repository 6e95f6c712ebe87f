"""Checkpoints: which there are, how one is saved and sealed, and the weights and optimizer state that it holds.

Under FSDP each worker writes and reads its own share of whole tensors, in the layout of the model hub's sharded files:
a checkpoint opens under any number of workers, and in Diffusers as it is.
"""

import contextlib
import json
import os
import re
import shutil
from pathlib import Path

from common import folders
from common.errors import CheckFailed
from common.messages import say
from training.parallel import is_sharded, place_like

CHECKPOINT_NAME = re.compile(r"checkpoint-(\d{6,})")
LATEST = "latest"
WEIGHTS = "diffusion_pytorch_model"  # Diffusers' name of a module's files
CLIP_TEXT_MODELS = ("CLIPTextModel", "CLIPTextModelWithProjection")  # classes of transformers


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def checkpoint_path(work_dir, step):
    """Return the folder of the checkpoint of `step`."""
    return Path(work_dir) / f"checkpoint-{step:06d}"


def list_checkpoints(work_dir):
    """Return [(step, folder)] of the whole checkpoints in `work_dir`, oldest first; other files do not matter."""
    found = []
    for path in Path(work_dir).glob("checkpoint-*"):
        match = CHECKPOINT_NAME.fullmatch(path.name)
        if match and folders.read_manifest(path) is not None:
            found.append((int(match[1]), path))
    return sorted(found)


def newest_checkpoint(work_dir):
    """Return (step, folder) of the newest checkpoint whose files all have their sha256, or (0, None)."""
    for step, path in reversed(list_checkpoints(work_dir)):
        if folders.read_manifest(path, deep=True) is not None:
            return step, path
        say(f"warning: {path} is damaged, going back to the checkpoint before it")
    return 0, None


def save_checkpoint(work_dir, step, write, facts, keep, rank=0, barrier=None, executor=None):
    """Publish checkpoint `step`, point `latest` at it, then remove all but the newest `keep`.

    write(folder): writes the checkpoint's files; facts: what the manifest says of the run, say its settings.
    rank, barrier: of the workers where each writes a share, and all of them call this.
    executor: for all that follows `write`: reading the files for their sha256, syncing, renaming; the future of this is
    returned. Without it that is done here.
    """
    target = checkpoint_path(work_dir, step)
    barrier = barrier or (lambda: None)
    if rank:
        barrier()
        write(folders.staging_path(target))
        barrier()
        return None
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(folders.staging(target))
        barrier()
        write(folder)
        barrier()
        staged = stack.pop_all()

    def seal():
        with staged:
            folders.publish(folder, target, step=step, **facts)
        pointer = Path(work_dir) / LATEST
        beside = pointer.with_name(f".{LATEST}.tmp")
        beside.unlink(missing_ok=True)
        beside.symlink_to(target.name)
        os.replace(beside, pointer)
        for _, old in list_checkpoints(work_dir)[:-keep]:
            shutil.rmtree(old)

    return executor.submit(seal) if executor else seal()


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
