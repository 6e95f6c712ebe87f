"""The flags of train.py that no other script has: of its images and prompts, its training and what it draws."""

import argparse

from common import cli
from pipelines.captions import MODES
from pipelines.subjects import add_concepts_flag
from training import flags


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model, the folders, the photos and the class images."""
    group = parser.add_argument_group("model")
    model = "folder of the base model, as printed by cache_model.py"
    group.add_argument("--model_dir", "--pretrained_model_name_or_path", required=True, help=model)
    output = "folder of the tuned pipeline; it appears when it is complete"
    group.add_argument("--output_dir", required=True, help=output)
    work = "folder of checkpoints, latent cache and logs; default: OUTPUT_DIR.work"
    group.add_argument("--work_dir", help=work)
    group.add_argument("--overwrite", action="store_true", help="replace an earlier run of other settings")

    group = parser.add_argument_group("images and prompts")
    photos = "folder of the subject's photos, about five"
    group.add_argument("--instance_images_dir", "--instance_data_dir", help=photos)
    prompt = 'prompt of the photos, with the identifier: "photo of unqtkn dog"'
    group.add_argument("--instance_prompt", help=prompt)
    images = "folder of class images, as drawn by run_model.py"
    group.add_argument("--class_images_dir", "--class_data_dir", help=images)
    group.add_argument("--class_prompt", help='prompt of the class images: "photo of a dog"')
    token = "identifier of the subject; default: the words of --instance_prompt that --class_prompt lacks"
    group.add_argument("--unique_token", help=token)
    add_concepts_flag(group)
    captions = "captions of single images (metadata.jsonl, NAME.txt beside NAME.jpg): own: in place of the prompt; "
    captions += "after: after it; none: not used; default: own if a photo has one"
    group.add_argument("--captions", choices=MODES, help=captions)
    side = "width and height in pixels to train on; default: the model's resolution"
    group.add_argument("--resolution", type=cli.positive_int, help=side)
    buckets = "crop each image to the aspect-ratio bucket nearest to its shape, of about as many pixels as the square"
    group.add_argument("--buckets", action="store_true", help=buckets)
    flags.add_switch(group, "random_crop", True, "crop photos at random positions instead of the center")
    flip = "mirror half of the photos; turn it off for subjects with text or one-sided marks"
    flags.add_switch(group, "random_flip", True, flip)
    variants = "largest number of different crops of a photo"
    group.add_argument("--max_variants", type=cli.positive_int, default=16, help=variants)
    group.add_argument("--skip_bad_images", action="store_true", help="leave out images that cannot be read")


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the length of the run, the optimizer and the loss."""
    group = parser.add_argument_group("training")
    batch = "pairs of a photo and a class image in a batch of one worker"
    group.add_argument("--train_batch_size", type=cli.positive_int, default=1, help=batch)
    accumulation = "batches of a worker in one optimizer step"
    group.add_argument("--gradient_accumulation_steps", type=cli.positive_int, default=1, help=accumulation)
    epochs = "length of the run in epochs; an epoch is max(photos, class images) pairs of each subject"
    group.add_argument("--num_epochs", "--num_train_epochs", type=cli.positive_int, default=4, help=epochs)
    pairs = "length of the run in pairs, whatever the batch size and the number of workers; overrides --num_epochs"
    group.add_argument("--max_train_pairs", type=cli.positive_int, help=pairs)
    steps = "length of the run in optimizer steps; overrides --num_epochs"
    group.add_argument("--max_train_steps", type=cli.positive_int, help=steps)
    flags.add_optimizer_flags(group, None, "constant", 0, ("--lr", "--learning_rate"))
    rate = "learning rate of the text encoder; default: --lr"
    group.add_argument("--text_encoder_lr", type=cli.positive_float, help=rate)
    prior = "weight of the prior-preservation loss; 0 trains without class images"
    group.add_argument("--prior_loss_weight", type=cli.non_negative_float, default=1.0, help=prior)
    flags.add_saving_flags(group, "DDP")
    text = "train the text encoder as well as the UNet; default: by the model, on for Stable Diffusion"
    flags.add_switch(group, "train_text_encoder", None, text)
    flags.add_compile_flag(group)
    group.add_argument("--seed", type=cli.seed, default=0, help="seed of crops, sample order, noise and timesteps")


def add_image_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of validation images and samples."""
    group = parser.add_argument_group("validation images and samples on the model card")
    prompts = "prompt to draw validation images of while the model trains; may be repeated"
    group.add_argument("--validation_prompts", "--validation_prompt", action="append", default=[], help=prompts)
    between = "number of steps between two drawings of validation images; default: a quarter of the run"
    group.add_argument("--validation_steps", type=cli.positive_int, help=between)
    count = "number of validation images of each prompt"
    group.add_argument("--num_validation_images", type=cli.positive_int, default=4, help=count)
    scale = "guidance scale of the validation and sample images; default: by the model, 7.5 for Stable Diffusion"
    group.add_argument("--guidance_scale", type=cli.non_negative_float, help=scale)
