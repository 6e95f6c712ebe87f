"""Map work over a pool of Ray Data actors, or over this process."""

import itertools
import pickle
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor

from common.cluster import share_resources, start_ray
from common.errors import Fault, ToolError, as_tool_error, describe_error
from common.messages import listen, say
from common.no_gc import no_gc


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
