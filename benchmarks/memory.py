"""Estimate the GPU memory of train.py for the published models of each family; needs no GPU and no weights.

One pair of a photo and a class image in bf16 (see training.estimate for what is counted), by flags of train.py. The
text encoders train where that is the default. The largest text encoder, which reads the prompts before, has to fit the
GPU too. Prints a Markdown table; the last line is JSON.

    python -m benchmarks.memory
    python -m benchmarks.memory --models sdxl flux --train_batch_size 2
"""

import argparse
import json
import tempfile
from pathlib import Path

from pipelines import loading
from pipelines.families import FAMILIES
from training.estimate import HALF, device_bytes
from training.task import ALL_WEIGHTS, Adapters

CARDS = (8, 12, 16, 24, 80)  # GB
FREE = 0.92  # share of a card's memory that CUDA and fragmentation leave
CLIP_L = {"vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
          "num_attention_heads": 12, "max_position_embeddings": 77, "projection_dim": 768}  # fmt: skip
CLIP_G = {**CLIP_L, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
          "num_attention_heads": 20, "projection_dim": 1280}  # fmt: skip
T5_XXL = {"vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
          "feed_forward_proj": "gated-gelu", "is_encoder_decoder": False}  # fmt: skip
VAE = {"block_out_channels": [128, 256, 512, 512], "latent_channels": 4}
CLIP, PROJECTED, T5 = "CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel"
SD3 = {"sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "attention_head_dim": 64,
       "joint_attention_dim": 4096, "pooled_projection_dim": 2048, "qk_norm": "rms_norm"}  # fmt: skip
SD3_ENCODERS = {
    "text_encoder": (PROJECTED, CLIP_L),
    "text_encoder_2": (PROJECTED, CLIP_G),
    "text_encoder_3": (T5, T5_XXL),
}
# {name: (pipeline, side in pixels, denoiser, its configuration, {text encoder: (class, its configuration)}, channels)}
MODELS = {
    "sd1": ("StableDiffusionPipeline", 512, "UNet2DConditionModel",
            {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
            {"text_encoder": (CLIP, CLIP_L)}, 4),
    "sdxl": ("StableDiffusionXLPipeline", 1024, "UNet2DConditionModel",
             {"sample_size": 128, "block_out_channels": [320, 640, 1280], "cross_attention_dim": 2048,
              "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
              "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
              "transformer_layers_per_block": [1, 2, 10], "attention_head_dim": [5, 10, 20],
              "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
              "projection_class_embeddings_input_dim": 2816},
             {"text_encoder": (CLIP, CLIP_L), "text_encoder_2": (PROJECTED, CLIP_G)}, 4),
    "sd3.5-medium": ("StableDiffusion3Pipeline", 1024, "SD3Transformer2DModel",
                     {**SD3, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536,
                      "pos_embed_max_size": 384, "dual_attention_layers": list(range(13))}, SD3_ENCODERS, 16),
    "sd3.5-large": ("StableDiffusion3Pipeline", 1024, "SD3Transformer2DModel",
                    {**SD3, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
                     "pos_embed_max_size": 192}, SD3_ENCODERS, 16),
    "flux": ("FluxPipeline", 1024, "FluxTransformer2DModel",
             {"in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
              "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768,
              "guidance_embeds": True, "axes_dims_rope": [16, 56, 56]},
             {"text_encoder": (CLIP, CLIP_L), "text_encoder_2": (T5, T5_XXL)}, 16),
}  # fmt: skip


def write_configs(folder, name):
    """Write the configurations of a published model as a model folder without weights."""
    pipeline, _, denoiser, config, encoders, channels = MODELS[name]
    parts = {FAMILIES[pipeline].denoiser: ("diffusers", denoiser, config)}
    parts |= {part: ("transformers", *encoder) for part, encoder in encoders.items()}
    parts["vae"] = ("diffusers", "AutoencoderKL", VAE | {"latent_channels": channels})
    for part, (_, _, values) in parts.items():
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(values))
    index = {part: list(each[:2]) for part, each in parts.items()}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline, **index}))


def methods(family, rank):
    """Yield (flags, whether text encoders train, is_recomputed, Adapters, use_8bit_adam)."""
    for trains in dict.fromkeys((family.trains_text_encoders, False)):
        text = [] if trains or not family.trains_text_encoders else ["--no-train_text_encoder"]
        for is_recomputed in (False, True):
            more = text + ["--gradient_checkpointing"] * is_recomputed
            for bits in (None, 8, 4):
                flags = [f"--lora {rank}", *([f"--base_bits {bits}"] if bits else []), *more]
                yield flags, trains, is_recomputed, Adapters(lora=rank, lora_alpha=float(rank), base_bits=bits), False
            for use_8bit, adam in ((False, []), (True, ["--use_8bit_adam"])) if family.trains_whole else ():
                yield adam + more, trains, is_recomputed, ALL_WEIGHTS, use_8bit


def largest_encoder(family, folder):
    """Return the bytes of the largest text encoder, which reads the prompts alone before the training."""
    return max(HALF * loading.empty_model(folder, name).num_parameters() for name in family.encoders)


def main(args):
    """Print a row of a Markdown table for each method, then one JSON line."""
    rows = []
    print("| model | flags | GB | smallest GPU |\n|---|---|---|---|")
    for name in args.models:
        folder = Path(tempfile.mkdtemp())
        write_configs(folder, name)
        family, side = FAMILIES[MODELS[name][0]], MODELS[name][1]
        before = largest_encoder(family, folder)
        for flags, *options in methods(family, args.rank):
            parts = device_bytes(family, folder, 2 * args.train_batch_size, (side, side), *options)
            gigabytes = {part: round(size / 1e9, 2) for part, size in parts.items()}
            peak = max(sum(parts.values()), before) / 1e9
            card = next((card for card in CARDS if peak <= FREE * card), None)
            rows.append({"model": name, "flags": flags, "gigabytes": gigabytes, "peak": round(peak, 1), "card": card})
            shown = " ".join(f"`{flag}`" for flag in flags)
            print(f"| {name} | {shown} | {peak:.1f} | {f'{card} GB' if card else '–'} |", flush=True)
    print(json.dumps({"train_batch_size": args.train_batch_size, "rows": rows}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="models to estimate")
    parser.add_argument("--train_batch_size", type=int, default=1, help="pairs of images per batch")
    parser.add_argument("--rank", type=int, default=16, help="rank of the LoRA")
    main(parser.parse_args())
