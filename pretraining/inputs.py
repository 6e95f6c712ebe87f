"""The inputs of pretrain.py: flags of its data and its model, and the data that they name, checked and opened."""

import argparse

from common import cli
from common.messages import say
from pretraining.latents import LatentFiles, open_latents
from pretraining.loader import add_raw_data_flags, loader_options
from pretraining.online import RawImages
from pretraining.raw_data import list_sources


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
    rows = "number of rows at the end of the data that are held out for the validation loss"
    group.add_argument("--num_validation_rows", type=cli.non_negative_int, default=0, help=rows)
    window = "row groups per worker that are read at the same time, a row of each in turn; more of them mix the rows "
    window += "better and take more memory"
    group.add_argument("--shuffle_window", type=cli.positive_int, default=16, help=window)
    add_raw_data_flags(parser.add_argument_group("raw data (with --online)"))


def add_loading_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of how a worker gets its batches."""
    loading_workers = "number of actors per worker that read data, or encode it with --online; 0 reads in a thread of "
    loading_workers += "the worker and encodes in the worker; default: 1 with --online, else 0"
    group.add_argument("--num_data_loading_workers", type=cli.non_negative_int, help=loading_workers)
    prefetch = "number of batches that a worker makes before they are needed"
    group.add_argument("--prefetch_batches", type=cli.positive_int, default=4, help=prefetch)


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
    if not args.online:
        columns = (args.latents_column, args.caption_latents_column, args.prescaled_latents)
        data = open_latents(args.data, args.model_dir, args.resolution, *columns)
        if data.has_texts:
            say(f"{args.data} has no caption latents: the captions are encoded in training")
        return data
    columns = args.image_column, args.caption_column
    options = {"flag": "--data", "indexed": True, "keep": not args.dry_run, "on_ray": cli.ray_or_none(args)}
    sources = list_sources(args.data, *columns, **options)
    encoder = {"model_dir": args.model_location, "mixed_precision": args.mixed_precision}
    encoder |= {"resolutions": (args.resolution,), "batch_size": args.encoding_batch_size}
    loader = loader_options(args, (args.resolution,))
    limits = args.max_bad_fraction, args.num_validation_rows
    return RawImages(tuple(map(vars, sources)), args.rows_per_file, loader, encoder, *limits)
