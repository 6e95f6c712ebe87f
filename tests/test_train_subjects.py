"""train.py with captions of single images, and with several subjects."""

import json
import shutil

import pytest
from PIL import Image
from safetensors.numpy import load_file
from test_train import assert_equal_weights, command, no_card_images, no_models  # noqa: F401

import train
from common import errors, folders
from pipelines.tokens import tokenize

PROMPT, CLASS_PROMPT = "photo of unqtkn dog", "photo of a dog"
GRASS, NIGHT = "unqtkn dog on grass", "unqtkn dog at night"


@pytest.fixture
def captioned(photos, tmp_path):
    """Three photos, two of them with a caption."""
    folder = shutil.copytree(photos, tmp_path / "captioned")
    (folder / "00.txt").write_text(GRASS)
    (folder / "01.txt").write_text(NIGHT)
    return folder


@pytest.fixture
def batches(monkeypatch):
    """The list of all batches of a run."""
    seen, real = [], train.training_step

    def watch(model, batch, *args, **options):
        seen.append(batch)
        return real(model, batch, *args, **options)

    monkeypatch.setattr(train, "training_step", watch)
    return seen


def texts_of(batches, model_dir, *candidates):
    """Return the texts of the instance row, and of the class row, of each batch."""
    ids = dict(zip(map(tuple, tokenize(model_dir, candidates)), candidates, strict=True))
    assert len(ids) == len(candidates)
    rows = [[ids[tuple(row)] for row in batch["text_encoder.ids"].tolist()] for batch in batches]
    return [list(half) for half in zip(*rows, strict=True)]


def settings_of(output_dir):
    return folders.read_manifest(output_dir)["settings"]


def write_records(images_dir, folder, *texts):
    """Copy images, and give the first of them a text in metadata.jsonl, as run_model.py does."""
    shutil.copytree(images_dir, folder)
    rows = [{"file_name": f"{number:02d}.png", "text": text} for number, text in enumerate(texts)]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_captions_replace_the_prompt_where_a_photo_has_one(command, captioned, batches, tiny_model, capsys):  # noqa: F811
    for number, value in enumerate((0, 128, 255)):  # black, grey and white: told apart by their latents
        Image.new("RGB", (20, 20), (value,) * 3).save(captioned / f"{number:02d}.png")
    command(instance_images_dir=captioned, max_train_steps=8)
    instance, others = texts_of(batches, tiny_model, GRASS, NIGHT, PROMPT, CLASS_PROMPT)
    assert sorted(instance) == [PROMPT] * 2 + [NIGHT] * 3 + [GRASS] * 3 and others == [CLASS_PROMPT] * 8  # an epoch
    grey = [round(float(batch["mean"][0].mean()), 4) for batch in batches]
    assert len(set(zip(instance, grey, strict=True))) == len(set(grey)) == 3
    said = capsys.readouterr().err
    line = "captions: 2 of 3 photos and 0 of 8 class images have one, which replaces the prompt (--captions own)"
    assert said.splitlines().count(line) == 1
    assert "skipped" not in said

    (captioned / "01.txt").write_text(f"{NIGHT}, running")
    with pytest.raises(errors.BadInput, match=r"other settings \(captions was "):
        command(instance_images_dir=captioned, max_train_steps=9)


def test_captions_follow_the_prompt(command, captioned, class_images, batches, tiny_model, tmp_path):  # noqa: F811
    """And those that run_model.py writes beside its class images do not repeat it."""
    (captioned / "00.txt").write_text("red")
    drawn = write_records(class_images, tmp_path / "drawn", "blue", *["dog"] * 7)
    flags = {"instance_prompt": "unqtkn dog", "class_prompt": "dog", "captions": "after"}  # the tiny model reads few
    command(instance_images_dir=captioned, class_images_dir=drawn, max_train_steps=8, **flags)
    texts = [f"unqtkn dog, {NIGHT}", "unqtkn dog, red", "unqtkn dog", "dog", "dog, blue"]
    instance, others = texts_of(batches, tiny_model, *texts)
    assert set(instance) == set(texts[:3]) and sorted(others) == ["dog"] * 7 + ["dog, blue"]


def test_without_captions_a_run_is_as_before(command, captioned, class_images, tmp_path, capsys):  # noqa: F811
    """Records of class images alone change no run, and captions that are not wanted do not either."""
    command(max_train_steps=2)
    drawn = write_records(class_images, tmp_path / "drawn", "a drawing of a dog")
    command(max_train_steps=2, output_dir=tmp_path / "of-drawn", class_images_dir=drawn)
    command(max_train_steps=2, output_dir=tmp_path / "of-none", instance_images_dir=captioned, captions="none")
    for other in ("of-drawn", "of-none"):
        assert_equal_weights(command.output_dir, tmp_path / other)
        assert settings_of(command.output_dir) == settings_of(tmp_path / other)
    assert "captions" not in settings_of(command.output_dir) and "captions" not in capsys.readouterr().err


def test_bad_captions_end_the_run_before_a_model_is_loaded(command, captioned, no_models):  # noqa: F811
    alone = {"prior_loss_weight": 0, "class_images_dir": None, "class_prompt": None}
    with pytest.raises(errors.BadInput, match=r"--captions own .*--unique_token"):
        command(instance_images_dir=captioned, **alone)
    (captioned / "01.txt").write_text("a dog at night")
    with pytest.raises(errors.BadInput, match=r"01\.txt: the caption 'a dog at night' lacks the identifier 'unqtkn'"):
        command(instance_images_dir=captioned)


def test_a_long_caption_that_is_cut_is_said(command, captioned, capsys):  # noqa: F811
    (captioned / "01.txt").write_text(f"unqtkn {'very ' * 40} end")
    command(instance_images_dir=captioned, dry_run=True)
    assert "end' is ignored" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Several subjects


def write_concepts(path, *subjects):
    tables = ["\n".join(["[[subject]]", *(f'{key} = "{value}"' for key, value in each.items())]) for each in subjects]
    path.write_text("\n\n".join(tables))
    return path


NO_FLAGS = dict.fromkeys(("instance_images_dir", "instance_prompt", "class_images_dir", "class_prompt"))


@pytest.fixture
def dog(photos, class_images):
    return {"images": photos, "prompt": PROMPT, "class_images": class_images, "class_prompt": CLASS_PROMPT}


@pytest.fixture
def two(dog, class_images, tmp_path):
    """A dog of three photos and a cat of two, grey ones, which share their class images."""
    (tmp_path / "cat").mkdir()
    for number, value in enumerate((0, 255)):
        Image.new("RGB", (20, 20), (value,) * 3).save(tmp_path / "cat" / f"{number}.png")
    cat = {"images": "cat", "prompt": "zwx cat", "class_images": class_images, "class_prompt": "cat"}
    return write_concepts(tmp_path / "concepts.toml", dog, cat)


def test_one_subject_in_a_file_is_that_of_the_flags(command, dog, tmp_path, capsys):  # noqa: F811
    concepts = write_concepts(tmp_path / "concepts.toml", dog)
    command(max_train_steps=2, random_crop=False, output_dir=tmp_path / "of-flags")
    command(max_train_steps=2, random_crop=False, concepts=concepts, **NO_FLAGS)
    assert_equal_weights(command.output_dir, tmp_path / "of-flags")
    assert settings_of(command.output_dir) == settings_of(tmp_path / "of-flags")
    assert (command.output_dir / "README.md").read_text() == (tmp_path / "of-flags" / "README.md").read_text()
    capsys.readouterr()
    command(max_train_steps=2, random_crop=False)
    assert "nothing to do" in capsys.readouterr().err


def test_an_epoch_has_as_many_pairs_of_each_subject(command, two, batches, tiny_model, capsys):  # noqa: F811
    command(concepts=two, num_epochs=2, max_train_steps=None, random_flip=False, **NO_FLAGS)
    instance, others = texts_of(batches, tiny_model, PROMPT, "zwx cat", CLASS_PROMPT, "cat")
    assert len(instance) == 2 * 2 * 8  # of two epochs, two subjects, eight class images
    for epoch in (slice(0, 16), slice(16, 32)):
        assert instance[epoch].count(PROMPT) == instance[epoch].count("zwx cat") == 8
    class_of = {PROMPT: CLASS_PROMPT, "zwx cat": "cat"}
    assert others == [class_of[text] for text in instance]
    grey = {batch["mean"][0].mean().item() for text, batch in zip(instance, batches, strict=True) if text == "zwx cat"}
    assert len(grey) == 2 and len({batch["mean"][1].mean().item() for batch in batches}) == 8
    arrays = load_file(command.work_dir / "posteriors" / "posteriors.safetensors")
    assert len(arrays["mean"]) <= 8 + 2 + 9  # shared class images, one crop of a square photo, three of each other

    settings = settings_of(command.output_dir)
    assert settings["instance_prompt"] == [PROMPT, "zwx cat"] and settings["class_prompt"] == [CLASS_PROMPT, "cat"]
    digests = settings["class_images_dir"]
    assert digests[0] == digests[1] != settings["instance_images_dir"][0] != settings["instance_images_dir"][1]
    card = (command.output_dir / "README.md").read_text()
    assert "fine-tuned on 2 subjects" in card and f"`{PROMPT}`, `zwx cat`." in card
    assert len(list((command.output_dir / "samples").iterdir())) == 2
    assert "warning" not in capsys.readouterr().err


def test_subjects_without_class_images(command, two, no_models):  # noqa: F811
    two.write_text("\n".join(line for line in two.read_text().splitlines() if not line.startswith("class_images")))
    with pytest.raises(errors.BadInput, match=r"subject 1 has no class images: run python run_model\.py"):
        command(concepts=two, **NO_FLAGS)


@pytest.mark.parametrize("words", [["--concepts", "x.toml"], []])
def test_flags_of_a_subject_or_a_file_of_them(command, words, capsys):  # noqa: F811
    flags = {} if words else {"instance_prompt": None}
    with pytest.raises(SystemExit):
        train.parse_args([*command.arguments(**flags), *words])
    said = capsys.readouterr().err
    assert "--instance_images_dir and --concepts both" in said if words else "required: --instance_prompt, or" in said


def test_captions_of_a_subject_have_its_own_identifier(command, two, no_models):  # noqa: F811
    (two.parent / "cat" / "1.txt").write_text("unqtkn dog")
    with pytest.raises(errors.BadInput, match=r"1\.txt: the caption 'unqtkn dog' lacks the identifier 'zwx'"):
        command(concepts=two, **NO_FLAGS)
