"""Make the contact sheet of the README: one row per folder, with the folder's first pictures.

python assets/contact_sheet.py --output assets/result.png assets/subject data/images-reg data/images-new
"""

import argparse
from pathlib import Path

from PIL import Image


def main():
    """Write the sheet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="a folder of pictures, or FOLDER:PATTERN")
    parser.add_argument("--output", required=True, help="PNG file to write")
    parser.add_argument("--columns", type=int, default=8, help="pictures in a row")
    parser.add_argument("--side", type=int, default=96, help="pixels of a picture's side")
    args = parser.parse_args()
    gap = 4
    cell = args.side + gap
    sheet = Image.new("RGB", (args.columns * cell + gap, len(args.folders) * cell + gap), "white")
    for row, name in enumerate(args.folders):
        folder, _, pattern = name.partition(":")
        for column, path in enumerate(sorted(Path(folder).glob(pattern or "*.[jp][pn]g"))[: args.columns]):
            picture = Image.open(path).convert("RGB").resize((args.side, args.side), Image.Resampling.LANCZOS)
            sheet.paste(picture, (gap + column * cell, gap + row * cell))
    sheet.save(args.output, optimize=True)


if __name__ == "__main__":
    main()
