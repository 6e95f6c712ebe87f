"""Find images in a folder; decode, check, crop and scale them."""

import functools
import io
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from common.errors import BadInput
from common.folders import LOCK, MANIFEST, check_on_node
from common.messages import say
from common.objects import local_copy
from common.storage import is_remote, split
from common.stores import Store
from common.targets import join_name

Size = tuple[int, int]  # width and height in pixels

READ = {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"}
PHOTOS_TO_CONVERT = {".heic", ".heif", ".jxl", ".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw"}
ORIENTATION = 0x0112  # EXIF tag; ImageOps.exif_transpose also rewrites the other tags, and fails on invalid ones
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
CAPTION_SUFFIX = ".txt"  # of NAME.txt, the caption of NAME.jpg; pipelines.captions reads it
SMALLEST_SIDE = 16  # pixels; smaller images are icons or mistakes
LARGEST_PICTURE = 2 * (Image.MAX_IMAGE_PIXELS or 0)  # pixels; above this Pillow reports a decompression bomb
warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # raised for the 90 to 179 megapixels of good cameras


class BadImage(Exception):
    """A file that cannot be used as an image; the message is the reason."""


def read_image(source: str | Path | bytes) -> Image.Image:
    """Return the first frame of an image as upright 8-bit RGB.

    Applies the EXIF orientation, composites transparent pixels on white, and scales 16-bit values.
    source: a path, or the content of a file.
    Raises BadImage with the reason; a decompression bomb is rejected by its header.
    """
    if (len(source) if isinstance(source, bytes) else os.path.getsize(source)) == 0:
        raise BadImage("empty file")
    if not isinstance(source, bytes) and Path(source).suffix.lower() in PHOTOS_TO_CONVERT:
        raise BadImage("unsupported format: export it as JPEG or PNG")
    try:
        # Pillow gets an open file, not the path: it would memory-map a TIFF and garble it while rotating it.
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file, Image.open(file) as image:
            if min(image.size) < SMALLEST_SIDE:
                raise BadImage(f"only {image.width}x{image.height} pixels")
            if image.width * image.height > LARGEST_PICTURE:
                raise BadImage(f"{image.width}x{image.height} pixels, a decompression bomb")
            image.load()
            turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
            return _to_rgb(image if turn is None else image.transpose(turn))
    except (BadImage, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise BadImage("a decompression bomb: its header claims too many pixels") from None
    except Image.UnidentifiedImageError:
        raise BadImage("not an image") from None
    except Exception as error:  # Pillow's plugins raise exceptions of many types
        raise BadImage(f"damaged: {error}") from None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":  # 16 bits or more: scale, as Pillow's convert clips
        values = np.asarray(image, dtype=np.float32)
        largest = 65535.0 if image.mode != "F" or values.max() > 255 else 255.0 if values.max() > 1 else 1.0
        image = Image.fromarray((values.clip(0, largest) / largest * 255).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def source_of(location: str | Path) -> str | Path | bytes:
    """Return what `read_image` and `read_size` take for a path or a URI: the path, or the content of the object.

    Raises BadInput if a path does not exist on this worker's node, or if there is no such object.
    """
    if not is_remote(location):
        check_on_node(location)
        return location
    folder, name = split(location)
    data = _open_store(folder).read(name)
    if data is None:
        raise BadInput(f"{location} does not exist: another run deleted it")
    return data


def read_image_at(location: str | Path) -> Image.Image:
    """Return `read_image` of a path or a URI, as `source_of` finds it."""
    return read_image(source_of(location))


@functools.lru_cache(maxsize=16)
def _open_store(uri: str) -> Store:
    return Store(uri)


@dataclass(frozen=True)
class ImageFolder:
    """The images of a folder by path or URI, none of them opened.

    flag: the one that gave the location. files: {path or URI of an image: its file on this node}, sorted by name.
    others: names of the other files.
    """

    location: str | Path
    flag: str
    files: dict[str, Path]
    others: list[str]


def find_images(location: str | Path, flag: str) -> ImageFolder:
    """Return the images of a folder: here those of a URI become files on this node.

    Captions of images, and files that the toolkit itself writes beside images, are left out.
    """
    folder = local_copy(location)
    if not folder.is_dir():
        raise BadInput(f"{flag} {folder} is not a folder")
    images, others = [], []
    for path in sorted(folder.iterdir()):
        known = path.suffix.lower() in READ | PHOTOS_TO_CONVERT
        (images if known and path.is_file() and path.name[0] != "." else others).append(path)
    if not images:
        raise BadInput(f"{flag} {location} contains no images: add some")
    known = {"metadata.jsonl", MANIFEST, LOCK} | {path.with_suffix(CAPTION_SUFFIX).name for path in images}
    files = {join_name(location, path.name): path for path in images}
    return ImageFolder(location, flag, files, [path.name for path in others if path.name not in known])


def check_images(found: ImageFolder, skip_bad: bool = False) -> list[str]:
    """Return the paths or URIs of the usable images of a folder; print which files are skipped, and why.

    Decodes every image once and raises BadInput that names all bad ones, unless `skip_bad` is set.
    """
    flag, folder = found.flag, found.location
    if found.others:
        say(f"{folder}: skipped {', '.join(found.others)}, which are hidden or not images")
    with ThreadPoolExecutor() as pool:
        faults = dict(zip(found.files, pool.map(_fault, found.files.values()), strict=True))
    bad = [image for image in found.files if faults[image]]
    for image in bad:
        say(f"{image}: {faults[image]}")
    if bad and not skip_bad:
        names = ", ".join(found.files[image].name for image in bad)
        raise BadInput(f"{flag} {folder}: {len(bad)} bad files ({names}): remove them or pass --skip_bad_images")
    if len(bad) == len(found.files):
        raise BadInput(f"{flag} {folder} contains no readable image: add some")
    return [image for image in found.files if image not in bad]


def _fault(path: Path) -> str | None:
    try:
        read_image(path)
    except BadImage as error:
        return str(error)
    return None


def read_size(source: str | Path | bytes) -> Size:
    """Return (width, height) of the image that `read_image` returns, from the file's header."""
    with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
        # Pillow has already exchanged the sides of a TIFF.
        exchanges = image.format != "TIFF" and image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
        width, height = image.size
        return (height, width) if exchanges else (width, height)


class Crop(NamedTuple):
    """A part of an upright image of `width` x `height` pixels: its edges in this image, and whether it is mirrored."""

    width: int
    height: int
    left: int
    top: int
    right: int
    bottom: int
    is_mirrored: bool

    @property
    def photo(self) -> Size:
        """(width, height) of the image."""
        return self.width, self.height

    @property
    def box(self) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) of the crop."""
        return self.left, self.top, self.right, self.bottom


def draw_crop(
    photo: Size,
    rng: np.random.Generator | None = None,
    random_crop: bool = True,
    random_flip: bool = True,
    size: Size = (1, 1),
) -> Crop:
    """Return the largest crop of an image that has the aspect ratio of `size`, to whole pixels.

    photo, size: of the image, and of the crop after resizing.
    rng: draws the position of the crop and the flip; None crops the centre and does not flip.
    """
    if photo[0] * size[1] > photo[1] * size[0]:
        width, height = round(photo[1] * size[0] / size[1]), photo[1]
    else:
        width, height = photo[0], round(photo[0] * size[1] / size[0])
    free = [photo[0] - width, photo[1] - height]
    left, top = [length // 2 for length in free]
    if rng is not None and random_crop:
        left, top = [int(rng.integers(length + 1)) for length in free]
    is_mirrored = rng is not None and random_flip and bool(rng.random() < 0.5)
    return Crop(*photo, left, top, left + width, top + height, is_mirrored)


def cut(image: Image.Image, crop: Crop, size: Size) -> Image.Image:
    """Return a crop of an image, resized to `size`."""
    image = image.resize(size, Image.Resampling.LANCZOS, box=crop.box)
    return ImageOps.mirror(image) if crop.is_mirrored else image


def crop_square(image: Image.Image, resolution: int, crop: Crop | None = None) -> Image.Image:
    """Return a square crop of an image, resized to `resolution` pixels a side; default: the centre."""
    return cut(image, crop or draw_crop(image.size), (resolution, resolution))


def scale_pixels(images: Any) -> np.ndarray:
    """Return uint8 pixels [..., H, W, 3] as [..., 3, H, W] float32 in [-1, 1]."""
    return np.moveaxis(np.asarray(images, dtype=np.float32), -1, -3) / 127.5 - 1


def to_pixel_values(image: Image.Image, resolution: int, crop: Crop | None = None) -> np.ndarray:
    """Return the result of `crop_square` as [3, H, W] float32 in [-1, 1]."""
    return scale_pixels(crop_square(image, resolution, crop))
