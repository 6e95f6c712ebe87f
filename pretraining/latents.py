"""Latents: encodes images and captions with a model's VAE and text encoders, and opens and reads data sets of them.

A data set is a folder of Parquet files, with the columns that LatentEncoder names and a metadata.json.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import BadInput, CheckFailed
from common.folders import MANIFEST, check_on_node
from common.images import Crop, scale_pixels
from common.objects import same_copy
from common.outages import patient
from common.storage import Folder, is_remote, join, open_parquet, read_footer
from pipelines import loading
from pipelines.conditions import locate
from pipelines.configs import pixel_factor, read_config
from pipelines.families import SD, find_family
from pipelines.family import Family
from pipelines.model_folder import digest_parts
from pipelines.tokens import count_tokens, tokenizer_of
from pretraining.captions import CaptionEncoder, to_numpy
from pretraining.columns import TEXT, Fields, read_columns
from pretraining.index import THREADS, Index, check_parts, read_index
from pretraining.streams import Arrays, Piece

METADATA = "metadata.json"
RECORD = "run.json"  # settings of an unfinished data set
SUPPORTED = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")  # pipelines that can be pre-trained


# ---------------------------------------------------------------------------------------------------------------------
# Columns


def image_fields(family: Family, model_dir: str | Path, resolution: int) -> Fields:
    """Return the fields of an image and of its crop: "mean", "std" (c, h, w), for SDXL "time_ids" (6,)."""
    side, column = resolution // pixel_factor(model_dir), f"image_latents_{resolution}"
    shape = (read_config(model_dir, "unet")["in_channels"], side, side)
    told = family.geometry((1, 1), (0, 0, 1, 1), (1, 1))
    geometry = {name: (f"{name}_{resolution}", (len(values),)) for name, values in told.items()}
    return {"mean": (column, shape), "std": (f"{column}_std", shape), **geometry}


def caption_fields(family: Family, model_dir: str | Path) -> Fields:
    """Return the fields of a caption, as pipelines.conditions names them: "text_encoder.hidden" (L, D), ..."""
    shapes = family.caption_shapes(model_dir)
    if len(shapes) == 1:
        return {field: ("caption_latents", shape) for field, shape in shapes.items()}
    return {field: (f"caption_{field.replace('.', '_')}", shape) for field, shape in shapes.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Encoding


class LatentEncoder:
    """Encodes chunks of a Loader with the frozen VAE and text encoders of a model, `batch_size` rows at a time.

    caption_latents: whether captions are encoded; if not, no text encoder is loaded.
    """

    def __init__(
        self,
        model_dir: str,
        resolutions: Sequence[int],
        batch_size: int,
        mixed_precision: str,
        num_threads: int | None = None,
        caption_latents: bool = True,
    ) -> None:
        import torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        loading.set_up_torch(self.device, num_threads, mixed_precision)
        model_dir = str(same_copy(model_dir, "--model_dir"))
        # In float32: each image is encoded only once, and some VAEs overflow in float16.
        self.vae = loading.load_models(model_dir, ("vae",), torch.float32)["vae"].to(self.device)
        self.family = find_family(model_dir, SUPPORTED)
        self.model_dir, self.resolutions, self.batch_size = model_dir, resolutions, batch_size
        self.captions: CaptionEncoder | None = None
        if caption_latents:
            dtype = loading.compute_dtype(mixed_precision, self.device)
            self.captions = CaptionEncoder(model_dir, batch_size, dtype, self.device)

    def __call__(self, chunk: dict[str, Any]) -> dict[str, np.ndarray]:
        """Return the columns of a chunk, those of image_fields and caption_fields: {column: [B, ...]}.

        Latents and captions are float16, what the denoiser is told of a crop is int32. Raises CheckFailed if a value is
        not finite.
        """
        import torch

        columns, crops = {}, [Crop(*row) for row in chunk["crops"].tolist()]
        with torch.inference_mode():
            for resolution in self.resolutions:
                rows = self._encode_images(chunk[f"pixels_{resolution}"])
                rows |= locate(self.family, crops, (resolution, resolution))
                columns |= to_columns(rows, image_fields(self.family, self.model_dir, resolution))
            if self.captions:
                rows = to_numpy(self.captions(chunk["captions"]))
                columns |= to_columns(rows, caption_fields(self.family, self.model_dir))
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
        mean, std = (np.concatenate(each) for each in zip(*parts, strict=True))
        return {"mean": mean, "std": std}

    def count_tokens(self, captions: Sequence[str]) -> tuple[list[int], int]:
        """Return (number of tokens of each caption, none cut, how many the first text encoder reads)."""
        encoder = self.family.encoders[0]
        unique = sorted(set(captions))
        counts = dict(zip(unique, count_tokens(self.model_dir, unique, encoder), strict=True))
        return [counts[caption] for caption in captions], self.family.prompt_length(self.model_dir, encoder)


def to_columns(rows: Mapping[str, np.ndarray], fields: Fields) -> dict[str, np.ndarray]:
    """Return the values of fields under the names of their columns."""
    return {column: rows[field] for field, (column, _) in fields.items()}


def digest_encoders(model_dir: str | Path, family: Family, caption_latents: bool = True) -> str:
    """Return a sha256 of the parts that determine a model's latents: VAE, text encoders and tokenizers.

    caption_latents: whether there are any; if not, the VAE alone does.
    """
    texts = (*family.encoders, *map(tokenizer_of, family.encoders)) if caption_latents else ()
    return digest_parts(model_dir, ("vae", *texts))


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class LatentFiles:
    """A data set of latents, as plain values, which workers read in pieces; a chunk is a row group of a file.

    fields: Fields; without "std" the column of "mean" holds one scaled sample per row, not the posterior's mean. index:
    the entry of metadata.json on the index, whose parts each are a chunk; None for data sets without one, whose chunks
    are in `listed`: ((file, row group, rows), ...).
    """

    location: str
    fields: dict
    index: dict | None = None
    listed: tuple = ()
    flag: str = "--data"

    def __reduce__(self) -> tuple:
        return LatentFiles, (self.location, self.fields, self.index, self.listed, self.flag)  # without the parts

    @functools.cached_property
    def parts(self) -> Index:
        """The parts that hold rows, of a data set with an index: their names and rows alone."""
        assert self.index, "a data set without an index"
        parts = read_index(Folder(self.location), self.index["files"], ("source", "chunk", "rows"))
        return parts.only(parts.rows > 0)

    @property
    def has_texts(self) -> bool:
        """Whether its rows have captions as text, which are encoded in training."""
        return TEXT in self.fields

    @property
    def fingerprint(self) -> list:
        """Values that determine the rows, whatever the location."""
        chunks = self.index["sha256"] if self.index else self.listed
        return [chunks, *(column for field, (column, _) in self.fields.items() if field != "std")]

    @property
    def chunk_rows(self) -> np.ndarray:
        """Number of rows in each chunk, [N]."""
        return self.parts.rows if self.index else np.array([rows for _, _, rows in self.listed], np.int32)

    def locate(self, piece: Piece) -> dict[str, Any]:
        """Return a piece with the "name" of its file and the number of its row "group"."""
        number = piece["chunk"]
        name, group = (self.parts.name(number), 0) if self.index else self.listed[number][:2]
        return {**piece, "name": name, "group": group}


@dataclass(frozen=True)
class PieceReader:
    """Reads pieces of LatentFiles, located; runs in Ray tasks, or in a worker."""

    location: str
    fields: dict
    flag: str = "--data"

    def __call__(self, item: dict[str, Any]) -> Iterator[Arrays]:
        """Yield the rows of a piece: {field: [B, ...] float16 or float32, or str objects}."""
        if not is_remote(self.location):
            check_on_node(self.location, self.flag)
        yield patient(self._read)(item)

    def _read(self, item):
        with open_parquet(Folder(self.location), item["name"]) as parquet:
            table = parquet.read_row_group(item["group"], columns=[column for column, _ in self.fields.values()])
        return read_columns(table.slice(item["first"], item["last"] - item["first"]), self.fields, item["name"])


def open_latents(
    location: str,
    model_dir: str,
    resolution: int,
    image_column: str | None = None,
    caption_column: str | None = None,
    prescaled: bool = False,
    flag: str = "--data",
) -> LatentFiles:
    """Return the LatentFiles at a path or URI after checking metadata.json, columns and number of rows.

    flag: the one that gave the location. Raises BadInput if the data does not fit the model, or has no metadata.json
    and is not prescaled; CheckFailed if a file is missing or damaged.
    """
    folder, family = Folder(location), find_family(model_dir, SUPPORTED)
    if folder.kind() != "folder":
        raise BadInput(f"{flag} {location} is not a folder: pass the --output_dir of preprocess.py")
    metadata = json.loads(folder.read(METADATA) or "{}")
    if metadata:
        _check_metadata(f"{flag} {location}", metadata, model_dir, family, resolution)
    elif folder.read(RECORD):
        raise BadInput(f"{flag} {location} is not finished: run the same preprocess.py command again")
    elif not prescaled:
        raise BadInput(f"{flag} {location} has no {METADATA}: pass --prescaled_latents if it holds scaled samples")
    index = metadata.get("index")  # missing in data sets of older versions
    files = _open_parts(folder, index) if index else _list_files(folder)
    if not files:
        raise BadInput(f"{flag} {location} holds no rows")
    images, captions = image_fields(family, model_dir, resolution), caption_fields(family, model_dir)
    if image_column:
        images |= {"mean": (image_column, images["mean"][1]), "std": (f"{image_column}_std", images["std"][1])}
    if prescaled:
        del images["std"]
    first, (columns, _) = next(iter(files.items()))
    fields = images | _name_captions(captions, caption_column, columns, join(location, first))
    _check_columns(location, files, fields)
    if index:
        return LatentFiles(location, fields, index, flag=flag)
    listed = tuple((name, group, rows) for name, (_, groups) in files.items() for group, rows in groups)
    return LatentFiles(location, fields, None, listed, flag)


def _open_parts(folder, index):
    """Check the parts in an index; return {name: (columns, [(row group, rows)])} of the first one that holds rows."""
    parts = check_parts(folder, index)
    filled = np.flatnonzero(parts.rows)
    if not len(filled):
        return {}
    name = parts.name(filled[0])
    columns, groups, _ = read_footer(folder, name)
    return {name: (columns, groups)}


def _list_files(folder):
    """Return {name: (columns, [(row group, rows)])} of the Parquet files that hold rows, of a data set without index.

    Raises CheckFailed if a file in its manifest is missing or of another size.
    """
    sizes = {name: size for name, size in folder.names(".parquet").items() if name[0] != "_"}
    named = json.loads(folder.read(MANIFEST) or "{}").get("files", {})
    for name in [name for name in named if name.endswith(".parquet") and name[0] != "_"]:
        place, size = join(folder.location, name), named[name]["size"]
        if name not in sizes:
            raise CheckFailed(f"{place} is missing: encode the data again")
        if sizes[name] != size:
            raise CheckFailed(f"{place} is damaged, its size is not {size} bytes: encode the data again")
    with ThreadPoolExecutor(THREADS) as pool:
        footers = list(pool.map(partial(read_footer, folder), sizes))
    filled = [(columns, [(group, rows) for group, rows in groups if rows]) for columns, groups, _ in footers]
    return {name: footer for name, footer in zip(sizes, filled, strict=True) if footer[1]}


def _name_captions(captions, caption_column, columns, place):
    """Return the fields of captions with their columns; those of TEXT if the file `place` has none of them.

    caption_column: of the flag. columns: those of the file.
    """
    if len(captions) > 1 and caption_column:
        raise BadInput(f"--caption_latents_column names one column, the model takes {len(captions)}: leave it out")
    names = [caption_column or column for column, _ in captions.values()]
    if len(names) == 1 and names[0] not in columns and not caption_column and "caption_embeddings" in columns:
        names = ["caption_embeddings"]  # of published data sets
    if not caption_column and not set(names) & set(columns):
        if TEXT not in columns:
            found = ", ".join(columns)
            raise BadInput(f"{place} has neither {names[0]} nor the text in a column {TEXT}: its columns are {found}")
        return {TEXT: (TEXT, ())}
    return {field: (name, shape) for name, (field, (_, shape)) in zip(names, captions.items(), strict=True)}


def _check_columns(location, files, fields):
    for name, (columns, _) in files.items():
        missing = [column for column, _ in fields.values() if column not in columns]
        if missing:
            found = ", ".join(columns)
            raise BadInput(f"{join(location, name)} has no column {missing[0]}: its columns are {found}")


def _check_metadata(place, metadata, model_dir, family, resolution):
    made_for = metadata.get("family", SD.name)  # data sets without this value are older than the other families
    if made_for != family.name:
        raise BadInput(
            f"{place} holds latents for {made_for}, but --model_dir {model_dir} is a {family.name} model: "
            "run preprocess.py with this model"
        )
    if resolution not in metadata["resolutions"]:
        found = ", ".join(map(str, metadata["resolutions"]))
        raise BadInput(f"{place} holds latents of {found} pixels, not of --resolution {resolution}")
    has_captions = metadata.get("settings", {}).get("caption_latents", True)
    if metadata["encoders"] != digest_encoders(model_dir, family, has_captions):
        which = "VAE or text encoder" if has_captions else "VAE"
        raise BadInput(
            f"{place} was encoded with the {which} of another model ({metadata['model']}) than "
            f"--model_dir {model_dir}: run preprocess.py with this model"
        )
