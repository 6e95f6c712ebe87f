"""What a tuned model learned and forgot, in numbers of embeddings alone: the measures of DreamBooth (arXiv 2208.12242).

Embeddings are rows [N, D] of any length; two are compared by their cosine. Each interval is a percentile bootstrap over
the pictures (Efron, 1979): what other pictures of the same model might have given. The photos are not resampled.
No measure depends on the order of the pictures.
"""

from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 1000
LEVEL = 0.95  # of the intervals
SMALLEST_SET = 3  # pictures: fewer give no interval
FEWEST_PHOTOS = 2  # to compare them with each other
DIGITS = 6


@dataclass(frozen=True)
class Measure:
    """What people read of a measure. better: "high" or "low"."""

    title: str
    better: str
    reading: str


MEASURES = {
    "subject_dino": Measure(
        "Subject fidelity, DINO",
        "high",
        "Likeness of the pictures of the subject to the photos, by an encoder that tells one dog from another; the "
        "likeness of the photos to each other is what can be hoped for.",
    ),
    "subject_clip": Measure(
        "Subject fidelity, CLIP-I",
        "high",
        "The same by CLIP, which sees more of what kind of thing it is and less of which one.",
    ),
    "prompt_clip": Measure(
        "Prompt fidelity, CLIP-T",
        "high",
        "Likeness of each picture to the words of its prompt; far below the base model's, prompts are ignored.",
    ),
    "prior_photos": Measure(
        "Prior: class pictures like the photos",
        "low",
        "Likeness of pictures of the class, without the token, to the photos; well above the base model's, the whole "
        "class has come to look like the subject.",
    ),
    "prior_base": Measure(
        "Prior: class pictures like before",
        "high",
        "Likeness of the tuned model's class pictures to the base model's; the base's column is how alike those are.",
    ),
    "diversity": Measure(
        "Diversity of class pictures",
        "high",
        "How much class pictures differ from each other; far below the base model's, they have become all alike.",
    ),
    "memorised": Measure(
        "Memorised",
        "low",
        "Share of the subject's pictures that are nearly a photo: many mean that the model repeats photos.",
    ),
}


# ---------------------------------------------------------------------------------------------------------------------
# Cosines


def normalized(rows):
    """Return rows [N, D] at unit length, float64."""
    rows = np.asarray(rows, dtype=np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def cosines(rows, columns):
    """Return the cosine of each row with each column [N, M] of embeddings [N, D] and [M, D]."""
    return normalized(rows) @ normalized(columns).T


def likeness(pictures, others):
    """Return each picture's mean cosine with the others [N].

    Their mean is the average pairwise cosine: with the subject's photos subject fidelity (section 4.1: DINO with a
    DINO's embeddings, CLIP-I with CLIP's), of class pictures with the photos PRES (section 4.3).
    """
    return cosines(pictures, others).mean(axis=1)


def prompt_fidelity(pictures, texts):
    """Return the cosine of each picture with its own text [N]: CLIP-T (section 4.1); both [N, D], row by row."""
    return (normalized(pictures) * normalized(texts)).sum(axis=1)


def nearest(pictures, photos):
    """Return (number of the nearest photo, cosine with it) of each picture, [N] each."""
    table = cosines(pictures, photos)
    return table.argmax(axis=1), table.max(axis=1)


# ---------------------------------------------------------------------------------------------------------------------
# Means and their intervals


def mean_of(values, seed):
    """Return {"value", "low", "high"}: the mean of one number a picture, and its bootstrap interval."""
    values = np.sort(np.asarray(values, dtype=np.float64))  # the same resamples, whatever the files are called
    picked = np.random.default_rng(seed).integers(len(values), size=(NUM_RESAMPLES, len(values)))
    return _estimate(values.mean(), values[picked].mean(axis=1))


def mean_of_pairs(table, seed):
    """Return {"value", "low", "high"}: the mean over the pairs of different pictures of a symmetric table [N, N].

    Pictures are resampled, not pairs, which are not independent; one drawn twice is not compared with itself.
    """
    order = np.argsort(table.sum(axis=1))
    table = table[order][:, order]
    size = len(table)
    others = 1.0 - np.eye(size)
    counts = np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), size=NUM_RESAMPLES)  # R N
    weights = ((counts @ others) * counts).sum(axis=1)
    sums = ((counts @ (table * others)) * counts).sum(axis=1)
    return _estimate((table * others).sum() / others.sum(), sums[weights > 0] / weights[weights > 0])


def diversity(pictures, seed):
    """Return the mean of 1 - cosine over the pairs of different pictures, with its interval.

    The paper's DIV (section 4.3) is the LPIPS distance between pictures of the subject of one prompt. This one asks
    the same of the class pictures and by the encoder: how different are they as things, not as pixels and textures.
    The two have different scales; compare this one with the base model's alone.
    """
    return mean_of_pairs(1 - cosines(pictures, pictures), seed)


def _estimate(value, resampled):
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {name: round(float(each), DIGITS) for name, each in (("value", value), ("low", low), ("high", high))}


def are_apart(one, other):
    """Return whether the intervals of two estimates do not touch."""
    return one["low"] > other["high"] or other["low"] > one["high"]


# ---------------------------------------------------------------------------------------------------------------------
# All measures


def measure(clip, dino, texts, memorised_above, seed):
    """Return {name of MEASURES: {"tuned": estimate, "base": estimate}}, None for one that needs the DINO that is None.

    clip, dino: embeddings by set: "photos"; "tuned" and "base", pictures of the subject; "class_tuned", "class_base".
    texts: CLIP's of the prompts of "tuned" and of "base", row by row. Subject fidelity also says "photos": the value
    of the photos among themselves. The measures that name no encoder use DINO, or else CLIP.
    """
    subject = clip if dino is None else dino
    measures = {}
    for name, encoded in (("subject_dino", dino), ("subject_clip", clip)):
        measures[name] = encoded and {
            **_of_both(lambda model: mean_of(likeness(encoded[model], encoded["photos"]), seed)),  # noqa: B023
            "photos": {"value": mean_of_pairs(cosines(encoded["photos"], encoded["photos"]), seed)["value"]},
        }
    measures["prompt_clip"] = _of_both(lambda model: mean_of(prompt_fidelity(clip[model], texts), seed))
    classes = {model: subject[f"class_{model}"] for model in ("tuned", "base")}
    measures["prior_photos"] = _of_both(lambda model: mean_of(likeness(classes[model], subject["photos"]), seed))
    measures["prior_base"] = {
        "tuned": mean_of(likeness(classes["tuned"], classes["base"]), seed),
        "base": mean_of_pairs(cosines(classes["base"], classes["base"]), seed),
    }
    measures["diversity"] = _of_both(lambda model: diversity(classes[model], seed))
    measures["memorised"] = _of_both(
        lambda model: mean_of(nearest(subject[model], subject["photos"])[1] > memorised_above, seed)
    )
    return measures


def _of_both(estimate):
    return {model: estimate(model) for model in ("tuned", "base")}
