"""A cluster with nodes of two types of GPUs, that are not there: what is placed on which node."""

import subprocess
import sys

import pytest
from conftest import last_json
from nodes import ROOT, Nodes, begin, end, variables

pytestmark = [pytest.mark.ray, pytest.mark.faults]  # a minute


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    cluster = Nodes(tmp_path_factory.mktemp("nodes"), 1, "2:A10G", "2:A100")
    yield cluster
    cluster.end()


def test_actors_and_workers_are_placed_on_gpus_of_their_type(nodes):
    command = [sys.executable, str(ROOT / "tests" / "where.py"), nodes.address]
    done = subprocess.run(command, env=variables(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert last_json(done.stdout) == {
        "default": {"A10G": 1, "A100": 1},
        "short": [False, True],
        "actors": [["A10G"]] * 3,
        "workers": ["A100"],
    }


def test_a_type_that_no_node_has(nodes, store, tmp_path):
    places = ["--model_dir", store("model"), "--output_dir", store("drawn"), "--prompts", "cat"]
    kind = ["--num_inference_steps", "2", "--accelerator_type", "L4"]
    code, _, said = end(begin("run_model.py", nodes, tmp_path, *places, *kind), tmp_path)
    assert code == 3 and f"--accelerator_type L4: the Ray cluster at {nodes.address} has GPUs of the types A100" in said
    wait = ["--gpus_per_worker", "1", "--num_workers", "1", "--start_timeout", "12"]
    code, _, said = end(begin("run_model.py", nodes, tmp_path, *places, *kind, *wait), tmp_path)
    assert code == 75 and "waiting for 1 worker of 0.5 CPU and 1 GPU of the type L4" in said, said
