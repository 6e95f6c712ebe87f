"""The log of a training: log.jsonl and TensorBoard."""

import json
from pathlib import Path

import numpy as np

from common import board, folders
from training.work_folder import LOG, TENSORBOARD


class StepLog:
    """log.jsonl and TensorBoard in `work_dir`; a run that continues drops the lines after its step."""

    def __init__(self, work_dir: str | Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = Path(work_dir) / LOG
        kept = [line for line in folders.read_json_lines(self.path) if line["step"] <= step]
        folders.write_bytes(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self.tensorboard = SummaryWriter(Path(work_dir) / TENSORBOARD, purge_step=step + 1)

    def write(self, step: int, **values: float) -> None:
        """Log the values of one step; the file has null for a value that is not finite."""
        finite = {name: value if abs(value) < float("inf") else None for name, value in values.items()}
        line = {"step": step, **finite}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        board.current().log(line)
        for name, value in values.items():
            self.tensorboard.add_scalar(name, value, step)

    def show(self, step: int, images: dict[str, np.ndarray]) -> None:
        """Send {name: image [H, W, 3]} to TensorBoard."""
        for name, image in images.items():
            self.tensorboard.add_image(name, image, step, dataformats="HWC")

    def close(self) -> None:
        """Close TensorBoard's file."""
        self.tensorboard.close()
