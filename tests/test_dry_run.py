"""--dry_run of the scripts that draw, encode and pre-train: it says what would be done, and nothing is written."""

import pytest
from conftest import last_json, tree
from tiny_models import make_tiny_clip, make_tiny_dino

import evaluate
import preprocess
import pretrain
import run_model


@pytest.fixture
def dry(tmp_path, capsys):
    """Return a function that runs a script with --dry_run and returns what it says; it fails if a file is written."""

    def run(script, **flags):
        before = tree(tmp_path)
        flags |= {"output_dir": tmp_path / "out", "num_workers": 0}
        words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        script.main(script.parse_args([*words, "--dry_run"]))
        assert tree(tmp_path) == before and not (tmp_path / "out").exists()
        said = last_json(capsys.readouterr().out)
        assert said.pop("dry_run")
        return said

    return run


def test_drawing(dry, tiny_model):
    said = dry(run_model, model_dir=tiny_model, prompts="a cat", num_samples_per_prompt=3)
    assert (said["images"], said["missing"]) == (3, 3) and said["disk_bytes"] == 3 * (3 * 16 * 16 + 4096)
    assert (said["settings"]["num_inference_steps"], said["settings"]["guidance_scale"]) == (50, 7.5)


def test_an_evaluation(dry, tiny_model, photos, class_images, tmp_path):
    encoders = make_tiny_clip(tmp_path / "clip", tiny_model / "tokenizer"), make_tiny_dino(tmp_path / "dino")
    models = {
        "model_dir": tiny_model,
        "base_model_dir": tiny_model,
        "clip_model": encoders[0],
        "dino_model": encoders[1],
    }
    prompts = {"instance_prompt": "a unqtkn cat", "class_prompt": "a cat"}
    images = {"instance_images_dir": photos, "class_images_dir": class_images, "num_class_images": 5}
    said = dry(evaluate, **models, **prompts, **images)
    assert said["images"] == said["missing"] == 4 + 4 + 5


def test_encoding(dry, tiny_model, raw_data):
    said = dry(preprocess, model_dir=tiny_model, input=raw_data)
    assert said["rows"] == 23 and said["disk_bytes"] == 23 * 2 * (2 * 4 * 8 * 8 + 24 * 16)
    assert said["settings"]["resolutions"] == [16]


def test_pre_training(dry, tiny_model, latents):
    said = dry(pretrain, model_dir=tiny_model, data=latents, max_steps=7, batch_size_per_worker=2)
    assert (said["steps"], said["rows"]) == (7, 23)
    assert said["disk_bytes"]["checkpoint"] == 4 * 4 * said["trained_weights"]  # with the average of EMA
