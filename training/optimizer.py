"""AdamW with a learning-rate schedule, gradient clipping and a loss scale."""

from common import folders
from common.errors import CheckFailed
from training import checkpoints

DIVERGED = "the run diverged"
REMEDY = "nothing is published: take a smaller --lr, or --mixed_precision no"
MAX_BAD_STEPS = 5  # skipped one after another, for a gradient that is not finite, before a run gives up
MAX_BAD_STEPS_FP16 = 25  # fp16 skips steps while it looks for a loss scale


class Optimizer:
    """AdamW with a learning-rate schedule, clipping and, for fp16, a loss scale, all over one list of parameters.

    parameters: kept as a list: a generator would be empty by the time that gradients are clipped.
    use_8bit: whether bitsandbytes keeps the averages in 8 bits (arXiv 2110.02861).
    """

    def __init__(self, parameters, lr, weight_decay, max_grad_norm, fp16, device, schedule, use_8bit=False):
        import torch
        from diffusers.optimization import get_scheduler

        self.parameters = list(parameters)
        if use_8bit:
            from bitsandbytes.optim import AdamW8bit

            self.adamw = AdamW8bit(self.parameters, lr=lr, weight_decay=weight_decay)
        else:
            self.adamw = torch.optim.AdamW(self.parameters, lr=lr, weight_decay=weight_decay, fused=True)
        self.scaler = torch.amp.GradScaler(device.type, enabled=fp16)
        name, num_warmup_steps, num_training_steps = schedule
        self.base_lr = lr
        steps = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
        self.lr_factor = get_scheduler(name, self.adamw, **steps).lr_lambdas[0]
        self.max_grad_norm = max_grad_norm
        is_sharded = any(hasattr(parameter, "device_mesh") for parameter in self.parameters)
        self.skips_by_itself = not use_8bit and not is_sharded  # PyTorch's fused kernel, of whole weights
        self.max_bad_steps = MAX_BAD_STEPS_FP16 if fp16 else MAX_BAD_STEPS
        self.bad_steps = torch.zeros((), device=device)  # in a row; read seldom, for that waits for the device

    def lr(self, step):
        """Return the learning rate of the step after `step` steps."""
        return self.base_lr * self.lr_factor(step)

    def step(self, step):
        """Clip and apply the gradients and return their norm before clipping; one that is not finite is not applied.

        step: steps taken before this one; the learning rate is a function of it.
        The gradients, and so the decision, are the same on all workers, and nothing waits for the device to make it.
        """
        import torch

        for group in self.adamw.param_groups:
            group["lr"] = self.lr(step)
        self.scaler.unscale_(self.adamw)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        grad_norm = grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm
        bad = (~torch.isfinite(grad_norm)).float()
        if self.scaler.is_enabled():
            self.scaler.step(self.adamw)
        elif self.skips_by_itself:
            self.adamw.found_inf = bad  # the kernel then leaves weights and averages as they are
            self.adamw.step()
        elif not bad:  # this waits for the device
            self.adamw.step()
        self.scaler.update()
        self.adamw.zero_grad(set_to_none=True)
        self.bad_steps = (self.bad_steps + 1) * bad
        return grad_norm

    def is_good(self):
        """Return whether the last step was applied; raise CheckFailed where a few in a row were not."""
        bad_steps = int(self.bad_steps)
        if bad_steps > self.max_bad_steps:
            raise CheckFailed(f"{DIVERGED}: {bad_steps} steps with a gradient that is not finite; {REMEDY}")
        return bad_steps == 0


def make_optimizer(config, modules, place, dtype, folder):
    """Return the Optimizer of the trainable weights of {"unet": module, ...}, as checkpoint `folder` left it."""
    import torch

    optimizer = Optimizer(
        [parameter for _, parameter in checkpoints.named_parameters(modules)],
        lr=config["lr"],
        weight_decay=config["adam_weight_decay"],
        max_grad_norm=config["max_grad_norm"],
        fp16=dtype == torch.float16,
        device=place.device,
        schedule=(config["lr_scheduler"], config["lr_warmup_steps"], config["max_train_steps"]),
        use_8bit=config.get("use_8bit_adam", False),
    )
    if folder:
        checkpoints.restore_optimizer(folder, modules, optimizer.adamw)
        scaler = folders.read_manifest(folder)["scaler"]
        if scaler:  # none where the run was in bf16 until here
            optimizer.scaler.load_state_dict(scaler)
    return optimizer
