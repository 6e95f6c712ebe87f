"""A disk that is full at byte k: here the kernel refuses to let a file grow past k; long.py fills a small tmpfs."""

import shutil

import pytest
from conftest import tree
from injection import assert_same, contents, draw, encode, finish, no_lies, pretrain, told, train, undisturbed

from common import folders
from training import checkpoints

FLAGS = {"max_train_steps": 12, "checkpointing_steps": 2}


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The output and the work folder of a run of ten steps, which two more are to follow."""
    folder = tmp_path_factory.mktemp("half")
    finish(train(folder / "out", **(FLAGS | {"max_train_steps": 10})))
    return folder


@pytest.fixture(scope="module")
def sizes(half):
    """The bytes of each file of a checkpoint, in the order in which they are written."""
    manifest = folders.read_manifest(half / "out.work" / "checkpoint-000010")
    return {name: fact["size"] for name, fact in manifest["files"].items()}


def what_counts(work_dir):
    """The checkpoints and the cache of a work folder, and what else lies there but logs."""
    return {name: content for name, (content, _) in tree(work_dir).items() if not name.startswith(("tensorboard", "."))}


@pytest.mark.parametrize(
    ("name", "byte"),
    [
        ("text_encoder/model.safetensors", 20_000),
        ("text_encoder/model.safetensors", -1),
        ("unet/diffusion_pytorch_model.safetensors", 200_000),
        ("unet/diffusion_pytorch_model.safetensors", -1),
        ("optimizer.safetensors", 500_000),
        ("optimizer.safetensors", -1),
    ],
)
def test_a_checkpoint_that_does_not_fit(half, sizes, tmp_path, name, byte):
    shutil.copytree(half, tmp_path, dirs_exist_ok=True, symlinks=True)
    before = what_counts(tmp_path / "out.work")
    full = finish(train(tmp_path / "out", **FLAGS), code=4, largest_file=byte % sizes[name])
    assert "disk full" in told(full)
    after = what_counts(tmp_path / "out.work")
    assert [path for path in after if before.get(path) != after[path]] == ["log.jsonl", "run.json"]  # the new length
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.rglob(".*.staging"))
    assert checkpoints.newest_checkpoint(tmp_path / "out.work")[0] == 10
    assert_same(tmp_path / "out", half / "out")


@pytest.mark.faults
def test_with_room_again_it_ends_as_if_there_had_always_been(half, tmp_path):
    shutil.copytree(half, tmp_path, dirs_exist_ok=True, symlinks=True)
    finish(train(tmp_path / "out", **FLAGS), code=4, largest_file=100_000)
    finish(train(tmp_path / "out", **FLAGS))
    assert_same(tmp_path / "out", undisturbed(train, **FLAGS))


def test_a_log_that_does_not_fit(half, tmp_path):
    """It is written anew as a run goes on: what it said of the first steps must not be lost."""
    shutil.copytree(half, tmp_path, dirs_exist_ok=True, symlinks=True)
    log, record = tmp_path / "out.work" / "log.jsonl", tmp_path / "out.work" / "run.json"
    before = log.read_bytes()
    assert record.stat().st_size + 100 < len(before)
    full = finish(train(tmp_path / "out", **FLAGS), code=4, largest_file=record.stat().st_size + 100)
    assert "disk full" in told(full)
    assert log.read_bytes().startswith(before)


def test_a_model_that_does_not_fit(tmp_path):
    full = finish(pretrain(tmp_path / "out"), code=4, largest_file=1_000)
    assert "disk full" in told(full)
    assert not (tmp_path / "out").exists() and not checkpoints.list_checkpoints(tmp_path / "out.work")


def test_images_before_the_disk_was_full_are_whole(tmp_path):
    """The second prompt's images are larger: they hold their prompt."""
    flags = {"prompts": ["a cat", "a dog " * 500]}
    full = finish(draw(tmp_path / "out", **flags), code=4, largest_file=2_500)
    assert "disk full" in told(full)
    names = [name for name in contents(tmp_path / "out") if name.endswith(".png")]
    assert len(names) == 2 and all(name.startswith("a-cat") for name in names)
    assert no_lies(tmp_path / "out") == 3  # metadata.jsonl too
    assert not list(tmp_path.rglob("*.tmp"))
    finish(draw(tmp_path / "out", **flags))
    finish(draw(tmp_path / "whole", **flags))
    assert_same(tmp_path / "out", tmp_path / "whole")


@pytest.mark.faults
def test_parts_before_the_disk_was_full_are_whole(tmp_path):
    """All but the largest fit."""
    largest = max(path.stat().st_size for path in undisturbed(encode).glob("*.parquet"))
    full = finish(encode(tmp_path / "out"), code=4, largest_file=largest - 1)
    assert "disk full" in told(full)
    assert not (tmp_path / "out").exists() and not list(tmp_path.rglob("*.tmp"))
    no_lies(tmp_path / "out")
    finish(encode(tmp_path / "out"))
    assert_same(tmp_path / "out", undisturbed(encode))
