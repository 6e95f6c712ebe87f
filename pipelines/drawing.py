"""Draw the images of image folders on a pool of actors.

An image depends only on the model, the prompt, the seed, its index and the sampler flags, not on the worker or batch
that draws it. Images that already exist undamaged are not drawn again.
"""

import contextlib
import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.actors import map_on_actors
from common.errors import BadInput
from common.folders import check_space
from common.messages import Progress, say
from common.no_gc import no_gc
from common.objects import local_copy, same_copy
from common.storage import absolute, is_remote, split
from common.targets import Files, Held, check_writable, join_name, lock
from pipelines import loading, lora
from pipelines.configs import check_resolution
from pipelines.families import FAMILIES, family_of, say_what_is_cut, sides
from pipelines.image_folder import read_metadata, wanted_images, whole_images, write_metadata
from pipelines.model_folder import check_model, check_pipeline
from pipelines.samplers import SAMPLER
from utils import image_seed

MAX_REDRAWS = 10  # per image, if the safety checker flags it
LOCATIONS = ("model_dir", "checkpoint")  # folders of a model, by path or URI


class ImageDrawer:
    """The worker of an actor: draws batches and writes their image files. It keeps the pipeline of its last batch.

    held: the locks of the folders, {location: lock}, without which nothing is written there.
    """

    def __init__(self, num_threads: int | None = None, held: dict[str, Held] | None = None):
        import torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.num_threads = num_threads
        self.model: dict[str, Any] | None = None
        self.pipeline: Any = None
        self.held = held or {}
        self.folders = {location: Files(location, each) for location, each in self.held.items()}

    def __call__(self, item: dict[str, Any]) -> dict[str, str]:
        """Draw a batch: {"model": as in draw_folders, "paths": [files to write], "records": [one per file]}.

        Returns, as JSON, "records": {path: record} of the images drawn, and "flagged": the paths of images that the
        safety checker flagged in every attempt.
        """
        self._load(item["model"])
        todo = dict(zip(item["paths"], item["records"], strict=True))
        done = {}
        for attempt in range(MAX_REDRAWS + 1):
            images, flags = self._draw(list(todo.values()), attempt)
            for (path, record), image, flag in zip(list(todo.items()), images, flags, strict=True):
                if not flag:
                    done[path] = self._save(image, path, record, attempt)
                    del todo[path]
            if not todo:
                break
        return {"records": json.dumps(done), "flagged": json.dumps(list(todo))}

    def _load(self, model: dict[str, Any]) -> None:
        """Load the pipeline of `model`, unless it is loaded, after freeing the previous one."""
        if model == self.model:
            return
        self.model = self.pipeline = None
        loading.set_up_torch(self.device, self.num_threads, model["mixed_precision"])
        dtype = loading.compute_dtype(model["mixed_precision"], self.device)
        copies = model.get("copies", {})
        model_dir, checkpoint = (
            model[name] and str(same_copy(model[name], f"--{name}", copies.get(name))) for name in LOCATIONS
        )
        with no_gc():
            pipeline = loading.load_pipeline(model_dir, dtype, checkpoint, model["safety_checker"])
        lora.fuse_all(model.get("loras", ()), model_dir, pipeline)
        self.pipeline = loading.move_pipeline(pipeline, self.device)
        self.model = model

    def _draw(self, records, attempt):
        seeds = [image_seed(record["base_seed"], record["index"], attempt) for record in records]
        sampler = {name: records[0][name] for name in SAMPLER}
        return loading.draw_images(self.pipeline, [record["text"] for record in records], seeds, **sampler)

    def _save(self, image, path, record, attempt):
        from PIL.PngImagePlugin import PngInfo

        record = {**record, "seed": image_seed(record["base_seed"], record["index"], attempt), "redraws": attempt}
        text = PngInfo()
        text.add_text("record", json.dumps(record, sort_keys=True))
        data = io.BytesIO()
        image.save(
            data, "PNG", pnginfo=text, compress_level=1
        )  # a fifth of the default level's time, files a sixth larger
        folder, name = split(path)
        if folder not in self.folders:
            self.folders[folder] = Files(folder)
        if folder in self.held and not is_remote(folder):  # in a store each write checks it
            self.held[folder].check()
        self.folders[folder].write(name, data.getvalue())
        return {**record, "file_name": name, "sha256": hashlib.sha256(data.getvalue()).hexdigest()}


def make_items(images: list[tuple[str, dict[str, Any], dict[str, Any]]], batch_size: int) -> list[dict[str, Any]]:
    """Return ImageDrawer's items: batches of at most `batch_size` images of one model and sampler, grouped by model.

    images: (path, model, record) of each. A batch may mix prompts, and the images of one prompt fill several batches.
    """
    groups: dict[str, tuple[dict, dict]] = {}  # {model as JSON: (model, {sampler: images})}
    for path, model, record in images:
        _, by_sampler = groups.setdefault(json.dumps(model, sort_keys=True), (model, {}))
        by_sampler.setdefault(tuple(record[name] for name in SAMPLER), []).append((path, record))
    return [
        {"model": model, "paths": [path for path, _ in batch], "records": [record for _, record in batch]}
        for model, by_sampler in groups.values()
        for group in by_sampler.values()
        for batch in (group[start : start + batch_size] for start in range(0, len(group), batch_size))
    ]


def make_copies(model: dict[str, Any]) -> dict[str, str | None]:
    """Return {"model_dir", "checkpoint"} of a model as folders on this node's disk, for its entry "copies".

    With this entry, a model is refused from then on if its URI holds another one.
    """
    return model.get("copies") or {name: model[name] and str(local_copy(model[name])) for name in LOCATIONS}


def check_model_and_sampler(model: dict[str, Any], sampler: dict[str, Any]) -> None:
    """Raise BadInput or CheckFailed unless a model's files are whole and it can draw with the sampler's settings.

    What is None in `sampler` is set to the model's own value, height and width only if one of them is given.
    """
    model_dir, folder = make_copies(model).values()
    assert model_dir is not None, "a model has a folder"
    index = check_pipeline(model_dir)
    if sampler["sampler"] == "dpm++" and "FlowMatch" in (scheduler := index["scheduler"][1]):
        raise BadInput(f"--sampler dpm++ cannot replace the {scheduler} of {model_dir}: use --sampler model")
    family = family_of(model_dir) or FAMILIES["StableDiffusionPipeline"]
    for name in ("num_inference_steps", "guidance_scale"):
        sampler[name] = getattr(family, name) if sampler[name] is None else sampler[name]
    if sampler["negative_prompt"] and not family.is_guided_by_prompt:
        raise BadInput(f"--negative_prompt has no effect on {model_dir}, which is guided by a number: leave it out")
    if sampler["height"] or sampler["width"]:  # Diffusers ignores one without the other
        side, multiple = sides(model_dir)
        for name in ("height", "width"):
            sampler[name] = sampler[name] or side
            check_resolution(model_dir, f"--{name}", sampler[name], multiple)
    if folder:
        loading.check_checkpoint(folder, model_dir)
    lora.check(model.get("loras", ()), model_dir)


@dataclass
class _Folder:
    """One image folder of draw_folders, with {file name: record} of all wanted images and of those that exist.

    versions: of the files when they were looked at.
    """

    location: str
    model: dict[str, Any]
    wanted: dict[str, dict[str, Any]]
    records: dict[str, dict[str, Any]]
    versions: dict[str, Any]

    def __post_init__(self):
        self.missing = {name: record for name, record in self.wanted.items() if name not in self.records}

    def is_finished(self) -> bool:
        """Return whether all wanted images exist and metadata.jsonl lists them."""
        return not self.missing and self.records.items() <= read_metadata(self.location).items()


def draw_folder(
    output_dir: str | Path,
    prompts: list[str],
    count: int,
    seed: int,
    model: dict[str, Any],
    sampler: dict[str, Any],
    overwrite: bool = False,
    **pool: Any,
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Draw the missing images of one folder: `draw_folders` with a single job."""
    return draw_folders([(output_dir, prompts, count, model)], seed, sampler, overwrite, **pool)[0]


def draw_folders(
    jobs: list[tuple[str | Path, list[str], int, dict[str, Any]]],
    seed: int,
    sampler: dict[str, Any],
    overwrite: bool = False,
    **pool: Any,
) -> list[tuple[int, dict[str, dict[str, Any]]]]:
    """Draw the missing images of several folders on one pool of actors.

    Returns (number of images drawn, {file name: record} of all wanted images) for each folder.
    jobs: (output_dir, prompts, count, model) for `count` images per prompt; output folders must differ.
    model: model_dir, checkpoint (or None), mixed_precision, safety_checker; optionally copies, as of make_copies, and
    loras, as of lora.describe.
    sampler: the settings in SAMPLER, checked by `check_model_and_sampler`.
    pool: batch_size, and the keyword arguments of map_on_actors.
    Folders are given by path or URI. All are checked and locked before the first image is drawn.
    """
    folders, held = [_look_into(job, seed, sampler, overwrite) for job in jobs], {}
    with contextlib.ExitStack() as stack:
        for i, folder in enumerate(folders):
            if folder.is_finished():
                say(f"{folder.location}: all {len(folder.wanted)} images exist")
                continue
            held[folder.location] = stack.enter_context(lock(folder.location))
            if Files(folder.location).versions() != folder.versions:  # another run drew there until now
                folders[i] = _look_into(jobs[i], seed, sampler, overwrite)
            _remove_left_files(folder.location)
        unfinished = [folder for folder in folders if folder.location in held]
        _check_needs([folder for folder in unfinished if folder.missing])
        for folder in unfinished:  # also if drawing fails
            stack.callback(write_metadata, folder.location, folder.records, held[folder.location])
        if unfinished:
            _draw_missing(unfinished, held, **pool)
    return [(len(folder.missing), folder.records) for folder in folders]


def explain_folders(
    jobs: list[tuple[str | Path, list[str], int, dict[str, Any]]], seed: int, sampler: dict[str, Any], overwrite: bool
) -> dict[str, int]:
    """Check what draw_folders checks; return the numbers of "images" and of "missing" ones, and their "disk_bytes"."""
    folders = [_look_into(job, seed, sampler, overwrite) for job in jobs]
    size = _check_needs([folder for folder in folders if folder.missing])
    images, missing = (sum(map(len, each)) for each in zip(*((f.wanted, f.missing) for f in folders), strict=True))
    return {"images": images, "missing": missing, "disk_bytes": size}


def _look_into(job, seed: int, sampler: dict[str, Any], overwrite: bool) -> _Folder:
    """Return the _Folder of a job, with absolute paths; raise BadInput if it is not writable or has other settings."""
    output_dir, prompts, count, model = job
    output_dir = absolute(output_dir)
    model = {**model, **{name: absolute(model[name]) for name in LOCATIONS if model[name]}}
    copies = make_copies(model)
    check_writable(output_dir, "--output_dir")
    wanted = wanted_images(prompts, count, seed, {**model, **copies}, sampler)
    versions = Files(output_dir).versions()
    records = whole_images(output_dir, wanted, overwrite)
    return _Folder(output_dir, {**model, "copies": copies}, wanted, records, versions)


def _remove_left_files(location: str) -> None:
    """Delete the files that a killed run left half written; a store has none."""
    for path in [] if is_remote(location) else Path(location).glob(".*.tmp"):
        path.unlink()


def _check_needs(folders: list[_Folder]) -> int:
    """Check the free disk space and the models' files before any model is loaded; warn of truncated prompts.

    Returns the bytes of the missing images.
    """
    needs, models, said, total = [], {}, {}, 0
    for folder in folders:
        copies = folder.model["copies"]
        side, _ = sides(copies["model_dir"])
        images = folder.missing.values()
        sizes = [3 * (record["height"] or side) * (record["width"] or side) + 4096 for record in images]
        total += sum(sizes)
        if not is_remote(folder.location):
            needs.append(("--output_dir", folder.location, sum(sizes)))  # upper bound of the PNG files, in bytes
        models |= dict.fromkeys(filter(None, copies.values()))
        texts = dict.fromkeys(text for each in images for text in (each["text"], each["negative_prompt"]))
        said.setdefault(copies["model_dir"], {}).update(texts)
    check_space(needs)
    for model_dir in models:
        check_model(model_dir)
    for model_dir, texts in said.items():
        say_what_is_cut(model_dir, texts)
    return total


def _draw_missing(folders: list[_Folder], held: dict[str, Held], batch_size: int, **pool: Any) -> None:
    """Draw the missing images of the folders and add them to their records."""
    images = [
        (join_name(each.location, name), each.model, record)
        for each in folders
        for name, record in each.missing.items()
    ]
    records = {folder.location: folder.records for folder in folders}
    flagged = []
    with Progress("draw", len(images), "images") as progress:
        for result in map_on_actors(ImageDrawer, {"held": held}, make_items(images, batch_size), **pool):
            drawn = json.loads(result["records"])
            for path, record in drawn.items():
                records[split(path)[0]][record["file_name"]] = record
            flagged += json.loads(result["flagged"])
            progress.update(len(drawn))
    if flagged:
        raise BadInput(
            f"the safety checker flagged {len(flagged)} images {MAX_REDRAWS + 1} times, starting with {flagged[0]}: "
            "change the prompt or the seed, or pass --no_safety_checker"
        )
