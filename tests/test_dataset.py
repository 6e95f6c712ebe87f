"""Photos, crops, pairs, the cache of posteriors and the layout of batches."""

import shutil
import struct
import warnings
import zlib
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import make_photos, tree
from PIL import Image
from tiny_models import RESOLUTION

import dataset
from common import errors, images
from common.images import BadImage, check_images, read_image, to_pixel_values
from dataset import Batches, Pairs, cache_posteriors
from pipelines.prompts import check_prompts
from utils import CLASS_NOISE, CROP, INSTANCE_NOISE, draw_noise, row_rng


def noise_pixels(height=20, width=24, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def pixels_of(path):
    image = read_image(path)
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def png_bytes(width, height, rows=b"\0"):
    """A PNG made by hand: its header may claim any size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def exif_bytes(*entries):
    """EXIF of (tag, type, count, four bytes) entries, as a camera might write them, right or wrong."""
    body = b"".join(struct.pack("<HHI", tag, kind, count) + value for tag, kind, count, value in entries)
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(entries)) + body + struct.pack("<I", 0)


# ---------------------------------------------------------------------------------------------------------------------
# read_image

# The EXIF standard says where the stored row 0 and column 0 are in the upright picture.
STORED = {
    1: lambda upright: upright,  # top, left
    2: lambda upright: upright[:, ::-1],  # top, right
    3: lambda upright: upright[::-1, ::-1],  # bottom, right
    4: lambda upright: upright[::-1],  # bottom, left
    5: lambda upright: upright.swapaxes(0, 1),  # left, top
    6: lambda upright: upright.swapaxes(0, 1)[::-1],  # right, top
    7: lambda upright: upright.swapaxes(0, 1)[::-1, ::-1],  # right, bottom
    8: lambda upright: upright.swapaxes(0, 1)[:, ::-1],  # left, bottom
}


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("suffix", ["png", "tif", "jpg"])
def test_exif_orientation_is_applied(tmp_path, orientation, suffix):
    upright = np.full((32, 48, 3), 200, np.uint8)
    upright[:16, :16] = (250, 10, 10)  # red above left, blue below right
    upright[16:, 32:] = (10, 10, 250)
    exif = Image.Exif()
    exif[0x112] = orientation
    path = tmp_path / f"photo.{suffix}"
    options = {"quality": 100, "subsampling": 0} if suffix == "jpg" else {}
    Image.fromarray(np.ascontiguousarray(STORED[orientation](upright))).save(path, exif=exif, **options)
    read = pixels_of(path)
    assert read.shape == upright.shape
    assert np.abs(read - upright).max() <= (8 if suffix == "jpg" else 0)


def test_exif_orientation_of_an_uncompressed_grey_tiff(tmp_path):
    upright = noise_pixels(channels=1)
    exif = Image.Exif()
    exif[0x112] = 6
    Image.fromarray(np.ascontiguousarray(STORED[6](upright))).save(tmp_path / "scan.tif", exif=exif)
    read = pixels_of(tmp_path / "scan.tif")
    assert read.shape == (*upright.shape, 3)
    assert (read == upright[..., None]).all()


def test_a_rotated_picture_keeps_its_transparency(tmp_path):
    indices = np.zeros((20, 30), np.uint8)
    indices[:, 20:] = 1
    image = Image.fromarray(indices, mode="P")
    image.putpalette([10, 200, 30, 255, 0, 0])
    exif = Image.Exif()
    exif[0x112] = 6  # to be turned clockwise: what was on the right comes below
    image.save(tmp_path / "p.png", transparency=1, exif=exif)
    read = pixels_of(tmp_path / "p.png")
    assert read.shape == (30, 20, 3)
    assert (read[:20] == (10, 200, 30)).all() and (read[20:] == 255).all()


@pytest.mark.parametrize(
    "odd",
    [(0x100, 2, 3, b"ab\0\0"), (0x11A, 2, 3, b"ab\0\0"), (0x131, 11, 1, struct.pack("<f", 1.5))],
    ids=["width is text", "resolution is text", "software is a number"],
)
def test_a_rotated_photo_with_an_odd_exif_tag_is_read(tmp_path, odd):
    entries = sorted([(0x112, 3, 1, struct.pack("<HH", 6, 0)), odd])
    Image.fromarray(noise_pixels(20, 24)).save(tmp_path / "photo.jpg", exif=exif_bytes(*entries))
    assert read_image(tmp_path / "photo.jpg").size == (20, 24)


def test_alpha_is_put_over_white(tmp_path):
    pixels = np.zeros((20, 20, 4), np.uint8)
    pixels[:, :10] = (200, 0, 100, 255)
    pixels[:, 10:15] = (200, 0, 100, 0)
    pixels[:, 15:] = (0, 0, 0, 127)  # half transparent black
    Image.fromarray(pixels).save(tmp_path / "rgba.png")
    read = pixels_of(tmp_path / "rgba.png")
    assert (read[:, :10] == (200, 0, 100)).all()
    assert (read[:, 10:15] == 255).all()
    assert (np.abs(read[:, 15:] - 128) <= 1).all()


def test_grey_with_alpha_is_put_over_white(tmp_path):
    pixels = np.full((20, 20, 2), 40, np.uint8)
    pixels[..., 1] = 255
    pixels[:, 10:, 1] = 0
    Image.fromarray(pixels, mode="LA").save(tmp_path / "la.png")
    read = pixels_of(tmp_path / "la.png")
    assert (read[:, :10] == 40).all() and (read[:, 10:] == 255).all()


@pytest.mark.parametrize("suffix", ["png", "gif"])
def test_a_palette_with_transparency_is_put_over_white(tmp_path, suffix):
    indices = np.zeros((20, 20), np.uint8)
    indices[:, 10:] = 1
    image = Image.fromarray(indices, mode="P")
    image.putpalette([10, 200, 30, 255, 0, 0])
    image.save(tmp_path / f"p.{suffix}", transparency=1)
    read = pixels_of(tmp_path / f"p.{suffix}")
    assert (read[:, :10] == (10, 200, 30)).all() and (read[:, 10:] == 255).all()


def test_rgb_with_a_transparent_colour_is_put_over_white(tmp_path):
    pixels = np.zeros((20, 20, 3), np.uint8)
    pixels[:, 10:] = (1, 2, 3)
    Image.fromarray(pixels).save(tmp_path / "key.png", transparency=(1, 2, 3))
    read = pixels_of(tmp_path / "key.png")
    assert (read[:, :10] == 0).all() and (read[:, 10:] == 255).all()


@pytest.mark.parametrize("suffix", ["jpg", "tif"])
def test_cmyk_becomes_the_colours_it_shows(tmp_path, suffix):
    image = Image.new("CMYK", (32, 32), (0, 255, 255, 0))  # no cyan: red
    image.paste((255, 0, 0, 0), (16, 0, 32, 32))
    image.save(tmp_path / f"print.{suffix}")
    read = pixels_of(tmp_path / f"print.{suffix}")
    assert (np.abs(read[4:28, 2:12] - (255, 0, 0)) <= 6).all()
    assert (np.abs(read[4:28, 20:30] - (0, 255, 255)) <= 6).all()


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path, suffix):
    values = np.zeros((20, 20), np.uint16)
    values[:, 5:10], values[:, 10:15], values[:, 15:] = 257, 32896, 65535  # of 65535: 1, 128 and 255 of 255
    Image.fromarray(values).save(tmp_path / f"deep.{suffix}")
    read = pixels_of(tmp_path / f"deep.{suffix}")
    for column, value in ((0, 0), (5, 1), (10, 128), (15, 255)):
        assert (read[:, column : column + 5] == value).all()


@pytest.mark.parametrize("mode", ["1", "L", "P"])
def test_grey_bilevel_and_palette_become_rgb(tmp_path, mode):
    pixels = np.zeros((20, 20), np.uint8)
    pixels[:, 10:] = 255
    Image.fromarray(pixels).convert(mode).save(tmp_path / "x.png")
    read = pixels_of(tmp_path / "x.png")
    assert read.shape == (20, 20, 3)
    assert (read[:, :10] == 0).all() and (read[:, 10:] == 255).all()


def test_the_first_frame_of_a_gif_is_taken(tmp_path):
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "lime", "blue")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    assert (pixels_of(tmp_path / "moving.gif") == (255, 0, 0)).all()


@pytest.mark.parametrize("name", ["a.webp", "a.tif", "a.tiff", "a.bmp", "a.png"])
def test_lossless_formats_come_back_exactly(tmp_path, name):
    pixels = noise_pixels()
    Image.fromarray(pixels).save(tmp_path / name, **({"lossless": True} if name == "a.webp" else {}))
    assert (pixels_of(tmp_path / name) == pixels).all()


@pytest.mark.parametrize("name", ["a.jfif", "a.jpeg", "a.JPG", "a.webp", "a.avif"])
def test_lossy_formats_are_read(tmp_path, name):
    Image.new("RGB", (24, 20), (200, 100, 50)).save(tmp_path / name, quality=95)
    read = pixels_of(tmp_path / name)
    assert read.shape == (20, 24, 3)
    assert (np.abs(read - (200, 100, 50)) <= 6).all()


def test_a_picture_named_as_another_format_is_read(tmp_path):
    Image.fromarray(noise_pixels()).save(tmp_path / "x.png")
    (tmp_path / "x.png").rename(tmp_path / "x.jpg")
    assert (pixels_of(tmp_path / "x.jpg") == noise_pixels()).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_truncated_picture_is_damaged(tmp_path, kind, share):
    path = tmp_path / f"cut.{kind.lower()}"
    Image.fromarray(noise_pixels()).save(path, kind)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(BadImage, match=r"damaged|not an image"):
        read_image(path)


def test_a_damaged_avif_is_damaged(tmp_path):
    Image.fromarray(noise_pixels()).save(tmp_path / "x.avif", "AVIF")
    data = bytearray((tmp_path / "x.avif").read_bytes())
    place = data.index(b"mdat") + 4
    data[place:] = b"\xff" * (len(data) - place)
    (tmp_path / "x.avif").write_bytes(data)
    with pytest.raises(BadImage):
        read_image(tmp_path / "x.avif")


def test_what_is_no_picture_is_said(tmp_path):
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("my dog at the beach\n" * 20)
    with pytest.raises(BadImage, match="empty"):
        read_image(tmp_path / "empty.jpg")
    with pytest.raises(BadImage, match="not an image"):
        read_image(tmp_path / "text.jpg")


def test_an_icon_is_too_small(tmp_path):
    Image.new("RGB", (1, 1)).save(tmp_path / "dot.png")
    Image.new("RGB", (200, 15)).save(tmp_path / "line.png")
    Image.new("RGB", (200, 16)).save(tmp_path / "enough.png")
    with pytest.raises(BadImage, match="1x1"):
        read_image(tmp_path / "dot.png")
    with pytest.raises(BadImage, match="200x15"):
        read_image(tmp_path / "line.png")
    assert read_image(tmp_path / "enough.png").size == (200, 16)


@pytest.mark.parametrize("side", [14_000, 60_000])
def test_a_decompression_bomb_is_refused_by_its_header(tmp_path, side):
    (tmp_path / "bomb.png").write_bytes(png_bytes(side, side))
    with pytest.raises(BadImage, match="bomb"):
        read_image(tmp_path / "bomb.png")


def test_a_camera_of_100_megapixels_is_no_bomb(tmp_path):
    """Its pixels are cut off here, so that it is damaged, which is not what a bomb is called; and nothing warns."""
    (tmp_path / "big.png").write_bytes(png_bytes(12_000, 8_500))
    with warnings.catch_warnings(record=True) as caught, pytest.raises(BadImage, match="damaged"):
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        read_image(tmp_path / "big.png")
    assert not caught


def test_a_phone_format_is_to_be_exported(tmp_path):
    (tmp_path / "IMG_1.HEIC").write_bytes(b"\0\0\0\x18ftypheic")
    with pytest.raises(BadImage, match="export"):
        read_image(tmp_path / "IMG_1.HEIC")


# ---------------------------------------------------------------------------------------------------------------------
# A folder


@pytest.fixture
def dirty_folder(tmp_path):
    folder = make_photos(tmp_path / "photos", 2)
    data = (folder / "00.png").read_bytes()
    (folder / "cut.png").write_bytes(data[: len(data) // 2])
    (folder / "empty.jpg").touch()
    (folder / "text.jpg").write_text("hello")
    (folder / "phone.HEIC").write_bytes(b"\0\0\0\x18ftypheic")
    (folder / "notes.txt").write_text("taken in May")
    (folder / "metadata.jsonl").write_text("{}")
    shutil.copy(folder / "00.png", folder / "._00.png")
    (folder / "more.png").mkdir()
    return folder


BAD = ("cut.png", "empty.jpg", "text.jpg", "phone.HEIC")


def test_every_bad_file_is_named_in_one_error(dirty_folder, capsys):
    with pytest.raises(errors.BadInput) as error:
        check_images(dirty_folder, "--instance_images_dir")
    said = capsys.readouterr().err
    assert "--instance_images_dir" in str(error.value) and "4 bad files" in str(error.value)
    for name in BAD:
        assert name in str(error.value)
    lines = {name: [line for line in said.splitlines() if line.startswith(f"{dirty_folder}/{name}")] for name in BAD}
    assert all(len(found) == 1 for found in lines.values())
    assert "empty" in lines["empty.jpg"][0] and "export" in lines["phone.HEIC"][0]
    assert "00.png:" not in said.replace("._00.png", "")


def test_skip_bad_goes_on_with_the_good(dirty_folder, capsys):
    images = check_images(dirty_folder, "--instance_images_dir", skip_bad=True)
    assert [path.name for path in images] == ["00.png", "01.png"]
    said = capsys.readouterr().err
    assert all(name in said for name in BAD)


def test_skipped_files_are_said(dirty_folder, capsys):
    check_images(dirty_folder, "--instance_images_dir", skip_bad=True)
    skipped = next(line for line in capsys.readouterr().err.splitlines() if "skipped" in line)
    assert all(name in skipped for name in ("notes.txt", "._00.png", "more.png"))
    assert "metadata.jsonl" not in skipped


def test_a_clean_folder_says_nothing(photos, capsys):
    assert [path.name for path in check_images(photos, "--x")] == ["00.png", "01.png", "02.png"]
    assert capsys.readouterr().err == ""


def test_upper_case_and_other_alphabets_are_read(tmp_path):
    make_photos(tmp_path, 1)
    for name in ("IMG_0001.PNG", "hündchen.png", "犬 1.png", "a,b 'c'.png"):
        shutil.copy(tmp_path / "00.png", tmp_path / name)
    assert {path.name for path in check_images(tmp_path, "--x")} == {
        "00.png", "IMG_0001.PNG", "hündchen.png", "犬 1.png", "a,b 'c'.png"
    }  # fmt: skip


def test_files_are_sorted_by_name_whatever_order_the_disk_has(tmp_path):
    make_photos(tmp_path / "a", 1)
    names = ["c.png", "a.png", "B.png", "10.png", "9.png"]
    (tmp_path / "b").mkdir()
    for name in names:
        shutil.copy(tmp_path / "a" / "00.png", tmp_path / "b" / name)
    assert [path.name for path in check_images(tmp_path / "b", "--x")] == sorted(names)


def test_a_folder_without_a_usable_picture_is_bad_input(tmp_path):
    with pytest.raises(errors.BadInput, match=r"--photos .*not a folder"):
        check_images(tmp_path / "none", "--photos")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(errors.BadInput, match=r"--photos .*no images"):
        check_images(tmp_path, "--photos")
    (tmp_path / "x.jpg").touch()
    with pytest.raises(errors.BadInput, match=r"--photos .*no image"):
        check_images(tmp_path, "--photos", skip_bad=True)


# ---------------------------------------------------------------------------------------------------------------------
# to_pixel_values


def crops_of(pixels, side):
    """Every square crop of an array, as to_pixel_values would give it, by its place."""
    values = pixels.astype(np.float32).transpose(2, 0, 1) / 127.5 - 1
    height, width = pixels.shape[:2]
    return {
        (top, left): values[:, top : top + side, left : left + side]
        for top in range(height - side + 1)
        for left in range(width - side + 1)
    }


@pytest.mark.parametrize(("height", "width"), [(16, 24), (24, 16), (16, 16), (16, 17)])
def test_the_centre_crop_is_exact(height, width):
    pixels = noise_pixels(height, width)
    values = to_pixel_values(Image.fromarray(pixels), 16)
    assert values.shape == (3, 16, 16) and values.dtype == np.float32
    centre = crops_of(pixels, 16)[(height - 16) // 2, (width - 16) // 2]
    assert np.allclose(values, centre, atol=1e-6)


def test_the_range_is_minus_one_to_one():
    image = Image.new("RGB", (16, 16))
    image.paste((255, 255, 255), (8, 0, 16, 16))
    values = to_pixel_values(image, 16)
    assert values.min() == -1 and values.max() == 1


@pytest.mark.parametrize(("size", "resolution"), [((48, 32), 16), ((32, 48), 16), ((101, 53), 16), ((20, 24), 64)])
def test_the_smaller_side_is_resized(size, resolution):
    """A ramp along the larger side keeps its slope: the picture is neither squeezed nor cut before it is resized."""
    ramp = np.linspace(0, 255, max(size)).astype(np.uint8)
    pixels = np.broadcast_to(ramp[:, None] if size[1] > size[0] else ramp[None], (size[1], size[0]))
    values = to_pixel_values(Image.fromarray(np.repeat(pixels[..., None], 3, axis=2)), resolution)
    assert values.shape == (3, resolution, resolution)
    along = values[0].mean(axis=1 if size[1] > size[0] else 0)
    slope = (along[-2] - along[1]) / (resolution - 3)
    assert slope == pytest.approx(2 / (max(size) / min(size) * resolution), rel=0.1)
    assert along.mean() == pytest.approx(0, abs=0.05)


def test_random_crops_lie_within_and_reach_both_ends():
    pixels = noise_pixels(16, 20)
    crops, seen = crops_of(pixels, 16), set()
    for row in range(60):
        values = to_pixel_values(Image.fromarray(pixels), 16, row_rng(0, CROP, 0, row), random_flip=False)
        places = [place for place, crop in crops.items() if np.allclose(crop, values, atol=1e-6)]
        assert len(places) == 1
        seen.add(places[0][1])
    assert seen == {0, 1, 2, 3, 4}


def test_half_of_the_photos_are_flipped():
    pixels = noise_pixels(16, 16)
    plain = crops_of(pixels, 16)[0, 0]
    flipped = 0
    for row in range(100):
        values = to_pixel_values(Image.fromarray(pixels), 16, row_rng(0, CROP, 0, row))
        is_flipped = np.allclose(values, plain[:, :, ::-1], atol=1e-6)
        assert is_flipped or np.allclose(values, plain, atol=1e-6)
        flipped += is_flipped
    assert 30 <= flipped <= 70


def test_crop_and_flip_can_be_turned_off():
    pixels = noise_pixels(16, 24)
    for row in range(20):
        rng = row_rng(0, CROP, 0, row)
        values = to_pixel_values(Image.fromarray(pixels), 16, rng, random_crop=False, random_flip=False)
        assert np.array_equal(values, to_pixel_values(Image.fromarray(pixels), 16))


def test_the_same_random_numbers_give_the_same_crop_and_variants_differ():
    image = Image.fromarray(noise_pixels(16, 400))
    first = [to_pixel_values(image, 16, row_rng(3, CROP, variant, 0)) for variant in range(8)]
    again = [to_pixel_values(image, 16, row_rng(3, CROP, variant, 0)) for variant in range(8)]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({values.tobytes() for values in first}) >= 7


# ---------------------------------------------------------------------------------------------------------------------
# Prompts


def test_good_prompts_pass():
    check_prompts("photo of unqtkn dog", "photo of a dog")
    check_prompts("photo of UNQTKN dog", "photo of a dog", "unqtkn")
    check_prompts("photo of unqtkn dog")
    check_prompts("photo of zwx qqv dog", "photo of a dog", "zwx qqv")


@pytest.mark.parametrize(
    ("instance", "other", "token", "said"),
    [
        ("photo of a dog", "photo of a dog", None, "--instance_prompt .*identifier"),
        ("photo of dog", "photo of a dog", None, "--instance_prompt .*identifier"),
        ("photo of a dog", "photo of a dog", "unqtkn", "--instance_prompt .*'unqtkn'"),
        ("photo of unqtkn dog", "photo of unqtkn dog", "unqtkn", "--class_prompt .*'unqtkn'"),
        ("photo of Unqtkn dog", "photo of UNQTKN dog", "unqtkn", "--class_prompt .*'unqtkn'"),
        ("photo of zwx dog", "photo of a dog", "zwx qqv", "--instance_prompt .*'qqv'"),
    ],
)
def test_an_identifier_that_does_not_tell_them_apart_is_bad_input(instance, other, token, said):
    with pytest.raises(errors.BadInput, match=said):
        check_prompts(instance, other, token)


# ---------------------------------------------------------------------------------------------------------------------
# Pairs

COUNTS = [(1, 1), (1, 7), (3, 8), (4, 4), (4, 12), (8, 3), (7, 2), (5, 0), (1, 0)]


def decode(pairs, row):
    """Return (instance image, variant) or the class image of a cache row."""
    if row >= pairs.num_instance * pairs.num_variants:
        return row - pairs.num_instance * pairs.num_variants
    return divmod(row, pairs.num_variants)


def epoch_rows(pairs, epoch):
    size = pairs.pairs_per_epoch
    return [pairs.rows(position) for position in range(epoch * size, (epoch + 1) * size)]


@pytest.mark.parametrize(("n", "m"), COUNTS)
def test_pair_j_holds_instance_j_mod_n_and_class_j_mod_m(n, m):
    pairs = Pairs(n, m, 16, seed=5)
    assert pairs.pairs_per_epoch == max(n, m)
    expected = sorted((j % n, j % m if m else -1) for j in range(max(n, m)))
    for epoch in range(3):
        rows = epoch_rows(pairs, epoch)
        found = [(decode(pairs, i)[0], -1 if c is None else decode(pairs, c)) for i, c in rows]
        assert sorted(found) == expected


@pytest.mark.parametrize(("n", "m"), [(n, m) for n, m in COUNTS if m >= n])
def test_each_class_image_comes_once_an_epoch(n, m):
    pairs = Pairs(n, m, 16, seed=5)
    for epoch in range(3):
        assert sorted(decode(pairs, c) for _, c in epoch_rows(pairs, epoch)) == list(range(m))


@pytest.mark.parametrize(("n", "m"), COUNTS)
@pytest.mark.parametrize("max_variants", [1, 2, 16])
def test_rows_are_in_range_and_used(n, m, max_variants):
    """A photo that an epoch shows once less than the others may leave its last variant unused."""
    pairs = Pairs(n, m, max_variants, seed=0)
    assert pairs.num_rows == n * pairs.num_variants + m
    assert 1 <= pairs.num_variants <= max_variants
    used = set()
    for epoch in range(16):
        for instance, other in epoch_rows(pairs, epoch):
            assert 0 <= instance < n * pairs.num_variants
            assert other is None if m == 0 else n * pairs.num_variants <= other < pairs.num_rows
            used |= {instance, other} - {None}
    assert used >= set(range(n * pairs.num_variants, pairs.num_rows))
    for image in range(n):
        shown = len(range(image, pairs.pairs_per_epoch, n)) if pairs.repeats > 1 else pairs.num_variants
        rows = set(range(image * pairs.num_variants, (image + 1) * pairs.num_variants))
        assert len(used & rows) >= min(shown, pairs.num_variants)


def test_the_order_is_a_function_of_seed_and_epoch():
    orders = {
        (seed, epoch): tuple(c for _, c in epoch_rows(Pairs(3, 20, 16, seed), epoch))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(set(orders.values())) == 16
    assert all(len(set(order)) == 20 for order in orders.values())
    later = Pairs(3, 20, 16, seed=2)
    assert later.rows(3 * 20 + 7)[1] == orders[2, 3][7]  # asked for alone, in any order
    assert tuple(c for _, c in epoch_rows(later, 0)) == orders[2, 0]


@pytest.mark.parametrize(("n", "m", "limit"), [(3, 8, 16), (1, 7, 16), (4, 12, 2), (2, 200, 16)])
def test_repeats_of_a_photo_are_distinct_variants_up_to_the_limit(n, m, limit):
    pairs = Pairs(n, m, limit, seed=1)
    for epoch in range(2):
        variants = {}
        for instance, _ in epoch_rows(pairs, epoch):
            image, variant = decode(pairs, instance)
            variants.setdefault(image, []).append(variant)
        for image, found in variants.items():
            shown = len(range(image, m, n))
            assert len(found) == shown
            assert len(set(found)) == min(shown, limit)


@pytest.mark.parametrize(("n", "m"), [(5, 0), (5, 3), (5, 5)])
def test_without_repeats_the_variants_advance_with_the_epochs(n, m):
    """One crop for all epochs would be what PITFALLS 20 warns of."""
    pairs = Pairs(n, m, 4, seed=1)
    shown = [{decode(pairs, instance) for instance, _ in epoch_rows(pairs, epoch)} for epoch in range(8)]
    for image in range(n):
        variants = [next(v for i, v in epoch if i == image) for epoch in shown]
        assert variants == [0, 1, 2, 3, 0, 1, 2, 3]


# ---------------------------------------------------------------------------------------------------------------------
# The cache


OPTIONS = {"resolution": RESOLUTION, "random_crop": True, "random_flip": True, "seed": 4}


@pytest.fixture(scope="module")
def cached(tiny_model, photos, class_images, tmp_path_factory):
    """(folder, pairs, instance images, class images) of a cache filled in this process."""
    folder = tmp_path_factory.mktemp("cache") / "posteriors"
    instance, others = sorted(photos.iterdir()), sorted(class_images.iterdir())
    pairs = Pairs(len(instance), len(others), 16, seed=4)
    cache_posteriors(folder, pairs, 10**6, instance, others, {"model_dir": str(tiny_model), **OPTIONS}, num_workers=0)
    return folder, pairs, instance, others


def load_cache(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "posteriors.safetensors")


def expected_posteriors(tiny_model, pairs, instance, others):
    """Encode each row's crop alone with the VAE, in the order that Pairs.rows counts in."""
    import torch
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(tiny_model, subfolder="vae")
    crops = [
        to_pixel_values(read_image(path), RESOLUTION, row_rng(4, CROP, variant, image))
        for image, path in enumerate(instance)
        for variant in range(pairs.num_variants)
    ]
    crops += [to_pixel_values(read_image(path), RESOLUTION) for path in others]
    with torch.no_grad():
        latents = [vae.encode(torch.from_numpy(crop)[None]).latent_dist for crop in crops]
    return np.stack([one.mean[0].numpy() for one in latents]), np.stack([one.std[0].numpy() for one in latents])


def test_each_row_is_the_posterior_of_its_own_crop(cached, tiny_model):
    folder, pairs, instance, others = cached
    arrays = load_cache(folder)
    mean, std = expected_posteriors(tiny_model, pairs, instance, others)
    used = pairs.rows_used(10**6)
    mean, std = mean[used], std[used]
    assert set(arrays) == {"mean", "std", "place"} and arrays["place"][used].tolist() == list(range(len(used)))
    assert (arrays["place"] == -1).sum() == pairs.num_rows - len(used) == 1  # a photo that is shown once less
    assert arrays["mean"].dtype == arrays["std"].dtype == np.float16
    assert arrays["mean"].shape == (len(used), 4, 8, 8) == mean.shape
    assert np.allclose(arrays["mean"], mean, rtol=2e-3, atol=2e-3)
    assert np.allclose(arrays["std"], std, rtol=2e-3, atol=2e-3)
    distance = np.abs(arrays["mean"].astype(np.float32)[:, None] - mean[None]).mean(axis=(2, 3, 4))
    others_distance = distance + np.eye(len(mean)) * 1e9
    assert (distance.diagonal() * 20 < others_distance.min(axis=1)).all()  # a shuffled cache would show


def test_the_manifest_says_which_row_is_which(cached):
    folder, pairs, instance, others = cached
    images = dataset.read_manifest(folder, deep=True)["images"]
    expected = [[str(path), v] for path in instance for v in range(pairs.num_variants)]
    assert images == expected + [[str(path), None] for path in others]


def test_a_whole_cache_is_not_touched(cached, tiny_model, monkeypatch):
    folder, pairs, instance, others = cached
    before = tree(folder)
    monkeypatch.setattr(dataset, "map_on_actors", lambda *args, **options: pytest.fail("encoded again"))
    cache_posteriors(folder, pairs, 10**6, instance, others, {"model_dir": str(tiny_model), **OPTIONS}, num_workers=0)
    assert tree(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_cut_cache_is_filled_again(cached, tiny_model, tmp_path):
    folder, pairs, instance, others = cached
    copy = shutil.copytree(folder, tmp_path / "posteriors")
    data = (copy / "posteriors.safetensors").read_bytes()
    (copy / "posteriors.safetensors").write_bytes(data[:-10])
    cache_posteriors(copy, pairs, 10**6, instance, others, {"model_dir": str(tiny_model), **OPTIONS}, num_workers=0)
    assert (copy / "posteriors.safetensors").read_bytes() == data


@pytest.mark.parametrize(("n", "m"), COUNTS)
@pytest.mark.parametrize("max_variants", [1, 2, 16])
@pytest.mark.parametrize("num_pairs", [1, 3, 8, 29, 200])
def test_the_rows_of_a_run_are_those_of_its_pairs(n, m, max_variants, num_pairs):
    pairs = Pairs(n, m, max_variants, seed=3)
    used = {row for position in range(num_pairs) for row in pairs.rows(position)} - {None}
    assert pairs.rows_used(num_pairs).tolist() == sorted(used)


def test_a_run_encodes_what_it_will_see():
    """1,000 photos without class images were encoded 16 times each, for four epochs."""
    assert len(Pairs(1000, 0, 16, seed=0).rows_used(4000)) == 4000
    assert len(Pairs(5, 0, 16, seed=0).rows_used(20)) == 20
    assert len(Pairs(5, 200, 16, seed=0).rows_used(20)) <= 40
    assert len(Pairs(5, 200, 16, seed=0).rows_used(800)) == 5 * 16 + 200


def encoded(monkeypatch, folder, pairs, num_pairs, instance, others, model, **options):
    """Fill a cache in this process and return the (path, variant) of what was encoded for it."""
    seen, real = [], dataset.map_on_actors

    def watch(worker, options, items, **pool):
        seen.extend((Path(path).name, variant) for item in items for _, path, _, variant in item["crops"])
        return real(worker, options, items, **pool)

    with monkeypatch.context() as patch:
        patch.setattr(dataset, "map_on_actors", watch)
        options = {"model_dir": str(model), **OPTIONS, **options}
        cache_posteriors(folder, pairs, num_pairs, instance, others, options, num_workers=0)
    return seen


def test_a_longer_run_adds_to_the_cache_what_it_lacks(cached, tiny_model, tmp_path, monkeypatch):
    """Bit for bit as if it had been that long from the start."""
    _, pairs, instance, others = cached
    run = partial(encoded, monkeypatch)
    first = run(tmp_path / "grown", pairs, 3, instance, others, tiny_model)
    assert len(first) == len(pairs.rows_used(3)) < pairs.num_rows
    assert run(tmp_path / "grown", pairs, 2, instance, others, tiny_model) == []
    more = run(tmp_path / "grown", pairs, 9, instance, others, tiny_model)
    assert len(first) + len(more) == len({*first, *more}) == len(pairs.rows_used(9))
    run(tmp_path / "whole", pairs, 9, instance, others, tiny_model)
    grown, whole = load_cache(tmp_path / "grown"), load_cache(tmp_path / "whole")
    for row in pairs.rows_used(9):
        for name in ("mean", "std"):
            assert np.array_equal(grown[name][grown["place"][row]], whole[name][whole["place"][row]])


@pytest.mark.parametrize(("size", "flags", "distinct"), [
    ((20, 20), {"random_flip": False}, 1),
    ((20, 20), {}, 2),
    ((20, 20), {"random_crop": False}, 2),
    ((24, 20), {"random_flip": False}, 5),
    ((24, 20), {"random_crop": False, "random_flip": False}, 1),
])  # fmt: skip
def test_variants_that_cannot_differ_are_encoded_once(tiny_model, tmp_path, monkeypatch, size, flags, distinct):
    """A square photo has one crop: only the flip tells its variants apart."""
    photos = sorted(make_photos(tmp_path / "photos", 2, size).iterdir())
    pairs = Pairs(2, 0, 16, seed=4)
    crops = encoded(monkeypatch, tmp_path / "cache", pairs, 32, photos, [], tiny_model, **flags)
    assert len(crops) == 2 * distinct
    place = load_cache(tmp_path / "cache")["place"]
    for row in range(pairs.num_rows):
        image, variant = divmod(row, 16)
        rng = row_rng(4, CROP, variant, image)
        crop = to_pixel_values(read_image(photos[image]), RESOLUTION, rng, **{"random_crop": True, **flags})
        name, encoded_variant = crops[place[row]]
        same = row_rng(4, CROP, encoded_variant, image)
        assert name == photos[image].name
        assert np.array_equal(crop, to_pixel_values(read_image(photos[image]), RESOLUTION, same, **flags))


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", [None, 1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_the_size_in_the_header_is_that_of_the_picture(tmp_path, orientation, suffix):
    exif, path = Image.Exif(), tmp_path / f"photo.{suffix}"
    if orientation:
        exif[0x0112] = orientation
    Image.new("RGB", (24, 20)).save(path, exif=exif)
    assert images.read_size(path) == read_image(path).size


def test_an_orientation_that_is_no_number_turns_nothing(tmp_path):
    """A tag of the wrong type, the text "6"."""
    entry = b"\x01\x12\x00\x02\x00\x00\x00\x02" + b"6\x00\x00\x00"
    exif = b"Exif\x00\x00" + b"MM\x00*\x00\x00\x00\x08" + b"\x00\x01" + entry + b"\x00\x00\x00\x00"
    Image.new("RGB", (24, 20)).save(tmp_path / "photo.jpg", exif=exif)
    with Image.open(tmp_path / "photo.jpg") as image:
        assert image.getexif()[0x0112] == "6"
    assert images.read_size(tmp_path / "photo.jpg") == read_image(tmp_path / "photo.jpg").size == (24, 20)


def test_a_cache_of_something_else_is_made_anew(cached, tiny_model, tmp_path):
    """Its run.json may be gone; a kill may have come between the two renames of its publishing."""
    _, pairs, instance, others = cached
    options = {"model_dir": str(tiny_model), **OPTIONS}
    for made_from, num_encoded in (({"seed": 1}, 17), ({"seed": 1}, 0), ({"seed": 2}, 17)):
        with mock.patch.object(dataset, "map_on_actors", wraps=dataset.map_on_actors) as mapped:
            folder = tmp_path / "cache"
            cache_posteriors(folder, pairs, 10**6, instance, others, options, made_from, num_workers=0)
        assert sum(len(item["crops"]) for call in mapped.mock_calls for item in call.args[2]) == max(0, num_encoded - 1)
    folder.rename(tmp_path / ".cache.replaced")
    with mock.patch.object(dataset, "map_on_actors", side_effect=AssertionError("encoded again")):
        cache_posteriors(folder, pairs, 10**6, instance, others, options, made_from, num_workers=0)


def test_the_cache_of_an_older_version_is_filled_anew(cached, tiny_model, tmp_path, monkeypatch):
    from safetensors.numpy import save_file

    folder, pairs, instance, others = cached
    arrays = load_cache(folder)
    del arrays["place"]
    (tmp_path / "beside").mkdir()
    save_file(arrays, tmp_path / "beside" / "posteriors.safetensors")
    dataset.publish(tmp_path / "beside", tmp_path / "old", images=[])
    encoded(monkeypatch, tmp_path / "old", pairs, 10**6, instance, others, tiny_model)
    assert np.array_equal(load_cache(tmp_path / "old")["mean"], load_cache(folder)["mean"])


def spoil(model_dir, target, name, change):
    """Copy a model folder and change the tensors of one of its weight files."""
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(model_dir, target)
    path = next((copy / name).glob("*.safetensors"))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return copy


def test_weights_that_overflow_fail_the_check(tiny_model, photos, tmp_path):
    model = spoil(tiny_model, tmp_path / "huge", "vae", lambda w: w["quant_conv.weight"].fill_(1e38))
    pairs = Pairs(3, 0, 1, seed=0)
    with pytest.raises(errors.CheckFailed, match=r"finite.*00\.png"):
        cache_posteriors(
            tmp_path / "posteriors", pairs, 3, sorted(photos.iterdir()), [], {"model_dir": str(model), **OPTIONS},
            num_workers=0,
        )  # fmt: skip
    assert not (tmp_path / "posteriors").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Batches


@pytest.fixture
def batches(tmp_path):
    """A maker of Batches over a cache whose row r holds the number r (mean) and r + 0.5 (std)."""
    import torch
    from safetensors.torch import save_file

    def make(pairs, seed=7, prompts=None):
        numbers = torch.arange(pairs.num_rows, dtype=torch.float16)[:, None, None, None].repeat(1, 4, 8, 8)
        arrays = {"mean": numbers, "std": numbers + 0.5, "place": torch.arange(pairs.num_rows)}
        save_file(arrays, tmp_path / "posteriors.safetensors")
        prompts = prompts or (torch.full((16,), 1), torch.full((16,), 2))
        return Batches(tmp_path, pairs, *prompts, seed, 1000)

    return make


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_batch_is_instance_rows_then_class_rows_in_all_fields(batches, size):
    import torch

    pairs = Pairs(3, 8, 16, seed=7)
    batch = batches(pairs)(2, 0, size, size)
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "mean": (2 * size, 4, 8, 8),
        "std": (2 * size, 4, 8, 8),
        "noise": (2 * size, 4, 8, 8),
        "posterior_noise": (2 * size, 4, 8, 8),
        "timesteps": (2 * size,),
        "prompt": (2 * size, 16),
    }
    assert {name: value.dtype for name, value in batch.items() if name not in ("timesteps", "prompt")} == {
        name: torch.float32 for name in ("mean", "std", "noise", "posterior_noise")
    }
    assert batch["timesteps"].dtype == batch["prompt"].dtype == torch.int64
    rows = [pairs.rows(2 * size + number) for number in range(size)]
    wanted = [instance for instance, _ in rows] + [other for _, other in rows]
    assert batch["mean"][:, 0, 0, 0].tolist() == wanted
    assert batch["std"][:, 0, 0, 0].tolist() == [row + 0.5 for row in wanted]
    assert batch["prompt"][:, 0].tolist() == [1] * size + [2] * size
    for half, stream in enumerate((INSTANCE_NOISE, CLASS_NOISE)):
        for number in range(size):
            noise, posterior_noise, timestep = draw_noise(7, stream, 2, number, (4, 8, 8), 1000)
            place = half * size + number
            assert np.array_equal(batch["noise"][place], noise)
            assert np.array_equal(batch["posterior_noise"][place], posterior_noise)
            assert batch["timesteps"][place] == timestep


def test_without_class_images_a_batch_is_instance_rows(batches):
    pairs = Pairs(3, 0, 2, seed=7)
    batch = batches(pairs)(1, 0, 2, 2)
    assert batch["mean"][:, 0, 0, 0].tolist() == [pairs.rows(2)[0], pairs.rows(3)[0]]
    assert batch["prompt"][:, 0].tolist() == [1, 1] and len(batch["noise"]) == 2


def test_prompt_embeds_are_laid_out_as_prompt_ids(batches):
    import torch

    embeds = (torch.full((16, 8), 0.25), torch.full((16, 8), 0.75))
    prompt = batches(Pairs(3, 8, 16, seed=7), prompts=embeds)(0, 0, 2, 2)["prompt"]
    assert prompt.shape == (4, 16, 8) and prompt.dtype == torch.float32
    assert prompt[:, 0, 0].tolist() == [0.25, 0.25, 0.75, 0.75]


@pytest.mark.parametrize("split", [(4,), (2, 2), (1, 1, 1, 1), (3, 1)])
def test_a_step_is_the_same_whatever_workers_share_it(batches, split):
    """One worker's four pairs are two workers' two and two, row by row, noise and all."""
    import torch

    make = batches(Pairs(3, 10, 16, seed=7))
    whole = make(5, 0, 4, 4)
    first, parts = 0, []
    for count in split:
        parts.append(make(5, first, count, 4))
        first += count
    for name, value in whole.items():
        instance = torch.cat([part[name][:count] for part, count in zip(parts, split, strict=True)])
        others = torch.cat([part[name][count:] for part, count in zip(parts, split, strict=True)])
        assert torch.equal(torch.cat([instance, others]), value), name


def test_a_restart_gives_the_same_batches(batches):
    import torch

    pairs = Pairs(3, 10, 16, seed=7)
    walked = batches(pairs)
    for step in range(6):
        last = walked(step, 0, 2, 2)
    fresh = batches(Pairs(3, 10, 16, seed=7))(5, 0, 2, 2)
    assert all(torch.equal(last[name], fresh[name]) for name in last)


def test_noise_differs_by_step_row_half_and_seed(batches):
    pairs = Pairs(3, 10, 16, seed=7)
    draws, timesteps = [], []
    for seed in (7, 8):
        make = batches(pairs, seed)
        for step in range(4):
            batch = make(step, 0, 3, 3)
            draws += [*batch["noise"], *batch["posterior_noise"]]
            timesteps += batch["timesteps"].tolist()
    flat = np.stack([draw.numpy().ravel() for draw in draws])
    correlation = np.corrcoef(flat) - np.eye(len(flat))
    assert len(flat) == 2 * 4 * 6 * 2
    assert np.abs(correlation).max() < 0.35  # 256 numbers each: 0.0625 is one standard deviation
    assert abs(flat.mean()) < 0.05 and abs(flat.std() - 1) < 0.05
    assert len(set(timesteps)) > 40 and min(timesteps) >= 0 and max(timesteps) < 1000


def test_two_steps_never_read_the_same_positions(batches):
    """Steps walk through the sequence without gap or overlap: ten pairs of an epoch, whatever the batch."""
    pairs = Pairs(3, 10, 16, seed=7)
    make = batches(pairs)
    shown = [int(row) for step in range(5) for row in make(step, 0, 2, 2)["mean"][2:, 0, 0, 0]]
    assert sorted(decode(pairs, row) for row in shown) == list(range(10))


# ---------------------------------------------------------------------------------------------------------------------
# On Ray


@pytest.mark.ray
def test_a_pool_fills_the_cache_as_this_process_does(ray_session, cached, tiny_model, tmp_path):
    folder, pairs, instance, others = cached
    options = {"model_dir": str(tiny_model), **OPTIONS}
    cache_posteriors(tmp_path / "posteriors", pairs, 10**6, instance, others, options, num_workers=(1, 2))
    here, there = load_cache(folder), load_cache(tmp_path / "posteriors")
    for name in ("mean", "std"):
        assert np.allclose(here[name], there[name], rtol=2e-3, atol=2e-3)


@pytest.mark.ray
def test_an_error_in_an_actor_keeps_its_exit_code(ray_session, tiny_model, photos, tmp_path):
    model = spoil(tiny_model, tmp_path / "less", "vae", lambda w: w.pop("quant_conv.weight"))
    options = {"model_dir": str(model), **OPTIONS}
    images = sorted(photos.iterdir())
    with pytest.raises(Exception) as error:
        cache_posteriors(tmp_path / "posteriors", Pairs(3, 0, 1, seed=0), 3, images, [], options, num_workers=1)
    code, message = errors.describe_error(error.value)
    assert code == errors.CheckFailed.exit_code
    assert "quant_conv.weight" in message
