"""The driver of a training: it starts the workers, shows their log, and finishes the run."""

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

from common import targets
from common.cluster import start_ray
from common.errors import (
    BadInput,
    ToolError,
    TryAgain,
)
from common.messages import print_result, say
from common.nodes import default_workers
from common.objects import local_copy
from pipelines import upload
from training import resuming
from training.launch import TRAINER

# ---------------------------------------------------------------------------------------------------------------------
# A run


def run_training(
    args: argparse.Namespace,
    settings: dict,
    plan_steps: Callable[[Any], int],
    train: Callable[[int, Any, str], dict],
    explain: Callable[[int], dict],
) -> None:
    """Train unless the result is there already, upload it if --push_to_hub is given, and print it as JSON.

    With --dry_run, print what would be done instead. Without --num_workers: as many as the run that continues, or one
    per GPU, or one.

    plan_steps(num_workers): returns the steps to train for; num_workers: or the smallest and the largest number.
    train(steps, num_workers, owner): trains; owner: the text in the lock of the work folder. explain(steps): checks
    what is left to check and returns what the training needs.
    """
    if args.push_to_hub:
        upload.check_access(args.push_to_hub)
    num_workers = resuming.recorded_workers(args.work_dir) if args.num_workers is None else args.num_workers
    if num_workers is None:
        nodes = start_ray(args.address, args.insecure_cluster, TRAINER)
        num_workers = default_workers(nodes, 1, args.gpus_per_worker, args.accelerator_type)
    steps = plan_steps(num_workers)
    if not args.lr_scheduler.startswith("constant"):
        settings["max_train_steps"] = steps  # the learning rate depends on the last step
    if resuming.is_finished(args.output_dir, settings, steps, args.overwrite):
        say(f"{args.output_dir} is already trained for {steps} steps: nothing to do")
        if resuming.is_to_drop(args.output_dir, args.work_dir):  # the run was killed before it dropped them
            with contextlib.suppress(TryAgain), targets.lock(args.work_dir) as held:
                resuming.drop_checkpoints(held)
        _finish(args, steps, trained=0)
        return
    resuming.check_can_continue(args.output_dir, args.work_dir, steps, args.overwrite)
    if args.dry_run:
        print_result(dry_run=True, steps=steps, num_workers=num_workers, settings=settings, **explain(steps))
        return
    with _lock_output(args), targets.lock(args.work_dir) as held:
        targets.recover(args.output_dir)
        record = {"settings": settings, "steps": steps, "num_workers": num_workers}
        resuming.open_work_dir(held, {**record, "keep_checkpoints": args.keep_checkpoints}, args.overwrite)
        result = train(steps, num_workers, held.owner)
        if resuming.is_to_drop(args.output_dir, args.work_dir):
            resuming.drop_checkpoints(held)
    _finish(args, steps, result["trained"])


def _finish(args: argparse.Namespace, steps: int, trained: int) -> None:
    """Upload the result if --push_to_hub is given, and print it as JSON; raise TryAgain if the upload fails."""
    result = {"output_dir": args.output_dir, "steps": steps, "trained": trained}
    if args.push_to_hub:
        try:
            url = upload.push_folder(local_copy(args.output_dir), "--output_dir", args.push_to_hub, args.hub_public)
        except ToolError as error:
            where = f"the result is in {args.output_dir}"
            raise TryAgain(f"{error}; {where}: run the same command again to upload it") from error
        result["pushed_to"] = url
    print_result(**result)


def _lock_output(args: argparse.Namespace) -> contextlib.AbstractContextManager:
    """Return a lock for --output_dir, or a null context if the lock of --work_dir covers it already."""
    usual = targets.beside(args.output_dir, ".work")
    return contextlib.nullcontext() if str(args.work_dir) == usual else targets.lock(usual)


def bounds(num_workers: int | tuple[int, int]) -> tuple[int, int]:
    """Return the smallest and the largest number of workers that a run may have."""
    return num_workers if isinstance(num_workers, tuple) else (num_workers, num_workers)


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
