"""Teach a Stable Diffusion model a subject from a few photos: DreamBooth (arXiv 2208.12242) on Ray Train with DDP.

Reads a model folder, the subject's photos and images of its class (run_model.py draws them). Writes the tuned pipeline
to --output_dir; checkpoints, the latent cache and logs to --work_dir. Run the command again to continue.

    python train.py --model_dir models/emoji-64 --output_dir data/tuned --instance_images_dir assets/subject \\
        --instance_prompt "a 3d emoji of a unqtkn cat" --prior_loss_weight 0 --max_train_steps 20 --num_workers 0
    python train.py --model_dir MODEL --output_dir data/tuned --instance_images_dir photos \\
        --class_images_dir data/reg --instance_prompt "photo of unqtkn dog" --class_prompt "photo of a dog"
"""

import importlib.util
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import utils
from common import cli, folders, messages, targets
from common.cluster import start_ray
from common.errors import BadInput
from common.images import check_images, find_images
from common.objects import local_copy, uris_in_errors
from common.storage import split
from dataset import Batches, Pairs, cache_posteriors
from pipelines import loading
from pipelines.conditions import encode_prompts
from pipelines.configs import read_config
from pipelines.families import find_family, say_what_is_cut
from pipelines.model_folder import check_model, count_weights
from pipelines.prompts import check_prompts
from pipelines.upload import add_hub_flags, check_hub_flags
from training import adapters, checkpoints, driver, estimate, flags, launch, loop, parallel, resuming, validation
from training.dreambooth_flags import add_data_flags, add_image_flags, add_training_flags
from training.inputs import check_inputs, check_method
from training.modules import join_modules, load_modules, recomputes
from training.optimizer import make_optimizer
from training.publishing import dreambooth_card, publish_pipeline
from training.task import Adapters, Compute, Images, Optimization, Output, Schedule, Task, from_flags, from_plain

# Flags that decide the trained weights: a run continues only with the same values.
SETTINGS = """
    instance_prompt class_prompt resolution random_crop random_flip max_variants skip_bad_images lr lr_scheduler seed
    lr_warmup_steps prior_loss_weight snr_gamma max_grad_norm adam_weight_decay use_8bit_adam train_text_encoder
    reduce_dtype mixed_precision compile
""".split()  # noqa: SIM905

# Settings that decide the latent cache; model and folders are digests of their files.
CACHE_SETTINGS = """
    model instance_images_dir class_images_dir resolution random_crop random_flip max_variants skip_bad_images seed
    mixed_precision
""".split()  # noqa: SIM905

IMAGES_DIRS = ("instance_images_dir", "class_images_dir")
CARD_IMAGES = 4  # samples on the model card


def parse_args(argv=None):
    """Parse the command line."""
    parser = cli.make_parser(__doc__)
    add_data_flags(parser)
    add_training_flags(parser)
    flags.add_lora_flags(parser.add_argument_group("LoRA"))
    add_image_flags(parser)
    group = parser.add_argument_group("checkpoints and logs")
    flags.add_checkpoint_flags(group, 200, keep=False, what="checkpoints and the latent cache")
    add_hub_flags(parser.add_argument_group("upload"))
    group = cli.add_shared_flags(parser)
    num_workers = "Ray Train workers: N, or MIN:MAX as nodes come and go; 0: this process; default: one per GPU, or 1"
    group.add_argument("--num_workers", type=cli.pool_size, help=num_workers)
    cli.add_compute_flags(group)
    args = parser.parse_args(argv)
    flags.check_schedule(parser, args)
    flags.check_lora(parser, args)
    check_hub_flags(parser, args)
    if args.prior_loss_weight and not (args.class_images_dir and args.class_prompt):
        parser.error("--class_images_dir and --class_prompt are required unless --prior_loss_weight is 0")
    if args.max_train_pairs and args.max_train_steps:
        parser.error("--max_train_pairs and --max_train_steps both set the length of the run: use only one of them")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# A step


@dataclass(frozen=True)
class DreamBooth:
    """What a worker learns, and from which images; pairs_per_step: pairs in one optimizer step of all workers."""

    instance_prompt: str
    class_prompt: str | None
    train_text_encoder: bool
    prior_loss_weight: float
    snr_gamma: float | None
    train_batch_size: int
    pairs_per_step: int
    pairs: Pairs
    posteriors_dir: str
    skipped_images: list
    reduce_dtype: str
    compile: bool


@dataclass(frozen=True)
class TrainTask(Task):
    """What a worker of train.py has to know."""

    adapters: Adapters
    dreambooth: DreamBooth


def training_step(model, batch, objective, vae_config, num_instance, prior_loss_weight):
    """Return (loss, instance loss, class loss) of a batch of dataset.collate: arXiv 2208.12242, eq. 2.

    objective: of pipelines.objectives. num_instance: number of instance rows, which come first; the other rows are
    class rows.
    """
    latents = loading.scale_latents(batch["mean"] + batch["std"] * batch["posterior_noise"], vae_config)  # 2B c h w
    noise, timesteps = batch["noise"], batch["timesteps"]  # 2B c h w, 2B
    noisy_latents, time = objective.noisy(latents, noise, timesteps)
    model_pred = model(noisy_latents, time, batch)
    target, row_weights = objective.target(latents, noise, timesteps), objective.row_weights(timesteps)
    return utils.prior_preserving_loss(model_pred, target, num_instance, prior_loss_weight, row_weights)


def make_batches(task, place, instance_prompt, class_prompt, draw_time):
    """Return batch(step, micro), the tensors of this worker's share of a global batch; prompts: their fields."""
    config = task.dreambooth
    batches = Batches(config.posteriors_dir, config.pairs, instance_prompt, class_prompt, task.schedule.seed, draw_time)
    num_pairs = config.train_batch_size

    def batch(step, micro):
        first_pair = (micro * place.world_size + place.rank) * num_pairs
        return batches(step, first_pair, num_pairs, config.pairs_per_step)

    return batch


def prepare(task, place, start):
    """Return the loop.Run of a worker, restored from the checkpoint at its start."""
    config, compute, model_dir = task.dreambooth, task.compute, task.output.model_dir
    loading.set_up_torch(place.device.type, compute.num_threads, compute.mixed_precision)
    dtype = loading.compute_dtype(compute.mixed_precision, place.device.type, place.any)
    family = find_family(model_dir)
    texts = [config.instance_prompt, config.class_prompt or "", "", *task.images.validation_prompts]
    trained = family.trained(config.train_text_encoder)
    instance, other, *drawn = encode_prompts(family, model_dir, texts, trained, place.device, dtype)
    modules = load_modules(
        family,
        model_dir,
        start.folder,
        place.device,
        train_text_encoder=config.train_text_encoder,
        gradient_checkpointing=compute.gradient_checkpointing,
        channels_last=not task.optimization.use_8bit_adam,  # bitsandbytes copies weights to contiguous memory
        dtype=dtype if task.adapters.lora else None,
    )
    write = partial(checkpoints.write_state, modules=modules)
    if task.adapters.lora:
        adapters.add_adapters(family, modules, task.adapters, task.schedule.seed, start.folder)
        base = task.output.settings["model"]
        write = partial(adapters.write_state, modules=modules, settings=task.adapters, base=base)
    optimizer = make_optimizer(task.optimization, task.schedule.max_train_steps, modules, place, dtype, start)
    joined = join_modules(family, modules)
    if config.compile:
        joined.compile()
    model = parallel.wrap(joined, place, reduce_dtype=config.reduce_dtype)
    objective = family.objective(model_dir, config.snr_gamma)
    options = {"objective": objective, "vae_config": read_config(model_dir, "vae")}
    options["prior_loss_weight"] = config.prior_loss_weight
    return loop.Run(
        step=start.step,
        model=model,
        optimizer=optimizer,
        batch=make_batches(task, place, instance, other, objective.draw_time),
        loss_names=("loss", "instance_loss", "class_loss"),
        losses=partial(training_step, model, num_instance=config.train_batch_size, **options),
        dtype=dtype,
        saves=place.rank == 0,
        write=partial(write, optimizer=optimizer.adamw),
        draw=validation.Painter(task, family, modules, drawn, place, dtype).draw,
    )


def train_loop(config):
    """Train on one worker; rank 0 logs, saves and publishes."""
    with uris_in_errors():
        return loop.work(from_plain(TrainTask, config), prepare, publish)


def publish(task, step, device):
    """Publish the tuned pipeline of checkpoint `step` with a model card."""
    output, config = task.output, task.dreambooth
    card = partial(
        dreambooth_card,
        model_dir=output.model_dir,
        instance_prompt=config.instance_prompt,
        skipped_images=config.skipped_images,
        settings={**output.settings, "max_train_steps": step},
    )
    weights = checkpoints.local_checkpoint(output.work_dir, step)
    prompts = [config.instance_prompt] * CARD_IMAGES
    precision = task.compute.mixed_precision
    publish_pipeline(output, task.images, step, device, weights, prompts, card, task.adapters, precision)


# ---------------------------------------------------------------------------------------------------------------------
# The driver


def read_inputs(args):
    """Check the model, the prompts and the folders without opening an image; return (settings of the run, images).

    images: ImageFolder of the photos and, if there are any, of the class images, by flag.
    """
    if args.use_8bit_adam and not importlib.util.find_spec("bitsandbytes"):
        raise BadInput("--use_8bit_adam requires bitsandbytes: python -m pip install bitsandbytes")
    check_prompts(args.instance_prompt, args.class_prompt, args.unique_token)
    images_dirs = {name: getattr(args, name) for name in IMAGES_DIRS}
    settings = check_inputs(args, SETTINGS, "validation_prompts", **images_dirs)
    check_method(args)
    more = flags.LORA_SETTINGS if args.lora else ()  # older results lack settings that they do not need
    more = [*more, "text_encoder_lr"] if args.text_encoder_lr else more
    settings |= {name: getattr(args, name) for name in more}
    images = {name: find_images(folder, f"--{name}") for name, folder in images_dirs.items() if folder}
    digests = {name: folders.digest_files(found.files.values()) for name, found in images.items()}
    settings |= {name: digests.get(name) for name in IMAGES_DIRS}
    return settings, images


def plan_steps(args, settings, images, num_workers):
    """Add the pairs of a step, of all workers together, to `settings`; return the number of steps to train for."""
    settings["pairs_per_step"] = args.train_batch_size * args.gradient_accumulation_steps * max(1, num_workers)
    num_pairs = args.max_train_pairs or args.num_epochs * max(len(found.files) for found in images.values())
    return args.max_train_steps or driver.steps_of(num_pairs, settings["pairs_per_step"])


def check_needs(args, num_rows):
    """Check the model's files and the disk space before a model is loaded; warn of prompts that are cut off.

    Returns (number of weights that are trained, resuming.Needs).
    """
    say_what_is_cut(args.model_dir, [args.instance_prompt, args.class_prompt or "", *args.validation_prompts])
    family = find_family(args.model_dir)
    sizes, trained = family.sizes(args.model_dir), family.trained(args.train_text_encoder)
    cache = num_rows * (args.resolution // sizes.cell) ** 2 * sizes.channels * 2 * 2  # float16 mean, std
    if args.lora:
        weights = adapters.count_weights(family, args.model_dir, trained, args.lora, args.lora_layers)
    else:
        weights = sum(count_weights(Path(args.model_dir, name)) for name in trained)
    needs = resuming.find_needs(args, weights, 3, cache)
    resuming.check_disk(args, needs)
    check_model(args.model_dir)
    return weights, needs


def check_photos(args, settings, images, steps):
    """Decode all images once; return ({flag: usable images}, names of skipped ones, Pairs, number of pairs)."""
    usable = {name: check_images(found, args.skip_bad_images) for name, found in images.items()}
    photos, class_images = (usable.get(name, []) for name in IMAGES_DIRS)
    skipped = [split(image)[1] for name in images for image in images[name].files if image not in usable[name]]
    pairs = Pairs(len(photos), len(class_images), args.max_variants, args.seed)
    if 0 < len(class_images) < settings["pairs_per_step"]:
        holds = f"--class_images_dir holds {len(class_images)} images, a step takes {settings['pairs_per_step']} pairs"
        messages.say(f"warning: {holds}: some images are used several times in a step")
    return usable, skipped, pairs, steps * settings["pairs_per_step"]


def explain(args, settings, images, steps):
    """Check what `train` checks and return what it needs, for --dry_run: weights that train, bytes."""
    *_, pairs, num_pairs = check_photos(args, settings, images, steps)
    weights, needs = check_needs(args, len(pairs.rows_used(num_pairs)))
    family, rows = find_family(args.model_dir), args.train_batch_size * (2 if images.get("class_images_dir") else 1)
    is_recomputed = recomputes(family, args.gradient_checkpointing, "cuda")
    adam = 2 if args.use_8bit_adam else 8
    options = (args.resolution, args.train_text_encoder, is_recomputed, from_flags(Adapters, args), adam)
    gpu = estimate.device_bytes(family, args.model_dir, rows, *options)
    return {
        "trained_weights": weights,
        "disk_bytes": asdict(needs),
        "gpu_bytes_in_bf16": gpu | {"sum": sum(gpu.values())},
    }


def train(args, settings, images, steps, num_workers, owner):
    """Check the images, fill the latent cache and run the workers; return what rank 0 returns."""
    usable, skipped, pairs, num_pairs = check_photos(args, settings, images, steps)
    photos, class_images = (usable.get(name, []) for name in IMAGES_DIRS)
    check_needs(args, len(pairs.rows_used(num_pairs)))
    if num_workers:
        start_ray(args.address, args.insecure_cluster, launch.TRAINER)
    posteriors_dir = targets.join_name(args.work_dir, "posteriors")
    names = ("resolution", "random_crop", "random_flip", "seed", "mixed_precision")
    encoder_options = {name: getattr(args, name) for name in names} | {"model_dir": args.model_location}
    pool = {"num_workers": num_workers, **cli.placement(args)}
    made_from = {name: settings[name] for name in CACHE_SETTINGS}
    output = from_flags(Output, args, model_dir=args.model_location, settings=settings, owner=owner)
    held = output.held
    cache_posteriors(posteriors_dir, pairs, num_pairs, photos, class_images, encoder_options, made_from, held, **pool)
    validation_steps = args.validation_steps or -(-steps // 4)  # a quarter of the run
    smallest, largest = num_workers if isinstance(num_workers, tuple) else (None, num_workers)
    learned = {"pairs_per_step": settings["pairs_per_step"], "pairs": pairs, "posteriors_dir": posteriors_dir}
    task = TrainTask(
        output=output,
        schedule=from_flags(Schedule, args, max_train_steps=steps, validation_steps=validation_steps),
        optimization=from_flags(Optimization, args),
        compute=from_flags(Compute, args, num_workers=largest, min_workers=smallest),
        images=from_flags(Images, args),
        adapters=from_flags(Adapters, args),
        dreambooth=from_flags(DreamBooth, args, **learned, skipped_images=skipped),
    )
    return launch.run_workers(train_loop, task, **cli.placement(args))


def main(args):
    """Check the inputs, fill the latent cache, train, and print the result."""
    if not args.prior_loss_weight:
        args.class_images_dir = args.class_prompt = None
    args.work_dir = args.work_dir or targets.beside(args.output_dir, ".work")
    cli.make_absolute(args, "model_dir", "output_dir", "work_dir", *IMAGES_DIRS)
    args.model_location, args.model_dir = args.model_dir, str(local_copy(args.model_dir))
    settings, images = read_inputs(args)
    plan, work = partial(plan_steps, args, settings, images), partial(train, args, settings, images)
    driver.run_training(args, settings, plan, work, partial(explain, args, settings, images))


if __name__ == "__main__":
    cli.run(main, parse_args())
