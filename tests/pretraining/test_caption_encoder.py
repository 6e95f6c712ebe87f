"""captions.py: captions encoded before training, or in it."""

import json
import shutil

import numpy as np
import pytest
import torch

from pipelines.families import find_family
from pretraining.captions import CaptionEncoder


def make_encoder(folder, batch_size=2):
    return CaptionEncoder(folder, batch_size, torch.float32, "cpu")


@pytest.mark.parametrize(("name", "is_zero"), [("sd", False), ("sdxl", True), ("sdxl", False)])
def test_no_caption_is_what_the_model_is_guided_by(tiny_families, tmp_path, name, is_zero):
    """Not an empty caption, which is encoded as any other."""
    copy = shutil.copytree(tiny_families[name], tmp_path / "copy")
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(json.dumps(index | {"force_zeros_for_empty_prompt": is_zero}))
    encoder = make_encoder(copy)
    found, empty = encoder.no_caption, encoder([""])
    assert {field: value.shape for field, value in found.items()} == find_family(copy).caption_shapes(copy)
    rows = encoder(["a cat", None, "", None])
    for field, value in found.items():
        assert torch.equal(value, torch.zeros_like(value) if is_zero else empty[field][0])
        assert torch.equal(rows[field][1], value) and torch.equal(rows[field][3], value)
        assert torch.equal(rows[field][2], encoder(["", "a cat"])[field][0])
        assert not torch.equal(rows[field][0], value)


def test_equal_captions_are_encoded_once_and_no_caption_never_again(tiny_model):
    encoder, seen = make_encoder(tiny_model), []
    encoder.encoders["text_encoder"].register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    (found,) = encoder(["a cat", "a dog", "", "a cat", "a dog"]).values()
    assert seen == [2, 1]
    assert found.shape == (5, 24, 16) and found.dtype == torch.float16
    assert torch.equal(found[0], found[3]) and torch.equal(found[1], found[4])
    assert not torch.equal(found[0], found[1])
    (others,) = encoder(["a dog", None, "a dog"]).values()
    (nothing,) = encoder([None, None]).values()
    assert seen == [2, 1, 1, 1], "one for the caption, one for no caption"
    assert torch.equal(others[1], nothing[0]) and torch.equal(nothing[0], nothing[1])


def test_a_batch_with_text_gets_its_fields_and_keeps_the_others(tiny_families):
    encoder = make_encoder(tiny_families["sdxl"])
    batch = {"mean": torch.ones(3, 4, 8, 8), "caption": np.array(["a cat", None, "a dog"], object)}
    filled = encoder.fill(batch)
    assert filled.keys() == {"mean", *find_family(tiny_families["sdxl"]).caption_shapes(tiny_families["sdxl"])}
    assert filled["mean"] is batch["mean"] and "caption" in batch
    expected = encoder(["a cat", None, "a dog"])
    assert all(torch.equal(filled[field], expected[field]) for field in expected)
