"""Encode images and captions as Parquet latents for pretrain.py: decodes on CPUs, encodes on GPUs if there are any.

Reads Parquet (image bytes, paths or URLs), a folder with metadata.jsonl, or WebDataset tars, from a local disk or an
object store; writes float16 latents (mean and standard deviation), caption embeddings and captions. To resume, run the
same command again. Without the embeddings (--no-caption_latents) pretrain.py encodes the captions while it trains.

    python preprocess.py --input data/emoji/dataset --model_dir models/emoji-64 --output_dir data/latents
    python preprocess.py --input s3://bucket/laion --model_dir MODEL --output_dir s3://bucket/latents \\
        --resolutions 256 512
"""

import argparse
import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import cli, folders, messages
from common.actors import map_on_actors
from common.errors import BadInput, CheckFailed
from common.messages import Progress, say
from common.objects import local_copy
from common.outages import working
from common.storage import Folder, is_remote
from common.uris import shown
from pipelines.configs import base_name, base_revision, check_resolution
from pipelines.families import find_family
from pipelines.model_folder import check_model, check_pipeline
from pretraining.card import CARD_FILES, write_card
from pretraining.filters import add_filter_flags, chosen_filters
from pretraining.index import COUNTS, IndexWriter, Record, check_parts, read_index
from pretraining.latents import METADATA, RECORD, SUPPORTED, caption_fields, digest_encoders, image_fields
from pretraining.loader import Loader, add_raw_data_flags, loader_options
from pretraining.parts import PartWriter, load_again, load_chunks, missing_parts, parts_to_complete, resume
from pretraining.raw_data import list_sources
from pretraining.sources import Sources
from pretraining.tally import BAD_ROWS, Tally, check, say_what_is_left_out, summarise

LISTED_FILES = 1000  # damaged files that metadata.json lists at most
EARLY = 1000  # rows after which a run with too many bad rows fails without waiting for the end
AGAIN_AFTER = (5.0, 30.0)  # seconds before each further attempt at the rows that could not be fetched


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = cli.make_parser(__doc__)
    group = parser.add_argument_group("data")
    group.add_argument("--input", required=True, help="folder, file or URI of the images and captions")
    group.add_argument("--output_dir", required=True, help="folder or URI to write the latents to")
    group.add_argument("--overwrite", action="store_true", help="replace a data set that has other settings")
    group = parser.add_argument_group("raw data")
    add_raw_data_flags(group)
    add_filter_flags(group)

    group = parser.add_argument_group("encoding")
    group.add_argument("--model_dir", required=True, help="folder of the model whose VAE and text encoders are used")
    resolutions_help = "side lengths in pixels to encode each image at; default: the model's resolution"
    group.add_argument("--resolutions", type=cli.positive_int, nargs="+", help=resolutions_help)
    group.add_argument("--seed", type=cli.seed, default=0, help="seed of random crops and flips")
    captions_help = "store the text encoders' output for each caption; without it pretrain.py encodes the captions"
    group.add_argument("--caption_latents", action=argparse.BooleanOptionalAction, default=True, help=captions_help)

    group = cli.add_shared_flags(parser)
    workers_help = "encoding actors: N, or MIN:MAX; 0: encode in this process; default: one per GPU or per four CPUs"
    group.add_argument("--num_workers", type=cli.pool_size, help=workers_help)
    cli.add_compute_flags(group)
    return cli.parse(parser, argv)


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def read_settings(args: argparse.Namespace) -> tuple[dict[str, Any], Sources]:
    """Check the flags against the model and the data; return (settings that determine the data set, its sources)."""
    check_pipeline(args.model_dir)
    family = find_family(args.model_dir, SUPPORTED)
    sizes = family.sizes(args.model_dir)
    args.resolutions = args.resolutions or [sizes.resolution]
    for resolution in args.resolutions:
        check_resolution(args.model_dir, "--resolutions", resolution, sizes.multiple)
    columns = args.image_column, args.caption_column
    options = {"keep": not args.dry_run, "on_ray": cli.ray_or_none(args), "where": args.where}
    sources = list_sources(args.input, *columns, max_bad_files=args.max_bad_files, **options)
    names = ("resolutions", "crop", "random_flip", "seed", "rows_per_file", "mixed_precision")
    settings = {name: getattr(args, name) for name in names} | chosen_filters(args)
    settings |= {} if args.caption_latents else {"caption_latents": False}  # others lack the setting, as older ones do
    settings["encoders"] = digest_encoders(args.model_dir, family, args.caption_latents)
    place = {"folder": shown(sources.folder)}
    settings["input"] = folders.digest_list(facts | place for facts in sources.facts())
    settings |= {"bad_files": len(sources.bad_files)} if sources.bad_files else {}
    return settings, sources


def read_metadata(output: Folder, overwrite: bool) -> dict[str, Any]:
    """Return the metadata.json of a finished data set, {} if there is none.

    Raises BadInput if the folder holds anything else, or a damaged data set and `overwrite` is not set.
    """
    metadata = json.loads(output.read(METADATA) or "{}")
    if is_remote(output.location):
        ours = "settings" in metadata or output.read(RECORD)
    else:
        ours = metadata and folders.read_manifest(output.location)
    if ours:
        return metadata if not metadata or _is_whole(output, metadata, overwrite) else {}
    if output.kind() and output.names(""):
        if is_remote(output.location):
            raise BadInput(
                f"--output_dir {output.location} holds files that preprocess.py did not write: choose another folder"
            )
        folders.check_ours(output.location, "--output_dir")
        if not overwrite:
            raise BadInput(f"--output_dir {output.location} is a damaged data set: pass --overwrite to replace it")
    return {}


def _is_whole(output, metadata, overwrite):
    """Return whether the parts of a finished data set are there; raise BadInput if not, unless it may be replaced."""
    try:
        if "index" in metadata:  # older data sets have none
            check_parts(output, metadata["index"])
    except CheckFailed as error:
        if not overwrite:
            what = f"--output_dir {output.location} is a damaged data set ({error})"
            raise BadInput(f"{what}: pass --overwrite to replace it") from None
        return False
    return True


def column_shapes(args: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """Return {column: shape of a row} of all that is encoded."""
    family = find_family(args.model_dir)
    fields = [image_fields(family, args.model_dir, resolution) for resolution in args.resolutions]
    fields += [caption_fields(family, args.model_dir)] if args.caption_latents else []
    return {column: shape for each in fields for column, shape in each.values()}


def check_space_for(args: argparse.Namespace, rows: int) -> int:
    """Return the bytes of the latents and caption embeddings of `rows` rows.

    Raises OutOfResource if they do not fit on the local disk.
    """
    size = 2 * rows * sum(map(math.prod, column_shapes(args).values()))  # two bytes a number
    if not is_remote(args.output_dir):
        folders.check_space([("--output_dir", args.output_dir, size)])
    return size


# ---------------------------------------------------------------------------------------------------------------------
# Encoding


def begin(folder: Folder, settings: dict[str, Any], overwrite: bool) -> None:
    """Record the settings in a folder of parts; parts of other settings are deleted with `overwrite`, else BadInput."""
    record = json.loads(folder.read(RECORD) or folder.read(METADATA) or "{}")
    record = record.get("settings", record)
    if record and record != settings:
        if not overwrite:
            folders.check_same_settings(settings, record, f"the unfinished {folder.location}")
        folder.write(RECORD, json.dumps(record).encode())  # in case this run is killed before all files are deleted
        for name in folder.names(".parquet", ".json", ".jsonl", ".md", ".jpg"):
            if name != RECORD:
                folder.delete(name)
    folder.write(RECORD, json.dumps(settings).encode())
    if not is_remote(folder.location):
        for path in Path(folder.location).glob(".*.tmp"):  # left by a killed run
            path.unlink()


def encode_missing(args: argparse.Namespace, folder: Folder, sources: Sources) -> IndexWriter:
    """Write the missing parts; return the writer of the index, which has all parts."""
    index, writer = resume(folder)
    tally, total = Tally.of(index), sources.num_rows
    check_space_for(args, total - tally.total)
    check_model(args.model_dir)
    items = missing_parts(sources, index, args.rows_per_file)
    with Progress("preprocess", total, "rows", initial=tally.total) as progress:
        record_parts(args, writer, tally, progress, write_parts(args, folder, items, load_chunks))
    return writer


def record_parts(
    args: argparse.Namespace, writer: IndexWriter, tally: Tally, progress: Progress, records: Iterable[Record]
) -> None:
    """Add new parts to the index; end with an error as soon as too many rows are bad or cannot be fetched."""
    with writer:
        for record in records:
            writer.add(record)
            tally.add(record)
            progress.update(sum(record[name] for name in COUNTS), bad=tally.bad)
            if tally.wanted >= EARLY and tally.fault(args.max_bad_fraction, is_early=True):
                break
    if tally.wanted >= EARLY:
        check(args.input, writer, tally, args.max_bad_fraction, is_early=True)


def fetch_again(args: argparse.Namespace, folder: Folder, sources: Sources, writer: IndexWriter) -> None:
    """Try to fetch the rows that could not be fetched when their parts were written."""
    for pause in AGAIN_AFTER:
        index = read_index(folder, writer.files)
        if not index.later.any():
            return
        say(f"fetching {index.later.sum()} rows again, in {pause:g} s, that could not be fetched")
        time.sleep(pause)
        with writer:
            items = parts_to_complete(sources, index, args.rows_per_file)
            for record in write_parts(args, folder, items, partial(load_again, output_dir=folder.location)):
                writer.add(record)


def write_parts(
    args: argparse.Namespace, folder: Folder, items: list[dict[str, Any]], load: Callable[..., Iterator]
) -> Iterator[Record]:
    """Yield the results of PartWriter for the chunks that `load`, load_chunks or load_again, makes of the items."""
    options = {
        "output_dir": folder.location,
        "model_dir": args.model_location,
        "resolutions": args.resolutions,
        "batch_size": args.encoding_batch_size,
        "mixed_precision": args.mixed_precision,
        "caption_latents": args.caption_latents,
    }
    loader = Loader(**loader_options(args, args.resolutions))
    prepare = partial(load, loader=loader, rows_per_file=args.rows_per_file)
    return map_on_actors(PartWriter, options, items, args.num_workers, prepare, **cli.placement(args))


def finish(
    args: argparse.Namespace, folder: Folder, settings: dict[str, Any], writer: IndexWriter, sources: Sources
) -> None:
    """Check the share of bad rows, write bad_rows.jsonl, the card and metadata.json; publish a local folder."""
    files = writer.files
    index = read_index(folder, files)
    tally = Tally.of(index)
    check(args.input, writer, tally, args.max_bad_fraction)
    summary, family = summarise(writer, index), find_family(args.model_dir)
    folder.write(BAD_ROWS, bytes(summary.bad_lines))
    shapes = column_shapes(args)
    metadata = {
        "family": family.name,
        "model": base_name(args.model_dir),
        "revision": base_revision(args.model_dir),
        "encoders": settings["encoders"],
        "resolutions": args.resolutions,
        "shapes": {name: shape for name, shape in shapes.items() if not name.endswith("_std")},
        "scaled": False,
        "parts": len(index),
        "rows": tally.rows,
        "bad_rows": tally.bad + tally.later,
        "index": {"files": files, "sha256": index.digest},
        "settings": settings,
    }
    if summary.filtered:
        metadata["filtered_rows"] = dict(summary.filtered)
    if sources.bad_files:
        metadata |= {"bad_files": len(sources.bad_files), "skipped_files": dict(sources.bad_files[:LISTED_FILES])}
    max_tokens = family.prompt_length(args.model_dir, family.encoders[0])
    write_card(folder, metadata, max_tokens, index, summary)
    folder.write(METADATA, json.dumps(metadata, indent=2, sort_keys=True).encode())
    folder.delete(RECORD)
    if not is_remote(args.output_dir):
        named = [METADATA, BAD_ROWS, *CARD_FILES, *files]
        folders.publish(Path(folder.location), args.output_dir, named, settings=settings)
    say_what_is_left_out(args.output_dir, tally, summary)
    print_rows(args.output_dir, metadata)


def print_rows(output_dir: str, metadata: dict[str, Any]) -> None:
    """Print the result of a finished data set."""
    names = ("rows", "bad_rows", "filtered_rows", "bad_files")
    messages.print_result(output_dir=output_dir, **{name: metadata[name] for name in names if name in metadata})


def main(args: argparse.Namespace) -> None:
    """Check everything, encode the missing parts, and publish the data set."""
    cli.make_absolute(args, "input", "model_dir", "output_dir")
    args.model_location, args.model_dir = args.model_dir, str(local_copy(args.model_dir))
    remote = is_remote(args.output_dir)
    if not remote:
        folders.check_writable(args.output_dir, "--output_dir")
    if not (remote or is_remote(args.input)):
        folders.check_apart(args.output_dir, input=args.input, model_dir=args.model_dir)
    settings, sources = read_settings(args)
    output = Folder(args.output_dir)
    metadata = read_metadata(output, args.overwrite)
    if metadata and metadata["settings"] == settings:
        say(f"{args.output_dir} is complete with {metadata['rows']} rows: nothing to do")
        return print_rows(args.output_dir, metadata)
    if metadata and not args.overwrite:
        folders.check_same_settings(settings, metadata["settings"], f"--output_dir {args.output_dir}")
    if args.dry_run:
        rows = sources.num_rows
        size = check_space_for(args, rows)
        check_model(args.model_dir)
        return messages.print_result(dry_run=True, settings=settings, rows=rows, disk_bytes=size)
    work_dir = f"{args.output_dir}.work"
    with contextlib.nullcontext() if remote else folders.lock(Path(work_dir) / folders.LOCK), working():
        folder = output if remote else Folder(f"{work_dir}/parts")
        begin(folder, settings, args.overwrite)
        writer = encode_missing(args, folder, sources)
        fetch_again(args, folder, sources, writer)
        finish(args, folder, settings, writer, sources)
    if not remote:
        shutil.rmtree(work_dir)


if __name__ == "__main__":
    cli.run(main, parse_args())
