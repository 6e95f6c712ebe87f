"""latents.py: what the VAE and the text encoder make of images and captions, and data sets of it."""

import dataclasses
import json
import pickle
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import make_latents
from tiny_models import RESOLUTION

from common import errors
from common.folders import MANIFEST
from common.storage import Folder
from pipelines.families import SD, SDXL
from pretraining import latents as latents_module
from pretraining.columns import from_column, to_parquet
from pretraining.index import IndexWriter, read_index, read_records
from pretraining.latents import (
    LatentEncoder,
    LatentFiles,
    PieceReader,
    caption_fields,
    digest_encoders,
    image_fields,
    open_latents,
)
from pretraining.parts import PartWriter

# ---------------------------------------------------------------------------------------------------------------------
# Files

SHAPES = {"mean": (4, 8, 8), "std": (4, 8, 8), "text_encoder.hidden": (24, 16)}


def read_folder(folder):
    return pq.read_table(sorted(folder.glob("part-*.parquet")))


def column(table, name, shape):
    """Return a column of read_folder."""
    return from_column(table[name], shape, name, table.schema.field(name).metadata)


def read_piece(files, piece):
    """Return the rows of a piece of LatentFiles, located on the worker and read anywhere."""
    (rows,) = pickle.loads(pickle.dumps(PieceReader(files.location, files.fields)))(files.locate(piece))
    return rows


def read_all(files):
    """Return {name: rows} of all rows of LatentFiles."""
    pieces = [{"chunk": chunk, "first": 0, "last": rows} for chunk, rows in enumerate(files.chunk_rows.tolist())]
    parts = [read_piece(files, piece) for piece in pieces]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def test_pieces_are_ranges_of_the_rows_of_a_file(latents, tiny_model):
    files = open_latents(str(latents), str(tiny_model), RESOLUTION)
    assert files.chunk_rows.tolist() == [5, 5, 5, 5, 3] and files.index["files"] == ["_index-00000.parquet"]
    rows = read_all(files)
    assert {name: values.shape[1:] for name, values in rows.items()} == SHAPES and len(rows["mean"]) == 23
    assert {values.dtype for values in rows.values()} == {np.dtype(np.float16)}
    table = read_folder(latents)
    names = {"mean": "image_latents_16", "std": "image_latents_16_std", "text_encoder.hidden": "caption_latents"}
    for key, name in names.items():
        found = np.frombuffer(b"".join(table[name].to_pylist()), np.float16)
        assert np.array_equal(rows[key].ravel(), found)
    for first, last in ((0, 1), (2, 5), (1, 3)):
        piece = read_piece(files, {"chunk": 2, "first": first, "last": last, "epoch": 7})
        assert all(np.array_equal(piece[key], rows[key][10 + first : 10 + last]) for key in names)


def test_the_files_read_the_same_as_plain_values(latents, tiny_model):
    """Workers of another process get them through JSON, without the parts."""
    from dataclasses import asdict

    files = open_latents(str(latents), str(tiny_model), RESOLUTION)
    assert len(files.parts) == 5 and len(pickle.dumps(files)) < 1000
    other = LatentFiles(**json.loads(json.dumps(asdict(files))))
    assert all(np.array_equal(*pair) for pair in zip(read_all(files).values(), read_all(other).values(), strict=True))
    assert json.dumps(other.fingerprint) == json.dumps(files.fingerprint)


def test_the_fingerprint_does_not_know_the_place(latents, tiny_model, tmp_path):
    shutil.copytree(latents, tmp_path / "copy")
    files = [open_latents(str(folder), str(tiny_model), RESOLUTION) for folder in (latents, tmp_path / "copy")]
    assert files[0].fingerprint == files[1].fingerprint and files[0].location != files[1].location


@pytest.fixture
def sealed(latents, tmp_path):
    return shutil.copytree(latents, tmp_path / "sealed")


@pytest.fixture
def sealed_rows(latents, tiny_model):
    return read_all(open_latents(str(latents), str(tiny_model), RESOLUTION))


@pytest.fixture
def copy(sealed, tmp_path):
    """A data set of an older version, without an index; and without a manifest: its files may be changed."""
    (sealed / MANIFEST).unlink()
    (sealed / "_index-00000.parquet").unlink()
    metadata = json.loads((sealed / latents_module.METADATA).read_text())
    del metadata["index"]
    (sealed / latents_module.METADATA).write_text(json.dumps(metadata))
    return sealed.rename(tmp_path / "copy")


def test_a_data_set_without_an_index_is_read_all_the_same(copy, sealed_rows, tiny_model):
    files = open_latents(str(copy), str(tiny_model), RESOLUTION)
    assert files.index is None and files.listed[1] == ("part-000000-0001.parquet", 0, 5)
    rows = read_all(files)
    assert all(np.array_equal(rows[name], values) for name, values in sealed_rows.items())


def test_latents_made_again_from_other_images_are_other_data(sealed, tiny_model):
    """The number of rows and the names are the same."""
    before = open_latents(str(sealed), str(tiny_model), RESOLUTION).fingerprint
    metadata = json.loads((sealed / latents_module.METADATA).read_text())
    folder, name = Folder(sealed), "_index-00000.parquet"
    records = read_records(folder, name)
    with IndexWriter(folder, 0, [records[0] | {"sha256": "ab" * 32}, *records[1:]]):
        pass
    with pytest.raises(errors.CheckFailed, match=r"metadata\.json and the index beside it differ"):
        open_latents(str(sealed), str(tiny_model), RESOLUTION)
    metadata["index"]["sha256"] = read_index(folder, [name]).digest
    (sealed / latents_module.METADATA).write_text(json.dumps(metadata))
    assert open_latents(str(sealed), str(tiny_model), RESOLUTION).fingerprint != before


def test_some_parts_of_many_are_looked_at(sealed, tiny_model, monkeypatch):
    monkeypatch.setattr("pretraining.index.CHECKED", 3)
    asked = []
    sizes = Folder.sizes
    monkeypatch.setattr(Folder, "sizes", lambda self, names: asked.extend(names) or sizes(self, names))
    open_latents(str(sealed), str(tiny_model), RESOLUTION)
    assert asked == [f"part-000000-000{number}.parquet" for number in (0, 2, 4)]


def test_latents_of_another_encoder_or_resolution_are_refused(latents, tiny_model, tmp_path):
    with pytest.raises(errors.BadInput, match="holds latents of 16 pixels, not of --resolution 32"):
        open_latents(str(latents), str(tiny_model), 32)
    other = shutil.copytree(tiny_model, tmp_path / "other")
    config = other / "text_encoder" / "config.json"
    config.write_text(config.read_text().replace('"quick_gelu"', '"gelu"'))
    with pytest.raises(errors.BadInput, match=r"another model \(tiny\).*run preprocess\.py with this model"):
        open_latents(str(latents), str(other), RESOLUTION)


def test_a_data_set_that_names_no_family_is_of_stable_diffusion(copy, tiny_families):
    metadata = json.loads((copy / latents_module.METADATA).read_text())
    assert metadata.pop("family") == "stable-diffusion"
    (copy / latents_module.METADATA).write_text(json.dumps(metadata))
    assert open_latents(str(copy), str(tiny_families["sd"]), RESOLUTION).chunk_rows.tolist() == [5, 5, 5, 5, 3]
    words = r"^--data .*copy holds latents for stable-diffusion, but .*sdxl is a stable-diffusion-xl model: run prepro"
    with pytest.raises(errors.BadInput, match=words):
        open_latents(str(copy), str(tiny_families["sdxl"]), RESOLUTION)


def test_an_unfinished_data_set_is_refused(copy, tiny_model):
    (copy / latents_module.METADATA).rename(copy / latents_module.RECORD)
    with pytest.raises(errors.BadInput, match=r"is not finished: run the same preprocess\.py command again"):
        open_latents(str(copy), str(tiny_model), RESOLUTION)


def test_without_metadata_only_scaled_samples_are_taken(copy, tiny_model):
    (copy / latents_module.METADATA).unlink()
    with pytest.raises(errors.BadInput, match=r"has no metadata\.json: pass --prescaled_latents"):
        open_latents(str(copy), str(tiny_model), RESOLUTION)
    assert "std" not in open_latents(str(copy), str(tiny_model), RESOLUTION, prescaled=True).fields


def test_a_missing_column_is_named_with_those_that_are_there(latents, tiny_model):
    for flags in ({"image_column": "image_latents_99"}, {"caption_column": "captions_99"}):
        words = (
            rf"0000\.parquet has no column {next(iter(flags.values()))}: its columns are key, caption, image_latents"
        )
        with pytest.raises(errors.BadInput, match=words):
            open_latents(str(latents), str(tiny_model), RESOLUTION, **flags)


def test_what_holds_no_rows_is_refused(copy, tiny_model, tmp_path):
    with pytest.raises(errors.BadInput, match="is not a folder"):
        open_latents(str(tmp_path / "nowhere"), str(tiny_model), RESOLUTION)
    for path in copy.glob("*.parquet"):
        pq.write_table(pq.read_table(path).slice(0, 0), path)
    with pytest.raises(errors.BadInput, match="holds no rows"):
        open_latents(str(copy), str(tiny_model), RESOLUTION)


def test_files_without_rows_are_passed_over(copy, tiny_model):
    chunk = {"keys": [], "captions": [], "bad": [["a:0", "no image"]]}
    (copy / "part-000000-0001.parquet").write_bytes(to_parquet(chunk, {}))
    assert open_latents(str(copy), str(tiny_model), RESOLUTION).chunk_rows.tolist() == [5, 5, 5, 3]


def test_a_damaged_file_is_named(copy, tiny_model):
    path = copy / "part-000000-0002.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(errors.CheckFailed, match=r"part-000000-0002\.parquet is damaged"):
        open_latents(str(copy), str(tiny_model), RESOLUTION)


@pytest.mark.parametrize("kept", [None, 0, 20, -20], ids=["gone", "empty", "its start", "most of it"])
def test_a_file_that_does_not_fit_the_manifest_is_named(sealed, tiny_model, kept):
    path = sealed / "part-000000-0002.parquet"
    data = path.read_bytes()[:kept]
    path.unlink()
    if kept is not None:
        path.write_bytes(data)
    words = r"part-000000-0002\.parquet is (missing|damaged, its size is not \d+ bytes): encode the data again"
    with pytest.raises(errors.CheckFailed, match=words):
        open_latents(str(sealed), str(tiny_model), RESOLUTION)


@pytest.mark.parametrize("place", [0.1, 0.2, 0.3])  # of the columns; the notes are behind them
def test_a_flipped_bit_is_seen_when_the_rows_are_read(sealed, tiny_model, place):
    files = open_latents(str(sealed), str(tiny_model), RESOLUTION)
    path = sealed / "part-000000-0002.parquet"
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1
    path.write_bytes(data)
    with pytest.raises(errors.CheckFailed, match=r"part-000000-0002\.parquet is damaged"):
        read_all(files)


def nested_lists(values):
    return pa.array(values.tolist())


def ray_tensors(values):
    from ray.data.extensions import ArrowTensorArray

    return ArrowTensorArray.from_numpy(values)


@pytest.mark.parametrize("caption_column", ["caption_latents", "caption_embeddings"])
@pytest.mark.parametrize("make", [nested_lists, ray_tensors], ids=["lists", "ray"])
def test_the_published_layout_is_read_as_scaled_samples(tiny_model, tmp_path, caption_column, make):
    image, prompt = (
        np.arange(6 * np.prod(shape), dtype=np.float32).reshape(6, *shape) / 999 for shape in ((4, 8, 8), (24, 16))
    )
    for part, rows in enumerate((slice(0, 4), slice(4, 6))):
        table = pa.table({"image_latents_16": make(image[rows]), caption_column: make(prompt[rows])})
        pq.write_table(table, tmp_path / f"{part}.parquet", row_group_size=3)
    files = open_latents(str(tmp_path), str(tiny_model), RESOLUTION, prescaled=True)
    assert files.chunk_rows.tolist() == [3, 1, 2] and files.fields["text_encoder.hidden"][0] == caption_column
    rows = read_all(files)
    assert rows.keys() == {"mean", "text_encoder.hidden"}
    assert np.array_equal(rows["mean"], image) and np.array_equal(rows["text_encoder.hidden"], prompt)


# ---------------------------------------------------------------------------------------------------------------------
# Encoding


def test_the_encoders_digest_ignores_the_unet(tiny_model, tmp_path):
    digest = digest_encoders(tiny_model, SD())
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    shutil.rmtree(copy / "unet")
    (copy / "model_index.json").unlink()
    assert digest_encoders(copy, SD()) == digest
    for part in ("vae", "text_encoder", "tokenizer"):
        path = next(iter(sorted((copy / part).glob("*.json"))))
        text = path.read_text()
        path.write_text(text + " ")
        assert digest_encoders(copy, SD()) != digest, part
        path.write_text(text)
    assert digest_encoders(copy, SD()) == digest


def test_the_shapes_are_those_of_the_model(tiny_families):
    sd, sdxl = tiny_families["sd"], tiny_families["sdxl"]
    images = {"mean": ("image_latents_32", (4, 16, 16)), "std": ("image_latents_32_std", (4, 16, 16))}
    assert image_fields(SD(), sd, 32) == images
    assert image_fields(SDXL(), sdxl, 32) == images | {"time_ids": ("time_ids_32", (6,))}
    assert caption_fields(SD(), sd) == {"text_encoder.hidden": ("caption_latents", (24, 16))}
    assert caption_fields(SDXL(), sdxl) == {
        "text_encoder.hidden": ("caption_text_encoder_hidden", (16, 32)),
        "text_encoder_2.hidden": ("caption_text_encoder_2_hidden", (16, 48)),
        "text_encoder_2.pooled": ("caption_text_encoder_2_pooled", (52,)),
    }


@pytest.fixture(scope="module")
def chunk():
    rng = np.random.default_rng(0)
    pixels = {f"pixels_{size}": rng.integers(0, 256, (5, size, size, 3), dtype=np.uint8) for size in (16, 32)}
    crops = np.array([(24, 20, 3, 0, 23, 20, row % 2) for row in range(5)])
    captions = ["a cat", "a dog", "", "a cat", "a dog"]
    return {"keys": list("abcde"), "captions": captions, "bad": [], "crops": crops, **pixels}


def test_latents_are_those_encoded_by_hand(tiny_model, chunk):
    """The posterior's mean and standard deviation, unscaled, and the text encoder's last hidden states."""
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(tiny_model)
    columns = LatentEncoder(tiny_model, (16, 32), batch_size=2, mixed_precision="no")(chunk)
    assert {values.dtype for values in columns.values()} == {np.dtype(np.float16)}
    with torch.no_grad():
        for size in (16, 32):
            pixels = torch.from_numpy(chunk[f"pixels_{size}"]).permute(0, 3, 1, 2).float() / 127.5 - 1
            posterior = pipeline.vae.encode(pixels).latent_dist
            for name, expected in (("", posterior.mean), ("_std", posterior.logvar.mul(0.5).exp())):
                found = columns.pop(f"image_latents_{size}{name}")
                assert found.shape == (5, 4, size // 2, size // 2)
                assert found == pytest.approx(expected.numpy(), rel=1e-3, abs=1e-4)
        (name,) = columns
        for row, caption in enumerate(chunk["captions"]):
            expected, _ = pipeline.encode_prompt(caption, torch.device("cpu"), 1, False)
            assert columns[name][row] == pytest.approx(expected[0].numpy(), rel=1e-3, abs=1e-4)


def test_captions_of_sdxl_are_those_encoded_by_hand(tiny_families, chunk):
    """Through the family's condition; and each crop as SDXL is told of it."""
    from diffusers import StableDiffusionXLPipeline

    folder = tiny_families["sdxl"]
    pipeline = StableDiffusionXLPipeline.from_pretrained(folder)
    encoder = LatentEncoder(folder, (16, 32), batch_size=2, mixed_precision="no")
    columns = encoder(chunk)
    said = {name: {} for name in encoder.captions.encoders}
    for field, (column, shape) in caption_fields(SDXL(), folder).items():
        assert columns[column].dtype == np.float16 and columns[column].shape == (5, *shape)
        name, _, key = field.partition(".")
        said[name][key] = torch.from_numpy(columns[column])
    condition = SDXL().condition(said)
    with torch.no_grad():
        for row, caption in enumerate(chunk["captions"]):
            prompt, _, pooled, _ = pipeline.encode_prompt(caption, do_classifier_free_guidance=False)
            assert condition["prompt"][row].numpy() == pytest.approx(prompt[0].numpy(), rel=1e-3, abs=1e-3)
            assert condition["pooled"][row].numpy() == pytest.approx(pooled[0].numpy(), rel=1e-3, abs=1e-3)
    assert columns["time_ids_16"].dtype == np.int32
    # 24x20 resized by 0.8 or 1.6: 3 pixels on the left, or 1 on the right, which is the left of a mirrored image.
    assert columns["time_ids_16"].tolist() == [[20, 24, 0, left, 16, 16] for left in (2, 1, 2, 1, 2)]
    assert columns["time_ids_32"].tolist() == [[20, 24, 0, left, 32, 32] for left in (5, 2, 5, 2, 5)]


def test_latents_that_are_not_finite_fail_the_check(tiny_model, chunk):
    encoder = LatentEncoder(tiny_model, (16,), batch_size=4, mixed_precision="no")
    with torch.no_grad():
        next(encoder.vae.encoder.parameters())[:] = float("nan")
    with pytest.raises(
        errors.CheckFailed, match="image_latents_16 is not finite in the chunk that starts with a: check the model"
    ):
        encoder(chunk)


def test_rows_are_the_same_whatever_the_batch(tiny_model, latents, raw_data, tmp_path):
    make_latents(tmp_path / "other", raw_data, tiny_model, encoding_batch_size=3, rows_per_file=7)
    one, other = (read_folder(folder) for folder in (latents, tmp_path / "other"))
    assert one["caption"].to_pylist() == other["caption"].to_pylist() == [f"picture {i % 5}" for i in range(23)]
    for name, shape in zip(
        ("image_latents_16", "image_latents_16_std", "caption_latents"), SHAPES.values(), strict=True
    ):
        pair = [column(table, name, shape) for table in (one, other)]
        assert pair[0] == pytest.approx(pair[1], rel=2e-3, abs=1e-4)


def test_a_folder_that_a_workers_node_lacks_is_named_with_its_flag(latents, tiny_model, tmp_path):
    missing = str(tmp_path / "none")
    with pytest.raises(errors.BadInput, match=rf"^--model_dir {missing} does not exist on node \S+: use"):
        LatentEncoder(missing, (), 1, "no")
    files = dataclasses.replace(open_latents(str(latents), tiny_model, RESOLUTION), location=missing)
    with pytest.raises(errors.BadInput, match=rf"^--data {missing} does not exist on node \S+: use"):
        next(PieceReader(files.location, files.fields)({"name": "part-000000-0000.parquet"}))
    with pytest.raises(errors.BadInput, match=rf"^--output_dir {missing} does not exist on node \S+: use"):
        PartWriter(missing, model_dir=str(tiny_model), resolutions=(), batch_size=1, mixed_precision="no")
