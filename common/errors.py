"""Exceptions of the toolkit with their exit codes, and what an exception of a library amounts to."""

import errno
import re
import signal

WORKER_DIED = ("ActorDiedError", "ActorUnavailableError", "WorkerCrashedError")  # Ray's


class ToolError(Exception):
    """A fault that a user can cause and mend: printed as one line, never as a traceback."""

    exit_code = 1


class BadInput(ToolError):
    """Photos, prompts, a model folder or a setting that does not fit them."""

    exit_code = 3


class OutOfResource(ToolError):
    """The disk or the memory is full."""

    exit_code = 4


class OutOfMemory(OutOfResource):
    """The memory of a GPU or of a host is full; `run` adds which flags of the script need less."""


class WorkerDied(OutOfMemory):
    """A process of Ray's ended by itself, not by an exception: as a rule the system ended it for its memory."""


class CheckFailed(ToolError):
    """A file that fails its check, or a run that diverged."""

    exit_code = 5


class TryAgain(ToolError):
    """Another run holds the output, or the network is away."""

    exit_code = 75


class Fault(ToolError):
    """A fault of ours in a worker, as text: its exception may not be one that the driver knows."""


class Stopped(ToolError):
    """A signal ended the run after it saved."""

    def __init__(self, signal_number):
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; the same command goes on from here")
        self.exit_code = 128 + signal_number

    def __reduce__(self):
        return Stopped, (self.exit_code - 128,)


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised wherever a script is: no Exception, which a library in between may catch and go on."""


def describe_error(error, args=None):
    """Return (exit code, one line) for an exception, looking through what Ray wraps around a worker's own.

    args: of the script, whose flags are a remedy where the memory is full.
    """
    *_, last = [error, *(each for each in causes(error) if str(each).strip())]
    known = list(filter(None, map(as_tool_error, causes(error))))
    if known:  # a worker that ended by itself says less than the error of one beside it
        known = min(known, key=lambda each: isinstance(each, WorkerDied))
        remedy = f": {_less_memory(vars(args))}" if args and isinstance(known, OutOfMemory) else ""
        return known.exit_code, one_line(f"{known}{remedy}")
    lines = str(last).strip().splitlines() or [""]
    return ToolError.exit_code, one_line(f"{type(last).__name__}: {lines[-1]} (--debug shows where)")


def as_tool_error(error):
    """Return the ToolError that an exception amounts to, None where it is a fault of ours."""
    if isinstance(error, ToolError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Stopped(signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
    written = re.search(r"os error (\d+)", str(error))  # safetensors' and the hub's writers are in Rust
    number = int(written[1]) if written else getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = getattr(error, "filename", None) or "a file"
        return OutOfResource(f"disk full while writing {where}: make room, then run again")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return OutOfMemory("out of memory")
    if type(error).__name__ in WORKER_DIED and not getattr(error, "actor_init_failed", False):
        return WorkerDied("a worker process died; usually the system ended it because memory ran out")
    return None


def _less_memory(flags):
    """Return what to do where the memory is full: flags of a script, {name: value}, in the order to try them.

    A flag that has its smallest value already is not named.
    """
    value, rest = flags.get, "with more --gradient_accumulation_steps"
    ways = {
        "--use_8bit_adam": value("use_8bit_adam") is False,
        "--gradient_checkpointing": value("gradient_checkpointing") is False,
        f"a smaller --train_batch_size {rest}": value("train_batch_size", 1) > 1,
        f"a smaller --batch_size_per_worker {rest}": value("batch_size_per_worker", 1) > 1,
        "--no-train_text_encoder": value("train_text_encoder") is True,
        "--strategy fsdp": value("strategy") == "ddp" and value("num_workers") not in (0, 1),
        "a smaller --encoding_batch_size": value("online", True) and value("encoding_batch_size", 1) > 1,
        "a smaller --batch_size": value("batch_size", 1) > 1,
        "a smaller --resolution": "resolution" in flags,
        # Not of evaluate.py, which compares with pictures of the class that are as large as the model draws.
        "smaller --height and --width": "height" in flags and "base_model_dir" not in flags,
        "fewer --num_workers": value("num_workers") not in (None, 0, 1),
    }
    named = [way for way, helps in ways.items() if helps]
    return f"try {', then '.join(named)}" if named else "take a machine or a GPU with more"


def causes(error):
    """Yield an exception and those it was raised from; Ray keeps its workers' in `.cause` or `.worker_failures`."""
    seen, left = set(), [error]
    while left:
        error = left.pop(0)
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        failures = getattr(error, "worker_failures", None) or {}
        others = [getattr(error, "controller_failure", None), getattr(error, "cause", None), error.__cause__]
        left = [*failures.values(), *others, *left]


def one_line(text, limit=800):
    """Return `text` with its line breaks as blanks, cut to `limit` characters."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
