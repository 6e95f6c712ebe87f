"""The length of a run, and the checks of its batch."""

import pytest

from common import errors
from training import driver


def test_steps_of_pairs():
    assert driver.steps_of(800, 1) == 800
    assert driver.steps_of(800, 8) == 100
    assert driver.steps_of(10, 4) == 3  # the third takes two more


def test_check_batch():
    driver.check_batch(4, 4, "--class_images_dir x")
    with pytest.raises(errors.BadInput, match="holds 3 images, a step takes 4"):
        driver.check_batch(3, 4, "--class_images_dir x")
