"""A local Ray listens on the loopback interface only, a cluster needs a token; how CPUs and GPUs are shared."""

import os
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
import ray
import ray.data

from common import cluster, errors
from common.nodes import Nodes, Share, share_resources


@pytest.fixture
def no_token(monkeypatch, tmp_path):
    """A home without a token, and nothing that names one."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)


@pytest.fixture
def joined(monkeypatch, no_token, listening):
    """The addresses that Ray was asked to join."""
    addresses = []
    monkeypatch.setattr(cluster, "_check_answers", lambda address: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **_: addresses.append(address))

    def nodes():
        return [{"NodeManagerAddress": host, "Alive": True, "Resources": {"CPU": 2.0}} for host in listening]

    monkeypatch.setattr(ray, "nodes", nodes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: mock.Mock(gcs_address="127.0.0.1:6379"))
    monkeypatch.setattr(ray._private.worker, "_global_node", mock.Mock())
    return addresses


@pytest.fixture
def listening():
    """The hosts that a local Ray of `joined` says it listens on."""
    return ["127.0.0.1"]


def test_a_cluster_without_a_token_is_refused(joined):
    for address in ("10.0.0.7:6379", "ray://head:10001", "auto"):
        with pytest.raises(errors.BadInput, match=f"{address} would be joined without a token.* --insecure_cluster"):
            cluster.start_ray(address)
    assert joined == []
    cluster.start_ray("10.0.0.7:6379", insecure_cluster=True)
    cluster.start_ray("127.0.0.1:6379")
    assert joined == ["10.0.0.7:6379", "127.0.0.1:6379"]


def test_a_ray_that_does_not_start_in_time_is_to_be_tried_again(joined, monkeypatch):
    def init(**options):
        raise Exception("The current node timed out during startup. This could happen because some of the raylet ...")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(errors.TryAgain, match="Ray did not start in time"):
        cluster.start_ray()


def test_a_token_opens_a_cluster_unless_ray_is_told_to_show_none(joined, monkeypatch, tmp_path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    cluster.start_ray()
    assert joined == ["10.0.0.7:6379"]
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(errors.BadInput, match="without a token"):
        cluster.start_ray()
    monkeypatch.setenv("RAY_AUTH_MODE", "TOKEN")
    cluster.start_ray()
    assert len(joined) == 2


def test_an_older_ray_is_refused(joined, monkeypatch):
    monkeypatch.setattr(ray, "__version__", "2.59.1")
    with pytest.raises(errors.BadInput, match=r"Ray 2\.59\.1 is installed, 2\.60 or newer"):
        cluster.start_ray()
    monkeypatch.setattr(ray, "__version__", "3.0.0.dev0")
    cluster.start_ray()


@pytest.mark.ray
def test_a_local_ray_listens_on_this_host_alone(ray_session):
    assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}
    assert ray.get_runtime_context().gcs_address.startswith("127.0.0.1:")
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_a_local_ray_that_other_hosts_reach_is_ended_and_refused(joined, listening, monkeypatch):
    cluster.start_ray("local")
    ended = []
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    listening.append("10.0.0.5")
    with pytest.raises(errors.BadInput, match=r"Ray listens on 10\.0\.0\.5.*requirements\.txt"):
        cluster.start_ray("local")
    assert ended == [True]


@pytest.mark.parametrize("node", [None, object(), mock.Mock(kill_log_monitor=mock.Mock(side_effect=TypeError))])
def test_a_ray_without_its_private_calls_works(joined, monkeypatch, node):
    """Another minor version may not have them."""
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    cluster.start_ray("local")
    monkeypatch.delattr(ray._private.worker, "_global_node")
    cluster.start_ray("local")


@pytest.mark.ray
def test_a_local_ray_has_no_process_that_hands_on_what_workers_print(ray_session):
    names = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert any("raylet" in name for name in names)
    assert not any("log_monitor" in name for name in names)


@pytest.mark.ray
def test_what_ray_data_leaves_behind_is_ended_and_comes_back_when_needed(ray_session):
    for _ in range(2):
        assert ray.data.range(3).map(lambda row: {"double": 2 * row["id"]}).sum("double") == 6
        assert ray.util.list_named_actors(all_namespaces=True)
        cluster.end_idle_actors("10.0.0.1:6379")  # a cluster's are its own
        assert ray.util.list_named_actors(all_namespaces=True)
        cluster.end_idle_actors()
        deadline = time.monotonic() + 30
        while ray.util.list_named_actors(all_namespaces=True):
            assert time.monotonic() < deadline
            time.sleep(0.1)


# ---------------------------------------------------------------------------------------------------------------------
# Shares of a cluster


@pytest.mark.parametrize(
    ("resources", "num_workers", "flags", "share"),
    [
        ({"CPU": 8.0}, 1, {}, (8, 0)),
        ({"CPU": 8.0}, 3, {}, (2, 0)),
        ({"CPU": 2.0}, 2, {}, (1, 0)),
        ({"CPU": 2.0}, 3, {}, (0.66, 0)),
        ({"CPU": 8.0, "GPU": 2.0}, 2, {}, (4, 1)),
        ({"CPU": 8.0, "GPU": 1.0}, 2, {"gpus_per_worker": 0.5}, (4, 0.5)),
        ({"CPU": 8.0}, 2, {"cpus_per_worker": 1.5}, (1.5, 0)),
        ({"CPU": 8.0}, 8, {"cpus_per_worker": 1.0}, (1, 0)),
        ({}, 1, {}, (1, 0)),
    ],
)
def test_workers_share_the_cluster_evenly(resources, num_workers, flags, share):
    assert share_resources(Nodes((resources,)), num_workers, **flags) == Share(*share)


@pytest.mark.parametrize("cpus", [1.0, 2.0, 4.0, 16.0])
def test_an_even_share_always_fits(cpus):
    for num_workers in range(1, 64):
        share = share_resources(Nodes(({"CPU": cpus},)), num_workers).cpus
        assert 0 < share * num_workers <= cpus
        assert share >= 0.5 * cpus / num_workers


@pytest.mark.parametrize(("cpus", "num_workers", "flags"), [(7.0, 25, {}), (3.3, 3, {"cpus_per_worker": 1.1})])
def test_a_share_that_fits_exactly_is_not_refused_for_rounding(cpus, num_workers, flags):
    share_resources(Nodes(({"CPU": cpus},)), num_workers, **flags)


@pytest.mark.parametrize(
    ("resources", "num_workers", "flags", "said"),
    [
        ({"CPU": 8.0, "GPU": 1.0}, 2, {}, "2 of 1 GPUs each need 2, the cluster has 1"),
        ({"CPU": 8.0}, 1, {"gpus_per_worker": 1.0}, "1 of 1 GPUs each need 1, the cluster has 0"),
        ({"CPU": 4.0}, 3, {"cpus_per_worker": 2.0}, "3 of 2 CPUs each need 6, the cluster has 4"),
        ({"CPU": 4.0, "GPU": 1.0}, 3, {"gpus_per_worker": 0.5}, "3 of 0.5 GPUs each need 1.5, the cluster has 1"),
    ],
)
def test_what_the_cluster_can_never_hold_is_refused(resources, num_workers, flags, said):
    with pytest.raises(errors.BadInput, match=f"--num_workers {said}"):
        share_resources(Nodes((resources,)), num_workers, **flags)
