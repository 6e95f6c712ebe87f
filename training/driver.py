"""The driver's side of a training: is it done, where does it work, start its workers and show their log."""

import contextlib
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from common import folders
from common.cli import stop_file
from common.cluster import end_idle_actors, is_local, share_resources, start_ray
from common.errors import BadInput, Fault, Stopped, TryAgain, WorkerDied, as_tool_error, causes, describe_error
from common.messages import Progress, print_result, say
from training.logs import LOG, read_last_line
from training.loop import STOP
from training.resuming import (
    _is_to_drop,
    check_can_go_on,
    drop_checkpoints,
    is_finished,
    open_work_dir,
    recorded_workers,
)
from training.workers import SAID, tell_driver

TRAINER = "ray.train.torch"  # the module of Ray that trains


def run_training(args, settings, plan_steps, train):
    """Train for `plan_steps(num_workers)` steps with `train(steps, num_workers)`, unless it is done; print the result.

    Without --num_workers it is those of the run that continues, or one for each GPU, or one.
    """
    num_workers = recorded_workers(args.work_dir) if args.num_workers is None else args.num_workers
    if num_workers is None:
        num_workers = int(start_ray(args.address, args.insecure_cluster, TRAINER).get("GPU", 0)) or 1
    steps = plan_steps(num_workers)
    if is_finished(args.output_dir, settings, steps, args.overwrite):
        say(f"{args.output_dir} is trained for {steps} steps already")
        print_result(output_dir=args.output_dir, steps=steps, trained=0)
        if _is_to_drop(args):  # it was killed before it did
            with contextlib.suppress(TryAgain), folders.lock(Path(args.work_dir) / folders.LOCK):
                drop_checkpoints(args.work_dir)
        return
    check_can_go_on(args.output_dir, args.work_dir, steps, args.overwrite)
    with _lock_output(args), folders.lock(Path(args.work_dir) / folders.LOCK) as args.owner:
        folders.recover(args.output_dir)
        record = {"settings": settings, "steps": steps, "num_workers": num_workers}
        open_work_dir(args.work_dir, {**record, "keep_checkpoints": args.keep_checkpoints}, args.overwrite)
        result = train(steps, num_workers)
        if _is_to_drop(args):
            drop_checkpoints(args.work_dir)
    print_result(output_dir=args.output_dir, steps=steps, trained=result["trained"])


def _lock_output(args):
    """Return the lock of --output_dir where the work folder is not its usual one, whose lock serves for both."""
    usual = Path(f"{args.output_dir}.work")
    return contextlib.nullcontext() if Path(args.work_dir) == usual else folders.lock(usual / folders.LOCK)


def run_workers(
    train_loop,
    config,
    address=None,
    insecure_cluster=False,
    cpus_per_worker=None,
    gpus_per_worker=None,
    max_failures=0,
):
    """Run `train_loop(config)` on config["num_workers"] workers, show its log, and return what rank 0 returns.

    0 workers: this process, without Ray. A signal makes the workers save and stop; then Stopped is raised.
    config: plain JSON values, with "num_workers", "work_dir" and "max_train_steps".
    """
    work_dir, cluster = Path(config["work_dir"]), (address, insecure_cluster, TRAINER)
    if config["num_workers"]:
        resources = start_ray(*cluster)
        end_idle_actors(address)
        cpus, gpus = share_resources(resources, config["num_workers"], cpus_per_worker, gpus_per_worker)
        config = {**config, "num_threads": max(1, int(cpus))}
        if config.get("pool", {}).get("num_workers"):
            cpus /= 2  # the other half is for those who read their data
        (work_dir / SAID).unlink(missing_ok=True)
        on_ray = partial(tell_driver, train_loop)
        fit = _make_fit(on_ray, work_dir / "ray", config["num_workers"], cpus, gpus, is_local(address))
    done = threading.Event()
    with stop_file(work_dir / STOP) as signals, ThreadPoolExecutor(2) as pool:
        follower = pool.submit(_follow, work_dir, config["max_train_steps"], done)
        try:
            # In this process in the thread that has encoded: OpenMP keeps a team of threads for each, which stop
            # spinning once there are more than CPUs. On Ray in another one: in this it would take SIGINT for itself.
            if config["num_workers"] == 0:
                result = train_loop(config)
            else:
                result = _until_done(lambda: pool.submit(fit, config).result(), max_failures, cluster)
        finally:
            done.set()
        follower.result()
    shutil.rmtree(work_dir / "ray", ignore_errors=True)
    (work_dir / SAID).unlink(missing_ok=True)
    if result["stopped"]:
        raise Stopped(signals[0] if signals else signal.SIGTERM)  # without one somebody else asked for it
    return result


def _until_done(fit, max_failures, cluster):
    """Return fit(), called again after a worker's death, but not after another ToolError; cluster: for start_ray.

    Ray would start the workers again for either, so it is told to do so for neither.
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
            say(f"warning: {reason}: starting the workers again from the newest checkpoint")
            if isinstance(error, ray.exceptions.RayActorError) and is_local(cluster[0]):
                ray.shutdown()  # its controller died, and nobody else gives the workers' CPUs back
                start_ray(*cluster)


def _make_fit(train_loop, storage_path, num_workers, cpus, gpus, is_alone):
    """Return fit(config), which trains on Ray once; is_alone: on a Ray of our own."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    scaling_config = ScalingConfig(
        num_workers=num_workers, use_gpu=gpus > 0, resources_per_worker={"CPU": cpus, "GPU": gpus}
    )
    trainer_class = _make_trainer_class(is_alone)

    def fit(config):
        shutil.rmtree(storage_path, ignore_errors=True)
        # The name is new each time: our checkpoints say where a run continues, not Ray's record of it.
        run_config = RunConfig(
            name=f"run-{time.time_ns()}",
            storage_path=str(storage_path),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
        )
        options = {"scaling_config": scaling_config, "run_config": run_config}
        return trainer_class(train_loop, train_loop_config=config, **options).fit().return_value

    return fit


def _make_trainer_class(is_alone):
    """Return TorchTrainer without those of its actors that only take time here.

    It is given no Ray Data, so one that hands it out is of no use. One that frees the workers' CPUs when the controller
    dies asks Ray's dashboard who lives: a Ray of our own has none, and each run would end with twelve seconds' wait.
    """
    from ray.train.torch import TorchTrainer

    needless = ("DatasetsCallback", "PlacementGroupCleanerCallback")[: 1 + is_alone]

    class Trainer(TorchTrainer):
        # Ray's own: were it gone, those actors would be there again.
        def _create_default_callbacks(self, *arguments, **options):
            callbacks = super()._create_default_callbacks(*arguments, **options)
            return [each for each in callbacks if type(each).__name__ not in needless]

    return Trainer


def _follow(work_dir, total, done):
    """Show what the workers say, and the last line of log.jsonl, as they come, until the event `done`."""
    progress, is_last, num_said = None, False, 0
    while not is_last:
        is_last = done.wait(0.2)
        with contextlib.suppress(FileNotFoundError):
            *said, _ = (work_dir / SAID).read_text(encoding="utf-8").split("\n")  # what follows the last is not whole
            for message in said[num_said:]:
                say(message)
            num_said = len(said)
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


def steps_of(num_pairs, pairs_per_step):
    """Return the optimizer steps that train on so many pairs, or rows; the last takes more rather than be short."""
    return -(-num_pairs // pairs_per_step)


def check_batch(count, per_step, flag, unit="images"):
    """Raise BadInput where a folder holds fewer images, or rows, than one global batch takes."""
    if count < per_step:
        raise BadInput(
            f"{flag} holds {count} {unit}, a step takes {per_step} (batch x accumulation x workers): "
            "get more, or take a smaller batch"
        )
