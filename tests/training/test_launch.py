"""How workers are started on Ray, followed, and started again."""

import contextlib
import os
import signal
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import make_task

from common import board, cli, errors
from common.nodes import Nodes, Share
from training import checkpoints, launch


def test_a_run_here_shows_its_log(tmp_path, capsys):
    def train_loop(config):
        assert threading.current_thread() is threading.main_thread()  # where the images were encoded
        board.current().log({"step": 3, "loss": 0.51239, "grad_norm": None})
        return {"step": 3, "trained": 3, "stopped": False}

    assert launch.run_workers(train_loop, make_task(tmp_path))["trained"] == 3
    assert capsys.readouterr().err.splitlines()[-1] == "train: 3/3 steps, 0 steps/s, loss 0.5124"


@pytest.mark.parametrize("line", [{"step": 2, "validation_loss": 0.5}, {"step": 2, "loss": None, "grad_norm": 1.0}])
def test_a_log_line_without_a_loss_is_shown_too(tmp_path, capsys, line):
    """With --log_every 10 and --validation_steps 4 there are steps of which only the validation loss is logged."""

    def train_loop(config):
        board.current().log(line)
        return {"step": 3, "trained": 3, "stopped": False}

    launch.run_workers(train_loop, make_task(tmp_path))
    assert "train: 2/3 steps" in capsys.readouterr().err


def test_a_signal_stops_a_run_after_it_saved(tmp_path):
    def train_loop(config):
        os.kill(os.getpid(), signal.SIGTERM)
        while not board.current().stop_asked():
            pass
        return {"step": 1, "trained": 1, "stopped": True}

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(errors.Stopped) as stopped:
        launch.run_workers(train_loop, make_task(tmp_path))
    assert stopped.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_error_passes_through(tmp_path):
    def train_loop(config):
        raise errors.CheckFailed("no")

    with pytest.raises(errors.CheckFailed, match="no"):
        launch.run_workers(train_loop, make_task(tmp_path))


@pytest.fixture
def trainers(monkeypatch):
    """Ray's trainer, which fails as often as a test says: a list of the trainers that were made, and the failures."""
    made, failures = [], []

    class Trainer:
        def __init__(self, train_loop, train_loop_config, scaling_config, run_config):
            made.append(SimpleNamespace(config=train_loop_config, scaling=scaling_config, run=run_config))

        def fit(self):
            if failures:
                raise failures.pop(0)
            return SimpleNamespace(return_value={"step": 3, "trained": 3, "stopped": False})

    monkeypatch.setattr("ray.train.torch.TorchTrainer", Trainer)
    monkeypatch.setattr(launch, "end_idle_actors", lambda address: None)  # those of the session's Ray
    for name in ("start_ray", "list_nodes"):
        monkeypatch.setattr(launch, name, lambda *_: Nodes(({"CPU": 4.0},)))
    monkeypatch.setattr(
        launch, "board_on_ray", lambda: contextlib.nullcontext(mock.Mock(news=lambda seen: ([], None, 0.0)))
    )
    return made, failures


def test_workers_are_started_again_as_often_as_is_allowed(tmp_path, trainers, capsys):
    made, failures = trainers
    failures += [RuntimeError("power cut"), RuntimeError("again")]
    assert launch.run_workers(print, make_task(tmp_path, num_workers=2), max_failures=2)["step"] == 3
    assert len(made) == 3 and len({trainer.run.name for trainer in made}) == 3
    assert (
        made[0].scaling.resources_per_worker == {"CPU": 2.0, "GPU": 0.0}
        and made[0].config["compute"]["num_threads"] == 2
    )
    assert "power cut" in capsys.readouterr().err and not (tmp_path / "ray").exists()
    failures += [RuntimeError("power cut"), RuntimeError("again")]
    with pytest.raises(RuntimeError, match="again"):
        launch.run_workers(print, make_task(tmp_path, num_workers=2), max_failures=1)


def test_a_dead_controller_leaves_no_cpus_behind(tmp_path, trainers, monkeypatch):
    """A Ray of our own is started anew: what that controller held of it is never free again."""
    import ray

    made, failures = trainers
    calls = []
    monkeypatch.setattr("ray.shutdown", lambda: calls.append("shutdown"))
    nodes = Nodes(({"CPU": 4.0},))
    monkeypatch.setattr(launch, "start_ray", lambda *_: calls.append("start") or nodes)
    monkeypatch.setattr(launch, "list_nodes", lambda address: nodes)
    failures += [RuntimeError("a worker died"), ray.exceptions.ActorDiedError()]
    launch.run_workers(print, make_task(tmp_path, num_workers=2), max_failures=2)
    assert calls == ["start", "shutdown", "start"] and len(made) == 3
    calls.clear()
    failures += [ray.exceptions.ActorDiedError()]
    nodes = Nodes(({"CPU": 4.0},), is_local=False)
    launch.run_workers(print, make_task(tmp_path, num_workers=2), max_failures=2, gpus_per_worker=0)
    assert calls == ["start"]


def test_a_worker_that_dies_each_time_is_out_of_memory_at_the_end(tmp_path, trainers, capsys):
    import ray

    made, failures = trainers
    failures += [ray.exceptions.ActorDiedError() for _ in range(2)]
    with pytest.raises(ray.exceptions.ActorDiedError) as caught:
        launch.run_workers(print, make_task(tmp_path, num_workers=2), max_failures=1)
    assert len(made) == 2 and errors.describe_error(caught.value)[0] == 4
    assert "memory ran out: restarting the workers from the newest checkpoint" in capsys.readouterr().err


def test_the_error_of_another_worker_says_more_than_a_death():
    import ray

    error = RuntimeError("training failed")
    error.worker_failures = {0: ray.exceptions.ActorDiedError(), 1: errors.CheckFailed("not finite")}
    assert errors.describe_error(error) == (5, "not finite")


@pytest.mark.parametrize("is_alone", [True, False])
def test_ray_train_starts_no_actor_that_only_takes_time(is_alone):
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    def actors(trainer_class):
        trainer = trainer_class(print, scaling_config=ScalingConfig(num_workers=1))
        return {type(each).__name__ for each in trainer._create_default_callbacks()}

    needless = {"DatasetsCallback", "PlacementGroupCleanerCallback"} if is_alone else {"DatasetsCallback"}
    more = set() if is_alone else {"Notices"}
    assert actors(launch._make_trainer_class(is_alone)) == actors(TorchTrainer) - needless | more
    assert needless < actors(TorchTrainer)


@pytest.mark.parametrize("has_arguments", [True, False])
def test_another_ray_train_makes_its_callbacks_in_another_way(monkeypatch, has_arguments):
    """The call is private: it may take arguments one day, or be gone."""
    from ray.train.torch import TorchTrainer

    class DatasetsCallback:
        pass

    if has_arguments:
        make = lambda self, settings: [DatasetsCallback(), settings]  # noqa: E731
        monkeypatch.setattr(TorchTrainer, "_create_default_callbacks", make)
        trainer_class = launch._make_trainer_class(is_alone=True)
        assert object.__new__(trainer_class)._create_default_callbacks("kept") == ["kept"]
    else:
        base = next(each for each in TorchTrainer.__mro__ if "_create_default_callbacks" in vars(each))
        monkeypatch.delattr(base, "_create_default_callbacks")
        assert issubclass(launch._make_trainer_class(is_alone=True), TorchTrainer)


def test_workers_are_not_started_again_for_an_error_of_the_user(tmp_path, trainers):
    """One worker's error is the run's, whatever the others die of meanwhile."""
    made, failures = trainers
    error = RuntimeError("training failed")
    error.worker_failures = {0: RuntimeError("connection closed"), 1: errors.CheckFailed("not finite")}
    failures.append(error)
    with pytest.raises(RuntimeError) as caught:
        launch.run_workers(print, make_task(tmp_path, num_workers=2), max_failures=3)
    assert len(made) == 1
    assert errors.describe_error(caught.value) == (5, "not finite")


def test_a_worker_that_reads_its_data_leaves_half_of_its_cpus(tmp_path, trainers):
    made, _ = trainers
    launch.run_workers(print, make_task(tmp_path, num_workers=2), has_loaders=True)
    assert (
        made[0].scaling.resources_per_worker == {"CPU": 1.0, "GPU": 0.0}
        and made[0].config["compute"]["num_threads"] == 2
    )


# ---------------------------------------------------------------------------------------------------------------------
# How many workers


def elastic_task(tmp_path, smallest=2, largest=8, accumulation=1):
    return make_task(
        tmp_path, num_workers=largest, min_workers=smallest, gradient_accumulation_steps=accumulation, owner="x"
    )


def test_each_number_of_workers_divides_the_global_batch(tmp_path):
    task = elastic_task(tmp_path)
    assert launch.possible_sizes(task) == [8, 4, 2]
    assert launch.possible_sizes(elastic_task(tmp_path, 1, 3, 2)) == [3, 2, 1]
    assert launch.possible_sizes(make_task(tmp_path, num_workers=5)) == [5]
    for size in (8, 4, 2):
        changed = launch.with_workers(task, size)
        assert changed.compute.num_workers * changed.schedule.gradient_accumulation_steps == 8


@pytest.mark.parametrize(("cpus", "size"), [((8.0,), 8), ((4.0, 3.0), 4), ((1.0,) * 3, 2), ((), 2)])
def test_as_many_workers_as_the_nodes_have_room_for(cpus, size):
    nodes = Nodes(tuple({"CPU": each} for each in cpus), is_local=False)
    assert launch.choose_size([8, 4, 2], nodes, Share(1.0, 0.0)) == size


def test_a_worker_fits_on_one_node():
    nodes = Nodes(({"CPU": 2.0, "GPU": 1.0}, {"CPU": 2.0}, {"CPU": 3.0, "GPU": 2.0}), is_local=False)
    assert nodes.room(Share(2, 0)) == 3 and nodes.room(Share(3, 0)) == 1 and nodes.room(Share(4, 0)) == 0
    assert nodes.room(Share(1, 1)) == 3


class WorkerGroupStartupTimeoutError(Exception):
    """As Ray Train's."""


@pytest.fixture
def attempts(monkeypatch):
    """Return a function that calls _until_done with given outcomes of the attempts; it returns (result, sizes)."""
    nodes = Nodes(({"CPU": 8.0},), is_local=False)
    monkeypatch.setattr(launch, "list_nodes", lambda address: nodes)

    def run(task, outcomes, max_failures=1):
        sizes = []

        def attempt(size, timeout, has_grown):
            sizes.append((size, timeout))
            outcome = outcomes.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return launch._until_done(
            attempt, launch.Plan(task, Share(1.0, 0.0), [], max_failures, 99, "host:1", True)
        ), sizes

    return run


def result(trained, stopped):
    return {"step": trained, "trained": trained, "stopped": stopped}


def test_an_elastic_run_that_finds_no_room_goes_on_with_fewer_workers(attempts, tmp_path):
    outcomes = [WorkerGroupStartupTimeoutError(), WorkerGroupStartupTimeoutError(), result(3, False)]
    done, sizes = attempts(elastic_task(tmp_path), outcomes)
    assert done["step"] == 3
    assert sizes == [(8, launch.TRY_SMALLER), (4, launch.TRY_SMALLER), (2, 99)]  # the last one waits as long as it may


def test_no_room_for_the_fewest_workers_is_said_and_ends(attempts, tmp_path):
    with pytest.raises(errors.TryAgain, match=r"no room for all workers for 99 s.*--start_timeout"):
        attempts(make_task(tmp_path, num_workers=2), [WorkerGroupStartupTimeoutError()])


def test_a_node_that_leaves_with_a_notice_is_no_failure(attempts, tmp_path, capsys):
    done, sizes = attempts(make_task(tmp_path, num_workers=2), [result(2, True)] * 3 + [result(1, False)], 0)
    assert done["step"] == 1 and len(sizes) == 4
    assert "a checkpoint is saved, and the workers start again" in capsys.readouterr().err


def test_nodes_that_change_without_end_are_given_up(attempts, tmp_path):
    with pytest.raises(errors.TryAgain, match="change faster than a step"):
        attempts(make_task(tmp_path, num_workers=2), [result(0, True)] * 9)


def test_a_lost_node_is_a_failure_of_its_own_kind(attempts, tmp_path, capsys):
    import ray

    class ActorDiedError(ray.exceptions.RayActorError):
        def __str__(self):
            return "The actor died because its node has died."

    lost = ActorDiedError()
    assert attempts(make_task(tmp_path, num_workers=2), [lost, result(3, False)])[0]["step"] == 3
    said = capsys.readouterr().err
    assert "a node of the cluster was lost: restarting the workers" in said and "memory" not in said
    with pytest.raises(ActorDiedError) as caught:
        attempts(make_task(tmp_path, num_workers=2), [lost, lost])
    assert errors.describe_error(caught.value)[0] == errors.TryAgain.exit_code


@pytest.fixture
def losses(attempts, tmp_path, monkeypatch):
    """Return a function that calls _until_done with losses, before each of which there is a checkpoint of a step."""

    def run(steps, max_failures):
        task, seen = make_task(tmp_path, num_workers=2), iter([0, *steps])
        monkeypatch.setattr(launch, "newest_step", lambda work_dir: next(seen))
        lost = [errors.NodeLost(f"loss {number}") for number, _ in enumerate(steps, 1)]
        return attempts(task, [*lost, result(1, False)], max_failures)

    return run


def test_failures_are_counted_anew_after_each_new_checkpoint(losses):
    assert len(losses([100 * step for step in range(1, 30)], 1)[1]) == 30
    assert len(losses([100, 100, 200, 200, 300, 300], 2)[1]) == 7
    with pytest.raises(errors.NodeLost, match="loss 3"):
        losses([100, 200, 200, 300], 1)
    with pytest.raises(errors.NodeLost, match="loss 1"):
        losses([100], 0)


def test_failures_without_progress_end_a_run_without_a_limit_too(losses):
    without = cli.failures("-1")
    with pytest.raises(errors.NodeLost, match="loss 14"):
        losses([100, 200, 300, 400, *[400] * 30], without)
    assert len(losses([100, 200, 300, 400, *[400] * 9, 500], without)[1]) == 15


def test_a_store_that_does_not_answer_shows_no_progress(attempts, tmp_path, monkeypatch):
    def away(work_dir):
        raise errors.Away("s3://b/x does not answer")

    monkeypatch.setattr(checkpoints, "list_checkpoints", away)
    lost = [errors.NodeLost("loss 1"), errors.NodeLost("loss 2")]
    with pytest.raises(errors.NodeLost, match="loss 2"):
        attempts(make_task(tmp_path, num_workers=2), lost)


def test_a_store_that_stays_away_is_a_failure_to_start_again_from(attempts, tmp_path, capsys):
    away = errors.Away("s3://b/x does not answer (503): try again later or check the address")
    assert attempts(make_task(tmp_path, num_workers=2), [away, result(3, False)])[0]["step"] == 3
    said = capsys.readouterr().err
    assert "warning: s3://b/x does not answer (503): restarting the workers from the newest checkpoint" in said
    with pytest.raises(errors.Away):
        attempts(make_task(tmp_path, num_workers=2), [away, away])


def test_workers_are_placed_on_gpus_of_their_type(tmp_path, trainers, monkeypatch):
    made, _ = trainers
    nodes = Nodes(({"CPU": 4.0, "GPU": 2.0, "accelerator_type:A100": 1.0}, {"CPU": 4.0, "GPU": 2.0}))
    for name in ("start_ray", "list_nodes"):
        monkeypatch.setattr(launch, name, lambda *_: nodes)
    launch.run_workers(print, make_task(tmp_path, num_workers=2), accelerator_type="A100")
    asked = made[0].scaling.resources_per_worker, made[0].scaling.accelerator_type
    assert asked == ({"CPU": 4.0, "GPU": 1.0}, "A100")
    with pytest.raises(errors.BadInput, match="--num_workers 3 of 1 GPUs each need 3, the cluster has 2"):
        launch.run_workers(print, make_task(tmp_path, num_workers=3), accelerator_type="A100")


def test_training_workers_do_not_share_a_gpu():
    for share in (1.0, 2.0, 0.0):
        launch.check_whole_gpus(2, share)
    launch.check_whole_gpus(1, 0.5)
    with pytest.raises(errors.BadInput, match=r"--gpus_per_worker 0\.5: training workers cannot share a GPU"):
        launch.check_whole_gpus(2, 0.5)
