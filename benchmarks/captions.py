"""Compare where pretrain.py gets its caption latents: stored, encoded in the step, or in the thread that reads ahead.

Trains the UNet of a model on latents with caption latents and on latents without, whose captions are encoded before
each step by the process that trains, on its device (as pretrain.py does), or in the thread that reads ahead. All
captions differ. The ways alternate; the ratio is of the images/s to those of stored caption latents. Then calculates
what the captions add to a step of Stable Diffusion 2 on a GPU, and how many CPU cores would encode them instead. The
last line is JSON.

    python -m benchmarks.captions --repeats 5
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.measuring import MODEL, ROOT, write_data
from pipelines import loading
from pipelines.configs import read_config
from pipelines.families import find_family
from pretrain import training_step
from pretraining.batches import Batching, ahead, training_batches
from pretraining.captions import CaptionEncoder, to_numpy
from pretraining.columns import TEXT
from pretraining.latents import open_latents
from pretraining.online import make_load
from pretraining.streams import Order

WAYS = ("stored", "in the step", "in the thread")
SKIPPED = 5  # steps
# The configurations of Stable Diffusion 2, https://huggingface.co/stabilityai/stable-diffusion-2
UNET = {"cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20], "use_linear_projection": True}
TEXT_ENCODER = {"vocab_size": 49408, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 23,
                "num_attention_heads": 16, "max_position_embeddings": 77}  # fmt: skip
STORED = 77 * 1024 * 2  # bytes of a caption's latents


# ---------------------------------------------------------------------------------------------------------------------
# Measured


def encode(folder, model_dir, *flags):
    """Make latents of the raw data in a folder; return where they are."""
    output = f"{folder}/latents{len(flags)}"
    command = [sys.executable, "preprocess.py", "--input", f"{folder}/raw", "--output_dir", output, "--num_workers"]
    command += ["0", "--model_dir", model_dir, *flags]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return output


class Trainer:
    """Trains the UNet of a model for some steps on a CPU."""

    def __init__(self, args, folder):
        self.args, self.family = args, find_family(args.model_dir)
        self.encoder = CaptionEncoder(args.model_dir, args.batch_size, torch.float32, "cpu")
        self.unet = loading.load_models(args.model_dir, ("unet",), torch.float32)["unet"].train()
        self.unet.to(memory_format=torch.channels_last)
        self.adamw = torch.optim.AdamW(self.unet.parameters(), lr=1e-9, fused=True)
        self.objective = self.family.objective(args.model_dir)
        self.vae_config = read_config(args.model_dir, "vae")
        side = self.family.sizes(args.model_dir).resolution
        places = encode(folder, args.model_dir), encode(folder, args.model_dir, "--no-caption_latents")
        self.data = [open_latents(place, args.model_dir, side) for place in places]

    def batches(self, way):
        """Yield the batches of a way, with their fields of captions."""
        data = self.data[way != "stored"]
        order = Order(data.chunk_rows, 0, 1, min(16, len(data.chunk_rows)), 0)
        batching = Batching(self.args.batch_size, 1, 0.1, 0, self.objective)
        no_caption = {TEXT: None} if data.has_texts else to_numpy(self.encoder.no_caption)
        load, steps = make_load(data, {"num_workers": 0}), self.args.steps
        batches = training_batches(order, load, 0, steps, batching, no_caption, True)
        if way == "in the thread":
            batches = map(self.encoder.fill, batches)
        batches = ahead(batches, 4)
        return map(self.encoder.fill, batches) if way == "in the step" else batches

    def rate(self, way):
        """Train; return the images/s after the first steps."""
        options = {"model": self.unet, "family": self.family, "objective": self.objective}
        for step, batch in enumerate(self.batches(way)):
            if step == SKIPPED:
                start = time.monotonic()
            (loss,) = training_step(batch, vae_config=self.vae_config, **options)
            loss.backward()
            self.adamw.step()
            self.adamw.zero_grad(set_to_none=True)
        return (self.args.steps - SKIPPED) * self.args.batch_size / (time.monotonic() - start)


def measure(args):
    """Return {way: [images/s, ...]}, measured alternately."""
    loading.set_up_torch("cpu")
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder) / "raw", args.rows, 64)
        trainer, rates = Trainer(args, folder), {way: [] for way in WAYS}
        for _ in range(args.repeats):
            for way in WAYS:
                rates[way].append(trainer.rate(way))
            print("  ".join(f"{way} {each[-1]:6.1f} images/s" for way, each in rates.items()), flush=True)
    return rates


# ---------------------------------------------------------------------------------------------------------------------
# Calculated


def count_flops(side):
    """Return (FLOPs of a caption, FLOPs of an image of `side` pixels forward and backward) of Stable Diffusion 2."""
    from diffusers import UNet2DConditionModel
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.device("meta"):
        encoder = CLIPTextModel(CLIPTextConfig(**TEXT_ENCODER))
        unet = UNet2DConditionModel(sample_size=side // 8, **UNET)
        with FlopCounterMode(display=False) as caption, torch.no_grad():
            said = encoder(torch.zeros(1, 77, dtype=torch.long))[0]
        with FlopCounterMode(display=False) as image:
            unet(torch.zeros(1, 4, side // 8, side // 8), torch.zeros(1), said).sample.sum().backward()
    return caption.get_total_flops(), image.get_total_flops()


def calculate(args):
    """Print and return what the captions cost a GPU, or CPU cores in its place, for each resolution."""
    rows = {}
    for side in (256, 512):
        caption, image = count_flops(side)
        captions = 1 - args.caption_dropout  # of an image; all differ
        images = args.tflops * 1e12 * args.utilisation / (image + captions * caption)
        rows[side] = {"tflop_of_image": image / 1e12, "tflop_of_caption": caption / 1e12}
        rows[side] |= {"share_of_step": captions * caption / (image + captions * caption)}
        rows[side] |= {"images_per_second": images}
        rows[side] |= {"cores_instead": images * captions * caption / args.core_gflops / 1e9}
        rows[side] |= {"megabytes_per_second_stored": images * STORED / 1e6}
        print(f"{side} pixels: " + ", ".join(f"{name} {value:.3g}" for name, value in rows[side].items()))
    names = ("tflops", "utilisation", "core_gflops", "caption_dropout")
    return {"assumed": {name: getattr(args, name) for name in names}, **rows}


def main(args):
    """Measure, calculate, then print one JSON line."""
    rates = measure(args) if args.repeats else {}
    result = {"medians": {way: statistics.median(each) for way, each in rates.items()}, "ratios": {}}
    for way in WAYS[1:] if rates else ():
        ratios = sorted(other / stored for other, stored in zip(rates[way], rates["stored"], strict=True))
        result["ratios"][way] = [statistics.median(ratios), ratios[0], ratios[-1]]
    print(json.dumps(result | {"stable_diffusion_2": calculate(args)}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir", default=MODEL, help="model whose UNet is trained")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each way; 0 only calculates")
    parser.add_argument("--steps", type=int, default=35, help="steps of a run; the first five are not measured")
    parser.add_argument("--batch_size", type=int, default=16, help="rows of a step")
    parser.add_argument("--rows", type=int, default=1000, help="rows of the data set")
    parser.add_argument("--tflops", type=float, default=312, help="of the GPU that is calculated: bf16 of an A100")
    parser.add_argument("--utilisation", type=float, default=0.4, help="share of them that is reached")
    parser.add_argument("--core_gflops", type=float, default=50, help="GFLOP/s that a CPU core reaches in float32")
    parser.add_argument("--caption_dropout", type=float, default=0.1, help="share of the rows without a caption")
    main(parser.parse_args())
