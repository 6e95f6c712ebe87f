"""Write a model, or a LoRA, as one file for other programs: AUTOMATIC1111, ComfyUI, kohya's scripts.

Reads a model folder of Stable Diffusion 1.x, 2.x or XL, with a checkpoint or LoRAs on top of it. Writes one safetensors
file in the names of the original code. With --lora_only it writes the LoRA alone, and reads Stable Diffusion 3 and
FLUX too. import_model.py is the way back.

    python export.py --model_dir data/model-tuned --output_file data/rex.safetensors
    python export.py --model_dir MODEL --lora data/rex-lora:0.8 --output_file data/rex.safetensors --save_dtype bf16
    python export.py --model_dir MODEL --lora data/rex-lora --lora_only --output_file data/rex-lora.safetensors
"""

import argparse
from pathlib import Path

from common.cli import add_shared_flags, make_parser, run
from common.errors import BadInput
from common.folders import check_space, check_writable, sha256_file
from common.messages import print_result
from common.objects import local_copy
from common.storage import is_remote
from pipelines import loading, lora, single_file
from pipelines.families import find_family
from pipelines.model_folder import check_model, check_pipeline, count_weights
from pipelines.names import original_names


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    group = parser.add_argument_group("model")
    model = "folder, or URI, of a Diffusers pipeline; with --lora_only that on which the LoRA was trained"
    group.add_argument("--model_dir", required=True, help=model)
    checkpoint = "checkpoint folder, or its URI, of train.py whose components replace the model's"
    group.add_argument("--checkpoint", help=checkpoint)
    lora.add_lora_flag(group, "add to the model's weights")

    group = parser.add_argument_group("file")
    group.add_argument("--output_file", required=True, help="file to write, NAME.safetensors, on this machine's disk")
    group.add_argument("--lora_only", action="store_true", help="write the LoRA alone, without the model")
    dtype = "data type of the weights in the file"
    group.add_argument("--save_dtype", choices=tuple(loading.STORAGE_DTYPES), default="fp16", help=dtype)
    group.add_argument("--overwrite", action="store_true", help="replace an existing file")
    add_shared_flags(parser)
    args = parser.parse_args(argv)
    if not args.output_file.endswith(".safetensors"):
        parser.error(f"--output_file {args.output_file} must end in .safetensors")
    if args.lora_only and (len(args.lora) != 1 or args.checkpoint):
        parser.error("--lora_only needs one --lora, and no --checkpoint: pass the checkpoint of a LoRA as --lora")
    return args


def check_output(output_file: str, overwrite: bool) -> None:
    """Raise BadInput unless the file can be written, and does not exist or may be replaced."""
    path = Path(output_file)
    if is_remote(output_file):
        raise BadInput(f"--output_file {output_file} is a URI: write to this machine's disk, then copy the file")
    if path.is_dir():
        raise BadInput(f"--output_file {path} is a folder: choose another name")
    if path.exists() and not overwrite:
        raise BadInput(f"--output_file {path} exists: choose another name, or pass --overwrite to replace it")
    check_writable(path.parent, "--output_file")


def export_model(args: argparse.Namespace, path: Path, title: str) -> None:
    """Write the whole model."""
    weights = sum(count_weights(Path(args.model_dir, component)) for component in original_names(args.model_dir))
    check_space([("--output_file", path.parent, weights * loading.storage_dtype(args.save_dtype).itemsize)])
    tensors = single_file.collect(args.model_dir, args.checkpoint, args.lora, args.save_dtype)
    metadata = find_family(args.model_dir).model_spec(args.model_dir, title)
    single_file.write(tensors, path, metadata | {"modelspec.implementation": single_file.IMPLEMENTATION})


def export_lora(args: argparse.Namespace, path: Path, title: str) -> None:
    """Write the one LoRA of --lora, its scale multiplied in."""
    location, scale = args.lora[0]
    weights = {
        component: {name: (down, up * scale) for name, (down, up) in modules.items()}
        for component, modules in lora.read(lora.find_file(location), args.model_dir).items()
    }
    prefixes = find_family(args.model_dir).webui
    tensors = lora.webui_tensors(weights, prefixes) if prefixes else lora.diffusers_tensors(weights)
    tensors = single_file.cast(tensors, args.save_dtype)
    check_space([("--output_file", path.parent, sum(tensor.nbytes for tensor in tensors.values()))])
    rank = max(len(down) for modules in weights.values() for down, _ in modules.values())
    single_file.write(tensors, path, lora.webui_metadata(args.model_dir, title, rank))


def main(args: argparse.Namespace) -> None:
    """Check everything, write the file and print its digest."""
    check_output(args.output_file, args.overwrite)
    args.model_dir = str(local_copy(args.model_dir))
    args.checkpoint = args.checkpoint and str(local_copy(args.checkpoint))
    check_pipeline(args.model_dir)
    path = Path(args.output_file).resolve()
    if not args.lora_only:
        original_names(args.model_dir)
    check_model(args.model_dir)
    if args.checkpoint:
        loading.check_checkpoint(args.checkpoint, args.model_dir)
    lora.check(lora.describe(args.lora), args.model_dir)
    loading.set_up_torch("cpu")
    path.parent.mkdir(parents=True, exist_ok=True)
    (export_lora if args.lora_only else export_model)(args, path, path.stem)
    print_result(output_file=str(path), bytes=path.stat().st_size, sha256=sha256_file(path))


if __name__ == "__main__":
    run(main, parse_args())
