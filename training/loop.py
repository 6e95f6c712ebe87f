"""The training loop of a worker: the same for every script that trains."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from common import board
from common.errors import Away, CheckFailed
from common.no_gc import no_gc
from common.objects import same_copy
from common.outages import working
from common.storage import is_remote
from training import checkpoints, parallel, work_folder
from training.checkpoints import Start
from training.logs import StepLog
from training.optimizer import DIVERGED, REMEDY, Optimizer
from training.task import Schedule, Task
from training.workers import Place, Reports, find_place
from utils import step_seed

if TYPE_CHECKING:
    import torch

T = TypeVar("T", bound=Task)


def is_due(step: int, every: int, last: int) -> bool:
    """Return whether `step` is a multiple of `every`, or the last step."""
    return step % every == 0 or step == last


@dataclass
class Run:
    """What a script gives to `train_steps`.

    step: steps taken so far. passes(step, micro): the forward passes of one batch, each as the arguments of `losses`:
    {"batch": tensors, ...}. losses(batch=..., ...): the losses `loss_names`, of which the first is minimised; those of
    the passes of a batch add up to its losses. saves: whether this worker takes part in saving. write(folder): writes
    this worker's part of a checkpoint. after_step(step): called after each step. validate(step): further values to log,
    or none. draw(step): validation images by name, or none; called on rank 0 only.
    """

    step: int
    model: Any
    optimizer: Optimizer
    passes: Callable[[int, int], list[dict[str, Any]]]
    losses: Callable[..., tuple[torch.Tensor, ...]]
    loss_names: tuple[str, ...]
    dtype: torch.dtype
    saves: bool
    write: Callable[[Path], None]
    after_step: Callable[[int], None] = lambda step: None
    validate: Callable[[int], dict[str, float]] = lambda step: {}
    draw: Callable[[int], dict[str, Any]] = lambda step: {}


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


def accumulate_gradients(run: Run, step: int, num_batches: int, place: Place) -> torch.Tensor:
    """Compute the gradients of one optimizer step; return this worker's mean losses [len(run.loss_names)]."""
    import torch

    losses = torch.zeros(len(run.loss_names), device=place.device)
    for micro in range(num_batches):
        passes = run.passes(step, micro)
        for number, arguments in enumerate(passes):
            is_last = micro == num_batches - 1 and number == len(passes) - 1
            wait = place.world_size > 1 and not is_last  # one all-reduce a step, after its last pass
            with parallel.no_sync(run.model) if wait else contextlib.nullcontext():
                losses += add_gradients(run, arguments, place, 1 / num_batches)
    return losses


def add_gradients(run: Run, arguments: dict[str, Any], place: Place, weight: float = 1.0) -> torch.Tensor:
    """Add `weight` times the gradients of a pass; return `weight` times its losses [len(run.loss_names)]."""
    import torch

    batch = {name: value.to(place.device, non_blocking=True) for name, value in arguments["batch"].items()}
    with torch.autocast(place.device.type, run.dtype, enabled=run.dtype != torch.float32):
        parts = run.losses(**{**arguments, "batch": batch})
    run.optimizer.scaler.scale(parts[0] * weight).backward()
    return torch.stack(parts).detach() * weight


def settle_buckets(run: Run, place: Place) -> None:
    """Make DDP form its final buckets before the first step, with a backward pass whose gradients are dropped.

    DDP forms its buckets anew after its first backward pass, and the buckets decide in which order the gradients of
    three or more workers are added: a resumed run would differ from an uninterrupted one. Two are added alike in either
    order.
    """
    if place.world_size < 3 or not hasattr(run.model, "reducer"):
        return
    first, passes, start = run.passes(run.step, 0), run.passes, run.step
    add_gradients(run, first[0], place)
    run.optimizer.adamw.zero_grad(set_to_none=True)
    run.passes = lambda step, micro: first if (step, micro) == (start, 0) else passes(step, micro)


# ---------------------------------------------------------------------------------------------------------------------
# Saving and stopping


class Saver:
    """Decides after each step whether to save and to stop, and saves; all workers decide alike.

    Checkpoints are sealed (read for their sha256, synced and renamed, or uploaded), and the log is copied to an object
    store, in a thread beside the next steps.
    """

    def __init__(
        self, run: Run, task: Task, place: Place, executor: ThreadPoolExecutor, reports: Reports | None = None
    ) -> None:
        import torch.distributed as dist

        self.run, self.task, self.place, self.executor = run, task, place, executor
        self.reports = reports or Reports(place)
        self.copier = work_folder.Copier(task.output.held)
        self.stopping = False
        self.sharing: dict[str, Any] = {}  # arguments of save_checkpoint if each worker writes a share
        if parallel.is_sharded(run.model):
            gather = place.make_gather() if is_remote(task.output.work_dir) else None
            self.sharing = {"rank": place.rank, "barrier": dist.barrier, "gather": gather}
        self.pending: list[Future] = []  # what the thread does with the newest checkpoint and the log

    def decide(self, step: int, is_logged: bool) -> tuple[bool, bool]:
        """Return whether to save at this step, and whether to stop after it."""
        schedule, on_cpu = self.task.schedule, self.place.device.type == "cpu"
        # All workers must agree to stop. On GPUs they wait for each other to do so, therefore only at logged steps.
        asks = is_logged or self.place.world_size == 1 or on_cpu
        if is_logged:
            self.reports.ask()
        is_asked = board.current().stop_asked() or self.reports.is_preempted
        self.stopping = self.stopping or (asks and self.place.any(is_asked))
        is_to_save = self.stopping or is_due(step, schedule.checkpointing_steps, schedule.max_train_steps)
        # A skipped step is not saved: each run of the command would get only a few steps further. A run that is asked
        # to stop continues to the next good step; is_good ends a run that has none.
        is_good = self.run.optimizer.is_good() if is_to_save or is_logged or on_cpu else None
        is_saved = bool(is_to_save and (is_good or step == schedule.max_train_steps))
        return is_saved, self.stopping and is_saved

    def save(self, step: int, values: dict[str, float]) -> None:
        """Write a checkpoint and start to seal it, and report the values of its step to Ray; all workers call this."""
        run, task = self.run, self.task
        self.reports.metrics |= values
        self.reports.report(step, str(checkpoints.checkpoint_path(task.output.work_dir, step)))
        if not run.saves:
            return
        if not all(bool(parameter.isfinite().all()) for parameter in parallel.local(run.optimizer.parameters)):
            raise CheckFailed(f"{DIVERGED}: weights that are not finite at step {step}; {REMEDY}")
        facts = {"settings": task.output.settings, "scaler": run.optimizer.scaler.state_dict()}
        keep = task.schedule.checkpoints_total_limit
        options: dict[str, Any] = {"executor": self.executor, "held": task.output.held, **self.sharing}
        self.pending = [self.executor.submit(self.copier.copy)] if self.place.rank == 0 else []
        sealing = checkpoints.save_checkpoint(task.output.work_dir, step, run.write, facts, keep, **options)
        self.pending += [sealing] if sealing else []

    def save_before_exit(self, step: int, first: int) -> None:
        """Write and seal a checkpoint of `step`, the steps taken when a batch could not be read; first: those at start.

        Called by the only worker there is.
        """
        self.check(wait=True)
        is_saved = is_due(step, self.task.schedule.checkpointing_steps, self.task.schedule.max_train_steps)
        if step > first and not is_saved and self.run.optimizer.is_good():
            self.save(step, {})
            self.check(wait=True)

    def check(self, wait: bool) -> None:
        """Raise what went wrong with the newest checkpoint or a copy of the log, if that is done or `wait`."""
        for each in self.pending:
            if wait or each.done():
                each.result()


def check_same_step(step: int, place: Place) -> None:
    """Raise CheckFailed if the workers are about to train from different steps."""

    if place.any(place.share(step) != step):
        raise CheckFailed(f"worker {place.rank} starts at step {step}, another one does not: run the command again")


# ---------------------------------------------------------------------------------------------------------------------
# Steps


def take_step(run: Run, step: int, schedule: Schedule, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the optimizer step that follows `step` steps; return this worker's losses and the gradient norm."""
    import torch

    torch.manual_seed(step_seed(schedule.seed, step, place.rank))  # for dropout, if a model has it
    losses = accumulate_gradients(run, step, schedule.gradient_accumulation_steps, place)
    grad_norm = run.optimizer.step(step)
    run.after_step(step + 1)
    return losses, grad_norm


def train_steps(run: Run, task: Task, place: Place, reports: Reports | None = None) -> int:
    """Train from step `run.step` to the last, or until asked to stop; return the step reached."""
    step, schedule, is_stopped = run.step, task.schedule, False
    last = schedule.max_train_steps
    log = StepLog(work_folder.scratch(task.output.work_dir), step) if place.rank == 0 else None
    if log:
        log.show(step, run.draw(step))
    if step < last:
        settle_buckets(run, place)
    with ThreadPoolExecutor(1) as executor:
        saver = Saver(run, task, place, executor, reports)
        while step < last and not is_stopped:
            try:
                losses, grad_norm = take_step(run, step, schedule, place)
            except Away:
                if place.world_size > 1:  # the others wait within this step for this worker's gradients
                    raise
                saver.save_before_exit(step, run.step)
                if not board.current().stop_asked():
                    raise
                break
            step += 1
            values = run.validate(step)
            is_logged = is_due(step, schedule.log_every, last)
            if is_logged:
                values |= dict(zip(run.loss_names, place.mean(losses).tolist(), strict=True))
                values |= {"grad_norm": grad_norm.item(), "lr": run.optimizer.lr(step - 1)}
            is_saved, is_stopped = saver.decide(step, is_logged)
            if place.rank == 0 and (values or is_saved):
                task.output.held.check()  # workers can outlive their driver by seconds
            if log and values:
                log.write(step, **values)
            saver.check(wait=is_saved)
            if is_saved:
                saver.save(step, values)
            if log:
                log.show(step, run.draw(step))
    saver.check(wait=True)
    if log:
        log.close()
        saver.copier.copy()
    return step


@working()
def work(
    task: T, prepare: Callable[[T, Place, Start], Run], publish: Callable[[T, int, torch.device], None]
) -> dict[str, int | bool]:
    """Do all the work of one worker: train from the newest checkpoint to the last step; rank 0 publishes.

    prepare(task, place, start): returns the Run. publish(task, step, device): publishes the checkpoint of `step`.
    """
    with no_gc():
        place = find_place(task.compute.num_workers, task.compute.is_on_cluster)
        model_dir = same_copy(task.output.model_dir, "--model_dir")
        task = replace(task, output=replace(task.output, model_dir=str(model_dir)))
        if place.rank == 0:
            work_folder.fetch(task.output.work_dir)
        run = prepare(task, place, checkpoints.find_start(task.output.work_dir, place))
        check_same_step(run.step, place)
    first, last = run.step, task.schedule.max_train_steps
    reports = Reports(place)
    step = train_steps(run, task, place, reports)
    del run  # frees the optimizer's memory for the pipeline
    if place.rank == 0 and step >= last:
        publish(task, step, place.device)
    reports.close()
    return {"step": step, "trained": step - first, "stopped": step < last}
