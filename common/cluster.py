"""Ray: start it or join it, and share its resources."""

import contextlib
import importlib
import ipaddress
import os
import signal
import sys
import threading
from pathlib import Path

from common.errors import BadInput

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
            here = str(Path(__file__).resolve().parent.parent)
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


def _even_share(cpus, num_workers):
    share = cpus / num_workers
    return float(int(share)) if share >= 1 else int(share * 100) / 100
