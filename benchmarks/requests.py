"""Count the requests to an object store that listing and reading raw data takes, per tar and per Parquet file.

Starts a local S3 behind a proxy that counts. Prints a table of requests, and the bytes of those that ask for a range,
for inputs with few and with many rows, then one JSON line.
Three requests of each listing are for the names in the folder.

    python -m benchmarks.requests --rows 1000 10000
"""

import argparse
import io
import json
import logging
import os
import re
import tarfile
import urllib.request

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.storage import Folder
from pretraining import tars
from pretraining.raw_data import list_sources
from pretraining.rows import read_rows
from tests.faulty_store import FaultyStore

CHUNK = 256  # rows of a chunk, as --rows_per_file


def make_tar(rows, image):
    """Return a tar of samples of an image, a caption and a JSON file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for row in range(rows):
            for suffix, data in (("jpg", image), ("txt", b"a caption"), ("json", b"{}")):
                entry = tarfile.TarInfo(f"{row:06d}.{suffix}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def make_parquet(rows, size, row_group):
    """Return a Parquet file of images of `size` bytes and captions in row groups of `row_group` rows."""
    buffer = io.BytesIO()
    rng = np.random.default_rng(0)
    images = [rng.bytes(size) for _ in range(rows)]
    table = pa.table({"image": pa.array(images, pa.binary()), "caption": ["a caption"] * rows})
    pq.write_table(table, buffer, row_group_size=row_group, use_dictionary=False)
    return buffer.getvalue()


def measure(store, uri, rows, size):
    """Return {what is done: (requests, bytes of ranges)} for tars and Parquet files of `rows` rows."""
    image = np.random.default_rng(0).bytes(size)
    folders = {name: uri(f"{name}-{rows}") for name in ("tar", "img2dataset", "parquet", "large")}
    Folder(folders["tar"]).write("00000.tar", make_tar(rows, image))
    Folder(folders["img2dataset"]).write("00000.tar", make_tar(rows, image))
    Folder(folders["img2dataset"]).write("00000_stats.json", json.dumps({"successes": rows}).encode())
    Folder(folders["parquet"]).write("00000.parquet", make_parquet(rows, size, 1000))
    Folder(folders["large"]).write("00000.parquet", make_parquet(rows, size, rows))
    counts = {}

    def count(name, do):
        tars.find_offsets.cache_clear()  # as in another process
        store.clear()
        result = do()
        ranges = [re.fullmatch(r"bytes=(\d+)-(\d+)", each.range or "") for each in store.requests]
        counts[name] = len(ranges), sum(int(each[2]) + 1 - int(each[1]) for each in ranges if each)
        return result

    def read(source, first, number):
        assert len(list(read_rows(source, first, number))) == min(number, source.num_rows)

    count("tar: list, the index is made", lambda: list_sources(folders["tar"]))
    (source,) = count("tar: list again", lambda: list_sources(folders["tar"]))
    count("tar: read whole", lambda: read(source, 0, rows))
    count(f"tar: read {CHUNK} rows in the middle", lambda: read(source, rows // 2, CHUNK))
    count("tar of img2dataset: list", lambda: list_sources(folders["img2dataset"]))
    sources = count("Parquet: list", lambda: list_sources(folders["parquet"]))
    count("Parquet: read a row group", lambda: read(sources[0], 0, rows))
    count(f"Parquet: read {CHUNK} rows in its middle", lambda: read(sources[0], sources[0].num_rows // 2, CHUNK))
    (source,) = list_sources(folders["large"])
    count("one row group: read whole", lambda: read(source, 0, rows))
    count(f"one row group: read {CHUNK} rows in the middle", lambda: read(source, rows // 2, CHUNK))
    return counts


def main(args):
    """Start the store, measure each number of rows, print a table, then one JSON line."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    target = "http://{}:{}".format(*server.get_host_and_port())
    urllib.request.urlopen(urllib.request.Request(f"{target}/bucket", method="PUT")).close()
    store = FaultyStore(target)
    found = {
        rows: measure(store, lambda path: f"s3://bucket/{path}?endpoint_override={store.url}", rows, args.image_bytes)
        for rows in args.rows
    }
    store.close()
    server.stop()
    for name in found[args.rows[0]]:
        told = (f"{counts[name][0]:5} ({counts[name][1] / 1e6:6.2f} MB)" for counts in found.values())
        print(f"{name:44}", *told)
    print(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 10000], help="rows of the inputs to compare")
    parser.add_argument("--image_bytes", type=int, default=2000, help="size of an image")
    main(parser.parse_args())
