"""The work folder of a training: is its run done, can it go on, what of it may go."""

import shutil
from pathlib import Path

from common import folders
from common.errors import BadInput
from pipelines.model_folder import count_weights
from training.checkpoints import LATEST, list_checkpoints
from training.logs import LOG

TO_GO_ON = ("checkpoint-*", ".checkpoint-*", LATEST, ".latest.tmp", "posteriors", ".posteriors.*")
WORK_FILES = (LOG, "tensorboard", "ray", "validation")
RECORD = "run.json"  # of the run in a work folder: settings, steps, workers, whether its checkpoints are kept


def is_finished(output_dir, settings, steps, overwrite):
    """Return whether `output_dir` holds the result of these settings; raise BadInput where it holds something else."""
    output_dir = Path(output_dir)
    manifest = folders.read_manifest(output_dir) or {}
    if manifest.get("settings") == settings and manifest.get("step") == steps:
        return True
    folders.check_ours(output_dir, "--output_dir")
    if overwrite or not output_dir.exists() or not any(output_dir.iterdir()):
        return False
    if not manifest:
        raise BadInput(f"--output_dir {output_dir} is a damaged result of ours: --overwrite replaces it")
    folders.check_same_settings(settings, manifest.get("settings", {}), f"--output_dir {output_dir}")
    if manifest["step"] > steps:
        raise BadInput(f"--output_dir {output_dir} is trained for {manifest['step']} steps, more than {steps}")
    return False


def check_can_go_on(output_dir, work_dir, steps, overwrite):
    """Raise BadInput where a result is to be trained on and its checkpoints were dropped."""
    manifest = folders.read_manifest(output_dir)
    if manifest and not overwrite and not list_checkpoints(work_dir):
        raise BadInput(
            f"--output_dir {output_dir} is trained for {manifest['step']} steps and --work_dir {work_dir} has no "
            f"checkpoint of it: --overwrite trains {steps} steps anew, and --keep_checkpoints keeps one to go on from"
        )


def _is_to_drop(args):
    """Return whether the work folder holds what only a longer run needs, of the run that published --output_dir.

    Not of one of other settings or another length, and not of one that was started to keep it.
    """
    record = folders.read_json(Path(args.work_dir) / RECORD)
    if record.get("keep_checkpoints", True):  # an older version's record says nothing
        return False
    manifest = folders.read_manifest(args.output_dir) or {}
    is_its = (manifest.get("settings"), manifest.get("step")) == (record["settings"], record["steps"])
    return is_its and bool(_to_go_on(args.work_dir))


def drop_checkpoints(work_dir):
    """Remove what only a longer run needs: checkpoints and the latent cache."""
    _remove(_to_go_on(work_dir))


def _to_go_on(work_dir):
    """Return our own files among those that have such names: the folders that we sealed or were about to."""

    def is_ours(path):
        return path.name[0] == "." or path.is_symlink() or (path / folders.MANIFEST).is_file()

    return [path for name in TO_GO_ON for path in Path(work_dir).glob(name) if is_ours(path)]


def _remove(paths):
    for path in paths:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def open_work_dir(work_dir, record, overwrite):
    """Make `work_dir` the one of this run: kept where it can go on from there, emptied where nothing is lost.

    record: what RECORD says. Raises BadInput, unless `overwrite`, where there are checkpoints of other settings, or one
    past the run's steps.
    """
    work_dir, settings, steps = Path(work_dir), record["settings"], record["steps"]
    checkpoints = list_checkpoints(work_dir)
    earlier = folders.read_json(work_dir / RECORD).get("settings")
    if earlier is None and checkpoints:
        earlier = folders.read_manifest(checkpoints[-1][1])["settings"]
    reached = max((step for step, _ in checkpoints), default=0)
    if earlier not in (None, settings) or reached > steps:
        if checkpoints and not overwrite:
            folders.check_same_settings(settings, earlier, f"--work_dir {work_dir}")
            raise BadInput(
                f"--work_dir {work_dir} has a checkpoint of step {reached}, more than {steps}: train for {reached} or "
                "more, or pass --overwrite, which drops it"
            )
        _remove([*_to_go_on(work_dir), *(path for name in WORK_FILES for path in work_dir.glob(name))])
    folders.write_json(work_dir / RECORD, record)


def recorded_workers(work_dir):
    """Return the number of workers of the run in `work_dir`, None where there is none: it goes on with as many."""
    return folders.read_json(Path(work_dir) / RECORD).get("num_workers")


def check_disk(args, trained_weights, copies, cache=0):
    """Raise OutOfResource unless the checkpoints, the cache [bytes] and the result fit on their disks.

    copies: numbers that a checkpoint holds of each trained weight: itself, Adam's two and perhaps its average.
    """
    left = max(0, args.checkpoints_total_limit + 1 - len(list_checkpoints(args.work_dir)))
    checkpoints = left * 4 * copies * trained_weights
    result = 4 * count_weights(args.model_dir)
    needs = [("--work_dir", args.work_dir, checkpoints + cache), ("--output_dir", args.output_dir, result)]
    folders.check_space(needs)
