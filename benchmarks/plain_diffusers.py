"""Use a model folder with Diffusers only, in whatever release is installed; older_libraries.py runs this with two.

Imports nothing from the project. `draw` loads a model folder as its card describes, saves pictures of one prompt and
prints JSON: the releases, missing weights, the number of pictures that the safety checker flags, and a sha256 of each
component's weights. `save` writes a tiny model with the components of Stable Diffusion 1.4.

    python -m benchmarks.plain_diffusers draw --model_dir models/emoji-64 --output pictures.npy
    python -m benchmarks.plain_diffusers save --model_dir data/tiny
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import diffusers
import numpy as np
import torch
import transformers

LENGTH, SIDE = 24, 16  # tokens of a prompt, pixels a side, of the tiny model


def draw(model_dir, prompt, seed, num_images, num_inference_steps, output):
    """Save pictures [N, H, W, 3] of a prompt; return releases, missing weights, flagged pictures and weight hashes."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(model_dir, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    options = {"num_images_per_prompt": num_images, "num_inference_steps": num_inference_steps}
    drawn = pipeline(prompt, generator=generator, **options)
    np.save(output, np.stack([np.asarray(image) for image in drawn.images]))
    missing, weights = [], {}
    for name, module in pipeline.components.items():
        if isinstance(module, torch.nn.Module):
            _, info = type(module).from_pretrained(Path(model_dir, name), output_loading_info=True)
            missing += [f"{name}.{key}" for key in sorted(info["missing_keys"])]
            weights[name] = digest(module)
    return {
        "transformers": transformers.__version__,
        "diffusers": diffusers.__version__,
        "missing": missing,
        "flagged": sum(drawn.nsfw_content_detected or []),
        "weights": weights,
    }


def digest(module):
    """Return one sha256 of a module's weights, independent of their names and order."""
    digests = sorted(hashlib.sha256(tensor.numpy()).hexdigest() for tensor in module.state_dict().values())
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def save_tiny_model(folder):
    """Save a StableDiffusionPipeline with random weights and all components of version 1.4."""
    torch.manual_seed(0)
    block = {"norm_num_groups": 4, "layers_per_block": 1}
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        sample_size=SIDE,
        **block,
    )
    unet = diffusers.UNet2DConditionModel(
        sample_size=SIDE // 2,
        block_out_channels=(16, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        **block,
    )
    scheduler = diffusers.PNDMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
    )
    parts = [vae, *make_text_parts(), unet, scheduler, *make_safety_parts()]
    diffusers.StableDiffusionPipeline(*parts).save_pretrained(folder)
    path = Path(folder, "model_index.json")
    index = json.loads(path.read_text())
    index["feature_extractor"] = ["transformers", "CLIPFeatureExtractor"]  # as it was called
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return {"transformers": transformers.__version__, "diffusers": diffusers.__version__}


def make_text_parts():
    """Return a text encoder, and a tokenizer of single characters."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789,.!?-"]
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
        Path(folder, "merges.txt").write_text("#version: 0.2\n")
        tokenizer = transformers.CLIPTokenizer.from_pretrained(folder, model_max_length=LENGTH)
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokens),
        max_position_embeddings=LENGTH,
        bos_token_id=len(tokens) - 2,
        eos_token_id=len(tokens) - 1,
        **transformer(),
    )
    return transformers.CLIPTextModel(config), tokenizer


def make_safety_parts():
    """Return a safety checker that flags nothing, and its feature extractor."""
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker

    vision = {"image_size": SIDE, "patch_size": 8, **transformer()}
    config = transformers.CLIPConfig(vision_config=vision, text_config=transformer(), projection_dim=8)
    checker = StableDiffusionSafetyChecker(config)
    for name in ("concept_embeds_weights", "special_care_embeds_weights"):
        torch.nn.init.constant_(getattr(checker, name), 2)  # thresholds of a cosine
    size = {"height": SIDE, "width": SIDE}
    return checker, transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=size)


def transformer():
    """Return the sizes of a tiny transformer."""
    return {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def main(args):
    """Draw or save, and print one JSON line."""
    if args.what == "save":
        print(json.dumps(save_tiny_model(args.model_dir)))
        return
    given = (args.model_dir, args.prompt, args.seed, args.num_images, args.num_inference_steps, args.output)
    print(json.dumps(draw(*given)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("draw", "save"), help="draw with a model, or save a tiny model")
    parser.add_argument("--model_dir", required=True, help="model folder to draw with, or to write")
    parser.add_argument("--prompt", default="a 3d emoji of a cat", help="prompt to draw")
    parser.add_argument("--seed", type=int, default=0, help="seed of the pictures")
    parser.add_argument("--num_images", type=int, default=4, help="pictures to draw")
    parser.add_argument("--num_inference_steps", type=int, default=20, help="denoising steps per picture")
    parser.add_argument("--output", help=".npy file for the pictures")
    sys.exit(main(parser.parse_args()))
