"""A training worker: its place among the others, and how its messages reach the driver."""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from common import board
from common.errors import one_line
from common.messages import listen
from common.uris import shown

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
SENT_WITHIN = 3  # seconds; Ray takes a report every two seconds

_told_to_end = threading.Event()  # by a SIGTERM to this process


@dataclass(frozen=True)
class Place:
    """A worker's place among the workers; local_world_size: workers on its node; is_on_cluster: one that was joined."""

    rank: int
    world_size: int
    device: torch.device
    local_world_size: int = 1
    is_on_ray: bool = False
    is_on_cluster: bool = False

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor over all workers, on each of them (all-reduce)."""
        import torch.distributed as dist

        if self.world_size > 1:
            dist.all_reduce(values)
        return values / self.world_size

    def share(self, value: T) -> T:
        """Return the `value` of rank 0 on every worker; plain values."""
        import torch.distributed as dist

        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def make_gather(self) -> Callable[[T], list[T]]:
        """Return gather(value), which returns the values of all workers by rank, on each of them; plain values.

        It has a process group of its own, so that another thread can call it beside this one's collectives. All workers
        call this.
        """
        import torch.distributed as dist

        if self.world_size == 1:
            return lambda value: [value]
        group = dist.new_group(backend="gloo")

        def gather(value: T) -> list[T]:
            values: list[Any] = [None] * self.world_size
            dist.all_gather_object(values, value, group=group)
            return values

        return gather

    def share_tensor(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Return rank 0's tensor on every worker; the others pass None."""
        import torch
        import torch.distributed as dist

        if self.world_size == 1:
            assert tensor is not None
            return tensor
        shape, dtype = self.share(((), torch.float32) if tensor is None else (tuple(tensor.shape), tensor.dtype))
        on_device = (torch.empty(shape, dtype=dtype) if tensor is None else tensor).to(self.device)
        dist.broadcast(on_device, src=0)
        return on_device

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any worker; all workers call this at the same step."""
        import torch

        return flag if self.world_size == 1 else self.mean(torch.tensor(float(flag), device=self.device)).item() > 0


def find_place(num_workers: int, is_on_cluster: bool = False) -> Place:
    """Return the place of this worker; `num_workers` 0 is a process without Ray."""
    import torch
    import torch.distributed as dist

    if num_workers == 0:
        return Place(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    import ray.train.torch

    device, on_ray = ray.train.torch.get_device(), {"is_on_ray": True, "is_on_cluster": is_on_cluster}
    if not dist.is_initialized():
        return Place(0, 1, device, **on_ray)
    local_world_size = ray.train.get_context().get_local_world_size()
    return Place(dist.get_rank(), dist.get_world_size(), device, local_world_size, **on_ray)


class Reports:
    """Sends metrics to Ray Train, and asks it for notices that a node is about to be taken away.

    Both wait for the other workers, and a report for Ray's controller, which looks every two seconds: they are made in
    a thread, so that no step waits. All workers make the same calls in the same order. Without Ray nothing is sent.
    """

    def __init__(self, place: Place) -> None:
        self.place, self.has_notice, self.metrics = place, False, {}
        self.thread = ThreadPoolExecutor(1) if place.is_on_ray else None

    @property
    def is_preempted(self) -> bool:
        """Whether this worker, or its node, is about to be taken away."""
        return self.has_notice or _told_to_end.is_set()

    def ask(self) -> None:
        """Ask for notices; `is_preempted` is true some time after there was one."""
        if self.thread and self.place.is_on_cluster:
            self.thread.submit(self._ask)

    def _ask(self) -> None:
        import ray.train

        self.has_notice = self.has_notice or ray.train.get_preemption_info() is not None

    def report(self, step: int, checkpoint: str) -> None:
        """Send `metrics` and the location of a checkpoint, for Ray's dashboard and Result.metrics."""
        if self.thread:
            self.thread.submit(self._report, {"step": step, **self.metrics}, checkpoint)

    def _report(self, metrics: dict[str, float], checkpoint: str) -> None:
        import ray.train

        if self.place.rank:
            ray.train.report(metrics)
            return
        with tempfile.TemporaryDirectory() as folder:  # Ray drops metrics without a checkpoint: it gets ours by name
            Path(folder, "checkpoint.json").write_text(json.dumps({"checkpoint": shown(checkpoint), **metrics}))
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))

    def close(self) -> None:
        """Wait until all is sent, for at most SENT_WITHIN seconds."""
        if self.thread:
            done = self.thread.submit(lambda: None)
            with contextlib.suppress(TimeoutError):
                done.result(SENT_WITHIN)
            self.thread.shutdown(wait=False, cancel_futures=True)


def take_sigterm_as_notice() -> None:
    """Let a first SIGTERM make the workers save and start again, as a notice does; a second one ends this process.

    Called in the main thread of a worker, where signals arrive; it trains in another thread.
    """
    earlier: Any = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: Any) -> None:
        if _told_to_end.is_set():
            earlier(number, frame)
        _told_to_end.set()

    signal.signal(signal.SIGTERM, handle)


def tell_driver(train_loop: Callable[[dict], dict], board_actor: Any, config: dict) -> dict[str, Any]:
    """Return train_loop(config) on a Ray worker, with this board; rank 0 passes its messages on."""
    import ray.train

    remote = board.RemoteBoard(board_actor, beats=True)
    board.use(remote)
    if ray.train.get_context().get_world_rank() == 0:
        listen(lambda message: remote.tell(one_line(message)))
    return train_loop(config)
