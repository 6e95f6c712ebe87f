"""What a family of models is: its parts, defaults, and the methods by which they are trained and drawn with.

`families` has the families, and finds that of a model folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pipelines.configs import model_resolution, pixel_factor, read_config, side_multiple
from pipelines.objectives import Diffusion, Objective
from pipelines.tokens import max_tokens, tokenize

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]

CLIP_LORA = (
    "q_proj",
    "k_proj",
    "v_proj",
    "out_proj",
)  # ends of names of modules that get an adapter


class Sizes(NamedTuple):
    """Pixels per side: that a model was trained on, of which sides are multiples, of a latent cell; latent channels."""

    resolution: int
    multiple: int
    cell: int
    channels: int


class Family:
    """A family of models, with what most of them have in common.

    pipeline: the class in Diffusers. trainable: the text encoders that can be trained. large: those of billions of
    weights. tokens: the length of a prompt where the pipeline limits it, not the tokenizer. lora: {layers: names of the
    denoiser's modules that get an adapter}. webui: {component: prefix of its modules in LoRA files of web UIs}, empty
    where these read the names of Diffusers. trains_whole: whether all weights can be trained, not only a LoRA.
    recomputes: whether activations are recomputed on a GPU (gradient checkpointing) unless a flag says otherwise. lr,
    lora_lr, trains_text_encoders, guidance_scale, num_inference_steps: defaults. is_guided_by_prompt: whether a
    negative prompt has an effect.
    """

    name: str
    pipeline: str
    denoiser: str
    encoders: tuple[str, ...]
    trainable: tuple[str, ...]
    large: tuple[str, ...] = ()
    tokens: ClassVar[dict[str, int]] = {}
    lora: ClassVar[dict[str, tuple[str, ...]]]
    webui: ClassVar[dict[str, str]] = {}
    trains_whole: bool = True
    recomputes: bool = True
    lr: float = 1e-6
    lora_lr: float = 1e-4
    trains_text_encoders: bool = False
    guidance_scale: float
    num_inference_steps: int
    is_guided_by_prompt: bool = True

    def sizes(self, model_dir: str | Path) -> Sizes:
        """Return the sizes of a model, from its configuration."""
        cell = pixel_factor(model_dir)
        channels = read_config(model_dir, "vae")["latent_channels"]
        return Sizes(self._resolution(model_dir), self._multiple(model_dir), cell, channels)

    def _resolution(self, model_dir: str | Path) -> int:
        return model_resolution(model_dir, self.denoiser)

    def _multiple(self, model_dir: str | Path) -> int:
        return side_multiple(model_dir)

    def trained(self, train_text_encoders: bool) -> tuple[str, ...]:
        """Return the components that are trained: the denoiser and, where it is asked for, text encoders."""
        return (self.denoiser, *(self.trainable if train_text_encoders else ()))

    def adapted(self, component: str, modules: Iterable[str], layers: str) -> list[str]:
        """Return the modules of a component that get an adapter, sorted; layers: a key of `lora`."""
        ends = CLIP_LORA if component in self.encoders else self.lora[layers]
        return sorted(name for name in modules if f".{name}".endswith(tuple(f".{end}" for end in ends)))

    def webui_facts(self, model_dir: str | Path) -> dict[str, str]:
        """Return the metadata by which web UIs tell for which kind of model a LoRA file is."""
        return {}

    def model_spec(self, model_dir: str | Path, title: str) -> dict[str, str]:
        """Return the metadata of a file by https://github.com/Stability-AI/ModelSpec, without its implementation."""
        side = self.sizes(model_dir).resolution
        facts = {"title": title, "architecture": self.architecture(model_dir), "resolution": f"{side}x{side}"}
        prediction = read_config(model_dir, "scheduler").get("prediction_type")
        if prediction in ("epsilon", "v_prediction"):
            facts["prediction_type"] = prediction.removesuffix("_prediction")
        return {f"modelspec.{name}": value for name, value in {"sai_model_spec": "1.0.0", **facts}.items()}

    def original(self, model_dir: str | Path) -> dict[str, tuple[str, str]]:
        """Return {component: (prefix, names)} of its weights in the single file of the original code; see `names`.

        names: "unet", "vae", "clip" or "open_clip". Empty where Diffusers' folder is the only form that is supported.
        """
        return {}

    def architecture(self, model_dir: str | Path) -> str:
        """Return the name of the model's kind in ModelSpec."""
        return self.name

    def prompt_length(self, model_dir: str | Path, encoder: str) -> int:
        """Return the number of tokens that a text encoder reads of a prompt."""
        return self.tokens.get(encoder) or max_tokens(model_dir, encoder)

    def hidden_shape(self, model_dir: str | Path, encoder: str) -> tuple[int, ...]:
        """Return the shape (L, D) of a text encoder's hidden states of one prompt."""
        return self.prompt_length(model_dir, encoder), read_config(model_dir, encoder)["hidden_size"]

    def tokenize(self, model_dir: str | Path, prompts: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the token ids that each text encoder reads: {encoder: [n, L] int64}."""
        import torch

        lengths, prompts = {each: self.prompt_length(model_dir, each) for each in self.encoders}, list(prompts)
        return {each: torch.tensor(tokenize(model_dir, prompts, each, length)) for each, length in lengths.items()}

    def read(self, name: str, encoder: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what the text encoder `name` says of ids [B, L]: "hidden" [B, L, D], "pooled" [B, P], or one of them.

        encoder: the module; gradients flow through it.
        """
        raise NotImplementedError

    def caption_shapes(self, model_dir: str | Path) -> dict[str, tuple[int, ...]]:
        """Return the shape of each output of `read` for one prompt: {"text_encoder.hidden": (L, D), ...}.

        Of the families that can be pre-trained, from the configurations of their text encoders.
        """
        raise NotImplementedError

    def condition(self, said: Mapping[str, Tensors]) -> dict[str, torch.Tensor]:
        """Return the condition of the denoiser: "prompt" [B, L, D] and, where it has one, "pooled" [B, P].

        said: {encoder: what `read` returned}.
        """
        raise NotImplementedError

    def unconditional(self, model_dir: str | Path, empty: Tensors) -> Tensors:
        """Return the condition of no prompt, for guidance.

        empty: the condition of the prompt "", or what `read` returned for it; the result has the same names.
        """
        return empty

    def geometry(
        self,
        photo: tuple[int, int],
        box: tuple[float, float, float, float],
        size: tuple[int, int],
        is_mirrored: bool = False,
    ) -> dict[str, list[int]]:
        """Return what the denoiser is told of a crop: "time_ids" [6], or nothing.

        photo, size: (width, height) of the upright photo, and of the crop after resizing. box: (left, top, right,
        bottom) of the crop in pixels of the photo. is_mirrored: whether the crop is mirrored.
        """
        return {}

    def unused(self, component: str, module: Any) -> list[str]:
        """Return the names of a component's parameters that no prediction depends on: they never have a gradient."""
        return []

    def objective(self, model_dir: str | Path, snr_gamma: float | None = None) -> Objective:
        """Return what the denoiser learns, by the model's scheduler; snr_gamma: of the min-SNR weights."""
        from diffusers import DDPMScheduler

        return Diffusion(DDPMScheduler.from_pretrained(model_dir, subfolder="scheduler"), snr_gamma)

    def predict(self, denoiser: Any, noisy: torch.Tensor, time: torch.Tensor, condition: Tensors) -> torch.Tensor:
        """Return the denoiser's prediction [B, c, h, w] for noisy latents [B, c, h, w] at times [B].

        condition: as returned by `condition`, with the "time_ids" [B, 6] of `geometry` where there are any.
        """
        raise NotImplementedError

    def pipeline_inputs(self, condition: Tensors, unconditional: Tensors) -> dict[str, torch.Tensor]:
        """Return the arguments that replace the prompts of a pipeline, which then needs no text encoders."""
        inputs = {"prompt_embeds": condition["prompt"], "negative_prompt_embeds": unconditional["prompt"]}
        if "pooled" in condition:
            inputs["pooled_prompt_embeds"] = condition["pooled"]
            inputs["negative_pooled_prompt_embeds"] = unconditional["pooled"]
        return inputs
