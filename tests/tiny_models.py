"""Tiny models of random weights: pipelines of each family, a CLIP and a DINO."""

from pathlib import Path

RESOLUTION = 16  # pixels a side of the tiny model: 8 latent cells of 2 pixels


def make_tiny_model(folder, prediction_type="epsilon", num_train_timesteps=1000):
    """Save a StableDiffusionPipeline of some 100,000 random weights: 16x16 pixels, 4x8x8 latents, 24 tokens."""
    import torch
    from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    torch.manual_seed(0)
    tokenizer = make_tiny_clip_tokenizer(24)
    text_encoder = make_tiny_text_encoder(tokenizer, 16, num_layers=2)
    vae = make_tiny_vae(scaling_factor=0.6)
    unet = UNet2DConditionModel(
        sample_size=RESOLUTION // 2,
        block_out_channels=(16, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=4,
    )
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear",
        prediction_type=prediction_type,
        num_train_timesteps=num_train_timesteps,
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    StableDiffusionPipeline(
        vae, text_encoder, tokenizer, unet, scheduler, None, None, requires_safety_checker=False
    ).save_pretrained(folder, safe_serialization=True)
    return Path(folder)


def make_tiny_clip(folder, tokenizer_dir):
    """Save a CLIPModel of some thousand random weights: 16x16 pixels, embeddings of 8."""
    import torch
    from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text_config = {
        **size,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 24,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision_config = {**size, "image_size": 16, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text_config, vision_config=vision_config, projection_dim=8)).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16).save_pretrained(folder)
    return folder


def make_tiny_dino(folder):
    """Save a ViTModel of some thousand random weights, without a pooler and without a preprocessor."""
    import torch
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(1)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ViTConfig(**size, image_size=16, patch_size=8)
    ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Other families: each text encoder has another width and padding, so that a wrong order is found out


def make_tiny_clip_tokenizer(length=16, pad_token="<|endoftext|>"):
    """Return a CLIPTokenizer of letters."""
    from transformers import CLIPTokenizer

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + list("0123456789,.!?-")
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=length, pad_token=pad_token)


def make_tiny_text_encoder(tokenizer, width, is_projected=False, num_layers=3):
    """Return a CLIPTextModel, or with `is_projected` a CLIPTextModelWithProjection to `width` + 4."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        projection_dim=width + 4,
    )
    return (CLIPTextModelWithProjection if is_projected else CLIPTextModel)(config)


def make_tiny_t5(width):
    """Return (a T5Tokenizer of letters, a T5EncoderModel)."""
    from transformers import T5Config, T5EncoderModel, T5Tokenizer

    letters = [*(chr(code) for code in range(ord("a"), ord("z") + 1)), *"0123456789,.!?-"]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in letters)]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=width, d_kv=8, d_ff=2 * width, num_layers=2, num_heads=2, dropout_rate=0.1
    )
    return tokenizer, T5EncoderModel(config)


def make_tiny_vae(latent_channels=4, **config):
    """Return an AutoencoderKL whose latent cells have 2 pixels a side."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        sample_size=RESOLUTION,
        latent_channels=latent_channels,
        mid_block_add_attention=False,
        **config,
    )


def make_tiny_sdxl(folder):
    """Save a StableDiffusionXLPipeline of random weights, with text encoders of widths 32 and 48."""
    import torch
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    torch.manual_seed(0)
    first, second = make_tiny_clip_tokenizer(), make_tiny_clip_tokenizer(pad_token="!")
    unet = UNet2DConditionModel(
        sample_size=RESOLUTION // 2,
        block_out_channels=(16, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=32 + 48,
        attention_head_dim=4,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 48 + 4,
    )
    scheduler = EulerDiscreteScheduler(beta_schedule="scaled_linear", steps_offset=1, timestep_spacing="leading")
    StableDiffusionXLPipeline(
        make_tiny_vae(scaling_factor=0.13),
        make_tiny_text_encoder(first, 32),
        make_tiny_text_encoder(second, 48, is_projected=True),
        first,
        second,
        unet,
        scheduler,
        add_watermarker=False,
    ).save_pretrained(folder, safe_serialization=True)
    return Path(folder)


def make_whole_vae(folder):
    """Give a tiny model a VAE with attention, which real ones have."""
    import torch
    from diffusers import AutoencoderKL

    torch.manual_seed(1)
    config = AutoencoderKL.load_config(folder / "vae")
    AutoencoderKL.from_config({**config, "mid_block_add_attention": True}).save_pretrained(folder / "vae")
    return folder


def make_tiny_sd2(folder):
    """Give a tiny Stable Diffusion the width of the text encoder that tells version 2 from version 1."""
    from diffusers import UNet2DConditionModel

    config = UNet2DConditionModel.load_config(folder / "unet")
    UNet2DConditionModel.from_config({**config, "cross_attention_dim": 1024}).save_pretrained(folder / "unet")
    make_tiny_text_encoder(make_tiny_clip_tokenizer(24), 1024, num_layers=1).save_pretrained(folder / "text_encoder")
    return folder


def make_tiny_sd3(folder):
    """Save a StableDiffusion3Pipeline of random weights, with text encoders of widths 24, 32 and 64."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    torch.manual_seed(0)
    first, second = make_tiny_clip_tokenizer(), make_tiny_clip_tokenizer(pad_token="!")
    third, t5 = make_tiny_t5(64)
    transformer = SD3Transformer2DModel(
        sample_size=RESOLUTION // 2,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=64,
        caption_projection_dim=16,
        pooled_projection_dim=24 + 4 + 32 + 4,
        pos_embed_max_size=RESOLUTION // 2,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    StableDiffusion3Pipeline(
        transformer,
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        make_tiny_vae(16, scaling_factor=1.53, shift_factor=0.06, use_quant_conv=False, use_post_quant_conv=False),
        make_tiny_text_encoder(first, 24, is_projected=True),
        first,
        make_tiny_text_encoder(second, 32, is_projected=True),
        second,
        t5,
        third,
    ).save_pretrained(folder, safe_serialization=True)
    return Path(folder)


def make_tiny_flux(folder, guidance_embeds=True):
    """Save a FluxPipeline of random weights, with text encoders of widths 32 and 48."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(0)
    first, (second, t5) = make_tiny_clip_tokenizer(), make_tiny_t5(48)
    transformer = FluxTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        pooled_projection_dim=32,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    FluxPipeline(
        FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        make_tiny_vae(16, scaling_factor=0.36, shift_factor=0.12, use_quant_conv=False, use_post_quant_conv=False),
        make_tiny_text_encoder(first, 32),
        first,
        t5,
        second,
        transformer,
    ).save_pretrained(folder, safe_serialization=True)
    return Path(folder)


# ---------------------------------------------------------------------------------------------------------------------
# LoRAs

RANK = 4
SPELLINGS = {
    "diffusers' scripts": (
        "{component}.{module}.lora_linear_layer.down.weight",
        "{component}.{module}.lora_linear_layer.up.weight",
    ),
    "peft": ("{component}.{module}.lora_A.weight", "{component}.{module}.lora_B.weight"),
    "older": ("{component}.{module}.lora.down.weight", "{component}.{module}.lora.up.weight"),
    "webui": ("{prefix}_{flat}.lora_down.weight", "{prefix}_{flat}.lora_up.weight"),
}


def random_lora(model_dir, layers="all"):
    """Return a LoRA of random weights for all that a family gives one: {component: {module: (down, up)}}."""
    import torch

    from pipelines import lora
    from pipelines.families import find_family

    family, shapes = find_family(model_dir), lora.module_shapes(model_dir)
    generator, made = torch.Generator().manual_seed(0), {}
    for component in (family.denoiser, *family.trainable):
        for module in family.adapted(component, shapes[component], layers):
            out, *into = shapes[component][module]
            down = torch.randn(RANK, *into, generator=generator)
            up = torch.randn(out, RANK, *(1 for _ in into[1:]), generator=generator)
            made.setdefault(component, {})[module] = down * 0.3, up * 0.3
    return made


def write_lora(made, path, spelling="peft", family=None, metadata=None, alpha=None):
    """Write a LoRA in a spelling; alpha: in the tensors of each module."""
    import torch
    from safetensors.torch import save_file

    from pipelines import lora
    from pipelines.families import find_family

    tensors, prefixes = {}, find_family(family).webui if family else {}
    for component, modules in made.items():
        for module, pair in modules.items():
            name = lora.file_name(component, module)
            words = {"component": component, "module": name, "flat": name.replace(".", "_")}
            for pattern, tensor in zip(SPELLINGS[spelling], pair, strict=True):
                tensors[pattern.format(prefix=prefixes.get(component), **words)] = tensor
            if alpha:
                tensors[f"{prefixes[component]}_{words['flat']}.alpha"] = torch.tensor(alpha)
    save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
    return path
