"""The training loop of a worker, for every script that trains."""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import folders
from common.errors import CheckFailed
from training import checkpoints, parallel
from training.logs import StepLog
from training.optimizer import DIVERGED, REMEDY, Optimizer
from utils import step_seed

STOP = "stop"


def stop_asked(config):
    """Return whether the driver has asked the workers to save and stop."""
    return (Path(config["work_dir"]) / STOP).exists()


def is_due(step, every, last):
    """Return whether `step` is one of every `every` steps, or the last."""
    return step % every == 0 or step == last


@dataclass
class Run:
    """What a worker trains with: of the script, what `train_steps` calls.

    batch(step, micro): the tensors of a batch; losses(batch): those named `loss_names`, the first is minimised.
    after_step(step): what follows each step; validate(step): further figures to log at it, or none;
    draw(step): pictures to show at it by name, or none, on the worker of rank 0.
    saves: whether this worker takes part in saving; write(folder): writes its part of a checkpoint.
    """

    step: int
    model: Any
    optimizer: Optimizer
    batch: Callable
    losses: Callable
    loss_names: tuple
    dtype: Any
    saves: bool
    write: Callable
    after_step: Callable = lambda step: None
    validate: Callable = lambda step: {}
    draw: Callable = lambda step: {}


def accumulate_gradients(run, step, config, place):
    """Leave the gradients of one optimizer step in place; return this worker's mean losses [len(run.loss_names)]."""
    import torch

    accumulation = config["gradient_accumulation_steps"]
    losses = torch.zeros(len(run.loss_names), device=place.device)
    for micro in range(accumulation):
        batch = run.batch(step, micro)
        wait = place.world_size > 1 and micro < accumulation - 1  # gradients are averaged once, after the last
        with parallel.no_sync(run.model) if wait else contextlib.nullcontext():
            losses += add_gradients(run, batch, place, 1 / accumulation)
    return losses


def add_gradients(run, batch, place, weight=1.0):
    """Add the gradients of a batch times `weight`; return its losses [len(run.loss_names)] times `weight`."""
    import torch

    batch = {name: value.to(place.device, non_blocking=True) for name, value in batch.items()}
    with torch.autocast(place.device.type, run.dtype, enabled=run.dtype != torch.float32):
        parts = run.losses(batch=batch)
    run.optimizer.scaler.scale(parts[0] * weight).backward()
    return torch.stack(parts).detach() * weight


def settle_buckets(run, place):
    """Let DDP form its buckets before the first step, by a backward pass whose gradients are dropped.

    It forms them anew after its first one, and they decide in which order three or more gradients are added: a run
    that goes on would differ from one that was never stopped. Two are added alike in either order.
    """
    if place.world_size < 3 or not hasattr(run.model, "reducer"):
        return
    first, batch, start = run.batch(run.step, 0), run.batch, run.step
    add_gradients(run, first, place)
    run.optimizer.adamw.zero_grad(set_to_none=True)
    run.batch = lambda step, micro: first if (step, micro) == (start, 0) else batch(step, micro)


def train_steps(run, config, place):
    """Train from step `run.step` to config["max_train_steps"], or until asked to stop; return the step reached."""
    import torch

    step, last, sealing = run.step, config["max_train_steps"], None
    stopping = is_stopped = False
    log = StepLog(config["work_dir"], step) if place.rank == 0 else None
    if log:
        log.show(step, run.draw(step))
    if step < last:
        settle_buckets(run, place)
    with ThreadPoolExecutor(1) as executor:
        while step < last and not is_stopped:
            torch.manual_seed(step_seed(config["seed"], step, place.rank))  # dropout's, where a model has it
            losses = accumulate_gradients(run, step, config, place)
            grad_norm = run.optimizer.step(step)
            step += 1
            run.after_step(step)
            values = run.validate(step)
            is_logged = is_due(step, config["log_every"], last)
            if is_logged:
                values |= dict(zip(run.loss_names, place.mean(losses).tolist(), strict=True))
                values |= {"grad_norm": grad_norm.item(), "lr": run.optimizer.lr(step - 1)}
            # All workers must agree to stop; on GPUs they wait for each other there, and do so at logged steps alone.
            asks = is_logged or place.world_size == 1 or place.device.type == "cpu"
            stopping = stopping or (asks and place.any(stop_asked(config)))
            is_to_save = stopping or is_due(step, config["checkpointing_steps"], last)
            # Not while steps are skipped: each time that the command is run again would go a few steps further. A run
            # that is asked to stop goes on to the next good step; is_good ends one that has none.
            is_good = run.optimizer.is_good() if is_to_save or is_logged or place.device.type == "cpu" else None
            is_saved = is_to_save and (is_good or step == last)
            is_stopped = stopping and is_saved
            if place.rank == 0 and (values or is_saved):
                folders.check_owner(Path(config["work_dir"]) / folders.LOCK, config["owner"])
            if log and values:
                log.write(step, **values)
            if sealing and (sealing.done() or is_saved):
                sealing.result()  # raises what went wrong with the checkpoint before
            if run.saves and is_saved:
                sealing = save(run, step, config, place, executor)
            if log:
                log.show(step, run.draw(step))
    if sealing:
        sealing.result()
    if log:
        log.close()
    return step


def save(run, step, config, place, executor):
    """Write a checkpoint; return the future of its sealing, which `executor` does beside the next steps, or None.

    All the workers that take part in it call this.
    """
    import torch.distributed as dist

    if not all(bool(parameter.isfinite().all()) for parameter in parallel.local(run.optimizer.parameters)):
        raise CheckFailed(f"{DIVERGED}: weights that are not finite at step {step}; {REMEDY}")
    facts = {"settings": config["settings"], "scaler": run.optimizer.scaler.state_dict()}
    keep = config["checkpoints_total_limit"]
    shared = {"rank": place.rank, "barrier": dist.barrier} if parallel.is_sharded(run.model) else {}
    return checkpoints.save_checkpoint(config["work_dir"], step, run.write, facts, keep, executor=executor, **shared)
