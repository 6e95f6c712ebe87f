"""The log of a training: log.jsonl and TensorBoard."""

import contextlib
import json
import os
from pathlib import Path

from common import folders

LOG = "log.jsonl"
MAX_LINE = 8192  # bytes of a line of it


class StepLog:
    """log.jsonl and TensorBoard of a run in `work_dir`; a run that continues drops what was logged past its step."""

    def __init__(self, work_dir, step):
        from torch.utils.tensorboard import SummaryWriter

        self.path = Path(work_dir) / LOG
        kept = [line for line in folders.read_json_lines(self.path) if line["step"] <= step]
        folders.write_bytes(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self.tensorboard = SummaryWriter(Path(work_dir) / "tensorboard", purge_step=step + 1)

    def write(self, step, **values):
        """Log one step; a value that is not finite is null in the file."""
        line = {name: value if abs(value) < float("inf") else None for name, value in values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **line}) + "\n")
        for name, value in values.items():
            self.tensorboard.add_scalar(name, value, step)

    def show(self, step, pictures):
        """Send {name: picture [H, W, 3]} to TensorBoard."""
        for name, picture in pictures.items():
            self.tensorboard.add_image(name, picture, step, dataformats="HWC")

    def close(self):
        self.tensorboard.close()


def read_last_line(path):
    """Return the last whole line of a log.jsonl as a dict, None where there is none; the log may be long."""
    with contextlib.suppress(FileNotFoundError), Path(path).open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LINE))
        for text in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError):
                return json.loads(text)
    return None
