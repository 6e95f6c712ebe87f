"""The log of a training: log.jsonl and TensorBoard."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from common import folders

LOG = "log.jsonl"  # in the work folder
MAX_LINE = 8192  # bytes; no line of the log is longer


class StepLog:
    """log.jsonl and TensorBoard in `work_dir`; a run that continues drops the lines after its step."""

    def __init__(self, work_dir: str | Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = Path(work_dir) / LOG
        kept = [line for line in folders.read_json_lines(self.path) if line["step"] <= step]
        folders.write_bytes(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self.tensorboard = SummaryWriter(Path(work_dir) / "tensorboard", purge_step=step + 1)

    def write(self, step: int, **values: float) -> None:
        """Log the values of one step; the file has null for a value that is not finite."""
        line = {name: value if abs(value) < float("inf") else None for name, value in values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **line}) + "\n")
        for name, value in values.items():
            self.tensorboard.add_scalar(name, value, step)

    def show(self, step: int, images: dict[str, np.ndarray]) -> None:
        """Send {name: image [H, W, 3]} to TensorBoard."""
        for name, image in images.items():
            self.tensorboard.add_image(name, image, step, dataformats="HWC")

    def close(self) -> None:
        """Close TensorBoard's file."""
        self.tensorboard.close()


def read_last_line(path: Path) -> dict[str, Any] | None:
    """Return the last whole line of a log, None if there is none; only the end of the file is read."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LINE))
        for text in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError):
                return json.loads(text)
    return None
