"""sheets.py: where the images and captions of a contact sheet are."""

import numpy as np
from PIL import Image

from common.sheets import CELL, GAP, make_sheet


def test_images_are_in_rows_with_captions_below():
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    images = [Image.new("RGB", (16, 16), colour) for colour in colours]
    sheet = np.asarray(make_sheet(images, ["one", "", "a long caption of many words that runs over the lines"], 2))
    height = (sheet.shape[0] - GAP) // 2
    assert sheet.shape[1] == 2 * (CELL + GAP) + GAP
    for number, colour in enumerate(colours):
        left, top = GAP + number % 2 * (CELL + GAP), GAP + number // 2 * height
        assert (sheet[top : top + CELL, left : left + CELL] == colour).all()
        below = sheet[top + CELL + GAP : top + height - GAP, left : left + CELL]
        assert (below < 128).any() == (number != 1), "a caption is black on white"
    assert (sheet[height + GAP :, GAP + CELL + GAP :] == 255).all()  # there is no fourth image
