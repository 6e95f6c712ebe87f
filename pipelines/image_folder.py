"""A folder of drawn images: file names, and the record of how each image was made, in metadata.jsonl."""

import contextlib
import hashlib
import json
import re
from pathlib import Path

from common.folders import check_same_settings, read_json_lines, sha256_file, write_bytes
from common.messages import say
from pipelines.model_folder import digest_model

METADATA = "metadata.jsonl"


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
    for record in read_json_lines(Path(output_dir) / METADATA):
        with contextlib.suppress(KeyError, TypeError):
            records[record["file_name"]] = record
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
