"""The batches of a training worker: from the data to what its steps take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pipelines.objectives import Objective
from pretraining.batches import Batch, Batching, ahead, choose_rows, pin, training_batches, validation_batches
from pretraining.captions import CaptionEncoder, to_numpy
from pretraining.columns import TEXT
from pretraining.latents import LatentFiles
from pretraining.online import RawImages, make_load
from pretraining.streams import Order

if TYPE_CHECKING:
    import torch


def make_batches(
    task: Any, place: Any, dtype: torch.dtype, first_step: int, objective: Objective
) -> tuple[Iterator[Batch], list[tuple[Batch, torch.Tensor]], Callable[[Batch], Batch]]:
    """Return (this worker's training batches from `first_step` on, its validation batches, fill).

    fill(batch): encodes its captions, if they are text, on the worker's device. task: of pretrain.py. place: the
    worker's. dtype: of the text encoders.
    """
    config, schedule = task.pretraining, task.schedule
    kind = RawImages if config.online else LatentFiles
    data, apart = kind(**config.data), kind(**config.validation_data) if config.validation_data else None
    load = make_load(data, config.pool)
    own = apart.chunk_rows if apart else None
    chunk_rows, held_out = choose_rows(data.chunk_rows, config.num_validation_rows, own)
    order = Order(chunk_rows, place.rank, place.world_size, config.num_streams, schedule.seed)
    encoder = CaptionEncoder(task.output.model_dir, config.batch_size_per_worker, dtype, place.device)
    no_caption = {TEXT: None} if data.has_texts else to_numpy(encoder.no_caption)
    sizes = config.batch_size_per_worker, schedule.gradient_accumulation_steps
    batching = Batching(*sizes, config.caption_dropout, schedule.seed, objective)
    is_ahead = bool(config.pool["num_workers"]) or not config.online  # encoding in this process alternates with steps
    batches = training_batches(order, load, first_step, schedule.max_train_steps, batching, no_caption, is_ahead)
    if place.device.type == "cuda":
        batches = map(pin, batches)
    if is_ahead:
        batches = ahead(batches, config.prefetch_batches)
    load = make_load(apart, config.pool) if apart else load
    held = validation_batches(held_out, load, place, batching) if held_out else []
    has_texts = data.has_texts or (apart is not None and apart.has_texts)
    return batches, held, encoder.fill if has_texts else lambda batch: batch
