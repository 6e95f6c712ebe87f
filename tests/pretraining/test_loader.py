"""loader.py: images by path and URI, bad rows with their reasons, and crops."""

import numpy as np
import pytest
from conftest import noise_png
from PIL import Image
from raw_files import make_kind, write_jsonl, write_parquet
from tiny_models import RESOLUTION

from common import images
from common.storage import Folder
from pretraining.loader import Loader
from pretraining.raw_data import list_sources


def make_loader(**options):
    defaults = {"resolutions": (RESOLUTION,), "random_crop": False, "random_flip": False, "seed": 0}
    return Loader(**{**defaults, "timeout": 5, "retries": 2, **options})


def load(location, loader=None, **options):
    """The loaded rows of the first source."""
    source = list_sources(str(location), **options)[0]
    return (loader or make_loader())(source, 0, source.num_rows)


def reasons(chunk):
    """{row: reason} of the bad rows, also of those that can perhaps be fetched later."""
    return {int(key.rpartition(":")[2]): reason for key, reason in chunk["bad"] + chunk["later"]}


# ---------------------------------------------------------------------------------------------------------------------
# Places


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "tar"])
def test_one_file_is_an_input_too(kind, remote, tmp_path, request):
    name = make_kind(tmp_path / "data", kind)
    (tmp_path / "data" / f"y-{name}").write_bytes(b"another, damaged")
    whole, location = tmp_path / "data", tmp_path / "data" / name
    if remote:
        s3 = request.getfixturevalue("s3")
        for path in whole.iterdir():
            Folder(s3("data")).write(path.name, path.read_bytes())
        location = s3(f"data/{name}")
    chunk = load(location)
    assert chunk["captions"] == [f"caption {i}" for i in range(10)] and not chunk["bad"]


def test_paths_lie_below_the_folder_and_addresses_anywhere(tmp_path, s3):
    write_jsonl(tmp_path / "data", [], [("images/a.png", noise_png(1))])
    (tmp_path / "other.png").write_bytes(noise_png(2))
    Folder(s3("")).write("c.png", noise_png(3))
    paths = ["images/a.png", str(tmp_path / "other.png"), s3("c.png"), s3("none.png"), "ftp://host/x.png"]
    write_parquet(tmp_path / "data" / "sub" / "x.parquet", paths, ["a"] * 5, image_column="image_path")
    chunk = load(tmp_path / "data")
    wanted = [images.crop_square(images.read_image(noise_png(seed)), RESOLUTION) for seed in (1, 2, 3)]
    assert np.array_equal(chunk[f"pixels_{RESOLUTION}"], np.stack(wanted))
    assert reasons(chunk) == {3: "file not found", 4: reasons(chunk)[4]} and "ftp://" in reasons(chunk)[4]


# ---------------------------------------------------------------------------------------------------------------------
# Bad rows


def test_each_bad_row_has_its_reason_and_the_others_are_loaded(tmp_path):
    bad = {
        "truncated": (noise_png()[:700], "a", "damaged"),
        "text": (b"<html>not found</html>", "a", "not an image"),
        "empty": (b"", "a", "no image"),
        "null": (None, "a", "no image"),
        "no caption": (noise_png(), None, "no caption"),
        "small": (noise_png(0, 40, 8), "a", "only 40x8 pixels"),
    }
    image, caption, reason = zip(*bad.values(), (noise_png(1), "good", None), (noise_png(2), "", None), strict=True)
    write_parquet(tmp_path / "x.parquet", list(image), list(caption))
    chunk = load(tmp_path)
    assert chunk["keys"] == ["x.parquet:0:6", "x.parquet:0:7"] and chunk["captions"] == ["good", ""]
    assert chunk[f"pixels_{RESOLUTION}"].shape == (2, RESOLUTION, RESOLUTION, 3)
    assert chunk[f"pixels_{RESOLUTION}"].dtype == np.uint8
    found = reasons(chunk)
    assert list(found) == list(range(6)) and all(wanted in found[row] for row, wanted in enumerate(reason[:6]))


def test_a_column_of_numbers_is_all_bad(tmp_path):
    write_parquet(tmp_path / "x.parquet", [1, 2], ["a", "b"])
    chunk = load(tmp_path)
    assert reasons(chunk) == {0: "no image", 1: "no image"}
    assert chunk["keys"] == [] and chunk[f"pixels_{RESOLUTION}"].shape == (0, RESOLUTION, RESOLUTION, 3)


def test_paths_stay_in_their_folder(tmp_path):
    (tmp_path / "secret.png").write_bytes(noise_png())
    names = [
        "../secret.png",
        "sub/../../secret.png",
        "sub",
        "none.png",
        "s3://bucket/x.png?region=eu&colour=red",
        "x" * 5000,
    ]
    write_jsonl(tmp_path / "data", [{"file_name": name, "text": "x"} for name in names], [("sub/a.png", noise_png())])
    found = reasons(load(tmp_path / "data"))
    assert found[0] == found[1] == "a path that leaves its folder" and found[3] == "file not found"
    assert all("cannot be read" in found[row] for row in (2, 4, 5))


def test_odd_lines_are_bad_rows_and_no_more(tmp_path):
    """U+2028 and its like end a line of text in Python, not one of JSON."""
    odd = [b"{broken", b"[1]", b"5", b'{"text": "no name"}', {"file_name": 5, "text": "x"}, {"file_name": None}]
    odd += [{"file_name": "a.png", "text": None}, {"file_name": "a.png", "text": ["x"]}, b'{"file_name": "caf\xe9"}']
    odd += [b'{"file_name": "a.png", "text": "half a pair \\ud83d"}', b'{"file_name": "a\\u0000.png", "text": "x"}']
    good = [{"file_name": "a.png", "text": f"one{end}line"} for end in "\u2028\u2029\x85"]
    write_jsonl(tmp_path, [*odd, *good], [("a.png", noise_png())])
    chunk = load(tmp_path)
    assert chunk["captions"] == [row["text"] for row in good]
    assert sorted(reasons(chunk)) == list(range(len(odd)))


# ---------------------------------------------------------------------------------------------------------------------
# Crops


def crops(folder, resolution=RESOLUTION, first=0, count=10, epoch=0, source=0, **options):
    options = {"random_crop": True, "resolutions": (resolution,), **options}
    return make_loader(**options)(list_sources(str(folder))[source], first, count, epoch)[f"pixels_{resolution}"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Two row groups of the same ten wide pictures."""
    folder = tmp_path_factory.mktemp("wide")
    write_parquet(folder / "x.parquet", [noise_png(i, 100, 20) for i in range(10)] * 2, ["x"] * 20, row_group_size=10)
    return folder


def test_the_centre_is_cropped_whatever_the_seed(wide):
    wanted = np.stack([images.crop_square(images.read_image(noise_png(i, 100, 20)), RESOLUTION) for i in range(10)])
    for seed in (0, 1):
        assert np.array_equal(crops(wide, random_crop=False, seed=seed), wanted)
    flipped = crops(wide, random_crop=False, random_flip=True)
    kept = [np.array_equal(one, other) for one, other in zip(flipped, wanted, strict=True)]
    assert 0 < sum(kept) < 10
    assert all(kept[i] or np.array_equal(flipped[i], wanted[i, :, ::-1]) for i in range(10))


def test_random_crops_are_a_function_of_seed_epoch_and_row(wide):
    whole = crops(wide, random_flip=True)
    assert np.array_equal(whole, crops(wide, random_flip=True))
    for size in (1, 3, 7):
        parts = [crops(wide, first=first, count=size, random_flip=True) for first in range(0, 10, size)]
        assert np.array_equal(np.concatenate(parts), whole)
    others = [crops(wide, seed=1), crops(wide, epoch=1), crops(wide, source=1), crops(wide, random_crop=False)]
    for i, one in enumerate([crops(wide), *others]):
        for other in others[i:]:
            assert sum(np.array_equal(*pair) for pair in zip(one, other, strict=True)) < 4  # one of 81 places by chance


def test_all_resolutions_show_the_same_crop(wide):
    loader = make_loader(resolutions=(16, 32), random_crop=True, random_flip=True)
    chunk = loader(list_sources(str(wide))[0], 0, 10)
    assert chunk["pixels_16"].shape == (10, 16, 16, 3) and chunk["pixels_32"].shape == (10, 32, 32, 3)
    assert np.array_equal(chunk["pixels_16"], crops(wide, 16, random_flip=True))
    assert np.array_equal(chunk["pixels_32"], crops(wide, 32, random_flip=True))
    halved = chunk["pixels_32"].reshape(10, 16, 2, 16, 2, 3).mean(axis=(2, 4))
    distance = np.abs(halved[:, None] - chunk["pixels_16"][None]).mean(axis=(2, 3, 4))
    assert (distance.argmin(axis=1) == np.arange(10)).all() and distance.diagonal().max() < 15


@pytest.mark.parametrize("flags", [{"random_crop": False}, {"random_crop": True, "random_flip": True}])
def test_a_chunk_says_where_each_crop_was(wide, flags):
    chunk = make_loader(**flags)(list_sources(str(wide))[0], 0, 10)
    assert len({tuple(crop) for crop in chunk["crops"].tolist()}) > 1 or not flags["random_crop"]
    for i, (width, height, left, top, _, _, is_mirrored) in enumerate(chunk["crops"].tolist()):
        assert (width, height, top) == (100, 20, 0)
        image, sides = images.read_image(noise_png(i, 100, 20)), (RESOLUTION, RESOLUTION)
        pixels = np.asarray(image.resize(sides, Image.Resampling.LANCZOS, box=(left, 0, left + 20, 20)))
        found = chunk[f"pixels_{RESOLUTION}"][i]
        assert np.array_equal(found[:, ::-1] if is_mirrored else found, pixels)
