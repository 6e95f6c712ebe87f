"""Names of modules and weights in files: those of text encoders, and those of Stable Diffusion's original code.

AUTOMATIC1111, ComfyUI and kohya's scripts read a whole model as one file with the names of the original code (latent-
diffusion, generative-models), and LoRAs with those of either code. The numbers of the blocks follow from the model's
configuration. The tables are those of Diffusers' scripts/convert_diffusers_to_original_stable_diffusion.py and
..._sdxl.py. A plain name has no prefix `text_model.`; a name may be that of a module or of a weight.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import BadInput
from pipelines.configs import read_config
from pipelines.families import FAMILIES, find_family

TEXT_MODEL = "text_model."
UNET = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
UNET_BLOCKS = {"DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"}
VAE = {
    "down_blocks": "down",
    "resnets": "block",
    "downsamplers.0": "downsample",
    "upsamplers.0": "upsample",
    "mid_block.resnets.0": "mid.block_1",
    "mid_block.resnets.1": "mid.block_2",
    "mid_block.attentions.0": "mid.attn_1",
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
    "conv_norm_out": "norm_out",
    "conv_shortcut": "nin_shortcut",
}
OPEN_CLIP = {
    "embeddings.token_embedding": "token_embedding",
    "embeddings.position_embedding.weight": "positional_embedding",
    "encoder.layers": "transformer.resblocks",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "final_layer_norm": "ln_final",
    "text_projection.weight": "text_projection",
}


def plain_name(name: str) -> str:
    """Return the name of a module, or a weight, without the prefix of text encoders."""
    return name.removeprefix(TEXT_MODEL)


def clip_name(name: str) -> str:
    """Return the name of a CLIP's module, or weight, in files, which all releases of transformers read."""
    return name if name.startswith((TEXT_MODEL, "text_projection")) else f"{TEXT_MODEL}{name}"


def file_name(component: str, module: str) -> str:
    """Return the name of a module in files: a text encoder's with its prefix (T5 never has a LoRA)."""
    return clip_name(module) if component.startswith("text_encoder") else module


def _replace(name: str, table: Mapping[str, str]) -> str:
    """Replace whole parts of a dotted name, the longest ones first."""
    for old in sorted(table, key=len, reverse=True):
        name = re.sub(rf"(^|\.){re.escape(old)}(?=\.|$)", rf"\g<1>{table[old]}", name)
    return name


def has_original_names(config: Mapping[str, Any]) -> bool:
    """Return whether a UNet with this configuration has only blocks that the original code has too."""
    blocks = {*config["down_block_types"], *config["up_block_types"]}
    return blocks <= UNET_BLOCKS and isinstance(config["layers_per_block"], int)


def unet_name(name: str, config: Mapping[str, Any]) -> str:
    """Return the original name of a UNet's module or weight; config: of the UNet.

    input_blocks count the resnets and downsamplers of all down blocks after conv_in, output_blocks the resnets of all
    up blocks. A resnet is part 0 of its block, an attention part 1, an upsampler the part after them.
    """
    found = re.fullmatch(r"(down|up|mid)_block(?:s\.(\d+))?\.([a-z]+)\.(\d+)(\..*)?", name)
    if not found:
        return _replace(name, UNET)
    place, kind, number, rest = found[1], found[3], int(found[4]), found[5] or ""
    block, size = int(found[2] or 0), config["layers_per_block"] + 1
    rest = _replace(rest, UNET_RESNET) if kind == "resnets" else rest
    if kind == "downsamplers":
        return f"input_blocks.{(block + 1) * size}.0{_replace(rest, {'conv': 'op'})}"
    if kind == "upsamplers":
        part = 2 if config["up_block_types"][block].startswith("CrossAttn") else 1
        return f"output_blocks.{block * size + size - 1}.{part}{rest}"
    part = int(kind == "attentions")
    if place == "mid":
        return f"middle_block.{2 * number + part}{rest}"
    start = f"input_blocks.{block * size + number + 1}" if place == "down" else f"output_blocks.{block * size + number}"
    return f"{start}.{part}{rest}"


def vae_name(name: str, config: Mapping[str, Any]) -> str:
    """Return the original name of a VAE's weight, where the last up block has number 0; config: of the VAE."""
    last = len(config["up_block_types"]) - 1
    return _replace(re.sub(r"up_blocks\.(\d+)", lambda found: f"up.{last - int(found[1])}", name), VAE)


def open_clip_name(name: str) -> str:
    """Return the name of a CLIP's weight in OpenCLIP, by its plain name; q, k and v are parts of one weight."""
    return _replace(re.sub(r"self_attn\.[qkv]_proj\.", "attn.in_proj_", name), OPEN_CLIP)


def original_names(model_dir: str | Path) -> dict[str, Callable[[str], str]]:
    """Return {component: function from the plain name of a weight to its name in the original file} of a model.

    Raises BadInput for a model that has no such file.
    """
    family = find_family(model_dir, [name for name, each in FAMILIES.items() if each.webui])
    unet, vae = read_config(model_dir, "unet"), read_config(model_dir, "vae")
    if not has_original_names(unet):
        raise BadInput(f"--model_dir {model_dir} has a UNet of blocks that the original code does not have")
    kinds = {"unet": partial(unet_name, config=unet), "vae": partial(vae_name, config=vae)}
    kinds |= {"clip": clip_name, "open_clip": open_clip_name}
    return {
        component: lambda name, prefix=prefix, rename=kinds[kind]: f"{prefix}{rename(name)}"
        for component, (prefix, kind) in family.original(model_dir).items()
    }
