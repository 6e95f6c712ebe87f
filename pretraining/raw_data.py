"""Raw images and captions: lists Parquet files, folders with metadata.jsonl, and WebDataset tars as sources."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from common.actors import map_on_actors
from common.errors import BadInput, CheckFailed
from common.messages import Progress, say
from common.storage import Folder, absolute, join, open_parquet, split
from common.uris import shown
from pretraining.filters import check_columns
from pretraining.rows import CAPTION_COLUMNS, find_lines
from pretraining.sources import FileSources, Sources
from pretraining.tars import INDEX, STATS, count_samples, find_records

IMAGE_COLUMNS = ("image", "jpg", "png", "webp", "image_bytes", "bytes", "URL", "url", "image_url", "image_path", "path")
KINDS = {"parquet": ".parquet", "tar": ".tar", "jsonl": "metadata.jsonl"}  # {kind: ending of its names}
LINES_OF_A_SOURCE = 4096  # in a metadata.jsonl
FILES_OF_A_TASK, LISTING_THREADS = 256, 16  # files that a task lists, and at the same time
TOLD = 10  # damaged files that are named in messages


def list_sources(
    location: str,
    image_column: str | None = None,
    caption_column: str | None = None,
    flag: str = "--input",
    indexed: bool = False,
    keep: bool = True,
    on_ray: dict[str, Any] | None = None,
    where: str | None = None,
    max_bad_files: int = 0,
) -> Sources:
    """Return the Sources of a folder or file, sorted by name; only footers, headers and metadata.jsonl are read.

    indexed: each tar must have an index, for reads in any order. keep: write the indexes that are made beside the tars.
    on_ray: of cli.ray_or_none; many files are listed in tasks on Ray. where: the condition for rows of Parquet files.
    max_bad_files: number of files that are skipped if they cannot be opened.

    Raises BadInput if there are no rows, if a Parquet file lacks a column, or if `where` does not fit the files;
    CheckFailed if more files are damaged than may be skipped.
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
    lister = Lister(folder, kind, image_column, caption_column, indexed, keep, where or "")
    sources = _list(lister, listed, on_ray, max_bad_files)
    _tell(sources.bad_files)
    if not len(sources):
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


def _list(lister, files, on_ray, max_bad_files):
    """Return the Sources of files; files: see Lister. Raises CheckFailed if too many of them are damaged."""
    batches = [files[i : i + FILES_OF_A_TASK] for i in range(0, len(files), FILES_OF_A_TASK)]
    if len(batches) == 1 or on_ray is None:
        results = itertools.chain.from_iterable(map(lister, batches))
    else:
        results = map_on_actors(None, {}, batches, 1, lister, ordered=True, gpus_per_worker=0, **on_ray)
    parts, bad = [], []
    with Progress("list", len(files), "files") if len(batches) > 1 else contextlib.nullcontext() as progress:
        for batch, found in zip(batches, results, strict=True):
            parts.append(found)
            bad += found.bad_files
            if len(bad) > max_bad_files:
                raise CheckFailed(_too_many(bad, max_bad_files))
            if progress:
                progress.update(len(batch))
    return Sources.join(parts)


def _too_many(bad, most):
    (_, reason), count = bad[0], len(bad)
    if not most:
        return f"{reason}, or pass --max_bad_files to skip files that are damaged"
    return f"{count} files are damaged, more than --max_bad_files {most} allows; the first: {reason}"


def _tell(bad):
    for _, reason in bad[:TOLD]:
        say(f"warning: skipped a file: {reason}")
    if len(bad) > TOLD:
        say(f"warning: skipped {len(bad) - TOLD} more damaged files")


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

    def __call__(self, files: list[tuple[str, int, dict[str, int]]]) -> Iterator[Sources]:
        """Yield the Sources of files, in their order; files: (name, bytes, records of find_records) of each."""
        with ThreadPoolExecutor(LISTING_THREADS) as pool:
            found = list(pool.map(self._find, *zip(*files, strict=True)))
        yield Sources.of([file[:2] for file in files], found, folder=self.folder, kind=self.kind, where=self.where)

    def _find(self, name, size, records):
        """Return the FileSources of a file, or the reason why it cannot be opened."""
        try:
            return {"parquet": self._parquet, "tar": self._tar, "jsonl": self._jsonl}[self.kind](name, size, records)
        except CheckFailed as error:
            return shown(str(error))

    def _parquet(self, name, size, records):
        place = join(self.folder, name)
        with open_parquet(Folder(self.folder), name) as parquet:
            schema, facts = parquet.schema_arrow, parquet.metadata
            rows = [facts.row_group(i).num_rows for i in range(facts.num_row_groups)]
        image = _pick_column(place, "image", self.image_column, IMAGE_COLUMNS, schema.names)
        caption = _pick_column(place, "caption", self.caption_column, CAPTION_COLUMNS, schema.names)
        if self.where:
            check_columns(self.where, schema, place)
        filled = [i for i, count in enumerate(rows) if count]
        return FileSources((image, caption), filled, [rows[i] for i in filled])

    def _jsonl(self, name, size, records):
        columns = (self.image_column or "file_name", self.caption_column or "text")
        count, starts = find_lines(self.folder, name, size, LINES_OF_A_SOURCE)
        firsts = range(0, count, LINES_OF_A_SOURCE)
        rows = [min(LINES_OF_A_SOURCE, count - first) for first in firsts]
        return FileSources(columns, firsts, rows, list(itertools.pairwise([*starts, size])))

    def _tar(self, name, size, records):
        count = count_samples(self.folder, name, size, records, self.indexed, self.keep)
        columns = (self.image_column or "", self.caption_column or "")
        return FileSources(columns, [0] if count else [], [count] if count else [])


def _pick_column(place, what, wanted, usual, columns):
    for name in (wanted,) if wanted else usual:
        if name in columns:
            return name
    missing = f"no column {wanted}" if wanted else f"none of the known {what} columns ({', '.join(usual)})"
    raise BadInput(f"{place} has {missing}: choose one of its columns with --{what}_column: {', '.join(columns)}")
