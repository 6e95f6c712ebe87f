"""cache_model.py against a small hub of our own on 127.0.0.1: what is fetched, what is kept, what each fault says."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, run_script, tree
from fake_hub import TOKEN
from safetensors.numpy import save

import cache_model
import run_model
from common import objects, targets
from common.errors import Stopped, describe_error
from common.folders import lock
from common.stores import Store
from pipelines.configs import base_name, base_revision

NAME = "someone/tiny"
FIRST, SECOND = "1" * 40, "2" * 40
INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "safety_checker": [None, None],
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
WANTED = {
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/[odd] name*.json",
    "tokenizer/merges.txt",
    "tokenizer/vocab.json",
    "unet/config.json",
    "unet/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
}
TEXTS = {"vocab_size": 2}
UNET, UNET_FP16 = "unet/diffusion_pytorch_model.safetensors", "unet/diffusion_pytorch_model.fp16.safetensors"
DECOYS = {
    "README.md",
    "v1.ckpt",
    "v1.safetensors",
    "safety_checker/model.safetensors",
    "text_encoder/flax_model.msgpack",
    "unet/diffusion_pytorch_model.bin",
    "unet/diffusion_pytorch_model.bin.index.json",
    UNET_FP16,
    "unet/deeper/config.json",
    "vae_1_0/config.json",
}


def make_files(seed=0):
    """Return {name: bytes} of a repository: a tiny pipeline among what else a repository holds."""
    files = {name: json.dumps({"file": name}).encode() for name in WANTED | DECOYS}
    for number, name in enumerate(sorted(name for name in files if name.endswith(".safetensors"))):
        files[name] = save({"weight": np.array([seed, number], np.float32)})
    values = {"model_index.json": INDEX, "tokenizer/vocab.json": {"a": 0, "b": 1}, "text_encoder/config.json": TEXTS}
    return files | {name: json.dumps(value).encode() for name, value in values.items()}


@pytest.fixture
def hub(hub):
    """A running hub with the repository `hub.repo`."""
    hub.repo = hub.add(NAME, make_files(), FIRST)
    return hub


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def fetch(cache, capsys):
    """A function that runs cache_model.py and returns (the last line of stdout as a path, stderr)."""

    def fetch(*flags, name=NAME):
        arguments = ["--model_name", str(name), "--model_dir", str(cache), *flags]
        cache_model.main(cache_model.parse_args(arguments))
        captured = capsys.readouterr()
        assert captured.out.count("\n") == 1
        return Path(captured.out.strip()), captured.err

    return fetch


def fault(fetch, *flags, **options):
    """Return (exit code, message) of a run that must fail."""
    with pytest.raises(Exception) as caught:
        fetch(*flags, **options)
    return describe_error(caught.value)


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def snapshot_files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def repo_of(cache):
    return cache / "models--someone--tiny"


# ---------------------------------------------------------------------------------------------------------------------
# What is fetched


def test_each_component_is_fetched_in_one_format_and_the_branch_recorded(hub, cache, fetch):
    folder, stderr = fetch()
    assert folder == repo_of(cache) / "snapshots" / FIRST
    assert snapshot_files(folder) == WANTED
    assert hub.fetched() == WANTED - {"model_index.json"}
    assert (folder / UNET).read_bytes() == hub.repo.commits[FIRST][UNET]
    assert (repo_of(cache) / "refs" / "main").read_text() == FIRST
    assert stderr == f"main is commit {FIRST}; --revision {FIRST} pins it\n"


def test_the_cache_is_one_that_the_hubs_own_client_reads(hub, cache, fetch):
    from huggingface_hub import scan_cache_dir, snapshot_download

    folder, _ = fetch()
    scan = scan_cache_dir(cache)
    assert not scan.warnings
    assert [(repo.repo_id, [str(r.snapshot_path) for r in repo.revisions]) for repo in scan.repos] == [
        (NAME, [str(folder)])
    ]
    wanted = ["model_index.json", "unet/*.safetensors"]
    assert snapshot_download(
        NAME, cache_dir=cache, local_files_only=True, allow_patterns=wanted, ignore_patterns="*fp16*"
    ) == str(folder)


def test_a_script_run_prints_one_line_and_nothing_of_the_hubs(hub, cache):
    flags = ("--model_name", NAME, "--model_dir", cache)
    done = run_script("cache_model.py", *flags, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0")
    assert (done.returncode, done.stdout) == (0, f"{repo_of(cache) / 'snapshots' / FIRST}\n")
    assert done.stderr.splitlines() == [f"main is commit {FIRST}; --revision {FIRST} pins it"]
    hub.gated, hub.repo.commits[SECOND] = "GatedRepo", make_files(1)
    done = run_script("cache_model.py", *flags, "--revision", SECOND, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)


def test_a_variant_is_taken_where_a_component_has_it(hub, fetch):
    folder, _ = fetch("--variant", "fp16")
    assert snapshot_files(folder) == WANTED - {UNET} | {UNET_FP16}
    folder, _ = fetch("--revision", FIRST)
    assert snapshot_files(folder) == WANTED | {UNET_FP16}


def test_a_local_folder_is_checked_and_printed(tmp_path, cache, fetch, monkeypatch):
    for name in WANTED:
        path = tmp_path / "models" / "tiny" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_files()[name])
    monkeypatch.chdir(tmp_path)
    assert fetch(name="models/tiny") == (tmp_path / "models" / "tiny", "")
    assert not cache.exists()
    (tmp_path / "models" / "tiny" / UNET).unlink()
    code, message = fault(fetch, name="models/tiny")
    assert code == 3 and "unet contains no weights" in message


# ---------------------------------------------------------------------------------------------------------------------
# What is kept


def test_a_pinned_model_needs_no_network_and_no_hub_client(hub, cache, fetch):
    folder, stderr = fetch("--revision", FIRST)
    assert stderr == ""
    hub.stop()
    hub.requests.clear()
    before = tree(cache)
    assert fetch("--revision", FIRST) == (folder, "")
    program = (
        "import sys, cache_model as c; c.main(c.parse_args(sys.argv[1:])); "
        "print([name for name in ('huggingface_hub', 'torch', 'diffusers', 'ray') if name in sys.modules])"
    )
    flags = ["--model_name", NAME, "--revision", FIRST, "--model_dir", str(cache)]
    done = subprocess.run([sys.executable, "-c", program, *flags], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(folder), "[]"]
    assert tree(cache) == before and not hub.requests


def test_a_whole_branch_costs_one_question_and_writes_nothing(hub, cache, fetch):
    fetch()
    hub.requests.clear()
    before = tree(cache)
    fetch()
    assert hub.requests == [("GET", f"/api/models/{NAME}/revision/main")]
    assert tree(cache) == before


@pytest.mark.parametrize("how", ["stopped", "silent", "switched off", "busy"])
def test_a_branch_without_network_is_what_it_last_was(hub, fetch, monkeypatch, how):
    folder, _ = fetch()
    if how == "stopped":
        hub.stop()
    elif how == "silent":
        monkeypatch.setattr(cache_model, "TIMEOUT", 0.2)
        hub.endless = {"/revision/main"}
    elif how == "switched off":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    else:
        hub.status = 503
    began = time.monotonic()
    again, stderr = fetch()
    assert again == folder and time.monotonic() - began < 10
    assert stderr.count("\n") == 1 and f"using commit {FIRST} from the cache" in stderr


def test_a_moved_branch_is_recorded_when_its_new_commit_is_whole(hub, cache, fetch):
    old, _ = fetch()
    hub.repo.commits[SECOND], hub.repo.refs["main"], hub.broken = make_files(1), SECOND, {UNET}
    assert fault(fetch)[0] == 75
    hub.repo.refs = {}
    hub.status = 503
    assert fetch()[0] == old
    hub.status, hub.repo.refs, hub.broken = None, {"main": SECOND}, set()
    new, stderr = fetch()
    assert new.name == SECOND and SECOND in stderr
    assert (repo_of(cache) / "refs" / "main").read_text() == SECOND
    assert snapshot_files(new) == snapshot_files(old) == WANTED


def test_a_kept_revision_stays_where_its_branch_moves(hub, cache, fetch):
    """Without the flag the branch is followed, and the commit that it then is is the one that is kept."""
    old, stderr = fetch("--keep_revision")
    assert old.name == FIRST and stderr == f"main is commit {FIRST}; --keep_revision keeps it\n"
    hub.repo.commits[SECOND], hub.repo.refs["main"] = make_files(1), SECOND
    hub.requests.clear()
    before = tree(cache)
    assert fetch("--keep_revision") == (old, "")
    assert not hub.requests and tree(cache) == before
    new, _ = fetch()
    assert new.name == SECOND
    hub.stop()
    assert fetch("--keep_revision") == (new, "")


def test_a_kept_revision_that_is_damaged_is_fetched_again_at_its_commit(hub, cache, fetch):
    folder, _ = fetch("--keep_revision")
    hub.repo.commits[SECOND], hub.repo.refs["main"] = make_files(1), SECOND
    (folder / UNET).write_bytes(hub.repo.commits[FIRST][UNET][:-1])
    (folder / "tokenizer/vocab.json").unlink()
    hub.requests.clear()
    again, stderr = fetch("--keep_revision")
    assert again == folder and stderr == f"{folder / UNET} is damaged: fetching it again\n"
    assert all(FIRST in path for _, path in hub.requests)
    assert (folder / UNET).read_bytes() == hub.repo.commits[FIRST][UNET] and snapshot_files(folder) == WANTED
    assert (repo_of(cache) / "refs" / "main").read_text() == FIRST
    (folder / UNET).unlink()
    hub.repo.commits.pop(FIRST)
    code, message = fault(fetch, "--keep_revision")
    assert code == 3 and f"--revision {FIRST} is not a commit" in message and "omit --keep_revision" in message


def test_a_recorded_commit_that_is_none_is_asked_for_again(hub, cache, fetch):
    (repo_of(cache) / "refs").mkdir(parents=True)
    (repo_of(cache) / "refs" / "main").write_text("../../elsewhere\n")
    assert fetch("--keep_revision")[0].name == FIRST
    assert (repo_of(cache) / "refs" / "main").read_text() == FIRST


def test_a_broken_download_goes_on_where_it_was(hub, fetch):
    hub.broken = {UNET, "tokenizer/vocab.json"}
    code, message = fault(fetch)
    assert code == 75 and "--model_name" in message and "500" in message
    hub.broken = set()
    first = hub.fetched()
    folder, _ = fetch()
    assert hub.fetched() == WANTED - {"model_index.json"} - (first - {UNET, "tokenizer/vocab.json"})
    assert snapshot_files(folder) == WANTED


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_stops_a_download_at_once(hub, cache, fetch, signal_number):
    hub.endless, rest = {UNET}, WANTED - {UNET}
    command = [sys.executable, str(ROOT / "cache_model.py"), "--model_name", NAME, "--model_dir", str(cache)]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    blobs, snapshot = repo_of(cache) / "blobs", repo_of(cache) / "snapshots" / FIRST
    wait_for(lambda: list(blobs.glob("*.incomplete")) and snapshot_files(snapshot) == rest)
    process.send_signal(signal_number)
    if signal_number == signal.SIGKILL:
        assert process.wait(5) == -signal_number
    else:
        assert process.wait(5) == 128 + signal_number
        assert process.stderr.read().splitlines()[1:] == [f"cache_model.py: {Stopped(signal_number)}"]
        assert not list(cache.rglob("*.incomplete"))
    hub.endless = set()
    hub.requests.clear()
    assert snapshot_files(fetch()[0]) == WANTED
    assert UNET in hub.fetched()


@pytest.mark.parametrize("name", [UNET, "tokenizer/vocab.json", "model_index.json"])
@pytest.mark.parametrize("how", ["absent", "dangling", "short"])
def test_what_a_snapshot_lacks_is_fetched_again(hub, cache, fetch, name, how):
    folder, _ = fetch("--revision", FIRST)
    if how == "absent":
        (folder / name).unlink()
    elif how == "dangling":
        (folder / name).resolve().unlink()
    else:
        (folder / name).write_bytes(hub.repo.commits[FIRST][name][:-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        code, message = fault(fetch, "--revision", FIRST)
        assert code == 75 and "the cache is incomplete" in message and name.split("/")[0] in message
    hub.requests.clear()
    assert fetch("--revision", FIRST)[0] == folder
    assert hub.fetched() <= {name}
    assert snapshot_files(folder) == WANTED
    assert (folder / name).read_bytes() == hub.repo.commits[FIRST][name]


@pytest.mark.parametrize("copied", [False, True])
def test_damaged_weights_of_the_right_size_are_fetched_again(hub, tmp_path, cache, fetch, copied):
    folder, _ = fetch("--revision", FIRST)
    if copied:  # a cache whose links became files on the way
        shutil.copytree(cache, tmp_path / "copy")
        shutil.rmtree(cache)
        shutil.move(tmp_path / "copy", cache)
        assert not (folder / UNET).is_symlink()
    (folder / UNET).write_bytes(b"\xff" * len(hub.repo.commits[FIRST][UNET]))
    _, stderr = fetch("--revision", FIRST)
    assert "damaged" in stderr and UNET in stderr
    assert (folder / UNET).read_bytes() == hub.repo.commits[FIRST][UNET]


@pytest.mark.parametrize("flags", [(), ("--revision", FIRST)])
def test_a_cache_without_a_listing_serves_without_network(hub, cache, fetch, flags):
    from huggingface_hub import snapshot_download

    folder = snapshot_download(NAME, cache_dir=cache)
    shutil.rmtree(repo_of(cache) / "trees")
    hub.stop()
    assert str(fetch(*flags)[0]) == folder
    (Path(folder) / UNET).unlink()
    (Path(folder) / UNET_FP16).unlink()
    assert fault(fetch, *flags)[0] == 75


def test_a_cache_of_the_hubs_own_client_is_not_fetched_again(hub, cache, fetch):
    from huggingface_hub import snapshot_download

    folder = snapshot_download(NAME, cache_dir=cache)
    hub.requests.clear()
    assert str(fetch("--revision", FIRST)[0]) == folder
    assert not hub.requests


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


def drop(files, *names):
    return {name: data for name, data in files.items() if name not in names}


FAULTS = {
    "gated": (
        lambda hub: setattr(hub, "gated", "GatedRepo"),
        (),
        3,
        ("--model_name", "accept its licence", "HF_TOKEN"),
    ),
    "refused": (lambda hub: setattr(hub, "gated", "Other"), (), 3, ("--model_name", "access (403)", "HF_TOKEN")),
    "bad token": (lambda hub: setattr(hub, "status", 401), (), 3, ("--model_name", "401", "HF_TOKEN")),
    "revision": (lambda hub: None, ("--revision", "v9"), 3, ("--revision v9", "not a commit, branch or tag")),
    "no commit": (lambda hub: None, ("--revision", "9" * 40), 3, (f"--revision {'9' * 40}",)),
    "variant": (lambda hub: None, ("--variant", "fp61"), 3, ("--variant fp61", "fp16")),
    "no pipeline": (
        lambda hub: hub.repo.commits.update({FIRST: drop(make_files(), "model_index.json")}),
        (),
        3,
        ("--model_name", "not a Diffusers pipeline"),
    ),
    "pickles": (
        lambda hub: hub.repo.commits.update({FIRST: drop(make_files(), UNET, UNET_FP16)}),
        (),
        3,
        ("--model_name", "unet/diffusion_pytorch_model.bin is a pickle, which can run code", "--revision"),
    ),
    "fp16 alone": (
        lambda hub: hub.repo.commits.update({FIRST: drop(make_files(), UNET)}),
        (),
        3,
        ("unet", "--variant fp16"),
    ),
    "damaged": (
        lambda hub: hub.repo.commits.update({FIRST: make_files() | {UNET: b"not safetensors"}}),
        (),
        5,
        (UNET, "damaged", "fetch the model again"),
    ),
    "busy": (lambda hub: setattr(hub, "status", 503), (), 75, ("--model_name", "503", "not contain revision main")),
    "no network": (
        lambda hub: hub.stop(),
        (),
        75,
        ("--model_name", "is not a local folder, and", "does not contain revision main"),
    ),
    "no network, pinned": (lambda hub: hub.stop(), ("--revision", FIRST), 75, ("--model_name", "unreachable", FIRST)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line_that_names_the_flag(hub, cache, fetch, name):
    prepare, flags, code, words = FAULTS[name]
    prepare(hub)
    found, message = fault(fetch, *flags)
    assert found == code, message
    assert all(word in message for word in words), message
    assert "\n" not in message
    if code == 3:
        assert not hub.fetched() and not list(cache.rglob("*.safetensors"))


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_gated_model_is_told_with_its_page_and_the_token_before_weights_load(hub, cache, fetch, monkeypatch, token):
    """The Hub answers 401 without a token, and 403 to a user who has not accepted the licence."""
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.gated = "GatedRepo"
    then = f"accept its licence at {hub.url}/{NAME}, then set HF_TOKEN or run `hf auth login`"
    assert fault(fetch) == (3, f"--model_name {NAME} is gated: {then}")
    assert not hub.fetched() and not list(cache.rglob("*.safetensors"))
    hub.gated = ""
    assert snapshot_files(fetch()[0]) == WANTED


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("someone/else", "neither a local folder nor a model on"),
        ("some one/tiny", "neither a local folder nor of the form ORGANISATION/NAME"),
    ],
)
def test_an_unknown_model(hub, fetch, name, words):
    code, message = fault(fetch, name=name)
    assert code == 3 and f"--model_name {name} is {words}" in message


@pytest.mark.parametrize("name", ["./models/none", "/models/none", "~/none", "../none", "none/", "a/b/c"])
def test_a_path_that_is_no_folder_is_not_asked_of_the_hub(hub, fetch, name):
    code, message = fault(fetch, name=name)
    assert code == 3 and message.startswith(f"--model_name {name} is not an existing folder")
    assert not hub.requests


def test_an_unwritable_cache_is_told_before_the_network(hub, cache, fetch):
    cache.write_text("a file")
    code, message = fault(fetch)
    assert code == 3 and message.startswith(f"--model_dir {cache}")
    assert not hub.requests


@pytest.mark.parametrize("error", [OSError(28, "No space left", "blob"), RuntimeError("No space (os error 28)")])
def test_a_full_disk_is_told_as_such(hub, fetch, monkeypatch, error):
    def fill(*args, **kwargs):
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.snapshot_download", fill)
    code, message = fault(fetch)
    assert code == 4 and "disk full" in message


def test_a_second_run_on_one_cache_is_sent_away(hub, cache, fetch):
    with lock(repo_of(cache) / ".lock"):
        code, message = fault(fetch)
    assert code == 75 and "in use by process" in message
    assert not hub.fetched()


# ---------------------------------------------------------------------------------------------------------------------
# Object stores


@pytest.fixture
def mirror(s3, node_cache, capsys):
    """A function that runs cache_model.py with --model_dir in a store and returns (its last line, stderr)."""

    def mirror(*flags, name=NAME):
        cache_model.main(cache_model.parse_args(["--model_name", str(name), "--model_dir", s3("models"), *flags]))
        captured = capsys.readouterr()
        assert captured.out.count("\n") == 1
        return captured.out.strip(), captured.err

    return mirror


def test_a_model_is_mirrored_once_and_knows_where_it_is_from(hub, mirror, s3, node_cache):
    uri, stderr = mirror()
    assert uri == s3(f"models/models--someone--tiny/snapshots/{FIRST}")
    assert stderr == f"main is commit {FIRST}; --revision {FIRST} pins it\n"
    copy = objects.local_copy(uri)
    assert snapshot_files(copy) == WANTED | {"manifest.json"}
    assert (copy / UNET).read_bytes() == hub.repo.commits[FIRST][UNET]
    assert (base_name(copy), base_revision(copy)) == (NAME, FIRST) == (base_name(uri), base_revision(uri))
    assert not list(node_cache.glob(".mirror-*/models--*"))  # what was downloaded is gone

    hub.requests.clear()
    before = Store(s3("models")).list()
    assert mirror() == (uri, stderr)
    assert hub.requests == [("GET", f"/api/models/{NAME}/revision/main")]
    hub.stop()
    hub.requests.clear()
    assert mirror("--keep_revision") == mirror("--revision", FIRST) == (uri, "")
    again, stderr = mirror()
    assert again == uri and f"using commit {FIRST} from the cache" in stderr
    assert Store(s3("models")).list() == before and not hub.requests


def test_another_commit_or_variant_replaces_no_mirrored_one(hub, mirror, s3):
    first, _ = mirror()
    hub.repo.commits[SECOND], hub.repo.refs["main"] = make_files(1), SECOND
    assert mirror("--keep_revision") == (first, "")
    second, _ = mirror()
    variant, _ = mirror("--variant", "fp16")
    assert len({first, second, variant}) == 3
    assert all(targets.read_manifest(uri, deep=True) for uri in (first, second, variant))
    assert UNET_FP16 in Store(variant).list() and UNET_FP16 not in Store(second).list()
    assert base_revision(variant) == SECOND
    assert mirror("--keep_revision") == (second, "")


def test_a_mirroring_that_is_stopped_continues(hub, mirror, s3, monkeypatch):
    hub.broken = {UNET}
    code, message = fault(mirror)
    assert code == 75 and "500" in message
    hub.broken = set()
    first = hub.fetched()
    with monkeypatch.context() as patch:
        patch.setattr(objects, "upload_folder", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            mirror()
    uri = s3(f"models/models--someone--tiny/snapshots/{FIRST}")
    assert targets.read_manifest(uri) is None
    assert hub.fetched() == WANTED - {"model_index.json"} - (first - {UNET})  # nothing whole was fetched twice
    hub.requests.clear()
    assert mirror()[0] == uri and targets.read_manifest(uri, deep=True)
    assert not hub.fetched()


def test_mirrors_exclude_each_other(hub, mirror, s3):
    with targets.lock(s3("models/models--someone--tiny")):
        code, message = fault(mirror)
    assert code == 75 and "models--someone--tiny" in message and "is in use by process" in message
    assert mirror()[0]


def test_a_folder_is_mirrored_once_and_a_uri_is_checked_and_printed(mirror, s3, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "my model")
    (folder / "unet" / "pickle.bin").write_bytes(b"x")
    (folder / "manifest.json").write_text("{}")
    uri, stderr = mirror(name=folder)
    assert uri.startswith(s3("models/my--model-").split("?")[0]) and stderr == ""
    copy = objects.local_copy(uri)
    assert base_name(copy) == "my model" and base_revision(copy) is None
    assert snapshot_files(copy) - {"manifest.json"} == snapshot_files(tiny_model) - {"manifest.json"}
    before = Store(s3("models")).list()
    assert mirror(name=folder) == mirror(name=uri) == (uri, "")
    assert Store(s3("models")).list() == before
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    assert mirror(name=folder)[0] != uri and targets.read_manifest(uri)
    code, message = fault(mirror, name=s3("none"))
    assert code == 3 and message.startswith(f"{s3('none')} does not exist or is empty")


@pytest.mark.usefixtures("one_thread")
def test_images_are_drawn_from_a_mirrored_model(mirror, drawn, s3, tiny_model, capsys):
    uri, _ = mirror(name=tiny_model)
    for model, place in ((uri, s3("one")), (str(tiny_model), s3("two"))):
        words = ["--model_dir", model, "--output_dir", place, "--prompts", "a cat", "--num_workers", "0"]
        run_model.main(run_model.parse_args(words))
    one, two = (Store(s3(name)) for name in ("one", "two"))
    names = [name for name in one.list() if name[0] != "."]
    assert len(names) == 5 and all(one.read(name) == two.read(name) for name in names)
