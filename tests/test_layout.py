"""The layout is a check: which way imports point, and what a newcomer finds where."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGES = ("common", "pipelines", "training", "pretraining", "evaluation")
TACH = Path(sys.executable).with_name("tach")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the code alone."""
    folder = tmp_path_factory.mktemp("layout")
    for path in (ROOT / "pyproject.toml", *ROOT.glob("*.py")):
        shutil.copy(path, folder)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def check(tree):
    done = subprocess.run([TACH, "check"], cwd=tree, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_imports_point_down(tree):
    code, said = check(tree)
    assert code == 0, said


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("common/images.py", "from utils import row_rng"),
        ("common/errors.py", "from pipelines.configs import read_index"),
        ("utils.py", "from pipelines import loading"),
        ("pipelines/drawing.py", "import dataset"),
        ("pipelines/tokens.py", "from training.loop import train_steps"),
        ("dataset.py", "from training import checkpoints"),
        ("training/loop.py", "from pretraining import streams"),
        ("evaluation/report.py", "from training import logs"),
        ("training/driver.py", "import train"),
        ("pretrain.py", "import train"),
    ],
)
def test_an_import_against_the_direction_fails(tree, place, line):
    """At the top of a module or inside a function."""
    path = tree / place
    text = path.read_text()
    for added in (f"{text}\n{line}\n", f"{text}\n\ndef later():\n    {line}\n"):
        path.write_text(added)
        code, said = check(tree)
        assert code == 1 and place in said, said
    path.write_text(text)


def test_each_package_says_what_it_holds():
    """The docstring of a package names its modules, all of them."""
    for package in PACKAGES:
        text = (ROOT / package / "__init__.py").read_text()
        assert text.startswith('"""') and text.count('"""') == 2
        for path in (ROOT / package).glob("*.py"):
            assert path.name == "__init__.py" or path.stem in text, path


def test_the_top_level_holds_what_a_person_runs():
    scripts = {"copy_photos", "cache_model", "run_model", "train", "preprocess", "pretrain", "evaluate", "push_model"}
    scripts |= {"export", "import_model"}
    assert {path.stem for path in ROOT.glob("*.py")} == scripts | {"dataset", "utils"}
