"""List, save and seal checkpoints; write and restore the weights and the optimizer state in them.

Under FSDP each worker writes and reads its own share of whole tensors, in the layout of the model Hub's sharded files:
a checkpoint opens under any number of workers, and in Diffusers as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import folders, objects, targets
from common.errors import Away, CheckFailed
from common.messages import say
from common.objects import local_copy
from common.storage import is_remote, split
from common.targets import Held
from pipelines.names import clip_name
from training.parallel import Ema, is_sharded, place_like
from training.workers import Place

if TYPE_CHECKING:
    import torch

CHECKPOINT_NAME = re.compile(r"checkpoint-(\d{6,})")
LATEST = "latest"  # link in the work folder to the newest checkpoint
WEIGHTS = "diffusion_pytorch_model"  # Diffusers' name for the weight files of a module
CLIP_TEXT_MODELS = ("CLIPTextModel", "CLIPTextModelWithProjection")  # in transformers


# ---------------------------------------------------------------------------------------------------------------------
# Saved and found


def checkpoint_path(work_dir: str | Path, step: int) -> str:
    """Return the location of the checkpoint of `step`."""
    return targets.join_name(work_dir, f"checkpoint-{step:06d}")


def local_checkpoint(work_dir: str | Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step` on this node."""
    return local_copy(checkpoint_path(work_dir, step))


def list_checkpoints(work_dir: str | Path) -> list[tuple[int, str]]:
    """Return [(step, location)] of the whole checkpoints in `work_dir`, oldest first; other files are ignored."""
    steps = sorted(int(match[1]) for name in targets.names(work_dir) if (match := CHECKPOINT_NAME.fullmatch(name)))
    found = [(step, checkpoint_path(work_dir, step)) for step in steps]
    return [(step, location) for step, location in found if targets.read_manifest(location) is not None]


def newest_checkpoint(work_dir: str | Path) -> tuple[int, Path | None]:
    """Return (step, folder on this node) of the newest checkpoint whose files all match their sha256, or (0, None)."""
    for step, location in reversed(list_checkpoints(work_dir)):
        if is_remote(location):
            with contextlib.suppress(CheckFailed):  # a download is verified
                return step, local_copy(location)
        elif targets.read_manifest(location, deep=True) is not None:
            return step, Path(location)
        say(f"warning: {location} is damaged: using the checkpoint before it")
    return 0, None


def newest_step(work_dir: str | Path) -> int:
    """Return the step of the newest whole checkpoint; 0 if there is none, or if the store does not answer now."""
    with contextlib.suppress(Away):
        return max((step for step, _ in list_checkpoints(work_dir)), default=0)
    return 0


@dataclass(frozen=True)
class Start:
    """Where a run starts: the newest checkpoint, or step 0.

    folder: of the checkpoint, on rank 0 only, which alone reads it. facts: of its manifest.
    """

    step: int = 0
    folder: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def find_start(work_dir: str | Path, place: Place) -> Start:
    """Return where a run starts. Rank 0 chooses and verifies the checkpoint and tells the others its step.

    A rank that looked for itself could find another one: a network disk shows new files late.
    """
    step, folder = newest_checkpoint(work_dir) if place.rank == 0 else (0, None)
    facts = {"scaler": (folders.read_manifest(folder) or {}).get("scaler")} if folder else {}
    step, facts = place.share((step, facts))
    return Start(step, folder, facts)


def save_checkpoint(
    work_dir: str | Path,
    step: int,
    write: Callable[[Path], None],
    facts: dict[str, Any],
    keep: int,
    rank: int = 0,
    barrier: Callable[[], Any] | None = None,
    executor: Executor | None = None,
    held: Held | None = None,
    gather: Callable[[Any], list] | None = None,
) -> Future | None:
    """Publish checkpoint `step`, point `latest` at it, then delete all but the newest `keep`.

    write(folder): writes the files of the checkpoint. facts: recorded in the manifest, such as the settings.
    rank, barrier: of the workers, if each of them writes a share; then all of them call this. gather(value): for a URI,
    returns the values of all workers, called by the executor. held: the lock of the work folder, for a URI.
    executor: runs all that follows `write` (sha256, sync, rename, upload); its future is returned. Without an executor
    this happens before the call returns.
    """
    target = checkpoint_path(work_dir, step)
    barrier, gather = barrier or (lambda: None), gather or (lambda value: [value])
    with contextlib.ExitStack() as stack:
        if is_remote(work_dir):
            folder = stack.enter_context(targets.staging(target))
            write(folder)
        else:
            folder = _write_together(target, write, rank, barrier, stack)
            if folder is None:
                return None
        staged = stack.pop_all()

    def facts_of_others() -> objects.Facts:
        return {name: fact for share in gather({}) for name, fact in share.items()}

    def seal() -> None:
        with staged:
            if rank:
                objects.upload_folder(folder, target, held.lease() if held else None)
                gather(folders.describe_files(folder))
                return
            targets.publish(folder, target, held, facts_of_others, step=step, **facts)
        _point_to(target, work_dir, held)
        for _, old in list_checkpoints(work_dir)[:-keep]:
            targets.delete(old, held)

    if executor:
        return executor.submit(seal)
    seal()
    return None


def _write_together(
    target: str, write: Callable[[Path], None], rank: int, barrier: Callable[[], Any], stack: contextlib.ExitStack
) -> Path | None:
    """Let each worker write its share to one folder on a disk that all share; return it on rank 0, which seals it."""
    folder = folders.staging_path(target) if rank else None
    if folder:
        barrier()
    else:
        folder = stack.enter_context(folders.staging(target))
        barrier()
    write(folder)
    barrier()
    return None if rank else folder


def _point_to(target: str, work_dir: str | Path, held: Held | None) -> None:
    """Make `latest` name a checkpoint: a link on a disk, an object with the name in a store."""
    if is_remote(work_dir):
        targets.write_text(work_dir, LATEST, split(target)[1] + "\n", held)
        return
    pointer = Path(work_dir) / LATEST
    beside = pointer.with_name(f".{LATEST}.tmp")
    beside.unlink(missing_ok=True)
    beside.symlink_to(Path(target).name)
    os.replace(beside, pointer)


# ---------------------------------------------------------------------------------------------------------------------
# What a checkpoint holds


def named_parameters(modules: dict[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (name, parameter) of the trainable weights of {"unet": module, ...}."""
    for folder, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                yield f"{folder}.{name}", parameter


def write_state(
    folder: str | Path, modules: dict[str, Any], optimizer: torch.optim.Optimizer, place: Place | None = None
) -> None:
    """Write {"unet": module, ...}, of Diffusers or transformers, each to its own folder, and the optimizer state.

    place: of this worker, if FSDP shards the modules; then all workers call this.
    """
    for name, module in modules.items():
        write_module(Path(folder) / name, module, place)
    write_optimizer(folder, modules, optimizer, place)


def write_optimizer(
    folder: str | Path, modules: dict[str, Any], optimizer: torch.optim.Optimizer, place: Place | None = None
) -> None:
    """Write the optimizer state of the trainable weights of {"unet": module, ...}."""
    import torch

    tensors = {}
    for name, parameter in named_parameters(modules):
        for key, value in optimizer.state[parameter].items():
            # An 8-bit optimizer counts steps in a plain number, and its weights share tables of 256 values.
            tensors[f"{name}:{key}"] = value.clone() if key.startswith("qmap") else torch.as_tensor(value)
    write_share(folder, "optimizer", tensors, place)


def write_module(folder: str | Path, module: Any, place: Place | None = None) -> None:
    """Write a module as Diffusers does; if FSDP shards it, write this worker's share: all workers call this.

    The weights of a CLIP text encoder get the names that all releases of transformers read. The configuration does not
    record the folder that the module was loaded from.
    """
    if is_sharded(module):
        assert place is not None, "a sharded module is written by all workers"
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


def clip_text_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of CLIPTextModel or CLIPTextModelWithProjection under the names used before transformers 5.

    transformers 5 drops the prefix `text_model.` from the names of CLIPTextModel and reads both. Older releases
    initialize weights randomly whose names lack it.
    """
    return {clip_name(name): tensor for name, tensor in module.state_dict().items()}


def write_share(folder: str | Path, stem: str, tensors: dict[str, Any], place: Place | None = None) -> None:
    """Write this worker's share of some named tensors: one file per worker, and an index of all.

    Each sharded tensor is gathered and written whole, to one of the files. If no tensor is sharded, there is one file
    and no index.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    if not any(hasattr(tensor, "full_tensor") for tensor in tensors.values()):
        whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}  # no copy of all of them on a GPU
        save_file(whole, folder / f"{stem}.safetensors")
        return
    assert place is not None, "sharded tensors are written by all workers"
    files = [f"{stem}-{rank + 1:05d}-of-{place.world_size:05d}.safetensors" for rank in range(place.world_size)]
    share: dict[str, torch.Tensor] = {}
    index, sizes = {}, dict.fromkeys(files, 0)
    for name, tensor in tensors.items():
        file = min(sizes, key=lambda name: sizes[name])  # all workers choose the same
        sizes[file] += tensor.nbytes
        index[name] = file
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if file == files[place.rank]:
            share[name] = whole.cpu().contiguous()
    save_file(share, folder / files[place.rank], metadata={"format": "pt"})
    if place.rank == 0:
        facts = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")


def read_shares(folder: str | Path | None, stem: str, place: Place | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of the files of all workers, one after another; rank 0 reads and sends them.

    folder: None on the other ranks. place: of this worker, None if there is one only.
    """
    from safetensors import safe_open

    share: Callable[[Any], Any] = place.share if place else lambda value: value
    with contextlib.ExitStack() as stack:
        paths = sorted(Path(folder).glob(f"{stem}*.safetensors")) if folder else []
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        names = [(i, name) for i, file in enumerate(files) for name in file.keys()]  # noqa: SIM118
        for i, name in share(names):
            tensor: Any = files[i].get_tensor(name) if folder else None
            yield name, place.share_tensor(tensor) if place else tensor


def restore_optimizer(
    folder: str | Path | None,
    modules: dict[str, torch.nn.Module],
    optimizer: torch.optim.Optimizer,
    place: Place | None = None,
) -> None:
    """Restore the optimizer state of a checkpoint, which any number of workers may have written."""
    parameters = dict(named_parameters(modules))
    state: dict[Any, dict[str, Any]] = {parameter: {} for parameter in parameters.values()}
    for full_name, tensor in read_shares(folder, "optimizer", place):
        name, _, key = full_name.rpartition(":")
        if name in parameters:
            state[parameters[name]][key] = place_like(tensor, parameters[name])
    for name, parameter in parameters.items():
        if not state[parameter]:
            raise CheckFailed(f"{folder}/optimizer.safetensors has no state of {name}: delete this checkpoint")
        if not state[parameter]["step"].is_floating_point():  # of an 8-bit optimizer
            state[parameter]["step"] = state[parameter]["step"].item()
    optimizer.state.update(state)


def restore_averages(folder: str | Path | None, module: torch.nn.Module, ema: Ema, place: Place | None = None) -> None:
    """Restore the exponential moving average of a module from a checkpoint."""
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    parameters = dict(zip(names, ema.parameters, strict=True))
    found = {
        name: place_like(tensor, parameters[name])
        for name, tensor in read_shares(folder, WEIGHTS, place)
        if name in parameters
    }
    ema.averages = [found[name] for name in names]
