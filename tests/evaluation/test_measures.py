"""measures.py: each measure against numbers worked by hand, on embeddings of two or three dimensions."""

import math

import numpy as np
import pytest

from evaluation import measures
from evaluation.measures import (
    MEASURES,
    cosines,
    diversity,
    likeness,
    mean_of,
    mean_of_pairs,
    measure,
    nearest,
    prompt_fidelity,
)

HALF = math.sqrt(0.5)
PHOTOS = [[1, 0], [0, 2]]  # at right angles, of any length
PICTURES = [[3, 0], [1, 1], [-1, 0]]


def some_embeddings(count, seed=0, size=5):
    return np.random.default_rng(seed).standard_normal((count, size))


def sets_of(**changed):
    sets = {"photos": some_embeddings(4, 1), "tuned": some_embeddings(6, 2), "base": some_embeddings(6, 3)}
    return {**sets, "class_tuned": some_embeddings(5, 4), "class_base": some_embeddings(7, 5), **changed}


# ---------------------------------------------------------------------------------------------------------------------
# Cosines


def test_cosines_by_hand():
    assert np.allclose(cosines(PICTURES, PHOTOS), [[1, 0], [HALF, HALF], [-1, 0]])


def test_likeness_is_the_mean_cosine_with_all_photos():
    assert np.allclose(likeness(PICTURES, PHOTOS), [0.5, HALF, -0.5])


def test_prompt_fidelity_compares_each_picture_with_its_own_text():
    assert np.allclose(prompt_fidelity(PICTURES, [[1, 0], [0, 1], [0, 1]]), [1, HALF, 0])


def test_the_nearest_photo_of_each_picture():
    numbers, values = nearest([[5, 1], [1, 5], [-1, 0]], PHOTOS)
    assert numbers.tolist() == [0, 1, 1]
    assert np.allclose(values, [5 / math.sqrt(26), 5 / math.sqrt(26), 0])


def test_diversity_by_hand():
    """The pairs: at 45 degrees, opposite, at 135 degrees."""
    assert diversity(PICTURES, 0)["value"] == pytest.approx(((1 - HALF) + 2 + (1 + HALF)) / 3, abs=1e-6)


def test_lengths_do_not_matter():
    assert np.allclose(cosines(np.multiply(PICTURES, 7), PHOTOS), cosines(PICTURES, PHOTOS))


def test_float16_does_not_overflow():
    assert np.allclose(cosines(np.full((2, 4), 6e4, np.float16), np.ones((1, 4), np.float16)), 1)


# ---------------------------------------------------------------------------------------------------------------------
# Identical folders


def test_of_one_picture_copied_all_is_one_and_nothing_is_diverse():
    same = np.tile([[0.3, -2.0, 1.0]], (4, 1))
    assert np.allclose(likeness(same, same), 1)
    assert mean_of(likeness(same, same), 0) == {"value": 1, "low": 1, "high": 1}
    assert diversity(same, 0) == {"value": 0, "low": 0, "high": 0}


def test_pictures_that_are_the_photos_are_memorised():
    numbers, values = nearest(some_embeddings(5), some_embeddings(5))
    assert numbers.tolist() == [0, 1, 2, 3, 4] and np.allclose(values, 1)
    photos = some_embeddings(6, 9)
    found = measure(sets_of(photos=photos, tuned=photos), None, some_embeddings(6), 0.99, 0)
    assert found["memorised"]["tuned"] == {"value": 1, "low": 1, "high": 1}
    assert found["memorised"]["base"]["value"] == 0


# ---------------------------------------------------------------------------------------------------------------------
# Intervals


def test_the_order_of_the_files_does_not_matter():
    order = np.random.default_rng(7).permutation(6)
    texts, sets = some_embeddings(6, 8), sets_of()
    other = {name: rows[np.random.default_rng(7).permutation(len(rows))] for name, rows in sets.items()}
    other |= {name: sets[name][order] for name in ("tuned", "base")}
    assert measure(sets, None, texts, 0.5, 0) == measure(other, None, texts[order], 0.5, 0)


def test_an_interval_covers_the_mean_nineteen_times_in_twenty():
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(300):
        found = mean_of(rng.normal(0.5, 0.1, size=40), 0)
        assert found["low"] < found["value"] < found["high"]
        covered.append(found["low"] <= 0.5 <= found["high"])
    assert 0.90 <= np.mean(covered) <= 0.98


def test_an_interval_of_pairs_covers_the_mean_of_the_population():
    """Of pairs it is the pictures that are drawn: resampled pairs would give intervals that are far too narrow."""
    rng = np.random.default_rng(0)

    def table(count):  # a picture's own share in each of its pairs, so that pairs are not independent
        shares = rng.normal(0.25, 0.1, size=count)
        return shares[:, None] + shares[None, :]

    found = [mean_of_pairs(table(25), 0) for _ in range(200)]
    assert 0.88 <= np.mean([each["low"] <= 0.5 <= each["high"] for each in found]) <= 0.99


def test_more_pictures_give_a_narrower_interval():
    widths = []
    for count in (10, 1000):
        found = mean_of(np.random.default_rng(0).normal(size=count), 0)
        widths.append(found["high"] - found["low"])
    assert widths[1] < widths[0] / 5


def test_intervals_are_seeded():
    values = np.random.default_rng(0).normal(size=12)
    table = cosines(some_embeddings(9), some_embeddings(9))
    assert mean_of(values, 3) == mean_of(values, 3) != mean_of(values, 4)
    assert mean_of_pairs(table, 3) == mean_of_pairs(table, 3) != mean_of_pairs(table, 4)
    assert mean_of(values, 3)["value"] == mean_of(values, 4)["value"]


def test_a_picture_drawn_twice_is_not_compared_with_itself():
    """Three pictures at right angles: whatever is drawn of them, different ones have nothing in common."""
    assert mean_of_pairs(cosines(np.eye(3), np.eye(3)), 0) == {"value": 0, "low": 0, "high": 0}


def test_intervals_are_apart_or_touch():
    low, middle, high = ({"low": at, "high": at + 0.2} for at in (0, 0.1, 0.5))
    assert measures.are_apart(low, high) and measures.are_apart(high, low)
    assert not measures.are_apart(low, middle)


# ---------------------------------------------------------------------------------------------------------------------
# All measures


def test_all_measures_by_hand():
    clip = {
        "photos": PHOTOS,
        "tuned": [[1, 0], [1, 0], [0, 1], [0, 1]],
        "base": [[1, 1], [-1, 1], [1, -1], [-1, -1]],
        "class_tuned": [[1, 1], [1, 1], [-1, -1]],
        "class_base": [[1, 0], [0, 1], [-1, 0]],
    }
    found = measure({name: np.array(rows) for name, rows in clip.items()}, None, np.array([[1, 0]] * 4), 0.9, 0)
    values = {name: (each["tuned"]["value"], each["base"]["value"]) for name, each in found.items() if each}
    assert values == {
        "subject_clip": (0.5, 0),
        "prompt_clip": (0.5, 0),
        "prior_photos": (pytest.approx(HALF / 3, abs=1e-6), pytest.approx(1 / 6, abs=1e-6)),
        "prior_base": (pytest.approx(HALF / 9, abs=1e-6), pytest.approx(-1 / 3, abs=1e-6)),
        "diversity": (pytest.approx(4 / 3, abs=1e-6), pytest.approx(4 / 3, abs=1e-6)),
        "memorised": (1, 0),
    }
    assert found["subject_clip"]["photos"] == {"value": 0}
    assert found["subject_dino"] is None and found.keys() == MEASURES.keys() - {"bleed"}


def test_the_bleed_is_the_likeness_to_the_most_alike_of_the_other_subjects():
    """Of the means 0 and 2/3 of the tuned model, and with it that of the base."""
    sets = {
        "photos": PHOTOS,
        "tuned": [[1, 0], [1, 0], [0, 1]],
        "base": [[-1, 0], [1, 0], [0, -1]],
        "class_tuned": np.eye(3)[:, :2] + 1,
        "class_base": np.eye(3)[:, :2] + 1,
        "photos of a cat": [[0, 1], [0, -1]],
        "photos of a fox": [[1, 0]],
    }
    sets = {name: np.array(rows, float) for name, rows in sets.items()}
    found = measure(sets, None, np.ones((3, 2)), 0.9, 0)
    bleed = found.pop("bleed")
    assert (bleed["tuned"]["value"], bleed["base"]["value"]) == (pytest.approx(2 / 3, abs=1e-6), 0)
    assert bleed["subjects"] == {"a cat": 0, "a fox": bleed["tuned"]["value"]}
    assert bleed["photos"]["value"] == pytest.approx(cosines(sets["photos"], [[1, 0]]).mean(), abs=1e-6)
    alone = {name: rows for name, rows in sets.items() if not name.startswith("photos of")}
    assert measure(alone, None, np.ones((3, 2)), 0.9, 0) == found


def test_with_dino_it_measures_the_subject_and_clip_the_prompts():
    clip, dino, texts = sets_of(), {name: rows[:, :3] for name, rows in sets_of().items()}, some_embeddings(6, 8)
    both, alone, other = measure(clip, dino, texts, 0.5, 0), measure(clip, None, texts, 0.5, 0), None
    other = measure(dino, None, texts[:, :3], 0.5, 0)
    assert both["subject_dino"] == other["subject_clip"]
    for name in ("subject_clip", "prompt_clip"):
        assert both[name] == alone[name]
    for name in ("prior_photos", "prior_base", "diversity", "memorised"):
        assert both[name] == other[name]


def test_a_tuned_model_that_is_the_base_changes_nothing():
    pictures, classes = some_embeddings(6), some_embeddings(5, 1)
    sets = sets_of(tuned=pictures, base=pictures, class_tuned=classes, class_base=classes)
    for name, found in measure(sets, None, some_embeddings(6, 2), 0.5, 0).items():
        if found and name != "prior_base":
            assert found["tuned"] == found["base"]


def test_every_measure_says_how_to_read_it():
    for each in MEASURES.values():
        assert each.better in ("high", "low") and each.title and each.reading.endswith(".")
