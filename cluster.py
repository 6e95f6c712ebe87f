"""Ray: start it or join it, share its resources, and map work over a pool of its actors."""

import contextlib
import importlib
import ipaddress
import itertools
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cli import BadInput, Fault, ToolError, as_tool_error, describe_error, listen, say
from utils import no_gc

OLDEST_RAY = (2, 60)
TOKEN_REMEDY = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"


def is_local(address=None):
    """Return whether start_ray(address) starts a Ray of its own, on this host alone."""
    return _full_address(address) == "local"


def _full_address(address):
    return address or os.environ.get("RAY_ADDRESS") or "local"


def start_ray(address=None, insecure_cluster=False, module="ray.data"):
    """Start a quiet local Ray, or join the cluster at `address` or RAY_ADDRESS; return its resources, {"CPU": 8.0}.

    module: the part of Ray that will be asked for next, imported while Ray's processes start.

    A local one listens on this host alone. A cluster without a token is refused, unless `insecure_cluster`; its
    workers get the scripts of this folder through `runtime_env`, local ones import them from here.
    """
    if is_local(address):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # what makes Ray listen on 127.0.0.1 alone
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # an actor that waits for a cloud's notice
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    # Paragraphs on each death of a worker: an actor tells when it was started again, as_tool_error when it was not.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed|Task .* retries remaining")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # an actor pool logs an error of no consequence each time
    # A small machine with readers, actors and trainers would be warned of many processes.
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(max(8, os.cpu_count())))
    import logging

    import ray

    if tuple(map(int, ray.__version__.split(".")[:2])) < OLDEST_RAY:
        raise BadInput(f"Ray {ray.__version__} is installed, 2.60 or newer is needed: install requirements.txt")
    if not ray.is_initialized():
        address = _full_address(address)
        options = {"logging_level": "ERROR", "log_to_driver": False}
        if is_local(address):
            options["include_dashboard"] = False
        else:
            if not insecure_cluster:
                _check_token(address)
            here = os.path.dirname(os.path.abspath(__file__))
            options["runtime_env"] = {"working_dir": here, "excludes": [".git", ".venv", "data", "models", "tests"]}
        meanwhile = threading.Thread(target=importlib.import_module, args=(module,))
        meanwhile.start()
        try:
            on_sigterm = signal.getsignal(signal.SIGTERM)
            with _no_stderr():  # its C++ side says there that it was told to be quiet
                ray.init(address=address, **options)
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own would exit with another code
            if is_local(address):
                _check_loopback()
                _end_log_monitor()
        except ConnectionError as error:
            if "AuthenticationError" in type(error.__cause__).__name__ + str(error.__cause__):
                raise BadInput(f"the Ray cluster at {address} asks for a token: {TOKEN_REMEDY}") from error
            raise BadInput(f"no Ray cluster answers at {address} ({error}): check --address and RAY_ADDRESS") from error
        finally:
            meanwhile.join()
    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # their errors are raised too
    return ray.cluster_resources()


def _check_loopback():
    """Raise BadInput, and end the Ray that was just started, where other hosts could reach it.

    It is a variable of Ray's, not of its public interface, that makes it listen on this host alone.
    """
    import ray

    hosts = {ray.get_runtime_context().gcs_address.rpartition(":")[0].strip("[]")}
    hosts |= {node["NodeManagerAddress"] for node in ray.nodes()}
    open_hosts = sorted(host for host in hosts if host != "localhost" and not ipaddress.ip_address(host).is_loopback)
    if open_hosts:
        ray.shutdown()
        raise BadInput(
            f"Ray listens on {open_hosts[0]}, where other hosts could reach it: install what requirements.txt pins, "
            "unset RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER, or join a cluster with --address"
        )


def _end_log_monitor():
    """End the process that would hand on what workers print, which log_to_driver turns off.

    The call is Ray's own: where another version has no such process, or another name for it, nothing is ended.
    """
    import ray

    with contextlib.suppress(Exception):
        ray._private.worker._global_node.kill_log_monitor(check_alive=False)


def end_idle_actors(address=None):
    """End the actors that Ray Data leaves behind on a Ray of our own: each takes a hundredth of a core, for nothing."""
    import ray

    for actor in ray.util.list_named_actors(all_namespaces=True) if is_local(address) else []:
        with contextlib.suppress(ValueError):  # it has gone meanwhile
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))


def _check_token(address):
    """Raise BadInput where Ray would join a cluster without a token: it is told to, or is not told and has none."""
    mode = os.environ.get("RAY_AUTH_MODE")
    given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    has_token = mode.lower() == "token" if mode else given or (Path.home() / ".ray" / "auth_token").is_file()
    if not has_token and address.rpartition(":")[0] not in ("localhost", "127.0.0.1", "[::1]"):
        raise BadInput(
            f"the Ray cluster at {address} would be joined without a token, and whoever reaches it could run code: "
            f"{TOKEN_REMEDY}, or pass --insecure_cluster"
        )


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


def share_with_loaders(resources, num_workers, count, encodes, gpus_per_worker=None):
    """Return the options of map_on_actors for the `count` actors that read the data of each of `num_workers`.

    They get half of the CPUs; of the GPUs, where they encode, what the workers leave.
    """
    gpus = resources.get("GPU", 0)
    free = gpus - num_workers * (gpus_per_worker if gpus_per_worker is not None else float(gpus > 0))
    if encodes and gpus and free <= 0:
        raise BadInput("--online: no GPU is left to encode on: take fewer --num_workers or smaller --gpus_per_worker")
    share = {"cpus_per_worker": resources.get("CPU", 1) / 2 / num_workers / count}
    share["gpus_per_worker"] = min(1.0, free / num_workers / count) if encodes and gpus else 0.0
    return {"num_workers": count, **share}


def _even_share(cpus, num_workers):
    share = cpus / num_workers
    return float(int(share)) if share >= 1 else int(share * 100) / 100


def map_on_actors(worker_class, options, items, num_workers, prepare=None, ordered=False, **place):
    """Yield `worker_class(**options)(item)` for every item, in the order in which they are done, or of the items.

    items: plain values; results: dicts of numbers, strings and numpy arrays.
    num_workers: 0 for this process, without Ray; n or (min, max) actors of a Ray Data pool; None for one on each GPU,
    or one on every four CPUs. An actor loads its model once, takes one item at a time, and is started again when it
    dies, `max_failures` times.
    prepare: a function that yields the workers' items for one of `items`; it runs on CPU tasks, ahead of the
    actors where these have a GPU or several CPUs, else in them.
    worker_class: None yields what `prepare` does. place: what cli.placement returns.
    """
    if not items:
        return
    prepare = prepare or _as_it_is
    if num_workers == 0:
        with no_gc():
            worker = worker_class(**options) if worker_class else lambda item: item
        yield from map(worker, itertools.chain.from_iterable(map(prepare, items)))
        return
    heard = set()
    for row in _on_ray(worker_class, options, items, num_workers, prepare, ordered, **place).iter_rows():
        result, said = pickle.loads(row["bytes"])
        for message in dict.fromkeys(said):
            if message not in heard:  # all actors may say the same
                say(message)
            heard.add(message)
        if isinstance(result, ToolError):
            raise result
        yield result


def _on_ray(
    worker_class,
    options,
    items,
    num_workers,
    prepare,
    ordered,
    address=None,
    insecure_cluster=False,
    cpus_per_worker=None,
    gpus_per_worker=None,
    max_failures=3,
):
    """Return a Ray Data set of one column, the pickled results of `map_on_actors`."""
    resources = start_ray(address, insecure_cluster)
    import ray.data
    from ray.data import ActorPoolStrategy
    from ray.util.annotations import RayDeprecationWarning

    if num_workers is None:
        num_workers = int(resources.get("GPU", 0)) or max(1, int(resources.get("CPU", 1)) // 4)
    smallest, largest = num_workers if isinstance(num_workers, tuple) else (num_workers, num_workers)
    smallest, largest = min(smallest, len(items)), min(largest, len(items))
    cpus, gpus = share_resources(resources, largest, cpus_per_worker, gpus_per_worker)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = ordered
    rows = ray.data.from_items([{"bytes": pickle.dumps((item, []))} for item in items], override_num_blocks=len(items))
    if prepare is not _as_it_is:
        # The CPUs that the actors leave: several tasks for each on a large machine. On one of few CPUs and no GPU the
        # shares are equal, and Ray Data runs both in the actor: a process less to start and to keep in memory.
        rows = rows.flat_map(_Prepare(prepare), num_cpus=min(1.0, cpus / 2))
    if worker_class is None:
        return rows
    # Ray Data starts an actor that dies again for ever. Ray 2.60 warns that these two options will get another place,
    # which it does not have yet.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RayDeprecationWarning)
        return rows.map(
            _Actor,
            fn_constructor_args=(worker_class, {**options, "num_threads": max(1, int(cpus))}),
            compute=ActorPoolStrategy(min_size=smallest, max_size=largest, max_tasks_in_flight_per_actor=2),
            num_cpus=cpus / 2,  # half of what it uses: Ray Data's own tasks must find a place, or all wait for ever
            num_gpus=gpus,
            max_restarts=max_failures,
            max_task_retries=max_failures,
        )


def _as_it_is(item):
    yield item


def _attempt(function, *arguments, **options):
    """Return what a function returns, or as a ToolError what it raises: Ray Data passes on the text of an exception."""
    try:
        return function(*arguments, **options)
    except Exception as error:
        known = as_tool_error(error) or Fault(describe_error(error)[1])
        known.add_note(traceback.format_exc())  # for --debug
        return known


def _was_restarted():
    """Return whether this process is an actor of Ray's that was started again after a death."""
    import ray

    context = ray.get_runtime_context() if ray.is_initialized() else None
    return bool(context and context.get_actor_id() and context.was_current_actor_reconstructed)


class _Prepare:
    """What a Ray Data task does: one item in, some out, as bytes of one column, each with what was said: nothing."""

    def __init__(self, prepare):
        self.prepare = prepare

    def __call__(self, row):
        items = iter(self.prepare(pickle.loads(row["bytes"])[0]))
        end = object()
        while (item := _attempt(next, items, end)) is not end:
            yield {"bytes": pickle.dumps((item, []))}
            if isinstance(item, ToolError):
                return


class _Actor:
    """What a Ray Data actor holds: the worker, made once. Results and ToolErrors travel as bytes of one column, each
    with what was said.

    One thread makes the worker and calls it, where Ray Data takes two: OpenMP keeps a team of threads for each, and
    its threads stop spinning, and lose a quarter of the speed, once there are more of them than CPUs.
    """

    def __init__(self, worker_class, options):
        self.thread, self.said = ThreadPoolExecutor(1), []
        listen(self.said.append)
        if _was_restarted():
            say("warning: a worker process died, and was started again")
        with no_gc():
            self.worker = self._run(worker_class, **options)

    def _run(self, function, *arguments, **options):
        return self.thread.submit(_attempt, function, *arguments, **options).result()

    def __call__(self, row):
        item, _ = pickle.loads(row["bytes"])
        failed = next((each for each in (self.worker, item) if isinstance(each, ToolError)), None)
        result = failed or self._run(self.worker, item)
        said = list(self.said)
        self.said.clear()
        return {"bytes": pickle.dumps((result, said))}
