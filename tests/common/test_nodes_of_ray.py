"""A worker's share of the nodes of a cluster, and what is said while a run waits for them."""

import pytest
import ray

from common import errors, nodes
from common.nodes import Nodes, Waiting, default_workers, share_resources

CPUS = Nodes(({"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 2.0}), is_local=False, address="host:6379")
GPUS = Nodes(({"CPU": 4.0}, {"CPU": 8.0, "GPU": 2.0}), is_local=False, address="host:6379")


@pytest.mark.parametrize(
    ("cluster", "flags", "share"),
    [
        (CPUS, {"gpus_per_worker": 0.0}, (1, 0)),  # not 6 CPUs, which no node has
        (CPUS, {"gpus_per_worker": 0.0, "cpus_per_worker": 2.0}, (2, 0)),
        (CPUS, {"gpus_per_worker": 1.0}, (1, 1)),  # nodes with GPUs may join
        (GPUS, {}, (1, 1)),
        (GPUS, {"gpus_per_worker": 0.0}, (1, 0)),
    ],
)
def test_a_share_is_of_a_node(cluster, flags, share):
    assert share_resources(cluster, 1, **flags) == share


def test_cpus_are_not_taken_in_silence_where_gpus_may_come():
    with pytest.raises(errors.BadInput, match=r"host:6379 has no GPU now: pass --gpus_per_worker 0.*--num_workers"):
        share_resources(CPUS, 1)
    with pytest.raises(errors.BadInput, match="has no GPU now: pass --num_workers"):
        default_workers(CPUS, 1.0, without_gpus=1)
    assert default_workers(GPUS, None, without_gpus=1) == 2
    assert default_workers(GPUS, 0, without_gpus=3) == 3


@pytest.fixture
def clock(monkeypatch):
    """A clock, as a list of one number, and a cluster of which the test says what is free."""
    now, free, groups = [100.0], {"CPU": 1.0}, {}
    monkeypatch.setattr(nodes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray, "available_resources", lambda: free)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": False}])
    monkeypatch.setattr(ray.util, "placement_group_table", lambda: groups)
    return now, free, groups


def test_what_is_waited_for_is_said_after_ten_seconds_and_each_minute(clock, capsys):
    now, _, _ = clock
    waiting = Waiting(2, 1.0, 1.0)
    for second in range(75):
        now[0] = 100.0 + second
        assert waiting.look(None) == second
    said = capsys.readouterr().err.splitlines()
    assert said == ["waiting for 2 workers of 1 CPU and 1 GPU: the cluster has 1 CPUs and 0 GPUs free, on 1 nodes"] * 2
    assert waiting.look(0.5) == 0.5
    now[0] += 20
    waiting.look(11.0)  # a node was lost: the next wait is said at once
    assert "waiting for 2 workers" in capsys.readouterr().err


def test_workers_that_have_room_are_not_waited_for(clock, capsys):
    now, free, groups = clock
    waiting = Waiting(2, 1.0, 0.0)
    groups["id"] = {"bundles": {0: {"CPU": 1.0}, 1: {"CPU": 1.0}}, "state": "CREATED"}
    now[0] += 30
    free["CPU"] = 0.0  # they have it
    waiting.look(None)
    assert capsys.readouterr().err == ""
    groups["id"]["state"] = "PENDING"
    waiting.look(None)
    assert "waiting for 2 workers of 1 CPU:" in capsys.readouterr().err
