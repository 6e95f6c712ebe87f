"""Ray jobs: train.py with workers, submitted to a head with a dashboard and a token; every folder is in a store."""

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from conftest import ROOT
from nodes import KEYS, train_words, variables

from common import objects, stores

pytestmark = [pytest.mark.ray, pytest.mark.faults]  # two minutes on two cores
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
FOLDERS = {"common", "pipelines", "training", "pretraining", "evaluation", "prompts", "deploy"}


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


class Head:
    """A head of 4 CPUs that asks for a token; `folder` is its --temp-dir, `variables` those of its clients."""

    def __init__(self, folder):
        self.folder = Path(folder)
        port, dashboard, *others = free_ports(4)
        flags = ["--dashboard-agent-listen-port", "--ray-client-server-port"]
        ports = [f"--port={port}", f"--dashboard-port={dashboard}", "--min-worker-port=0", "--max-worker-port=0"]
        ports += [f"{flag}={number}" for flag, number in zip(flags, others, strict=True)]
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        own = {"DREAMBOOTH_CACHE": f"{folder}/cache", "PYTHONUNBUFFERED": "1"}  # so that `wait` sees what it prints
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # a job's `python` is the head's
        start = ["start", "--head", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=4", f"--temp-dir={folder}"]
        self.process = subprocess.Popen(
            [*RAY, *start, *ports, "--disable-usage-stats"],
            env=variables(**KEYS, **token, **own, PATH=path),
            stdout=(self.folder / "stdout").open("w"),
            stderr=subprocess.STDOUT,
        )
        self.url, self.token = f"http://127.0.0.1:{dashboard}", token["RAY_AUTH_TOKEN"]
        self.variables = variables(**token, RAY_API_SERVER_ADDRESS=self.url, PYTHON=sys.executable)

    def ask(self, path):
        """Return the JSON at a path of the dashboard."""
        request = urllib.request.Request(f"{self.url}{path}", headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def submit(self, *command, timeout=400):
        """Run a command that submits a job; return the process, with all its output on stdout, and the job's status."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=ROOT, env=self.variables, timeout=timeout, **pipes)
        job = re.search(r"'((?:raysubmit_|dreambooth-)[\w-]+)' submitted", done.stdout)
        assert job, done.stdout
        return done, self.ask(f"/api/jobs/{job[1]}")["status"]

    def wait(self):
        """Wait until all processes of the node have started and the dashboard answers."""
        end = time.monotonic() + 180
        while True:
            said = (self.folder / "stdout").read_text()
            with contextlib.suppress(OSError):
                if "Ray runtime started" in said:
                    return self.ask("/api/jobs/")
            assert self.process.poll() is None and time.monotonic() < end, said
            time.sleep(0.5)

    def end(self):
        for each in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def head():
    folder = tempfile.mkdtemp(prefix="jobs-")  # the paths of Ray's sockets must be short
    head = Head(folder)
    try:
        head.wait()
        yield head
    finally:
        head.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    "submit",
    [[*RAY, "job", "submit", "--working-dir", ".", "--"], ["bash", "deploy/submit.sh"]],
    ids=["ray-job-submit", "submit.sh"],
)
def test_a_training_as_a_job(head, store, submit):
    """Two workers train two steps; the job says how far it is, and its result is whole in the store."""
    words = train_words(store, "--num_workers", "2", "--max_train_steps", "2", "--log_every", "1")
    done, status = head.submit(*submit, "python", "train.py", *words)
    assert (done.returncode, status) == (0, "SUCCEEDED"), done.stdout
    assert re.search(r"^train: 2/2 steps, .*loss ", done.stdout, re.MULTILINE), done.stdout
    (result,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"output_dir"')]
    assert result == {"output_dir": store("tuned"), "steps": 2, "trained": 2}
    assert objects.read_manifest(store("tuned"), deep=True)["step"] == 2
    left = [name for name in stores.Store(store("tuned.work")).list() if "checkpoint" in name]
    assert not left

    from diffusers import DiffusionPipeline

    DiffusionPipeline.from_pretrained(objects.local_copy(store("tuned")))


def test_the_head_unpacks_the_code_and_nothing_else(head):
    """Of a tree with photos, models, tests and a virtual environment; and it asks for the token."""
    done, status = head.submit(*RAY, "job", "submit", "--working-dir", ".", "--", "ls")
    assert (done.returncode, status) == (0, "SUCCEEDED"), done.stdout
    trees = list(head.folder.glob("session_2*/runtime_resources/working_dir_files/_ray_pkg_*/"))
    assert trees
    for tree in trees:
        files = [path for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert {path.name for path in tree.iterdir() if path.is_dir()} - {"__pycache__"} == FOLDERS
        assert tree / "train.py" in files and sum(path.stat().st_size for path in files) < 2**20
    head.token = "0" * 64
    with pytest.raises(urllib.error.HTTPError, match=r"40[13]"):
        head.ask("/api/jobs/")
