"""Latents: what the VAE and the text encoder make of images and captions, and the Parquet files that keep them.

The columns, and metadata.json beside them, are known here alone.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from common.errors import BadInput, CheckFailed
from common.folders import MANIFEST
from common.images import scale_pixels
from common.storage import Folder, join, open_parquet, read_footer
from pipelines import loading
from pipelines.configs import pixel_factor, read_config
from pipelines.model_folder import digest_parts
from pipelines.tokens import max_tokens, tokenize

METADATA = "metadata.json"
RECORD = "run.json"  # the settings of an unfinished data set
FOOTER_THREADS = 16


# ---------------------------------------------------------------------------------------------------------------------
# Encoding


class LatentEncoder:
    """The frozen VAE and text encoder of a model: turns a loader's chunk into latents, some images at a time."""

    def __init__(self, model_dir, resolutions, batch_size, mixed_precision, num_threads=None):
        import torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        loading.set_up_torch(self.device, num_threads, mixed_precision)
        dtype = loading.compute_dtype(mixed_precision, self.device)
        if resolutions:  # the VAE in float32: each picture is encoded once, and some VAEs overflow in float16
            self.vae = loading.load_models(model_dir, ("vae",), torch.float32)["vae"].to(self.device)
        self.text_encoder = loading.load_models(model_dir, ("text_encoder",), dtype)["text_encoder"].to(self.device)
        self.model_dir, self.resolutions, self.batch_size = model_dir, resolutions, batch_size

    def __call__(self, chunk):
        """Return {"image_latents_256": [n, c, h, w], "..._std", "caption_latents": [n, L, D]}, float16, of a chunk."""
        import torch

        columns = {}
        with torch.inference_mode():
            for resolution in self.resolutions:
                mean, std = self._encode_images(chunk[f"pixels_{resolution}"])
                columns |= {f"image_latents_{resolution}": mean, f"image_latents_{resolution}_std": std}
            columns["caption_latents"] = self.encode_captions(chunk["captions"])
        for name, values in columns.items():
            if not np.isfinite(values).all():
                raise CheckFailed(f"{name} of {chunk['keys'][0]} and those after it are not finite: check the model")
        return columns

    def _encode_images(self, pixels):
        import torch

        parts = []
        for start in range(0, len(pixels), self.batch_size):
            pixel_values = torch.from_numpy(scale_pixels(pixels[start : start + self.batch_size]))
            posterior = loading.encode_posterior(self.vae, pixel_values.to(self.device))
            parts.append([each.half().cpu().numpy() for each in posterior])
        return [np.concatenate(each) for each in zip(*parts, strict=True)]

    def encode_captions(self, captions):
        """Return the text encoder's last hidden states [n, L, D] float16 of captions; equal ones are encoded once."""
        import torch

        unique = sorted(set(captions))
        ids = torch.tensor(tokenize(self.model_dir, unique))
        parts = []
        with torch.inference_mode():
            for start in range(0, len(ids), self.batch_size):
                batch = ids[start : start + self.batch_size].to(self.device)
                parts.append(self.text_encoder(batch)[0].half().cpu().numpy())
        place = {caption: number for number, caption in enumerate(unique)}
        return np.concatenate(parts)[[place[caption] for caption in captions]]


# ---------------------------------------------------------------------------------------------------------------------
# Parquet


def to_parquet(chunk, columns):
    """Return the bytes of a Parquet file of one row group; the bad rows of the chunk are in its schema's metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {"key": pa.array(chunk["keys"], pa.string()), "caption": pa.array(chunk["captions"], pa.string())}
    for name, values in columns.items():
        arrays[name] = pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(values))
    table = pa.table(arrays).replace_schema_metadata({"bad_rows": json.dumps(chunk["bad"])})
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd", row_group_size=max(1, len(table)), write_page_checksum=True)
    return buffer.getvalue().to_pybytes()


def from_column(column, shape, place):
    """Return a column as float32 [n, *shape], whatever list or tensor type holds its numbers.

    Raises CheckFailed where there are nulls, rows of several sizes, or another shape.
    """
    import pyarrow as pa

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    count = len(array)
    array, found, nulls = _innermost(array, place)
    if nulls:
        raise CheckFailed(f"{place} is null in {nulls} places: leave those rows out")
    values = array.to_numpy(zero_copy_only=False).astype(np.float32)
    if len(found) > 1 and found != tuple(shape):
        raise CheckFailed(f"{place} holds rows of shape {found}, the model takes {shape}")
    if values.size != count * int(np.prod(shape)):
        raise CheckFailed(f"{place} holds {values.size // max(count, 1)} values a row, the model takes {shape}")
    if not np.isfinite(values).all():
        raise CheckFailed(f"{place} holds values that are not finite: make the data set again")
    return values.reshape(count, *shape)


def _innermost(array, place):
    """Return (the numbers within nested lists or tensors, the shape of a row, how many nulls there were)."""
    import pyarrow as pa

    sides, tensor, nulls = [], None, array.null_count  # sides of nested lists; the shape of a tensor
    while not pa.types.is_floating(array.type):
        if isinstance(array, pa.ExtensionArray):
            tensor, array = getattr(array.type, "shape", None), array.storage
        elif pa.types.is_struct(array.type) and {"data", "shape"} <= set(array.type.names):
            # A tensor of Ray Data whose rows may differ in shape.
            tensor, array = next(iter(array.field("shape").to_pylist()), None), array.field("data")
        elif hasattr(array, "value_lengths"):
            sides, array = sides + _lengths(array, place), array.flatten()
        else:
            raise CheckFailed(f"{place} holds {array.type}, not floats: give another column")
        nulls += array.null_count
    return array, tuple(tensor or sides), nulls


def _lengths(array, place):
    """Return [the length of the lists in an array], [] where it holds none; raise CheckFailed for several lengths."""
    lengths = array.value_lengths().drop_null().unique().to_pylist()
    if len(lengths) > 1:
        raise CheckFailed(f"{place} holds rows of several sizes: leave out those that differ")
    return lengths


def digest_encoders(model_dir):
    """Return a sha256 of what decides a model's latents: its VAE, text encoder and tokenizer, whatever its UNet."""
    return digest_parts(model_dir, ("vae", "text_encoder", "tokenizer"))


def latent_shapes(model_dir, resolution):
    """Return the shapes of a row: ((c, h, w) of an image's latents, (L, D) of a caption's)."""

    side = resolution // pixel_factor(model_dir)
    unet = read_config(model_dir, "unet")
    return (unet["in_channels"], side, side), (max_tokens(model_dir), unet["cross_attention_dim"])


@dataclass(frozen=True)
class LatentFiles:
    """A data set of latents, as plain values: read on the workers, chunk by chunk.

    chunks: [[file, row group, rows]]; the latents are a posterior's mean and std, or (prescaled) one scaled sample.
    """

    location: str
    chunks: tuple
    image_column: str
    caption_column: str
    image_shape: tuple
    caption_shape: tuple
    prescaled: bool

    @property
    def fingerprint(self):
        """What decides the rows, wherever they lie."""
        return [self.chunks, self.image_column, self.caption_column]

    @property
    def chunk_rows(self):
        """Rows of each chunk."""
        return tuple(rows for _, _, rows in self.chunks)

    def __call__(self, item):
        """Yield {"mean", "std", "prompt"} of a piece {"chunk", "first", "last"}; std is absent where prescaled."""
        name, group, _ = self.chunks[item["chunk"]]
        columns = {"mean": self.image_column, "std": f"{self.image_column}_std", "prompt": self.caption_column}
        if self.prescaled:
            del columns["std"]
        with open_parquet(Folder(self.location), name) as parquet:
            table = parquet.read_row_group(group, columns=list(columns.values()))
        table = table.slice(item["first"], item["last"] - item["first"])
        shapes = {"prompt": self.caption_shape}
        yield {
            key: from_column(table[column], shapes.get(key, self.image_shape), f"{name}: column {column}")
            for key, column in columns.items()
        }


def open_latents(location, model_dir, resolution, image_column=None, caption_column=None, prescaled=False):
    """Return the LatentFiles at `location`, checked against the model: metadata.json, columns and rows.

    Raises BadInput where they do not fit. Without metadata.json only data that is said to be prescaled is taken.
    """
    folder = Folder(location)
    if folder.kind() != "folder":
        raise BadInput(f"--data {location} is not a folder: give what preprocess.py wrote")
    metadata = json.loads(folder.read(METADATA) or "{}")
    if metadata:
        _check_metadata(location, metadata, model_dir, resolution)
        _check_files(folder)
    elif folder.read(RECORD):
        raise BadInput(f"--data {location} is not finished: run preprocess.py again")
    elif not prescaled:
        raise BadInput(f"--data {location} has no {METADATA}: --prescaled_latents says that it holds scaled samples")
    image_column = image_column or f"image_latents_{resolution}"
    wanted = [image_column] if prescaled else [image_column, f"{image_column}_std"]
    list_file = partial(_list_chunks, folder, wanted, caption_column)
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        files = list(pool.map(list_file, folder.names(".parquet")))
    chunks = [chunk for _, chunks in files for chunk in chunks]
    if not chunks:
        raise BadInput(f"--data {location} holds no rows")
    shapes = latent_shapes(model_dir, resolution)
    caption_column = next(caption for caption, _ in files if caption)
    return LatentFiles(location, tuple(chunks), image_column, caption_column, *shapes, prescaled)


def _check_files(folder):
    """Raise CheckFailed for a Parquet file of a data set that is not there, or not of the size in its manifest."""
    named, there = json.loads(folder.read(MANIFEST) or "{}").get("files", {}), folder.names(".parquet")
    for name in [name for name in named if name.endswith(".parquet")]:
        place, size = join(folder.location, name), named[name]["size"]
        if name not in there:
            raise CheckFailed(f"{place} is missing: make the data set again")
        if there[name] != size:
            raise CheckFailed(f"{place} is damaged: it is not of {size} bytes: make the data set again")


def _list_chunks(folder, wanted, caption_column, name):
    """Return (the caption column, [(file, row group, rows)]) of a Parquet file; raise BadInput where a column lacks."""
    columns, groups, _ = read_footer(folder, name)
    if not sum(rows for _, rows in groups):
        return None, []
    usual = (column for column in ("caption_latents", "caption_embeddings") if column in columns)
    caption = caption_column or next(usual, "caption_latents")
    missing = [column for column in (*wanted, caption) if column not in columns]
    if missing:
        raise BadInput(f"{join(folder.location, name)} has no column {missing[0]}; it has {', '.join(columns)}")
    return caption, [(name, group, rows) for group, rows in groups if rows]


def _check_metadata(location, metadata, model_dir, resolution):
    if resolution not in metadata["resolutions"]:
        there = ", ".join(map(str, metadata["resolutions"]))
        raise BadInput(f"--data {location} holds latents of {there} pixels, not of --resolution {resolution}")
    if metadata["encoders"] != digest_encoders(model_dir):
        raise BadInput(
            f"--data {location} was encoded by the VAE or text encoder of another model ({metadata['model']}) than "
            f"--model_dir {model_dir}: run preprocess.py with this one"
        )
