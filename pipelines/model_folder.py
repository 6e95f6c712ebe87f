"""The files of a Diffusers model folder: are they whole, which are used, their digest, copies.

No weights are loaded here.
"""

import hashlib
import json
import math
import re
import shutil
from pathlib import Path

from common import folders
from common.errors import BadInput, CheckFailed
from pipelines.configs import components, read_config, read_index, read_json_file
from pipelines.tokens import WITHOUT_VOCABULARY, check_vocabulary, find_vocabulary, read_vocab_size

TRAINING_LOG, VALIDATION_STRIP = "training_log.jsonl", "validation/strip.png"  # what training adds to a folder
CONFIGURATION = {".json", ".txt", ".model"}  # and a tokenizer's vocabulary
MODEL_FILES = CONFIGURATION | {".safetensors"}


def check_pipeline(model_dir, flag="--model_dir"):
    """Check that `model_dir` is a whole Diffusers pipeline in safetensors and return its model_index.json.

    Every component's folder is there with its configuration, every safetensors header parses and fits its file.
    Raises BadInput for what is missing and CheckFailed for a damaged file; no weights are loaded.
    """
    folder = Path(model_dir)
    if not folder.is_dir():
        remedy = "for a model of the hub run cache_model.py first, and give the folder that it prints"
        raise BadInput(f"{flag} {folder} is not a folder: {remedy}")
    try:
        index = read_index(folder)
    except FileNotFoundError:
        raise BadInput(f"{flag} {folder} has no model_index.json: give what cache_model.py printed") from None
    parts = components(index)
    for name, (_, class_name) in parts.items():
        check_component(folder, name, class_name, flag)
    for name, (_, class_name) in parts.items():
        text_encoder = name.replace("tokenizer", "text_encoder")
        if text_encoder != name and text_encoder in parts and class_name not in WITHOUT_VOCABULARY:
            check_vocabulary(folder / name, read_vocab_size(read_config(folder, text_encoder)))
    return index


def check_component(folder, name, class_name, flag):
    """Raise BadInput or CheckFailed unless the folder `name` of a model, or of a checkpoint, is whole."""
    part = folder / name
    if not part.is_dir():
        raise BadInput(f"{flag} {folder} lacks the folder of its {name}: fetch the model again")
    kind = re.search(r"Tokenizer|Scheduler|ImageProcessor|FeatureExtractor", class_name)
    if kind:
        if not any(part.iterdir()):
            raise BadInput(f"{part} is empty: fetch the model again")
        if kind[0] == "Tokenizer" and class_name not in WITHOUT_VOCABULARY:
            find_vocabulary(part)
        return
    if not (part / "config.json").is_file():
        raise BadInput(f"{part} has no config.json: fetch the model again")
    for path in part.glob("*.json"):
        read_json_file(path)
    weights = sorted(part.glob("*.safetensors"))
    if not weights:
        pickles = [path.name for pattern in ("*.bin", "*.ckpt", "*.pt") for path in part.glob(pattern)]
        held = f"only {pickles[0]}, a pickle, which can run code" if pickles else "no weights"
        raise BadInput(f"{part} holds {held}: take a revision with safetensors")
    for index in part.glob("*.safetensors.index*.json"):
        shards = set(read_json_file(index)["weight_map"].values())
        missing = sorted(shards - {path.name for path in weights})
        if missing:
            raise BadInput(f"{part} lacks {missing[0]}: fetch the model again")
    for path in weights:
        check_safetensors(path)


def check_safetensors(path):
    """Raise CheckFailed unless a safetensors file's header parses and its size is what the header says."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckFailed(f"{path} is damaged ({error}): fetch the model again") from None


def count_weights(folder):
    """Return how many numbers the weights hold of a model folder, or of one component's; a variant counts once."""
    from safetensors import safe_open

    folder = Path(folder)
    parts = [folder, *(path for path in folder.iterdir() if path.is_dir())]
    total = 0
    for part in parts:
        for path in component_files(part).values():
            if path.suffix == ".safetensors":
                with safe_open(path, framework="np") as file:
                    total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


def count_weights_of(unet_config):
    """Return how many weights a UNet of a configuration has; it is made without memory for them."""
    import torch
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        return UNet2DConditionModel.from_config(unet_config).num_parameters()


# ---------------------------------------------------------------------------------------------------------------------
# The files of a component


def variant_of(name):
    """Return the "fp16" of model.fp16.safetensors, of its shards and of their index; None for plain weights."""
    words = re.sub(r"-\d+-of-\d+", "", Path(name).name).split(".")[1:]
    return ".".join(word for word in words if word not in ("safetensors", "index", "json")) or None


def weights_variant(part):
    """Return the variant of a component's weight files ("fp16" of unet/...fp16.safetensors), None for plain ones."""
    variants = {variant_of(path.name) for path in Path(part).glob("*.safetensors")}
    return None if None in variants or not variants else min(variants)


def component_files(part):
    """Return {name: path} of the files of a component that are used; a copy has them under these names.

    They are its configuration or vocabulary, and each weight once: plain, or where there are variants alone that of
    `weights_variant`, whose files and index a copy has under plain names.
    """
    variant, files = weights_variant(part), {}
    for path in sorted(Path(part).glob("*")):
        if ".safetensors" in path.name:
            if variant_of(path.name) == variant:
                files[_plain_name(path.name)] = path
        elif path.suffix in CONFIGURATION and ".index." not in path.name:  # that is an index of pickles
            files[path.name] = path
    return files


def _plain_name(name):
    variant = variant_of(name)
    return name.replace(f".{variant}", "", 1) if variant else name


def _rewritten(name, path):
    """Return what a copy's file `name` holds where it is not what `path` does: the index of a variant's shards."""
    if name == path.name or path.suffix != ".json":
        return None
    index = read_json_file(path)
    index["weight_map"] = {key: _plain_name(shard) for key, shard in index["weight_map"].items()}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def copy_component(part, folder):
    """Copy the files of a component that are used, byte for byte but for the index of a variant's shards."""
    Path(folder).mkdir(parents=True)
    for name, path in component_files(part).items():
        data = _rewritten(name, path)
        if data is None:
            shutil.copyfile(path, Path(folder, name))
        else:
            Path(folder, name).write_bytes(data)


def digest_parts(model_dir, parts, known=None):
    """Return one sha256 of the files of some components that are used, the same for a copy of them.

    known: {path: sha256} of files that need not be read.
    """
    return folders.digest_named(_digests(model_dir, parts, known or {}))


def _digests(model_dir, parts, known):
    for part in parts:
        for name, path in component_files(Path(model_dir, part)).items():
            data = _rewritten(name, path)
            if data is not None:
                yield f"{part}/{name}", hashlib.sha256(data).hexdigest()
            else:
                yield f"{part}/{name}", known.get(path) or folders.sha256_file(path)


# ---------------------------------------------------------------------------------------------------------------------
# What decides what it draws


def digest_model(model_dir):
    """Return one sha256 of the files of a model folder, or a checkpoint, that decide what it draws.

    Gigabytes are not read again where a manifest or the hub's cache knows their sha256: `check_model` reads them.
    """
    known = _known_sha256(model_dir)
    index = [(path.name, known.get(path) or folders.sha256_file(path)) for path in _index_file(model_dir)]
    return folders.digest_named([*index, *_digests(model_dir, _part_names(model_dir), known)])


def check_model(model_dir):
    """Raise CheckFailed for a file of a model folder, or a checkpoint, that has not the sha256 that is known of it."""
    folder, known = Path(model_dir), _known_sha256(model_dir)
    for name, fact in folders.read_json(folder / folders.MANIFEST).get("files", {}).items():
        path = folder / name
        if path.suffix in MODEL_FILES and not (path.is_file() and path.stat().st_size == fact["size"]):
            raise CheckFailed(f"{path} is damaged: it is not of {fact['size']} bytes: fetch or make it again")
    for path, found in zip(known, folders.sha256_files(known), strict=True):
        if found != known[path]:
            raise CheckFailed(f"{path} is damaged: its sha256 is not {known[path][:12]}...: fetch or make it again")


def _index_file(model_dir):
    return list(Path(model_dir).glob("model_index.json"))  # a checkpoint has none


def _part_names(model_dir):
    """Return the names of the components of a model folder: those in its index, of a checkpoint all its folders."""
    if _index_file(model_dir):
        return list(components(read_index(model_dir)))
    return [path.name for path in Path(model_dir).iterdir() if path.is_dir() and path.name[0] != "."]


def _model_files(model_dir):
    parts = _part_names(model_dir)
    return [
        *_index_file(model_dir),
        *(path for part in parts for path in component_files(Path(model_dir, part)).values()),
    ]


def _known_sha256(model_dir):
    """Return {file of a model folder: the sha256 it must have}, by its manifest or its blob's name in a hub cache."""
    folder, known = Path(model_dir), {}
    files = folders.read_json(folder / folders.MANIFEST).get("files", {})
    for path in _model_files(folder):
        fact, blob = files.get(path.relative_to(folder).as_posix()), path.resolve()
        if fact and fact["size"] == path.stat().st_size:
            known[path] = fact["sha256"]
        elif blob.parent.name == "blobs" and folders.SHA256.fullmatch(blob.name):
            known[path] = blob.name
    return known
