"""Load rows of raw data: read or fetch their images, decode and crop them, and say why a row is bad."""

import argparse
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from common import cli
from common.errors import BadInput
from common.images import BadImage, Crop, cut, draw_crop, read_image
from common.storage import Folder, is_remote, split
from common.uris import shown
from pretraining.fetching import Fetcher, Later
from pretraining.rows import read_rows
from pretraining.sources import Source
from utils import CROP, row_rng

READ_THREADS = 16  # that read files and decode images
ROWS_AHEAD = 2048  # rows whose URLs are being fetched, or whose images wait in memory for the rows before them

Batch = tuple[Sequence[int], list[dict[str, Any]]]  # (numbers of rows in their source, the rows)


def add_raw_data_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags for reading raw data, which preprocess.py and pretrain.py --online share."""
    image_help = "column of image bytes, paths or URLs; default: the first known name, such as image, jpg or url"
    group.add_argument("--image_column", help=image_help)
    caption_help = "column of captions; default: the first known name, such as caption, TEXT or txt"
    group.add_argument("--caption_column", help=caption_help)
    crop_help = "square of each image to keep"
    group.add_argument("--crop", choices=("center", "random"), default="center", help=crop_help)
    group.add_argument("--random_flip", action="store_true", help="mirror each image with a probability of one half")
    timeout_help = "seconds to fetch an image URL, from the look-up of its host to the last byte"
    group.add_argument("--timeout", type=cli.positive_float, default=10, help=timeout_help)
    retries_help = "further attempts within seconds to fetch an image URL whose server fails or is busy"
    group.add_argument("--retries", type=cli.non_negative_int, default=2, help=retries_help)
    bad_help = "largest share of unusable rows, 0 to 1, before the run fails"
    group.add_argument("--max_bad_fraction", type=cli.fraction, default=0.05, help=bad_help)
    files_help = "number of damaged files that are skipped when the data is listed, before the run fails"
    group.add_argument("--max_bad_files", type=cli.non_negative_int, default=0, help=files_help)
    rows_help = "rows to read and encode together, one output file; a 512-pixel image takes 1 MB of memory"
    group.add_argument("--rows_per_file", type=cli.positive_int, default=256, help=rows_help)
    batch_help = "batch size for encoding images and captions"
    group.add_argument("--encoding_batch_size", type=cli.positive_int, default=16, help=batch_help)


def likely_bad(count: int, max_bad_fraction: float) -> float:
    """Return how many of `count` rows may be bad by chance if the largest allowed share of all rows is bad.

    Four standard deviations more than the share of them, and at least one.
    """
    expected = max_bad_fraction * count
    return max(1, expected + 4 * expected**0.5)


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
    timeout, retries: of a Fetcher. min_side, max_aspect: the shortest side in pixels and the largest ratio of the sides
    of an image that is not filtered; 0: any.
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

        A chunk is {"keys", "captions", "bad": [[key, reason]], "later": [[key, reason]], "filtered": {reason: number of
        rows}, "crops": [B, 7], "pixels_256": [B, H, W, 3] uint8, ...}. A row of "crops" is a Crop. A bad row is in
        "bad" only, one that cannot be fetched now, but perhaps later, in "later" only, and one that a filter leaves out
        is counted in "filtered" only. The crops depend on the number of a row in its source, not on `first`.
        """
        return self.load(source, list(read_rows(source, first, count)), first, epoch)

    def load(self, source: Source, rows: list[dict[str, Any]], first: int, epoch: int = 0) -> dict[str, Any]:
        """Return the chunk of some rows of read_rows; first: the number of rows[0] in its source."""
        (chunk,) = self.load_all(source, [(range(first, first + len(rows)), rows)], epoch)
        return chunk

    def load_all(self, source: Source, batches: Iterable[Batch], epoch: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the chunk of each (numbers in the source, rows of read_rows), in order.

        While a chunk waits for its URLs, those of up to ROWS_AHEAD rows after it are fetched.
        """
        with Fetcher(self.timeout, self.retries) as fetcher:
            pending: deque[tuple[Sequence[int], list[dict[str, Any]], list[Future | None]]] = deque()
            for numbers, rows in batches:
                fetches = [fetcher.fetch(row["image"]) if _is_fetched(row) else None for row in rows]
                pending.append((numbers, rows, fetches))
                while pending and (_is_done(pending[0][2]) or sum(len(rows) for _, rows, _ in pending) > ROWS_AHEAD):
                    yield self._finish(source, *pending.popleft(), epoch)
            while pending:
                yield self._finish(source, *pending.popleft(), epoch)

    def _finish(self, source, numbers, rows, fetches, epoch):
        """Return the chunk of some rows; fetches: for each row the future of its URL, or None."""
        with ThreadPoolExecutor(READ_THREADS) as pool:
            loaded = list(pool.map(lambda *row: self._load(source, epoch, *row), rows, numbers, fetches))
        good = [(row, crops) for row, crops in zip(rows, loaded, strict=True) if isinstance(crops, tuple)]
        chunk: dict[str, Any] = {
            "keys": [row["key"] for row, _ in good],
            "captions": [row["caption"] for row, _ in good],
            "bad": [[row["key"], why] for row, why in zip(rows, loaded, strict=True) if isinstance(why, str)],
            "later": [[row["key"], str(why)] for row, why in zip(rows, loaded, strict=True) if isinstance(why, Later)],
            "filtered": dict(Counter(why.reason for why in loaded if isinstance(why, Filtered))),
            "crops": np.array([crop for _, (crop, _) in good], np.int64).reshape(-1, len(Crop._fields)),
        }
        for i, resolution in enumerate(self.resolutions):
            blank = np.empty((0, resolution, resolution, 3), np.uint8)
            chunk[f"pixels_{resolution}"] = np.stack([pixels[i] for _, (_, pixels) in good]) if good else blank
        return chunk

    def _load(self, source, epoch, row, number, fetched):
        """Return (crop, [its pixels at each resolution]) of one row, the reason why it is bad, Later or Filtered."""
        if "filtered" in row:
            return Filtered(row["filtered"])
        if "damaged" in row:
            return row["damaged"]
        if reason := _what_lacks(row):
            return reason
        try:
            if fetched:
                data = fetched.result()
            else:
                data = row["image"] if isinstance(row["image"], bytes) else _read_file(source, row["image"])
        except Later as error:
            return error
        except BadImage as error:
            return shown(str(error))
        try:
            image = read_image(data)
        except BadImage as error:
            return str(error) if data is row["image"] else shown(f"{row['image']}: {error}")
        if reason := self._size_reason(*image.size):
            return Filtered(reason)
        number += zlib.crc32(f"{source.name}:{source.first}".encode()) << 24  # sources have crops of their own
        rng = row_rng(self.seed, CROP, epoch, number)
        crop = draw_crop(image.size, rng, self.random_crop, self.random_flip)
        return crop, [np.asarray(cut(image, crop, (side, side))) for side in self.resolutions]

    def _size_reason(self, width, height):
        """Return why an image is filtered for its size, or None."""
        if min(width, height) < self.min_side:
            return f"side < {self.min_side}"
        if self.max_aspect and max(width, height) > self.max_aspect * min(width, height):
            return f"aspect > {self.max_aspect:g}"
        return None


def _what_lacks(row):
    """Return why a row can be left out before its image is read, or None."""
    try:
        row["caption"].encode()  # fails unless it is a str without lone surrogates, which JSON allows
    except (AttributeError, UnicodeError):
        return "no caption"
    if not row["image"] or not isinstance(row["image"], (bytes, str)):
        return "no image"
    return None


def _is_fetched(row):
    """Return whether the image of a row is fetched from a URL."""
    is_url = isinstance(row["image"], str) and row["image"].startswith(("http://", "https://"))
    return is_url and not _what_lacks(row)


def _is_done(fetches):
    return all(each is None or each.done() for each in fetches)


def _read_file(source, address):
    """Return the bytes of an image at a URI, or a path relative to the source's folder."""
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
