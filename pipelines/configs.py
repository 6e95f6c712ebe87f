"""What a Diffusers model folder says of itself: its components, their configurations and sizes."""

import importlib
import inspect
import json
import math
import re
from pathlib import Path

from common.errors import BadInput, CheckFailed


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


def base_name(model_dir):
    """Return a name for a base model: the hub's where it lies in a hub cache, else its folder's."""
    hub = re.search(r"models--([^/]+)--([^/]+)/snapshots/", f"{model_dir}/")
    return f"{hub[1]}/{hub[2]}" if hub else Path(model_dir).name


def base_revision(model_dir):
    """Return the commit hash of a base model in a hub cache, None for another folder."""
    found = re.search(r"/snapshots/([0-9a-f]{40})", str(model_dir))
    return found and found[1]


def base_license(model_dir):
    """Return the licence that a base model's README.md names in its front matter, or `other`."""
    readme = Path(model_dir) / "README.md"
    found = readme.is_file() and re.search(r"^license: *(\S+)", readme.read_text(errors="replace"), re.MULTILINE)
    return found[1] if found else "other"
