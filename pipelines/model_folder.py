"""Files of a Diffusers model folder: check them, select weight variants, copy components, compute digests.

No weights are loaded here.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from common import folders
from common.errors import BadInput, CheckFailed
from pipelines.configs import components, read_config, read_index, read_json_file
from pipelines.tokens import WITHOUT_VOCABULARY, check_vocabulary, find_vocabulary, read_vocab_size

TRAINING_LOG = "training_log.jsonl"  # written to a model folder by training
LORA_FILE = "pytorch_lora_weights.safetensors"  # Diffusers' name; a checkpoint of train.py --lora has it too
VALIDATION_STRIP = "validation/strip.png"  # the same, and in the work folder
CONFIGURATION = {".json", ".txt", ".model"}  # suffixes of configuration and vocabulary files
MODEL_FILES = CONFIGURATION | {".safetensors"}


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def check_pipeline(model_dir: str | Path, flag: str = "--model_dir") -> dict[str, Any]:
    """Check that `model_dir` is a complete Diffusers pipeline with safetensors weights; return its model_index.json.

    Every component needs its folder and configuration, and every safetensors header must match its file's size.
    Raises BadInput for missing files and CheckFailed for damaged ones.
    """
    folder = Path(model_dir)
    if not folder.is_dir():
        remedy = "download a Hub model with cache_model.py and pass the folder that it prints"
        raise BadInput(f"{flag} {folder} is not a folder: {remedy}")
    try:
        index = read_index(folder)
    except FileNotFoundError:
        raise BadInput(
            f"{flag} {folder} has no model_index.json: pass the folder that cache_model.py printed"
        ) from None
    parts = components(index)
    for name, (_, class_name) in parts.items():
        check_component(folder, name, class_name, flag)
    for name, (_, class_name) in parts.items():
        text_encoder = name.replace("tokenizer", "text_encoder")
        if text_encoder != name and text_encoder in parts and class_name not in WITHOUT_VOCABULARY:
            check_vocabulary(folder / name, read_vocab_size(read_config(folder, text_encoder)))
    return index


def check_component(folder: Path, name: str, class_name: str, flag: str) -> None:
    """Raise BadInput or CheckFailed unless component `name` of a model folder or a checkpoint is complete."""
    part = folder / name
    if not part.is_dir():
        raise BadInput(f"{flag} {folder} lacks the folder {name}: fetch the model again")
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
        held = f"only {pickles[0]}, a pickle, which can run code when loaded" if pickles else "no weights"
        raise BadInput(f"{part} contains {held}: use a revision with safetensors")
    for index in part.glob("*.safetensors.index*.json"):
        shards = set(read_json_file(index)["weight_map"].values())
        missing = sorted(shards - {path.name for path in weights})
        if missing:
            raise BadInput(f"{part} lacks {missing[0]}: fetch the model again")
    for path in weights:
        check_safetensors(path)


def check_safetensors(path: Path) -> None:
    """Raise CheckFailed unless the header of a safetensors file is valid and matches the file's size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckFailed(f"{path} is damaged ({error}): fetch the model again") from None


def read_shapes(part: str | Path) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the weights of a component that are loaded, from the headers of its files."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in component_files(part).values():
        if path.suffix == ".safetensors":
            with safe_open(path, framework="np") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def count_weights(folder: str | Path) -> int:
    """Return the number of weights of a model folder or a component; further variants are not counted."""
    folder = Path(folder)
    parts = [folder, *(path for path in folder.iterdir() if path.is_dir())]
    return sum(math.prod(shape) for part in parts for shape in read_shapes(part).values())


# ---------------------------------------------------------------------------------------------------------------------
# Files of a component


def variant_of(name: str) -> str | None:
    """Return the variant in the name of a weight file, a shard or an index: "fp16" for model.fp16.safetensors.

    Plain weights have None.
    """
    words = re.sub(r"-\d+-of-\d+", "", Path(name).name).split(".")[1:]
    return ".".join(word for word in words if word not in ("safetensors", "index", "json")) or None


def weights_variant(part: str | Path) -> str | None:
    """Return the variant of a component's weights to load: None if it has plain weights or none, else its first."""
    found = [variant_of(path.name) for path in Path(part).glob("*.safetensors")]
    variants = [variant for variant in found if variant]
    return min(variants) if variants and None not in found else None


def component_files(part: str | Path) -> dict[str, Path]:
    """Return {name in a copy: path} of the files of a component that are loaded.

    They are its configuration or vocabulary, and the weights of one variant, see `weights_variant`. A copy names these
    without the variant.
    """
    variant = weights_variant(part)
    files: dict[str, Path] = {}
    for path in sorted(Path(part).glob("*")):
        if ".safetensors" in path.name:
            if variant_of(path.name) == variant:
                files[_plain_name(path.name)] = path
        elif path.suffix in CONFIGURATION and ".index." not in path.name:  # such an index lists pickles
            files[path.name] = path
    return files


def _plain_name(name: str) -> str:
    variant = variant_of(name)
    return name.replace(f".{variant}", "", 1) if variant else name


def _rewritten(name: str, path: Path) -> bytes | None:
    """Return the content of a copy's file `name` if it differs from `path`: the index of a variant's shards."""
    if name == path.name or path.suffix != ".json":
        return None
    index = read_json_file(path)
    index["weight_map"] = {key: _plain_name(shard) for key, shard in index["weight_map"].items()}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def copy_component(part: str | Path, folder: str | Path) -> None:
    """Copy the files of a component that are loaded to a new folder, with the names of `component_files`."""
    Path(folder).mkdir(parents=True)
    for name, path in component_files(part).items():
        data = _rewritten(name, path)
        if data is None:
            shutil.copyfile(path, Path(folder, name))
        else:
            Path(folder, name).write_bytes(data)


def digest_parts(model_dir: str | Path, parts: Iterable[str]) -> str:
    """Return one SHA-256 of the files of components that are loaded; a copy has the same one."""
    return folders.digest_named(_digests(model_dir, parts, {}))


def _digests(model_dir: str | Path, parts: Iterable[str], known: dict[Path, str]) -> Iterator[tuple[str, str]]:
    for part in parts:
        for name, path in component_files(Path(model_dir, part)).items():
            data = _rewritten(name, path)
            if data is not None:
                yield f"{part}/{name}", hashlib.sha256(data).hexdigest()
            else:
                yield f"{part}/{name}", known.get(path) or folders.sha256_file(path)


# ---------------------------------------------------------------------------------------------------------------------
# Digest of a model


def digest_model(model_dir: str | Path) -> str:
    """Return one SHA-256 of the files of a model folder or a checkpoint that determine the images it draws.

    Files whose SHA-256 is in a manifest or in the Hub's cache are not read; `check_model` compares them.
    """
    known = _known_sha256(model_dir)
    index = [(path.name, known.get(path) or folders.sha256_file(path)) for path in _own_files(model_dir)]
    return folders.digest_named([*index, *_digests(model_dir, _part_names(model_dir), known)])


def check_model(model_dir: str | Path) -> None:
    """Raise CheckFailed unless the files of a model folder or a checkpoint have the sizes and SHA-256s on record."""
    folder, known = Path(model_dir), _known_sha256(model_dir)
    for name, fact in folders.read_json(folder / folders.MANIFEST).get("files", {}).items():
        path = folder / name
        if path.suffix in MODEL_FILES and not (path.is_file() and path.stat().st_size == fact["size"]):
            raise CheckFailed(f"{path} is damaged, its size is not {fact['size']} bytes: fetch or create it again")
    for path, found in zip(known, folders.sha256_files(known), strict=True):
        if found != known[path]:
            raise CheckFailed(f"{path} is damaged, its SHA-256 is not {known[path][:12]}...: fetch or create it again")


def _own_files(model_dir: str | Path) -> list[Path]:
    """Return the index of a model folder, or the LoRA of a checkpoint, which has no index and perhaps a LoRA."""
    found = [Path(model_dir, name) for name in ("model_index.json", LORA_FILE)]
    return [path for path in found if path.is_file()][:1]


def _part_names(model_dir: str | Path) -> list[str]:
    """Return the components of a model folder: those in its index, or all folders of a checkpoint."""
    if Path(model_dir, "model_index.json").is_file():
        return list(components(read_index(model_dir)))
    return [path.name for path in Path(model_dir).iterdir() if path.is_dir() and path.name[0] != "."]


def _model_files(model_dir: str | Path) -> list[Path]:
    parts = _part_names(model_dir)
    return [
        *_own_files(model_dir),
        *(path for part in parts for path in component_files(Path(model_dir, part)).values()),
    ]


def _known_sha256(model_dir: str | Path) -> dict[Path, str]:
    """Return {path: expected SHA-256} of a model's files, from its manifest or the names of blobs in a Hub cache."""
    folder = Path(model_dir)
    known: dict[Path, str] = {}
    files = folders.read_json(folder / folders.MANIFEST).get("files", {})
    for path in _model_files(folder):
        fact, blob = files.get(path.relative_to(folder).as_posix()), path.resolve()
        if fact and fact["size"] == path.stat().st_size:
            known[path] = fact["sha256"]
        elif blob.parent.name == "blobs" and folders.SHA256.fullmatch(blob.name):
            known[path] = blob.name
    return known
