"""Raw images and captions: Parquet files, folders with metadata.jsonl, and WebDataset tars.

A source is a unit that is read sequentially: a row group of a Parquet file, a range of lines of a metadata.jsonl, or a
tar file.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from common.actors import map_on_actors
from common.errors import BadInput, CheckFailed
from common.images import READ
from common.messages import Progress, say
from common.storage import Folder, absolute, join, open_parquet, read_footer, split
from pretraining.filters import check_columns, columns_of, meets
from pretraining.tars import INDEX, STATS, count_samples, find_records, read_samples

IMAGE_COLUMNS = ("image", "jpg", "png", "webp", "image_bytes", "bytes", "URL", "url", "image_url", "image_path", "path")
CAPTION_COLUMNS = ("caption", "TEXT", "text", "txt", "prompt")
KINDS = {"parquet": ".parquet", "tar": ".tar", "jsonl": "metadata.jsonl"}  # {kind: ending of its names}
LINES_OF_A_SOURCE = 4096  # in a metadata.jsonl
FILES_OF_A_TASK, LISTING_THREADS = 256, 16  # files that a task lists, and at the same time


@dataclass(frozen=True)
class Source:
    """The location of some rows, as plain values.

    folder: a path or URI; name, size: the file below it, and its bytes; kind: "parquet", "jsonl" or "tar".
    first: the number of the row group (Parquet) or of the first line (jsonl). where: a condition on the rows, or "".
    """

    folder: str
    name: str
    size: int
    kind: str
    first: int
    num_rows: int
    image_column: str = ""
    caption_column: str = ""
    where: str = ""


# ---------------------------------------------------------------------------------------------------------------------
# Sources


def list_sources(
    location: str,
    image_column: str | None = None,
    caption_column: str | None = None,
    flag: str = "--input",
    indexed: bool = False,
    keep: bool = True,
    on_ray: dict[str, Any] | None = None,
    where: str | None = None,
) -> list[Source]:
    """Return the Sources of a folder or file, sorted by name; only footers, headers and metadata.jsonl are read.

    indexed: each tar must have an index, for reads in any order. keep: write the indexes that are made beside the tars.
    on_ray: of cli.ray_or_none; many files are listed in tasks on Ray. where: the condition for rows of Parquet files.

    Raises BadInput if there are no rows, if a Parquet file lacks a column, or if `where` does not fit the files.
    """
    location = absolute(location)
    found = Folder(location).kind()
    if found is None:
        raise BadInput(f"{flag} {location} does not exist")
    folder, only = split(location) if found == "file" else (location, None)
    files = Folder(folder).names(*KINDS.values(), INDEX, STATS)
    kind, names = _choose(files, only)
    if not names:
        raise BadInput(f"{flag} {location} holds no .parquet or .tar file and no metadata.jsonl")
    if where and kind != "parquet":
        raise BadInput(f"--where is for the columns of Parquet files, {flag} {location} holds none")
    if all(name + INDEX in files for name in names):  # there is nothing to read
        on_ray = None
    listed = [(name, files[name], find_records(name, files)) for name in names]
    sources = _list(Lister(folder, kind, image_column, caption_column, indexed, keep, where or ""), listed, on_ray)
    if not sum(source.num_rows for source in sources):
        raise BadInput(f"{flag} {location} holds no rows")
    return sources


def _choose(files, only):
    """Return (kind, names) of the files that hold the rows: the first of KINDS that there is, of `only` if it is set.

    A Parquet file beside a tar of the same name is a record of img2dataset: the tars hold the rows.
    """
    found = {
        kind: [name for name in files if only in (None, name) and name.lower().endswith(ending)]
        for kind, ending in KINDS.items()
    }
    stems = {os.path.splitext(name)[0] for name in found["tar"]}
    lone = [name for name in found["parquet"] if os.path.splitext(name)[0] not in stems]
    if len(lone) < len(found["parquet"]):
        if lone:
            say(f"tars beside Parquet files of the same names hold the rows: {lone[0]} has no tar and is left out")
        del found["parquet"]
    return next(((kind, names) for kind, names in found.items() if names), ("", []))


def _list(lister, files, on_ray):
    """Return the Sources of files; files: see Lister."""
    batches = [files[i : i + FILES_OF_A_TASK] for i in range(0, len(files), FILES_OF_A_TASK)]
    if len(batches) == 1 or on_ray is None:
        return [source for batch in batches for found in lister(batch) for source in found]
    sources: list[Source] = []
    with Progress("list", len(files), "files") as progress:
        results = map_on_actors(None, {}, batches, 1, lister, ordered=True, gpus_per_worker=0, **on_ray)
        for batch, found in zip(batches, results, strict=True):
            sources += found
            progress.update(len(batch))
    return sources


@dataclass(frozen=True)
class Lister:
    """Lists files of one kind in a folder as Sources; runs on tasks.

    indexed, keep, where: see list_sources.
    """

    folder: str
    kind: str
    image_column: str | None
    caption_column: str | None
    indexed: bool
    keep: bool
    where: str

    def __call__(self, files: list[tuple[str, int, dict[str, int]]]) -> Iterator[list[Source]]:
        """Yield the Sources of files, in their order; files: (name, bytes, records of find_records) of each."""
        list_file = {"parquet": self._parquet, "tar": self._tar, "jsonl": self._jsonl}[self.kind]
        with ThreadPoolExecutor(LISTING_THREADS) as pool:
            yield list(itertools.chain.from_iterable(pool.map(list_file, *zip(*files, strict=True))))

    def _parquet(self, name, size, records):
        place = join(self.folder, name)
        columns, groups, _ = read_footer(Folder(self.folder), name)
        image = _pick_column(place, "image", self.image_column, IMAGE_COLUMNS, columns)
        caption = _pick_column(place, "caption", self.caption_column, CAPTION_COLUMNS, columns)
        if self.where:
            with open_parquet(Folder(self.folder), name) as parquet:
                check_columns(self.where, parquet.schema_arrow, place)
        facts = (image, caption, self.where)
        return [Source(self.folder, name, size, "parquet", i, rows, *facts) for i, rows in groups if rows]

    def _jsonl(self, name, size, records):
        count = len(_read_lines(self.folder, name))
        starts = range(0, count, LINES_OF_A_SOURCE)
        columns = (self.image_column or "file_name", self.caption_column or "text")
        return [
            Source(self.folder, name, size, "jsonl", i, min(LINES_OF_A_SOURCE, count - i), *columns) for i in starts
        ]

    def _tar(self, name, size, records):
        count = count_samples(self.folder, name, size, records, self.indexed, self.keep)
        columns = (self.image_column or "", self.caption_column or "")
        return [Source(self.folder, name, size, "tar", 0, count, *columns)] if count else []


def _pick_column(place, what, wanted, usual, columns):
    for name in (wanted,) if wanted else usual:
        if name in columns:
            return name
    missing = f"no column {wanted}" if wanted else f"none of the known {what} columns ({', '.join(usual)})"
    raise BadInput(f"{place} has {missing}: choose one of its columns with --{what}_column: {', '.join(columns)}")


def _read_lines(folder, name):
    """Return the non-empty lines of a file as bytes: splitting text would also split at U+2028 inside a JSON string."""
    data = Folder(folder).read(name)
    if data is None:
        raise CheckFailed(f"{join(folder, name)} was removed while it was being read: restore it")
    return [line for line in data.splitlines() if line.strip()]


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def read_rows(source: Source, first: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield up to `count` rows of a source, from row `first` on, as {"key", "image", "caption"}.

    image: the bytes of a file, a path, a URI, a URL or None; caption: any value, None if missing. A row that does not
    meet the condition of its source has neither, and "filtered": the reason.
    """
    readers = {"parquet": _parquet_rows, "tar": _tar_rows, "jsonl": _jsonl_rows}
    last = min(first + count, source.num_rows)
    for number, row in enumerate(readers[source.kind](source, first, last), start=first):
        yield {"key": f"{source.name}:{source.first}:{number}", **row}


def _parquet_rows(source, first, last):
    with open_parquet(Folder(source.folder), source.name) as parquet:
        asked = columns_of(source.where) if source.where else []
        columns, start = list(dict.fromkeys((source.image_column, source.caption_column, *asked))), 0
        for batch in parquet.iter_batches(64, row_groups=[source.first], columns=columns):
            low, high = (min(max(row - start, 0), len(batch)) for row in (first, last))
            batch, start = batch.slice(low, max(high - low, 0)), start + len(batch)
            met = meets(source.where, batch, source.name) if asked else itertools.repeat(True)
            for row, is_met in zip(batch.to_pylist(), met, strict=False):
                if not is_met:
                    yield {"image": None, "caption": None, "filtered": "--where"}
                    continue
                image = row[source.image_column]
                if isinstance(image, dict):  # the Image feature of Hugging Face datasets
                    image = image.get("bytes") or image.get("path")
                yield {"image": image, "caption": row[source.caption_column]}
            if start >= last:
                return


def _jsonl_rows(source, first, last):
    parent = source.name.rpartition("/")[0]
    for line in _read_lines(source.folder, source.name)[source.first + first : source.first + last]:
        try:
            row = json.loads(line)
            name = row[source.image_column]
        except (ValueError, KeyError, TypeError):
            yield {"image": None, "caption": None}
            continue
        yield {"image": f"{parent}/{name}" if parent and name else name, "caption": row.get(source.caption_column)}


def _tar_rows(source, first, last):
    for sample in read_samples(source.folder, source.name, source.size, source.num_rows, first, last):
        suffixes = [source.image_column] if source.image_column else [name for name in sample if f".{name}" in READ]
        caption = sample.get(source.caption_column or "txt")
        if caption is None and "json" in sample:
            names = [source.caption_column] if source.caption_column else CAPTION_COLUMNS
            with contextlib.suppress(ValueError, AttributeError):  # not JSON, or not an object: no caption
                facts = json.loads(sample["json"])
                caption = next((facts[name] for name in names if facts.get(name)), None)
        caption = caption.decode(errors="replace").strip() if isinstance(caption, bytes) else caption
        yield {"image": next((sample[name] for name in suffixes if name in sample), None), "caption": caption}
