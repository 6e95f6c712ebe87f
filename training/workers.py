"""A training worker: its place among the others, and how it tells the driver what it says."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import one_line
from common.messages import listen

SAID = "said.txt"


@dataclass(frozen=True)
class Place:
    """A worker's place among the workers."""

    rank: int
    world_size: int
    device: Any
    local_world_size: int = 1

    def mean(self, values):
        """Return the mean over the workers of a tensor, on all of them."""
        import torch.distributed as dist

        if self.world_size > 1:
            dist.all_reduce(values)
        return values / self.world_size

    def any(self, flag):
        """Return whether `flag` is true on any worker; all call this at the same step."""
        import torch

        return flag if self.world_size == 1 else self.mean(torch.tensor(float(flag), device=self.device)).item() > 0


def tell_driver(train_loop, config):
    """Return train_loop(config) on a worker of Ray; what rank 0 says goes to the file SAID, which the driver shows."""
    import ray.train

    if ray.train.get_context().get_world_rank() == 0:
        path = Path(config["work_dir"]) / SAID

        def write(message):
            with path.open("a", encoding="utf-8") as file:
                file.write(one_line(message) + "\n")

        listen(write)
    return train_loop(config)


def find_place(num_workers):
    """Return this worker's place; `num_workers` 0 is a process without Ray."""
    import torch
    import torch.distributed as dist

    if num_workers == 0:
        return Place(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    import ray.train.torch

    device = ray.train.torch.get_device()
    if not dist.is_initialized():
        return Place(0, 1, device)
    return Place(dist.get_rank(), dist.get_world_size(), device, ray.train.get_context().get_local_world_size())
