"""Teach a Stable Diffusion model a subject from a few photos: DreamBooth (arXiv 2208.12242) on Ray Train with DDP.

Reads a model folder, the subject's photos and images of its class (run_model.py draws them). Writes the tuned pipeline
to --output_dir; checkpoints, the latent cache and logs to --work_dir. Run the command again to continue.

    python train.py --model_dir models/emoji-64 --output_dir data/tuned --instance_images_dir assets/subject \\
        --instance_prompt "a 3d emoji of a unqtkn cat" --prior_loss_weight 0 --max_train_steps 20 --num_workers 0
    python train.py --model_dir MODEL --output_dir data/tuned --instance_images_dir photos \\
        --class_images_dir data/reg --instance_prompt "photo of unqtkn dog" --class_prompt "photo of a dog"
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import utils
from common import cli, targets
from common.buckets import assign, bucket_sizes
from common.cluster import start_ray
from common.objects import local_copy, uris_in_errors
from dataset import Batches, Pairs, cache_posteriors, count_pixels, largest_pass
from pipelines import loading
from pipelines.conditions import encode_prompts
from pipelines.configs import read_config
from pipelines.families import find_family, say_what_is_cut
from pipelines.model_folder import check_model, count_weights
from pipelines.subjects import check_subject_flags, read_subjects
from pipelines.upload import add_hub_flags, check_hub_flags
from training import adapters, checkpoints, driver, estimate, flags, launch, loop, parallel, resuming, validation
from training.dreambooth_flags import add_data_flags, add_image_flags, add_training_flags
from training.inputs import check_inputs, check_method
from training.modules import join_modules, load_modules, recomputes
from training.optimizer import make_optimizer
from training.publishing import dreambooth_card, publish_pipeline
from training.subjects import find_folders
from training.task import Adapters, Compute, Images, Optimization, Output, Schedule, Task, from_flags, from_plain

# Flags that decide the trained weights, with the prompts and images: a run continues only with the same values.
SETTINGS = """
    resolution random_crop random_flip max_variants skip_bad_images lr lr_scheduler seed lr_warmup_steps
    prior_loss_weight snr_gamma max_grad_norm adam_weight_decay use_8bit_adam train_text_encoder reduce_dtype
    mixed_precision compile
""".split()  # noqa: SIM905

# Settings that decide the latent cache; model and folders are digests of their files.
CACHE_SETTINGS = """
    model instance_images_dir class_images_dir resolution random_crop random_flip max_variants skip_bad_images seed
    mixed_precision buckets
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
    args = cli.parse(parser, argv)
    flags.check_schedule(parser, args)
    flags.check_lora(parser, args)
    check_hub_flags(parser, args)
    check_subject_flags(parser, args, ("instance_images_dir", "instance_prompt"))
    if args.prior_loss_weight and not args.concepts and not (args.class_images_dir and args.class_prompt):
        parser.error("--class_images_dir and --class_prompt are required unless --prior_loss_weight is 0")
    if args.max_train_pairs and args.max_train_steps:
        parser.error("--max_train_pairs and --max_train_steps both set the length of the run: use only one of them")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# A step


@dataclass(frozen=True)
class DreamBooth:
    """What a worker learns, and from which images.

    instance_prompts: of each subject. texts: those that images are trained with; text_of: the number of the text of
    each image, see dataset.Pairs.image_of. pairs_per_step: pairs in one optimizer step of all workers.
    """

    instance_prompts: list
    texts: list
    text_of: list
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


def training_step(model, batch, objective, vae_config, num_instance, prior_loss_weight, num_pairs=None):
    """Return (loss, instance loss, class loss) of a pass of dataset.Batches: arXiv 2208.12242, eq. 2.

    objective: of pipelines.objectives. num_instance: number of instance rows, which come first; the other rows are
    class rows. num_pairs: of utils.prior_preserving_loss.
    """
    latents = loading.scale_latents(batch["mean"] + batch["std"] * batch["posterior_noise"], vae_config)  # 2B c h w
    noise, timesteps = batch["noise"], batch["timesteps"]  # 2B c h w, 2B
    noisy_latents, time = objective.noisy(latents, noise, timesteps)
    model_pred = model(noisy_latents, time, batch)
    target, row_weights = objective.target(latents, noise, timesteps), objective.row_weights(timesteps)
    return utils.prior_preserving_loss(model_pred, target, num_instance, prior_loss_weight, row_weights, num_pairs)


def make_batches(task, place, prompts, draw_time):
    """Return passes(step, micro) of loop.Run, of this worker's share; prompts: the fields of each image's text."""
    config = task.dreambooth
    batches = Batches(config.posteriors_dir, config.pairs, prompts, task.schedule.seed, draw_time)
    num_pairs = config.train_batch_size

    def passes(step, micro):
        first_pair = (micro * place.world_size + place.rank) * num_pairs
        return batches(step, first_pair, num_pairs, config.pairs_per_step)

    return passes


def prepare(task, place, start):
    """Return the loop.Run of a worker, restored from the checkpoint at its start."""
    config, compute, model_dir = task.dreambooth, task.compute, task.output.model_dir
    loading.set_up_torch(place.device.type, compute.num_threads, compute.mixed_precision)
    dtype = loading.compute_dtype(compute.mixed_precision, place.device.type, place.any)
    family = find_family(model_dir)
    texts = [*config.texts, "", *task.images.validation_prompts]
    trained = family.trained(config.train_text_encoder)
    fields = encode_prompts(family, model_dir, texts, trained, place.device, dtype)
    prompts, drawn = [fields[number] for number in config.text_of], fields[len(config.texts) :]
    modules = load_modules(
        family,
        model_dir,
        start.folder,
        place.device,
        train_text_encoder=config.train_text_encoder,
        gradient_checkpointing=compute.gradient_checkpointing,
        channels_last=not task.optimization.use_8bit_adam,  # bitsandbytes copies weights to contiguous memory
        dtype=dtype if task.adapters.lora else None,
        base_bits=task.adapters.base_bits,
    )
    write = partial(checkpoints.write_state, modules=modules)
    if task.adapters.lora:
        adapters.add_adapters(family, modules, task.adapters, task.schedule.seed, start.folder)
        base = task.output.settings["model"]
        write = partial(adapters.write_state, modules=modules, settings=task.adapters, base=base)
    optimizer = make_optimizer(task.optimization, task.schedule.max_train_steps, modules, place, dtype, start)
    joined = join_modules(family, modules)
    if config.compile:
        parallel.compile_modules(modules)
    model = parallel.wrap(joined, place, reduce_dtype=config.reduce_dtype)
    objective = family.objective(model_dir, config.snr_gamma)
    options = {"objective": objective, "vae_config": read_config(model_dir, "vae")}
    options["prior_loss_weight"] = config.prior_loss_weight
    return loop.Run(
        step=start.step,
        model=model,
        optimizer=optimizer,
        passes=make_batches(task, place, prompts, objective.draw_time),
        loss_names=("loss", "instance_loss", "class_loss"),
        losses=partial(training_step, model, num_pairs=config.train_batch_size, **options),
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
        instance_prompts=config.instance_prompts,
        skipped_images=config.skipped_images,
        settings={**output.settings, "max_train_steps": step},
    )
    weights = checkpoints.local_checkpoint(output.work_dir, step)
    prompts = config.instance_prompts * CARD_IMAGES
    dtype = loading.compute_dtype(task.compute.mixed_precision, device.type)
    publish_pipeline(output, task.images, step, device, weights, prompts, card, task.adapters, dtype)


# ---------------------------------------------------------------------------------------------------------------------
# The driver


def read_inputs(args):
    """Check the model, the prompts and the folders without opening an image; return (settings of the run, Folders)."""
    subjects = read_subjects(args, args.model_dir if args.prior_loss_weight else None)
    locations = {each.flag.lstrip("-"): each.location for subject in subjects for each in subject.folders}
    settings = check_inputs(args, SETTINGS, "validation_prompts", **locations)
    check_method(args)
    more = [*(flags.LORA_SETTINGS if args.lora else ()), "text_encoder_lr", *(["buckets"] if args.buckets else [])]
    given = {name: getattr(args, name) for name in more if getattr(args, name) is not None}
    found = find_folders(subjects, args.captions)
    return settings | given | found.settings(), found  # older results lack settings that they do not need


def plan_steps(args, settings, found, num_workers):
    """Add the pairs of a step, of all workers together, to `settings`; return the number of steps to train for."""
    largest = max(1, driver.bounds(num_workers)[1])
    settings["pairs_per_step"] = args.train_batch_size * args.gradient_accumulation_steps * largest
    num_pairs = args.max_train_pairs or args.num_epochs * found.pairs_per_epoch
    return args.max_train_steps or driver.steps_of(num_pairs, settings["pairs_per_step"])


def check_needs(args, texts, pixels):
    """Check the model's files and the disk space before a model is loaded; warn of texts that are cut off.

    pixels: of all crops in the latent cache. Returns (number of weights that are trained, resuming.Needs).
    """
    say_what_is_cut(args.model_dir, [*texts, *args.validation_prompts])
    family = find_family(args.model_dir)
    sizes, trained = family.sizes(args.model_dir), family.trained(args.train_text_encoder)
    cache = pixels // sizes.cell**2 * sizes.channels * 2 * 2  # float16 mean, std
    if args.lora:
        weights = adapters.count_weights(family, args.model_dir, trained, args.lora, args.lora_layers)
    else:
        weights = sum(count_weights(Path(args.model_dir, name)) for name in trained)
    needs = resuming.find_needs(args, weights, 3, cache)
    resuming.check_disk(args, needs)
    check_model(args.model_dir)
    return weights, needs


def check_photos(args, settings, found, steps):
    """Decode all images once; return (Material, Pairs, number of pairs)."""
    material = found.check(args.skip_bad_images, settings["pairs_per_step"])
    pairs = Pairs(len(material.photos), len(material.class_images), args.max_variants, args.seed)
    return material, pairs, steps * settings["pairs_per_step"]


def find_sizes(args, found, images):
    """Return {image: width and height that it is cropped to} of usable images; found: Folders."""
    files = {image: file for each in found.images.values() for image, file in each.files.items() if image in images}
    if not args.buckets:
        return dict.fromkeys(files, (args.resolution, args.resolution))
    return assign(files, bucket_sizes(args.resolution, find_family(args.model_dir).sizes(args.model_dir).multiple))


def explain(args, settings, found, steps):
    """Check what `train` checks and return what it needs, for --dry_run: weights that train, bytes."""
    material, pairs, num_pairs = check_photos(args, settings, found, steps)
    sizes = find_sizes(args, found, material.images)
    photos, class_images = material.halves
    weights, needs = check_needs(args, material.texts, count_pixels(pairs, num_pairs, photos, class_images, sizes))
    rows, size = largest_pass(args.train_batch_size, photos, class_images, sizes)
    family = find_family(args.model_dir)
    is_recomputed = recomputes(family, args.gradient_checkpointing, "cuda")
    options = (size, args.train_text_encoder, is_recomputed, from_flags(Adapters, args), args.use_8bit_adam)
    gpu = estimate.device_bytes(family, args.model_dir, rows, *options)
    return {
        "trained_weights": weights,
        "disk_bytes": asdict(needs),
        "gpu_bytes_in_bf16": gpu | {"sum": sum(gpu.values())},
    }


def train(args, settings, found, steps, num_workers, owner):
    """Check the images, fill the latent cache and run the workers; return what rank 0 returns."""
    material, pairs, num_pairs = check_photos(args, settings, found, steps)
    photos, class_images = material.halves
    sizes = find_sizes(args, found, material.images)
    check_needs(args, material.texts, count_pixels(pairs, num_pairs, photos, class_images, sizes))
    if num_workers:
        start_ray(args.address, args.insecure_cluster, launch.TRAINER)
    posteriors_dir = targets.join_name(args.work_dir, "posteriors")
    names = ("resolution", "random_crop", "random_flip", "seed", "mixed_precision")
    encoder_options = {name: getattr(args, name) for name in names} | {"model_dir": args.model_location}
    pool = {"num_workers": num_workers, **cli.placement(args)}
    made_from = {name: settings[name] for name in CACHE_SETTINGS if name in settings}
    output = from_flags(Output, args, model_dir=args.model_location, settings=settings, owner=owner)
    where = {"held": output.held, "buckets": sizes if args.buckets else None}
    cache_posteriors(
        posteriors_dir, pairs, num_pairs, photos, class_images, encoder_options, made_from, **where, **pool
    )
    validation_steps = args.validation_steps or -(-steps // 4)  # a quarter of the run
    smallest, largest = driver.bounds(num_workers)
    learned = {name: getattr(material, name) for name in ("texts", "text_of", "skipped_images")}
    learned["instance_prompts"] = [subject.photos.prompt for subject in found.subjects]
    learned |= {"pairs_per_step": settings["pairs_per_step"], "pairs": pairs, "posteriors_dir": posteriors_dir}
    task = TrainTask(
        output=output,
        schedule=from_flags(Schedule, args, max_train_steps=steps, validation_steps=validation_steps),
        optimization=from_flags(Optimization, args),
        compute=from_flags(Compute, args, num_workers=largest, min_workers=smallest),
        images=from_flags(Images, args),
        adapters=from_flags(Adapters, args),
        dreambooth=from_flags(DreamBooth, args, **learned),
    )
    return launch.run_workers(train_loop, task, **cli.placement(args))


def main(args):
    """Check the inputs, fill the latent cache, train, and print the result."""
    if not args.prior_loss_weight:
        args.class_images_dir = args.class_prompt = None
    args.work_dir = args.work_dir or targets.beside(args.output_dir, ".work")
    cli.make_absolute(args, "model_dir", "output_dir", "work_dir", *IMAGES_DIRS)
    args.model_location, args.model_dir = args.model_dir, str(local_copy(args.model_dir))
    settings, found = read_inputs(args)
    plan, work = partial(plan_steps, args, settings, found), partial(train, args, settings, found)
    driver.run_training(args, settings, plan, work, partial(explain, args, settings, found))


if __name__ == "__main__":
    cli.run(main, parse_args())
