"""Model families: what differs between Stable Diffusion, SDXL, Stable Diffusion 3 and FLUX.

A family knows the parts of its models, how the outputs of their text encoders become the condition of the denoiser, and
how the denoiser is called. `find_family` finds the family of a model folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from common.errors import BadInput
from pipelines import tokens
from pipelines.configs import components, model_resolution, pixel_factor, read_config, read_index, side_multiple
from pipelines.family import Family
from pipelines.objectives import Flow

# Modules of denoisers that get an adapter, by the end of their names.
UNET_LORA = ("to_q", "to_k", "to_v", "to_out.0")
UNET_LORA_ALL = (*UNET_LORA, "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
JOINT_LORA = (*UNET_LORA, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
JOINT_LORA_ALL = (*JOINT_LORA, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")

# Prefixes and kinds of names in the single file of the original code.
ORIGINAL = {"vae": ("first_stage_model.", "vae"), "unet": ("model.diffusion_model.", "unet")}


class SD(Family):
    """Stable Diffusion 1.x and 2.x (arXiv 2112.10752): the last hidden state of one CLIP."""

    name = "stable-diffusion"
    pipeline = "StableDiffusionPipeline"
    denoiser = "unet"
    encoders = trainable = ("text_encoder",)
    lora: ClassVar = {"attention": UNET_LORA, "all": UNET_LORA_ALL}
    webui: ClassVar = {"unet": "lora_unet", "text_encoder": "lora_te"}
    recomputes = False
    lr = 5e-6
    trains_text_encoders = True
    guidance_scale = 7.5
    num_inference_steps = 50

    def _is_v2(self, model_dir):
        return read_config(model_dir, "unet")["cross_attention_dim"] == 1024

    def webui_facts(self, model_dir):
        return {"ss_v2": "True"} if self._is_v2(model_dir) else {}

    def original(self, model_dir):
        encoder = ("cond_stage_model.transformer.", "clip")
        if self._is_v2(model_dir):
            encoder = ("cond_stage_model.model.", "open_clip")
        return {**ORIGINAL, "text_encoder": encoder}

    def architecture(self, model_dir):
        if not self._is_v2(model_dir):
            return "stable-diffusion-v1"
        is_v = read_config(model_dir, "scheduler")["prediction_type"] == "v_prediction"
        return f"stable-diffusion-v2-{'768-v' if is_v else '512'}"

    def read(self, name, encoder, ids):
        return {"hidden": encoder(ids)[0]}

    def caption_shapes(self, model_dir):
        return {"text_encoder.hidden": self.hidden_shape(model_dir, "text_encoder")}

    def condition(self, said):
        return {"prompt": said["text_encoder"]["hidden"]}

    def predict(self, denoiser, noisy, time, condition):
        return denoiser(noisy, time, condition["prompt"]).sample


class SDXL(Family):
    """Stable Diffusion XL (arXiv 2307.01952): two CLIPs side by side, the pooled output of the second, time_ids."""

    name = "stable-diffusion-xl"
    pipeline = "StableDiffusionXLPipeline"
    denoiser = "unet"
    encoders = trainable = ("text_encoder", "text_encoder_2")
    lora: ClassVar = {"attention": UNET_LORA, "all": UNET_LORA_ALL}
    webui: ClassVar = {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}
    guidance_scale = 5.0
    num_inference_steps = 50

    def webui_facts(self, model_dir):
        return {"ss_base_model_version": "sdxl_base_v1-0"}

    def original(self, model_dir):
        first, second = "conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."
        return {**ORIGINAL, "text_encoder": (first, "clip"), "text_encoder_2": (second, "open_clip")}

    def architecture(self, model_dir):
        return "stable-diffusion-xl-v1-base"

    def read(self, name, encoder, ids):
        output = encoder(ids, output_hidden_states=True)
        said = {"hidden": output.hidden_states[-2]}
        return said | {"pooled": output.text_embeds} if name == "text_encoder_2" else said

    def caption_shapes(self, model_dir):
        shapes = {f"{encoder}.hidden": self.hidden_shape(model_dir, encoder) for encoder in self.encoders}
        return shapes | {"text_encoder_2.pooled": (read_config(model_dir, "text_encoder_2")["projection_dim"],)}

    def condition(self, said):
        import torch

        prompt = torch.cat([said[encoder]["hidden"] for encoder in self.encoders], dim=-1)  # B L D1+D2
        return {"prompt": prompt, "pooled": said["text_encoder_2"]["pooled"]}

    def unconditional(self, model_dir, empty):
        is_zero = read_index(model_dir).get("force_zeros_for_empty_prompt", True)
        return {name: value.new_zeros(value.shape) for name, value in empty.items()} if is_zero else empty

    def geometry(self, photo, box, size, is_mirrored=False):
        """Return "time_ids": height and width of the photo; top and left of the crop; height and width of the crop.

        Top and left are in pixels of the resized and, with `is_mirrored`, mirrored photo (arXiv 2307.01952, section 2).
        """
        left, top, right, bottom = box
        before = photo[0] - right if is_mirrored else left
        place = round(top * size[1] / (bottom - top)), round(before * size[0] / (right - left))
        return {"time_ids": [photo[1], photo[0], *place, size[1], size[0]]}

    def unused(self, component, module):
        """Return the last layer of the first CLIP, of which the hidden states before that layer are read."""
        if component != "text_encoder":
            return []
        last = (f"layers.{module.config.num_hidden_layers - 1}.", "final_layer_norm.")
        return [name for name, _ in module.named_parameters() if any(part in name for part in last)]

    def predict(self, denoiser, noisy, time, condition):
        time_ids = condition["time_ids"].int()  # FSDP would cast floats to bf16, where 1001 pixels are 1000
        added = {"text_embeds": condition["pooled"], "time_ids": time_ids}
        return denoiser(noisy, time, condition["prompt"], added_cond_kwargs=added).sample


class SD3(Family):
    """Stable Diffusion 3 and 3.5 (arXiv 2403.03206): two CLIPs side by side, T5 after them; a flow."""

    name = "stable-diffusion-3"
    pipeline = "StableDiffusion3Pipeline"
    denoiser = "transformer"
    encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    trainable = ("text_encoder", "text_encoder_2")
    large = ("text_encoder_3",)
    tokens: ClassVar = {"text_encoder_3": 256}
    trains_whole = False
    lora: ClassVar = {"attention": JOINT_LORA, "all": JOINT_LORA_ALL}
    guidance_scale = 7.0
    num_inference_steps = 28

    def _multiple(self, model_dir):
        return pixel_factor(model_dir) * read_config(model_dir, self.denoiser)["patch_size"]

    def read(self, name, encoder, ids):
        if name == "text_encoder_3":
            return {"hidden": encoder(ids)[0]}
        output = encoder(ids, output_hidden_states=True)
        return {"hidden": output.hidden_states[-2], "pooled": output.text_embeds}

    def condition(self, said):
        import torch

        first, second, t5 = (said[encoder] for encoder in self.encoders)
        clips = torch.cat([first["hidden"], second["hidden"]], dim=-1)  # B L D1+D2
        clips = torch.nn.functional.pad(clips, (0, t5["hidden"].shape[-1] - clips.shape[-1]))  # B L D
        prompt = torch.cat([clips, t5["hidden"]], dim=-2)  # B L+256 D
        return {"prompt": prompt, "pooled": torch.cat([first["pooled"], second["pooled"]], dim=-1)}

    def unused(self, component, module):
        """Return the queries of the text in the last block, whose output is dropped: their gradient is zero."""
        if component != self.denoiser:
            return []
        last = f"transformer_blocks.{len(module.transformer_blocks) - 1}.attn."
        queries = (f"{last}add_q_proj.", f"{last}norm_added_q.")
        return [name for name, _ in module.named_parameters() if name.startswith(queries)]

    def objective(self, model_dir, snr_gamma=None):
        return load_flow(model_dir, snr_gamma)

    def predict(self, denoiser, noisy, time, condition):
        pooled, prompt = condition["pooled"], condition["prompt"]
        return denoiser(noisy, timestep=time, encoder_hidden_states=prompt, pooled_projections=pooled).sample


class FLUX(Family):
    """FLUX.1: T5, and the pooled output of a CLIP; patches of 2x2 latent cells in a sequence; a flow."""

    name = "flux"
    pipeline = "FluxPipeline"
    denoiser = "transformer"
    encoders = ("text_encoder", "text_encoder_2")
    trainable = ()
    large = ("text_encoder_2",)
    tokens: ClassVar = {"text_encoder_2": 512}
    trains_whole = False
    lora: ClassVar = {"attention": JOINT_LORA, "all": JOINT_LORA_ALL}
    guidance_scale = 3.5
    is_guided_by_prompt = False
    num_inference_steps = 28

    def _resolution(self, model_dir):
        return 128 * pixel_factor(model_dir)  # FluxPipeline's default; its configurations have no size

    def _multiple(self, model_dir):
        return 2 * pixel_factor(model_dir)

    def read(self, name, encoder, ids):
        return {"pooled": encoder(ids).pooler_output} if name == "text_encoder" else {"hidden": encoder(ids)[0]}

    def condition(self, said):
        return {"prompt": said["text_encoder_2"]["hidden"], "pooled": said["text_encoder"]["pooled"]}

    def architecture(self, model_dir):
        return f"flux-1-{'dev' if read_config(model_dir, self.denoiser)['guidance_embeds'] else 'schnell'}"

    def objective(self, model_dir, snr_gamma=None):
        return load_flow(model_dir, snr_gamma)

    def predict(self, denoiser, noisy, time, condition):
        import torch

        rows, channels, height, width = noisy.shape
        h, w = height // 2, width // 2
        packed = noisy.reshape(rows, channels, h, 2, w, 2).permute(0, 2, 4, 1, 3, 5).reshape(rows, h * w, channels * 4)
        img_ids = noisy.new_zeros(h, w, 3)
        img_ids[..., 1], img_ids[..., 2] = torch.arange(h)[:, None], torch.arange(w)
        prompt = condition["prompt"]
        pred = denoiser(
            packed,
            encoder_hidden_states=prompt,
            pooled_projections=condition["pooled"],
            timestep=time / 1000,
            img_ids=img_ids.flatten(0, 1),
            txt_ids=noisy.new_zeros(prompt.shape[1], 3),
            guidance=torch.ones_like(time) if denoiser.config.guidance_embeds else None,  # 1: no guidance in training
        ).sample  # B h*w 4c
        return pred.reshape(rows, h, w, channels, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(noisy.shape)

    def pipeline_inputs(self, condition, unconditional):
        """Return the arguments without those of no prompt: guidance is an input of the denoiser."""
        return {"prompt_embeds": condition["prompt"], "pooled_prompt_embeds": condition["pooled"]}


def load_flow(model_dir: str | Path, snr_gamma: float | None) -> Flow:
    """Return the objective of a model that learns a flow; raise BadInput if it is given an snr_gamma."""
    if snr_gamma is not None:
        raise BadInput(f"--snr_gamma weighs the timesteps of a diffusion, but {model_dir} learns a flow: leave it out")
    from diffusers import FlowMatchEulerDiscreteScheduler

    return Flow(FlowMatchEulerDiscreteScheduler.from_pretrained(model_dir, subfolder="scheduler"))


FAMILIES = {family.pipeline: family for family in (SD(), SDXL(), SD3(), FLUX())}


def family_of(model_dir: str | Path) -> Family | None:
    """Return the family of a model folder, None for a pipeline of no family, which can be drawn with all the same."""
    return FAMILIES.get(read_index(model_dir).get("_class_name", ""))


def say_what_is_cut(model_dir: str | Path, prompts: Iterable[str]) -> None:
    """Print a warning for each prompt that the text encoder of the longest prompts cannot read to its end."""
    family, parts = family_of(model_dir), components(read_index(model_dir))
    limits = [(name, length) for name, length in (family.tokens if family else {}).items() if name in parts]
    encoder, length = limits[0] if limits else ("text_encoder", None)
    tokens.say_what_is_cut(model_dir, prompts, encoder, length)


def sides(model_dir: str | Path) -> tuple[int, int]:
    """Return (side of the images that a pipeline draws, in pixels, number of which sides are multiples).

    Of a pipeline of no family, what is true of most.
    """
    family = family_of(model_dir)
    return family.sizes(model_dir)[:2] if family else (model_resolution(model_dir), side_multiple(model_dir))


def find_family(model_dir: str | Path, supported: Iterable[str] = tuple(FAMILIES)) -> Family:
    """Return the family of a model folder, by the pipeline's class; raise BadInput if it is none of the supported."""
    class_name = read_index(model_dir).get("_class_name", "pipeline of no class")
    if class_name not in supported:
        raise BadInput(f"--model_dir {model_dir} is a {class_name}; supported: {', '.join(supported)}")
    return FAMILIES[class_name]
