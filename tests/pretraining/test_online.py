"""online.py: raw data that is encoded while training."""

import numpy as np
import pytest
from conftest import make_raw_data
from tiny_models import RESOLUTION

from common import errors
from pretraining.online import RawImages, make_load
from pretraining.raw_data import list_sources


def raw_images(folder, tiny_model, max_bad_fraction=0.25, random_crop=False):
    loader = {"resolutions": (RESOLUTION,), "random_crop": random_crop, "random_flip": False}
    loader |= {"seed": 0, "timeout": 1.0, "retries": 0}
    encoder = {"model_dir": str(tiny_model), "resolutions": (RESOLUTION,), "batch_size": 4, "mixed_precision": "no"}
    sources = tuple(map(vars, list_sources(str(folder))))
    return RawImages(sources, 4, loader, encoder, max_bad_fraction)


def piece(chunk, first, last, epoch=0):
    return {"chunk": chunk, "first": first, "last": last, "epoch": epoch}


def test_raw_data_comes_in_the_chunks_that_preprocess_writes(raw_data, tiny_model):
    data = raw_images(raw_data, tiny_model)
    assert data.chunk_rows.tolist() == [4, 4, 4, 4, 4, 3]
    (chunk,) = data(piece(1, 1, 3))
    assert [key.rpartition(":")[2] for key in chunk["keys"]] == ["5", "6"]
    assert chunk["captions"] == ["picture 0", "picture 1"] and chunk["pixels_16"].shape == (2, 16, 16, 3)
    (whole,) = data(piece(1, 0, 4))
    assert np.array_equal(whole["pixels_16"][1:3], chunk["pixels_16"])


def test_random_crops_differ_by_epoch_and_not_by_piece(raw_data, tiny_model):
    data = raw_images(raw_data, tiny_model, random_crop=True)
    crops = [next(data(piece(1, 0, 4, epoch)))["pixels_16"] for epoch in (0, 1)]
    assert not np.array_equal(*crops)
    assert np.array_equal(next(data(piece(1, 2, 4, 1)))["pixels_16"], crops[1][2:])


def test_other_rows_stand_in_for_a_bad_one(tmp_path, tiny_model):
    folder = make_raw_data(tmp_path / "raw", 8)
    (folder / "01.png").write_text("no image")
    data = raw_images(folder, tiny_model)
    (chunk,) = data(piece(0, 0, 4))
    assert [key.rpartition(":")[2] for key in chunk["keys"]] == ["0", "2", "3", "0"]
    assert chunk["captions"] == ["picture 0", "picture 2", "picture 3", "picture 0"]
    assert np.array_equal(chunk["pixels_16"][0], chunk["pixels_16"][3]) and len(chunk["pixels_16"]) == 4
    (arrays,) = make_load(data, {"num_workers": 0})([piece(0, 0, 4)])
    assert {name: len(values) for name, values in arrays.items()} == {"mean": 4, "std": 4, "text_encoder.hidden": 4}


def test_too_many_bad_rows_are_bad_input(tmp_path, tiny_model):
    folder = make_raw_data(tmp_path / "raw", 8)
    for name in ("01.png", "02.png"):
        (folder / name).write_text("no image")
    words = r"2 of 4 rows of metadata\.jsonl are bad, more than --max_bad_fraction 0\.01 allows; the first is .*:1: "
    with pytest.raises(errors.BadInput, match=words):
        list(raw_images(folder, tiny_model, 0.01)(piece(0, 0, 4)))
    assert len(next(raw_images(folder, tiny_model, 0.5)(piece(0, 0, 4)))["keys"]) == 4
    (chunk,) = raw_images(folder, tiny_model, 0.5)(piece(0, 1, 3))  # a piece without a good row takes its chunk's
    assert chunk["captions"] == ["picture 0", "picture 3"]
    for name in ("00.png", "03.png"):
        (folder / name).unlink()
    with pytest.raises(errors.BadInput, match="4 of 4 rows"):
        list(raw_images(folder, tiny_model, 1.0)(piece(0, 0, 4)))
