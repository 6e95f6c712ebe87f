"""The files of a hub repository that make up a pipeline."""

from pathlib import Path

import pytest

from common import errors
from pipelines.hub import select_files

UNET_ONLY = {"unet": ["diffusers", "UNet2DConditionModel"], "_name": "x", "safety_checker": [None, None]}


def chosen(*names, variant=None):
    files = ["model_index.json", "unet/config.json", *(f"unet/{name}" for name in names)]
    return [Path(name).name for name in select_files(files, UNET_ONLY, variant)][2:]


def test_shards_come_with_their_index():
    plain = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    half = [
        "model.fp16-00001-of-00002.safetensors",
        "model.fp16-00002-of-00002.safetensors",
        "model.safetensors.index.fp16.json",
    ]
    other = ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"]
    assert chosen(*plain, *half, *other) == plain
    assert chosen(*plain, *half, *other, variant="fp16") == half


def test_shards_that_name_their_variant_last():
    half = ["model-00001-of-00001.fp16.safetensors", "model.safetensors.fp16.index.json"]
    assert chosen(*half, "model.safetensors", variant="fp16") == half


def test_a_variant_of_two_words_is_not_its_part():
    names = ["model.safetensors", "model.fp16.safetensors", "model.non_ema.fp16.safetensors"]
    assert chosen(*names, variant="fp16") == ["model.fp16.safetensors"]
    assert chosen(*names, variant="non_ema.fp16") == ["model.non_ema.fp16.safetensors"]


@pytest.mark.parametrize("name", ["model.onnx", "flax_model.msgpack", "model.fp16.bin", "model.ckpt"])
def test_weights_in_no_safetensors_are_refused(name):
    with pytest.raises(errors.BadInput, match=f"unet/{name} is"):
        chosen(name)


def test_a_component_without_a_folder_is_refused():
    with pytest.raises(errors.BadInput, match="no files of its unet"):
        select_files(["model_index.json", "v1.safetensors"], UNET_ONLY)
