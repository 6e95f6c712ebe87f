"""The latent cache of train.py: what the VAE says of crops, in a folder that later runs add to.

The file FILE has `mean` and `std` [N, c, h, w] float16, for SDXL `time_ids` [N, 6] int32, and `place` [num_rows]: the
number of each row, -1 if it is not encoded. With buckets it has these for each size, named WIDTHxHEIGHT.mean, ...
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from common import targets
from common.actors import map_on_actors
from common.errors import CheckFailed
from common.images import Crop, Size, cut, draw_crop, read_image_at, read_size, scale_pixels, source_of
from common.messages import Progress
from common.objects import local_copy, same_copy
from common.targets import Held
from common.uris import shown
from pipelines import loading
from pipelines.conditions import locate
from pipelines.families import find_family
from utils import CROP, row_rng

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
FILE = "posteriors.safetensors"
ENCODE_BATCH = 4  # images that the VAE encodes at a time

Row = tuple[str, int, int | None]  # path, image, variant: None for a class image, whose center is taken
Job = tuple[int, str, int, int | None]  # number among the crops to encode, then a Row


class PosteriorEncoder:
    """Decodes, crops and encodes images: the work of one actor while the cache is filled."""

    def __init__(
        self,
        model_dir: str,
        resolution: int,
        random_crop: bool,
        random_flip: bool,
        seed: int,
        mixed_precision: str = "no",
        num_threads: int | None = None,
    ) -> None:
        import torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        loading.set_up_torch(self.device, num_threads, mixed_precision)
        # float32, because this is computed once, and because SDXL's VAE overflows in float16.
        model = same_copy(model_dir, "--model_dir")
        self.family = find_family(model)
        self.vae = loading.load_models(str(model), ("vae",), torch.float32)["vae"].to(self.device)
        self.read_image = functools.lru_cache(maxsize=1)(read_image_at)  # the variants of a photo follow each other
        self.square, self.seed = (resolution, resolution), seed
        self.flags = {"random_crop": random_crop, "random_flip": random_flip}

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return {"crops": [R], "mean": [R, c, h, w], "std"}, float16, of {"crops": Jobs, "size": of a bucket or None}.

        With "time_ids" [R, 6] int32, if the denoiser is told where a crop was, and with the "size".
        The VAE always encodes ENCODE_BATCH images: an image on its own comes out slightly different, and a cache that
        is completed later would differ from one that is filled at once.
        """
        import torch

        jobs, size = item["crops"], item["size"] or self.square
        pixel_values, crops = zip(*(self.read(*job[1:], size=size) for job in jobs), strict=True)
        batch = np.stack(pixel_values + pixel_values[:1] * (ENCODE_BATCH - len(crops)))
        with torch.inference_mode():
            posterior = loading.encode_posterior(self.vae, torch.from_numpy(batch).to(self.device))
        mean, std = (each[: len(crops)].cpu().numpy().astype(np.float16) for each in posterior)
        numbers, told = np.array([job[0] for job in jobs]), locate(self.family, crops, size)
        return {"crops": numbers, "mean": mean, "std": std, **told, "size": item["size"]}

    def read(self, path: str, image: int, variant: int | None, size: Size | None = None) -> tuple[np.ndarray, Crop]:
        """Return the pixels [3, H, W] of a crop, float32 in [-1, 1], and the crop; size: default: a square."""
        photo, size = self.read_image(path), size or self.square
        rng = None if variant is None else row_rng(self.seed, CROP, variant, image)
        crop = draw_crop(photo.size, rng, **self.flags, size=size)
        return scale_pixels(cut(photo, crop, size)), crop


# ---------------------------------------------------------------------------------------------------------------------
# Filling


def fill(
    folder: str,
    rows: np.ndarray,
    images: Sequence[Row],
    encoder_options: dict[str, Any],
    buckets: Mapping[str, Size] | None = None,
    made_from: dict[str, Any] | None = None,
    held: Held | None = None,
    **pool: Any,
) -> None:
    """Encode the crops of `rows` into `folder`; return at once if all are there.

    images: of all rows. buckets: {path: size that it is cropped to}, None for squares. The others: of
    dataset.cache_posteriors.
    """
    targets.recover(folder)
    sizes = [buckets[path] if buckets else None for path, *_ in images]
    earlier = read_places(folder, len(images), made_from)
    places, jobs = dict(earlier), {}
    for size in dict.fromkeys(sizes[row] for row in rows):
        own = np.array([row for row in rows if sizes[row] == size])
        place = earlier.get(size, np.full(len(images), -1))
        places[size], jobs[size] = plan_cache(own, place, images, encoder_options, size)
    if not any(jobs.values()):
        return
    arrays = encode_crops(jobs, encoder_options, **pool)
    from safetensors.numpy import load_file, save_file

    parts = [split_by_size(load_file(local_copy(folder) / FILE))] if earlier else []
    parts.append(arrays)
    tensors = {}
    for size, place in places.items():
        own = [part[size] for part in parts if size in part]
        whole = {name: np.concatenate([each[name] for each in own]) for name in own[-1] if name != "place"}
        tensors |= {_name(size, name): values for name, values in {**whole, "place": place}.items()}
    with targets.staging(folder) as beside:
        save_file(tensors, beside / FILE)
        read = [[shown(path), variant] for path, _, variant in images]
        targets.publish(beside, folder, held, made_from=made_from, images=read)


def encode_crops(
    jobs: Mapping[Size | None, list[Job]], encoder_options: dict[str, Any], **pool: Any
) -> dict[Size | None, dict[str, np.ndarray]]:
    """Return the arrays of PosteriorEncoder for all crops, [N, ...], by size.

    Raises CheckFailed if one is not finite.
    """
    items = [
        {"size": size, "crops": own[start : start + ENCODE_BATCH]}
        for size, own in jobs.items()
        for start in range(0, len(own), ENCODE_BATCH)
    ]
    arrays: dict[Size | None, dict[str, np.ndarray]] = {size: {} for size, own in jobs.items() if own}
    with Progress("encode", sum(map(len, jobs.values())), "images") as progress:
        for result in map_on_actors(PosteriorEncoder, encoder_options, items, **pool):
            size, numbers = result.pop("size"), result.pop("crops")
            for name, values in result.items():
                empty = np.empty((len(jobs[size]), *values.shape[1:]), values.dtype)
                arrays[size].setdefault(name, empty)[numbers] = values
            progress.update(len(numbers))
    for size, found in arrays.items():
        for i, (_, path, *_) in enumerate(jobs[size]):
            if not all(np.isfinite(array[i]).all() for array in found.values()):
                raise CheckFailed(f"the VAE gives no finite latents for {path}: check the model and the image")
    return arrays


def plan_cache(
    rows: np.ndarray, place: np.ndarray, images: Sequence[Row], options: dict[str, Any], size: Size | None = None
) -> tuple[np.ndarray, list[Job]]:
    """Return (place with these rows, crops to encode for them), all of one size; None: squares.

    Equal crops, such as those of a square photo, are encoded once. place: of read_places. images: of all rows.
    options: of PosteriorEncoder.
    """
    flags = {name: options[name] for name in ("random_crop", "random_flip")} | {"size": size or (1, 1)}
    size_of = functools.cache(lambda location: read_size(source_of(location)))

    def crop_of(row: int) -> tuple:
        path, image, variant = images[row]
        if variant is None:
            return path, None
        return path, draw_crop(size_of(path), row_rng(options["seed"], CROP, variant, image), **flags)

    missing = rows[place[rows] < 0]
    if not len(missing):
        return place, []
    place = place.copy()
    known = {crop_of(row): place[row] for row in np.flatnonzero(place >= 0).tolist()}
    first, crops = place.max() + 1, []
    for row in missing.tolist():
        crop = crop_of(row)
        if crop not in known:
            known[crop] = first + len(crops)
            crops.append((len(crops), *images[row]))
        place[row] = known[crop]
    return place, crops


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_places(folder: str, num_rows: int, made_from: dict[str, Any] | None) -> dict[Size | None, np.ndarray]:
    """Return the number of each row in the cache [num_rows], -1 if it is not encoded, by size; no latents are read.

    A cache that is not whole, or that was made from other values, counts as empty.
    """
    from safetensors import safe_open

    manifest = targets.read_manifest(folder, deep=True)
    if not manifest or manifest.get("made_from") != made_from:
        return {}
    with safe_open(local_copy(folder) / FILE, framework="np") as file:
        names = file.keys()
        places = {name: file.get_tensor(name) for name in names if name.endswith("place")}  # older versions lack them
    found = split_by_size(places)
    return {size: own["place"] for size, own in found.items() if len(own["place"]) == num_rows}


def load(folder: str | Path) -> dict[Size | None, dict[str, torch.Tensor]]:
    """Return the tensors of a cache by size, mapped into memory."""
    from safetensors.torch import load_file

    return split_by_size(load_file(same_copy(folder, "--work_dir") / FILE))


def split_by_size(tensors: Mapping[str, T]) -> dict[Size | None, dict[str, T]]:
    """Return {size: {name: tensor}} of the tensors in FILE; the size of squares is None."""
    found: dict[Size | None, dict[str, T]] = {}
    for key, tensor in tensors.items():
        size, _, name = key.rpartition(".")
        width, _, height = size.partition("x")
        found.setdefault((int(width), int(height)) if size else None, {})[name] = tensor
    return found


def _name(size: Size | None, name: str) -> str:
    return f"{size[0]}x{size[1]}.{name}" if size else name
