"""The adapters of a LoRA in training: added to frozen modules, saved in checkpoints, published.

A checkpoint holds them in float32 as they are, under the names and with the metadata of Diffusers, so that it opens
there and with --checkpoint and --lora of run_model.py. The published file has alpha / rank in the second matrix.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import CheckFailed
from pipelines import lora, single_file
from pipelines.families import find_family
from pipelines.family import Family
from pipelines.model_folder import LORA_FILE
from training import checkpoints
from training.task import Adapters
from utils import ADAPTER, row_rng

if TYPE_CHECKING:
    import torch

NAME = "default"  # peft's name of an adapter that has none


def count_weights(family: Family, model_dir: str | Path, trained: tuple[str, ...], rank: int, layers: str) -> int:
    """Return the number of weights of the adapters of a model, from the headers of its files."""
    shapes = lora.module_shapes(model_dir)
    found = (
        shapes[component][name]
        for component in trained
        for name in family.adapted(component, shapes[component], layers)
    )
    return sum(rank * (shape[0] + math.prod(shape[1:])) for shape in found)


def add_adapters(
    family: Family, modules: Mapping[str, Any], settings: Adapters, seed: int, folder: str | Path | None
) -> None:
    """Freeze {name: module} and add adapters, in float32: from checkpoint `folder`, or at their first weights.

    The first matrix is drawn with a standard deviation of 1 / rank, from the seed, the same on any machine; the second
    one is zero, so that training begins at the base model.
    """
    import torch
    from peft import LoraConfig
    from safetensors.torch import load_file

    rank, alpha = settings.lora, settings.lora_alpha
    assert rank and alpha, "no LoRA is asked for"
    for component, module in modules.items():
        unused = set(family.unused(component, module.requires_grad_(False)))
        found = (name for name, _ in module.named_modules() if f"{name}.weight" not in unused)
        names = family.adapted(component, found, settings.lora_layers)
        options: dict[str, Any] = {"lora_dropout": settings.lora_dropout, "use_rslora": settings.rslora}
        options |= {"r": rank, "lora_alpha": alpha, "target_modules": names}
        module.add_adapter(LoraConfig(init_lora_weights=False, **options))
        module.train()
    saved = load_file(Path(folder, LORA_FILE)) if folder else {}
    for number, (key, weight) in enumerate(sorted(named_matrices(modules))):
        first = np.zeros(weight.shape, "float32")
        if key.endswith(".lora_A.weight"):
            first = row_rng(seed, ADAPTER, 0, number).standard_normal(weight.shape, "float32") / np.float32(rank)
        if folder and key not in saved:
            raise CheckFailed(f"{folder}/{LORA_FILE} has no {key}: delete this checkpoint")
        weight.data = saved.get(key, torch.from_numpy(first)).to(weight.device)


def _key(component: str, module: str, part: str) -> str:
    return f"{component}.{lora.file_name(component, lora.plain_name(module))}.lora_{part}.weight"


def named_matrices(modules: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in files, weight) of the matrices of all adapters."""
    for component, module in modules.items():
        for name, layer in module.named_modules():
            if hasattr(layer, "lora_A"):
                yield _key(component, name, "A"), layer.lora_A[NAME].weight
                yield _key(component, name, "B"), layer.lora_B[NAME].weight


def write_state(
    folder: str | Path, modules: dict[str, Any], optimizer: torch.optim.Optimizer, settings: Adapters, base: str
) -> None:
    """Write the adapters of {name: module} and the optimizer state to a checkpoint; base: digest of the model."""
    from safetensors.torch import save_file

    tensors = {key: weight.detach().cpu().contiguous() for key, weight in named_matrices(modules)}
    own = {}
    for component, module in modules.items():
        names = [lora.plain_name(name) for name, layer in module.named_modules() if hasattr(layer, "lora_A")]
        facts = {"r": settings.lora, "lora_alpha": settings.lora_alpha, "use_rslora": settings.rslora}
        own |= {f"{component}.{name}": value for name, value in (facts | {"target_modules": names}).items()}
    metadata = {"format": "pt", lora.FACTS: json.dumps(own, sort_keys=True), lora.BASE: base}
    save_file(tensors, Path(folder, LORA_FILE), metadata=metadata)
    checkpoints.write_optimizer(folder, modules, optimizer)


def write_result(checkpoint: Path, folder: Path, name: str, settings: Adapters, model_dir: str, base: str) -> None:
    """Write the LoRA of a checkpoint to a folder, in the names of Diffusers and, where they differ, of web UIs.

    name: of the file for web UIs, NAME_webui.safetensors. base: digest of the model.
    """
    weights = lora.read(checkpoint / LORA_FILE, model_dir)
    tensors = single_file.cast(lora.diffusers_tensors(weights), settings.save_dtype)
    single_file.write(tensors, folder / LORA_FILE, {lora.BASE: base})
    family = find_family(model_dir)
    if family.webui:
        assert settings.lora, "no LoRA is asked for"
        facts = lora.webui_metadata(model_dir, name, settings.lora)
        tensors = single_file.cast(lora.webui_tensors(weights, family.webui), settings.save_dtype)
        single_file.write(tensors, folder / f"{name}_webui.safetensors", {lora.BASE: base} | facts)
