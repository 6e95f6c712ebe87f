"""Where the rows of raw data are: sources, and the chunks of their rows, as arrays.

A source is a unit that is read sequentially: a row group of a Parquet file, a range of lines of a metadata.jsonl, or a
tar file. Two billion rows are millions of sources, so no object is kept for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

BLOCK = 100_000  # sources that are converted to Python's numbers at a time


@dataclass(frozen=True)
class Source:
    """The location of some rows, as plain values.

    folder: a path or URI; name, size: the file below it, and its bytes; kind: "parquet", "jsonl" or "tar".
    first: the number of the row group (Parquet) or of the first line (jsonl). where: a condition on the rows, or "".
    start, end: the bytes of the lines in the file (jsonl).
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
    start: int = 0
    end: int = 0


class FileSources(NamedTuple):
    """The sources in one file: see Sources."""

    columns: tuple[str, str]
    first: Sequence[int]
    rows: Sequence[int]
    spans: Sequence[tuple[int, int]] = ()


NO_SOURCES = FileSources(("", ""), (), ())


@dataclass(frozen=True, eq=False)
class Sources:
    """The sources in the files of a folder, numbered in the order of the files' names.

    names, sizes, columns: name, bytes and (image column, caption column) of each file, [F]; file: number of the file of
    each source, [S]; first, rows: see Source, [S]; spans: start and end, [S, 2], of jsonl alone. bad_files: (name,
    reason) of the files that were skipped because they are damaged; they have no sources.
    """

    folder: str
    kind: str
    where: str
    names: list[str]
    sizes: np.ndarray
    columns: list[tuple[str, str]]
    file: np.ndarray
    first: np.ndarray
    rows: np.ndarray
    spans: np.ndarray
    bad_files: list[tuple[str, str]]

    @classmethod
    def of(cls, files: Iterable[tuple[str, int]], found: list[FileSources | str], **shared: str) -> Sources:
        """Return the sources of files, (name, bytes) each; found: the sources in each, or why it is skipped.

        shared: folder, kind and where.
        """
        names, sizes = zip(*files, strict=True)
        good = [NO_SOURCES if isinstance(each, str) else each for each in found]
        return cls(
            **shared,
            names=list(names),
            sizes=np.array(sizes, np.int64),
            columns=[each.columns for each in good],
            file=np.repeat(np.arange(len(good), dtype=np.int32), [len(each.rows) for each in good]),
            first=np.array([first for each in good for first in each.first], np.int64),
            rows=np.array([rows for each in good for rows in each.rows], np.int32),
            spans=np.array([span for each in good for span in each.spans], np.int64).reshape(-1, 2),
            bad_files=[(name, each) for name, each in zip(names, found, strict=True) if isinstance(each, str)],
        )

    @classmethod
    def join(cls, parts: list[Sources]) -> Sources:
        """Return the sources of several lists of files of one folder, in their order."""
        shared: dict[tuple[str, str], tuple[str, str]] = {}  # one object for equal columns
        ends = np.cumsum([len(part.names) for part in parts]).tolist()
        files = [part.file + (end - len(part.names)) for part, end in zip(parts, ends, strict=True)]
        return replace(
            parts[0],
            names=[name for part in parts for name in part.names],
            sizes=np.concatenate([part.sizes for part in parts]),
            columns=[shared.setdefault(each, each) for part in parts for each in part.columns],
            file=np.concatenate(files),
            first=np.concatenate([part.first for part in parts]),
            rows=np.concatenate([part.rows for part in parts]),
            spans=np.concatenate([part.spans for part in parts]),
            bad_files=[each for part in parts for each in part.bad_files],
        )

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, number: int) -> Source:
        file = int(self.file[number])
        span = self.spans[number].tolist() if len(self.spans) else (0, 0)
        place = self.folder, self.names[file], int(self.sizes[file]), self.kind
        return Source(*place, int(self.first[number]), int(self.rows[number]), *self.columns[file], self.where, *span)

    def __iter__(self) -> Iterator[Source]:
        return map(self.__getitem__, range(len(self)))

    @property
    def num_rows(self) -> int:
        """Number of rows, good or bad."""
        return int(self.rows.sum(dtype=np.int64))

    def only(self, numbers: np.ndarray) -> Sources:
        """Return some of the sources, with their files alone."""
        files, file = np.unique(self.file[numbers], return_inverse=True)
        return replace(
            self,
            names=[self.names[each] for each in files.tolist()],
            sizes=self.sizes[files],
            columns=[self.columns[each] for each in files.tolist()],
            file=file.astype(np.int32),
            first=self.first[numbers],
            rows=self.rows[numbers],
            spans=self.spans[numbers] if len(self.spans) else self.spans,
            bad_files=[],
        )

    def facts(self) -> Iterator[dict[str, Any]]:
        """Yield what determines the rows of each source, but for `where`: the values of Source by name."""
        last, facts = -1, {}
        for low in range(0, len(self), BLOCK):
            some = (each[low : low + BLOCK].tolist() for each in (self.file, self.first, self.rows))
            for file, first, rows in zip(*some, strict=True):
                if file != last:
                    last, (image, caption) = file, self.columns[file]
                    facts = {"folder": self.folder, "name": self.names[file], "size": int(self.sizes[file])}
                    facts |= {"kind": self.kind, "image_column": image, "caption_column": caption}
                yield {**facts, "first": first, "num_rows": rows}


@dataclass(frozen=True)
class Chunks:
    """The chunks of sources: up to `size` rows of a source each, numbered over all sources in their order.

    source_rows: number of rows of each source, [S], none of them 0.
    """

    source_rows: np.ndarray
    size: int

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of chunks of each source, [S]."""
        return -(-self.source_rows // self.size)

    @cached_property
    def ends(self) -> np.ndarray:
        """Number of the chunk after the last one of each source, [S]."""
        return np.cumsum(self.counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def rows(self) -> np.ndarray:
        """Number of rows of each chunk, [N]."""
        rows = np.full(len(self), self.size, np.int32)
        rows[self.ends - 1] = self.source_rows - (self.counts - 1) * self.size
        return rows

    @property
    def passes(self) -> float:
        """How often all rows are read if each chunk is read from the start of its source to its own end."""
        rows = self.source_rows.astype(np.int64)
        return float((rows * (self.counts + 1)).sum() / (2 * rows.sum()))

    def numbers(self, source: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Return the numbers of chunks, given by the numbers of their sources and their places in these."""
        return self.ends[source] - self.counts[source] + chunk

    def place(self, number: int) -> tuple[int, int]:
        """Return (number of its source, place in it) of a chunk."""
        source = int(np.searchsorted(self.ends, number, "right"))
        return source, int(number - self.ends[source] + self.counts[source])
