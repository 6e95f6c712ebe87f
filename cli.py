"""What the command lines share before anything heavy is imported: errors and exit codes, flags, progress, Ray's start.

Nothing here imports torch or Ray at the top, so that a wrong flag or a finished step answers in a fraction of a second.
"""

import argparse
import contextlib
import errno
import json
import os
import re
import signal
import sys
import time
import traceback

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


def run(main, args):
    """Call `main(args)` and leave the process with the exit code of what happened; one line on stderr for an error."""
    global _results
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    _results, sys.stdout = sys.stdout, sys.stderr  # Ray prints there what goes wrong with its processes
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        main(args)
        code = 0
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        if args.debug:
            traceback.print_exc()
        code, message = describe_error(error, args)
        print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
    _results.flush()
    sys.exit(code)


def _raise_terminated(signal_number, frame):
    raise Terminated


@contextlib.contextmanager
def stop_file(path):
    """Turn SIGTERM and SIGINT into the file `path`, which workers look for; yield a list that gets the signal.

    A second signal ends the process at once.
    """
    received = []

    def handle(signal_number, frame):
        if received:
            os._exit(128 + signal_number)
        received.append(signal_number)
        open(path, "w").close()
        say("stopping: saving a checkpoint first")

    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    earlier = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


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


_listeners = []


def say(message):
    """Print one line for a person, on stderr, and pass it to who listens."""
    print(message, file=sys.stderr, flush=True)
    for listener in _listeners:
        listener(message)


def listen(listener):
    """Call `listener(message)` for all that this process says from now on: nobody sees the stderr of a worker."""
    _listeners.append(listener)


_results = None  # stdout, which is for the last line alone once `run` has begun


def print_last(line):
    """Print the last line of stdout, which is for machines."""
    print(line, file=_results or sys.stdout, flush=True)


def print_result(**result):
    """Print one JSON object as the last line of stdout."""
    print_last(json.dumps(result))


def check_text(flag, text):
    """Raise BadInput where a flag's value is not text: a terminal of another encoding sends bytes that are none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{flag} {text.encode(errors='replace').decode()!r} is not UTF-8: set the terminal's") from None


# ---------------------------------------------------------------------------------------------------------------------
# Flags


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it is written; the default after each help text that has one worth naming."""

    def _fill_text(self, text, width, indent):
        return text

    def _get_help_string(self, action):
        return action.help if action.default in (None, False, "", []) else super()._get_help_string(action)


def make_parser(doc):
    """Return a parser that shows `doc` as it is written, and defaults after each help text."""
    return argparse.ArgumentParser(description=doc, formatter_class=_HelpFormatter, allow_abbrev=False)


def add_shared_flags(parser):
    """Add the flags that every script has."""
    group = parser.add_argument_group("running")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return group


def add_compute_flags(group):
    """Add the flags of the scripts that run on Ray."""
    group.add_argument("--address", help="Ray cluster to join; RAY_ADDRESS, or else a local one")
    group.add_argument("--insecure_cluster", action="store_true", help="join a cluster that asks for no token")
    group.add_argument("--cpus_per_worker", type=positive_float, help="CPUs of each worker; default: an even share")
    group.add_argument("--gpus_per_worker", type=positive_float, help="GPUs of each worker; default: 1 where there are")
    help_text = "how often a worker that died is started again before the run ends with exit code 4"
    group.add_argument("--max_failures", type=non_negative_int, default=3, help=help_text)
    group.add_argument(
        "--mixed_precision",
        choices=("auto", "no", "bf16", "fp16"),
        default="auto",
        help="type to compute in; auto: bf16 on a GPU, fp32 on a CPU",
    )


PLACEMENT = ("address", "insecure_cluster", "cpus_per_worker", "gpus_per_worker", "max_failures")


def placement(args):
    """Return the flags that say where on Ray something runs, as map_on_actors and run_workers take them."""
    return {name: getattr(args, name) for name in PLACEMENT}


def positive_int(text):
    """Parse a flag's value as an int of at least 1."""
    return _at_least(int, text, 1)


def non_negative_int(text):
    """Parse a flag's value as an int of at least 0."""
    return _at_least(int, text, 0)


def non_negative_float(text):
    """Parse a flag's value as a finite float of at least 0."""
    return _at_least(float, text, 0)


def seed(text):
    """Parse a flag's value as a seed, which must fit a signed 64-bit integer."""
    value = non_negative_int(text)
    if value >= 2**63:
        raise argparse.ArgumentTypeError(f"{text} does not fit 63 bits")
    return value


def positive_float(text):
    """Parse a flag's value as a finite float above 0."""
    value = _at_least(float, text, 0)
    if value == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def pool_size(text):
    """Parse N or MIN:MAX actors."""
    try:
        sizes = [int(part) for part in text.split(":")]
    except ValueError:
        sizes = []
    if len(sizes) == 1 and sizes[0] >= 0:
        return sizes[0]
    if len(sizes) == 2 and 1 <= sizes[0] <= sizes[1]:
        return tuple(sizes)
    raise argparse.ArgumentTypeError(f"{text!r} is neither N nor MIN:MAX")


def fraction(text):
    """Parse a flag's value as a number from 0 to 1."""
    value = _at_least(float, text, 0)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is above 1")
    return value


def _at_least(kind, text, minimum):
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not minimum <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is below {minimum} or not finite")
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Progress


class Progress:
    """One progress bar on a terminal; elsewhere (cron, CI) a line every ten seconds and one at the end."""

    def __init__(self, name, total, unit, initial=0):
        self.name, self.total, self.unit, self.done, self.start = name, total, unit, initial, initial
        self.began = self.said = time.monotonic()
        self.figures, self.last_said = {}, None
        self.bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, unit=f" {unit}", desc=name, initial=initial, dynamic_ncols=True)

    def update(self, count, **figures):
        """Add `count` done units; `figures` (say loss=0.1) stand beside the bar."""
        self.done += count
        self.figures |= figures
        if self.bar is not None:
            self.bar.set_postfix(self.figures, refresh=False)
            self.bar.update(count)
        elif time.monotonic() - self.said > 10:
            self._say()

    def _say(self):
        self.said, self.last_said = time.monotonic(), self.done
        rate = (self.done - self.start) / max(self.said - self.began, 1e-9)
        extra = "".join(f", {name} {value}" for name, value in self.figures.items())
        say(f"{self.name}: {self.done}/{self.total} {self.unit}, {rate:.3g} {self.unit}/s{extra}")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        """Show the last state."""
        if self.bar is not None:
            self.bar.close()
        elif self.last_said != self.done:
            self._say()
