"""Train the UNet of Stable Diffusion or SDXL on images and captions: DDPM loss on latents, Ray Train, DDP or FSDP.

Reads a model folder (VAE, text encoders, scheduler, the configuration of the UNet) and latents from preprocess.py, or
images and captions with --online. Writes the whole pipeline to --output_dir, checkpoints and logs to --storage_path.
Run the command again to continue.

    python pretrain.py --data data/latents --model_dir models/emoji-64 --output_dir data/base --max_steps 20 \\
        --batch_size_per_worker 8 --num_workers 0
    python pretrain.py --data s3://bucket/latents --model_dir MODEL --output_dir data/base --resolution 256 \\
        --strategy fsdp --fsdp_sharding SHARD_GRAD_OP
"""

import contextlib
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import utils
from common import cli, folders, targets
from common.errors import BadInput
from common.messages import say
from common.objects import local_copy, uris_in_errors
from common.storage import split
from pipelines import loading
from pipelines.conditions import read_condition
from pipelines.configs import read_config, read_unet_config
from pipelines.families import find_family
from pipelines.model_folder import check_model, count_weights
from pipelines.upload import add_hub_flags, check_hub_flags
from pretraining.feeding import make_batches
from pretraining.inputs import (
    add_data_flags,
    add_loading_flags,
    add_model_flags,
    check_loading_flags,
    open_data,
    open_validation_data,
)
from pretraining.latents import SUPPORTED
from pretraining.online import RawImages
from pretraining.resources import loading_pool
from pretraining.streams import count_streams
from training import checkpoints, driver, estimate, flags, launch, loop, parallel, resuming
from training.inputs import check_inputs
from training.modules import load_unet, recomputes
from training.optimizer import make_optimizer
from training.pretraining_flags import add_strategy_flags, add_training_flags, check_strategy
from training.publishing import pretraining_card, publish_pipeline
from training.task import Compute, Images, Optimization, Output, Schedule, Task, from_flags, from_plain

# Flags that decide the trained weights: a run continues only with the same values.
SETTINGS = """
    resolution prescaled_latents num_validation_rows online init_from_pretrained lr lr_scheduler lr_warmup_steps
    adam_weight_decay max_grad_norm snr_gamma ema_decay caption_dropout shuffle_window seed mixed_precision
""".split()  # noqa: SIM905


def parse_args(argv=None):
    """Parse the command line."""
    parser = cli.make_parser(__doc__)
    add_data_flags(parser)
    add_model_flags(parser)
    add_training_flags(parser)
    add_hub_flags(parser.add_argument_group("upload"))
    group = cli.add_shared_flags(parser)
    num_workers = "Ray Train workers: N, or MIN:MAX as nodes come and go; 0: this process; default: one per GPU, or 1"
    group.add_argument("--num_workers", type=cli.pool_size, help=num_workers)
    add_loading_flags(group)
    add_strategy_flags(group)
    cli.add_compute_flags(group)
    args = cli.parse(parser, argv)
    flags.check_schedule(parser, args)
    check_strategy(parser, args)
    check_hub_flags(parser, args)
    check_loading_flags(parser, args)
    if args.unet_config and args.init_from_pretrained:
        parser.error("--unet_config makes a new UNet, --init_from_pretrained loads the model's: use only one of them")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# A step


@dataclass(frozen=True)
class Pretraining:
    """What a worker learns, and from which data.

    unet: configuration of the UNet. pool: options of map_on_actors. online: whether `data`, and `validation_data` if
    there is any, are the fields of RawImages, else of LatentFiles. num_streams: of streams.Order. rows_per_step: rows
    in one optimizer step of all workers.
    """

    unet: dict
    init_from_pretrained: bool
    strategy: str
    fsdp_sharding: str
    ema_decay: float
    snr_gamma: float | None
    online: bool
    data: dict
    validation_data: dict | None
    pool: dict
    num_validation_rows: int
    num_streams: int
    prefetch_batches: int
    batch_size_per_worker: int
    rows_per_step: int
    caption_dropout: float
    sample_prompts: list
    reduce_dtype: str
    compile: bool


@dataclass(frozen=True)
class PretrainTask(Task):
    """What a worker of pretrain.py has to know."""

    pretraining: Pretraining


def denoising_losses(model, batch, family, objective, vae_config):
    """Return the loss of each row [B] of a batch of batches.with_noise: arXiv 2006.11239, eq. 14, on latents.

    objective: of pipelines.objectives. A batch without "std" holds scaled latents.
    """
    batch = {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}
    latents = batch["mean"]  # B c h w
    if "std" in batch:
        latents = loading.scale_latents(latents + batch["std"] * batch["posterior_noise"], vae_config)
    noise, timesteps = batch["noise"], batch["timesteps"]  # B c h w, B
    noisy_latents, time = objective.noisy(latents, noise, timesteps)
    model_pred = family.predict(model, noisy_latents, time, read_condition(family, batch, {}))
    return utils.row_losses(model_pred, objective.target(latents, noise, timesteps), objective.row_weights(timesteps))


def training_step(batch, **options):
    """Return (loss,) of a batch: the mean over its rows; options: of denoising_losses."""
    return (denoising_losses(batch=batch, **options).mean(),)


def validation_loss(batches, place, dtype, **options):
    """Return the mean loss of the held-out rows, over all workers.

    batches: [(batch, weights)] of batches.validation_batches; options: of denoising_losses.
    """
    import torch

    total = torch.zeros((), device=place.device)
    with torch.no_grad(), torch.autocast(place.device.type, dtype, enabled=dtype != torch.float32):
        for batch, weights in batches:
            batch = {name: value.to(place.device) for name, value in batch.items()}
            total += (denoising_losses(batch=batch, **options) * weights.to(place.device)).sum()
    parallel.reshard(options["model"])
    return place.mean(total).item() * place.world_size


def prepare(task, place, start):
    """Return the loop.Run of a worker, restored from the checkpoint at its start."""
    config, schedule, compute, model_dir = task.pretraining, task.schedule, task.compute, task.output.model_dir
    loading.set_up_torch(place.device.type, compute.num_threads, compute.mixed_precision)
    dtype = loading.compute_dtype(compute.mixed_precision, place.device.type, place.any)
    family = find_family(model_dir)
    unet = load_unet(
        config.unet,
        model_dir,
        place,
        start.folder,
        schedule.seed,
        from_pretrained=config.init_from_pretrained,
        gradient_checkpointing=recomputes(family, compute.gradient_checkpointing, place.device.type),
        channels_last=config.strategy != "fsdp" and not task.optimization.use_8bit_adam,  # both copy the weights
    )
    sharding = config.strategy, config.fsdp_sharding
    if config.compile:
        parallel.compile_modules({"unet": unet})
    model = parallel.wrap(unet, place, *sharding, dtype, config.reduce_dtype)
    optimizer = make_optimizer(task.optimization, schedule.max_train_steps, {"unet": unet}, place, dtype, start)
    ema = parallel.Ema(unet.parameters(), config.ema_decay) if config.ema_decay else None
    if start.step and ema:
        checkpoints.restore_averages(start.folder and start.folder / "ema" / "unet", unet, ema, place)
    objective = family.objective(model_dir, config.snr_gamma)
    batches, held_out, fill = make_batches(task, place, dtype, start.step, objective)
    options = {"model": model, "family": family, "objective": objective, "vae_config": read_config(model_dir, "vae")}

    def validate(step):
        if not held_out or not loop.is_due(step, schedule.validation_steps, schedule.max_train_steps):
            return {}
        with ema.in_place() if ema else contextlib.nullcontext():
            filled = ((fill(batch), weights) for batch, weights in held_out)
            return {"validation_loss": validation_loss(filled, place, dtype, **options)}

    def write(folder):
        checkpoints.write_state(folder, {"unet": unet}, optimizer.adamw, place)
        if ema:
            with ema.in_place():
                checkpoints.write_module(folder / "ema" / "unet", unet, place)

    return loop.Run(
        step=start.step,
        model=model,
        optimizer=optimizer,
        passes=lambda step, micro: [{"batch": fill(next(batches))}],
        losses=partial(training_step, **options),
        loss_names=("loss",),
        dtype=dtype,
        saves=place.rank == 0 or parallel.is_sharded(unet),
        write=write,
        after_step=ema.update if ema else lambda step: None,
        validate=validate,
    )


def train_loop(config):
    """Train on one worker; rank 0 logs, saves and publishes."""
    with uris_in_errors():
        return loop.work(from_plain(PretrainTask, config), prepare, publish)


def publish(task, step, device):
    """Publish the pipeline with the UNet of checkpoint `step`, or its moving average, with a model card."""
    output, config = task.output, task.pretraining
    card = partial(
        pretraining_card,
        model_dir=output.model_dir,
        output_dir=output.output_dir.partition("?")[0],  # without the options of a URI
        sample_prompts=config.sample_prompts,
        rows_per_step=config.rows_per_step,
        settings={**output.settings, "max_train_steps": step},
    )
    folder = checkpoints.local_checkpoint(output.work_dir, step)
    weights = folder / "ema" if config.ema_decay else folder
    publish_pipeline(output, task.images, step, device, weights, config.sample_prompts, card)


# ---------------------------------------------------------------------------------------------------------------------
# The driver


def read_inputs(args):
    """Check the model, the data and the flags; return (settings of the run, data, validation data or None)."""
    locations = {"data": args.data, "validation_data": args.validation_data}
    settings = check_inputs(args, SETTINGS, "sample_prompts", supported=SUPPORTED, **locations)
    data, apart = open_data(args), open_validation_data(args)
    sample_size = args.resolution // find_family(args.model_dir).sizes(args.model_dir).cell
    settings["unet"] = {**read_unet_config(args.unet_config, args.model_dir), "sample_size": sample_size}
    settings["data"] = folders.digest_list(data.fingerprint)
    if isinstance(data, RawImages) and data.sources["bad_files"]:
        settings["bad_files"] = len(data.sources["bad_files"])
    if apart:
        settings["validation_data"] = folders.digest_list(apart.fingerprint)
    return settings | flags.given_rounding(args), data, apart  # older results lack these settings


def plan_steps(args, settings, data, num_workers):
    """Add what the workers share to `settings`: rows per step, streams; return the number of steps to train for."""
    total = int(data.chunk_rows.sum())
    rows = total if args.validation_data else total - args.num_validation_rows
    smallest, largest = (max(1, bound) for bound in driver.bounds(num_workers))
    per_step = args.batch_size_per_worker * args.gradient_accumulation_steps * largest
    settings["rows_per_step"] = per_step
    if rows <= 0:
        raise BadInput(f"--num_validation_rows {args.num_validation_rows} leaves none of {total} rows to train on")
    driver.check_batch(rows, per_step, f"--data {args.data}", "rows")
    sizes = launch.dividing_sizes(smallest, largest, args.gradient_accumulation_steps)
    args.num_streams = count_streams(args.shuffle_window, sizes, len(data.chunk_rows))
    earlier = resuming.recorded_settings(args.output_dir, args.work_dir)
    is_same = all(earlier.get(name) == settings[name] for name in ("rows_per_step", "shuffle_window", "data"))
    if is_same:
        args.num_streams = earlier.get("num_streams", args.num_streams)
    if not is_same or "num_streams" in earlier:  # runs of older versions have none
        settings["num_streams"] = args.num_streams
    return args.max_steps or driver.steps_of(args.max_epochs * rows, per_step)


def check_needs(args, settings):
    """Check the model's files and the disk space; return (number of weights that are trained, resuming.Needs)."""
    weights = count_weights(Path(args.model_dir, "unet"))
    if args.unet_config:
        weights = loading.empty_model(args.model_dir, "unet", settings["unet"]).num_parameters()
    needs = resuming.find_needs(args, weights, 3 + bool(args.ema_decay))
    resuming.check_disk(args, needs)
    check_model(args.model_dir)
    return weights, needs


def explain(args, settings, data):
    """Check what `train` checks and return what it needs, for --dry_run: rows, weights that train, bytes."""
    weights, needs = check_needs(args, settings)
    workers = settings["rows_per_step"] // (args.batch_size_per_worker * args.gradient_accumulation_steps)
    gpu = estimate.pretraining_bytes(args, settings["unet"], workers, data.has_texts)
    return {
        "rows": int(data.chunk_rows.sum()),
        "trained_weights": weights,
        "disk_bytes": asdict(needs),
        "gpu_bytes_in_bf16": gpu | {"sum": sum(gpu.values())},
    }


def train(args, settings, data, apart, steps, num_workers, owner):
    """Run the workers; return what rank 0 returns."""
    check_needs(args, settings)
    if "num_streams" not in settings:
        say("warning: an older version began this run: in this epoch some rows may be used twice, or not at all")
    smallest, largest = driver.bounds(num_workers)
    pool = loading_pool(args, largest, launch.TRAINER)
    learned = {"unet": settings["unet"], "rows_per_step": settings["rows_per_step"], "data": asdict(data), "pool": pool}
    learned["validation_data"] = asdict(apart) if apart else None
    task = PretrainTask(
        output=from_flags(Output, args, model_dir=args.model_location, settings=settings, owner=owner),
        schedule=from_flags(Schedule, args, max_train_steps=steps),
        optimization=from_flags(Optimization, args),
        compute=from_flags(Compute, args, num_workers=largest, min_workers=smallest),
        images=from_flags(Images, args),
        pretraining=from_flags(Pretraining, args, **learned),
    )
    return launch.run_workers(train_loop, task, has_loaders=bool(pool["num_workers"]), **cli.placement(args))


def main(args):
    """Check the inputs, train, and print the result."""
    cli.make_absolute(args, "data", "validation_data", "model_dir", "output_dir")
    parent, name = split(args.output_dir.rstrip("/"))
    args.work_dir = targets.join_name(args.storage_path or parent, args.experiment_name or f"{name}.work")
    cli.make_absolute(args, "work_dir")
    args.model_location, args.model_dir = args.model_dir, str(local_copy(args.model_dir))
    settings, data, apart = read_inputs(args)
    plan, work = partial(plan_steps, args, settings, data), partial(train, args, settings, data, apart)
    driver.run_training(args, settings, plan, work, lambda steps: explain(args, settings, data))


if __name__ == "__main__":
    cli.run(main, parse_args())
