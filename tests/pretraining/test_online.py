"""online.py: raw data that is encoded while training."""

import dataclasses
import itertools
import threading

import numpy as np
import pytest
from conftest import make_raw_data, noise_png
from raw_files import make_tar, write_parquet
from tiny_models import RESOLUTION

from common import errors, outages
from common.storage import Folder
from pretraining.online import PieceLoader, RawImages, make_load
from pretraining.raw_data import list_sources


def raw_images(folder, tiny_model, max_bad_fraction=0.25, random_crop=False, held_out=0, **options):
    loader = {"resolutions": (RESOLUTION,), "random_crop": random_crop, "random_flip": False}
    loader |= {"seed": 0, "timeout": 1.0, "retries": 0}
    encoder = {"model_dir": str(tiny_model), "resolutions": (RESOLUTION,), "batch_size": 4, "mixed_precision": "no"}
    sources = list_sources(str(folder), **options)
    return RawImages(vars(sources), 4, loader, encoder, max_bad_fraction, held_out)


def load(data, piece):
    """The one chunk of Loader for a piece."""
    (chunk,) = PieceLoader(data.loader, data.max_bad_fraction)(data.locate(piece))
    return chunk


def piece(chunk, first, last, epoch=0):
    return {"chunk": chunk, "first": first, "last": last, "epoch": epoch}


def test_raw_data_comes_in_the_chunks_that_preprocess_writes(raw_data, tiny_model):
    data = raw_images(raw_data, tiny_model)
    assert data.chunk_rows.tolist() == [4, 4, 4, 4, 4, 3]
    chunk = load(data, piece(1, 1, 3))
    assert [key.rpartition(":")[2] for key in chunk["keys"]] == ["5", "6"]
    assert chunk["captions"] == ["picture 0", "picture 1"] and chunk["pixels_16"].shape == (2, 16, 16, 3)
    whole = load(data, piece(1, 0, 4))
    assert np.array_equal(whole["pixels_16"][1:3], chunk["pixels_16"])


def test_the_patience_with_servers_is_no_other_data(raw_data, tiny_model):
    data = raw_images(raw_data, tiny_model)
    patient, other = ({**data.loader, **values} for values in ({"timeout": 60.0, "retries": 9}, {"seed": 1}))
    found, same, changed = (
        list(each.fingerprint)
        for each in (data, dataclasses.replace(data, loader=patient), dataclasses.replace(data, loader=other))
    )
    assert same == found != changed
    assert found[-1] == {**data.loader, "timeout": 10, "retries": 2}  # as runs recorded it before


def test_random_crops_differ_by_epoch_and_not_by_piece(raw_data, tiny_model):
    data = raw_images(raw_data, tiny_model, random_crop=True)
    crops = [load(data, piece(1, 0, 4, epoch))["pixels_16"] for epoch in (0, 1)]
    assert not np.array_equal(*crops)
    assert np.array_equal(load(data, piece(1, 2, 4, 1))["pixels_16"], crops[1][2:])


def test_a_piece_of_a_tar_in_a_store_is_a_request(faulty_s3, tiny_model):
    place = faulty_s3.uri("tars")
    pairs = [((f"{i:03d}.png", noise_png(i)), (f"{i:03d}.txt", f"picture {i}".encode())) for i in range(10)]
    Folder(place).write("x.tar", make_tar(itertools.chain.from_iterable(pairs)))
    data = raw_images(place, tiny_model, indexed=True)
    assert "x.tar.idx" in Folder(place).names("") and data.chunk_rows.tolist() == [4, 4, 2]
    chunk = load(data, piece(1, 1, 3))  # also reads the index
    assert chunk["captions"] == ["picture 5", "picture 6"]
    faulty_s3.clear()
    chunk = load(data, piece(2, 0, 2))
    assert chunk["captions"] == ["picture 8", "picture 9"] and len(faulty_s3.requests) == 1


def test_other_rows_stand_in_for_a_bad_one(tmp_path, tiny_model):
    folder = make_raw_data(tmp_path / "raw", 8)
    (folder / "01.png").write_text("no image")
    data = raw_images(folder, tiny_model)
    chunk = load(data, piece(0, 0, 4))
    assert [key.rpartition(":")[2] for key in chunk["keys"]] == ["0", "2", "3", "0"]
    assert chunk["captions"] == ["picture 0", "picture 2", "picture 3", "picture 0"]
    assert np.array_equal(chunk["pixels_16"][0], chunk["pixels_16"][3]) and len(chunk["pixels_16"]) == 4
    (arrays,) = make_load(data, {"num_workers": 0})([piece(0, 0, 4)])
    assert {name: len(values) for name, values in arrays.items()} == {"mean": 4, "std": 4, "text_encoder.hidden": 4}


def test_servers_that_are_away_are_waited_for(web, tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr(outages, "FIRST_PAUSE", 0.05)
    write_parquet(tmp_path / "x.parquet", [f"{web.address}/good/{row}" for row in range(4)], ["x"] * 4)
    data = raw_images(tmp_path, tiny_model)
    web.down["good"] = "503"
    with pytest.raises(errors.Away, match=r"4 of 4 rows of x\.parquet cannot be fetched now; .*HTTP 503: try again"):
        load(data, piece(0, 0, 4))
    threading.Timer(0.3, web.down.clear).start()
    with outages.working():
        chunk = load(data, piece(0, 0, 4))
    assert len(chunk["keys"]) == 4 and len(set(chunk["keys"])) == 4


def test_no_row_stands_in_across_the_border_to_the_held_out_rows(tmp_path, tiny_model):
    """Of eight rows the last three are held out: the first of the second chunk is trained on."""
    folder = make_raw_data(tmp_path / "raw", 8)
    for name in ("05.png", "06.png"):
        (folder / name).write_text("no image")
    data = raw_images(folder, tiny_model, 1.0, held_out=3)
    chunk = load(data, piece(1, 1, 3))
    assert [key.rpartition(":")[2] for key in chunk["keys"]] == ["7", "7"]
    (folder / "07.png").unlink()
    with pytest.raises(errors.BadInput, match="2 of 2 rows"):
        load(data, piece(1, 1, 3))  # row 4 is good, but trained on
    (folder / "04.png").unlink()
    make_raw_data(tmp_path / "more", 8)
    (tmp_path / "more" / "07.png").rename(folder / "07.png")
    with pytest.raises(errors.BadInput, match="1 of 1 rows"):
        load(data, piece(1, 0, 1))  # row 7 is good, but held out


def test_too_many_bad_rows_are_bad_input(tmp_path, tiny_model):
    folder = make_raw_data(tmp_path / "raw", 8)
    for name in ("01.png", "02.png"):
        (folder / name).write_text("no image")
    words = r"2 of 4 rows of metadata\.jsonl are bad, more than --max_bad_fraction 0\.01 allows; the first is .*:1: "
    with pytest.raises(errors.BadInput, match=words):
        load(raw_images(folder, tiny_model, 0.01), piece(0, 0, 4))
    assert len(load(raw_images(folder, tiny_model, 0.5), piece(0, 0, 4))["keys"]) == 4
    chunk = load(raw_images(folder, tiny_model, 0.5), piece(0, 1, 3))  # a piece without a good row takes its chunk's
    assert chunk["captions"] == ["picture 0", "picture 3"]
    for name in ("00.png", "03.png"):
        (folder / name).unlink()
    with pytest.raises(errors.BadInput, match="4 of 4 rows"):
        load(raw_images(folder, tiny_model, 1.0), piece(0, 0, 4))
