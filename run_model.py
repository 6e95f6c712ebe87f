"""Draw images of prompts with a Stable Diffusion model, on a pool of Ray Data actors.

Reads a model folder, as printed by cache_model.py or written by train.py. Writes PNG files and metadata.jsonl. An image
depends only on the model, the prompt, the seed, the image's index and the sampler flags. To resume, run the same
command again: only missing and damaged images are drawn. Folders may be URIs such as s3://bucket/images.

    python run_model.py --model_dir models/emoji-64 --prompts "a 3d emoji of a dog" --output_dir data/try
    python run_model.py --model_dir MODEL --prompts "photo of a dog" --num_samples_per_prompt 200 --output_dir data/reg
"""

import argparse

from common.cli import (
    add_compute_flags,
    add_shared_flags,
    check_text,
    make_parser,
    parse,
    placement,
    pool_size,
    positive_int,
    run,
    seed,
)
from common.errors import BadInput
from common.messages import print_result
from common.storage import absolute
from pipelines.drawing import check_model_and_sampler, draw_folder, explain_folders, make_copies
from pipelines.lora import add_lora_flag, describe
from pipelines.prompts import read_prompts_file, unique_prompts
from pipelines.samplers import SAMPLER, add_sampler_flags


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model_dir", required=True, help="folder, or URI, of a Diffusers pipeline with safetensors weights"
    )
    checkpoint_help = "checkpoint folder, or its URI, of train.py whose components replace the model's"
    group.add_argument("--checkpoint", help=checkpoint_help)
    add_lora_flag(group)
    group.add_argument("--no_safety_checker", action="store_true", help="disable the model's safety checker")

    group = parser.add_argument_group("images")
    group.add_argument(
        "--output_dir", required=True, help="folder, or URI, to write the images to; an existing one is completed"
    )
    group.add_argument("--prompts", action="append", default=[], help="prompt to draw; may be repeated")
    group.add_argument("--prompts_file", help="text file with one prompt per line")
    group.add_argument("--num_samples_per_prompt", type=positive_int, default=4, help="number of images per prompt")
    group.add_argument("--seed", type=seed, default=0, help="random seed of the images")
    group.add_argument(
        "--overwrite", action="store_true", help="redraw existing images that were drawn with other settings"
    )

    add_sampler_flags(parser.add_argument_group("sampler"))

    group = add_shared_flags(parser)
    images = "number of images that an actor draws at a time"
    group.add_argument("--batch_size", "--sample_batch_size", type=positive_int, default=4, help=images)
    group.add_argument(
        "--num_workers",
        type=pool_size,
        help="number of Ray actors: N or MIN:MAX; 0 runs in this process; default: one per GPU, else one per four CPUs",
    )
    add_compute_flags(group)
    args = parse(parser, argv)
    if not args.prompts and not args.prompts_file:
        parser.error("pass --prompts or --prompts_file")
    return args


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Return the unique prompts of --prompts and --prompts_file, in order."""
    from_file = read_prompts_file(args.prompts_file) if args.prompts_file else []
    for prompt in args.prompts:
        check_text("--prompts", prompt)
    prompts = unique_prompts([*args.prompts, *from_file])
    if not prompts:
        flags = f"--prompts and --prompts_file {args.prompts_file}" if args.prompts_file else "--prompts"
        raise BadInput(f"{flags} contain no text: add a prompt")
    return prompts


def main(args: argparse.Namespace) -> None:
    """Draw the requested images that are missing."""
    prompts = read_prompts(args)
    model = {name: getattr(args, name) for name in ("model_dir", "checkpoint", "mixed_precision")}
    model |= {"safety_checker": not args.no_safety_checker, "copies": make_copies(model), "loras": describe(args.lora)}
    sampler = {name: getattr(args, name) for name in SAMPLER}
    check_model_and_sampler(model, sampler)
    pool = {"batch_size": args.batch_size, "num_workers": args.num_workers, **placement(args)}
    count = args.num_samples_per_prompt
    if args.dry_run:
        job = (args.output_dir, prompts, count, model)
        print_result(dry_run=True, settings=sampler, **explain_folders([job], args.seed, sampler, args.overwrite))
        return
    drawn, records = draw_folder(args.output_dir, prompts, count, args.seed, model, sampler, args.overwrite, **pool)
    print_result(output_dir=absolute(args.output_dir), drawn=drawn, images=len(records))


if __name__ == "__main__":
    run(main, parse_args())
