"""What the measurements share: raw data of noise, made as they need it."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent


def write_data(folder, num_rows, size, seed=0):
    """Write Parquet files of 1,000 rows: PNG bytes of `size` pixels a side, made of coarse noise, and captions."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for start in range(0, num_rows, 1000):
        images, captions = [], []
        for row in range(start, min(start + 1000, num_rows)):
            coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
            file = io.BytesIO()
            coarse.resize((size, size), Image.Resampling.BICUBIC).save(file, "PNG")
            images.append(file.getvalue())
            captions.append(f"a picture of number {row}")
        pq.write_table(pa.table({"image": images, "caption": captions}), folder / f"{start:06d}.parquet")
