"""Download one revision of a Diffusers model, safetensors and configuration only, and check that it is complete.

Reads a repository of the Hugging Face Hub, or a model folder, which is only checked. Writes --model_dir in the layout
of the Hub's cache, or, if it is a URI, copies the model there once. The last line of stdout is the model's folder or
URI. Needs no Hub if the model is already in --model_dir and --revision is a commit or --keep_revision is set.

    python cache_model.py --model_name models/emoji-64 --model_dir data/model-orig
    python cache_model.py --model_name CompVis/stable-diffusion-v1-4 --model_dir data/model-orig \\
        --revision b95be7d6f134c3a9e62ee616f310733567f069ce
    python cache_model.py --model_name CompVis/stable-diffusion-v1-4 --model_dir s3://bucket/models --keep_revision
"""

import argparse
import contextlib
import glob
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from common import cache, targets
from common.cli import add_shared_flags, make_parser, run, stopping_at_once
from common.errors import BadInput, CheckFailed, OutOfResource, ToolError, TryAgain
from common.folders import check_space, digest_values, lock, write_bytes
from common.messages import print_last, say
from common.objects import local_copy
from common.storage import is_remote, join
from pipelines.configs import base_name, base_revision, components, read_index
from pipelines.hub import (
    COMMIT,
    check_snapshot,
    drop_damaged,
    is_whole,
    known_commit,
    open_hub,
    read_listing,
    select_files,
)
from pipelines.model_folder import MODEL_FILES, check_pipeline, digest_model

TIMEOUT = 10  # seconds to wait for the Hub's answer


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    group = parser.add_argument_group("model")
    name = "model folder or URI, or ORGANISATION/NAME of a model on the Hugging Face Hub"
    group.add_argument("--model_name", required=True, help=name)
    group.add_argument("--revision", default="main", help="commit, branch or tag of the model; a commit pins it")
    keep = "keep the commit that --revision pointed to when it was first downloaded; do not ask the Hub again"
    group.add_argument("--keep_revision", action="store_true", help=keep)
    group.add_argument("--variant", help="weight variant to use for components that have it, such as fp16")
    group.add_argument("--model_dir", required=True, help="folder or URI to copy to, in the layout of the Hub's cache")
    add_shared_flags(parser)
    return parser.parse_args(argv)


@contextlib.contextmanager
def plain_errors(args: argparse.Namespace, endpoint: str) -> Iterator[None]:
    """Convert the exceptions of the Hub's client to ToolErrors that name the flag and the remedy."""
    import httpx2
    from huggingface_hub import errors

    model, token = f"--model_name {args.model_name}", "set HF_TOKEN or run `hf auth login`"
    try:
        yield
    except errors.HFValidationError as error:
        raise BadInput(f"{model} is neither a local folder nor of the form ORGANISATION/NAME: check it") from error
    except errors.GatedRepoError as error:
        page = f"{endpoint}/{args.model_name}"
        raise BadInput(f"{model} is gated: accept its licence at {page}, then {token}") from error
    except errors.RepositoryNotFoundError as error:
        where = f"neither a local folder nor a model on {endpoint}"
        raise BadInput(f"{model} is {where}: check the name; for a private model {token}") from error
    except errors.RevisionNotFoundError as error:
        remedy = "omit --keep_revision to fetch a newer commit" if args.is_kept else "check it"
        raise BadInput(
            f"--revision {args.revision} is not a commit, branch or tag of {args.model_name}: {remedy}"
        ) from error
    except (httpx2.TransportError, OSError, RuntimeError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
        status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else 0
        if status >= 500 or status in (408, 429):
            raise TryAgain(f"{model}: {endpoint} answers {status}: try again later") from error
        if status:
            raise BadInput(f"{model}: {endpoint} refuses access ({status}): check the name and HF_TOKEN") from error
        if "os error 28" in str(error):  # how hf_xet, written in Rust, reports a full disk
            raise OutOfResource(f"disk full while writing {args.model_dir}: free some space, then run again") from error
        if isinstance(error, OSError) and error.errno:
            raise
        raise TryAgain(
            f"{model} is not a local folder, and {endpoint} is unreachable ({cause}): try again later"
        ) from error


def resolve(args: argparse.Namespace) -> tuple[str, dict[str, int | None]]:
    """Return (commit, {file name: size}) of the revision on the Hub; raise TryAgain if the Hub is unreachable."""
    api = open_hub()
    with plain_errors(args, api.endpoint):
        info = api.model_info(args.model_name, revision=args.revision, files_metadata=True, timeout=TIMEOUT)
    listing = {file.rfilename: file.size for file in info.siblings or ()}
    if "model_index.json" not in listing:
        remedy = "it is not a Diffusers pipeline, use another model"
        raise BadInput(f"--model_name {args.model_name} has no model_index.json: {remedy}")
    assert info.sha is not None, "the Hub returned no commit"
    return info.sha, listing


def drop_incomplete(blobs: Path) -> None:
    """Delete the files of the cache whose download is not complete."""
    for path in blobs.glob("*.incomplete"):
        path.unlink(missing_ok=True)


def download(args: argparse.Namespace, snapshot: Path, listing: dict[str, int | None]) -> None:
    """Fetch the files of a commit that the cache lacks, then check the complete snapshot."""
    api = open_hub()
    place = {"repo_id": args.model_name, "revision": snapshot.name, "cache_dir": args.model_dir}
    drop_damaged(snapshot, listing)
    with plain_errors(args, api.endpoint):
        api.hf_hub_download(filename="model_index.json", **place)
    names = select_files(listing, read_index(snapshot), args.variant)
    need = sum(listing[name] or 0 for name in names if not (snapshot / name).is_file())
    check_space([("--model_dir", args.model_dir, need)])
    blobs = snapshot.parent.parent / "blobs"
    with plain_errors(args, api.endpoint), stopping_at_once(lambda: drop_incomplete(blobs)):
        api.snapshot_download(allow_patterns=[glob.escape(name) for name in names], **place)
    check_snapshot(snapshot, listing, args.variant)


# ---------------------------------------------------------------------------------------------------------------------
# Where models are kept


class HubCache:
    """The commits of a model in --model_dir, a Hub cache on a disk."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.repo = Path(os.path.abspath(args.model_dir), repo_folder(args.model_name))

    def location(self, commit: str) -> str:
        """Return the folder of a commit."""
        return str(self.repo / "snapshots" / commit)

    def known_commit(self) -> str | None:
        """Return the commit that --revision was when it was last kept, or None."""
        return known_commit(self.repo, self.args.revision)

    def is_whole(self, commit: str | None) -> bool:
        """Return whether all files of a commit are here; reaches no Hub."""
        return is_whole(self.repo, commit, self.args.variant)

    def check(self, commit: str) -> None:
        """Raise a ToolError that says what a commit lacks, unless it can be used."""
        check_snapshot(Path(self.location(commit)), read_listing(self.repo, commit), self.args.variant)

    def fetch(self, commit: str, listing: dict[str, int | None]) -> None:
        """Fetch what is missing of a commit."""
        with lock(self.repo / ".lock"):
            download(self.args, Path(self.location(commit)), listing)

    def keep(self, commit: str) -> None:
        """Record that --revision is a commit."""
        path = self.repo / "refs" / self.args.revision
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, commit.encode())


class Mirror:
    """The commits of a model in --model_dir, a URI: a published folder for each commit and --variant.

    A commit is downloaded to a hidden folder in this node's cache, uploaded, and deleted from there.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.repo = join(args.model_dir, repo_folder(args.model_name))

    def location(self, commit: str) -> str:
        """Return the URI of a commit."""
        return join(self.repo, "snapshots/" + ".".join(filter(None, (commit, self.args.variant))))

    def known_commit(self) -> str | None:
        """Return the commit that --revision was when it was last kept, or None."""
        if COMMIT.fullmatch(self.args.revision):
            return self.args.revision
        found = (targets.Files(self.repo).read(f"refs/{self.args.revision}") or b"").decode(errors="replace").strip()
        return found if COMMIT.fullmatch(found) else None

    def is_whole(self, commit: str | None) -> bool:
        """Return whether all files of a commit are here; reaches no Hub."""
        return commit is not None and targets.read_manifest(self.location(commit)) is not None

    def check(self, commit: str) -> None:
        """Raise a ToolError unless a commit can be used."""
        if not self.is_whole(commit):
            raise CheckFailed(f"{self.location(commit)} is missing or incomplete")

    def fetch(self, commit: str, listing: dict[str, int | None]) -> None:
        """Download a commit from the Hub and publish it."""
        work = cache.root() / f".mirror-{digest_values(self.repo)[:16]}"
        hub_cache = HubCache(argparse.Namespace(**{**vars(self.args), "model_dir": work}))
        with lock(work / ".lock"):
            hub_cache.fetch(commit, listing)
            snapshot = Path(hub_cache.location(commit))
            names = select_files(listing, read_index(snapshot), self.args.variant)
            with targets.lock(self.repo) as held:
                if not self.is_whole(commit):  # else another host was faster
                    facts = {"model_name": self.args.model_name, "revision": commit}
                    publish(snapshot, names, self.location(commit), held, **facts)
            shutil.rmtree(hub_cache.repo)

    def keep(self, commit: str) -> None:
        """Record that --revision is a commit."""
        targets.Files(self.repo).write(f"refs/{self.args.revision}", commit.encode())


def repo_folder(model_name: str) -> str:
    """Return the name of a repository's folder in a Hub cache."""
    return "models--" + model_name.replace("/", "--")


def publish(folder: Path, names: Iterable[str], uri: str, held: targets.Held, **facts: Any) -> None:
    """Publish some files of a folder at a URI with a manifest that has `facts`."""
    with targets.staging(uri) as links:
        for name in names:
            (links / name).parent.mkdir(parents=True, exist_ok=True)
            (links / name).symlink_to((folder / name).resolve())
        targets.publish(links, uri, held, **facts)


def mirror_folder(folder: Path, model_dir: str) -> str:
    """Copy a model folder into the store at `model_dir`, unless it is there, and return its URI."""
    index, name = check_pipeline(folder, "--model_name"), base_name(folder)
    uri = join(model_dir, f"{re.sub(r'[^A-Za-z0-9_.-]+', '--', name)}-{digest_model(folder)[:12]}")
    if targets.read_manifest(uri) is None:
        files = [folder / "model_index.json", folder / "README.md", *folder.glob("LICENSE*")]
        files += [path for part in components(index) for path in (folder / part).glob("*")]
        kinds = MODEL_FILES | {".md", ""}
        names = [path.relative_to(folder).as_posix() for path in files if path.is_file() and path.suffix in kinds]
        with targets.lock(uri) as held:
            publish(folder, names, uri, held, model_name=name, revision=base_revision(folder))
    return uri


# ---------------------------------------------------------------------------------------------------------------------
# Finding


def find_without_network(
    args: argparse.Namespace, place: HubCache | Mirror, commit: str | None, no_network: TryAgain
) -> str:
    """Return the location of a cached commit; raise TryAgain that says what the cache lacks if it is incomplete."""
    if commit is None:
        raise TryAgain(f"{no_network}; --model_dir {args.model_dir} does not contain revision {args.revision} either")
    try:
        place.check(commit)
    except ToolError as lack:
        raise TryAgain(f"{no_network}; the cache is incomplete: {lack}") from None
    say(f"{no_network}; using commit {commit} from the cache")
    return place.location(commit)


def find_or_fetch(args: argparse.Namespace, place: HubCache | Mirror) -> str:
    """Return the location of the revision in --model_dir, after fetching what is missing."""
    commit = place.known_commit()
    args.is_kept = args.keep_revision and commit not in (None, args.revision)
    if args.is_kept:
        args.revision = commit  # pinned from here on, also if a damaged file has to be fetched again
    whole = place.is_whole(commit)
    if commit and whole and commit == args.revision:
        return place.location(commit)
    if not whole:
        targets.check_writable(args.model_dir, "--model_dir")
    try:
        commit, listing = resolve(args)
    except TryAgain as no_network:
        return find_without_network(args, place, commit, no_network)
    if commit != args.revision:
        pins = "--keep_revision keeps it" if args.keep_revision else f"--revision {commit} pins it"
        say(f"{args.revision} is commit {commit}; {pins}")
    if not place.is_whole(commit):
        place.fetch(commit, listing)
    if commit != place.known_commit():
        place.keep(commit)
    return place.location(commit)


def main(args: argparse.Namespace) -> None:
    """Check the model, after fetching it if needed, and print its location."""
    name, folder = args.model_name, Path(os.path.abspath(Path(args.model_name).expanduser()))
    if is_remote(name):
        check_pipeline(local_copy(name), "--model_name")
        print_last(name)
    elif folder.is_dir() and is_remote(args.model_dir):
        print_last(mirror_folder(folder, args.model_dir))
    elif folder.is_dir():
        check_pipeline(folder, "--model_name")
        print_last(str(folder))
    elif name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1:
        raise BadInput(f"--model_name {name} is not an existing folder: check the path")
    else:
        print_last(find_or_fetch(args, Mirror(args) if is_remote(args.model_dir) else HubCache(args)))


if __name__ == "__main__":
    run(main, parse_args())
