"""Files of a model folder: checks, weight variants, copies and digests."""

import hashlib
import json
import shutil

import pytest
from conftest import ROOT

from common import errors, folders
from pipelines.configs import model_resolution
from pipelines.model_folder import (
    check_model,
    check_pipeline,
    check_safetensors,
    component_files,
    copy_component,
    count_weights,
    digest_model,
    digest_parts,
    weights_variant,
)

PARTS = ("scheduler", "text_encoder", "tokenizer", "unet", "vae")


@pytest.fixture
def model(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


def weights_of(model, part):
    return next((model / part).glob("*.safetensors"))


def test_a_whole_model_passes(tiny_model):
    index = check_pipeline(tiny_model)
    assert index["_class_name"] == "StableDiffusionPipeline"
    assert {name for name, value in index.items() if isinstance(value, list) and value[0]} == set(PARTS)


def test_what_is_no_model_folder_is_bad_input(tmp_path):
    with pytest.raises(errors.BadInput, match=r"--base .*not a folder"):
        check_pipeline(tmp_path / "none", "--base")
    with pytest.raises(errors.BadInput, match=r"--base .*model_index\.json"):
        check_pipeline(tmp_path, "--base")


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_part_is_named(model, part):
    shutil.rmtree(model / part)
    with pytest.raises(errors.BadInput, match=f"lacks the folder {part}"):
        check_pipeline(model)


@pytest.mark.parametrize("part", ["scheduler", "tokenizer"])
def test_an_empty_part_is_named(model, part):
    shutil.rmtree(model / part)
    (model / part).mkdir()
    with pytest.raises(errors.BadInput, match=f"{part} is empty"):
        check_pipeline(model)


@pytest.mark.parametrize("part", ["text_encoder", "unet", "vae"])
def test_a_missing_configuration_or_weight_is_named(model, part):
    config = (model / part / "config.json").read_bytes()
    (model / part / "config.json").unlink()
    with pytest.raises(errors.BadInput, match=rf"{part} has no config\.json"):
        check_pipeline(model)
    (model / part / "config.json").write_bytes(config)
    weights_of(model, part).unlink()
    with pytest.raises(errors.BadInput, match=f"{part} contains no weights"):
        check_pipeline(model)


@pytest.mark.parametrize("cut", [1, 100, "half", "all"])
def test_truncated_weights_fail_the_check(model, cut):
    path = weights_of(model, "unet")
    data = path.read_bytes()
    path.write_bytes(data[: {"half": len(data) // 2, "all": 0}.get(cut, len(data) - cut if cut in (1, 100) else 0)])
    with pytest.raises(errors.CheckFailed, match=f"{path.name} is damaged"):
        check_pipeline(model)
    with pytest.raises(errors.CheckFailed):
        check_safetensors(path)


def test_weights_with_a_torn_header_fail_the_check(model):
    path = weights_of(model, "vae")
    data = bytearray(path.read_bytes())
    data[8:40] = b"\0" * 32
    path.write_bytes(data)
    with pytest.raises(errors.CheckFailed, match="damaged"):
        check_pipeline(model)


def test_a_damaged_index_fails_the_check(model):
    text = (model / "model_index.json").read_text()
    (model / "model_index.json").write_text(text[:-20])
    with pytest.raises(errors.CheckFailed, match=r"model_index\.json is not JSON"):
        check_pipeline(model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.ckpt"])
def test_a_pickle_alone_is_bad_input(model, name):
    weights_of(model, "text_encoder").unlink()
    (model / "text_encoder" / name).write_bytes(b"\x80\x04.")
    with pytest.raises(errors.BadInput, match=f"{name}, a pickle"):
        check_pipeline(model)


def shard(model, part="unet", count=3):
    """Rename a part's weights as the first of `count` shards; return the paths of the others, which are missing."""
    path = weights_of(model, part)
    names = [f"{path.stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for name in names:
        shutil.copy(path, path.with_name(name))
    path.unlink()
    index = {"weight_map": {f"weight{i}": name for i, name in enumerate(names)}}
    path.with_name(f"{path.name}.index.json").write_text(json.dumps(index))
    return [path.with_name(name) for name in names]


def test_a_missing_shard_is_named(model):
    shards = shard(model)
    check_pipeline(model)
    shards[1].unlink()
    with pytest.raises(errors.BadInput, match=shards[1].name):
        check_pipeline(model)


@pytest.mark.parametrize("name", ["diffusion_pytorch_model.safetensors.index.json", "config.json"])
def test_damaged_json_of_a_part_fails_the_check(model, name):
    shard(model)
    path = model / "unet" / name
    path.write_text(path.read_text()[:-5])
    with pytest.raises(errors.CheckFailed, match=name):
        check_pipeline(model)
        model_resolution(model)  # what train.py asks for next


# ---------------------------------------------------------------------------------------------------------------------
# Other files, variants, number of weights


def test_other_files_beside_do_not_matter(model):
    (model / "README.md").write_text("x")
    (model / "v1-4.ckpt").write_bytes(b"x")
    (model / ".cache").mkdir()
    check_pipeline(model)


@pytest.mark.parametrize(
    ("names", "variant"),
    [
        (["model.safetensors"], None),
        (["model.fp16.safetensors"], "fp16"),
        (["model.safetensors", "model.fp16.safetensors"], None),
        (["diffusion_pytorch_model.non_ema.safetensors"], "non_ema"),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], None),
        (["model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"], "fp16"),
        (["model-00001-of-00002.fp16.safetensors", "model-00002-of-00002.fp16.safetensors"], "fp16"),
        ([], None),
    ],
)
def test_the_variant_of_a_parts_weights(tmp_path, names, variant):
    for name in names:
        (tmp_path / name).touch()
    assert weights_variant(tmp_path) == variant


def test_the_weights_are_counted_once_whatever_their_variants(model):
    from diffusers import UNet2DConditionModel
    from safetensors.numpy import load_file, save_file

    unet = UNet2DConditionModel.from_pretrained(model / "unet")
    assert count_weights(model / "unet") == unet.num_parameters()
    parts = [count_weights(model / part) for part in PARTS]
    assert count_weights(model) == sum(parts) and parts.count(0) == 2  # the scheduler and the tokenizer have none
    plain = model / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({name: value.astype("float16") for name, value in load_file(plain).items()},
              model / "unet" / "diffusion_pytorch_model.fp16.safetensors")  # fmt: skip
    assert count_weights(model / "unet") == unet.num_parameters()
    plain.unlink()
    assert count_weights(model / "unet") == unet.num_parameters()


# ---------------------------------------------------------------------------------------------------------------------
# The files that are used, and copies of them

INDEX = '{"weight_map": {}}'


@pytest.mark.parametrize(
    ("names", "used"),
    [
        (["config.json", "model.safetensors"], {}),
        (["config.json", "model.fp16.safetensors"], {"model.fp16.safetensors": "model.safetensors"}),
        (["merges.txt", "vocab.json", "spiece.model"], {}),
        (["model.non_ema.fp16.safetensors"], {"model.non_ema.fp16.safetensors": "model.safetensors"}),
        (["model-00001-of-00001.safetensors", "model.safetensors.index.json"], {}),
        (
            ["model.fp16-00001-of-00001.safetensors", "model.safetensors.index.fp16.json"],
            {
                "model.fp16-00001-of-00001.safetensors": "model-00001-of-00001.safetensors",
                "model.safetensors.index.fp16.json": "model.safetensors.index.json",
            },
        ),
        (["model-00001-of-00001.fp16.safetensors"], {
            "model-00001-of-00001.fp16.safetensors": "model-00001-of-00001.safetensors"
        }),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "others", [[], ["model.bin", "pytorch_model.bin.index.json", "README.md", "flax_model.msgpack"]]
)
def test_the_files_of_a_component_that_are_used(tmp_path, names, used, others):
    for name in (*names, *others):
        (tmp_path / name).write_text(INDEX)
    assert component_files(tmp_path) == {used.get(name, name): tmp_path / name for name in names}


def test_a_variant_beside_plain_weights_is_not_used(tmp_path):
    names = ["model.safetensors", "model.fp16.safetensors", "model.safetensors.index.fp16.json"]
    for name in names:
        (tmp_path / name).write_text(INDEX)
    assert component_files(tmp_path) == {names[0]: tmp_path / names[0]}


def as_hub_snapshot(model, folder):
    """Make links in `folder` to the files of a model, as the Hub's cache has them; return it."""
    for number, path in enumerate(path for path in sorted(model.rglob("*")) if path.is_file()):
        blob, link = folder.parent / "blobs" / str(number), folder / path.relative_to(model)
        for place in (blob, link):
            place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blob)
        link.symlink_to(blob)
    return folder


def with_fp16_beside(model, folder):
    shutil.copytree(model, folder)
    for path in folder.glob("*/*.safetensors"):
        path.with_suffix(".fp16.safetensors").write_bytes(b"never read")
    return folder


def with_fp16_alone(model, folder):
    shutil.copytree(model, folder)
    for path in folder.glob("*/*.safetensors"):
        path.rename(path.with_suffix(".fp16.safetensors"))
    return folder


def with_fp16_in_shards(model, folder):
    import torch
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(model, dtype=torch.float16)
    pipeline.save_pretrained(folder, variant="fp16", max_shard_size="50KB")
    assert len(list(folder.glob("unet/*.safetensors"))) > 1
    return folder


@pytest.mark.parametrize(
    "make", [shutil.copytree, as_hub_snapshot, with_fp16_beside, with_fp16_alone, with_fp16_in_shards]
)
def test_a_copy_has_the_digest_of_its_base_and_loads_alike(tiny_model, tmp_path, make):
    import torch

    from pipelines.loading import load_models

    base, copy = make(tiny_model, tmp_path / "base"), tmp_path / "copy"
    copy.mkdir()
    for name in PARTS:
        copy_component(base / name, copy / name)
    shutil.copyfile(base / "model_index.json", copy / "model_index.json")
    check_pipeline(copy)
    assert digest_model(copy) == digest_model(base)
    assert all(digest_parts(copy, [part]) == digest_parts(base, [part]) for part in PARTS)
    assert not any(path.is_symlink() or ".fp16" in path.name for path in copy.rglob("*"))
    pairs = [load_models(folder, ("unet", "text_encoder"), torch.float32) for folder in (base, copy)]
    for name in pairs[0]:
        numbers = [pair[name].state_dict().values() for pair in pairs]
        assert all(torch.equal(one, other) for one, other in zip(*numbers, strict=True))


def test_the_digest_of_an_ordinary_model_stays_what_it_was(tiny_model):
    """Images, evaluations and data sets that were made with it name it."""
    names = sorted(path.relative_to(tiny_model).as_posix() for path in tiny_model.rglob("*") if path.is_file())

    def digest(names):
        lines = sorted(f"{name} {hashlib.sha256((tiny_model / name).read_bytes()).hexdigest()}" for name in names)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    assert digest_model(tiny_model) == digest(names)
    encoders = ("vae", "text_encoder", "tokenizer")
    assert digest_parts(tiny_model, encoders) == digest(name for name in names if name.startswith(encoders))


def test_other_folders_beside_do_not_change_the_digest(model):
    digest = digest_model(model)
    shutil.copytree(model / "unet", model / "unet.old")
    assert digest_model(model) == digest


def test_the_embedded_model_is_laid_out_as_older_libraries_read_it():
    """By weights' names with a prefix, and a tokenizer's vocab.json and merges.txt; tokenizer.json says the same."""
    from safetensors import safe_open

    folder = ROOT / "models" / "emoji-64"
    with safe_open(folder / "text_encoder" / "model.safetensors", framework="np") as file:
        assert all(name.startswith("text_model.") for name in file.keys())  # noqa: SIM118
    fast = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["model"]
    assert json.loads((folder / "tokenizer" / "vocab.json").read_text()) == fast["vocab"]
    _, *merges = (folder / "tokenizer" / "merges.txt").read_text().splitlines()
    assert [line.split() for line in merges] == fast["merges"]
    manifest = folders.read_manifest(folder, deep=True)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert manifest["files"].keys() == files - {folders.MANIFEST}


# ---------------------------------------------------------------------------------------------------------------------
# Damage


def make_model(folder):
    (folder / "unet").mkdir(parents=True)
    (folder / "unet" / "model.safetensors").write_text("anything")
    (folder / "unet" / "config.json").write_text("{}")
    return folder


def test_a_hub_blob_is_read_to_check_it_not_to_know_its_digest(tmp_path, monkeypatch):
    model = make_model(tmp_path / "snapshots" / "commit")
    blob = tmp_path / "blobs" / ("a" * 64)
    blob.parent.mkdir()
    (model / "unet" / "model.safetensors").rename(blob)
    (model / "unet" / "model.safetensors").symlink_to(blob)
    read = []
    with monkeypatch.context() as patch:
        patch.setattr(folders, "sha256_file", lambda path: read.append(path.name) or "0")
        digest_model(model)
    assert read == ["config.json"]
    with pytest.raises(errors.CheckFailed, match=r"model\.safetensors is damaged"):
        check_model(model)


def test_a_manifest_knows_the_digests_of_its_model(tmp_path):
    plain, published = make_model(tmp_path / "plain"), make_model(tmp_path / "beside")
    folders.publish(published, tmp_path / "model")
    assert digest_model(tmp_path / "model") == digest_model(plain)
    check_model(tmp_path / "model")
    (tmp_path / "model" / "unet" / "model.safetensors").write_text("anythinG")
    with pytest.raises(errors.CheckFailed, match=r"model\.safetensors is damaged"):
        check_model(tmp_path / "model")
    check_model(plain)  # nothing is known of it
