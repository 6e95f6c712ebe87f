"""The flags that train.py and pretrain.py share, with the defaults of each."""

import argparse
from dataclasses import fields

from common import cli
from pipelines.loading import STORAGE_DTYPES
from training.task import Adapters

LORA_SETTINGS = tuple(field.name for field in fields(Adapters))  # flags of a LoRA, which decide its weights or files
# Flags that decide the rounding of the weights, with their defaults. Results of pretrain.py record the others.
ROUNDING = {"use_8bit_adam": False, "reduce_dtype": "fp32", "compile": False}
SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")


def add_switch(group: argparse._ArgumentGroup, name: str, default: bool | None, help_text: str) -> None:
    """Add --NAME and --no-NAME."""
    group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default, help=help_text)


def add_optimizer_flags(
    group: argparse._ArgumentGroup, lr: float | None, lr_scheduler: str, lr_warmup_steps: int, lr_names: tuple[str, ...]
) -> None:
    """Add the flags of task.Optimization that both scripts have, and those of the loss and of memory.

    lr: None for that of the model's family.
    """
    rate = "learning rate"
    rate += "" if lr else "; default: by the model, 5e-6 for Stable Diffusion, 1e-4 with --lora"
    group.add_argument(*lr_names, type=cli.positive_float, default=lr, help=rate)
    group.add_argument("--lr_scheduler", choices=SCHEDULES, default=lr_scheduler, help="learning-rate schedule")
    warmup = "steps over which the learning rate rises linearly from 0"
    group.add_argument("--lr_warmup_steps", type=cli.non_negative_int, default=lr_warmup_steps, help=warmup)
    group.add_argument("--adam_weight_decay", type=cli.non_negative_float, default=1e-2, help="weight decay of AdamW")
    norm = "largest norm of the gradients; larger ones are scaled down to it"
    group.add_argument("--max_grad_norm", type=cli.positive_float, default=1.0, help=norm)
    snr = "weight the loss by min-SNR (arXiv 2303.09556) with this gamma, usually 5; default: no weighting"
    group.add_argument("--snr_gamma", type=cli.positive_float, help=snr)
    checkpointing = "recompute activations in the backward pass: less memory, about a third more time per step"
    add_switch(group, "gradient_checkpointing", None, f"{checkpointing}; default: on a GPU for SDXL, SD 3 and FLUX")


def add_saving_flags(group: argparse._ArgumentGroup, strategies: str) -> None:
    """Add the flags that save memory and bytes to send; strategies: those of parallel.wrap that the script has."""
    adam = "keep AdamW's moving averages in 8 bits to save memory; requires bitsandbytes"
    group.add_argument("--use_8bit_adam", action="store_true", help=adam)
    reduce = f"data type in which {strategies} averages gradients between workers"
    group.add_argument("--reduce_dtype", choices=("fp32", "bf16"), default=ROUNDING["reduce_dtype"], help=reduce)


def add_compile_flag(group: argparse._ArgumentGroup) -> None:
    """Add --compile."""
    compiled = "compile the model with torch.compile: minutes at the start, then faster steps"
    group.add_argument("--compile", action="store_true", help=compiled)


def given_rounding(args: argparse.Namespace) -> dict[str, bool | str]:
    """Return those of ROUNDING that are not at their default."""
    return {name: getattr(args, name) for name, default in ROUNDING.items() if getattr(args, name) != default}


def add_lora_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of task.Adapters."""
    rank = "train a LoRA of this rank, usually 4 to 64, in place of all weights: a file of some megabytes"
    group.add_argument("--lora", "--rank", type=cli.positive_int, metavar="RANK", help=rank)
    alpha = "strength of the LoRA, which is scaled by alpha / RANK; default: RANK"
    group.add_argument("--lora_alpha", type=cli.positive_float, help=alpha)
    dropout = "share of the inputs of the LoRA that are dropped in training"
    group.add_argument("--lora_dropout", type=cli.fraction, default=0.0, help=dropout)
    layers = "layers of the denoiser that get a LoRA: those of attention, or the feed-forward layers too"
    group.add_argument("--lora_layers", choices=("attention", "all"), default="attention", help=layers)
    group.add_argument("--rslora", action="store_true", help="scale by alpha / sqrt(RANK): arXiv 2312.03732")
    bits = "bits of the weights of the base model in training: 8 (LLM.int8) or 4 (NF4); less memory, slower steps; "
    bits += "requires bitsandbytes; default: those of --mixed_precision"
    group.add_argument("--base_bits", type=int, choices=(8, 4), help=bits)
    kind = "data type of the weights in the files"
    group.add_argument("--save_dtype", choices=tuple(STORAGE_DTYPES), default="fp16", help=kind)
    group.add_argument("--merge", action="store_true", help="write the whole pipeline to --output_dir too")


def check_lora(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a usage error if a flag of a LoRA cannot be used; set --lora_alpha to the rank if needed."""
    if args.base_bits and args.compile:
        parser.error("--base_bits and --compile do not work together: use only one of them")
    if args.lora:
        args.lora_alpha = args.lora_alpha or float(args.lora)
        if args.lora_dropout == 1:
            parser.error("--lora_dropout 1 drops all inputs, so that nothing is learned: use a smaller one")
        return
    given = [name for name in LORA_SETTINGS if getattr(args, name) != parser.get_default(name)]
    if given:
        parser.error(f"--{given[0]} has no effect without --lora")


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
