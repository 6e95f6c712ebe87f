"""run.sh: its steps, its variables, and the whole of it with a tiny model."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, make_photos, tree

from common.stores import Store
from pipelines.model_folder import LORA_FILE


def run_sh(*arguments, timeout=300, **environment):
    return subprocess.run(
        [ROOT / "run.sh", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHON": sys.executable, **{name: str(value) for name, value in environment.items()}},
    )


def read_settings(text):
    """Return {name: value} of what ./run.sh settings printed, as a shell reads it."""
    return dict(word.split("=", 1) for word in shlex.split(text))


def settings(**environment):
    done = run_sh("settings", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return read_settings(done.stdout)


def test_settings_are_all_variables_and_can_be_sourced(tmp_path):
    """Every variable that can be set from outside is printed, and a shell that reads the output gets its value."""
    evil = "'a' \"b\" $(touch x) `touch x`; \\ #"
    text = run_sh("settings", CLASS_NAME=evil, DATA_PREFIX=tmp_path / "a b").stdout
    names = re.findall(r"^ *([A-Z_]+)=\$\{\1:-", (ROOT / "run.sh").read_text(), re.MULTILINE)
    assert len(names) > 20 and {*names, "CLASS_PROMPT", "INSTANCE_PROMPT"} == {
        *re.findall(r"^(\w+)=", text, re.MULTILINE)
    }
    program = 'set -eu; source /dev/stdin; printf "%s|" "$CLASS_NAME" "$INSTANCE_PROMPT" "$TUNED_MODEL_DIR"'
    done = subprocess.run(["bash", "-c", program], input=text, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split("|")[:3] == [evil, f"a 3d emoji of a unqtkn {evil}", f"{tmp_path}/a b/model-tuned"]
    assert not list(tmp_path.iterdir())


TOY = {"LR": "1e-4", "PROMPT_START": "a 3d emoji of a", "GUIDANCE_SCALE": "3", "CLIP_MODEL": "models/emoji-clip"}
REAL = {
    "LR": "",
    "PROMPT_START": "photo of a",
    "GUIDANCE_SCALE": "",
    "NUM_CLASS_IMAGES": "200",
    "CLIP_MODEL": "openai/clip-vit-base-patch32",
    "DINO_MODEL": "facebook/dino-vits16",
}


@pytest.mark.parametrize("name", [None, "models/emoji-64", "./models/../models/emoji-64/", ROOT / "models/emoji-64"])
def test_the_embedded_models_values_belong_to_its_folder_however_it_is_written(name):
    found = settings(**({} if name is None else {"ORIG_MODEL_NAME": name}))
    assert found | TOY == found


def test_other_folders_and_names_get_the_values_for_real_models(tmp_path):
    shutil.copytree(ROOT / "models/emoji-64/scheduler", tmp_path / "models/emoji-64/scheduler")
    for name in (tmp_path / "models/emoji-64", "models/emoji-clip", "models", "someone/model"):
        found = settings(ORIG_MODEL_NAME=name)
        assert found | REAL == found
    assert settings(ORIG_MODEL_NAME="someone/model", LR="1e-5")["LR"] == "1e-5"


@pytest.mark.parametrize(
    ("name", "revision"),
    [
        ("CompVis/stable-diffusion-v1-4", "b95be7d6f134c3a9e62ee616f310733567f069ce"),
        ("CompVis/stable-diffusion-v1-3", "main"),
        ("stable-diffusion-v1-5/stable-diffusion-v1-5", "main"),
        ("models/emoji-64", "main"),
    ],
)
def test_a_commit_is_the_default_for_its_own_model_alone(name, revision):
    assert settings(ORIG_MODEL_NAME=name)["ORIG_MODEL_HASH"] == revision
    assert settings(ORIG_MODEL_NAME=name, ORIG_MODEL_HASH="v2")["ORIG_MODEL_HASH"] == "v2"


@pytest.fixture
def words(tmp_path):
    """A function that runs steps of run.sh with a Python that does nothing; it returns {script: [its words]}."""
    said, fake = tmp_path / "said", tmp_path / "copy" / ".venv" / "bin" / "python"
    fake.parent.mkdir(parents=True)
    shutil.copy(ROOT / "run.sh", tmp_path / "copy")
    program = f"import json, sys; open({str(said)!r}, 'a').write(json.dumps(sys.argv[1:]) + chr(10))"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S -c "{program}" "$@"\n')
    fake.chmod(0o755)

    def run(steps, **environment):
        said.unlink(missing_ok=True)
        environment = {**os.environ, "DATA_PREFIX": str(tmp_path / "data"), **environment}
        for step in steps:
            command = [tmp_path / "copy" / "run.sh", step]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
        return {call[0]: call[1:] for call in map(json.loads, said.read_text().splitlines())}

    return run


def test_the_model_keeps_its_revision(words):
    called = words("2", ORIG_MODEL_NAME="someone/model")["cache_model.py"]
    assert called[called.index("--revision") :] == ["--revision", "main", "--keep_revision"]


def test_a_lora_is_trained_and_drawn_with_its_base(words, tmp_path):
    called = words("456", LORA="16")
    assert called["train.py"][called["train.py"].index("--lora") + 1] == "16"
    for script in ("run_model.py", "evaluate.py"):
        at = called[script].index("--model_dir")
        assert called[script][at + 2 : at + 4] == ["--lora", str(tmp_path / "data" / "model-tuned")]
    assert "--lora" not in words("4")["train.py"]
    assert (settings(LORA="16")["LR"], settings(LORA="16", ORIG_MODEL_NAME="someone/model")["LR"]) == ("2e-3", "")


def test_the_length_is_said_in_pairs_or_where_it_is_asked_for_in_steps(words):
    called = words("4")["train.py"]
    assert called[called.index("--max_train_pairs") + 1] == "800"
    assert not {"--max_train_steps", "--validation_steps"} & set(called)
    called = words("4", MAX_TRAIN_STEPS="7", NUM_TRAIN_PAIRS="9")["train.py"]
    assert called[called.index("--max_train_steps") + 1] == "7" and "--max_train_pairs" not in called
    assert settings()["NUM_TRAIN_PAIRS"] == "600" and settings()["MAX_TRAIN_STEPS"] == ""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", []),
        ("  --use_8bit_adam\n --resolution   256 ", ["--use_8bit_adam", "--resolution", "256"]),
        ("""--validation_prompts 'a b' --x "it's" ''""", ["--validation_prompts", "a b", "--x", "it's", ""]),
        (r"$(touch x) `touch x` *; a\ b", ["$(touch", "x)", "`touch", "x`", "*;", "a b"]),
    ],
)
def test_further_flags_come_last_and_are_words_alone(words, tmp_path, flags, expected):
    drawn = ["--batch_size", "3", "--num_workers", "2", *expected]
    called = words("356", DRAW_FLAGS=flags, BATCH_SIZE="3", NUM_WORKERS="2")
    assert called["evaluate.py"][-len(drawn) :] == called["run_model.py"][-len(drawn) :] == drawn
    drawn = words("3", DRAW_FLAGS=flags)["run_model.py"]
    assert drawn[-2 - len(expected) :] == ["--batch_size", "10", *expected]
    trained = words("4", TRAIN_FLAGS=flags, DRAW_FLAGS="--no_safety_checker", NUM_WORKERS="2")["train.py"]
    assert trained[-2 - len(expected) :] == ["--num_workers", "2", *expected]
    assert not list(tmp_path.rglob("x"))


@pytest.mark.parametrize("name", ["TRAIN_FLAGS", "DRAW_FLAGS"])
def test_a_quote_without_an_end_ends_the_run_before_it_starts(name, tmp_path):
    done = run_sh("1", **{name: "--negative_prompt 'a b"}, DATA_PREFIX=tmp_path / "data")
    assert done.returncode == 2 and done.stderr == (
        f"run.sh: {name}=--negative_prompt 'a b cannot be split into words: close its quotes, on one line\n"
    )
    assert not list(tmp_path.iterdir())


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
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert re.search(r"--output_dir .*images-own has 00.png, which --instance_images_dir .*two lacks", last)
    assert tree(data) == before


def test_an_empty_photo_folder_and_an_unknown_step(tmp_path):
    (tmp_path / "empty").mkdir()
    done = run_sh("1", INSTANCE_DIR=tmp_path / "empty", DATA_PREFIX=tmp_path / "data")
    assert done.returncode == 3 and "contains no photos" in done.stderr
    assert run_sh("7").returncode == 2


@pytest.mark.parametrize(
    ("prefix", "images"),
    [
        ("s3://bucket/rex", "s3://bucket/rex/images-own"),
        ("gs://bucket/rex?anonymous=true&x=?", "gs://bucket/rex/images-own?anonymous=true&x=?"),
        ("what? a folder", "what? a folder/images-own"),
    ],
)
def test_the_options_of_a_uri_stay_at_its_end(prefix, images):
    found = settings(DATA_PREFIX=prefix)
    assert found["IMAGES_OWN_DIR"] == images
    names = {"model-orig", "model-tuned", "images-own", "images-reg", "images-new", "evaluation"}
    assert {images.replace("images-own", name) for name in names} <= set(found.values())
    assert settings(DATA_PREFIX=prefix, IMAGES_OWN_DIR="s3://other/x?y")["IMAGES_OWN_DIR"] == "s3://other/x?y"


def test_the_last_lines_name_uris(words, tmp_path):
    command = [tmp_path / "copy" / "run.sh"]
    environment = {**os.environ, "DATA_PREFIX": "s3://bucket/rex?region=eu-west-1"}
    said = [subprocess.run([*command, step], env=environment, capture_output=True, text=True).stderr for step in "456"]
    assert "are in s3://bucket/rex/model-tuned/validation/strip.png?region=eu-west-1\n" in said[0]
    assert "are in s3://bucket/rex/images-new?region=eu-west-1\n" in said[1]
    assert "report is s3://bucket/rex/evaluation/report.html?region=eu-west-1\n" in said[2]


def test_the_first_steps_in_a_store_twice(tmp_path, tiny_model, s3, node_cache):
    photos = make_photos(tmp_path / "photos", 2)
    variables = {"ORIG_MODEL_NAME": tiny_model, "DATA_PREFIX": s3("rex"), "INSTANCE_DIR": photos, "NUM_WORKERS": 0}
    variables |= {"NUM_CLASS_IMAGES": 2, "NUM_INFERENCE_STEPS": 2}
    for step in "13":
        done = run_sh(step, **variables)
        assert done.returncode == 0, done.stderr
    before = Store(s3("rex")).list()
    names = {name for name in before if "/." not in name}
    assert {"images-own/00.png", "images-own/01.png", "images-own/manifest.json"} <= names
    assert len([name for name in names if name.startswith("images-reg/")]) == 2 + 1
    assert len([name for name in names if name.startswith("model-orig/")]) > 5
    for step in "123":
        assert run_sh(step, **variables).returncode == 0
    assert Store(s3("rex")).list() == before


@pytest.fixture
def whole(tmp_path):
    """Return a function that runs all steps with a tiny model, and returns the finished process."""
    variables = {
        "DATA_PREFIX": tmp_path / "some data",
        "INSTANCE_DIR": make_photos(tmp_path / "photos", 2),
        "CLASS_NAME": "dog",
        "NUM_CLASS_IMAGES": 3,
        "NUM_INFERENCE_STEPS": 2,
        "NUM_EVALUATION_IMAGES": 2,
        "MAX_TRAIN_STEPS": 2,
        "CLIP_MODEL": "models/emoji-clip",
        "DINO_MODEL": "none",
        "PROMPTS_FILE": "prompts/emoji.txt",
        "NUM_WORKERS": 0,
        "OMP_NUM_THREADS": 1,
    }
    return lambda model, **changed: run_sh(timeout=900, **{**variables, "ORIG_MODEL_NAME": model, **changed})


@pytest.mark.ray
def test_all_steps_twice(tmp_path, tiny_model, whole):
    done = whole(tiny_model)
    assert done.returncode == 0, done.stderr
    data = tmp_path / "some data"
    assert {path.name for path in data.iterdir()} == {
        *("images-own", "images-reg", "images-new", "model-tuned", "model-tuned.work", "evaluation"),
    }
    assert len(list((data / "images-new").glob("*unqtkn-dog*.png"))) == 15
    assert (data / "evaluation" / "report.html").is_file() and "report.html" in done.stderr.splitlines()[-1]
    before = tree(data)
    again = whole(tiny_model)
    assert again.returncode == 0, again.stderr
    assert tree(data) == before


@pytest.mark.faults  # a minute each
@pytest.mark.parametrize(("name", "rank"), [("sdxl", ""), ("sdxl", "4"), ("sd3", "4"), ("flux", "4")])
def test_all_steps_with_each_family(name, rank, tmp_path, tiny_families, whole):
    """A LoRA, or all weights; half a minute each."""
    few = {"TRAIN_FLAGS": "--resolution 16 --num_validation_images 1 --validation_steps 2", "NUM_EVALUATION_IMAGES": 1}
    done = whole(tiny_families[name], LORA=rank, DRAW_FLAGS="--height 16 --width 16", **few)
    assert done.returncode == 0, done.stderr
    data = tmp_path / "some data"
    assert (data / "model-tuned" / LORA_FILE).is_file() is bool(rank)
    assert len(list((data / "images-new").glob("*.png"))) == 15
    measures = json.loads((data / "evaluation" / "evaluation.json").read_text())["measures"]
    assert measures["subject_clip"]["tuned"]["value"] != measures["subject_clip"]["base"]["value"]


@pytest.mark.parametrize(
    ("name", "variables", "code", "said"),
    [
        ("sd3", {}, 3, "pass --lora RANK"),
        ("sd", {"TRAIN_FLAGS": "--train_batch_size 0"}, 2, "--train_batch_size"),
        ("sd", {"CLASS_NAME": "unqtkn dog"}, 3, "contains the identifier 'unqtkn'"),
    ],
)
def test_what_training_refuses_is_told_before_class_images_are_drawn(
    name, variables, code, said, tmp_path, tiny_families, whole
):
    done = whole(tiny_families[name], **variables)
    assert done.returncode == code and said in done.stderr.splitlines()[-1]
    assert [path.name for path in (tmp_path / "some data").iterdir()] == ["images-own"]
