"""The flags that train.py and pretrain.py share, with the defaults of each."""

import argparse

from common import cli

SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")


def add_switch(group: argparse._ArgumentGroup, name: str, default: bool, help_text: str) -> None:
    """Add --NAME and --no-NAME."""
    group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default, help=help_text)


def add_optimizer_flags(
    group: argparse._ArgumentGroup, lr: float, lr_scheduler: str, lr_warmup_steps: int, lr_names: tuple[str, ...]
) -> None:
    """Add the flags of task.Optimization but for --use_8bit_adam, and those of the loss and of memory."""
    group.add_argument(*lr_names, type=cli.positive_float, default=lr, help="learning rate")
    group.add_argument("--lr_scheduler", choices=SCHEDULES, default=lr_scheduler, help="learning-rate schedule")
    warmup = "steps over which the learning rate rises linearly from 0"
    group.add_argument("--lr_warmup_steps", type=cli.non_negative_int, default=lr_warmup_steps, help=warmup)
    group.add_argument("--adam_weight_decay", type=cli.non_negative_float, default=1e-2, help="weight decay of AdamW")
    norm = "largest norm of the gradients; larger ones are scaled down to it"
    group.add_argument("--max_grad_norm", type=cli.positive_float, default=1.0, help=norm)
    snr = "weight the loss by min-SNR (arXiv 2303.09556) with this gamma, usually 5; default: no weighting"
    group.add_argument("--snr_gamma", type=cli.positive_float, help=snr)
    checkpointing = "recompute activations in the backward pass: less memory, about a third more time per step"
    group.add_argument("--gradient_checkpointing", action="store_true", help=checkpointing)


def add_checkpoint_flags(group: argparse._ArgumentGroup, checkpointing_steps: int, keep: bool, what: str) -> None:
    """Add the flags of checkpoints and logs; what: the files that --keep_checkpoints keeps."""
    steps = "number of steps between two checkpoints"
    group.add_argument("--checkpointing_steps", type=cli.positive_int, default=checkpointing_steps, help=steps)
    limit = "number of checkpoints to keep while the run trains; older ones are deleted"
    group.add_argument("--checkpoints_total_limit", type=cli.positive_int, default=2, help=limit)
    add_switch(group, "keep_checkpoints", keep, f"keep {what} after publishing, so that a longer run can continue")
    log = "number of steps between two lines of log.jsonl"
    group.add_argument("--log_every", type=cli.positive_int, default=10, help=log)


def check_schedule(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a usage error if warm-up steps are given to a schedule without warm-up."""
    if args.lr_warmup_steps and args.lr_scheduler == "constant":
        parser.error("--lr_warmup_steps has no effect with --lr_scheduler constant: use constant_with_warmup")
