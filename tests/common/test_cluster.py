"""A local Ray listens on this host alone, a cluster asks for a token; how Ray is shared, and work on its actors."""

import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import psutil
import pytest
import ray
import ray.data

from common import actors, cluster, errors, messages
from pretraining import resources


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
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **_: addresses.append(address))
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeManagerAddress": host} for host in listening])
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


def test_those_who_read_get_half_of_the_cpus_and_the_gpus_that_are_left():
    share = resources.share_with_loaders
    assert share({"CPU": 8.0}, 2, 2, True) == {"num_workers": 2, "cpus_per_worker": 1.0, "gpus_per_worker": 0.0}
    with_gpus = {"CPU": 8.0, "GPU": 4.0}
    assert share(with_gpus, 2, 1, True)["gpus_per_worker"] == 1.0
    assert share(with_gpus, 2, 1, False)["gpus_per_worker"] == 0.0
    assert share(with_gpus, 4, 2, True, gpus_per_worker=0.5)["gpus_per_worker"] == 0.25
    with pytest.raises(errors.BadInput, match="no GPU is left"):
        share(with_gpus, 4, 1, True)


class Doubler:
    made = 0

    def __init__(self, offset):
        Doubler.made += 1
        self.offset = offset

    def __call__(self, item):
        return {"double": 2 * item["number"] + self.offset}


def test_without_workers_items_are_done_here_in_order_by_one_worker():
    Doubler.made = 0
    results = actors.map_on_actors(Doubler, {"offset": 1}, [{"number": i} for i in range(3)], num_workers=0)
    assert [result["double"] for result in results] == [1, 3, 5]
    assert Doubler.made == 1


def test_too_large_a_pool_is_bad_input(monkeypatch):
    monkeypatch.setattr(actors, "start_ray", lambda *_: {"CPU": 2.0})
    items = [{"number": i} for i in range(9)]
    with pytest.raises(errors.BadInput, match="--num_workers 3 of 1 CPUs"):
        next(actors.map_on_actors(Doubler, {"offset": 1}, items, num_workers=3, cpus_per_worker=1))
    with pytest.raises(errors.BadInput, match="--num_workers 1 of 1 GPUs"):
        next(actors.map_on_actors(Doubler, {"offset": 1}, items, num_workers=(1, 1), gpus_per_worker=1))


EMPTY_ROW = {"bytes": pickle.dumps(({}, []))}


class Full:
    """A worker whose disk or memory is full."""

    def __init__(self, kind):
        self.kind = kind

    def __call__(self, item):
        raise MemoryError if self.kind == "memory" else OSError(28, "No space left on device", "/out/x.png")


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_an_actor_that_is_out_of_a_resource_says_so(kind):
    result = actors._Actor(Full, {"kind": kind})(EMPTY_ROW)["bytes"]
    assert errors.describe_error(pickle.loads(result)[0])[0] == errors.OutOfResource.exit_code
    assert isinstance(pickle.loads(result)[0], errors.OutOfMemory) == (kind == "memory")


@pytest.mark.ray
def test_what_an_actor_says_is_said_once_by_the_driver(ray_session, capsys):
    """Nobody sees the stderr of an actor."""

    class Talker:
        """A worker that says something when it is made, and with each item."""

        def __init__(self, num_threads):
            messages.say("this GPU is old")

        def __call__(self, item):
            messages.say(f"item {item['number']}")
            return item

    options = {"num_workers": 2, "cpus_per_worker": 0.5}
    results = list(actors.map_on_actors(Talker, {}, [{"number": i % 2} for i in range(6)], **options))
    assert len(results) == 6
    said = [line for line in capsys.readouterr().err.splitlines() if "raylet" not in line]
    assert sorted(said) == ["item 0", "item 1", "this GPU is old"]


@pytest.mark.ray
@pytest.mark.parametrize("when", ["made", "called"])
def test_an_actor_that_dies_each_time_is_given_up(ray_session, tmp_path, when):
    """Ray Data alone would start it again for ever."""

    class Mortal:
        def __init__(self, num_threads):
            (tmp_path / f"{time.monotonic_ns()}.born").touch()
            self.die("made")

        def die(self, moment):
            if moment == when:
                os.kill(os.getpid(), signal.SIGKILL)

        def __call__(self, item):
            self.die("called")
            return {}

    with pytest.raises(ray.exceptions.ActorDiedError) as caught:
        list(actors.map_on_actors(Mortal, {}, [{}, {}], 1, max_failures=1))
    code, message = errors.describe_error(caught.value)
    assert code == 4 and "a worker process died; usually the system killed it because memory ran out" in message
    assert len(list(tmp_path.glob("*.born"))) == 2


@pytest.mark.ray
def test_an_actor_that_dies_once_is_started_again_and_says_so(ray_session, tmp_path, capfd):
    class Mortal:
        def __init__(self, num_threads):
            pass

        def __call__(self, item):
            if not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return item

    results = list(actors.map_on_actors(Mortal, {}, [{"number": i} for i in range(3)], 1))
    assert sorted(result["number"] for result in results) == [0, 1, 2]
    assert capfd.readouterr().err.count("warning: a worker process died and was restarted") == 1


@pytest.mark.ray
def test_an_error_of_ours_in_an_actor_is_told_as_it_is(ray_session, capfd):
    class Faulty:
        def __init__(self, num_threads):
            raise KeyError("scaling_factor")

    with pytest.raises(errors.ToolError) as caught:
        list(actors.map_on_actors(Faulty, {}, [{}], 1))
    assert errors.describe_error(caught.value) == (1, "KeyError: 'scaling_factor' (--debug shows the traceback)")
    assert "in __init__" in caught.value.__notes__[0] and capfd.readouterr().out == ""


class Whereabouts:
    """A worker that tells in which thread it was made and is called."""

    def __init__(self):
        self.made_in = threading.get_ident()

    def __call__(self, item):
        return {"made_in": self.made_in, "called_in": threading.get_ident()}


def test_an_actor_computes_in_one_thread_wherever_it_is_called():
    """Two threads that compute would each have a team of OpenMP's, and together be slower than one core."""
    actor = actors._Actor(Whereabouts, {})
    with ThreadPoolExecutor(1) as other:
        results = [actor(EMPTY_ROW), other.submit(actor, EMPTY_ROW).result()]
    seen = [pickle.loads(result["bytes"])[0] for result in results]
    assert len({each[name] for each in seen for name in each}) == 1
