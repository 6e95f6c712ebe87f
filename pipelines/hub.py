"""Models of the Hugging Face Hub: which files to fetch, and which of them the local Hub cache already has.

repo: the cache folder of a repository, models--ORGANISATION--NAME; snapshot: a commit's folder in it.
"""

import contextlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import BadInput, CheckFailed, ToolError
from common.messages import say
from pipelines.configs import components
from pipelines.model_folder import CONFIGURATION, check_pipeline, check_safetensors, variant_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi

COMMIT = re.compile(r"[0-9a-f]{40}")
PICKLES = {".bin", ".ckpt", ".pt", ".pth", ".pkl"}
OTHER_WEIGHTS = {".msgpack", ".onnx", ".h5", ".gguf"}


def select_files(names: Iterable[str], index: dict[str, Any], variant: str | None = None) -> list[str]:
    """Return the files of a repository that make up its pipeline, sorted: configuration and one variant of weights.

    names: all files of the repository; index: its model_index.json.
    variant: the weights to select; components that lack it get their plain weights.
    Raises BadInput for a component without suitable safetensors.
    """
    names = list(names)
    chosen, found = ["model_index.json"], set()
    for part in components(index):
        files = sorted(name for name in names if name.count("/") == 1 and name.startswith(f"{part}/"))
        if not files:
            raise BadInput(f"--model_name: the repository has no files of its {part}: use another model or --revision")
        weights = {name: variant_of(name) for name in files if ".safetensors" in name}
        variants = set(weights.values())
        found |= variants
        wanted = variant if variant in variants else None
        if weights and wanted not in variants:
            others = sorted(filter(None, variants))
            raise BadInput(f"--variant: the weights of {part} are only {', '.join(others)}: use --variant {others[0]}")
        for name in files:
            kind = Path(name).suffix
            if not weights and kind in PICKLES | OTHER_WEIGHTS:
                why = "a pickle, which can run code when loaded" if kind in PICKLES else "not in safetensors format"
                raise BadInput(f"--model_name: {name} is {why}: use a model or a --revision with safetensors")
            if weights[name] == wanted if name in weights else kind in CONFIGURATION and ".index." not in name:
                chosen.append(name)
    if variant and variant not in found:
        others = ", ".join(sorted(found - {None})) or "none"
        raise BadInput(f"--variant {variant}: no component has it (available: {others}): omit the flag")
    return sorted(chosen)


def known_commit(repo: Path, revision: str) -> str | None:
    """Return the commit of a revision when it was last fetched, or None if it never was; a commit is itself."""
    if COMMIT.fullmatch(revision):
        return revision
    try:
        commit = (repo / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        return None
    return commit if COMMIT.fullmatch(commit) else None


def read_listing(repo: Path, commit: str) -> dict[str, int | None] | None:
    """Return {name: size} of all files of a commit, or None; the Hub's client saves it before it fetches files."""
    try:
        files = json.loads((repo / "trees" / f"{commit}.json").read_text())["files"]
        return {name: fact["size"] for name, fact in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def check_snapshot(snapshot: Path, listing: dict[str, int | None] | None, variant: str | None) -> None:
    """Raise BadInput or CheckFailed unless a snapshot is complete and, if there is a listing, its sizes match."""
    index = check_pipeline(snapshot)
    listing = listing or {}
    for name in select_files(listing, index, variant) if listing else ():
        path = snapshot / name
        if not path.is_file() or listing[name] not in (None, path.stat().st_size):
            raise CheckFailed(f"{path} is missing or its size is not {listing[name]} bytes: fetch the model again")


def is_whole(repo: Path, commit: str | None, variant: str | None) -> bool:
    """Return whether the cache lists the files of a commit and contains them all; uses no network."""
    listing = read_listing(repo, commit) if commit else None
    with contextlib.suppress(ToolError):
        if commit and listing:
            check_snapshot(repo / "snapshots" / commit, listing, variant)
            return True
    return False


def drop_damaged(snapshot: Path, listing: dict[str, int | None]) -> None:
    """Delete damaged files from the cache, so that the Hub's client fetches them again."""
    for name, size in listing.items():
        path = snapshot / name
        try:
            if path.is_file() and size not in (None, path.stat().st_size):
                raise CheckFailed(f"{path} does not have {size} bytes")
            if path.is_file() and path.suffix == ".safetensors":
                check_safetensors(path)
        except CheckFailed:
            say(f"{path} is damaged: fetching it again")
            path.resolve().unlink()


def open_hub() -> "HfApi":
    """Return a client of the Hub without log messages, and with progress bars only on a terminal."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()
    return HfApi()
