"""Upload a pipeline, or a LoRA, with its model card and manifest to the Hugging Face Hub, in one commit.

repo_id: ORGANISATION/NAME of a repository on the Hub.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.cli import stopping_at_once
from common.errors import BadInput, CheckFailed, TryAgain, causes
from common.folders import MANIFEST, read_json, read_manifest, sha256_file
from common.messages import say
from pipelines.hub import open_hub
from pipelines.model_folder import LORA_FILE, check_pipeline, check_safetensors

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

TIMEOUT = 10  # seconds to wait for the Hub's first answer
CARD = "README.md"
LOGIN = "set HF_TOKEN or run `hf auth login`"


# ---------------------------------------------------------------------------------------------------------------------
# Flags


def add_hub_flags(group: argparse._ArgumentGroup, required: bool = False) -> None:
    """Add --push_to_hub and --hub_public."""
    repository = (
        "ORGANISATION/NAME of the repository on the Hugging Face Hub to upload the result to; created if needed"
    )
    group.add_argument("--push_to_hub", required=required, metavar="REPO", help=repository)
    public = "make a repository that --push_to_hub creates public, not private; an existing one keeps its visibility"
    group.add_argument("--hub_public", action="store_true", help=public)


def check_hub_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a usage error if --hub_public is given without --push_to_hub."""
    if args.hub_public and not args.push_to_hub:
        parser.error("--hub_public has no effect without --push_to_hub")


# ---------------------------------------------------------------------------------------------------------------------
# Errors


@contextlib.contextmanager
def plain_errors(repo_id: str, endpoint: str) -> Iterator[None]:
    """Convert the exceptions of the Hub's client to ToolErrors that name the flag and the remedy."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except HFValidationError as error:
        raise BadInput(f"--push_to_hub {repo_id} is not of the form ORGANISATION/NAME: {error}") from error
    except (httpx2.HTTPError, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, ValueError) and CARD in str(error):
            raise BadInput(f"--push_to_hub {repo_id}: {endpoint} refuses the model card, {CARD}: {error}") from error
        answer = next((each for each in causes(error) if isinstance(each, HfHubHTTPError)), None)
        if answer is not None:
            raise _error_of(answer, repo_id, endpoint) from error
        if isinstance(error, OSError) and error.errno:
            raise
        raise TryAgain(f"--push_to_hub {repo_id}: {endpoint} is unreachable ({error}): try again later") from error


def _error_of(answer: Any, repo_id: str, endpoint: str) -> BadInput | TryAgain:
    """Return the ToolError of an HfHubHTTPError."""
    status = answer.response.status_code
    said = f"--push_to_hub {repo_id}: {endpoint} answers {status} ({answer.server_message or 'without a reason'})"
    if status >= 500 or status in (408, 429):
        return TryAgain(f"{said}: try again later")
    if status in (409, 412):
        return TryAgain(f"{said}: the repository is changed by somebody else at the same time: try again")
    if status == 401:
        return BadInput(f"{said}: the token is not valid; {_make_token(endpoint)}")
    if status == 403:
        return BadInput(f"{said}: the token may not write there; {_make_token(endpoint)}")
    return BadInput(f"{said}: check the name and what the token may access")


def _make_token(endpoint: str) -> str:
    return f"create one with write access at {endpoint}/settings/tokens, then {LOGIN}"


# ---------------------------------------------------------------------------------------------------------------------
# Before the work whose result is to be uploaded


def check_access(repo_id: str) -> None:
    """Check, without changing the Hub, that the user's token may write to a repository or create it.

    Raises BadInput if it may not, or if the repository holds another model; TryAgain if the Hub does not answer.
    """
    from huggingface_hub import get_token
    from huggingface_hub.utils import validate_repo_id

    if repo_id.count("/") != 1:
        raise BadInput(f"--push_to_hub {repo_id} is not of the form ORGANISATION/NAME: check it")
    api = open_hub()
    with plain_errors(repo_id, api.endpoint):
        validate_repo_id(repo_id)
        if get_token() is None:
            raise BadInput(f"--push_to_hub {repo_id} needs a token of {api.endpoint}: {LOGIN}")
        # The first request, because it is the only one that takes a time limit.
        info = _find_repository(api, repo_id)
        user = api.whoami()
        if not _may_write(user, None if info else repo_id.split("/")[0]):
            account = f"the token of {user['name']} on {api.endpoint} may not write to it"
            raise BadInput(f"--push_to_hub {repo_id}: {account}; {_make_token(api.endpoint)}")
        if info:
            api.auth_check(repo_id, write=True)
            _check_ours(info, repo_id)


def _find_repository(api: "HfApi", repo_id: str) -> "ModelInfo | None":
    """Return the newest commit of a repository and its files, or None if there is none that the token can see."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return api.model_info(repo_id, files_metadata=True, timeout=TIMEOUT)
    except RepositoryNotFoundError:
        return None


def _may_write(user: dict[str, Any], namespace: str | None) -> bool:
    """Return whether an answer of whoami allows writing, and creating repositories in `namespace` unless it is None.

    The Hub does not always list what a fine-grained token may do; then the answer is True, and the upload decides.
    """
    token = user.get("auth", {}).get("accessToken", {})
    if token.get("role") == "read":
        return False
    if namespace is None:
        return True
    if token.get("role") == "fineGrained":
        scopes = token.get("fineGrained", {}).get("scoped")
        granted = [s["entity"].get("name", "") for s in scopes or () if "repo.write" in s["permissions"]]
        names = [name.split("/")[0] for name in granted]
        if scopes is None:
            return True
    else:
        writable = [org["name"] for org in user.get("orgs", ()) if org.get("roleInOrg") != "read"]
        names = [user["name"], *writable]
    return namespace.lower() in [name.lower() for name in names]


def _files_of(info: "ModelInfo") -> "dict[str, RepoSibling]":
    return {file.rfilename: file for file in info.siblings or ()}


def _check_ours(info: "ModelInfo", repo_id: str) -> None:
    """Raise BadInput if a repository holds a model that this toolkit did not upload."""
    files = _files_of(info)
    if {"model_index.json", LORA_FILE} & files.keys() and MANIFEST not in files:
        raise BadInput(f"--push_to_hub {repo_id} holds a model of another program: choose another repository")


# ---------------------------------------------------------------------------------------------------------------------
# The upload


def check_folder(folder: str | Path, flag: str) -> dict[str, Any]:
    """Return the manifest of a pipeline or a LoRA; raise BadInput or CheckFailed if it is not whole. flag: its flag."""
    if Path(folder, LORA_FILE).is_file() and not Path(folder, "model_index.json").is_file():
        check_safetensors(Path(folder, LORA_FILE))
    else:
        check_pipeline(folder, flag)
    manifest = read_manifest(folder)
    if manifest is None:
        remedy = "pass the output of train.py or pretrain.py, or create it again"
        raise BadInput(f"{flag} {folder} has no {MANIFEST} that matches its files: {remedy}")
    return manifest


def push_folder(folder: str | Path, flag: str, repo_id: str, is_public: bool) -> str:
    """Upload a result of train.py or pretrain.py unless the Hub already has it; return the repository's URL.

    All files become visible together, in one commit. A repository that is created is private unless `is_public`.
    flag: the flag of `folder`. Raises BadInput if the folder is no whole result with a manifest, or if the Hub
    refuses it; CheckFailed if a file is damaged; TryAgain if the Hub does not answer. On a signal the process ends at
    once: what was not committed is not visible, and files that arrived are not sent again.
    """
    folder, manifest = Path(folder), check_folder(folder, flag)
    api = open_hub()
    url = f"{api.endpoint}/{repo_id}"
    with stopping_at_once(), plain_errors(repo_id, api.endpoint):
        info = _open_repository(api, repo_id, is_public)
        changed = _changed_files(folder, manifest, _files_of(info))
        if not changed:
            say(f"{url} already has {folder}: nothing to upload")
            return url
        if read_manifest(folder, deep=True) is None:
            raise CheckFailed(f"{flag} {folder} is damaged, a SHA-256 does not match {MANIFEST}: create it again")
        size = sum(Path(folder, name).stat().st_size for name in changed)
        say(f"uploading {len(changed)} files, {size / 1e6:.3g} MB, to {url}")
        _commit(api, repo_id, folder, manifest, changed, info)
    return url


def _open_repository(api: "HfApi", repo_id: str, is_public: bool) -> "ModelInfo":
    """Return the newest commit of a repository, which is created if it does not exist."""
    info = _find_repository(api, repo_id)
    if info is None:
        api.create_repo(repo_id, private=not is_public, exist_ok=True)
        return api.model_info(repo_id, files_metadata=True, timeout=TIMEOUT)
    _check_ours(info, repo_id)
    if info.private is is_public:
        state, asked = ("private", "--hub_public") if is_public else ("public", "no --hub_public")
        say(f"warning: {api.endpoint}/{repo_id} is {state} and stays so, despite {asked}: its settings page changes it")
    return info


def _changed_files(folder: Path, manifest: dict[str, Any], theirs: "dict[str, RepoSibling]") -> list[str]:
    """Return the files of a folder that the Hub lacks or has with other content, sorted.

    A model card that was edited on the Hub is not replaced while the manifest on the Hub is that of `folder`.
    """
    digests = {name: fact["sha256"] for name, fact in manifest["files"].items()}
    digests[MANIFEST] = sha256_file(folder / MANIFEST)
    changed = {name for name, sha256 in digests.items() if not _is_same(folder / name, sha256, theirs.get(name))}
    if MANIFEST not in changed and CARD in theirs:
        changed.discard(CARD)
    return sorted(changed)


def _is_same(path: Path, sha256: str, theirs: "RepoSibling | None") -> bool:
    """Return whether a file on the Hub has the content of `path`: Git has a SHA-1, large-file storage a SHA-256."""
    from huggingface_hub.utils.sha import git_hash

    if theirs is None:
        return False
    return theirs.lfs.sha256 == sha256 if theirs.lfs else theirs.blob_id == git_hash(path.read_bytes())


def _commit(
    api: "HfApi", repo_id: str, folder: Path, manifest: dict[str, Any], changed: list[str], info: "ModelInfo"
) -> None:
    """Upload the changed files and delete those of an earlier result, in one commit on top of `info`."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    # HfApi.upload_folder may split a folder into several commits; then a reader could see half of it.
    added = [CommitOperationAdd(name, folder / name) for name in changed]
    earlier = _earlier_files(api, repo_id, info)
    gone = sorted(earlier & _files_of(info).keys() - {*manifest["files"], MANIFEST})
    what = f"Upload the model of step {manifest['step']}" if "step" in manifest else "Upload the model"
    operations = [*(CommitOperationDelete(name) for name in gone), *added]
    api.create_commit(repo_id, operations, commit_message=what, parent_commit=info.sha)


def _earlier_files(api: "HfApi", repo_id: str, info: "ModelInfo") -> set[str]:
    """Return the files in the manifest on the Hub; none if there is no manifest."""
    if MANIFEST not in _files_of(info):
        return set()
    with tempfile.TemporaryDirectory() as place:
        path = api.hf_hub_download(repo_id, MANIFEST, revision=info.sha, local_dir=place)
        return set(read_json(path).get("files", {}))
