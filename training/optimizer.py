"""AdamW with a learning-rate schedule, gradient clipping and a loss scale."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from common.errors import CheckFailed
from training import checkpoints
from training.task import Optimization
from training.workers import Place

if TYPE_CHECKING:
    import torch

DIVERGED = "the run diverged"
REMEDY = "nothing is published: use a smaller --lr, or --mixed_precision no"
MAX_BAD_STEPS = 5  # consecutive steps with a gradient that is not finite, before a run gives up
MAX_BAD_STEPS_FP16 = 25  # in fp16, which skips steps while it looks for a loss scale


class Optimizer:
    """AdamW over groups of parameters; gradient clipping and the loss scale of fp16 use all of them.

    groups: [(parameters, learning rate)]; the first rate is the one that `lr` tells.
    schedule: name of Diffusers' learning-rate schedule, warm-up steps, all steps.
    use_8bit: keep the moving averages in 8 bits with bitsandbytes (arXiv 2110.02861).
    """

    def __init__(
        self,
        groups: Iterable[tuple[Iterable[torch.nn.Parameter], float]],
        weight_decay: float,
        max_grad_norm: float,
        fp16: bool,
        device: torch.device,
        schedule: tuple[str, int, int],
        use_8bit: bool = False,
    ) -> None:
        import torch
        from diffusers.optimization import get_scheduler

        self.groups = [(list(parameters), lr) for parameters, lr in groups]
        self.parameters = [parameter for parameters, _ in self.groups for parameter in parameters]
        asked = [{"params": parameters, "lr": lr} for parameters, lr in self.groups]
        self.adamw: Any
        if use_8bit:
            from bitsandbytes.optim import AdamW8bit

            self.adamw = AdamW8bit(asked, weight_decay=weight_decay)
        else:
            self.adamw = torch.optim.AdamW(asked, weight_decay=weight_decay, fused=True)
        self.scaler = torch.amp.GradScaler(device.type, enabled=fp16)
        name, num_warmup_steps, num_training_steps = schedule
        steps = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
        self.lr_factor = get_scheduler(name, self.adamw, **steps).lr_lambdas[0]
        self.max_grad_norm = max_grad_norm
        is_sharded = any(hasattr(parameter, "device_mesh") for parameter in self.parameters)
        self.kernel_skips = not use_8bit and not is_sharded  # PyTorch's fused kernel reads found_inf for whole weights
        self.max_bad_steps = MAX_BAD_STEPS_FP16 if fp16 else MAX_BAD_STEPS
        self.bad_steps = torch.zeros((), device=device)  # consecutive; read seldom, as reading waits for the device

    def lr(self, step: int) -> float:
        """Return the learning rate of the step that follows `step` steps."""
        return self.groups[0][1] * self.lr_factor(step)

    def step(self, step: int) -> torch.Tensor:
        """Clip and apply the gradients and return their norm before clipping; skip the step if it is not finite.

        step: number of steps taken before this one; the learning rate is a function of it.
        The gradients, and therefore the decision, are the same on all workers. Nothing waits for the device.
        """
        import torch

        for group, (_, lr) in zip(self.adamw.param_groups, self.groups, strict=True):
            group["lr"] = lr * self.lr_factor(step)
        self.scaler.unscale_(self.adamw)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        grad_norm = grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm
        bad = (~torch.isfinite(grad_norm)).float()
        if self.scaler.is_enabled():
            self.scaler.step(self.adamw)
        elif self.kernel_skips:
            self.adamw.found_inf = bad  # the kernel leaves weights and averages unchanged if it is 1
            self.adamw.step()
        elif not bad:  # this waits for the device
            self.adamw.step()
        self.scaler.update()
        self.adamw.zero_grad(set_to_none=True)
        self.bad_steps = (self.bad_steps + 1) * bad
        return grad_norm

    def is_good(self) -> bool:
        """Return whether the last step was applied; raise CheckFailed if too many consecutive steps were skipped."""
        bad_steps = int(self.bad_steps)
        if bad_steps > self.max_bad_steps:
            raise CheckFailed(f"{DIVERGED}: {bad_steps} steps with a gradient that is not finite; {REMEDY}")
        return bad_steps == 0


def _groups(settings: Optimization, modules: dict[str, Any]) -> list[tuple[list[torch.nn.Parameter], float]]:
    """Return all trainable weights as one group or, with a text_encoder_lr, those of the text encoders as a second."""
    named = list(checkpoints.named_parameters(modules))
    if settings.text_encoder_lr is None:
        return [([parameter for _, parameter in named], settings.lr)]
    of_text = [parameter for name, parameter in named if name.startswith("text_encoder")]
    others = [parameter for name, parameter in named if not name.startswith("text_encoder")]
    return [(others, settings.lr), (of_text, settings.text_encoder_lr)]


def make_optimizer(
    settings: Optimization,
    max_train_steps: int,
    modules: dict[str, torch.nn.Module],
    place: Place,
    dtype: torch.dtype,
    start: checkpoints.Start,
) -> Optimizer:
    """Return the Optimizer of the trainable weights of {"unet": module, ...}, restored from a checkpoint, if any."""
    import torch

    optimizer = Optimizer(
        _groups(settings, modules),
        weight_decay=settings.adam_weight_decay,
        max_grad_norm=settings.max_grad_norm,
        fp16=dtype == torch.float16,
        device=place.device,
        schedule=(settings.lr_scheduler, settings.lr_warmup_steps, max_train_steps),
        use_8bit=settings.use_8bit_adam,
    )
    if start.step:
        checkpoints.restore_optimizer(start.folder, modules, optimizer.adamw, place)
        if start.facts["scaler"]:  # empty if the run has been in bf16 until here
            optimizer.scaler.load_state_dict(start.facts["scaler"])
    return optimizer
