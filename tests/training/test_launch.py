"""How workers are started on Ray, followed, and started again."""

import contextlib
import os
import signal
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import make_task

from common import board, errors
from common.nodes import Nodes
from training import launch


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
    monkeypatch.setattr(launch, "start_ray", lambda *_: Nodes(({"CPU": 4.0},)))
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
    failures += [RuntimeError("a worker died"), ray.exceptions.ActorDiedError()]
    launch.run_workers(print, make_task(tmp_path, num_workers=2), max_failures=2)
    assert calls.count("shutdown") == 1 and calls[calls.index("shutdown") + 1] == "start" and len(made) == 3
    calls.clear()
    failures += [ray.exceptions.ActorDiedError()]
    nodes = Nodes(({"CPU": 4.0},), is_local=False)
    launch.run_workers(print, make_task(tmp_path, num_workers=2), max_failures=2, gpus_per_worker=0)
    assert set(calls) == {"start"}


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
    assert actors(launch._make_trainer_class(is_alone)) == actors(TorchTrainer) - needless
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
