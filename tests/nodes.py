"""A Ray cluster of several nodes on this machine, in a process of its own that takes orders on stdin.

Each node has CPUs, temporary folder and cache of its own. `python tests/nodes.py FOLDER CPUS...` starts a head and
other nodes and prints the address; then each line is an order: `add CPUS`, or `kill NAME`, which ends the node that
runs a process of that name as a power cut does.
"""

import os
import sys
from pathlib import Path

import psutil
from ray.cluster_utils import Cluster


def start(cluster, folder, number, cpus):
    home = Path(folder, f"node-{number}")
    (home / "tmp").mkdir(parents=True)
    variables = {"TMPDIR": str(home / "tmp"), "DREAMBOOTH_CACHE": str(home / "cache")}
    return cluster.add_node(num_cpus=float(cpus), env_vars={**os.environ, **variables}, include_dashboard=False)


def runs(node, name):
    processes = [each.process.pid for each in node.all_processes["raylet"]]
    children = [child for pid in processes for child in psutil.Process(pid).children(recursive=True)]
    return any(name in " ".join(child.cmdline()) for child in children)


def main(folder, *cpus):
    cluster = Cluster()
    nodes = [start(cluster, folder, number, each) for number, each in enumerate(cpus)]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        order, word = line.split()
        if order == "add":
            nodes.append(start(cluster, folder, len(nodes), word))
        else:
            victim = next((node for node in nodes[1:] if runs(node, word)), None)
            if victim:
                nodes.remove(victim)
                cluster.remove_node(victim, allow_graceful=False)
        print("done" if order == "add" or victim else "none", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
