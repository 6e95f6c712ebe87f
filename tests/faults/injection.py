"""What injects faults, and what tells afterwards whether a promise was kept: for the tests here and for long.py.

A script runs as a person runs it, `python SCRIPT ...`, in a session of its own; it is forked from a process that has
imported torch, so that a kill costs two seconds and not twelve.
"""

import atexit
import contextlib
import functools
import importlib
import multiprocessing
import os
import pickle
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

from common import folders, leases
from training import checkpoints, logs

ROOT = Path(__file__).resolve().parent.parent.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TRANSFORMERS_VERBOSITY": "error"}

COLD_WITH_SHORT_LEASES = """
import functools, runpy, sys
root, seconds, *sys.argv = sys.argv[1:]
sys.path[0] = root
from common import leases
leases.lease = functools.partial(leases.lease, seconds=float(seconds))
runpy.run_path(sys.argv[0], run_name="__main__")
"""

warm = multiprocessing.get_context("forkserver")


# ---------------------------------------------------------------------------------------------------------------------
# Scripts at work


def _be_script(words, output, cold, largest_file, lease_seconds, variables):
    """What a forked process does: it becomes the script; `cold` starts Python anew."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it puts in the background without it
    os.environ.pop("PYTHONPATH")
    os.environ.update(variables)
    for descriptor, name in enumerate((os.devnull, output / "stdout", output / "stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    if cold:
        os.environ["FAULTS_OUTPUT"] = str(output)
        shorter = [] if lease_seconds is None else ["-c", COLD_WITH_SHORT_LEASES, str(ROOT), str(lease_seconds)]
        os.execv(sys.executable, [sys.executable, *shorter, *words])
    if lease_seconds is not None:
        leases.lease = functools.partial(leases.lease, seconds=lease_seconds)
    multiprocessing.set_start_method(None, force=True)  # as in a process that was not forked
    sys.argv[:] = words
    sys.path.insert(0, str(ROOT))
    importlib.import_module("training.validation").NUM_INFERENCE_STEPS = 2  # sample images are not what is tested
    runpy.run_path(words[0], run_name="__main__")


def _fork(target, *arguments):
    # One number of threads, so that sums are equal to the last bit; a path on which heavy.py is found.
    with mock.patch.dict(os.environ, {**ONE_THREAD, "PYTHONPATH": str(Path(__file__).parent)}):
        warm.set_forkserver_preload(["heavy"])
        forkserver.ensure_running()
    process = warm.Process(target=target, args=arguments)
    process.start()
    return process


@functools.cache
def scratch():
    """Return a folder that goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Script:
    """A script of the project at work; leaving its context kills what is left of it.

    command: [script, *arguments]; cold: without the imports that are ready, as Ray's drivers need it.
    largest_file: bytes, past which the kernel refuses to write, as on a full disk. lease_seconds: those of its locks in
    object stores. variables: of its environment.
    """

    def __init__(self, command, cold=False, largest_file=None, lease_seconds=None, variables=None):
        self.name, *arguments = map(str, command)
        self.output = Path(tempfile.mkdtemp(dir=scratch()))
        words = [str(ROOT / self.name), *arguments]
        self.process = _fork(_be_script, words, self.output, cold, largest_file, lease_seconds, variables or {})
        self.pid = self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for pid in [self.pid, *self.processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.join()

    @property
    def stdout(self):
        return (self.output / "stdout").read_text()

    @property
    def stderr(self):
        return (self.output / "stderr").read_text()

    def processes(self):
        """Return the processes that a cold script started and that run still: those of its session or with its mark.

        Ray's workers and agents overwrite their environment with their title, and with it the mark.
        """
        there = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return [pid for pid in there if _session(pid) == self.pid or _mark(self.output) in _environment(pid)]

    def send(self, number):
        """Send the process a signal, if it runs still."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, seconds=120):
        """Return the exit code, negative for a signal; raise AssertionError where it takes longer."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"{self.name} runs after {seconds} s: {self.stderr}"
        return self.process.exitcode

    def until(self, happened, seconds=60):
        """Wait until `happened()` is true, or the script has ended; return whether it runs still."""
        end = time.monotonic() + seconds
        while not happened() and self.process.is_alive():
            assert time.monotonic() < end, f"{self.name} does not get there in {seconds} s: {self.stderr}"
            time.sleep(0.002)
        return self.process.is_alive()


def _mark(output):
    return f"FAULTS_OUTPUT={output}".encode()


def _environment(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _session(pid):
    """Return the session of a process, None where it has ended."""
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return None
    return int(session) if state != "Z" else None


def finish(command, code=0, seconds=120, **options):
    """Run a script to its end and return it; raise AssertionError where its exit code is another."""
    with Script(command, **options) as script:
        found = script.wait(seconds)
    assert found == code, f"{script.name} ended with {found}: {script.stderr}"
    return script


def told(script):
    """Return the one line with which a script ended that could not go on; raise AssertionError for a traceback."""
    text = script.stderr
    lines = [line for line in text.splitlines() if line.startswith(f"{script.name}: ")]
    assert len(lines) == 1 and text.endswith(f"{lines[0]}\n") and "Traceback" not in text, text
    return lines[0]


# ---------------------------------------------------------------------------------------------------------------------
# What scripts are run on


def _make_inputs(folder):
    sys.path.insert(0, str(ROOT / "tests"))
    from conftest import make_latents, make_photos, make_raw_data
    from tiny_models import RESOLUTION, make_tiny_model

    make_tiny_model(folder / "model")
    make_photos(folder / "photos", 3)
    make_photos(folder / "class", 8, (RESOLUTION, RESOLUTION), seed=1)
    make_raw_data(folder / "raw", 23)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the table of long.py
        make_latents(folder / "latents", folder / "raw", folder / "model")


@functools.cache
def inputs():
    """Return a folder with a tiny `model`, `photos`, `class` images, `raw` data and `latents`; not to be written to."""
    folder = scratch() / "inputs"
    process = _fork(_make_inputs, folder)
    process.join()
    assert process.exitcode == 0
    return folder


def _command(script, **flags):
    """Return [script, *words]; a flag that is False becomes --no-flag, of None nothing, of a list as many."""
    words = [script]
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            words += [str(word) for each in values for word in (f"--{name}", each)]
    return words


def train(output_dir, **changed):
    """Return the command of train.py on the inputs, with some flags changed."""
    flags = {
        "model_dir": inputs() / "model",
        "output_dir": output_dir,
        "instance_images_dir": inputs() / "photos",
        "instance_prompt": "photo of unqtkn dog",
        "class_images_dir": inputs() / "class",
        "class_prompt": "photo of a dog",
        "num_workers": 0,
        "max_train_steps": 4,
        "log_every": 1,
        "keep_checkpoints": True,
    }
    return _command("train.py", **(flags | changed))


def pretrain(output_dir, **changed):
    """Return the command of pretrain.py on the inputs, with some flags changed."""
    flags = {
        "data": inputs() / "latents",
        "model_dir": inputs() / "model",
        "output_dir": output_dir,
        "num_workers": 0,
        "batch_size_per_worker": 4,
        "max_steps": 4,
        "lr": 1e-3,
        "lr_warmup_steps": 0,
        "log_every": 1,
    }
    return _command("pretrain.py", **(flags | changed))


def draw(output_dir, **changed):
    """Return the command of run_model.py on the inputs, with some flags changed."""
    flags = {
        "model_dir": inputs() / "model",
        "output_dir": output_dir,
        "prompts": "a cat",
        "num_samples_per_prompt": 2,
        "num_inference_steps": 2,
        "batch_size": 1,
        "num_workers": 0,
    }
    return _command("run_model.py", **(flags | changed))


def encode(output_dir, **changed):
    """Return the command of preprocess.py on the inputs, with some flags changed."""
    flags = {
        "input": inputs() / "raw",
        "model_dir": inputs() / "model",
        "output_dir": output_dir,
        "rows_per_file": 1,
        "num_workers": 0,
    }
    return _command("preprocess.py", **(flags | changed))


@functools.cache
def undisturbed(command, **flags):
    """Return the output of a command that was left alone, made once; its folder is named `out`."""
    folder = Path(tempfile.mkdtemp(dir=scratch())) / "out"
    finish(command(folder, **flags))
    return folder


def step_of(work_dir):
    """Return the last step in log.jsonl, 0 where there is none."""
    return max((line["step"] for line in folders.read_json_lines(Path(work_dir) / logs.LOG)), default=0)


def count(folder, pattern):
    """Return how many files of a folder have a name."""
    return len(list(Path(folder).glob(pattern)))


# ---------------------------------------------------------------------------------------------------------------------
# Whether a promise was kept


def no_lies(output_dir):
    """Raise AssertionError where a reader takes for whole, in an output or its work folder, what is not.

    Checkpoints, caches and published folders by their manifest and their tensors, images and Parquet files by
    their names. Return how many were looked at.
    """
    output_dir = Path(output_dir)
    work_dir = output_dir.with_name(f"{output_dir.name}.work")
    candidates = [
        output_dir,
        work_dir / "posteriors",
        *(Path(path) for _, path in checkpoints.list_checkpoints(work_dir)),
    ]
    taken = [folder for folder in candidates if folders.read_manifest(folder) is not None]
    for folder in taken:
        assert folders.read_manifest(folder, deep=True) is not None, f"{folder} is taken for whole"
    latest = work_dir / checkpoints.LATEST
    assert not latest.is_symlink() or latest.resolve() in taken, f"{latest} points at {os.readlink(latest)}"
    files = [path for place in (output_dir, work_dir / "parts") for path in place.glob("[!.]*") if path.is_file()]
    files += [path for folder in taken for path in folder.rglob("*.safetensors")]
    for path in files:
        _read_all(path)
    return len(taken) + len(files)


def _read_all(path):
    """Read all that a file holds, as its kind is read."""
    if path.suffix == ".png":
        from PIL import Image

        with Image.open(path) as image:
            image.load()
    elif path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118
                file.get_tensor(name)
    elif path.suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.read_table(path)


def contents(folder):
    """Return {name: sha256} of the files in a folder but its lock."""
    folder = Path(folder)
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != folders.LOCK]
    return {path.relative_to(folder).as_posix(): folders.sha256_file(path) for path in sorted(paths)}


def assert_same(folder, other):
    """Raise AssertionError unless two folders hold the same files, bit for bit, but for their locks."""
    one, two = contents(folder), contents(other)
    different = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    assert one and not different, f"{folder} and {other} differ in {', '.join(different[:5]) or 'nothing: both empty'}"


# ---------------------------------------------------------------------------------------------------------------------
# Damage


def weights_file(folder, part="unet"):
    """Return the file of the weights of a model's part."""
    return next((Path(folder) / part).glob("*.safetensors"))


def flip_byte(path, place=0.5):
    """Change one bit of a file; place: where, as a share of its length."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def cut(path):
    """Leave half of a file."""
    os.truncate(path, path.stat().st_size // 2)


def _change_tensors(path, change):
    from safetensors.numpy import load_file, save_file

    tensors = {name: tensor.copy() for name, tensor in load_file(path).items()}
    name = sorted(tensors)[len(tensors) // 2]
    change(tensors, name)
    save_file(tensors, path, metadata={"format": "pt"})
    return name


def put_nan(path):
    """Make one number of a weight file NaN; return the tensor's name."""
    return _change_tensors(path, lambda tensors, name: tensors[name].reshape(-1).__setitem__(0, float("nan")))


def drop_key(path):
    """Leave a tensor out of a weight file; return its name."""
    return _change_tensors(path, lambda tensors, name: tensors.pop(name))


def change_shape(path):
    """Give a tensor of a weight file one row more; return its name."""
    import numpy as np

    def widen(tensors, name):
        tensors[name] = np.concatenate([tensors[name], tensors[name][:1]])

    return _change_tensors(path, widen)


def add_key(path):
    """Add a tensor that no layer has to a weight file; return its name."""
    import numpy as np

    _change_tensors(path, lambda tensors, name: tensors.update(stranger=np.zeros(1, np.float32)))
    return "stranger"


class _Trap:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def write_pickle(path, marker):
    """Write a file of pickled weights that make the folder `marker` when they are read."""
    path.write_bytes(pickle.dumps({"weight": _Trap(marker)}, protocol=2))
