"""A folder of generated images: file names, and metadata.jsonl with a record of how each image was drawn."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.folders import check_same_settings, read_json_lines, sha256_file, write_bytes
from common.messages import say
from pipelines.model_folder import digest_model

METADATA = "metadata.jsonl"


def image_name(prompt: str, index: int) -> str:
    """Return the file name of an image: readable words of its prompt, a hash of the whole prompt, the image's index."""
    readable = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60].strip("-")
    return f"{readable or 'image'}-{hashlib.sha256(prompt.encode()).hexdigest()[:8]}-{index:05d}.png"


def wanted_images(
    prompts: Iterable[str], count: int, seed: int, model: dict[str, Any], sampler: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return {file name: record} of `count` images per prompt.

    A record lacks what is known only after drawing: the image's seed, which redraws change, and its file's SHA-256.
    """
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


def read_metadata(output_dir: str | Path) -> dict[str, dict[str, Any]]:
    """Return {file name: record} of metadata.jsonl; lines that are not records are ignored."""
    records = {}
    for record in read_json_lines(Path(output_dir) / METADATA):
        with contextlib.suppress(KeyError, TypeError):
            records[record["file_name"]] = record
    return records


def read_record(path: str | Path) -> dict[str, Any] | None:
    """Return the record in a PNG file that this toolkit wrote, or None for a damaged file or any other one."""
    from PIL import Image
    from PIL.PngImagePlugin import PngImageFile

    try:
        with Image.open(path) as image:
            if not isinstance(image, PngImageFile):
                return None
            image.load()
            record = json.loads(image.text["record"])
        return {**record, "file_name": Path(path).name, "sha256": sha256_file(path)}
    except (OSError, ValueError, KeyError, AttributeError, SyntaxError):
        return None


def whole_images(
    output_dir: str | Path, wanted: dict[str, dict[str, Any]], overwrite: bool
) -> dict[str, dict[str, Any]]:
    """Return {file name: record} of the wanted images that `output_dir` already contains undamaged.

    A record in metadata.jsonl is used if its SHA-256 matches the file; otherwise the record is read from the file.
    Raises BadInput for an image that was drawn with other settings, unless `overwrite` is set.
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
            say(f"{path} is damaged: drawing it again")
            continue
        drawn = {key: found.get(key) for key in record}
        if drawn == record:
            whole[name] = found
        elif not overwrite:
            check_same_settings(record, drawn, f"--output_dir {output_dir}: {name}")
    return whole


def write_metadata(output_dir: str | Path, records: dict[str, dict[str, Any]]) -> None:
    """Write metadata.jsonl with `records` and its earlier records of files that still exist, if that changes it."""
    output_dir = Path(output_dir)
    kept = {name: record for name, record in read_metadata(output_dir).items() if (output_dir / name).is_file()}
    records = kept | records
    data = "".join(json.dumps(records[name], sort_keys=True) + "\n" for name in sorted(records)).encode()
    path = output_dir / METADATA
    if not path.is_file() or path.read_bytes() != data:
        write_bytes(path, data)
