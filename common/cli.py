"""Command-line interface of the scripts: entry point with exit codes, signal handling, flag types, shared flags.

torch and Ray are not imported here, so that a wrong flag or a finished command exits within a fraction of a second.
"""

import argparse
import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from common.errors import BadInput, Stopped, Terminated, describe_error
from common.messages import keep_stdout_for_the_result, say
from common.objects import uris_in_errors
from common.storage import absolute
from common.uris import shown

PLACEMENT = """
    address insecure_cluster cpus_per_worker gpus_per_worker accelerator_type max_failures start_timeout
""".split()  # noqa: SIM905

MOST_FAILURES = 10  # in a row, for --max_failures -1: nothing is tried again without a bound


def run(main: Callable[[argparse.Namespace], Any], args: argparse.Namespace) -> NoReturn:
    """Call `main(args)` and exit with 0, or with an error's exit code and one line on stderr."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    results = keep_stdout_for_the_result()
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        with uris_in_errors():
            main(args)
        code = 0
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        if args.debug:
            print(shown(traceback.format_exc()), file=sys.stderr, end="")
        code, message = describe_error(error, args)
        print(f"{os.path.basename(sys.argv[0])}: {shown(message)}", file=sys.stderr)
    results.flush()
    sys.exit(code)


def _raise_terminated(signal_number, frame):
    raise Terminated


@contextlib.contextmanager
def stopping(ask: Callable[[], Any]) -> Iterator[list[int]]:
    """Call `ask()` on SIGTERM or SIGINT, so that the workers save and stop; yield a list for the signal's number.

    A second signal ends the process immediately.
    """
    received: list[int] = []

    def handle(signal_number, frame):
        if received:
            os._exit(128 + signal_number)
        received.append(signal_number)
        ask()
        say("saving a checkpoint before stopping")

    earlier = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stopping_at_once(clean_up: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """End the process immediately on SIGTERM or SIGINT, after `clean_up()`.

    For work of the Hub's client, which would first finish all files that it is transferring.
    """

    def stop(signal_number, frame):
        clean_up()
        error = Stopped(signal_number)
        say(f"{os.path.basename(sys.argv[0])}: {error}")
        os._exit(error.exit_code)

    earlier = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def check_text(flag: str, text: str) -> None:
    """Raise BadInput unless a flag's value is valid UTF-8; a terminal with another encoding sends other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        readable = text.encode(errors="replace").decode()
        raise BadInput(f"{flag} {readable!r} is not valid UTF-8: use a UTF-8 terminal") from None


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Keep the line breaks of the description; append defaults to help texts, except None, False and empty ones."""

    def _fill_text(self, text, width, indent):
        return text

    def _get_help_string(self, action):
        hidden = action.default is None or action.default is False or action.default in ("", [])
        return action.help if hidden else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        super().error(shown(message))


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows `doc` with its line breaks, and the defaults of flags."""
    return _Parser(description=doc, formatter_class=_HelpFormatter, allow_abbrev=False)


def add_shared_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags that every script has and return their group."""
    group = parser.add_argument_group("running")
    group.add_argument("--debug", action="store_true", help="print the traceback of an error")
    return group


def add_compute_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of scripts that run on Ray."""
    help_text = "check everything, print what would be done, and end without loading a model"
    group.add_argument("--dry_run", action="store_true", help=help_text)
    help_text = "address of the Ray cluster to join; default: RAY_ADDRESS, or a local Ray instance"
    group.add_argument("--address", help=help_text)
    help_text = "join a Ray cluster that does not use token authentication"
    group.add_argument("--insecure_cluster", action="store_true", help=help_text)
    help_text = "CPUs per worker; default: an even share of this machine's CPUs, or 1 on a cluster"
    group.add_argument("--cpus_per_worker", type=positive_float, help=help_text)
    help_text = "GPUs per worker; default: 1 if there are GPUs, else 0; required on a cluster without GPUs at present"
    group.add_argument("--gpus_per_worker", type=non_negative_float, help=help_text)
    help_text = "type of the GPUs that workers are placed on, as Ray names it, such as A10G or A100; default: any"
    group.add_argument("--accelerator_type", metavar="TYPE", help=help_text)
    help_text = "seconds to wait for a cluster to hold the workers before the run ends with exit code 75"
    group.add_argument("--start_timeout", type=positive_float, default=1800, help=help_text)
    help_text = (
        "number of times in a row, without progress in between, that a worker that died is restarted before the "
    )
    help_text += "run ends with exit code 4; progress is a newer checkpoint in training, else a result of the worker; "
    help_text += f"-1: {MOST_FAILURES}"
    group.add_argument("--max_failures", type=failures, default=3, help=help_text)
    group.add_argument(
        "--mixed_precision",
        choices=("auto", "no", "bf16", "fp16"),
        default="auto",
        help="data type to compute in; auto: bf16 on a GPU (fp16 if it lacks bf16 units), fp32 on a CPU",
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line of a script with compute flags, which end with a usage error if they do not fit."""
    args = parser.parse_args(argv)
    for flag in ("gpus_per_worker", "num_workers"):
        if args.accelerator_type and getattr(args, flag) == 0:
            parser.error(f"--accelerator_type chooses among GPUs of Ray, --{flag} 0 uses none: use only one of them")
    return args


def make_absolute(args: argparse.Namespace, *names: str) -> None:
    """Replace the relative paths of flags by absolute ones, for workers, which run in other working directories."""
    for name in names:
        if getattr(args, name):
            setattr(args, name, absolute(getattr(args, name)))


def placement(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that place work on Ray, as keyword arguments of map_on_actors and run_workers."""
    return {name: getattr(args, name) for name in PLACEMENT}


def ray_or_none(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the flags that start or join Ray, as keyword arguments of map_on_actors, or None with --num_workers 0."""
    if args.num_workers == 0:
        return None
    return {"address": args.address, "insecure_cluster": args.insecure_cluster}


def positive_int(text: str) -> int:
    """Parse a flag's value as an int of at least 1."""
    return _at_least(int, text, 1)


def non_negative_int(text: str) -> int:
    """Parse a flag's value as an int of at least 0."""
    return _at_least(int, text, 0)


def failures(text: str) -> int:
    """Parse a number of failures in a row: an int of at least 0, or -1 for MOST_FAILURES."""
    value = _at_least(int, text, -1)
    return MOST_FAILURES if value == -1 else value


def non_negative_float(text: str) -> float:
    """Parse a flag's value as a finite float of at least 0."""
    return _at_least(float, text, 0)


def seed(text: str) -> int:
    """Parse a flag's value as a seed: an int from 0 to 2**63 - 1."""
    value = non_negative_int(text)
    if value >= 2**63:
        raise argparse.ArgumentTypeError(f"{text} is larger than 2**63 - 1")
    return value


def positive_float(text: str) -> float:
    """Parse a flag's value as a finite float above 0."""
    value = _at_least(float, text, 0)
    if value == 0:
        raise argparse.ArgumentTypeError("must be greater than 0")
    return value


def pool_size(text: str) -> int | tuple[int, int]:
    """Parse a number of actors: N as an int, MIN:MAX as a tuple."""
    try:
        sizes = [int(part) for part in text.split(":")]
    except ValueError:
        sizes = []
    if len(sizes) == 1 and sizes[0] >= 0:
        return sizes[0]
    if len(sizes) == 2 and 1 <= sizes[0] <= sizes[1]:
        return sizes[0], sizes[1]
    raise argparse.ArgumentTypeError(f"{text!r} is not N or MIN:MAX")


def fraction(text: str) -> float:
    """Parse a flag's value as a float from 0 to 1."""
    value = _at_least(float, text, 0)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is greater than 1")
    return value


def _at_least(kind: Callable[[str], Any], text: str, minimum: int) -> Any:
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not minimum <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is less than {minimum} or not finite")
    return value
