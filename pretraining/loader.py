"""Load rows of raw data: fetch images with bounded retries, decode and crop them, and say why a row is bad."""

import argparse
import http.client
import io
import time
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from common import cli
from common.errors import BadInput
from common.images import BadImage, crop_square, draw_crop, read_image
from common.storage import Folder, is_remote, split
from common.uris import shown
from pretraining.raw_data import Source, read_rows
from utils import CROP, row_rng

LARGEST_FILE = 64 * 2**20  # bytes
FETCH_THREADS = 16
WAIT = 0.5  # seconds before the first retry of a URL; it doubles with each further one


def add_raw_data_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags for reading raw data, which preprocess.py and pretrain.py --online share."""
    image_help = "column of image bytes, paths or URLs; default: the first known name, such as image, jpg or url"
    group.add_argument("--image_column", help=image_help)
    caption_help = "column of captions; default: the first known name, such as caption, TEXT or txt"
    group.add_argument("--caption_column", help=caption_help)
    crop_help = "square of each image to keep"
    group.add_argument("--crop", choices=("center", "random"), default="center", help=crop_help)
    group.add_argument("--random_flip", action="store_true", help="mirror each image with a probability of one half")
    group.add_argument("--timeout", type=cli.positive_float, default=10, help="seconds to wait for an image URL")
    group.add_argument("--retries", type=cli.non_negative_int, default=2, help="retries of an image URL that fails")
    bad_help = "largest share of unusable rows, 0 to 1, before the run fails"
    group.add_argument("--max_bad_fraction", type=cli.fraction, default=0.05, help=bad_help)
    rows_help = "rows to read and encode together, one output file; a 512-pixel image takes 1 MB of memory"
    group.add_argument("--rows_per_file", type=cli.positive_int, default=256, help=rows_help)
    batch_help = "batch size for encoding images and captions"
    group.add_argument("--encoding_batch_size", type=cli.positive_int, default=16, help=batch_help)


def loader_options(args: argparse.Namespace, resolutions: Sequence[int]) -> dict[str, Any]:
    """Return the options of a Loader that the flags ask for."""
    options = {name: getattr(args, name) for name in ("random_flip", "seed", "timeout", "retries")}
    options |= {name: getattr(args, name) for name in ("min_side", "max_aspect") if getattr(args, name, None)}
    return {"resolutions": tuple(resolutions), "random_crop": args.crop == "random", **options}


@dataclass(frozen=True)
class Filtered:
    """A row that a filter leaves out, and why."""

    reason: str


@dataclass(frozen=True)
class Loader:
    """Loads rows as chunks of captions and pixels; runs on CPU tasks.

    resolutions: side lengths in pixels of the square crops; random_crop, random_flip: drawn by (seed, epoch, row).
    timeout: seconds for a URL; retries: further attempts after a failure. min_side, max_aspect: the shortest side in
    pixels and the largest ratio of the sides of an image that is not filtered; 0: any.
    """

    resolutions: tuple
    random_crop: bool
    random_flip: bool
    seed: int
    timeout: float
    retries: int
    min_side: int = 0
    max_aspect: float = 0.0

    def __call__(self, source: Source, first: int, count: int, epoch: int = 0) -> dict[str, Any]:
        """Return a chunk: up to `count` rows of a source, from row `first` on.

        A chunk is {"keys", "captions", "bad": [[key, reason]], "filtered": {reason: number of rows}, "crops": [B, 5],
        "pixels_256": [B, H, W, 3] uint8, ...}.
        A row of "crops" is the width and height of the upright image, and left, top and whether it is mirrored of
        draw_crop. A bad row is in "bad" only, one that a filter leaves out is counted in "filtered" only. The crops
        depend on the number of a row in its source, not on `first`.
        """
        return self.load(source, list(read_rows(source, first, count)), first, epoch)

    def load(self, source: Source, rows: list[dict[str, Any]], first: int, epoch: int = 0) -> dict[str, Any]:
        """Return the chunk of some rows of read_rows; first: the number of rows[0] in its source."""
        with ThreadPoolExecutor(FETCH_THREADS) as pool:
            numbers = range(first, first + len(rows))
            loaded = list(pool.map(lambda row, number: self._load(source, row, number, epoch), rows, numbers))
        good = [(row, crops) for row, crops in zip(rows, loaded, strict=True) if isinstance(crops, tuple)]
        chunk: dict[str, Any] = {
            "keys": [row["key"] for row, _ in good],
            "captions": [row["caption"] for row, _ in good],
            "bad": [[row["key"], crops] for row, crops in zip(rows, loaded, strict=True) if isinstance(crops, str)],
            "filtered": dict(Counter(crops.reason for crops in loaded if isinstance(crops, Filtered))),
            "crops": np.array([crop for _, (crop, _) in good], np.int64).reshape(-1, 5),
        }
        for i, resolution in enumerate(self.resolutions):
            blank = np.empty((0, resolution, resolution, 3), np.uint8)
            chunk[f"pixels_{resolution}"] = np.stack([pixels[i] for _, (_, pixels) in good]) if good else blank
        return chunk

    def _load(self, source, row, number, epoch):
        """Return (crop, [its pixels at each resolution]) of one row, the reason why it is bad, or Filtered."""
        if "filtered" in row:
            return Filtered(row["filtered"])
        try:
            row["caption"].encode()  # fails unless it is a str without lone surrogates, which JSON allows
        except (AttributeError, UnicodeError):
            return "no caption"
        if not row["image"] or not isinstance(row["image"], (bytes, str)):
            return "no image"
        try:
            data = row["image"] if isinstance(row["image"], bytes) else self._fetch(source, row["image"])
        except BadImage as error:
            return shown(str(error))
        try:
            image = read_image(data)
        except BadImage as error:
            return str(error) if data is row["image"] else shown(f"{row['image']}: {error}")
        if reason := self._size_reason(*image.size):
            return Filtered(reason)
        number += zlib.crc32(f"{source.name}:{source.first}".encode()) << 24  # sources have crops of their own
        flags = self.random_crop, self.random_flip
        rng, *rngs = [row_rng(self.seed, CROP, epoch, number) for _ in (None, *self.resolutions)]
        pairs = zip(self.resolutions, rngs, strict=True)
        pixels = [np.asarray(crop_square(image, size, each, *flags)) for size, each in pairs]
        return (*image.size, *draw_crop(image.size, rng, *flags)), pixels

    def _size_reason(self, width, height):
        """Return why an image is filtered for its size, or None."""
        if min(width, height) < self.min_side:
            return f"side < {self.min_side}"
        if self.max_aspect and max(width, height) > self.max_aspect * min(width, height):
            return f"aspect > {self.max_aspect:g}"
        return None

    def _fetch(self, source, address):
        """Return the bytes of an image at a URL, a URI, or a path relative to the source's folder."""
        if address.startswith(("http://", "https://")):
            return self._fetch_url(address)
        try:
            if is_remote(address):
                folder, name = split(address)
                data = Folder(folder).read(name)
            else:
                if ".." in address.split("/"):
                    raise BadImage("a path that leaves its folder")
                folder = "" if address.startswith("/") and not is_remote(source.folder) else source.folder
                data = Folder(folder or "/").read(address.lstrip("/"))
        except (BadInput, OSError, ValueError) as error:  # ValueError: not a valid file name
            raise BadImage(f"cannot be read: {error}") from None
        if data is None:
            raise BadImage("file not found")
        return data

    def _fetch_url(self, url):
        reason = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(WAIT * 2 ** (attempt - 1))
            try:
                return self._read_url(url)
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}"
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, ValueError, http.client.HTTPException) as error:
                reason = str(getattr(error, "reason", None) or error) or type(error).__name__
        raise BadImage(f"cannot be fetched: {reason}")

    def _read_url(self, url):
        """Return the contents of a URL; the timeout covers the whole download, not each read of the socket."""
        end = time.monotonic() + self.timeout
        request = urllib.request.Request(url, headers={"User-Agent": "ray-dreambooth"})
        data = io.BytesIO()
        with urllib.request.urlopen(request, timeout=self.timeout) as response:
            while block := response.read1(2**16):
                data.write(block)
                if time.monotonic() > end:
                    raise TimeoutError(f"slower than {self.timeout:g} s")
                if data.tell() > LARGEST_FILE:
                    raise BadImage(f"more than {LARGEST_FILE >> 20} MiB")
            if response.length:
                raise ConnectionError(f"cut short by {response.length} bytes")
        return data.getvalue()
