"""Make the training data of the embedded model's UNet: pictures and captions, as Parquet files.

Columns: image (PNG of 64x64 RGB pixels), caption, and key (a readable name of the row).

    python -m recipes.emoji.make_dataset --output_dir data/emoji/raw --rows_per_picture 2
    python -m recipes.emoji.make_dataset --output_dir data/emoji/raw
"""

import io
import sys
from pathlib import Path

from common import cli, errors, folders, messages
from recipes.emoji import pictures
from recipes.emoji.pictures import ALSO, BACKGROUNDS, STYLES
from utils import row_rng

ROWS_PER_FILE, ROWS_PER_GROUP = 2000, 500
WHITE_SHARE = 0.4  # share of the rows on white
NAMES_COLOUR, NAMES_WHITE = 0.85, 0.3  # how often a caption names a coloured, or a white, background
STATES_STYLE = 0.85
OTHER_NAME = 0.25
DRAW, SHUFFLE = 120, 121  # streams of random numbers


def parse_args(argv=None):
    """Parse the command line."""
    parser = cli.make_parser(__doc__)
    parser.add_argument("--cache_dir", default="data/emoji", help="folder of the downloaded archives")
    parser.add_argument("--output_dir", required=True, help="folder for the Parquet files")
    parser.add_argument("--rows_per_picture", type=cli.positive_int, default=60, help="rows per emoji")
    parser.add_argument("--seed", type=cli.seed, default=0, help="seed of positions, backgrounds, captions and order")
    cli.add_shared_flags(parser)
    return parser.parse_args(argv)


def make_row(picture, index, rng):
    """Return row `index` of a picture as {"image": PNG bytes, "caption", "key"}."""
    background = "white"
    if rng.random() >= WHITE_SHARE:
        background = rng.choice([name for name in BACKGROUNDS if name != "white"])
    style = STYLES[picture.style] if rng.random() < STATES_STYLE else None
    name = ALSO.get(picture.name, picture.name) if rng.random() < OTHER_NAME else picture.name
    named = rng.random() < (NAMES_WHITE if background == "white" else NAMES_COLOUR)
    file = io.BytesIO()
    pictures.compose(picture, rng, BACKGROUNDS[background], centred=True).save(file, "PNG")
    return {
        "image": file.getvalue(),
        "caption": pictures.caption(style, name, background if named else None),
        "key": f"{picture.name.replace(' ', '-')}-{background}-{index:03d}",
    }


def write_files(rows, num_rows, folder):
    """Write `num_rows` rows to pictures-00000-of-00005.parquet and further files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("image", pa.binary()), ("caption", pa.string()), ("key", pa.string())])
    num_files = -(-num_rows // ROWS_PER_FILE)
    for number in range(num_files):
        count = min(ROWS_PER_FILE, num_rows - number * ROWS_PER_FILE)
        table = pa.Table.from_pylist([next(rows) for _ in range(count)], schema)
        path = folder / f"pictures-{number:05d}-of-{num_files:05d}.parquet"
        pq.write_table(table, path, row_group_size=ROWS_PER_GROUP)


def main(args):
    """Draw all rows in shuffled order and publish the folder."""
    output_dir = Path(args.output_dir)
    settings = {"rows_per_picture": args.rows_per_picture, "seed": args.seed}
    manifest = folders.read_manifest(output_dir)
    if manifest:
        if manifest.get("settings") != settings:
            raise errors.BadInput(
                f"--output_dir {output_dir} holds rows of other settings: remove it, or choose another"
            )
        return messages.print_result(output_dir=str(output_dir), rows=manifest["rows"], drawn=0)
    drawn = [picture for picture in pictures.load_pictures(args.cache_dir, ("fluent",)) if pictures.is_drawn(picture)]
    num_rows = len(drawn) * args.rows_per_picture
    order = row_rng(args.seed, SHUFFLE, 0, 0).permutation(num_rows)
    with folders.staging(output_dir) as beside, messages.Progress("dataset", num_rows, "rows") as progress:

        def rows():
            for number in order.tolist():
                which, index = divmod(number, args.rows_per_picture)
                yield make_row(drawn[which], index, row_rng(args.seed, DRAW, index, which))
                progress.update(1)

        write_files(rows(), num_rows, beside)
        folders.publish(beside, output_dir, settings=settings, rows=num_rows)
    messages.print_result(output_dir=str(output_dir), rows=num_rows, drawn=num_rows)


if __name__ == "__main__":
    sys.exit(cli.run(main, parse_args()))
