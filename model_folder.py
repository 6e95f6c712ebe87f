"""A Diffusers model folder as files: is it whole, is it damaged, its sizes and tokens. No weights are loaded here."""

import functools
import hashlib
import json
import math
import re
import shutil
from pathlib import Path

import checkpoint
from cli import BadInput, CheckFailed, one_line, say

CONFIGURATION = {".json", ".txt", ".model"}  # and a tokenizer's vocabulary
MODEL_FILES = CONFIGURATION | {".safetensors"}


def read_json_file(path):
    """Return the JSON of a file of a model; raise CheckFailed where it is damaged."""
    try:
        return json.loads(Path(path).read_text())
    except ValueError as error:
        raise CheckFailed(f"{path} is not JSON ({error}): fetch the model again") from None


def read_index(model_dir):
    """Return a model folder's model_index.json: {"unet": ["diffusers", "UNet2DConditionModel"], ...}."""
    return read_json_file(Path(model_dir) / "model_index.json")


def components(index):
    """Return {name: (library, class)} of the components that a model_index.json names."""
    return {
        name: tuple(value) for name, value in index.items() if isinstance(value, list) and len(value) == 2 and value[0]
    }


def read_config(model_dir, component):
    """Return a component's configuration as a dict."""
    name = "scheduler_config.json" if component == "scheduler" else "config.json"
    return read_json_file(Path(model_dir) / component / name)


def read_unet_config(path, model_dir):
    """Return the configuration of a UNet in a file, which must fit the model's VAE and text encoder, or the model's."""
    own = read_config(model_dir, "unet")
    if not path:
        return own
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"--unet_config {path}: {error}") from None
    if not isinstance(config, dict):
        raise BadInput(f"--unet_config {path} is not a UNet's configuration: give the config.json of one")
    for name, default in {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 1280}.items():  # Diffusers'
        if config.get(name, default) != own[name]:
            found = config.get(name, default)
            raise BadInput(f"--unet_config {path} has {name} {found}, --model_dir {model_dir} needs {own[name]}")
    return config


def pixel_factor(model_dir):
    """Return how many pixels a side one latent cell covers: 8 for Stable Diffusion's VAE."""
    return 2 ** (len(read_config(model_dir, "vae")["block_out_channels"]) - 1)


def model_resolution(model_dir):
    """Return the side, in pixels, of the square pictures that a model was trained to draw."""
    return read_config(model_dir, "unet")["sample_size"] * pixel_factor(model_dir)


def check_resolution(model_dir, flag, value):
    """Raise BadInput unless the VAE divides `value` pixels into whole latent cells, and Diffusers draws it."""
    multiple = math.lcm(pixel_factor(model_dir), 8)  # Diffusers' pipelines take multiples of 8, whatever the VAE
    if value % multiple:
        near = max(multiple, round(value / multiple) * multiple)
        raise BadInput(f"{flag} {value} is not a multiple of {multiple}, as the VAE needs: take {near}")


def check_pipeline(model_dir, flag="--model_dir"):
    """Check that `model_dir` is a whole Diffusers pipeline in safetensors and return its model_index.json.

    Every component's folder is there with its configuration, every safetensors header parses and fits its file.
    Raises BadInput for what is missing and CheckFailed for a damaged file; no weights are loaded.
    """
    folder = Path(model_dir)
    if not folder.is_dir():
        raise BadInput(f"{flag} {folder} is not a folder: give what cache_model.py printed")
    try:
        index = read_index(folder)
    except FileNotFoundError:
        raise BadInput(f"{flag} {folder} has no model_index.json: give what cache_model.py printed") from None
    for name, (_, class_name) in components(index).items():
        check_component(folder, name, class_name, flag)
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
    return checkpoint.digest_named(_digests(model_dir, parts, known or {}))


def _digests(model_dir, parts, known):
    for part in parts:
        for name, path in component_files(Path(model_dir, part)).items():
            data = _rewritten(name, path)
            if data is not None:
                yield f"{part}/{name}", hashlib.sha256(data).hexdigest()
            else:
                yield f"{part}/{name}", known.get(path) or checkpoint.sha256_file(path)


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


@functools.lru_cache(maxsize=1)
def _load_tokenizer(model_dir):
    import transformers

    return getattr(transformers, read_index(model_dir)["tokenizer"][1]).from_pretrained(f"{model_dir}/tokenizer")


def max_tokens(model_dir):
    """Return how many tokens of a prompt a model reads: 77 for Stable Diffusion's."""
    return _recorded_max_tokens(model_dir) or _load_tokenizer(model_dir).model_max_length


def _recorded_max_tokens(model_dir):
    """Return what the tokenizer's settings say, for which transformers is not imported; None where they do not."""
    path = Path(model_dir) / "tokenizer" / "tokenizer_config.json"
    return read_json_file(path).get("model_max_length") if path.is_file() else None


def tokenize(model_dir, prompts):
    """Return each prompt's token ids, padded to the text encoder's length, or cut to it."""
    tokenizer, length = _load_tokenizer(model_dir), max_tokens(model_dir)
    return [
        list(tokenizer(text, padding="max_length", max_length=length, truncation=True).input_ids) for text in prompts
    ]


def say_what_is_cut(model_dir, prompts):
    """Print a warning for each prompt that is longer than the model reads, with the words that are lost."""
    length = _recorded_max_tokens(model_dir)
    for prompt in prompts:
        if length is None or len(prompt.encode()) + 2 <= length:  # a token is a byte or more: transformers stays away
            continue
        tokenizer = _load_tokenizer(model_dir)
        ids = tokenizer(prompt, truncation=False, verbose=False).input_ids
        if len(ids) > length:
            said, lost = one_line(prompt, 100), one_line(tokenizer.decode(ids[length - 1 : -1]), 400)
            say(f"warning: the model reads {length} tokens, {said!r} has {len(ids)}: {lost!r} is not read")


# ---------------------------------------------------------------------------------------------------------------------
# What decides what it draws


def digest_model(model_dir):
    """Return one sha256 of the files of a model folder, or a checkpoint, that decide what it draws.

    Gigabytes are not read again where a manifest or the hub's cache knows their sha256: `check_model` reads them.
    """
    known = _known_sha256(model_dir)
    index = [(path.name, known.get(path) or checkpoint.sha256_file(path)) for path in _index_file(model_dir)]
    return checkpoint.digest_named([*index, *_digests(model_dir, _part_names(model_dir), known)])


def check_model(model_dir):
    """Raise CheckFailed for a file of a model folder, or a checkpoint, that has not the sha256 that is known of it."""
    folder, known = Path(model_dir), _known_sha256(model_dir)
    for name, fact in checkpoint.read_json(folder / checkpoint.MANIFEST).get("files", {}).items():
        path = folder / name
        if path.suffix in MODEL_FILES and not (path.is_file() and path.stat().st_size == fact["size"]):
            raise CheckFailed(f"{path} is damaged: it is not of {fact['size']} bytes: fetch or make it again")
    for path, found in zip(known, checkpoint.sha256_files(known), strict=True):
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
    files = checkpoint.read_json(folder / checkpoint.MANIFEST).get("files", {})
    for path in _model_files(folder):
        fact, blob = files.get(path.relative_to(folder).as_posix()), path.resolve()
        if fact and fact["size"] == path.stat().st_size:
            known[path] = fact["sha256"]
        elif blob.parent.name == "blobs" and checkpoint.SHA256.fullmatch(blob.name):
            known[path] = blob.name
    return known
