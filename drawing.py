"""Pictures of prompts in an image folder: names, records of how each was made, and the actors that draw them.

A picture depends on the model, the prompt, the seed, its index and the sampler's settings alone, not on which worker
drew it or beside what; what lies whole in the folder is not drawn again.
"""

import hashlib
import io
import json
import re
from pathlib import Path

from checkpoint import (
    check_same_settings,
    check_space,
    check_writable,
    lock,
    sha256_file,
    write_bytes,
)
from cli import BadInput, Progress, non_negative_float, positive_int, say
from cluster import map_on_actors
from model_folder import (
    check_component,
    check_model,
    check_pipeline,
    check_resolution,
    components,
    digest_model,
    model_resolution,
    say_what_is_cut,
)
from utils import image_seed

METADATA = "metadata.jsonl"
MAX_REDRAWS = 10  # of an image that the safety checker flags
SAMPLER = ("sampler", "num_inference_steps", "guidance_scale", "negative_prompt", "height", "width")


def add_sampler_flags(group):
    """Add the flags of SAMPLER."""
    help_text = "model: the model's own; dpm++: DPM-Solver++, good with 20 to 25 steps"
    group.add_argument("--sampler", choices=("model", "dpm++"), default="model", help=help_text)
    group.add_argument("--num_inference_steps", type=positive_int, default=50, help="denoising steps an image")
    group.add_argument("--guidance_scale", type=non_negative_float, default=7.5, help="weight of the prompt")
    group.add_argument("--negative_prompt", default="", help="what not to draw")
    group.add_argument("--height", type=positive_int, help="pixels; default: the model's own")
    group.add_argument("--width", type=positive_int, help="pixels; default: the model's own")


# ---------------------------------------------------------------------------------------------------------------------
# Names and records


def image_name(prompt, index):
    """Return the file name of image `index` of a prompt: its readable part, a hash of the whole prompt, the index."""
    readable = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60].strip("-")
    return f"{readable or 'image'}-{hashlib.sha256(prompt.encode()).hexdigest()[:8]}-{index:05d}.png"


def wanted_images(prompts, count, seed, model, sampler):
    """Return {file name: record}: what metadata.jsonl says of each image, less the seed that a redraw may change."""
    digest = digest_model(model["model_dir"]) + (digest_model(model["checkpoint"]) if model["checkpoint"] else "")
    settings = {
        "model": digest,
        "base_seed": seed,
        "safety_checker": model["safety_checker"],
        "mixed_precision": model["mixed_precision"],
        **sampler,
    }
    return {
        image_name(prompt, index): {"text": prompt, "index": index, **settings}
        for prompt in prompts
        for index in range(count)
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
        set_up_torch(device, num_threads, mixed_precision)
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
        return draw_images(self.pipeline, first["text"], seeds, **{name: first[name] for name in SAMPLER})

    def _save(self, image, name, record, attempt):
        from PIL.PngImagePlugin import PngInfo

        record = {**record, "seed": image_seed(record["base_seed"], record["index"], attempt), "redraws": attempt}
        text = PngInfo()
        text.add_text("record", json.dumps(record, sort_keys=True))
        data = io.BytesIO()
        image.save(data, "PNG", pnginfo=text, compress_level=1)  # a fifth of the usual time, a sixth more bytes
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


def check_model_and_sampler(model, sampler):
    """Check that a model is whole and draws pictures of the sampler's height and width, which it makes explicit."""
    index = check_pipeline(model["model_dir"])
    if sampler["sampler"] == "dpm++" and "FlowMatch" in (scheduler := index["scheduler"][1]):
        raise BadInput(f"--sampler dpm++ cannot replace the {scheduler} of {model['model_dir']}: take model")
    if sampler["height"] or sampler["width"]:  # Diffusers would drop one that comes alone
        for name in ("height", "width"):
            sampler[name] = sampler[name] or model_resolution(model["model_dir"])
            check_resolution(model["model_dir"], f"--{name}", sampler[name])
    folder = model["checkpoint"]
    replaced = [name for name in components(index) if folder and (Path(folder) / name).is_dir()]
    for name in replaced:
        check_component(Path(folder), name, index[name][1], "--checkpoint")
    if folder and not replaced:
        raise BadInput(f"--checkpoint {folder} holds no module of the model: give a checkpoint-... folder")


def draw_folder(output_dir, prompts, count, seed, model, sampler, overwrite=False, **pool):
    """Draw what is missing of `count` images of each prompt in `output_dir`; return (how many, records by file name).

    model: model_dir, checkpoint (or None), mixed_precision, safety_checker; sampler: those of SAMPLER, checked.
    pool: batch_size, and num_workers and the like of map_on_actors.
    """
    output_dir = str(Path(output_dir).resolve())
    model = {**model, **{name: str(Path(model[name]).resolve()) for name in ("model_dir", "checkpoint") if model[name]}}
    check_writable(output_dir, "--output_dir")
    wanted = wanted_images(prompts, count, seed, model, sampler)
    records = whole_images(output_dir, wanted, overwrite)
    if len(records) == len(wanted) and records.items() <= read_metadata(output_dir).items():
        say(f"{output_dir}: all {len(wanted)} images are there")
        return 0, records
    with lock(Path(output_dir) / ".lock"):
        for path in Path(output_dir).glob(".*.tmp"):  # what a killed run was writing
            path.unlink()
        missing = {name: record for name, record in wanted.items() if name not in records}
        _check_needs(output_dir, model, missing)
        _draw_missing(output_dir, model, missing, records, **pool)
    return len(missing), records


def _check_needs(output_dir, model, missing):
    """Check, before the model is loaded, its files and the room on the disk; say what of a prompt is not read."""
    side = model_resolution(model["model_dir"])
    sizes = [3 * (record["height"] or side) * (record["width"] or side) + 4096 for record in missing.values()]
    check_space([("--output_dir", output_dir, sum(sizes))])  # bytes of a PNG, at the most
    for folder in filter(None, (model["model_dir"], model["checkpoint"])):
        check_model(folder)
    said = dict.fromkeys(text for each in missing.values() for text in (each["text"], each["negative_prompt"]))
    say_what_is_cut(model["model_dir"], said)


def _draw_missing(output_dir, model, missing, records, batch_size, num_workers, **place):
    """Draw the missing images and add their records to `records`; metadata.jsonl follows even when this fails."""
    options = {**model, "output_dir": output_dir}
    items = make_items(missing, batch_size)
    flagged = []
    try:
        with Progress("draw", len(missing), "images") as progress:
            for result in map_on_actors(ImageDrawer, options, items, num_workers=num_workers, **place):
                drawn = json.loads(result["records"])
                records.update({record["file_name"]: record for record in drawn})
                flagged += json.loads(result["flagged"])
                progress.update(len(drawn))
    finally:
        write_metadata(output_dir, records)
    if flagged:
        raise BadInput(
            f"the safety checker flagged {len(flagged)} images {MAX_REDRAWS + 1} times ({flagged[0]} the first): "
            "change the prompt or the seed, or pass --no_safety_checker"
        )
