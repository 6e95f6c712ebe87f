"""The actors that load data for the training workers: how many, and their CPUs and GPUs."""

import argparse
import math
from typing import Any

from common.cluster import start_ray
from common.errors import BadInput
from common.messages import say
from common.nodes import Nodes, Share, check_accelerator_type, describe


def loading_pool(args: argparse.Namespace, num_workers: int, module: str) -> dict[str, Any]:
    """Return the pool options of map_on_actors for the loading actors of each of `num_workers` training workers.

    module: the part of Ray that the caller uses next.
    """
    count = int(args.online) if args.num_data_loading_workers is None else args.num_data_loading_workers
    if not (num_workers and count):
        return {"num_workers": 0}
    nodes = start_ray(args.address, args.insecure_cluster, module)
    types = args.accelerator_type, args.data_loading_accelerator_type
    share = share_with_loaders(nodes, num_workers, count, args.online, args.gpus_per_worker, *types)
    limits = {"max_failures": args.max_failures, "start_timeout": args.start_timeout}
    return {"num_workers": count, **share, **limits, "address": nodes.address}


def share_with_loaders(
    nodes: Nodes,
    num_workers: int,
    count: int,
    encodes: bool,
    gpus_per_worker: float | None = None,
    accelerator_type: str | None = None,
    loading_type: str | None = None,
) -> dict[str, Any]:
    """Return the placement of the `count` loading actors of each of `num_workers` workers, as cli.placement does.

    The actors of all workers together get half of a machine's CPUs, or 1 CPU each on a cluster, and, if they encode,
    the GPUs that the workers leave free, or those of a type of their own: loading_type, which is None or differs from
    accelerator_type, that of the workers. If there are none, a cluster that may grow is asked for more if the workers
    wait for nodes too, or if --gpus_per_worker says so; else BadInput is raised.
    """
    share = {"cpus_per_worker": nodes.cpus / 2 / num_workers / count if nodes.is_local else 1.0}
    gpus = nodes.gpus(accelerator_type)
    if not encodes or gpus_per_worker == 0 or not (gpus or gpus_per_worker):
        return {**share, "gpus_per_worker": 0.0}
    kind = loading_type or accelerator_type
    if loading_type:
        check_accelerator_type(nodes, loading_type, gpus_per_worker, "--data_loading_accelerator_type")
        free = nodes.gpus(loading_type)
    else:
        free = gpus - num_workers * (1.0 if gpus_per_worker is None else gpus_per_worker)
    if free <= 0:
        if nodes.is_local or (free == 0 and gpus_per_worker is None):
            wait = "" if nodes.is_local else ", or pass --gpus_per_worker to wait for nodes with GPUs"
            raise BadInput(f"--online: no GPU is left to encode on: reduce --num_workers or --gpus_per_worker{wait}")
        free = float(num_workers)
        asked = describe(num_workers * count, Share(0.5, 1 / count, kind))
        say(f"warning: the cluster has no GPU for {asked} that encode: they wait for more nodes")
    return {**share, "gpus_per_worker": 1 / math.ceil(num_workers * count / free), "accelerator_type": kind}
