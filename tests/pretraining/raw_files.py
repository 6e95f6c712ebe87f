"""Helpers that write raw data: Parquet files, folders with metadata.jsonl, and tars."""

import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
from conftest import noise_png


def write_parquet(path, image, caption, row_group_size=None, **names):
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {names.get("image_column", "image"): image, names.get("caption_column", "caption"): caption}
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)


def write_jsonl(folder, rows, images=()):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    (folder / "metadata.jsonl").write_bytes(b"\n".join(lines))
    for name, data in images:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def make_tar(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def make_kind(folder, kind, count=10):
    """Write `count` rows as a file of one kind and return the name of the file."""
    names = {"parquet": "x.parquet", "jsonl": "metadata.jsonl", "tar": "x.tar"}
    captions = [f"caption {i}" for i in range(count)]
    if kind == "parquet":
        write_parquet(folder / "x.parquet", [noise_png(i) for i in range(count)], captions)
    elif kind == "jsonl":
        rows = [{"file_name": f"{i}.png", "text": caption} for i, caption in enumerate(captions)]
        write_jsonl(folder, rows, [(f"{i}.png", noise_png(i)) for i in range(count)])
    else:
        folder.mkdir()
        pairs = (
            [(f"{i}.png", noise_png(i)) for i in range(count)],
            [(f"{i}.txt", c.encode()) for i, c in enumerate(captions)],
        )
        (folder / "x.tar").write_bytes(make_tar([member for pair in zip(*pairs, strict=True) for member in pair]))
    return names[kind]
