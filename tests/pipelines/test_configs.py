"""Component configurations with defaults of their classes, resolutions."""

import json
import shutil

import pytest

from common import errors
from pipelines.configs import (
    base_name,
    base_revision,
    check_resolution,
    model_resolution,
    pixel_factor,
    read_config,
)


@pytest.fixture
def model(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


def test_what_a_configuration_leaves_out_is_the_default_of_its_class(model):
    for part, names in {"vae": ("scaling_factor", "shift_factor"), "text_encoder": ("vocab_size",)}.items():
        path = model / part / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({name: value for name, value in config.items() if name not in names}))
    vae = read_config(model, "vae")
    assert vae["scaling_factor"] == 0.18215 and vae["shift_factor"] is None and vae["latent_channels"] == 4
    assert read_config(model, "text_encoder")["vocab_size"] == 49408
    assert vae.get("block_out_channels") == [8, 8] and vae.get("nothing") is None
    with pytest.raises(KeyError):
        vae["nothing"]


def test_a_resolution_that_the_configuration_does_not_say_is_named(model):
    path = model / "unet" / "config.json"
    config = json.loads(path.read_text())
    del config["sample_size"]
    path.write_text(json.dumps(config))
    with pytest.raises(errors.BadInput, match=r"unet/config\.json has no integer sample_size"):
        model_resolution(model)


def test_the_size_of_a_picture_follows_from_the_configuration(tiny_model):
    assert pixel_factor(tiny_model) == 2
    assert model_resolution(tiny_model) == 16


def set_vae_blocks(model, count):
    config = json.loads((model / "vae" / "config.json").read_text())
    config["block_out_channels"] = [8] * count
    (model / "vae" / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("blocks", "good", "bad"), [(2, (8, 16, 24, 512), (2, 17, 20)), (5, (16, 512), (8, 504))])
def test_a_resolution_is_a_multiple_of_the_vaes_factor_and_of_eight(model, blocks, good, bad):
    set_vae_blocks(model, blocks)
    for value in good:
        check_resolution(model, "--resolution", value)
    for value in bad:
        with pytest.raises(
            errors.BadInput, match=f"--resolution {value} is not a multiple of {2 ** max(3, blocks - 1)}"
        ):
            check_resolution(model, "--resolution", value)


def test_another_resolution_is_answered_with_one_near(model):
    set_vae_blocks(model, 4)  # Stable Diffusion's factor, 8
    with pytest.raises(errors.BadInput, match=r"--height 501 .*use 504"):
        check_resolution(model, "--height", 501)
    with pytest.raises(errors.BadInput, match=r"--height 1 .*use 8"):
        check_resolution(model, "--height", 1)


def test_a_bases_name_and_revision_are_those_in_its_manifest_or_its_path(tmp_path):
    commit, folder = "1" * 40, tmp_path / "abc"
    folder.mkdir()
    assert (base_name(folder), base_revision(folder)) == ("abc", None)
    assert base_name(folder, "s3://bucket/models/rex/?region=eu-west-1") == "rex"
    assert base_name(folder, tmp_path / "link") == "link"
    (folder / "manifest.json").write_text(json.dumps({"model_name": "some/model", "revision": commit, "files": {}}))
    assert (base_name(folder, "s3://bucket/rex"), base_revision(folder)) == ("some/model", commit)
    hub = tmp_path / "models--some--other" / "snapshots" / commit
    assert (base_name(hub), base_revision(hub)) == ("some/other", commit)
