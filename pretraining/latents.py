"""Latents: encodes images and captions with a model's VAE and text encoder, and opens and reads data sets of them.

A data set is a folder of Parquet files, with the columns that LatentEncoder names and a metadata.json.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import BadInput, CheckFailed
from common.folders import MANIFEST, check_on_node
from common.images import scale_pixels
from common.objects import same_copy
from common.storage import Folder, is_remote, join, open_parquet, read_footer
from pipelines import loading
from pipelines.configs import pixel_factor, read_config
from pipelines.model_folder import digest_parts
from pipelines.tokens import max_tokens, tokenize
from pretraining.columns import from_column

METADATA = "metadata.json"
RECORD = "run.json"  # settings of an unfinished data set
FOOTER_THREADS = 16


# ---------------------------------------------------------------------------------------------------------------------
# Encoding


class LatentEncoder:
    """Encodes chunks of a Loader with the frozen VAE and text encoder of a model, `batch_size` rows at a time.

    Without resolutions only captions are encoded, and no VAE is loaded.
    """

    def __init__(
        self,
        model_dir: str,
        resolutions: Sequence[int],
        batch_size: int,
        mixed_precision: str,
        num_threads: int | None = None,
    ) -> None:
        import torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        loading.set_up_torch(self.device, num_threads, mixed_precision)
        dtype = loading.compute_dtype(mixed_precision, self.device)
        model_dir = str(same_copy(model_dir, "--model_dir"))
        if resolutions:  # in float32: each image is encoded only once, and some VAEs overflow in float16
            self.vae = loading.load_models(model_dir, ("vae",), torch.float32)["vae"].to(self.device)
        self.text_encoder = loading.load_models(model_dir, ("text_encoder",), dtype)["text_encoder"].to(self.device)
        self.model_dir, self.resolutions, self.batch_size = model_dir, resolutions, batch_size

    def __call__(self, chunk: dict[str, Any]) -> dict[str, np.ndarray]:
        """Return the columns of a chunk, float16.

        {"image_latents_256": mean [B, c, h, w], "image_latents_256_std": [B, c, h, w], "caption_latents": [B, L, D]}.
        Raises CheckFailed if a value is not finite.
        """
        import torch

        columns = {}
        with torch.inference_mode():
            for resolution in self.resolutions:
                mean, std = self._encode_images(chunk[f"pixels_{resolution}"])
                columns |= {f"image_latents_{resolution}": mean, f"image_latents_{resolution}_std": std}
            columns["caption_latents"] = self.encode_captions(chunk["captions"])
        for name, values in columns.items():
            if not np.isfinite(values).all():
                first = chunk["keys"][0]
                raise CheckFailed(f"{name} is not finite in the chunk that starts with {first}: check the model")
        return columns

    def _encode_images(self, pixels):
        import torch

        parts = []
        for start in range(0, len(pixels), self.batch_size):
            pixel_values = torch.from_numpy(scale_pixels(pixels[start : start + self.batch_size]))
            posterior = loading.encode_posterior(self.vae, pixel_values.to(self.device))
            parts.append([each.half().cpu().numpy() for each in posterior])
        return [np.concatenate(each) for each in zip(*parts, strict=True)]

    def encode_captions(self, captions: Sequence[str]) -> np.ndarray:
        """Return the text encoder's last hidden states [B, L, D] float16; equal captions are encoded once."""
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


def digest_encoders(model_dir: str | Path) -> str:
    """Return a sha256 of the parts that determine a model's latents: VAE, text encoder and tokenizer."""
    return digest_parts(model_dir, ("vae", "text_encoder", "tokenizer"))


def latent_shapes(model_dir: str | Path, resolution: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Return the shapes of a row: (c, h, w) of image latents, (L, D) of caption latents."""
    side = resolution // pixel_factor(model_dir)
    unet = read_config(model_dir, "unet")
    return (unet["in_channels"], side, side), (max_tokens(model_dir), unet["cross_attention_dim"])


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class LatentFiles:
    """A data set of latents, as plain values, which workers read in pieces; a chunk is a row group of a file.

    chunks: ((file, row group, rows), ...); image_shape: (c, h, w); caption_shape: (L, D).
    prescaled: the image column holds one scaled sample per row, not the posterior's mean with a std column beside it.
    """

    location: str
    chunks: tuple
    image_column: str
    caption_column: str
    image_shape: tuple
    caption_shape: tuple
    prescaled: bool

    @property
    def fingerprint(self) -> list:
        """Values that determine the rows, whatever the location."""
        return [self.chunks, self.image_column, self.caption_column]

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        """Number of rows in each chunk."""
        return tuple(rows for _, _, rows in self.chunks)

    def __call__(self, item: dict[str, int]) -> Iterator[dict[str, np.ndarray]]:
        """Yield the rows of a piece {"chunk", "first", "last"}, float32.

        {"mean": [B, c, h, w], "std": [B, c, h, w], "prompt": [B, L, D]}; prescaled latents have no "std".
        """
        if not is_remote(self.location):
            check_on_node(self.location, "--data")
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


def open_latents(
    location: str,
    model_dir: str,
    resolution: int,
    image_column: str | None = None,
    caption_column: str | None = None,
    prescaled: bool = False,
) -> LatentFiles:
    """Return the LatentFiles at a path or URI after checking metadata.json, columns and number of rows.

    Raises BadInput if the data does not fit the model, or has no metadata.json and is not prescaled; CheckFailed if a
    file is missing or damaged.
    """
    folder = Folder(location)
    if folder.kind() != "folder":
        raise BadInput(f"--data {location} is not a folder: pass the --output_dir of preprocess.py")
    metadata = json.loads(folder.read(METADATA) or "{}")
    if metadata:
        _check_metadata(location, metadata, model_dir, resolution)
        _check_files(folder)
    elif folder.read(RECORD):
        raise BadInput(f"--data {location} is not finished: run the same preprocess.py command again")
    elif not prescaled:
        raise BadInput(f"--data {location} has no {METADATA}: pass --prescaled_latents if it holds scaled samples")
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
    """Raise CheckFailed if a Parquet file in the manifest is missing or of another size."""
    named, found = json.loads(folder.read(MANIFEST) or "{}").get("files", {}), folder.names(".parquet")
    for name in [name for name in named if name.endswith(".parquet")]:
        place, size = join(folder.location, name), named[name]["size"]
        if name not in found:
            raise CheckFailed(f"{place} is missing: encode the data again")
        if found[name] != size:
            raise CheckFailed(f"{place} is damaged, its size is not {size} bytes: encode the data again")


def _list_chunks(folder, wanted, caption_column, name):
    """Return (caption column, [(file, row group, rows)]) of a Parquet file; raise BadInput if a column is missing."""
    columns, groups, _ = read_footer(folder, name)
    if not sum(rows for _, rows in groups):
        return None, []
    usual = (column for column in ("caption_latents", "caption_embeddings") if column in columns)
    caption = caption_column or next(usual, "caption_latents")
    missing = [column for column in (*wanted, caption) if column not in columns]
    if missing:
        raise BadInput(
            f"{join(folder.location, name)} has no column {missing[0]}: its columns are {', '.join(columns)}"
        )
    return caption, [(name, group, rows) for group, rows in groups if rows]


def _check_metadata(location, metadata, model_dir, resolution):
    if resolution not in metadata["resolutions"]:
        found = ", ".join(map(str, metadata["resolutions"]))
        raise BadInput(f"--data {location} holds latents of {found} pixels, not of --resolution {resolution}")
    if metadata["encoders"] != digest_encoders(model_dir):
        raise BadInput(
            f"--data {location} was encoded with the VAE or text encoder of another model ({metadata['model']}) than "
            f"--model_dir {model_dir}: run preprocess.py with this model"
        )
