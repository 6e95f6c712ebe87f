"""Make a model folder of one file of another program, or a LoRA folder of a LoRA file.

Reads a safetensors file in the names of AUTOMATIC1111, ComfyUI or kohya's scripts, and the base: a model folder of the
same kind (Stable Diffusion 1.x, 2.x or XL; for a LoRA any family), which has the configurations. Writes --output_dir,
which every script reads as --model_dir, or as --lora. run_model.py --lora reads LoRA files as they are, too. export.py
is the way back.

    python import_model.py --from_file realistic.safetensors --model_dir MODEL --output_dir data/realistic
    python import_model.py --from_file style-lora.safetensors --model_dir MODEL --output_dir data/style-lora
"""

import argparse
from pathlib import Path
from typing import Any

from common import targets
from common.cli import add_shared_flags, make_parser, run
from common.errors import BadInput
from common.folders import check_space, sha256_file
from common.messages import print_result, say
from common.objects import local_copy
from common.storage import absolute, is_remote
from pipelines import loading, lora, single_file
from pipelines.configs import base_license, base_name
from pipelines.model_folder import LORA_FILE, check_model, check_pipeline, check_safetensors, digest_model
from pipelines.names import original_names


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    group = parser.add_argument_group("model")
    file = "safetensors file, or its URI, of a whole model or of a LoRA"
    group.add_argument("--from_file", required=True, help=file)
    base = "folder, or URI, of the Diffusers pipeline that the file is a fine-tuned version, or a LoRA, of"
    group.add_argument("--model_dir", required=True, help=base)
    group.add_argument("--output_dir", required=True, help="folder, or URI, to write; it appears when it is complete")
    group.add_argument("--overwrite", action="store_true", help="replace an earlier result of other inputs")
    add_shared_flags(parser)
    return parser.parse_args(argv)


def find_file(location: str) -> Path:
    """Return the file on this machine's disk; raise BadInput or CheckFailed unless it is a safetensors file."""
    path = local_copy(location)
    if not path.is_file():
        raise BadInput(f"--from_file {location} is not a file: pass a .safetensors file")
    if path.suffix != ".safetensors":
        raise BadInput(f"--from_file {location} may be a pickle, which can run code: use a .safetensors file")
    check_safetensors(path)
    return path


def is_finished(output_dir: str, settings: dict[str, Any], overwrite: bool) -> bool:
    """Return whether a folder has the result; raise BadInput if it has another one, unless it may be replaced."""
    manifest = targets.read_manifest(output_dir) or {}
    if manifest.get("settings") == settings:
        return True
    targets.check_ours(output_dir, "--output_dir")
    if not (overwrite or targets.is_empty(output_dir)):
        raise BadInput(f"--output_dir {output_dir} exists: choose another folder, or pass --overwrite to replace it")
    return False


def write_lora(path: Path, model_dir: str, folder: Path) -> None:
    """Write the LoRA in a file to a folder in Diffusers' names, in float32, as alpha / rank is multiplied in."""
    tensors = lora.diffusers_tensors(lora.read(path, model_dir))
    single_file.write(tensors, folder / LORA_FILE, {})


def make_card(path: Path, model_dir: str, base: str, is_model: bool) -> str:
    """Return the README.md of the result; base: the name of the model in `model_dir`."""
    what = f"A model of the kind of `{base}`" if is_model else f"A LoRA of models such as `{base}`"
    tags = "[text-to-image]" if is_model else "[lora, text-to-image]"
    return f"""---
library_name: diffusers
license: other
pipeline_tag: text-to-image
tags: {tags}
---

# {path.stem}

{what}, imported from the file `{path.name}`, whose licence holds. That of the base is {base_license(model_dir)}.
"""


def main(args: argparse.Namespace) -> None:
    """Check everything, then publish the folder unless it is there."""
    path = find_file(args.from_file)
    base, args.model_dir = args.model_dir, str(local_copy(args.model_dir))
    args.output_dir = absolute(args.output_dir)
    check_pipeline(args.model_dir)
    is_model = single_file.is_model(path)
    if is_model:
        original_names(args.model_dir)
    targets.check_writable(args.output_dir, "--output_dir")
    targets.check_apart(args.output_dir, model_dir=absolute(base), from_file=absolute(args.from_file))
    settings = {"from_file": sha256_file(path), "model": digest_model(args.model_dir)}
    result = {"output_dir": args.output_dir, "kind": "model" if is_model else "lora"}
    if is_finished(args.output_dir, settings, args.overwrite):
        say(f"{args.output_dir} is complete: nothing to do")
        return print_result(**result)
    check_model(args.model_dir)
    loading.set_up_torch("cpu")
    work_dir = targets.beside(args.output_dir, ".work")
    with targets.lock(work_dir) as held:
        targets.recover(args.output_dir)
        with targets.staging(args.output_dir) as folder:
            if not is_remote(args.output_dir):
                check_space([("--output_dir", folder, path.stat().st_size * (1 if is_model else 2))])
            (single_file.read if is_model else write_lora)(path, args.model_dir, folder)
            (folder / "README.md").write_text(
                make_card(path, args.model_dir, base_name(args.model_dir, base), is_model), encoding="utf-8"
            )
            targets.publish(folder, args.output_dir, held, settings=settings)
    if not is_remote(work_dir):
        targets.delete(work_dir)
    print_result(**result)


if __name__ == "__main__":
    run(main, parse_args())
