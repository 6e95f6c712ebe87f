"""The file of --concepts."""

import json
from argparse import Namespace

import pytest

from common import errors
from pipelines.subjects import PromptedFolder, read_subjects

REX = {"images": "rex", "prompt": "a zwx dog", "class_images": "reg/dog", "class_prompt": "a dog"}
TOM = {"images": "tom", "prompt": "a sks cat", "class_images": "reg/cat", "class_prompt": "a cat"}


@pytest.fixture
def read(tmp_path):
    """Return a function from subjects, or the text of a file, to what is read of it."""

    def call(*rows, text=None, name="concepts.toml", model_dir="my model", encoding="utf-8"):
        if text is None and name.endswith(".json"):
            text = json.dumps(rows)
        if text is None:
            tables = ["\n".join(["[[subject]]", *(f"{key} = {json.dumps(row[key])}" for key in row)]) for row in rows]
            text = "\n\n".join(tables)
        (tmp_path / name).write_bytes(text.encode(encoding))
        return read_subjects(Namespace(concepts=str(tmp_path / name)), model_dir)

    return call


def test_folders_are_relative_to_the_file(read, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    locations = {"s3://bucket/rex?region=x": "s3://bucket/rex?region=x", "/rex": "/rex", "~/rex": "/home/me/rex"}
    for given, expected in {**locations, "rex": str(tmp_path / "rex"), "../rex": str(tmp_path.parent / "rex")}.items():
        assert read({**REX, "images": given}, TOM)[0].photos.location == expected


def test_each_subject_has_its_folders_prompts_and_identifier(read, tmp_path):
    rex, tom = read(REX, {**TOM, "class_prompt": "a photo of cat", "unique_token": "sks"})
    place = f"--concepts {tmp_path / 'concepts.toml'}, subject 1"
    assert rex.photos == PromptedFolder(str(tmp_path / "rex"), "a zwx dog", f"{place}: images")
    assert rex.class_images == PromptedFolder(str(tmp_path / "reg" / "dog"), "a dog", f"{place}: class_images")
    assert (rex.identifier, tom.identifier) == (("zwx",), ("sks",))
    assert [subject.class_images for subject in read(REX, TOM, model_dir=None)] == [None, None]


def test_a_list_of_diffusers_is_the_same(read):
    names = {"images": "instance_data_dir", "prompt": "instance_prompt", "class_images": "class_data_dir"}
    rows = [{names.get(key, key): value for key, value in row.items()} for row in (REX, TOM)]
    for one, other in zip(read(*rows, name="concepts.json"), read(REX, TOM), strict=True):
        assert one.photos[:2] == other.photos[:2] and one.class_images[:2] == other.class_images[:2]


def test_files_of_other_systems_are_read(read):
    text = '\ufeff[[subject]]\r\nimages = "hündchen"\r\nprompt = "a zwx dog"\r\nclass_prompt = "a dog"\r\n'
    assert read(text=text, model_dir=None)[0].photos.location.endswith("/hündchen")


def without(row, *names):
    return {key: value for key, value in row.items() if key not in names}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([REX, {**TOM, "class_image": "x"}], r"subject 2 has the unknown key 'class_image': the keys are images, "),
        ([REX, without(TOM, "images")], r"subject 2 has no images: add it"),
        ([without(REX, "class_prompt"), TOM], r"subject 1 has no class_prompt: add it"),
        ([{**REX, "prompt": 3}, TOM], r"subject 1: prompt must be a text that is not empty, not 3"),
        ([{**REX, "images": " "}, TOM], r"subject 1: images must be a text"),
        ([REX, {**TOM, "prompt": "a cat"}], r"subject 2: prompt has no word that class_prompt lacks"),
        ([REX, {**TOM, "unique_token": "unq"}], r"subject 2: prompt 'a sks cat' lacks the identifier 'unq'"),
        ([REX, {**TOM, "prompt": "a zwx cat"}], r"prompt of subject 1, 'a zwx dog', contains the identifier 'zwx' of"),
        ([REX, {**TOM, "class_prompt": "a cat, zwx"}], r"class_prompt of subject 2, .* 'zwx' of subject 1: each"),
        ([REX, {**TOM, "prompt": "a sks dog"}], r"'a zwx dog', contains 'dog' of the identifier 'sks dog' \(see uni"),
        ([REX, without(TOM, "class_images")], r"subject 2 has no class images: run python run_model\.py --model_dir "
         r"'my model' --prompts 'a cat' --num_samples_per_prompt 200 --output_dir \S+/class-images-2 and add "
         r'class_images = "class-images-2"'),
    ],
)  # fmt: skip
def test_subjects_that_cannot_be_told_apart_or_are_incomplete(read, rows, said):
    with pytest.raises(errors.BadInput, match=rf"--concepts \S+concepts\.toml.*{said}"):
        read(*rows)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ({"text": ""}, r"must hold tables \[\[subject\]\] alone"),
        ({"text": '[subject]\nimages = "x"'}, r"must hold tables \[\[subject\]\] alone"),
        ({"text": 'lr = 1\n[[subject]]\nimages = "x"'}, r"must hold tables \[\[subject\]\] alone"),
        ({"text": "[[subject]]\nimages = x"}, r"concepts\.toml: Invalid value"),
        ({"text": 'x = "hündchen"', "encoding": "latin-1"}, r"concepts\.toml: .*utf-8"),
        ({"text": '{"instance_prompt": "x"}', "name": "concepts.json"}, r"must hold a list of objects"),
        ({"text": "[", "name": "concepts.json"}, r"concepts\.json: "),
    ],
)
def test_a_file_of_another_form(read, file, said):
    with pytest.raises(errors.BadInput, match=said):
        read(**file)


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(errors.BadInput, match=r"--concepts .*none\.toml: .*No such file"):
        read_subjects(Namespace(concepts=str(tmp_path / "none.toml")), "m")
