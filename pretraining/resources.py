"""CPUs and GPUs of the actors that load data for the training workers."""

from common.errors import BadInput
from common.nodes import Nodes


def share_with_loaders(
    nodes: Nodes, num_workers: int, count: int, encodes: bool, gpus_per_worker: float | None = None
) -> dict[str, float]:
    """Return the pool options of map_on_actors for the `count` loading actors of each of `num_workers` workers.

    The actors of all workers together get half of a machine's CPUs, or 1 CPU each on a cluster, and, if they encode,
    the GPUs that the workers leave free. Raises BadInput if no GPU is left to encode on.
    """
    gpus = nodes.total("GPU")
    free = gpus - num_workers * (gpus_per_worker if gpus_per_worker is not None else float(gpus > 0))
    on_gpus = encodes and gpus_per_worker != 0 and (gpus > 0 or bool(gpus_per_worker))
    if not nodes.is_local and gpus < num_workers * (gpus_per_worker or 0):  # its nodes with GPUs are yet to come
        free = float(num_workers)
    if on_gpus and free <= 0:
        raise BadInput("--online: no GPU is left to encode on: reduce --num_workers or --gpus_per_worker")
    share = {"cpus_per_worker": nodes.total("CPU") / 2 / num_workers / count if nodes.is_local else 1.0}
    share["gpus_per_worker"] = min(1.0, free / num_workers / count) if on_gpus else 0.0
    return {"num_workers": count, **share}
