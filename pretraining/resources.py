"""The share of the cluster that reads and encodes data beside the training workers."""

from common.errors import BadInput


def share_with_loaders(resources, num_workers, count, encodes, gpus_per_worker=None):
    """Return the options of map_on_actors for the `count` actors that read the data of each of `num_workers`.

    They get half of the CPUs; of the GPUs, where they encode, what the workers leave.
    """
    gpus = resources.get("GPU", 0)
    free = gpus - num_workers * (gpus_per_worker if gpus_per_worker is not None else float(gpus > 0))
    if encodes and gpus and free <= 0:
        raise BadInput("--online: no GPU is left to encode on: take fewer --num_workers or smaller --gpus_per_worker")
    share = {"cpus_per_worker": resources.get("CPU", 1) / 2 / num_workers / count}
    share["gpus_per_worker"] = min(1.0, free / num_workers / count) if encodes and gpus else 0.0
    return {"num_workers": count, **share}
