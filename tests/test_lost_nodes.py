"""A node that is lost in each kind of work: the run goes on, and makes what it would have made.

`python -m pytest -m faults tests/test_lost_nodes.py -s` prints what each loss costs, in seconds.
"""

import io
import time

import pyarrow.parquet as pq
import pytest
from conftest import make_photos, make_raw_data
from nodes import Nodes, assert_equal_images, begin, end, read_log, train_words, wait_until
from test_train import assert_equal_weights
from tiny_models import make_tiny_clip, make_tiny_dino

from common import objects
from common.stores import Store
from evaluate import DRAWN

pytestmark = [pytest.mark.ray, pytest.mark.faults]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """A head without CPUs, as on a real cluster, and three nodes of 2 CPUs each."""
    cluster = Nodes(tmp_path_factory.mktemp("nodes"), 0, 2, 2, 2)
    yield cluster
    cluster.end()


def run_twice(script, nodes, folder, words, disturb):
    """Run a command undisturbed and disturbed; return, of each, its seconds, its result and what it said.

    words: a function from the name of an output to flags. disturb: called with the process and the folder of its
    output once the command runs for the second time.
    """
    runs = []
    for output in ("without", "with"):
        place = folder / output
        place.mkdir()
        began = time.monotonic()
        process = begin(script, nodes, place, *words(output))
        if output == "with":
            disturb(process, place)
        code, result, said = end(process, place)
        assert code == 0, said
        runs.append((time.monotonic() - began, result, said))
    return runs


@pytest.fixture
def lose(nodes, tmp_path, capsys, request):
    """Return a function that runs a command with and without the loss of a node; it returns the results of both.

    begun: whether it is time to lose a node that runs a process of that name.
    """

    def run(script, words, begun, name):
        def kill(process, place):
            wait_until(lambda: begun() and nodes.order("kill", name) == "done", process, place)

        (without, result, _), (with_, other, _) = run_twice(script, nodes, tmp_path, words, kill)
        assert nodes.order("add", "2") == "done"
        with capsys.disabled():
            print(
                f"\n{request.node.name}: {without:.0f} s without a loss, {with_:.0f} s with one, "
                f"which cost {with_ - without:.0f} s"
            )
        return result, other

    return run


# ---------------------------------------------------------------------------------------------------------------------
# Ray Data's actors


def test_drawing(lose, store):
    def words(output):
        places = ["--model_dir", store("model"), "--output_dir", store(output), "--prompts", "cat"]
        flags = ["--num_samples_per_prompt", "160", "--batch_size", "8", "--num_inference_steps", "50"]
        return [*places, *flags, "--num_workers", "2", "--gpus_per_worker", "0"]

    def begun():
        return sum(name.endswith(".png") for name in Store(store("with")).list()) >= 16

    _, result = lose("run_model.py", words, begun, "MapWorker")
    assert result["drawn"] == 160
    assert_equal_images(store("without"), store("with"))


def test_encoding(lose, store, tmp_path):
    objects.upload_folder(make_raw_data(tmp_path / "raw", 400), store("raw"))

    def words(output):
        places = ["--model_dir", store("model"), "--output_dir", store(output), "--input", store("raw")]
        return [*places, "--rows_per_file", "10", "--num_workers", "2", "--gpus_per_worker", "0"]

    lose("preprocess.py", words, lambda: len(Store(store("with")).list()) >= 5, "MapWorker")
    tables = [
        {name: pq.read_table(io.BytesIO(files.read(name))) for name in files.list() if name.endswith(".parquet")}
        for files in (Store(store("without")), Store(store("with")))
    ]
    rows = sum(len(table) for name, table in tables[0].items() if name.startswith("part-"))
    assert tables[0] == tables[1] and rows == 400


def test_evaluation(lose, store, tmp_path, tiny_model, class_images):
    objects.upload_folder(class_images, store("class"))
    clip = make_tiny_clip(tmp_path / "clip", tiny_model / "tokenizer")
    dino = make_tiny_dino(tmp_path / "dino")

    def words(output):
        models = ["--model_dir", store("model"), "--base_model_dir", store("model"), "--output_dir", store(output)]
        images = ["--instance_images_dir", store("photos"), "--class_images_dir", store("class")]
        prompts = ["--instance_prompt", "photo of a unqtkn cat", "--class_prompt", "photo of a cat"]
        flags = ["--clip_model", clip, "--dino_model", dino, "--num_samples_per_prompt", "40", "--batch_size", "8"]
        return [*models, *images, *prompts, *flags, "--num_workers", "2", "--gpus_per_worker", "0"]

    def begun():
        return sum(name.endswith(".png") for name in Store(store("with")).list()) >= 16

    without, with_ = lose("evaluate.py", words, begun, "MapWorker")
    assert without["measures"] == with_["measures"] and without["pictures"] == with_["pictures"]
    for name in DRAWN:
        assert_equal_images(store(f"without/{name}"), store(f"with/{name}"))


# ---------------------------------------------------------------------------------------------------------------------
# Ray Train's workers


def train_of(store, output, *more):
    steps = ["--max_train_steps", "60", "--checkpointing_steps", "10", "--log_every", "5"]
    return train_words(store, "--output_dir", store(output), "--cpus_per_worker", "2", *steps, *more)


def has_checkpoint(uri, step=10):
    """Return a function that says whether the checkpoint of a step is whole."""
    return lambda: Store(uri).head(f"checkpoint-{step:06d}/manifest.json") is not None


def assert_equal_results(one, other):
    assert_equal_weights(*(objects.local_copy(each) for each in (one, other)))


def test_training_with_ddp(lose, store):
    def words(output):
        return train_of(store, output, "--num_workers", "2")

    _, result = lose("train.py", words, has_checkpoint(store("with.work")), "RayTrainWorker")
    assert result["steps"] == 60
    assert_equal_results(store("without"), store("with"))


def pretrain_of(store, output, *more):
    places = ["--model_dir", store("model"), "--data", store("latents"), "--output_dir", store(output)]
    steps = ["--max_steps", "60", "--checkpointing_steps", "10", "--batch_size_per_worker", "4", "--seed", "1"]
    return [*places, *steps, "--strategy", "fsdp", "--gpus_per_worker", "0", *more]


def test_pre_training_with_fsdp(lose, store, latents):
    objects.upload_folder(latents, store("latents"))

    def words(output):
        return pretrain_of(store, output, "--num_workers", "2")

    lose("pretrain.py", words, has_checkpoint(store("with.work")), "RayTrainWorker")
    assert_equal_results(store("without"), store("with"))


def test_publishing(lose, faulty_s3, tiny_model, tmp_path):
    store = faulty_s3.uri
    objects.upload_folder(tiny_model, store("model"))
    objects.upload_folder(make_photos(tmp_path / "photos", 3), store("photos"))
    faulty_s3.fault("delay", method="PUT", path="/with/unet", seconds=5.0)

    def words(output):
        return train_of(store, output, "--num_workers", "1")

    lose("train.py", words, lambda: faulty_s3.seen("PUT", "/with/unet"), "RayTrainWorker")
    assert_equal_results(store("without"), store("with"))


# ---------------------------------------------------------------------------------------------------------------------
# Without a spare node


@pytest.fixture
def two_nodes(tmp_path):
    """A head without CPUs and two nodes, so that there is no third for what the loss of one ended."""
    cluster = Nodes(tmp_path / "nodes", 0, 2, 2)
    yield cluster
    cluster.end()


def test_a_run_waits_for_a_node_and_says_so(two_nodes, store, tmp_path):
    def words(output):
        return train_of(store, output, "--num_workers", "2")

    def kill(process, place):
        wait_until(has_checkpoint(store("with.work")), process, place)
        assert two_nodes.order("kill", "RayTrainWorker") == "done"
        wait_until(lambda: "waiting for " in (place / "stderr").read_text(), process, place)
        assert two_nodes.order("add", "2") == "done"

    _, (_, _, said) = run_twice("train.py", two_nodes, tmp_path, words, kill)
    assert "waiting for 2 workers of 2 CPUs" in said
    assert_equal_results(store("without"), store("with"))


@pytest.mark.parametrize("script", ["train.py", "pretrain.py"])
def test_a_run_of_one_to_two_workers_goes_on_alone(script, two_nodes, store, tmp_path, latents):
    """The worker that is left takes the rows of both; of pre-training in the order of both."""
    if script == "pretrain.py":
        objects.upload_folder(latents, store("latents"))

    def words(output):
        flags = ["--num_workers", "1:2"]
        if script == "train.py":
            return train_of(store, output, *flags)
        return pretrain_of(store, output, *flags, "--cpus_per_worker", "2", "--max_steps", "30", "--log_every", "5")

    def kill(process, place):
        wait_until(has_checkpoint(store("with.work")), process, place)
        assert two_nodes.order("kill", "RayTrainWorker") == "done"

    run_twice(script, two_nodes, tmp_path, words, kill)
    logs = [read_log(store(f"{output}.work")) for output in ("without", "with")]
    assert logs[0].keys() == logs[1].keys() >= {5, 30}
    for step in logs[0]:
        assert logs[1][step] == pytest.approx(logs[0][step], abs=1e-5), step


def test_a_notice_that_a_node_is_taken_away_costs_no_failure_and_no_step(two_nodes, store, tmp_path):
    """No checkpoint is due: what continues in the middle was saved because of the notice."""
    words = train_words(store, "--output_dir", store("with"), "--num_workers", "2", "--cpus_per_worker", "1")
    flags = ["--max_train_steps", "400", "--checkpointing_steps", "400", "--log_every", "5", "--max_failures", "0"]
    process = begin("train.py", two_nodes, tmp_path, *words, *flags)
    wait_until(lambda: "train: " in (tmp_path / "stderr").read_text(), process, tmp_path)
    assert two_nodes.order("drain", "RayTrainWorker") == "done"
    code, result, said = end(process, tmp_path)
    assert code == 0 and 0 < result["trained"] < 400, said
    assert said.count("the workers start again from it") == 1 and "restarting" not in said
    log = read_log(store("with.work"))
    assert sorted(log) == list(range(5, 401, 5))
