"""Train the UNet of a Stable Diffusion model on images and captions: DDPM loss on latents, Ray Train with DDP or FSDP.

Reads a model folder (VAE, text encoder, scheduler, the UNet's configuration) and latents of preprocess.py, or with
--online raw data; writes the whole pipeline to --output_dir, checkpoints and logs to --storage_path. Run the command
again to continue.

    python pretrain.py --data data/latents --model_dir models/emoji-64 --output_dir data/base --max_steps 20 \\
        --batch_size_per_worker 8 --num_workers 0
    python pretrain.py --data s3://bucket/latents --model_dir MODEL --output_dir data/base --resolution 256 \\
        --strategy fsdp --fsdp_sharding SHARD_GRAD_OP
"""

import argparse
import contextlib
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import utils
from common import cli, folders, no_gc
from common.cluster import start_ray
from common.errors import BadInput
from common.storage import absolute
from pipelines import loading
from pipelines.configs import check_resolution, model_resolution, pixel_factor, read_config, read_unet_config
from pipelines.model_folder import check_model, check_pipeline, count_weights, count_weights_of, digest_model
from pretraining.latents import LatentEncoder, LatentFiles, open_latents
from pretraining.loader import add_raw_data_flags, loader_options
from pretraining.raw_data import list_sources
from pretraining.resources import share_with_loaders
from pretraining.streams import Order, RawImages, ahead, hold_out, make_load, training_batches, validation_batches
from training import checkpoints, driver, loop, parallel, resuming, workers
from training.optimizer import make_optimizer
from training.publishing import pretraining_card, publish_pipeline

# Flags that decide the weights that come out: a run continues only under the same.
SETTINGS = """
    resolution prescaled_latents num_validation_rows online init_from_pretrained lr lr_scheduler lr_warmup_steps
    adam_weight_decay max_grad_norm snr_gamma ema_decay caption_dropout shuffle_window seed mixed_precision
""".split()  # noqa: SIM905


def parse_args(argv=None):
    """Parse the command line."""
    parser = cli.make_parser(__doc__)
    _add_data_flags(parser)
    _add_training_flags(parser)
    group = cli.add_shared_flags(parser)
    group.add_argument("--num_workers", type=cli.non_negative_int, help="0: this process; default: one a GPU, or 1")
    loading = "of each worker: actors that read, or encode with --online (default 1); 0: a thread reads, itself encodes"
    group.add_argument("--num_data_loading_workers", type=cli.non_negative_int, help=loading)
    group.add_argument("--prefetch_batches", type=cli.positive_int, default=4, help="batches made ahead of their step")
    group.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp", help="how workers share the UNet")
    group.add_argument("--fsdp_sharding", choices=parallel.SHARDINGS, default="FULL_SHARD", help="what FSDP splits")
    cli.add_compute_flags(group)
    args = parser.parse_args(argv)
    if args.lr_warmup_steps and args.lr_scheduler == "constant":
        parser.error("--lr_warmup_steps does nothing with --lr_scheduler constant: take constant_with_warmup")
    if args.online and args.prescaled_latents:
        parser.error("--prescaled_latents is about latents, --online reads images: leave one out")
    if args.unet_config and args.init_from_pretrained:
        parser.error("--unet_config makes a new UNet, --init_from_pretrained takes the model's: leave one out")
    return args


def _add_data_flags(parser):
    group = parser.add_argument_group("data")
    group.add_argument("--data", required=True, help="folder or URI of latents; of raw data with --online")
    group.add_argument("--online", action="store_true", help="encode raw data on the fly")
    group.add_argument("--resolution", type=cli.positive_int, help="pixels a side; default: the model's")
    group.add_argument("--latents_column", help="column of latents; default: image_latents_RESOLUTION")
    group.add_argument("--caption_latents_column", help="default: caption_latents or caption_embeddings")
    group.add_argument("--prescaled_latents", action="store_true", help="the latents are one scaled sample each: the "
                       "published layout without metadata.json")  # fmt: skip
    group.add_argument("--num_validation_rows", type=cli.non_negative_int, default=0, help="last rows, held out")
    group.add_argument("--shuffle_window", type=cli.positive_int, default=16, help="files' row groups mixed at a time")
    add_raw_data_flags(parser.add_argument_group("raw data (with --online)"))

    group = parser.add_argument_group("model")
    group.add_argument("--model_dir", required=True, help="pipeline with the VAE, text encoder and scheduler")
    group.add_argument("--unet_config", help="config.json of the UNet to make; default: that of --model_dir")
    group.add_argument("--init_from_pretrained", action="store_true", help="start from the UNet of --model_dir")
    group.add_argument("--output_dir", required=True, help="folder for the pipeline; appears when it is whole")
    group.add_argument("--storage_path", help="folder of experiments; default: that of --output_dir")
    group.add_argument("--experiment_name", help="folder in it for checkpoints and logs; default: OUTPUT_DIR.work")
    group.add_argument("--overwrite", action="store_true", help="drop an earlier run of other settings")
    group.add_argument("--sample_prompts", action="append", default=[], help="drawn for the model card; repeatable")
    group.add_argument("--guidance_scale", type=cli.non_negative_float, default=7.5, help="of the pictures of those")


def _add_training_flags(parser):
    group = parser.add_argument_group("training")
    group.add_argument("--max_steps", type=cli.positive_int, help="optimizer steps; overrides --max_epochs")
    group.add_argument("--max_epochs", type=cli.positive_int, default=1, help="passes over the data")
    group.add_argument("--batch_size_per_worker", type=cli.positive_int, default=32, help="rows a worker takes")
    group.add_argument("--gradient_accumulation_steps", type=cli.positive_int, default=1, help="batches a step")
    group.add_argument("--lr", type=cli.positive_float, default=1e-4, help="learning rate")
    schedules = ("constant", "constant_with_warmup", "linear", "cosine")
    group.add_argument("--lr_scheduler", choices=schedules, default="constant_with_warmup", help="its course")
    group.add_argument("--lr_warmup_steps", type=cli.non_negative_int, default=10000, help="steps of linear warm-up")
    group.add_argument("--adam_weight_decay", type=cli.non_negative_float, default=1e-2, help="AdamW's")
    group.add_argument("--max_grad_norm", type=cli.positive_float, default=1.0, help="gradients are clipped to this")
    group.add_argument("--snr_gamma", type=cli.positive_float, help="weigh rows by min-SNR with this gamma, say 5")
    group.add_argument("--ema_decay", type=cli.fraction, default=0.9999, help="of the averaged weights; 0: none")
    group.add_argument("--caption_dropout", type=cli.fraction, default=0.1, help="share of rows without a caption")
    group.add_argument("--gradient_checkpointing", action="store_true", help="less memory, a third more time")
    group.add_argument("--seed", type=cli.seed, default=0, help="seed of weights, order and noise")

    group = parser.add_argument_group("checkpoints and logs")
    group.add_argument("--validation_steps", type=cli.positive_int, default=1000, help="steps between validations")
    group.add_argument("--checkpointing_steps", type=cli.positive_int, default=1000, help="steps between checkpoints")
    limit = "newest checkpoints to keep while it trains"
    group.add_argument("--checkpoints_total_limit", type=cli.positive_int, default=2, help=limit)
    keep = "keep checkpoints once the result is published, so that a longer run can go on"
    group.add_argument("--keep_checkpoints", action=argparse.BooleanOptionalAction, default=True, help=keep)
    group.add_argument("--log_every", type=cli.positive_int, default=10, help="steps between lines of log.jsonl")


# ---------------------------------------------------------------------------------------------------------------------
# A step


def denoising_losses(model, batch, noise_scheduler, vae_config, snr_gamma=None):
    """Return each row's loss [B] of a batch of streams.with_noise: arXiv 2006.11239, eq. 14, on latents.

    A batch without "std" holds scaled latents.
    """
    latents = batch["mean"]  # B c h w
    if "std" in batch:
        latents = loading.scale_latents(latents + batch["std"] * batch["posterior_noise"], vae_config)
    noise, timesteps = batch["noise"], batch["timesteps"]  # B c h w, B
    noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)
    model_pred = model(noisy_latents, timesteps, batch["prompt"]).sample
    target = utils.get_target(noise_scheduler, latents, noise, timesteps)
    row_weights = None if snr_gamma is None else utils.min_snr_weights(noise_scheduler, timesteps, snr_gamma)
    return utils.row_losses(model_pred, target, row_weights)


def training_step(batch, **options):
    """Return (loss,) of a batch: the mean over its rows."""
    return (denoising_losses(batch=batch, **options).mean(),)


def validation_loss(batches, place, dtype, **options):
    """Return the mean loss of the held-out rows, on all workers: [(batch, weights)] of streams.validation_batches.

    options: of `denoising_losses`, the model among them.
    """
    import torch

    total = torch.zeros((), device=place.device)
    with torch.no_grad(), torch.autocast(place.device.type, dtype, enabled=dtype != torch.float32):
        for batch, weights in batches:
            batch = {name: value.to(place.device) for name, value in batch.items()}
            total += (denoising_losses(batch=batch, **options) * weights.to(place.device)).sum()
    parallel.reshard(options["model"])
    return place.mean(total).item() * place.world_size


def load_unet(config, place, folder):
    """Return the UNet to train: of checkpoint `folder`, of the model, or new with weights by the seed."""
    import torch
    from diffusers import UNet2DConditionModel

    if folder or config["init_from_pretrained"]:
        unet = loading.load_models(config["model_dir"], ("unet",), torch.float32, folder)["unet"]
    else:
        torch.manual_seed(config["seed"])
        unet = UNet2DConditionModel.from_config(config["unet"])
    unet.register_to_config(sample_size=config["unet"]["sample_size"])
    if config["gradient_checkpointing"]:
        unet.enable_gradient_checkpointing()
    unet = unet.to(place.device).train()
    return unet if config["strategy"] == "fsdp" else unet.to(memory_format=torch.channels_last)


def encode_no_caption(config, place):
    """Return the empty caption's embedding, [L, D] float32."""
    encoder = LatentEncoder(config["model_dir"], (), 1, config["mixed_precision"], config.get("num_threads"))
    return encoder.encode_captions([""])[0].astype("float32")


def prepare(config, place):
    """Return the training.Run of a worker: everything stands where the newest checkpoint left it."""
    from diffusers import DDPMScheduler

    loading.set_up_torch(place.device.type, config.get("num_threads"), config["mixed_precision"])
    dtype = loading.compute_dtype(config["mixed_precision"], place.device.type, place.any)
    step, folder = checkpoints.newest_checkpoint(config["work_dir"])
    unet = load_unet(config, place, folder)
    model = parallel.wrap(unet, place, config["strategy"], config["fsdp_sharding"], dtype)
    optimizer = make_optimizer(config, {"unet": unet}, place, dtype, folder)
    ema = parallel.Ema(unet.parameters(), config["ema_decay"]) if config["ema_decay"] else None
    if folder and ema:
        checkpoints.restore_averages(folder / "ema" / "unet", unet, ema)
    noise_scheduler = DDPMScheduler.from_pretrained(config["model_dir"], subfolder="scheduler")
    config = {**config, "num_train_timesteps": noise_scheduler.config.num_train_timesteps}

    data = (RawImages if config["online"] else LatentFiles)(**config["data_options"])
    load = make_load(data, config["pool"])
    chunk_rows, held_out = hold_out(data.chunk_rows, config["num_validation_rows"])
    order = Order(chunk_rows, place.rank, place.world_size, config["shuffle_window"], config["seed"])
    no_caption = encode_no_caption(config, place)
    batches = training_batches(order, load, step, config["max_train_steps"], config, no_caption)
    if config["pool"]["num_workers"] or not config["online"]:  # what encodes in this process takes turns with the steps
        batches = ahead(batches, config["prefetch_batches"])
    held_out = validation_batches(held_out, load, place, config) if held_out else []
    options = {"model": model, "noise_scheduler": noise_scheduler, "snr_gamma": config["snr_gamma"]}
    options["vae_config"] = read_config(config["model_dir"], "vae")

    def validate(step):
        if not held_out or not loop.is_due(step, config["validation_steps"], config["max_train_steps"]):
            return {}
        with ema.in_place() if ema else contextlib.nullcontext():
            return {"validation_loss": validation_loss(held_out, place, dtype, **options)}

    def write(folder):
        checkpoints.write_state(folder, {"unet": unet}, optimizer.adamw, place)
        if ema:
            with ema.in_place():
                checkpoints.write_module(folder / "ema" / "unet", unet, place)

    return loop.Run(
        step=step,
        model=model,
        optimizer=optimizer,
        batch=lambda step, micro: next(batches),
        losses=partial(training_step, **options),
        loss_names=("loss",),
        dtype=dtype,
        saves=place.rank == 0 or parallel.is_sharded(unet),
        write=write,
        after_step=ema.update if ema else lambda step: None,
        validate=validate,
    )


def train_loop(config):
    """Train on one worker from the newest checkpoint to `max_train_steps`; rank 0 logs and publishes."""
    with no_gc.no_gc():
        place = workers.find_place(config["num_workers"])
        run = prepare(config, place)
    first, last = run.step, config["max_train_steps"]
    step = loop.train_steps(run, config, place)
    del run  # the optimizer's memory, for the pipeline
    if place.rank == 0 and step >= last:
        folder = checkpoints.checkpoint_path(config["work_dir"], step)
        weights = folder / "ema" if config["ema_decay"] else folder
        publish_pipeline(config, step, place.device, weights, config["sample_prompts"], pretraining_card)
    return {"step": step, "trained": step - first, "stopped": step < last}


# ---------------------------------------------------------------------------------------------------------------------
# The driver


def open_data(args):
    """Return LatentFiles or RawImages of --data, checked against the model; nothing is decoded."""
    if not args.online:
        columns = (args.latents_column, args.caption_latents_column, args.prescaled_latents)
        return open_latents(args.data, args.model_dir, args.resolution, *columns)
    sources = list_sources(args.data, args.image_column, args.caption_column, flag="--data")
    encoder = {name: getattr(args, name) for name in ("model_dir", "mixed_precision")}
    encoder |= {"resolutions": (args.resolution,), "batch_size": args.encoding_batch_size}
    loader = loader_options(args, (args.resolution,))
    return RawImages(tuple(map(vars, sources)), args.rows_per_file, loader, encoder, args.max_bad_fraction)


def read_inputs(args):
    """Check the model, the data and the flags; return (settings of the run, the data)."""
    check_pipeline(args.model_dir)
    args.resolution = args.resolution or model_resolution(args.model_dir)
    check_resolution(args.model_dir, "--resolution", args.resolution)
    for prompt in args.sample_prompts:
        cli.check_text("--sample_prompts", prompt)
    folders.check_apart(args.output_dir, work_dir=args.work_dir, model_dir=args.model_dir, data=args.data)
    for name in ("output_dir", "work_dir"):
        folders.check_writable(getattr(args, name), f"--{name}")
    data = open_data(args)
    settings = {name: getattr(args, name) for name in SETTINGS}
    sample_size = args.resolution // pixel_factor(args.model_dir)
    settings["unet"] = {**read_unet_config(args.unet_config, args.model_dir), "sample_size": sample_size}
    settings["model"] = digest_model(args.model_dir)
    settings["data"] = folders.digest_values(data.fingerprint)
    return settings, data


def plan_steps(args, settings, data, num_workers):
    """Add the rows of a step to `settings`, whatever workers share them, and return the steps to train for."""
    total = sum(data.chunk_rows)
    rows = total - args.num_validation_rows
    per_step = args.batch_size_per_worker * args.gradient_accumulation_steps * max(1, num_workers)
    settings["rows_per_step"] = per_step
    if rows <= 0:
        raise BadInput(f"--num_validation_rows {args.num_validation_rows} leaves nothing of {total} rows")
    driver.check_batch(rows, per_step, f"--data {args.data}", "rows")
    steps = args.max_steps or driver.steps_of(args.max_epochs * rows, per_step)
    if not args.lr_scheduler.startswith("constant"):
        settings["max_train_steps"] = steps  # the learning rate falls towards the end
    return steps


def train(args, settings, data, steps, num_workers):
    """Run the workers; return what rank 0 says."""
    weights = count_weights_of(settings["unet"]) if args.unet_config else count_weights(Path(args.model_dir, "unet"))
    resuming.check_disk(args, weights, 3 + bool(args.ema_decay))
    check_model(args.model_dir)
    count = int(args.online) if args.num_data_loading_workers is None else args.num_data_loading_workers
    pool = {"num_workers": 0}
    if num_workers and count:
        resources = start_ray(args.address, args.insecure_cluster, driver.TRAINER)
        pool = share_with_loaders(resources, num_workers, count, args.online, args.gpus_per_worker)
        pool["max_failures"] = args.max_failures
    config = {
        **vars(args),
        "settings": settings,
        "unet": settings["unet"],
        "rows_per_step": settings["rows_per_step"],
        "max_train_steps": steps,
        "num_workers": num_workers,
        "pool": pool,
        "data_options": asdict(data),
    }
    return driver.run_workers(train_loop, config, **cli.placement(args))


def main(args):
    """Check everything, train, and say where the result is."""
    output_dir = Path(args.output_dir).resolve()
    args.work_dir = Path(args.storage_path or output_dir.parent) / (args.experiment_name or f"{output_dir.name}.work")
    args.data = absolute(args.data)
    for name in ("model_dir", "output_dir", "work_dir"):
        setattr(args, name, str(Path(getattr(args, name)).resolve()))
    settings, data = read_inputs(args)
    plan, work = partial(plan_steps, args, settings, data), partial(train, args, settings, data)
    driver.run_training(args, settings, plan, work)


if __name__ == "__main__":
    sys.exit(cli.run(main, parse_args()))
