"""Ray: start it or join it, share its resources, and map work over a pool of its actors."""

import contextlib
import json
import os
import pickle
import signal
import sys

from cli import BadInput, ToolError, as_tool_error


def start_ray(address=None):
    """Start a quiet local Ray, or join the cluster at `address` or RAY_ADDRESS; return its resources, {"CPU": 8.0}.

    A cluster's workers get the scripts of this folder through `runtime_env`; local ones import them from here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # an actor pool logs an error of no consequence each time
    import logging

    import ray

    if not ray.is_initialized():
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        options = {"logging_level": "ERROR", "log_to_driver": False}
        if address == "local":
            options["include_dashboard"] = False
        else:
            here = os.path.dirname(os.path.abspath(__file__))
            options["runtime_env"] = {"working_dir": here, "excludes": [".git", ".venv", "data", "models", "tests"]}
        try:
            on_sigterm = signal.getsignal(signal.SIGTERM)
            with _no_stderr():  # its C++ side says there that it was told to be quiet
                ray.init(address=address, **options)
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own would exit with another code
        except ConnectionError as error:
            if "AuthenticationError" in type(error.__cause__).__name__ + str(error.__cause__):
                remedy = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
                raise BadInput(f"the Ray cluster at {address} asks for a token: {remedy}") from error
            raise BadInput(f"no Ray cluster answers at {address} ({error}): check --address and RAY_ADDRESS") from error
    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return ray.cluster_resources()


@contextlib.contextmanager
def _no_stderr():
    """Send file descriptor 2 to nowhere for a while; Python exceptions are not affected."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def share_resources(resources, num_workers, cpus_per_worker=None, gpus_per_worker=None):
    """Return (CPUs, GPUs) of each of `num_workers`, from the flags or as an even share of `resources`.

    Raises BadInput where the cluster can never hold that many: Ray would wait for ever.
    """
    cpus, gpus = resources.get("CPU", 1), resources.get("GPU", 0)
    gpu = gpus_per_worker if gpus_per_worker is not None else float(gpus > 0)
    cpu = cpus_per_worker if cpus_per_worker is not None else _even_share(cpus, num_workers)
    for name, each, total in (("CPUs", cpu, cpus), ("GPUs", gpu, gpus)):
        if each * num_workers > total + 1e-6:  # what the shares lose to rounding
            raise BadInput(
                f"--num_workers {num_workers} of {each:g} {name} each need {each * num_workers:g}, the cluster has "
                f"{total:g}: take fewer workers or a smaller share"
            )
    return cpu, gpu


def _even_share(cpus, num_workers):
    share = cpus / num_workers
    return float(int(share)) if share >= 1 else int(share * 100) / 100


def map_on_actors(worker_class, options, items, num_workers, address=None, cpus_per_worker=None, gpus_per_worker=None):
    """Yield `worker_class(**options)(item)` for every item, in the order in which they are done.

    items: plain JSON values; results: dicts of numbers, strings and numpy arrays.
    num_workers: 0 for this process, without Ray; n or (min, max) actors of a Ray Data pool; None for one on each GPU,
    or one on every four CPUs. An actor loads its model once, takes one item at a time, and is replaced when it dies.
    """
    if not items:
        return
    if num_workers == 0:
        worker = worker_class(**options)
        yield from map(worker, items)
        return
    import ray.data
    from ray.data import ActorPoolStrategy

    resources = start_ray(address)

    if num_workers is None:
        num_workers = int(resources.get("GPU", 0)) or max(1, int(resources.get("CPU", 1)) // 4)
    smallest, largest = num_workers if isinstance(num_workers, tuple) else (num_workers, num_workers)
    smallest, largest = min(smallest, len(items)), min(largest, len(items))
    cpus, gpus = share_resources(resources, largest, cpus_per_worker, gpus_per_worker)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    rows = ray.data.from_items([{"item": json.dumps(item)} for item in items], override_num_blocks=len(items))
    results = rows.map(
        _Actor,
        fn_constructor_args=(worker_class, {**options, "num_threads": max(1, int(cpus))}),
        compute=ActorPoolStrategy(min_size=smallest, max_size=largest, max_tasks_in_flight_per_actor=2),
        num_cpus=cpus / 2,  # half of what it uses: Ray Data's own tasks must find a place, or all wait for ever
        num_gpus=gpus,
    )
    for row in results.iter_rows():
        result = pickle.loads(row["result"])
        if isinstance(result, ToolError):
            raise result
        yield result


class _Actor:
    """What a Ray Data actor holds: the worker, made once. Results and ToolErrors travel as bytes of one column.

    A ToolError is a result because Ray Data passes on the text of an exception, not the exception.
    """

    def __init__(self, worker_class, options):
        self.worker = self._attempt(worker_class, **options)

    def __call__(self, row):
        result = self.worker
        if not isinstance(self.worker, ToolError):
            result = self._attempt(self.worker, json.loads(row["item"]))
        return {"result": pickle.dumps(result)}

    def _attempt(self, function, *arguments, **options):
        try:
            return function(*arguments, **options)
        except Exception as error:
            known = as_tool_error(error)
            if known is None:
                raise
            return known
