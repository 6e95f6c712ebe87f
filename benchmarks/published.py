"""A reimplementation of Ray's published DreamBooth example from its description, as the baseline of the benchmarks.

Training: the VAE encodes at every step, the text encoder and the UNet are wrapped in separate DDP modules, Ray Data
provides the pairs, and every step is reported to Ray. Drawing: each prompt is one item of an actor pool, drawn one
picture at a time. Computes in float32, since bfloat16 is slow on CPUs.

    python -m benchmarks.published train --model_dir M --instance_images_dir I --class_images_dir C --output_dir O
    python -m benchmarks.published images --model_dir M --prompts P --num_samples_per_prompt 20 --output_dir O
"""

import argparse
import itertools
import json
from pathlib import Path

import numpy as np

from common.cluster import start_ray
from common.images import find_images, read_image, to_pixel_values
from pipelines.configs import model_resolution
from pipelines.tokens import tokenize


def parse_args():
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("train", "images"))
    parser.add_argument("--model_dir", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--num_workers", type=int, default=1)
    parser.add_argument("--cpus_per_worker", type=float, default=1.0)
    parser.add_argument("--instance_images_dir")
    parser.add_argument("--class_images_dir")
    parser.add_argument("--instance_prompt", default="a 3d emoji of a unqtkn cat")
    parser.add_argument("--class_prompt", default="a 3d emoji of a cat")
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--max_train_steps", type=int, default=20)
    parser.add_argument("--log_every", type=int, default=5, help="steps between lines of the log")
    parser.add_argument("--report_every", type=int, default=1, help="steps between reports to Ray; 0: no reports")
    parser.add_argument("--prompts", action="append", default=[])
    parser.add_argument("--num_samples_per_prompt", type=int, default=4)
    parser.add_argument("--num_inference_steps", type=int, default=50)
    parser.add_argument("--guidance_scale", type=float, default=7.5)
    return parser.parse_args()


def load_pairs(args):
    """Return the rows of the training set, with the photos repeated to match the number of class images."""
    folders = [find_images(folder, "").files.values() for folder in (args.instance_images_dir, args.class_images_dir)]
    side = model_resolution(args.model_dir)
    instances, classes = ([to_pixel_values(read_image(path), side) for path in folder] for folder in folders)
    ids = [np.array(row) for row in tokenize(args.model_dir, [args.instance_prompt, args.class_prompt])]
    pairs = zip(itertools.cycle(instances), classes, strict=False)
    names = ("instance_image", "class_image", "instance_prompt_ids", "class_prompt_ids")
    return [dict(zip(names, (*pair, *ids), strict=True)) for pair in pairs]


def train_function(config):
    """Train on one worker."""
    import ray.train
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from ray.train.torch import prepare_model
    from transformers import CLIPTextModel

    torch.set_num_threads(max(1, int(config["cpus_per_worker"])))
    model_dir = config["model_dir"]
    vae = AutoencoderKL.from_pretrained(model_dir, subfolder="vae", torch_dtype=torch.float32).requires_grad_(False)
    text_encoder = CLIPTextModel.from_pretrained(model_dir, subfolder="text_encoder", dtype=torch.float32)
    unet = UNet2DConditionModel.from_pretrained(model_dir, subfolder="unet", torch_dtype=torch.float32)
    noise_scheduler = DDPMScheduler.from_pretrained(model_dir, subfolder="scheduler")
    text_encoder, unet = prepare_model(text_encoder.train()), prepare_model(unet.train())
    parameters = [*text_encoder.parameters(), *unet.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config["lr"])
    step, log = 0, Path(config["log"]) if ray.train.get_context().get_world_rank() == 0 else None
    while step < config["max_train_steps"]:
        for batch in ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=1):
            pixels = torch.cat([batch["instance_image"], batch["class_image"]])  # 2 3 H W
            ids = torch.cat([batch["instance_prompt_ids"], batch["class_prompt_ids"]])  # 2 L
            optimizer.zero_grad()
            latents = vae.encode(pixels).latent_dist.sample() * vae.config.scaling_factor
            noise = torch.randn_like(latents)
            timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (2,))
            noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)
            prediction = unet(noisy_latents, timesteps, text_encoder(ids)[0]).sample
            is_noise = noise_scheduler.config.prediction_type == "epsilon"
            target = noise if is_noise else noise_scheduler.get_velocity(latents, noise, timesteps)
            losses = (prediction - target).square().mean(dim=(1, 2, 3))
            loss = losses[0] + losses[1]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            step += 1
            if config["report_every"] and step % config["report_every"] == 0:
                ray.train.report({"step": step, "loss": loss.item()})
            if log and step % config["log_every"] == 0:
                with log.open("a") as file:
                    file.write(json.dumps({"step": step}) + "\n")
            if step == config["max_train_steps"]:
                break


def train(args):
    """Train with a TorchTrainer."""
    import ray.data
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    start_ray()
    data = ray.data.from_items(load_pairs(args))
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    TorchTrainer(
        train_function,
        train_loop_config={**vars(args), "log": str(output_dir / "log.jsonl")},
        scaling_config=ScalingConfig(
            num_workers=args.num_workers, resources_per_worker={"CPU": args.cpus_per_worker / 2}
        ),
        run_config=RunConfig(storage_path=str(output_dir)),
        datasets={"train": data},
    ).fit()


class Drawer:
    """Draws all pictures of a prompt, one after another; runs in an actor."""

    def __init__(self, options):
        import torch
        from diffusers import DiffusionPipeline

        torch.set_num_threads(max(1, int(options["cpus_per_worker"])))
        self.options = options
        self.pipeline = DiffusionPipeline.from_pretrained(options["model_dir"], torch_dtype=torch.float32)
        self.pipeline.set_progress_bar_config(disable=True)

    def __call__(self, row):
        sampler = {name: self.options[name] for name in ("num_inference_steps", "guidance_scale")}
        for number in range(self.options["num_samples_per_prompt"]):
            image = self.pipeline(row["prompt"], **sampler).images[0]
            image.save(Path(self.options["output_dir"]) / f"{row['number']:03d}-{number:05d}.png")
        return row


def draw(args):
    """Draw the pictures on a pool of actors."""
    import ray.data
    from ray.data import ActorPoolStrategy

    start_ray()
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": prompt, "number": number} for number, prompt in enumerate(args.prompts)]
    pool = {"compute": ActorPoolStrategy(size=args.num_workers), "num_cpus": args.cpus_per_worker / 2}
    ray.data.from_items(rows).map(Drawer, fn_constructor_args=(vars(args),), **pool).materialize()


if __name__ == "__main__":
    args = parse_args()
    args.model_dir, args.output_dir = (str(Path(path).resolve()) for path in (args.model_dir, args.output_dir))
    (train if args.task == "train" else draw)(args)
