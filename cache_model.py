"""Download one revision of a Diffusers model, safetensors and configuration only, and check that it is complete.

Reads a repository of the Hugging Face Hub, or a model folder, which is only checked. Writes --model_dir in the layout
of the Hub's cache. The last line of stdout is the model's folder. Needs no network if the model is already in the cache
and --revision is a commit or --keep_revision is set.

    python cache_model.py --model_name models/emoji-64 --model_dir data/model-orig
    python cache_model.py --model_name CompVis/stable-diffusion-v1-4 --model_dir data/model-orig \\
        --revision b95be7d6f134c3a9e62ee616f310733567f069ce
"""

import argparse
import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from common.cli import add_shared_flags, make_parser, run, stopping_at_once
from common.errors import BadInput, OutOfResource, ToolError, TryAgain
from common.folders import check_space, check_writable, lock, write_bytes
from common.messages import print_last, say
from pipelines.configs import read_index
from pipelines.hub import check_snapshot, drop_damaged, is_whole, known_commit, open_hub, read_listing, select_files
from pipelines.model_folder import check_pipeline

TIMEOUT = 10  # seconds to wait for the Hub's answer


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    group = parser.add_argument_group("model")
    name = "model folder, or ORGANISATION/NAME of a model on the Hugging Face Hub"
    group.add_argument("--model_name", required=True, help=name)
    group.add_argument("--revision", default="main", help="commit, branch or tag of the model; a commit pins it")
    keep = "keep the commit that --revision pointed to when it was first downloaded; do not ask the Hub again"
    group.add_argument("--keep_revision", action="store_true", help=keep)
    group.add_argument("--variant", help="weight variant to use for components that have it, such as fp16")
    group.add_argument("--model_dir", required=True, help="folder to download to, in the layout of the Hub's cache")
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


def find_without_network(args: argparse.Namespace, repo: Path, commit: str | None, no_network: TryAgain) -> Path:
    """Return the folder of a cached commit; raise TryAgain that says what the cache lacks if it is incomplete."""
    if commit is None:
        raise TryAgain(f"{no_network}; --model_dir {args.model_dir} does not contain revision {args.revision} either")
    snapshot = repo / "snapshots" / commit
    try:
        check_snapshot(snapshot, read_listing(repo, commit), args.variant)
    except ToolError as lack:
        raise TryAgain(f"{no_network}; the cache is incomplete: {lack}") from None
    say(f"{no_network}; using commit {commit} from the cache")
    return snapshot


def find_or_fetch(args: argparse.Namespace, repo: Path) -> Path:
    """Return the folder of the revision in the cache folder `repo`, after fetching what is missing."""
    commit = known_commit(repo, args.revision)
    args.is_kept = args.keep_revision and commit not in (None, args.revision)
    if args.is_kept:
        args.revision = commit  # pinned from here on, also if a damaged file has to be fetched again
    whole = is_whole(repo, commit, args.variant)
    if whole and commit == args.revision:
        return repo / "snapshots" / args.revision
    if not whole:
        check_writable(args.model_dir, "--model_dir")
    try:
        commit, listing = resolve(args)
    except TryAgain as no_network:
        return find_without_network(args, repo, commit, no_network)
    if commit != args.revision:
        pins = "--keep_revision keeps it" if args.keep_revision else f"--revision {commit} pins it"
        say(f"{args.revision} is commit {commit}; {pins}")
    if not is_whole(repo, commit, args.variant):
        with lock(repo / ".lock"):
            download(args, repo / "snapshots" / commit, listing)
    if commit != known_commit(repo, args.revision):
        (repo / "refs" / args.revision).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(repo / "refs" / args.revision, commit.encode())
    return repo / "snapshots" / commit


def main(args: argparse.Namespace) -> None:
    """Check the model, after fetching it if needed, and print its folder."""
    name, folder = args.model_name, Path(args.model_name).expanduser()
    if folder.is_dir():
        check_pipeline(folder, "--model_name")
        print_last(os.path.abspath(folder))
        return
    if name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1:
        raise BadInput(f"--model_name {name} is not an existing folder: check the path")
    repo = Path(os.path.abspath(args.model_dir), "models--" + name.replace("/", "--"))
    print_last(str(find_or_fetch(args, repo)))


if __name__ == "__main__":
    run(main, parse_args())
