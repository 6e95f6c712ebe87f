"""Load the modules to train from a model or a checkpoint, create new ones, and join them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines import loading
from training.workers import Place

if TYPE_CHECKING:
    import torch


def load_modules(
    model_dir: str,
    folder: Path | None,
    device: torch.device,
    train_text_encoder: bool,
    gradient_checkpointing: bool,
    channels_last: bool,
) -> tuple[dict[str, Any], Any]:
    """Return (modules to train by name, frozen text encoder or None), from checkpoint `folder` if there is one."""
    import torch

    modules = loading.load_models(model_dir, ("text_encoder", "unet"), torch.float32, folder)
    modules = {name: module.to(device).train() for name, module in modules.items()}
    if channels_last:
        modules["unet"].to(memory_format=torch.channels_last)
    frozen = None if train_text_encoder else modules.pop("text_encoder").eval()
    for module in modules.values():
        module.requires_grad_(True)
        if gradient_checkpointing:
            (getattr(module, "enable_gradient_checkpointing", None) or module.activation_checkpointing_enable)()
    return modules, frozen


def join_modules(text_encoder: Any, unet: Any) -> torch.nn.Module:
    """Return one module of both, so that one DDP reducer serves both; text_encoder: None if it is frozen.

    Its forward takes noisy_latents [B, c, h, w], timesteps [B] and prompt: prompt_ids [B, L], or prompt_embeds
    [B, L, D] if the text encoder is frozen. It returns the prediction [B, c, h, w].
    """
    import torch

    class TextToNoise(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet = unet
            self.text_encoder = text_encoder

        def forward(self, noisy_latents: torch.Tensor, timesteps: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
            hidden_states = prompt if self.text_encoder is None else self.text_encoder(prompt)[0]  # B L D
            return self.unet(noisy_latents, timesteps, hidden_states).sample  # B c h w

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
        unet.enable_gradient_checkpointing()
    unet = unet.to(place.device).train()
    return unet.to(memory_format=torch.channels_last) if channels_last else unet
