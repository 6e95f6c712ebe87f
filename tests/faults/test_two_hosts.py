"""Two hosts that share nothing but an object store run one command: the lease of the output decides which one works.

The first host reaches the store through a proxy, which slows it down and sees its requests. The second one runs the
command again and again, as cron does.
"""

import signal
import time

import pytest
from conftest import last_json
from injection import Script, assert_same, told, train, undisturbed

from common import objects
from common.stores import Store

pytestmark = pytest.mark.faults
LEASE = 10  # seconds, instead of a minute
STEPS, EVERY = 40, 4  # of a run, and between two checkpoints


@pytest.fixture
def hosts(tmp_path, s3, faulty_s3, s3_keys):
    """A function from a host's name to the URI of the output and the options of its scripts."""
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}

    def host(name):
        uri = faulty_s3.uri("out") if name == "first" else s3("out")
        return uri, {"lease_seconds": LEASE, "variables": {**keys, "DREAMBOOTH_CACHE": str(tmp_path / name)}}

    return host


def everything(uri):
    """Return all that the store tells of the output and its work folder."""
    return {end: Store(uri.replace("/out?", f"/out{end}?")).list() for end in ("", ".work")}


def begin(hosts, faulty_s3, **flags):
    """Start the first host's run, slower than the second's; return it when there is a checkpoint."""
    uri, options = hosts("first")
    faulty_s3.fault("delay", method="GET", path=".lock", seconds=1, times=float("inf"))  # each step reads it
    words = train(uri, max_train_steps=STEPS, checkpointing_steps=EVERY, keep_checkpoints=False, **flags)
    first = Script(words, cold=bool(flags), **options)
    work = Store(uri.replace("/out?", "/out.work?"))
    assert first.until(lambda: work.head(f"checkpoint-{EVERY:06d}/manifest.json"), 300), first.stderr
    return first


def run_until_done(hosts, first):
    """Run the second host's command until it is done; return it. It is sent away before, by the first one's name."""
    uri, options = hosts("second")
    began, refused = time.monotonic(), 0
    while True:
        with Script(
            train(uri, max_train_steps=STEPS, checkpointing_steps=EVERY, keep_checkpoints=False), **options
        ) as run:
            code = run.wait(300)
        if code == 0:
            break
        assert code == 75 and f"in use by process {first.pid} on" in told(run), run.stderr
        refused += 1
        assert time.monotonic() - began < 6 * LEASE, "the lease does not expire"
    assert refused, "the second host was not sent away"
    return run


def same_as_undisturbed(uri):
    folder = objects.local_copy(uri)
    assert_same(folder, undisturbed(train, max_train_steps=STEPS))


def test_a_driver_that_sleeps_past_its_lease_writes_nothing(hosts, faulty_s3, node_cache):
    with begin(hosts, faulty_s3) as first:
        first.send(signal.SIGSTOP)
        run_until_done(hosts, first)
        uri, _ = hosts("second")
        before = everything(uri)
        first.send(signal.SIGCONT)
        assert first.wait() == 75
        assert "now belongs to another run: this run stops" in told(first)
    assert everything(uri) == before
    same_as_undisturbed(uri)


def test_the_second_host_goes_on_from_the_checkpoint_of_a_killed_one(hosts, faulty_s3, node_cache):
    with begin(hosts, faulty_s3) as first:
        first.send(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        second = run_until_done(hosts, first)
    uri, _ = hosts("second")
    assert 0 < last_json(second.stdout)["trained"] <= STEPS - EVERY
    same_as_undisturbed(uri)


@pytest.mark.ray
def test_workers_of_a_driver_that_sleeps_past_its_lease_stop_writing(hosts, faulty_s3, node_cache):
    """They go on while nobody else has the lock; once the second host has it, they end."""
    with begin(hosts, faulty_s3, num_workers=1, cpus_per_worker=1) as first:
        first.send(signal.SIGSTOP)
        run_until_done(hosts, first)
        uri, _ = hosts("second")
        before = everything(uri)
        faulty_s3.clear()
        time.sleep(LEASE)
        assert not faulty_s3.seen(), "a worker still asks the store"
        first.send(signal.SIGCONT)
        assert first.wait() == 75
        assert "now belongs to another run: this run stops" in told(first)
    assert everything(uri) == before
    same_as_undisturbed(uri)
