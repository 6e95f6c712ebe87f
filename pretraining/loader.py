"""From rows to pixels: images fetched with bounded retries, decoded and cropped; bad ones told with their reason."""

import http.client
import io
import time
import urllib.error
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from common import cli
from common.errors import BadInput
from common.images import BadImage, crop_square, read_image
from common.storage import Folder, is_remote, split
from pretraining.raw_data import read_rows
from utils import CROP, row_rng

LARGEST_FILE = 64 * 2**20  # bytes of one image
FETCH_THREADS = 16
WAIT = 0.5  # seconds before the second try of a fetch; it doubles


def add_raw_data_flags(group):
    """Add the flags that say how raw data is read: of preprocess.py, and of pretrain.py --online."""
    group.add_argument("--image_column", help="column of bytes, paths or URLs; default: the first of the usual names")
    group.add_argument("--caption_column", help="column of captions; default: the first of the usual names")
    group.add_argument("--crop", choices=("center", "random"), default="center", help="which square of an image")
    group.add_argument("--random_flip", action="store_true", help="mirror half of the images")
    group.add_argument("--timeout", type=cli.positive_float, default=10, help="seconds for one URL")
    group.add_argument("--retries", type=cli.non_negative_int, default=2, help="further tries of a URL")
    group.add_argument("--max_bad_fraction", type=cli.fraction, default=0.05, help="share of bad rows to put up with")
    rows_help = "rows that are read and encoded at a time; a 512-pixel image takes 1 MB in memory"
    group.add_argument("--rows_per_file", type=cli.positive_int, default=256, help=rows_help)
    group.add_argument(
        "--encoding_batch_size", type=cli.positive_int, default=16, help="images the VAE takes at a time"
    )


def loader_options(args, resolutions):
    """Return the options of the Loader that the flags ask for."""
    options = {name: getattr(args, name) for name in ("random_flip", "seed", "timeout", "retries")}
    return {"resolutions": tuple(resolutions), "random_crop": args.crop == "random", **options}


@dataclass(frozen=True)
class Loader:
    """Reads pieces on a CPU task: rows fetched and decoded, cropped to `resolutions`.

    timeout: seconds for a URL; retries: its further tries; random_crop, random_flip: drawn by (seed, epoch, row).
    """

    resolutions: tuple
    random_crop: bool
    random_flip: bool
    seed: int
    timeout: float
    retries: int

    def __call__(self, source, first, count, epoch=0):
        """Return {"keys", "captions", "bad": [[key, reason]], "pixels_256": [n, H, W, 3] uint8, ...} of rows first ....

        first counts from the start of the source, and so do the crops; a bad row is in "bad" alone.
        """
        return self.load(source, list(read_rows(source, first, count)), first, epoch)

    def load(self, source, rows, first, epoch=0):
        """Return what calling does, of rows of a source that are read already."""
        with ThreadPoolExecutor(FETCH_THREADS) as pool:
            numbers = range(first, first + len(rows))
            loaded = list(pool.map(lambda row, number: self._load(source, row, number, epoch), rows, numbers))
        good = [(row, crops) for row, crops in zip(rows, loaded, strict=True) if not isinstance(crops, str)]
        chunk = {
            "keys": [row["key"] for row, _ in good],
            "captions": [row["caption"] for row, _ in good],
            "bad": [[row["key"], crops] for row, crops in zip(rows, loaded, strict=True) if isinstance(crops, str)],
        }
        for i, resolution in enumerate(self.resolutions):
            blank = np.empty((0, resolution, resolution, 3), np.uint8)
            chunk[f"pixels_{resolution}"] = np.stack([crops[i] for _, crops in good]) if good else blank
        return chunk

    def _load(self, source, row, number, epoch):
        """Return the crops of one row, or the reason that there are none."""
        try:
            row["caption"].encode()  # a str, and without half a surrogate pair, which JSON can hold
        except (AttributeError, UnicodeError):
            return "no caption"
        if not row["image"] or not isinstance(row["image"], (bytes, str)):
            return "no image"
        try:
            data = row["image"] if isinstance(row["image"], bytes) else self._fetch(source, row["image"])
            image = read_image(data)
        except BadImage as error:
            return str(error)
        number += zlib.crc32(f"{source.name}:{source.first}".encode()) << 24  # each source has crops of its own
        rng = [row_rng(self.seed, CROP, epoch, number) for _ in self.resolutions]
        pairs = zip(self.resolutions, rng, strict=True)
        return [np.asarray(crop_square(image, size, r, self.random_crop, self.random_flip)) for size, r in pairs]

    def _fetch(self, source, address):
        """Return the bytes of an image by URL, by URI, or by path below the source's folder."""
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
        except (BadInput, OSError, ValueError) as error:  # ValueError: no name of a file
            raise BadImage(f"cannot be read: {error}") from None
        if data is None:
            raise BadImage("file not found")
        return data

    def _fetch_url(self, url):
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
        """Return what a URL holds; the time-out is for all of it, not for each read of the socket."""
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
