"""Progress on stderr, the result alone on stdout."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from common import messages


def test_the_result_is_one_json_line(capsys):
    messages.print_result(output_dir="/a b/ü", images=3)
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and json.loads(out) == {"output_dir": "/a b/ü", "images": 3}


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


def test_progress_off_a_terminal_is_a_line_now_and_then(monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr(messages, "time", clock)
    with messages.Progress("train", 100, "steps", initial=20) as progress:
        for _ in range(10):
            clock.now += 3
            progress.update(5, loss=0.25)
        so_far = capsys.readouterr()
        assert so_far.out == ""
        assert so_far.err.splitlines() == [
            "train: 40/100 steps, 1.67 steps/s, loss 0.25",
            "train: 60/100 steps, 1.67 steps/s, loss 0.25",
        ]
    assert capsys.readouterr().err == "train: 70/100 steps, 1.67 steps/s, loss 0.25\n"


def test_progress_ends_with_a_line_when_it_fails(capsys):
    with pytest.raises(ValueError), messages.Progress("draw", 4, "images") as progress:
        progress.update(1)
        raise ValueError
    assert capsys.readouterr().err.startswith("draw: 1/4 images")


# ---------------------------------------------------------------------------------------------------------------------
# Shares of a cluster


def test_stdout_holds_the_last_line_alone(tmp_path):
    """Ray prints there, in a thread of its own, what its processes die of."""
    script = tmp_path / "script.py"
    script.write_text(
        "import argparse\n"
        "from common import cli, messages\n"
        "def main(args):\n"
        "    print('a worker died')\n"
        "    messages.print_result(done=1)\n"
        "    print('another one')\n"
        "cli.run(main, argparse.Namespace(debug=False))\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stdout) == (0, '{"done": 1}\n')
    assert done.stderr == "a worker died\nanother one\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://b/x?access_key=A&secret_key=b/c+d=: refused", "s3://b/x?access_key=***&secret_key=***: refused"),
        ("(gs://b/x?access_token=ya29.a-b_c)", "(gs://b/x?access_token=***)"),
        ("'s3://b?region=r&session_token=A%2Fb', next", "'s3://b?region=r&session_token=***', next"),
        ("s3://b/x?region=r&endpoint_override=http://h:1", "s3://b/x?region=r&endpoint_override=http://h:1"),
        ("secret_key=a of no URI", "secret_key=a of no URI"),
    ],
)
def test_secrets_of_uris_are_not_said(text, expected, capsys):
    messages.say(text)
    messages.print_result(place=text)
    shown = capsys.readouterr()
    assert shown.err == f"{expected}\n" and json.loads(shown.out) == {"place": expected}
