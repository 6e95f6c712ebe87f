"""What train.py trains on: pairs of photos and class images, the latent cache, and batches."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.images import Size
from common.targets import Held
from pipelines import posteriors
from pipelines.posteriors import Row
from utils import CLASS_NOISE, INSTANCE_NOISE, ORDER, draw_noise, row_rng

if TYPE_CHECKING:
    import torch


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
        return _permutation(self.seed, epoch, self.pairs_per_epoch)


@functools.lru_cache(maxsize=2)  # a step asks for each of its pairs
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return row_rng(seed, ORDER, epoch, 0).permutation(count)


# ---------------------------------------------------------------------------------------------------------------------
# The latent cache


def cache_posteriors(
    folder: str,
    pairs: Pairs,
    num_pairs: int,
    instance_images: Sequence[Path | str],
    class_images: Sequence[Path | str],
    encoder_options: dict[str, Any],
    made_from: dict[str, Any] | None = None,
    held: Held | None = None,
    buckets: Mapping[str, Size] | None = None,
    **pool: Any,
) -> None:
    """Encode the images that the first `num_pairs` pairs use into `folder`; return at once if all are there.

    A longer run adds to the cache of a shorter one. encoder_options: of posteriors.PosteriorEncoder. made_from: plain
    values that decide the latents; a cache made from others is replaced. held: the lock of the work folder, for a URI.
    buckets: {image: width and height that it is cropped to}, None for squares. pool: options of map_on_actors.
    """
    images = list_rows(pairs, instance_images, class_images)
    rows = pairs.rows_used(num_pairs)
    posteriors.fill(folder, rows, images, encoder_options, buckets, made_from, held, **pool)


def list_rows(pairs: Pairs, instance_images: Sequence[Path | str], class_images: Sequence[Path | str]) -> list[Row]:
    """Return all rows in the order that Pairs counts them in."""
    rows = list_variants(instance_images, pairs)
    return [*rows, *((str(path), i, None) for i, path in enumerate(class_images))]


def list_variants(instance_images: Sequence[Path | str], pairs: Pairs) -> list[Row]:
    """Return (path, image, variant) of each row of an instance image.

    A photo that is listed several times counts as one image, with its next variant at each place.
    """
    paths, rows = [str(path) for path in instance_images], []
    times, earlier = collections.Counter(paths), collections.Counter[str]()
    first = {path: number for number, path in reversed(list(enumerate(paths)))}
    for path in paths:
        numbers = (variant * times[path] + earlier[path] for variant in range(pairs.num_variants))
        rows += [(path, first[path], variant % pairs.max_variants) for variant in numbers]
        earlier[path] += 1
    return rows


def count_pixels(
    pairs: Pairs, num_pairs: int, instance_images: Sequence[str], class_images: Sequence[str], sizes: Mapping[str, Size]
) -> int:
    """Return the pixels of all crops that the first `num_pairs` pairs use; sizes: of the crops of each image."""
    rows = list_rows(pairs, instance_images, class_images)
    return sum(math.prod(sizes[rows[row][0]]) for row in pairs.rows_used(num_pairs))


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
        found = posteriors.load(cache_dir)
        self.caches = [found[size] for size in sorted(found, key=lambda size: size or ())]
        self.places = np.stack([cache.pop("place").numpy() for cache in self.caches])
        self.shape = (self.places >= 0).argmax(axis=0)  # of each row, as the number of its cache
        self.pairs, self.prompts, self.seed, self.draw_time = pairs, prompts, seed, draw_time
        self.hand_out = functools.lru_cache(maxsize=1)(self._hand_out)

    def __call__(self, step: int, first_pair: int, num_pairs: int, pairs_per_step: int) -> list[dict[str, Any]]:
        """Return the forward passes of pairs first_pair ... of the `pairs_per_step` of optimizer step `step`.

        One for each shape of their latents: {"batch": rows as `collate` lays them out, "num_instance": how many of
        them are instance rows}.
        """
        picked = self.hand_out(step, pairs_per_step)[first_pair : first_pair + num_pairs]
        rows = [(number, INSTANCE_NOISE, instance) for number, instance, _ in picked]
        rows += [(number, CLASS_NOISE, row) for number, _, row in picked if row is not None]
        passes = []
        for shape in sorted({self.shape[row] for *_, row in rows}):
            own = [each for each in rows if self.shape[each[2]] == shape]
            batch = collate([self._row(step, *each) for each in own])
            passes.append({"batch": batch, "num_instance": sum(stream == INSTANCE_NOISE for _, stream, _ in own)})
        return passes

    def _hand_out(self, step: int, pairs_per_step: int) -> list[tuple[int, int, int | None]]:
        """Return (number, instance row, class row) of the pairs of a step, those of equal shapes side by side."""
        numbers = range(pairs_per_step)
        picked = [(number, *self.pairs.rows(step * pairs_per_step + number)) for number in numbers]
        return sorted(picked, key=lambda pair: tuple(self.shape[row] for row in pair[1:] if row is not None))

    def _row(self, step: int, number: int, stream: int, row: int) -> dict[str, torch.Tensor]:
        import torch

        cache, place = self.caches[self.shape[row]], self.places[self.shape[row], row]
        mean = cache["mean"][place].float()
        noise = draw_noise(self.seed, stream, step, number, mean.shape, self.draw_time)
        return {
            "mean": mean,
            "std": cache["std"][place].float(),
            "noise": torch.from_numpy(noise[0]),
            "posterior_noise": torch.from_numpy(noise[1]),
            "timesteps": torch.tensor(noise[2]),
            **({"time_ids": cache["time_ids"][place]} if "time_ids" in cache else {}),
            **self.prompts[self.pairs.image_of(row)],
        }


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack rows of one shape: instance rows, then, with prior preservation, class rows; all fields use this order.

    mean, std, noise, posterior_noise: [B, c, h, w] float32; timesteps: [B] int64; for SDXL time_ids: [B, 6] int32;
    prompts: as in pipelines.conditions, [B, ...].
    """
    import torch

    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def largest_pass(
    num_pairs: int, instance_images: Iterable[str], class_images: Iterable[str], sizes: Mapping[str, Size]
) -> tuple[int, Size]:
    """Return (rows, size) of the largest forward pass that batches of `num_pairs` pairs may have.

    sizes: of the crops of each image.
    """
    kinds = [{sizes[image] for image in images} for images in (instance_images, class_images)]
    passes = [(num_pairs * sum(size in kind for kind in kinds), size) for size in set.union(*kinds)]
    return max(passes, key=lambda each: (each[0], math.prod(each[1])))
