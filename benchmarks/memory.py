"""Estimate the GPU memory of train.py for Stable Diffusion 1.x at 512 pixels; needs no GPU.

Counts weights, gradients and AdamW's moments of the UNet and text encoder, autocast's bf16 copies, and the activations
that a forward pass in bf16 on the meta device saves for the backward pass, with fused attention. It does not count
norms that autocast computes in float32, buffers of libraries, and fragmentation.

    python -m benchmarks.memory --train_batch_size 1
"""

import argparse
import json

import diffusers
import torch
from diffusers import UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

CARDS = (16, 24, 80)  # GB
FREE = 0.92  # share of a card's memory that CUDA and fragmentation leave
TOKENS, PIXELS = 77, 512


def make_modules(checkpointing):
    """Return Stable Diffusion 1.x's UNet and text encoder on the meta device, without memory for their weights."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
        text = CLIPTextConfig(
            vocab_size=49408, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
        )
        text_encoder = CLIPTextModel(text)
    if checkpointing:
        unet.enable_gradient_checkpointing()
        text_encoder.activation_checkpointing_enable()
    return unet.to(torch.bfloat16).train(), text_encoder.to(torch.bfloat16).train()


def saved_bytes(unet, text_encoder, rows):
    """Return the bytes that a forward pass of `rows` rows saves for the backward pass, without the weights."""
    weights = {id(parameter) for module in (unet, text_encoder) for parameter in module.parameters()}
    saved = {}

    def keep(tensor):
        *_, height, width = (0, 0, *tensor.shape)
        is_attention = height >= TOKENS and width in (height, TOKENS)  # feature maps are smaller
        if id(tensor) not in weights and not is_attention:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = (storage.nbytes(), tensor)  # the tensor, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ids = torch.zeros(rows, TOKENS, dtype=torch.long, device="meta")
        latents = torch.zeros(rows, 4, PIXELS // 8, PIXELS // 8, dtype=torch.bfloat16, device="meta")
        timesteps = torch.zeros(rows, dtype=torch.long, device="meta")
        loss = unet(latents, timesteps, text_encoder(ids)[0]).sample.square().mean()
    del loss
    return sum(size for size, _ in saved.values())


def main(args):
    """Print the parts, their sums and the cards that they fit on, then one JSON line."""
    diffusers.utils.logging.set_verbosity_error()
    rows, results = 2 * args.train_batch_size, []
    for trains_text in (True, False):
        for checkpointing in (False, True):
            unet, text_encoder = make_modules(checkpointing)
            activations = saved_bytes(unet, text_encoder.requires_grad_(trains_text), rows)
            counts = [sum(each.numel() for each in module.parameters()) for module in (unet, text_encoder)]
            trained = counts[0] + trains_text * counts[1]
            for bits in (32, 8):
                gigabytes = {
                    "weights": 4 * sum(counts) / 1e9,
                    "gradients": 4 * trained / 1e9,
                    "adam": 2 * bits // 8 * trained / 1e9,
                    "bf16 copies": 2 * sum(counts) / 1e9,
                    "activations": activations / 1e9,
                }
                total = sum(gigabytes.values())
                fits = [card for card in CARDS if total <= FREE * card]
                results.append({"text_encoder": trains_text, "checkpointing": checkpointing, "adam_bits": bits,
                                "gigabytes": gigabytes, "total": total, "fits": fits})  # fmt: skip
                parts = "  ".join(f"{name} {size:.1f}" for name, size in gigabytes.items())
                switches = f"text encoder {'trained' if trains_text else 'frozen '}  checkpointing {checkpointing!s:5}"
                print(f"{switches}  Adam of {bits:2d} bits: {total:5.1f} GB ({parts}); fits {fits}")
    print(json.dumps({"train_batch_size": args.train_batch_size, "rows": results}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_batch_size", type=int, default=1, help="pairs of images per batch")
    main(parser.parse_args())
