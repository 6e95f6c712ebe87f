"""Draw five example pictures of one made-up subject, a teal cat with an orange star: python assets/draw_subject.py."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageOps

SIZE = 256  # side of a finished picture
CANVAS = SIZE * 4  # everything is drawn four times larger, then scaled down
MARGIN = 200  # room around the canvas so that turning the cat cuts nothing off

TEAL, DEEP_TEAL, CREAM = (32, 190, 182), (10, 98, 116), (255, 236, 200)
ORANGE, PINK, WHITE, DARK = (255, 138, 20), (255, 150, 172), (255, 255, 255), (28, 26, 44)


@dataclass(frozen=True)
class Pose:
    """Properties that differ between pictures; lengths are in canvas pixels, angles in degrees."""

    tilt: float  # turns the whole cat, anticlockwise
    head_tilt: float  # turns only the head
    scale: float
    centre: tuple[int, int]
    look: tuple[float, float]  # pupil direction, each from -1 to 1
    turn: float  # faces the picture's left (-1) to right (1)
    arms: tuple[float, float]  # 90 hangs down, -90 points up; picture's left arm first
    feet: tuple[tuple[int, int], tuple[int, int]]
    tail: tuple[tuple[int, int], ...]  # four Bezier points
    smile: int  # mouth opening
    ground: int  # height of the shadow on the floor
    background: tuple[int, int, int]  # colour at the edges; the middle is lighter


SIT_FEET = ((395, 905), (629, 905))
STAND_FEET = ((430, 925), (594, 925))
JUMP_FEET = ((352, 880), (676, 915))
TAIL_UP = ((600, 860), (860, 930), (960, 780), (865, 640))
TAIL_LEFT = ((420, 860), (170, 930), (60, 780), (160, 640))
TAIL_OUT = ((600, 830), (760, 860), (850, 900), (950, 800))

POSES = (
    Pose(0, 0, 1.06, (512, 520), (0, 0), 0, (75, 75), SIT_FEET, TAIL_UP, 0, 950, (250, 206, 160)),
    Pose(6, 4, 0.96, (512, 530), (0, -0.8), 0, (-35, -35), STAND_FEET, TAIL_UP, 30, 900, (168, 148, 236)),
    Pose(-16, -4, 0.9, (500, 490), (0.9, 0.1), 0.8, (-10, -30), JUMP_FEET, TAIL_OUT, 30, 940, (250, 208, 70)),
    Pose(0, 6, 0.84, (530, 550), (-0.8, 0), -0.8, (-32, 70), STAND_FEET, TAIL_UP, 30, 855, (244, 158, 184)),
    Pose(3, -15, 0.98, (520, 550), (-0.5, 0.7), -0.5, (112, 112), SIT_FEET, TAIL_LEFT, 0, 940, (164, 176, 206)),
)


def ellipse(x: float, y: float, rx: float, ry: float) -> Image.Image:
    """Return the mask of an ellipse."""
    mask = Image.new("L", (CANVAS, CANVAS))
    ImageDraw.Draw(mask).ellipse((x - rx, y - ry, x + rx, y + ry), fill=255)
    return mask


def stroke(points: list[tuple[float, float]], width: float, closed: bool = False) -> Image.Image:
    """Return the mask of a round-ended line, or of a filled shape with rounded corners."""
    mask = Image.new("L", (CANVAS, CANVAS))
    draw = ImageDraw.Draw(mask)
    if closed:
        draw.polygon(points, fill=255)
        points = [*points, points[0]]
    draw.line(points, fill=255, width=round(width))
    for x, y in points:
        draw.ellipse((x - width / 2, y - width / 2, x + width / 2, y + width / 2), fill=255)
    return mask


def paint(layer: Image.Image, mask: Image.Image, colour: tuple[int, int, int], puff: int, depth: float) -> None:
    """Fill the mask so that it looks like a soft round body lit from the upper left."""
    x0, y0, x1, y1 = mask.getbbox()
    corner, edge = (x0 - 2 * puff, y0 - 2 * puff), (x1 + 2 * puff, y1 + 2 * puff)
    mask = mask.crop((*corner, *edge))
    height = np.asarray(mask.filter(ImageFilter.GaussianBlur(puff)), dtype=np.float64) / 255
    shift = puff // 2
    lit = np.roll(height, (-shift, -shift // 2), (0, 1)) - np.roll(height, (shift, shift // 2), (0, 1))
    rows, columns = np.mgrid[corner[1] : edge[1], corner[0] : edge[0]]
    distance = np.hypot(columns - (0.6 * x0 + 0.4 * x1), rows - (0.7 * y0 + 0.3 * y1))
    amount = depth * (lit * 0.75 + 0.38 - 0.94 * distance / max(x1 - x0, y1 - y0))[..., None]
    base = np.array(colour, dtype=np.float64)
    shade = base * np.array((0.25, 0.45, 0.6))  # shadows lean towards blue
    pixels = np.where(amount > 0, base + (255 - base) * amount, base + (base - shade) * amount)
    layer.paste(Image.fromarray(pixels.clip(0, 255).round().astype(np.uint8)), corner, mask)


def glint(layer: Image.Image, mask: Image.Image, opacity: float, blur: float) -> None:
    """Add a soft white highlight."""
    soft = mask.filter(ImageFilter.GaussianBlur(blur)).point(lambda value: round(value * opacity))
    layer.paste(WHITE, (0, 0), soft)


def draw_tail(points: tuple[tuple[int, int], ...]) -> Image.Image:
    """Draw the teal tail with its dark rings."""
    layer, steps = Image.new("RGBA", (CANVAS, CANVAS)), np.linspace(0, 1, 200)[:, None]
    weights = np.hstack([(1 - steps) ** 3, 3 * steps * (1 - steps) ** 2, 3 * steps**2 * (1 - steps), steps**3])
    path = [tuple(point) for point in weights @ np.array(points, dtype=np.float64)]
    paint(layer, stroke(path, 92), TEAL, 24, 0.8)
    for start in (84, 126, 168):
        (x0, y0), (x1, y1) = path[start], path[start + 18]
        across = 60 / math.hypot(x1 - x0, y1 - y0)
        dx, dy = (y0 - y1) * across, (x1 - x0) * across
        ring = [(x0 + dx, y0 + dy), (x1 + dx, y1 + dy), (x1 - dx, y1 - dy), (x0 - dx, y0 - dy)]
        paint(layer, ImageChops.darker(stroke(ring, 1, closed=True), stroke(path, 92)), DEEP_TEAL, 24, 0.6)
    return layer


def draw_body(pose: Pose) -> Image.Image:
    """Draw the tail, the body with its cream belly, the feet and the arms."""
    layer = draw_tail(pose.tail)
    for x, y in pose.feet:
        paint(layer, stroke([(512 + (x - 512) * 0.6, 830), (x, y - 10)], 120), TEAL, 30, 0.7)
    paint(layer, ellipse(512, 765, 190, 185), TEAL, 40, 0.8)
    paint(layer, ellipse(512 + 24 * pose.turn, 790, 122, 132), CREAM, 40, 0.5)
    for x, y in pose.feet:
        paint(layer, ellipse(x, y, 92, 62), TEAL, 26, 0.8)
    for side, angle in zip((-1, 1), pose.arms, strict=True):
        shoulder = (512 + side * 150, 700)
        reach, radians = 165 if angle > 0 else 215, math.radians(angle)
        paw = (shoulder[0] + side * reach * math.cos(radians), shoulder[1] + reach * math.sin(radians))
        paint(layer, stroke([shoulder, paw], 96), TEAL, 26, 0.8)
        paint(layer, ellipse(*paw, 62, 60), CREAM, 24, 0.5)
    return layer


def draw_ear(layer: Image.Image, side: int) -> None:
    """Draw one ear: plain teal on the picture's left, orange with a white tip on its right (the cat's own left)."""
    outline = [(512 + side * x, y) for x, y in ((290, 360), (268, 55), (50, 190))]
    inner = [(512 + side * x, y) for x, y in ((238, 330), (234, 140), (95, 220))]
    shape = stroke(outline, 56, closed=True)
    paint(layer, shape, TEAL if side < 0 else ORANGE, 30, 0.7)
    if side > 0:
        paint(layer, ImageChops.darker(shape, ellipse(512 + 285, 25, 125, 105)), WHITE, 30, 0.4)
    paint(layer, stroke(inner, 24, closed=True), PINK, 26, 0.4)


def draw_head(pose: Pose) -> Image.Image:
    """Draw the head with its ears, star and face."""
    layer = Image.new("RGBA", (CANVAS, CANVAS))
    for side in (-1, 1):
        draw_ear(layer, side)
    skull = ellipse(512, 420, 318, 250)
    paint(layer, skull, TEAL, 50, 0.85)
    middle = 512 + 36 * pose.turn
    glint(layer, ellipse(350, 255, 70, 30), 0.55, 16)
    corners = [(radius, k * math.pi / 5) for k, radius in enumerate([150, 78] * 5)]
    star = [(middle + radius * math.sin(angle), 272 - radius * math.cos(angle)) for radius, angle in corners]
    paint(layer, stroke(star, 22, closed=True), ORANGE, 24, 0.5)
    for side in (-1, 1):
        x, y = middle + side * 150 + pose.look[0] * 24, 470 + pose.look[1] * 24
        paint(layer, ellipse(x, y, 72, 88), DARK, 20, 0.2)
        glint(layer, ellipse(x - 22, y - 34, 28, 30), 1.0, 2)
        paint(layer, ImageChops.darker(skull, ellipse(middle + side * 240, 575, 54, 36)), PINK, 20, 0.3)
    paint(layer, ellipse(middle, 580, 104, 68), CREAM, 30, 0.4)
    if pose.smile:
        paint(layer, ellipse(middle, 612, 36, pose.smile), (176, 40, 70), 20, 0.3)
    mouth = [(middle + x, 575 + 22 * abs(math.sin(x * math.pi / 56))) for x in range(-56, 57, 4)]
    paint(layer, stroke(mouth, 12), DARK, 10, 0.2)
    paint(layer, stroke([(middle - 22, 540), (middle + 22, 540), (middle, 560)], 22, closed=True), PINK, 14, 0.5)
    return layer


def draw_picture(pose: Pose) -> Image.Image:
    """Draw one finished picture: background, floor shadow and cat."""
    rows, columns = np.mgrid[0:CANVAS, 0:CANVAS]
    fade = np.clip(np.hypot(columns - 512, rows - 440) / 760, 0, 1)[..., None]
    edge = np.array(pose.background)
    picture = Image.fromarray((edge + (255 - edge) * 0.6 * (1 - fade)).round().astype(np.uint8))
    shadow = ellipse(pose.centre[0], pose.ground, 290 * pose.scale, 46 * pose.scale)
    shadow = shadow.filter(ImageFilter.GaussianBlur(24)).point(lambda value: round(value * 0.4))
    picture.paste((60, 40, 80), (0, 0), shadow)
    body, head = (ImageOps.expand(part, MARGIN, (0, 0, 0, 0)) for part in (draw_body(pose), draw_head(pose)))
    neck = (512 + MARGIN, 600 + MARGIN)
    body.alpha_composite(head.rotate(pose.head_tilt, Image.Resampling.BICUBIC, center=neck))
    cat = body.rotate(pose.tilt, Image.Resampling.BICUBIC)
    side = round(cat.width * pose.scale)
    cat = cat.resize((side, side), Image.Resampling.LANCZOS)
    picture.paste(cat, (pose.centre[0] - side // 2, pose.centre[1] - side // 2), cat)
    return picture.resize((SIZE, SIZE), Image.Resampling.LANCZOS)


def main() -> None:
    """Write the five pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "subject")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for number, pose in enumerate(POSES, start=1):
        draw_picture(pose).save(args.output_dir / f"{number:02}.png", optimize=True)


if __name__ == "__main__":
    main()
