"""Aspect-ratio buckets: their sizes, and which image goes where."""

import numpy as np
import pytest
from PIL import Image

from common import errors
from common.buckets import assign, bucket_sizes, nearest
from common.images import draw_crop
from pipelines.conditions import locate
from pipelines.families import SDXL
from utils import CROP, row_rng

AT_1024 = [
    *[(704, 1408), (768, 1280), (768, 1344), (832, 1216), (896, 1152), (960, 1088), (1024, 1024)],
    *[(1088, 960), (1152, 896), (1216, 832), (1280, 768), (1344, 768), (1408, 704)],
]


def test_the_sizes_of_published_models():
    assert bucket_sizes(1024, 8) == bucket_sizes(1024, 16) == AT_1024
    assert bucket_sizes(512, 8) == [(384, 640), (448, 576), (512, 512), (576, 448), (640, 384)]


def test_sizes_of_small_models_have_smaller_steps():
    assert bucket_sizes(64, 8) == [(48, 80), (56, 72), (64, 64), (72, 56), (80, 48)]
    assert bucket_sizes(32, 8) == [(24, 40), (32, 32), (40, 24)]


@pytest.mark.parametrize(("resolution", "multiple"), [(768, 16), (1024, 48), (2048, 8), (200, 16), (520, 8)])
def test_sides_fit_the_model_and_no_size_is_larger_than_the_square(resolution, multiple):
    sizes = bucket_sizes(resolution, multiple)
    step = np.lcm(8 if resolution < 256 else 64, multiple)
    for width, height in sizes:
        assert width % step == height % step == 0 and width * height <= resolution**2
        assert max(width, height) <= 2 * min(width, height) and (height, width) in sizes
        assert width * (height + step) > resolution**2 or (width + step) * height > resolution**2


def test_a_resolution_with_a_single_size_is_refused():
    with pytest.raises(errors.BadInput, match=r"^--buckets: --resolution 16 leaves one size, 16x16"):
        bucket_sizes(16, 8)
    with pytest.raises(errors.BadInput, match=r"^--buckets: --resolution 300 leaves no size"):
        bucket_sizes(300, 100)


@pytest.mark.parametrize(
    ("photo", "size"),
    [
        ((4032, 3024), (1152, 896)),  # 1.333: 1.286 is nearer than 1.462
        ((3024, 4032), (896, 1152)),
        ((640, 640), (1024, 1024)),
        ((3000, 2000), (1216, 832)),  # 1.5: 1.462 is nearer than 1.667
        ((1080, 1920), (768, 1344)),  # 0.563: 0.571 is nearer than 0.5
        ((1600, 40), (1408, 704)),
    ],
)
def test_photos_assigned_by_hand(photo, size):
    assert nearest(photo, AT_1024) == nearest(photo, AT_1024[::-1]) == size


def test_of_equal_aspect_ratios_the_larger_size_is_taken():
    assert nearest((100, 50), [(64, 32), (128, 64), (32, 16)]) == (128, 64)
    assert nearest((30, 30), [(40, 20), (10, 20)]) == (40, 20)  # twice as wide, twice as high


def test_one_line_names_the_images_that_lose_much(tmp_path, capsys):
    """100x400 becomes 48x80 by keeping 167 rows of 400; of 39x30 all is kept, and it becomes 72x56."""
    photos = {"tall.png": (100, 400), "small.png": (39, 30), "good.png": (144, 112), "square.png": (64, 64)}
    for name, size in photos.items():
        Image.new("RGB", size).save(tmp_path / name)
    found = assign({f"/there/{name}": tmp_path / name for name in photos}, bucket_sizes(64, 8))
    assert list(found.values()) == [(48, 80), (72, 56), (72, 56), (64, 64)]
    assert list(found) == [f"/there/{name}" for name in photos]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ") and "tall.png (42% kept), small.png (enlarged 1.8 times):" in line
    assert assign({"x": tmp_path / "good.png"}, bucket_sizes(64, 8)) and not capsys.readouterr().err


def test_a_long_list_is_cut(tmp_path, capsys):
    Image.new("RGB", (400, 20)).save(tmp_path / "x.png")
    assign({f"/{i}.png": tmp_path / "x.png" for i in range(9)}, bucket_sizes(64, 8))
    (line,) = capsys.readouterr().err.splitlines()
    assert "4.png (" in line and "5.png (" not in line and " and 4 more: " in line


# ---------------------------------------------------------------------------------------------------------------------
# Crops


def test_the_largest_crop_of_a_shape():
    """896/3024 of a photo's height, and 3888 of its 4032 pixels wide, of which 72 are on the left."""
    crop = draw_crop((4032, 3024), size=(1152, 896))
    assert crop == (4032, 3024, 72, 0, 3960, 3024, False)
    assert locate(SDXL(), [crop], (1152, 896))["time_ids"].tolist() == [[3024, 4032, 0, 21, 896, 1152]]
    assert draw_crop((3024, 4032), size=(896, 1152)).box == (0, 72, 3024, 3960)
    assert draw_crop((1000, 500), size=(40, 20)).box == (0, 0, 1000, 500)


def test_random_crops_of_a_shape_reach_both_ends_of_one_side():
    places = set()
    for row in range(200):
        crop = draw_crop((50, 24), row_rng(0, CROP, 0, row), size=(40, 24))
        assert (crop.right - crop.left, crop.top, crop.bottom) == (40, 0, 24)
        places.add((crop.left, crop.is_mirrored))
    assert places == {(left, is_mirrored) for left in range(11) for is_mirrored in (False, True)}
