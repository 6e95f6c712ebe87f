"""Images and captions as they lie around: Parquet, a folder with metadata.jsonl, WebDataset tars.

A source is one unit that is read from front to back: a row group of a Parquet file, some lines of a metadata.jsonl,
a tar. A piece is a range of the rows of one source.
"""

import contextlib
import itertools
import json
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from common.errors import BadInput, CheckFailed
from common.images import READ
from common.storage import Folder, absolute, join, open_parquet, read_footer, split

IMAGE_COLUMNS = ("image", "jpg", "png", "webp", "image_bytes", "bytes", "URL", "url", "image_url", "image_path", "path")
CAPTION_COLUMNS = ("caption", "TEXT", "text", "txt", "prompt")
LINES_OF_A_SOURCE = 4096  # of a metadata.jsonl
LISTING_THREADS = 16


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
            with ThreadPoolExecutor(LISTING_THREADS) as pool:
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
        count = sum(1 for _ in _tar_samples(join(folder, name), file, None))
    return [Source(folder, name, size, "tar", 0, count, image_column or "", caption_column or "")] if count else []


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def read_rows(source, first, count):
    """Yield {"key", "image", "caption"} of rows first ... of a source; image: bytes, a path, a URI, a URL or None."""
    readers = {"parquet": _parquet_rows, "tar": _tar_rows, "jsonl": _jsonl_rows}
    rows = readers[source.kind](source, first)
    for number, row in enumerate(itertools.islice(rows, count), start=first):
        yield {"key": f"{source.name}:{source.first}:{number}", **row}


def _parquet_rows(source, first):
    with open_parquet(Folder(source.folder), source.name) as parquet:
        columns = list(dict.fromkeys((source.image_column, source.caption_column)))
        for batch in parquet.iter_batches(64, row_groups=[source.first], columns=columns):
            skipped, first = min(first, len(batch)), max(0, first - len(batch))
            for row in batch.slice(skipped).to_pylist():
                image = row[source.image_column]
                if isinstance(image, dict):  # the struct of Hugging Face data sets
                    image = image.get("bytes") or image.get("path")
                yield {"image": image, "caption": row[source.caption_column]}


def _jsonl_rows(source, first):
    below = source.name.rpartition("/")[0]
    for line in _read_lines(source.folder, source.name)[source.first + first : source.first + source.num_rows]:
        try:
            row = json.loads(line)
            name = row[source.image_column]
        except (ValueError, KeyError, TypeError):
            yield {"image": None, "caption": None}
            continue
        yield {"image": f"{below}/{name}" if below and name else name, "caption": row.get(source.caption_column)}


def _tar_rows(source, first):
    with Folder(source.folder).open(source.name) as file:
        for sample in itertools.islice(_tar_samples(join(source.folder, source.name), file, first), first, None):
            suffixes = [source.image_column] if source.image_column else [name for name in sample if f".{name}" in READ]
            caption = sample.get(source.caption_column or "txt")
            if caption is None and "json" in sample:
                names = [source.caption_column] if source.caption_column else CAPTION_COLUMNS
                with contextlib.suppress(ValueError, AttributeError):  # no JSON, or no object: no caption
                    facts = json.loads(sample["json"])
                    caption = next((facts[name] for name in names if facts.get(name)), None)
            caption = caption.decode(errors="replace").strip() if isinstance(caption, bytes) else caption
            yield {"image": next((sample[name] for name in suffixes if name in sample), None), "caption": caption}


def _tar_samples(place, file, first):
    """Yield {suffix: bytes} of the samples of a WebDataset: neighbours whose paths are equal up to the first dot.

    first: the first sample whose files are read; None reads none.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            members = (each for each in tar if each.isfile() and not os.path.basename(each.name).startswith("."))
            for number, (key, group) in enumerate(itertools.groupby(members, key=_sample_key)):
                is_read = first is not None and number >= first
                yield {
                    member.name[len(key) + 1 :].lower(): tar.extractfile(member).read() if is_read else b""
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
