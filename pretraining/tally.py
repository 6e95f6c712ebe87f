"""Counts of the rows of a data set of latents, the shares of unusable rows that end a run, and all that parts note."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from common.errors import BadInput, TryAgain
from common.messages import say
from common.storage import join
from pretraining.columns import row_number
from pretraining.index import COUNTS, Index, IndexWriter, Record, read_index, read_notes
from pretraining.loader import likely_bad
from pretraining.statistics import Statistics, add_bounded, count_reasons

BAD_ROWS = "bad_rows.jsonl"
LISTED, TOLD = 100_000, 10  # rows that it lists at most, and those that messages name
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


@dataclass
class Summary:
    """What the notes of all parts say.

    bad_rows: [key, reason] of the first TOLD bad rows, with those that could not be fetched. bad_lines: the content of
    BAD_ROWS, which has `listed` rows. reasons, filtered: numbers of rows by reason, of all bad rows and of those that
    filters left out. pictures: of thumbnails, by part.
    """

    bad_rows: list[list[str]] = field(default_factory=list)
    bad_lines: bytearray = field(default_factory=bytearray)
    listed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)
    statistics: Statistics = field(default_factory=Statistics)
    pictures: dict[int, list[list[str]]] = field(default_factory=dict)

    def list_bad(self, rows: list[list[str]]) -> None:
        """Add [key, reason] of bad rows to BAD_ROWS, as long as there are not LISTED of them."""
        rows = rows[: LISTED - self.listed]
        self.bad_rows += rows[: TOLD - len(self.bad_rows)]
        self.bad_lines += b"".join(json.dumps({"key": key, "reason": reason}).encode() + b"\n" for key, reason in rows)
        self.listed += len(rows)


def summarise(writer: IndexWriter, index: Index) -> Summary:
    """Return the Summary of all parts in one pass over the index; those of older versions have less to say."""
    found = Summary()
    for part, notes in read_notes(writer.folder, writer.files, index):
        if bad := notes["bad"] + notes["later"]:
            if found.listed < LISTED:
                found.list_bad(_all_bad(notes))
            add_bounded(found.reasons, notes.get("reasons") or count_reasons(reason for _, reason in bad))
        add_bounded(found.filtered, notes["filtered"])
        if "statistics" in notes:
            found.statistics.add(notes["statistics"])
        if "pictures" in notes:
            found.pictures[part] = notes["pictures"]
    return found


def _all_bad(notes: dict[str, Any]) -> list[list[str]]:
    """Return the bad rows of a part with those that could not be fetched, in the order of their numbers."""
    later = [[key, f"{reason}, also when tried again"] for key, reason in notes["later"]]
    return sorted(notes["bad"] + later, key=row_number)


def say_what_is_left_out(location: str, tally: Tally, summary: Summary) -> None:
    """Print the first bad rows of a finished data set, and how many are bad or filtered."""
    for key, reason in summary.bad_rows:
        say(f"skipped {key}: {reason}")
    if bad := tally.bad + tally.later:
        what = "lists them all" if bad <= LISTED else f"lists {LISTED} of them, the index all"
        say(f"skipped {bad} bad rows of {tally.rows + bad}: {join(location, BAD_ROWS)} {what}")
    for reason, count in sorted(summary.filtered.items()):
        say(f"filtered {count} rows: {reason}")
