"""The nodes of a Ray instance: which share of their CPUs and GPUs a worker asks for, and how many workers they hold."""

import time
from dataclasses import dataclass

from common.errors import BadInput
from common.messages import say

TOLERANCE = 1e-6  # for rounded shares
SAY_AFTER, SAY_AGAIN = 10, 60  # seconds without a sign of life before a message, seconds between two messages
TYPE = "accelerator_type:"  # before the type of a node's GPUs, in the name of the resource by which Ray knows it
TYPE_SHARE = 0.001  # of this resource, of which a node has 1; what Ray asks for where it is told an accelerator type


@dataclass(frozen=True)
class Share:
    """What a worker asks of one node; accelerator_type: of its GPUs, as Ray names it, such as A10G; None: any."""

    cpus: float
    gpus: float
    accelerator_type: str | None = None

    @property
    def resources(self) -> dict[str, float]:
        """{Ray's name: amount}, without what is not asked for."""
        asked = {"CPU": self.cpus, "GPU": self.gpus}
        if self.accelerator_type:
            asked[TYPE + self.accelerator_type] = TYPE_SHARE
        return {name: amount for name, amount in asked.items() if amount}


@dataclass(frozen=True)
class Nodes:
    """The nodes that are up, {"CPU": 8.0, "GPU": 1.0} of each; is_local: a Ray of this process's own, with one node."""

    each: tuple[dict[str, float], ...]
    is_local: bool = True
    address: str = "local"

    @property
    def cpus(self) -> float:
        """The CPUs of all nodes together; no single node need have that many."""
        return sum(node.get("CPU", 0) for node in self.each)

    def gpus(self, accelerator_type: str | None = None) -> float:
        """Return the GPUs of all nodes together; accelerator_type: of the nodes with this type only."""
        return sum(
            node.get("GPU", 0) for node in self.each if accelerator_type is None or TYPE + accelerator_type in node
        )

    @property
    def accelerator_types(self) -> list[str]:
        """The types of the GPUs, sorted."""
        return sorted(
            {name.removeprefix(TYPE) for node in self.each if node.get("GPU") for name in node if name.startswith(TYPE)}
        )

    def room(self, share: Share) -> int:
        """Return how many workers of this share the nodes hold while nothing else runs; a worker fits on one node."""
        asked = share.resources
        if not asked:
            return 10**9
        return sum(
            min(int((node.get(name, 0) + TOLERANCE) / amount) for name, amount in asked.items()) for node in self.each
        )


def share_resources(
    nodes: Nodes,
    num_workers: int,
    cpus_per_worker: float | None = None,
    gpus_per_worker: float | None = None,
    accelerator_type: str | None = None,
) -> Share:
    """Return what a worker asks for: the flags' values, or the defaults.

    The default on a local Ray is an even share of the CPUs, on a cluster 1 CPU; and 1 GPU if there are any.

    Raises BadInput if a local Ray cannot hold all workers, and on a cluster without GPUs, or without those of the
    accelerator type, which may be about to start some, if it is not said whether to wait for them. A cluster that
    cannot hold all workers now is asked all the same: it may grow.
    """
    _check_gpus(nodes, gpus_per_worker, accelerator_type)
    num_gpus = nodes.gpus(accelerator_type)
    if nodes.is_local:
        gpu = gpus_per_worker if gpus_per_worker is not None else float(num_gpus > 0)
        cpu = cpus_per_worker if cpus_per_worker is not None else _even_share(nodes.cpus or 1, num_workers)
        _check_room(nodes, num_workers, cpu, gpu, num_gpus)
    else:
        gpu = 1.0 if gpus_per_worker is None else gpus_per_worker
        cpu = 1.0 if cpus_per_worker is None else cpus_per_worker
    return Share(cpu, gpu, accelerator_type)


def _check_gpus(nodes: Nodes, gpus_per_worker: float | None, accelerator_type: str | None) -> None:
    """Raise BadInput if there are no GPUs, or none of the type, and the flags do not say whether to wait for them."""
    if accelerator_type:
        check_accelerator_type(nodes, accelerator_type, gpus_per_worker)
    elif gpus_per_worker is None and not nodes.is_local and not nodes.gpus():
        raise BadInput(
            f"the Ray cluster at {nodes.address} has no GPU now: pass --gpus_per_worker 0 to compute on CPUs, or "
            "--gpus_per_worker 1 and --num_workers to wait for nodes with GPUs"
        )


def check_accelerator_type(
    nodes: Nodes, accelerator_type: str, gpus_per_worker: float | None, flag: str = "--accelerator_type"
) -> None:
    """Raise BadInput if no node has GPUs of the type of a flag, unless such nodes may join and are to be waited for."""
    if nodes.gpus(accelerator_type) or (gpus_per_worker and not nodes.is_local):
        return
    where = "this machine" if nodes.is_local else f"the Ray cluster at {nodes.address}"
    wait = "" if nodes.is_local else ", or --gpus_per_worker 1 and --num_workers to wait for nodes of this type"
    remedy = "pass one of these types" if nodes.accelerator_types else f"leave out {flag}"
    raise BadInput(f"{flag} {accelerator_type}: {where} has {_list_types(nodes)} now: {remedy}{wait}")


def _list_types(nodes: Nodes) -> str:
    """Return a text such as "GPUs of the types A100, A10G"."""
    if types := nodes.accelerator_types:
        return f"GPUs of the type{'s' if len(types) > 1 else ''} {', '.join(types)}"
    return "GPUs of no known type" if nodes.gpus() else "no GPU"


def _check_room(nodes: Nodes, num_workers: int, cpus: float, gpus: float, num_gpus: float) -> None:
    for name, each, total in (("CPUs", cpus, nodes.cpus or 1), ("GPUs", gpus, num_gpus)):
        if each * num_workers > total + TOLERANCE:
            raise BadInput(
                f"--num_workers {num_workers} of {each:g} {name} each need {each * num_workers:g}, the cluster has "
                f"{total:g}: use fewer workers or fewer {name} per worker"
            )


def _even_share(cpus: float, num_workers: int) -> float:
    share = cpus / num_workers
    return float(int(share)) if share >= 1 else int(share * 100) / 100


def default_workers(
    nodes: Nodes, without_gpus: int, gpus_per_worker: float | None = None, accelerator_type: str | None = None
) -> int:
    """Return the number of workers to use by default: one for each GPU, or `without_gpus` to compute on CPUs.

    Raises BadInput if GPUs, or those of a type, are asked for and there are none yet to be counted.
    """
    if gpus_per_worker == 0:
        return without_gpus
    if accelerator_type:
        check_accelerator_type(nodes, accelerator_type, gpus_per_worker)
    num_gpus = int(nodes.gpus(accelerator_type))
    if gpus_per_worker and not num_gpus and not nodes.is_local:
        kind = f" of the type {accelerator_type}" if accelerator_type else ""
        raise BadInput(
            f"the Ray cluster at {nodes.address} has no GPU{kind} now: pass --num_workers to say how many to wait for"
        )
    return num_gpus or without_gpus


def say_what_lacks(nodes: Nodes, num_workers: int, share: Share) -> None:
    """Say so if a cluster cannot hold all workers at present."""
    room = nodes.room(share)
    if not nodes.is_local and room < num_workers:
        types = f", with {_list_types(nodes)}," if share.accelerator_type else ""
        say(
            f"warning: {describe(num_workers, share)} are asked for, and the cluster's {len(nodes.each)} nodes{types} "
            f"hold {room} of them: the others wait for more nodes"
        )


def describe(num_workers: int, share: Share) -> str:
    """Return a text such as "2 workers of 1 CPU and 1 GPU"."""
    amounts = ((share.cpus, "CPU"), (share.gpus, "GPU"))
    parts = [f"{amount:g} {name}{'s' if amount > 1 else ''}" for amount, name in amounts if amount]
    kind = f" of the type {share.accelerator_type}" if share.accelerator_type else ""
    return f"{num_workers} worker{'s' if num_workers > 1 else ''} of {' and '.join(parts) or 'no CPU'}{kind}"


class Waiting:
    """Says what a run on a cluster waits for while none of its workers gives a sign of life.

    is_group: whether all workers are placed at once, as Ray Train does.
    """

    def __init__(self, num_workers: int, share: Share, is_group: bool = True) -> None:
        self.num_workers, self.share, self.is_group = num_workers, share, is_group
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
            say(f"waiting for {describe(self.num_workers, self.share)}: {describe_free(self.share.accelerator_type)}")
        return waited

    def _is_short(self) -> bool:
        """Return whether the cluster lacks room; if not, the workers are starting."""
        import ray

        bundle = self.share.resources
        groups = [
            group
            for group in ray.util.placement_group_table().values()
            if [dict(each) for each in group["bundles"].values()] == [bundle] * self.num_workers
        ]
        if groups and self.is_group:
            return any(group["state"] in ("PENDING", "RESCHEDULING") for group in groups)
        free, nodes = ray.available_resources(), nodes_up()
        # Ray tells what is free on all nodes together: GPUs of other types may be all that is free.
        others = {"GPU": nodes.gpus() - nodes.gpus(self.share.accelerator_type)}
        return any(free.get(name, 0) - others.get(name, 0) < amount for name, amount in bundle.items())


def nodes_up(is_local: bool = True, address: str = "local") -> Nodes:
    """Return the nodes of the Ray that this process has joined, as they are now."""
    import ray

    return Nodes(tuple(node["Resources"] for node in ray.nodes() if node["Alive"]), is_local, address)


def describe_free(accelerator_type: str | None = None) -> str:
    """Return a text such as "the cluster has 5 CPUs and 0 GPUs free, on 3 nodes"."""
    import ray

    free, nodes = ray.available_resources(), nodes_up()
    cpus, gpus = (free.get(name, 0) for name in ("CPU", "GPU"))
    text = f"the cluster has {cpus:g} CPUs and {gpus:g} GPUs free, on {len(nodes.each)} nodes"
    if accelerator_type is None:
        return text
    count = sum(TYPE + accelerator_type in node for node in nodes.each)
    return f"{text}, {count} of them with GPUs of this type"
