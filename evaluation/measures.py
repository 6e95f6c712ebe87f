"""Measures of embeddings: subject and prompt fidelity, prior preservation, diversity and memorisation.

They follow DreamBooth (arXiv 2208.12242, section 4). Embeddings are rows [N, D] of any length, compared by cosine
similarity. Intervals are percentile bootstrap confidence intervals (Efron, 1979) over the pictures; the photos are not
resampled. No measure depends on the order of the pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

NUM_RESAMPLES = 1000
LEVEL = 0.95  # of the confidence intervals
SMALLEST_SET = 3  # pictures that an interval needs
FEWEST_PHOTOS = 2  # photos that a comparison with each other needs
DIGITS = 6

Estimate = dict[str, float]  # {"value", "low", "high"}


@dataclass(frozen=True)
class Measure:
    """How the report explains a measure. better: "high" or "low"."""

    title: str
    better: str
    reading: str


MEASURES = {
    "subject_dino": Measure(
        "Subject fidelity, DINO",
        "high",
        "Similarity of the subject's images to the photos. DINO tells individuals of a class apart. The similarity "
        "of the photos to each other is a practical upper limit.",
    ),
    "subject_clip": Measure(
        "Subject fidelity, CLIP-I",
        "high",
        "Similarity of the subject's images to the photos. CLIP depends more on the class of the subject, and less "
        "on the individual.",
    ),
    "prompt_clip": Measure(
        "Prompt fidelity, CLIP-T",
        "high",
        "Similarity of each image to its prompt. A value far below the base model's means that the tuned model "
        "ignores prompts.",
    ),
    "prior_photos": Measure(
        "Prior: class images and photos",
        "low",
        "Similarity of class images, which are drawn without the identifier, to the photos. A value well above the "
        "base model's means that the whole class has come to look like the subject.",
    ),
    "prior_base": Measure(
        "Prior: class images of both models",
        "high",
        "Similarity of the tuned model's class images to the base model's. The base column is the similarity of the "
        "base model's class images to each other.",
    ),
    "diversity": Measure(
        "Diversity of class images",
        "high",
        "Mean of 1 - cosine similarity over all pairs of class images. A value far below the base model's means that "
        "class images have become alike.",
    ),
    "memorised": Measure(
        "Memorised",
        "low",
        "Share of the subject's images that are nearly identical to a photo. A high share means that the tuned model "
        "reproduces its training photos.",
    ),
    "bleed": Measure(
        "Bleed from another subject",
        "low",
        "Similarity of the subject's images to the photos of the other subject that they resemble most. A value well "
        "above the base model's means that the model mixes its subjects.",
    ),
}

PHOTOS_OF = "photos of "  # names of the sets of other subjects' photos begin with it


# ---------------------------------------------------------------------------------------------------------------------
# Cosine similarities


def normalized(rows: ArrayLike) -> np.ndarray:
    """Return rows [N, D] scaled to unit length, float64."""
    rows = np.asarray(rows, dtype=np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def cosines(rows: ArrayLike, columns: ArrayLike) -> np.ndarray:
    """Return the cosine similarity [N, M] of each row [N, D] to each column [M, D]."""
    return normalized(rows) @ normalized(columns).T


def likeness(pictures: ArrayLike, others: ArrayLike) -> np.ndarray:
    """Return the mean cosine similarity of each picture to all others, [N].

    Their mean is the paper's average pairwise cosine similarity: subject fidelity for pictures of the subject and the
    photos (section 4.1: DINO, CLIP-I), PRES for class pictures and the photos (section 4.3).
    """
    return cosines(pictures, others).mean(axis=1)


def prompt_fidelity(pictures: ArrayLike, texts: ArrayLike) -> np.ndarray:
    """Return the cosine similarity of each picture [N, D] to its own text [N, D], [N]: CLIP-T (section 4.1)."""
    return (normalized(pictures) * normalized(texts)).sum(axis=1)


def nearest(pictures: ArrayLike, photos: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the photo nearest to each picture, and the cosine similarity to it, [N] each."""
    table = cosines(pictures, photos)
    return table.argmax(axis=1), table.max(axis=1)


# ---------------------------------------------------------------------------------------------------------------------
# Means with confidence intervals


def mean_of(values: ArrayLike, seed: int) -> Estimate:
    """Return the mean of one value per picture [N], and its bootstrap confidence interval."""
    values = np.sort(np.asarray(values, dtype=np.float64))  # so that file names do not change the resamples
    picked = np.random.default_rng(seed).integers(len(values), size=(NUM_RESAMPLES, len(values)))
    return _estimate(values.mean(), values[picked].mean(axis=1))


def mean_of_pairs(table: np.ndarray, seed: int) -> Estimate:
    """Return the mean over all pairs of different pictures in a symmetric table [N, N], and its confidence interval.

    Pictures are resampled, not pairs, since pairs are not independent. A picture that is drawn twice is not compared
    with itself.
    """
    order = np.argsort(table.sum(axis=1))
    table = table[order][:, order]
    size = len(table)
    others = 1.0 - np.eye(size)
    counts = np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), size=NUM_RESAMPLES)  # R N
    weights = ((counts @ others) * counts).sum(axis=1)
    sums = ((counts @ (table * others)) * counts).sum(axis=1)
    return _estimate((table * others).sum() / others.sum(), sums[weights > 0] / weights[weights > 0])


def diversity(pictures: ArrayLike, seed: int) -> Estimate:
    """Return the mean of 1 - cosine similarity over all pairs of pictures, and its confidence interval.

    The paper's DIV (section 4.3) is the LPIPS distance between pictures of the subject for one prompt. This measure
    uses class pictures and an encoder, which compares content rather than pixels and textures. The scales differ:
    compare only with the base model's value.
    """
    return mean_of_pairs(1 - cosines(pictures, pictures), seed)


def _estimate(value, resampled):
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {name: round(float(each), DIGITS) for name, each in (("value", value), ("low", low), ("high", high))}


def are_apart(one: Estimate, other: Estimate) -> bool:
    """Return whether the confidence intervals of two estimates do not overlap."""
    return one["low"] > other["high"] or other["low"] > one["high"]


# ---------------------------------------------------------------------------------------------------------------------
# All measures


def measure(
    clip: dict[str, np.ndarray],
    dino: dict[str, np.ndarray] | None,
    texts: np.ndarray,
    memorised_above: float,
    seed: int,
) -> dict[str, dict[str, Any] | None]:
    """Return {measure: {"tuned": estimate, "base": estimate}} for MEASURES; None if it needs DINO and `dino` is None.

    clip, dino: embeddings of each set: "photos"; "tuned", "base" (the subject); "class_tuned", "class_base".
    texts: CLIP embeddings of the prompt of each picture in "tuned" and in "base".
    Subject fidelity also has "photos", the similarity of the photos to each other. Measures whose name has no encoder
    use DINO, or CLIP without DINO. "bleed" is measured if there are sets of other subjects' photos (PHOTOS_OF).
    """
    encoded = clip if dino is None else dino
    photos = encoded["photos"]
    classes = {model: encoded[f"class_{model}"] for model in ("tuned", "base")}
    others = {name.removeprefix(PHOTOS_OF): rows for name, rows in encoded.items() if name.startswith(PHOTOS_OF)}
    measures = {
        "subject_dino": None if dino is None else _subject_fidelity(dino, seed),
        "subject_clip": _subject_fidelity(clip, seed),
        "prompt_clip": _of_both(lambda model: mean_of(prompt_fidelity(clip[model], texts), seed)),
        "prior_photos": _of_both(lambda model: mean_of(likeness(classes[model], photos), seed)),
        "prior_base": {
            "tuned": mean_of(likeness(classes["tuned"], classes["base"]), seed),
            "base": mean_of_pairs(cosines(classes["base"], classes["base"]), seed),
        },
        "diversity": _of_both(lambda model: diversity(classes[model], seed)),
        "memorised": _of_both(lambda model: mean_of(nearest(encoded[model], photos)[1] > memorised_above, seed)),
    }
    return measures | ({"bleed": _bleed(encoded, others, seed)} if others else {})


def _bleed(encoded: dict[str, np.ndarray], others: dict[str, np.ndarray], seed: int) -> dict[str, Any]:
    """Return the estimates for the other subject that the tuned model's images resemble most.

    With "photos", the similarity of both subjects' photos to each other, and {"subjects": {name: value}} of all others.
    """
    found = {
        name: _of_both(lambda model, rows=rows: mean_of(likeness(encoded[model], rows), seed))
        for name, rows in others.items()
    }
    values = {name: each["tuned"]["value"] for name, each in found.items()}
    most = max(values, key=lambda name: values[name])
    photos = round(float(likeness(encoded["photos"], others[most]).mean()), DIGITS)
    return {**found[most], "photos": {"value": photos}, "subjects": values}


def _subject_fidelity(encoded: dict[str, np.ndarray], seed: int) -> dict[str, Estimate]:
    photos = encoded["photos"]
    found = _of_both(lambda model: mean_of(likeness(encoded[model], photos), seed))
    return {**found, "photos": {"value": mean_of_pairs(cosines(photos, photos), seed)["value"]}}


def _of_both(estimate: Callable[[str], Estimate]) -> dict[str, Estimate]:
    return {model: estimate(model) for model in ("tuned", "base")}
