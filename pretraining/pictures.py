"""The contact sheet of a data set: rows evenly spaced over it, whose pixels are kept small when they are encoded.

So nothing is read or decoded again, and the images of URLs need not be there any more.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from common.errors import one_line
from common.sheets import CELL, make_sheet
from pretraining.columns import row_number

SHOWN, COLUMNS = 40, 8  # pictures on the sheet
CANDIDATES = 160  # rows that are kept for it: some may be bad, or lie where filters leave nothing
CAPTION = 200  # characters
LAST_DRAWN = "\u024f"  # character that Pillow's own font may draw: of Latin letters

Picture = list[str]  # [caption, JPEG in base64]


def choose_rows(source_rows: np.ndarray) -> dict[int, list[int]]:
    """Return {number of a source: numbers of its rows}, CANDIDATES evenly spaced over all rows or all of them.

    source_rows: number of rows of each source, [S].
    """
    ends = np.cumsum(source_rows, dtype=np.int64)
    rows = np.unique(np.linspace(0, ends[-1] - 1, CANDIDATES).round().astype(np.int64))
    places = np.searchsorted(ends, rows, "right")
    chosen: dict[int, list[int]] = {}
    for place, row in zip(places.tolist(), rows.tolist(), strict=True):
        chosen.setdefault(place, []).append(row - int(ends[place]) + int(source_rows[place]))
    return chosen


def thumbnails(chunk: Mapping[str, Any], resolution: int) -> list[Picture]:
    """Return small pictures of the rows in "shown" of a chunk; of a bad row the next good one is taken."""
    numbers = [row_number([key]) for key in chunk["keys"]]
    if not numbers:
        return []
    places = np.unique(np.minimum(np.searchsorted(numbers, chunk["shown"]), len(numbers) - 1))
    return [_picture(chunk["captions"][i], chunk[f"pixels_{resolution}"][i]) for i in places.tolist()]


def _picture(caption: str, pixels: np.ndarray) -> Picture:
    image, file = Image.fromarray(pixels), io.BytesIO()
    image.thumbnail((CELL, CELL), Image.Resampling.LANCZOS)
    image.save(file, "JPEG", quality=90)
    return [one_line(caption, CAPTION), base64.b64encode(file.getvalue()).decode()]


def draw_sheet(pictures: Mapping[int, list[Picture]]) -> tuple[bytes, list[str]]:
    """Return (JPEG of the contact sheet, the captions in its order) of SHOWN pictures, evenly chosen.

    pictures: of the parts that have some, by part.
    """
    found = [picture for part in sorted(pictures) for picture in pictures[part]]
    chosen = [found[i] for i in np.unique(np.linspace(0, len(found) - 1, SHOWN).round().astype(int))]
    images = [Image.open(io.BytesIO(base64.b64decode(data))) for _, data in chosen]
    captions = [caption for caption, _ in chosen]
    drawn = ["".join(letter for letter in caption if letter <= LAST_DRAWN) for caption in captions]
    sheet, file = make_sheet(images, [f"{i}. {text}" for i, text in enumerate(drawn, 1)], COLUMNS), io.BytesIO()
    sheet.save(file, "JPEG", quality=90)
    return file.getvalue(), captions
