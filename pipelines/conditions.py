"""Prompts and crops as fields of a batch, and the denoiser's condition from them.

Of each text encoder a batch has either the ids of its prompts, "ENCODER.ids", which the encoder in training reads at
every step, or what the frozen encoder says of them, "ENCODER.hidden" and "ENCODER.pooled", computed once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from common.images import Crop, Size
from pipelines import loading
from pipelines.family import Family

if TYPE_CHECKING:
    import torch


def encode_prompts(
    family: Family,
    model_dir: str,
    prompts: Sequence[str],
    trained: Collection[str],
    device: torch.device,
    dtype: torch.dtype,
) -> list[dict[str, torch.Tensor]]:
    """Return the fields of each prompt: "ENCODER.ids" [L], or "ENCODER.hidden" [L, D] and "ENCODER.pooled" [P].

    trained: the text encoders that are trained; the others are loaded one after another, and none of them stays.
    dtype: of the weights of the family's large encoders; the others are read in float32.
    """
    import torch

    fields: list[dict[str, torch.Tensor]] = [{} for _ in prompts]
    for name, ids in family.tokenize(model_dir, prompts).items():
        encoder: Any = None
        if name not in trained:
            kind = dtype if name in family.large else torch.float32
            encoder = loading.load_models(model_dir, (name,), kind)[name].to(device).eval()
        for row, own in zip(ids, fields, strict=True):
            said = {"ids": row[None]}
            if encoder is not None:
                with torch.no_grad():
                    said = family.read(name, encoder, row[None].to(device))
            own.update({f"{name}.{key}": value[0].cpu() for key, value in said.items()})
    return fields


def locate(family: Family, crops: Iterable[Crop], size: Size) -> dict[str, np.ndarray]:
    """Return what the denoiser is told of crops that are resized to `size`: "time_ids" [B, 6] int32, or nothing."""
    told = [family.geometry(crop.photo, crop.box, size, crop.is_mirrored) for crop in crops]
    return {name: np.array([each[name] for each in told], np.int32) for name in told[0]}


def read_condition(
    family: Family, batch: Mapping[str, torch.Tensor], encoders: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the denoiser's condition from the fields of a batch, with its "time_ids" if it has them.

    encoders: the text encoders in training, by name.
    """
    said = {}
    for name in family.encoders:
        fields = {key: batch[f"{name}.{key}"] for key in ("ids", "hidden", "pooled") if f"{name}.{key}" in batch}
        said[name] = family.read(name, encoders[name], fields["ids"]) if "ids" in fields else fields
    condition = family.condition(said)
    return condition | {"time_ids": batch["time_ids"]} if "time_ids" in batch else condition
