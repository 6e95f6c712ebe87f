"""Export the pre-trained pipeline as the embedded model: float16 weights, a contact sheet and a model card.

python -m recipes.emoji.export --model_dir data/emoji/base --output_dir models/emoji-64
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np

from common import cli, errors, folders, messages
from common.sheets import make_sheet
from pipelines.loading import load_pipeline, set_up_torch
from pipelines.model_folder import copy_component
from recipes.emoji import contact_sheet, pictures
from training.checkpoints import write_module

LARGEST = 25_000_000  # bytes of safetensors
SEED = 0


def parse_args(argv=None):
    """Parse the command line."""
    parser = cli.make_parser(__doc__)
    parser.add_argument("--model_dir", required=True, help="output directory of pretrain.py")
    parser.add_argument("--cache_dir", default="data/emoji", help="folder of the downloaded archives")
    parser.add_argument("--vae_dir", required=True, help="output directory of train_vae.py")
    parser.add_argument("--clip_dir", required=True, help="output directory of train_clip.py")
    parser.add_argument("--note", default="", help="text about the training of the UNet to add to the model card")
    parser.add_argument("--output_dir", required=True, help="folder for the embedded model")
    cli.add_shared_flags(parser)
    return parser.parse_args(argv)


def card(args, prompts):
    """Return the README.md of the embedded model."""
    manifest = folders.read_manifest(args.model_dir)
    settings = manifest["settings"]
    log = [json.loads(line) for line in (Path(args.model_dir) / "training_log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log[-100:] if line.get("loss")]
    validation = [line["validation_loss"] for line in log if line.get("validation_loss")]
    vae, clip = (folders.read_json(Path(folder) / "log.json") for folder in (args.vae_dir, args.clip_dir))
    drawn = sum(map(pictures.is_drawn, pictures.load_pictures(args.cache_dir, ("fluent",))))
    rows = "\n".join(f"{number}. {prompt}" for number, prompt in enumerate(prompts, start=1))
    held_out = f"{validation[-1]:.3f} on held-out rows" if validation else "nothing held out"
    unet = f"{manifest['step']} steps of {settings['rows_per_step']} pictures; loss {np.mean(losses):.3f}, {held_out}"
    return f"""---
library_name: diffusers
license: apache-2.0
pipeline_tag: text-to-image
tags: [stable-diffusion, text-to-image, emoji]
---

# emoji-64

A small Stable Diffusion pipeline that draws {drawn} emoji, 64x64 pixels, on ten background colours, on any CPU in a
second. Made from nothing by `recipes/emoji/make.sh`. Prompts read like "a 3d emoji of a cat face on a blue background".

![contact sheet](contact_sheet.png)

Prompts of the picture, seed {SEED}, row by row:

{rows}

| part | weights | how it was trained |
|---|---|---|
| VAE | 0.65 million | {vae["steps"]} steps of emoji in three styles and crops of photographs; {vae["psnr"]:.1f} dB |
| text encoder | 0.9 million | the text tower of a CLIP: {clip["steps"]} steps of captioned emoji in three styles |
| UNet | 10.9 million | {unet}{args.note and f"; {args.note}"} |

v_prediction with zero terminal SNR and trailing timesteps. {settings["caption_dropout"]:.0%} of the captions were left
out, for classifier-free guidance. The weights are float16: load them with `torch_dtype=torch.float32` on a CPU.

## Data and licences

| data | for | licence |
|---|---|---|
| Fluent Emoji 3D by Microsoft, npm @lobehub/fluent-emoji-3d 1.1.0 | VAE, CLIP, {drawn} pictures of the UNet | MIT |
| Noto Emoji by Google, npm emoji-datasource-google 16.0.0 | VAE and CLIP | Apache-2.0 |
| Twemoji graphics, npm emoji-datasource-twitter 16.0.0 | VAE and CLIP | CC-BY 4.0 |
| labels and tags, npm emojibase-data 17.0.0 | captions | MIT |
| nine photographs in scikit-image 0.26.0 | VAE | public domain or CC0 |

The nine cat faces among Fluent's smileys were never shown to the UNet. Flags, symbols and skin tones are left out.
"""


def main(args):
    """Convert the weights, draw the contact sheet, and publish the model."""
    import torch

    set_up_torch("cpu")
    prompts = contact_sheet.read_prompts(contact_sheet.PROMPTS_FILE)
    pipeline = load_pipeline(args.model_dir, torch.float32)
    with folders.staging(args.output_dir) as beside:
        images = contact_sheet.draw_prompts(pipeline, prompts, SEED, num_inference_steps=30, guidance_scale=3.0)
        make_sheet(images, prompts, contact_sheet.COLUMNS).save(beside / "contact_sheet.png")
        shutil.copyfile(Path(args.model_dir) / "model_index.json", beside / "model_index.json")
        for name, part in pipeline.to(torch.float16).components.items():
            if isinstance(part, torch.nn.Module):
                write_module(beside / name, part)
            elif part is not None:
                copy_component(Path(args.model_dir) / name, beside / name)
        size = sum(path.stat().st_size for path in beside.rglob("*.safetensors"))
        if size > LARGEST:
            raise errors.BadInput(f"the model takes {size} bytes, more than {LARGEST}: make it smaller")
        (beside / "README.md").write_text(card(args, prompts))
        shutil.copy(Path(args.model_dir) / "training_log.jsonl", beside)
        folders.publish(beside, args.output_dir)
    messages.print_result(output_dir=args.output_dir, bytes=size)


if __name__ == "__main__":
    sys.exit(cli.run(main, parse_args()))
