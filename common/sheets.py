"""Contact sheets: one image of many, each with its caption below."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

CELL, CAPTION_LINES, LINE, GAP = 128, 2, 12, 4  # pixels of an image's side, lines, pixels
FONT_SIZE = 10


def make_sheet(images: Sequence[Image.Image], captions: Sequence[str], columns: int) -> Image.Image:
    """Return an image of all square images, CELL pixels a side, in `columns` columns with their captions below.

    A caption is cut after CAPTION_LINES lines.
    """
    font = ImageFont.load_default(FONT_SIZE)
    height = CELL + CAPTION_LINES * LINE + 2 * GAP
    num_rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (CELL + GAP) + GAP, num_rows * height + GAP), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = GAP + index % columns * (CELL + GAP), GAP + index // columns * height
        sheet.paste(image.resize((CELL, CELL), Image.Resampling.LANCZOS), (left, top))
        for line, text in enumerate(_wrap(caption, font)):
            pen.text((left + CELL / 2, top + CELL + GAP + line * LINE), text, fill="black", font=font, anchor="ma")
    return sheet


def _wrap(text, font):
    """Return a text wrapped to the width of a cell, as at most CAPTION_LINES lines."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= CELL or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines[:CAPTION_LINES]
