"""LoRA (arXiv 2106.09685): a low-rank change of a model's weights, in files that other programs read too.

In memory a LoRA is {component: {module: (down, up)}}: the weight W of the module becomes W + scale * up @ down. What a
file says of alpha and rank is in `up` already. Modules of text encoders are named without the prefix `text_model.`,
which transformers 5 drops from some of them; files have it, as ComfyUI and AUTOMATIC1111 know no other name.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import folders
from common.errors import BadInput, CheckFailed, TryAgain
from common.messages import say
from common.objects import local_copy
from common.storage import absolute
from pipelines.configs import components, read_config, read_index
from pipelines.families import family_of, find_family
from pipelines.model_folder import LORA_FILE, digest_model, read_shapes
from pipelines.names import file_name, has_original_names, plain_name, unet_name

if TYPE_CHECKING:
    import torch

    Lora = dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]

FACTS = "lora_adapter_metadata"  # in the file's metadata: rank and alpha of each component, as JSON, by Diffusers
BASE = "base_sha256"  # in the file's metadata: digest of the model that was trained
WEIGHT = ".weight"  # end of the name of a module's weight
PARTS = {  # ends of names in files: of peft and Diffusers, older Diffusers, kohya
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora.down.weight": "down",
    ".lora.up.weight": "up",
    ".lora_linear_layer.down.weight": "down",
    ".lora_linear_layer.up.weight": "up",
    ".lora_down.weight": "down",
    ".lora_up.weight": "up",
    ".alpha": "alpha",
}


# ---------------------------------------------------------------------------------------------------------------------
# The flag


def add_lora_flag(group: argparse._ArgumentGroup, use: str = "draw with") -> None:
    """Add --lora to a script; use: what it does with LoRAs."""
    lora = f"LoRA to {use}: folder that train.py --lora wrote, its URI, or a .safetensors file; may be repeated"
    group.add_argument("--lora", type=parse_flag, action="append", default=[], metavar="LORA[:SCALE]", help=lora)


def parse_flag(text: str) -> tuple[str, float]:
    """Return (location, scale) of LORA[:SCALE]; the scale is 1 if it is not given."""
    location, colon, scale = text.rpartition(":")
    try:
        value = float(scale)
    except ValueError:
        return text, 1.0
    if not colon or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form FOLDER_OR_FILE:SCALE with a finite scale")
    return location, value


def describe(flag: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    """Return the LoRAs of --lora as entries of a model: "location", "scale", and "sha256" of the file."""
    return [
        {"location": absolute(location), "scale": scale, "sha256": folders.sha256_file(find_file(location))}
        for location, scale in flag
    ]


def find_file(location: str) -> Path:
    """Return the file of a LoRA on this node's disk; raise BadInput if there is none, or none of safetensors."""
    place = local_copy(location)
    if place.is_dir():
        found = [place / LORA_FILE] if (place / LORA_FILE).is_file() else sorted(place.glob("*.safetensors"))
        if len(found) != 1:
            many = f"{len(found)} .safetensors files" if found else f"no {LORA_FILE}"
            raise BadInput(f"--lora {location} has {many}: pass the output of train.py --lora, or one file")
        return found[0]
    if not place.is_file():
        raise BadInput(f"--lora {location} does not exist: pass the output of train.py --lora, or a .safetensors file")
    if place.suffix != ".safetensors":
        raise BadInput(f"--lora {location} is not a .safetensors file; others may be pickles, which can run code")
    return place


def check(loras: Iterable[Mapping[str, Any]], model_dir: str | Path) -> None:
    """Raise BadInput or CheckFailed unless each LoRA fits a model; warn of one that was trained on another model."""
    bases = {}
    for each in loras:
        path = find_file(each["location"])
        read(path, model_dir)
        bases[each["location"]] = _read_metadata(path).get(BASE)
    digest = digest_model(model_dir) if any(bases.values()) else None
    for location, base in bases.items():
        if base and base != digest:
            say(f"warning: --lora {location} was trained on another model than {model_dir}")


def fuse_all(loras: Iterable[Mapping[str, Any]], model_dir: str | Path, pipeline: Any) -> None:
    """Fuse the LoRAs of a model's entry with its pipeline, on a worker; raise TryAgain if a file was replaced."""
    for each in loras:
        path = find_file(each["location"])
        if folders.sha256_file(path) != each["sha256"]:
            raise TryAgain(f"--lora {each['location']} was replaced while this run uses it: run the same command again")
        fuse(read(path, model_dir), pipeline.components, each["scale"])


# ---------------------------------------------------------------------------------------------------------------------
# Names


def module_shapes(model_dir: str | Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return {component: {module: shape of its weight}} of a model folder, from the headers of its files."""
    shapes = {component: read_shapes(Path(model_dir, component)) for component in components(read_index(model_dir))}
    return {
        component: {plain_name(name[: -len(WEIGHT)]): shape for name, shape in own.items() if name.endswith(WEIGHT)}
        for component, own in shapes.items()
        if own
    }


def _owners(model_dir: str | Path, shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> dict[str, tuple[str, str]]:
    """Return {name in a file, without its end: (component, module)}, in all spellings that programs use."""
    family = family_of(model_dir)
    unet = read_config(model_dir, "unet") if "unet" in shapes else {}
    has_originals, owners = bool(unet) and has_original_names(unet), {}
    for component, modules in shapes.items():
        prefix = family.webui.get(component) if family else None
        for module in modules:
            name = file_name(component, module)
            spellings = [f"{component}.{each}" for each in (module, name)]
            if prefix:
                original = [unet_name(module, unet)] if component == "unet" and has_originals else []
                spellings += [f"{prefix}_{each.replace('.', '_')}" for each in (name, *original)]
            owners |= dict.fromkeys(spellings, (component, module))
    return owners


# ---------------------------------------------------------------------------------------------------------------------
# Files


def read(path: Path, model_dir: str | Path) -> Lora:
    """Return the LoRA in a file, checked against the headers of a model: float32, alpha / rank in `up`.

    Raises BadInput for a file that is no LoRA of such a model, CheckFailed for a damaged one.
    """
    tensors = _read_tensors(path)
    shapes = module_shapes(model_dir)
    owners, found, unknown = _owners(model_dir, shapes), {}, []
    for key, tensor in tensors.items():
        end = next((each for each in PARTS if key.endswith(each)), None)
        if end is None:
            raise BadInput(f"{path} holds {key}, which is no weight of a LoRA (DoRA and LyCORIS are not supported)")
        owner = owners.get(key.removesuffix(end))
        if owner is None:
            unknown.append(key)
        else:
            found.setdefault(owner, {})[PARTS[end]] = tensor
    if unknown or not found:
        first = f", starting with {min(unknown)}" if unknown else ""
        lacks = f"{len(unknown)} of its {len(tensors)} weights have no place there{first}"
        raise BadInput(f"{path} is a LoRA of another kind of model than {model_dir}: {lacks}")
    facts, lora = _read_facts(path), {}
    for (component, module), parts in sorted(found.items()):
        where = f"{path}: the LoRA of {component}.{module}"
        _check_pair(where, parts, shapes[component][module])
        down, up = parts["down"].float(), parts["up"].float()
        lora.setdefault(component, {})[module] = down, up * _scale(parts, facts, component, module)
    return lora


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckFailed(f"{path} is damaged ({error}): fetch or create it again") from None


def _read_metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return file.metadata() or {}


def _read_facts(path: Path) -> dict[str, Any]:
    """Return rank and alpha of each component, {"unet.lora_alpha": 4}; raise CheckFailed if they are no numbers."""
    try:
        facts = json.loads(_read_metadata(path).get(FACTS, "{}"))
        patterns = [value or {} for name, value in facts.items() if name.endswith(".alpha_pattern")]
        alphas = [value for name, value in facts.items() if name.endswith(".lora_alpha")]
        alphas += [alpha for each in patterns for alpha in each.values()]
        if all(math.isfinite(alpha) for alpha in alphas):
            return facts
    except (ValueError, TypeError, AttributeError):
        pass
    raise CheckFailed(f"{path} has damaged metadata ({FACTS}): fetch or create the file again")


def _check_pair(where: str, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> None:
    missing = [name for name in ("down", "up") if name not in parts]
    if missing:
        raise BadInput(f"{where} lacks its {missing[0]} weight: fetch or create the file again")
    down, up = parts["down"], parts["up"]
    rank = len(down) if down.ndim > 1 else 0
    sizes = rank * math.prod(shape[1:]), shape[0] * rank
    if not rank or (down.numel(), up.numel()) != sizes or up.shape[:1] != shape[:1]:
        found = " and ".join("x".join(map(str, each.shape)) for each in (down, up))
        raise BadInput(f"{where} has the sizes {found}, which do not fit a weight of {'x'.join(map(str, shape))}")
    if not (down.is_floating_point() and up.is_floating_point()):
        raise BadInput(f"{where} is of type {down.dtype}: use a file of float16, bfloat16 or float32")
    if "alpha" in parts and parts["alpha"].numel() != 1:
        raise BadInput(f"{where} has an alpha of {parts['alpha'].numel()} numbers: fetch or create the file again")
    if not all(bool(part.float().isfinite().all()) for part in parts.values()):
        raise CheckFailed(f"{where} is not finite: fetch or create the file again")


def _scale(parts: Mapping[str, torch.Tensor], facts: Mapping[str, Any], component: str, module: str) -> float:
    """Return alpha / rank (arXiv 2106.09685, section 4.1), or alpha / sqrt(rank) (arXiv 2312.03732); 1 if unknown."""
    rank = len(parts["down"])
    if "alpha" in parts:
        return float(parts["alpha"]) / rank
    start = f"{component}."
    own = {name.removeprefix(start): value for name, value in facts.items() if name.startswith(start)}
    alpha = own.get("lora_alpha", rank)
    for name, value in (own.get("alpha_pattern") or {}).items():
        if f".{file_name(component, module)}".endswith(f".{name.strip('^$')}"):
            alpha = value
    return alpha / math.sqrt(rank) if own.get("use_rslora") else alpha / rank


def diffusers_tensors(lora: Lora) -> dict[str, torch.Tensor]:
    """Return the tensors of a LoRA under the names that Diffusers, and for SD 3 and FLUX also ComfyUI, read."""
    return {
        f"{component}.{file_name(component, module)}.lora_{part}.weight": tensor
        for component, modules in lora.items()
        for module, pair in modules.items()
        for part, tensor in zip("AB", pair, strict=True)
    }


def webui_metadata(model_dir: str | Path, title: str, rank: int) -> dict[str, str]:
    """Return the metadata of a LoRA file for other programs; rank: the largest of its modules."""
    family = find_family(model_dir)
    facts = {"ss_network_dim": str(rank), "ss_network_alpha": str(rank), "ss_output_name": title}
    spec = family.model_spec(model_dir, title) | {"modelspec.implementation": "diffusers"}
    spec["modelspec.architecture"] += "/lora"
    return facts | spec | family.webui_facts(model_dir)


def webui_tensors(lora: Lora, prefixes: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a LoRA under the names that ComfyUI, AUTOMATIC1111 and kohya's scripts read.

    prefixes: {component: prefix}, of a family. alpha is the rank, as `up` is scaled already.
    """
    import torch

    tensors = {}
    for component, modules in lora.items():
        for module, (down, up) in modules.items():
            name = f"{prefixes[component]}_{file_name(component, module).replace('.', '_')}"
            tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
            tensors[f"{name}.alpha"] = torch.tensor(float(len(down)))
    return tensors


# ---------------------------------------------------------------------------------------------------------------------
# Use


def fuse(lora: Lora, parts: Mapping[str, Any], scale: float = 1.0) -> None:
    """Add a LoRA to the weights of a model's components; computed in float32, stored in their own type."""
    import torch

    with torch.no_grad():
        for component, modules in lora.items():
            found = {plain_name(name): module for name, module in parts[component].named_modules()}
            for name, (down, up) in modules.items():
                weight = found[name].weight
                change = up.flatten(1).to(weight.device) @ down.flatten(1).to(weight.device)
                weight.copy_(weight.float() + scale * change.reshape(weight.shape))
