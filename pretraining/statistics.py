"""Statistics of a data set: sizes of images and lengths of captions as histograms, and why rows are bad.

The task that writes a part counts its rows; the driver adds the counts up. All histograms have the same bins, so what
it holds does not grow with the data.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.errors import one_line
from common.images import READ

STEPS = 16  # bins from a value to its double; smaller values than 2 * STEPS have a bin each
LARGEST = 2**16 - 1  # larger values count as this one
ASPECT = 1024  # for width / height = 1
QUANTITIES = ("width", "height", "shortest_side", "aspect_ratio", "characters", "tokens")
QUANTILES = {"smallest": 0.0, "5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95, "largest": 1.0}

MOST_REASONS, OTHER = 1000, "other reasons"  # different ones that are counted; the others together
ADDRESS = re.compile(rf"^.+?(?:{'|'.join(map(re.escape, sorted(READ)))})(?:[?#]\S*)?: |^\S*[./]\S*: ", re.IGNORECASE)
QUOTED = re.compile(r"b?'[^']*'|b?\"[^\"]*\"|\w+://\S+|\S*/\S+|<[^>]*>")
STATUS_OR_NUMBER = re.compile(r"(HTTP \d{3})|0x[0-9a-f]+|\d+(?:\.\d+)?")


# ---------------------------------------------------------------------------------------------------------------------
# Histograms


def find_bins(values: np.ndarray) -> np.ndarray:
    """Return the number of the bin of each value, an int of at least 0; log-linear as those of HdrHistogram."""
    values = np.clip(values, 0, LARGEST)
    shift = np.maximum(np.frexp(values)[1] - 5, 0)  # of the bits below those that name the bin
    return STEPS * shift + (values >> shift)


NUM_BINS = int(find_bins(np.array(LARGEST))) + 1


def smallest_values(bins: np.ndarray) -> np.ndarray:
    """Return the smallest value of each bin: exact below 32, at most 1/16 less than any value of the bin above."""
    shift = np.maximum(bins // STEPS - 1, 0)
    return (bins - STEPS * shift) << shift


@dataclass
class Statistics:
    """Counts of good rows.

    rows: those that are counted. enlarged: {resolution: images that are smaller}. cut: captions of more tokens than the
    text encoder reads. counts: [QUANTITIES, NUM_BINS].
    """

    rows: int = 0
    enlarged: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    counts: np.ndarray = field(default_factory=lambda: np.zeros((len(QUANTITIES), NUM_BINS), np.int64))

    @classmethod
    def of(
        cls,
        crops: np.ndarray,
        resolutions: Iterable[int],
        captions: Sequence[str],
        tokens: Sequence[int],
        max_tokens: int,
    ) -> Statistics:
        """Return the statistics of some rows.

        crops: [B, 7], as of a chunk of Loader; tokens: of each caption, none cut; max_tokens: that are read.
        """
        width, height = crops[:, 0], crops[:, 1]
        side, lengths = np.minimum(width, height), np.array([len(caption.strip()) for caption in captions], np.int64)
        counted = np.array(tokens, np.int64)
        values = (width, height, side, (ASPECT * width + height // 2) // np.maximum(height, 1), lengths, counted)
        counts = np.stack([np.bincount(find_bins(each), minlength=NUM_BINS) for each in values])
        enlarged = Counter({str(resolution): int((side < resolution).sum()) for resolution in resolutions})
        return cls(len(captions), enlarged, int((counted > max_tokens).sum()), counts)

    def to_note(self) -> dict[str, Any]:
        """Return plain values for the notes of a part.

        "counts": base64 of zlib of all counts, as unsigned integers of as few bytes as the largest one needs.
        """
        smallest = np.min_scalar_type(self.counts.max()).newbyteorder("<")
        counts = base64.b64encode(zlib.compress(self.counts.astype(smallest).tobytes())).decode()
        return {"rows": self.rows, "enlarged": dict(self.enlarged), "cut": self.cut, "counts": counts}

    def add(self, note: Mapping[str, Any]) -> None:
        """Add the rows of a note of `to_note`."""
        data = zlib.decompress(base64.b64decode(note["counts"]))
        counts = np.frombuffer(data, f"<u{len(data) // self.counts.size}")
        self.counts += counts.reshape(self.counts.shape)
        self.rows += note["rows"]
        self.cut += note["cut"]
        self.enlarged.update(note["enlarged"])

    def quantiles(self, quantity: str) -> dict[str, float]:
        """Return the QUANTILES of a quantity, each rounded down to the smallest value of its bin; {} without rows."""
        ends, scale = np.cumsum(self.counts[QUANTITIES.index(quantity)]), _scale(quantity)
        if not ends[-1]:
            return {}
        rows = np.clip(np.ceil(np.array([*QUANTILES.values()]) * ends[-1]), 1, ends[-1])
        values = smallest_values(np.searchsorted(ends, rows)) / scale
        return dict(zip(QUANTILES, (values.round(3) if scale > 1 else values.astype(int)).tolist(), strict=True))

    def histogram(self, quantity: str) -> list[list[float]]:
        """Return [[smallest value of the bin, rows], ...] of the bins that are not empty."""
        counts, scale = self.counts[QUANTITIES.index(quantity)], _scale(quantity)
        bins = np.flatnonzero(counts)
        borders = smallest_values(bins) / scale if scale > 1 else smallest_values(bins)
        return [list(pair) for pair in zip(borders.tolist(), counts[bins].tolist(), strict=True)]

    @property
    def empty_captions(self) -> int:
        """Rows whose captions are empty or white space."""
        return int(self.counts[QUANTITIES.index("characters"), 0])


def _scale(quantity: str) -> int:
    return ASPECT if quantity == "aspect_ratio" else 1


# ---------------------------------------------------------------------------------------------------------------------
# Reasons


def general(reason: str) -> str:
    """Return the reason why a row is bad without file names, URLs and numbers, but with the status of HTTP."""
    reason = QUOTED.sub("...", ADDRESS.sub("", reason))
    return one_line(STATUS_OR_NUMBER.sub(lambda found: found[1] or "N", reason), 100)


def count_reasons(reasons: Iterable[str]) -> dict[str, int]:
    """Return {general reason: rows} of the reasons of bad rows."""
    counts: Counter[str] = Counter()
    for reason, count in Counter(reasons).items():
        add_bounded(counts, {general(reason): count})
    return dict(counts)


def add_bounded(total: Counter[str], counts: Mapping[str, int]) -> None:
    """Add counts of reasons; when there are MOST_REASONS, those of further ones are added to OTHER."""
    for reason, count in counts.items():
        total[reason if reason in total or len(total) < MOST_REASONS else OTHER] += count
