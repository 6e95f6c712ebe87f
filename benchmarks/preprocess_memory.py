"""Measure the peak memory of preprocess.py, over its whole process tree, for data sets of different sizes.

Prints a table, then one JSON line.

    python -m benchmarks.preprocess_memory --rows 2000 20000 --num_workers 1
"""

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.measuring import peak_memory, write_data


def main(args):
    """Measure each size and print a table, then one JSON line."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for rows in args.rows:
            write_data(Path(folder) / f"data-{rows}", rows, args.size)
            command = ["preprocess.py", "--input", f"{folder}/data-{rows}", "--model_dir", args.model_dir]
            command += ["--output_dir", f"{folder}/latents-{rows}", "--num_workers", args.num_workers]
            parts, seconds = peak_memory(command)
            peak = sum(parts.values())
            results.append({"rows": rows, "peak_mb": peak, "seconds": round(seconds, 1), "parts_mb": parts})
            print(f"{rows:8d} rows  {peak:8d} MB  {seconds:8.1f} s  {rows / seconds:6.1f} rows/s", flush=True)
    growth = results[-1]["peak_mb"] / results[0]["peak_mb"]
    print(json.dumps({"results": results, "growth": round(growth, 3), "num_workers": args.num_workers}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2000, 20000], help="number of rows in each data set")
    parser.add_argument("--size", type=int, default=96, help="side length in pixels of the raw images")
    parser.add_argument("--model_dir", default="models/emoji-64", help="model to encode with")
    parser.add_argument("--num_workers", type=int, default=1, help="actors of preprocess.py; 0: without Ray")
    main(parser.parse_args())
