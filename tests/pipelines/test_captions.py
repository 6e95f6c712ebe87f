"""Captions of single images: where they are read, and which are refused."""

import json
from pathlib import Path

import pytest
from conftest import make_photos

from common import errors, objects
from common.images import check_images, find_images
from pipelines.captions import MODES, Caption, check_captions, read_captions, text_of


def write_captions(folder, **texts):
    """Write metadata.jsonl: {name of the image without its ending: text}."""
    lines = [json.dumps({"file_name": f"{name[1:]}.png", "text": text}) for name, text in texts.items()]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path):
    return make_photos(tmp_path / "photos", 3)


def captions_of(location):
    found = read_captions(find_images(location, "--x"))
    return {Path(image).name: text for image, (text, _) in found.items()}


def test_metadata_comes_before_a_text_file_and_some_images_have_neither(folder):
    write_captions(folder, _00="from metadata", _09="of no image")
    (folder / "00.txt").write_text("from a file")
    (folder / "01.txt").write_text("from a file")
    assert captions_of(folder) == {"00.png": "from metadata", "01.png": "from a file"}


def test_a_folder_without_captions_has_none(folder):
    assert captions_of(folder) == {}
    (folder / "metadata.jsonl").write_text('{"file_name": "00.png", "label": 3}\n')
    assert captions_of(folder) == {}


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["no BOM", "BOM"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_files_of_other_systems_are_read(folder, mark, end):
    rows = [{"file_name": "00.png", "text": "a\u2028b hündchen"}, {"file_name": "01.png", "text": " two "}]
    text = mark + end.join([*(json.dumps(row, ensure_ascii=False) for row in rows), "", ""])
    (folder / "metadata.jsonl").write_text(text, encoding="utf-8", newline="")
    (folder / "02.txt").write_text(f"{mark}a dog{end}  on grass{end}", encoding="utf-8", newline="")
    assert captions_of(folder) == {"00.png": "a b hündchen", "01.png": "two", "02.png": "a dog on grass"}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("01.txt", b"", r"01\.txt: the file is no caption"),
        ("01.txt", b"\xef\xbb\xbf \r\n", r"01\.txt: the file is no caption"),
        ("01.txt", "hündchen".encode("latin-1"), r"01\.txt is not UTF-8"),
        ("metadata.jsonl", b"\xff", r"metadata\.jsonl is not UTF-8"),
        ("metadata.jsonl", b'{"file_name": "00.png"}\n{"text": "a"}\n', r"metadata\.jsonl: line 2 is not"),
        ("metadata.jsonl", b"file_name,text\n", r"metadata\.jsonl: line 1 is not"),
        ("metadata.jsonl", b'{"file_name": "00.png", "text": " "}', r"metadata\.jsonl: the text of 00\.png is no"),
        ("metadata.jsonl", b'{"file_name": "00.png", "text": 3}', r"metadata\.jsonl: the text of 00\.png is no"),
    ],
)
def test_a_file_that_is_no_caption_is_named(folder, name, content, said):
    (folder / name).write_bytes(content)
    with pytest.raises(errors.BadInput, match=f"{said}.*--captions none"):
        captions_of(folder)


def test_a_caption_counts_neither_as_an_image_nor_as_skipped(folder, capsys):
    write_captions(folder, _00="x")
    (folder / "01.txt").write_text("x")
    (folder / "notes.txt").write_text("taken in May")
    assert len(check_images(find_images(folder, "--x"))) == 3
    assert capsys.readouterr().err == f"{folder}: skipped notes.txt, which are hidden or not images\n"


def test_captions_of_a_store_are_read_and_named_by_their_uri(folder, s3, node_cache):
    write_captions(folder, _00="one")
    (folder / "01.txt").write_text("two")
    objects.upload_folder(folder, s3("photos"))
    found = read_captions(find_images(s3("photos"), "--x"))
    expected = {s3("photos/00.png"): "one", s3("photos/01.png"): "two"}
    assert {image: text for image, (text, _) in found.items()} == expected
    with pytest.raises(errors.BadInput) as error, objects.uris_in_errors():
        check_captions(found, ["unqtkn"])
    assert f"{s3('photos/metadata.jsonl')}: the caption of 00.png 'one' lacks" in str(error.value)


def test_the_identifier_is_in_captions_of_photos_and_not_in_those_of_class_images(folder):
    caption = {"/x/01.png": Caption("A Zwx, QQV dog.", folder / "01.txt")}
    check_captions(caption, ("zwx", "qqv"), [("unqtkn",), ()])
    with pytest.raises(errors.BadInput, match=r"01\.txt: the caption 'A Zwx.* lacks the identifier 'unqtkn': .*after"):
        check_captions(caption, ("unqtkn",))
    with pytest.raises(errors.BadInput, match=r"lacks 'red' of the identifier 'zwx red' \(see unique_token"):
        check_captions(caption, ("zwx", "red"))
    with pytest.raises(errors.BadInput, match=r"01\.txt: the caption 'A Zwx.* contains the identifier 'qqv': remove"):
        check_captions(caption, (), [("unqtkn",), ("qqv",)])


def test_the_text_of_an_image():
    caption = Caption("on grass", Path("00.txt"))
    assert [text_of("a dog", caption, how) for how in MODES] == ["a dog", "on grass", "a dog, on grass"]
    assert [text_of("a dog", None, how) for how in MODES] == ["a dog"] * 3
    assert text_of("a dog", Caption("a dog", Path("00.txt")), "after") == "a dog"  # of an image of run_model.py
