"""The optimizer step: clipping, skipped steps, 8-bit averages, the learning rate."""

import pytest
import torch

import training.optimizer
from common import errors
from training import checkpoints, workers
from training.optimizer import MAX_BAD_STEPS, Optimizer
from training.task import Optimization


def make_optimizer(parameters, **options):
    options = {"lr": 0.1, "weight_decay": 0.0, "max_grad_norm": 1.0, "fp16": False, **options}
    groups = [(parameters, options.pop("lr"))]
    return Optimizer(groups, device=torch.device("cpu"), schedule=("constant", 0, 10), **options)


def test_clipping_clips_even_what_came_as_a_generator():
    """clip_grad_norm_ on a generator that AdamW has emptied returns 0 and clips nothing."""
    module = torch.nn.Linear(4, 3)
    optimizer = make_optimizer(parameter for parameter in module.parameters())
    seen = []
    optimizer.adamw.register_step_pre_hook(
        lambda adamw, *rest: seen.append(torch.cat([p.grad.flatten() for p in module.parameters()]).norm().item())
    )
    for scale in (1e4, 1.0, 1e-3):
        (module(torch.ones(2, 4)).sum() * scale).backward()
        true_norm = torch.cat([p.grad.flatten() for p in module.parameters()]).norm().item()
        assert optimizer.step(0).item() == pytest.approx(true_norm, rel=1e-5)
    assert len(seen) == 3 and max(seen) <= 1.0 + 1e-5
    assert seen[0] == pytest.approx(1.0, rel=1e-4) and seen[2] < 0.1


def test_a_gradient_that_is_not_finite_is_skipped_then_ends_the_run():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = make_optimizer([weight], weight_decay=0.1)
    weight.grad = torch.ones(3)
    optimizer.step(0)
    assert optimizer.is_good()
    before = weight.clone(), {name: value.clone() for name, value in optimizer.adamw.state[weight].items()}
    for bad in (float("nan"), float("inf"), float("-inf"), float("nan"), float("inf")):
        weight.grad = torch.tensor([1.0, bad, 1.0])
        optimizer.step(1)
        assert not optimizer.is_good() and torch.equal(weight, before[0])
        assert all(torch.equal(value, before[1][name]) for name, value in optimizer.adamw.state[weight].items())
    weight.grad = torch.ones(3)
    optimizer.step(1)
    assert not torch.equal(weight, before[0]) and optimizer.is_good()
    for _ in range(MAX_BAD_STEPS + 1):
        optimizer.is_good()
        weight.grad = torch.full((3,), float("inf"))
        optimizer.step(0)
    with pytest.raises(errors.CheckFailed, match="diverged"):
        optimizer.is_good()


def test_eight_bit_averages_skip_and_come_back_bit_for_bit(tmp_path):
    """A table of 256 values and a number of a byte each, for weights of 4,096 numbers and more."""
    from training import checkpoints

    def train(optimizer, weight, steps):
        for step in steps:
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step(step)

    def make(start=None):
        torch.manual_seed(0)
        module = torch.nn.Linear(64, 64)
        if start is not None:
            module.load_state_dict(start)
        module.save_pretrained = lambda folder, **_: None
        module.bias.requires_grad_(False)
        return {"unet": module}, make_optimizer([module.weight], use_8bit=True)

    modules, optimizer = make()
    train(optimizer, modules["unet"].weight, range(2))
    assert optimizer.adamw.state[modules["unet"].weight]["state1"].dtype == torch.uint8
    before = modules["unet"].weight.detach().clone()
    modules["unet"].weight.grad = torch.full((64, 64), float("inf"))
    optimizer.step(2)
    assert torch.equal(modules["unet"].weight, before) and not optimizer.is_good()
    checkpoints.write_state(tmp_path, modules, optimizer.adamw)
    again, restored = make(modules["unet"].state_dict())
    checkpoints.restore_optimizer(tmp_path, again, restored.adamw)
    for each, its in ((optimizer, modules), (restored, again)):
        train(each, its["unet"].weight, range(2, 5))
    assert torch.equal(modules["unet"].weight, again["unet"].weight) and not torch.equal(before, again["unet"].weight)


def test_skipped_steps_leave_the_others_as_they_would_be_without_them():
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [make_optimizer([weight]) for weight in weights]
    for step, bad in enumerate((True, False, True, False, False)):
        for weight, optimizer, skips in zip(weights, optimizers, (False, True), strict=True):
            if bad and not skips:
                continue
            weight.grad = torch.full((3,), float("nan")) if bad else torch.arange(3.0) + step
            optimizer.step(0)
    assert torch.equal(*weights)


def test_a_run_in_bf16_goes_on_in_fp16(monkeypatch):
    """`auto` takes the type that the GPU at hand computes in; a run in bf16 leaves no loss scale."""
    settings = Optimization(
        lr=0.1, lr_scheduler="constant", lr_warmup_steps=0, adam_weight_decay=0.0, max_grad_norm=1.0
    )
    monkeypatch.setattr(training.optimizer.checkpoints, "restore_optimizer", lambda *arguments: None)
    place = workers.Place(0, 1, torch.device("cpu"))
    for earlier, later in ((torch.bfloat16, torch.float16), (torch.float16, torch.float16)):
        modules = {"unet": torch.nn.Linear(2, 2)}
        none = checkpoints.Start()
        scaler = training.optimizer.make_optimizer(settings, 4, modules, place, earlier, none).scaler
        start = checkpoints.Start(1, "folder", {"scaler": scaler.state_dict()})
        again = training.optimizer.make_optimizer(settings, 4, modules, place, later, start)
        assert again.scaler.get_scale() == 2**16


def test_learning_rate_is_a_function_of_the_step():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = Optimizer([([weight], 1.0)], 0.0, 1.0, False, torch.device("cpu"), ("linear", 2, 6))
    assert [optimizer.lr(step) for step in range(6)] == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25])
