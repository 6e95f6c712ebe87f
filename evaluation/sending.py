"""Sends files from the driver's node to the nodes of a cluster, each of which keeps one copy in its cache."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common import cache
from common.folders import write_bytes


@dataclass(frozen=True)
class Sent:
    """Files in Ray's object store. size: bytes; files: reference to {name: content} while the driver lives."""

    digest: str
    size: int
    files: Any

    def receive(self) -> Path:
        """Return a folder with the files on this node's disk."""
        import ray

        def fill(folder: Path) -> None:
            for name, data in ray.get(self.files).items():
                write_bytes(folder / name, data.data)

        return cache.get(f"sent-{self.digest}", self.size, fill, "files of the driver")


def send(paths: Iterable[Path], digest: str) -> Sent:
    """Put files of different names into Ray's object store; digest: of their names and contents."""
    import ray

    files = {path.name: np.fromfile(path, dtype=np.uint8) for path in paths}
    return Sent(digest, sum(data.nbytes for data in files.values()), ray.put(files))
