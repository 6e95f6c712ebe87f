"""Draw images of prompts with a Stable Diffusion model, on a Ray Data pool of actors.

Reads a model folder (what cache_model.py printed, or train.py wrote), writes PNG files and metadata.jsonl. An image
depends on the model, the prompt, the seed, its index and the sampler's settings alone. Run the command again to
continue: only images that are missing or broken are drawn.

    python run_model.py --model_dir models/emoji-64 --prompts "a 3d emoji of a dog" --output_dir data/try
    python run_model.py --model_dir MODEL --prompts "photo of a dog" --num_samples_per_prompt 200 --output_dir data/reg
"""

import sys
from pathlib import Path

from common.cli import (
    add_compute_flags,
    add_shared_flags,
    check_text,
    make_parser,
    placement,
    pool_size,
    positive_int,
    run,
    seed,
)
from common.errors import BadInput
from common.messages import print_result
from pipelines.drawing import check_model_and_sampler, draw_folder
from pipelines.samplers import SAMPLER, add_sampler_flags


def parse_args(argv=None):
    """Parse the command line."""
    parser = make_parser(__doc__)
    group = parser.add_argument_group("model")
    group.add_argument("--model_dir", required=True, help="folder of a Diffusers pipeline in safetensors")
    group.add_argument("--checkpoint", help="checkpoint folder of train.py whose modules replace the model's")
    group.add_argument("--no_safety_checker", action="store_true", help="turn the model's safety checker off")

    group = parser.add_argument_group("images")
    group.add_argument("--output_dir", required=True, help="folder for the images; kept and completed where it exists")
    group.add_argument("--prompts", action="append", default=[], help="one prompt, commas and all; may be repeated")
    group.add_argument("--prompts_file", help="text file with one prompt a line")
    group.add_argument("--num_samples_per_prompt", type=positive_int, default=4, help="images of each prompt")
    group.add_argument("--seed", type=seed, default=0, help="seed of the images")
    group.add_argument("--overwrite", action="store_true", help="redraw images of other settings")

    add_sampler_flags(parser.add_argument_group("sampler"))

    group = add_shared_flags(parser)
    images = "images an actor draws at a time"
    group.add_argument("--batch_size", "--sample_batch_size", type=positive_int, default=4, help=images)
    group.add_argument(
        "--num_workers",
        type=pool_size,
        help="actors: N, or MIN:MAX, or 0 for this process; default: one a GPU, or one for every four CPUs",
    )
    add_compute_flags(group)
    args = parser.parse_args(argv)
    if not args.prompts and not args.prompts_file:
        parser.error("give --prompts or --prompts_file")
    return args


def read_prompts(args):
    """Return the prompts of --prompts and --prompts_file, each once, in order."""
    prompts = list(args.prompts)
    if args.prompts_file:
        try:
            prompts += Path(args.prompts_file).read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"--prompts_file {args.prompts_file}: {error}") from None
    for prompt in prompts:
        check_text("--prompts", prompt)
    prompts = list(dict.fromkeys(prompt.strip() for prompt in prompts if prompt.strip()))
    if not prompts:
        raise BadInput(f"--prompts_file {args.prompts_file or ''} and --prompts hold no prompt")
    return prompts


def main(args):
    """Draw what is missing of the images that the command line asks for."""
    prompts = read_prompts(args)
    model = {name: getattr(args, name) for name in ("model_dir", "checkpoint", "mixed_precision")}
    model["safety_checker"] = not args.no_safety_checker
    sampler = {name: getattr(args, name) for name in SAMPLER}
    check_model_and_sampler(model, sampler)
    pool = {"batch_size": args.batch_size, "num_workers": args.num_workers, **placement(args)}
    count = args.num_samples_per_prompt
    drawn, records = draw_folder(args.output_dir, prompts, count, args.seed, model, sampler, args.overwrite, **pool)
    print_result(output_dir=str(Path(args.output_dir).resolve()), drawn=drawn, images=len(records))


if __name__ == "__main__":
    sys.exit(run(main, parse_args()))
