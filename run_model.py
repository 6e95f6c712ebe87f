"""Draw images of prompts with a Stable Diffusion model, on a Ray Data pool of actors.

Reads a model folder (what cache_model.py printed, or train.py wrote), writes PNG files and metadata.jsonl. An image
depends on the model, the prompt, the seed, its index and the sampler's settings alone. Run the command again to
continue: only images that are missing or broken are drawn.

    python run_model.py --model_dir models/emoji-interim --prompts "a 3d emoji of a dog" --output_dir data/try
    python run_model.py --model_dir MODEL --prompts "photo of a dog" --num_samples_per_prompt 200 --output_dir data/reg
"""

import hashlib
import io
import json
import re
import sys
from pathlib import Path

from checkpoint import (
    check_model,
    check_same_settings,
    check_space,
    check_writable,
    digest_model,
    lock,
    sha256_file,
    write_bytes,
)
from cli import (
    BadInput,
    Progress,
    add_compute_flags,
    add_shared_flags,
    make_parser,
    non_negative_float,
    placement,
    pool_size,
    positive_int,
    print_result,
    run,
    say,
    seed,
)
from cluster import map_on_actors
from model_folder import check_pipeline, check_resolution, model_resolution, say_what_is_cut
from utils import image_seed

METADATA = "metadata.jsonl"
MAX_REDRAWS = 10  # of an image that the safety checker flags


def parse_args(argv=None):
    """Parse the command line."""
    parser = make_parser(__doc__)
    group = parser.add_argument_group("model")
    group.add_argument("--model_dir", required=True, help="folder of a Diffusers pipeline in safetensors")
    group.add_argument("--checkpoint", help="checkpoint folder of train.py whose modules replace the model's")
    group.add_argument("--no_safety_checker", action="store_true", help="turn the model's safety checker off")

    group = parser.add_argument_group("images")
    group.add_argument("--output_dir", required=True, help="folder for the images; kept and completed where it exists")
    group.add_argument("--prompts", action="append", default=[], help="one prompt, commas and all; may be repeated")
    group.add_argument("--prompts_file", help="text file with one prompt a line")
    group.add_argument("--num_samples_per_prompt", type=positive_int, default=4, help="images of each prompt")
    group.add_argument("--seed", type=seed, default=0, help="seed of the images")
    group.add_argument("--overwrite", action="store_true", help="redraw images of other settings")

    group = parser.add_argument_group("sampler")
    group.add_argument("--num_inference_steps", type=positive_int, default=50, help="denoising steps an image")
    group.add_argument("--guidance_scale", type=non_negative_float, default=7.5, help="weight of the prompt")
    group.add_argument("--negative_prompt", default="", help="what not to draw")
    group.add_argument("--height", type=positive_int, help="pixels; default: the model's own")
    group.add_argument("--width", type=positive_int, help="pixels; default: the model's own")

    group = add_shared_flags(parser)
    group.add_argument("--batch_size", type=positive_int, default=4, help="images an actor draws at a time")
    group.add_argument(
        "--num_workers",
        type=pool_size,
        help="actors: N, or MIN:MAX, or 0 for this process; default: one a GPU, or one for every four CPUs",
    )
    add_compute_flags(group)
    args = parser.parse_args(argv)
    if not args.prompts and not args.prompts_file:
        parser.error("give --prompts or --prompts_file")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# Names and records


def image_name(prompt, index):
    """Return the file name of image `index` of a prompt: its readable part, a hash of the whole prompt, the index."""
    readable = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60].strip("-")
    return f"{readable or 'image'}-{hashlib.sha256(prompt.encode()).hexdigest()[:8]}-{index:05d}.png"


def read_prompts(args):
    """Return the prompts of --prompts and --prompts_file, each once, in order."""
    prompts = list(args.prompts)
    if args.prompts_file:
        try:
            prompts += Path(args.prompts_file).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"--prompts_file {args.prompts_file}: {error}") from None
    prompts = list(dict.fromkeys(prompt.strip() for prompt in prompts if prompt.strip()))
    if not prompts:
        raise BadInput(f"--prompts_file {args.prompts_file or ''} and --prompts hold no prompt")
    return prompts


def wanted_images(prompts, args, model_digest):
    """Return {file name: record}: what metadata.jsonl says of each image, less the seed that a redraw may change."""
    sampler = {
        name: getattr(args, name)
        for name in ("num_inference_steps", "guidance_scale", "negative_prompt", "height", "width", "mixed_precision")
    }
    settings = {"model": model_digest, "base_seed": args.seed, "safety_checker": not args.no_safety_checker, **sampler}
    return {
        image_name(prompt, index): {"text": prompt, "index": index, **settings}
        for prompt in prompts
        for index in range(args.num_samples_per_prompt)
    }


def read_metadata(output_dir):
    """Return {file name: record} of metadata.jsonl; lines that are not records do not count."""
    records = {}
    try:
        lines = (Path(output_dir) / METADATA).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return records
    for line in lines:
        try:
            record = json.loads(line)
            records[record["file_name"]] = record
        except (ValueError, KeyError, TypeError):
            continue
    return records


def read_record(path):
    """Return the record inside a whole PNG file of ours, None for any other file."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
            record = json.loads(image.text["record"])
        return {**record, "file_name": Path(path).name, "sha256": sha256_file(path)}
    except (OSError, ValueError, KeyError, AttributeError, SyntaxError):
        return None


def whole_images(output_dir, wanted, overwrite):
    """Return the records of the wanted images that stand whole in `output_dir`.

    metadata.jsonl is trusted where it has the file's sha256; else the file is decoded and tells its own record.
    Raises BadInput, unless `overwrite`, where one was drawn with other settings.
    """
    listed, whole = read_metadata(output_dir), {}
    for name, record in wanted.items():
        path = Path(output_dir) / name
        if not path.is_file():
            continue
        found = listed.get(name)
        if found is None or found.get("sha256") != sha256_file(path):
            found = read_record(path)
        if found is None:
            say(f"{path} is broken: it is drawn again")
            continue
        drawn = {key: found.get(key) for key in record}
        if drawn == record:
            whole[name] = found
        elif not overwrite:
            check_same_settings(record, drawn, f"--output_dir {output_dir}: {name}")
    return whole


def write_metadata(output_dir, records):
    """Write metadata.jsonl of `records` and of what it listed before and still lies there, unless it says so."""
    output_dir = Path(output_dir)
    kept = {name: record for name, record in read_metadata(output_dir).items() if (output_dir / name).is_file()}
    records = kept | records
    data = "".join(json.dumps(records[name], sort_keys=True) + "\n" for name in sorted(records)).encode()
    path = output_dir / METADATA
    if not path.is_file() or path.read_bytes() != data:
        write_bytes(path, data)


# ---------------------------------------------------------------------------------------------------------------------
# Drawing


class ImageDrawer:
    """Draws batches and writes each image whole: the work of one actor."""

    def __init__(self, model_dir, checkpoint, output_dir, mixed_precision, safety_checker, num_threads=None):
        import torch

        from utils import compute_dtype, load_pipeline, set_up_torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        set_up_torch(device, num_threads)
        dtype = compute_dtype(mixed_precision, device)
        self.pipeline = load_pipeline(model_dir, dtype, checkpoint, safety_checker).to(device)
        self.output_dir = Path(output_dir)

    def __call__(self, item):
        """Draw {"names": [file names], "records": [...]}; return the JSON of both, "flagged" those never passed."""
        todo = dict(zip(item["names"], item["records"], strict=True))
        done = []
        for attempt in range(MAX_REDRAWS + 1):
            images, flags = self._draw(list(todo.values()), attempt)
            for (name, record), image, flag in zip(list(todo.items()), images, flags, strict=True):
                if not flag:
                    done.append(self._save(image, name, record, attempt))
                    del todo[name]
            if not todo:
                break
        return {"records": json.dumps(done), "flagged": json.dumps(list(todo))}

    def _draw(self, records, attempt):
        from utils import draw_images

        first = records[0]
        seeds = [image_seed(record["base_seed"], record["index"], attempt) for record in records]
        names = ("num_inference_steps", "guidance_scale", "negative_prompt", "height", "width")
        return draw_images(self.pipeline, first["text"], seeds, **{name: first[name] for name in names})

    def _save(self, image, name, record, attempt):
        from PIL.PngImagePlugin import PngInfo

        record = {**record, "seed": image_seed(record["base_seed"], record["index"], attempt), "redraws": attempt}
        text = PngInfo()
        text.add_text("record", json.dumps(record, sort_keys=True))
        data = io.BytesIO()
        image.save(data, "PNG", pnginfo=text)
        write_bytes(self.output_dir / name, data.getvalue())
        return {**record, "file_name": name, "sha256": hashlib.sha256(data.getvalue()).hexdigest()}


def make_items(missing, batch_size):
    """Return work items of at most `batch_size` images of one prompt each, so that one prompt keeps all actors busy."""
    by_prompt = {}
    for name, record in missing.items():
        by_prompt.setdefault(record["text"], []).append((name, record))
    return [
        {"names": [name for name, _ in batch], "records": [record for _, record in batch]}
        for images in by_prompt.values()
        for batch in (images[start : start + batch_size] for start in range(0, len(images), batch_size))
    ]


def draw_missing(args, missing, records):
    """Draw the missing images and add their records to `records`; metadata.jsonl follows even when this fails."""
    options = {
        "model_dir": args.model_dir,
        "checkpoint": args.checkpoint,
        "output_dir": args.output_dir,
        "mixed_precision": args.mixed_precision,
        "safety_checker": not args.no_safety_checker,
    }
    items = make_items(missing, args.batch_size)
    flagged = []
    try:
        with Progress("draw", len(missing), "images") as progress:
            for result in map_on_actors(ImageDrawer, options, items, num_workers=args.num_workers, **placement(args)):
                drawn = json.loads(result["records"])
                records.update({record["file_name"]: record for record in drawn})
                flagged += json.loads(result["flagged"])
                progress.update(len(drawn))
    finally:
        write_metadata(args.output_dir, records)
    if flagged:
        raise BadInput(
            f"the safety checker flagged {len(flagged)} images {MAX_REDRAWS + 1} times ({flagged[0]} the first): "
            "change the prompt or the seed, or pass --no_safety_checker"
        )


def check_draw(args, missing):
    """Check, before the model is loaded, its files and the room on the disk; say what of a prompt is not read."""
    side = model_resolution(args.model_dir)
    largest = 3 * (args.height or side) * (args.width or side) + 4096  # bytes of a PNG
    check_space([("--output_dir", args.output_dir, len(missing) * largest)])
    for folder in filter(None, (args.model_dir, args.checkpoint)):
        check_model(folder)
    prompts = dict.fromkeys(record["text"] for record in missing.values())
    say_what_is_cut(args.model_dir, [*prompts, args.negative_prompt])


def main(args):
    """Draw what is missing of the images that the command line asks for."""
    prompts = read_prompts(args)
    index = check_pipeline(args.model_dir)
    if args.height or args.width:  # Diffusers would drop one that comes alone
        args.height = args.height or model_resolution(args.model_dir)
        args.width = args.width or model_resolution(args.model_dir)
        check_resolution(args.model_dir, "--height", args.height)
        check_resolution(args.model_dir, "--width", args.width)
    if args.checkpoint and not any((Path(args.checkpoint) / name).is_dir() for name in index):
        raise BadInput(f"--checkpoint {args.checkpoint} holds no module of the model: give a checkpoint-... folder")
    args.model_dir, args.output_dir = str(Path(args.model_dir).resolve()), str(Path(args.output_dir).resolve())
    args.checkpoint = args.checkpoint and str(Path(args.checkpoint).resolve())
    check_writable(args.output_dir, "--output_dir")
    model_digest = digest_model(args.model_dir) + (digest_model(args.checkpoint) if args.checkpoint else "")
    wanted = wanted_images(prompts, args, model_digest)
    records = whole_images(args.output_dir, wanted, args.overwrite)
    if len(records) == len(wanted) and records.items() <= read_metadata(args.output_dir).items():
        say(f"{args.output_dir}: all {len(wanted)} images are there")
        return print_result(output_dir=args.output_dir, drawn=0, images=len(wanted))
    with lock(Path(args.output_dir) / ".lock"):
        missing = {name: record for name, record in wanted.items() if name not in records}
        check_draw(args, missing)
        draw_missing(args, missing, records)
    print_result(output_dir=args.output_dir, drawn=len(missing), images=len(wanted))


if __name__ == "__main__":
    sys.exit(run(main, parse_args()))
