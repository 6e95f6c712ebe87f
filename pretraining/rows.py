"""Rows of raw data: reads the rows of a source of Parquet, metadata.jsonl or a WebDataset tar."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

from common.errors import CheckFailed, Damaged
from common.images import READ
from common.storage import Folder, join, open_parquet
from common.uris import shown
from pretraining.filters import columns_of, meets
from pretraining.sources import Source
from pretraining.tars import read_samples

CAPTION_COLUMNS = ("caption", "TEXT", "text", "txt", "prompt")
REQUEST = 8 << 20  # bytes of a request for a column of a row group
BLOCK = 8 << 20  # bytes of a metadata.jsonl that are split into lines at a time


def read_rows(source: Source, first: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield up to `count` rows of a source, from row `first` on, as {"key", "image", "caption"}.

    image: the bytes of a file, a path, a URI, a URL or None; caption: any value, None if missing. A row that does not
    meet the condition of its source has neither, and "filtered": the reason. If a file is damaged, the first row that
    cannot be read and all after it have neither, and "damaged": the reason.
    """
    readers = {"parquet": _parquet_rows, "tar": _tar_rows, "jsonl": _jsonl_rows}
    number, last = first, min(first + count, source.num_rows)
    try:
        for row in readers[source.kind](source, first, last):
            yield {"key": f"{source.name}:{source.first}:{number}", **row}
            number += 1
    except Damaged as error:
        lost = {"image": None, "caption": None, "damaged": shown(str(error))}
        yield from ({"key": f"{source.name}:{source.first}:{row}", **lost} for row in range(number, last))


def _parquet_rows(source, first, last):
    with open_parquet(Folder(source.folder), source.name, REQUEST) as parquet:
        asked = columns_of(source.where) if source.where else []
        columns, start = list(dict.fromkeys((source.image_column, source.caption_column, *asked))), 0
        for batch in parquet.iter_batches(64, row_groups=[source.first], columns=columns):
            low, high = (min(max(row - start, 0), len(batch)) for row in (first, last))
            batch, start = batch.slice(low, max(high - low, 0)), start + len(batch)
            met = meets(source.where, batch, source.name) if asked else itertools.repeat(True)
            for row, is_met in zip(_to_dicts(batch), met, strict=False):
                if not is_met:
                    yield {"image": None, "caption": None, "filtered": "--where"}
                    continue
                image = row[source.image_column]
                if isinstance(image, dict):  # the Image feature of Hugging Face datasets
                    image = image.get("bytes") or image.get("path")
                yield {"image": image, "caption": row[source.caption_column]}
            if start >= last:
                return


def _to_dicts(batch):
    """Return the rows of a batch as dicts; text that is not UTF-8 is None."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        return [{name: _to_value(batch[name][row]) for name in batch.schema.names} for row in range(len(batch))]


def _to_value(scalar):
    with contextlib.suppress(UnicodeDecodeError):
        return scalar.as_py()


def find_lines(folder: str, name: str, size: int, every: int) -> tuple[int, list[int]]:
    """Return (number of lines, offsets of line 0, `every`, 2 * `every`, ...) of a file; empty lines do not count.

    Raises CheckFailed if it cannot be read.
    """
    count, offset, starts = 0, 0, []
    try:
        with Folder(folder).open_range(name, 0, size) as file:
            while block := file.read(BLOCK) + file.readline():
                for line in block.splitlines(keepends=True):  # of bytes: text has further line ends, such as U+2028
                    if line.strip():
                        starts += [] if count % every else [offset]
                        count += 1
                    offset += len(line)
    except OSError as error:
        raise CheckFailed(f"{join(folder, name)} cannot be read ({error}): restore it") from None
    return count, starts


def _jsonl_rows(source, first, last):
    parent, place = source.name.rpartition("/")[0], join(source.folder, source.name)
    try:
        data = Folder(source.folder).read_range(source.name, source.start, source.end)
    except FileNotFoundError:
        raise CheckFailed(f"{place} was removed while it was being read: restore it") from None
    lines = [line for line in data.splitlines() if line.strip()]
    if len(lines) != source.num_rows:
        raise CheckFailed(f"{place} was changed while it was being read: restore it")
    for line in lines[first:last]:
        try:
            row = json.loads(line)
            name = row[source.image_column]
        except (ValueError, KeyError, TypeError):
            yield {"image": None, "caption": None}
            continue
        yield {"image": f"{parent}/{name}" if parent and name else name, "caption": row.get(source.caption_column)}


def _tar_rows(source, first, last):
    for sample in read_samples(source.folder, source.name, source.size, source.num_rows, first, last):
        suffixes = [source.image_column] if source.image_column else [name for name in sample if f".{name}" in READ]
        caption = sample.get(source.caption_column or "txt")
        if caption is None and "json" in sample:
            names = [source.caption_column] if source.caption_column else CAPTION_COLUMNS
            with contextlib.suppress(ValueError, AttributeError):  # not JSON, or not an object: no caption
                facts = json.loads(sample["json"])
                caption = next((facts[name] for name in names if facts.get(name)), None)
        caption = caption.decode(errors="replace").strip() if isinstance(caption, bytes) else caption
        yield {"image": next((sample[name] for name in suffixes if name in sample), None), "caption": caption}
