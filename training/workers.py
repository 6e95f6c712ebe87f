"""A training worker: its place among the others, and how its messages reach the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import one_line
from common.messages import listen

if TYPE_CHECKING:
    import torch

MESSAGES = "said.txt"  # in the work folder: what the worker of rank 0 says, one message a line


@dataclass(frozen=True)
class Place:
    """A worker's place among the workers; local_world_size: workers on its node."""

    rank: int
    world_size: int
    device: torch.device
    local_world_size: int = 1

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor over all workers, on each of them (all-reduce)."""
        import torch.distributed as dist

        if self.world_size > 1:
            dist.all_reduce(values)
        return values / self.world_size

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any worker; all workers call this at the same step."""
        import torch

        return flag if self.world_size == 1 else self.mean(torch.tensor(float(flag), device=self.device)).item() > 0


def find_place(num_workers: int) -> Place:
    """Return the place of this worker; `num_workers` 0 is a process without Ray."""
    import torch
    import torch.distributed as dist

    if num_workers == 0:
        return Place(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    import ray.train.torch

    device = ray.train.torch.get_device()
    if not dist.is_initialized():
        return Place(0, 1, device)
    return Place(dist.get_rank(), dist.get_world_size(), device, ray.train.get_context().get_local_world_size())


def tell_driver(train_loop: Callable[[dict], dict], config: dict) -> dict[str, Any]:
    """Return train_loop(config) on a Ray worker; rank 0 appends its messages to the file MESSAGES for the driver."""
    import ray.train

    if ray.train.get_context().get_world_rank() == 0:
        path = Path(config["output"]["work_dir"]) / MESSAGES

        def write(message: str) -> None:
            with path.open("a", encoding="utf-8") as file:
                file.write(one_line(message) + "\n")

        listen(write)
    return train_loop(config)
