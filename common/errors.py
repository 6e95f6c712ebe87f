"""The toolkit's exceptions with their exit codes, and the mapping of library exceptions to them."""

import argparse
import errno
import re
import signal
from collections.abc import Iterator
from typing import Any

NODE_DIED = re.compile(r"node.{0,80} (has )?died|node (was|has been) (terminated|preempted|marked dead)", re.DOTALL)
MEMORY = "usually the system killed it because memory ran out"
WORKER_DIED = ("ActorDiedError", "ActorUnavailableError", "WorkerCrashedError")  # Ray's exceptions


class ToolError(Exception):
    """An error that the user can cause and fix; printed as one line without a traceback."""

    exit_code = 1


class BadInput(ToolError):
    """Images, prompts, a model folder or a flag are invalid or do not fit together."""

    exit_code = 3


class OutOfResource(ToolError):
    """The disk or the memory is full."""

    exit_code = 4


class OutOfMemory(OutOfResource):
    """GPU or host memory is full; `describe_error` adds the flags that reduce memory use."""


class WorkerDied(OutOfMemory):
    """A Ray process died without raising an exception, usually killed by the system because memory ran out."""


class CheckFailed(ToolError):
    """A file failed its check, or a training run diverged."""

    exit_code = 5


class Damaged(CheckFailed):
    """The content of a file is damaged; to read it again does not help."""


class TryAgain(ToolError):
    """Another run holds the output folder's lock, or the network is unreachable."""

    exit_code = 75


class Away(TryAgain):
    """An object store or a server does not answer."""


class NodeLost(TryAgain):
    """A node of the cluster was lost with a worker on it."""


class Fault(ToolError):
    """A bug raised in a worker, sent as text: the driver may be unable to unpickle the original exception."""


class Stopped(ToolError):
    """A signal stopped the run after it saved its state; the exit code is 128 + the signal's number."""

    def __init__(self, signal_number: int):
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; run the same command again to continue")
        self.exit_code = 128 + signal_number

    def __reduce__(self):
        return Stopped, (self.exit_code - 128,)


class Terminated(KeyboardInterrupt):
    """SIGTERM was received. Not an Exception subclass, so that no library catches it and continues."""


def describe_error(error: BaseException, args: argparse.Namespace | None = None) -> tuple[int, str]:
    """Return (exit code, one-line message) for an exception, including those that Ray wraps around a worker's own.

    args: the script's flags, from which the remedy for an out-of-memory error is chosen.
    """
    *_, last = [error, *(each for each in causes(error) if str(each).strip())]
    known = [each for each in map(as_tool_error, causes(error)) if each]
    if known:  # another worker's error says more than the death of a worker
        first = min(known, key=lambda each: isinstance(each, WorkerDied))
        remedy = f": {_less_memory(vars(args))}" if args and isinstance(first, OutOfMemory) else ""
        return first.exit_code, one_line(f"{first}{remedy}")
    lines = str(last).strip().splitlines() or [""]
    return ToolError.exit_code, one_line(f"{type(last).__name__}: {lines[-1]} (--debug shows the traceback)")


def as_tool_error(error: BaseException) -> ToolError | None:
    """Return the ToolError that an exception corresponds to, or None if it is a bug of the toolkit."""
    if isinstance(error, ToolError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Stopped(signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
    written = re.search(r"os error (\d+)", str(error))  # raised by the Rust code of safetensors and hf_xet
    number = int(written[1]) if written else getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = getattr(error, "filename", None) or "a file"
        return OutOfResource(f"disk full while writing {where}: free some space, then run again")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return OutOfMemory("out of memory")
    if type(error).__name__ == "WorkerHealthCheckFailedError":
        return NodeLost("a worker or its node cannot be reached: run the same command again to continue")
    if type(error).__name__ in WORKER_DIED and NODE_DIED.search(str(error)):
        return NodeLost("a node of the cluster was lost: run the same command again to continue")
    if type(error).__name__ in WORKER_DIED and not getattr(error, "actor_init_failed", False):
        return WorkerDied(f"a worker process died; {MEMORY}")
    return None


def _less_memory(flags: dict[str, Any]) -> str:
    """Return which flags to change, in the order to try them, to use less memory.

    flags: {name: value} of the script. A flag that already has its smallest value is not named.
    """
    value, rest = flags.get, "with more --gradient_accumulation_steps"
    ways = {
        "--use_8bit_adam": value("use_8bit_adam") is False and value("strategy") != "fsdp",
        "--gradient_checkpointing": value("gradient_checkpointing", True) is not True,
        "--base_bits 4": bool(value("lora")) and value("base_bits", 4) != 4,
        f"a smaller --train_batch_size {rest}": value("train_batch_size", 1) > 1,
        f"a smaller --batch_size_per_worker {rest}": value("batch_size_per_worker", 1) > 1,
        "--no-train_text_encoder": value("train_text_encoder", False) is not False,
        "--strategy fsdp": value("strategy") == "ddp"
        and value("num_workers") not in (0, 1)
        and not value("use_8bit_adam"),
        "a smaller --encoding_batch_size": value("online", True) and value("encoding_batch_size", 1) > 1,
        "a smaller --batch_size": value("batch_size", 1) > 1,
        "a smaller --resolution": "resolution" in flags,
        # Not for evaluate.py, which compares with class images of the size that the model draws by default.
        "smaller --height and --width": "height" in flags and "base_model_dir" not in flags,
        "fewer --num_workers": value("num_workers") not in (None, 0, 1),
    }
    named = [way for way, helps in ways.items() if helps]
    return f"try {', then '.join(named)}" if named else "use a machine or a GPU with more memory"


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, which Ray keeps in `.cause`, `.worker_failures` or `.controller_failure`."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop(0)
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        failures = getattr(found, "worker_failures", None) or {}
        others = [getattr(found, "controller_failure", None), getattr(found, "cause", None), found.__cause__]
        left = [*failures.values(), *others, *left]


def one_line(text: str, limit: int = 800) -> str:
    """Return `text` with its whitespace collapsed to single spaces, cut to `limit` characters."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
