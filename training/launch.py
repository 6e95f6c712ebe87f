"""Train on Ray: place the workers, start them again after a loss, with fewer or more of them if that is allowed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from common import targets
from common.board import Board, board_on_ray, use
from common.cli import stopping
from common.cluster import end_idle_actors, list_nodes, start_ray
from common.errors import (
    Away,
    BadInput,
    Fault,
    NodeLost,
    Stopped,
    TryAgain,
    WorkerDied,
    as_tool_error,
    causes,
    describe_error,
)
from common.messages import say
from common.nodes import Nodes, Share, Waiting, say_what_lacks, share_resources
from common.storage import Folder, is_remote
from training.checkpoints import newest_step
from training.following import show
from training.task import Task
from training.work_folder import RAY
from training.workers import take_sigterm_as_notice, tell_driver

TRAINER = "ray.train.torch"  # the part of Ray that trains
START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
TRY_SMALLER = 30  # seconds that a number of workers has to start, if there is a smaller one to try
MAX_IDLE_RESTARTS = 3  # restarts in a row, for a change of the nodes, without a step in between


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
            result = show(lambda: train_loop(asdict(task)), board, task, signals)
    else:
        with stopping(lambda: None) as signals:  # `show` passes the request on
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
    accelerator_type: str | None = None,
    max_failures: int = 0,
    start_timeout: float = 60,
) -> dict[str, Any]:
    """Train with Ray Train; has_loaders: actors that read the workers' data take half of their CPUs."""
    nodes = start_ray(address, insecure_cluster, TRAINER)
    end_idle_actors(address)
    share = share_resources(nodes, task.compute.num_workers, cpus_per_worker, gpus_per_worker, accelerator_type)
    check_whole_gpus(task.compute.num_workers, share.gpus)
    compute = replace(task.compute, num_threads=max(1, int(share.cpus)), is_on_cluster=not nodes.is_local)
    task = replace(task, compute=compute)
    if has_loaders:
        share = replace(share, cpus=share.cpus / 2)
    say_what_lacks(nodes, task.compute.num_workers, share)

    def attempt(size: int, timeout: float, has_grown: Callable[[], bool] | None) -> dict[str, Any]:
        if not nodes.is_local:
            os.environ[START_TIMEOUT] = str(timeout)
        return _attempt(train_loop, with_workers(task, size), signals, share, nodes.is_local, has_grown)

    result = _until_done(attempt, Plan(task, share, signals, max_failures, start_timeout, address, insecure_cluster))
    _delete_ray_files(task)
    return result


def check_whole_gpus(num_workers: int, gpus_per_worker: float) -> None:
    """Raise BadInput for several workers on a GPU: NCCL, which averages their gradients, refuses them."""
    if gpus_per_worker % 1 and num_workers > 1:
        raise BadInput(
            f"--gpus_per_worker {gpus_per_worker:g}: training workers cannot share a GPU: use 1, and as many "
            "--num_workers as there are GPUs"
        )


@dataclass(frozen=True)
class Plan:
    """What stays the same however often the workers are started.

    share: of a worker. signals: filled when the run shall save and stop. max_failures: losses in a row, without a new
    checkpoint in between, after which the workers start again. start_timeout: seconds that they may take to start.
    address, insecure_cluster: arguments of start_ray.
    """

    task: Task
    share: Share
    signals: list[int]
    max_failures: int
    start_timeout: float
    address: str | None
    insecure_cluster: bool


# ---------------------------------------------------------------------------------------------------------------------
# How many workers


def dividing_sizes(smallest: int, largest: int, accumulation: int) -> list[int]:
    """Return the numbers of workers, largest first, that divide the batches of a step of `largest` workers."""
    return [size for size in range(largest, smallest - 1, -1) if largest * accumulation % size == 0]


def possible_sizes(task: Task) -> list[int]:
    """Return the numbers of workers, largest first, that a run may have and that divide its global batch."""
    smallest = task.compute.min_workers or task.compute.num_workers
    return dividing_sizes(smallest, task.compute.num_workers, task.schedule.gradient_accumulation_steps)


def with_workers(task: Task, size: int) -> Task:
    """Return a task for `size` workers, which take the same global batches: each takes more of their parts."""
    batches = task.compute.num_workers * task.schedule.gradient_accumulation_steps
    schedule = replace(task.schedule, gradient_accumulation_steps=batches // size)
    return replace(task, schedule=schedule, compute=replace(task.compute, num_workers=size))


def choose_size(sizes: list[int], nodes: Nodes, share: Share) -> int:
    """Return the largest number of workers that the nodes have room for, or else the smallest, to wait for."""
    room = nodes.room(share)
    return next((size for size in sizes if size <= room), sizes[-1])


def _grown(plan: Plan, size: int, before: Nodes) -> Callable[[], bool] | None:
    """Return a function that says whether nodes have joined that hold more workers; None if there are no more."""
    sizes = possible_sizes(plan.task)
    if before.is_local or size == sizes[0]:
        return None

    def has_grown() -> bool:
        now = list_nodes(plan.address)
        return len(now.each) > len(before.each) and choose_size(sizes, now, plan.share) > size

    return has_grown


# ---------------------------------------------------------------------------------------------------------------------
# Until it is done


def _until_done(attempt: Callable[..., dict], plan: Plan) -> dict[str, Any]:
    """Return attempt(size, seconds to start, has_grown), called again after a loss, but not after another ToolError.

    Ray Train would start the workers again after either, for a photo that cannot be read as for a node that is lost;
    and when nodes join or leave it would end the workers without saving. So it is told to do neither.
    """
    failures, idle, newest = 0, 0, newest_step(plan.task.output.work_dir)
    sizes = possible_sizes(plan.task)
    limit = sizes[0]
    while True:
        if plan.signals:
            raise Stopped(plan.signals[0])
        nodes = list_nodes(plan.address)
        size = choose_size([each for each in sizes if each <= limit], nodes, plan.share)
        smaller = [each for each in sizes if each < size]
        try:
            result = attempt(size, TRY_SMALLER if smaller else plan.start_timeout, _grown(plan, size, nodes))
        except Exception as error:
            if _found_no_room(error, nodes):
                if not smaller:
                    raise _no_room(plan.start_timeout) from error
                limit = smaller[0]
                say(f"no room for {size} workers: trying {limit}")
                continue
            reached = newest_step(plan.task.output.work_dir)
            failures, newest = 1 if reached > newest else failures + 1, max(newest, reached)
            _check_loss(error, failures > plan.max_failures)
            if nodes.is_local:
                _end_dead_controller(error, plan)
            continue
        if not result["stopped"] or plan.signals or nodes.is_local:
            return result
        limit, idle = sizes[0], 0 if result["trained"] else idle + 1
        if idle >= MAX_IDLE_RESTARTS:
            raise TryAgain("the nodes of the cluster change faster than a step takes: run the same command again")
        say("nodes or workers of the cluster leave or join: a checkpoint is saved, and the workers start again from it")


def _check_loss(error: Exception, is_last: bool) -> None:
    """Say that the workers start again after `error`; raise it if that does not help."""
    known = filter(None, map(as_tool_error, causes(error)))
    if is_last or not all(isinstance(each, Away | WorkerDied | NodeLost | Fault) for each in known):
        raise error
    reason = describe_error(error)[1].split(". ")[0].removesuffix(": run the same command again to continue")
    reason = reason.partition(": try again")[0]
    say(f"warning: {reason}: restarting the workers from the newest checkpoint")


def _end_dead_controller(error: Exception, plan: Plan) -> None:
    """Start a local Ray anew if Ray Train's controller died: nothing else releases the workers' CPUs."""
    import ray

    if isinstance(error, ray.exceptions.RayActorError):
        ray.shutdown()
        start_ray(plan.address, plan.insecure_cluster, TRAINER)


def _found_no_room(error: BaseException, nodes: Nodes) -> bool:
    names = [type(each).__name__ for each in causes(error)]
    return not nodes.is_local and "WorkerGroupStartupTimeoutError" in names


def _no_room(seconds: float) -> TryAgain:
    return TryAgain(
        f"the cluster had no room for all workers for {seconds:g} s: run the same command again when it has, use fewer "
        "--num_workers, or a longer --start_timeout"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Once


def _storage_path(task: Task) -> str:
    """Return the location of the files that Ray Train writes for itself."""
    return targets.join_name(task.output.work_dir, RAY)


def _delete_ray_files(task: Task) -> None:
    """Delete what Ray Train wrote for itself; in a store, also the empty objects with which it marks folders."""
    targets.delete(_storage_path(task), task.output.held)
    if is_remote(task.output.work_dir):
        folder = Folder(_storage_path(task))
        with contextlib.suppress(OSError):  # some stores cannot delete many objects at once: the empty ones stay
            folder.filesystem.delete_dir(folder.path)


def _attempt(
    train_loop: Callable[[dict], dict],
    task: Task,
    signals: list[int],
    share: Share,
    is_local: bool,
    has_grown: Callable[[], bool] | None,
) -> dict[str, Any]:
    """Train on Ray once, and show what the workers tell."""
    waiting = None if is_local else Waiting(task.compute.num_workers, share)
    with board_on_ray() as board, ThreadPoolExecutor(1) as pool:  # another thread: in this one Ray takes SIGINT
        loop = partial(tell_driver, train_loop, board.actor)
        fit = partial(_fit, loop, asdict(task), _storage_path(task), task.compute.num_workers, share, is_local)
        return show(lambda: pool.submit(fit).result(), board, task, signals, waiting, has_grown)


def _fit(
    train_loop: Callable[[dict], dict],
    config: dict,
    storage_path: str,
    num_workers: int,
    share: Share,
    is_alone: bool,
) -> dict[str, Any]:
    """Train on Ray once and return what rank 0 returns; is_alone: on a local Ray of this process."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

    filesystem, path = Folder(storage_path).filesystem, Folder(storage_path).path
    if not is_remote(storage_path):
        shutil.rmtree(storage_path, ignore_errors=True)
    scaling_config = ScalingConfig(
        num_workers=num_workers,
        use_gpu=share.gpus > 0,
        resources_per_worker={"CPU": share.cpus, "GPU": share.gpus},
        accelerator_type=share.accelerator_type,
    )
    # A new name each time: our checkpoints decide where a run continues, not Ray's record of it.
    run_config = RunConfig(
        name=f"run-{time.time_ns()}",
        storage_path=path,
        storage_filesystem=filesystem if is_remote(storage_path) else None,
        checkpoint_config=CheckpointConfig(num_to_keep=1),  # of the reports' notes
        failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
    )
    options = {"scaling_config": scaling_config, "run_config": run_config}
    return _make_trainer_class(is_alone)(train_loop, train_loop_config=config, **options).fit().return_value


def _make_trainer_class(is_alone: bool) -> Any:
    """Return TorchTrainer without those of its actors that only cost time here; on a cluster, SIGTERM is a notice.

    One of them hands out Ray Data datasets, of which there are none. The other releases the workers' CPUs if the
    controller dies; it asks Ray's dashboard, which a local Ray does not have, and would delay each run by 12 seconds.
    """
    from ray.train.torch import TorchTrainer

    needless = ("DatasetsCallback", "PlacementGroupCleanerCallback")[: 1 + is_alone]

    class Trainer(TorchTrainer):
        # A private method of Ray's: if it goes, the actors are back, and nothing else changes.
        def _create_default_callbacks(self, *arguments: Any, **options: Any) -> list:
            callbacks = super()._create_default_callbacks(*arguments, **options)
            kept = [each for each in callbacks if type(each).__name__ not in needless]
            return kept if is_alone else [*kept, *_notices()]

    return Trainer


def _notices() -> list:
    """Return what makes Ray's controller set the SIGTERM handler of each worker, in its main thread.

    The import is private to Ray: in a version without it, SIGTERM is the death of a worker.
    """
    try:
        from ray.train.v2._internal.execution.callback import WorkerGroupCallback
    except ImportError:
        return []

    class Notices(WorkerGroupCallback):
        def after_worker_group_start(self, worker_group: Any) -> None:
            worker_group.execute(take_sigterm_as_notice)

    return [Notices()]
