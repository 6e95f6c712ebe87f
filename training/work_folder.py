"""The work folder of a run: on a disk as it is, of a URI a scratch folder on this node that is copied to the store.

Rank 0 alone writes the log, TensorBoard's files and the validation images. Checkpoints go to the store by themselves.
"""

import hashlib
import shutil
from pathlib import Path

from common import cache
from common.storage import is_remote
from common.targets import Held
from pipelines.model_folder import VALIDATION_STRIP

LOG = "log.jsonl"
TENSORBOARD = "tensorboard"
VALIDATION, STRIP = VALIDATION_STRIP.split("/")  # the images of some steps, and one image of all of them
RAY = "ray"  # what Ray Train writes for itself
COPIED = (LOG, TENSORBOARD, VALIDATION)  # what a store gets of the scratch folder


def scratch(work_dir: str | Path) -> Path:
    """Return the folder on this node for the log and images of a run: `work_dir`, or one that stands for a URI."""
    if not is_remote(work_dir):
        return Path(work_dir)
    return cache.root() / "work" / hashlib.sha256(str(work_dir).encode()).hexdigest()[:16]


def fetch(work_dir: str | Path) -> None:
    """Make the scratch folder of a URI anew, with what the store has of it; nothing for a folder on a disk."""
    if not is_remote(work_dir):
        return
    from common.stores import Store

    folder, store = scratch(work_dir), Store(str(work_dir))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in store.list():
        if name.split("/")[0] in COPIED and (data := store.read(name)) is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)


class Copier:
    """Copies what has changed in the scratch folder of a URI to the store, under the run's lock."""

    def __init__(self, held: Held) -> None:
        self.held, self.copied = held, {}
        self.writer = held.lease().writer(held.location) if is_remote(held.location) else None

    def copy(self) -> None:
        """Copy the files that have changed since the last call; nothing for a folder on a disk."""
        if self.writer is None:
            return
        folder = scratch(self.held.location)
        for path in sorted(path for name in COPIED for path in [folder / name, *(folder / name).rglob("*")]):
            if not path.is_file() or path.name.endswith(".tmp"):
                continue
            facts = path.stat()
            if self.copied.get(path) != (facts.st_size, facts.st_mtime_ns):
                self.writer.write(path.relative_to(folder).as_posix(), path.read_bytes())
                self.copied[path] = facts.st_size, facts.st_mtime_ns
