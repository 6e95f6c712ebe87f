"""Print, as JSON, on which type of GPU actors and training workers of each type run: `python tests/where.py ADDRESS`.

The GPUs are not there, which is why the workers have gloo in place of NCCL, and train nothing.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import ray

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of tests/, which has a folder `common` too

from common import actors, cluster  # noqa: E402
from common.nodes import Share, Waiting, default_workers  # noqa: E402
from training import launch  # noqa: E402


def type_here():
    """Return the types of the GPUs of the node that this process runs on."""
    here = ray.get_runtime_context().get_node_id()
    (node,) = (each["Resources"] for each in ray.nodes() if each["NodeID"] == here)
    return cluster.Nodes((node,)).accelerator_types


class Where:
    def __init__(self, num_threads):
        pass

    def __call__(self, item):
        return {"types": type_here()}


def where_actors_run(address, kind):
    place = {"address": address, "insecure_cluster": True, "accelerator_type": kind}
    return [result["types"] for result in actors.map_on_actors(Where, {}, [0, 1, 2], None, **place)]


def where_workers_run(kind):
    from ray.train.torch import TorchConfig

    make = launch._make_trainer_class
    launch._make_trainer_class = lambda is_alone: partial(make(is_alone), torch_config=TorchConfig(backend="gloo"))
    with tempfile.TemporaryDirectory() as folder:
        return launch._fit(lambda config: type_here(), {}, folder, 1, Share(0.5, 1.0, kind), False)


def is_short(kind, num_workers):
    """Return whether a group of workers is taken for one that waits for nodes."""
    share = Share(0.5, 1.0, kind)
    group = ray.util.placement_group([share.resources] * num_workers)
    group.wait(3)
    try:
        return Waiting(num_workers, share)._is_short()
    finally:
        ray.util.remove_placement_group(group)


if __name__ == "__main__":
    nodes = cluster.start_ray(sys.argv[1], insecure_cluster=True)
    found = {
        "default": {kind: default_workers(nodes, 1, accelerator_type=kind) for kind in ("A10G", "A100")},
        "short": [is_short("A100", 1), is_short("A100", 2)],
        "actors": where_actors_run(sys.argv[1], "A10G"),
        "workers": where_workers_run("A100"),
    }
    print(json.dumps(found))
