"""Check that a change to the code does not change results: run the scripts of two revisions and compare their output.

Checks out the earlier revision into a temporary folder, runs the same commands there and here with this Python, and
compares bit by bit the weights of train.py and pretrain.py, the latents of preprocess.py, the pictures of run_model.py
and the measures of evaluate.py. The last line is JSON; the exit code is 1 if anything differs.

    python -m benchmarks.same_results --before HEAD~1
    python -m benchmarks.same_results --before main --num_workers 1 --steps 50
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from safetensors.numpy import load_file

from benchmarks.measuring import CLASS_PROMPT, INSTANCE_PROMPT, MODEL, PROMPTS, ROOT, SUBJECT, write_data

NUM_ROWS = 64  # of the raw data that is encoded
PREFIX = ("output_dir", "report", "drawn", "settings", "details")  # of evaluation.json, what names folders or differs


def commands(data, out, steps, num_workers):
    """Return (script, flags) of a small job for each script; data: folder of raw images; out: folder for results."""
    draw = ("--num_inference_steps", 10, "--guidance_scale", 3, "--num_workers", num_workers)
    eight, shown = ("--prompts", CLASS_PROMPT, "--num_samples_per_prompt", 8), ("--validation_prompts", CLASS_PROMPT)
    images = ("--instance_images_dir", SUBJECT, "--class_images_dir", out / "class")
    model = ("--model_dir", MODEL)
    few = ("--max_train_steps", steps, "--num_workers", num_workers, "--gradient_accumulation_steps", 2)
    rows = ("--max_steps", steps, "--batch_size_per_worker", 4, "--num_workers", num_workers, "--lr_warmup_steps", 2)
    tuned = ("--model_dir", out / "tuned")
    measured = ("--base_model_dir", MODEL, "--clip_model", "models/emoji-clip", "--dino_model", "none")
    return [
        ("run_model.py", (*model, *eight, *draw, "--output_dir", out / "class")),
        ("train.py", (*model, *images, *PROMPTS, *few, *shown, "--output_dir", out / "tuned")),
        ("run_model.py", (*tuned, "--prompts", INSTANCE_PROMPT, *draw, "--output_dir", out / "new")),
        ("evaluate.py", (*tuned, *measured, *images, *PROMPTS, *draw, "--output_dir", out / "evaluation")),
        ("preprocess.py", (*model, "--input", data, "--output_dir", out / "latents", "--num_workers", num_workers)),
        ("pretrain.py", (*model, "--data", out / "latents", *rows, "--output_dir", out / "base")),
        ("pretrain.py", (*model, "--data", data, "--online", *rows, "--output_dir", out / "online")),
    ]


def run(tree, script, flags):
    """Run a script of a source tree and wait for it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # sums depend on the threads, and those on what else runs
    done = subprocess.run(
        [sys.executable, script, *map(str, flags)], cwd=tree, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{tree}: {script} ended with {done.returncode}: {done.stderr[-2000:]}")


def read_results(out):
    """Return {name: array or JSON} of the results under `out` that must not change."""
    found = {}
    for path in sorted(out.rglob("*.safetensors")):
        found |= {f"{path.relative_to(out)}:{name}": tensor for name, tensor in load_file(path).items()}
    for path in sorted(out.rglob("*.png")):
        found[str(path.relative_to(out))] = np.asarray(Image.open(path))
    for path in sorted(out.rglob("part-*.parquet")):
        table = pq.read_table(path)
        found |= {f"{path.relative_to(out)}:{name}": read_values(table, name) for name in table.column_names}
    evaluation = json.loads((out / "evaluation" / "evaluation.json").read_text())
    return found | {"evaluation": {name: value for name, value in evaluation.items() if name not in PREFIX}}


def read_values(table, name):
    """Return the numbers of a column of latents, which older versions wrote as tensors, or the values of another."""
    column, facts = table[name].combine_chunks(), table.schema.field(name).metadata or {}
    if b"dtype" in facts:
        return np.frombuffer(b"".join(column.to_pylist()), facts[b"dtype"].decode())
    return column.to_numpy_ndarray().ravel() if isinstance(column, pa.FixedShapeTensorArray) else column.to_pylist()


def is_equal(one, other):
    """Return whether two results are bit-equal."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return one == other


def main(args):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        before = folder / "before"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", before, args.before], cwd=ROOT, check=True)
        try:
            write_data(folder / "data", NUM_ROWS, 64)
            results = {}
            for name, tree in (("before", before), ("after", ROOT)):
                out = folder / f"results-{name}"
                for script, flags in commands(folder / "data", out, args.steps, args.num_workers):
                    print(f"{name}: {script}", file=sys.stderr)
                    run(tree, script, flags)
                results[name] = read_results(out)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    one, other = results["before"], results["after"]
    missing = sorted(one.keys() ^ other.keys())
    different = [name for name in one if name in other and not is_equal(one[name], other[name])]
    print(json.dumps({"before": args.before, "compared": len(one), "missing": missing, "different": different}))
    sys.exit(bool(missing or different))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="HEAD", help="revision to compare the working tree with")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of train.py and pretrain.py")
    parser.add_argument("--num_workers", type=int, default=0, help="Ray workers and actors; 0: without Ray")
    main(parser.parse_args())
