"""resources.py: the CPUs and GPUs of the actors that load data."""

import pytest

from common import errors
from common.nodes import Nodes
from pretraining.resources import share_with_loaders


def test_loaders_get_half_of_the_cpus_and_the_gpus_that_the_workers_leave():
    assert share_with_loaders(Nodes(({"CPU": 8.0},)), 2, 2, True) == {
        "num_workers": 2,
        "cpus_per_worker": 1.0,
        "gpus_per_worker": 0.0,
    }
    with_gpus = Nodes(({"CPU": 8.0, "GPU": 4.0},))
    assert share_with_loaders(with_gpus, 2, 1, True)["gpus_per_worker"] == 1.0
    assert share_with_loaders(with_gpus, 2, 1, False)["gpus_per_worker"] == 0.0
    assert share_with_loaders(with_gpus, 4, 2, True, gpus_per_worker=0.5)["gpus_per_worker"] == 0.25
    with pytest.raises(errors.BadInput, match="no GPU is left"):
        share_with_loaders(with_gpus, 4, 1, True)
