"""A model folder as files: whole or not, which weights, what its tokenizer cuts."""

import hashlib
import json
import shutil
import sys

import pytest
from conftest import ROOT

from common import errors, folders
from pipelines import tokens
from pipelines.configs import check_resolution, model_resolution, pixel_factor, read_config
from pipelines.model_folder import (
    check_model,
    check_pipeline,
    check_safetensors,
    component_files,
    copy_component,
    count_weights,
    count_weights_of,
    digest_model,
    digest_parts,
    weights_variant,
)
from pipelines.tokens import check_vocabulary, max_tokens, say_what_is_cut, tokenize

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
# Vocabularies and configurations


def test_a_tokenizer_without_its_vocabulary_is_refused(model):
    (model / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(errors.BadInput, match=r"tokenizer lacks tokenizer\.json, or vocab"):
        check_pipeline(model)
    (model / "tokenizer" / "vocab.json").write_text('{"a": 0}')  # transformers 5 would take it without merges.txt
    with pytest.raises(errors.BadInput, match=r"lacks tokenizer\.json"):
        check_pipeline(model)


def as_slow_tokenizer(model):
    """Keep a model's vocabulary in vocab.json and merges.txt, as libraries did before tokenizer.json; return it."""
    path = model / "tokenizer" / "tokenizer.json"
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    path.unlink()
    (model / "tokenizer" / "vocab.json").write_text(json.dumps(vocabulary))
    (model / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    return vocabulary


def test_a_vocabulary_in_two_files_passes(model):
    before = tokenize(str(model), ["a dog"])
    as_slow_tokenizer(model)
    check_pipeline(model)
    tokens._load_tokenizer.cache_clear()
    assert tokenize(str(model), ["a dog"]) == before


@pytest.mark.parametrize("change", ["two", "more", "added"])
def test_a_tokenizer_of_another_text_encoder_is_refused(model, change):
    vocabulary = as_slow_tokenizer(model)
    count, tokenizer = len(vocabulary), model / "tokenizer"
    if change == "two":
        (tokenizer / "vocab.json").write_text('{"<|startoftext|>": 0, "<|endoftext|>": 1}')
    elif change == "more":
        (tokenizer / "vocab.json").write_text(json.dumps(vocabulary | {"dog</w>": count}))
    else:
        (tokenizer / "added_tokens.json").write_text(json.dumps({"<sks>": count}))
    found = 2 if change == "two" else count + 1
    with pytest.raises(errors.BadInput, match=f"tokenizer has {found} tokens, but the text encoder has {count}"):
        check_pipeline(model)


def test_a_tokenizer_with_half_of_its_merges_is_refused(tmp_path):
    """It reads words letter by letter: its text encoder has never seen them so."""
    for name, half in (("merges.txt", lambda text: text[: len(text) // 2]), ("merges.txt", lambda text: "")):
        folder = shutil.copytree(ROOT / "models" / "emoji-64" / "tokenizer", tmp_path / "tokenizer", dirs_exist_ok=True)
        check_vocabulary(folder, 2500)
        (folder / "tokenizer.json").unlink()
        check_vocabulary(folder, 2500)
        (folder / name).write_text(half((folder / name).read_text()))
        with pytest.raises(errors.BadInput, match=r"has \d+ merges for 1986 multi-letter tokens"):
            check_vocabulary(folder, 2500)


@pytest.mark.parametrize("text", ["[]", '{"model": null}', '{"model": {"vocab": {"a": "x"}}}', '{"added_tokens": [1]}'])
def test_a_vocabulary_that_is_none_fails_the_check(model, text):
    (model / "tokenizer" / "tokenizer.json").write_text(text)
    with pytest.raises(errors.CheckFailed, match=r"tokenizer\.json is not a"):
        check_pipeline(model)


def test_tokenizers_of_other_kinds_pass(tmp_path):
    """Unigram's vocabulary is a list, WordPiece's a text file in which a line may hold what else ends lines."""
    unigram = {"model": {"type": "Unigram", "vocab": [["a", 0.0], ["dog", -1.0]]}, "added_tokens": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    check_vocabulary(tmp_path, 2)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("a\n\u2028\n\x85\ndog\n", "utf-8")
    check_vocabulary(tmp_path, 4)


def test_a_tokenizer_of_bytes_has_no_vocabulary(model):
    index = json.loads((model / "model_index.json").read_text())
    index["tokenizer"] = ["transformers", "ByT5Tokenizer"]
    (model / "model_index.json").write_text(json.dumps(index))
    (model / "tokenizer" / "tokenizer.json").unlink()
    check_pipeline(model)


def test_tokens_rounded_up_and_vocabularies_of_other_libraries_pass(model):
    path = model / "text_encoder" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 3}))
    check_pipeline(model)
    (model / "tokenizer" / "tokenizer.json").unlink()
    (model / "tokenizer" / "spiece.model").write_bytes(b"sentencepiece")
    check_pipeline(model)


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


def test_other_files_beside_do_not_matter(model):
    (model / "README.md").write_text("x")
    (model / "v1-4.ckpt").write_bytes(b"x")
    (model / ".cache").mkdir()
    check_pipeline(model)


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


@pytest.fixture
def length(tiny_model):
    """Tokens that the tiny text encoder reads: a letter each, but for the first and the last."""
    return json.loads((tiny_model / "tokenizer" / "tokenizer_config.json").read_text())["model_max_length"]


def test_prompts_become_ids_of_the_encoders_length(tiny_model, length, capsys):
    ids = tokenize(tiny_model, ["a cat", "", "a dog"])
    assert [len(row) for row in ids] == [length] * 3
    assert all(isinstance(i, int) for row in ids for i in row)
    assert ids[0][:2] == ids[2][:2] and ids[0][2] != ids[2][2]
    assert len(set(ids[1])) == 2  # begin, then end and padding
    assert capsys.readouterr().err == ""


def test_the_length_is_known_without_transformers_or_from_the_text_encoder(model, length, monkeypatch):
    path = model / "tokenizer" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)
        assert max_tokens(model) == length
    path.write_text(json.dumps({name: value for name, value in settings.items() if name != "model_max_length"}))
    assert max_tokens(model) == length
    path.write_text(json.dumps({**settings, "model_max_length": 10**30}))
    assert max_tokens(model) == length


def test_what_of_a_long_prompt_is_cut_is_said(tiny_model, length, capsys):
    fits = "abcdefghij"[: (length - 2) % 10] + "abcdefghij" * ((length - 2) // 10)
    kept, cut = tokenize(tiny_model, [fits, fits + "xyz"])
    say_what_is_cut(tiny_model, [fits, fits + "xyz"])
    assert len(kept) == len(cut) == length and kept[:-2] == cut[:-2]  # the last letter ends a word or not
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert f"{length} tokens" in said[0] and f"has {length + 3}" in said[0] and "'xyz'" in said[0]
    assert fits + "xyz" in said[0]


def test_the_weights_are_counted_once_whatever_their_variants(model):
    from diffusers import UNet2DConditionModel
    from safetensors.numpy import load_file, save_file

    unet = UNet2DConditionModel.from_pretrained(model / "unet")
    assert count_weights(model / "unet") == unet.num_parameters() == count_weights_of(dict(unet.config))
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
    """Make links in `folder` to the files of a model, as the hub's cache has them; return it."""
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
