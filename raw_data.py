"""Images and captions as they lie around: Parquet, a folder with metadata.jsonl, WebDataset tars.

A source is one unit that is read from front to back: a row group of a Parquet file, some lines of a metadata.jsonl,
a tar. A piece is a range of the rows of one source.
"""

import contextlib
import http.client
import io
import itertools
import json
import os
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

import cli
from cli import BadInput, CheckFailed
from dataset import READ, BadImage, crop_square, read_image
from storage import Folder, absolute, is_remote, join, open_parquet, read_footer, split
from utils import CROP, row_rng

IMAGE_COLUMNS = ("image", "jpg", "png", "webp", "image_bytes", "bytes", "URL", "url", "image_url", "image_path", "path")
CAPTION_COLUMNS = ("caption", "TEXT", "text", "txt", "prompt")
LINES_OF_A_SOURCE = 4096  # of a metadata.jsonl
LARGEST_FILE = 64 * 2**20  # bytes of one image
FETCH_THREADS = 16
WAIT = 0.5  # seconds before the second try of a fetch; it doubles


@dataclass(frozen=True)
class Source:
    """Where some rows lie: a file of `size` bytes below `folder`, of it a row group or the lines from `first` on."""

    folder: str
    name: str
    size: int
    kind: str
    first: int
    num_rows: int
    image_column: str = ""
    caption_column: str = ""


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
    names = ("random_flip", "seed", "timeout", "retries")
    return {"resolutions": tuple(resolutions), "random_crop": args.crop == "random"} | {
        n: getattr(args, n) for n in names
    }


# ---------------------------------------------------------------------------------------------------------------------
# What there is


def list_sources(location, image_column=None, caption_column=None, flag="--input"):
    """Return the Sources of a folder or file, in the order of their names; only footers and headers are read.

    Raises BadInput where there is nothing, or a Parquet file lacks the columns.
    """
    location = absolute(location)
    kind = Folder(location).kind()
    if kind is None:
        raise BadInput(f"{flag} {location} does not exist")
    folder, only = split(location) if kind == "file" else (location, None)
    files = Folder(folder).names(".parquet", ".tar", "metadata.jsonl")
    files = {name: size for name, size in files.items() if only is None or name == only}
    kinds = {"parquet": _parquet_sources, "tar": _tar_sources, "jsonl": _jsonl_sources}
    for suffix, list_file in kinds.items():
        found = [name for name in files if name.lower().endswith(suffix)]
        if found:
            facts = [(folder, name, files[name], image_column, caption_column) for name in found]
            with ThreadPoolExecutor(FETCH_THREADS) as pool:
                sources = list(itertools.chain.from_iterable(pool.map(list_file, *zip(*facts, strict=True))))
            if not sum(source.num_rows for source in sources):
                raise BadInput(f"{flag} {location} holds no rows")
            return sources
    raise BadInput(f"{flag} {location} holds no .parquet or .tar file and no metadata.jsonl")


def _parquet_sources(folder, name, size, image_column, caption_column):
    columns, groups, _ = read_footer(Folder(folder), name)
    image = _pick_column(join(folder, name), "image", image_column, IMAGE_COLUMNS, columns)
    caption = _pick_column(join(folder, name), "caption", caption_column, CAPTION_COLUMNS, columns)
    return [Source(folder, name, size, "parquet", i, rows, image, caption) for i, rows in groups if rows]


def _pick_column(place, what, wanted, usual, columns):
    for name in (wanted,) if wanted else usual:
        if name in columns:
            return name
    missing = wanted or f"any of {', '.join(usual)}"
    raise BadInput(f"{place} has no column {missing}: name one with --{what}_column; it has {', '.join(columns)}")


def _jsonl_sources(folder, name, size, image_column, caption_column):
    count = len(_read_lines(folder, name))
    starts = range(0, count, LINES_OF_A_SOURCE)
    columns = (image_column or "file_name", caption_column or "text")
    return [Source(folder, name, size, "jsonl", i, min(LINES_OF_A_SOURCE, count - i), *columns) for i in starts]


def _read_lines(folder, name):
    """Return the lines of a file as bytes: text may hold other line ends, U+2028 say, inside a line."""
    return [line for line in Folder(folder).read(name).splitlines() if line.strip()]


def _tar_sources(folder, name, size, image_column, caption_column):
    with Folder(folder).open(name) as file:
        count = sum(1 for _ in _tar_samples(join(folder, name), file, load=False))
    return [Source(folder, name, size, "tar", 0, count, image_column or "", caption_column or "")] if count else []


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def read_rows(source, first, count):
    """Yield {"key", "image", "caption"} of rows first ... of a source; image: bytes, a path, a URI, a URL or None."""
    readers = {"parquet": _parquet_rows, "tar": _tar_rows, "jsonl": _jsonl_rows}
    rows = readers[source.kind](source)
    for number, row in enumerate(itertools.islice(rows, first, first + count), start=first):
        yield {"key": f"{source.name}:{source.first}:{number}", **row}


def _parquet_rows(source):
    with open_parquet(Folder(source.folder), source.name) as parquet:
        columns = list(dict.fromkeys((source.image_column, source.caption_column)))
        for batch in parquet.iter_batches(64, row_groups=[source.first], columns=columns):
            for row in batch.to_pylist():
                image = row[source.image_column]
                if isinstance(image, dict):  # the struct of Hugging Face data sets
                    image = image.get("bytes") or image.get("path")
                yield {"image": image, "caption": row[source.caption_column]}


def _jsonl_rows(source):
    below = source.name.rpartition("/")[0]
    for line in _read_lines(source.folder, source.name)[source.first : source.first + source.num_rows]:
        try:
            row = json.loads(line)
            name = row[source.image_column]
        except (ValueError, KeyError, TypeError):
            yield {"image": None, "caption": None}
            continue
        yield {"image": f"{below}/{name}" if below and name else name, "caption": row.get(source.caption_column)}


def _tar_rows(source):
    with Folder(source.folder).open(source.name) as file:
        for sample in _tar_samples(join(source.folder, source.name), file):
            suffixes = [source.image_column] if source.image_column else [name for name in sample if f".{name}" in READ]
            caption = sample.get(source.caption_column or "txt")
            if caption is None and "json" in sample:
                names = [source.caption_column] if source.caption_column else CAPTION_COLUMNS
                with contextlib.suppress(ValueError, AttributeError):  # no JSON, or no object: no caption
                    facts = json.loads(sample["json"])
                    caption = next((facts[name] for name in names if facts.get(name)), None)
            caption = caption.decode(errors="replace").strip() if isinstance(caption, bytes) else caption
            yield {"image": next((sample[name] for name in suffixes if name in sample), None), "caption": caption}


def _tar_samples(place, file, load=True):
    """Yield {suffix: bytes} of the samples of a WebDataset: neighbours whose paths are equal up to the first dot."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            members = (
                member for member in tar if member.isfile() and not os.path.basename(member.name).startswith(".")
            )
            for _, group in itertools.groupby(members, key=_sample_key):
                yield {
                    member.name[len(_sample_key(member)) + 1 :].lower(): tar.extractfile(member).read() if load else b""
                    for member in group
                }
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes a damaged header for the end
                raise tarfile.ReadError("no member where one should begin")
    except (tarfile.TarError, OSError) as error:
        raise CheckFailed(f"{place} is damaged ({error}): make it again") from None


def _sample_key(member):
    folder, slash, name = member.name.rpartition("/")
    return folder + slash + name.split(".", 1)[0]


# ---------------------------------------------------------------------------------------------------------------------
# Images


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
        rows = list(read_rows(source, first, count))
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
