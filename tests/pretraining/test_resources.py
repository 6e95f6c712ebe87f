"""resources.py: the CPUs and GPUs of the actors that load data."""

import pytest

from common import errors
from common.nodes import Nodes
from pretraining.resources import share_with_loaders

A10G = {"CPU": 8.0, "GPU": 1.0, "accelerator_type:A10G": 1.0}
A100 = {"CPU": 64.0, "GPU": 8.0, "accelerator_type:A100": 1.0}


def test_loaders_get_half_of_the_cpus_and_the_gpus_that_the_workers_leave():
    assert share_with_loaders(Nodes(({"CPU": 8.0},)), 2, 2, True) == {"cpus_per_worker": 1.0, "gpus_per_worker": 0.0}
    with_gpus = Nodes(({"CPU": 8.0, "GPU": 4.0},))
    assert share_with_loaders(with_gpus, 2, 1, True)["gpus_per_worker"] == 1.0
    assert share_with_loaders(with_gpus, 2, 1, False)["gpus_per_worker"] == 0.0
    assert share_with_loaders(with_gpus, 4, 2, True, gpus_per_worker=0.5)["gpus_per_worker"] == 0.25
    with pytest.raises(errors.BadInput, match="no GPU is left"):
        share_with_loaders(with_gpus, 4, 1, True)


def test_the_shares_of_the_loaders_fit_on_whole_gpus():
    """Three actors that ask for two thirds of a GPU each do not fit on two GPUs."""
    nodes = Nodes((A10G, A10G, A100), is_local=False)
    assert share_with_loaders(nodes, 3, 1, True, 1.0, "A100", "A10G")["gpus_per_worker"] == 0.5


def test_loaders_encode_on_gpus_of_their_own_type():
    nodes = Nodes((A10G, A10G, A100), is_local=False, address="host:1")
    share = share_with_loaders(nodes, 2, 1, True, None, "A100", "A10G")
    assert share == {"cpus_per_worker": 1.0, "gpus_per_worker": 1.0, "accelerator_type": "A10G"}
    assert share_with_loaders(nodes, 8, 1, True, None, "A100", "A10G")["gpus_per_worker"] == 0.25
    assert share_with_loaders(nodes, 2, 1, True, None, "A100")["accelerator_type"] == "A100"
    with pytest.raises(errors.BadInput, match="no GPU is left"):  # the A10Gs are not for them
        share_with_loaders(nodes, 8, 1, True, None, "A100")
    said = "--data_loading_accelerator_type L4: the Ray cluster at host:1 has GPUs of the types A100, A10G now"
    with pytest.raises(errors.BadInput, match=said):
        share_with_loaders(nodes, 2, 1, True, None, "A100", "L4")
    waits = share_with_loaders(nodes, 2, 1, True, 1.0, "A100", "L4")
    assert waits == {"cpus_per_worker": 1.0, "gpus_per_worker": 1.0, "accelerator_type": "L4"}


def test_a_cluster_that_may_grow_is_asked_for_gpus_to_encode_on(capsys):
    """Its eight GPUs are those of the workers."""
    nodes = Nodes((A100,), is_local=False, address="host:1")
    with pytest.raises(errors.BadInput, match=r"no GPU is left to encode on.*or pass --gpus_per_worker to wait"):
        share_with_loaders(nodes, 8, 2, True)
    for num_workers, gpus in ((8, 1.0), (16, None)):  # sixteen workers wait for nodes too
        assert share_with_loaders(nodes, num_workers, 2, True, gpus)["gpus_per_worker"] == 0.5
    assert "warning: the cluster has no GPU for 16 workers of 0.5 CPU and 0.5 GPU" in capsys.readouterr().err
    with pytest.raises(errors.BadInput, match="no GPU is left"):
        share_with_loaders(Nodes((A100,)), 8, 2, True, gpus_per_worker=1.0)
