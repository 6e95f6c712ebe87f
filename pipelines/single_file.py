"""A whole model in one file with the names of Stable Diffusion's original code, written and read.

AUTOMATIC1111, ComfyUI and kohya's scripts read and write such files; see `names` for the names.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING

from common import folders
from common.errors import BadInput, CheckFailed
from common.messages import say
from pipelines import loading, lora
from pipelines.configs import components, read_config, read_index
from pipelines.families import find_family
from pipelines.model_folder import LORA_FILE, component_files, copy_component
from pipelines.names import clip_name, original_names, plain_name

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

IMPLEMENTATION = "https://github.com/Stability-AI/generative-models"
WEIGHTS = {"diffusers": "diffusion_pytorch_model.safetensors", "transformers": "model.safetensors"}  # by library
# Weights of original files that Diffusers' models do without: the last layer of SD 2's encoder, which is not read, ...
UNUSED = re.compile(
    r"cond_stage_model\.model\.(text_projection|transformer\.resblocks\.23\..*)|first_stage_model\.(loss|model_ema)\..*"
    r"|.*\.(logit_scale|position_ids|attn_mask)"
)
V_PREDICTION = "v_pred"  # an empty tensor: ComfyUI and AUTOMATIC1111 take other SDXL files for models of epsilon
ZERO_SNR = "ztsnr"  # the same for a schedule that ends in pure noise


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def _by_key(names: Iterable[str], rename: Callable[[str], str]) -> dict[str, list[str]]:
    """Return {name in the file: the weights in it}: one, or q, k and v of an attention in this order."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(rename(plain_name(name)), []).append(name)
    return {key: sorted(each, key=lambda name: "qkv".find(name.split(".")[-2][0])) for key, each in found.items()}


def pack(tensors: Mapping[str, torch.Tensor], rename: Callable[[str], str]) -> Tensors:
    """Return a component's weights as they are in the file; rename: of `original_names`.

    OpenCLIP stacks q, k and v and multiplies by its projection from the right; the VAE's attention has 1x1
    convolutions.
    """
    import torch

    packed = {}
    for key, names in _by_key(tensors, rename).items():
        tensor = torch.cat([tensors[name] for name in names]) if len(names) > 1 else tensors[names[0]]
        if key.endswith(".text_projection"):
            tensor = tensor.T
        elif ".mid.attn_1." in key and tensor.ndim == 2:
            tensor = tensor[:, :, None, None]
        packed[key] = tensor.contiguous()
    return packed


def unpack(
    file: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], rename: Callable[[str], str]
) -> Tensors:
    """Return the weights of a component, {name: shape}, from its weights in a file: the reverse of `pack`.

    Raises BadInput if a weight has another shape; sides of length 1 may differ.
    """
    found = {}
    for key, names in _by_key(shapes, rename).items():
        tensor = file[key].T if key.endswith(".text_projection") else file[key]
        for name, part in zip(names, tensor.chunk(len(names)), strict=True):
            if [size for size in part.shape if size > 1] != [size for size in shapes[name] if size > 1]:
                sizes = ["x".join(map(str, shape)) for shape in (part.shape, shapes[name])]
                raise BadInput(f"{key} has the size {sizes[0]}, which does not fit a weight of {sizes[1]}")
            found[name] = part.reshape(shapes[name]).contiguous()
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Write


def cast(tensors: Mapping[str, torch.Tensor], save_dtype: str) -> Tensors:
    """Return weights in the data type of --save_dtype, single numbers as they are; raise BadInput if one overflows."""
    dtype = loading.storage_dtype(save_dtype)
    stored = {key: tensor.to(dtype) if tensor.ndim else tensor for key, tensor in tensors.items()}
    for key, tensor in stored.items():
        if not tensor.isfinite().all():
            raise BadInput(f"{key} has values that --save_dtype {save_dtype} cannot hold: use bf16 or fp32")
    return stored


def collect(model_dir: str, checkpoint: str | None, loras: Iterable[tuple[str, float]], save_dtype: str) -> Tensors:
    """Return the weights of a model as they are in its file, on the CPU, one component in memory as float32 at a time.

    checkpoint: folder whose components replace the model's, or whose LoRA is fused. loras: of --lora, fused in order.
    Raises BadInput for a family without such a file, or if a weight does not fit the data type.
    """
    import torch

    files, tensors = [(lora.find_file(location), scale) for location, scale in loras], {}
    if checkpoint and Path(checkpoint, LORA_FILE).is_file():
        files.insert(0, (Path(checkpoint, LORA_FILE), 1.0))
    changes = [(lora.read(path, model_dir), scale) for path, scale in files]
    for component, rename in original_names(model_dir).items():
        module = loading.load_models(model_dir, [component], torch.float32, checkpoint)[component]
        for change, scale in changes:
            lora.fuse({component: change.get(component, {})}, {component: module}, scale)
        tensors |= cast(pack(module.state_dict(), rename), save_dtype)
    return tensors | {name: torch.zeros(0) for name in _markers(model_dir)}


def _markers(model_dir: str) -> list[str]:
    """Return the names of empty tensors by which other programs tell what an SDXL model predicts."""
    scheduler, kind = read_config(model_dir, "scheduler"), find_family(model_dir).architecture(model_dir)
    is_v = scheduler["prediction_type"] == "v_prediction"
    if is_v and kind == "stable-diffusion-v1":
        say("warning: other programs take the file for a model of epsilon: set v-prediction there")
    if not is_v or kind != "stable-diffusion-xl-v1-base":
        return []
    return [V_PREDICTION, *([ZERO_SNR] if scheduler.get("rescale_betas_zero_snr") else [])]


def write(tensors: Tensors, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, whole or not at all."""
    from safetensors.torch import save_file

    with folders.replacing(path) as beside:
        save_file(tensors, beside, metadata={"format": "pt", **metadata})
        folders.make_readable(beside)


# ---------------------------------------------------------------------------------------------------------------------
# Read


def is_model(path: Path) -> bool:
    """Return whether a safetensors file is a whole model, not a LoRA."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return any(name.startswith("model.diffusion_model.") for name in file.keys())  # noqa: SIM118


def read(path: Path, model_dir: str, folder: Path) -> None:
    """Write the model in a file to a folder as a Diffusers pipeline; components that the file lacks are the base's.

    model_dir: the base, whose configurations must fit. Weights keep the data types that they have in the file. Raises
    BadInput if the file does not fit, CheckFailed if it is damaged.
    """
    from safetensors import safe_open

    renames = original_names(model_dir)
    models = {component: loading.empty_model(model_dir, component) for component in renames}
    shapes = {
        component: {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        for component, model in models.items()
    }
    keys = {component: _by_key(found, renames[component]).keys() for component, found in shapes.items()}
    shutil.copyfile(Path(model_dir, "model_index.json"), folder / "model_index.json")
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        _check_names(path, model_dir, names, keys)
        for component, (library, _) in components(read_index(model_dir)).items():
            if component not in keys or not names & keys[component]:
                copy_component(Path(model_dir, component), folder / component)
                continue
            tensors = {key: file.get_tensor(key) for key in keys[component]}
            _check_values(path, tensors)
            try:
                found = unpack(tensors, shapes[component], renames[component])
            except BadInput as error:
                raise BadInput(f"{path} is another kind of model than {model_dir}: {error}") from None
            _write_component(Path(model_dir, component), folder / component, library, found)


def _check_names(path: Path, model_dir: str, names: set[str], keys: Mapping[str, Set[str]]) -> None:
    """Raise BadInput unless the weights in a file are those of a model; keys: {component: its weights in the file}."""
    wrong = f"{path} is another kind of model than {model_dir}"
    for component, own in keys.items():
        lacks = own - names
        if lacks == own:
            say(f"{path} has no {component}: that of {model_dir} is used")
        elif lacks:
            raise BadInput(f"{wrong}, or incomplete: {len(lacks)} weights are missing, starting with {min(lacks)}")
    prefixes = tuple(prefix for prefix, _ in find_family(model_dir).original(model_dir).values())
    others = [name for name in names.difference(*keys.values()) if name.startswith(prefixes)]
    others = [name for name in others if not UNUSED.fullmatch(name)]
    if others:
        raise BadInput(f"{wrong}: {len(others)} of its weights have no place there, starting with {min(others)}")
    if V_PREDICTION in names and read_config(model_dir, "scheduler")["prediction_type"] != "v_prediction":
        raise BadInput(f"{path} is a model of v-prediction: pass a --model_dir whose scheduler has it too")


def _check_values(path: Path, tensors: Tensors) -> None:
    import torch

    for key, tensor in tensors.items():
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise BadInput(f"{path}: {key} is of type {tensor.dtype}: use a file of float16, bfloat16 or float32")
        if not tensor.isfinite().all():
            raise CheckFailed(f"{path}: {key} is not finite: fetch the file again")


def _write_component(base: Path, folder: Path, library: str, tensors: Tensors) -> None:
    """Write a component's weights to a new folder, with the configuration of a base."""
    from safetensors.torch import save_file

    folder.mkdir()
    for name, path in component_files(base).items():
        if ".safetensors" not in name:
            shutil.copyfile(path, folder / name)
    if library == "transformers":
        tensors = {clip_name(name): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS[library], metadata={"format": "pt"})
