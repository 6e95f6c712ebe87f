"""The scripts on a cluster of several nodes that share no disk: every folder is in an object store."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, last_json, make_photos
from test_train import assert_equal_weights

from common import objects, stores

pytestmark = pytest.mark.ray
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}


def without_ray():
    """Return the environment without the variables that a Ray of this process has set, its token among them."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


class Nodes:
    """The process of nodes.py."""

    def __init__(self, folder, *cpus):
        command = [sys.executable, str(ROOT / "tests" / "nodes.py"), str(folder), *map(str, cpus)]
        variables = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "OMP_NUM_THREADS": "1", **KEYS}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process = subprocess.Popen(command, env={**without_ray(), **variables}, **pipes)
        self.address = self.process.stdout.readline().strip()

    def order(self, *words):
        print(*words, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.stdin.close()
        self.process.wait(60)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """A head and two nodes of 2 CPUs each."""
    cluster = Nodes(tmp_path_factory.mktemp("nodes"), 2, 2, 2)
    yield cluster
    cluster.end()


@pytest.fixture
def store(s3, tiny_model, tmp_path):
    """Return a function from a name to its URI in a store with a model and photos."""
    objects.upload_folder(tiny_model, s3("model"))
    objects.upload_folder(make_photos(tmp_path / "photos", 3), s3("photos"))
    return s3


def begin(script, nodes, folder, *arguments):
    """Start a script that joins the cluster; it has a cache of its own, as the host of a driver does."""
    variables = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "DREAMBOOTH_CACHE": str(folder / "driver-cache")}
    command = [sys.executable, str(ROOT / script), *map(str, arguments), "--address", nodes.address]
    return subprocess.Popen(
        [*command, "--insecure_cluster"],
        env={**without_ray(), **variables, "OMP_NUM_THREADS": "1"},
        stdout=(folder / "stdout").open("w"),
        stderr=(folder / "stderr").open("w"),
    )


def end(process, folder, timeout=200):
    """Wait for a script; return (exit code, its result or None, what it said)."""
    try:
        process.wait(timeout)
    finally:
        process.kill()
    out, said = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    return process.returncode, last_json(out) if out.strip() else None, said


def wait_for(process, folder, text, timeout=120):
    """Wait until a script says a text."""
    until = time.monotonic() + timeout
    while text not in (said := (folder / "stderr").read_text()):
        assert process.poll() is None and time.monotonic() < until, said
        time.sleep(0.2)


def train_words(store, *more):
    places = ["--model_dir", store("model"), "--instance_images_dir", store("photos"), "--output_dir", store("tuned")]
    return [*places, "--instance_prompt", "cat", "--prior_loss_weight", "0", "--gpus_per_worker", "0", *more]


def test_a_cluster_without_gpus_is_told_to_compute_on_cpus(nodes, store, tmp_path):
    """A GPU node may be about to start; training on one CPU without a word would be a surprise."""
    words = [word for word in train_words(store, "--max_train_steps", "1") if word not in ("--gpus_per_worker",)]
    words.remove("0") if words.count("0") > 1 else None
    code, _, said = end(begin("train.py", nodes, tmp_path, *words), tmp_path)
    assert code == 3 and "has no GPU now: pass --gpus_per_worker 0" in said


def test_a_share_is_of_a_node_and_one_item_needs_no_half_of_the_cluster(nodes, store, tmp_path):
    words = ["--model_dir", store("model"), "--output_dir", store("drawn"), "--prompts", "cat", "--num_workers", "1"]
    words += ["--num_inference_steps", "2", "--gpus_per_worker", "0"]
    code, result, said = end(begin("run_model.py", nodes, tmp_path, *words), tmp_path)
    assert (code, result and result["drawn"]) == (0, 4), said
    assert sum(name.endswith(".png") for name in stores.Store(store("drawn")).list()) == 4


@pytest.mark.faults  # three minutes on two cores
def test_a_node_is_lost_in_training_and_another_one_joins(nodes, store, tmp_path):
    """Two workers of 2 CPUs need two nodes: after the loss the run goes on, bit-equal, without a disk in common."""
    flags = ["--max_train_steps", "60", "--checkpointing_steps", "10", "--log_every", "5"]
    alone = ["--num_workers", "2", "--output_dir", store("undisturbed")]
    code, _, said = end(begin("train.py", nodes, tmp_path, *train_words(store), *flags, *alone), tmp_path)
    assert code == 0, said
    more = ["--num_workers", "2", "--cpus_per_worker", "2", "--max_failures", "2"]
    process = begin("train.py", nodes, tmp_path, *train_words(store), *flags, *more)
    until = time.monotonic() + 150
    while not stores.Store(store("tuned.work")).head("checkpoint-000010/manifest.json"):
        assert process.poll() is None and time.monotonic() < until, (tmp_path / "stderr").read_text()
        time.sleep(0.1)
    assert nodes.order("kill", "RayTrainWorker") == "done"
    code, result, said = end(process, tmp_path)
    assert code == 0 and result["steps"] == 60, said
    assert "restarting the workers from the newest checkpoint" in said and "memory ran out" not in said
    assert_equal_weights(objects.local_copy(store("undisturbed")), objects.local_copy(store("tuned")))
    assert nodes.order("add", "2") == "done"
