"""Aspect-ratio buckets: sizes of about the same number of pixels, to one of which each photo is cropped."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from common.errors import BadInput
from common.images import Size, draw_crop, read_size
from common.messages import say
from common.storage import split

STEP, SMALL_STEP, SMALL = 64, 8, 256  # pixels; sides are multiples of SMALL_STEP below a resolution of SMALL
LONGEST = 2  # times the shorter side
LEAST_KEPT, MOST_ENLARGED = 0.7, 1.5  # share of a photo's pixels, factor: a warning names photos beyond these
NAMED = 5  # photos that the warning names


def bucket_sizes(resolution: int, multiple: int) -> list[Size]:
    """Return the sizes of at most `resolution` ** 2 pixels that photos are cropped to, by width.

    For each width, and for each height, the largest; none longer than LONGEST times its shorter side. multiple: number
    of pixels of which the model requires sides to be multiples. Raises BadInput if only one size is left.
    """
    step = math.lcm(SMALL_STEP if resolution < SMALL else STEP, multiple)
    largest = [(side, resolution**2 // side // step * step) for side in range(step, LONGEST * resolution + 1, step)]
    sizes = {size for width, height in largest for size in ((width, height), (height, width))}
    found = sorted(size for size in sizes if max(size) <= LONGEST * min(size))
    if len(found) < 2:
        left = "one size, {}x{}".format(*found[0]) if found else "no size"
        raise BadInput(f"--buckets: --resolution {resolution} leaves {left}, as sides are multiples of {step}: omit it")
    return found


def nearest(photo: Size, sizes: Iterable[Size]) -> Size:
    """Return the size whose aspect ratio is the nearest to a photo's on a logarithmic scale; of equals the largest."""

    def distance(size: Size) -> tuple[float, int]:
        one, other = photo[0] * size[1], photo[1] * size[0]
        return max(one, other) / min(one, other), -size[0] * size[1]

    return min(sizes, key=distance)


def assign(files: Mapping[str, Path], sizes: Iterable[Size]) -> dict[str, Size]:
    """Return {image: size that it is cropped to}; print a warning that names the images of which much is lost.

    files: {path or URI of an image: its file on this node}.
    """
    photos = {image: read_size(file) for image, file in files.items()}
    found = {image: nearest(photo, sizes) for image, photo in photos.items()}
    faults = {image: _faults_of(photos[image], size) for image, size in found.items()}
    lossy = [f"{split(image)[1]} ({', '.join(reasons)})" for image, reasons in faults.items() if reasons]
    if lossy:
        more = f" and {len(lossy) - NAMED} more" if len(lossy) > NAMED else ""
        say(f"warning: no bucket suits {', '.join(lossy[:NAMED])}{more}: crop or replace these images")
    return found


def _faults_of(photo: Size, size: Size) -> list[str]:
    left, top, right, bottom = draw_crop(photo, size=size).box
    kept, enlarged = (right - left) * (bottom - top) / math.prod(photo), size[0] / (right - left)
    reasons = [f"{kept:.0%} kept"] if kept < LEAST_KEPT else []
    return [*reasons, f"enlarged {enlarged:.1f} times"] if enlarged > MOST_ENLARGED else reasons
