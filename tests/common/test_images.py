"""Images: decoding, checks of a folder, crops."""

import shutil
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from conftest import make_photos
from PIL import Image

from common import errors, images, objects
from common.images import BadImage, check_images, draw_crop, find_images, read_image, to_pixel_values
from utils import CROP, row_rng


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
# find_images and check_images


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
        check_images(find_images(dirty_folder, "--instance_images_dir"))
    said = capsys.readouterr().err
    assert "--instance_images_dir" in str(error.value) and "4 bad files" in str(error.value)
    for name in BAD:
        assert name in str(error.value)
    lines = {name: [line for line in said.splitlines() if line.startswith(f"{dirty_folder}/{name}")] for name in BAD}
    assert all(len(found) == 1 for found in lines.values())
    assert "empty" in lines["empty.jpg"][0] and "export" in lines["phone.HEIC"][0]
    assert "00.png:" not in said.replace("._00.png", "")


def test_skip_bad_goes_on_with_the_good(dirty_folder, capsys):
    images = check_images(find_images(dirty_folder, "--instance_images_dir"), skip_bad=True)
    assert [Path(path).name for path in images] == ["00.png", "01.png"]
    said = capsys.readouterr().err
    assert all(name in said for name in BAD)


def test_skipped_files_are_said(dirty_folder, capsys):
    check_images(find_images(dirty_folder, "--instance_images_dir"), skip_bad=True)
    skipped = next(line for line in capsys.readouterr().err.splitlines() if "skipped" in line)
    assert all(name in skipped for name in ("notes.txt", "._00.png", "more.png"))
    assert "metadata.jsonl" not in skipped


def test_a_clean_folder_says_nothing(photos, capsys):
    assert [Path(path).name for path in check_images(find_images(photos, "--x"))] == ["00.png", "01.png", "02.png"]
    assert capsys.readouterr().err == ""


def test_upper_case_and_other_alphabets_are_read(tmp_path):
    make_photos(tmp_path, 1)
    for name in ("IMG_0001.PNG", "hündchen.png", "犬 1.png", "a,b 'c'.png"):
        shutil.copy(tmp_path / "00.png", tmp_path / name)
    assert {Path(path).name for path in check_images(find_images(tmp_path, "--x"))} == {
        "00.png", "IMG_0001.PNG", "hündchen.png", "犬 1.png", "a,b 'c'.png"
    }  # fmt: skip


def test_files_are_sorted_by_name_whatever_order_the_disk_has(tmp_path):
    make_photos(tmp_path / "a", 1)
    names = ["c.png", "a.png", "B.png", "10.png", "9.png"]
    (tmp_path / "b").mkdir()
    for name in names:
        shutil.copy(tmp_path / "a" / "00.png", tmp_path / "b" / name)
    assert [Path(path).name for path in check_images(find_images(tmp_path / "b", "--x"))] == sorted(names)


def test_the_images_of_a_uri_are_read_here_and_named_by_uri(dirty_folder, s3, node_cache, capsys):
    shutil.rmtree(dirty_folder / "more.png")
    objects.upload_folder(dirty_folder, s3("photos"))
    found = find_images(s3("photos"), "--x")
    assert list(found.files) == [s3(f"photos/{path.name}") for path in found.files.values()]
    assert all(node_cache in path.parents and path.is_file() for path in found.files.values())
    assert check_images(found, skip_bad=True) == [s3("photos/00.png"), s3("photos/01.png")]
    said = capsys.readouterr().err
    assert f"{s3('photos/cut.png')}: damaged" in said and str(node_cache) not in said


def test_a_folder_without_a_usable_picture_is_bad_input(tmp_path):
    with pytest.raises(errors.BadInput, match=r"--photos .*not a folder"):
        find_images(tmp_path / "none", "--photos")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(errors.BadInput, match=r"--photos .*no images"):
        check_images(find_images(tmp_path, "--photos"))
    (tmp_path / "x.jpg").touch()
    with pytest.raises(errors.BadInput, match=r"--photos .*no readable image"):
        check_images(find_images(tmp_path, "--photos"), skip_bad=True)


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
        crop = draw_crop((20, 16), row_rng(0, CROP, 0, row), random_flip=False)
        values = to_pixel_values(Image.fromarray(pixels), 16, crop)
        places = [place for place, crop in crops.items() if np.allclose(crop, values, atol=1e-6)]
        assert len(places) == 1
        seen.add(places[0][1])
    assert seen == {0, 1, 2, 3, 4}


def test_half_of_the_photos_are_flipped():
    pixels = noise_pixels(16, 16)
    plain = crops_of(pixels, 16)[0, 0]
    flipped = 0
    for row in range(100):
        values = to_pixel_values(Image.fromarray(pixels), 16, draw_crop((16, 16), row_rng(0, CROP, 0, row)))
        is_flipped = np.allclose(values, plain[:, :, ::-1], atol=1e-6)
        assert is_flipped or np.allclose(values, plain, atol=1e-6)
        flipped += is_flipped
    assert 30 <= flipped <= 70


def test_crop_and_flip_can_be_turned_off():
    pixels = noise_pixels(16, 24)
    for row in range(20):
        crop = draw_crop((24, 16), row_rng(0, CROP, 0, row), random_crop=False, random_flip=False)
        values = to_pixel_values(Image.fromarray(pixels), 16, crop)
        assert np.array_equal(values, to_pixel_values(Image.fromarray(pixels), 16))


def test_the_same_random_numbers_give_the_same_crop_and_variants_differ():
    image = Image.fromarray(noise_pixels(16, 400))
    first, again = (
        [to_pixel_values(image, 16, draw_crop(image.size, row_rng(3, CROP, variant, 0))) for variant in range(8)]
        for _ in range(2)
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({values.tobytes() for values in first}) >= 7


# ---------------------------------------------------------------------------------------------------------------------
# read_size


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
