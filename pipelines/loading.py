"""Load models and pipelines, set torch up for them, draw and encode.

torch and diffusers are imported in the functions that need them: a script's checks run before anything heavy.
"""

import os
from pathlib import Path

from common.errors import BadInput, CheckFailed
from common.messages import say
from pipelines.configs import components, read_index
from pipelines.model_folder import weights_variant
from pipelines.samplers import use_sampler


def set_up_torch(device_type, num_threads=None, mixed_precision="auto"):
    """Set threads and the float32 mode, quieten the libraries.

    On a GPU float32 operations use TF32, of 10 bits of precision, unless `mixed_precision` is `no`.
    """
    import diffusers
    import torch
    import transformers

    if num_threads:
        torch.set_num_threads(num_threads)
    if device_type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = mixed_precision != "no"
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def compute_dtype(mixed_precision, device_type, on_any=bool):
    """Return the torch type to compute in: `auto` is fp32 on a CPU, bf16 on a GPU that has units for it, else fp16.

    PyTorch emulates bf16 on GPUs older than Ampere (T4, V100, RTX 20xx), which is slow.
    on_any: of workers that must take the same type, whether a flag is true on any of them.
    """
    import torch

    if mixed_precision == "fp16" and device_type == "cpu":
        raise BadInput("--mixed_precision fp16 needs a GPU: take no or auto")
    if mixed_precision == "auto" and device_type == "cpu":
        mixed_precision = "no"
    elif mixed_precision == "auto":
        mixed_precision = "bf16"
        if on_any(not torch.cuda.is_bf16_supported(including_emulation=False)):
            mixed_precision = "fp16"
            say(f"{torch.cuda.get_device_name()} has no bf16 units: --mixed_precision auto computes in fp16")
    return {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[mixed_precision]


def load_models(model_dir, names, dtype, checkpoint=None):
    """Return {name: component} of a Diffusers model folder, safetensors only, weights in `dtype`.

    names: folders of `model_dir`, say ("vae", "unet"); a folder that `checkpoint` holds too is taken from there.
    Raises CheckFailed where a weight is missing: no layer starts from random numbers in silence.
    """

    index = read_index(model_dir)
    models = {}
    for name in names:
        own = checkpoint is not None and os.path.isdir(os.path.join(checkpoint, name))
        root = checkpoint if own else model_dir
        library, class_name = index[name]
        component = getattr(__import__(library), class_name)
        path = os.path.join(root, name)
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
            ignore_mismatched_sizes=True,  # they are in the info, and end the run below
        )
        # Old checkpoints of CLIP hold the numbers of the positions too.
        others = [key for key in info["unexpected_keys"] if not key.endswith("position_ids")]
        wrong = [*info["missing_keys"], *(key[0] for key in info["mismatched_keys"]), *others]
        if wrong:
            raise CheckFailed(
                f"{path}: {len(wrong)} weights are missing, misshapen or not of this model, {min(wrong)} the first"
            )
        broken = [key for key, value in models[name].state_dict().items() if not value.isfinite().all()]
        if broken:
            raise CheckFailed(f"{path}: {len(broken)} weights are not finite, {broken[0]} the first: fetch it again")
    return models


def load_pipeline(model_dir, dtype, checkpoint=None, safety_checker=True, modules=None):
    """Return the pipeline of a model folder, weights in `dtype`, checked; modules of `checkpoint` replace its own.

    modules: {name: module} that are in memory already, taken as they are.
    """
    from diffusers import DiffusionPipeline

    index = read_index(model_dir)
    # What has weights and a class of the libraries' own; tokenizers and the like are left to Diffusers.
    names = [
        name
        for name, (library, _) in components(index).items()
        if library in ("diffusers", "transformers") and any(Path(model_dir, name).glob("*.safetensors"))
    ]
    own = modules or {}
    replaced = own | load_models(model_dir, [name for name in names if name not in own], dtype, checkpoint)
    if not safety_checker and "safety_checker" in index:
        replaced |= {"safety_checker": None, "requires_safety_checker": False}
    pipeline = DiffusionPipeline.from_pretrained(
        model_dir,
        dtype=dtype,
        variant=weights_variant(os.path.join(model_dir, "safety_checker")),  # all that is left to load
        use_safetensors=True,
        local_files_only=True,
        **replaced,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw_images(pipeline, prompts, seeds, sampler="model", **options):
    """Return (PIL images, whether the safety checker flagged each), drawn in one batch; prompts, seeds: of each image.

    sampler: of samplers.use_sampler.
    """
    import torch

    count = len(seeds)
    assert len(prompts) == count, f"{len(prompts)} prompts of {count} images"
    negative_prompt = options.pop("negative_prompt", "") or None
    with use_sampler(pipeline, sampler), torch.inference_mode():
        output = pipeline(
            prompts,
            negative_prompt=negative_prompt and [negative_prompt] * count,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            **options,
        )
    return output.images, getattr(output, "nsfw_content_detected", None) or [False] * count


def encode_posterior(vae, pixel_values):
    """Return the mean and standard deviation of the VAE's posterior, unscaled, each [B, c, h, w].

    pixel_values: [B, 3, H, W] in [-1, 1].
    """
    posterior = vae.encode(pixel_values).latent_dist
    return posterior.mean, posterior.std


def scale_latents(latents, vae_config):
    """Shift and scale the VAE's latents to those the UNet was trained on, by the VAE's own configuration."""
    shift = vae_config.get("shift_factor") or 0.0
    return (latents - shift) * vae_config["scaling_factor"]
