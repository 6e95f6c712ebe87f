"""Compare a LoRA with the training of all weights: likeness, memory, size of the result, on the embedded model.

Each way trains on as many pairs of the embedded subject and class images, one process, and is measured by evaluate.py.
The speed is a row of benchmarks.speed. The last line is JSON. Takes about 20 minutes on two CPU cores.

    python -m benchmarks.lora
    python -m benchmarks.lora --peer train_dreambooth_lora.py
    python -m benchmarks.lora --ways "--lr 1e-4" "--lora 8 --lr 1e-3" "--lora 8 --lr 2e-3"
"""

import argparse
import json
import shlex
import tempfile
from pathlib import Path

from benchmarks.measuring import CLASS_PROMPT, MODEL, PROMPTS, SUBJECT, peak_memory, peer_command, run

PEER = "peer"  # Diffusers' script, with the rank and learning rate of PEER_FLAGS
PEER_FLAGS = ("--rank", 8, "--learning_rate", 2e-3, "--resolution", 64)
WAYS = ("--lr 1e-4", "--lora 8 --lr 2e-3")
MEASURES = ("subject_clip", "prior_base", "prior_photos", "diversity", "memorised")
SAMPLER = ("--num_inference_steps", 25, "--guidance_scale", 3)


def measure(folder, class_images, way, pairs, peer):
    """Train in one way and measure the result; return a row of the table."""
    output, flags = folder / "tuned", shlex.split(way)
    images = ("--instance_images_dir", SUBJECT, "--class_images_dir", class_images, *PROMPTS)
    length = ("--max_train_pairs", pairs, "--no-random_flip", "--num_workers", 0)
    command = ("train.py", "--model_dir", MODEL, "--output_dir", output, *images, *length, *flags)
    if way == PEER:
        command = peer_command(peer, MODEL, class_images, folder, *PEER_FLAGS, "--max_train_steps", pairs)
        command, flags = [*command, "--output_dir", output], ["--lora"]
    memory, seconds = peak_memory(command)
    tuned = ("--model_dir", MODEL, "--lora", output) if "--lora" in flags else ("--model_dir", output)
    prompts = ("--prompts_file", "prompts/emoji.txt", "--class_name", "cat", "--num_samples_per_prompt", 2)
    encoders = ("--clip_model", "models/emoji-clip", "--dino_model", "none", "--batch_size", 10, "--num_workers", 0)
    run("evaluate.py", *tuned, "--base_model_dir", MODEL, *images, *prompts, *encoders, *SAMPLER,
        "--output_dir", folder / "evaluation")  # fmt: skip
    measures = json.loads((folder / "evaluation" / "evaluation.json").read_text())["measures"]
    files = [output / "pytorch_lora_weights.safetensors"] if "--lora" in flags else output.rglob("*.safetensors")
    size = sum(path.stat().st_size for path in files)
    row = {name: measures[name]["tuned"]["value"] for name in MEASURES}
    return row | {"MB of memory": sum(memory.values()), "seconds": seconds, "MB of the result": size / 1e6}


def main(args):
    """Draw class images once, then measure each way."""
    folder = Path(tempfile.mkdtemp(prefix="lora-"))
    run("run_model.py", "--model_dir", MODEL, "--output_dir", folder / "class", "--prompts", CLASS_PROMPT,
        "--num_samples_per_prompt", 50, *SAMPLER, "--batch_size", 10, "--num_workers", 0)  # fmt: skip
    rows = {}
    for number, way in enumerate([*args.ways, *([PEER] if args.peer else [])]):
        (folder / str(number)).mkdir()
        rows[way] = measure(folder / str(number), folder / "class", way, args.pairs, args.peer)
        print(way, *(f"{name} {value:.3g}" for name, value in rows[way].items()), sep="  ", flush=True)
    print(json.dumps({"pairs": args.pairs, "folder": str(folder), "rows": rows}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=WAYS, help="flags of train.py, a way each")
    parser.add_argument("--peer", help="path of diffusers' train_dreambooth_lora.py, to measure it too")
    parser.add_argument("--pairs", type=int, default=600, help="training pairs")
    main(parser.parse_args())
