"""Map work over a pool of Ray Data actors, or run it in this process."""

import contextlib
import itertools
import pickle
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from common.board import RemoteBoard, board_on_ray, local_board
from common.cluster import start_ray
from common.errors import MEMORY, Fault, ToolError, TryAgain, WorkerDied, as_tool_error, describe_error
from common.messages import listen, say
from common.no_gc import no_gc
from common.nodes import Waiting, default_workers, describe, say_what_lacks, share_resources
from common.objects import uris_in_errors
from common.outages import working

LOOK_EVERY = 1.0  # seconds between two looks at the actors' signs of life
MOST_RESTARTS = 1000  # of an actor in a run, however much it has done in between
MOST_BLOCKS = 10_000  # of the items of a dataset: Ray needs a millisecond and some kilobytes of the driver for each


def map_on_actors(
    worker_class: Callable[..., Callable[[Any], Any]] | None,
    options: dict[str, Any],
    items: list,
    num_workers: int | tuple[int, int] | None,
    prepare: Callable[[Any], Iterable] | None = None,
    ordered: bool = False,
    **place: Any,
) -> Iterator[Any]:
    """Yield `worker_class(**options)(item)` for every item, in the order of completion, or of the items if `ordered`.

    An actor loads its model once, takes one item at a time, and is restarted if it dies, up to `max_failures` times
    without a result in between.
    worker_class: called on Ray with an additional `num_threads`; None yields the results of `prepare`.
    items: plain values. Results are dicts of numbers, strings and numpy arrays.
    num_workers: 0 runs in this process without Ray; N or (min, max) actors of a Ray Data pool; None starts one actor
    per GPU, else one per four CPUs.
    prepare: a function that turns one of `items` into an iterable of the workers' items. It runs in CPU tasks ahead of
    the actors if these leave CPUs free, else inside the actors.
    place: the keyword arguments that cli.placement returns.
    Raises the ToolError of a worker.
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
    with contextlib.closing(_on_ray(worker_class, options, items, num_workers, prepare, ordered, **place)) as rows:
        for row in rows:
            result, said = pickle.loads(row["bytes"])
            for message in dict.fromkeys(said):
                if message not in heard:  # several actors may send the same message
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
    accelerator_type=None,
    max_failures=3,
    start_timeout=1800,
):
    """Yield the rows of a Ray Data dataset with one column, the pickled results of `map_on_actors`."""
    nodes = start_ray(address, insecure_cluster)
    smallest, largest = _pool_size(num_workers, nodes, len(items), gpus_per_worker, accelerator_type)
    share = share_resources(nodes, largest, cpus_per_worker, gpus_per_worker, accelerator_type)
    rows = _rows_of(items, ordered)
    if prepare is not _as_it_is:
        # These tasks use the CPUs that the actors leave, several tasks per actor on a large machine. On a machine with
        # few CPUs and no GPU the requests are equal, and Ray Data fuses both stages into the actor: fewer processes.
        rows = rows.flat_map(_Prepare(prepare), num_cpus=min(1.0, share.cpus / 2))
    if worker_class is None:
        yield from rows.iter_rows()
        return
    asked = replace(share, cpus=share.cpus / 2)  # Ray Data's own tasks need CPUs too, or everything waits forever
    say_what_lacks(nodes, largest, asked)
    options = {**options, "num_threads": max(1, int(share.cpus))}
    with contextlib.nullcontext() if nodes.is_local else board_on_ray() as board:
        arguments = (worker_class, options, board and board.actor, max_failures)
        found = _map(rows, arguments, (smallest, largest), asked, max_failures).iter_rows()
        yield from _watch(found, board, Waiting(1, asked, is_group=False), start_timeout) if board else found


def _rows_of(items, ordered):
    """Return a Ray Data dataset of the items, pickled."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1  # a batch may take hours; `_watch` looks at the actors themselves
    context.execution_options.preserve_order = ordered
    blocks = min(len(items), MOST_BLOCKS)
    return ray.data.from_items([{"bytes": pickle.dumps((item, []))} for item in items], override_num_blocks=blocks)


def _map(rows, arguments, sizes, share, max_failures):
    """Return a dataset mapped over a pool of _Actor(*arguments); sizes: (min, max) of the pool."""
    from ray.data import ActorPoolStrategy
    from ray.util.annotations import RayDeprecationWarning

    smallest, largest = sizes
    # Without a limit Ray Data restarts a dying actor forever. Ray counts the restarts in a whole run, the actors count
    # those in a row. Ray 2.60 deprecates these two options without offering a replacement yet.
    limits = {"max_restarts": MOST_RESTARTS if max_failures else 0}
    # The restarts bound these too. Until Ray notices that a node is lost, each second costs one of them.
    limits["max_task_retries"] = -1
    kind = {"accelerator_type": share.accelerator_type} if share.accelerator_type else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RayDeprecationWarning)
        return rows.map(
            _Actor,
            fn_constructor_args=arguments,
            compute=ActorPoolStrategy(min_size=smallest, max_size=largest, max_tasks_in_flight_per_actor=2),
            num_cpus=share.cpus,
            num_gpus=share.gpus,
            **kind,
            **limits,
        )


def _watch(rows: Iterable[Any], board: RemoteBoard, waiting: Waiting, start_timeout: float) -> Iterator[Any]:
    """Yield the rows that actors make, and say what the actors wait for while none of them is alive.

    board: that the actors give signs of life to. Raises TryAgain after `start_timeout` seconds without a living actor.
    """
    done, is_given_up = threading.Event(), threading.Event()
    is_main = threading.current_thread() is threading.main_thread()

    def look() -> None:
        while not done.wait(LOOK_EVERY):
            if waiting.look(board.news()[2]) > start_timeout:
                is_given_up.set()
                if is_main:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                return

    thread = threading.Thread(target=look, daemon=True)
    # Not SIGINT, which a shell makes its background commands ignore.
    earlier = signal.signal(signal.SIGUSR1, signal.default_int_handler) if is_main else None
    thread.start()
    try:
        yield from rows if is_main else _until(is_given_up, iter(rows))
    except KeyboardInterrupt:
        if not is_given_up.is_set():
            raise
        asked = describe(waiting.num_workers, waiting.share)
        raise TryAgain(
            f"the cluster had no room for {asked} for {start_timeout:g} s: run the same command again when it has, "
            "or pass a longer --start_timeout"
        ) from None
    finally:
        done.set()
        thread.join()
        if is_main:
            signal.signal(signal.SIGUSR1, earlier)


def _until(is_given_up: threading.Event, rows: Iterator[Any]) -> Iterator[Any]:
    """Yield rows; raise KeyboardInterrupt once the event is set, as the signal does in the main thread."""
    pool, end = ThreadPoolExecutor(1), object()
    try:
        while True:
            row = pool.submit(next, rows, end)
            while not wait([row], LOOK_EVERY).done:
                if is_given_up.is_set():
                    raise KeyboardInterrupt
            if row.result() is end:
                return
            yield row.result()
    finally:
        pool.shutdown(wait=False)  # it may wait for a row that never comes


def _pool_size(num_workers, nodes, num_items, gpus_per_worker=None, accelerator_type=None):
    """Return the (min, max) number of actors, by default one per GPU or else per four CPUs; at most one per item."""
    if num_workers is None:
        num_workers = default_workers(nodes, max(1, int(nodes.cpus) // 4), gpus_per_worker, accelerator_type)
    smallest, largest = num_workers if isinstance(num_workers, tuple) else (num_workers, num_workers)
    return min(smallest, num_items), min(largest, num_items)


def _as_it_is(item):
    yield item


def _attempt(function, *arguments, **options):
    """Return a function's result, or its exception as a ToolError: Ray Data forwards only the text of exceptions."""
    try:
        with uris_in_errors(), working():
            return function(*arguments, **options)
    except Exception as error:
        known = as_tool_error(error) or Fault(describe_error(error)[1])
        known.add_note(traceback.format_exc())  # for --debug
        return known


def _restarted_actor():
    """Return the name of this process if it is a Ray actor that was restarted after it died, else None."""
    import ray

    context = ray.get_runtime_context() if ray.is_initialized() else None
    name = context and context.get_actor_id()
    return name if name and context.was_current_actor_reconstructed else None


class _Prepare:
    """Ray Data task: run `prepare` on one item. Rows hold pickled (item, messages) pairs; there are no messages yet."""

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
    """Ray Data actor: create the worker once and call it. Rows hold pickled (result or ToolError, messages) pairs.

    The worker is created and called in one thread; Ray Data would use two. OpenMP keeps a team of threads for each
    calling thread, and with more OpenMP threads than CPUs it is a quarter slower.
    """

    def __init__(self, worker_class, options, board=None, max_failures=0):
        self.board = RemoteBoard(board, beats=True) if board else None
        self.thread, self.said, self.deaths = ThreadPoolExecutor(1), [], 0
        listen(self.said.append)
        self.name = _restarted_actor()
        if self.name:
            say("warning: a worker process died and was restarted")
            self.board = self.board or local_board()
            self.deaths = self.board.begin_again(self.name)
        if self.deaths > max_failures:
            self.worker = WorkerDied(f"a worker process died {self.deaths} times without a result in between; {MEMORY}")
            return
        with no_gc():
            self.worker = self._run(worker_class, **options)

    def _run(self, function, *arguments, **options):
        return self.thread.submit(_attempt, function, *arguments, **options).result()

    def __call__(self, row):
        item, _ = pickle.loads(row["bytes"])
        failed = next((each for each in (self.worker, item) if isinstance(each, ToolError)), None)
        result = failed or self._run(self.worker, item)
        if self.name and self.board and self.deaths and not failed:
            self.board.has_result(self.name)
            self.deaths = 0
        said = list(self.said)
        self.said.clear()
        return {"bytes": pickle.dumps((result, said))}
