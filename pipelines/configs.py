"""Read model_index.json, component configurations, sizes and metadata of a Diffusers model folder."""

import importlib
import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

from common import folders
from common.errors import BadInput, CheckFailed
from common.storage import is_remote


def read_json_file(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model; raise CheckFailed if the file is damaged."""
    try:
        value = json.loads(Path(path).read_text())
    except ValueError as error:
        raise CheckFailed(f"{path} is not JSON ({error}): fetch the model again") from None
    if not isinstance(value, dict):
        raise CheckFailed(f"{path} is not a JSON object: fetch the model again")
    return value


def read_index(model_dir: str | Path) -> dict[str, Any]:
    """Return model_index.json of a model folder: {"unet": ["diffusers", "UNet2DConditionModel"], ...}."""
    return read_json_file(Path(model_dir) / "model_index.json")


def components(index: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return {name: (library, class)} of the components in a model_index.json."""
    pairs = {name: value for name, value in index.items() if isinstance(value, list) and len(value) == 2}
    return {name: (library, class_name) for name, (library, class_name) in pairs.items() if library}


class Config(dict):
    """A component's configuration; values that its file lacks are the defaults of its class.

    Files written by older library versions lack newer settings. The class, whose import takes seconds, is imported
    only if a value is missing.
    """

    def __init__(self, values: dict[str, Any], library: str, class_name: str):
        super().__init__(values)
        self.library, self.class_name = library, class_name

    def __missing__(self, name: str) -> Any:
        component = getattr(importlib.import_module(self.library), self.class_name)
        if hasattr(component, "config_class"):  # a transformers class
            defaults = component.config_class().to_dict()
        else:
            defaults = {each.name: each.default for each in inspect.signature(component.__init__).parameters.values()}
        value = defaults[name]
        return list(value) if isinstance(value, tuple) else value

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value or its class default, which dict.get ignores; `default` if the class has none."""
        try:
            return self[name]
        except KeyError:
            return default


def read_config(model_dir: str | Path, component: str) -> Config:
    """Return the configuration of a model's component."""
    name = "scheduler_config.json" if component == "scheduler" else "config.json"
    return Config(read_json_file(Path(model_dir) / component / name), *components(read_index(model_dir))[component])


def read_unet_config(path: str | Path | None, model_dir: str | Path) -> dict[str, Any]:
    """Return the UNet configuration in the file of --unet_config, or the model's own if `path` is empty.

    Raises BadInput if the configuration does not fit the model's VAE and text encoder.
    """
    own = read_config(model_dir, "unet")
    if not path:
        return dict(own)
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"--unet_config {path}: {error}") from None
    if not isinstance(config, dict):
        raise BadInput(f"--unet_config {path} is not a UNet configuration: pass the config.json of a UNet")
    found = Config(config, own.library, own.class_name)
    pairs = {name: (found[name], own[name]) for name in ("in_channels", "out_channels", "cross_attention_dim")}
    added = ("addition_embed_type", "addition_time_embed_dim", "projection_class_embeddings_input_dim")
    pairs |= {name: (dict.get(found, name), dict.get(own, name)) for name in added}  # None by default
    for name, (value, needed) in pairs.items():
        if value != needed:
            raise BadInput(f"--unet_config {path} has {name} {value}, but --model_dir {model_dir} needs {needed}")
    return config


def pixel_factor(model_dir: str | Path) -> int:
    """Return the number of pixels per side of a latent cell: 8 for Stable Diffusion's VAE."""
    return 2 ** (len(read_config(model_dir, "vae")["block_out_channels"]) - 1)


def model_resolution(model_dir: str | Path, denoiser: str = "unet") -> int:
    """Return the side, in pixels, of the square images that a model was trained on."""
    cells = read_config(model_dir, denoiser)["sample_size"]
    if not isinstance(cells, int):
        raise BadInput(f"{model_dir}/{denoiser}/config.json has no integer sample_size (latent cells per side): add it")
    return cells * pixel_factor(model_dir)


def side_multiple(model_dir: str | Path) -> int:
    """Return the number of pixels of which the sides of images are multiples, where a family has no other rule."""
    return math.lcm(pixel_factor(model_dir), 8)  # Diffusers' pipelines require multiples of 8 for every VAE


def largest_side(model_dir: str | Path) -> int | None:
    """Return the largest side of an image in pixels, of a transformer with a table of positions; None: no limit."""
    if "transformer" not in components(read_index(model_dir)):
        return None
    config = dict(read_config(model_dir, "transformer"))
    patches = config.get("pos_embed_max_size")
    return patches and patches * config["patch_size"] * pixel_factor(model_dir)


def check_resolution(model_dir: str | Path, flag: str, value: int, multiple: int | None = None) -> None:
    """Raise BadInput unless `value` pixels are a side that a model can draw, and a multiple of `multiple`.

    Default: side_multiple.
    """
    multiple = multiple or side_multiple(model_dir)
    largest = largest_side(model_dir)
    if largest and value > largest:
        raise BadInput(f"{flag} {value} is larger than {largest}, the largest side of the model: use {largest} or less")
    if value % multiple:
        near = max(multiple, round(value / multiple) * multiple)
        raise BadInput(f"{flag} {value} is not a multiple of {multiple}, which the model requires: use {near}")


def base_name(model_dir: str | Path, location: str | Path | None = None) -> str:
    """Return the name of a base model: that in its manifest, its hub name if it is in a Hub cache, or its folder's.

    location: the path or URI that `model_dir` is the local copy of.
    """
    name = folders.read_json(Path(model_dir) / folders.MANIFEST).get("model_name")
    hub = re.search(r"models--([^/]+)--([^/]+)/snapshots/", f"{model_dir}/")
    place = str(location or model_dir)
    own = Path(place.partition("?")[0] if is_remote(place) else place).name
    return name or (f"{hub[1]}/{hub[2]}" if hub else own)


def base_revision(model_dir: str | Path) -> str | None:
    """Return the commit hash of a base model, from its manifest or its path in a Hub cache, or None if it has none."""
    found = re.search(r"/snapshots/([0-9a-f]{40})", str(model_dir))
    return folders.read_json(Path(model_dir) / folders.MANIFEST).get("revision") or (found and found[1])


def base_license(model_dir: str | Path) -> str:
    """Return the licence named in the front matter of a base model's README.md, or `other`."""
    readme = Path(model_dir) / "README.md"
    found = readme.is_file() and re.search(r"^license: *(\S+)", readme.read_text(errors="replace"), re.MULTILINE)
    return found[1] if found else "other"
