"""A training worker: its place among the others, and how its messages reach the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from common import board
from common.errors import one_line
from common.messages import listen

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


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

    def share(self, value: T) -> T:
        """Return the `value` of rank 0 on every worker; plain values."""
        import torch.distributed as dist

        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

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


def tell_driver(train_loop: Callable[[dict], dict], board_name: str, config: dict) -> dict[str, Any]:
    """Return train_loop(config) on a Ray worker, with the board of this name; rank 0 passes its messages on."""
    import ray.train

    remote = board.RemoteBoard(board_name, beats=True)
    board.use(remote)
    if ray.train.get_context().get_world_rank() == 0:
        listen(lambda message: remote.tell(one_line(message)))
    return train_loop(config)
