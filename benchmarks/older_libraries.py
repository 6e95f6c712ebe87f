"""Check that older releases of the libraries load a model folder and draw the same pictures as the current ones.

Creates a virtual environment with OLDER, which takes minutes and a few GB, unless --python names one. Without
--model_dir it compares four models: the embedded one, that one tuned by train.py with and without its text encoder, and
a tuned version of a tiny model saved by the older libraries. Prints a line per model, then one JSON line. Exits with
code 1 if weights are missing or differ, if the safety checker disagrees, or if a pixel differs by more than
--max_difference.

    python -m benchmarks.older_libraries --model_dir models/emoji-64
    python -m benchmarks.older_libraries
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import numpy as np

from benchmarks.measuring import CLASS_PROMPT, MODEL, PROMPTS, ROOT, SUBJECT, run

OLDER = ("transformers==4.57.1", "diffusers==0.35.*", "accelerate==1.*")
PLAIN = "-m", "benchmarks.plain_diffusers"
TRAIN = ("--num_workers", 0, "--max_train_steps", 20, "--log_every", 1)
STEPS = 20  # denoising steps per picture


def make_environment(folder):
    """Create a virtual environment with OLDER and the current version of torch; return its Python."""
    venv.create(folder, with_pip=True)
    python = Path(folder, "bin", "python")
    torch = importlib.metadata.version("torch").split("+")[0]
    subprocess.run([python, "-m", "pip", "install", "-q", f"torch=={torch}", *OLDER], check=True, stdout=sys.stderr)
    return python


def plain(python, *arguments):
    """Run plain_diffusers.py with the given Python and return the JSON that it prints."""
    done = subprocess.run([python, *PLAIN, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{PLAIN[1]} {arguments} ended with {done.returncode} under {python}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(pythons, model_dir, prompt, seed, folder):
    """Return the `difference` between the results of two Pythons that load a model and draw with it."""
    facts, pictures = [], []
    for number, python in enumerate(pythons):
        output = Path(folder, f"{number}.npy")
        flags = ("--prompt", prompt, "--seed", seed, "--num_inference_steps", STEPS, "--output", output)
        facts.append(plain(python, "draw", "--model_dir", model_dir, *flags))
        pictures.append(np.load(output).astype(int))
    return difference(facts, pictures)


def difference(facts, pictures):
    """Return the differences between two results of plain_diffusers.draw and their pictures [N, H, W, 3]."""
    here, there = (fact["weights"] for fact in facts)
    names = sorted(here.keys() | there.keys())
    return {
        "largest_difference": int(np.abs(pictures[0] - pictures[1]).max()),  # of 255
        "missing": [key for fact in facts for key in fact["missing"]],
        "other_weights": [name for name in names if here.get(name) != there.get(name)],
        "flagged": [fact["flagged"] for fact in facts],
    }


def is_alike(found, max_difference):
    """Return whether there is no difference except for rounding of the pixels."""
    same = not found["missing"] and not found["other_weights"] and len(set(found["flagged"])) == 1
    return same and found["largest_difference"] <= max_difference


def make_models(older, folder):
    """Return {description: (folder, prompt)} of the models to compare; trains those that need it."""
    plain(older, "save", "--model_dir", folder / "tiny")
    subject = ("--instance_images_dir", ROOT / SUBJECT, "--class_images_dir", ROOT / SUBJECT)
    made = {
        "trained": (MODEL, PROMPTS),
        "its text encoder frozen": (MODEL, (*PROMPTS, "--no-train_text_encoder")),
        "trained, of a base by the older libraries": (folder / "tiny", ("--instance_prompt", "a zq cat",
                                                                        "--class_prompt", "a cat")),
    }  # fmt: skip
    models = {"embedded": (MODEL, CLASS_PROMPT)}
    for number, (name, (base, flags)) in enumerate(made.items()):
        output = folder / str(number)
        run("train.py", "--model_dir", base, "--output_dir", output, *subject, *flags, *TRAIN)
        models[name] = (output, flags[1])
    return models


def main(args):
    """Compare the models, print the differences, and return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        older = args.python or make_environment(folder / "older")
        pythons = (sys.executable, older)
        models = {"given": (Path(args.model_dir).resolve(), CLASS_PROMPT)} if args.model_dir else None
        results = {}
        for name, (model_dir, prompt) in (models or make_models(older, folder)).items():
            results[name] = compare(pythons, model_dir, args.prompt or prompt, args.seed, folder)
            print(f"{name:45s} largest difference of a pixel {results[name]['largest_difference']} of 255", flush=True)
    alike = all(is_alike(found, args.max_difference) for found in results.values())
    print(json.dumps({"models": results, "alike": alike}))
    return 0 if alike else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir", help="model folder to compare; default: four models")
    parser.add_argument("--python", help="Python of an environment with the older libraries; default: create one")
    parser.add_argument("--prompt", help="prompt to draw; default: one that the model knows")
    parser.add_argument("--seed", type=int, default=0, help="seed of the pictures")
    parser.add_argument("--max_difference", type=int, default=2, help="largest difference of a pixel value, of 255")
    sys.exit(main(parser.parse_args()))
