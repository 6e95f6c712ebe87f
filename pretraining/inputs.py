"""The inputs of pretrain.py: flags of its data and its model, and the data that they name, checked and opened."""

import argparse

from common import cli
from common.errors import BadInput
from common.messages import say
from pretraining.filters import refuse_filter_flags
from pretraining.latents import LatentFiles, open_latents
from pretraining.loader import add_raw_data_flags, loader_options
from pretraining.online import RawImages
from pretraining.raw_data import list_sources
from pretraining.sources import Chunks

MANY_PASSES = 4.0  # over raw data in an epoch, above which a warning is given

MOST_VALIDATION_ROWS = 100_000  # that are taken unless --num_validation_rows asks for more; of SD 17 GB in memory


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the data that pretrain.py trains on."""
    group = parser.add_argument_group("data")
    data = "folder or URI of latents from preprocess.py; with --online, of images and captions"
    group.add_argument("--data", required=True, help=data)
    group.add_argument("--online", action="store_true", help="read images and captions and encode them while training")
    side = "width and height in pixels to train on; default: the model's resolution"
    group.add_argument("--resolution", type=cli.positive_int, help=side)
    group.add_argument("--latents_column", help="column of image latents; default: image_latents_RESOLUTION")
    captions = "column of caption embeddings; default: caption_latents or caption_embeddings; if the data has neither, "
    captions += "its captions are encoded while training"
    group.add_argument("--caption_latents_column", help=captions)
    scaled = "the latents are scaled samples, without a standard deviation and metadata.json, as in published data sets"
    group.add_argument("--prescaled_latents", action="store_true", help=scaled)
    validation = "data set like that of --data, whose rows are used for the validation loss alone; the workers keep "
    validation += "them in memory"
    group.add_argument("--validation_data", help=validation)
    rows = "rows for the validation loss: the first ones of --validation_data, where 0 takes all; without it, the last "
    rows += "ones of --data, which are then held out of training"
    group.add_argument("--num_validation_rows", type=cli.non_negative_int, default=0, help=rows)
    window = "row groups per worker that are read at the same time, a row of each in turn; more of them mix the rows "
    window += "better and take more memory"
    group.add_argument("--shuffle_window", type=cli.positive_int, default=16, help=window)
    group = parser.add_argument_group("raw data (with --online)")
    add_raw_data_flags(group)
    refuse_filter_flags(group)


def add_loading_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of how a worker gets its batches."""
    loading_workers = "number of actors per worker that read data, or encode it with --online; 0 reads in a thread of "
    loading_workers += "the worker and encodes in the worker; default: 1 with --online, else 0"
    group.add_argument("--num_data_loading_workers", type=cli.non_negative_int, help=loading_workers)
    kind = "type of the GPUs that data-loading actors encode on with --online, such as A10G; default: that of the "
    kind += "training workers, --accelerator_type"
    group.add_argument("--data_loading_accelerator_type", metavar="TYPE", help=kind)
    prefetch = "number of batches that a worker makes before they are needed"
    group.add_argument("--prefetch_batches", type=cli.positive_int, default=4, help=prefetch)


def check_loading_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a usage error if flags of the data do not fit together."""
    if args.online and args.prescaled_latents:
        parser.error("--prescaled_latents describes latents, but --online reads images: use only one of them")
    if not args.data_loading_accelerator_type:
        return
    if not args.online or args.num_data_loading_workers == 0:
        parser.error(
            "--data_loading_accelerator_type is for actors that encode: pass --online, and no "
            "--num_data_loading_workers 0"
        )
    if args.accelerator_type in (None, args.data_loading_accelerator_type):
        parser.error(
            "--data_loading_accelerator_type keeps GPUs from the training workers: pass another type as "
            "--accelerator_type"
        )


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model that pretrain.py trains, and of its results."""
    group = parser.add_argument_group("model")
    model = "folder of the pipeline with the VAE, text encoders and scheduler"
    group.add_argument("--model_dir", required=True, help=model)
    config = "config.json of the UNet to initialize randomly; default: the configuration of the model's UNet"
    group.add_argument("--unet_config", help=config)
    group.add_argument("--init_from_pretrained", action="store_true", help="start from the weights of the model's UNet")
    output = "folder, or URI, of the trained pipeline; it appears when it is complete"
    group.add_argument("--output_dir", required=True, help=output)
    storage = "folder, or URI, of experiments; default: the parent folder of --output_dir"
    group.add_argument("--storage_path", help=storage)
    name = "name of the folder in --storage_path for checkpoints and logs; default: OUTPUT_DIR.work"
    group.add_argument("--experiment_name", help=name)
    group.add_argument("--overwrite", action="store_true", help="replace an earlier run of other settings")
    prompts = "prompt to draw a sample of for the model card; may be repeated"
    group.add_argument("--sample_prompts", action="append", default=[], help=prompts)
    scale = "classifier-free guidance scale of the samples; default: by the model, 7.5 for Stable Diffusion"
    group.add_argument("--guidance_scale", type=cli.non_negative_float, help=scale)


def open_data(args: argparse.Namespace) -> LatentFiles | RawImages:
    """Return the LatentFiles or RawImages of --data, checked against the model; nothing is decoded."""
    return _open(args, args.data, "--data", 0 if args.validation_data else args.num_validation_rows)


def open_validation_data(args: argparse.Namespace) -> LatentFiles | RawImages | None:
    """Return the LatentFiles or RawImages of --validation_data, checked as --data is, or None without the flag.

    Raises BadInput if it holds fewer rows than --num_validation_rows, or more than MOST_VALIDATION_ROWS without it.
    """
    if not args.validation_data:
        return None
    data, asked = _open(args, args.validation_data, "--validation_data", 0), args.num_validation_rows
    rows = int(data.chunk_rows.sum())
    if asked > rows:
        raise BadInput(f"--num_validation_rows {asked}: --validation_data {args.validation_data} holds {rows} rows")
    if rows > MOST_VALIDATION_ROWS and not asked:
        what = f"--validation_data {args.validation_data} holds {rows} rows, which the workers would keep in memory"
        raise BadInput(f"{what}: pass --num_validation_rows to use the first ones, for example 10000")
    return data


def _open(args, location, flag, held_out):
    """Return the LatentFiles or RawImages at a location; held_out: rows at its end that are not trained on."""
    if not args.online:
        columns = (args.latents_column, args.caption_latents_column, args.prescaled_latents)
        data = open_latents(location, args.model_dir, args.resolution, *columns, flag)
        if data.has_texts:
            say(f"{location} has no caption latents: the captions are encoded in training")
        return data
    columns = args.image_column, args.caption_column
    options = {"flag": flag, "indexed": True, "keep": not args.dry_run, "on_ray": cli.ray_or_none(args)}
    sources = list_sources(location, *columns, max_bad_files=args.max_bad_files, **options)
    if sources.kind == "parquet" and Chunks(sources.rows, args.rows_per_file).passes > MANY_PASSES:
        say(
            f"warning: {flag} has row groups of up to {sources.rows.max()} rows, and any {args.rows_per_file} of them "
            "are read from the start of their row group: write smaller row groups, or pass a larger --rows_per_file"
        )
    encoder = {"model_dir": args.model_location, "mixed_precision": args.mixed_precision}
    encoder |= {"resolutions": (args.resolution,), "batch_size": args.encoding_batch_size}
    loader = loader_options(args, (args.resolution,))
    limits = args.max_bad_fraction, held_out
    return RawImages(vars(sources), args.rows_per_file, loader, encoder, *limits, flag)
