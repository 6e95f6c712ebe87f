"""Put one revision of a Diffusers model on this disk, safetensors and configuration only, and check that it is whole.

Reads a model folder, or a repository of the Hugging Face hub. Writes the hub's own cache layout under --model_dir
(nothing for a folder); the last line of stdout is the model's folder. A model of a pinned commit, or with
--keep_revision of any revision, that is there already needs no network.

    python cache_model.py --model_name models/emoji-64 --model_dir data/model-orig
    python cache_model.py --model_name CompVis/stable-diffusion-v1-4 --model_dir data/model-orig \\
        --revision b95be7d6f134c3a9e62ee616f310733567f069ce
"""

import contextlib
import glob
import json
import os
import re
import signal
import sys
from pathlib import Path

from common.cli import add_shared_flags, make_parser, run
from common.errors import BadInput, CheckFailed, OutOfResource, Stopped, ToolError, TryAgain
from common.folders import check_space, check_writable, lock, write_bytes
from common.messages import print_last, say
from pipelines.configs import components, read_index
from pipelines.model_folder import CONFIGURATION, check_pipeline, check_safetensors, variant_of

COMMIT = re.compile(r"[0-9a-f]{40}")
PICKLES = {".bin", ".ckpt", ".pt", ".pth", ".pkl"}
OTHER_WEIGHTS = {".msgpack", ".onnx", ".h5", ".gguf"}
TIMEOUT = 10  # seconds until the hub counts as out of reach


def parse_args(argv=None):
    """Parse the command line."""
    parser = make_parser(__doc__)
    group = parser.add_argument_group("model")
    group.add_argument("--model_name", required=True, help="a model folder, or ORGANISATION/NAME on the hub")
    group.add_argument("--revision", default="main", help="commit, branch or tag; a commit pins the model")
    keep = "use the commit that --revision was when it was first fetched to --model_dir, without asking the hub again"
    group.add_argument("--keep_revision", action="store_true", help=keep)
    group.add_argument("--variant", help="take these weights where a component has them, say fp16")
    group.add_argument("--model_dir", required=True, help="cache folder, in the hub's own layout")
    add_shared_flags(parser)
    return parser.parse_args(argv)


def select_files(names, index, variant=None):
    """Return the files of a repository that make the pipeline, sorted: configuration, and each weight once.

    names: all its files; index: its model_index.json. Raises BadInput for a component without fitting safetensors.
    """
    chosen, found = ["model_index.json"], set()
    for part in components(index):
        files = sorted(name for name in names if name.count("/") == 1 and name.startswith(f"{part}/"))
        if not files:
            raise BadInput(f"--model_name: the repository has no files of its {part}: take another model or --revision")
        weights = {name: variant_of(name) for name in files if ".safetensors" in name}
        variants = set(weights.values())
        found |= variants
        wanted = variant if variant in variants else None
        if weights and wanted not in variants:
            others = ", ".join(sorted(variants))
            raise BadInput(f"--variant: the weights of {part} are {others} alone: take --variant {min(variants)}")
        for name in files:
            kind = Path(name).suffix
            if not weights and kind in PICKLES | OTHER_WEIGHTS:
                why = "a pickle, which can run code" if kind in PICKLES else "no safetensors"
                raise BadInput(f"--model_name: {name} is {why}: take a model or a --revision with safetensors")
            if weights[name] == wanted if name in weights else kind in CONFIGURATION and ".index." not in name:
                chosen.append(name)
    if variant and variant not in found:
        others = ", ".join(sorted(found - {None})) or "none"
        raise BadInput(f"--variant {variant}: no component has it (there is: {others}): leave it out")
    return sorted(chosen)


def known_commit(repo, revision):
    """Return the commit that a revision is, or was when it was last fetched to the cache folder `repo`; or None."""
    if COMMIT.fullmatch(revision):
        return revision
    try:
        commit = (repo / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        return None
    return commit if COMMIT.fullmatch(commit) else None


def read_listing(repo, commit):
    """Return {name: size} of all files of a commit, which the hub's client notes before it fetches any; or None."""
    try:
        files = json.loads((repo / "trees" / f"{commit}.json").read_text())["files"]
        return {name: fact["size"] for name, fact in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def check_snapshot(snapshot, listing, variant):
    """Raise BadInput or CheckFailed unless a cached model is whole, by `listing` too where there is one."""
    index = check_pipeline(snapshot)
    for name in select_files(listing, index, variant) if listing else ():
        path = snapshot / name
        if not path.is_file() or listing[name] not in (None, path.stat().st_size):
            raise CheckFailed(f"{path} is missing or not of {listing[name]} bytes: fetch the model again")


def is_whole(repo, commit, variant):
    """Tell, without network, whether all files of a commit are known and in the cache."""
    listing = read_listing(repo, commit)
    with contextlib.suppress(ToolError):
        if listing:
            check_snapshot(repo / "snapshots" / commit, listing, variant)
            return True
    return False


def drop_damaged(snapshot, listing):
    """Remove the cached files that are damaged, so that the hub's client fetches them again."""
    for name, size in listing.items():
        path = snapshot / name
        try:
            if path.is_file() and size not in (None, path.stat().st_size):
                raise CheckFailed(f"{path} is not of {size} bytes")
            if path.is_file() and path.suffix == ".safetensors":
                check_safetensors(path)
        except CheckFailed:
            say(f"{path} is damaged: fetching it again")
            path.resolve().unlink()


def open_hub():
    """Return the hub's client, quiet but for progress bars on a terminal."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()
    return HfApi()


@contextlib.contextmanager
def plain_errors(args, endpoint):
    """Turn what the hub's client raises into one line that names the flag and the remedy."""
    import httpx2
    from huggingface_hub import errors

    model, token = f"--model_name {args.model_name}", "set HF_TOKEN or run `hf auth login`"
    try:
        yield
    except errors.HFValidationError as error:
        raise BadInput(f"{model} is neither a folder here nor an ORGANISATION/NAME of the hub: check it") from error
    except errors.GatedRepoError as error:
        page = f"{endpoint}/{args.model_name}"
        raise BadInput(f"{model} is gated: accept its licence on {page}, then {token}") from error
    except errors.RepositoryNotFoundError as error:
        where = f"neither a folder here nor a model on {endpoint}"
        raise BadInput(f"{model} is {where}: check the name; for a private model {token}") from error
    except errors.RevisionNotFoundError as error:
        remedy = " any more: leave --keep_revision out, for a newer one" if args.is_kept else ""
        where = f"{args.model_name}{remedy}"
        raise BadInput(f"--revision {args.revision} is no commit, branch or tag of {where}") from error
    except (httpx2.TransportError, OSError, RuntimeError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
        status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else 0
        if status >= 500 or status in (408, 429):
            raise TryAgain(f"{model}: {endpoint} answers {status}: try again later") from error
        if status:
            raise BadInput(f"{model}: {endpoint} refuses it ({status}): check the name and HF_TOKEN") from error
        if "os error 28" in str(error):  # how hf_xet, written in Rust, says that the disk is full
            raise OutOfResource(f"disk full while writing {args.model_dir}: make room, then run again") from error
        if isinstance(error, OSError) and error.errno:
            raise
        raise TryAgain(
            f"{model} is not a folder here, and no network to {endpoint} ({cause}): try again later"
        ) from error


@contextlib.contextmanager
def stopping_at_once(blobs):
    """Let a signal end the process at once: the hub's client would first wait for every file that it is fetching."""

    def stop(signal_number, frame):
        for path in blobs.glob("*.incomplete"):
            path.unlink(missing_ok=True)
        error = Stopped(signal_number)
        say(f"cache_model.py: {error}")
        os._exit(error.exit_code)

    earlier = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def resolve(args):
    """Return (commit, {name: size}) of the revision on the hub; raise TryAgain where there is no network."""
    api = open_hub()
    with plain_errors(args, api.endpoint):
        info = api.model_info(args.model_name, revision=args.revision, files_metadata=True, timeout=TIMEOUT)
    listing = {file.rfilename: file.size for file in info.siblings}
    if "model_index.json" not in listing:
        raise BadInput(f"--model_name {args.model_name} has no model_index.json: it is no Diffusers pipeline")
    return info.sha, listing


def download(args, snapshot, listing):
    """Fetch the files of a commit that the cache lacks, then check the whole."""
    api = open_hub()
    place = {"repo_id": args.model_name, "revision": snapshot.name, "cache_dir": args.model_dir}
    drop_damaged(snapshot, listing)
    with plain_errors(args, api.endpoint):
        api.hf_hub_download(filename="model_index.json", **place)
    names = select_files(listing, read_index(snapshot), args.variant)
    need = sum(listing[name] or 0 for name in names if not (snapshot / name).is_file())
    check_space([("--model_dir", args.model_dir, need)])
    with plain_errors(args, api.endpoint), stopping_at_once(snapshot.parent.parent / "blobs"):
        api.snapshot_download(allow_patterns=[glob.escape(name) for name in names], **place)
    check_snapshot(snapshot, listing, args.variant)


def find_without_network(args, repo, commit, no_network):
    """Return the folder of a cached commit; raise TryAgain, saying what the cache lacks, where it is not whole."""
    if commit is None:
        raise TryAgain(f"{no_network}; --model_dir {args.model_dir} has no revision {args.revision} of it")
    snapshot = repo / "snapshots" / commit
    try:
        check_snapshot(snapshot, read_listing(repo, commit), args.variant)
    except ToolError as lack:
        raise TryAgain(f"{no_network}; the cache is not whole: {lack}") from None
    say(f"{no_network}; for now commit {commit} is taken from the cache")
    return snapshot


def find_or_fetch(args, repo):
    """Return the folder of the revision in the cache folder `repo`, fetched where it is not whole."""
    commit = known_commit(repo, args.revision)
    args.is_kept = args.keep_revision and commit not in (None, args.revision)
    if args.is_kept:
        args.revision = commit  # from here on it is a pinned one, also where a damaged file is fetched again
    whole = is_whole(repo, commit, args.variant)
    if whole and commit == args.revision:
        return repo / "snapshots" / commit
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


def main(args):
    """Print the folder of the model, checked."""
    name, folder = args.model_name, Path(args.model_name).expanduser()
    if folder.is_dir():
        check_pipeline(folder, "--model_name")
        print_last(os.path.abspath(folder))
        return
    if name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1:
        raise BadInput(f"--model_name {name} is not a folder: check the path")
    print_last(find_or_fetch(args, Path(os.path.abspath(args.model_dir), "models--" + name.replace("/", "--"))))


if __name__ == "__main__":
    run(main, parse_args())
