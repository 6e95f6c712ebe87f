"""Locks in an object store: two runs exclude each other, and one that lost its lock writes nothing."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT

from common import errors, leases, stores, targets
from common.stores import LARGE, Store


@pytest.fixture
def uri(faulty_s3):
    return faulty_s3.uri("out")


@contextlib.contextmanager
def process(code, *arguments):
    """Run Python code in a process of its own; give it when it has printed its first line."""
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.communicate()


HOLD = """
import sys, time
from common.leases import lease
with lease(sys.argv[1], float(sys.argv[2])) as held:
    print(held.owner, flush=True)
    time.sleep(60)
"""
WRITE = """
import sys, time
from common.errors import TryAgain
from common.leases import lease
with lease(sys.argv[1], float(sys.argv[2])) as held:
    fence = held.writer(sys.argv[1])
    for step in range(100_000):
        fence.write("log.jsonl", b"line of the first run\\n" * step)
        fence.write(f"step-{step}", b"first")
        if step > 3:
            fence.delete(f"step-{step - 3}")
        if step == 5:
            print("writing", flush=True)
"""


def versions(uri):
    return {name: (found.tag, found.modified) for name, found in Store(uri).list().items()}


@contextlib.contextmanager
def take(uri, seconds, within):
    """Hold the lock as soon as it can be taken."""
    end = time.monotonic() + within
    with contextlib.ExitStack() as stack:
        while True:
            try:
                held = stack.enter_context(leases.lease(uri, seconds))
                break
            except errors.TryAgain:
                assert time.monotonic() < end, f"not free within {within} s"
                time.sleep(0.1)
        yield held


# ---------------------------------------------------------------------------------------------------------------------
# Locks


def test_two_runs_exclude_each_other(uri):
    with leases.lease(uri) as held:
        held.check()
        held.confirm()
        leases.borrow(uri, held.owner).check()
        record = json.loads(Store(uri).read(".lock"))
        assert record["owner"] == held.owner and record["token"] == held.token == 1 and record["seconds"] == 60
        assert f"process {os.getpid()} on " in held.owner
        match = rf"out.* is in use by {held.owner}: wait .* at most 60 s"
        with pytest.raises(errors.TryAgain, match=match), leases.lease(uri):
            pass
        with leases.lease(uri.replace("/out", "/other")):
            pass
    with leases.lease(uri) as other:
        assert other.token == 2
        with pytest.raises(errors.TryAgain, match="now belongs to another run"):
            leases.borrow(uri, held.owner).check()
    with pytest.raises(errors.TryAgain, match="now belongs to another run"):
        leases.borrow(uri, other.owner).check()


def test_checks_of_a_held_lock_share_one_store(uri, monkeypatch):
    opened = []
    with targets.lock(uri) as held:
        monkeypatch.setattr(leases, "Store", lambda uri: opened.append(uri) or Store(uri))
        for _ in range(3):
            targets.Held(held.location, held.owner).check()
    assert opened == [uri]
    with pytest.raises(errors.TryAgain, match="now belongs to another run"):
        held.check()


def test_of_many_runs_that_come_together_one_holds_the_lock(uri):
    """Each of them finds the lock free, and again when the first has left."""
    for token in (1, 2):
        start, held, sent_away, done = threading.Barrier(6), [], [], threading.Event()

        def run(start=start, held=held, sent_away=sent_away, done=done):
            start.wait()
            try:
                with leases.lease(uri) as lease:
                    held.append(lease.token)
                    done.wait(20)
            except errors.TryAgain:
                sent_away.append(1)
            if len(sent_away) == 5:
                done.set()

        threads = [threading.Thread(target=run) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert held == [token] and len(sent_away) == 5


def test_a_lease_is_renewed_while_its_run_works(uri):
    tags = set()
    with leases.lease(uri, seconds=2) as held:
        for _ in range(6):
            time.sleep(0.5)
            held.check()
            tags.add(held.tag["e_tag"])
            with pytest.raises(errors.TryAgain, match="in use"), leases.lease(uri, seconds=2):
                pass
        held.confirm()
    assert len(tags) > 2, "equal tags would let a stale renewal pass"


def test_a_lease_survives_faults_of_the_store(faulty_s3, monkeypatch):
    """Also a renewal that arrives but whose answer and repetition are lost."""
    monkeypatch.setattr(stores, "RETRY_SECONDS", 0)
    with contextlib.ExitStack() as stack:
        held = {}
        for kind in ("503", "lose_response", "reset_request"):
            held[kind] = stack.enter_context(leases.lease(faulty_s3.uri(kind), seconds=4))
            faulty_s3.fault(kind, method="PUT", path=f"{kind}/.lock", times=2)
        time.sleep(3.5)
        assert not any(fault.times for fault in faulty_s3.faults), "the faults were met"
        for kind, lease in held.items():
            lease.check()
            lease.confirm()
            lease.writer(faulty_s3.uri(kind)).write("a", b"1")
    for kind in held:
        assert json.loads(Store(faulty_s3.uri(kind)).read(".lock"))["owner"] == ""


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_lease_goes_on_after_its_store_was_away_unless_another_run_has_taken_it(
    is_taken, uri, faulty_s3, monkeypatch
):
    monkeypatch.setattr(stores, "RETRY_SECONDS", 0)
    direct = uri.replace(faulty_s3.url, faulty_s3.target)  # the other run reaches the store
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(leases.lease(uri, seconds=2))
        faulty_s3.fault("503", times=float("inf"))
        time.sleep(1.8)
        with pytest.raises(errors.TryAgain, match="now belongs to another run"):
            held.check()
        if is_taken:
            time.sleep(2.5)  # a store tells whole seconds
            stack.enter_context(leases.lease(direct))
        faulty_s3.clear()
        time.sleep(0.7)
        before = versions(direct)
        if is_taken:
            with pytest.raises(errors.TryAgain, match="now belongs to another run"):
                held.check()
            with pytest.raises(errors.TryAgain):
                held.writer(uri).write("a", b"1")
            assert versions(direct) == before
        else:
            held.check()
            held.writer(uri).write("a", b"1")


def test_time_that_passes_while_a_process_sleeps_is_noticed_by_the_check_itself(uri, monkeypatch):
    with leases.lease(uri) as held:
        real = leases._clock
        monkeypatch.setattr(leases, "_clock", lambda: real() + 44)
        held.check()
        monkeypatch.setattr(leases, "_clock", lambda: real() + 46)
        with pytest.raises(errors.TryAgain, match="now belongs to another run"):
            held.check()


def test_a_killed_holders_lock_is_taken_over_after_it_expired_by_the_clock_of_the_store(uri, monkeypatch):
    """Neither does a host a day ahead take a lock that is held, nor does one a day behind wait for one that expired."""
    real = time.time
    with process(HOLD, uri, "2") as holder:
        monkeypatch.setattr(time, "time", lambda: real() + 86400)
        time.sleep(2.5)
        with pytest.raises(errors.TryAgain, match="in use"), leases.lease(uri, 2):
            pass
        holder.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        monkeypatch.setattr(time, "time", lambda: real() - 86400)
        with take(uri, 2, within=10) as held:
            assert time.monotonic() - killed > 1 and held.token == 2
            held.confirm()


def test_a_damaged_lock_is_replaced(uri):
    for data in (b"", b"{}", b"[]", b"\xff"):
        Store(uri).write(".lock", data)
        with leases.lease(uri) as held:
            held.confirm()


def test_a_store_that_ignores_conditions_is_bad_input(uri, faulty_s3):
    faulty_s3.fault("ignore_conditions", method="PUT", times=float("inf"))
    with pytest.raises(errors.BadInput, match=r"out.* ignores conditional writes"), leases.lease(uri):
        pass
    assert Store(uri).read(".lock") is None


# ---------------------------------------------------------------------------------------------------------------------
# Fenced writes


def test_a_stopped_run_that_wakes_after_the_takeover_writes_nothing(faulty_s3):
    """Four runs, stopped at different places of their work."""
    with contextlib.ExitStack() as stack:
        stale = {}
        for number in range(4):
            uri = faulty_s3.uri(f"out-{number}")
            stale[uri] = stack.enter_context(process(WRITE, uri, "2"))
            time.sleep(0.037 * number)
            stale[uri].send_signal(signal.SIGSTOP)
        held = {uri: stack.enter_context(take(uri, 60, within=20)) for uri in stale}
        for uri, lease in held.items():
            for name in Store(uri).list().keys() | {"log.jsonl", "other"}:
                if not name.startswith(".lock"):
                    lease.writer(uri).write(name, b"second")
        before = {uri: versions(uri) for uri in stale}
        for child in stale.values():
            child.send_signal(signal.SIGCONT)
        assert [child.wait(20) for child in stale.values()] == [1] * 4
        for uri in stale:
            held[uri].confirm()
            assert versions(uri) == before[uri]


@pytest.fixture
def holders(uri, monkeypatch):
    """(lease of a run that was stopped after each check of its clock, lease of its successor, the takeover)."""
    monkeypatch.setattr(leases, "_clock", lambda: 0.0)
    with leases.lease(uri) as first:
        second = leases.Lease(Store(uri), "its successor", 2, 60)
        yield first, second, lambda: second.write(second.owner, first.tag)


def large(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(name.encode() * (LARGE // 2))
    return path


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("attempt", ["write", "delete"])
def test_a_stale_run_changes_nothing_of_its_successor(known, size, attempt, holders, uri, tmp_path):
    first, second, take_over = holders
    data = [large(tmp_path, "one"), large(tmp_path, "two")] if size == "large" else [b"one", b"two"]
    stale = first.writer(uri)
    if known:
        stale.write("a", data[0])
    take_over()
    second.writer(uri).write("a", data[1])
    before = versions(uri)
    with pytest.raises(errors.TryAgain, match="now belongs to another run"):
        stale.write("a", data[0]) if attempt == "write" else stale.delete("a")
    assert versions(uri) == before


@pytest.mark.parametrize("attempt", ["write", "delete"])
def test_a_takeover_between_the_look_at_a_version_and_the_write_is_met(attempt, holders, uri, monkeypatch):
    """The run is stopped after it asked who holds the lock: what it saw is replaced by then."""
    first, second, take_over = holders
    Store(uri).write("a", b"of an earlier run")
    stale = first.writer(uri)
    real = stale._known_version

    def known_version(name):
        tag = real(name)  # raises TryAgain the second time
        take_over()
        second.writer(uri).write(name, b"of the second run")
        return tag

    monkeypatch.setattr(stale, "_known_version", known_version)
    with pytest.raises(errors.TryAgain, match="now belongs to another run"):
        stale.write("a", b"of the first run") if attempt == "write" else stale.delete("a")
    assert Store(uri).read("a") == b"of the second run"


@pytest.mark.parametrize("size", ["small", "large"])
def test_what_a_dead_run_left_is_replaced(size, uri, tmp_path, faulty_s3):
    data = large(tmp_path, "left") if size == "large" else b"left"
    Store(uri).write("a", data)
    with leases.lease(uri) as held:
        fence = held.writer(uri)
        for content in (b"1", b"22", b"333"):
            fence.write("a", content)
            assert Store(uri).read("a") == content
        faulty_s3.clear()
        fence.write("a", b"4444")
        assert len(faulty_s3.seen(path="/a")) == 1, "a version that this run wrote is not asked for"
        fence.write("a", large(tmp_path, "new"))
        assert Store(uri).head("a").size == 3 * (LARGE // 2)
        fence.delete("a")
        fence.delete("a")
        assert Store(uri).read("a") is None
        fence.write("a", b"5")
        assert Store(uri).read("a") == b"5"
