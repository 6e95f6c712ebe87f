"""Measure whether a worker of pretrain.py has its batches in time, with latents of Stable Diffusion 2's shapes.

A consumer takes `--images_per_second` images, as a GPU would, and waits when there is no batch. Prints the share of the
time in which it was busy, its peak memory, and rows/s without waiting; the last line is JSON.

    python -m benchmarks.reading --parts 64 --images_per_second 100
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from common.storage import Folder
from pretraining.batches import Batching, ahead, training_batches
from pretraining.columns import to_parquet
from pretraining.index import IndexWriter, describe_part, part_name, read_index
from pretraining.latents import LatentFiles
from pretraining.online import make_load
from pretraining.streams import Order, count_streams

ROWS, BATCH = 256, 32
SHAPES = {"mean": (4, 32, 32), "std": (4, 32, 32), "text_encoder.hidden": (77, 1024)}  # SD 2 at 256 pixels


class Times:
    """Draws timesteps."""

    def draw_time(self, rng):
        """Return a timestep."""
        return int(rng.integers(1000))


def make_data(folder, count):
    """Write a data set of `count` parts of random numbers; return its LatentFiles."""
    rng, place = np.random.default_rng(0), Folder(folder)
    names = {field: field.replace(".", "_") for field in SHAPES}
    with IndexWriter(place) as writer:
        for source in range(count):
            keys = [f"x:{row}" for row in range(ROWS)]
            columns = {
                names[field]: rng.standard_normal((ROWS, *shape)).astype("f2") for field, shape in SHAPES.items()
            }
            data = to_parquet({"keys": keys, "captions": keys, "bad": []}, columns)
            place.write(part_name(source, 0), data)
            writer.add(describe_part(part_name(source, 0), data))
    files = writer.files
    index = {"files": files, "sha256": read_index(place, files).digest}
    return LatentFiles(str(folder), {field: (names[field], shape) for field, shape in SHAPES.items()}, index)


def consume(data, window, prefetch, seconds_per_batch, steps):
    """Take batches; return (seconds, seconds until the first batch)."""
    order = Order(data.chunk_rows, 0, 1, count_streams(window, [1], len(data.chunk_rows)), 0)
    batching = Batching(BATCH, 1, 0.1, 0, Times())
    no_caption = {"text_encoder.hidden": np.zeros(SHAPES["text_encoder.hidden"], "f2")}
    batches = training_batches(order, make_load(data, {"num_workers": 0}), 0, steps, batching, no_caption, True)
    start, first = time.monotonic(), None
    for _ in ahead(batches, prefetch):
        first = first or time.monotonic() - start
        time.sleep(seconds_per_batch)
    return time.monotonic() - start, first


def main(args):
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder), args.parts)
        steps = args.epochs * args.parts * ROWS // BATCH
        per_batch = BATCH / args.images_per_second
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        seconds, first = consume(data, args.shuffle_window, args.prefetch_batches, per_batch, steps)
        busy = steps * per_batch / (seconds - first)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        fast, _ = consume(data, args.shuffle_window, args.prefetch_batches, 0, steps)
    row = {
        "busy": round(busy, 4),
        "first_batch_s": round(first, 2),
        "peak_mb": round(memory),
        "before_mb": round(before),
    }
    print(json.dumps(row | {"rows_per_second": round(steps * BATCH / fast), "steps": steps}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=64, help="parts of the data set, 45 MB each")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the data")
    parser.add_argument("--images_per_second", type=float, default=100, help="speed of the consumer")
    parser.add_argument("--shuffle_window", type=int, default=16, help="as of pretrain.py")
    parser.add_argument("--prefetch_batches", type=int, default=4, help="as of pretrain.py")
    main(parser.parse_args())
