"""Measure how fast one CPU task of preprocess.py loads rows of image URLs, of which some never answer.

A local server answers after --latency seconds. Prints the rows per second of each share, then one JSON line.

    python -m benchmarks.fetching --rows 10000 --shares 0 0.1
"""

import argparse
import asyncio
import io
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from common.storage import Folder
from pretraining.index import read_index
from pretraining.loader import Loader
from pretraining.parts import load_chunks, missing_parts
from pretraining.raw_data import list_sources


def make_jpeg(size):
    """Return the bytes of a JPEG of `size` pixels a side that is neither flat nor noise."""
    small = np.random.default_rng(0).integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((size, size), Image.Resampling.BICUBIC).save(buffer, "jpeg", quality=90)
    return buffer.getvalue()


def serve(pipe, body, latency):
    """Answer each request with `body` after `latency` seconds, or never if its path starts with /hang."""

    async def answer(reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await asyncio.sleep(latency if not head.startswith(b"GET /hang") else 3600)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run():
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def measure(folder, port, share, args):
    """Return (rows per second, good rows) of one task that loads all rows of a Parquet file of URLs."""
    hangs = np.random.default_rng(1).random(args.rows) < share
    urls = [f"http://127.0.0.1:{port}/{'hang' if each else 'image'}/{row}" for row, each in enumerate(hangs)]
    pq.write_table(pa.table({"url": urls, "caption": ["a picture"] * args.rows}), Path(folder, "x.parquet"))
    (item,) = missing_parts(list_sources(folder), read_index(Folder(folder), []), args.rows_per_file)
    loader = Loader((args.resolution,), random_crop=False, random_flip=False, seed=0, timeout=args.timeout, retries=2)
    began = time.monotonic()
    good = sum(len(chunk["keys"]) for chunk in load_chunks(item, loader, args.rows_per_file))
    assert good == args.rows - hangs.sum(), f"{args.rows - hangs.sum() - good} good rows were lost"
    return args.rows / (time.monotonic() - began), good


def main(args):
    """Measure each share of URLs that hang, print its speed, then one JSON line."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.Process(target=serve, args=(sender, make_jpeg(args.size), args.latency), daemon=True)
    server.start()
    port, rates = receiver.recv(), {}
    for share in args.shares:
        with tempfile.TemporaryDirectory() as folder:
            rates[share], good = measure(folder, port, share, args)
        print(f"{share:6.1%} hang  {rates[share]:6.1f} rows/s  {good} of {args.rows} rows are good", flush=True)
    server.terminate()
    print(json.dumps({"rows_per_second": {str(share): round(rate, 1) for share, rate in rates.items()}, **vars(args)}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10000, help="number of URLs")
    parser.add_argument("--shares", type=float, nargs="+", default=[0, 0.1], help="shares of URLs that hang")
    parser.add_argument("--timeout", type=float, default=10, help="seconds for a URL, as of preprocess.py")
    parser.add_argument("--latency", type=float, default=0.1, help="seconds until the server answers")
    parser.add_argument("--size", type=int, default=256, help="side length in pixels of the images")
    parser.add_argument("--resolution", type=int, default=256, help="side length in pixels of the crops")
    parser.add_argument("--rows_per_file", type=int, default=256, help="rows of a chunk, as of preprocess.py")
    main(parser.parse_args())
