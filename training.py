"""The workers' side of a training, for every script that trains: the place among them, the steps and their log."""

import contextlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoint
import parallel
from cli import CheckFailed, listen, one_line
from utils import step_seed

LOG = "log.jsonl"
MAX_LINE = 8192  # bytes of a line of it
STOP = "stop"
SAID = "said.txt"
DIVERGED = "the run diverged"
REMEDY = "nothing is published: take a smaller --lr, or --mixed_precision no"
MAX_BAD_STEPS = 5  # skipped one after another, for a gradient that is not finite, before a run gives up
MAX_BAD_STEPS_FP16 = 25  # fp16 skips steps while it looks for a loss scale


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


class Optimizer:
    """AdamW with a learning-rate schedule, clipping and, for fp16, a loss scale, all over one list of parameters.

    parameters: kept as a list: a generator would be empty by the time that gradients are clipped.
    use_8bit: whether bitsandbytes keeps the averages in 8 bits (arXiv 2110.02861).
    """

    def __init__(self, parameters, lr, weight_decay, max_grad_norm, fp16, device, schedule, use_8bit=False):
        import torch
        from diffusers.optimization import get_scheduler

        self.parameters = list(parameters)
        if use_8bit:
            from bitsandbytes.optim import AdamW8bit

            self.adamw = AdamW8bit(self.parameters, lr=lr, weight_decay=weight_decay)
        else:
            self.adamw = torch.optim.AdamW(self.parameters, lr=lr, weight_decay=weight_decay, fused=True)
        self.scaler = torch.amp.GradScaler(device.type, enabled=fp16)
        name, num_warmup_steps, num_training_steps = schedule
        self.base_lr = lr
        steps = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
        self.lr_factor = get_scheduler(name, self.adamw, **steps).lr_lambdas[0]
        self.max_grad_norm = max_grad_norm
        is_sharded = any(hasattr(parameter, "device_mesh") for parameter in self.parameters)
        self.skips_by_itself = not use_8bit and not is_sharded  # PyTorch's fused kernel, of whole weights
        self.max_bad_steps = MAX_BAD_STEPS_FP16 if fp16 else MAX_BAD_STEPS
        self.bad_steps = torch.zeros((), device=device)  # in a row; read seldom, for that waits for the device

    def lr(self, step):
        """Return the learning rate of the step after `step` steps."""
        return self.base_lr * self.lr_factor(step)

    def step(self, step):
        """Clip and apply the gradients and return their norm before clipping; one that is not finite is not applied.

        step: steps taken before this one; the learning rate is a function of it.
        The gradients, and so the decision, are the same on all workers, and nothing waits for the device to make it.
        """
        import torch

        for group in self.adamw.param_groups:
            group["lr"] = self.lr(step)
        self.scaler.unscale_(self.adamw)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        grad_norm = grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm
        bad = (~torch.isfinite(grad_norm)).float()
        if self.scaler.is_enabled():
            self.scaler.step(self.adamw)
        elif self.skips_by_itself:
            self.adamw.found_inf = bad  # the kernel then leaves weights and averages as they are
            self.adamw.step()
        elif not bad:  # this waits for the device
            self.adamw.step()
        self.scaler.update()
        self.adamw.zero_grad(set_to_none=True)
        self.bad_steps = (self.bad_steps + 1) * bad
        return grad_norm

    def is_good(self):
        """Return whether the last step was applied; raise CheckFailed where a few in a row were not."""
        bad_steps = int(self.bad_steps)
        if bad_steps > self.max_bad_steps:
            raise CheckFailed(f"{DIVERGED}: {bad_steps} steps with a gradient that is not finite; {REMEDY}")
        return bad_steps == 0


class StepLog:
    """log.jsonl and TensorBoard of a run in `work_dir`; a run that continues drops what was logged past its step."""

    def __init__(self, work_dir, step):
        from torch.utils.tensorboard import SummaryWriter

        self.path = Path(work_dir) / LOG
        kept = [line for line in read_log(self.path) if line["step"] <= step]
        checkpoint.write_bytes(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self.tensorboard = SummaryWriter(Path(work_dir) / "tensorboard", purge_step=step + 1)

    def write(self, step, **values):
        """Log one step; a value that is not finite is null in the file."""
        line = {name: value if abs(value) < float("inf") else None for name, value in values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **line}) + "\n")
        for name, value in values.items():
            self.tensorboard.add_scalar(name, value, step)

    def show(self, step, pictures):
        """Send {name: picture [H, W, 3]} to TensorBoard."""
        for name, picture in pictures.items():
            self.tensorboard.add_image(name, picture, step, dataformats="HWC")

    def close(self):
        self.tensorboard.close()


def read_log(path):
    """Return the lines of a log.jsonl as dicts; a line that a kill cut short does not count."""
    lines = []
    try:
        texts = Path(path).read_text().splitlines()
    except FileNotFoundError:
        return lines
    for text in texts:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def read_last_line(path):
    """Return the last whole line of a log.jsonl as a dict, None where there is none; the log may be long."""
    with contextlib.suppress(FileNotFoundError), Path(path).open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LINE))
        for text in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError):
                return json.loads(text)
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Steps


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


def make_optimizer(config, modules, place, dtype, folder):
    """Return the Optimizer of the trainable weights of {"unet": module, ...}, as checkpoint `folder` left it."""
    import torch

    optimizer = Optimizer(
        [parameter for _, parameter in parallel.named_parameters(modules)],
        lr=config["lr"],
        weight_decay=config["adam_weight_decay"],
        max_grad_norm=config["max_grad_norm"],
        fp16=dtype == torch.float16,
        device=place.device,
        schedule=(config["lr_scheduler"], config["lr_warmup_steps"], config["max_train_steps"]),
        use_8bit=config.get("use_8bit_adam", False),
    )
    if folder:
        parallel.restore_optimizer(folder, modules, optimizer.adamw)
        scaler = checkpoint.read_manifest(folder)["scaler"]
        if scaler:  # none where the run was in bf16 until here
            optimizer.scaler.load_state_dict(scaler)
    return optimizer


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
                checkpoint.check_owner(Path(config["work_dir"]) / checkpoint.LOCK, config["owner"])
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
    return checkpoint.save_checkpoint(config["work_dir"], step, run.write, facts, keep, executor=executor, **shared)
