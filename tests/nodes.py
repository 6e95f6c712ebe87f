"""A Ray cluster of several nodes on this machine, in a process of its own that takes orders on stdin.

Each node has CPUs, temporary folder and cache of its own. `python tests/nodes.py FOLDER CPUS...` starts a head and
other nodes and prints the address; then each line is an order: `add CPUS`, or one about a node that runs a process of
that name and is not the head: `kill NAME` ends it as a power cut does, `drain NAME` gives notice that it will be taken
away. `2:A10G` in place of CPUS is a node of 2 CPUs and of a GPU that is not there. `Nodes` is such a process, `begin`
and `end` run scripts that join it.
"""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
from PIL import Image
from ray.cluster_utils import Cluster

ROOT = Path(__file__).resolve().parent.parent
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}


def variables(**more):
    """Return the environment without what a Ray of this process has set, its token among them, and with `more`."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**ours, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "OMP_NUM_THREADS": "1", **more}


class Nodes:
    """A running cluster."""

    def __init__(self, folder, *cpus):
        command = [sys.executable, __file__, str(folder), *map(str, cpus)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process = subprocess.Popen(command, env=variables(**KEYS), **pipes)
        self.address = self.process.stdout.readline().strip()

    def order(self, *words):
        """Give an order; return the answer, "done" or "none"."""
        print(*words, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.stdin.close()
        self.process.wait(60)


def train_words(store, *more):
    places = ["--model_dir", store("model"), "--instance_images_dir", store("photos"), "--output_dir", store("tuned")]
    return [*places, "--instance_prompt", "cat", "--prior_loss_weight", "0", "--gpus_per_worker", "0", *more]


def begin(script, nodes, folder, *arguments, **more):
    """Start a script that joins the cluster; it has a cache of its own, as the host of a driver does."""
    command = [sys.executable, str(ROOT / script), *map(str, arguments), "--address", nodes.address]
    return subprocess.Popen(
        [*command, "--insecure_cluster"],
        env=variables(DREAMBOOTH_CACHE=str(folder / "driver-cache"), **more),
        stdout=(folder / "stdout").open("w"),
        stderr=(folder / "stderr").open("w"),
    )


def end(process, folder, timeout=400):
    """Wait for a script; return (exit code, its result or None, what it said)."""
    from conftest import last_json

    try:
        process.wait(timeout)
    finally:
        process.kill()
    out, said = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    return process.returncode, last_json(out) if out.strip() else None, said


def wait_until(happened, process, folder, timeout=400):
    """Wait until a function returns true while a script runs; return the script's messages."""
    until = time.monotonic() + timeout
    while True:
        said = Path(folder, "stderr").read_text()
        if happened():
            return said
        assert process.poll() is None and time.monotonic() < until, said
        time.sleep(0.1)


# ---------------------------------------------------------------------------------------------------------------------
# What two runs made, on a disk or in a store


def read_log(work_dir):
    """Return {step: loss} of a training."""
    from common.targets import Files

    lines = map(json.loads, Files(work_dir).read("log.jsonl").decode().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def assert_equal_images(one, other, within=0):
    """Raise AssertionError unless two folders have images of the same names whose pixels differ by at most `within`."""
    from common import targets

    names = [{name for name in targets.names(each) if name.endswith(".png")} for each in (one, other)]
    assert names[0] == names[1] and names[0]
    for name in names[0]:
        pixels = [_pixels(targets.Files(each).read(name)) for each in (one, other)]
        assert np.abs(pixels[0] - pixels[1]).max() <= within, name


def _pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)), dtype=int)


# ---------------------------------------------------------------------------------------------------------------------
# The process of the cluster


def _start(cluster, folder, number, words):
    cpus, _, kind = words.partition(":")
    gpu = {"num_gpus": 1, "resources": {f"accelerator_type:{kind}": 1}} if kind else {}
    home = Path(folder, f"node-{number}")
    (home / "tmp").mkdir(parents=True)
    own = {"TMPDIR": str(home / "tmp"), "DREAMBOOTH_CACHE": str(home / "cache")}
    return cluster.add_node(num_cpus=float(cpus), **gpu, env_vars={**os.environ, **own}, include_dashboard=False)


def _runs(node, name):
    processes = [each.process.pid for each in node.all_processes["raylet"]]
    children = [child for pid in processes for child in psutil.Process(pid).children(recursive=True)]
    return any(name in " ".join(child.cmdline()) for child in children)


def _drain(cluster, node):
    flags = [
        "--reason",
        "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message",
        "test",
        "--deadline-remaining-seconds",
        "120",
    ]
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address]
    subprocess.run([*command, "--node-id", node.node_id, *flags], check=True, stdout=subprocess.DEVNULL)


def main(folder, *cpus):
    cluster = Cluster()
    nodes = [_start(cluster, folder, number, each) for number, each in enumerate(cpus)]
    started = len(nodes)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        order, word = line.split()
        if order == "add":
            nodes.append(_start(cluster, folder, started, word))
            started += 1
        node = nodes[-1] if order == "add" else next((each for each in nodes[1:] if _runs(each, word)), None)
        if node and order == "kill":
            nodes.remove(node)
            cluster.remove_node(node, allow_graceful=False)
        if node and order == "drain":
            _drain(cluster, node)
        print("done" if node else "none", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
