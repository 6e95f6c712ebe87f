"""Measure how the time of a step of train.py scales with images, steps and workers, and model it for up to 64 workers.

Measures the embedded model: steps/s with 10 to 160 class images, early and late in a run, and with one and two workers
of one thread. The model of a step is compute time, linear in the pairs of a batch, plus the part of the gradient
all-reduce that does not overlap with the backward pass. In a ring, each of n workers sends 2 (n - 1) / n times the
bytes of the gradients in 2 (n - 1) hops per bucket. Compute time and bandwidth are fitted to the measurements; for
Stable Diffusion 1.x on GPUs they follow from FLOPs at an assumed utilisation and the nominal bandwidth of the links.

    python -m benchmarks.scaling --repeats 5 --output data/scaling.png
"""

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.measuring import LOG_EVERY, MODEL, PROMPTS, ROOT, SUBJECT, follow

IMAGES = (10, 40, 160)  # class images
THIRDS = ("steps 10 to 100", "steps 100 to 200", "steps 200 to 300")
PAIRS = (1, 2)  # per batch
WORKERS = (1, 2, 4, 8, 16, 32, 64)
BUCKET = 25 * 2**20  # bytes of a DDP bucket
# Stable Diffusion 1.x at 512 pixels: TFLOP of a pair, forward and backward; the weights of UNet and text encoder.
GPU = {"tflop": 2 * 2.407, "tflops": 312, "utilisation": 0.4, "weights": 859_520_964 + 123_060_480}
LINKS = {"NVLink, 200 GB/s": (200e9, 5e-6), "100 Gbit/s": (12.5e9, 20e-6)}  # bytes/s, seconds per hop
THIS_CPU = "this CPU"
CPU_PAIRS = (1, 2, 4)
BACKWARD = 2 / 3  # share of the compute time that overlaps with the all-reduce on a GPU; none does on a CPU
# Ways to improve the efficiency: (pairs per batch, batches per step, bytes per gradient)
REMEDIES = {
    "1 pair": (1, 1, 4),
    "1 pair, --reduce_dtype bf16": (1, 1, 2),
    "4 pairs": (4, 1, 4),
    "4 pairs, 8 batches": (4, 8, 4),
    "4 pairs, 8 batches, bf16": (4, 8, 2),
}


# ---------------------------------------------------------------------------------------------------------------------
# Measured


def make_images(folder, count):
    """Make a folder of `count` images of noise: the speed does not depend on their content."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(folder / f"{number:04d}.png")
    return folder


class Runs:
    """Runs of train.py in one folder."""

    def __init__(self, folder):
        self.folder, self.numbers = Path(folder), itertools.count()
        self.class_images = {count: make_images(self.folder / f"class-{count}", count) for count in IMAGES}

    def rates(self, *flags, num_class=IMAGES[0], steps=(2 * LOG_EVERY, 60)):
        """Return the steps/s between each two of `steps`."""
        output = self.folder / f"run-{next(self.numbers)}"
        images = ("--instance_images_dir", SUBJECT, "--class_images_dir", self.class_images[num_class], *PROMPTS)
        every = ("--max_train_steps", steps[-1], "--log_every", LOG_EVERY)
        log = Path(f"{output}.work/log.jsonl")
        seconds = follow(log, steps, "train.py", "--model_dir", MODEL, "--output_dir", output, *images, *every, *flags)
        return [(steps[i + 1] - steps[i]) / (seconds[i + 1] - seconds[i]) for i in range(len(steps) - 1)]


def measure(runs, repeats):
    """Return {measurement: [steps/s, ...]}, all measured alternately."""
    found = {}
    for _ in range(repeats):
        for count in IMAGES:
            found.setdefault(f"{count} class images", []).extend(runs.rates("--num_workers", 0, num_class=count))
        for name, rate in zip(THIRDS, runs.rates("--num_workers", 0, steps=(10, 100, 200, 300)), strict=True):
            found.setdefault(name, []).append(rate)
        for num_workers, pairs in itertools.product((1, 2), PAIRS):
            flags = ("--num_workers", num_workers, "--cpus_per_worker", 1, "--train_batch_size", pairs)
            name = f"{num_workers} workers of {pairs} pairs"
            found.setdefault(name, []).extend(runs.rates(*flags, steps=(10, 30)))
        print("  ".join(f"{name}: {rates[-1]:.2f}" for name, rates in found.items()), flush=True)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Modelled


def average_seconds(workers, weights, bytes_each, bytes_a_second, hop):
    """Return (seconds, bytes that each worker sends) of a ring all-reduce of the gradients."""
    size = weights * bytes_each
    sent = 2 * (workers - 1) / workers * size
    return sent / bytes_a_second + 2 * (workers - 1) * hop * -(-size // BUCKET), sent


def efficiency(workers, work, weights, wire, hop, hides=0.0, batches=1, bytes_each=4):
    """Return the share of its time that a worker computes; work: seconds per batch, with `batches` batches per step.

    hides: the share of a batch's work behind which the average may hide.
    """
    average = average_seconds(workers, weights, bytes_each, wire, hop)[0] if workers > 1 else 0.0
    step = batches * work
    return step / (step + max(0.0, average - hides * work))


def fit(medians, weights):
    """Return (seconds per step, seconds per pair, bytes/s between workers), fitted to measured steps/s."""
    one, two = ([1 / medians[f"{count} workers of {pairs} pairs"] for pairs in PAIRS] for count in (1, 2))
    pair = (one[1] - one[0]) / (PAIRS[1] - PAIRS[0])
    waits = [max(1e-3, b - a) for a, b in zip(one, two, strict=True)]
    return one[0] - PAIRS[0] * pair, pair, weights * 4 / statistics.mean(waits)


def count_pairs(pairs):
    """Return `1 pair`, `2 pairs`."""
    return f"{pairs} pair" + "s" * (pairs > 1)


def curves(medians, weights):
    """Return {name: [efficiency for each of WORKERS]} for CPU workers of this machine, and for GPUs with REMEDIES."""
    step, pair, wire = fit(medians, weights)
    found = {
        f"{THIS_CPU}: {count_pairs(pairs)}": [efficiency(n, step + pairs * pair, weights, wire, 1e-4) for n in WORKERS]
        for pairs in CPU_PAIRS
    }
    second = GPU["tflop"] / (GPU["tflops"] * GPU["utilisation"])
    for (link, speed), (name, (pairs, batches, size)) in itertools.product(LINKS.items(), REMEDIES.items()):
        rest = (GPU["weights"], *speed, BACKWARD, batches, size)
        found[f"{link}: {name}"] = [efficiency(n, pairs * second, *rest) for n in WORKERS]
    return found


def draw(found, medians, path):
    """Plot the curves, one panel per link, and the measured points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {THIS_CPU: "measured and fitted: embedded model, CPU"}
    titles |= {link: f"on paper: SD 1.x at 512, GPUs, {link}" for link in LINKS}
    figure, axes = pyplot.subplots(1, len(titles), figsize=(13, 4), sharey=True)
    for axis, (link, title) in zip(axes, titles.items(), strict=True):
        for name, values in found.items():
            if name.startswith(link):
                axis.plot(WORKERS, values, marker=".", label=name.removeprefix(f"{link}: "))
        axis.set(xscale="log", xlabel="workers", xticks=WORKERS, xticklabels=WORKERS, ylim=(0, 1.05))
        axis.set_title(title, fontsize=10)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for pairs in PAIRS:
        measured = medians[f"2 workers of {pairs} pairs"] / medians[f"1 workers of {pairs} pairs"]
        axes[0].plot([2], [measured], "o", label=f"measured, {count_pairs(pairs)}", color=f"C{CPU_PAIRS.index(pairs)}")
    for axis in axes[:2]:  # the third uses the colours of the second
        axis.legend(fontsize=8, loc="best")
    axes[0].set_ylabel("efficiency of a step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def count_weights():
    """Return the number of trainable weights of the embedded model."""
    from pipelines.model_folder import count_weights

    return sum(count_weights(ROOT / MODEL / name) for name in ("unet", "text_encoder"))


def main(args):
    """Measure, fit, plot the curves, and print tables, then one JSON line."""
    if args.measured:
        found = json.loads(Path(args.measured).read_text().splitlines()[-1])["steps_a_second"]
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Runs(folder), args.repeats)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    for name, rates in found.items():
        print(f"{name:28s} {medians[name]:6.2f} steps/s  ({min(rates):.2f} to {max(rates):.2f})")
    weights = count_weights()
    step, pair, wire = fit(medians, weights)
    print(f"fitted: {step:.3f} s a step and {pair:.3f} s a pair of work; gradients travel at {wire / 1e6:.0f} MB/s")
    print(f"{'efficiency of workers':50s}" + "".join(f"{n:7d}" for n in WORKERS))
    efficiencies = curves(medians, weights)
    for name, values in efficiencies.items():
        print(f"{name:50s}" + "".join(f"{100 * value:6.0f}%" for value in values))
    for label, count in (("embedded", weights), ("SD 1.x", GPU["weights"])):
        sent = [average_seconds(n, count, 4, 1, 0)[1] / 1e6 for n in WORKERS]
        print(f"{f'MB that a worker sends a step, {label}':50s}" + "".join(f"{each:7.0f}" for each in sent))
    draw(efficiencies, medians, args.output)
    print(json.dumps({"steps_a_second": found, "fit": [step, pair, wire], "efficiency": efficiencies}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each measurement")
    parser.add_argument("--measured", help="file with the output of an earlier run whose measurements are reused")
    parser.add_argument("--output", required=True, help="image file to plot the curves to")
    main(parser.parse_args())
