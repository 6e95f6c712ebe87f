"""Subjects in turn, with photos that come again."""

import pytest

from dataset import Pairs, list_variants
from training.subjects import mix


def test_subjects_come_in_turn_and_as_often():
    assert mix(["abc", "x"]) == ["a", "x", "b", "x", "c", "x"]
    assert mix(["abc"]) == ["a", "b", "c"] and mix([]) == []


@pytest.mark.parametrize(("sizes", "num_class"), [((3, 1), 8), ((5, 2, 4), 12), ((4, 1), 0), ((2, 2), 3)])
def test_pair_j_is_of_subject_j_mod_s(sizes, num_class):
    photos = mix([[(subject, photo) for photo in range(size)] for subject, size in enumerate(sizes)])
    others = mix([[(subject, each) for each in range(num_class)] for subject in range(len(sizes)) if num_class])
    pairs = Pairs(len(photos), len(others), 16, seed=1)
    assert pairs.pairs_per_epoch == len(sizes) * max(*sizes, num_class)
    shown = {subject: [] for subject in range(len(sizes))}
    for position in range(pairs.pairs_per_epoch):
        instance, other = pairs.rows(position)
        subject, photo = photos[pairs.image_of(instance)]
        shown[subject].append(photo)
        assert other is None or others[pairs.image_of(other) - len(photos)][0] == subject
    assert {len(found) for found in shown.values()} == {max(*sizes, num_class)}
    for subject, size in enumerate(sizes):
        assert set(shown[subject]) == set(range(size))


def test_a_photo_that_comes_again_has_its_next_variants():
    """Photo `x` comes three times as often as the others, and never has more crops than --max_variants allows."""
    photos = mix(["abc", "x"])
    rows = list_variants(photos, Pairs(len(photos), 0, 4, seed=1))
    of_x = [(image, variant) for path, image, variant in rows if path == "x"]
    assert of_x == [(1, v) for first in (0, 1, 2) for v in (first, (first + 3) % 4, (first + 6) % 4, (first + 9) % 4)]
    assert [row[1:] for row in rows if row[0] == "b"] == [(2, 0), (2, 1), (2, 2), (2, 3)]


def test_photos_of_one_subject_are_numbered_as_they_are_listed():
    pairs = Pairs(3, 8, 16, seed=1)
    assert list_variants(["a", "b", "c"], pairs) == [(p, i, v) for i, p in enumerate("abc") for v in range(3)]
