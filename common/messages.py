"""Output of a script: messages and progress on stderr, its result as the last line of stdout."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from common.uris import shown

_listeners: list[Callable[[str], Any]] = []


def say(message: str) -> None:
    """Print one line for the user on stderr and pass it to all listeners, without secrets of URIs."""
    message = shown(message)
    print(message, file=sys.stderr, flush=True)
    for listener in _listeners:
        listener(message)


def listen(listener: Callable[[str], Any]) -> None:
    """Call `listener(message)` for every later message of this process; nobody sees a worker's stderr."""
    _listeners.append(listener)


_results: TextIO | None = None  # the real stdout, once keep_stdout_for_the_result has redirected sys.stdout


def keep_stdout_for_the_result() -> TextIO:
    """Redirect sys.stdout to stderr, except for `print_last`, and return the real stdout.

    Ray prints to stdout when its processes fail.
    """
    global _results
    _results, sys.stdout = sys.stdout, sys.stderr
    return _results


def print_last(line: str) -> None:
    """Print the last line of stdout, which other programs read, as it is."""
    print(line, file=_results or sys.stdout, flush=True)


def print_result(**result: Any) -> None:
    """Print one JSON object as the last line of stdout, without secrets of URIs."""
    print_last(shown(json.dumps(result)))


class Progress:
    """Show progress as a bar on a terminal; otherwise (cron, CI) as a line every ten seconds and one at the end."""

    def __init__(self, name: str, total: int, unit: str, initial: int = 0):
        self.name, self.total, self.unit, self.done, self.start = name, total, unit, initial, initial
        self.began = self.said = time.monotonic()
        self.figures: dict[str, Any] = {}
        self.last_said: int | None = None
        self.bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, unit=f" {unit}", desc=name, initial=initial, dynamic_ncols=True)

    def update(self, count: int, **figures: Any) -> None:
        """Add `count` finished units; `figures`, such as loss=0.1, are shown next to the progress."""
        self.done += count
        self.figures |= figures
        if self.bar is not None:
            self.bar.set_postfix(self.figures, refresh=False)
            self.bar.update(count)
        elif time.monotonic() - self.said > 10:
            self._say()

    def _say(self) -> None:
        self.said, self.last_said = time.monotonic(), self.done
        rate = (self.done - self.start) / max(self.said - self.began, 1e-9)
        extra = "".join(f", {name} {value}" for name, value in self.figures.items())
        say(f"{self.name}: {self.done}/{self.total} {self.unit}, {rate:.3g} {self.unit}/s{extra}")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Show the final state."""
        if self.bar is not None:
            self.bar.close()
        elif self.last_said != self.done:
            self._say()
