"""raw_data.py: the sources found in Parquet, metadata.jsonl and WebDataset tars, and the rows read from them."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import noise_png
from raw_files import make_kind, make_tar, write_img2dataset, write_jsonl, write_parquet

from common import errors
from common.storage import Folder
from pretraining import raw_data, rows, tars
from pretraining.raw_data import list_sources
from pretraining.rows import read_rows


def all_rows(location, **options):
    return [row for source in list_sources(str(location), **options) for row in read_rows(source, 0, source.num_rows)]


# ---------------------------------------------------------------------------------------------------------------------
# Parquet


def test_a_row_group_of_a_parquet_file_is_a_source(tmp_path):
    write_parquet(tmp_path / "b.parquet", [b"x"] * 5, list("abcde"), row_group_size=2)
    write_parquet(tmp_path / "a" / "z.PARQUET", [b"x"], ["f"])
    write_parquet(tmp_path / "c.parquet", pa.array([], pa.binary()), pa.array([], pa.string()))
    sources = list_sources(str(tmp_path))
    found = [(source.name, source.kind, source.first, source.num_rows) for source in sources]
    assert found == [
        ("a/z.PARQUET", "parquet", 0, 1),
        *[("b.parquet", "parquet", group, rows) for group, rows in enumerate([2, 2, 1])],
    ]
    assert all(source.size == (tmp_path / source.name).stat().st_size for source in sources)
    found = all_rows(tmp_path)
    assert [row["caption"] for row in found] == list("fabcde") and len({row["key"] for row in found}) == 6


def test_a_footer_is_read_once_also_for_a_condition(faulty_s3):
    buffer, place = pa.BufferOutputStream(), faulty_s3.uri("raw")
    pq.write_table(pa.table({"image": ["x"] * 4, "caption": ["x"] * 4, "score": [1.0] * 4}), buffer, row_group_size=2)
    Folder(place).write("x.parquet", buffer.getvalue().to_pybytes())
    counts = []
    for where in (None, "score > 0"):
        faulty_s3.clear()
        assert len(list_sources(place, where=where)) == 2
        counts.append(len(faulty_s3.seen("", "x.parquet")))
    assert counts[0] == counts[1]


def test_a_row_group_is_read_to_the_last_row_asked_for(faulty_s3, monkeypatch):
    """A column that is larger than a request takes one or two requests for each of that size."""
    buffer, place, rng = pa.BufferOutputStream(), faulty_s3.uri("raw"), np.random.default_rng(0)
    images, step = [rng.bytes(1000) for _ in range(1024)], 128
    table = pa.table({"image": pa.array(images, pa.binary()), "caption": ["x"] * len(images)})
    pages = {"data_page_size": 20_000, "write_batch_size": 20}
    pq.write_table(table, buffer, compression="none", use_dictionary=False, **pages)
    Folder(place).write("x.parquet", buffer.getvalue().to_pybytes())
    (source,) = list_sources(place)

    def requests(first, count):
        faulty_s3.clear()
        assert [row["image"] for row in read_rows(source, first, count)] == images[first : first + count]
        return len(faulty_s3.requests)

    whole = requests(0, 1024)
    assert requests(0, step) == requests(1024 - step, step) == whole
    monkeypatch.setattr(rows, "REQUEST", 250_000)
    assert requests(0, step) == whole < requests(512, step) < requests(1024 - step, step) <= whole + 7
    assert requests(0, 1024) == requests(1024 - step, step)


def test_the_struct_of_hugging_face_holds_bytes_or_a_path(tmp_path):
    images = [{"bytes": b"one", "path": "1.png"}, {"bytes": None, "path": "2.png"}, {"bytes": None, "path": None}, None]
    write_parquet(tmp_path / "x.parquet", images, list("abcd"))
    assert [row["image"] for row in all_rows(tmp_path)] == [b"one", "2.png", None, None]


def test_text_that_is_not_utf_8_is_no_caption(tmp_path):
    captions = pa.array([b"one", b"\xff\xfe two", b"three"], pa.binary()).view(pa.string())
    write_parquet(tmp_path / "x.parquet", [b"x"] * 3, captions)
    assert [(row["image"], row["caption"]) for row in all_rows(tmp_path)] == [
        (b"x", "one"),
        (b"x", None),
        (b"x", "three"),
    ]


@pytest.mark.parametrize(
    ("columns", "flags", "found"),
    [
        (["TEXT", "URL"], {}, ("URL", "TEXT")),
        (["jpg", "txt", "url"], {}, ("jpg", "txt")),
        (["image", "caption", "text"], {}, ("image", "caption")),
        (["image", "caption", "text", "thumb"], {"image_column": "thumb", "caption_column": "text"}, ("thumb", "text")),
    ],
)
def test_the_usual_columns_are_found_and_others_named(columns, flags, found, tmp_path):
    pq.write_table(pa.table({name: ["x"] for name in columns}), tmp_path / "x.parquet")
    source = list_sources(str(tmp_path), **flags)[0]
    assert (source.image_column, source.caption_column) == found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, r"none of the known image columns \(image, jpg.*--image_column: picture, alt$"),
        ({"image_column": "jpg"}, r"no column jpg: .*--image_column: picture, alt$"),
        ({"image_column": "picture"}, r"none of the known caption columns.*--caption_column: picture, alt$"),
    ],
)
def test_a_column_that_is_missing_names_those_that_are_there(flags, message, tmp_path):
    pq.write_table(pa.table({"picture": ["x"], "alt": ["x"]}), tmp_path / "x.parquet")
    with pytest.raises(errors.BadInput, match=message):
        list_sources(str(tmp_path), **flags)


# ---------------------------------------------------------------------------------------------------------------------
# metadata.jsonl


def test_lines_name_files_beside_them(tmp_path):
    write_jsonl(tmp_path, [{"file_name": "a.png", "text": "one"}, b"", {"file_name": "b/c.png", "text": "two"}])
    write_jsonl(tmp_path / "more", [{"file_name": "d.png", "text": "three"}])
    found = [(row["image"], row["caption"]) for row in all_rows(tmp_path)]
    assert found == [("a.png", "one"), ("b/c.png", "two"), ("more/d.png", "three")]
    other = {"image_column": "text", "caption_column": "file_name"}
    row = {"key": "more/metadata.jsonl:0:0", "image": "more/three", "caption": "d.png"}
    assert all_rows(tmp_path, **other)[2] == row


def test_a_long_file_is_several_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_data, "LINES_OF_A_SOURCE", 4)
    write_jsonl(tmp_path, [{"file_name": f"{i}.png", "text": str(i)} for i in range(10)])
    assert [(source.first, source.num_rows) for source in list_sources(str(tmp_path))] == [(0, 4), (4, 4), (8, 2)]
    rows = all_rows(tmp_path)
    assert [row["caption"] for row in rows] == [str(i) for i in range(10)] and len({row["key"] for row in rows}) == 10


def test_lines_are_found_by_their_place_in_the_file(faulty_s3, monkeypatch):
    """A range of lines is one request, whatever ends the lines, and however they fall into the blocks of a listing."""
    captions = [f"caption {i} \u2028 {'x' * (i % 5)}" for i in range(11)]
    lines = [json.dumps({"file_name": f"{i}.png", "text": text}, ensure_ascii=False) for i, text in enumerate(captions)]
    ends = ["\n", "\r\n", "\n\n", "\r", "\n \t\n"]
    text = "".join(line + ends[i % 5] for i, line in enumerate(lines))
    place = faulty_s3.uri("raw")
    Folder(place).write("sub/metadata.jsonl", b"\r\n" + text.encode().rstrip())
    monkeypatch.setattr(raw_data, "LINES_OF_A_SOURCE", 3)
    expected = list(list_sources(place))
    assert [(source.first, source.num_rows) for source in expected] == [(0, 3), (3, 3), (6, 3), (9, 2)]
    for block in (1, 50, 120):
        monkeypatch.setattr(rows, "BLOCK", block)
        assert list(list_sources(place)) == expected
    faulty_s3.clear()
    assert [row["caption"] for row in read_rows(expected[2], 0, 9)] == captions[6:9]
    assert len(faulty_s3.requests) == 1
    assert [row["caption"] for source in expected for row in read_rows(source, 1, 1)] == captions[1::3]
    Folder(place).write("sub/metadata.jsonl", b"\n" * 2000)
    with pytest.raises(errors.CheckFailed, match=r"sub/metadata\.jsonl.* was changed while it was being read"):
        list(read_rows(expected[2], 0, 9))


# ---------------------------------------------------------------------------------------------------------------------
# WebDataset


def test_neighbours_of_one_name_are_a_sample(tmp_path):
    members = [
        ("0001.jpg", b"one"), ("0001.txt", b" a caption\n"),
        ("sub/0001.png", b"two"), ("sub/0001.json", json.dumps({"caption": "from json", "text": "no"}).encode()),
        ("v1.5/0002.JPG", b"three"), ("v1.5/0002.txt", b"a folder with a dot"),
        ("._0002.jpg", b"a Mac's"), ("0003.webp", b"four"), ("0003.json", b'{"text": "text"}'), ("0003.txt", b"txt"),
        ("0004.txt", b"no image"), ("0005.jpg", b"no caption"),
        ("0006.jpg", b"six"), ("0006.json", b"{broken"), ("0007.jpg", b"seven"), ("0007.json", b"[1]"),
    ]  # fmt: skip
    (tmp_path / "x.tar").write_bytes(make_tar(members))
    assert [(row["image"], row["caption"]) for row in all_rows(tmp_path)] == [
        (b"one", "a caption"), (b"two", "from json"), (b"three", "a folder with a dot"), (b"four", "txt"),
        (None, "no image"), (b"no caption", None), (b"six", None), (b"seven", None),
    ]  # fmt: skip


def test_a_name_with_dots_ends_at_the_first_as_webdataset_has_it(tmp_path):
    members = [("a.small.jpg", b"small"), ("a.large.jpg", b"large"), ("a.alt", b"text"), ("a.json", b'{"TITLE": "it"}')]
    (tmp_path / "x.tar").write_bytes(make_tar(members))
    assert [(row["image"], row["caption"]) for row in all_rows(tmp_path)] == [(None, None)]
    for column, caption in (("alt", "text"), ("TITLE", "it")):
        rows = all_rows(tmp_path, image_column="large.jpg", caption_column=column)
        assert rows == [{"key": "x.tar:0:0", "image": b"large", "caption": caption}]


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda tar: b"",
        lambda tar: b"no tar" * 200,
        lambda tar: tar[: 7 * 512 + 100],  # within the second sample's header
        lambda tar: tar[: 9 * 512],  # within its image
        lambda tar: tar[: 7 * 512] + b"\xff" * 512 + tar[8 * 512 :],  # tarfile takes it for the end
        lambda tar: tar[: 7 * 512],  # between two samples
        lambda tar: tar[: 21 * 512],  # after the last one
        lambda tar: tar[: 22 * 512],  # within the two blocks of zeros after it
        lambda tar: tar + tar,  # a second archive, which tarfile does not see
    ],
)
def test_a_damaged_tar_fails_the_check_with_its_name(spoil, remote, tmp_path, request):
    members = [(f"{i}.{kind}", b"x" * size) for i in range(3) for kind, size in (("jpg", 2000), ("txt", 9))]
    place = request.getfixturevalue("s3")("tars") if remote else str(tmp_path)
    Folder(place).write("x.tar", spoil(make_tar(members)))
    with pytest.raises(errors.CheckFailed, match=r"x\.tar.* is damaged") as error:
        list_sources(place)
    assert "\n" not in errors.describe_error(error.value)[1]


# ---------------------------------------------------------------------------------------------------------------------
# img2dataset


def test_the_tars_of_img2dataset_hold_the_rows_and_its_records_their_number(tmp_path, monkeypatch):
    write_img2dataset(tmp_path, 5, failed=(1, 3))
    write_img2dataset(tmp_path, 2, failed=(0, 1), shard="00001")
    with monkeypatch.context() as patch:
        patch.setattr(tars, "_scan", None)
        (source,) = list_sources(str(tmp_path))
        assert (source.name, source.kind, source.num_rows) == ("00000.tar", "tar", 3)
        (tmp_path / "00000_stats.json").unlink()
        assert all(list(list_sources(str(place))) == [source] for place in (tmp_path, tmp_path / "00000.tar"))
    rows = list(read_rows(source, 0, 9))
    assert [(row["image"], row["caption"]) for row in rows] == [(noise_png(i), f"caption {i}") for i in (0, 2, 4)]
    (tmp_path / "00000.parquet").write_bytes(b"broken")
    (tmp_path / "00000_stats.json").write_text("[]")
    assert list(list_sources(str(tmp_path))) == [source]


def test_parquet_without_a_tar_is_left_out_beside_the_tars_of_img2dataset(tmp_path, capsys):
    write_img2dataset(tmp_path, 2)
    write_parquet(tmp_path / "all.parquet", ["http://127.0.0.1:1/x.jpg"], ["x"])
    assert [source.name for source in list_sources(str(tmp_path))] == ["00000.tar"]
    assert "all.parquet has no tar and is left out" in capsys.readouterr().err
    assert [source.name for source in list_sources(str(tmp_path / "all.parquet"))] == ["all.parquet"]
    (tmp_path / "00000.parquet").unlink()
    assert [source.name for source in list_sources(str(tmp_path))] == ["all.parquet"]


def test_a_record_of_more_samples_than_the_tar_holds_is_told(tmp_path):
    write_img2dataset(tmp_path, 3)
    (tmp_path / "00000_stats.json").write_text('{"successes": 4}')
    found = all_rows(tmp_path)
    assert ["damaged" in row for row in found] == [False, False, True, True]
    assert "00000.tar is damaged (it does not hold the 4 samples" in found[-1]["damaged"]
    assert [row["key"] for row in found] == [f"00000.tar:0:{i}" for i in range(4)]


# ---------------------------------------------------------------------------------------------------------------------
# Damaged files


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_damaged_files_are_skipped_up_to_a_number(kind, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(raw_data, "TOLD", 1)
    for name in "abcd":
        name = make_kind(tmp_path / name, kind)
    good = list(list_sources(str(tmp_path)))
    for folder in "bd":
        (tmp_path / folder / name).write_bytes(b"no such file" * 200)
        (tmp_path / folder / f"{name}.idx").unlink(missing_ok=True)
    with pytest.raises(errors.CheckFailed, match=rf"b/{name} is damaged .*, or pass --max_bad_files to skip files"):
        list_sources(str(tmp_path))
    with pytest.raises(errors.CheckFailed, match=rf"2 files .* --max_bad_files 1 allows; the first: .*b/{name} is dam"):
        list_sources(str(tmp_path), max_bad_files=1)
    capsys.readouterr()
    sources = list_sources(str(tmp_path), max_bad_files=2)
    assert list(sources) == [good[0], good[2]]
    assert [bad for bad, _ in sources.bad_files] == [f"b/{name}", f"d/{name}"] and sources.names[3] == f"d/{name}"
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and f"warning: skipped a file: {tmp_path}/b/{name} is damaged" in said[0]
    assert said[1] == "warning: skipped 1 more damaged files"
    for folder in "ac":
        (tmp_path / folder / name).write_bytes(b"")
        (tmp_path / folder / f"{name}.idx").unlink(missing_ok=True)
    with pytest.raises(errors.BadInput, match="holds no rows"):
        list_sources(str(tmp_path), max_bad_files=4)


def test_a_file_of_other_columns_is_not_damaged(tmp_path):
    write_parquet(tmp_path / "a.parquet", [b"x"], ["x"])
    write_parquet(tmp_path / "b.parquet", [b"x"], ["x"], image_column="picture")
    with pytest.raises(errors.BadInput, match=r"b\.parquet has none of the known image columns"):
        list_sources(str(tmp_path), max_bad_files=9)


def test_the_rows_of_a_damaged_page_are_bad_with_its_reason(tmp_path):
    """Those of other row groups are not, nor is a system that cannot read a file damage."""
    captions = [f"{'caption ' * 9}{i}" for i in range(300)]
    table = pa.table({"image": pa.array([b"x"] * 300, pa.binary()), "caption": captions})
    options = {"use_dictionary": False, "write_page_checksum": True, "compression": "none"}
    pq.write_table(
        table, tmp_path / "x.parquet", row_group_size=100, data_page_size=2000, write_batch_size=20, **options
    )
    data = (tmp_path / "x.parquet").read_bytes()
    spoiled = data.replace(f"{'caption ' * 9}190".encode(), f"{'Caption ' * 9}190".encode())
    (tmp_path / "x.parquet").write_bytes(spoiled)
    sources = list_sources(str(tmp_path))
    found = [list(read_rows(source, 0, 100)) for source in sources]
    assert [row["caption"] for row in found[0] + found[2]] == captions[:100] + captions[200:]
    is_damaged = ["damaged" in row for row in found[1]]
    first = is_damaged.index(True)
    assert 0 < first <= 90 and all(is_damaged[first:])
    assert [row["caption"] for row in found[1][:first]] == captions[100 : 100 + first]
    assert [row["key"] for row in found[1]] == [f"x.parquet:1:{i}" for i in range(100)]
    assert "x.parquet is damaged" in found[1][99]["damaged"] and found[1][99]["image"] is None
    (tmp_path / "x.parquet").unlink()
    with pytest.raises(errors.CheckFailed, match=r"x\.parquet"):
        list(read_rows(sources[0], 0, 9))


# ---------------------------------------------------------------------------------------------------------------------
# Many files


@pytest.mark.ray
def test_many_files_are_listed_in_tasks_on_ray(ray_session, tmp_path, monkeypatch, capsys):
    for i in range(5):
        (tmp_path / f"{i}.tar").write_bytes(make_tar([(f"{j}.txt", b"x") for j in range(i + 1)]))
    expected = list(list_sources(str(tmp_path), keep=False))
    monkeypatch.setattr(raw_data, "FILES_OF_A_TASK", 2)
    assert list(list_sources(str(tmp_path), keep=False, on_ray=None)) == expected
    monkeypatch.setattr(tars, "_scan", None)  # in this process
    assert list(list_sources(str(tmp_path), on_ray={"address": "local"})) == expected
    assert [source.num_rows for source in expected] == [1, 2, 3, 4, 5] and len(list(tmp_path.glob("*.idx"))) == 5
    assert "list: 5/5 files" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(raw_data, "map_on_actors", None)  # with indexes there is nothing to read
        assert list(list_sources(str(tmp_path), on_ray={"address": "local"})) == expected
    (tmp_path / "3.tar").write_bytes(b"no tar" * 200)
    (tmp_path / "3.tar.idx").unlink()
    with pytest.raises(errors.CheckFailed, match=r"3\.tar is damaged"):
        list_sources(str(tmp_path), on_ray={"address": "local"})


# ---------------------------------------------------------------------------------------------------------------------
# Places


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "tar"])
def test_slices_are_the_whole_whatever_their_size(kind, tmp_path):
    name = make_kind(tmp_path / "data", kind)
    source = list_sources(str(tmp_path / "data"))[0]
    whole = list(read_rows(source, 0, 10))
    assert [row["caption"] for row in whole] == [f"caption {i}" for i in range(10)]
    assert [row["key"] for row in whole] == [f"{name}:0:{i}" for i in range(10)]
    for size in (1, 3, 4, 10, 99):
        assert [row for first in range(0, 10, size) for row in read_rows(source, first, size)] == whole
    assert list(read_rows(source, 10, 5)) == []


def test_nothing_to_read_is_bad_input(tmp_path):
    with pytest.raises(errors.BadInput, match=r"--input .*none does not exist"):
        list_sources(str(tmp_path / "none"))
    (tmp_path / "photo.png").write_bytes(noise_png())
    for place in (tmp_path, tmp_path / "photo.png"):
        with pytest.raises(errors.BadInput, match=r"--data .*holds no \.parquet or \.tar file and no metadata\.jsonl"):
            list_sources(str(place), flag="--data")


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "tar"])
def test_data_without_rows_are_bad_input(kind, tmp_path):
    if kind == "parquet":
        write_parquet(tmp_path / "x.parquet", pa.array([], pa.binary()), pa.array([], pa.string()))
    (tmp_path / "metadata.jsonl").write_text("\n \n")
    if kind == "tar":
        (tmp_path / "x.tar").write_bytes(make_tar([]))
    with pytest.raises(errors.BadInput, match="holds no rows"):
        list_sources(str(tmp_path))
