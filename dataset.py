"""What train.py trains on: pairs of photos and class images, the latent cache, and batches."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common import targets
from common.actors import map_on_actors
from common.errors import CheckFailed
from common.images import draw_crop, read_image_at, read_size, source_of, to_pixel_values
from common.messages import Progress
from common.objects import local_copy, same_copy
from common.targets import Held
from common.uris import shown
from pipelines import loading
from pipelines.families import find_family
from utils import CLASS_NOISE, CROP, INSTANCE_NOISE, ORDER, draw_noise, row_rng

if TYPE_CHECKING:
    import torch

ENCODE_BATCH = 4  # images that the VAE encodes at a time

Crop = tuple[int, str, int, int | None]  # number, path, image, variant: None for a class image, whose center is taken


# ---------------------------------------------------------------------------------------------------------------------
# Pairs


@dataclass(frozen=True)
class Pairs:
    """The endless sequence of pairs of an instance image and a class image that a run trains on.

    An epoch has max(num_instance, num_class) pairs in an order that depends on (seed, epoch) only. Pair j holds
    instance image j mod num_instance and class image j mod num_class. Each repeat of an instance image uses its next
    variant, another crop and flip; it has as many variants as repeats in an epoch, at most `max_variants`.

    A row is one image to encode: variant v of instance image i is row i * num_variants + v; class images follow.
    """

    num_instance: int
    num_class: int
    max_variants: int
    seed: int

    @property
    def pairs_per_epoch(self) -> int:
        """Number of pairs in an epoch."""
        return max(self.num_instance, self.num_class)

    @property
    def repeats(self) -> int:
        """How many times an epoch uses each instance image."""
        return math.ceil(self.pairs_per_epoch / self.num_instance)

    @property
    def num_variants(self) -> int:
        """Number of variants of each instance image."""
        return min(self.max_variants, self.repeats) if self.repeats > 1 else self.max_variants

    @property
    def num_rows(self) -> int:
        """Number of rows that a run of any length may use."""
        return self.num_instance * self.num_variants + self.num_class

    def rows(self, position: int) -> tuple[int, Any]:
        """Return the rows of the pair at `position` of the sequence: (instance, class or None)."""
        epoch, place = divmod(position, self.pairs_per_epoch)
        return self._rows_of(epoch, int(self._order(epoch)[place]))

    def image_of(self, row: int) -> int:
        """Return the image of a row: the number of an instance image, or `num_instance` + that of a class image."""
        first_class = self.num_instance * self.num_variants
        return row // self.num_variants if row < first_class else self.num_instance + row - first_class

    def rows_used(self, num_pairs: int) -> np.ndarray:
        """Return the rows [R] that the first `num_pairs` pairs of the sequence use, in ascending order."""
        full_epochs, rest = divmod(num_pairs, self.pairs_per_epoch)
        parts = [(epoch, np.arange(self.pairs_per_epoch)) for epoch in range(min(full_epochs, self.num_variants))]
        parts.append((full_epochs, self._order(full_epochs)[:rest]))  # whole epochs repeat after `num_variants`
        used = np.zeros(self.num_rows, dtype=bool)
        for part in parts:
            for rows in self._rows_of(*part)[: 1 + bool(self.num_class)]:
                used[rows] = True
        return np.flatnonzero(used)

    def _rows_of(self, epoch: int, j: Any) -> tuple[Any, Any]:
        variant = (epoch * self.repeats + j // self.num_instance) % self.num_variants
        instance = (j % self.num_instance) * self.num_variants + variant
        if not self.num_class:
            return instance, None
        return instance, self.num_instance * self.num_variants + j % self.num_class

    def _order(self, epoch: int) -> np.ndarray:
        return row_rng(self.seed, ORDER, epoch, 0).permutation(self.pairs_per_epoch)


# ---------------------------------------------------------------------------------------------------------------------
# The latent cache


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
        self.resolution, self.random_crop, self.random_flip, self.seed = resolution, random_crop, random_flip, seed

    def __call__(self, item: dict[str, list[Crop]]) -> dict[str, np.ndarray]:
        """Return {"crops": [R], "mean": [R, c, h, w], "std"}, float16, of {"crops": crops to encode}.

        With "time_ids" [R, 6] int32, if the denoiser is told where a crop was.
        The VAE always encodes ENCODE_BATCH images: an image on its own comes out slightly different, and a cache that
        is completed later would differ from one that is filled at once.
        """
        import torch

        crops = item["crops"]
        pixel_values, told = zip(*(self._read(*crop[1:]) for crop in crops), strict=True)
        batch = np.stack(pixel_values + pixel_values[:1] * (ENCODE_BATCH - len(crops)))
        with torch.inference_mode():
            posterior = loading.encode_posterior(self.vae, torch.from_numpy(batch).to(self.device))
        mean, std = (each[: len(crops)].cpu().numpy().astype(np.float16) for each in posterior)
        geometry = {name: np.array([each[name] for each in told], np.int32) for name in told[0]}
        return {"crops": np.array([crop[0] for crop in crops]), "mean": mean, "std": std, **geometry}

    def _read(self, path: str, image: int, variant: int | None) -> tuple[np.ndarray, dict[str, list[int]]]:
        """Return the pixels [3, H, W] of a crop, and what the denoiser is told of it."""
        flags = {"random_crop": self.random_crop, "random_flip": self.random_flip}
        rngs = [None if variant is None else row_rng(self.seed, CROP, variant, image) for _ in range(2)]
        photo, side = self.read_image(path), self.resolution
        left, top, is_mirrored = draw_crop(photo.size, rngs[0], **flags)
        box = (left, top, left + min(photo.size), top + min(photo.size))
        told = self.family.geometry(photo.size, box, (side, side), is_mirrored)
        return to_pixel_values(photo, side, rngs[1], **flags), told


def cache_posteriors(
    folder: str,
    pairs: Pairs,
    num_pairs: int,
    instance_images: Sequence[Path | str],
    class_images: Sequence[Path | str],
    encoder_options: dict[str, Any],
    made_from: dict[str, Any] | None = None,
    held: Held | None = None,
    **pool: Any,
) -> None:
    """Encode the images that the first `num_pairs` pairs use into `folder`; return at once if all are there.

    The file has `mean` and `std` [N, c, h, w] float16, for SDXL `time_ids` [N, 6] int32, and `place` [num_rows]: the
    number of each row, -1 if it is not encoded. A longer run adds to the cache of a shorter one. encoder_options: of
    PosteriorEncoder. made_from: plain values that decide the latents; a cache made from others is replaced. held: the
    lock of the work folder, for a URI.
    pool: options of map_on_actors.
    """
    targets.recover(folder)
    images = list_variants(instance_images, pairs)
    images += [(str(path), i, None) for i, path in enumerate(class_images)]
    earlier_place = read_places(folder, pairs, made_from)
    place, crops = plan_cache(pairs.rows_used(num_pairs), earlier_place, images, encoder_options)
    if not crops:
        return
    arrays = encode_crops(crops, encoder_options, **pool)
    from safetensors.numpy import load_file, save_file

    if earlier_place.max() >= 0:
        earlier = load_file(local_copy(folder) / "posteriors.safetensors")
        arrays = {name: np.concatenate([earlier[name], arrays[name]]) for name in arrays}
    with targets.staging(folder) as beside:
        save_file({**arrays, "place": place}, beside / "posteriors.safetensors")
        read = [[shown(path), variant] for path, _, variant in images]
        targets.publish(beside, folder, held, made_from=made_from, images=read)


def list_variants(instance_images: Sequence[Path | str], pairs: Pairs) -> list[tuple[str, int, int | None]]:
    """Return (path, image, variant) of each row of an instance image.

    A photo that is listed several times counts as one image, with its next variant at each place.
    """
    paths, rows = [str(path) for path in instance_images], []
    times, earlier = collections.Counter(paths), collections.Counter[str]()
    first = {path: number for number, path in reversed(list(enumerate(paths)))}
    for path in paths:
        shown = (variant * times[path] + earlier[path] for variant in range(pairs.num_variants))
        rows += [(path, first[path], variant % pairs.max_variants) for variant in shown]
        earlier[path] += 1
    return rows


def encode_crops(crops: list[Crop], encoder_options: dict[str, Any], **pool: Any) -> dict[str, np.ndarray]:
    """Return the arrays of PosteriorEncoder for all crops, [N, ...]; raise CheckFailed if one is not finite."""
    items = [{"crops": crops[start : start + ENCODE_BATCH]} for start in range(0, len(crops), ENCODE_BATCH)]
    arrays: dict[str, np.ndarray] = {}
    with Progress("encode", len(crops), "images") as progress:
        for result in map_on_actors(PosteriorEncoder, encoder_options, items, **pool):
            numbers = result.pop("crops")
            for name, values in result.items():
                arrays.setdefault(name, np.empty((len(crops), *values.shape[1:]), values.dtype))[numbers] = values
            progress.update(len(numbers))
    broken = [path for i, path, *_ in crops if not all(np.isfinite(array[i]).all() for array in arrays.values())]
    if broken:
        raise CheckFailed(f"the VAE gives no finite latents for {broken[0]}: check the model and the image")
    return arrays


def read_places(folder: str, pairs: Pairs, made_from: dict[str, Any] | None) -> np.ndarray:
    """Return the number of each row in the cache [num_rows], -1 if it is not encoded; no latents are read.

    A cache that is not whole, or that was made from other values, counts as empty.
    """
    from safetensors import safe_open

    nowhere = np.full(pairs.num_rows, -1)
    manifest = targets.read_manifest(folder, deep=True)
    if not manifest or manifest.get("made_from") != made_from:
        return nowhere
    with safe_open(local_copy(folder) / "posteriors.safetensors", framework="np") as file:
        names = file.keys()
        place = file.get_tensor("place") if "place" in names else np.empty(0)  # missing in caches of older versions
    return place if len(place) == pairs.num_rows else nowhere


def plan_cache(
    rows: np.ndarray, place: np.ndarray, images: list[tuple[str, int, int | None]], options: dict[str, Any]
) -> tuple[np.ndarray, list[Crop]]:
    """Return (place with these rows, crops to encode for them).

    Equal crops, such as those of a square photo, are encoded once. place: of read_places. images: (path, image,
    variant) of all rows. options: of PosteriorEncoder.
    """
    flags = {name: options[name] for name in ("random_crop", "random_flip")}
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
# Batches


class Batches:
    """Makes training batches from the cache, which it maps into memory; they do not depend on the worker.

    prompts: the fields (conditions.encode_prompts) of the text of each image, in the order of Pairs.image_of.
    draw_time: of the objective.
    """

    def __init__(
        self,
        cache_dir: str | Path,
        pairs: Pairs,
        prompts: Sequence[dict[str, torch.Tensor]],
        seed: int,
        draw_time: Callable[[np.random.Generator], int],
    ) -> None:
        from safetensors.torch import load_file

        self.cache = load_file(same_copy(cache_dir, "--work_dir") / "posteriors.safetensors")
        self.place = self.cache.pop("place")
        self.pairs, self.prompts, self.seed, self.draw_time = pairs, prompts, seed, draw_time

    def __call__(self, step: int, first_pair: int, num_pairs: int, pairs_per_step: int) -> dict[str, torch.Tensor]:
        """Return pairs first_pair ... of the `pairs_per_step` of optimizer step `step`, as `collate` lays them out."""
        numbers = range(first_pair, first_pair + num_pairs)
        picked = {number: self.pairs.rows(step * pairs_per_step + number) for number in numbers}
        rows = [self._row(step, number, INSTANCE_NOISE, instance) for number, (instance, _) in picked.items()]
        if self.pairs.num_class:
            rows += [self._row(step, number, CLASS_NOISE, row) for number, (_, row) in picked.items()]
        return collate(rows)

    def _row(self, step: int, number: int, stream: int, row: int) -> dict[str, torch.Tensor]:
        import torch

        place = int(self.place[row])
        mean = self.cache["mean"][place].float()
        noise = draw_noise(self.seed, stream, step, number, mean.shape, self.draw_time)
        return {
            "mean": mean,
            "std": self.cache["std"][place].float(),
            "noise": torch.from_numpy(noise[0]),
            "posterior_noise": torch.from_numpy(noise[1]),
            "timesteps": torch.tensor(noise[2]),
            **({"time_ids": self.cache["time_ids"][place]} if "time_ids" in self.cache else {}),
            **self.prompts[self.pairs.image_of(row)],
        }


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack rows into a batch: B instance rows, then, with prior preservation, B class rows; all fields use this order.

    mean, std, noise, posterior_noise: [2B, c, h, w] float32; timesteps: [2B] int64; for SDXL time_ids: [2B, 6] int32;
    prompts: as in pipelines.conditions, [2B, ...].
    """
    import torch

    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
