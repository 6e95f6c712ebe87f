"""A folder of photos with all kinds of bad files: told together, before a model loads; a bomb takes no memory."""

import json
import struct
import subprocess
import sys
import zlib

import pytest
from conftest import ROOT, make_photos, make_raw_data
from injection import encode, finish, train

MEGABYTES = 100  # that a bomb may take


def bomb(width=60_000, height=60_000):
    """Return a PNG file of some bytes that claims many pixels, all of them black, and holds some."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(10_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def measured(command, code):
    """Run a script; return (its stderr, the megabytes that it took at most)."""
    measure = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run([sys.executable, *sys.argv[1:]], stdout=subprocess.DEVNULL)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
        "sys.exit(done.returncode)\n"
    )
    words = [sys.executable, "-c", measure, str(ROOT / command[0]), *map(str, command[1:])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done.stderr, int(done.stdout) / 1000


@pytest.fixture
def photos(tmp_path):
    return make_photos(tmp_path / "photos", 3)


def test_a_bomb_is_refused_from_its_header(photos, tmp_path):
    command = train(tmp_path / "out", instance_images_dir=photos)
    (photos / "bomb.png").write_bytes(b"not an image")
    _, without = measured(command, 3)
    (photos / "bomb.png").write_bytes(bomb())
    assert (photos / "bomb.png").stat().st_size < 20_000
    stderr, with_it = measured(command, 3)
    assert "bomb.png" in stderr.splitlines()[-1] and "decompression bomb" in stderr
    assert with_it - without < MEGABYTES


@pytest.mark.parametrize("size", [(13_400, 13_400), (2**31 - 1, 1), (1, 200_000_000)])
def test_bombs_of_other_shapes(photos, tmp_path, size):
    (photos / "bomb.png").write_bytes(bomb(*size))
    stderr, taken = measured(train(tmp_path / "out", instance_images_dir=photos), 3)
    assert "bomb.png" in stderr.splitlines()[-1] and taken < 4 * MEGABYTES


def make_bad(folder):
    """Add a file of each fault to a folder; return {name: a word of its reason}."""
    good = (folder / "00.png").read_bytes()
    middle = good[: len(good) // 2]
    faults = {
        "bomb.png": (bomb(), "bomb"),
        "cut.png": (middle, "damaged"),
        "empty.jpg": (b"", "empty"),
        "flipped.png": (middle + bytes([good[len(middle)] ^ 255]) + good[len(middle) + 1 :], "damaged"),
        "phone.heic": (b"\0\0\0\x18ftypheic", "export"),
        "text.jpg": (b"<html>404</html>", "not an image"),
    }
    for name, (data, _) in faults.items():
        (folder / name).write_bytes(data)
    return {name: word for name, (_, word) in faults.items()}


def test_all_bad_files_are_told_together(photos, tmp_path):
    bad = make_bad(photos)
    (photos / "notes.txt").write_text("mine")
    stderr, _ = measured(train(tmp_path / "out", instance_images_dir=photos), 3)
    *lines, last = stderr.splitlines()
    assert len(lines) < 24 and "Traceback" not in stderr and "notes.txt" in stderr
    for name, word in bad.items():
        assert name in last and any(name in line and word in line for line in lines), name
    assert last.startswith("train.py: ") and "--skip_bad_images" in last
    assert not (tmp_path / "out").exists()


@pytest.mark.faults
def test_a_run_without_the_bad_files_says_so(photos, tmp_path):
    """On stderr, with each reason, and on the model card."""
    bad = make_bad(photos)
    done = finish(train(tmp_path / "out", instance_images_dir=photos, max_train_steps=1, skip_bad_images=True))
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(name in done.stderr and name in card for name in bad)


def test_a_bomb_among_rows(tmp_path):
    """preprocess.py leaves it out and says so."""
    folder = make_raw_data(tmp_path / "raw", 23)
    (folder / "05.png").write_bytes(bomb())
    done = finish(encode(tmp_path / "out", input=folder, max_bad_fraction=0.1))
    assert json.loads(done.stdout.splitlines()[-1])["bad_rows"] == 1
    assert "bomb" in (tmp_path / "out" / "bad_rows.jsonl").read_text()
