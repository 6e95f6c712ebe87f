"""Batches of pre-training: noise, timesteps, captions that are dropped, and the held-out rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipelines.objectives import Objective
from utils import NO_CAPTION, ROW_NOISE, VALIDATION, draw_noise, row_rng

if TYPE_CHECKING:
    import torch

from pretraining.streams import Arrays, Load, Order, Piece, batch_rows, pick_rows, read_pieces

Item = TypeVar("Item")
Batch = dict[str, Any]  # {field: tensor [B, ...]}; captions that are text are an array of objects [B]


@dataclass(frozen=True)
class Batching:
    """How rows become batches.

    batch_size: rows of a worker in a batch. caption_dropout: share of the rows without caption. objective: draws the
    timesteps.
    """

    batch_size: int
    gradient_accumulation_steps: int
    caption_dropout: float
    seed: int
    objective: Objective


def training_batches(
    order: Order,
    load: Load,
    first_step: int,
    last_step: int,
    batching: Batching,
    no_caption: dict[str, Any],
    is_ahead: bool = False,
) -> Iterator[Batch]:
    """Yield this worker's batches for steps `first_step` to `last_step - 1`, as returned by with_noise.

    no_caption: the fields of no caption, without a dimension of rows; they replace a share `caption_dropout` of the
    captions. is_ahead: whether a thread reads pieces before they are needed, half as many as are in use.
    """
    size, accumulation, seed = batching.batch_size, batching.gradient_accumulation_steps, batching.seed
    position = first_step * accumulation * size
    num_rows = (last_step - first_step) * accumulation * size
    pieces = read_pieces(order, load, position, num_rows)
    pieces = ahead(pieces, -(-order.num_streams // order.world_size // 2)) if is_ahead else pieces
    batches = batch_rows(order, pieces, position, num_rows, size)
    for step in range(first_step, last_step):
        for micro, batch in zip(range(accumulation), batches, strict=False):
            first = order.rank + order.world_size * micro * size  # in the global batch
            rows = range(first, first + order.world_size * size, order.world_size)
            chances = np.array([row_rng(seed, NO_CAPTION, step, row).random() for row in rows])
            for name, value in no_caption.items():
                batch[name][chances < batching.caption_dropout] = value
            shape = batch["mean"].shape[1:]
            drawn = [draw_noise(seed, ROW_NOISE, step, row, shape, batching.objective.draw_time) for row in rows]
            yield with_noise(batch, drawn)


def with_noise(batch: Arrays, drawn: list[tuple[np.ndarray, np.ndarray, int]]) -> Batch:
    """Return a batch as tensors, with the (noise, posterior noise, timestep) drawn for each row.

    mean, std: [B, c, h, w] as they are read, float16 or float32; noise, posterior_noise: float32; timesteps: [B]
    int64; captions: as in pipelines.conditions, [B, ...], as they are read, or objects [B], str or None for no caption;
    for SDXL time_ids: [B, 6] float32.
    """
    import torch

    noise, posterior_noise, timesteps = (np.stack(each) for each in zip(*drawn, strict=True))
    fields = {**batch, "noise": noise, "posterior_noise": posterior_noise, "timesteps": timesteps}
    return {
        name: values if values.dtype == object else torch.from_numpy(np.ascontiguousarray(values))
        for name, values in fields.items()
    }


def pin(batch: Batch) -> Batch:
    """Return a batch in pinned memory, from which it is copied to a GPU while this process goes on."""
    return {name: value.pin_memory() if hasattr(value, "pin_memory") else value for name, value in batch.items()}


def hold_out(chunk_rows: np.ndarray, num_rows: int) -> tuple[np.ndarray, list[Piece]]:
    """Return (number of rows in each chunk left for training, pieces of the last `num_rows` rows)."""
    kept, pieces = np.array(chunk_rows), []
    for chunk in reversed(range(len(kept))):
        rows = int(kept[chunk])
        take = min(rows, num_rows)
        if not take:
            break
        pieces.append({"chunk": chunk, "first": rows - take, "last": rows, "epoch": 0})
        kept[chunk], num_rows = rows - take, num_rows - take
    return kept, pieces[::-1]


def choose_rows(
    chunk_rows: np.ndarray, num_rows: int, apart: np.ndarray | None = None
) -> tuple[np.ndarray, list[Piece]]:
    """Return (number of rows in each chunk to train on, pieces of the rows for the validation loss).

    apart: number of rows in each chunk of a data set of its own, whose first `num_rows` rows, or all if that is 0, are
    taken; without it the last `num_rows` rows are held out.
    """
    if apart is None:
        return hold_out(chunk_rows, num_rows)
    pieces = [{"chunk": chunk, "first": 0, "last": rows, "epoch": 0} for chunk, rows in enumerate(apart.tolist())]
    return chunk_rows, cut(pieces, 0, num_rows or int(apart.sum()))


def cut(pieces: list[Piece], first: int, last: int) -> list[Piece]:
    """Return the pieces of rows `first` to `last - 1` of pieces, counted over all of them."""
    found, start = [], 0
    for piece in pieces:
        low, high = (max(0, each - start) + piece["first"] for each in (first, last))
        if low < min(high, piece["last"]):
            found.append({**piece, "first": low, "last": min(high, piece["last"])})
        start += piece["last"] - piece["first"]
    return found


def validation_batches(
    pieces: list[Piece], load: Load, place: Any, batching: Batching
) -> list[tuple[Batch, torch.Tensor]]:
    """Return (batch, row weights [B]) of this worker's share of the held-out rows, with fixed noise and timesteps.

    Timesteps are evenly spaced; the latents are the posterior's mean. Shares are padded with rows of weight 0, so that
    all workers have the same number of batches. place: the worker's `rank` and `world_size`.
    """
    import torch

    count, size = sum(piece["last"] - piece["first"] for piece in pieces), batching.batch_size
    share = -(-count // (place.world_size * size)) * size
    first = min(place.rank * share, count - 1)
    parts = load(cut(pieces, first, min(first + share, count)))
    rows = [(part, row) for part in parts for row in range(len(part["mean"]))]
    batches = []
    for start in range(place.rank * share, (place.rank + 1) * share, size):
        numbers = np.arange(start, start + size)
        chosen = np.minimum(numbers - first, len(rows) - 1)  # beyond the last row its weight is 0
        held = pick_rows([rows[number] for number in chosen.tolist()])
        drawn = []
        for number in (numbers % count).tolist():
            noise = row_rng(batching.seed, VALIDATION, 0, number).standard_normal(held["mean"].shape[1:], np.float32)
            timestep = int((number + 0.5) / count * batching.objective.num_train_timesteps)
            drawn.append((noise, np.zeros_like(noise), timestep))
        batches.append((with_noise(held, drawn), torch.from_numpy(numbers < count).float() / count))
    return batches


def ahead(iterator: Iterator[Item], count: int) -> Iterator[Item]:
    """Yield the items of an iterator, which runs in a thread up to `count` items ahead."""
    end: Any = object()
    with ThreadPoolExecutor(1) as pool:
        pending = deque(pool.submit(next, iterator, end) for _ in range(max(1, count)))
        while (item := pending.popleft().result()) is not end:
            pending.append(pool.submit(next, iterator, end))
            yield item
