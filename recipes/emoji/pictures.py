"""The emoji of the recipe: downloads them from package registries at pinned versions, checks and captions them.

python -m recipes.emoji.pictures --cache_dir data/emoji      # downloads 180 MB once, prints what it finds
"""

import argparse
import hashlib
import io
import json
import re
import sys
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

NPM, PYPI = "https://registry.npmjs.org", "https://files.pythonhosted.org/packages"
ARCHIVES = {  # name: (address, sha512)
    "fluent": (
        f"{NPM}/@lobehub/fluent-emoji-3d/-/fluent-emoji-3d-1.1.0.tgz",  # MIT
        "5a5ab69554ad4e7afc043a48274a449d328ee0bb83c71a931214ef46d0f50cb4"
        "45d267bba207914232a87a10c75ee549d9069e720979c1106feb4954006de1ee",
    ),
    "noto": (
        f"{NPM}/emoji-datasource-google/-/emoji-datasource-google-16.0.0.tgz",  # Noto Emoji: Apache-2.0
        "6517b17f3b3b315a0b9e6cd998db0ee132a19c0269e43fbe566e8fa54a47fe31"
        "104257a6a7797cf028d9f83a19d9f68cf51e10c5990e3c90a84fc0e53e17d0dc",
    ),
    "twemoji": (
        f"{NPM}/emoji-datasource-twitter/-/emoji-datasource-twitter-16.0.0.tgz",  # graphics: CC-BY 4.0
        "ec5fae0ae1c7fbb427adcd793f9b676ef2a483d13ab65ce2e0c9d3dae5b54653"
        "78a4b613cdae9c3ff76cb487d20ccb698c52d6b997b05a0f2305bb8bd9ec842d",
    ),
    "labels": (
        f"{NPM}/emojibase-data/-/emojibase-data-17.0.0.tgz",  # MIT
        "62f81be405a81d588757f82ad6aaf96406ab7018a9f81dbbfd92d1b142646e00"
        "0468b959fdfa1ff60f3cd8b4e9984a728413440b49b6484988b658c7b13ca08c",
    ),
    "photos": (
        f"{PYPI}/a1/b4/2528bb43c67d48053a7a649a9666432dc307d66ba02e3a6d5c40f46655df/scikit_image-0.26.0.tar.gz",
        "30df4fa366d6f9b936f62247734ea26992e6d9af60390cf4bb9d87665dcfb395"
        "d27b67a52bf1a89d01ed4fa8dd56357a199201feacd5181c7e7f363a2c898cc5",
    ),
}
PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png", "hubble_deep_field.jpg",
          "grass.png", "gravel.png", "brick.png")  # fmt: skip  # public domain or CC0

# What the UNet learns to draw, in one style. It excludes the nine cat-face smileys, which remain unknown subjects.
DRAWN = """
    dog face, dog, poodle, cat face, cat, black cat, lion, tiger face, tiger, leopard, fox, wolf, raccoon, horse face,
    horse, unicorn, zebra, deer, moose, cow face, cow, pig face, pig, camel, giraffe, elephant, rhinoceros, mouse face,
    hamster, rabbit face, rabbit, chipmunk, hedgehog, bear, polar bear, koala, panda, sloth, otter, kangaroo,
    monkey face, monkey, gorilla, rooster, chicken, hatching chick, baby chick, bird, penguin, eagle, duck, swan, owl,
    flamingo, peacock, parrot, frog, crocodile, turtle, snake, dragon face, sauropod, T-Rex, whale, dolphin, fish,
    tropical fish, blowfish, shark, octopus, crab, lobster, snail, butterfly, honeybee, lady beetle, spider,
    cherry blossom, hibiscus, rose, sunflower, tulip, evergreen tree, deciduous tree, palm tree, cactus, potted plant,
    four leaf clover, maple leaf, mushroom, grapes, watermelon, tangerine, lemon, banana, pineapple, red apple,
    green apple, pear, peach, cherries, strawberry, tomato, avocado, eggplant, carrot, ear of corn, hot pepper,
    broccoli, bread, croissant, pretzel, pancakes, cheese wedge, hamburger, french fries, pizza, hot dog, sandwich,
    taco, popcorn, soft ice cream, doughnut, cookie, birthday cake, cupcake, lollipop, hot beverage, teapot,
    automobile, racing car, taxi, police car, fire engine, ambulance, bus, pickup truck, tractor, bicycle, motorcycle,
    motor scooter, locomotive, ship, sailboat, canoe, helicopter, airplane, rocket, flying saucer, skateboard, guitar,
    violin, trumpet, saxophone, drum, robot, ghost, alien, clown face
"""
DRAWN_LABELS = {" ".join(label.split()) for label in DRAWN.split(",")}
NAMES = {  # common names
    "automobile": "car",
    "deciduous tree": "tree",
    "evergreen tree": "pine tree",
    "sport utility vehicle": "suv",
    "T-Rex": "dinosaur",
    "sauropod": "long-necked dinosaur",
    "locomotive": "steam train",
    "high-speed train": "train",
    "hot beverage": "cup of coffee",
    "beverage box": "juice box",
    "baby chick": "chick",
    "musical keyboard": "piano",
}
ALSO = {  # further common names
    "airplane": "plane",
    "bicycle": "bike",
    "car": "red car",
    "chick": "baby bird",
    "dinosaur": "t-rex",
    "doughnut": "donut",
    "flying saucer": "ufo",
    "french fries": "fries",
    "guitar": "electric guitar",
    "hamburger": "burger",
    "honeybee": "bee",
    "lady beetle": "ladybug",
    "pizza": "slice of pizza",
    "rabbit": "bunny",
    "rose": "red rose",
    "ship": "boat",
    "soft ice cream": "ice cream cone",
    "spider": "black spider",
    "tangerine": "orange",
    "tree": "green tree",
}
NO_ARTICLE = r"(?<![su])(?<!nocero)(?<!tenni)s$|^(wo)?men$|^people$|\b(bacon|bread|broccoli|garlic|ice|popcorn|salt)$"
UNUSED_GROUPS = {2, 8, 9}  # components, symbols, flags
STYLES = {"fluent": "3d", "noto": "drawn", "twemoji": "flat"}
BACKGROUNDS = {  # RGB
    "white": (255, 255, 255),
    "red": (226, 84, 80),
    "orange": (250, 166, 74),
    "yellow": (252, 220, 98),
    "green": (116, 190, 112),
    "blue": (94, 156, 226),
    "purple": (156, 116, 206),
    "pink": (248, 172, 200),
    "gray": (158, 160, 164),
    "black": (34, 34, 38),
}


@dataclass(frozen=True)
class Picture:
    """An emoji in one style: RGBA pixels [H, W, 4] uint8, its label in the data set, and its other names."""

    style: str
    hexcode: str
    label: str
    tags: tuple
    rgba: np.ndarray

    @property
    def name(self):
        return NAMES.get(self.label, self.label)


def fetch(name, cache_dir):
    """Return the path of an archive, downloaded if it is missing; its sha512 must match the pinned one."""
    address, sha512 = ARCHIVES[name]
    path = Path(cache_dir) / address.rpartition("/")[2]
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(address, timeout=60) as response:
            data = response.read()
        if hashlib.sha512(data).hexdigest() != sha512:
            sys.exit(f"{address}: its sha512 is not the pinned one")
        beside = path.with_suffix(".tmp")
        beside.write_bytes(data)
        beside.rename(path)
    return path


def read_members(archive, wanted):
    """Yield (path, bytes) of the files in a .tgz for which `wanted(path)` is true."""
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and wanted(member.name):
                yield member.name, tar.extractfile(member).read()


def read_labels(cache_dir):
    """Return {hexcode: (label, tags)} of the emoji that are neither flags nor symbols."""
    wanted = "package/en/data.json"
    files = dict(read_members(fetch("labels", cache_dir), lambda path: path == wanted))
    return {
        each["hexcode"].lower(): (each["label"], tuple(each.get("tags", ())))
        for each in json.loads(files[wanted])
        if each.get("group") is not None and each["group"] not in UNUSED_GROUPS
    }


def load_pictures(cache_dir, styles=tuple(STYLES)):
    """Return the Pictures of some styles, 64 to 128 pixels a side, sorted by code point."""
    labels = read_labels(cache_dir)
    codes = {hexcode.replace("-fe0f", ""): hexcode for hexcode in labels}
    pictures = []
    for style in styles:
        folder = "package/assets/" if style == "fluent" else "/img/"
        size = 128 if style == "fluent" else 64
        for path, data in sorted(read_members(fetch(style, cache_dir), lambda path: folder in path)):  # noqa: B023
            stem = Path(path).stem.lower()
            hexcode = codes.get(stem.replace("-fe0f", ""))
            if hexcode is None or (style != "fluent" and "/64/" not in path):
                continue
            image = Image.open(io.BytesIO(data)).convert("RGBA").resize((size, size), Image.Resampling.LANCZOS)
            pictures.append(Picture(style, hexcode, *labels[hexcode], np.asarray(image)))
    return pictures


def is_drawn(picture):
    """Return whether a picture is in the training data of the UNet."""
    return picture.style == "fluent" and picture.label in DRAWN_LABELS


def compose(picture, rng, background, size=64, centred=False):
    """Return a picture on a plain colour as a Pillow image: 0.82 to 1 of its width, moved a little, maybe mirrored.

    centred: always seven eighths of the width, in the middle, as it is: a small UNet that has to choose between two
    drawings for one prompt mixes them.
    """
    side = size * 7 // 8 if centred else round(size * rng.uniform(0.82, 1.0))
    image = Image.fromarray(picture.rgba).resize((side, side), Image.Resampling.LANCZOS)
    if not centred and rng.random() < 0.5:
        image = ImageOps.mirror(image)
    canvas = Image.new("RGB", (size, size), background)
    left, top = ((size - side) // 2 if centred else int(rng.integers(size - side + 1)) for _ in "xy")
    canvas.paste(image, (left, top), image)
    return canvas


def with_article(words):
    """Return words with "a" or "an", by their sound; plurals and uncountable nouns are unchanged."""
    head = re.split(r" (?:with|of|in|on|over|and|holding|lifting|showing|blowing) ", words)[0]
    if re.search(NO_ARTICLE, head):
        return words
    vowel = re.match(r"(?!uni(?!m|n)|ufo|uku|eu|ewe|one\b)[aeiou]|hour|x-ray|suv\b", words, re.IGNORECASE)
    return f"{'an' if vowel else 'a'} {words}"


def caption(style=None, name=None, background=None):
    """Return a caption such as "a 3d emoji of a cat face on a blue background", without the parts that are None.

    style: a value of STYLES; name: a name or another word for the picture; background: a key of BACKGROUNDS.
    """
    emoji = f"a {style} emoji" if style else "an emoji"
    thing = name and with_article(name)
    subject = f"{emoji} of {thing}" if style and thing else thing or emoji
    return f"{subject} on {with_article(f'{background} background')}" if background else subject


def load_photos(cache_dir):
    """Return a few free photographs, [H, W, 3] uint8 each, so that the VAE does not learn from drawings only."""
    files = read_members(
        fetch("photos", cache_dir), lambda path: Path(path).name in PHOTOS and "/skimage/data/" in path
    )
    return [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for _, data in sorted(files)]


def main(args):
    """Download everything and print a summary."""
    pictures = load_pictures(args.cache_dir)
    for style in STYLES:
        of_style = [picture for picture in pictures if picture.style == style]
        print(f"{style}: {len(of_style)} pictures, {sum(map(is_drawn, of_style))} of them to draw")
    print(f"photos: {len(load_photos(args.cache_dir))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache_dir", default="data/emoji", help="folder to download the archives to")
    main(parser.parse_args())
