"""pictures.py: which rows are on the contact sheet, and the sheet."""

import base64
import io

import numpy as np
from PIL import Image

from common.sheets import CELL
from pretraining.pictures import CANDIDATES, SHOWN, choose_rows, draw_sheet, thumbnails


def test_the_rows_are_evenly_spaced_over_all_sources():
    assert choose_rows(np.array([2, 1, 3], np.int32)) == {0: [0, 1], 1: [0], 2: [0, 1, 2]}
    counts = [1_000_000, 10, 3_000_000_000, 999_999_990]
    chosen = choose_rows(np.array(counts))
    starts = np.cumsum([0, *counts])
    rows = [int(starts[source]) + row for source, own in chosen.items() for row in own]
    assert len(rows) == CANDIDATES and rows[0] == 0 and rows[-1] == sum(counts) - 1
    assert np.ptp(np.diff(rows)) <= 1
    assert all(0 <= row < counts[source] for source, own in chosen.items() for row in own)


def test_the_next_good_row_stands_in_for_a_bad_one():
    rows = [3, 5, 6]
    pixels = np.stack([np.full((300, 300, 3), 40 * row, np.uint8) for row in rows])
    chunk = {"keys": [f"a.tar:0:{row}" for row in rows], "captions": [f"row {row}" for row in rows]}
    chunk |= {"pixels_300": pixels, "shown": [3, 4, 5, 7]}
    found = thumbnails(chunk, 300)
    assert [caption for caption, _ in found] == ["row 3", "row 5", "row 6"]
    for row, (_, data) in zip(rows, found, strict=True):
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert image.size == (CELL, CELL) and image.getpixel((9, 9)) == (40 * row,) * 3
    none = {"keys": [], "captions": [], "pixels_300": pixels[:0], "shown": [4]}
    assert thumbnails(none, 300) == []


def picture(level, caption):
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (level,) * 3).save(file, "JPEG")
    return [caption, base64.b64encode(file.getvalue()).decode()]


def test_the_sheet_has_its_pictures_in_the_order_of_the_data():
    parts = {part: [picture(part, f"part {part}")] for part in reversed(range(CANDIDATES))}
    data, captions = draw_sheet(parts)
    numbers = [int(caption.split()[1]) for caption in captions]
    assert len(numbers) == SHOWN and numbers == sorted(numbers) and {0, CANDIDATES - 1} < set(numbers)
    with Image.open(io.BytesIO(data)) as sheet:
        assert sheet.format == "JPEG"
        first, eighth = (sheet.getpixel((x, CELL // 2))[0] for x in (CELL // 2, sheet.width - CELL // 2))
    assert abs(first - numbers[0]) <= 3 and abs(eighth - numbers[7]) <= 3
    few, captions = draw_sheet({0: [picture(9, "犬 dog")]})
    assert captions == ["犬 dog"] and few.startswith(b"\xff\xd8")
