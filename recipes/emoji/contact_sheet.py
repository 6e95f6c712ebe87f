"""Draw one picture for each prompt in a file, with fixed seeds, and put them on a contact sheet.

python -m recipes.emoji.contact_sheet --model_dir models/emoji-64 --output sheet.png
"""

import io
import sys
from pathlib import Path

from common import cli, errors, folders, messages
from common.sheets import make_sheet
from utils import image_seed

COLUMNS = 4
PROMPTS_FILE = Path(__file__).with_suffix(".txt")


def parse_args(argv=None):
    """Parse the command line."""
    parser = cli.make_parser(__doc__)
    parser.add_argument("--model_dir", required=True, help="folder of a Diffusers pipeline")
    parser.add_argument("--output", required=True, help="PNG file to write or replace")
    parser.add_argument(
        "--checkpoint", help="checkpoint of pretrain.py to take the UNet from, preferably its ema folder"
    )
    parser.add_argument("--prompts_file", default=str(PROMPTS_FILE), help="text file with one prompt per line")
    parser.add_argument("--num_inference_steps", type=cli.positive_int, default=30, help="denoising steps")
    parser.add_argument(
        "--guidance_scale", type=cli.non_negative_float, default=3.0, help="classifier-free guidance scale"
    )
    parser.add_argument("--seed", type=cli.seed, default=0, help="seed of the pictures")
    cli.add_shared_flags(parser)
    return parser.parse_args(argv)


def read_prompts(path):
    """Return the prompts of a file with one prompt per line."""
    try:
        prompts = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise errors.BadInput(f"--prompts_file {path}: {error}") from None
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise errors.BadInput(f"--prompts_file {path} holds no prompt")
    return prompts


def draw_prompts(pipeline, prompts, seed, **sampler):
    """Return one picture for each prompt; its noise depends only on the seed and the number of the prompt."""
    from pipelines.loading import draw_images

    images = []
    with messages.Progress("draw", len(prompts), "images") as progress:
        for index, prompt in enumerate(prompts):
            images += draw_images(pipeline, [prompt], [image_seed(seed, index)], **sampler)[0]
            progress.update(1)
    return images


def main(args):
    """Draw the pictures and write the sheet, whole or not at all."""
    import torch

    from pipelines.loading import load_pipeline, set_up_torch
    from pipelines.model_folder import check_pipeline

    prompts = read_prompts(args.prompts_file)
    output = Path(args.output)
    folders.check_writable(output.parent, "--output")
    check_pipeline(args.model_dir)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    set_up_torch(device)
    pipeline = load_pipeline(args.model_dir, torch.float32, args.checkpoint, safety_checker=False).to(device)
    sampler = {name: getattr(args, name) for name in ("num_inference_steps", "guidance_scale")}
    file = io.BytesIO()
    make_sheet(draw_prompts(pipeline, prompts, args.seed, **sampler), prompts, COLUMNS).save(file, "PNG")
    output.parent.mkdir(parents=True, exist_ok=True)
    folders.write_bytes(output, file.getvalue())
    messages.print_result(output=str(output), images=len(prompts))


if __name__ == "__main__":
    sys.exit(cli.run(main, parse_args()))
