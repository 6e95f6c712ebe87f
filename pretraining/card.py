"""The data set card: README.md with the front matter of the Hub, the same facts in statistics.json, a contact sheet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from common.errors import one_line
from common.messages import say
from common.storage import Folder, open_parquet
from pretraining.index import Index
from pretraining.pictures import draw_sheet
from pretraining.statistics import QUANTILES, QUANTITIES
from pretraining.tally import Summary, Tally

CARD, STATISTICS, SHEET = "README.md", "statistics.json", "contact_sheet.jpg"
CARD_FILES = (CARD, STATISTICS, SHEET)
LISTED_REASONS = 20  # on the card; statistics.json has all that are counted
SIZE_CATEGORIES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "1B<n<10B")
CONTENTS = (  # what columns hold, by the start of their names
    ("key", "where the row came from"),
    ("image_latents", "{what} of the VAE's posterior for the image at {side} pixels, not scaled"),
    ("time_ids", "height and width of the image, top and left of its crop, height and width of the crop"),
    ("caption_", "output of the text encoder for the caption"),
    ("caption", "the text"),
)
IMAGES, CAPTIONS = QUANTITIES[:4], QUANTITIES[4:]

Columns = list[tuple[str, str, list[int]]]  # (name, data type, shape of a row)


def write_card(folder: Folder, metadata: Mapping[str, Any], max_tokens: int, index: Index, summary: Summary) -> None:
    """Write CARD_FILES to a folder of parts; metadata: the content of its metadata.json.

    max_tokens: that the text encoder reads of a caption. There is no sheet if no part has noted pictures, or if it
    cannot be drawn, which only is a warning.
    """
    facts = find_facts(metadata, max_tokens, index, summary)
    captions: list[str] = []
    try:
        if summary.pictures:
            sheet, captions = draw_sheet(summary.pictures)
            folder.write(SHEET, sheet)
    except Exception as error:  # Pillow raises exceptions of many types
        say(f"warning: {SHEET} is left out: {one_line(str(error))}")
    folder.write(STATISTICS, json.dumps(facts, indent=2, ensure_ascii=False).encode())
    filled = np.flatnonzero(index.rows)
    part = index.name(int(filled[0])) if len(filled) else None
    text = make_card(metadata, facts, captions, part, read_columns_of(folder, part) if part else [])
    folder.write(CARD, text.encode(errors="replace"))


def find_facts(metadata: Mapping[str, Any], max_tokens: int, index: Index, summary: Summary) -> dict[str, Any]:
    """Return the content of statistics.json."""
    tally, found = Tally.of(index), summary.statistics
    images = {name: {"quantiles": found.quantiles(name), "histogram": found.histogram(name)} for name in IMAGES}
    captions = {name: {"quantiles": found.quantiles(name), "histogram": found.histogram(name)} for name in CAPTIONS}
    return {
        "rows": tally.rows,
        "bad_rows": tally.bad + tally.later,
        "bad_rows_by_reason": dict(summary.reasons.most_common()),
        "unfetched_rows": tally.later,
        "filtered_rows": dict(summary.filtered),
        "parts": len(index),
        "bytes": int(index.bytes.sum()),
        "counted_rows": found.rows,
        "images": images | {"enlarged": {str(side): found.enlarged[str(side)] for side in metadata["resolutions"]}},
        "captions": captions | {"empty": found.empty_captions, "cut": found.cut, "max_tokens": max_tokens},
    }


def read_columns_of(folder: Folder, part: str) -> Columns:
    """Return the columns of a part."""
    with open_parquet(folder, part) as parquet:
        columns: Columns = []
        for column in parquet.schema_arrow:
            facts = column.metadata or {}
            shape = json.loads(facts.get(b"shape", b"[]"))
            columns.append((column.name, facts.get(b"dtype", str(column.type).encode()).decode(), shape))
        return columns


# ---------------------------------------------------------------------------------------------------------------------
# The text


def make_card(
    metadata: Mapping[str, Any],
    facts: Mapping[str, Any],
    captions: Sequence[str],
    part: str | None,
    columns: Columns,
) -> str:
    """Return the content of README.md; part: the first one that holds rows; captions: of the contact sheet."""
    model, revision = metadata["model"], metadata["revision"]
    made = f"`{model}`" + (f" (revision `{revision}`)" if revision else "")
    sides = " and ".join(f"{side}" for side in metadata["resolutions"])
    encoders = "VAE and the text encoder" if metadata["settings"].get("caption_latents", True) else "VAE"
    category = next((each for i, each in enumerate(SIZE_CATEGORIES) if facts["rows"] < 1000 * 10**i), "n>10B")
    settings = {key: _code(json.dumps(value)) for key, value in sorted(metadata["settings"].items())}
    sections = [
        f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: part-*.parquet
{_features(columns)}size_categories: [{category}]
tags: [latents, {metadata["family"]}]
task_categories: [text-to-image]
---

# Latents

{facts["rows"]:,} images and captions, encoded at {sides} pixels with the {encoders} of {made}, family
`{metadata["family"]}`: latents to train a denoiser of such a model on. Written by `preprocess.py`:
{facts["parts"]:,} Parquet {"file" if facts["parts"] == 1 else "files"}, {_bytes(facts["bytes"])}. The licence is that
of the images and captions, which the program does not know.

`statistics.json` has the numbers of this page and the histograms, `bad_rows.jsonl` the bad rows.""",
        _sheet(captions),
        _rows(facts),
        _sizes(facts),
        _captions(facts),
        _columns(columns),
        _usage(metadata, part, columns),
        f"## Settings\n\n{_table(('setting', 'value'), settings.items())}",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _features(columns):
    """Return the types of the columns; without them datasets 3.6 refuses columns of a fixed number of bytes."""
    kinds = {name: "string" if dtype == "string" else "binary" for name, dtype, _ in columns}
    lines = [f"  - name: {name}\n    dtype: {kind}\n" for name, kind in kinds.items()]
    return "dataset_info:\n  features:\n" + "".join(lines) if lines else ""


def _sheet(captions):
    if not captions:
        return ""
    lines = "\n".join(f"{number}. {_code(caption)}" for number, caption in enumerate(captions, 1))
    summary = f"<summary>The captions of the {len(captions)} images</summary>"
    return f"![Images evenly spaced over the data set]({SHEET})\n\n<details>\n{summary}\n\n{lines}\n\n</details>"


def _rows(facts):
    filtered = facts["filtered_rows"]
    total = facts["rows"] + facts["bad_rows"] + sum(filtered.values())
    unfetched = f" (of these {facts['unfetched_rows']:,} could not be fetched)" if facts["unfetched_rows"] else ""
    counts = {"in this data set": facts["rows"], f"bad{unfetched}": facts["bad_rows"]}
    if filtered:
        counts["left out by filters"] = sum(filtered.values())
    text = "## Rows\n\n" + _table(("rows of the input", "number", "share"), _shares(counts, total))
    if reasons := facts["bad_rows_by_reason"]:
        some = {_code(reason): count for reason, count in list(reasons.items())[:LISTED_REASONS]}
        if rest := sum(reasons.values()) - sum(some.values()):
            some["others"] = rest
        text += "\n\n" + _table(("why rows are bad", "number", "share of all"), _shares(some, total))
    if filtered:
        some = {_code(reason): count for reason, count in filtered.items()}
        text += "\n\n" + _table(("filter", "number", "share of all"), _shares(some, total))
    return text


def _sizes(facts):
    images, counted = facts["images"], facts["counted_rows"]
    if not counted:
        return f"## Images and captions\n\n{_coverage(facts)}"
    enlarged = {f"{side} pixels": count for side, count in images["enlarged"].items()}
    return f"""## Images

{_quantiles(images, IMAGES)}

In pixels, of the original images; the aspect ratio is width / height. Values are rounded down, by at most 6 %.
{_coverage(facts)}
An image whose shortest side is smaller than a resolution was enlarged for it:

{_table(("resolution", "images enlarged", "share"), _shares(enlarged, counted))}"""


def _captions(facts):
    captions, counted = facts["captions"], facts["counted_rows"]
    if not counted:
        return ""
    cut = f"of more than {captions['max_tokens']} tokens, cut for the text encoder"
    counts = {"empty": captions["empty"], cut: captions["cut"]}
    return f"""## Captions

{_quantiles(captions, CAPTIONS)}

Tokens include those of the start and the end.

{_table(("captions", "number", "share"), _shares(counts, counted))}"""


def _coverage(facts):
    """Return a line that says which rows the statistics cover, if these are not all."""
    counted, rows = facts["counted_rows"], facts["rows"]
    if counted == rows:
        return ""
    text = f"Sizes and lengths are known of {counted:,} of the {rows:,} rows: an older version wrote the others, or a\n"
    return text + "run was killed after it wrote them, and their images are not there any more.\n"


def _columns(columns):
    if not columns:
        return ""
    rows = [(f"`{name}`", dtype, " × ".join(map(str, shape)), _content(name)) for name, dtype, shape in columns]
    return f"## Columns\n\n{_table(('column', 'type', 'shape', 'content'), rows)}"


def _content(name):
    text = next(text for start, text in CONTENTS if name.startswith(start))
    side = name.removesuffix("_std").rpartition("_")[2]
    return text.format(what="standard deviation" if name.endswith("_std") else "mean", side=side)


def _usage(metadata, part, columns):
    if not part:
        return ""
    column = next(name for name, _, _ in columns if name.startswith("image_latents"))
    return f"""## Use

A row of numbers is stored as bytes; the metadata of the column has their type and shape:

```python
import json

import numpy as np
import pyarrow.parquet as pq

table = pq.read_table("{part}")


def read(name):
    facts, rows = table.schema.field(name).metadata, table[name].to_pylist()
    values = np.frombuffer(b"".join(rows), facts[b"dtype"].decode())
    return values.reshape(len(rows), *json.loads(facts[b"shape"]))


captions = table["caption"].to_pylist()
mean, std = read("{column}"), read("{column}_std")
latents = mean + std * np.random.randn(*mean.shape)  # times scaling_factor in the config.json of the VAE
```

To train on it, with a model of the same VAE and text encoder:

```bash
python pretrain.py --data path/to/this/folder --model_dir MODEL --resolution {metadata["resolutions"][0]} \\
    --output_dir data/base
```"""


# ---------------------------------------------------------------------------------------------------------------------
# Markdown


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]  # it ends a cell also inside code
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _quantiles(facts, names):
    head = ("", *QUANTILES)
    return _table(head, [(name.replace("_", " "), *facts[name]["quantiles"].values()) for name in names])


def _shares(counts: Mapping[str, int], total: int) -> list[tuple[str, str, str]]:
    return [(name, f"{count:,}", f"{100 * count / max(total, 1):.3g} %") for name, count in counts.items()]


def _code(text: str) -> str:
    """Return a text as code, in which nothing is Markdown."""
    return f"`{one_line(text, 300).replace('`', chr(39))}`" if text.strip() else "(empty)"


def _bytes(count: int) -> str:
    unit = next(i for i in range(5) if count < 1000 ** (i + 1) or i == 4)
    return f"{count / 1000**unit:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[unit]}"
