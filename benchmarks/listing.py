"""Measure what the drivers of preprocess.py and pretrain.py --online do with raw data before the first row is read.

The Parquet files are hard links of one with a hundred row groups, so that any number fits this machine. Prints a table,
then one JSON line: seconds, and peak memory in MB of the driver alone.

    python -m benchmarks.listing --row_groups 20000 2000000
"""

import argparse
import json
import os
import pickle
import tempfile
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.index import measure
from common.folders import digest_list
from common.storage import Folder
from pretraining.index import read_index
from pretraining.online import RawImages
from pretraining.parts import missing_parts
from pretraining.raw_data import list_sources

GROUPS = 100  # row groups of a file
ROWS = 4  # of a row group; a chunk has one, so that there are four in a row group, as in row groups of 1,000 rows


def make_data(folder, count):
    """Make a folder of Parquet files with `count` row groups in sum."""
    folder.mkdir()
    rows = GROUPS * ROWS
    table = pa.table({"url": ["http://127.0.0.1/x.jpg"] * rows, "caption": ["x"] * rows})
    pq.write_table(table, folder / "000000.parquet", row_group_size=ROWS)
    for number in range(1, count // GROUPS):
        os.link(folder / "000000.parquet", folder / f"{number:06d}.parquet")


def list_data(folder):
    """List the row groups, which both drivers do first."""
    return list_sources(str(folder))


def encode(folder):
    """List, and calculate what preprocess.py does then: the digest of the input, the items of the actors."""
    sources = list_data(folder)
    digest_list(sources.facts())
    items = missing_parts(sources, read_index(Folder(folder), []), 1)
    print(f"    {len(items)} items, {sum(len(pickle.dumps(item)) for item in items) / 1e6:.1f} MB")


def train(folder):
    """List, and calculate what pretrain.py does then: the digest, the configuration of a worker, its chunks."""
    data = RawImages(vars(list_data(folder)), 1, {}, {}, 0.05)
    digest_list(data.fingerprint)
    config = pickle.dumps(asdict(data))
    print(f"    configuration {len(config) / 1e6:.1f} MB")
    data = RawImages(**pickle.loads(config))
    data.locate({"chunk": len(data.chunk_rows) - 1})


def main(args):
    """Measure and print."""
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for count in args.row_groups:
            make_data(Path(folder, str(count)), count)
            for function in (list_data, encode, train):
                seconds, _, memory = measure(function, Path(folder, str(count)))
                what = function.__name__
                table.append({"what": what, "row_groups": count, "seconds": round(seconds, 2), "mb": round(memory)})
                print(f"{what:10s} {count:9d}  {seconds:8.2f} s  {memory:6.0f} MB", flush=True)
    print(json.dumps(table))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    counts = "row groups of the folders to list"
    parser.add_argument("--row_groups", type=int, nargs="+", default=[20_000, 2_000_000], help=counts)
    main(parser.parse_args())
