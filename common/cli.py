"""What the command lines share: the main loop with its exit codes, and the parsing of flags.

Nothing here imports torch or Ray at the top, so that a wrong flag or a finished step answers in a fraction of a second.
"""

import argparse
import contextlib
import os
import signal
import sys
import traceback

from common.errors import BadInput, Terminated, describe_error
from common.messages import keep_stdout_for_the_result, say

PLACEMENT = ("address", "insecure_cluster", "cpus_per_worker", "gpus_per_worker", "max_failures")


def run(main, args):
    """Call `main(args)` and leave the process with the exit code of what happened; one line on stderr for an error."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    results = keep_stdout_for_the_result()
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
    results.flush()
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


def check_text(flag, text):
    """Raise BadInput where a flag's value is not text: a terminal of another encoding sends bytes that are none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{flag} {text.encode(errors='replace').decode()!r} is not UTF-8: set the terminal's") from None


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
