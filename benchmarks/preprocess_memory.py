"""Does preprocess.py's memory grow with its data? Peak memory of the whole process tree at two sizes of data.

python benchmarks/preprocess_memory.py --rows 2000 20000 --num_workers 1
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from common import ROOT, write_data


def tree_memory(process):
    """Return the bytes that a process and its children hold, by name; shared memory counts once (PSS)."""
    held = Counter()
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            name = (each.cmdline() or [each.name()])[0]
            held[Path(name).name if name.startswith("/") else name] += each.memory_full_info().pss
    return held


def measure(command):
    """Run a command; return (bytes of its tree by process at their peak, seconds)."""
    start, peak = time.monotonic(), Counter()
    running = psutil.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
    while running.poll() is None:
        peak = max(peak, tree_memory(running), key=Counter.total)
        time.sleep(0.5)
    if running.returncode:
        sys.exit(f"{command} ended with {running.returncode}")
    return peak, time.monotonic() - start


def main(args):
    """Measure each size and print a table, then one JSON line."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for rows in args.rows:
            write_data(Path(folder) / f"data-{rows}", rows, args.size)
            command = [
                sys.executable,
                "preprocess.py",
                "--input",
                f"{folder}/data-{rows}",
                "--model_dir",
                args.model_dir,
            ]
            command += ["--output_dir", f"{folder}/latents-{rows}", "--num_workers", str(args.num_workers)]
            held, seconds = measure(command)
            peak, parts = held.total(), {name: round(size / 1e6) for name, size in held.most_common()}
            results.append(
                {"rows": rows, "peak_mb": round(peak / 1e6), "seconds": round(seconds, 1), "parts_mb": parts}
            )
            print(f"{rows:8d} rows  {peak / 1e6:8.0f} MB  {seconds:8.1f} s  {rows / seconds:6.1f} rows/s", flush=True)
    growth = results[-1]["peak_mb"] / results[0]["peak_mb"]
    print(json.dumps({"results": results, "growth": round(growth, 3), "num_workers": args.num_workers}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2000, 20000], help="sizes of the data")
    parser.add_argument("--size", type=int, default=96, help="pixels a side of the raw images")
    parser.add_argument("--model_dir", default="models/emoji-64", help="model that encodes")
    parser.add_argument("--num_workers", type=int, default=1, help="as of preprocess.py")
    main(parser.parse_args())
