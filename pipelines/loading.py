"""Set up torch, load models and pipelines, draw images, encode images.

torch and diffusers are imported inside the functions, so that a script's checks run before these slow imports.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import BadInput, CheckFailed
from common.messages import say
from pipelines import lora
from pipelines.configs import components, read_index
from pipelines.model_folder import LORA_FILE, check_component, weights_variant
from pipelines.samplers import use_sampler

if TYPE_CHECKING:
    import torch
    from PIL import Image

STORAGE_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}  # values of --save_dtype: types of torch
PART_FOR_WEIGHTS = 0.7  # of a GPU's free memory; the rest is for activations


def set_up_torch(device_type: str, num_threads: int | None = None, mixed_precision: str = "auto") -> None:
    """Set the number of threads and the precision of float32 operations, and silence the libraries.

    On a GPU float32 matrix products and convolutions use TF32 (10-bit mantissa), unless `mixed_precision` is `no`.
    """
    import diffusers
    import torch
    import transformers

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it where it is installed
    if num_threads:
        torch.set_num_threads(num_threads)
    if device_type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = mixed_precision != "no"
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def compute_dtype(mixed_precision: str, device_type: str, on_any: Callable[[bool], bool] = bool) -> torch.dtype:
    """Return the data type to compute in; `auto` is fp32 on a CPU, bf16 on a GPU with bf16 units, else fp16.

    PyTorch emulates bf16 on GPUs older than Ampere (T4, V100, RTX 20xx), which is slow.
    on_any: returns whether its argument is true on any worker, so that all workers use the same type.
    """
    import torch

    if mixed_precision == "fp16" and device_type == "cpu":
        raise BadInput("--mixed_precision fp16 needs a GPU: use no or auto")
    if mixed_precision == "auto" and device_type == "cpu":
        mixed_precision = "no"
    elif mixed_precision == "auto":
        mixed_precision = "bf16"
        if on_any(not torch.cuda.is_bf16_supported(including_emulation=False)):
            mixed_precision = "fp16"
            say(f"{torch.cuda.get_device_name()} has no bf16 units: --mixed_precision auto uses fp16")
    return {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[mixed_precision]


def storage_dtype(save_dtype: str) -> torch.dtype:
    """Return the data type of --save_dtype."""
    import torch

    return getattr(torch, STORAGE_DTYPES[save_dtype])


def empty_model(model_dir: str | Path, name: str, config: dict[str, Any] | None = None) -> Any:
    """Return a component of a model by its configuration, on the meta device: its weights have shapes and no memory.

    config: in place of its own.
    """
    import torch

    library, class_name = read_index(model_dir)[name]
    component = getattr(importlib.import_module(library), class_name)
    load = component.config_class.from_pretrained if library == "transformers" else component.load_config
    config = config or load(os.path.join(model_dir, name), local_files_only=True)
    with torch.device("meta"):
        return component(config) if library == "transformers" else component.from_config(config)


def check_checkpoint(checkpoint: str | Path, model_dir: str | Path) -> None:
    """Raise BadInput or CheckFailed unless a checkpoint has components of a model, or a LoRA of it, that are whole."""
    index = read_index(model_dir)
    replaced = [name for name in components(index) if Path(checkpoint, name).is_dir()]
    for name in replaced:
        check_component(Path(checkpoint), name, index[name][1], "--checkpoint")
    if Path(checkpoint, LORA_FILE).is_file():
        lora.read(Path(checkpoint, LORA_FILE), model_dir)
    elif not replaced:
        raise BadInput(f"--checkpoint {checkpoint} contains no component of the model: pass a checkpoint-... folder")


def load_models(
    model_dir: str | Path, names: Iterable[str], dtype: torch.dtype, checkpoint: str | Path | None = None
) -> dict[str, Any]:
    """Return {name: component} of a Diffusers model folder, loaded from safetensors with weights in `dtype`.

    names: components such as ("vae", "unet"); those that `checkpoint` contains are loaded from there.
    Raises CheckFailed if weights are missing, misshapen, unexpected or not finite; Diffusers would initialize missing
    ones randomly.
    """
    index = read_index(model_dir)
    models = {}
    for name in names:
        path = os.path.join(model_dir, name)
        if checkpoint is not None and os.path.isdir(os.path.join(checkpoint, name)):
            path = os.path.join(checkpoint, name)
        library, class_name = index[name]
        component = getattr(importlib.import_module(library), class_name)
        if not hasattr(component, "named_parameters"):
            models[name] = component.from_pretrained(path, local_files_only=True)
            continue
        models[name], info = component.from_pretrained(
            path,
            dtype=dtype,
            variant=weights_variant(path),
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported in `info`
        )
        _check_weights(path, models[name], info)
    return models


def _check_weights(path: str, model: torch.nn.Module, info: dict[str, Any]) -> None:
    """Raise CheckFailed unless a model got all its weights and they are finite; info: of from_pretrained."""
    # Old CLIP checkpoints also contain the position ids.
    others = [key for key in info["unexpected_keys"] if not key.endswith("position_ids")]
    wrong = [*info["missing_keys"], *(key[0] for key in info["mismatched_keys"]), *others]
    fault = "missing, of the wrong shape, or unexpected"
    if not wrong:
        wrong = [key for key, value in model.state_dict().items() if not value.isfinite().all()]
        fault = "not finite"
    if wrong:
        first = min(wrong)
        raise CheckFailed(f"{path}: {len(wrong)} weights are {fault}, starting with {first}: fetch or create it again")


def load_pipeline(
    model_dir: str | Path,
    dtype: torch.dtype,
    checkpoint: str | Path | None = None,
    safety_checker: bool = True,
    modules: Mapping[str, Any] | None = None,
) -> Any:
    """Return the Diffusers pipeline of a model folder, weights in `dtype`, checked as by `load_models`.

    checkpoint: a folder whose components replace the model's own, or whose LoRA is fused with them.
    modules: {name: module} of components in memory, used as they are.
    """
    from diffusers import DiffusionPipeline

    index = read_index(model_dir)
    # Components with weights and a class of diffusers or transformers; Diffusers loads the others.
    names = [
        name
        for name, (library, _) in components(index).items()
        if library in ("diffusers", "transformers") and any(Path(model_dir, name).glob("*.safetensors"))
    ]
    own: dict[str, Any] = dict.fromkeys(name for name, pair in index.items() if pair == [None, None])
    own |= modules or {}
    replaced = own | load_models(model_dir, [name for name in names if name not in own], dtype, checkpoint)
    if not safety_checker and "safety_checker" in index:
        replaced |= {"safety_checker": None, "requires_safety_checker": False}
    pipeline = DiffusionPipeline.from_pretrained(
        model_dir,
        dtype=dtype,
        variant=weights_variant(os.path.join(model_dir, "safety_checker")),  # the only weights left to load
        use_safetensors=True,
        local_files_only=True,
        **replaced,
    )
    pipeline.set_progress_bar_config(disable=True)
    if checkpoint is not None and Path(checkpoint, LORA_FILE).is_file():
        lora.fuse(lora.read(Path(checkpoint, LORA_FILE), model_dir), pipeline.components)
    return pipeline


def move_pipeline(pipeline: Any, device: torch.device | str) -> Any:
    """Return a pipeline moved to a device.

    If it does not fit into a GPU, each component moves when it is used; if one does not fit either, each layer.
    """
    import torch

    if torch.device(device).type == "cuda":
        modules = [each for each in pipeline.components.values() if isinstance(each, torch.nn.Module)]
        sizes = [sum(parameter.nbytes for parameter in module.parameters()) for module in modules]
        room = PART_FOR_WEIGHTS * torch.cuda.mem_get_info(device)[0]
        if max(sizes) > room:
            pipeline.enable_group_offload(torch.device(device), offload_type="leaf_level")
            return pipeline
        if sum(sizes) > room:
            pipeline.enable_model_cpu_offload(device=device)
            return pipeline
    return pipeline.to(device)


def draw_images(
    pipeline: Any, prompts: list[str] | None, seeds: list[int], sampler: str = "model", **options: Any
) -> tuple[list[Image.Image], list[bool]]:
    """Draw one batch of images and return them with the safety checker's verdicts: True for a flagged image.

    prompts, seeds: one per image; no prompts if the options have embeddings. sampler: as in samplers.use_sampler.
    options: passed to the pipeline.
    """
    import torch

    count = len(seeds)
    assert prompts is None or len(prompts) == count, f"{len(prompts)} prompts for {count} images"
    negative_prompt = options.pop("negative_prompt", "") or None
    with use_sampler(pipeline, sampler), torch.inference_mode():
        output = pipeline(
            prompts,
            negative_prompt=negative_prompt and [negative_prompt] * count,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            **options,
        )
    return output.images, getattr(output, "nsfw_content_detected", None) or [False] * count


def encode_posterior(vae: Any, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and standard deviation of the VAE's posterior, unscaled, each [B, c, h, w].

    pixel_values: [B, 3, H, W] in [-1, 1].
    """
    posterior = vae.encode(pixel_values).latent_dist
    return posterior.mean, posterior.std


def scale_latents(latents: Any, vae_config: Mapping[str, Any]) -> Any:
    """Return latents, shifted and scaled by the VAE's configuration to the values that the UNet is trained on."""
    shift = vae_config.get("shift_factor") or 0.0
    return (latents - shift) * vae_config["scaling_factor"]
