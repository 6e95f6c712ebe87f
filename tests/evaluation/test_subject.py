"""subject.py: what the prompts call the subject and its class."""

import pytest
from conftest import ROOT

from common import errors
from evaluation.subject import find_subject, read_templates

ANIMAL = ("Sks Xyz stuffed animal", "stuffed animal")


@pytest.mark.parametrize(
    ("instance_prompt", "class_prompt", "more", "expected"),
    [
        ("photo of unqtkn dog", "photo of a dog", {}, ("unqtkn dog", "dog")),
        ("a 3d emoji of a unqtkn cat", "a 3d emoji of a cat", {}, ("unqtkn cat", "cat")),
        ("A photo of a Sks Xyz stuffed animal.", "a photo of a stuffed animal", {}, ANIMAL),
        ("photo of unqtkn dog, sitting", "photo of a dog", {"unique_token": "unqtkn"}, ("unqtkn dog", "dog")),
        ("photo of unqtkn dog on grass", "photo of a dog on grass", {"class_name": "dog"}, ("unqtkn dog", "dog")),
        ("picture of sks dog", "photo of a dog", {"unique_token": "sks"}, ("sks dog", "dog")),
        ("photo of unqtkn", "photo of a dog", {"class_name": "dog"}, ("unqtkn dog", "dog")),
    ],
)
def test_the_subject_is_found(instance_prompt, class_prompt, more, expected):
    assert find_subject(instance_prompt, class_prompt, **more) == expected


@pytest.mark.parametrize(
    ("instance_prompt", "class_prompt", "said"),
    [
        ("photo of a dog", "photo of a dog", "has no word that --class_prompt lacks"),
        ("picture of sks dog", "photo of a dog", r"several words .*\(picture, sks\): .* --unique_token"),
        ("photo of unqtkn", "photo of a dog", "names no class after the identifier: give --class_name"),
    ],
)
def test_prompts_that_do_not_tell(instance_prompt, class_prompt, said):
    with pytest.raises(errors.BadInput, match=said):
        find_subject(instance_prompt, class_prompt)


def test_without_a_file_the_instance_prompt_is_the_prompt():
    assert read_templates(None, "photo of unqtkn dog, sitting", "unqtkn dog") == ["photo of {}, sitting"]
    with pytest.raises(errors.BadInput, match="lacks 'unqtkn dog': give --prompts_file"):
        read_templates(None, "photo of unqtkn", "unqtkn dog")


def test_a_file_has_a_prompt_a_line_each_once(tmp_path):
    (tmp_path / "prompts.txt").write_bytes("\ufeffa {}\r\n\n  a red {}, {}  \na {}\n".encode())
    assert read_templates(tmp_path / "prompts.txt", "", "") == ["a {}", "a red {}, {}"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no prompt"),
        (b"\n \n", "holds no prompt"),
        (b"a {}\na dog\n", r"'a dog' has no \{\}"),
        (b"caf\xe9 {}\n", "utf-8"),
        (None, "No such file"),
    ],
)
def test_a_file_without_prompts_is_bad_input(tmp_path, content, said):
    if content is not None:
        (tmp_path / "prompts.txt").write_bytes(content)
    with pytest.raises(errors.BadInput, match=rf"--prompts_file .*{said}"):
        read_templates(tmp_path / "prompts.txt", "", "")


@pytest.mark.parametrize(("name", "count"), [("objects", 25), ("living", 25), ("emoji", 10)])
def test_the_prompts_that_come_along(name, count):
    templates = read_templates(ROOT / "prompts" / f"{name}.txt", "", "")
    assert len(templates) == count and all(template.count("{}") == 1 for template in templates)
