"""A folder of generated images: file names, and metadata.jsonl with a record of how each image was drawn."""

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.folders import check_same_settings, parse_json_lines
from common.messages import say
from common.targets import Files, Held, join_name
from pipelines.model_folder import digest_model

METADATA = "metadata.jsonl"
READERS = 8  # images that are read and compared at the same time


def image_name(prompt: str, index: int) -> str:
    """Return the file name of an image: readable words of its prompt, a hash of the whole prompt, the image's index."""
    readable = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60].strip("-")
    return f"{readable or 'image'}-{hashlib.sha256(prompt.encode()).hexdigest()[:8]}-{index:05d}.png"


def wanted_images(
    prompts: Iterable[str], count: int, seed: int, model: dict[str, Any], sampler: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return {file name: record} of `count` images per prompt.

    A record lacks what is known only after drawing: the image's seed, which redraws change, and its file's SHA-256.
    model: as in drawing.draw_folders, with folders on this node's disk.
    """
    digest = digest_model(model["model_dir"]) + (digest_model(model["checkpoint"]) if model["checkpoint"] else "")
    digest += "".join(f"+{each['scale']:g}*{each['sha256']}" for each in model.get("loras", ()))
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


def read_metadata(output_dir: str | Path) -> dict[str, dict[str, Any]]:
    """Return {file name: record} of metadata.jsonl; lines that are not records are ignored."""
    records = {}
    for record in parse_json_lines(Files(output_dir).read(METADATA) or b""):
        with contextlib.suppress(KeyError, TypeError):
            records[record["file_name"]] = record
    return records


def read_record(name: str, data: bytes) -> dict[str, Any] | None:
    """Return the record in a PNG file that this toolkit wrote, or None for a damaged file or any other one."""
    from PIL import Image
    from PIL.PngImagePlugin import PngImageFile

    try:
        with Image.open(io.BytesIO(data)) as image:
            if not isinstance(image, PngImageFile):
                return None
            image.load()
            record = json.loads(image.text["record"])
        return {**record, "file_name": name, "sha256": hashlib.sha256(data).hexdigest()}
    except (OSError, ValueError, KeyError, AttributeError, SyntaxError):
        return None


def whole_images(
    output_dir: str | Path, wanted: dict[str, dict[str, Any]], overwrite: bool
) -> dict[str, dict[str, Any]]:
    """Return {file name: record} of the wanted images that `output_dir` already contains undamaged.

    A record in metadata.jsonl is used if its SHA-256 matches the file; otherwise the record is read from the file.
    Raises BadInput for an image that was drawn with other settings, unless `overwrite` is set.
    """
    files = Files(output_dir)
    listed, versions, whole = read_metadata(output_dir), files.versions(), {}

    def find(name: str) -> dict[str, Any] | None:
        data, record = files.read(name) or b"", listed.get(name)
        is_listed = record is not None and record.get("sha256") == hashlib.sha256(data).hexdigest()
        return record if is_listed else read_record(name, data)

    names = [name for name in wanted if name in versions]
    with ThreadPoolExecutor(READERS) as pool:
        records = dict(zip(names, pool.map(find, names), strict=True))
    for name, found in records.items():
        if found is None:
            say(f"{join_name(output_dir, name)} is damaged: drawing it again")
            continue
        drawn = {key: found.get(key) for key in wanted[name]}
        if drawn == wanted[name]:
            whole[name] = found
        elif not overwrite:
            check_same_settings(wanted[name], drawn, f"--output_dir {output_dir}: {name}")
    return whole


def write_metadata(output_dir: str | Path, records: dict[str, dict[str, Any]], held: Held | None = None) -> None:
    """Write metadata.jsonl with `records` and its earlier records of files that still exist, if that changes it."""
    files = Files(output_dir, held)
    there = files.versions()
    records = {name: record for name, record in read_metadata(output_dir).items() if name in there} | records
    data = "".join(json.dumps(records[name], sort_keys=True) + "\n" for name in sorted(records)).encode()
    if files.read(METADATA) != data:
        files.write(METADATA, data)
