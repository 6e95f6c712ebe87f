"""The flags of pretrain.py that no other script has, but for those of its data and its model."""

import argparse

from common import cli
from training import flags, parallel


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the training, and of checkpoints and logs."""
    group = parser.add_argument_group("training")
    steps = "length of the run in optimizer steps; overrides --max_epochs"
    group.add_argument("--max_steps", type=cli.positive_int, help=steps)
    epochs = "length of the run in passes over the data"
    group.add_argument("--max_epochs", type=cli.positive_int, default=1, help=epochs)
    batch = "number of rows in a batch of one worker"
    group.add_argument("--batch_size_per_worker", type=cli.positive_int, default=32, help=batch)
    accumulation = "batches of a worker in one optimizer step"
    group.add_argument("--gradient_accumulation_steps", type=cli.positive_int, default=1, help=accumulation)
    flags.add_optimizer_flags(group, 1e-4, "constant_with_warmup", 10000, ("--lr",))
    ema = "decay of the exponential moving average of the weights; 0 keeps no average"
    group.add_argument("--ema_decay", type=cli.fraction, default=0.9999, help=ema)
    dropout = "share of the rows that are trained without caption, for classifier-free guidance"
    group.add_argument("--caption_dropout", type=cli.fraction, default=0.1, help=dropout)
    flags.add_saving_flags(group, "DDP or FSDP")
    flags.add_compile_flag(group)
    group.add_argument("--seed", type=cli.seed, default=0, help="seed of new weights, row order, noise and timesteps")

    group = parser.add_argument_group("checkpoints and logs")
    between = "number of steps between two computations of the validation loss"
    group.add_argument("--validation_steps", type=cli.positive_int, default=1000, help=between)
    flags.add_checkpoint_flags(group, 1000, keep=True, what="checkpoints")


def add_strategy_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of what the workers share."""
    strategy = "ddp: each worker holds the whole UNet; fsdp: the workers share its weights"
    group.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp", help=strategy)
    sharding = "what FSDP shards, under the names of PyTorch's ShardingStrategy"
    group.add_argument("--fsdp_sharding", choices=parallel.SHARDINGS, default="FULL_SHARD", help=sharding)


def check_strategy(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a usage error if other flags do not work with --strategy."""
    if args.use_8bit_adam and args.strategy == "fsdp":
        parser.error("--use_8bit_adam needs whole weights, which --strategy fsdp shards: use only one of them")
