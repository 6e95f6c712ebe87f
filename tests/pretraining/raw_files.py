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


def make_tar(members, format=tarfile.DEFAULT_FORMAT):
    """Return a tar of (name, bytes) pairs; a member without bytes is a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            if data is None:
                entry.type, data = tarfile.DIRTYPE, b""
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


def write_img2dataset(folder, count, failed=(), shard="00000"):
    """Write a shard of `count` rows as img2dataset writes tars; `failed`: rows that it could not download."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, members = [], []
    for i in range(count):
        key, error = f"{shard}{i:04d}", "HTTP Error 404: Not Found" if i in failed else None
        row = {"url": f"http://127.0.0.1:1/{i}.jpg", "caption": f"caption {i}", "key": key}
        row |= {"status": "failed_to_download" if error else "success", "error_message": error}
        row |= {"width": 28, "height": 20, "original_width": 28, "original_height": 20, "sha256": None}
        rows.append(row)
        if not error:
            members += [(f"{key}.jpg", noise_png(i)), (f"{key}.json", json.dumps(row).encode())]
            members += [(f"{key}.txt", row["caption"].encode())]
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{shard}.parquet", row_group_size=100)
    stats = {"count": count, "successes": count - len(failed), "failed_to_download": len(failed)}
    stats |= {"failed_to_resize": 0, "duration": 1.0, "status_dict": {"success": count - len(failed)}}
    (folder / f"{shard}_stats.json").write_text(json.dumps(stats, indent=4))
    (folder / f"{shard}.tar").write_bytes(make_tar(members))
