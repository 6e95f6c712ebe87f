"""Pictures of prompts in an image folder: names, records of how each was made, and the actors that draw them.

A picture depends on the model, the prompt, the seed, its index and the sampler's settings alone, not on which worker
drew it or beside what; what lies whole in the folder is not drawn again.
"""

import contextlib
import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

from common.actors import map_on_actors
from common.errors import BadInput
from common.folders import check_space, check_writable, lock, write_bytes
from common.messages import Progress, say
from common.no_gc import no_gc
from pipelines import loading
from pipelines.configs import check_resolution, components, model_resolution
from pipelines.image_folder import read_metadata, wanted_images, whole_images, write_metadata
from pipelines.model_folder import check_component, check_model, check_pipeline
from pipelines.samplers import SAMPLER
from pipelines.tokens import say_what_is_cut
from utils import image_seed

MAX_REDRAWS = 10  # of an image that the safety checker flags


class ImageDrawer:
    """Draws batches and writes each image whole: the work of one actor. It holds one pipeline, of its last batch."""

    def __init__(self, num_threads=None):
        import torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.num_threads, self.model, self.pipeline = num_threads, None, None

    def __call__(self, item):
        """Draw {"model": as draw_folders takes it, "paths": [files to write], "records": [of each]}.

        Returns JSON: "records", {path: record} of what was drawn, and "flagged", the paths of what never passed.
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

    def _load(self, model):
        """Make `model` the one that draws; the one before it leaves the memory first."""

        if model == self.model:
            return
        self.model = self.pipeline = None
        loading.set_up_torch(self.device, self.num_threads, model["mixed_precision"])
        dtype = loading.compute_dtype(model["mixed_precision"], self.device)
        with no_gc():
            pipeline = loading.load_pipeline(model["model_dir"], dtype, model["checkpoint"], model["safety_checker"])
        self.pipeline = pipeline.to(self.device)
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
        image.save(data, "PNG", pnginfo=text, compress_level=1)  # a fifth of the usual time, a sixth more bytes
        write_bytes(path, data.getvalue())
        return {**record, "file_name": Path(path).name, "sha256": hashlib.sha256(data.getvalue()).hexdigest()}


def make_items(images, batch_size):
    """Return ImageDrawer's items of at most `batch_size` images of one model and sampler, those of a model in a row.

    images: (path, model, record) of each. An item may hold several prompts, and one prompt fills many items, so that
    it keeps all actors busy.
    """
    groups = {}  # by model, then by sampler
    for path, model, record in images:
        _, by_sampler = groups.setdefault(json.dumps(model, sort_keys=True), (model, {}))
        by_sampler.setdefault(tuple(record[name] for name in SAMPLER), []).append((path, record))
    return [
        {"model": model, "paths": [path for path, _ in batch], "records": [record for _, record in batch]}
        for model, by_sampler in groups.values()
        for group in by_sampler.values()
        for batch in (group[start : start + batch_size] for start in range(0, len(group), batch_size))
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


@dataclass
class _Folder:
    """An image folder of draw_folders. wanted, records: by file name, what is asked for and what stands whole."""

    path: Path
    model: dict
    wanted: dict
    records: dict

    def __post_init__(self):
        self.missing = {name: record for name, record in self.wanted.items() if name not in self.records}

    def is_finished(self):
        """Return whether all images are there and metadata.jsonl lists them."""
        return not self.missing and self.records.items() <= read_metadata(self.path).items()


def draw_folder(output_dir, prompts, count, seed, model, sampler, overwrite=False, **pool):
    """Draw what is missing of one folder: `draw_folders` of one job."""
    return draw_folders([(output_dir, prompts, count, model)], seed, sampler, overwrite, **pool)[0]


def draw_folders(jobs, seed, sampler, overwrite=False, **pool):
    """Draw what is missing of several folders on one pool of actors; return [(how many, records by file name)] of them.

    jobs: (output_dir, prompts, count, model) each: `count` images of each prompt; no folder comes twice.
    model: model_dir, checkpoint (or None), mixed_precision, safety_checker; sampler: those of SAMPLER, checked.
    pool: batch_size, and num_workers and the like of map_on_actors.
    All folders are checked and locked before the first image is drawn.
    """
    folders, unfinished = [_look_into(*job, seed, sampler, overwrite) for job in jobs], []
    for folder in folders:
        if folder.is_finished():
            say(f"{folder.path}: all {len(folder.wanted)} images are there")
        else:
            unfinished.append(folder)
    with contextlib.ExitStack() as stack:
        for folder in unfinished:
            stack.enter_context(lock(folder.path / ".lock"))
            for path in folder.path.glob(".*.tmp"):  # what a killed run was writing
                path.unlink()
        _check_needs([folder for folder in unfinished if folder.missing])
        for folder in unfinished:
            stack.callback(write_metadata, folder.path, folder.records)  # also where drawing, or another's, fails
        if unfinished:
            _draw_missing(unfinished, **pool)
    return [(len(folder.missing), folder.records) for folder in folders]


def _look_into(output_dir, prompts, count, model, seed, sampler, overwrite):
    """Return the _Folder of a job, with absolute paths; raise BadInput where it cannot be written or holds another."""
    output_dir = Path(output_dir).resolve()
    model = {**model, **{name: str(Path(model[name]).resolve()) for name in ("model_dir", "checkpoint") if model[name]}}
    check_writable(output_dir, "--output_dir")
    wanted = wanted_images(prompts, count, seed, model, sampler)
    return _Folder(output_dir, model, wanted, whole_images(output_dir, wanted, overwrite))


def _check_needs(folders):
    """Check, before a model is loaded, its files and the room on the disk; say what of a prompt is not read."""
    needs, models, said = [], {}, {}
    for folder in folders:
        side = model_resolution(folder.model["model_dir"])
        images = folder.missing.values()
        sizes = [3 * (record["height"] or side) * (record["width"] or side) + 4096 for record in images]
        needs.append(("--output_dir", folder.path, sum(sizes)))  # bytes of a PNG, at the most
        models |= dict.fromkeys(filter(None, (folder.model["model_dir"], folder.model["checkpoint"])))
        texts = dict.fromkeys(text for each in images for text in (each["text"], each["negative_prompt"]))
        said.setdefault(folder.model["model_dir"], {}).update(texts)
    check_space(needs)
    for model_dir in models:
        check_model(model_dir)
    for model_dir, texts in said.items():
        say_what_is_cut(model_dir, texts)


def _draw_missing(folders, batch_size, **pool):
    """Draw what is missing of the folders and add it to their records."""
    images = [(str(each.path / name), each.model, record) for each in folders for name, record in each.missing.items()]
    records = {folder.path: folder.records for folder in folders}
    flagged = []
    with Progress("draw", len(images), "images") as progress:
        for result in map_on_actors(ImageDrawer, {}, make_items(images, batch_size), **pool):
            drawn = json.loads(result["records"])
            for path, record in drawn.items():
                records[Path(path).parent][record["file_name"]] = record
            flagged += json.loads(result["flagged"])
            progress.update(len(drawn))
    if flagged:
        raise BadInput(
            f"the safety checker flagged {len(flagged)} images {MAX_REDRAWS + 1} times ({flagged[0]} the first): "
            "change the prompt or the seed, or pass --no_safety_checker"
        )
