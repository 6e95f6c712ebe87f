"""The same command again: what is finished answers at once, imports nothing heavy and writes nothing."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, tree
from injection import draw, encode, pretrain, train, undisturbed

SECONDS = 2  # of a processor, that a finished command may take: what else runs here does not count
RUN = """
import runpy, sys
del sys.argv[0]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(*sorted({"diffusers", "ray", "torch", "transformers"} & sys.modules.keys()), file=sys.__stdout__)
"""


@pytest.mark.parametrize("command", [train, pretrain, draw, encode])
def test_finished_work_is_left_alone(command):
    done = undisturbed(command)
    before, began = tree(done.parent), os.times()
    again = subprocess.run([sys.executable, "-c", RUN, *command(done)], cwd=ROOT, capture_output=True, text=True)
    ended = os.times()
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-1] == "", "heavy imports"
    assert tree(done.parent) == before
    assert ended.children_user + ended.children_system - began.children_user - began.children_system < SECONDS
