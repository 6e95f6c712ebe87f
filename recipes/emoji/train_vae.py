"""Train the VAE of the embedded model: 64x64 pixels to 4x16x16 latents, 0.65 million weights.

Two thirds of the pictures are emoji in three styles on random colours, one third are crops of photographs. To resume,
run the same command again.

    python -m recipes.emoji.train_vae --output_dir data/emoji/vae --max_train_steps 5 --train_batch_size 2
    python -m recipes.emoji.train_vae --output_dir data/emoji/vae
"""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from common import cli, folders, messages
from common.images import draw_crop, to_pixel_values
from recipes.emoji import pictures
from training import checkpoints
from training.logs import StepLog
from training.optimizer import Optimizer
from utils import row_rng

PHOTO_SHARE = 1 / 3
KL_WEIGHT = 1e-6
FIRST_LOG_VARIANCE = -6.0  # of the posterior; with a larger one it learns only the mean colour for a long time
EMOJI, PHOTO = 100, 101  # streams of random numbers


def parse_args(argv=None):
    """Parse the command line."""
    parser = cli.make_parser(__doc__)
    parser.add_argument("--cache_dir", default="data/emoji", help="folder of the downloaded archives")
    parser.add_argument("--output_dir", required=True, help="folder for the VAE; checkpoints go to OUTPUT_DIR.work")
    parser.add_argument("--max_train_steps", type=cli.positive_int, default=16000, help="optimizer steps")
    parser.add_argument("--train_batch_size", type=cli.positive_int, default=8, help="pictures per step")
    parser.add_argument("--lr", type=cli.positive_float, default=6e-4, help="peak learning rate of the cosine schedule")
    parser.add_argument("--checkpointing_steps", type=cli.positive_int, default=250, help="steps between checkpoints")
    parser.add_argument("--seed", type=cli.seed, default=0, help="seed of weights and pictures")
    cli.add_shared_flags(parser)
    return parser.parse_args(argv)


def make_vae():
    """Return a VAE with random weights."""
    import torch
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        block_out_channels=(16, 32, 64),
        down_block_types=["DownEncoderBlock2D"] * 3,
        up_block_types=["UpDecoderBlock2D"] * 3,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=64,
        mid_block_add_attention=False,
    )
    with torch.no_grad():
        vae.quant_conv.bias[4:] = FIRST_LOG_VARIANCE
        vae.quant_conv.weight[4:] *= 0.1
    return vae.to(memory_format=torch.channels_last)


class Pixels:
    """Training pictures by (seed, step, row)."""

    def __init__(self, cache_dir, seed):
        self.emoji = pictures.load_pictures(cache_dir)
        self.photos = [Image.fromarray(photo) for photo in pictures.load_photos(cache_dir)]
        self.seed = seed

    def batch(self, step, size):
        """Return a batch [B, 3, 64, 64] float32 in [-1, 1]."""
        import torch

        return torch.from_numpy(np.stack([self._row(step, row) for row in range(size)]))

    def _row(self, step, row):
        if row_rng(self.seed, PHOTO, step, row).random() < PHOTO_SHARE:
            rng = row_rng(self.seed, PHOTO, step, row)
            values = self._crop(rng)
        else:
            rng = row_rng(self.seed, EMOJI, step, row)
            picture = self.emoji[rng.integers(len(self.emoji))]
            background = tuple(int(c) for c in rng.integers(256, size=3)) if rng.random() < 0.8 else (255, 255, 255)
            values = to_pixel_values(pictures.compose(picture, rng, background), 64)
        return values[rng.permutation(3)] if rng.random() < 0.5 else values  # the same shapes in other colours

    def _crop(self, rng):
        photo = self.photos[rng.integers(len(self.photos))]
        side = int(rng.uniform(64, min(photo.size)))
        left, top = (int(rng.integers(length - side + 1)) for length in photo.size)
        square = photo.crop((left, top, left + side, top + side))
        return to_pixel_values(square, 64, draw_crop(square.size, rng))


def vae_loss(vae, pixel_values, generator):
    """Return (loss, mean squared error); the loss is L1 + 2 MSE + 0.5 L1 of neighbour differences + weighted KL."""
    posterior = vae.encode(pixel_values).latent_dist
    output = vae.decode(posterior.sample(generator)).sample
    error = output - pixel_values
    edges = sum((error.diff(dim=dim)).abs().mean() for dim in (2, 3))
    mse = error.square().mean()
    kl = posterior.kl().mean() / output[0].numel()
    return error.abs().mean() + 2 * mse + 0.5 * edges + KL_WEIGHT * kl, mse


def latents_std(vae, cache_dir, seed):
    """Return the standard deviation of the latents of the UNet's pictures; its inverse is the scaling factor."""
    import torch

    drawn = [picture for picture in pictures.load_pictures(cache_dir, ("fluent",)) if pictures.is_drawn(picture)]
    rows = []
    for index, picture in enumerate(drawn):
        image = pictures.compose(picture, row_rng(seed, EMOJI, 0, index), (255, 255, 255))
        rows.append(to_pixel_values(image, 64))
    with torch.inference_mode():
        return vae.encode(torch.from_numpy(np.stack(rows))).latent_dist.sample().std().item()


def main(args):
    """Train from the newest checkpoint to the last step, and publish the VAE with its scaling factor."""
    import torch

    output_dir, work_dir = Path(args.output_dir), Path(f"{args.output_dir}.work")
    if folders.read_manifest(output_dir):
        return messages.print_result(output_dir=str(output_dir), trained=0)
    torch.manual_seed(args.seed)
    vae = make_vae()
    work_dir.mkdir(parents=True, exist_ok=True)
    step, folder = checkpoints.newest_checkpoint(work_dir)
    if folder:
        vae = type(vae).from_pretrained(folder / "vae").to(memory_format=torch.channels_last)
    vae.train()
    schedule = ("cosine", 100, args.max_train_steps)
    optimizer = Optimizer([(vae.parameters(), args.lr)], 1e-4, 1.0, False, torch.device("cpu"), schedule)
    if folder:
        checkpoints.restore_optimizer(folder, {"vae": vae}, optimizer.adamw)
    write = partial(checkpoints.write_state, modules={"vae": vae}, optimizer=optimizer.adamw)
    pixels, log, mean_mse = Pixels(args.cache_dir, args.seed), StepLog(work_dir, step), 0.05
    with messages.Progress("vae", args.max_train_steps, "steps", initial=step) as progress:
        while step < args.max_train_steps:
            generator = torch.Generator().manual_seed(step)
            pixel_values = pixels.batch(step, args.train_batch_size).contiguous(memory_format=torch.channels_last)
            loss, mse = vae_loss(vae, pixel_values, generator)
            loss.backward()
            grad_norm = optimizer.step(step)
            step += 1
            mean_mse += 0.02 * (mse.item() - mean_mse)
            psnr = 10 * np.log10(4 / mean_mse)
            progress.update(1, psnr=f"{psnr:.2f}")
            if step % 50 == 0:
                log.write(step, loss=loss.item(), psnr=psnr, grad_norm=grad_norm.item())
            if step % args.checkpointing_steps == 0 or step == args.max_train_steps:
                checkpoints.save_checkpoint(work_dir, step, write, {}, keep=2)
    vae.register_to_config(scaling_factor=1 / latents_std(vae.eval(), args.cache_dir, args.seed))
    with folders.staging(output_dir) as beside:
        vae.save_pretrained(beside)
        (beside / "log.json").write_text(json.dumps({"psnr": psnr, "steps": step}))
        folders.publish(beside, output_dir)
    messages.print_result(output_dir=str(output_dir), psnr=psnr)


if __name__ == "__main__":
    sys.exit(cli.run(main, parse_args()))
