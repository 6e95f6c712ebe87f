"""The driver of a training: it starts the workers, shows their log, and finishes the run."""

import argparse
import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from common import folders
from common.cli import stop_file
from common.cluster import end_idle_actors, is_local, share_resources, start_ray
from common.errors import BadInput, Fault, Stopped, TryAgain, WorkerDied, as_tool_error, causes, describe_error
from common.messages import Progress, print_result, say
from training import resuming
from training.logs import LOG, read_last_line
from training.loop import STOP
from training.task import Task
from training.workers import MESSAGES, tell_driver

TRAINER = "ray.train.torch"  # the part of Ray that trains
FOLLOW_EVERY = 0.2  # seconds between two looks at the log


# ---------------------------------------------------------------------------------------------------------------------
# A run


def run_training(
    args: argparse.Namespace,
    settings: dict,
    plan_steps: Callable[[int], int],
    train: Callable[[int, int, str], dict],
) -> None:
    """Train unless the result is there already, and print the result as JSON.

    plan_steps(num_workers): returns the steps to train for. train(steps, num_workers, owner): trains; owner: the text
    in the lock of the work folder. Without --num_workers: as many as the run that continues, or one per GPU, or one.
    """
    num_workers = resuming.recorded_workers(args.work_dir) if args.num_workers is None else args.num_workers
    if num_workers is None:
        num_workers = int(start_ray(args.address, args.insecure_cluster, TRAINER).get("GPU", 0)) or 1
    steps = plan_steps(num_workers)
    lock_file = Path(args.work_dir) / folders.LOCK
    if resuming.is_finished(args.output_dir, settings, steps, args.overwrite):
        say(f"{args.output_dir} is already trained for {steps} steps: nothing to do")
        print_result(output_dir=args.output_dir, steps=steps, trained=0)
        if resuming.is_to_drop(args.output_dir, args.work_dir):  # the run was killed before it dropped them
            with contextlib.suppress(TryAgain), folders.lock(lock_file):
                resuming.drop_checkpoints(args.work_dir)
        return
    resuming.check_can_continue(args.output_dir, args.work_dir, steps, args.overwrite)
    with _lock_output(args), folders.lock(lock_file) as owner:
        folders.recover(args.output_dir)
        record = {"settings": settings, "steps": steps, "num_workers": num_workers}
        resuming.open_work_dir(args.work_dir, {**record, "keep_checkpoints": args.keep_checkpoints}, args.overwrite)
        result = train(steps, num_workers, owner)
        if resuming.is_to_drop(args.output_dir, args.work_dir):
            resuming.drop_checkpoints(args.work_dir)
    print_result(output_dir=args.output_dir, steps=steps, trained=result["trained"])


def _lock_output(args: argparse.Namespace) -> contextlib.AbstractContextManager:
    """Return a lock for --output_dir, or a null context if the lock of --work_dir covers it already."""
    usual = Path(f"{args.output_dir}.work")
    return contextlib.nullcontext() if Path(args.work_dir) == usual else folders.lock(usual / folders.LOCK)


def steps_of(num_pairs: int, pairs_per_step: int) -> int:
    """Return the optimizer steps that cover so many pairs, or rows; the last step may take some more."""
    return -(-num_pairs // pairs_per_step)


def check_batch(count: int, per_step: int, flag: str, unit: str = "images") -> None:
    """Raise BadInput if a folder holds fewer images, or rows, than one global batch."""
    if count < per_step:
        raise BadInput(
            f"{flag} holds {count} {unit}, a step takes {per_step} (batch size x accumulation x workers): "
            "add more of them, or use a smaller batch"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Its workers


def run_workers(
    train_loop: Callable[[dict], dict],
    task: Task,
    has_loaders: bool = False,
    address: str | None = None,
    insecure_cluster: bool = False,
    cpus_per_worker: float | None = None,
    gpus_per_worker: float | None = None,
    max_failures: int = 0,
) -> dict[str, Any]:
    """Call train_loop(task as plain values) on each worker, show the log, and return what rank 0 returns.

    0 workers: this process, without Ray. has_loaders: actors that read the workers' data take half of their CPUs.
    A signal makes the workers save and stop; then Stopped is raised.
    """
    work_dir, cluster, config = Path(task.output.work_dir), (address, insecure_cluster, TRAINER), asdict(task)
    num_workers = task.compute.num_workers
    if num_workers:
        resources = start_ray(*cluster)
        end_idle_actors(address)
        cpus, gpus = share_resources(resources, num_workers, cpus_per_worker, gpus_per_worker)
        config["compute"]["num_threads"] = max(1, int(cpus))
        (work_dir / MESSAGES).unlink(missing_ok=True)
        on_ray, reserved = partial(tell_driver, train_loop), cpus / 2 if has_loaders else cpus
        fit = _make_fit(on_ray, work_dir / "ray", num_workers, reserved, gpus, is_local(address))
    done = threading.Event()
    with stop_file(work_dir / STOP) as signals, ThreadPoolExecutor(2) as pool:
        follower = pool.submit(_follow, work_dir, task.schedule.max_train_steps, done)
        try:
            # Without Ray: in the thread that has encoded, because OpenMP keeps a team of threads for each calling
            # thread, and they stop spinning once there are more of them than CPUs. With Ray: in another thread,
            # because Ray would take SIGINT for itself in this one.
            if num_workers == 0:
                result = train_loop(config)
            else:
                result = _until_done(lambda: pool.submit(fit, config).result(), max_failures, cluster)
        finally:
            done.set()
        follower.result()
    shutil.rmtree(work_dir / "ray", ignore_errors=True)
    (work_dir / MESSAGES).unlink(missing_ok=True)
    if result["stopped"]:
        raise Stopped(signals[0] if signals else signal.SIGTERM)  # without a signal somebody else wrote the stop file
    return result


def _until_done(fit: Callable[[], dict], max_failures: int, cluster: tuple) -> dict:
    """Return fit(), called again after the death of a worker, but not after another ToolError.

    cluster: the arguments of start_ray. Ray would start the workers again after either, so it is told not to.
    """
    import ray

    for left in reversed(range(max_failures + 1)):
        try:
            return fit()
        except Exception as error:
            known = filter(None, map(as_tool_error, causes(error)))
            if not left or not all(isinstance(each, WorkerDied | Fault) for each in known):
                raise
            reason = describe_error(error)[1].split(". ")[0]
            say(f"warning: {reason}: restarting the workers from the newest checkpoint")
            if isinstance(error, ray.exceptions.RayActorError) and is_local(cluster[0]):
                ray.shutdown()  # Ray Train's controller died, and nothing else releases the workers' CPUs
                start_ray(*cluster)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _make_fit(
    train_loop: Callable[[dict], dict],
    storage_path: Path,
    num_workers: int,
    cpus: float,
    gpus: float,
    is_alone: bool,
) -> Callable[[dict], dict]:
    """Return fit(config), which trains on Ray once; is_alone: on a local Ray of this process."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    scaling_config = ScalingConfig(
        num_workers=num_workers, use_gpu=gpus > 0, resources_per_worker={"CPU": cpus, "GPU": gpus}
    )
    trainer_class = _make_trainer_class(is_alone)

    def fit(config: dict) -> dict:
        shutil.rmtree(storage_path, ignore_errors=True)
        # A new name each time: our checkpoints decide where a run continues, not Ray's record of it.
        run_config = RunConfig(
            name=f"run-{time.time_ns()}",
            storage_path=str(storage_path),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
        )
        options = {"scaling_config": scaling_config, "run_config": run_config}
        return trainer_class(train_loop, train_loop_config=config, **options).fit().return_value

    return fit


def _make_trainer_class(is_alone: bool) -> Any:
    """Return TorchTrainer without those of its actors that only cost time here.

    One of them hands out Ray Data datasets, of which there are none. The other releases the workers' CPUs if the
    controller dies; it asks Ray's dashboard, which a local Ray does not have, and would delay each run by 12 seconds.
    """
    from ray.train.torch import TorchTrainer

    needless = ("DatasetsCallback", "PlacementGroupCleanerCallback")[: 1 + is_alone]

    class Trainer(TorchTrainer):
        # A private method of Ray's: if it goes, the actors are back, and nothing else changes.
        def _create_default_callbacks(self, *arguments: Any, **options: Any) -> list:
            callbacks = super()._create_default_callbacks(*arguments, **options)
            return [each for each in callbacks if type(each).__name__ not in needless]

    return Trainer


def _follow(work_dir: Path, total: int, done: threading.Event) -> None:
    """Show the workers' messages, and the last line of log.jsonl, as they come, until the event `done`."""
    progress, is_last, num_shown = None, False, 0
    while not is_last:
        is_last = done.wait(FOLLOW_EVERY)
        num_shown += _show_messages(work_dir / MESSAGES, num_shown)
        last = read_last_line(work_dir / LOG)
        if last is None:
            continue
        if progress is None:
            progress = Progress("train", total, "steps", initial=last["step"])
        figures = {name: f"{last[name]:.4g}" for name in ("loss", "grad_norm") if last.get(name) is not None}
        if last["step"] != progress.done or is_last:
            progress.update(last["step"] - progress.done, **figures)
    if progress:
        progress.close()


def _show_messages(path: Path, num_shown: int) -> int:
    """Print the whole lines of a file after the first `num_shown`; return how many there were."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last line break is not whole
    except FileNotFoundError:
        return 0
    for line in lines[num_shown:]:
        say(line)
    return max(0, len(lines) - num_shown)
