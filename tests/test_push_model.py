"""push_model.py against a small hub on 127.0.0.1: what is uploaded, what is not sent again, what each fault says."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, run_script
from fake_hub import LARGE, TOKEN, sha256

import cache_model
import push_model
from common import folders
from common.errors import Stopped, describe_error
from pipelines import upload
from pipelines.model_folder import LORA_FILE

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>'")  # of the Hub's client
REPO = "someone/rex"
CARD = "---\nlibrary_name: diffusers\n---\n\n# photo of unqtkn dog\n\n![0](samples/0.png)\n"
UNET = "unet/diffusion_pytorch_model.safetensors"


def write(folder, files):
    """Write {name: bytes} and seal the folder again."""
    for name, data in files.items():
        Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, name).write_bytes(data)
    Path(folder, folders.MANIFEST).unlink(missing_ok=True)
    folders.publish(folder, folder.with_name("sealed"), step=3, settings={})
    Path(folder.with_name("sealed")).rename(folder)


@pytest.fixture
def model(tiny_model, tmp_path):
    """A folder as train.py writes it."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    extra = {"README.md": CARD.encode(), "samples/0.png": b"a picture", "training_log.jsonl": b'{"step": 3}\n'}
    write(folder, extra | {"validation/strip.png": b"pictures", "empty.txt": b""})
    return folder


@pytest.fixture
def hub(hub, monkeypatch):
    """A hub with a user's token; its client does not wait before it tries again."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    return hub


@pytest.fixture
def push(model, capsys):
    """A function that runs push_model.py and returns (the last line of stdout, stderr)."""

    def push(*flags, repo=REPO, folder=model):
        push_model.main(push_model.parse_args(["--model_dir", str(folder), "--push_to_hub", repo, *flags]))
        captured = capsys.readouterr()
        assert captured.out.count("\n") == 1
        return captured.out.strip(), captured.err

    return push


def fault(push, *flags, **options):
    """Return (exit code, message) of a run that must fail."""
    with pytest.raises(Exception) as caught:
        push(*flags, **options)
    return describe_error(caught.value)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def uploaded(hub, repo=REPO):
    """Return the files of a repository, without the one that the Hub creates."""
    return {name: data for name, data in hub.repositories[repo].files.items() if name != ".gitattributes"}


def sent(hub):
    """Return the paths that were written to, and forget all requests."""
    paths = [path for method, path in hub.requests if method in ("POST", "PUT")]
    hub.requests.clear()
    return paths


# ---------------------------------------------------------------------------------------------------------------------
# What is uploaded


def test_a_model_is_uploaded_whole_private_and_in_one_commit(hub, model, push):
    url, stderr = push()
    assert url == f"{hub.url}/{REPO}" and stderr.startswith("uploading ") and url in stderr
    assert uploaded(hub) == contents(model)
    repository = hub.repositories[REPO]
    assert repository.private and repository.messages == ["Upload the model of step 3"]
    assert set(hub.objects) == {sha256(data) for name, data in contents(model).items() if name.endswith(LARGE)}


def test_a_lora_is_uploaded_too(hub, push, tmp_path):
    import numpy as np
    from safetensors.numpy import save

    folder = tmp_path / "lora"
    write(folder, {"README.md": CARD.encode(), LORA_FILE: save({"unet.x.lora_A.weight": np.zeros((4, 4), "float32")})})
    push(folder=folder)
    assert uploaded(hub) == contents(folder)
    write(folder, {LORA_FILE: b"no weights"})
    assert fault(push, folder=folder)[0] == 5


def test_what_was_uploaded_is_what_is_downloaded(hub, model, push, tmp_path, capsys):
    from huggingface_hub import snapshot_download

    push()
    cache_model.main(cache_model.parse_args(["--model_name", REPO, "--model_dir", str(tmp_path / "cache")]))
    fetched = contents(Path(capsys.readouterr().out.strip()))
    assert UNET in fetched and "model_index.json" in fetched
    assert fetched.items() <= contents(model).items()
    whole = Path(snapshot_download(REPO, cache_dir=tmp_path / "whole"))
    assert folders.read_manifest(whole, deep=True)["step"] == 3


def test_a_script_run_prints_one_line_and_nothing_of_the_hubs(hub, model):
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    done = run_script("push_model.py", "--model_dir", model, "--push_to_hub", REPO, **environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, f"{hub.url}/{REPO}\n", 1)
    hub.user["auth"]["accessToken"]["role"] = "read"
    done = run_script("push_model.py", "--model_dir", model, "--push_to_hub", REPO, **environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert done.stderr.startswith(f"push_model.py: --push_to_hub {REPO}: the token of someone")


def test_the_store_of_chunks_takes_large_files(hub, model, push, tmp_path, monkeypatch):
    """The Hub's client uploads with hf_xet where that is installed; here hf_xet writes its chunks to a folder."""
    pytest.importorskip("hf_xet")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    hub.chunk_store = f"local://{tmp_path / 'chunks'}"
    large = {name: data for name, data in contents(model).items() if name.endswith(LARGE)}
    hub.objects = {sha256(data): data for data in large.values()}  # the hub cannot read chunks, but checks the digests
    push()
    assert uploaded(hub) == contents(model) and len(hub.repositories[REPO].messages) == 1
    chunks = sum(path.stat().st_size for path in (tmp_path / "chunks").rglob("*") if path.is_file())
    assert chunks > 0.5 * sum(map(len, large.values()))
    assert not any(path.startswith("/objects/") or "lfs" in path for path in sent(hub))


def test_a_model_that_is_there_is_not_sent_again(hub, model, push):
    url, _ = push()
    sent(hub)
    again, stderr = push()
    assert again == url and stderr == f"{url} already has {model}: nothing to upload\n" and sent(hub) == []


def test_only_what_changed_is_sent_and_what_is_gone_is_deleted(hub, model, push):
    push()
    hub.repositories[REPO].files["LICENSE"] = b"added on the Hub"
    before = contents(model)
    (model / "validation/strip.png").unlink()
    write(model, {UNET: before[UNET][:-4] + b"\1\2\3\4", "README.md": CARD.encode() + b"more\n"})
    sent(hub)
    push()
    assert [path for path in sent(hub) if path.startswith("/objects/")] == [
        f"/objects/{sha256((model / UNET).read_bytes())}"
    ]
    assert uploaded(hub) == contents(model) | {"LICENSE": b"added on the Hub"}
    assert len(hub.repositories[REPO].messages) == 2


def test_a_card_that_was_edited_on_the_hub_is_kept_until_the_model_changes(hub, model, push):
    push()
    files = hub.repositories[REPO].files
    files["README.md"] = b"---\n---\nedited"
    assert "nothing to upload" in push()[1] and uploaded(hub)["README.md"] == b"---\n---\nedited"
    del files["README.md"], files["unet/config.json"]
    push()
    assert uploaded(hub) == contents(model)
    hub.repositories[REPO].files["README.md"] = b"---\n---\nedited"
    write(model, {"training_log.jsonl": b'{"step": 4}\n'})
    push()
    assert uploaded(hub) == contents(model)


def test_an_existing_repository_keeps_its_visibility(hub, push):
    push("--hub_public")
    push("--hub_public", repo="team/rex")
    assert not hub.repositories[REPO].private and not hub.repositories["team/rex"].private
    _, stderr = push()
    assert f"warning: {hub.url}/{REPO} is public and stays so" in stderr and not hub.repositories[REPO].private
    hub.repositories[REPO].private = True
    _, stderr = push("--hub_public")
    assert f"warning: {hub.url}/{REPO} is private and stays so" in stderr and hub.repositories[REPO].private


# ---------------------------------------------------------------------------------------------------------------------
# What is refused before anything is sent


def grant(hub, *scoped):
    rights = [{"entity": {"type": "user", "name": name}, "permissions": permissions} for name, permissions in scoped]
    hub.user["auth"]["accessToken"] |= {"role": "fineGrained", "fineGrained": {"global": [], "scoped": rights}}


def be_silent(hub):
    hub.add(REPO, {}, "1" * 40)
    hub.endless.add(f"/api/models/{REPO}")


def be_other(hub):
    hub.add(REPO, {"model_index.json": b"{}"}, "1" * 40)


REFUSED = {
    "no name": (lambda hub, patch: None, "rex", 3, ("not of the form ORGANISATION/NAME",)),
    "three names": (lambda hub, patch: None, "a/b/c", 3, ("not of the form ORGANISATION/NAME",)),
    "odd name": (lambda hub, patch: None, "some one/rex", 3, ("not of the form ORGANISATION/NAME",)),
    "no token": (lambda hub, patch: patch.delenv("HF_TOKEN"), REPO, 3, ("needs a token", "HF_TOKEN", "hf auth login")),
    "wrong token": (lambda hub, patch: patch.setenv("HF_TOKEN", "hf_no"), REPO, 3, ("401", "not valid", "/settings/")),
    "reading token": (
        lambda hub, patch: hub.user["auth"]["accessToken"].update(role="read"),
        REPO,
        3,
        ("write access",),
    ),
    "other's name": (lambda hub, patch: None, "somebody/rex", 3, ("someone", "may not write to it", "write access")),
    "team's reader": (lambda hub, patch: None, "readers/rex", 3, ("may not write to it",)),
    "narrow token": (lambda hub, patch: grant(hub, ("someone", ["repo.content.read"])), REPO, 3, ("may not write",)),
    "token of a team": (lambda hub, patch: grant(hub, ("team", ["repo.write"])), REPO, 3, ("may not write",)),
    "other's repository": (
        lambda hub, patch: hub.add("somebody/rex", {}, "1" * 40),
        "somebody/rex",
        3,
        ("403", "may not write there", "write access"),
    ),
    "other model": (lambda hub, patch: be_other(hub), REPO, 3, ("holds a model of another program",)),
    "no network": (lambda hub, patch: hub.stop(), REPO, 75, ("unreachable", "try again later")),
    "silence": (
        lambda hub, patch: be_silent(hub),
        REPO,
        75,
        ("unreachable", "try again later"),
    ),
    "busy": (lambda hub, patch: setattr(hub, "status", 503), REPO, 75, ("503", "try again later")),
    "too often": (
        lambda hub, patch: hub.faults.append(["GET", "whoami", 429, 9]),
        REPO,
        75,
        ("429", "try again later"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_fault_is_told_within_seconds_and_changes_nothing(hub, push, monkeypatch, name):
    prepare, repo, code, words = REFUSED[name]
    monkeypatch.setattr(upload, "TIMEOUT", 0.3)
    prepare(hub, monkeypatch)
    before = set(hub.repositories)
    began = time.monotonic()
    found, message = fault(push, repo=repo)
    assert found == code, message
    assert message.startswith(f"--push_to_hub {repo}") and all(word in message for word in words), message
    assert time.monotonic() - began < 5 and sent(hub) == [] and set(hub.repositories) == before


@pytest.mark.parametrize("scoped", [[("someone", ["repo.write"])], [("SomeOne/rex", ["repo.write"])], None])
def test_a_fine_grained_token_that_may_write_is_enough(hub, push, scoped):
    """The Hub does not always say what such a token may do."""
    if scoped is None:
        hub.user["auth"]["accessToken"]["role"] = "fineGrained"
    else:
        grant(hub, *scoped)
    push()
    assert uploaded(hub)


def unseal(model):
    (model / folders.MANIFEST).unlink()


def cut(model):
    (model / "training_log.jsonl").write_bytes(b"")


def flip(model):
    (model / "samples/0.png").write_bytes(b"A picture")


def make_checkpoint(model):
    (model / "model_index.json").unlink()


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (unseal, 3, "has no manifest.json that matches its files"),
        (cut, 3, "has no manifest.json that matches its files"),
        (make_checkpoint, 3, "has no model_index.json"),
        (shutil.rmtree, 3, "is not a folder"),
        (flip, 5, "is damaged, a SHA-256 does not match"),
    ],
)
def test_a_folder_that_is_not_whole_is_not_uploaded(hub, model, push, damage, code, words):
    damage(model)
    found, message = fault(push)
    assert found == code and message.startswith(f"--model_dir {model}") and words in message
    assert not any(path.startswith("/objects/") for path in sent(hub))
    assert REPO not in hub.repositories or not uploaded(hub)


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong during an upload


@pytest.mark.parametrize("where", ["/preupload/", "/objects/batch", "/objects/"])
def test_two_errors_of_the_server_are_passed_over(hub, model, push, where):
    hub.faults = [["PUT" if where == "/objects/" else "POST", where, 500, 2]]
    push()
    assert hub.faults[0][3] == 0 and uploaded(hub) == contents(model)


@pytest.mark.parametrize(
    ("method", "where", "status", "code", "words"),
    [
        ("POST", "/repos/create", 403, 3, "403 (as told): the token may not write there"),
        ("POST", "/preupload/", 401, 3, "401 (as told): the token is not valid"),
        ("POST", "/preupload/", 404, 3, "404 (as told): check the name"),
        ("POST", "/objects/batch", 503, 75, "503 (as told): try again later"),
        ("PUT", "/objects/", 403, 3, "403 (as told)"),
        ("PUT", "/objects/", 500, 75, "500 (as told): try again later"),
        ("POST", "/commit/", 403, 3, "403 (as told): the token may not write there"),
        ("POST", "/commit/", 412, 75, "changed by somebody else at the same time"),
        ("POST", "/commit/", 500, 75, "500 (as told): try again later"),
        ("POST", "/commit/", 413, 3, "413 (as told)"),
    ],
)
def test_a_fault_of_an_upload_shows_nothing_and_the_next_run_completes_it(
    hub, model, push, method, where, status, code, words
):
    hub.faults = [[method, where, status, 99]]
    found, message = fault(push)
    assert found == code and message.startswith(f"--push_to_hub {REPO}: {hub.url} answers") and words in message
    assert "\n" not in message
    assert REPO not in hub.repositories or not uploaded(hub)
    hub.faults = []
    arrived = set(hub.objects)
    sent(hub)
    push()
    assert uploaded(hub) == contents(model)
    assert arrived.isdisjoint(path.removeprefix("/objects/") for path in sent(hub))


def test_a_repository_that_the_token_cannot_see(hub, push):
    hub.add(REPO, {"README.md": b"theirs"}, "1" * 40, private=True)
    hub.hidden = {REPO}
    code, message = fault(push)
    assert code == 3 and "404 (Repository not found): check the name and what the token may access" in message
    assert uploaded(hub) == {"README.md": b"theirs"}


def test_a_card_that_the_hub_refuses(hub, model, push):
    write(model, {"README.md": b"no metadata"})
    code, message = fault(push)
    assert code == 3 and "refuses the model card" in message and "no metadata" in message
    assert not uploaded(hub) and not hub.objects


def test_a_commit_of_somebody_else_meanwhile_is_not_overwritten(hub, push, monkeypatch):
    push()
    real = upload._commit

    def commit_late(api, repo_id, *rest):
        repository = hub.repositories[repo_id]
        repository.commits["9" * 40] = {"README.md": b"theirs"}
        repository.refs["main"] = "9" * 40
        real(api, repo_id, *rest)

    del hub.repositories[REPO].files["training_log.jsonl"]
    monkeypatch.setattr(upload, "_commit", commit_late)
    code, message = fault(push)
    assert code == 75 and "412" in message and hub.repositories[REPO].files == {"README.md": b"theirs"}


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_an_upload_that_is_ended_shows_nothing_and_goes_on_later(hub, model, push, signal_number):
    digest = sha256((model / UNET).read_bytes())
    hub.endless = {f"/objects/{digest}"}
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, str(ROOT / "push_model.py"), "--model_dir", str(model), "--push_to_hub", REPO]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    others = {sha256(data) for name, data in contents(model).items() if name.endswith(LARGE)} - {digest}
    deadline = time.monotonic() + 30
    while set(hub.objects) != others or ("PUT", f"/objects/{digest}") not in hub.requests:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal_number)
    stderr = process.communicate(timeout=5)[1]
    if signal_number == signal.SIGKILL:
        assert process.returncode == -signal_number
    else:
        assert process.returncode == 128 + signal_number
        assert stderr.splitlines()[-1] == f"push_model.py: {Stopped(signal_number)}"
    assert not uploaded(hub)
    hub.endless = set()
    sent(hub)
    push()
    assert uploaded(hub) == contents(model)
    assert [path for path in sent(hub) if path.startswith("/objects/")] == [f"/objects/{digest}"]
