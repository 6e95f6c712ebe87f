"""The driver of a training: it starts the workers, shows their log, and finishes the run."""

import argparse
import contextlib
import os
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
from common.board import Board, RemoteBoard, board_on_ray, use
from common.cli import stopping
from common.cluster import end_idle_actors, start_ray
from common.errors import (
    BadInput,
    Fault,
    Stopped,
    ToolError,
    TryAgain,
    WorkerDied,
    as_tool_error,
    causes,
    describe_error,
)
from common.messages import Progress, print_result, say
from common.nodes import Nodes, Waiting, default_workers, say_what_lacks, share_resources
from pipelines import upload
from training import resuming
from training.task import Task
from training.workers import tell_driver

TRAINER = "ray.train.torch"  # the part of Ray that trains
FOLLOW_EVERY = 0.2  # seconds between two looks at the board
START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"


# ---------------------------------------------------------------------------------------------------------------------
# A run


def run_training(
    args: argparse.Namespace,
    settings: dict,
    plan_steps: Callable[[int], int],
    train: Callable[[int, int, str], dict],
) -> None:
    """Train unless the result is there already, upload it if --push_to_hub is given, and print it as JSON.

    plan_steps(num_workers): returns the steps to train for. train(steps, num_workers, owner): trains; owner: the text
    in the lock of the work folder. Without --num_workers: as many as the run that continues, or one per GPU, or one.
    """
    if args.push_to_hub:
        upload.check_access(args.push_to_hub)
    num_workers = resuming.recorded_workers(args.work_dir) if args.num_workers is None else args.num_workers
    if num_workers is None:
        nodes = start_ray(args.address, args.insecure_cluster, TRAINER)
        num_workers = default_workers(nodes, args.gpus_per_worker, without_gpus=1)
    steps = plan_steps(num_workers)
    lock_file = Path(args.work_dir) / folders.LOCK
    if resuming.is_finished(args.output_dir, settings, steps, args.overwrite):
        say(f"{args.output_dir} is already trained for {steps} steps: nothing to do")
        if resuming.is_to_drop(args.output_dir, args.work_dir):  # the run was killed before it dropped them
            with contextlib.suppress(TryAgain), folders.lock(lock_file):
                resuming.drop_checkpoints(args.work_dir)
        _finish(args, steps, trained=0)
        return
    resuming.check_can_continue(args.output_dir, args.work_dir, steps, args.overwrite)
    with _lock_output(args), folders.lock(lock_file) as owner:
        folders.recover(args.output_dir)
        record = {"settings": settings, "steps": steps, "num_workers": num_workers}
        resuming.open_work_dir(args.work_dir, {**record, "keep_checkpoints": args.keep_checkpoints}, args.overwrite)
        result = train(steps, num_workers, owner)
        if resuming.is_to_drop(args.output_dir, args.work_dir):
            resuming.drop_checkpoints(args.work_dir)
    _finish(args, steps, result["trained"])


def _finish(args: argparse.Namespace, steps: int, trained: int) -> None:
    """Upload the result if --push_to_hub is given, and print it as JSON; raise TryAgain if the upload fails."""
    result = {"output_dir": args.output_dir, "steps": steps, "trained": trained}
    if args.push_to_hub:
        try:
            url = upload.push_folder(args.output_dir, "--output_dir", args.push_to_hub, args.hub_public)
        except ToolError as error:
            where = f"the result is in {args.output_dir}"
            raise TryAgain(f"{error}; {where}: run the same command again to upload it") from error
        result["pushed_to"] = url
    print_result(**result)


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


def run_workers(train_loop: Callable[[dict], dict], task: Task, **place: Any) -> dict[str, Any]:
    """Call train_loop(task as plain values) on each worker, show the log, and return what rank 0 returns.

    0 workers: this process, without Ray. place: arguments of _run_on_ray, of which cli.placement returns most.
    A signal makes the workers save and stop; then Stopped is raised.
    """
    if task.compute.num_workers == 0:
        board = Board()
        use(board)
        with stopping(board.ask_to_stop) as signals:
            # In the thread that has encoded, because OpenMP keeps a team of threads for each calling thread, and they
            # stop spinning once there are more of them than CPUs.
            result = _show(lambda: train_loop(asdict(task)), board, task, signals)
    else:
        with stopping(lambda: None) as signals:  # _follow passes the request on
            result = _run_on_ray(train_loop, task, signals, **place)
    if result["stopped"]:
        raise Stopped(signals[0] if signals else signal.SIGTERM)
    return result


def _run_on_ray(
    train_loop: Callable[[dict], dict],
    task: Task,
    signals: list[int],
    has_loaders: bool = False,
    address: str | None = None,
    insecure_cluster: bool = False,
    cpus_per_worker: float | None = None,
    gpus_per_worker: float | None = None,
    max_failures: int = 0,
    start_timeout: float = 60,
) -> dict[str, Any]:
    """Train with Ray Train; has_loaders: actors that read the workers' data take half of their CPUs."""
    num_workers, cluster = task.compute.num_workers, (address, insecure_cluster, TRAINER)
    nodes = start_ray(*cluster)
    end_idle_actors(address)
    cpus, gpus = share_resources(nodes, num_workers, cpus_per_worker, gpus_per_worker)
    check_whole_gpus(num_workers, gpus)
    config = asdict(task)
    config["compute"]["num_threads"] = max(1, int(cpus))
    share = cpus / 2 if has_loaders else cpus, gpus
    say_what_lacks(nodes, num_workers, *share)
    if not nodes.is_local:
        os.environ[START_TIMEOUT] = str(start_timeout)
    storage_path = Path(task.output.work_dir) / "ray"

    def attempt() -> dict[str, Any]:
        if signals:
            raise Stopped(signals[0])
        waiting = None if nodes.is_local else Waiting(num_workers, *share)
        with board_on_ray() as board, ThreadPoolExecutor(1) as pool:  # another thread: in this one Ray takes SIGINT
            loop = partial(tell_driver, train_loop, board.name)
            return _show(
                lambda: pool.submit(_fit, loop, config, storage_path, num_workers, *share, nodes.is_local).result(),
                board,
                task,
                signals,
                waiting,
            )

    result = _until_done(attempt, max_failures, nodes, cluster)
    shutil.rmtree(storage_path, ignore_errors=True)
    return result


def check_whole_gpus(num_workers: int, gpus_per_worker: float) -> None:
    """Raise BadInput for several workers on a GPU: NCCL, which averages their gradients, refuses them."""
    if gpus_per_worker % 1 and num_workers > 1:
        raise BadInput(
            f"--gpus_per_worker {gpus_per_worker:g}: training workers cannot share a GPU: use 1, and as many "
            "--num_workers as there are GPUs"
        )


def _until_done(attempt: Callable[[], dict], max_failures: int, nodes: Nodes, cluster: tuple) -> dict[str, Any]:
    """Return attempt(), called again after the death of a worker, but not after another ToolError.

    cluster: the arguments of start_ray. Ray Train would start the workers again after either, for a photo that cannot
    be read as for a node that is lost, so it is told not to.
    """
    import ray

    for left in reversed(range(max_failures + 1)):
        try:
            return attempt()
        except Exception as error:
            _check_start(error, nodes)
            known = filter(None, map(as_tool_error, causes(error)))
            if not left or not all(isinstance(each, WorkerDied | Fault) for each in known):
                raise
            reason = describe_error(error)[1].split(". ")[0]
            say(f"warning: {reason}: restarting the workers from the newest checkpoint")
            if isinstance(error, ray.exceptions.RayActorError) and nodes.is_local:
                ray.shutdown()  # Ray Train's controller died, and nothing else releases the workers' CPUs
                start_ray(*cluster)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _check_start(error: BaseException, nodes: Nodes) -> None:
    """Raise TryAgain if workers did not find room on a cluster in time."""
    if not nodes.is_local and any(type(each).__name__ == "WorkerGroupStartupTimeoutError" for each in causes(error)):
        raise TryAgain(
            f"the cluster had no room for all workers for {float(os.environ[START_TIMEOUT]):g} s: run the same command "
            "again when it has, use fewer --num_workers, or a longer --start_timeout"
        ) from error


def _fit(
    train_loop: Callable[[dict], dict],
    config: dict,
    storage_path: Path,
    num_workers: int,
    cpus: float,
    gpus: float,
    is_alone: bool,
) -> dict[str, Any]:
    """Train on Ray once and return what rank 0 returns; is_alone: on a local Ray of this process."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    shutil.rmtree(storage_path, ignore_errors=True)
    scaling_config = ScalingConfig(
        num_workers=num_workers, use_gpu=gpus > 0, resources_per_worker={"CPU": cpus, "GPU": gpus}
    )
    # A new name each time: our checkpoints decide where a run continues, not Ray's record of it.
    run_config = RunConfig(
        name=f"run-{time.time_ns()}",
        storage_path=str(storage_path),
        failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
    )
    options = {"scaling_config": scaling_config, "run_config": run_config}
    return _make_trainer_class(is_alone)(train_loop, train_loop_config=config, **options).fit().return_value


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


def _show(
    run: Callable[[], dict],
    board: Board | RemoteBoard,
    task: Task,
    signals: list[int],
    waiting: Waiting | None = None,
) -> dict[str, Any]:
    """Return run(), and show meanwhile what the workers tell the board."""
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(_follow, board, task.schedule.max_train_steps, done, signals, waiting)
        try:
            result = run()
        finally:
            done.set()
        follower.result()
    return result


def _follow(
    board: Board | RemoteBoard, total: int, done: threading.Event, signals: list[int], waiting: Waiting | None
) -> None:
    """Show messages, the newest line of the log, and what is waited for, until the event `done`.

    signals: filled when the workers shall save and stop.
    """
    progress, is_last, is_told, num_shown = None, False, False, 0
    while not is_last:
        is_last = done.wait(FOLLOW_EVERY)
        if signals and not is_told:
            board.ask_to_stop()
            is_told = True
        messages, line, silence = board.news(num_shown)
        num_shown += len(messages)
        for message in messages:
            say(message)
        if waiting and not is_last:
            waiting.look(silence)
        if line is None:
            continue
        if progress is None:
            progress = Progress("train", total, "steps", initial=line["step"])
        figures = {name: f"{line[name]:.4g}" for name in ("loss", "grad_norm") if line.get(name) is not None}
        if line["step"] != progress.done or is_last:
            progress.update(line["step"] - progress.done, **figures)
    if progress:
        progress.close()
