"""The scripts on a cluster of several nodes that share no disk: every folder is in an object store."""

import contextlib
import subprocess

import psutil
import pytest
from conftest import make_raw_data
from nodes import ROOT, Nodes, assert_equal_images, begin, end, read_log, train_words, variables, wait_until

from common import objects, stores
from evaluate import DRAWN

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """A head and two nodes of 2 CPUs each."""
    cluster = Nodes(tmp_path_factory.mktemp("nodes"), 2, 2, 2)
    yield cluster
    cluster.end()


def test_a_cluster_without_gpus_is_told_to_compute_on_cpus(nodes, store, tmp_path):
    """A GPU node may be about to start; training on one CPU without a word would be a surprise."""
    words = train_words(store, "--max_train_steps", "1")
    at = words.index("--gpus_per_worker")
    del words[at : at + 2]
    code, _, said = end(begin("train.py", nodes, tmp_path, *words), tmp_path)
    assert code == 3 and "has no GPU now: pass --gpus_per_worker 0" in said


def test_a_share_is_of_a_node_and_one_item_needs_no_half_of_the_cluster(nodes, store, tmp_path):
    words = ["--model_dir", store("model"), "--output_dir", store("drawn"), "--prompts", "cat", "--num_workers", "1"]
    words += ["--num_inference_steps", "2", "--gpus_per_worker", "0"]
    code, result, said = end(begin("run_model.py", nodes, tmp_path, *words), tmp_path)
    assert (code, result and result["drawn"]) == (0, 4), said
    assert sum(name.endswith(".png") for name in stores.Store(store("drawn")).list()) == 4


@pytest.mark.faults  # a minute
def test_actors_of_the_cluster_encode_for_a_training_worker(nodes, store, tmp_path):
    objects.upload_folder(make_raw_data(tmp_path / "raw", 20), store("raw"))
    words = ["--model_dir", store("model"), "--data", store("raw"), "--output_dir", store("base"), "--online"]
    words += ["--max_steps", "4", "--batch_size_per_worker", "4", "--rows_per_file", "10", "--gpus_per_worker", "0"]
    code, result, said = end(begin("pretrain.py", nodes, tmp_path, *words, "--num_workers", "1"), tmp_path)
    assert code == 0 and result["trained"] == 4, said


@pytest.mark.faults  # minutes
def test_run_sh_with_everything_in_a_store_makes_what_it_makes_here(nodes, s3, tmp_path):
    short = {
        "NUM_WORKERS": "2",
        "NUM_TRAIN_PAIRS": "20",
        "NUM_CLASS_IMAGES": "6",
        "NUM_INFERENCE_STEPS": "5",
        "NUM_EVALUATION_IMAGES": "4",
    }
    (tmp_path / "prompts.txt").write_text("a 3d emoji of a {} on the moon\n")
    short |= {"PROMPTS_FILE": str(tmp_path / "prompts.txt"), "BATCH_SIZE": "2"}
    here, there = tmp_path / "data", s3("data")
    joined = "--gpus_per_worker 0 --insecure_cluster"
    for prefix, flags in ((here, {}), (there, {"RAY_ADDRESS": nodes.address, "DRAW_FLAGS": joined})):
        log = f"--log_every 1 {flags.get('DRAW_FLAGS', '')}"
        own = {"DATA_PREFIX": str(prefix), "TRAIN_FLAGS": log, "DREAMBOOTH_CACHE": str(tmp_path / "cache")}
        for step in range(1, 7):
            command = ["bash", str(ROOT / "run.sh"), str(step)]
            done = subprocess.run(command, env=variables(**short, **own, **flags), capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    assert read_log(here / "model-tuned.work") == pytest.approx(read_log(s3("data/model-tuned.work")), abs=1e-5)
    drawn = [f"evaluation/{name}" for name in DRAWN]
    for name in ("images-own", "images-reg", "images-new", "model-tuned/validation", *drawn):
        assert_equal_images(here / name, s3(f"data/{name}"), within=2)


@pytest.mark.faults  # more than a minute
def test_a_worker_that_is_told_to_end_saves_and_the_workers_start_again(nodes, store, tmp_path):
    """No failure is allowed and no checkpoint is due: what continues in the middle was saved because of SIGTERM."""
    flags = ["--max_train_steps", "600", "--checkpointing_steps", "600", "--log_every", "10", "--max_failures", "0"]
    process = begin("train.py", nodes, tmp_path, *train_words(store, "--num_workers", "2", *flags))
    wait_until(lambda: "train: " in (tmp_path / "stderr").read_text(), process, tmp_path)
    workers = [child for child in psutil.Process(nodes.process.pid).children(recursive=True) if is_training(child)]
    assert len(workers) == 2
    workers[0].terminate()
    code, result, said = end(process, tmp_path)
    assert code == 0 and 0 < result["trained"] < 600, said
    assert said.count("the workers start again from it") == 1 and "restarting" not in said
    assert not [name for name in stores.Store(store("tuned.work")).list() if "checkpoint" in name]


def is_training(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return "RayTrainWorker" in " ".join(process.cmdline())
