"""A tiny Stable Diffusion pipeline of random weights, photos, and one Ray for the session."""

import contextlib
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_hub import running_hub
from PIL import Image
from tiny_models import (
    RESOLUTION,
    make_tiny_flux,
    make_tiny_model,
    make_tiny_sd2,
    make_tiny_sd3,
    make_tiny_sdxl,
    make_whole_vae,
)

from common import cache, cli, errors, folders, messages, objects

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # start_ray sets it too, but tests import ray before
ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py") if "\ndef parse_args(" in path.read_text())


def make_photos(folder, count, size=(24, 20), seed=0):
    """Save `count` PNG photos of noise, 00.png ..."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for index in range(count):
        pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:02d}.png")
    return folder


def make_raw_data(folder, count, num_captions=5):
    """Save `count` PNG photos of noise and a metadata.jsonl of their captions."""
    make_photos(folder, count)
    lines = [{"file_name": f"{i:02d}.png", "text": f"picture {i % num_captions}"} for i in range(count)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def make_task(work_dir, **values):
    """Return a training.task.Task of three steps in `work_dir`; values: fields of its topics, by name."""
    from training import task

    topics = {
        "output": {"model_dir": "", "output_dir": "", "work_dir": str(work_dir), "settings": {}, "owner": ""},
        "schedule": {
            "max_train_steps": 3,
            "gradient_accumulation_steps": 1,
            "log_every": 1,
            "validation_steps": 1,
            "checkpointing_steps": 1,
            "checkpoints_total_limit": 9,
            "seed": 0,
        },
        "optimization": {
            "lr": 0.1,
            "lr_scheduler": "constant",
            "lr_warmup_steps": 0,
            "adam_weight_decay": 0.0,
            "max_grad_norm": 1.0,
        },
        "compute": {"num_workers": 0, "mixed_precision": "no", "gradient_checkpointing": False, "min_workers": None},
        "images": {"guidance_scale": 1.0, "resolution": RESOLUTION, "seed": 0},
    }
    for topic in topics.values():
        topic.update({name: values.pop(name) for name in list(values) if name in topic})
    assert not values, f"no topic has {values}"
    return task.from_plain(task.Task, topics)


def make_latents(folder, raw_data, model_dir, **flags):
    """Encode raw data with preprocess.py, five rows a file."""
    import preprocess

    flags = {"input": raw_data, "model_dir": model_dir, "num_workers": 0, "rows_per_file": 5, **flags}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    preprocess.main(preprocess.parse_args([*words, "--output_dir", str(folder)]))
    return folder


def noise_png(seed=0, width=28, height=20):
    """Return the bytes of a PNG of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def run_script(script, *arguments, timeout=240, **environment):
    """Run a script of the project as a person does; return the finished process with its text."""
    return subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )


def last_json(text):
    """Return the JSON object on the last line of a script's stdout."""
    return json.loads(text.strip().splitlines()[-1])


def tree(folder):
    """Return {relative path: (bytes, modification time)} of a folder, to show that nothing was written."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def one_thread():
    """Threads that wait for each other make the tiny models ten times slower on a busy machine."""
    import torch

    earlier = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(earlier)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_families(tiny_model, tmp_path_factory):
    """{name: folder} of a tiny model of each family."""
    folder, makers = tmp_path_factory.mktemp("families"), {"sdxl": make_tiny_sdxl, "sd3": make_tiny_sd3}
    others = {name: make(folder / name) for name, make in (makers | {"flux": make_tiny_flux}).items()}
    return {"sd": tiny_model, **others}


@pytest.fixture(scope="session")
def single_file_families(tiny_families, tmp_path_factory):
    """{name: folder} of tiny models that have a single file, with attention in the VAE: SD 1, SD 2 and SDXL."""
    folder = tmp_path_factory.mktemp("single-file-families")
    made = {name: shutil.copytree(tiny_families[name], folder / name) for name in ("sd", "sdxl")}
    made["sd2"] = make_tiny_sd2(shutil.copytree(tiny_families["sd"], folder / "sd2"))
    return {name: make_whole_vae(place) for name, place in made.items()}


@pytest.fixture(scope="session")
def tiny_v_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-v", "v_prediction")


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos") / "instance", 3)


@pytest.fixture(scope="session")
def class_images(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos") / "class", 8, (RESOLUTION, RESOLUTION), seed=1)


@pytest.fixture(scope="session")
def raw_data(tmp_path_factory):
    return make_raw_data(tmp_path_factory.mktemp("raw") / "photos", 23)


@pytest.fixture(scope="session")
def latents(tmp_path_factory, raw_data, tiny_model):
    """The raw data as latents: 23 rows in five files."""
    return make_latents(tmp_path_factory.mktemp("latents") / "set", raw_data, tiny_model)


@pytest.fixture
def pretrain_command(tiny_model, latents, tmp_path):
    """Return a function that runs pretrain.py here with some flags changed."""

    def arguments(**flags):
        flags = {
            "data": latents,
            "model_dir": tiny_model,
            "output_dir": tmp_path / "out",
            "num_workers": 0,
            "batch_size_per_worker": 4,
            "max_steps": 4,
            "lr": 1e-3,
            "lr_warmup_steps": 0,
            "shuffle_window": 2,
            "log_every": 1,
            **flags,
        }
        words = []
        for name, value in flags.items():
            if value is True:
                words.append(f"--{name}")
            elif value is not None:
                words += [f"--{name}", str(value)]
        return words

    def run(**flags):
        import pretrain

        pretrain.main(pretrain.parse_args(arguments(**flags)))

    run.arguments = arguments
    run.output_dir, run.work_dir = tmp_path / "out", tmp_path / "out.work"
    return run


@pytest.fixture
def refused(command, monkeypatch):
    """Return a function that runs the `command` of a module, and returns the line of its error.

    It fails unless the command does, before a model is loaded and without a result.
    """

    def loaded(*arguments, **options):
        raise AssertionError("a model was loaded")

    def refuse(**flags):
        with monkeypatch.context() as patch, pytest.raises(errors.ToolError) as caught:
            patch.setattr("pipelines.loading.load_models", loaded)
            patch.setattr("pretrain.load_unet", loaded)
            command(**flags)
        code, line = errors.describe_error(caught.value)
        assert code == 3 and "\n" not in line
        assert not command.output_dir.exists() or folders.read_manifest(command.output_dir)
        return line

    return refuse


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A running hub without repositories, and nobody's token."""
    with running_hub(monkeypatch, tmp_path) as hub:
        yield hub


@pytest.fixture
def power_cut(monkeypatch):
    """Return a context in which a training in this process ends with an error after three steps."""
    from training import loop

    real = loop.accumulate_gradients

    def crash(run, step, *rest):
        if step == 3:
            raise RuntimeError("power cut")
        return real(run, step, *rest)

    @contextlib.contextmanager
    def cut():
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
            patch.setattr(loop, "accumulate_gradients", crash)
            yield

    return cut


@pytest.fixture
def drawn(monkeypatch):
    """Replace the pipeline by noise that depends on prompt and seed; give the list of (prompts, seeds) that were drawn.

    `drawn.flag` says which seeds the safety checker flags, `drawn.fail_at` at which call the drawing fails.
    """
    from pipelines import loading

    class Calls(list):
        flag = staticmethod(lambda seed: False)
        fail_at = None

    class Pipeline:
        def to(self, device):
            return self

    calls = Calls()

    def draw_images(pipeline, prompts, seeds, **sampler):
        if len(calls) == calls.fail_at:
            raise OSError(28, "No space left on device", "x.png")
        calls.append((list(prompts), list(seeds)))
        images = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            rng = np.random.default_rng([seed, zlib.crc32(json.dumps([prompt, sampler], sort_keys=True).encode())])
            images.append(Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)))
        return images, [calls.flag(seed) for seed in seeds]

    monkeypatch.setattr(loading, "load_pipeline", lambda *args, **options: Pipeline())
    monkeypatch.setattr(loading, "draw_images", draw_images)
    return calls


@pytest.fixture
def web():
    """A running web server for images; see web.py."""
    from web import running_web

    with running_web() as state:
        yield state


@pytest.fixture(scope="session")
def ray_session(tmp_path_factory):
    """One local Ray for all tests that need it; the scripts find it running."""
    import ray

    from common.cluster import start_ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DREAMBOOTH_CACHE", str(tmp_path_factory.mktemp("cache-of-actors")))
        start_ray("local")
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def s3_server():
    """The address of a local S3 that keeps its objects in memory."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3_keys(monkeypatch):
    """Credentials that no store knows, so that none are looked for on the machine or the network."""
    for name, value in {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.fixture
def s3(s3_server, s3_keys, tmp_path):
    """A function from a path to its URI in a new bucket of the local S3."""
    bucket = "b" + "".join(letter if letter.isalnum() else "-" for letter in tmp_path.name.lower()).strip("-")[-40:]
    urllib.request.urlopen(urllib.request.Request(f"{s3_server}/{bucket}", method="PUT")).close()
    return lambda path: f"s3://{bucket}/{path}?endpoint_override={s3_server}"


@pytest.fixture
def store(s3, tiny_model, tmp_path):
    """Return a function from a name to its URI in a store with a model and photos."""
    objects.upload_folder(tiny_model, s3("model"))
    objects.upload_folder(make_photos(tmp_path / "photos", 3), s3("photos"))
    return s3


@pytest.fixture
def node_cache(tmp_path, monkeypatch):
    """The cache of local copies, empty, as on another node."""
    monkeypatch.setenv("DREAMBOOTH_CACHE", str(tmp_path / "node-cache"))
    monkeypatch.setattr(cache, "_used", {})
    return tmp_path / "node-cache"


@pytest.fixture
def faulty_s3(s3_server, s3):
    """A proxy before the local S3 that injects faults; `faulty_s3.uri(path)` is a URI through it, in a new bucket."""
    from faulty_store import FaultyStore

    proxy = FaultyStore(s3_server)
    proxy.uri = lambda path: s3(path).replace(s3_server, proxy.url)
    yield proxy
    proxy.close()


@pytest.fixture
def as_script(monkeypatch):
    """Let `cli.run` set its signal handler, variable and stdout in this process, and restore them afterwards."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setattr(sys, "argv", ["/somewhere/script.py"])
    earlier = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stdout = sys.stdout
    yield
    sys.stdout, messages._results = stdout, None
    for number, handler in earlier.items():
        signal.signal(number, handler)


def run_main(main, debug=False):
    """Return the exit code of `cli.run`; needs the fixture as_script."""
    with pytest.raises(SystemExit) as exit_:
        cli.run(main, SimpleNamespace(debug=debug))
    return exit_.value.code


def raiser(error):
    """Return a main function that raises `error`."""

    def main(args):
        raise error

    return main
