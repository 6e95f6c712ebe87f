"""Turn images and captions into Parquet latents that pretrain.py trains on: decode on CPUs, encode on accelerators.

Reads Parquet (bytes, paths or URLs), a folder with metadata.jsonl, or WebDataset tars, on disks and in object stores;
writes float16 latents (mean and std), caption embeddings and captions. Run the command again to continue.

    python preprocess.py --input data/emoji/dataset --model_dir models/emoji-64 --output_dir data/latents
    python preprocess.py --input s3://bucket/laion --model_dir MODEL --output_dir s3://bucket/latents \\
        --resolutions 256 512
"""

import contextlib
import itertools
import json
import math
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from common import cli, folders, messages
from common.actors import map_on_actors
from common.errors import BadInput
from common.messages import Progress, say
from common.storage import Folder, absolute, is_remote, read_footer
from pipelines.configs import base_name, base_revision, check_resolution, model_resolution
from pipelines.model_folder import check_model, check_pipeline
from pretraining.latents import (
    FOOTER_THREADS,
    METADATA,
    RECORD,
    LatentEncoder,
    digest_encoders,
    latent_shapes,
    to_parquet,
)
from pretraining.loader import Loader, add_raw_data_flags, loader_options
from pretraining.raw_data import Source, list_sources, read_rows

BAD_ROWS = "bad_rows.jsonl"
EARLY = 1000  # rows after which a run with too many bad ones does not wait for the end


def parse_args(argv=None):
    """Parse the command line."""
    parser = cli.make_parser(__doc__)
    group = parser.add_argument_group("data")
    group.add_argument("--input", required=True, help="folder, file or URI of the images and captions")
    group.add_argument("--output_dir", required=True, help="folder or URI for the latents")
    group.add_argument("--overwrite", action="store_true", help="drop an earlier data set of other settings")
    add_raw_data_flags(parser.add_argument_group("raw data"))

    group = parser.add_argument_group("encoding")
    group.add_argument("--model_dir", required=True, help="folder of the model whose VAE and text encoder are used")
    group.add_argument("--resolutions", type=cli.positive_int, nargs="+", help="pixels a side; default: the model's")
    group.add_argument("--seed", type=cli.seed, default=0, help="seed of random crops and flips")

    group = cli.add_shared_flags(parser)
    group.add_argument("--num_workers", type=cli.pool_size, help="0: this process; actors: 4, or 1:8; default: one a "
                       "GPU, or one on four CPUs")  # fmt: skip
    cli.add_compute_flags(group)
    return parser.parse_args(argv)


class PartWriter:
    """Encodes a loader's chunk and writes it as one Parquet file: the work of one actor."""

    def __init__(self, output_dir, **encoder_options):
        self.encoder, self.folder = LatentEncoder(**encoder_options), Folder(output_dir)

    def __call__(self, chunk):
        """Return {"name", "rows", "bad"} of a chunk, written under its name, whole or not at all."""
        columns = self.encoder(chunk) if chunk["keys"] else {}
        self.folder.write(chunk["name"], to_parquet(chunk, columns))
        return {"name": chunk["name"], "rows": len(chunk["keys"]), "bad": chunk["bad"]}


def load_chunks(item, loader, rows_per_file):
    """Yield the chunks of one source that are not written yet: {"source", "number", "done": names of what is}.

    What lies together is read in one go.
    """
    source = Source(**item["source"])
    missing = [
        chunk
        for chunk in range(-(-source.num_rows // rows_per_file))
        if part_name(item["number"], chunk) not in item["done"]
    ]
    for _, stretch in itertools.groupby(enumerate(missing), key=lambda pair: pair[1] - pair[0]):
        chunks = [chunk for _, chunk in stretch]
        rows = read_rows(source, chunks[0] * rows_per_file, len(chunks) * rows_per_file)
        for chunk in chunks:
            some = list(itertools.islice(rows, rows_per_file))
            yield {"name": part_name(item["number"], chunk), **loader.load(source, some, chunk * rows_per_file)}


def part_name(source_number, chunk_number):
    """Return the file that holds a chunk of a source: in the order of the rows, whoever writes it."""
    return f"part-{source_number:06d}-{chunk_number:04d}.parquet"


def written_parts(folder):
    """Return {name: (rows, bad rows)} of the parts that are there."""
    names = [name for name in folder.names(".parquet") if re.fullmatch(r"part-\d{6,}-\d{4,}\.parquet", name)]
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        footers = pool.map(partial(read_footer, folder), names)
    return {name: (sum(rows for _, rows in groups), bad) for name, (_, groups, bad) in zip(names, footers, strict=True)}


def check_bad_rows(good, bad, max_bad_fraction):
    """Raise BadInput where the share of bad rows, [[key, reason]], is more than one puts up with."""
    if len(bad) > max_bad_fraction * (good + len(bad)):
        key, reason = bad[0]
        raise BadInput(
            f"{len(bad)} of {good + len(bad)} rows are bad, more than --max_bad_fraction {max_bad_fraction:g}; "
            f"the first is {key}: {reason}"
        )


def check_room(args, rows):
    """Raise OutOfResource unless the latents and caption embeddings of so many rows fit on a local disk."""
    shapes = [latent_shapes(args.model_dir, size) for size in args.resolutions]
    numbers = sum(2 * math.prod(image) for image, _ in shapes) + math.prod(shapes[0][1])  # mean and std, a caption's
    if not is_remote(args.output_dir):
        folders.check_space([("--output_dir", args.output_dir, 2 * numbers * rows)])  # float16


def encode_all(args, folder, sources):
    """Write the parts that are missing; return the rows and bad rows of all, in the order of the parts."""
    parts = written_parts(folder)
    total = sum(source.num_rows for source in sources)
    good, bad = sum(rows for rows, _ in parts.values()), [row for _, rows in parts.values() for row in rows]
    counts = [-(-source.num_rows // args.rows_per_file) for source in sources]
    items = []
    for number, (source, count) in enumerate(zip(sources, counts, strict=True)):
        done = [name for name in (part_name(number, chunk) for chunk in range(count)) if name in parts]
        if len(done) < count:
            items.append({"source": vars(source), "number": number, "done": done})
    check_room(args, total - good - len(bad))
    check_model(args.model_dir)
    loader = Loader(**loader_options(args, args.resolutions))
    options = {
        "output_dir": folder.location,
        "model_dir": args.model_dir,
        "resolutions": args.resolutions,
        "batch_size": args.encoding_batch_size,
        "mixed_precision": args.mixed_precision,
    }
    prepare = partial(load_chunks, loader=loader, rows_per_file=args.rows_per_file)
    results = map_on_actors(PartWriter, options, items, args.num_workers, prepare, **cli.placement(args))
    with Progress("preprocess", total, "rows", initial=good + len(bad)) as progress:
        for result in results:
            parts[result["name"]] = (result["rows"], result["bad"])
            good, bad = good + result["rows"], bad + result["bad"]
            progress.update(result["rows"] + len(result["bad"]), bad=len(bad))
            if good + len(bad) >= EARLY:
                check_bad_rows(good, bad, args.max_bad_fraction)
    return dict(sorted(parts.items()))


def finish(args, folder, settings, parts):
    """Check the share of bad rows, then write what a reader needs; on a local disk the folder appears now."""
    good, bad = sum(rows for rows, _ in parts.values()), [row for _, rows in parts.values() for row in rows]
    check_bad_rows(good, bad, args.max_bad_fraction)
    folder.write(BAD_ROWS, "".join(json.dumps({"key": key, "reason": reason}) + "\n" for key, reason in bad).encode())
    shapes = {f"image_latents_{size}": latent_shapes(args.model_dir, size)[0] for size in args.resolutions}
    shapes["caption_latents"] = latent_shapes(args.model_dir, args.resolutions[0])[1]
    metadata = {
        "model": base_name(args.model_dir),
        "revision": base_revision(args.model_dir),
        "encoders": settings["encoders"],
        "resolutions": args.resolutions,
        "shapes": shapes,
        "scaled": False,
        "rows": good,
        "bad_rows": len(bad),
        "settings": settings,
    }
    folder.write(METADATA, json.dumps(metadata, indent=2, sort_keys=True).encode())
    folder.delete(RECORD)
    if not is_remote(args.output_dir):
        folders.publish(Path(folder.location), args.output_dir, settings=settings)
    for row in bad[:10]:
        say(f"left out {row[0]}: {row[1]}")
    if bad:
        say(f"left out {len(bad)} bad rows of {good + len(bad)}: {args.output_dir}/{BAD_ROWS} has them all")
    messages.print_result(output_dir=args.output_dir, rows=good, bad_rows=len(bad))


def read_settings(args):
    """Check the flags against the model and the data; return (what decides the data set, its sources)."""
    check_pipeline(args.model_dir)
    args.resolutions = args.resolutions or [model_resolution(args.model_dir)]
    for resolution in args.resolutions:
        check_resolution(args.model_dir, "--resolutions", resolution)
    sources = list_sources(args.input, args.image_column, args.caption_column)
    names = ("resolutions", "crop", "random_flip", "seed", "rows_per_file", "mixed_precision")
    settings = {name: getattr(args, name) for name in names}
    settings["encoders"] = digest_encoders(args.model_dir)
    settings["input"] = folders.digest_values([vars(source) for source in sources])
    return settings, sources


def main(args):
    """Check everything, encode what is missing, and publish."""
    for name in ("input", "model_dir", "output_dir"):
        setattr(args, name, absolute(getattr(args, name)))
    remote = is_remote(args.output_dir)
    if not remote:
        folders.check_writable(args.output_dir, "--output_dir")
    if not (remote or is_remote(args.input)):
        folders.check_apart(args.output_dir, input=args.input, model_dir=args.model_dir)
    settings, sources = read_settings(args)
    output = Folder(args.output_dir)
    metadata = read_metadata(output, args.overwrite)
    if metadata and metadata["settings"] == settings:
        say(f"{args.output_dir}: all {metadata['rows']} rows are there")
        return messages.print_result(output_dir=args.output_dir, rows=metadata["rows"], bad_rows=metadata["bad_rows"])
    if metadata and not args.overwrite:
        folders.check_same_settings(settings, metadata["settings"], f"--output_dir {args.output_dir}")
    work_dir = f"{args.output_dir}.work"
    with contextlib.nullcontext() if remote else folders.lock(Path(work_dir) / folders.LOCK):
        folder = output if remote else Folder(f"{work_dir}/parts")
        begin(folder, settings, args.overwrite)
        finish(args, folder, settings, encode_all(args, folder, sources))
    if not remote:
        shutil.rmtree(work_dir)


def read_metadata(output, overwrite):
    """Return the metadata.json of a whole data set, {} where there is none; raise BadInput where something else is."""
    metadata = json.loads(output.read(METADATA) or "{}")
    if is_remote(output.location):
        ours = "settings" in metadata or output.read(RECORD)
    else:
        ours = metadata and folders.read_manifest(output.location)
    if not ours and output.kind() and output.names(""):
        if is_remote(output.location):
            raise BadInput(
                f"--output_dir {output.location} is in the way: it is not a data set of ours; choose another"
            )
        folders.check_ours(output.location, "--output_dir")
        if not overwrite:
            raise BadInput(f"--output_dir {output.location} is a damaged data set of ours: --overwrite replaces it")
    return metadata if ours else {}


def begin(folder, settings, overwrite):
    """Make `folder` that of these settings: what another run left there is only dropped with --overwrite."""
    record = json.loads(folder.read(RECORD) or folder.read(METADATA) or "{}")
    record = record.get("settings", record)
    if record and record != settings:
        if not overwrite:
            folders.check_same_settings(settings, record, f"the unfinished {folder.location}")
        folder.write(RECORD, json.dumps(record).encode())  # until all of it is gone
        for name in folder.names(".parquet", ".json", ".jsonl"):
            if name != RECORD:
                folder.delete(name)
    folder.write(RECORD, json.dumps(settings).encode())
    if not is_remote(folder.location):
        for path in Path(folder.location).glob(".*.tmp"):  # what a killed run was writing
            path.unlink()


if __name__ == "__main__":
    sys.exit(cli.run(main, parse_args()))
