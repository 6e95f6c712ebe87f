"""Waiting for a store or a server that does not answer: a run that works waits, one that checks its input does not."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from common import board
from common.errors import Away
from common.messages import say

OUTAGE = 600.0  # seconds without an answer after which a run that works gives up
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before a call is repeated; the pause doubles each time
SAY_EVERY = 120.0  # seconds between two messages of a process

P = ParamSpec("P")
T = TypeVar("T")
_guard = threading.Lock()
_working = 0  # blocks of `working` that this process is in
_said = float("-inf")  # time of the last message


@contextmanager
def working() -> Iterator[None]:
    """Let all threads of this process wait for stores and servers within the block, for at most OUTAGE seconds."""
    _add(1)
    try:
        yield
    finally:
        _add(-1)


def _add(number: int) -> None:
    global _working
    with _guard:
        _working += number


def patient(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that is called again, with growing pauses, while it raises Away within a block of `working`.

    Calling it twice must be as good as once. Raises Away after OUTAGE seconds, or if the run shall stop.
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        began, pause = time.monotonic(), FIRST_PAUSE
        while True:
            try:
                return function(*arguments, **options)
            except Away as error:
                left = began + OUTAGE - time.monotonic()
                if not _working or left <= 0 or board.current().stop_asked():
                    raise
                _tell(error)
                time.sleep(min(pause, left))
                pause = min(2 * pause, LONGEST_PAUSE)

    return call


def _tell(error: Away) -> None:
    """Say what is waited for, once for all threads that wait."""
    global _said
    with _guard:
        is_told = time.monotonic() - _said < SAY_EVERY
        _said = _said if is_told else time.monotonic()
    if not is_told:
        say(f"waiting for up to {OUTAGE / 60:g} minutes: {str(error).partition(': try again')[0]}")
