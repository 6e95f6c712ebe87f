"""Captions: encodes them with a model's frozen text encoders, before training or in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines import loading
from pipelines.families import find_family
from pretraining.columns import TEXT

if TYPE_CHECKING:
    import torch


class CaptionEncoder:
    """Encodes captions with the text encoders of a model on this node, `batch_size` of them at a time."""

    def __init__(self, model_dir: str | Path, batch_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.family = find_family(model_dir)
        encoders = loading.load_models(model_dir, self.family.encoders, dtype)
        self.encoders = {name: encoder.to(device) for name, encoder in encoders.items()}
        self.model_dir, self.batch_size, self.device = model_dir, batch_size, device

    def __call__(self, captions: Sequence[str | None]) -> dict[str, torch.Tensor]:
        """Return the fields of captions on the device, {"text_encoder.hidden": [B, L, D] float16, ...}.

        Equal captions are encoded once. None: no caption, see `no_caption`.
        """
        import torch

        unique: list[Any] = sorted({caption for caption in captions if caption is not None})
        fields = self._encode(unique)
        if len(unique) < len(set(captions)):
            for field, value in self.no_caption.items():
                fields.setdefault(field, []).append(value[None])
            unique.append(None)
        number = {caption: number for number, caption in enumerate(unique)}
        rows = [number[caption] for caption in captions]
        return {field: torch.cat(parts)[rows] for field, parts in fields.items()}

    def _encode(self, captions):
        """Return {field: [its values for a batch of captions, ...]}."""
        import torch

        fields: dict[str, list[torch.Tensor]] = {}
        with torch.no_grad():
            for name, ids in self.family.tokenize(self.model_dir, captions).items():
                for start in range(0, len(ids), self.batch_size):
                    batch = ids[start : start + self.batch_size].to(self.device)
                    for key, value in self.family.read(name, self.encoders[name], batch).items():
                        fields.setdefault(f"{name}.{key}", []).append(value.half())
        return fields

    @cached_property
    def no_caption(self) -> dict[str, torch.Tensor]:
        """The fields of no caption, for classifier-free guidance, each of one row, float16, on the device."""
        empty = {field: values[0] for field, values in self([""]).items()}
        return dict(self.family.unconditional(self.model_dir, empty))

    def fill(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch with the fields of its captions in place of their text, if they are text."""
        if TEXT not in batch:
            return batch
        return {name: value for name, value in batch.items() if name != TEXT} | self(batch[TEXT].tolist())


def to_numpy(fields: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return fields as arrays in the memory of this process."""
    return {field: value.cpu().numpy() for field, value in fields.items()}
