"""Photos and rows: the only file that knows how images are decoded, cropped, paired, cached and laid out in a batch."""

import functools
import io
import math
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from checkpoint import publish, read_manifest, recover, staging
from cli import BadInput, CheckFailed, Progress, check_text, say
from cluster import map_on_actors
from utils import CLASS_NOISE, CROP, INSTANCE_NOISE, ORDER, draw_noise, row_rng

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
ENCODE_BATCH = 4  # images that the VAE takes at a time
SMALLEST_SIDE = 16  # pixels: a smaller picture is an icon or a mistake
LARGEST_PICTURE = 2 * Image.MAX_IMAGE_PIXELS  # pixels: past this Pillow takes it for a decompression bomb
warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # 90 to 179 million pixels: a good camera


# ---------------------------------------------------------------------------------------------------------------------
# A person's folder of photos


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


def _words(prompt):
    return [word.strip(".,;:!?\"'()") for word in prompt.lower().split()]


def check_prompts(instance_prompt, class_prompt=None, unique_token=None):
    """Raise BadInput unless the identifier is in the instance prompt and not in the class prompt.

    unique_token: by default the words that the instance prompt has and the class prompt lacks.
    """
    for flag, text in (("--instance_prompt", instance_prompt), ("--class_prompt", class_prompt or "")):
        check_text(flag, text)
    instance, other, token = (_words(text or "") for text in (instance_prompt, class_prompt, unique_token))
    token = token or [word for word in instance if word not in other]
    if not token:
        raise BadInput("--instance_prompt has no word that --class_prompt lacks: add an identifier, say unqtkn")
    for word in token:
        if word not in instance:
            raise BadInput(f"--instance_prompt {instance_prompt!r} lacks the identifier {word!r}: add it")
        if word in other:
            raise BadInput(f"--class_prompt {class_prompt!r} has the identifier {word!r}: leave it out")


# ---------------------------------------------------------------------------------------------------------------------
# Pairs


@dataclass(frozen=True)
class Pairs:
    """The endless sequence of pairs of an instance and a class image that training walks through.

    An epoch is max(num_instance, num_class) pairs, in an order that depends on (seed, epoch) alone: pair j holds
    instance image j mod num_instance and class image j mod num_class. Each repeat of an instance image takes its
    next variant: another crop and flip, of as many as it has repeats in an epoch, at most `max_variants`.
    """

    num_instance: int
    num_class: int
    max_variants: int
    seed: int

    @property
    def pairs_per_epoch(self):
        return max(self.num_instance, self.num_class)

    @property
    def repeats(self):
        """How often an epoch shows each instance image."""
        return math.ceil(self.pairs_per_epoch / self.num_instance)

    @property
    def num_variants(self):
        return min(self.max_variants, self.repeats) if self.repeats > 1 else self.max_variants

    @property
    def num_rows(self):
        """Rows that a run of any length may use: the variants of each instance image, then the class images."""
        return self.num_instance * self.num_variants + self.num_class

    def rows(self, position):
        """Return the rows of the pair at `position` of the sequence: (instance, class or None)."""
        epoch, place = divmod(position, self.pairs_per_epoch)
        return self._rows_of(epoch, int(self._order(epoch)[place]))

    def rows_used(self, num_pairs):
        """Return the rows [R] that the first `num_pairs` pairs of the sequence use, in order."""
        full_epochs, rest = divmod(num_pairs, self.pairs_per_epoch)
        parts = [(epoch, np.arange(self.pairs_per_epoch)) for epoch in range(min(full_epochs, self.num_variants))]
        parts.append((full_epochs, self._order(full_epochs)[:rest]))  # whole epochs repeat after as many as variants
        used = np.zeros(self.num_rows, dtype=bool)
        for part in parts:
            for rows in self._rows_of(*part)[: 1 + bool(self.num_class)]:
                used[rows] = True
        return np.flatnonzero(used)

    def _rows_of(self, epoch, j):
        variant = (epoch * self.repeats + j // self.num_instance) % self.num_variants
        instance = (j % self.num_instance) * self.num_variants + variant
        if not self.num_class:
            return instance, None
        return instance, self.num_instance * self.num_variants + j % self.num_class

    def _order(self, epoch):
        return row_rng(self.seed, ORDER, epoch, 0).permutation(self.pairs_per_epoch)


# ---------------------------------------------------------------------------------------------------------------------
# The cache of VAE posteriors


class PosteriorEncoder:
    """Decodes, crops and encodes some rows: the work of one actor while the cache is filled."""

    def __init__(self, model_dir, resolution, random_crop, random_flip, seed, mixed_precision="no", num_threads=None):
        import torch

        from utils import load_models, set_up_torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        set_up_torch(self.device, num_threads, mixed_precision)
        # float32: computed once, and SDXL's VAE overflows in float16.
        self.vae = load_models(model_dir, ("vae",), torch.float32)["vae"].to(self.device)
        self.resolution, self.random_crop, self.random_flip, self.seed = resolution, random_crop, random_flip, seed

    def __call__(self, item):
        """Return {"crops": [R], "mean": [R, c, h, w], "std"}, float16, of {"crops": [(number, path, image, variant)]}.

        A class image has no variant (None): its centre is taken. The VAE always takes ENCODE_BATCH images: one that is
        alone comes out a little differently, and a cache that is completed later would be another.
        """
        import torch

        from utils import encode_posterior

        crops = item["crops"]
        pixel_values = [self._pixel_values(*crop[1:]) for crop in crops]
        pixel_values = np.stack(pixel_values + pixel_values[:1] * (ENCODE_BATCH - len(crops)))
        with torch.inference_mode():
            posterior = encode_posterior(self.vae, torch.from_numpy(pixel_values).to(self.device))
        mean, std = (each[: len(crops)].cpu().numpy().astype(np.float16) for each in posterior)
        return {"crops": np.array([crop[0] for crop in crops]), "mean": mean, "std": std}

    def _pixel_values(self, path, image, variant):
        rng = None if variant is None else row_rng(self.seed, CROP, variant, image)
        return to_pixel_values(read_image(path), self.resolution, rng, self.random_crop, self.random_flip)


def cache_posteriors(folder, pairs, num_pairs, instance_images, class_images, encoder_options, made_from=None, **pool):
    """Encode what the first `num_pairs` pairs use, with Ray Data, into `folder`; return at once where all is there.

    What a shorter run has cached is kept. encoder_options: of PosteriorEncoder; made_from: plain values that decide
    the latents: a cache of others is made anew; pool: num_workers and the like, of map_on_actors.
    """
    recover(folder)
    images = [(str(path), i, v) for i, path in enumerate(instance_images) for v in range(pairs.num_variants)]
    images += [(str(path), i, None) for i, path in enumerate(class_images)]
    earlier_place = read_places(folder, pairs, made_from)
    place, crops = plan_cache(pairs.rows_used(num_pairs), earlier_place, images, encoder_options)
    if not crops:
        return
    items = [{"crops": crops[start : start + ENCODE_BATCH]} for start in range(0, len(crops), ENCODE_BATCH)]
    arrays = {}
    with Progress("encode", len(crops), "images") as progress:
        for result in map_on_actors(PosteriorEncoder, encoder_options, items, **pool):
            for name in ("mean", "std"):
                shape = (len(crops), *result[name].shape[1:])
                arrays.setdefault(name, np.empty(shape, np.float16))[result["crops"]] = result[name]
            progress.update(len(result["crops"]))
    broken = [path for i, path, *_ in crops if not all(np.isfinite(array[i]).all() for array in arrays.values())]
    if broken:
        raise CheckFailed(f"the VAE gives no finite latents for {broken[0]}: check the model and the image")
    from safetensors.numpy import load_file, save_file

    if earlier_place.max() >= 0:
        earlier = load_file(Path(folder) / "posteriors.safetensors")
        arrays = {name: np.concatenate([earlier[name], arrays[name]]) for name in arrays}
    with staging(folder) as beside:
        save_file({**arrays, "place": place}, beside / "posteriors.safetensors")
        publish(beside, folder, made_from=made_from, images=[[path, variant] for path, _, variant in images])


def read_places(folder, pairs, made_from):
    """Return where in the cache each row is, [num_rows], -1 where it is not; no latents are read.

    A cache that is not whole, or made from something else, has no rows. It holds this as `place`, beside `mean` and
    `std`, [N, c, h, w] float16.
    """
    from safetensors import safe_open

    nowhere = np.full(pairs.num_rows, -1)
    manifest = read_manifest(folder, deep=True)
    if not manifest or manifest.get("made_from") != made_from:
        return nowhere
    with safe_open(Path(folder) / "posteriors.safetensors", framework="np") as file:
        names = file.keys()
        place = file.get_tensor("place") if "place" in names else ()  # an older version's has none
    return place if len(place) == pairs.num_rows else nowhere


def plan_cache(rows, place, images, options):
    """Return (place with these rows, the crops to encode for them [(number, path, image, variant)]).

    Crops that come out alike, say of a square photo, are encoded once. place: of read_places; images: (path, image,
    variant) of all rows; options: of PosteriorEncoder.
    """
    flags = {name: options[name] for name in ("random_crop", "random_flip")}
    size_of = functools.cache(read_size)

    def crop_of(row):
        path, image, variant = images[row]
        if variant is None:
            return path, None
        return path, draw_crop(size_of(path), row_rng(options["seed"], CROP, variant, image), **flags)

    missing = rows[place[rows] < 0]
    if not len(missing):
        return place, []
    place = place.copy()
    known = {crop_of(row): place[row] for row in np.flatnonzero(place >= 0)}
    first, crops = place.max() + 1, []
    for row in missing:
        crop = crop_of(row)
        if crop not in known:
            known[crop] = first + len(crops)
            crops.append((len(crops), *images[row]))
        place[row] = known[crop]
    return place, crops


# ---------------------------------------------------------------------------------------------------------------------
# Batches


class Batches:
    """Makes training batches from the mapped cache: batch (step, pairs) is the same on whatever worker asks for it."""

    def __init__(self, cache_dir, pairs, instance_prompt, class_prompt, seed, num_train_timesteps):
        from safetensors.torch import load_file

        self.cache = load_file(Path(cache_dir) / "posteriors.safetensors")
        self.place = self.cache.pop("place")
        self.pairs, self.seed, self.num_train_timesteps = pairs, seed, num_train_timesteps
        self.prompts = {INSTANCE_NOISE: instance_prompt, CLASS_NOISE: class_prompt}

    def __call__(self, step, first_pair, num_pairs, pairs_per_step):
        """Return pairs first_pair ... of the `pairs_per_step` of optimizer step `step`, as `collate` lays them out."""
        numbers = range(first_pair, first_pair + num_pairs)
        picked = {number: self.pairs.rows(step * pairs_per_step + number) for number in numbers}
        rows = [self._row(step, number, INSTANCE_NOISE, instance) for number, (instance, _) in picked.items()]
        if self.pairs.num_class:
            rows += [self._row(step, number, CLASS_NOISE, row) for number, (_, row) in picked.items()]
        return collate(rows)

    def _row(self, step, number, stream, row):
        import torch

        place = int(self.place[row])
        mean = self.cache["mean"][place].float()
        noise = draw_noise(self.seed, stream, step, number, mean.shape, self.num_train_timesteps)
        return {
            "mean": mean,
            "std": self.cache["std"][place].float(),
            "noise": torch.from_numpy(noise[0]),
            "posterior_noise": torch.from_numpy(noise[1]),
            "timesteps": torch.tensor(noise[2]),
            "prompt": self.prompts[stream],
        }


def collate(rows):
    """Stack rows into a batch: B instance rows, then (with prior preservation) B class rows, in all fields alike.

    mean, std, noise, posterior_noise: [2B, c, h, w] float32; timesteps: [2B] int64;
    prompt: prompt_ids [2B, L] int64, or prompt_embeds [2B, L, D] where the text encoder is frozen.
    """
    import torch

    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
