"""A worker's share of the nodes of a cluster, and what is said while a run waits for them."""

import pytest
import ray

from common import errors, nodes
from common.nodes import Nodes, Share, Waiting, default_workers, describe_free, say_what_lacks, share_resources

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
    assert share_resources(cluster, 1, **flags) == Share(*share)


def test_cpus_are_not_taken_in_silence_where_gpus_may_come():
    with pytest.raises(errors.BadInput, match=r"host:6379 has no GPU now: pass --gpus_per_worker 0.*--num_workers"):
        share_resources(CPUS, 1)
    with pytest.raises(errors.BadInput, match="has no GPU now: pass --num_workers"):
        default_workers(CPUS, 1, 1.0)
    assert default_workers(GPUS, 1) == 2
    assert default_workers(GPUS, 3, 0) == 3


@pytest.mark.parametrize(
    ("num_workers", "flags", "said"),
    [
        (8, {"gpus_per_worker": 1.0}, "8 workers of 1 CPU and 1 GPU are asked for, and the cluster's 2 nodes hold 2"),
        (2, {"gpus_per_worker": 4.0}, "2 workers of 1 CPU and 4 GPUs are asked for, and the cluster's 2 nodes hold 0"),
        (3, {"cpus_per_worker": 8.0, "gpus_per_worker": 0.0}, "3 workers of 8 CPUs are asked for"),
    ],
)
def test_a_cluster_that_may_grow_is_asked_for_more_than_it_has(num_workers, flags, said, capsys):
    say_what_lacks(GPUS, num_workers, share_resources(GPUS, num_workers, **flags))
    assert capsys.readouterr().err.startswith(f"warning: {said}")


@pytest.fixture
def clock(monkeypatch):
    """A clock, as a list of one number, and a cluster of one A10G of which the test says what is free."""
    now, free, groups = [100.0], {"CPU": 1.0}, {}
    monkeypatch.setattr(nodes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray, "available_resources", lambda: free)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": A10G}, {"Alive": False}])
    monkeypatch.setattr(ray.util, "placement_group_table", lambda: groups)
    return now, free, groups


def test_what_is_waited_for_is_said_after_ten_seconds_and_each_minute(clock, capsys):
    now, _, _ = clock
    waiting = Waiting(2, Share(1.0, 1.0))
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
    waiting = Waiting(2, Share(1.0, 0.0))
    groups["id"] = {"bundles": {0: {"CPU": 1.0}, 1: {"CPU": 1.0}}, "state": "CREATED"}
    now[0] += 30
    free["CPU"] = 0.0  # they have it
    waiting.look(None)
    assert capsys.readouterr().err == ""
    groups["id"]["state"] = "PENDING"
    waiting.look(None)
    assert "waiting for 2 workers of 1 CPU:" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Types of GPUs

A10G = {"CPU": 8.0, "GPU": 1.0, "accelerator_type:A10G": 1.0}
A100 = {"CPU": 64.0, "GPU": 8.0, "accelerator_type:A100": 1.0}
HEAD = {"CPU": 4.0, "accelerator_type:L4": 1.0}  # its GPU is not for workers
MIXED = Nodes((HEAD, A10G, A10G, A100), is_local=False, address="host:6379")


def test_gpus_of_another_type_do_not_count():
    assert MIXED.gpus() == 10 and MIXED.gpus("A10G") == 2 and MIXED.gpus("L4") == 0
    assert MIXED.accelerator_types == ["A100", "A10G"]
    for kind, count in (("A10G", 2), ("A100", 8), (None, 10)):
        share = share_resources(MIXED, 1, accelerator_type=kind)
        assert share == Share(1.0, 1.0, kind) and MIXED.room(share) == count
        assert default_workers(MIXED, 1, accelerator_type=kind) == count
    assert MIXED.room(Share(16.0, 1.0, "A10G")) == 0 and MIXED.room(Share(16.0, 1.0, "A100")) == 4


def test_a_type_that_no_node_has_is_refused_with_those_that_nodes_have():
    said = (
        r"--accelerator_type A10: the Ray cluster at host:6379 has GPUs of the types A100, A10G now: pass one of these "
        r"types, or --gpus_per_worker 1 and --num_workers to wait for nodes of this type"
    )
    for ask in (
        lambda: share_resources(MIXED, 4, accelerator_type="A10"),
        lambda: default_workers(MIXED, 1, None, "A10"),
    ):
        with pytest.raises(errors.BadInput, match=said):
            ask()
    with pytest.raises(errors.BadInput, match="host:6379 has no GPU of the type A10 now: pass --num_workers"):
        default_workers(MIXED, 1, 1.0, "A10")
    with pytest.raises(
        errors.BadInput, match="--accelerator_type A100: this machine has GPUs of the type A10G now: pass"
    ):
        share_resources(Nodes((A10G,)), 1, gpus_per_worker=1.0, accelerator_type="A100")
    with pytest.raises(errors.BadInput, match="this machine has no GPU now: leave out --accelerator_type"):
        share_resources(Nodes(({"CPU": 2.0},)), 1, accelerator_type="A100")
    with pytest.raises(errors.BadInput, match="--num_workers 2 of 1 GPUs each need 2, the cluster has 1"):
        share_resources(Nodes((A10G,)), 2, accelerator_type="A10G")


def test_nodes_of_a_type_that_may_join_are_waited_for(clock, capsys):
    share = share_resources(MIXED, 2, gpus_per_worker=1.0, accelerator_type="L4")
    assert share == Share(1.0, 1.0, "L4")
    say_what_lacks(MIXED, 2, share)
    assert capsys.readouterr().err == (
        "warning: 2 workers of 1 CPU and 1 GPU of the type L4 are asked for, and the cluster's 4 nodes, with GPUs of "
        "the types A100, A10G, hold 0 of them: the others wait for more nodes\n"
    )
    now, free, _ = clock
    free["GPU"] = 1.0  # of another type
    waiting = Waiting(1, share)
    now[0] += 30
    assert waiting.look(None) == 30
    text = "the cluster has 1 CPUs and 1 GPUs free, on 1 nodes, 0 of them with GPUs of this type"
    assert capsys.readouterr().err == f"waiting for 1 worker of 1 CPU and 1 GPU of the type L4: {text}\n"
    assert describe_free("A10G").endswith("1 of them with GPUs of this type")


def test_actors_are_not_taken_for_a_group_that_asks_for_as_much(clock, capsys):
    """Ray Train's only worker may ask for the same."""
    now, free, groups = clock
    groups["id"] = {"bundles": {0: {"CPU": 1.0}}, "state": "CREATED"}
    free["CPU"] = 0.0
    waiting = Waiting(1, Share(1.0, 0.0), is_group=False)
    now[0] += 30
    waiting.look(None)
    assert "waiting for 1 worker of 1 CPU:" in capsys.readouterr().err


@pytest.mark.parametrize(("free_gpus", "is_said"), [(9.0, False), (8.0, True), (0.0, True)])
def test_free_gpus_of_another_type_are_not_what_is_waited_for(clock, monkeypatch, capsys, free_gpus, is_said):
    now, free, _ = clock
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": node} for node in (A10G, A100)])
    free |= {"GPU": free_gpus, "accelerator_type:A10G": 0.999}
    waiting = Waiting(1, Share(1.0, 1.0, "A10G"), is_group=False)
    now[0] += 30
    waiting.look(None)
    assert ("1 GPU of the type A10G" in capsys.readouterr().err) == is_said
