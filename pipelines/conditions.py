"""Prompts as fields of a batch, and the denoiser's condition from them.

Of each text encoder a batch has either the ids of its prompts, "ENCODER.ids", which the encoder in training reads at
every step, or what the frozen encoder says of them, "ENCODER.hidden" and "ENCODER.pooled", computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipelines.families import Family

if TYPE_CHECKING:
    import torch


def encode_prompts(
    family: Family, model_dir: str, prompts: Sequence[str], frozen: Mapping[str, Any], device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """Return the fields of each prompt: "ENCODER.ids" [L], or "ENCODER.hidden" [L, D] and "ENCODER.pooled" [P].

    frozen: the text encoders that are not trained, by name.
    """
    import torch

    fields: list[dict[str, torch.Tensor]] = [{} for _ in prompts]
    for name, ids in family.tokenize(model_dir, prompts).items():
        for row, own in zip(ids, fields, strict=True):
            said = {"ids": row[None]}
            if name in frozen:
                with torch.no_grad():
                    said = family.read(name, frozen[name], row[None].to(device))
            own.update({f"{name}.{key}": value[0].cpu() for key, value in said.items()})
    return fields


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
