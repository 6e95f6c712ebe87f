"""Files of prompts, and the identifier in instance and class prompts."""

import pytest

from common import errors
from pipelines.prompts import check_prompts, read_prompts_file, unique_prompts


def test_good_prompts_pass():
    check_prompts("photo of unqtkn dog", "photo of a dog")
    check_prompts("photo of UNQTKN dog", "photo of a dog", "unqtkn")
    check_prompts("photo of unqtkn dog")
    check_prompts("photo of zwx qqv dog", "photo of a dog", "zwx qqv")


@pytest.mark.parametrize(
    ("instance", "other", "token", "said"),
    [
        ("photo of a dog", "photo of a dog", None, "--instance_prompt .*identifier"),
        ("photo of dog", "photo of a dog", None, "--instance_prompt .*identifier"),
        ("photo of a dog", "photo of a dog", "unqtkn", "--instance_prompt .*'unqtkn'"),
        ("photo of unqtkn dog", "photo of unqtkn dog", "unqtkn", "--class_prompt .*'unqtkn'"),
        ("photo of Unqtkn dog", "photo of UNQTKN dog", "unqtkn", "--class_prompt .*'unqtkn'"),
        ("photo of zwx dog", "photo of a dog", "zwx qqv", "--instance_prompt .*'qqv'"),
    ],
)
def test_an_identifier_that_does_not_tell_them_apart_is_bad_input(instance, other, token, said):
    with pytest.raises(errors.BadInput, match=said):
        check_prompts(instance, other, token)


def test_a_file_has_a_prompt_a_line_each_once(tmp_path):
    (tmp_path / "prompts.txt").write_text("\ufeffa cat\r\n\n  a dog, sitting \n a cat\n", encoding="utf-8", newline="")
    assert read_prompts_file(tmp_path / "prompts.txt") == ["a cat", "a dog, sitting"]
    assert unique_prompts([" b", "a", "", "b"]) == ["b", "a"]


@pytest.mark.parametrize("content", [None, b"\xff"], ids=["missing", "not UTF-8"])
def test_a_file_that_cannot_be_read_is_bad_input(tmp_path, content):
    if content is not None:
        (tmp_path / "prompts.txt").write_bytes(content)
    with pytest.raises(errors.BadInput, match=r"--prompts_file .*prompts\.txt: "):
        read_prompts_file(tmp_path / "prompts.txt")
