"""Pictures: found in a folder, decoded, checked, cropped and scaled."""

import io
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from common.errors import BadInput
from common.messages import say

READ = {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"}
PHOTOS_TO_CONVERT = {".heic", ".heif", ".jxl", ".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw"}
ORIENTATION = 0x0112  # EXIF's tag; ImageOps.exif_transpose also rewrites the other tags, and fails on odd ones
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SMALLEST_SIDE = 16  # pixels: a smaller picture is an icon or a mistake
LARGEST_PICTURE = 2 * Image.MAX_IMAGE_PIXELS  # pixels: past this Pillow takes it for a decompression bomb
warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # 90 to 179 million pixels: a good camera


class BadImage(Exception):
    """A file that cannot be used as a picture; the text is the reason."""


def read_image(source):
    """Return a picture as 8-bit RGB, upright: EXIF rotation applied, alpha over white, 16 bits scaled, first frame.

    source: a path, or the bytes of a file. Raises BadImage with the reason. A decompression bomb is refused from its
    header.
    """
    is_bytes = isinstance(source, bytes)
    if (len(source) if is_bytes else os.path.getsize(source)) == 0:
        raise BadImage("empty file")
    if not is_bytes and Path(source).suffix.lower() in PHOTOS_TO_CONVERT:
        raise BadImage("a format that is not read: export it as JPEG or PNG")
    try:
        # Opened here, not by Pillow, which would map a TIFF and scramble it as it turns it.
        with io.BytesIO(source) if is_bytes else open(source, "rb") as file, Image.open(file) as image:
            if min(image.size) < SMALLEST_SIDE:
                raise BadImage(f"only {image.width}x{image.height} pixels")
            if image.width * image.height > LARGEST_PICTURE:
                raise BadImage(f"{image.width}x{image.height} pixels, a decompression bomb")
            image.load()
            turn = TURNS.get(image.getexif().get(ORIENTATION))
            return _to_rgb(image if turn is None else image.transpose(turn))
    except (BadImage, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise BadImage("a decompression bomb: its header claims more pixels than a picture has") from None
    except Image.UnidentifiedImageError:
        raise BadImage("not an image") from None
    except Exception as error:  # each of Pillow's plugins raises its own
        raise BadImage(f"damaged: {error}") from None


def _to_rgb(image):
    if image.mode.startswith("I") or image.mode == "F":  # 16 bits and more: scale, Pillow's convert would clip
        values = np.asarray(image, dtype=np.float32)
        largest = 65535.0 if image.mode != "F" or values.max() > 255 else 255.0 if values.max() > 1 else 1.0
        image = Image.fromarray((values.clip(0, largest) / largest * 255).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def find_images(folder, flag):
    """Return (image files, other files but metadata.jsonl) of a folder, sorted by name; nothing is opened."""
    folder = Path(folder)
    if not folder.is_dir():
        raise BadInput(f"{flag} {folder} is not a folder")
    images, others = [], []
    for path in sorted(folder.iterdir()):
        known = path.suffix.lower() in READ | PHOTOS_TO_CONVERT
        (images if known and path.is_file() and path.name[0] != "." else others).append(path)
    if not images:
        raise BadInput(f"{flag} {folder} holds no images: copy some there")
    return images, [path for path in others if path.name not in ("metadata.jsonl", ".lock")]


def check_images(folder, flag, skip_bad=False):
    """Return the usable image files of a folder, sorted by name; say which files were skipped, and why.

    Every picture is decoded once, so that bad ones end the run here, all named: BadInput; `skip_bad` goes on.
    """
    images, others = find_images(folder, flag)
    if others:
        say(f"{folder}: skipped {', '.join(path.name for path in others)}: hidden or not images")
    with ThreadPoolExecutor() as pool:
        faults = dict(zip(images, pool.map(_fault, images), strict=True))
    bad = [path for path in images if faults[path]]
    for path in bad:
        say(f"{path}: {faults[path]}")
    if bad and not skip_bad:
        names = ", ".join(path.name for path in bad)
        raise BadInput(f"{flag} {folder}: {len(bad)} bad files ({names}): remove them, or pass --skip_bad_images")
    if len(bad) == len(images):
        raise BadInput(f"{flag} {folder} holds no image that can be read")
    return [path for path in images if path not in bad]


def _fault(path):
    try:
        read_image(path)
    except BadImage as error:
        return str(error)
    return None


def read_size(path):
    """Return (width, height) of a picture as `read_image` gives it, from its header."""
    with Image.open(path) as image:
        # Of a TIFF Pillow has exchanged the sides already.
        exchanges = image.format != "TIFF" and image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
        return image.size[::-1] if exchanges else image.size


def draw_crop(size, rng=None, random_crop=True, random_flip=True):
    """Return (left, top, is flipped) of a square crop of the smaller side of a picture of `size`.

    rng: draws the place of the crop and the flip; None crops the centre and does not flip.
    """
    free = [length - min(size) for length in size]
    left, top = [length // 2 for length in free]
    if rng is not None and random_crop:
        left, top = [int(rng.integers(length + 1)) for length in free]
    return left, top, rng is not None and random_flip and bool(rng.random() < 0.5)


def crop_square(image, resolution, rng=None, random_crop=True, random_flip=True):
    """Return the square of a Pillow image that `draw_crop` says, resized to `resolution` pixels."""
    left, top, is_flipped = draw_crop(image.size, rng, random_crop, random_flip)
    side = min(image.size)
    box = (left, top, left + side, top + side)
    image = image.resize((resolution, resolution), Image.Resampling.LANCZOS, box=box)
    return ImageOps.mirror(image) if is_flipped else image


def scale_pixels(images):
    """Return uint8 pixels [..., H, W, 3] as [..., 3, H, W] float32 in [-1, 1]."""
    return np.moveaxis(np.asarray(images, dtype=np.float32), -1, -3) / 127.5 - 1


def to_pixel_values(image, resolution, rng=None, random_crop=True, random_flip=True):
    """Return [3, H, W] float32 in [-1, 1]: what `crop_square` gives."""
    return scale_pixels(crop_square(image, resolution, rng, random_crop, random_flip))
