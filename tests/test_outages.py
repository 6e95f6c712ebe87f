"""An object store that does not answer for a while: preprocess.py and pretrain.py wait, and lose nothing."""

import itertools
import json
import threading
import time

import pytest
from conftest import last_json, make_raw_data

import preprocess
from common import errors, objects, outages, storage, stores
from common.storage import Folder
from pretraining import parts
from training import checkpoints, loop

pytestmark = pytest.mark.usefixtures("one_thread")
LONG = pytest.mark.faults


@pytest.fixture
def short(monkeypatch):
    """Requests fail soon and are soon repeated."""
    for module, values in (
        (stores, {"RETRIES": 0, "RETRY_SECONDS": 0, "CONNECT_TIMEOUT": 1, "REQUEST_TIMEOUT": 1}),
        (storage, {"ATTEMPTS": 1, "CONNECT_TIMEOUT": 1, "REQUEST_TIMEOUT": 1}),
        (outages, {"FIRST_PAUSE": 0.1, "LONGEST_PAUSE": 0.3, "OUTAGE": 60.0, "_said": float("-inf")}),
    ):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


@pytest.fixture
def outage_at(monkeypatch, faulty_s3):
    """A function that lets an outage begin when something is called for the n-th time; it returns when it began."""

    def at(place, name, number, seconds=2.0, kind="503"):
        function, calls, count = getattr(place, name), [], itertools.count(1)

        def call(*arguments, **options):
            calls.append(arguments)
            if next(count) == number:
                faulty_s3.outage(seconds, kind)
            return function(*arguments, **options)

        monkeypatch.setattr(place, name, call)
        return calls

    return at


def encode(source, folder, model_dir, *flags):
    arguments = ["--input", source, "--model_dir", model_dir, "--output_dir", folder, "--rows_per_file", 4]
    preprocess.main(preprocess.parse_args([str(part) for part in (*arguments, "--num_workers", 0, *flags)]))


def losses(work_dir):
    """{step: loss} of a log; of a step that was taken twice, both."""
    lines = [json.loads(line) for line in (work_dir / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@pytest.fixture
def undisturbed(faulty_s3, latents, raw_data, pretrain_command, tmp_path):
    """A function that trains on data in the store, raw with `online`, without an outage; it returns the flags."""

    def train(online):
        objects.upload_folder(raw_data if online else latents, faulty_s3.uri("data"))
        flags = {"data": faulty_s3.uri("data"), "max_steps": 14}
        flags |= {"online": True, "rows_per_file": 4} if online else {"online": None, "rows_per_file": None}
        pretrain_command(**flags, output_dir=tmp_path / "undisturbed")
        return flags

    return train


@pytest.mark.parametrize("kind", ["503", *(pytest.param(kind, marks=LONG) for kind in ("reset", "silent"))])
def test_latents_are_those_of_an_undisturbed_run(kind, short, outage_at, faulty_s3, tiny_model, tmp_path, capsys):
    """The store is away while the images of the third file are being read, and then while it is written."""
    raw = make_raw_data(tmp_path / "raw", 23)
    objects.upload_folder(raw, faulty_s3.uri("raw"))
    encode(faulty_s3.uri("raw"), faulty_s3.uri("undisturbed"), tiny_model)
    capsys.readouterr()
    calls = outage_at(parts.Loader, "_finish", 3, kind=kind)
    writes = outage_at(parts, "to_parquet", 4, kind=kind)
    encode(faulty_s3.uri("raw"), faulty_s3.uri("out"), tiny_model)
    output = capsys.readouterr()
    assert len(calls) == len(writes) == 6 and last_json(output.out)["rows"] == 23
    assert "waiting for up to 1 minutes: s3://" in output.err
    one, other = (Folder(faulty_s3.uri(name)) for name in ("undisturbed", "out"))
    names = one.names(".parquet")
    assert len(names) == 7 and other.names(".parquet") == names  # six parts and the index
    assert all(one.read(name) == other.read(name) for name in names)


@pytest.mark.parametrize(
    ("kind", "online"), [("503", False), ("reset", True), pytest.param("silent", False, marks=LONG)]
)
def test_training_goes_on_where_it_was(kind, online, short, outage_at, undisturbed, pretrain_command, tmp_path):
    flags = undisturbed(online)
    calls = outage_at(loop, "accumulate_gradients", 2, kind=kind)
    pretrain_command(**flags)
    assert len(calls) == 14
    assert losses(tmp_path / "out.work") == losses(tmp_path / "undisturbed.work")


@pytest.mark.parametrize("online", [False, pytest.param(True, marks=LONG)])
def test_after_too_long_an_outage_no_step_is_lost(
    online, short, outage_at, faulty_s3, undisturbed, pretrain_command, tmp_path, monkeypatch
):
    flags = undisturbed(online)
    monkeypatch.setattr(outages, "OUTAGE", 1.0)
    calls = outage_at(loop, "accumulate_gradients", 3, seconds=1000)
    with pytest.raises(errors.TryAgain, match="does not answer"):
        pretrain_command(**flags)
    reached = losses(tmp_path / "out.work")[-1][0]
    assert checkpoints.newest_checkpoint(tmp_path / "out.work")[0] == reached >= 2
    faulty_s3.clear()
    calls.clear()
    pretrain_command(**flags)
    assert len(calls) == 14 - reached
    assert losses(tmp_path / "out.work") == losses(tmp_path / "undisturbed.work")


def test_checkpoints_wait_for_their_store(short, outage_at, faulty_s3, latents, pretrain_command):
    flags = {"data": latents, "max_steps": 6, "checkpointing_steps": 2, "output_dir": faulty_s3.uri("out")}
    calls = outage_at(loop, "accumulate_gradients", 4)
    pretrain_command(**flags)
    assert len(calls) == 6 and objects.read_manifest(faulty_s3.uri("out"), deep=True)


def test_a_run_that_checks_its_input_does_not_wait(short, faulty_s3, tiny_model, tmp_path):
    faulty_s3.outage(1000)
    with pytest.raises(errors.TryAgain, match="does not answer"):
        encode(faulty_s3.uri("raw"), tmp_path / "out", tiny_model)


# ---------------------------------------------------------------------------------------------------------------------
# On Ray, with the patience of real runs


@pytest.fixture
def silent_for_a_minute(faulty_s3):
    """A function that lets the store hang for a minute once it has been asked for so many objects below "data"."""
    began = []

    def watch(number):
        while len(faulty_s3.seen("GET", "data/")) < number:
            time.sleep(0.05)
        began.append(time.monotonic())
        faulty_s3.outage(60, "silent")

    def start(number):
        faulty_s3.clear()
        threading.Thread(target=watch, args=(number,), daemon=True).start()
        return began

    return start


@pytest.mark.faults
@pytest.mark.ray
def test_actors_wait_for_a_silent_store(ray_session, silent_for_a_minute, faulty_s3, tiny_model, tmp_path):
    objects.upload_folder(make_raw_data(tmp_path / "raw", 60), faulty_s3.uri("data"))
    source = f"{faulty_s3.uri('data')}&access_key=test&secret_key=test"
    encode(source, tmp_path / "undisturbed", tiny_model, "--num_workers", 1)
    began = silent_for_a_minute(20)
    encode(source, tmp_path / "out", tiny_model, "--num_workers", 1)
    assert time.monotonic() - began[0] > 60
    one, other = (Folder(tmp_path / name) for name in ("undisturbed", "out"))
    assert len(one.names(".parquet")) == 15
    assert all(one.read(name) == other.read(name) for name in one.names(".parquet"))


@pytest.mark.faults
@pytest.mark.ray
@pytest.mark.parametrize("online", [False, True])
def test_workers_wait_for_a_silent_store(
    online, ray_session, silent_for_a_minute, faulty_s3, latents, raw_data, pretrain_command, tmp_path
):
    objects.upload_folder(raw_data if online else latents, faulty_s3.uri("data"))
    flags = {"data": f"{faulty_s3.uri('data')}&access_key=test&secret_key=test", "max_steps": 24, "num_workers": 1}
    flags |= {"online": online or None, "rows_per_file": 4 if online else None, "max_failures": 0}
    pretrain_command(**flags, output_dir=tmp_path / "undisturbed")
    began = silent_for_a_minute(30)
    pretrain_command(**flags)
    assert time.monotonic() - began[0] > 60
    assert losses(tmp_path / "out.work") == losses(tmp_path / "undisturbed.work")
