"""run.sh: its steps, its variables, and the whole of it with a tiny model."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, make_photos, tree


def run_sh(*arguments, timeout=300, **environment):
    return subprocess.run(
        [ROOT / "run.sh", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHON": sys.executable, **{name: str(value) for name, value in environment.items()}},
    )


def test_step_1_copies_photos_with_any_name_once(tmp_path):
    photos = make_photos(tmp_path / "my photos", 2)
    (photos / "a b $HOME `x` 'q'.png").write_bytes((photos / "00.png").read_bytes())
    data = tmp_path / "the data"
    assert run_sh("1", INSTANCE_DIR=photos, DATA_PREFIX=data).returncode == 0
    before = tree(data)
    assert {name: content for name, (content, _) in before.items()} == {
        f"images-own/{name}": content for name, (content, _) in tree(photos).items()
    }
    assert run_sh("1", INSTANCE_DIR=photos, DATA_PREFIX=data).returncode == 0
    assert tree(data) == before


def test_photos_of_another_subject_are_not_mixed_in_or_removed(tmp_path):
    data = tmp_path / "data"
    run_sh("1", INSTANCE_DIR=make_photos(tmp_path / "one", 2), DATA_PREFIX=data)
    other = make_photos(tmp_path / "two", 1)
    (other / "00.png").rename(other / "other.png")
    before = tree(data)
    done = run_sh("1", INSTANCE_DIR=other, DATA_PREFIX=data)
    assert done.returncode == 3 and "INSTANCE_DIR" in done.stderr.splitlines()[-1]
    assert tree(data) == before


def test_an_empty_photo_folder_and_an_unknown_step(tmp_path):
    (tmp_path / "empty").mkdir()
    done = run_sh("1", INSTANCE_DIR=tmp_path / "empty", DATA_PREFIX=tmp_path / "data")
    assert done.returncode == 3 and "holds no photos" in done.stderr
    assert run_sh("7").returncode == 2


@pytest.mark.ray
def test_all_steps_twice(tmp_path, tiny_model):
    variables = {
        "ORIG_MODEL_NAME": tiny_model,
        "DATA_PREFIX": tmp_path / "some data",
        "INSTANCE_DIR": make_photos(tmp_path / "photos", 2),
        "CLASS_NAME": "dog",
        "NUM_CLASS_IMAGES": 3,
        "NUM_INFERENCE_STEPS": 2,
        "MAX_TRAIN_STEPS": 2,
        "NUM_WORKERS": 0,
    }
    done = run_sh(**variables)
    assert done.returncode == 0, done.stderr
    data = tmp_path / "some data"
    assert {path.name for path in data.iterdir()} == {
        *("images-own", "images-reg", "images-new", "model-tuned", "model-tuned.work", "evaluation"),
    }
    assert len(list((data / "images-new").glob("*unqtkn-dog*.png"))) == 15
    assert (data / "evaluation" / "report.html").is_file() and "report.html" in done.stderr.splitlines()[-1]
    before = tree(data)
    again = run_sh(**variables)
    assert again.returncode == 0, again.stderr
    assert tree(data) == before
