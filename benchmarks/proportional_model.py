"""Make a pipeline with random weights and the proportions of Stable Diffusion that is small enough to train on a CPU.

It takes 128 pixels (4x16x16 latents). As with Stable Diffusion at 512 pixels, encoding an image takes about 31 % of a
training step without a latent cache.

    python -m benchmarks.proportional_model --output_dir data/proportional
"""

import argparse
import json
import statistics
import time

from benchmarks.measuring import MODEL, ROOT

VAE_CHANNELS = (64, 96, 128, 128)
UNET_CHANNELS = (64, 96, 160, 160)


def make_model(folder):
    """Save the pipeline, with the tokenizer of the embedded model."""
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    tokenizer = CLIPTokenizer.from_pretrained(ROOT / MODEL / "tokenizer")
    text = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=VAE_CHANNELS,
        layers_per_block=2,
        norm_num_groups=16,
        sample_size=128,
    )
    unet = UNet2DConditionModel(
        sample_size=16, block_out_channels=UNET_CHANNELS, cross_attention_dim=192, attention_head_dim=8
    )
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
    )
    parts = (vae, CLIPTextModel(text), tokenizer, unet, scheduler, None, None)
    StableDiffusionPipeline(*parts, requires_safety_checker=False).save_pretrained(folder)


def measure(folder, repeats=7):
    """Return the median seconds to encode a pair of images, and of the rest of a training step."""
    import torch
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(folder)
    images, latents = torch.randn(2, 3, 128, 128), torch.randn(2, 4, 16, 16)
    ids = torch.zeros(2, pipeline.tokenizer.model_max_length, dtype=torch.long)
    parameters = [*pipeline.unet.parameters(), *pipeline.text_encoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def encode():
        with torch.no_grad():
            pipeline.vae.encode(images)

    def learn():
        hidden_states = pipeline.text_encoder(ids)[0]
        pipeline.unet(latents, torch.tensor([1, 2]), hidden_states).sample.square().mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    medians = []
    for function in (encode, learn):
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times[1:]))
    return medians


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True, help="folder for the pipeline")
    args = parser.parse_args()
    make_model(args.output_dir)
    encode, learn = measure(args.output_dir)
    print(json.dumps({"encode_s": round(encode, 4), "learn_s": round(learn, 4), "share": encode / (encode + learn)}))
