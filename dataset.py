"""What train.py trains on: pairs of photos and class images, the cache of their latents, and batches."""

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.actors import map_on_actors
from common.errors import CheckFailed
from common.folders import publish, read_manifest, recover, staging
from common.images import draw_crop, read_image, read_size, to_pixel_values
from common.messages import Progress
from pipelines import loading
from utils import CLASS_NOISE, CROP, INSTANCE_NOISE, ORDER, draw_noise, row_rng

ENCODE_BATCH = 4  # images that the VAE takes at a time


# ---------------------------------------------------------------------------------------------------------------------
# Pairs


@dataclass(frozen=True)
class Pairs:
    """The endless sequence of pairs of an instance and a class image that training walks through.

    An epoch is max(num_instance, num_class) pairs, in an order that depends on (seed, epoch) alone: pair j holds
    instance image j mod num_instance and class image j mod num_class. Each repeat of an instance image takes its
    next variant: another crop and flip, of as many as it has repeats in an epoch, at most `max_variants`.
    """

    num_instance: int
    num_class: int
    max_variants: int
    seed: int

    @property
    def pairs_per_epoch(self):
        return max(self.num_instance, self.num_class)

    @property
    def repeats(self):
        """How often an epoch shows each instance image."""
        return math.ceil(self.pairs_per_epoch / self.num_instance)

    @property
    def num_variants(self):
        return min(self.max_variants, self.repeats) if self.repeats > 1 else self.max_variants

    @property
    def num_rows(self):
        """Rows that a run of any length may use: the variants of each instance image, then the class images."""
        return self.num_instance * self.num_variants + self.num_class

    def rows(self, position):
        """Return the rows of the pair at `position` of the sequence: (instance, class or None)."""
        epoch, place = divmod(position, self.pairs_per_epoch)
        return self._rows_of(epoch, int(self._order(epoch)[place]))

    def rows_used(self, num_pairs):
        """Return the rows [R] that the first `num_pairs` pairs of the sequence use, in order."""
        full_epochs, rest = divmod(num_pairs, self.pairs_per_epoch)
        parts = [(epoch, np.arange(self.pairs_per_epoch)) for epoch in range(min(full_epochs, self.num_variants))]
        parts.append((full_epochs, self._order(full_epochs)[:rest]))  # whole epochs repeat after as many as variants
        used = np.zeros(self.num_rows, dtype=bool)
        for part in parts:
            for rows in self._rows_of(*part)[: 1 + bool(self.num_class)]:
                used[rows] = True
        return np.flatnonzero(used)

    def _rows_of(self, epoch, j):
        variant = (epoch * self.repeats + j // self.num_instance) % self.num_variants
        instance = (j % self.num_instance) * self.num_variants + variant
        if not self.num_class:
            return instance, None
        return instance, self.num_instance * self.num_variants + j % self.num_class

    def _order(self, epoch):
        return row_rng(self.seed, ORDER, epoch, 0).permutation(self.pairs_per_epoch)


# ---------------------------------------------------------------------------------------------------------------------
# The cache of VAE posteriors


class PosteriorEncoder:
    """Decodes, crops and encodes some rows: the work of one actor while the cache is filled."""

    def __init__(self, model_dir, resolution, random_crop, random_flip, seed, mixed_precision="no", num_threads=None):
        import torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        loading.set_up_torch(self.device, num_threads, mixed_precision)
        # float32: computed once, and SDXL's VAE overflows in float16.
        self.vae = loading.load_models(model_dir, ("vae",), torch.float32)["vae"].to(self.device)
        self.resolution, self.random_crop, self.random_flip, self.seed = resolution, random_crop, random_flip, seed

    def __call__(self, item):
        """Return {"crops": [R], "mean": [R, c, h, w], "std"}, float16, of {"crops": [(number, path, image, variant)]}.

        A class image has no variant (None): its centre is taken. The VAE always takes ENCODE_BATCH images: one that is
        alone comes out a little differently, and a cache that is completed later would be another.
        """
        import torch

        crops = item["crops"]
        pixel_values = [self._pixel_values(*crop[1:]) for crop in crops]
        pixel_values = np.stack(pixel_values + pixel_values[:1] * (ENCODE_BATCH - len(crops)))
        with torch.inference_mode():
            posterior = loading.encode_posterior(self.vae, torch.from_numpy(pixel_values).to(self.device))
        mean, std = (each[: len(crops)].cpu().numpy().astype(np.float16) for each in posterior)
        return {"crops": np.array([crop[0] for crop in crops]), "mean": mean, "std": std}

    def _pixel_values(self, path, image, variant):
        rng = None if variant is None else row_rng(self.seed, CROP, variant, image)
        return to_pixel_values(read_image(path), self.resolution, rng, self.random_crop, self.random_flip)


def cache_posteriors(folder, pairs, num_pairs, instance_images, class_images, encoder_options, made_from=None, **pool):
    """Encode what the first `num_pairs` pairs use, with Ray Data, into `folder`; return at once where all is there.

    What a shorter run has cached is kept. encoder_options: of PosteriorEncoder; made_from: plain values that decide
    the latents: a cache of others is made anew; pool: num_workers and the like, of map_on_actors.
    """
    recover(folder)
    images = [(str(path), i, v) for i, path in enumerate(instance_images) for v in range(pairs.num_variants)]
    images += [(str(path), i, None) for i, path in enumerate(class_images)]
    earlier_place = read_places(folder, pairs, made_from)
    place, crops = plan_cache(pairs.rows_used(num_pairs), earlier_place, images, encoder_options)
    if not crops:
        return
    items = [{"crops": crops[start : start + ENCODE_BATCH]} for start in range(0, len(crops), ENCODE_BATCH)]
    arrays = {}
    with Progress("encode", len(crops), "images") as progress:
        for result in map_on_actors(PosteriorEncoder, encoder_options, items, **pool):
            for name in ("mean", "std"):
                shape = (len(crops), *result[name].shape[1:])
                arrays.setdefault(name, np.empty(shape, np.float16))[result["crops"]] = result[name]
            progress.update(len(result["crops"]))
    broken = [path for i, path, *_ in crops if not all(np.isfinite(array[i]).all() for array in arrays.values())]
    if broken:
        raise CheckFailed(f"the VAE gives no finite latents for {broken[0]}: check the model and the image")
    from safetensors.numpy import load_file, save_file

    if earlier_place.max() >= 0:
        earlier = load_file(Path(folder) / "posteriors.safetensors")
        arrays = {name: np.concatenate([earlier[name], arrays[name]]) for name in arrays}
    with staging(folder) as beside:
        save_file({**arrays, "place": place}, beside / "posteriors.safetensors")
        publish(beside, folder, made_from=made_from, images=[[path, variant] for path, _, variant in images])


def read_places(folder, pairs, made_from):
    """Return where in the cache each row is, [num_rows], -1 where it is not; no latents are read.

    A cache that is not whole, or made from something else, has no rows. It holds this as `place`, beside `mean` and
    `std`, [N, c, h, w] float16.
    """
    from safetensors import safe_open

    nowhere = np.full(pairs.num_rows, -1)
    manifest = read_manifest(folder, deep=True)
    if not manifest or manifest.get("made_from") != made_from:
        return nowhere
    with safe_open(Path(folder) / "posteriors.safetensors", framework="np") as file:
        names = file.keys()
        place = file.get_tensor("place") if "place" in names else ()  # an older version's has none
    return place if len(place) == pairs.num_rows else nowhere


def plan_cache(rows, place, images, options):
    """Return (place with these rows, the crops to encode for them [(number, path, image, variant)]).

    Crops that come out alike, say of a square photo, are encoded once. place: of read_places; images: (path, image,
    variant) of all rows; options: of PosteriorEncoder.
    """
    flags = {name: options[name] for name in ("random_crop", "random_flip")}
    size_of = functools.cache(read_size)

    def crop_of(row):
        path, image, variant = images[row]
        if variant is None:
            return path, None
        return path, draw_crop(size_of(path), row_rng(options["seed"], CROP, variant, image), **flags)

    missing = rows[place[rows] < 0]
    if not len(missing):
        return place, []
    place = place.copy()
    known = {crop_of(row): place[row] for row in np.flatnonzero(place >= 0)}
    first, crops = place.max() + 1, []
    for row in missing:
        crop = crop_of(row)
        if crop not in known:
            known[crop] = first + len(crops)
            crops.append((len(crops), *images[row]))
        place[row] = known[crop]
    return place, crops


# ---------------------------------------------------------------------------------------------------------------------
# Batches


class Batches:
    """Makes training batches from the mapped cache: batch (step, pairs) is the same on whatever worker asks for it."""

    def __init__(self, cache_dir, pairs, instance_prompt, class_prompt, seed, num_train_timesteps):
        from safetensors.torch import load_file

        self.cache = load_file(Path(cache_dir) / "posteriors.safetensors")
        self.place = self.cache.pop("place")
        self.pairs, self.seed, self.num_train_timesteps = pairs, seed, num_train_timesteps
        self.prompts = {INSTANCE_NOISE: instance_prompt, CLASS_NOISE: class_prompt}

    def __call__(self, step, first_pair, num_pairs, pairs_per_step):
        """Return pairs first_pair ... of the `pairs_per_step` of optimizer step `step`, as `collate` lays them out."""
        numbers = range(first_pair, first_pair + num_pairs)
        picked = {number: self.pairs.rows(step * pairs_per_step + number) for number in numbers}
        rows = [self._row(step, number, INSTANCE_NOISE, instance) for number, (instance, _) in picked.items()]
        if self.pairs.num_class:
            rows += [self._row(step, number, CLASS_NOISE, row) for number, (_, row) in picked.items()]
        return collate(rows)

    def _row(self, step, number, stream, row):
        import torch

        place = int(self.place[row])
        mean = self.cache["mean"][place].float()
        noise = draw_noise(self.seed, stream, step, number, mean.shape, self.num_train_timesteps)
        return {
            "mean": mean,
            "std": self.cache["std"][place].float(),
            "noise": torch.from_numpy(noise[0]),
            "posterior_noise": torch.from_numpy(noise[1]),
            "timesteps": torch.tensor(noise[2]),
            "prompt": self.prompts[stream],
        }


def collate(rows):
    """Stack rows into a batch: B instance rows, then (with prior preservation) B class rows, in all fields alike.

    mean, std, noise, posterior_noise: [2B, c, h, w] float32; timesteps: [2B] int64;
    prompt: prompt_ids [2B, L] int64, or prompt_embeds [2B, L, D] where the text encoder is frozen.
    """
    import torch

    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
