"""What the training scripts share: workers on Ray Train or in this process, an optimizer step, the log of steps."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoint
from cli import BadInput, CheckFailed, Progress, Stopped, as_tool_error, stop_file
from cluster import share_resources, start_ray

LOG = "log.jsonl"
STOP = "stop"
RECORD = "run.json"  # the settings and the number of workers of the run in a work folder
MAX_BAD_STEPS = 5  # skipped one after another, for a gradient that is not finite, before a run gives up
MAX_BAD_STEPS_FP16 = 25  # fp16 skips steps while it looks for a loss scale


# ---------------------------------------------------------------------------------------------------------------------
# On a worker


@dataclass(frozen=True)
class Place:
    """A worker's place among the workers."""

    rank: int
    world_size: int
    device: Any

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


def find_place(num_workers):
    """Return this worker's place; `num_workers` 0 is a process without Ray."""
    import torch
    import torch.distributed as dist

    if num_workers == 0:
        return Place(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    import ray.train.torch

    device = ray.train.torch.get_device()
    return Place(dist.get_rank(), dist.get_world_size(), device) if dist.is_initialized() else Place(0, 1, device)


class Optimizer:
    """AdamW with a learning-rate schedule, clipping and, for fp16, a loss scale, all over one list of parameters.

    parameters: kept as a list: a generator would be empty by the time that gradients are clipped.
    """

    def __init__(self, parameters, lr, weight_decay, max_grad_norm, fp16, device, schedule):
        import torch
        from diffusers.optimization import get_scheduler

        self.parameters = list(parameters)
        self.adamw = torch.optim.AdamW(self.parameters, lr=lr, weight_decay=weight_decay, fused=True)
        self.scaler = torch.amp.GradScaler(device.type, enabled=fp16)
        name, num_warmup_steps, num_training_steps = schedule
        self.base_lr = lr
        steps = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
        self.lr_factor = get_scheduler(name, self.adamw, **steps).lr_lambdas[0]
        self.max_grad_norm = max_grad_norm
        self.bad_steps, self.max_bad_steps = 0, MAX_BAD_STEPS_FP16 if fp16 else MAX_BAD_STEPS

    def lr(self, step):
        """Return the learning rate of the step after `step` steps."""
        return self.base_lr * self.lr_factor(step)

    def step(self, step):
        """Clip and apply the gradients and return their norm before clipping; one that is not finite is not applied.

        step: steps taken before this one; the learning rate is a function of it.
        The gradients, and so the decision, are the same on all workers. Raises CheckFailed after a few in a row.
        """
        import torch

        for group in self.adamw.param_groups:
            group["lr"] = self.lr(step)
        self.scaler.unscale_(self.adamw)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        finite = bool(torch.isfinite(grad_norm))
        if finite or self.scaler.is_enabled():
            self.scaler.step(self.adamw)
        self.scaler.update()
        self.adamw.zero_grad(set_to_none=True)
        self.bad_steps = 0 if finite else self.bad_steps + 1
        if self.bad_steps > self.max_bad_steps:
            raise CheckFailed(
                f"the run diverged: {self.bad_steps} steps with a gradient that is not finite; nothing is published: "
                "take a smaller --lr, or --mixed_precision no"
            )
        return grad_norm


class StepLog:
    """log.jsonl and TensorBoard of a run in `work_dir`; a run that continues drops what was logged past its step."""

    def __init__(self, work_dir, step):
        from torch.utils.tensorboard import SummaryWriter

        self.path = Path(work_dir) / LOG
        kept = [line for line in read_log(self.path) if line["step"] <= step]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self.tensorboard = SummaryWriter(Path(work_dir) / "tensorboard", purge_step=step + 1)

    def write(self, step, **values):
        """Log one step; a value that is not finite is null in the file."""
        line = {name: value if abs(value) < float("inf") else None for name, value in values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **line}) + "\n")
        for name, value in values.items():
            self.tensorboard.add_scalar(name, value, step)

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


# ---------------------------------------------------------------------------------------------------------------------
# On the driver


def is_finished(output_dir, settings, steps, overwrite):
    """Return whether `output_dir` holds the result of these settings; raise BadInput where it holds something else."""
    output_dir = Path(output_dir)
    manifest = checkpoint.read_manifest(output_dir) or {}
    if manifest.get("settings") == settings and manifest.get("step") == steps:
        return True
    if overwrite or not output_dir.exists() or (output_dir.is_dir() and not any(output_dir.iterdir())):
        return False
    if not manifest:
        raise BadInput(f"--output_dir {output_dir} is in the way: not a whole result of ours; another, or --overwrite")
    checkpoint.check_same_settings(settings, manifest.get("settings", {}), f"--output_dir {output_dir}")
    if manifest["step"] > steps:
        raise BadInput(f"--output_dir {output_dir} is trained for {manifest['step']} steps, more than {steps}")
    return False


def open_work_dir(work_dir, settings, num_workers, overwrite):
    """Make `work_dir` the one of this run: kept where its settings are the same, emptied where nothing is lost."""
    work_dir = Path(work_dir)
    earlier = checkpoint.read_json(work_dir / RECORD).get("settings")
    if earlier not in (None, settings):
        if checkpoint.list_checkpoints(work_dir) and not overwrite:
            checkpoint.check_same_settings(settings, earlier, f"--work_dir {work_dir}")
        checkpoint.empty_folder(work_dir)
    checkpoint.write_json(work_dir / RECORD, {"settings": settings, "num_workers": num_workers})


def recorded_workers(work_dir):
    """Return the number of workers of the run in `work_dir`, None where there is none: it goes on with as many."""
    return checkpoint.read_json(Path(work_dir) / RECORD).get("num_workers")


def run_workers(train_loop, config, address=None, cpus_per_worker=None, gpus_per_worker=None, max_failures=0):
    """Run `train_loop(config)` on config["num_workers"] workers, show its log, and return what rank 0 returns.

    0 workers: this process, without Ray. A signal makes the workers save and stop; then Stopped is raised.
    config: plain JSON values, with "num_workers", "work_dir" and "max_train_steps".
    """
    work_dir = Path(config["work_dir"])
    if config["num_workers"] == 0:
        fit = train_loop
    else:
        shares = share_resources(start_ray(address), config["num_workers"], cpus_per_worker, gpus_per_worker)
        config = {**config, "num_threads": max(1, int(shares[0]))}
        fit = _make_trainer(_guard(train_loop), work_dir / "ray", config["num_workers"], *shares, max_failures)
    with stop_file(work_dir / STOP) as signals, ThreadPoolExecutor(1) as pool:
        future = pool.submit(fit, config)  # off the main thread, where Ray would take SIGINT for itself
        _follow(work_dir / LOG, config["max_train_steps"], future)
        result = future.result()
    if "error" in result:
        raise result["error"]
    shutil.rmtree(work_dir / "ray", ignore_errors=True)
    if result["stopped"] and signals:
        raise Stopped(signals[0])
    return result


def _guard(train_loop):
    """Return a `train_loop` that returns a ToolError as a result: Ray would start the workers again for it."""

    def guarded(config):
        try:
            return train_loop(config)
        except Exception as error:
            known = as_tool_error(error)
            if known is None:
                raise
            return {"error": known}

    return guarded


def _make_trainer(train_loop, storage_path, num_workers, cpus, gpus, max_failures):
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def fit(config):
        shutil.rmtree(storage_path, ignore_errors=True)
        trainer = TorchTrainer(
            train_loop,
            train_loop_config=config,
            scaling_config=ScalingConfig(
                num_workers=num_workers, use_gpu=gpus > 0, resources_per_worker={"CPU": cpus, "GPU": gpus}
            ),
            # The name is new each time: our checkpoints say where a run continues, not Ray's record of it.
            run_config=RunConfig(
                name=f"run-{time.time_ns()}",
                storage_path=str(storage_path),
                failure_config=FailureConfig(max_failures=max_failures, controller_failure_limit=max_failures),
            ),
        )
        return trainer.fit().return_value

    return fit


def _follow(log_path, total, future):
    """Show the lines of log.jsonl as they come, until the future is done."""
    progress = None
    done = False
    while not done:
        done = future.done() or bool(wait([future], timeout=0.2).done)
        lines = read_log(log_path)
        if not lines:
            continue
        last = lines[-1]
        if progress is None:
            progress = Progress("train", total, "steps", initial=last["step"])
        figures = {name: f"{last[name]:.4g}" for name in ("loss", "grad_norm") if last[name] is not None}
        if last["step"] != progress.done or done:
            progress.update(last["step"] - progress.done, **figures)
    if progress:
        progress.close()


def stop_asked(config):
    """Return whether the driver has asked the workers to save and stop."""
    return (Path(config["work_dir"]) / STOP).exists()


def steps_of(num_epochs, pairs_per_epoch, pairs_per_step):
    """Return the optimizer steps of some epochs; the last step runs into the next epoch rather than be short."""
    return -(-num_epochs * pairs_per_epoch // pairs_per_step)


def check_batch(num_images, pairs_per_step, flag):
    """Raise BadInput where a folder holds fewer images than one global batch takes."""
    if num_images < pairs_per_step:
        raise BadInput(
            f"{flag} holds {num_images} images, a step takes {pairs_per_step} (batch x accumulation x workers): "
            "draw more, or take a smaller batch"
        )
