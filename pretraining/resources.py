"""CPUs and GPUs of the actors that load data for the training workers."""

from common.errors import BadInput


def share_with_loaders(
    resources: dict[str, float], num_workers: int, count: int, encodes: bool, gpus_per_worker: float | None = None
) -> dict[str, float]:
    """Return the pool options of map_on_actors for the `count` loading actors of each of `num_workers` workers.

    The actors of all workers together get half of the CPUs and, if they encode, the GPUs that the workers leave free.
    Raises BadInput if no GPU is left to encode on.
    """
    gpus = resources.get("GPU", 0)
    free = gpus - num_workers * (gpus_per_worker if gpus_per_worker is not None else float(gpus > 0))
    if encodes and gpus and free <= 0:
        raise BadInput("--online: no GPU is left to encode on: reduce --num_workers or --gpus_per_worker")
    share = {"cpus_per_worker": resources.get("CPU", 1) / 2 / num_workers / count}
    share["gpus_per_worker"] = min(1.0, free / num_workers / count) if encodes and gpus else 0.0
    return {"num_workers": count, **share}
