"""--dry_run of the scripts that draw, encode and pre-train: it says what would be done, and nothing is written."""

import itertools

import pytest
from conftest import last_json, tree
from diffusers import UNet2DConditionModel
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
        flags = {"output_dir": tmp_path / "out", "num_workers": 0, **flags}
        words = [str(word) for name, value in flags.items() for word in (f"--{name}", value) if word is not True]
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
    count, gpu = said["trained_weights"], said["gpu_bytes_in_bf16"]
    found = [gpu.pop(name) for name in ("weights", "gradients", "adam", "copies", "average")]
    assert found == [4 * count, 4 * count, 8 * count, 2 * count, 4 * count]
    assert gpu.pop("sum") == 22 * count + gpu.pop("activations") and not gpu
    said = dry(pretrain, model_dir=tiny_model, data=latents, max_steps=7, batch_size_per_worker=2, use_8bit_adam=True)
    assert said["gpu_bytes_in_bf16"]["adam"] == 2 * count and said["settings"]["use_8bit_adam"]


@pytest.mark.parametrize(
    ("sharding", "shards", "is_gathered"),
    [("NO_SHARD", 1, True), ("SHARD_GRAD_OP", 4, True), ("FULL_SHARD", 4, False), ("HYBRID_SHARD", 2, False)],
)
def test_pre_training_on_two_nodes_of_two_gpus(sharding, shards, is_gathered, dry, tiny_model, latents, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    flags = {"strategy": "fsdp", "fsdp_sharding": sharding, "num_workers": 4, "batch_size_per_worker": 1}
    flags |= {"model_dir": tiny_model, "data": latents, "max_steps": 7, "ema_decay": 0}
    said = dry(pretrain, **flags)
    gpu, count = said["gpu_bytes_in_bf16"], said["trained_weights"]
    assert "average" not in gpu and gpu["weights"] == gpu["gradients"] == 4 * count // shards == gpu["adam"] // 2
    unet = UNet2DConditionModel.from_pretrained(tiny_model / "unet")
    parts = [*unet.down_blocks, unet.mid_block, *unet.up_blocks]
    blocks = [sum(each.numel() for each in part.parameters()) for part in parts]
    two = max(one + other for one, other in itertools.pairwise(blocks))
    assert gpu["copies"] == 2 * (count if is_gathered else count - sum(blocks) + two)
    accumulated = dry(pretrain, **flags, gradient_accumulation_steps=2)["gpu_bytes_in_bf16"]
    assert accumulated["gradients"] == gpu["gradients"] + 4 * count
    halved = dry(pretrain, **flags, gradient_accumulation_steps=2, reduce_dtype="bf16")["gpu_bytes_in_bf16"]
    assert halved["gradients"] == gpu["gradients"] + 2 * count
