"""Prompts, tokens and folders with odd names: nothing outside the output is touched, and all can be read again."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT, make_photos, tree
from injection import Script, assert_same, contents, draw, encode, finish, inputs, pretrain, told, train, undisturbed

from pipelines.image_folder import image_name

NAME = re.compile(r"[a-z0-9][a-z0-9-]*-[0-9a-f]{8}-\d{5}\.png")
ODD = [
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    'a cat\'; touch x; "y" `touch z` $(touch z)',
    "a cat, " * 700,  # some 5,000 characters
    "\u202ea cat\u202c \u200f",
    "a \x00 cat",
    "a \x1b[31mcat",
    "犬 😀",
    "-rf",
    "CON",
    "%s {0} {prompt}",
]


def outside(tmp_path):
    """What lies beside the output folder."""
    return sorted(path.name for path in tmp_path.iterdir() if path.name != "out")


def test_prompts_of_a_file(tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(ODD))
    command = draw(tmp_path / "out", prompts=None, prompts_file=tmp_path / "prompts.txt", num_samples_per_prompt=1)
    finish(command)
    assert outside(tmp_path) == ["prompts.txt"]
    names = [name for name in contents(tmp_path / "out") if name != "metadata.jsonl"]
    assert len(names) == len(ODD) and all(NAME.fullmatch(name) for name in names)
    lines = (tmp_path / "out" / "metadata.jsonl").read_text().splitlines()
    assert {record["text"]: record["file_name"] for record in map(json.loads, lines)} == {
        prompt.strip(): image_name(prompt.strip(), 0) for prompt in ODD
    }
    before = tree(tmp_path)
    again = finish(command)
    assert json.loads(again.stdout)["drawn"] == 0 and tree(tmp_path) == before


def test_a_prompt_with_line_breaks(tmp_path):
    prompt = "a cat\n\r\n../../x\n--\n# y"
    finish(draw(tmp_path / "out", prompts=prompt, num_samples_per_prompt=1))
    assert set(contents(tmp_path / "out")) == {image_name(prompt, 0), "metadata.jsonl"} and not outside(tmp_path)
    record = json.loads((tmp_path / "out" / "metadata.jsonl").read_text())
    assert record["text"] == prompt


@pytest.mark.parametrize(
    ("command", "flag"),
    [(draw, "prompts"), (train, "instance_prompt"), (train, "validation_prompts"), (pretrain, "sample_prompts")],
)
def test_a_prompt_that_is_no_text(tmp_path, command, flag):
    """Bytes that are not UTF-8, as a terminal of another encoding sends them."""
    prompt = os.fsdecode(b"photo of unqtkn caf\xe9")
    assert f"--{flag}" in told(finish(command(tmp_path / "out", **{flag: prompt}), code=3))
    assert not list(tmp_path.iterdir())


def test_what_is_cut_of_a_prompt_is_said(tmp_path):
    """The tiny model reads 24 tokens, a letter each."""
    done = finish(draw(tmp_path / "out", prompts="a cat on a mat near a striped zebra", num_samples_per_prompt=1))
    warning = next(line for line in done.stderr.splitlines() if line.startswith("warning: "))
    assert "24 tokens" in warning and "zebra" in warning.rpartition(": ")[2]


@pytest.mark.parametrize(
    "prompt",
    [
        "photo of unqtkn 'dog' \"x\" : - # {a} [b] | > & * ! % @ `c`\n---\nlicense: mit\n# evil",
        pytest.param("photo of unqtkn ../../x \u202edog\u202c 犬 😀 " + "very " * 1000, marks=pytest.mark.faults),
    ],
    ids=["line-breaks", "unicode"],
)
def test_the_model_card_of_an_odd_prompt(tmp_path, prompt):
    flags = {"instance_prompt": prompt, "class_prompt": prompt.replace("unqtkn ", "").replace("unqtkn", "")}
    finish(train(tmp_path / "out", unique_token="unqtkn", max_train_steps=1, **flags))
    assert outside(tmp_path) == ["out.work"]
    card = (tmp_path / "out" / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    facts = yaml.safe_load(front)
    assert set(facts) == {"instance_prompt", "library_name", "license", "pipeline_tag", "tags"}
    assert facts["instance_prompt"] == prompt and facts["license"] == "other"
    lines = body.strip().splitlines()
    assert lines[0].startswith("# ") and not lines[1]
    assert sum(line.startswith("# ") for line in lines) == 1 and "---" not in lines


@pytest.mark.parametrize(
    ("command", "flags"),
    [(draw, {}), (encode, {}), pytest.param(train, {"max_train_steps": 1}, marks=pytest.mark.faults)],
)
def test_an_output_with_spaces_behind_a_link(tmp_path, command, flags):
    """The link stays, what it points at is filled; what lies around both is as it was."""
    real, link = tmp_path / "a 'real' folder $HOME" / "*", tmp_path / "a link ; touch x"
    real.mkdir(parents=True)
    (real.parent / "mine.txt").write_text("mine")
    link.symlink_to(real)
    before = tree(inputs())
    finish(command(link, **flags))
    assert tree(inputs()) == before
    assert link.is_symlink() and link.resolve() == real
    assert_same(real, undisturbed(command, **flags))
    assert (real.parent / "mine.txt").read_text() == "mine"
    assert {path.name for path in real.parent.iterdir()} - {"*.work"} == {"mine.txt", "*"}
    assert set(outside(tmp_path)) - {f"{link.name}.work"} == {real.parent.name, link.name}


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (draw, ["out/.lock"]),
        (draw, ["out/metadata.jsonl", f"out/{image_name('a cat', 0)}"]),
        (train, [f"out.work/{name}" for name in ("log.jsonl", "run.json", "stop", "latest", ".latest.tmp")]),
    ],
)
def test_files_of_others_behind_links_are_not_written(command, names, tmp_path):
    """Names that scripts write to, as links to a file of someone else."""
    (tmp_path / "mine.txt").write_text("mine")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(tmp_path / "mine.txt")
    with Script(command(tmp_path / "out")) as script:
        script.wait()  # refused, or done
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_run_sh_takes_names_as_they_are(tmp_path):
    """Quotes, substitutions and blanks in every variable reach the scripts as one word each, and run nothing."""
    said = tmp_path / "said"
    fake = tmp_path / "copy" / ".venv" / "bin" / "python"
    fake.parent.mkdir(parents=True)
    fake.write_text(
        f"#!{sys.executable}\nimport json, sys\nopen({str(said)!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
    )
    fake.chmod(0o755)
    shutil.copy(ROOT / "run.sh", tmp_path / "copy")
    evil = "'a' \"b\" $(touch x) `touch x` ; touch x # ../.. *\n-rf"
    photos = make_photos(tmp_path / evil.replace("/", "_"), 1)
    variables = {
        "CLASS_NAME": evil,
        "UNIQUE_TOKEN": evil,
        "PROMPT_START": evil,
        "INSTANCE_DIR": photos,
        "DATA_PREFIX": tmp_path / "some $(touch x) data",
        "ORIG_MODEL_NAME": evil,
    }
    for step in "12345":
        done = subprocess.run(
            [tmp_path / "copy" / "run.sh", step],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        )
        assert done.returncode == 0, done.stderr
    calls = [json.loads(line) for line in said.read_text().splitlines()]
    assert [call[0] for call in calls].count("run_model.py") == 2
    trained = [word for word in next(call for call in calls if call[0] == "train.py") if "random_flip" not in word]
    flags = dict(zip(trained[1::2], trained[2::2], strict=True))
    assert flags["--instance_prompt"] == f"{evil} {evil} {evil}" and flags["--class_prompt"] == f"{evil} {evil}"
    assert flags["--unique_token"] == evil
    assert flags["--output_dir"] == f"{tmp_path}/some $(touch x) data/model-tuned"
    assert not list(tmp_path.rglob("x")) and not (ROOT / "x").exists()
    assert outside(tmp_path) == sorted([photos.name, "copy", "said"])
