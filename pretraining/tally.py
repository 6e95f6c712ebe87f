"""Counts of the rows of a data set of latents, and the shares of unusable rows that end a run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common.errors import BadInput, TryAgain
from common.storage import Folder
from pretraining.columns import row_number
from pretraining.index import COUNTS, Index, Record, index_files, read_index, read_notes
from pretraining.loader import likely_bad

MOST_LATER = 0.5  # share of rows that cannot be fetched, above which the network or a server is taken to be away


@dataclass
class Tally:
    """Numbers of rows: see index.COUNTS."""

    rows: int = 0
    bad: int = 0
    later: int = 0
    filtered: int = 0

    @classmethod
    def of(cls, index: Index) -> Tally:
        """Return the numbers of all parts of an index."""
        return cls(*(int(getattr(index, name).sum()) for name in COUNTS))

    def add(self, record: Record) -> None:
        """Count the rows of a part."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + record[name])

    @property
    def total(self) -> int:
        """All rows."""
        return self.rows + self.bad + self.later + self.filtered

    @property
    def wanted(self) -> int:
        """All rows but those that filters left out, of which shares are taken."""
        return self.total - self.filtered

    def is_too_bad(self, max_bad_fraction: float) -> bool:
        """Return whether more of the rows so far are bad, or cannot be fetched, than chance explains."""
        seen = self.rows + self.bad
        most_later = max(MOST_LATER, max_bad_fraction) * self.wanted
        return self.bad > likely_bad(seen, max_bad_fraction) or self.later > most_later


def check(location: str, folder: Folder, tally: Tally, max_bad_fraction: float, is_early: bool = False) -> None:
    """Raise BadInput or TryAgain if more rows are bad, or cannot be fetched, than max_bad_fraction allows.

    folder: of the parts; their notes name the first such row. is_early: these are not all rows, so that the shares may
    differ by chance.
    """
    seen = tally.rows + tally.bad + (0 if is_early else tally.later)
    if tally.bad > (likely_bad(seen, max_bad_fraction) if is_early else max_bad_fraction * seen):
        key, reason = _first(folder, "bad")
        raise BadInput(
            f"--input {location}: {tally.bad} of {seen} rows are bad, more than --max_bad_fraction "
            f"{max_bad_fraction:g} allows; the first is {key}: {reason}"
        )
    most = max(MOST_LATER, max_bad_fraction) if is_early else max_bad_fraction - tally.bad / max(1, tally.wanted)
    if tally.later > most * tally.wanted:
        key, reason = _first(folder, "later")
        raise TryAgain(
            f"--input {location}: {tally.later} of {tally.wanted} rows cannot be fetched now; the first is {key}: "
            f"{reason}: run the same command again when the servers answer, or pass a larger --max_bad_fraction"
        )


def _notes(folder: Folder) -> Iterator[dict[str, Any]]:
    files = index_files(folder)
    return (notes for _, notes in read_notes(folder, files, read_index(folder, files)))


def _first(folder: Folder, note: str) -> list[str]:
    return next(notes[note][0] for notes in _notes(folder) if notes[note])


def list_bad_rows(folder: Folder, most: int) -> list[list[str]]:
    """Return [key, reason] of the first bad rows, at most `most`, with those that could not be fetched."""
    return list(itertools.islice(itertools.chain.from_iterable(map(_all_bad, _notes(folder))), most))


def _all_bad(notes: dict[str, Any]) -> list[list[str]]:
    """Return the bad rows of a part with those that could not be fetched, in the order of their numbers."""
    later = [[key, f"{reason}, also when tried again"] for key, reason in notes["later"]]
    return sorted(notes["bad"] + later, key=row_number)


def count_filtered(folder: Folder) -> dict[str, int]:
    """Return {reason: number of rows that filters left out for it}."""
    counts: Counter[str] = Counter()
    for notes in _notes(folder):
        counts.update(notes["filtered"])
    return dict(counts)
