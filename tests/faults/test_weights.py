"""Damaged weights and latents are refused, the file or tensor named, before anything is made; no pickle is run."""

import itertools
import os
import pickle
import shutil
from functools import partial
from pathlib import Path

import pytest
from injection import (
    Script,
    add_key,
    assert_same,
    change_shape,
    count,
    cut,
    draw,
    drop_key,
    encode,
    finish,
    flip_byte,
    inputs,
    pretrain,
    put_nan,
    told,
    train,
    undisturbed,
    weights_file,
    write_pickle,
)

from common import folders

SCRIPTS = {"train.py": train, "run_model.py": draw, "pretrain.py": pretrain, "preprocess.py": encode}
PARTS = {"preprocess.py": "vae"}  # that a script loads; the others load the UNet
FLAGS = {"pretrain.py": {"init_from_pretrained": True}}


def rest(cases):
    """Return the parameters of tests that do not run unless they are asked for."""
    return [pytest.param(*case, marks=pytest.mark.faults) for case in cases]


@pytest.fixture
def model(tmp_path):
    """A copy of the model, as one that nobody sealed."""
    return shutil.copytree(inputs() / "model", tmp_path / "model")


@pytest.fixture
def sealed(model, tmp_path):
    """A copy of the model with a manifest, as train.py publishes it."""
    folders.publish(model, tmp_path / "sealed")
    return tmp_path / "sealed"


@pytest.fixture
def cached(model, tmp_path):
    """A copy of the model as in the Hub's cache: links to files that are named by their sha256."""
    repo = tmp_path / "models--someone--tiny"
    snapshot = repo / "snapshots" / ("1" * 40)
    (repo / "blobs").mkdir(parents=True)
    for path in [path for path in model.rglob("*") if path.is_file()]:
        link, blob = snapshot / path.relative_to(model), repo / "blobs" / folders.sha256_file(path)
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def refused(script, model, out, code, **flags):
    """Return the one line with which a script refuses a model; nothing has come of it."""
    flags = {"model_dir": model} | FLAGS.get(script, {}) | flags
    line = told(finish(SCRIPTS[script](out, **flags), code=code))
    assert not list(out.parent.glob("out*/**/*.png")) and not list(out.parent.glob("out*/**/*.parquet"))
    assert not (out / folders.MANIFEST).exists() and count(f"{out}.work", "checkpoint-*") == 0
    return line


@pytest.mark.parametrize(
    ("script", "damage"),
    [
        *itertools.product(["train.py"], [cut, put_nan, drop_key, change_shape, add_key]),
        *rest(itertools.product(["run_model.py"], [cut, put_nan, drop_key, change_shape, add_key])),
        *rest(itertools.product(["pretrain.py", "preprocess.py"], [put_nan, drop_key])),
    ],
)
def test_a_model_that_nobody_sealed(script, damage, model, tmp_path):
    path = weights_file(model, PARTS.get(script, "unet"))
    name = damage(path) or path.name
    assert name in refused(script, model, tmp_path / "out", 5)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_flipped_bit_of_a_published_model(script, sealed, tmp_path):
    path = weights_file(sealed, PARTS.get(script, "unet"))
    flip_byte(path)
    assert str(path) in refused(script, sealed, tmp_path / "out", 5)


@pytest.mark.parametrize("script", ["train.py", "run_model.py"])
def test_a_published_model_whose_configuration_was_changed(script, sealed, tmp_path):
    """Its size too, so that the manifest does not fit at first sight."""
    path = sealed / "scheduler" / "scheduler_config.json"
    path.write_text(path.read_text().replace('"beta_end": 0.02', '"beta_end": 0.2'))
    assert path.name in refused(script, sealed, tmp_path / "out", 5)


@pytest.mark.parametrize("script", ["train.py", "run_model.py"])
def test_a_flipped_bit_in_the_hubs_cache(script, cached, tmp_path):
    path = weights_file(cached)
    flip_byte(path)
    assert str(path) in refused(script, cached, tmp_path / "out", 5)


@pytest.mark.parametrize(("damage", "sealed"), [(flip_byte, True), (drop_key, False), (put_nan, False)])
def test_a_checkpoint_to_draw_with(damage, sealed, tmp_path):
    folder = tmp_path / "checkpoint-000002"
    shutil.copytree(inputs() / "model" / "unet", folder / "unet")
    if sealed:
        folders.publish(folder, tmp_path / "sealed")
        folder = tmp_path / "sealed"
    path = weights_file(folder)
    name = damage(path) or str(path)
    assert name in refused("run_model.py", inputs() / "model", tmp_path / "out", 5, checkpoint=folder)


@pytest.mark.faults
def test_a_checkpoint_to_go_on_from(tmp_path):
    """The one before it is gone back to, and the end is the same."""
    flags = {"checkpointing_steps": 2}
    finish(pretrain(tmp_path / "out", **flags))
    flip_byte(weights_file(tmp_path / "out.work" / "checkpoint-000004"))
    again = finish(pretrain(tmp_path / "out", max_steps=6, **flags))
    assert "checkpoint-000004 is damaged" in again.stderr
    assert_same(tmp_path / "out", undisturbed(pretrain, max_steps=6))


@pytest.mark.faults
def test_a_checkpoint_of_other_settings_is_not_gone_on_from(tmp_path):
    """Where the record of the work folder is lost: each checkpoint says itself what it was made with."""
    finish(pretrain(tmp_path / "out"))
    (tmp_path / "out.work" / "run.json").unlink()
    shutil.rmtree(tmp_path / "out")
    with Script(pretrain(tmp_path / "out", lr=1e-4)) as script:
        code = script.wait()
    if code:
        assert code == 3 and "lr was 0.001, now 0.0001" in told(script)
    else:
        assert_same(tmp_path / "out", undisturbed(pretrain, lr=1e-4))


@pytest.mark.parametrize("damage", [cut, Path.unlink, *(partial(flip_byte, place=place) for place in (0.1, 0.2, 0.3))])
def test_latents(damage, tmp_path):
    """A data set of preprocess.py whose manifest does not fit: one of its files is cut, gone or changed."""
    folder = shutil.copytree(inputs() / "latents", tmp_path / "latents")
    path = sorted(folder.glob("part-*.parquet"))[2]
    damage(path)
    assert path.name in refused("pretrain.py", inputs() / "model", tmp_path / "out", 5, data=folder, max_steps=5)


# ---------------------------------------------------------------------------------------------------------------------
# Pickles


def test_the_trap_works(tmp_path):
    write_pickle(tmp_path / "pickle", tmp_path / "marker")
    pickle.loads((tmp_path / "pickle").read_bytes())
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_pickle_instead_of_safetensors(script, model, tmp_path):
    path = weights_file(model, PARTS.get(script, "unet"))
    write_pickle(path.with_suffix(".bin"), tmp_path / "marker")
    path.unlink()
    line = refused(script, model, tmp_path / "out", 3)
    assert "a pickle" in line and path.with_suffix(".bin").name in line
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("script", ["train.py", "run_model.py"])
def test_a_pickle_under_the_name_of_safetensors(script, model, tmp_path):
    path = weights_file(model)
    write_pickle(path, tmp_path / "marker")
    assert str(path) in refused(script, model, tmp_path / "out", 5)
    assert not (tmp_path / "marker").exists()


def test_a_pickle_instead_of_a_checkpoints_safetensors(tmp_path):
    folder = tmp_path / "checkpoint-000002" / "unet"
    shutil.copytree(inputs() / "model" / "unet", folder)
    path = weights_file(folder.parent)
    write_pickle(path.with_suffix(".bin"), tmp_path / "marker")
    path.unlink()
    line = refused("run_model.py", inputs() / "model", tmp_path / "out", 3, checkpoint=folder.parent)
    assert "a pickle" in line
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("script", ["run_model.py", *rest([("pretrain.py",)])])
def test_pickles_beside_what_is_read(script, model, tmp_path):
    """At every level of the folder, under the names that libraries look for."""
    names = ["model.ckpt", "pytorch_model.bin", "diffusion_pytorch_model.bin"]
    names += [f"{part}/{name}" for part in ("unet", "vae") for name in ("diffusion_pytorch_model.bin", "a.pt")]
    names += ["text_encoder/pytorch_model.bin", "tokenizer/added_tokens.pkl", "scheduler/scheduler.pth"]
    for name in names:
        write_pickle(model / name, tmp_path / "marker")
    finish(SCRIPTS[script](tmp_path / "out", **{"model_dir": model, **FLAGS.get(script, {})}))
    assert not (tmp_path / "marker").exists()
