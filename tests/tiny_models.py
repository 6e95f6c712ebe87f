"""Tiny models of random weights: a Stable Diffusion pipeline, a CLIP and a DINO."""

from pathlib import Path

RESOLUTION = 16  # pixels a side of the tiny model: 8 latent cells of 2 pixels


def make_tiny_model(folder, prediction_type="epsilon", num_train_timesteps=1000):
    """Save a StableDiffusionPipeline of some 100,000 random weights: 16x16 pixels, 4x8x8 latents, 24 tokens."""
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + list("0123456789,.!?-")
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=24, pad_token="<|endoftext|>"
    )
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokens),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=24,
            bos_token_id=len(tokens) - 2,
            eos_token_id=len(tokens) - 1,
        )
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        sample_size=RESOLUTION,
        scaling_factor=0.6,
        mid_block_add_attention=False,
    )
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
