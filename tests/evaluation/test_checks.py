"""checks.py: related models, and class images that were drawn in another way."""

import json
import shutil

import pytest

from common import errors
from evaluation.checks import check_family, compare_class_images


def edit(path, **changed):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def test_models_of_different_families(tiny_model, tmp_path):
    check_family(tiny_model, shutil.copytree(tiny_model, tmp_path / "tuned"))
    for file, changed, said in (
        ("model_index.json", {"_class_name": "StableDiffusionXLPipeline"}, "the pipeline is StableDiffusionXLPipeline"),
        ("text_encoder/config.json", {"hidden_size": 32}, "text_encoder's hidden_size is 32 and 16"),
        ("unet/config.json", {"block_out_channels": [16, 32]}, "unet's block_out_channels is"),
    ):
        other = shutil.copytree(tiny_model, tmp_path / file.replace("/", "-"))
        edit(other / file, **changed)
        with pytest.raises(errors.BadInput, match=rf"--model_dir .* of different families .{said}"):
            check_family(tiny_model, other)


def test_what_an_older_configuration_does_not_say_is_no_other_family(tiny_model, tmp_path):
    """It is what its class takes for granted."""
    older = shutil.copytree(tiny_model, tmp_path / "older")
    path = older / "unet" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in config.items() if name != "in_channels"}))
    check_family(older, tiny_model)
    path.write_text(json.dumps({name: value for name, value in config.items() if name != "layers_per_block"}))
    with pytest.raises(errors.BadInput, match="unet's layers_per_block is 1 and 2"):
        check_family(older, tiny_model)


def test_each_setting_in_which_class_images_differ_is_a_warning(tmp_path):
    wanted = {"num_inference_steps": 25, "model": "a" * 64, "text": "a dog"}
    assert compare_class_images(str(tmp_path), wanted) == []
    records = [{"file_name": "0.png", **wanted}, {"file_name": "1.png", "num_inference_steps": 50, "model": "b" * 64}]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    notes = compare_class_images(str(tmp_path), wanted)
    assert [note.split(" drawn with ")[1].split(":")[0] for note in notes] == [
        "num_inference_steps 50 instead of 25",
        "another model",
    ]
