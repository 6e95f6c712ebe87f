"""drawing.py with folders in an object store: what is drawn again, who may write, and what each fault says."""

import json
import shutil
import subprocess
import sys
import time

import pytest
from conftest import ROOT, last_json

import run_model
from common import errors, leases, objects, targets
from common.storage import join
from common.stores import Store
from pipelines.drawing import ImageDrawer
from pipelines.image_folder import image_name

pytestmark = pytest.mark.usefixtures("one_thread", "node_cache")

RECORD = {"text": "a cat", "index": 0, "base_seed": 0, "sampler": "model", "num_inference_steps": 2}
RECORD |= {"guidance_scale": 7.5, "negative_prompt": "", "height": None, "width": None}
NAMES = [image_name("a cat", index) for index in range(4)]


@pytest.fixture
def words(tiny_model):
    """A function that returns a command line for four images."""

    def words(output_dir, *flags, model_dir=tiny_model):
        given = ["--model_dir", model_dir, "--output_dir", output_dir, "--prompts", "a cat"]
        return [str(word) for word in (*given, "--num_inference_steps", 2, "--num_workers", 0, *flags)]

    return words


@pytest.fixture
def draw(words, capsys):
    """A function that runs run_model.py in this process and returns its JSON."""

    def draw(output_dir, *flags, **options):
        run_model.main(run_model.parse_args(words(output_dir, *flags, **options)))
        return last_json(capsys.readouterr().out)

    return draw


def objects_of(uri):
    """Return {name: (tag, time)} of what is not hidden."""
    return {name: (each.tag, each.modified) for name, each in Store(uri).list().items() if name[0] != "."}


def contents_of(uri):
    return {name: Store(uri).read(name) for name in objects_of(uri)}


def test_a_store_gets_the_bytes_that_a_disk_gets(draw, drawn, s3, tiny_model, tmp_path):
    """From a model and a checkpoint in a store, too; the second time nothing is drawn or written."""
    checkpoint = shutil.copytree(tiny_model / "unet", tmp_path / "checkpoint" / "unet").parent
    draw(tmp_path / "out", "--checkpoint", checkpoint)
    objects.publish(tiny_model, s3("model"))
    objects.upload_folder(checkpoint, s3("checkpoint"))
    flags = ("--checkpoint", s3("checkpoint"))
    result = draw(s3("images/out"), *flags, model_dir=s3("model"))
    assert result == {"output_dir": s3("images/out"), "drawn": 4, "images": 4}
    on_disk = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name[0] != "."}
    assert contents_of(s3("images/out")) == on_disk and on_disk.keys() == {*NAMES, "metadata.jsonl"}

    before = Store(s3("images")).list()
    assert draw(s3("images/out"), *flags, model_dir=s3("model"))["drawn"] == 0
    assert Store(s3("images")).list() == before
    assert len(drawn) == 2


def test_a_fault_leaves_images_and_their_list_and_the_same_command_continues(draw, drawn, s3):
    drawn.fail_at = 1
    with pytest.raises(OSError):
        draw(s3("out"), "--batch_size", 3)
    assert objects_of(s3("out")).keys() == {*NAMES[:3], "metadata.jsonl"}
    before, drawn.fail_at = objects_of(s3("out")), None
    assert draw(s3("out"), "--batch_size", 3)["drawn"] == 1
    after = objects_of(s3("out"))
    assert after.keys() == {*NAMES, "metadata.jsonl"} and all(after[name] == before[name] for name in NAMES[:3])


def test_a_killed_run_is_continued_after_its_lease(draw, drawn, words, s3, monkeypatch):
    """Images that no list names have their record inside."""
    command = [sys.executable, ROOT / "run_model.py", *words(s3("out"), "--batch_size", 1)]
    command += ["--num_samples_per_prompt", "40"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(objects_of(s3("out"))) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    assert process.wait() == -9
    before = objects_of(s3("out"))
    assert 2 <= len(before) < 40 and "metadata.jsonl" not in before
    with pytest.raises(errors.TryAgain, match=r"out.* is in use by .* its lock ends in at most 60 s"):
        draw(s3("out"), "--num_samples_per_prompt", 40)
    assert drawn == []
    monkeypatch.setattr(leases, "_expired", lambda *facts: True)
    assert draw(s3("out"), "--num_samples_per_prompt", 40)["drawn"] == 40 - len(before)
    after = objects_of(s3("out"))
    assert len(after) == 41 and all(after[name] == before[name] for name in before)


def test_two_drivers_exclude_each_other(draw, drawn, s3):
    with targets.lock(s3("out")), pytest.raises(errors.TryAgain, match="is in use by process") as error:
        draw(s3("out"))
    assert error.value.exit_code == 75 and drawn == [] and not objects_of(s3("out"))
    assert draw(s3("out"))["drawn"] == 4


def test_a_worker_of_a_run_that_lost_its_lock_writes_nothing(drawn, s3, tiny_model):
    with targets.lock(s3("out")) as first:
        pass
    model = {"model_dir": str(tiny_model), "checkpoint": None, "mixed_precision": "no", "safety_checker": True}
    item = {"model": model, "paths": [join(s3("out"), NAMES[0])], "records": [RECORD]}
    with targets.lock(s3("out")) as second:
        with pytest.raises(errors.TryAgain, match="now belongs to another run"):
            ImageDrawer(held={s3("out"): first})(item)
        assert not objects_of(s3("out"))
        ImageDrawer(held={s3("out"): second})(item)
    assert objects_of(s3("out")).keys() == {NAMES[0]}


def test_a_damaged_object_is_drawn_again(draw, drawn, s3):
    draw(s3("out"))
    before = contents_of(s3("out"))
    Store(s3("out")).write(NAMES[1], before[NAMES[1]][:-90])
    Store(s3("out")).delete(NAMES[3])
    drawn.clear()
    assert draw(s3("out"))["drawn"] == 2
    assert contents_of(s3("out")) == before and [len(seeds) for _, seeds in drawn] == [2]


def test_images_of_other_settings_are_refused_or_replaced(draw, drawn, s3):
    draw(s3("out"))
    before = objects_of(s3("out"))
    with pytest.raises(errors.BadInput, match=r"--output_dir s3://.*/out.*: a-cat.*base_seed was 0, now 1"):
        draw(s3("out"), "--seed", 1)
    assert objects_of(s3("out")) == before
    assert draw(s3("out"), "--seed", 1, "--overwrite")["drawn"] == 4
    assert {json.loads(line)["base_seed"] for line in contents_of(s3("out"))["metadata.jsonl"].splitlines()} == {1}


def test_what_another_run_drew_before_the_lock_was_taken_is_seen(draw, drawn, s3, monkeypatch):
    """The folder is looked at before the lock, so that a finished one is not written to, and again if it changed."""
    lock = targets.lock

    def late(location):
        monkeypatch.setattr("pipelines.drawing.lock", lock)
        draw(s3("out"), "--seed", 1)
        return lock(location)

    monkeypatch.setattr("pipelines.drawing.lock", late)
    with pytest.raises(errors.BadInput, match="base_seed was 1, now 0"):
        draw(s3("out"))
    assert len(drawn) == 1


def test_a_model_that_is_replaced_meanwhile_is_not_mixed(draw, drawn, s3, tiny_model, tiny_v_model, monkeypatch):
    objects.publish(tiny_model, s3("model"))
    drawer = ImageDrawer._load

    def load(self, model):
        objects.publish(tiny_v_model, s3("model"))
        drawer(self, model)

    monkeypatch.setattr(ImageDrawer, "_load", load)
    with pytest.raises(errors.TryAgain, match=r"--model_dir s3://.*/model\?.* was replaced while this run uses it"):
        draw(s3("out"), model_dir=s3("model"))
    assert drawn == [] and not [name for name in objects_of(s3("out")) if name.endswith(".png")]


def test_a_fault_of_a_model_names_its_uri(draw, drawn, s3, tiny_model):
    with pytest.raises(errors.BadInput, match=r"s3://.*/model\?.* does not exist or is empty"):
        draw(s3("out"), model_dir=s3("model"))
    objects.upload_folder(tiny_model, s3("model"))
    Store(s3("model")).delete("unet/config.json")
    named = r"s3://[a-z0-9-]+/model/unet\?endpoint_override=\S+ has no config.json"
    with pytest.raises(errors.BadInput, match=named), objects.uris_in_errors():  # as cli.run has it
        draw(s3("out"), model_dir=s3("model"))
    assert not Store(s3("out")).list()


def test_a_folder_that_a_node_lacks_is_one_line(drawn, tmp_path, tiny_model):
    remedy = "use a folder that all nodes share, or a URI"
    model = {"model_dir": str(tmp_path / "none"), "checkpoint": None, "mixed_precision": "no", "safety_checker": True}
    item = {"paths": [str(tmp_path / "out" / "x.png")], "records": [RECORD], "model": model}
    with pytest.raises(errors.BadInput, match=rf"^--model_dir .*none does not exist on node \S+: {remedy}$"):
        ImageDrawer()(item)
    item["model"] = {**model, "model_dir": str(tiny_model)}
    held = {str(tmp_path / "out"): targets.Held(str(tmp_path / "out"), "process 1")}
    with pytest.raises(errors.BadInput, match=rf"out/.lock does not exist on node \S+: {remedy}$"):
        ImageDrawer(held=held)(item)
