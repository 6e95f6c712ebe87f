"""Teach a Stable Diffusion model a subject from a few photos: DreamBooth (arXiv 2208.12242) on Ray Train with DDP.

Reads a model folder, the subject's photos and images of its class (run_model.py draws them); writes the tuned pipeline
to --output_dir, and checkpoints, cached latents and logs to --work_dir. Run the command again to continue.

    python train.py --model_dir models/emoji-64 --output_dir data/tuned --instance_images_dir assets/subject \\
        --instance_prompt "a 3d emoji of a unqtkn cat" --prior_loss_weight 0 --max_train_steps 20 --num_workers 0
    python train.py --model_dir MODEL --output_dir data/tuned --instance_images_dir photos \\
        --class_images_dir data/reg --instance_prompt "photo of unqtkn dog" --class_prompt "photo of a dog"
"""

import argparse
import importlib.util
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import utils
from common import cli, folders, messages, no_gc
from common.cluster import start_ray
from common.errors import BadInput
from common.images import check_images, find_images
from dataset import Batches, Pairs, cache_posteriors
from pipelines import loading
from pipelines.configs import check_resolution, model_resolution, pixel_factor, read_config
from pipelines.model_folder import check_model, check_pipeline, count_weights, digest_model
from pipelines.prompts import check_prompts
from pipelines.tokens import say_what_is_cut, tokenize
from training import checkpoints, driver, loop, parallel, resuming, validation, workers
from training.optimizer import make_optimizer
from training.publishing import dreambooth_card, publish_pipeline

# Flags that decide the weights that come out: a run continues only under the same.
SETTINGS = """
    instance_prompt class_prompt resolution random_crop random_flip max_variants skip_bad_images lr lr_scheduler seed
    lr_warmup_steps prior_loss_weight snr_gamma max_grad_norm adam_weight_decay use_8bit_adam train_text_encoder
    reduce_dtype mixed_precision compile
""".split()  # noqa: SIM905

# Those that decide the cached latents, the digests of the model and the folders among them.
CACHE_SETTINGS = """
    model instance_images_dir class_images_dir resolution random_crop random_flip max_variants skip_bad_images seed
    mixed_precision
""".split()  # noqa: SIM905

CARD_IMAGES = 4  # samples on the model card


def parse_args(argv=None):
    """Parse the command line."""
    parser = cli.make_parser(__doc__)
    _add_data_flags(parser)
    _add_training_flags(parser)
    group = cli.add_shared_flags(parser)
    group.add_argument("--num_workers", type=cli.non_negative_int, help="0: this process; default: one a GPU, or 1")
    cli.add_compute_flags(group)
    args = parser.parse_args(argv)
    if args.prior_loss_weight and not (args.class_images_dir and args.class_prompt):
        parser.error("--class_images_dir and --class_prompt are needed, or --prior_loss_weight 0")
    if args.lr_warmup_steps and args.lr_scheduler == "constant":
        parser.error("--lr_warmup_steps does nothing with --lr_scheduler constant: take constant_with_warmup")
    if args.max_train_pairs and args.max_train_steps:
        parser.error("--max_train_pairs and --max_train_steps both set how long the run is: leave one out")
    return args


def _add_data_flags(parser):
    group = parser.add_argument_group("model")
    model = "folder of the base model, what cache_model.py printed"
    group.add_argument("--model_dir", "--pretrained_model_name_or_path", required=True, help=model)
    group.add_argument("--output_dir", required=True, help="folder for the tuned pipeline; appears when it is whole")
    group.add_argument("--work_dir", help="folder for checkpoints, cached latents and logs; default: OUTPUT_DIR.work")
    group.add_argument("--overwrite", action="store_true", help="drop an earlier run of other settings")

    group = parser.add_argument_group("images and prompts")
    photos = "folder of the subject's photos, about five"
    group.add_argument("--instance_images_dir", "--instance_data_dir", required=True, help=photos)
    group.add_argument("--instance_prompt", required=True, help='what they show: "photo of unqtkn dog"')
    group.add_argument("--class_images_dir", "--class_data_dir", help="folder of class images, drawn by run_model.py")
    group.add_argument("--class_prompt", help='what those show: "photo of a dog"')
    group.add_argument("--unique_token", help="identifier; default: the words that only --instance_prompt has")
    group.add_argument("--resolution", type=cli.positive_int, help="pixels a side; default: the model's own")
    _add_switch(group, "random_crop", True, "crop photos at a random place, not the centre")
    _add_switch(group, "random_flip", True, "mirror half the photos; turn off for text and one-sided marks")
    group.add_argument("--max_variants", type=cli.positive_int, default=16, help="crops of a photo, at most")
    group.add_argument("--skip_bad_images", action="store_true", help="go on without files that cannot be read")


def _add_training_flags(parser):
    group = parser.add_argument_group("training")
    group.add_argument("--train_batch_size", type=cli.positive_int, default=1, help="pairs a worker takes at a time")
    group.add_argument("--gradient_accumulation_steps", type=cli.positive_int, default=1, help="batches a step")
    epochs = "passes over max(photos, class images)"
    group.add_argument("--num_epochs", "--num_train_epochs", type=cli.positive_int, default=4, help=epochs)
    pairs = "pairs of a photo and a class image to train on; the steps follow from the batch size, the accumulation "
    pairs += "and the workers; overrides --num_epochs"
    group.add_argument("--max_train_pairs", type=cli.positive_int, help=pairs)
    group.add_argument("--max_train_steps", type=cli.positive_int, help="optimizer steps; overrides --num_epochs")
    group.add_argument("--lr", "--learning_rate", type=cli.positive_float, default=5e-6, help="learning rate")
    schedules = ("constant", "constant_with_warmup", "linear", "cosine")
    group.add_argument("--lr_scheduler", choices=schedules, default="constant", help="course of the learning rate")
    group.add_argument("--lr_warmup_steps", type=cli.non_negative_int, default=0, help="steps of linear warm-up")
    group.add_argument("--prior_loss_weight", type=cli.non_negative_float, default=1.0, help="of the class images")
    group.add_argument("--snr_gamma", type=cli.positive_float, help="weigh rows by min-SNR with this gamma, say 5")
    group.add_argument("--max_grad_norm", type=cli.positive_float, default=1.0, help="gradients are clipped to this")
    group.add_argument("--adam_weight_decay", type=cli.non_negative_float, default=1e-2, help="AdamW's")
    group.add_argument("--use_8bit_adam", action="store_true", help="AdamW's averages in 8 bits; needs bitsandbytes")
    group.add_argument("--reduce_dtype", choices=("fp32", "bf16"), default="fp32", help="workers send gradients so")
    _add_switch(group, "train_text_encoder", True, "train the text encoder too")
    group.add_argument("--gradient_checkpointing", action="store_true", help="less memory, a third more time")
    group.add_argument("--compile", action="store_true", help="faster steps after minutes: for thousands of steps")
    group.add_argument("--seed", type=cli.seed, default=0, help="seed of crops, order and noise")

    group = parser.add_argument_group("pictures while it trains, and on the model card")
    prompts = "what to draw meanwhile; repeatable"
    group.add_argument("--validation_prompts", "--validation_prompt", action="append", default=[], help=prompts)
    between = "steps between drawings; default: a quarter of the run"
    group.add_argument("--validation_steps", type=cli.positive_int, help=between)
    group.add_argument("--num_validation_images", type=cli.positive_int, default=4, help="pictures of each prompt")
    group.add_argument("--guidance_scale", type=cli.non_negative_float, default=7.5, help="of all these pictures")

    group = parser.add_argument_group("checkpoints and logs")
    group.add_argument("--checkpointing_steps", type=cli.positive_int, default=200, help="steps between checkpoints")
    limit = "newest checkpoints to keep while it trains"
    group.add_argument("--checkpoints_total_limit", type=cli.positive_int, default=2, help=limit)
    keep = "keep checkpoints and latent cache once the result is published, so that a longer run can go on"
    _add_switch(group, "keep_checkpoints", False, keep)
    group.add_argument("--log_every", type=cli.positive_int, default=10, help="steps between lines of log.jsonl")


def _add_switch(group, name, default, help_text):
    group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default, help=help_text)


# ---------------------------------------------------------------------------------------------------------------------
# A step


def join_modules(text_encoder, unet):
    """Return one module of both, so that one DDP reducer serves both; text_encoder: None where it is frozen."""
    import torch

    class TextToNoise(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.unet = unet
            self.text_encoder = text_encoder

        def forward(self, noisy_latents, timesteps, prompt):
            hidden_states = prompt if self.text_encoder is None else self.text_encoder(prompt)[0]  # 2B L D
            return self.unet(noisy_latents, timesteps, hidden_states).sample  # 2B c h w

    return TextToNoise()


def training_step(model, batch, noise_scheduler, vae_config, num_instance, prior_loss_weight, snr_gamma=None):
    """Return (loss, instance loss, class loss) of a batch of dataset.collate: arXiv 2208.12242, eq. 2.

    num_instance: how many rows, the first ones, are the subject's; the others are the class's.
    """
    latents = loading.scale_latents(batch["mean"] + batch["std"] * batch["posterior_noise"], vae_config)  # 2B c h w
    noise, timesteps = batch["noise"], batch["timesteps"]  # 2B c h w, 2B
    noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)
    model_pred = model(noisy_latents, timesteps, batch["prompt"])
    target = utils.get_target(noise_scheduler, latents, noise, timesteps)
    row_weights = None if snr_gamma is None else utils.min_snr_weights(noise_scheduler, timesteps, snr_gamma)
    return utils.prior_preserving_loss(model_pred, target, num_instance, prior_loss_weight, row_weights)


def load_modules(config, place, folder):
    """Return (modules to train by name, frozen text encoder or None), from checkpoint `folder` where there is one."""
    import torch

    modules = loading.load_models(config["model_dir"], ("text_encoder", "unet"), torch.float32, folder)
    modules = {name: module.to(place.device).train() for name, module in modules.items()}
    if not config["use_8bit_adam"]:  # which copies weights into the usual order
        modules["unet"].to(memory_format=torch.channels_last)
    frozen = None if config["train_text_encoder"] else modules.pop("text_encoder").eval()
    for module in modules.values():
        module.requires_grad_(True)
        if config["gradient_checkpointing"]:
            (getattr(module, "enable_gradient_checkpointing", None) or module.activation_checkpointing_enable)()
    return modules, frozen


def encode_prompts(config, text_encoder, device):
    """Return (instance, class) prompt_ids [L]; prompt_embeds [L, D], computed once, with a frozen text encoder."""
    import torch

    prompts = [config["instance_prompt"], config["class_prompt"] or ""]
    prompt_ids = [torch.tensor(ids) for ids in tokenize(config["model_dir"], prompts)]
    if text_encoder is None:
        return prompt_ids
    with torch.no_grad():
        return [text_encoder(ids[None].to(device))[0][0].cpu() for ids in prompt_ids]


def prepare(config, place):
    """Return the training.Run of a worker: everything stands where the newest checkpoint left it."""
    from diffusers import DDPMScheduler

    loading.set_up_torch(place.device.type, config.get("num_threads"), config["mixed_precision"])
    dtype = loading.compute_dtype(config["mixed_precision"], place.device.type, place.any)
    step, folder = checkpoints.newest_checkpoint(config["work_dir"])
    modules, frozen_text_encoder = load_modules(config, place, folder)
    optimizer = make_optimizer(config, modules, place, dtype, folder)
    joined = join_modules(modules.get("text_encoder"), modules["unet"])
    if config["compile"]:
        joined.compile()
    model = parallel.wrap(joined, place, reduce_dtype=config["reduce_dtype"])
    noise_scheduler = DDPMScheduler.from_pretrained(config["model_dir"], subfolder="scheduler")
    prompts = encode_prompts(config, frozen_text_encoder, place.device)
    num_timesteps = noise_scheduler.config.num_train_timesteps
    batches = Batches(config["posteriors_dir"], Pairs(**config["pairs"]), *prompts, config["seed"], num_timesteps)
    num_pairs = config["train_batch_size"]
    painter = validation.Painter(config, {"text_encoder": frozen_text_encoder, **modules}, place, dtype)

    def batch(step, micro):
        first_pair = (micro * place.world_size + place.rank) * num_pairs
        return batches(step, first_pair, num_pairs, config["pairs_per_step"])

    return loop.Run(
        step=step,
        model=model,
        optimizer=optimizer,
        batch=batch,
        loss_names=("loss", "instance_loss", "class_loss"),
        losses=partial(
            training_step,
            model,
            noise_scheduler=noise_scheduler,
            vae_config=read_config(config["model_dir"], "vae"),
            num_instance=num_pairs,
            prior_loss_weight=config["prior_loss_weight"],
            snr_gamma=config["snr_gamma"],
        ),
        dtype=dtype,
        saves=place.rank == 0,
        write=partial(checkpoints.write_state, modules=modules, optimizer=optimizer.adamw),
        draw=painter.draw,
    )


def train_loop(config):
    """Train on one worker from the newest checkpoint to `max_train_steps`; rank 0 logs, saves and publishes."""
    with no_gc.no_gc():
        place = workers.find_place(config["num_workers"])
        run = prepare(config, place)
    first, last = run.step, config["max_train_steps"]
    step = loop.train_steps(run, config, place)
    del run  # the optimizer's memory, for the pipeline
    if place.rank == 0 and step >= last:
        weights = checkpoints.checkpoint_path(config["work_dir"], step)
        prompts = [config["instance_prompt"]] * CARD_IMAGES
        publish_pipeline(config, step, place.device, weights, prompts, dreambooth_card)
    return {"step": step, "trained": step - first, "stopped": step < last}


# ---------------------------------------------------------------------------------------------------------------------
# The driver


def read_inputs(args):
    """Check the model, the prompts and the folders without opening an image; return the settings of the run."""
    if args.use_8bit_adam and not importlib.util.find_spec("bitsandbytes"):
        raise BadInput("--use_8bit_adam needs a package that is not here: python -m pip install bitsandbytes")
    index = check_pipeline(args.model_dir)
    if index["_class_name"] != "StableDiffusionPipeline":
        raise BadInput(f"--model_dir {args.model_dir} is a {index['_class_name']}: only StableDiffusionPipeline learns")
    args.resolution = args.resolution or model_resolution(args.model_dir)
    check_resolution(args.model_dir, "--resolution", args.resolution)
    check_prompts(args.instance_prompt, args.class_prompt, args.unique_token)
    for prompt in args.validation_prompts:
        cli.check_text("--validation_prompts", prompt)
    others = ("work_dir", "model_dir", "instance_images_dir", "class_images_dir")
    folders.check_apart(args.output_dir, **{name: getattr(args, name) for name in others})
    for name in ("output_dir", "work_dir"):
        folders.check_writable(getattr(args, name), f"--{name}")
    settings = {name: getattr(args, name) for name in SETTINGS}
    settings["model"] = digest_model(args.model_dir)
    for name in ("instance_images_dir", "class_images_dir"):
        folder = getattr(args, name)
        settings[name] = folders.digest_files(find_images(folder, f"--{name}")[0]) if folder else None
    return settings


def plan_steps(args, settings, num_workers):
    """Add the pairs of a step to `settings`, whatever workers share them, and return the steps to train for."""
    settings["pairs_per_step"] = args.train_batch_size * args.gradient_accumulation_steps * max(1, num_workers)
    folders = [folder for folder in (args.instance_images_dir, args.class_images_dir) if folder]
    num_pairs = args.max_train_pairs or args.num_epochs * max(len(find_images(folder, "")[0]) for folder in folders)
    steps = args.max_train_steps or driver.steps_of(num_pairs, settings["pairs_per_step"])
    if not args.lr_scheduler.startswith("constant"):
        settings["max_train_steps"] = steps  # the learning rate falls towards the end
    return steps


def pick_images(args):
    """Return ([instance images, class images], names of those that --skip_bad_images leaves out)."""
    images, skipped = [], []
    for name in ("instance_images_dir", "class_images_dir"):
        folder, flag = getattr(args, name), f"--{name}"
        images.append(check_images(folder, flag, args.skip_bad_images) if folder else [])
        skipped += [path.name for path in find_images(folder, flag)[0] if path not in images[-1]] if folder else []
    return images, skipped


def check_needs(args, num_rows):
    """Check, before a model is loaded, its files and the room on the disk; say what of a prompt is not read."""
    say_what_is_cut(args.model_dir, [args.instance_prompt, args.class_prompt or "", *args.validation_prompts])
    cells = (args.resolution // pixel_factor(args.model_dir)) ** 2
    cache = num_rows * cells * read_config(args.model_dir, "vae")["latent_channels"] * 2 * 2  # float16 mean, std
    trained = ("unet", "text_encoder")[: 1 + args.train_text_encoder]
    resuming.check_disk(args, sum(count_weights(Path(args.model_dir, name)) for name in trained), 3, cache)
    check_model(args.model_dir)


def train(args, settings, steps, num_workers):
    """Check the images, fill the cache of latents and run the workers; return what rank 0 says."""
    images, skipped = pick_images(args)
    pairs = Pairs(len(images[0]), len(images[1]), args.max_variants, args.seed)
    num_pairs = steps * settings["pairs_per_step"]
    check_needs(args, len(pairs.rows_used(num_pairs)))
    if 0 < len(images[1]) < settings["pairs_per_step"]:
        holds = f"--class_images_dir holds {len(images[1])} images, a step takes {settings['pairs_per_step']} pairs"
        messages.say(f"warning: {holds}: an image is used several times a step")
    if num_workers:
        start_ray(args.address, args.insecure_cluster, driver.TRAINER)
    posteriors_dir = str(Path(args.work_dir) / "posteriors")
    names = ("model_dir", "resolution", "random_crop", "random_flip", "seed", "mixed_precision")
    encoder_options = {name: getattr(args, name) for name in names}
    pool = {"num_workers": num_workers, **cli.placement(args)}
    made_from = {name: settings[name] for name in CACHE_SETTINGS}
    cache_posteriors(posteriors_dir, pairs, num_pairs, *images, encoder_options, made_from, **pool)
    config = {
        **vars(args),
        "settings": settings,
        "pairs_per_step": settings["pairs_per_step"],
        "max_train_steps": steps,
        "validation_steps": args.validation_steps or -(-steps // 4),  # a quarter
        "num_workers": num_workers,
        "posteriors_dir": posteriors_dir,
        "pairs": asdict(pairs),
        "skipped_images": skipped,
    }
    return driver.run_workers(train_loop, config, **cli.placement(args))


def main(args):
    """Check everything, fill the cache of latents, train, and say where the result is."""
    if not args.prior_loss_weight:
        args.class_images_dir = args.class_prompt = None
    args.work_dir = args.work_dir or f"{args.output_dir.rstrip('/')}.work"
    for name in ("model_dir", "output_dir", "work_dir", "instance_images_dir", "class_images_dir"):
        setattr(args, name, getattr(args, name) and str(Path(getattr(args, name)).resolve()))
    settings = read_inputs(args)
    plan, work = partial(plan_steps, args, settings), partial(train, args, settings)
    driver.run_training(args, settings, plan, work)


if __name__ == "__main__":
    sys.exit(cli.run(main, parse_args()))
