"""Work on a pool of Ray Data actors: order, messages, errors and deaths of actors."""

import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from common import actors, errors, messages, nodes
from common.nodes import Nodes


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
    monkeypatch.setattr(actors, "start_ray", lambda *_: Nodes(({"CPU": 2.0},)))
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
def test_more_items_than_blocks_keep_their_order(ray_session, monkeypatch):
    monkeypatch.setattr(actors, "MOST_BLOCKS", 2)
    options = {"prepare": lambda item: [item, -item], "ordered": True}
    assert list(actors.map_on_actors(None, {}, list(range(5)), 1, **options)) == [0, 0, 1, -1, 2, -2, 3, -3, 4, -4]


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

    with pytest.raises(errors.WorkerDied) as caught:
        list(actors.map_on_actors(Mortal, {}, [{}, {}], 1, max_failures=1))
    code, message = errors.describe_error(caught.value)
    assert code == 4 and "a worker process died 2 times without a result in between; usually" in message
    assert len(list(tmp_path.glob("*.born"))) == 2


@pytest.mark.ray
def test_an_actor_may_die_more_often_if_it_has_results_in_between(ray_session, tmp_path):
    class Mortal:
        """A worker that dies of each third item, once."""

        def __init__(self, num_threads):
            pass

        def __call__(self, item):
            cause = tmp_path / f"{item['number']}.died"
            if item["number"] % 3 == 2 and not cause.exists():
                cause.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return item

    results = list(actors.map_on_actors(Mortal, {}, [{"number": i} for i in range(12)], 1, max_failures=1))
    assert sorted(result["number"] for result in results) == list(range(12))
    assert len(list(tmp_path.glob("*.died"))) == 4


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


# ---------------------------------------------------------------------------------------------------------------------
# Waiting for room


@pytest.fixture
def watch(monkeypatch):
    """Return a function that yields rows as _watch does on a cluster where no actor is alive for 0.2 seconds."""
    monkeypatch.setattr(actors, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(nodes, "SAY_AFTER", 99)
    waiting = nodes.Waiting(1, nodes.Share(1.0, 1.0, "A10G"), is_group=False)
    board = SimpleNamespace(news=lambda: ([], None, None))
    return lambda rows: list(actors._watch(rows, board, waiting, 0.2))


def test_a_loader_in_a_thread_waits_for_room_and_gives_up(watch):
    """Only the main thread can be interrupted, and training workers load their data in another one."""
    never = threading.Event()

    def rows():
        yield 1
        never.wait(20)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(watch, [1, 2, 3]).result() == [1, 2, 3]
        with pytest.raises(
            errors.TryAgain, match=r"no room for 1 worker of 1 CPU and 1 GPU of the type A10G for 0\.2 s"
        ):
            pool.submit(watch, rows()).result()
    with pytest.raises(errors.TryAgain, match="no room for 1 worker"):
        watch(rows())
    never.set()
