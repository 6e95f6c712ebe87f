"""Load the modules to train from a model or a checkpoint, create new ones, and join them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines import loading
from pipelines.conditions import read_condition
from pipelines.family import Family
from training import quantization
from training.workers import Place

if TYPE_CHECKING:
    import torch


def load_modules(
    family: Family,
    model_dir: str,
    folder: Path | None,
    device: torch.device,
    train_text_encoder: bool,
    gradient_checkpointing: bool | None,
    channels_last: bool,
    dtype: torch.dtype | None = None,
    base_bits: int | None = None,
) -> dict[str, Any]:
    """Return {name: module to train}, from checkpoint `folder` if there is one.

    gradient_checkpointing: None for the family's default. dtype: of the weights, float32 by default. base_bits: of the
    weights of linear layers, if they are to be quantised, and all others frozen.
    """
    import torch

    trained = family.trained(train_text_encoder)
    names = [name for name in (*family.encoders, family.denoiser) if name in trained]
    modules = loading.load_models(model_dir, names, dtype or torch.float32, folder)
    if base_bits:
        for module in modules.values():
            quantization.quantize(module, base_bits, dtype or torch.float32, device)
    modules = {name: module.to(device).train() for name, module in modules.items()}
    if channels_last:
        modules[family.denoiser].to(memory_format=torch.channels_last)
    is_recomputed = recomputes(family, gradient_checkpointing, device.type)
    for name, module in modules.items():
        module.requires_grad_(not base_bits)
        for each in family.unused(name, module):
            module.get_parameter(each).requires_grad_(False)
        if is_recomputed:
            recompute(module)
    return modules


def recomputes(family: Family, gradient_checkpointing: bool | None, device_type: str) -> bool:
    """Return whether activations are recomputed; gradient_checkpointing: of the flag, None for the family's default."""
    return family.recomputes and device_type == "cuda" if gradient_checkpointing is None else gradient_checkpointing


def recompute(module: Any) -> None:
    """Turn on gradient checkpointing in a model of Diffusers or Transformers."""
    (getattr(module, "enable_gradient_checkpointing", None) or module.activation_checkpointing_enable)()


def join_modules(family: Family, modules: Mapping[str, Any]) -> torch.nn.Module:
    """Return one module of the denoiser and the text encoders in training, so that one DDP reducer serves all.

    Its forward takes noisy latents [B, c, h, w], their times [B] and the batch, whose fields of the prompts it reads.
    It returns the prediction [B, c, h, w].
    """
    import torch

    class TextToNoise(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in (family.denoiser, *family.encoders):
                if name in modules:
                    self.add_module(name, modules[name])

        def forward(self, noisy: torch.Tensor, time: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            condition = read_condition(family, batch, self._modules)
            return family.predict(self._modules[family.denoiser], noisy, time, condition)  # B c h w

    return TextToNoise()


def load_unet(
    unet_config: dict[str, Any],
    model_dir: str,
    place: Place,
    folder: Path | None,
    seed: int,
    from_pretrained: bool = False,
    gradient_checkpointing: bool = False,
    channels_last: bool = True,
) -> Any:
    """Return the UNet to train: from checkpoint `folder`, from the model, or new, with random weights from the seed."""
    import torch
    from diffusers import UNet2DConditionModel

    if folder or from_pretrained:
        unet = loading.load_models(model_dir, ("unet",), torch.float32, folder)["unet"]
    else:
        torch.manual_seed(seed)
        unet = UNet2DConditionModel.from_config(unet_config)
    unet.register_to_config(sample_size=unet_config["sample_size"])
    if gradient_checkpointing:
        recompute(unet)
    unet = unet.to(place.device).train()
    return unet.to(memory_format=torch.channels_last) if channels_last else unet
