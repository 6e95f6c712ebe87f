"""Start a local Ray, or join a cluster and send it the code."""

import contextlib
import importlib
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import BadInput, TryAgain
from common.nodes import Nodes, nodes_up

OLDEST_RAY = (2, 60)
TOKEN_REMEDY = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # what Ray's job server tells the command of `ray job submit`
ANSWER_WITHIN = 5  # seconds


def is_local(address: str | None = None) -> bool:
    """Return whether start_ray(address) starts a local Ray instance rather than joining a cluster."""
    return _full_address(address) == "local"


def _full_address(address: str | None) -> str:
    return address or os.environ.get("RAY_ADDRESS") or "local"


def start_ray(address: str | None = None, insecure_cluster: bool = False, module: str = "ray.data") -> Nodes:
    """Start a local Ray instance, or join the cluster at `address` or RAY_ADDRESS; return its nodes.

    module: the Ray library that the caller uses next; it is imported while Ray's processes start.

    A local instance listens on the loopback interface only. BadInput is raised for a cluster without token
    authentication, unless `insecure_cluster` is set. A cluster's workers receive the project's code.
    """
    address = _full_address(address)
    _set_ray_variables(is_local(address))
    import ray

    if tuple(map(int, ray.__version__.split(".")[:2])) < OLDEST_RAY:
        raise BadInput(f"Ray {ray.__version__} is installed, 2.60 or newer is needed: pip install -r requirements.txt")
    if not ray.is_initialized():
        options = {"include_dashboard": False} if is_local(address) else _code_for_workers()
        if not is_local(address):
            if not insecure_cluster:
                _check_token(address)
            _check_answers(address)
        with _importing(module):
            _connect(address, options)
    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they also raise the errors that they log
    return list_nodes(address)


def list_nodes(address: str | None = None) -> Nodes:
    """Return the nodes of the Ray that start_ray(address) has started or joined, as they are now."""
    address = _full_address(address)
    return nodes_up(is_local(address), address)


def _code_for_workers() -> dict[str, Any]:
    """Return the options of ray.init that send the project's code to workers; .rayignore leaves out all but the code.

    A command of `ray job submit --working-dir` runs in a copy of the project that all workers get, and Ray refuses a
    second working directory.
    """
    if "working_dir" in json.loads(os.environ.get(JOB) or "{}").get("runtime_env", {}):
        return {}
    return {"runtime_env": {"working_dir": str(Path(__file__).resolve().parent.parent)}}


def _set_ray_variables(local: bool) -> None:
    """Set the environment variables that Ray reads when it is imported, unless the user has set them."""
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
        # Drop Ray's paragraphs on dead workers and nodes: actors tell their restarts, as_tool_error the final death.
        "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed|Task .* retries remaining|Raylet is terminated|"
        "has been marked dead",
        "RAY_BACKEND_LOG_LEVEL": "fatal",  # every actor pool logs a harmless error when it ends
        # Below this number Ray warns about many worker processes on a small machine.
        "RAY_worker_maximum_startup_concurrency": str(max(8, os.cpu_count() or 1)),
    }
    if local:
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # makes Ray listen on 127.0.0.1 only
        variables["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # an actor that waits for a cloud's preemption notice
    else:
        variables["RAY_NUM_REDIS_GET_RETRIES"] = "2"  # of ten seconds each, before a cluster does not answer
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def _importing(module: str) -> Iterator[None]:
    """Import a module in another thread, for use while this one waits."""
    thread = threading.Thread(target=importlib.import_module, args=(module,))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _connect(address: str, options: dict[str, Any]) -> None:
    """Call ray.init without its output and with this process's own SIGTERM handler.

    Raises BadInput if no cluster answers, TryAgain if Ray does not start in time.
    """
    import ray

    try:
        on_sigterm = signal.getsignal(signal.SIGTERM)
        with _no_stderr():  # Ray's C++ code prints its log level there
            ray.init(address=address, logging_level="ERROR", log_to_driver=False, **options)
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's handler exits with another code
        if is_local(address):
            _check_loopback()
            _end_log_monitor()
    except ConnectionError as error:
        if "AuthenticationError" in type(error.__cause__).__name__ + str(error.__cause__):
            raise BadInput(f"the Ray cluster at {address} asks for a token: {TOKEN_REMEDY}") from error
        raise BadInput(f"no Ray cluster answers at {address} ({error}): check --address and RAY_ADDRESS") from error
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        raise TryAgain("Ray did not start in time, as on a very busy machine: run the same command again") from error


def _check_loopback() -> None:
    """Shut down the Ray instance that was just started and raise BadInput if other hosts can reach it.

    Ray listens on 127.0.0.1 only because of an environment variable that is not part of its public interface.
    """
    import ray

    hosts = {ray.get_runtime_context().gcs_address.rpartition(":")[0].strip("[]")}
    hosts |= {node["NodeManagerAddress"] for node in ray.nodes()}
    open_hosts = sorted(host for host in hosts if host != "localhost" and not ipaddress.ip_address(host).is_loopback)
    if open_hosts:
        ray.shutdown()
        raise BadInput(
            f"Ray listens on {open_hosts[0]}, which other hosts can reach: install the versions that requirements.txt "
            "pins, unset RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER, or join a cluster with --address"
        )


def _end_log_monitor() -> None:
    """End the process that forwards the workers' output, which log_to_driver=False discards.

    The call is private to Ray: in a version without it the process keeps running.
    """
    import ray

    with contextlib.suppress(Exception):
        ray._private.worker._global_node.kill_log_monitor(check_alive=False)


def end_idle_actors(address: str | None = None) -> None:
    """Kill the actors that Ray Data leaves on a local Ray instance; each uses 1% of a core."""
    import ray

    for actor in ray.util.list_named_actors(all_namespaces=True) if is_local(address) else []:
        with contextlib.suppress(ValueError):  # the actor has ended in the meantime
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))


def _check_answers(address: str) -> None:
    """Raise BadInput if nothing listens at HOST:PORT; Ray would try for minutes without a word."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_WITHIN).close()
    except OSError as error:
        raise BadInput(f"no Ray cluster answers at {address} ({error}): check --address and RAY_ADDRESS") from None


def _check_token(address: str) -> None:
    """Raise BadInput if Ray would join a cluster without a token: authentication is off, or no token is set."""
    mode = os.environ.get("RAY_AUTH_MODE")
    given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    has_token = mode.lower() == "token" if mode else given or (Path.home() / ".ray" / "auth_token").is_file()
    if not has_token and address.rpartition(":")[0] not in ("localhost", "127.0.0.1", "[::1]"):
        raise BadInput(
            f"the Ray cluster at {address} would be joined without a token, so that anyone who reaches it could run "
            f"code: {TOKEN_REMEDY}, or pass --insecure_cluster"
        )


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    """Redirect file descriptor 2 to /dev/null; Python exceptions are not affected."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
