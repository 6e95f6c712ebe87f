"""Map work over a pool of Ray Data actors, or run it in this process."""

import _thread
import contextlib
import itertools
import pickle
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from common.board import RemoteBoard, board_on_ray
from common.cluster import start_ray
from common.errors import Fault, ToolError, TryAgain, as_tool_error, describe_error
from common.messages import listen, say
from common.no_gc import no_gc
from common.nodes import Waiting, default_workers, describe, say_what_lacks, share_resources
from common.objects import uris_in_errors
from common.outages import working

LOOK_EVERY = 1.0  # seconds between two looks at the actors' signs of life
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

    An actor loads its model once, takes one item at a time, and is restarted up to `max_failures` times if it dies.
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
    import ray.data
    from ray.data import ActorPoolStrategy
    from ray.util.annotations import RayDeprecationWarning

    smallest, largest = _pool_size(num_workers, nodes, len(items), gpus_per_worker, accelerator_type)
    share = share_resources(nodes, largest, cpus_per_worker, gpus_per_worker, accelerator_type)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1  # a batch may take hours; `_watch` looks at the actors themselves
    context.execution_options.preserve_order = ordered
    blocks = min(len(items), MOST_BLOCKS)
    rows = ray.data.from_items([{"bytes": pickle.dumps((item, []))} for item in items], override_num_blocks=blocks)
    if prepare is not _as_it_is:
        # These tasks use the CPUs that the actors leave, several tasks per actor on a large machine. On a machine with
        # few CPUs and no GPU the requests are equal, and Ray Data fuses both stages into the actor: fewer processes.
        rows = rows.flat_map(_Prepare(prepare), num_cpus=min(1.0, share.cpus / 2))
    if worker_class is None:
        yield from rows.iter_rows()
        return
    asked = replace(share, cpus=share.cpus / 2)  # Ray Data's own tasks need CPUs too, or everything waits forever
    say_what_lacks(nodes, largest, asked)
    is_watched = not nodes.is_local and threading.current_thread() is threading.main_thread()
    watch = _watch(Waiting(1, asked), start_timeout) if is_watched else contextlib.nullcontext()
    with watch as board:
        # Without a limit Ray Data restarts a dying actor forever. Ray 2.60 deprecates these two options without
        # offering a replacement yet.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RayDeprecationWarning)
            rows = rows.map(
                _Actor,
                fn_constructor_args=(worker_class, {**options, "num_threads": max(1, int(share.cpus))}, board),
                compute=ActorPoolStrategy(min_size=smallest, max_size=largest, max_tasks_in_flight_per_actor=2),
                num_cpus=asked.cpus,
                num_gpus=asked.gpus,
                **({"accelerator_type": accelerator_type} if accelerator_type else {}),
                max_restarts=max_failures,
                # The restarts bound these too. Until Ray notices that a node is lost, each second costs one of them.
                max_task_retries=-1,
            )
        yield from rows.iter_rows()


@contextlib.contextmanager
def _watch(waiting: Waiting, start_timeout: float) -> Iterator[Any]:
    """Yield the actor of a board for actors; say what they wait for while none of them is alive.

    Raises TryAgain in the main thread after `start_timeout` seconds without a living actor.
    """
    done, waited = threading.Event(), 0.0

    def look(board: RemoteBoard) -> None:
        nonlocal waited
        while not done.wait(LOOK_EVERY):
            waited = waiting.look(board.news()[2])
            if waited > start_timeout:
                _thread.interrupt_main()
                return

    with board_on_ray() as board:
        thread = threading.Thread(target=look, args=(board,), daemon=True)
        thread.start()
        try:
            yield board.actor
        except KeyboardInterrupt:
            if waited <= start_timeout:
                raise
            asked = describe(waiting.num_workers, waiting.share)
            raise TryAgain(
                f"the cluster had no room for {asked} for {start_timeout:g} s: run the same command again when it has, "
                "or pass a longer --start_timeout"
            ) from None
        finally:
            done.set()
            thread.join()


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


def _was_restarted():
    """Return whether this process is a Ray actor that was restarted after it died."""
    import ray

    context = ray.get_runtime_context() if ray.is_initialized() else None
    return bool(context and context.get_actor_id() and context.was_current_actor_reconstructed)


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

    def __init__(self, worker_class, options, board=None):
        self.board = board and RemoteBoard(board, beats=True)
        self.thread, self.said = ThreadPoolExecutor(1), []
        listen(self.said.append)
        if _was_restarted():
            say("warning: a worker process died and was restarted")
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
