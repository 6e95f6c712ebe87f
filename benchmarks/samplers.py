"""Compare samplers and numbers of steps with a reference of 250 steps, on pictures of one prompt with the same seeds.

Prints for each sampler the seconds per picture, the root mean square difference (of 255) to the reference picture with
the same seed, and the distance between the sets of pictures: the unbiased squared MMD of CLIP embeddings with a
polynomial kernel (KID, arXiv 1801.01401). The row `another prompt` shows a large distance.

    python -m benchmarks.samplers --output data/samplers.png
"""

import argparse
import io
import json
import time

import numpy as np
import torch
from PIL import Image

from evaluation.encoders import Encoder
from evaluation.measures import normalized
from pipelines.loading import draw_images, load_pipeline, set_up_torch
from utils import image_seed

REFERENCE = ("model", 250)
WAYS = (("model", 50), ("model", 25), ("model", 12), ("dpm++", 25), ("dpm++", 20), ("dpm++", 12))
SHOWN = 8  # pictures per sampler


def draw(pipeline, args, prompt, sampler, steps):
    """Return (pictures [N, H, W, 3], seconds per picture)."""
    seeds, images = [image_seed(0, index) for index in range(args.num_images)], []
    start = time.perf_counter()
    for first in range(0, len(seeds), args.batch_size):
        batch = seeds[first : first + args.batch_size]
        options = {"sampler": sampler, "num_inference_steps": steps, "guidance_scale": args.guidance_scale}
        images += draw_images(pipeline, [prompt] * len(batch), batch, **options)[0]
    return np.stack([np.asarray(image) for image in images]), (time.perf_counter() - start) / len(seeds)


def embed(encoder, pictures):
    """Return the embeddings [N, D], scaled to unit length, of pictures [N, H, W, 3]."""
    files = []
    for picture in pictures:
        Image.fromarray(picture).save(file := io.BytesIO(), "PNG")
        files.append(file.getvalue())
    return normalized(encoder({"name": "", "start": 0, "paths": files})["embeds"].astype(float))


def squared_mmd(one, other):
    """Return the unbiased squared maximum mean discrepancy of two sets [N, D]: arXiv 1801.01401, eq. 4."""
    n = len(one)

    def kernel(a, b):
        return (a @ b.T + 1) ** 3

    within = [(kernel(a, a).sum() - np.trace(kernel(a, a))) / (n * (n - 1)) for a in (one, other)]
    return float(sum(within) - 2 * kernel(one, other).mean())


def main(args):
    """Draw, measure, print a table, then one JSON line."""
    set_up_torch("cpu")
    pipeline = load_pipeline(args.model_dir, torch.float32)
    encoder = Encoder(args.clip_model)
    reference, seconds = draw(pipeline, args, args.prompt, *REFERENCE)
    target, rows, strips = embed(encoder, reference), [], [reference[:SHOWN]]
    print(f"{REFERENCE[0]:>6} {REFERENCE[1]:4d} steps  {seconds:7.3f} s a picture", flush=True)
    for sampler, steps in WAYS:
        pictures, seconds = draw(pipeline, args, args.prompt, sampler, steps)
        difference = float(np.sqrt(np.square(pictures.astype(float) - reference).mean()))
        distance = squared_mmd(embed(encoder, pictures), target)
        rows.append({"sampler": sampler, "steps": steps, "seconds": seconds, "rms": difference, "mmd2": distance})
        strips.append(pictures[:SHOWN])
        text = f"{sampler:>6} {steps:4d} steps  {seconds:7.3f} s a picture"
        print(f"{text}  difference {difference:5.1f}  set {distance:8.5f}", flush=True)
    others, _ = draw(pipeline, args, args.other_prompt, "model", 25)
    other = squared_mmd(embed(encoder, others), target)
    print(f"another prompt: set {other:8.5f}")
    sheet = np.concatenate([np.concatenate(list(strip), axis=1) for strip in strips])
    Image.fromarray(sheet).save(args.output)
    print(json.dumps({"rows": rows, "other_prompts": other, "num_images": args.num_images}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir", default="models/emoji-64", help="model to draw with")
    parser.add_argument("--clip_model", default="models/emoji-clip", help="folder of the CLIP model to compare with")
    parser.add_argument("--prompt", default="a 3d emoji of a cat", help="prompt to draw")
    parser.add_argument("--other_prompt", default="a 3d emoji of a dog", help="prompt of the row `another prompt`")
    parser.add_argument("--num_images", type=int, default=40, help="pictures to draw with each sampler")
    parser.add_argument("--batch_size", type=int, default=10, help="pictures to draw at a time")
    parser.add_argument("--guidance_scale", type=float, default=3.0, help="scale of classifier-free guidance")
    parser.add_argument("--output", required=True, help="image file: a row per sampler, the reference first")
    main(parser.parse_args())
