"""Measure what a tuned model learned and what it forgot, beside its base model, and show it on one page.

Reads both models, the subject's photos and images of the class; draws what else it needs under --output_dir and writes
evaluation.json and report.html there. Run the command again to continue: no picture is drawn twice. The measures are
those of DreamBooth (arXiv 2208.12242, section 4); prompts/objects.txt and prompts/living.txt are its 25 prompts each,
from its data set (CC-BY 4.0).

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
from pathlib import Path

from common import cli, folders, messages
from common.errors import BadInput, ToolError
from common.images import check_images, find_images
from evaluation.encoders import digest_encoder, embed, find_encoder
from evaluation.measures import FEWEST_PHOTOS, MEASURES, SMALLEST_SET, measure, nearest
from evaluation.report import write_report
from evaluation.subject import find_subject, read_templates
from pipelines.configs import read_config, read_index
from pipelines.drawing import check_model_and_sampler, draw_folders
from pipelines.image_folder import image_name, read_metadata
from pipelines.model_folder import check_pipeline, digest_model
from pipelines.samplers import SAMPLER, add_sampler_flags

RESULT, REPORT = "evaluation.json", "report.html"
LIMITS = {"high": "--fail_under", "low": "--fail_above"}  # of the measures that are better high, or low
FAMILY = {  # what decides whether the weights of two models fit each other
    "unet": ("in_channels", "block_out_channels", "down_block_types", "layers_per_block", "cross_attention_dim"),
    "text_encoder": ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"),
    "vae": ("latent_channels", "block_out_channels"),
}
# Flags that decide the numbers that come out.
SETTINGS = """
    instance_prompt class_prompt unique_token class_name num_samples_per_prompt num_class_images seed memorised_above
    skip_bad_images no_safety_checker mixed_precision
""".split()  # noqa: SIM905


def parse_args(argv=None):
    """Parse the command line."""
    parser = cli.make_parser(__doc__)
    _add_input_flags(parser)
    _add_picture_flags(parser)
    group = parser.add_argument_group("measuring")
    group.add_argument("--clip_model", default="openai/clip-vit-base-patch32", help="CLIP: a hub name or a folder")
    group.add_argument("--dino_model", default="facebook/dino-vits16", help="the same of DINO; none leaves it out")
    group.add_argument("--memorised_above", type=cli.fraction, default=0.95, help="cosine with a photo that counts")
    for better, flag in LIMITS.items():
        names = ", ".join(name for name, each in MEASURES.items() if each.better == better)
        help_text = f"exit 1 where the tuned model's NAME is {flag.split('_')[1]} VALUE; may be repeated; NAME: {names}"
        limit = functools.partial(_limit, better)
        group.add_argument(flag, type=limit, action="append", default=[], metavar="NAME=VALUE", help=help_text)
    group = cli.add_shared_flags(parser)
    group.add_argument("--batch_size", type=cli.positive_int, default=4, help="images an actor draws at a time")
    group.add_argument("--num_workers", type=cli.pool_size, help="actors: N, MIN:MAX, or 0 for this process")
    cli.add_compute_flags(group)
    args = parser.parse_args(argv)
    if args.dino_model == "none" and any(name == "subject_dino" for name, _ in args.fail_under):
        parser.error("--fail_under subject_dino is not measured with --dino_model none")
    args.command = ["python", "evaluate.py", *(sys.argv[1:] if argv is None else argv)]
    return args


def _add_input_flags(parser):
    group = parser.add_argument_group("models and images")
    group.add_argument("--model_dir", required=True, help="folder of the tuned pipeline, what train.py wrote")
    group.add_argument("--base_model_dir", required=True, help="folder of the model that it was tuned from")
    group.add_argument("--instance_images_dir", required=True, help="folder of the subject's photos")
    group.add_argument("--class_images_dir", required=True, help="images of the class that the base model drew")
    group.add_argument("--skip_bad_images", action="store_true", help="go on without files that cannot be read")
    group.add_argument("--no_safety_checker", action="store_true", help="turn the models' safety checker off")

    group = parser.add_argument_group("prompts")
    group.add_argument("--instance_prompt", required=True, help='as in training: "photo of unqtkn dog"')
    group.add_argument("--class_prompt", required=True, help='as in training: "photo of a dog"')
    group.add_argument("--unique_token", help="identifier; default: the words that only --instance_prompt has")
    group.add_argument("--class_name", help="what it is; default: the words after the identifier")
    group.add_argument("--prompts_file", help="a prompt a line, {} for the subject; default: --instance_prompt")


def _add_picture_flags(parser):
    group = parser.add_argument_group("pictures")
    group.add_argument("--output_dir", required=True, help="folder for the pictures, the numbers and the report")
    group.add_argument("--overwrite", action="store_true", help="replace an evaluation of other settings")
    group.add_argument("--num_samples_per_prompt", type=cli.positive_int, default=4, help="pictures of each prompt")
    group.add_argument("--num_class_images", type=cli.positive_int, default=100, help="class pictures, at most")
    group.add_argument("--seed", type=cli.seed, default=0, help="seed of the pictures and of the intervals")
    add_sampler_flags(group)


def _limit(better, text):
    """Parse NAME=VALUE of a measure that is better when it is `better`, high or low."""
    name, _, value = text.partition("=")
    names = [name for name, each in MEASURES.items() if each.better == better]
    if name in MEASURES and name not in names:
        other = MEASURES[name].better
        raise argparse.ArgumentTypeError(f"{name} is better when it is {other}: use {LIMITS[other]}")
    if name not in names:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(names)}")
    try:
        value = float(value)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER")
    return name, value


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def check_family(base, tuned):
    """Raise BadInput where two models cannot be one tuned from the other; a size that one does not say is no matter."""
    facts = []
    for folder in (base, tuned):
        index = read_index(folder)
        facts.append({"the pipeline": index["_class_name"]})
        for part, names in FAMILY.items():
            config = read_config(folder, part) if part in index else {}
            facts[-1] |= {f"{part}'s {name}": config[name] for name in names if config.get(name) is not None}
    for name in facts[0]:
        if facts[0][name] != facts[1].get(name, facts[0][name]):
            raise BadInput(
                f"--model_dir {tuned} and --base_model_dir {base} are of different families: {name} is "
                f"{facts[1][name]} and {facts[0][name]}: give the model that it was tuned from"
            )


def check_counts(args, num_photos, num_class_images, num_prompts):
    """Raise BadInput where there are too few pictures for a measure."""
    counts = (
        (f"--instance_images_dir {args.instance_images_dir}", num_photos, FEWEST_PHOTOS, "fidelity"),
        (f"--class_images_dir {args.class_images_dir}", num_class_images, SMALLEST_SET, "diversity"),
        ("--num_class_images", args.num_class_images, SMALLEST_SET, "diversity"),
        ("--num_samples_per_prompt", num_prompts * args.num_samples_per_prompt, SMALLEST_SET, "fidelity"),
    )
    for flag, found, needed, measured in counts:
        if found < needed:
            raise BadInput(f"{flag}: {found} pictures are too few, {measured} is measured on {needed} or more")


def read_settings(args, templates, sampler):
    """Check the models, the folders and the encoders; return (settings that decide the result, encoders' folders)."""
    for flag in ("base_model_dir", "model_dir"):
        check_pipeline(getattr(args, flag), f"--{flag}")
        check_model_and_sampler(model_of(args, getattr(args, flag)), sampler)
    check_family(args.base_model_dir, args.model_dir)
    settings = {**{name: getattr(args, name) for name in SETTINGS}, **sampler}
    settings["prompts"] = folders.digest_values(templates)
    for flag in ("instance_images_dir", "class_images_dir"):
        settings[flag] = folders.digest_files(find_images(getattr(args, flag), f"--{flag}")[0])
    for flag in ("base_model_dir", "model_dir"):
        settings[flag] = digest_model(getattr(args, flag))
    encoders = {"clip": find_encoder(args.clip_model, "--clip_model"), "dino": None}
    if args.dino_model != "none":
        encoders["dino"] = find_encoder(args.dino_model, "--dino_model")
    settings |= {name: folder and digest_encoder(folder) for name, folder in encoders.items()}
    return settings, encoders


def model_of(args, model_dir):
    """Return a model as draw_folders takes it."""
    model = {"model_dir": model_dir, "checkpoint": None, "mixed_precision": args.mixed_precision}
    return {**model, "safety_checker": not args.no_safety_checker}


def find_finished(output_dir, settings, overwrite):
    """Return the evaluation of these settings that `output_dir` holds, or None; raise BadInput where it holds another.

    With `overwrite` another is no matter.
    """
    evaluation = folders.read_json(Path(output_dir) / RESULT)
    earlier = evaluation.get("settings")
    if earlier == settings and (Path(output_dir) / REPORT).is_file():
        return evaluation
    if earlier is not None and not overwrite:
        folders.check_same_settings(settings, earlier, f"--output_dir {output_dir}")
    return None


def find_differences(args, sampler):
    """Return what is known to make the class images of the base model differ from those that are drawn here."""
    wanted = {**sampler, "model": digest_model(args.base_model_dir), "text": args.class_prompt}
    records, notes = read_metadata(args.class_images_dir).values(), []
    for name, value in wanted.items():
        found = {record[name] for record in records if name in record}
        if found - {value}:
            other = "another" if name == "model" else f"{sorted(map(str, found - {value}))[0]}, not {value}"
            notes.append(f"The base model's class pictures were drawn with {name} {other}: compare with care.")
    return notes


# ---------------------------------------------------------------------------------------------------------------------
# Drawing and measuring


def draw_sets(args, prompts, num_class_images, sampler):
    """Draw the pictures that are missing; return (how many, {set: paths}), prompt by prompt."""
    pool = {"batch_size": args.batch_size, "num_workers": args.num_workers, **cli.placement(args)}
    wanted = {
        "tuned": ("images-tuned", args.model_dir, prompts, args.num_samples_per_prompt),
        "base": ("images-base", args.base_model_dir, prompts, args.num_samples_per_prompt),
        "class_tuned": ("class-tuned", args.model_dir, [args.class_prompt], num_class_images),
    }
    jobs, sets = [], {}
    for name, (folder, model_dir, texts, count) in wanted.items():
        folder = Path(args.output_dir) / folder
        jobs.append((folder, texts, count, model_of(args, model_dir)))
        sets[name] = [folder / image_name(text, index) for text in texts for index in range(count)]
    drawn = draw_folders(jobs, args.seed, sampler, args.overwrite, **pool)
    return sum(count for count, _ in drawn), sets


def measure_sets(args, sets, texts, encoders):
    """Return (measures, {set: [(photo, cosine)]}: the nearest photo of each picture of the subject)."""
    pool = {"num_workers": args.num_workers, **cli.placement(args)}
    jobs = [(encoders["clip"], sets, texts)]
    if encoders["dino"]:
        jobs.append((encoders["dino"], sets, ()))
    clip, *others = embed(jobs, **pool)
    dino = others[0] if others else None
    each_text = clip["texts"].repeat(args.num_samples_per_prompt, axis=0)
    measures = measure(clip, dino, each_text, args.memorised_above, args.seed)
    subject, photos, found = dino or clip, sets["photos"], {}
    for name in ("tuned", "base"):
        numbers, values = nearest(subject[name], subject["photos"])
        found[name] = [(photos[i].name, round(float(v), 4)) for i, v in zip(numbers, values, strict=True)]
    return measures, found


def evaluate(args, settings, encoders, templates, subject, class_name, sampler):
    """Draw, embed, measure, and write the report and the result, which is returned."""
    photos = check_images(args.instance_images_dir, "--instance_images_dir", args.skip_bad_images)
    class_images = check_images(args.class_images_dir, "--class_images_dir", args.skip_bad_images)
    check_counts(args, len(photos), len(class_images), len(templates))
    class_images = class_images[: args.num_class_images]
    notes = find_differences(args, sampler)
    for note in notes:
        messages.say(f"warning: {note}")
    output_dir = Path(args.output_dir)
    with folders.lock(output_dir / folders.LOCK):
        (output_dir / RESULT).unlink(missing_ok=True)  # its pictures may be replaced now
        prompts = [template.replace("{}", subject) for template in templates]
        drawn, sets = draw_sets(args, prompts, len(class_images), sampler)
        sets |= {"photos": photos, "class_base": class_images}
        texts = [template.replace("{}", class_name) for template in templates]
        measures, found = measure_sets(args, sets, texts, encoders)
        evaluation = {
            "output_dir": str(output_dir),
            "report": str(output_dir / REPORT),
            "drawn": drawn,
            "pictures": {name: len(paths) for name, paths in sets.items()},
            "encoders": {"clip": args.clip_model, "dino": args.dino_model if encoders["dino"] else None},
            "measures": measures,
            "settings": settings,
            "details": {"subject": subject, "prompts": prompts, "notes": notes, "nearest": found},
        }
        models = {"tuned": args.model_dir, "base": args.base_model_dir}
        write_report(output_dir / REPORT, evaluation, sets, models, args.command)
        folders.write_json(output_dir / RESULT, evaluation)
    return evaluation


def check_limits(fail_under, fail_above, measures):
    """Raise ToolError naming each measure of the tuned model that is on the wrong side of its limit."""
    values = {name: found["tuned"]["value"] for name, found in measures.items() if found}
    low = [f"{name} {values[name]:.4g} is below {limit:g}" for name, limit in fail_under if values[name] < limit]
    high = [f"{name} {values[name]:.4g} is above {limit:g}" for name, limit in fail_above if values[name] > limit]
    missed = [f"{flag}: {', '.join(each)}" for flag, each in zip(LIMITS.values(), (low, high), strict=True) if each]
    if missed:
        raise ToolError("; ".join(missed))


def main(args):
    """Check everything, measure unless it is done, and print the measures."""
    for name in ("model_dir", "base_model_dir", "instance_images_dir", "class_images_dir", "output_dir"):
        setattr(args, name, str(Path(getattr(args, name)).resolve()))
    folders.check_writable(args.output_dir, "--output_dir")
    subject, class_name = find_subject(args.instance_prompt, args.class_prompt, args.unique_token, args.class_name)
    templates = read_templates(args.prompts_file, args.instance_prompt, subject)
    sampler = {name: getattr(args, name) for name in SAMPLER}
    settings, encoders = read_settings(args, templates, sampler)
    evaluation = find_finished(args.output_dir, settings, args.overwrite)
    if evaluation is None:
        evaluation = evaluate(args, settings, encoders, templates, subject, class_name, sampler)
    else:
        messages.say(f"{args.output_dir} is evaluated already")
        evaluation["drawn"] = 0
    shown = {name: value for name, value in evaluation.items() if name not in ("settings", "details")}
    messages.print_result(**shown)
    check_limits(args.fail_under, args.fail_above, evaluation["measures"])


if __name__ == "__main__":
    sys.exit(cli.run(main, parse_args()))
