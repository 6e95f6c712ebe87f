"""Compare the losses of train.py with and without each speed optimization: do they change the numbers?

The reference is train.py in one process; the other runs are train.py with other flags, and the bare loop without the
named optimizations. Prints the largest difference in the loss of any step, then one JSON line.

    python -m benchmarks.agree --max_train_steps 20
    python -m benchmarks.agree --max_train_steps 20 --compile
"""

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.bare import SWITCHES
from benchmarks.measuring import MODEL, PROMPTS, SUBJECT, run
from common.folders import read_json_lines

FLAGS = {
    "one Ray worker": ("--num_workers", 1),
    "gradient checkpointing": ("--num_workers", 0, "--gradient_checkpointing"),
    "compiled": ("--num_workers", 0, "--compile"),
}
PAIRS = {  # two pairs per step; the reference has them in one batch
    "two workers of one pair": ("--num_workers", 2),
    "two batches of one pair": ("--num_workers", 0, "--gradient_accumulation_steps", 2),
    "two workers, bf16 gradients": ("--num_workers", 2, "--reduce_dtype", "bf16"),
}


def main(args):
    """Run all, print a table, then one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        results = {}

        def train(name, *flags):
            output = Path(folder) / name.replace(" ", "-")
            images = ("--instance_images_dir", SUBJECT, "--class_images_dir", SUBJECT, *PROMPTS)
            steps = ("--max_train_steps", args.max_train_steps, "--log_every", 1)
            run("train.py", "--model_dir", MODEL, "--output_dir", output, *images, *steps, "--keep_checkpoints", *flags)
            return Path(f"{output}.work")

        def losses(log):
            return [line["loss"] for line in read_json_lines(log)]

        def compare(name, found, expected):
            results[name] = max(abs(a - b) for a, b in zip(found, expected, strict=True))
            print(f"{name:50s} {results[name]:.1e} of {expected[-1]:.2f}", flush=True)

        base = train("base", "--num_workers", 0)
        expected = losses(base / "log.jsonl")
        for name, flags in FLAGS.items():
            if name != "compiled" or args.compile:
                compare(name, losses(train(name, *flags) / "log.jsonl"), expected)
        for without in ((), *((switch,) for switch in SWITCHES), SWITCHES):
            log = Path(folder) / "-".join(("bare", *without))
            flags = ("--work_dir", base, "--model_dir", MODEL, "--log", log, "--log_every", 1)
            run("-m", "benchmarks.bare", *flags, "--max_train_steps", args.max_train_steps, "--without", *without)
            compare(f"bare loop without {', '.join(without) or 'Ray'}", losses(log), expected)
        pairs = losses(train("pairs", "--num_workers", 0, "--train_batch_size", 2) / "log.jsonl")
        for name, flags in PAIRS.items():
            compare(name, losses(train(name, *flags) / "log.jsonl"), pairs)
    print(json.dumps({"largest_differences": results, "steps": args.max_train_steps}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_train_steps", type=int, default=20, help="optimizer steps to compare")
    parser.add_argument("--compile", action="store_true", help="also compare train.py --compile, which takes minutes")
    main(parser.parse_args())
