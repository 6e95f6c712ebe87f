"""Measure what grows with the parts of a data set of latents: pretrain.py's start, the driver of preprocess.py.

The parts are hard links of one, and results of no encoder, so that any number fits this machine. Prints a table, then
one JSON line: seconds, and peak memory in MB of the driver alone.

    python -m benchmarks.index --parts 10 50000 --results 100000 1000000
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.measuring import MODEL, ROOT, run, write_data
from common.messages import Progress
from common.storage import Folder
from pretraining.card import find_facts
from pretraining.index import IndexWriter, describe_part, part_name, read_index
from pretraining.latents import METADATA, open_latents
from pretraining.statistics import Statistics, count_reasons
from pretraining.streams import Order
from pretraining.tally import Tally, summarise

ROWS = 256  # of a part
ALL_PARTS, WORKERS = 7_800_000, 256  # of two billion rows


def make_parts(template, folder, count):
    """Make a data set of `count` parts, all of them the first part of the one in `template`."""
    folder.mkdir()
    name = part_name(0, 0)
    data, metadata = (template / name).read_bytes(), json.loads((template / METADATA).read_text())
    record = describe_part(name, data)
    notes = json.loads(record["notes"])
    notes.pop("pictures")  # which only a few parts of a data set have
    record["notes"] = json.dumps(notes)
    with IndexWriter(Folder(folder)) as writer:
        for source in range(count):
            os.link(template / name, folder / part_name(source, 0))
            writer.add({**record, "source": source})
    files = writer.files
    metadata |= {"rows": count * metadata["rows"]}
    metadata["index"] = {"files": files, "sha256": read_index(Folder(folder), files).digest}
    (folder / METADATA).write_text(json.dumps(metadata))


def open_data(folder):
    """What the driver and a worker of pretrain.py do with the data before the first step."""
    files = open_latents(str(folder), MODEL, 64)
    next(Order(files.chunk_rows, 0, 1, 16, 0).pieces(0))
    files.locate({"chunk": 0})


def begin_order(count, world_size):
    """Find the first piece of one of `world_size` workers in the order of `count` parts."""
    rows = np.random.default_rng(0).integers(200, 257, count, np.int32)
    next(Order(rows, 0, world_size, 16 * world_size, 0).pieces(0))


def record(folder, count):
    """What the driver of preprocess.py does with `count` results, of which a tenth of the rows is bad."""
    from preprocess import record_parts

    bad = [[f"00000.parquet:0:{row}", "cannot be fetched: HTTP 404"] for row in range(ROWS // 10)]
    notes = {"bad": bad, "later": [], "filtered": {}, "reasons": count_reasons(reason for _, reason in bad)}
    notes["statistics"] = any_statistics(ROWS - len(bad)).to_note()
    facts = {"chunk": 0, "rows": ROWS - len(bad), "bad": len(bad), "later": 0, "filtered": 0, "bytes": 2**20}
    facts["sha256"], text = "ab" * 32, json.dumps(notes)
    results = ({**facts, "source": source, "notes": text + " "} for source in range(count))  # each has its own notes
    args = argparse.Namespace(input="synthetic", max_bad_fraction=0.2)
    with Progress("preprocess", count * ROWS, "rows") as progress:
        record_parts(args, IndexWriter(Folder(folder)), Tally(), progress, results)


def any_statistics(rows):
    """Statistics of images of many sizes and captions of many lengths, such as those of a table of URLs."""
    rng = np.random.default_rng(0)
    sides = np.exp2(rng.uniform(8, 12, (rows, 2))).astype(np.int64)
    crops = np.concatenate([sides, np.zeros((rows, 5), np.int64)], axis=1)
    lengths = rng.integers(3, 300, rows)
    return Statistics.of(crops, (256, 512), ["x" * length for length in lengths], lengths // 4 + 2, 77)


def add_up(folder):
    """What it then does for the data set card."""
    folder = Folder(folder)
    writer = IndexWriter(folder, len(folder.names(".parquet")))
    index = read_index(folder, writer.files)
    find_facts({"resolutions": [256, 512]}, 77, index, summarise(writer, index))


def _timed(function, arguments, results):
    os.chdir(ROOT)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    function(*arguments)
    memory = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    results.put((time.monotonic() - start, before / 1e3, memory / 1e3))


def measure(function, *arguments):
    """Call a function in a process of its own; return (seconds, peak memory in MB before and after it).

    The peak is that of the process, or of the command that it runs.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_timed, args=(function, arguments, results))
    process.start()
    found = results.get()
    process.join()
    return found


def main(args):
    """Measure and print."""
    rows = []

    def show(what, count, seconds, memory):
        rows.append({"what": what, "count": count, "seconds": round(seconds, 2), "mb": round(memory)})
        print(f"{what:44s} {count:9d}  {seconds:8.2f} s  {memory:6.0f} MB", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_data(place / "data", ROWS, 64)
        flags = ["--input", place / "data", "--model_dir", MODEL, "--output_dir", place / "template"]
        run("preprocess.py", *flags, "--num_workers", 0)
        for count in args.parts:
            make_parts(place / "template", place / f"parts-{count}", count)
        for count in args.parts:
            found = [measure(open_data, place / f"parts-{count}") for _ in range(args.repeats)]
            seconds, _, memory = map(statistics.median, zip(*found, strict=True))
            show("open a data set, parts", count, seconds, memory)
        found = [measure(begin_order, ALL_PARTS, WORKERS) for _ in range(args.repeats)]
        seconds, _, memory = map(statistics.median, zip(*found, strict=True))
        show(f"begin the order of one of {WORKERS} workers, parts", ALL_PARTS, seconds, memory)
        flags = ["--model_dir", MODEL, "--max_steps", 2, "--batch_size_per_worker", 2, "--num_workers", 0, "--data"]
        runs = {count: [] for count in args.parts}
        for number in range(args.repeats):
            for count in args.parts:
                output = place / f"out-{count}-{number}"
                words = *flags, place / f"parts-{count}", "--output_dir", output
                runs[count].append(measure(run, "pretrain.py", *words))
        for count, found in runs.items():
            seconds, _, memory = map(statistics.median, zip(*found, strict=True))
            show("pretrain.py, 2 steps in this process, parts", count, seconds, memory)
        for count in args.results:
            (place / f"results-{count}").mkdir()
            seconds, _, memory = measure(record, place / f"results-{count}", count)
            show("results of preprocess.py's actors", count, seconds, memory)
            seconds, _, memory = measure(add_up, place / f"results-{count}")
            show("statistics and card of as many parts", count, seconds, memory)
    print(json.dumps(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, nargs="+", default=[10, 50_000], help="parts of the data sets to open")
    parser.add_argument("--results", type=int, nargs="+", default=[100_000, 1_000_000], help="results of actors")
    parser.add_argument("--repeats", type=int, default=5, help="repeats; the median counts")
    main(parser.parse_args())
