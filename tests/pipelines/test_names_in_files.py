"""Names in files, against Diffusers' readers, names of published files, and ComfyUI's table for LoRAs."""

import pytest
import torch

from common import errors
from pipelines import lora, names
from pipelines.families import FAMILIES

SD = {"block_out_channels": (320, 640, 1280, 1280), "cross_attention_dim": 768}
SDXL = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "cross_attention_dim": 2048,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}
# As ComfyUI finds them: transformers of the resnets going down, in the middle, and going up from the last one.
COMFY_UNETS = {
    "sd": {"blocks": 4, "down": [1, 1, 1, 1, 1, 1, 0, 0], "mid": 1, "up": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]},
    "sdxl": {"blocks": 3, "down": [0, 0, 2, 2, 10, 10], "mid": 10, "up": [0, 0, 0, 2, 2, 2, 10, 10, 10]},
}
PIPELINES = {"sd": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline"}


@pytest.fixture(scope="module")
def unets():
    """The UNets of Stable Diffusion 1.5 and SDXL, without weights."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        return {"sd": UNet2DConditionModel(**SD), "sdxl": UNet2DConditionModel(**SDXL)}


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_the_names_of_a_unet_are_those_that_diffusers_reads(name, unets):
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    weights, config = unets[name].state_dict(), unets[name].config
    file = {f"model.diffusion_model.{names.unet_name(key, config)}": value for key, value in weights.items()}
    read = convert_ldm_unet_checkpoint(file, config)
    assert len(file) == len(weights) == {"sd": 686, "sdxl": 1680}[name]
    assert read.keys() == weights.keys() and all(read[key] is value for key, value in weights.items())


def test_the_names_of_a_vae_are_those_that_diffusers_reads():
    from diffusers import AutoencoderKL
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    with torch.device("meta"):
        vae = AutoencoderKL(**VAE)
    weights = vae.state_dict()
    file = {f"first_stage_model.{names.vae_name(key, vae.config)}": value for key, value in weights.items()}
    read = convert_ldm_vae_checkpoint(file, vae.config)
    assert len(file) == 248 and read.keys() == weights.keys()
    assert all(read[key] is value for key, value in weights.items())


@pytest.mark.parametrize(
    ("model", "name", "original"),
    [
        ("sd", "down_blocks.2.downsamplers.0.conv.weight", "input_blocks.9.0.op.weight"),
        ("sd", "up_blocks.0.upsamplers.0.conv.weight", "output_blocks.2.1.conv.weight"),
        ("sd", "up_blocks.1.upsamplers.0.conv.weight", "output_blocks.5.2.conv.weight"),
        ("sd", "up_blocks.3.resnets.2.conv_shortcut.weight", "output_blocks.11.0.skip_connection.weight"),
        ("sd", "mid_block.resnets.1.norm1.bias", "middle_block.2.in_layers.0.bias"),
        ("sd", "time_embedding.linear_2.weight", "time_embed.2.weight"),
        ("sdxl", "add_embedding.linear_1.bias", "label_emb.0.0.bias"),
        ("sdxl", "up_blocks.0.upsamplers.0.conv.weight", "output_blocks.2.2.conv.weight"),
        (
            "sdxl",
            "mid_block.attentions.0.transformer_blocks.9.attn2.to_k",
            "middle_block.1.transformer_blocks.9.attn2.to_k",
        ),
        ("sdxl", "down_blocks.1.attentions.0.proj_in", "input_blocks.4.1.proj_in"),
    ],
)
def test_names_of_published_files(model, name, original, unets):
    assert names.unet_name(name, unets[model].config) == original


@pytest.mark.parametrize(
    ("name", "original"),
    [
        ("encoder.layers.9.mlp.fc2.bias", "transformer.resblocks.9.mlp.c_proj.bias"),
        ("encoder.layers.0.self_attn.k_proj.weight", "transformer.resblocks.0.attn.in_proj_weight"),
        ("encoder.layers.0.self_attn.out_proj.bias", "transformer.resblocks.0.attn.out_proj.bias"),
        ("encoder.layers.31.layer_norm2.weight", "transformer.resblocks.31.ln_2.weight"),
        ("embeddings.position_embedding.weight", "positional_embedding"),
        ("embeddings.token_embedding.weight", "token_embedding.weight"),
        ("final_layer_norm.bias", "ln_final.bias"),
        ("text_projection.weight", "text_projection"),
    ],
)
def test_names_of_open_clip(name, original):
    assert names.open_clip_name(name) == original


def test_a_unet_of_other_blocks_has_no_original_names(unets):
    config = dict(unets["sd"].config)
    assert names.has_original_names(config)
    for change in ({"layers_per_block": [1, 2, 2, 2]}, {"down_block_types": ["AttnDownBlock2D"]}):
        assert not names.has_original_names(config | change)


def test_families_without_an_original_file_are_refused(tiny_families):
    for name in ("sd3", "flux"):
        with pytest.raises(errors.BadInput, match=r"supported: StableDiffusionPipeline, StableDiffusionXLPipeline$"):
            names.original_names(tiny_families[name])


# ---------------------------------------------------------------------------------------------------------------------
# LoRA files: ComfyUI's table, restated from its unet_to_diffusers and model_lora_keys_clip


def comfy_unet(blocks, down, mid, up):
    """Return {name of a layer in LoRA files after lora_unet_: its name in the original code} of the attentions."""
    parts = [f"attn{i}.{each}" for i in (1, 2) for each in ("to_q", "to_k", "to_v", "to_out.0")]
    parts += ["ff.net.0.proj", "ff.net.2"]
    table, down, up = {}, list(down), list(up)

    def add(place, original, count):
        found = [f"transformer_blocks.{number}.{part}" for number in range(count) for part in parts]
        for part in [*found, "proj_in", "proj_out"] if count else []:
            table[f"{place}.{part}".replace(".", "_")] = f"{original}.{part}"

    for block in range(blocks):
        for i in range(2):
            add(f"down_blocks.{block}.attentions.{i}", f"input_blocks.{1 + 3 * block + i}.1", down.pop(0))
        for i in range(3):
            add(f"up_blocks.{block}.attentions.{i}", f"output_blocks.{3 * block + i}.1", up.pop())
    add("mid_block.attentions.0", "middle_block.1", mid)
    return table


def comfy_clip(prefix, layers):
    parts = [f"self_attn_{each}" for each in ("q_proj", "k_proj", "v_proj", "out_proj")]
    return {f"{prefix}_text_model_encoder_layers_{number}_{part}" for number in range(layers) for part in parts}


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_the_names_of_a_lora_are_those_of_comfyui(name, unets):
    """Of all layers that train.py gives an adapter in Stable Diffusion 1.5 and SDXL: the same names, all of them."""
    family, table, pair = FAMILIES[PIPELINES[name]], comfy_unet(**COMFY_UNETS[name]), (torch.ones(1, 1),) * 2
    layers = {"sd": {"text_encoder": 12}, "sdxl": {"text_encoder": 12, "text_encoder_2": 32}}[name]
    modules = [each for each, _ in unets[name].named_modules()]
    made = {"unet": dict.fromkeys(family.adapted("unet", modules, "all"), pair)}
    for encoder, count in layers.items():
        parts = [f"encoder.layers.{n}.self_attn.{each}_proj" for n in range(count) for each in ("q", "k", "v", "out")]
        made[encoder] = dict.fromkeys(parts, pair)
    found = {key.split(".")[0] for key in lora.webui_tensors(made, family.webui)}
    prefixes = {"sd": ["lora_te"], "sdxl": ["lora_te1", "lora_te2"]}[name]
    clips = set().union(*(comfy_clip(*each) for each in zip(prefixes, layers.values(), strict=True)))
    assert found == clips | {f"lora_unet_{each}" for each in table}
    for module in made["unet"]:
        assert names.unet_name(module, unets[name].config) == table[module.replace(".", "_")]
