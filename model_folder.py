"""A Diffusers model folder as files: is it whole, is it damaged, its sizes and tokens. No weights are loaded here."""

import functools
import hashlib
import importlib
import inspect
import json
import math
import re
import shutil
from pathlib import Path

import checkpoint
from cli import BadInput, CheckFailed, one_line, say

CONFIGURATION = {".json", ".txt", ".model"}  # and a tokenizer's vocabulary
MODEL_FILES = CONFIGURATION | {".safetensors"}
VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("vocab.txt",), ("*.model",))  # a tokenizer has one
WITHOUT_VOCABULARY = ("ByT5Tokenizer",)  # its tokens are bytes
LEAST_TOKENS = 0.9  # of the text encoder's embeddings: some models round their number up, T5's to 32,128 of 32,100


def read_json_file(path):
    """Return the JSON of a file of a model; raise CheckFailed where it is damaged."""
    try:
        value = json.loads(Path(path).read_text())
    except ValueError as error:
        raise CheckFailed(f"{path} is not JSON ({error}): fetch the model again") from None
    if not isinstance(value, dict):
        raise CheckFailed(f"{path} is not a JSON object: fetch the model again")
    return value


def read_index(model_dir):
    """Return a model folder's model_index.json: {"unet": ["diffusers", "UNet2DConditionModel"], ...}."""
    return read_json_file(Path(model_dir) / "model_index.json")


def components(index):
    """Return {name: (library, class)} of the components that a model_index.json names."""
    return {
        name: tuple(value) for name, value in index.items() if isinstance(value, list) and len(value) == 2 and value[0]
    }


class Config(dict):
    """A component's configuration; a value that its file leaves out is the default of its class.

    Files of older libraries lack what was added since. The class is imported only then: that takes seconds.
    """

    def __init__(self, values, library, class_name):
        super().__init__(values)
        self.library, self.class_name = library, class_name

    def __missing__(self, name):
        component = getattr(importlib.import_module(self.library), self.class_name)
        if hasattr(component, "config_class"):  # of transformers
            defaults = component.config_class().to_dict()
        else:
            defaults = {each.name: each.default for each in inspect.signature(component.__init__).parameters.values()}
        value = defaults[name]
        return list(value) if isinstance(value, tuple) else value

    def get(self, name, default=None):
        """Return a value as [] does, which a dict's own get does not; `default` where the class has none either."""
        try:
            return self[name]
        except KeyError:
            return default


def read_config(model_dir, component):
    """Return the Config of a model's component."""
    name = "scheduler_config.json" if component == "scheduler" else "config.json"
    return Config(read_json_file(Path(model_dir) / component / name), *components(read_index(model_dir))[component])


def read_unet_config(path, model_dir):
    """Return the configuration of a UNet in a file, which must fit the model's VAE and text encoder, or the model's."""
    own = read_config(model_dir, "unet")
    if not path:
        return dict(own)
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"--unet_config {path}: {error}") from None
    if not isinstance(config, dict):
        raise BadInput(f"--unet_config {path} is not a UNet's configuration: give the config.json of one")
    found = Config(config, own.library, own.class_name)
    for name in ("in_channels", "out_channels", "cross_attention_dim"):
        if found[name] != own[name]:
            raise BadInput(f"--unet_config {path} has {name} {found[name]}, --model_dir {model_dir} needs {own[name]}")
    return config


def pixel_factor(model_dir):
    """Return how many pixels a side one latent cell covers: 8 for Stable Diffusion's VAE."""
    return 2 ** (len(read_config(model_dir, "vae")["block_out_channels"]) - 1)


def model_resolution(model_dir):
    """Return the side, in pixels, of the square pictures that a model was trained to draw."""
    cells = read_config(model_dir, "unet")["sample_size"]
    if not isinstance(cells, int):
        raise BadInput(f"{model_dir}/unet/config.json has no sample_size in whole latent cells a side: write it there")
    return cells * pixel_factor(model_dir)


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


def find_vocabulary(folder):
    """Return the files of a tokenizer's vocabulary; raise BadInput where it lacks some.

    transformers 5 makes a tokenizer of two tokens from a folder without them, to which all texts are the same.
    """
    for names in VOCABULARIES:
        found = [path for name in names for path in sorted(Path(folder).glob(name))]
        if len(found) >= len(names):
            return found
    raise BadInput(f"{folder} lacks its vocabulary (tokenizer.json, or vocab.json and merges.txt): fetch it again")


def read_vocab_size(config):
    """Return how many tokens a text encoder of a configuration has embeddings for, None where it does not say."""
    inner = dict.get(config, "text_config") or {}  # of a model for texts and pictures
    return inner["vocab_size"] if "vocab_size" in inner else config.get("vocab_size")


def check_vocabulary(folder, vocab_size):
    """Raise BadInput unless a folder's tokenizer has as many tokens as its text encoder has embeddings.

    And a merge for each token of several symbols, where they are merged: without them words are read letter by letter.
    """
    files = find_vocabulary(folder)
    if files[0].suffix == ".model":  # only its own library reads it
        return
    try:
        tokens, added, num_merges = _read_vocabulary(files, Path(folder))
        ids = {int(number) for number in (*tokens.values(), *added)}
    except (TypeError, AttributeError, KeyError, ValueError):
        raise CheckFailed(f"{files[0]} is not a tokenizer's vocabulary: fetch the model again") from None
    check_num_tokens(folder, len(ids), max(ids, default=-1), vocab_size)
    special = re.compile(r"<.*>")
    words = [token for token, number in tokens.items() if number not in added and not special.fullmatch(token)]
    num_merged = sum(len(token.removesuffix("</w>")) > 1 for token in words)
    if num_merges is not None and num_merges < LEAST_TOKENS * num_merged:
        raise BadInput(f"{folder} has {num_merges} merges for {num_merged} tokens of several letters: fetch it again")


def check_num_tokens(place, count, highest, vocab_size):
    """Raise BadInput where a tokenizer's tokens, `count` with numbers up to `highest`, are not the text encoder's."""
    if vocab_size and (highest >= vocab_size or count < LEAST_TOKENS * vocab_size):
        raise BadInput(f"{place} has {count} tokens, the text encoder {vocab_size}: fetch the model again")


def _read_vocabulary(files, folder):
    """Return ({token: number}, numbers of added tokens, how many merges, None for a tokenizer without)."""
    first = files[0]
    if first.suffix == ".txt":
        return {line: number for number, line in enumerate(first.read_text("utf-8").rstrip("\n").split("\n"))}, (), None
    if first.name == "vocab.json":
        path = folder / "added_tokens.json"
        added = read_json_file(path).values() if path.is_file() else ()
        merges = [line for line in files[1].read_text("utf-8").split("\n") if line and not line.startswith("#version")]
        return read_json_file(first), set(added), len(merges)
    parts = read_json_file(first)
    model, added = parts["model"], {each["id"] for each in parts.get("added_tokens") or ()}
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram's, of [token, score]
        vocabulary = {each[0]: number for number, each in enumerate(vocabulary)}
    return vocabulary, added, len(model["merges"]) if model.get("type") == "BPE" else None


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

    tokenizer = getattr(transformers, read_index(model_dir)["tokenizer"][1]).from_pretrained(f"{model_dir}/tokenizer")
    vocab_size = read_vocab_size(read_config(model_dir, "text_encoder"))
    check_num_tokens(f"{model_dir}/tokenizer", len(tokenizer), len(tokenizer) - 1, vocab_size)
    return tokenizer


def max_tokens(model_dir):
    """Return how many tokens of a prompt a model reads: 77 for Stable Diffusion's."""
    path = Path(model_dir) / "tokenizer" / "tokenizer_config.json"
    recorded = read_json_file(path).get("model_max_length") if path.is_file() else None
    positions = read_config(model_dir, "text_encoder").get("max_position_embeddings")
    known = [each for each in (recorded, positions) if each]
    return min(known) if known else _load_tokenizer(model_dir).model_max_length  # recorded may be 10**30: no limit


def tokenize(model_dir, prompts):
    """Return each prompt's token ids, padded to the text encoder's length, or cut to it."""
    tokenizer, length = _load_tokenizer(model_dir), max_tokens(model_dir)
    return [
        list(tokenizer(text, padding="max_length", max_length=length, truncation=True).input_ids) for text in prompts
    ]


def say_what_is_cut(model_dir, prompts):
    """Print a warning for each prompt that is longer than the model reads, with the words that are lost."""
    length = max_tokens(model_dir)
    for prompt in prompts:
        if len(prompt.encode()) + 2 <= length:  # a token is a byte or more: transformers stays away
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
