"""The work folder of a training: is its run done, can it continue, which of its files may be deleted."""

import argparse
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import folders, targets
from common.errors import BadInput
from common.storage import is_remote
from common.targets import Held
from pipelines.model_folder import count_weights
from training.checkpoints import LATEST, list_checkpoints
from training.work_folder import COPIED, RAY

TO_CONTINUE = ("checkpoint-*", ".checkpoint-*", LATEST, ".latest.tmp", "posteriors", ".posteriors.*")
RECORD = "run.json"  # of the run in a work folder: settings, steps, num_workers, keep_checkpoints


# ---------------------------------------------------------------------------------------------------------------------
# Before a run


def is_finished(output_dir: str | Path, settings: dict, steps: int, overwrite: bool) -> bool:
    """Return whether `output_dir` holds the result of these settings; raise BadInput if it holds something else."""
    manifest = targets.read_manifest(output_dir) or {}
    if manifest.get("settings") == settings and manifest.get("step") == steps:
        return True
    targets.check_ours(output_dir, "--output_dir")
    if overwrite or targets.is_empty(output_dir):
        return False
    if not manifest:
        raise BadInput(f"--output_dir {output_dir} is a damaged output of this toolkit: pass --overwrite to replace it")
    folders.check_same_settings(settings, manifest.get("settings", {}), f"--output_dir {output_dir}")
    if manifest["step"] > steps:
        raise BadInput(f"--output_dir {output_dir} is trained for {manifest['step']} steps, more than {steps}")
    return False


def check_can_continue(output_dir: str, work_dir: str, steps: int, overwrite: bool) -> None:
    """Raise BadInput if a published result is to be trained further and its checkpoints are deleted."""
    manifest = targets.read_manifest(output_dir)
    if manifest and not overwrite and not list_checkpoints(work_dir):
        raise BadInput(
            f"--output_dir {output_dir} is trained for {manifest['step']} steps and --work_dir {work_dir} has no "
            f"checkpoint of it: --overwrite trains {steps} steps from the start; --keep_checkpoints keeps checkpoints"
        )


def open_work_dir(held: Held, record: dict[str, Any], overwrite: bool) -> None:
    """Make the work folder that is locked the one of this run: kept if the run can continue from it, else emptied.

    record: the content of RECORD. Raises BadInput, unless `overwrite`, if there are checkpoints of other settings, or
    one after the last step of this run.
    """
    work_dir, settings, steps = held.location, record["settings"], record["steps"]
    checkpoints = list_checkpoints(work_dir)
    earlier = targets.read_json(work_dir, RECORD).get("settings")
    if earlier is None and checkpoints:
        earlier = (targets.read_manifest(checkpoints[-1][1]) or {}).get("settings")
    reached = max((step for step, _ in checkpoints), default=0)
    if earlier not in (None, settings) or reached > steps:
        if checkpoints and not overwrite:
            folders.check_same_settings(settings, earlier or {}, f"--work_dir {work_dir}")
            raise BadInput(
                f"--work_dir {work_dir} has a checkpoint of step {reached}, more than {steps}: train for {reached} or "
                "more steps, or delete it with --overwrite"
            )
        _remove(held, [*_names_to_continue(work_dir), *({*COPIED, RAY} & targets.names(work_dir))])
    targets.write_json(work_dir, RECORD, record, held)


def recorded_settings(output_dir: str | Path, work_dir: str | Path) -> dict[str, Any]:
    """Return the settings of the run in `work_dir`, or else those of the result in `output_dir`, or {}."""
    recorded = targets.read_json(work_dir, RECORD) or targets.read_manifest(output_dir) or {}
    return recorded.get("settings", {})


def recorded_workers(work_dir: str | Path) -> int | tuple[int, int] | None:
    """Return the number of workers of the run in `work_dir`, None if there is none; it continues with as many."""
    recorded = targets.read_json(work_dir, RECORD).get("num_workers")
    return tuple(recorded) if isinstance(recorded, list) else recorded


@dataclass(frozen=True)
class Needs:
    """What a training writes, in bytes. checkpoint: a single one."""

    checkpoint: int
    cache: int
    result: int


def find_needs(args: argparse.Namespace, trained_weights: int, copies: int, cache: int = 0) -> Needs:
    """Return what a training writes; copies: numbers in a checkpoint per trained weight.

    These are the weight, Adam's two averages and perhaps the moving average. The result of a LoRA has its weights
    alone, unless it is merged.
    """
    is_small = getattr(args, "lora", None) and not args.merge
    published = trained_weights if is_small else count_weights(args.model_dir)
    return Needs(4 * copies * trained_weights, cache, 4 * published)


def check_disk(args: argparse.Namespace, needs: Needs) -> None:
    """Raise OutOfResource unless the checkpoints, the cache and the result fit on their disks."""
    left = max(0, args.checkpoints_total_limit + 1 - len(list_checkpoints(args.work_dir)))
    sizes: list[tuple[str, str | Path, float]] = [
        ("--work_dir", args.work_dir, left * needs.checkpoint + needs.cache),
        ("--output_dir", args.output_dir, needs.result),
    ]
    folders.check_space([each for each in sizes if not is_remote(each[1])])


# ---------------------------------------------------------------------------------------------------------------------
# After a run


def is_to_drop(output_dir: str, work_dir: str) -> bool:
    """Return whether the work folder still holds files that only a longer run needs, of the published run.

    The answer is no for a run of other settings or another length, and for one that was started with
    --keep_checkpoints.
    """
    record = targets.read_json(work_dir, RECORD)
    if record.get("keep_checkpoints", True):  # the record of an older version does not say
        return False
    manifest = targets.read_manifest(output_dir) or {}
    is_its = (manifest.get("settings"), manifest.get("step")) == (record["settings"], record["steps"])
    return is_its and bool(_names_to_continue(work_dir))


def drop_checkpoints(held: Held) -> None:
    """Delete the files that only a longer run needs: checkpoints and the latent cache."""
    _remove(held, _names_to_continue(held.location))


def _names_to_continue(work_dir: str | Path) -> list[str]:
    """Return the names of such files and folders that are ours: sealed, or about to be."""
    found = [name for name in targets.names(work_dir) if any(fnmatch.fnmatch(name, each) for each in TO_CONTINUE)]
    if is_remote(work_dir):
        return found

    def is_ours(path: Path) -> bool:
        return path.name[0] == "." or path.is_symlink() or (path / folders.MANIFEST).is_file()

    return [name for name in found if is_ours(Path(work_dir, name))]


def _remove(held: Held, names: Iterable[str]) -> None:
    for name in names:
        targets.remove(held.location, name, held)
