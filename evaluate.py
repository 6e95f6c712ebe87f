"""Measure what a tuned model learned and forgot, compared with its base model, and write a report.

Reads both models, the subject's photos and class images of the base model; draws the missing images and writes
evaluation.json and report.html to --output_dir. To resume, run the same command again: no image is drawn twice. The
measures follow DreamBooth (arXiv 2208.12242, section 4); prompts/objects.txt and prompts/living.txt are its 25 prompts
each, from its data set (CC-BY 4.0). Folders may be URIs such as s3://bucket/images.

    python evaluate.py --model_dir data/model-tuned --base_model_dir models/emoji-64 \\
        --instance_images_dir assets/subject --class_images_dir data/images-reg \\
        --instance_prompt "a 3d emoji of a unqtkn cat" --class_prompt "a 3d emoji of a cat" \\
        --prompts_file prompts/emoji.txt --num_inference_steps 25 --guidance_scale 3 \\
        --clip_model models/emoji-clip --dino_model none --output_dir data/evaluation
    python evaluate.py --model_dir TUNED --base_model_dir MODEL --instance_images_dir photos \\
        --class_images_dir data/reg --instance_prompt "photo of unqtkn dog" --class_prompt "photo of a dog" \\
        --prompts_file prompts/living.txt --output_dir data/evaluation \\
        --fail_under subject_dino=0.5 --fail_above memorised=0.1
"""

import argparse
import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common import cli, folders, messages, targets
from common.errors import BadInput, ToolError
from common.images import ImageFolder, check_images, find_images
from common.uris import shown
from evaluation.checks import check_counts, check_family, compare_class_images
from evaluation.encoders import digest_encoder, find_encoder
from evaluation.measures import MEASURES, PHOTOS_OF
from evaluation.pictures import draw_sets, measure_sets
from evaluation.report import make_report
from evaluation.subject import Prompts, find_subject, read_templates, split_subjects
from pipelines.configs import base_name
from pipelines.drawing import check_model_and_sampler, explain_folders, make_copies
from pipelines.lora import add_lora_flag, describe, find_file
from pipelines.model_folder import check_pipeline, digest_model
from pipelines.samplers import SAMPLER, add_sampler_flags
from pipelines.subjects import add_concepts_flag, check_subject_flags

RESULT, REPORT = "evaluation.json", "report.html"
DRAWN = ("images-tuned", "images-base", "class-tuned")  # folders of images
IMAGES_DIRS = ("instance_images_dir", "class_images_dir")
MODEL_FLAGS = {"tuned": "model_dir", "base": "base_model_dir"}
LIMITS = {"high": "--fail_under", "low": "--fail_above"}  # for measures where high, or low, is better
# Flags that determine the result.
SETTINGS = """
    instance_prompt class_prompt unique_token class_name num_samples_per_prompt num_class_images seed memorised_above
    skip_bad_images no_safety_checker mixed_precision
""".split()  # noqa: SIM905


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = cli.make_parser(__doc__)
    _add_input_flags(parser)
    _add_picture_flags(parser)
    _add_measuring_flags(parser)
    group = cli.add_shared_flags(parser)
    group.add_argument("--batch_size", type=cli.positive_int, default=4, help="images that an actor draws at a time")
    workers_help = "drawing and embedding actors: N, or MIN:MAX; 0: this process; default: one per GPU or per four CPUs"
    group.add_argument("--num_workers", type=cli.pool_size, help=workers_help)
    cli.add_compute_flags(group)
    args = cli.parse(parser, argv)
    check_subject_flags(parser, args, (*IMAGES_DIRS, "instance_prompt", "class_prompt"))
    if args.dino_model == "none" and any(name == "subject_dino" for name, _ in args.fail_under):
        parser.error("--fail_under subject_dino cannot be checked with --dino_model none: remove one of them")
    args.command = ["python", "evaluate.py", *map(shown, sys.argv[1:] if argv is None else argv)]
    return args


def _add_input_flags(parser):
    group = parser.add_argument_group("models and images")
    group.add_argument("--model_dir", required=True, help="folder, or URI, of the tuned pipeline that train.py wrote")
    group.add_argument("--base_model_dir", required=True, help="folder, or URI, of the model that was tuned")
    add_lora_flag(group)
    group.add_argument("--instance_images_dir", help="folder, or URI, of the subject's photos")
    group.add_argument("--class_images_dir", help="folder, or URI, of class images that the base model drew")
    add_concepts_flag(group)
    group.add_argument("--skip_bad_images", action="store_true", help="skip image files that cannot be read")
    group.add_argument("--no_safety_checker", action="store_true", help="turn off the safety checker of the models")

    group = parser.add_argument_group("prompts")
    instance_help = 'prompt of the subject, as in training, such as "photo of unqtkn dog"'
    group.add_argument("--instance_prompt", help=instance_help)
    class_help = 'prompt of the class, as in training, such as "photo of a dog"'
    group.add_argument("--class_prompt", help=class_help)
    token_help = "identifier of the subject; default: the words of --instance_prompt that --class_prompt lacks"
    group.add_argument("--unique_token", help=token_help)
    group.add_argument("--class_name", help="class of the subject; default: the words after the identifier")
    prompts_help = "file with one prompt per line, {} for the subject; default: --instance_prompt only"
    group.add_argument("--prompts_file", help=prompts_help)


def _add_picture_flags(parser):
    group = parser.add_argument_group("images")
    group.add_argument(
        "--output_dir", required=True, help="folder, or URI, for the images, the measures and the report"
    )
    group.add_argument("--overwrite", action="store_true", help="replace an evaluation that has other settings")
    samples_help = "images to draw for each prompt with each model"
    group.add_argument("--num_samples_per_prompt", type=cli.positive_int, default=4, help=samples_help)
    class_help = "largest number of class images to compare"
    group.add_argument("--num_class_images", type=cli.positive_int, default=100, help=class_help)
    seed_help = "seed of the images and of the bootstrap confidence intervals"
    group.add_argument("--seed", type=cli.seed, default=0, help=seed_help)
    add_sampler_flags(group)


def _add_measuring_flags(parser):
    group = parser.add_argument_group("measuring")
    clip_help = "CLIP model: name on the Hugging Face Hub, folder, or URI"
    group.add_argument("--clip_model", default="openai/clip-vit-base-patch32", help=clip_help)
    dino_help = "DINO model: name on the Hugging Face Hub, folder, or URI; none: measure without DINO"
    group.add_argument("--dino_model", default="facebook/dino-vits16", help=dino_help)
    memorised_help = "cosine similarity to a photo above which an image counts as memorised"
    group.add_argument("--memorised_above", type=cli.fraction, default=0.95, help=memorised_help)
    for better, side in (("high", "below"), ("low", "above")):
        names = ", ".join(name for name, each in MEASURES.items() if each.better == better)
        limit_help = f"exit with code 1 if the tuned model's NAME is {side} VALUE; may be repeated; NAME: {names}"
        limit = functools.partial(_limit, better)
        flag = LIMITS[better]
        group.add_argument(flag, type=limit, action="append", default=[], metavar="NAME=VALUE", help=limit_help)


def _limit(better, text):
    """Parse NAME=VALUE for a measure where `better`, high or low, is better."""
    name, _, value = text.partition("=")
    names = [name for name, each in MEASURES.items() if each.better == better]
    if name in MEASURES and name not in names:
        other = MEASURES[name].better
        raise argparse.ArgumentTypeError(f"{other} is better for {name}: use {LIMITS[other]}")
    if name not in names:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(names)}")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=NUMBER")
    return name, number


# ---------------------------------------------------------------------------------------------------------------------
# Checks


@dataclass(frozen=True)
class Plan:
    """The checked inputs of an evaluation, whose images are not opened yet.

    sampler: values of SAMPLER; models: "tuned" and "base", as draw_folders takes them; images: those of IMAGES_DIRS;
    others: photos of other subjects, by subject; clip_dir, dino_dir: folders of the encoders on this node; settings:
    all that determines the result, as evaluation.json repeats it.
    """

    prompts: Prompts
    sampler: dict[str, Any]
    models: dict[str, dict[str, Any]]
    images: dict[str, ImageFolder]
    others: dict[str, ImageFolder]
    clip_dir: str
    dino_dir: str | None
    settings: dict[str, Any]


def make_plan(args: argparse.Namespace) -> Plan:
    """Check the prompts, the models, the image folders and the encoders, and return the Plan; no image is decoded."""
    subject, class_name = find_subject(args.instance_prompt, args.class_prompt, args.unique_token, args.class_name)
    templates = read_templates(args.prompts_file, args.instance_prompt, subject)
    sampler = {name: getattr(args, name) for name in SAMPLER}
    models = {name: model_of(args, getattr(args, flag)) for name, flag in MODEL_FLAGS.items()}
    models["tuned"]["loras"] = describe(args.lora)
    for name in ("base", "tuned"):
        check_pipeline(folder_of(models[name]), f"--{MODEL_FLAGS[name]}")
        check_model_and_sampler(models[name], sampler)
    check_family(folder_of(models["base"]), folder_of(models["tuned"]))
    settings = {**{name: getattr(args, name) for name in SETTINGS}, **sampler}
    settings["prompts"] = folders.digest_values(templates)
    images = {name: find_images(getattr(args, name), f"--{name}") for name in IMAGES_DIRS}
    settings |= {name: folders.digest_files(found.files.values()) for name, found in images.items()}
    others = {name: find_images(*folder) for name, folder in args.other_photos.items()}
    if others:
        settings["other_photos"] = {name: folders.digest_files(found.files.values()) for name, found in others.items()}
    settings |= {flag: digest_model(folder_of(models[name])) for name, flag in MODEL_FLAGS.items()}
    if args.lora:
        settings["lora"] = [[each["sha256"], each["scale"]] for each in models["tuned"]["loras"]]
    clip_dir = find_encoder(args.clip_model, "--clip_model")
    dino_dir = None if args.dino_model == "none" else find_encoder(args.dino_model, "--dino_model")
    settings |= {"clip": digest_encoder(clip_dir), "dino": dino_dir and digest_encoder(dino_dir)}
    prompts = Prompts(subject, class_name, tuple(templates))
    return Plan(prompts, sampler, models, images, others, clip_dir, dino_dir, settings)


def model_of(args: argparse.Namespace, model_dir: str) -> dict[str, Any]:
    """Return a model as draw_folders takes it."""
    model = {"model_dir": model_dir, "checkpoint": None, "mixed_precision": args.mixed_precision}
    return {**model, "safety_checker": not args.no_safety_checker, "copies": make_copies(model)}


def folder_of(model: dict[str, Any]) -> str:
    """Return the folder of a model on this node."""
    return model["copies"]["model_dir"]


def find_finished(output_dir: str, settings: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """Return the finished evaluation with these settings in `output_dir`, or None.

    Raises BadInput if the folder holds an evaluation with other settings, unless `overwrite`.
    """
    evaluation = targets.read_json(output_dir, RESULT)
    earlier = evaluation.get("settings")
    if earlier == settings and REPORT in targets.Files(output_dir).versions():
        return evaluation
    if earlier is not None and not overwrite:
        folders.check_same_settings(settings, earlier, f"--output_dir {output_dir}")
    return None


def check_limits(
    fail_under: list[tuple[str, float]], fail_above: list[tuple[str, float]], measures: dict[str, Any], of: str = ""
) -> None:
    """Raise ToolError with each measure of the tuned model on the wrong side of its limit; of: the subject."""
    values = {name: found["tuned"]["value"] for name, found in measures.items() if found}
    low = [f"{name} {values[name]:.4g} is below {limit:g}" for name, limit in fail_under if values[name] < limit]
    high = [f"{name} {values[name]:.4g} is above {limit:g}" for name, limit in fail_above if values[name] > limit]
    missed = [f"{flag}: {', '.join(each)}" for flag, each in zip(LIMITS.values(), (low, high), strict=True) if each]
    if missed:
        raise ToolError(f"{of}: {'; '.join(missed)}" if of else "; ".join(missed))


# ---------------------------------------------------------------------------------------------------------------------
# The evaluation


def evaluate(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Draw, embed and measure; write the report and evaluation.json, and return the latter.

    With --dry_run, return the settings and what would be drawn.
    """
    photos, class_images = (check_images(plan.images[name], args.skip_bad_images) for name in IMAGES_DIRS)
    others = {f"{PHOTOS_OF}{name}": check_images(each, args.skip_bad_images) for name, each in plan.others.items()}
    prompts = plan.prompts
    check_counts(args, len(photos), len(class_images), len(prompts.templates))
    class_images = class_images[: args.num_class_images]
    drawn_as = {**plan.sampler, "model": plan.settings["base_model_dir"], "text": args.class_prompt}
    notes = compare_class_images(args.class_images_dir, drawn_as)
    for note in notes:
        messages.say(f"warning: {note}")

    folder = {name: targets.join_name(args.output_dir, name) for name in (*DRAWN, REPORT)}
    tuned, base = plan.models["tuned"], plan.models["base"]
    wanted = {
        "tuned": (folder["images-tuned"], prompts.of_subject, args.num_samples_per_prompt, tuned),
        "base": (folder["images-base"], prompts.of_subject, args.num_samples_per_prompt, base),
        "class_tuned": (folder["class-tuned"], [args.class_prompt], len(class_images), tuned),
    }
    if args.dry_run:
        drawn = explain_folders(list(wanted.values()), args.seed, plan.sampler, args.overwrite)
        return {"dry_run": True, "settings": plan.settings, **drawn}
    pool = {"num_workers": args.num_workers, **cli.placement(args)}
    with targets.lock(args.output_dir) as held:
        output = targets.Files(args.output_dir, held)
        output.delete(RESULT)  # its images may be replaced now
        drawn, sets = draw_sets(wanted, args.seed, plan.sampler, args.overwrite, batch_size=args.batch_size, **pool)
        sets |= {"photos": photos, "class_base": class_images, **others}
        encoders = (plan.clip_dir, plan.dino_dir)
        measures, found = measure_sets(sets, prompts.of_class, *encoders, args.memorised_above, args.seed, **pool)
        evaluation = {
            "output_dir": shown(args.output_dir),
            "report": shown(folder[REPORT]),
            "drawn": drawn,
            "pictures": {name: len(paths) for name, paths in sets.items()},
            "encoders": {"clip": shown(args.clip_model), "dino": shown(args.dino_model) if plan.dino_dir else None},
            "measures": measures,
            "settings": plan.settings,
            "details": {"subject": prompts.subject, "prompts": prompts.of_subject, "notes": notes, "nearest": found},
        }
        names = {name: base_name(folder_of(model), model["model_dir"]) for name, model in plan.models.items()}
        loras = [find_file(each["location"]).parent for each in tuned["loras"]]
        for path, each in zip(loras, tuned["loras"], strict=True):
            names["tuned"] += f" + {base_name(path, each['location'])}"
        trained = loras[0] if loras else folder_of(tuned)
        output.write(REPORT, make_report(evaluation, sets, trained, names, args.command).encode())
        targets.write_json(args.output_dir, RESULT, evaluation, held)
    return evaluation


def find_or_evaluate(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Return what is printed of one subject: of a finished evaluation, of a new one, or of --dry_run."""
    evaluation = find_finished(args.output_dir, plan.settings, args.overwrite)
    if evaluation is None:
        evaluation = evaluate(args, plan)
        if args.dry_run:
            return evaluation
    else:
        messages.say(f"{args.output_dir} already holds this evaluation: nothing to do")
        evaluation["drawn"] = 0
    return {name: value for name, value in evaluation.items() if name not in ("settings", "details")}


def main(args: argparse.Namespace) -> None:
    """Check everything, evaluate what is not done already, print the measures, and check their limits."""
    cli.make_absolute(args, *MODEL_FLAGS.values(), *IMAGES_DIRS, "output_dir")
    targets.check_writable(args.output_dir, "--output_dir")
    subjects = split_subjects(args)
    if len(subjects) == 1 and "bleed" in dict(args.fail_above):
        raise BadInput("--fail_above bleed compares several subjects: name them in a file of --concepts")
    plans, found = {name: make_plan(flags) for name, flags in subjects.items()}, {}
    for name, flags in subjects.items():
        if len(subjects) > 1:
            messages.say(f"{name}: {flags.output_dir}")
        found[name] = find_or_evaluate(flags, plans[name])
    several = {"output_dir": shown(args.output_dir), "subjects": found}
    messages.print_result(**(several if len(found) > 1 else next(iter(found.values()))))
    for name, result in found.items():
        if "measures" in result:
            check_limits(args.fail_under, args.fail_above, result["measures"], name if len(found) > 1 else "")


if __name__ == "__main__":
    cli.run(main, parse_args())
