"""What the workers of a run tell its driver, and the request to stop that the driver sends them.

Without Ray, and in tests, both sides share one Board in this process. On Ray it is an actor on the driver's node: a
cluster's nodes need not share a disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BEAT_EVERY = 0.5  # seconds between two signs of life of a worker


class Board:
    """Messages for the user, the newest line of the log, signs of life, deaths, and whether the run shall stop."""

    def __init__(self) -> None:
        self._messages: list[str] = []
        self._line: dict[str, Any] | None = None
        self._beat: float | None = None
        self._is_to_stop = False
        self._deaths: dict[str, int] = {}

    def tell(self, message: str) -> None:
        """Add a message for the user."""
        self._messages.append(message)

    def log(self, line: dict[str, Any]) -> None:
        """Set the newest line of the log."""
        self._line = line

    def beat(self) -> bool:
        """Note that a worker is alive; return whether it shall stop."""
        self._beat = time.monotonic()
        return self._is_to_stop

    def news(self, num_seen: int = 0) -> tuple[list[str], dict[str, Any] | None, float | None]:
        """Return (messages after the first `num_seen`, newest line of the log, seconds since the last sign of life)."""
        silence = None if self._beat is None else time.monotonic() - self._beat
        return self._messages[num_seen:], self._line, silence

    def begin_again(self, name: str) -> int:
        """Note that a worker begins again after it died; return how often it has since it had a result."""
        self._deaths[name] = self._deaths.get(name, 0) + 1
        return self._deaths[name]

    def has_result(self, name: str) -> None:
        """Note that a worker that has begun again has a result."""
        self._deaths.pop(name, None)

    def ask_to_stop(self) -> None:
        """Ask the workers to save and stop."""
        self._is_to_stop = True

    def stop_asked(self) -> bool:
        """Return whether the workers shall save and stop."""
        return self._is_to_stop


class RemoteBoard:
    """The Board of an actor, as a process on Ray uses it; no call waits, except `news` and `begin_again`.

    beats: whether this is a worker, which gives signs of life from a thread of its own and learns there of a request to
    stop.
    """

    def __init__(self, actor: Any, beats: bool = False) -> None:
        self.actor, self._is_to_stop = actor, False
        if beats:
            threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        import ray

        try:
            while True:
                self._is_to_stop = ray.get(self.actor.beat.remote())
                time.sleep(BEAT_EVERY)
        except Exception:  # the run has ended, or its driver died: Ray ends this process too
            return

    def tell(self, message: str) -> None:
        self.actor.tell.remote(message)

    def log(self, line: dict[str, Any]) -> None:
        self.actor.log.remote(line)

    def news(self, num_seen: int = 0) -> tuple[list[str], dict[str, Any] | None, float | None]:
        import ray

        return ray.get(self.actor.news.remote(num_seen))

    def begin_again(self, name: str) -> int:
        import ray

        return ray.get(self.actor.begin_again.remote(name))

    def has_result(self, name: str) -> None:
        self.actor.has_result.remote(name)

    def ask_to_stop(self) -> None:
        self.actor.ask_to_stop.remote()

    def stop_asked(self) -> bool:
        return self._is_to_stop


_current: Board | RemoteBoard = Board()


def current() -> Board | RemoteBoard:
    """Return the board of the run that this process works for."""
    return _current


def use(board: Board | RemoteBoard) -> None:
    """Make `board` the board of this process."""
    global _current
    _current = board


@contextmanager
def board_on_ray() -> Iterator[RemoteBoard]:
    """Start a Board as an actor on the driver's node, which dies with the driver, and end it afterwards."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0)(Board).options(scheduling_strategy=here).remote()
    try:
        yield RemoteBoard(actor)
    finally:
        ray.kill(actor)


def local_board() -> RemoteBoard:
    """Return the board of the actors of a local Ray: the first one to ask for it starts it, it ends with that Ray."""
    import ray

    options = {"name": "board", "get_if_exists": True, "lifetime": "detached", "num_cpus": 0}
    return RemoteBoard(ray.remote(Board).options(**options).remote())
