"""Export the output of train_clip.py, with a model card, as the embedded CLIP, which evaluates the embedded model.

python -m recipes.emoji.export_clip --clip_dir data/emoji/clip --output_dir models/emoji-clip
"""

import json
import shutil
import sys
from pathlib import Path

from common import cli, errors, folders, messages
from pipelines.model_folder import count_weights

LARGEST = 5_000_000  # bytes of all files


def parse_args(argv=None):
    """Parse the command line."""
    parser = cli.make_parser(__doc__)
    parser.add_argument("--clip_dir", required=True, help="output directory of train_clip.py")
    parser.add_argument("--output_dir", required=True, help="folder for the embedded CLIP")
    cli.add_shared_flags(parser)
    return parser.parse_args(argv)


def card(log, num_weights):
    """Return the README.md of the embedded CLIP; log: the measurements of train_clip.py."""
    return f"""---
library_name: transformers
license: apache-2.0
pipeline_tag: zero-shot-image-classification
tags: [clip, emoji]
---

# emoji-clip

A small CLIP of emoji: {num_weights / 1e6:.1f} million weights, 64x64 pixels, 32 tokens. `evaluate.py` measures pictures
of the embedded model with it; the text encoder of emoji-64 is a copy of its text tower. It knows emoji on plain colours
and nothing else. Load it with transformers: `CLIPModel.from_pretrained("models/emoji-clip")`.

Made by `recipes/emoji/train_clip.py` in {log["steps"]:,} steps on emoji of three styles on ten background colours, with
captions like "a 3d emoji of a cat face on a blue background"; training looks at half of the patches of each picture.
The weights are float16: load them with `dtype=torch.float32` on a CPU.

| on pictures that it was not trained on | right |
|---|---|
| the picture's name among 16 | {log["retrieval_accuracy"]:.1%} |
| its background among ten colours | {log["background_accuracy"]:.1%} |

Those are a tenth of the pictures of the two styles that the embedded model does not draw; most of the same emoji were
seen in another style.

## Data and licences

| data | for | licence |
|---|---|---|
| Fluent Emoji 3D by Microsoft, npm @lobehub/fluent-emoji-3d 1.1.0 | pictures | MIT |
| Noto Emoji by Google, npm emoji-datasource-google 16.0.0 | pictures | Apache-2.0 |
| Twemoji graphics, npm emoji-datasource-twitter 16.0.0 | pictures | CC-BY 4.0 |
| labels and tags, npm emojibase-data 17.0.0 | captions | MIT |
"""


def main(args):
    """Copy the CLIP without the path in its configuration, write its card, and publish both."""
    clip_dir = Path(args.clip_dir)
    log = folders.read_json(clip_dir / "log.json")
    if folders.read_manifest(clip_dir, deep=True) is None or not log:
        raise errors.BadInput(f"--clip_dir {clip_dir} is not what train_clip.py wrote: run it to its end")
    folders.check_ours(args.output_dir, "--output_dir")
    with folders.staging(args.output_dir) as beside:
        shutil.copytree(clip_dir / "clip", beside, dirs_exist_ok=True)
        for path in beside.glob("*.json"):
            config = json.loads(path.read_text())
            for name in ("_name_or_path", "name_or_path"):
                if config.pop(name, None):
                    path.write_text(json.dumps(config, indent=2) + "\n")
        (beside / "README.md").write_text(card(log, count_weights(beside)))
        size = sum(path.stat().st_size for path in beside.iterdir())
        if size > LARGEST:
            raise errors.BadInput(f"the CLIP takes {size} bytes, more than {LARGEST}: make it smaller")
        folders.publish(beside, args.output_dir)
    messages.print_result(output_dir=args.output_dir, bytes=size)


if __name__ == "__main__":
    sys.exit(cli.run(main, parse_args()))
