"""Counts of the rows of a data set of latents, and the shares of unusable rows that end a run."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

from common.errors import BadInput, TryAgain
from pretraining.columns import row_number
from pretraining.index import COUNTS, Index, IndexWriter, Record, read_index, read_notes
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

    def seen(self, is_early: bool = False) -> int:
        """Rows of which the share of bad ones is taken; early without those that may be fetched later."""
        return self.rows + self.bad + (0 if is_early else self.later)

    def fault(self, max_bad_fraction: float, is_early: bool = False) -> str | None:
        """Return of what there are more rows than max_bad_fraction allows, "bad" or "later", or None.

        is_early: these are not all rows, so that the shares may differ by chance.
        """
        most_bad = likely_bad(self.seen(True), max_bad_fraction) if is_early else max_bad_fraction * self.seen()
        if self.bad > most_bad:
            return "bad"
        most = max(MOST_LATER, max_bad_fraction) if is_early else max_bad_fraction - self.bad / max(1, self.wanted)
        return "later" if self.later > most * self.wanted else None


def check(location: str, writer: IndexWriter, tally: Tally, max_bad_fraction: float, is_early: bool = False) -> None:
    """Raise BadInput or TryAgain if more rows are bad, or cannot be fetched, than Tally.fault allows.

    writer: of the index, whose notes name the first such row.
    """
    fault = tally.fault(max_bad_fraction, is_early)
    if fault == "bad":
        key, reason = _first(writer, fault)
        raise BadInput(
            f"--input {location}: {tally.bad} of {tally.seen(is_early)} rows are bad, more than --max_bad_fraction "
            f"{max_bad_fraction:g} allows; the first is {key}: {reason}"
        )
    if fault:
        key, reason = _first(writer, fault)
        raise TryAgain(
            f"--input {location}: {tally.later} of {tally.wanted} rows cannot be fetched now; the first is {key}: "
            f"{reason}: run the same command again when the servers answer, or pass a larger --max_bad_fraction"
        )


def _first(writer: IndexWriter, note: str) -> list[str]:
    index = read_index(writer.folder, writer.files)
    return next(notes[note][0] for _, notes in read_notes(writer.folder, writer.files, index) if notes[note])


def list_bad_rows(writer: IndexWriter, index: Index, most: int) -> list[list[str]]:
    """Return [key, reason] of the first bad rows, at most `most`, with those that could not be fetched."""
    notes = read_notes(writer.folder, writer.files, index)
    return list(itertools.islice(itertools.chain.from_iterable(_all_bad(each) for _, each in notes), most))


def _all_bad(notes: dict[str, Any]) -> list[list[str]]:
    """Return the bad rows of a part with those that could not be fetched, in the order of their numbers."""
    later = [[key, f"{reason}, also when tried again"] for key, reason in notes["later"]]
    return sorted(notes["bad"] + later, key=row_number)


def count_filtered(writer: IndexWriter, index: Index) -> dict[str, int]:
    """Return {reason: number of rows that filters left out for it}."""
    counts: Counter[str] = Counter()
    for _, notes in read_notes(writer.folder, writer.files, index):
        counts.update(notes["filtered"])
    return dict(counts)
