"""Compare the speed of pretrain.py on Parquet latents and on raw data (--online), in images per second.

Runs both alternately; prints the speed of each run, then one JSON line.

    python -m benchmarks.pretrain_online --steps 42 --repeats 5
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import LOG_EVERY, ROOT, rate, write_data


def measure(folder, flags, args):
    """Return the images per second of one run, between its tenth and its last step."""
    output = Path(folder) / f"run-{time.time_ns()}"
    flags = [*flags, "--model_dir", args.model_dir, "--output_dir", output, "--max_steps", args.steps]
    flags += ["--batch_size_per_worker", args.batch_size, "--num_workers", args.num_workers, "--log_every", LOG_EVERY]
    steps_a_second = rate(Path(f"{output}.work/log.jsonl"), 2 * LOG_EVERY, args.steps, "pretrain.py", *flags)
    return steps_a_second * args.batch_size * max(1, args.num_workers)


def main(args):
    """Measure both alternately, print a table, then one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder) / "raw", args.rows, args.size)
        command = [sys.executable, "preprocess.py", "--input", f"{folder}/raw", "--output_dir", f"{folder}/latents"]
        command += ["--model_dir", args.model_dir, "--num_workers", "0"]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ways = {"offline": ["--data", f"{folder}/latents"], "online": ["--data", f"{folder}/raw", "--online"]}
        rates = {way: [] for way in ways}
        for _ in range(args.repeats):
            for way, flags in ways.items():
                rates[way].append(measure(folder, flags, args))
            print("  ".join(f"{way} {values[-1]:6.1f} images/s" for way, values in rates.items()), flush=True)
    medians = {way: statistics.median(values) for way, values in rates.items()}
    ratios = sorted(online / offline for online, offline in zip(rates["online"], rates["offline"], strict=True))
    result = {"medians": medians, "online_over_offline": statistics.median(ratios), "spread": [ratios[0], ratios[-1]]}
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=42, help="optimizer steps; the first ten are not measured")
    parser.add_argument("--repeats", type=int, default=5, help="runs on latents and on raw data")
    parser.add_argument("--rows", type=int, default=2000, help="rows of the data set")
    parser.add_argument("--size", type=int, default=96, help="side length in pixels of the raw images")
    parser.add_argument("--batch_size", type=int, default=16, help="rows per worker and step")
    parser.add_argument("--model_dir", default="models/emoji-64", help="model whose UNet is trained")
    parser.add_argument("--num_workers", type=int, default=0, help="workers of pretrain.py; 0: without Ray")
    main(parser.parse_args())
