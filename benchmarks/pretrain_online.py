"""How many images a second pretrain.py trains on, from Parquet latents and from raw data (--online), in turn.

A run of 1 step is taken from one of --steps, so that start-up does not count.

    python benchmarks/pretrain_online.py --steps 41 --repeats 5
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, write_data


def seconds(folder, flags, steps, args):
    """Return how long a run of some steps takes."""
    command = [
        sys.executable,
        "pretrain.py",
        "--model_dir",
        args.model_dir,
        "--output_dir",
        f"{folder}/run-{time.time_ns()}",
    ]
    command += ["--max_steps", str(steps), "--batch_size_per_worker", str(args.batch_size), *flags]
    command += ["--num_workers", str(args.num_workers)]
    start = time.monotonic()
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - start


def main(args):
    """Measure both in turn, print a table, then one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder) / "raw", args.rows, args.size)
        command = [sys.executable, "preprocess.py", "--input", f"{folder}/raw", "--output_dir", f"{folder}/latents"]
        command += ["--model_dir", args.model_dir, "--num_workers", "0"]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ways = {"offline": ["--data", f"{folder}/latents"], "online": ["--data", f"{folder}/raw", "--online"]}
        rates = {way: [] for way in ways}
        for _ in range(args.repeats):
            for way, flags in ways.items():
                spent = seconds(folder, flags, args.steps, args) - seconds(folder, flags, 1, args)
                rates[way].append((args.steps - 1) * args.batch_size * max(1, args.num_workers) / spent)
            print("  ".join(f"{way} {values[-1]:6.1f} images/s" for way, values in rates.items()), flush=True)
    medians = {way: statistics.median(values) for way, values in rates.items()}
    ratios = sorted(online / offline for online, offline in zip(rates["online"], rates["offline"], strict=True))
    result = {"medians": medians, "online_over_offline": statistics.median(ratios), "spread": [ratios[0], ratios[-1]]}
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=41, help="of the longer run")
    parser.add_argument("--repeats", type=int, default=5, help="of both ways")
    parser.add_argument("--rows", type=int, default=2000, help="of the data")
    parser.add_argument("--size", type=int, default=96, help="pixels a side of the raw images")
    parser.add_argument("--batch_size", type=int, default=16, help="rows a worker takes")
    parser.add_argument("--model_dir", default="models/emoji-64", help="model whose UNet is trained")
    parser.add_argument("--num_workers", type=int, default=0, help="as of pretrain.py")
    main(parser.parse_args())
