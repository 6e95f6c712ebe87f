"""Flags of pretrain.py that save memory or time, in this process; training/test_parallel.py has several processes."""

import dataclasses
import threading

import pytest
import torch
from test_pretrain import assert_equal, assert_same_state, log_of, losses, short_sampling, weights  # noqa: F401

import pretrain
from common import errors, folders
from pretraining import feeding
from pretraining.captions import CaptionEncoder
from training import checkpoints
from training.flags import ROUNDING


@pytest.fixture
def command(pretrain_command):
    return pretrain_command


def test_resume_with_8_bit_adam_is_bit_equal(command, tmp_path, power_cut):
    command(output_dir=tmp_path / "whole", use_8bit_adam=True)
    flags = {"use_8bit_adam": True, "checkpointing_steps": 2}
    with power_cut():
        command(**flags)
    command(**flags)
    assert_equal(weights(tmp_path / "whole"), weights(command.output_dir))
    assert_same_state(tmp_path / "whole.work", command.work_dir, 4)
    kinds = {tensor.dtype for _, tensor in checkpoints.read_shares(command.work_dir / "latest", "optimizer")}
    assert torch.uint8 in kinds
    command(output_dir=tmp_path / "usual")
    assert losses(command.work_dir) == pytest.approx(losses(tmp_path / "usual.work"), abs=0.01)
    assert losses(command.work_dir) != losses(tmp_path / "usual.work")


@pytest.mark.faults  # not one, but minutes of a compiler
def test_compiled_steps_have_the_same_losses_and_resume(command, tmp_path, power_cut):
    """With validation, whose passes have no gradients, and with what else changes the modules in place."""
    flags = {"use_8bit_adam": True, "gradient_checkpointing": True, "checkpointing_steps": 2}
    flags |= {"num_validation_rows": 3, "validation_steps": 2}
    command(output_dir=tmp_path / "plain", **flags)
    command(output_dir=tmp_path / "compiled", compile=True, **flags)
    with power_cut():
        command(compile=True, **flags)
    command(compile=True, **flags)
    assert_same_state(tmp_path / "compiled.work", command.work_dir, 4)
    plain, compiled = log_of(tmp_path / "plain.work"), log_of(tmp_path / "compiled.work")
    for name in ("loss", "validation_loss", "grad_norm"):
        pair = [[line.get(name, 0.0) for line in lines] for lines in (plain, compiled)]
        assert pair[0] == pytest.approx(pair[1], abs=1e-4)
    assert weights(tmp_path / "plain").keys() == weights(tmp_path / "compiled").keys()


@pytest.mark.faults  # a minute
@pytest.mark.ray
def test_two_workers_go_on_bit_equal_with_8_bits_and_gradients_in_bf16(command, tmp_path, ray_session):
    flags = {"use_8bit_adam": True, "reduce_dtype": "bf16", "num_workers": 2, "batch_size_per_worker": 2}
    command(output_dir=tmp_path / "whole", **flags)
    for steps in (2, 4):
        command(max_steps=steps, **flags)
    assert_same_state(tmp_path / "whole.work", command.work_dir, 4)
    command(output_dir=tmp_path / "exact")
    assert losses(command.work_dir) == pytest.approx(losses(tmp_path / "exact.work"), abs=0.01)


def test_flags_that_change_the_rounding_are_recorded_if_they_are_given(command):
    command(max_steps=1)
    settings = folders.read_manifest(command.output_dir)["settings"]
    assert not settings.keys() & ROUNDING.keys(), "results of older versions do not have them"
    for name, value in {"use_8bit_adam": True, "compile": True, "reduce_dtype": "bf16"}.items():
        with pytest.raises(errors.BadInput, match=f"{name} was None, now {value!r}"):
            command(max_steps=1, **{name: value})


def test_eight_bits_ask_for_their_package_and_for_whole_weights(refused, command, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_:
        command(use_8bit_adam=True, strategy="fsdp")
    assert exit_.value.code == 2
    assert "--use_8bit_adam needs whole weights, which --strategy fsdp shards" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "--use_8bit_adam requires bitsandbytes: python -m pip install bitsandbytes" in refused(use_8bit_adam=True)


def test_batches_for_a_gpu_are_pinned_in_the_thread_that_makes_them(command, monkeypatch):
    """A GPU but for its driver: this build of PyTorch cannot pin."""
    tasks, threads, real = [], set(), pretrain.make_batches
    monkeypatch.setattr(pretrain, "make_batches", lambda *given: tasks.append(given) or real(*given))
    command(max_steps=2, num_validation_rows=2)
    ((task, place, *rest),) = tasks
    unpinned, *_ = real(task, place, *rest)

    class Pinned(torch.Tensor):
        pass

    def pin_memory(tensor):
        threads.add(threading.get_ident())
        return tensor.as_subclass(Pinned)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    on_cpu = lambda *given: CaptionEncoder(*given[:3], "cpu")  # noqa: E731
    monkeypatch.setattr(feeding, "CaptionEncoder", on_cpu)
    pinned, *_ = real(task, dataclasses.replace(place, device=torch.device("cuda")), *rest)
    for one, other in zip(unpinned, pinned, strict=True):
        assert {type(value) for value in other.values()} == {Pinned}
        assert one["mean"].dtype == one["text_encoder.hidden"].dtype == torch.float16, "until they are on the device"
        assert_equal(one, {name: value.as_subclass(torch.Tensor) for name, value in other.items()})
    assert threads and threading.get_ident() not in threads
