"""The nodes of a Ray instance: which share of their CPUs and GPUs a worker asks for, and how many workers they hold."""

import time
from dataclasses import dataclass

from common.errors import BadInput
from common.messages import say

TOLERANCE = 1e-6  # for rounded shares
SAY_AFTER, SAY_AGAIN = 10, 60  # seconds without a sign of life before a message, seconds between two messages


@dataclass(frozen=True)
class Nodes:
    """The nodes that are up, {"CPU": 8.0, "GPU": 1.0} of each; is_local: a Ray of this process's own, with one node."""

    each: tuple[dict[str, float], ...]
    is_local: bool = True
    address: str = "local"

    def total(self, name: str) -> float:
        """Return the sum of a resource over all nodes; no single node need have that much."""
        return sum(node.get(name, 0) for node in self.each)

    def room(self, cpus: float, gpus: float) -> int:
        """Return how many workers of this share the nodes hold while nothing else runs; a worker fits on one node."""
        asked = {name: share for name, share in (("CPU", cpus), ("GPU", gpus)) if share}
        if not asked:
            return 10**9
        return sum(
            min(int((node.get(name, 0) + TOLERANCE) / share) for name, share in asked.items()) for node in self.each
        )


def share_resources(
    nodes: Nodes, num_workers: int, cpus_per_worker: float | None = None, gpus_per_worker: float | None = None
) -> tuple[float, float]:
    """Return (CPUs, GPUs) per worker: the flags' values, or the defaults.

    The default on a local Ray is an even share of the CPUs, on a cluster 1 CPU; and 1 GPU if there are any.

    Raises BadInput if a local Ray cannot hold all workers, and on a cluster without GPUs, which may be about to start
    some, if it is not said whether to compute on CPUs. A cluster that cannot hold all workers now is asked all the
    same: it may grow.
    """
    num_gpus = nodes.total("GPU")
    if nodes.is_local:
        gpu = gpus_per_worker if gpus_per_worker is not None else float(num_gpus > 0)
        cpu = cpus_per_worker if cpus_per_worker is not None else _even_share(nodes.total("CPU") or 1, num_workers)
        _check_room(nodes, num_workers, cpu, gpu)
        return cpu, gpu
    if gpus_per_worker is None and not num_gpus:
        raise BadInput(
            f"the Ray cluster at {nodes.address} has no GPU now: pass --gpus_per_worker 0 to compute on CPUs, or "
            "--gpus_per_worker 1 and --num_workers to wait for nodes with GPUs"
        )
    cpu = 1.0 if cpus_per_worker is None else cpus_per_worker
    return cpu, 1.0 if gpus_per_worker is None else gpus_per_worker


def _check_room(nodes: Nodes, num_workers: int, cpus: float, gpus: float) -> None:
    for name, each, total in (("CPUs", cpus, nodes.total("CPU") or 1), ("GPUs", gpus, nodes.total("GPU"))):
        if each * num_workers > total + TOLERANCE:
            raise BadInput(
                f"--num_workers {num_workers} of {each:g} {name} each need {each * num_workers:g}, the cluster has "
                f"{total:g}: use fewer workers or fewer {name} per worker"
            )


def _even_share(cpus: float, num_workers: int) -> float:
    share = cpus / num_workers
    return float(int(share)) if share >= 1 else int(share * 100) / 100


def default_workers(nodes: Nodes, gpus_per_worker: float | None, without_gpus: int) -> int:
    """Return the number of workers to use by default: one for each GPU, or `without_gpus` to compute on CPUs.

    Raises BadInput if GPUs are asked for and there are none yet to be counted.
    """
    if gpus_per_worker == 0:
        return without_gpus
    num_gpus = int(nodes.total("GPU"))
    if gpus_per_worker and not num_gpus and not nodes.is_local:
        raise BadInput(
            f"the Ray cluster at {nodes.address} has no GPU now: pass --num_workers to say how many to wait for"
        )
    return num_gpus or without_gpus


def say_what_lacks(nodes: Nodes, num_workers: int, cpus: float, gpus: float) -> None:
    """Say so if a cluster cannot hold all workers at present."""
    room = nodes.room(cpus, gpus)
    if not nodes.is_local and room < num_workers:
        say(
            f"warning: {describe(num_workers, cpus, gpus)} are asked for, and the cluster's {len(nodes.each)} nodes "
            f"hold {room} of them: the others wait for more nodes"
        )


def describe(num_workers: int, cpus: float, gpus: float) -> str:
    """Return a text such as "2 workers of 1 CPU and 1 GPU"."""
    parts = [f"{share:g} {name}{'s' if share > 1 else ''}" for share, name in ((cpus, "CPU"), (gpus, "GPU")) if share]
    return f"{num_workers} worker{'s' if num_workers > 1 else ''} of {' and '.join(parts) or 'no CPU'}"


class Waiting:
    """Says what a run on a cluster waits for while none of its workers gives a sign of life."""

    def __init__(self, num_workers: int, cpus: float, gpus: float) -> None:
        self.num_workers, self.cpus, self.gpus = num_workers, cpus, gpus
        self.began, self.said = time.monotonic(), 0.0

    def look(self, silence: float | None) -> float:
        """Return for how many seconds the run has waited; silence: seconds since a worker's last sign of life, or None.

        The first message comes after SAY_AFTER seconds, the next ones after SAY_AGAIN seconds each.
        """
        now = time.monotonic()
        waited = now - self.began if silence is None else min(silence, now - self.began)
        if waited < SAY_AFTER:
            self.said = 0.0  # the next wait is said at once
        elif now - self.said > SAY_AGAIN and self._is_short():
            self.said = now
            say(f"waiting for {describe(self.num_workers, self.cpus, self.gpus)}: {describe_free()}")
        return waited

    def _is_short(self) -> bool:
        """Return whether the cluster lacks room; if not, the workers are starting."""
        import ray

        bundle = {name: share for name, share in (("CPU", self.cpus), ("GPU", self.gpus)) if share}
        groups = [
            group
            for group in ray.util.placement_group_table().values()
            if [dict(each) for each in group["bundles"].values()] == [bundle] * self.num_workers
        ]
        if groups:  # Ray Train's: all its workers are placed at once
            return any(group["state"] in ("PENDING", "RESCHEDULING") for group in groups)
        free = ray.available_resources()
        return any(free.get(name, 0) < share for name, share in bundle.items())


def describe_free() -> str:
    """Return a text such as "the cluster has 5 CPUs and 0 GPUs free, on 3 nodes"."""
    import ray

    free, nodes = ray.available_resources(), [node for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (free.get(name, 0) for name in ("CPU", "GPU"))
    return f"the cluster has {cpus:g} CPUs and {gpus:g} GPUs free, on {len(nodes)} nodes"
