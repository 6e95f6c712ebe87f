"""What a script prints: messages and progress on stderr, its result as the last line of stdout."""

import json
import sys
import time

_listeners = []


def say(message):
    """Print one line for a person, on stderr, and pass it to who listens."""
    print(message, file=sys.stderr, flush=True)
    for listener in _listeners:
        listener(message)


def listen(listener):
    """Call `listener(message)` for all that this process says from now on: nobody sees the stderr of a worker."""
    _listeners.append(listener)


_results = None  # stdout, once it is for the last line alone


def keep_stdout_for_the_result():
    """Send to stderr what is printed from now on, but for `print_last`: Ray prints there when its processes fail."""
    global _results
    _results, sys.stdout = sys.stdout, sys.stderr
    return _results


def print_last(line):
    """Print the last line of stdout, which is for machines."""
    print(line, file=_results or sys.stdout, flush=True)


def print_result(**result):
    """Print one JSON object as the last line of stdout."""
    print_last(json.dumps(result))


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
