"""report.py: a page of its own, parsed as HTML; its pictures, its words, and what it escapes."""

import base64
import html
import io
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest
from conftest import make_photos
from PIL import Image

from evaluation.measures import MEASURES
from evaluation.report import (
    SHOWN_CLASS_IMAGES,
    describe_change,
    format_command,
    format_estimate,
    make_report,
    plot_training,
    smooth,
)

ECHO = f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
VOID = {"meta", "link", "img", "br"}
CLASS_IMAGES = 30


class Page(HTMLParser):
    """The page's elements [(tag, attributes)], its visible text, and whether every element is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.words, self.is_well_formed = [], [], [], True
        self.feed(text)
        self.is_well_formed &= not self.open
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        self.is_well_formed &= bool(self.open) and self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def estimate(value):
    return {"value": value, "low": value - 0.05, "high": value + 0.05}


def make_evaluation(prompts, sets, **changed):
    """Return what evaluation.json holds of some prompts and {set: paths}."""
    measures = {name: {"tuned": estimate(0.6), "base": estimate(0.3)} for name in MEASURES}
    measures["subject_dino"]["photos"] = {"value": 0.8}
    measures["bleed"]["subjects"] = {"zwx cat": 0.61, "sks fox": 0.17}
    photos = sets["photos"]
    near = [(photos[i % len(photos)].name, round(0.5 + i / 100, 4)) for i in range(len(sets["tuned"]))]
    return {
        "measures": measures,
        "encoders": {"clip": "some/clip", "dino": "some/dino"},
        "settings": {"memorised_above": 0.95, "seed": 0, "height": None, "photos": "ab" * 32},
        "details": {"subject": "unqtkn dog", "prompts": prompts, "notes": [], "nearest": {"tuned": near, "base": near}},
        **changed,
    }


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Pictures of two prompts, two each, of both models; more class pictures than are shown."""
    folder = tmp_path_factory.mktemp("pictures")
    counts = {"photos": 3, "tuned": 4, "base": 4, "class_tuned": CLASS_IMAGES, "class_base": CLASS_IMAGES}
    return {
        name: sorted(make_photos(folder / name, count, seed=seed).glob("*.png"))
        for seed, (name, count) in enumerate(counts.items())
    }


@pytest.fixture
def make_page(sets, tmp_path):
    """Return a function that writes a report and returns it as a Page."""

    def make(prompts=("photo of unqtkn dog", "unqtkn dog in the snow"), command=("python", "evaluate.py"), **changed):
        evaluation = make_evaluation(list(prompts), sets, **changed)
        page = make_report(evaluation, sets, tmp_path / "tuned", {"tuned": "tuned", "base": "base"}, command)
        (tmp_path / "report.html").write_text(page)
        return Page(page)

    (tmp_path / "tuned").mkdir()
    return make


def write_log(folder, count=30):
    lines = [{"step": 10 * i, "loss": 1 / i, "grad_norm": 2.0} for i in range(1, count + 1)]
    (folder / "training_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


# ---------------------------------------------------------------------------------------------------------------------
# The page


def test_the_page_is_whole_and_needs_nothing_else(make_page, tmp_path):
    write_log(tmp_path / "tuned")
    page = make_page()
    assert page.is_well_formed and not page.all("script")
    text = (tmp_path / "report.html").read_text()
    links = {attributes["href"] for attributes in page.all("a")}
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) == links == {"https://arxiv.org/abs/2208.12242"}
    assert [attributes["href"] for attributes in page.all("link")] == ["data:,"]
    assert not re.search(r"url\(|@import|srcset|\son[a-z]+=", text.split("</style>")[0])
    policies = [each["content"] for each in page.all("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_every_picture_loads_from_the_page_and_has_a_text(make_page, tmp_path):
    write_log(tmp_path / "tuned")
    images = make_page().all("img")
    assert len(images) == 3 + 2 * 4 + 2 * SHOWN_CLASS_IMAGES + 2 * 4 + 1
    kinds = []
    for image in images:
        assert image["alt"].strip()
        kind, data = re.fullmatch(r"data:image/(webp|svg\+xml);base64,(.+)", image["src"]).groups()
        kinds.append(kind)
        data = base64.b64decode(data)
        if kind == "webp":
            Image.open(io.BytesIO(data)).load()
        else:
            assert xml.etree.ElementTree.fromstring(data).tag.endswith("svg")
    assert kinds.count("svg+xml") == 1


def test_the_strip_of_the_training_is_shown_where_there_is_one(make_page, tmp_path):
    count = len(make_page().all("img"))
    (tmp_path / "tuned" / "validation").mkdir()
    Image.new("RGB", (600, 300), "red").save(tmp_path / "tuned" / "validation" / "strip.png")
    images = make_page().all("img")
    assert len(images) == count + 1 and "a row for each step" in images[-1]["alt"]


def test_what_the_page_says(make_page, tmp_path):
    text = make_page(command=["python", "evaluate.py", "--seed", "3"]).text
    for about in MEASURES.values():
        assert about.title in text and about.reading in text
    for words in (
        "photo of unqtkn dog", "unqtkn dog in the snow", "some/clip", "some/dino", "0.600 0.550 to 0.650",
        "photos to each other: 0.800",
        "zwx cat: 0.610 sks fox: 0.170", "higher than before", "00.png, 0.50", r"python evaluate.py \ --seed 3",
        f"sha256 {'ab' * 6}…", "has no training_log.jsonl",
    ):  # fmt: skip
        assert words in text, words
    assert "height" not in text


def test_one_subject_has_no_bleed(make_page, sets):
    measures = make_evaluation([""], sets)["measures"]
    del measures["bleed"]
    assert "Bleed" not in make_page(measures=measures).text


def test_a_measure_that_was_left_out_says_why(make_page, sets):
    measures = {**make_evaluation([""], sets)["measures"], "subject_dino": None}
    text = make_page(measures=measures, encoders={"clip": "c", "dino": None}).text
    assert "not measured: --dino_model none" in text and "DINO was left out" in text


def test_what_people_write_is_escaped(make_page, sets, tmp_path):
    evil = ["<script>alert(1)</script> \"quoted\" & 'so'", "{{ 7 * 7 }} {% raw %} </style></h3>"]
    details = {**make_evaluation(evil, sets)["details"], "subject": "<b>x</b>", "notes": ["<img src=x>"]}
    page = make_page(evil, command=["python", "evaluate.py", "--x", "<script>"], details=details)
    assert page.is_well_formed and not page.all("script")
    for words in (*evil, "<b>x</b>", "<img src=x>", "--x '<script>'"):
        assert words in page.text
    assert any(evil[0] in image["alt"] for image in page.all("img"))
    assert "<script" not in (tmp_path / "report.html").read_text()


def test_big_pictures_become_thumbnails(sets, make_page, monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    big = tmp_path / "big.png"
    Image.fromarray(rng.integers(0, 256, (900, 1200, 3), dtype=np.uint8)).save(big)
    monkeypatch.setitem(sets, "photos", [big, *sets["photos"][1:]])
    page = make_page()
    image = next(image for image in page.all("img") if "big.png" in image["alt"])
    shown = Image.open(io.BytesIO(base64.b64decode(image["src"].split(",")[1])))
    assert max(shown.size) <= 256 and shown.width / shown.height == pytest.approx(4 / 3, abs=0.02)


def test_a_page_of_many_pictures_stays_small(tmp_path):
    """The paper's 25 prompts of four pictures, 512 pixels a side."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((512, 512), Image.Resampling.BICUBIC).save(tmp_path / "one.png")
    one = tmp_path / "one.png"
    sets = {"photos": [one] * 5, "tuned": [one] * 100, "base": [one] * 100, "class_tuned": [one] * 99}
    sets["class_base"] = sets["class_tuned"]
    evaluation = make_evaluation([f"prompt {i}" for i in range(25)], sets)
    assert len(make_report(evaluation, sets, tmp_path, {"tuned": "tuned", "base": "base"}, [])) < 3_000_000


def test_the_same_evaluation_gives_the_same_bytes(make_page, tmp_path):
    write_log(tmp_path / "tuned")
    make_page()
    before = (tmp_path / "report.html").read_bytes()
    make_page()
    assert (tmp_path / "report.html").read_bytes() == before


# ---------------------------------------------------------------------------------------------------------------------
# Numbers and curves


def test_numbers_read_well():
    assert format_estimate({"value": -0.0123, "low": -0.1, "high": 0.25}) == {
        "value": "−0.012",
        "interval": "−0.100 to 0.250",
    }
    assert format_estimate({"value": 1}) == {"value": "1.000", "interval": ""}
    assert format_estimate(None) is None


def test_a_shell_reads_the_command_as_it_was():
    words = ["python", "evaluate.py", "--class_prompt", "a -- 'dog' $HOME", "--seed", "3"]
    line = format_command(words)
    assert line.count("\n") == 2
    assert json.loads(subprocess.check_output(["bash", "-c", line.replace("python evaluate.py", ECHO, 1)])) == words[2:]


def test_a_change_is_one_where_the_intervals_are_apart():
    assert describe_change(estimate(0.5), estimate(0.3)) == "higher than before"
    assert describe_change(estimate(0.3), estimate(0.5)) == "lower than before"
    assert describe_change(estimate(0.5), estimate(0.45)) == "no clear change"


def test_smoothing_keeps_a_constant_and_follows_a_fall():
    assert smooth([2.0] * 7) == pytest.approx([2.0] * 7)
    noise = np.random.default_rng(0).normal(size=400)
    smoothed = smooth(noise)
    assert smoothed[0] == noise[0] and np.std(smoothed[50:]) < np.std(noise) / 3


def test_a_log_without_losses_gives_no_plot():
    assert plot_training([]) is None
    assert plot_training([{"step": 1, "validation_loss": 1.0}, {"step": 2, "loss": None, "grad_norm": 1}]) is None
    assert "over 30 steps" in plot_training([{"step": s, "loss": 1.0, "grad_norm": 1.0} for s in (10, 20, 30)])["alt"]


# ---------------------------------------------------------------------------------------------------------------------
# A browser


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium is installed")
@pytest.mark.parametrize("size", ["1280,900", "500,900"])
def test_a_browser_shows_it_without_an_error(make_page, tmp_path, size):
    write_log(tmp_path / "tuned")
    make_page()
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'chrome'}"]
    command += ["--enable-logging=stderr", f"--window-size={size}", f"--screenshot={tmp_path / 'page.png'}"]
    done = subprocess.run([*command, (tmp_path / "report.html").as_uri()], capture_output=True, text=True, timeout=180)
    assert "CONSOLE" not in done.stderr and "Content Security Policy" not in html.unescape(done.stderr)
    shown = np.asarray(Image.open(tmp_path / "page.png").convert("L"))
    assert shown.std() > 10 and shown.shape == tuple(map(int, size.split(",")))[::-1]
