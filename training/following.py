"""Show what the workers of a training tell their driver, and tell them to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common.board import Board, RemoteBoard
from common.messages import Progress, say
from common.nodes import Waiting
from training.task import Task

FOLLOW_EVERY = 0.2  # seconds between two looks at the board
GROWN_EVERY = 5.0  # seconds between two looks at the nodes


def show(
    run: Callable[[], dict],
    board: Board | RemoteBoard,
    task: Task,
    signals: list[int],
    waiting: Waiting | None = None,
    has_grown: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Return run(), and show meanwhile what the workers tell the board, and what is waited for.

    signals: filled when the workers shall save and stop. has_grown: says whether they shall because nodes have joined.
    """
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(_follow, board, task.schedule.max_train_steps, done, signals, waiting, has_grown)
        try:
            result = run()
        finally:
            done.set()
        follower.result()
    return result


def _follow(
    board: Board | RemoteBoard,
    total: int,
    done: threading.Event,
    signals: list[int],
    waiting: Waiting | None,
    has_grown: Callable[[], bool] | None,
) -> None:
    progress, is_last, is_told, num_shown, looked = None, False, False, 0, time.monotonic()
    while not is_last:
        is_last = done.wait(FOLLOW_EVERY)
        is_wanted = bool(signals)
        if has_grown and not (is_last or is_told) and time.monotonic() - looked > GROWN_EVERY:
            looked = time.monotonic()
            is_wanted = is_wanted or has_grown()
        if is_wanted and not is_told:
            board.ask_to_stop()
            is_told = True
        messages, line, silence = board.news(num_shown)
        num_shown += len(messages)
        for message in messages:
            say(message)
        if waiting and not is_last:
            waiting.look(silence)
        if line is None:
            continue
        if progress is None:
            progress = Progress("train", total, "steps", initial=line["step"])
        figures = {name: f"{line[name]:.4g}" for name in ("loss", "grad_norm") if line.get(name) is not None}
        if line["step"] != progress.done or is_last:
            progress.update(line["step"] - progress.done, **figures)
    if progress:
        progress.close()
