"""Check that DDP and each FSDP sharding train alike, and recover from a killed worker or a change in their number.

Trains the embedded model's UNet for 20 steps on two workers with each strategy, kills a worker at step 11, and resumes
a checkpoint of two workers with one, on other rows, since the rows depend on the number of workers.

    python -m benchmarks.shardings
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.measuring import ROOT, write_data

STEPS, KILL_AT = 20, 11
WAYS = {"ddp": ("--strategy", "ddp")} | {
    name: ("--strategy", "fsdp", "--fsdp_sharding", name)
    for name in ("NO_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "FULL_SHARD")
}


def read_losses(output):
    """Return {step: loss} of a run."""
    path = Path(f"{output}.work/log.jsonl")
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {line["step"]: line["loss"] for line in lines}


def read_weights(output):
    """Return the bytes of the UNet that a run published."""
    return b"".join(path.read_bytes() for path in sorted(Path(output, "unet").glob("*.safetensors")))


def pretrain(args, data, output, *flags, kill=False, num_workers=2, steps=STEPS):
    """Run pretrain.py and return its output folder; `kill`: SIGKILL one of its workers during the run."""
    command = [sys.executable, "pretrain.py", "--data", data, "--model_dir", args.model_dir, "--output_dir", output,
               "--init_from_pretrained", "--max_steps", steps, "--batch_size_per_worker", 8 // num_workers,
               "--lr_warmup_steps", 5, "--log_every", 1, "--checkpointing_steps", 5, "--num_workers", num_workers,
               *flags]  # fmt: skip
    with tempfile.TemporaryFile("w+") as errors:
        running = psutil.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)
        while running.poll() is None:
            if kill and len(read_losses(output)) >= KILL_AT:
                tree = running.children(recursive=True)
                next(each for each in tree if "RayTrainWorker" in " ".join(each.cmdline())).send_signal(signal.SIGKILL)
                kill = False
            time.sleep(0.02)
        if running.returncode or kill:
            errors.seek(0)
            sys.exit(f"{command} ended with {running.returncode}: {errors.read()[-2000:]}")
    return output


def largest_difference(one, other):
    """Return the largest difference between the losses of two runs at the same step."""
    one, other = read_losses(one), read_losses(other)
    assert one.keys() == other.keys() == set(range(1, STEPS + 1)), (len(one), len(other))
    return max(abs(one[step] - other[step]) for step in one)


def main(args):
    """Run all, print a line for each, then one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder) / "raw", 320, 64)
        command = ["--input", f"{folder}/raw", "--output_dir", f"{folder}/latents", "--num_workers", "0"]
        command = [sys.executable, "preprocess.py", "--model_dir", args.model_dir, "--rows_per_file", "32", *command]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        data, result = f"{folder}/latents", {}
        for name in args.ways:
            flags = WAYS[name]
            pretrain(args, data, f"{folder}/{name}", *flags)
            result[name] = largest_difference(f"{folder}/{args.ways[0]}", f"{folder}/{name}")
            print(f"{name:14s} losses of {STEPS} steps within {result[name]:.1e} of {args.ways[0]}'s", flush=True)
        for name in dict.fromkeys((args.ways[0], args.ways[-1])):
            killed = pretrain(args, data, f"{folder}/killed-{name}", *WAYS[name], kill=True)
            equal = read_weights(killed) == read_weights(f"{folder}/{name}")
            result[f"killed_{name}"] = equal
            found = "bit-equal" if equal else "DIFFER"
            print(f"{name:14s} a worker killed at step {KILL_AT}: weights {found}", flush=True)
        pretrain(args, data, f"{folder}/fewer", *WAYS[args.ways[-1]], steps=10)
        pretrain(args, data, f"{folder}/fewer", num_workers=1)
        losses = [read_losses(f"{folder}/{name}") for name in ("fewer", args.ways[0])]
        one, two = (statistics.mean(each[step] for step in range(11, STEPS + 1)) for each in losses)
        result["two_workers_then_one"] = [one, two]
        print(
            f"{args.ways[-1]} for 10 steps, then one worker: mean loss of the others {one:.3f}; two workers' {two:.3f}"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir", default="models/emoji-64", help="model whose UNet is trained")
    ways_help = "strategies to compare with the first of them"
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help=ways_help)
    main(parser.parse_args())
