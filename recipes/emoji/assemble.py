"""Assemble the pipeline that pretrain.py starts from: trained VAE, text encoder and tokenizer, and a random UNet.

Older releases of transformers can read it too: the names of the text encoder's weights are those of `write_module`, and
the tokenizer has a vocab.json and a merges.txt.

    python -m recipes.emoji.assemble --vae_dir data/emoji/vae --clip_dir data/emoji/clip \\
        --output_dir data/emoji/start
"""

import sys

from common import cli, folders, messages
from pipelines.loading import set_up_torch
from training.checkpoints import write_module

UNET = {  # 10.9 million weights; attention below the top level
    "sample_size": 16,
    "block_out_channels": (64, 128, 192),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "norm_num_groups": 16,
    "cross_attention_dim": 128,
    "attention_head_dim": 4,
}
SCHEDULER = {  # zero terminal SNR: plain backgrounds of any colour (arXiv 2305.08891)
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
    "clip_sample": False,
    "set_alpha_to_one": True,
    "steps_offset": 1,
}


def parse_args(argv=None):
    """Parse the command line."""
    parser = cli.make_parser(__doc__)
    parser.add_argument("--vae_dir", required=True, help="output directory of train_vae.py")
    parser.add_argument("--clip_dir", required=True, help="output directory of train_clip.py")
    parser.add_argument("--output_dir", required=True, help="folder for the pipeline")
    parser.add_argument("--seed", type=cli.seed, default=0, help="seed of the UNet's weights")
    cli.add_shared_flags(parser)
    return parser.parse_args(argv)


def main(args):
    """Load the trained parts, initialize the UNet, and publish the pipeline."""
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTokenizer

    set_up_torch("cpu")
    torch.manual_seed(args.seed)
    pipeline = StableDiffusionPipeline(
        vae=AutoencoderKL.from_pretrained(args.vae_dir),
        text_encoder=CLIPTextModel.from_pretrained(f"{args.clip_dir}/text_encoder", dtype=torch.float32),
        tokenizer=CLIPTokenizer.from_pretrained(f"{args.clip_dir}/tokenizer"),
        unet=UNet2DConditionModel(**UNET),
        scheduler=DDIMScheduler(**SCHEDULER),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    with folders.staging(args.output_dir) as beside:
        pipeline.save_pretrained(beside)
        for name in ("vae", "text_encoder", "unet"):
            write_module(beside / name, getattr(pipeline, name))
        pipeline.tokenizer.backend_tokenizer.model.save(str(beside / "tokenizer"))  # vocab.json, merges.txt
        folders.publish(beside, args.output_dir)
    messages.print_result(output_dir=args.output_dir, unet_weights=sum(p.numel() for p in pipeline.unet.parameters()))


if __name__ == "__main__":
    sys.exit(cli.run(main, parse_args()))
