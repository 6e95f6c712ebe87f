"""preprocess.py: the rows it writes, bad rows, continuing, what it refuses, object stores and Ray."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, last_json, noise_png, run_script, tree
from tiny_models import make_tiny_model

import preprocess
from common import errors, folders
from common.images import crop_square, read_image, scale_pixels
from common.storage import Folder
from pipelines.families import SD
from pretraining import index, tally
from pretraining.latents import digest_encoders
from pretraining.tally import Tally

pytestmark = pytest.mark.usefixtures("one_thread")

CAPTIONS = [
    "a cat.",
    "two dogs",
    "",
    "a cat.",
    "犬",
    "one two three four five six seven eight nine",
    "x",
    "y",
    "z",
    "-",
]
PARTS = [f"part-000000-{chunk:04d}.parquet" for chunk in range(3)]
CARD = ["README.md", "contact_sheet.jpg", "statistics.json"]
WRITTEN = sorted(["_index-00000.parquet", "bad_rows.jsonl", "metadata.json", *CARD, *PARTS])


def make_data(folder, bad=(), count=10, **options):
    """Write `count` pictures with captions as one row group of Parquet; those of `bad` are cut."""
    images = [noise_png(i)[: 500 if i in bad else None] for i in range(count)]
    captions = [CAPTIONS[i % len(CAPTIONS)] for i in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": images, "caption": captions}), folder / "x.parquet", **options)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Ten good rows."""
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def command(tiny_model, data, tmp_path):
    """A function from what is special about a run to its arguments: ten rows, four a file, in this process."""

    def make(*flags, source=data, folder=tmp_path / "out", model=tiny_model):
        arguments = ["--input", source, "--model_dir", model, "--output_dir", folder, "--rows_per_file", 4]
        arguments += [] if "--num_workers" in flags else ["--num_workers", 0]
        return [str(part) for part in (*arguments, *flags)]

    return make


@pytest.fixture
def encode(command, capsys):
    """Run preprocess.main in this process; return its JSON."""

    def call(*flags, **options):
        capsys.readouterr()
        preprocess.main(preprocess.parse_args(command(*flags, **options)))
        return last_json(capsys.readouterr().out)

    return call


@pytest.fixture
def stop_at(monkeypatch):
    """A function that makes the encoder fail at a chunk, counted from 0; it returns the names of those it is given."""
    write = preprocess.PartWriter.__call__

    def patch(chunk=None):
        seen = []

        def call(self, given):
            if len(seen) == chunk:
                raise errors.OutOfResource("full")
            seen.append(given["name"])
            return write(self, given)

        monkeypatch.setattr(preprocess.PartWriter, "__call__", call)
        return seen

    return patch


def contents(folder):
    """{name: bytes} of a folder."""
    return {name: content for name, (content, _) in tree(folder).items()}


def read_parts(folder):
    """{column: values} of all parts, in the order of their names."""
    folder = Folder(folder)
    names = [name for name in folder.names(".parquet") if name.startswith("part-")]
    tables = [pq.read_table(pa.BufferReader(folder.read(name))) for name in names]
    columns = {}
    for name in tables[0].column_names:
        facts = tables[0].schema.field(name).metadata
        rows = [row for table in tables if len(table) for row in table[name].to_pylist()]
        columns[name] = np.array(rows, object)
        if facts:
            columns[name] = np.frombuffer(b"".join(rows), facts[b"dtype"].decode())
            columns[name] = columns[name].reshape(len(rows), *json.loads(facts[b"shape"]))
    return columns


def read_statistics(folder):
    return json.loads(Folder(folder).read("statistics.json"))


def read_bad_rows(folder):
    return [json.loads(line) for line in Folder(folder).read("bad_rows.jsonl").decode().splitlines()]


# ---------------------------------------------------------------------------------------------------------------------
# What is written


@pytest.fixture(scope="module")
def whole(tiny_model, data, tmp_path_factory):
    """The data set of an undisturbed run, at two resolutions."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    flags = ["--input", data, "--model_dir", tiny_model, "--output_dir", folder, "--rows_per_file", 4]
    flags += ["--num_workers", 0, "--resolutions", 16, 32]
    preprocess.main(preprocess.parse_args([str(flag) for flag in flags]))
    return folder


def test_the_columns_are_latents_captions_and_keys(whole):
    assert sorted(tree(whole)) == sorted([*WRITTEN, "manifest.json"])
    columns = read_parts(whole)
    shapes = {"key": (), "caption": (), "caption_latents": (24, 16)}
    for size in (16, 32):
        shapes |= {f"image_latents_{size}{end}": (4, size // 2, size // 2) for end in ("", "_std")}
    assert {name: values.shape for name, values in columns.items()} == {n: (10, *s) for n, s in shapes.items()}
    assert all(values.dtype == np.float16 for name, values in columns.items() if "latents" in name)
    assert list(columns["key"]) == [f"x.parquet:0:{row}" for row in range(10)]
    assert list(columns["caption"]) == CAPTIONS
    assert [pq.ParquetFile(whole / name).metadata.num_rows for name in PARTS] == [4, 4, 2]


def test_the_values_are_those_of_the_models_own_parts(whole, tiny_model):
    import torch
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel, CLIPTokenizer

    vae = AutoencoderKL.from_pretrained(tiny_model, subfolder="vae")
    text_encoder = CLIPTextModel.from_pretrained(tiny_model, subfolder="text_encoder")
    tokenizer = CLIPTokenizer.from_pretrained(tiny_model, subfolder="tokenizer")
    columns = read_parts(whole)
    with torch.no_grad():
        for row, caption in enumerate(CAPTIONS):
            for size in (16, 32):
                pixels = scale_pixels(np.asarray(crop_square(read_image(noise_png(row)), size)))
                latents = vae.encode(torch.from_numpy(pixels)[None]).latent_dist
                for name, wanted in (("", latents.mean), ("_std", latents.std)):
                    found = columns[f"image_latents_{size}{name}"][row]
                    assert np.allclose(found, wanted[0].numpy(), rtol=2e-3, atol=2e-3)
            ids = tokenizer(
                caption, padding="max_length", max_length=24, truncation=True, return_tensors="pt"
            ).input_ids
            wanted = text_encoder(ids).last_hidden_state[0].numpy()
            assert np.allclose(columns["caption_latents"][row], wanted, rtol=2e-3, atol=2e-3)


def test_the_metadata_say_what_a_reader_must_know(whole, tiny_model):
    metadata = json.loads((whole / "metadata.json").read_text())
    known = {
        "rows": 10,
        "bad_rows": 0,
        "scaled": False,
        "resolutions": [16, 32],
        "encoders": digest_encoders(tiny_model, SD()),
    }
    assert {name: metadata[name] for name in known} == known
    assert metadata["settings"]["seed"] == 0 and metadata["settings"]["crop"] == "center"
    assert (whole / "bad_rows.jsonl").read_bytes() == b""
    manifest = folders.read_manifest(whole, deep=True)
    assert manifest["settings"] == metadata["settings"] and set(manifest["files"]) == set(WRITTEN) - set(PARTS)
    assert [path.name for path in whole.parent.iterdir()] == ["out"]


def test_the_resolution_is_the_models_unless_another_is_asked_for(encode, tmp_path, whole):
    result = encode()
    assert result == {"output_dir": str(tmp_path / "out"), "rows": 10, "bad_rows": 0}
    columns, both = read_parts(tmp_path / "out"), read_parts(whole)
    assert [name for name in columns if name.startswith("image")] == ["image_latents_16", "image_latents_16_std"]
    assert all(np.array_equal(columns[name], both[name]) for name in columns)


def test_random_crops_come_from_the_seed(encode, tmp_path):
    flags = ["--crop", "random", "--random_flip", "--seed"]
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        encode(*flags, seed, folder=tmp_path / name)
    one, again, two = (read_parts(tmp_path / name)["image_latents_16"] for name in ("one", "again", "two"))
    assert np.array_equal(one, again) and not np.array_equal(one, two)


# ---------------------------------------------------------------------------------------------------------------------
# Bad rows


def test_filtered_rows_are_counted_by_reason_and_apart_from_bad_ones(encode, stop_at, tmp_path):
    """Also those that an earlier run left out; the settings have the filters that were passed alone."""
    source = make_data(tmp_path / "data", bad=[9])
    table = pq.read_table(source / "x.parquet")
    images = [noise_png(0, 40, 17) if row == 7 else image for row, image in enumerate(table["image"].to_pylist())]
    table = pa.table({"image": images, "caption": table["caption"], "score": list(range(10))})
    pq.write_table(table, source / "x.parquet")
    limits = ("--min_side", "18", "--max_aspect", "2", "--max_bad_fraction", "0.2")
    flags = ("--where", "score >= 3 and score != 5", *limits)
    stop_at(1)
    with pytest.raises(errors.OutOfResource):
        encode(*flags, source=source)
    stop_at()
    result = encode(*flags, source=source)
    filtered = {"--where": 4, "side < 18": 1}
    assert (result["rows"], result["bad_rows"], result["filtered_rows"]) == (4, 1, filtered)
    assert list(read_parts(tmp_path / "out")["key"]) == [f"x.parquet:0:{row}" for row in (3, 4, 6, 8)]
    metadata = json.loads((tmp_path / "out" / "metadata.json").read_text())
    assert metadata["filtered_rows"] == filtered and metadata["settings"]["where"] == flags[1]
    assert encode(*flags, source=source) == result
    with pytest.raises(errors.BadInput, match=r"where was 'score >= 3 and score != 5', now 'score > 3'"):
        encode("--where", "score > 3", *limits, source=source)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| left out by filters | 5 | 50 % |" in card and "| `--where` | 4 | 40 % |" in card
    plain = encode("--max_bad_fraction", "0.2", source=source, folder=tmp_path / "plain")
    assert plain.keys() == {"output_dir", "rows", "bad_rows"} and plain["rows"] == 9
    settings = json.loads((tmp_path / "plain" / "metadata.json").read_text())["settings"]
    assert not settings.keys() & {"where", "min_side", "max_aspect"}


def test_one_bad_row_in_a_hundred_is_listed_and_left_out(encode, tmp_path):
    result = encode("--rows_per_file", 64, source=make_data(tmp_path / "data", bad=[70], count=100))
    assert (result["rows"], result["bad_rows"]) == (99, 1)
    columns = read_parts(tmp_path / "out")
    assert list(columns["key"]) == [f"x.parquet:0:{row}" for row in range(100) if row != 70]
    assert list(columns["caption"]) == [CAPTIONS[row % 10] for row in range(100) if row != 70]
    bad = read_bad_rows(tmp_path / "out")
    assert len(bad) == 1 and bad[0]["key"] == "x.parquet:0:70" and "damaged" in bad[0]["reason"]
    facts = read_statistics(tmp_path / "out")
    assert (facts["bad_rows"], facts["unfetched_rows"], facts["counted_rows"]) == (1, 0, 99)
    ((reason, count),) = facts["bad_rows_by_reason"].items()
    assert count == 1 and reason.startswith("damaged")


def test_too_many_bad_rows_end_the_run_and_a_larger_share_goes_on(encode, stop_at, tmp_path):
    """Row 7 has no caption; the second file holds no good row at all."""
    source = make_data(tmp_path / "data", bad=[1, 4, 5, 6])
    table = pq.read_table(source / "x.parquet").to_pydict()
    table["caption"][7] = None
    pq.write_table(pa.table(table), source / "x.parquet")
    with pytest.raises(
        errors.BadInput, match=r"5 of 10 rows are bad, more than --max_bad_fraction 0\.4.*x\.parquet:0:1: dam"
    ):
        encode("--max_bad_fraction", 0.4, source=source)
    assert not (tmp_path / "out").exists()
    seen = stop_at()
    result = encode("--max_bad_fraction", 0.5, source=source)
    assert seen == [] and (result["rows"], result["bad_rows"]) == (5, 5)
    assert [row["key"] for row in read_bad_rows(tmp_path / "out")] == [f"x.parquet:0:{row}" for row in (1, 4, 5, 6, 7)]
    assert read_bad_rows(tmp_path / "out")[-1]["reason"] == "no caption"
    assert list(read_parts(tmp_path / "out")["key"]) == [f"x.parquet:0:{row}" for row in (0, 2, 3, 8, 9)]
    assert [pq.ParquetFile(tmp_path / "out" / name).metadata.num_rows for name in PARTS] == [3, 0, 2]


def test_a_run_of_bad_rows_ends_early(encode, stop_at, tmp_path, monkeypatch):
    monkeypatch.setattr(preprocess, "EARLY", 4)
    seen = stop_at()
    with pytest.raises(errors.BadInput, match="4 of 4 rows are bad"):
        encode(source=make_data(tmp_path / "data", bad=range(4), count=40))
    assert seen == PARTS[:1]


def test_an_early_look_allows_for_chance(monkeypatch):
    """Of runs with 4.5 % bad rows, a third met more than 5 % in some look after 1,000 rows; one with 10 % ends."""
    for seed in range(20):
        is_bad = np.random.default_rng(seed).random(20_000) < 0.045
        for seen in range(1000, 20_001, 256):
            bad = int(is_bad[:seen].sum())
            assert not Tally(seen - bad, bad).fault(0.05, is_early=True)
    assert Tally(900, 100).fault(0.05, is_early=True) == "bad"
    monkeypatch.setattr(tally, "_first", lambda folder, note: ["key", "reason"])
    tally.check("data", None, Tally(960, 60), 0.05, is_early=True)
    with pytest.raises(errors.BadInput, match="100 of 1000 rows are bad"):
        tally.check("data", None, Tally(900, 100), 0.05, is_early=True)
    with pytest.raises(errors.BadInput, match="501 of 10000 rows are bad"):
        tally.check("data", None, Tally(9499, 501), 0.05)
    with pytest.raises(errors.TryAgain, match="501 of 1000 rows cannot be fetched now"):
        tally.check("data", None, Tally(499, 0, 501), 0.05, is_early=True)


# ---------------------------------------------------------------------------------------------------------------------
# Damaged files


@pytest.fixture
def three_files(tmp_path):
    """Three files of ten rows, of which the second is damaged."""
    for name in "abc":
        make_data(tmp_path / "data" / name)
    (tmp_path / "data" / "b" / "x.parquet").write_bytes(b"cut")
    return tmp_path / "data"


def test_a_damaged_file_is_skipped_counted_and_named(encode, stop_at, three_files, tmp_path):
    with pytest.raises(errors.CheckFailed, match=r"b/x\.parquet is damaged .* or pass --max_bad_files"):
        encode(source=three_files)
    stop_at(4)
    with pytest.raises(errors.OutOfResource):
        encode("--max_bad_files", 1, source=three_files)
    seen = stop_at()
    result = encode("--max_bad_files", 2, source=three_files)
    assert result == {"output_dir": str(tmp_path / "out"), "rows": 20, "bad_rows": 0, "bad_files": 1}
    assert seen == [f"part-000001-{chunk:04d}.parquet" for chunk in (1, 2)]
    assert list(read_parts(tmp_path / "out")["key"]) == [
        f"{name}/x.parquet:0:{row}" for name in "ac" for row in range(10)
    ]
    metadata = json.loads((tmp_path / "out" / "metadata.json").read_text())
    assert metadata["bad_files"] == metadata["settings"]["bad_files"] == 1
    assert list(metadata["skipped_files"]) == ["b/x.parquet"]
    assert "b/x.parquet is damaged" in metadata["skipped_files"]["b/x.parquet"]
    assert encode("--max_bad_files", 1, source=three_files) == result
    make_data(three_files / "b")
    with pytest.raises(errors.BadInput, match=r"other settings \(bad_files was 1, now None, input was"):
        encode("--max_bad_files", 1, source=three_files)


def test_a_number_of_bad_files_without_one_is_no_other_setting(encode, stop_at):
    seen, result = stop_at(), encode()
    assert encode("--max_bad_files", 5) == result and len(seen) == 3


def test_damage_that_shows_when_rows_are_read_makes_bad_rows(encode, tmp_path):
    for name in "ab":
        make_data(tmp_path / "data" / name, compression="none", use_dictionary=False)
    path = tmp_path / "data" / "a" / "x.parquet"
    data = path.read_bytes()
    start = data.index(noise_png(0)[:50])
    path.write_bytes(data[: start - 4] + b"\xff\xff\xff\x7f" + data[start:])
    with pytest.raises(errors.BadInput, match=r"10 of 20 rows are bad.*a/x\.parquet is damaged"):
        encode(source=tmp_path / "data")
    result = encode("--max_bad_fraction", 0.5, source=tmp_path / "data")
    assert (result["rows"], result["bad_rows"]) == (10, 10) and "bad_files" not in result
    assert {row["key"].partition(":")[0] for row in read_bad_rows(tmp_path / "out")} == {"a/x.parquet"}


# ---------------------------------------------------------------------------------------------------------------------
# Rows that cannot be fetched


@pytest.fixture
def url_data(web, tmp_path, monkeypatch):
    """Ten rows of URLs; those of 2, 3 and 9 are of the kind "503", that of 5 is not there."""
    monkeypatch.setattr(preprocess, "AGAIN_AFTER", (0.01,))
    kinds = ["503" if row in (2, 3, 9) else "404" if row == 5 else "good" for row in range(10)]
    urls = [f"{web.address}/{kind}/{row}" for row, kind in enumerate(kinds)]
    (tmp_path / "urls").mkdir()
    pq.write_table(pa.table({"url": urls, "caption": CAPTIONS}), tmp_path / "urls" / "x.parquet")
    return tmp_path / "urls"


FETCH = ["--timeout", 5, "--retries", 0, "--max_bad_fraction"]


def test_a_server_that_is_busy_for_a_while_costs_no_row(encode, web, url_data, tmp_path, monkeypatch):
    web.down["503"] = "good"
    encode(*FETCH, 0.1, source=url_data, folder=tmp_path / "undisturbed")
    web.down.clear()
    web.hits.clear()
    monkeypatch.setattr(preprocess.time, "sleep", lambda seconds: web.down.update({"503": "good"}))
    result = encode(*FETCH, 0.1, source=url_data)
    assert (result["rows"], result["bad_rows"]) == (9, 1)
    assert sorted(map(web.hits.count, set(web.hits))) == [1] * 7 + [2] * 3  # only what failed is fetched again
    one, other = read_parts(tmp_path / "out"), read_parts(tmp_path / "undisturbed")
    assert list(one["key"]) == list(other["key"]) and list(one["caption"]) == list(other["caption"])
    assert all(np.allclose(one[name], other[name], rtol=2e-3, atol=2e-3) for name in one if "latents" in name)
    assert read_bad_rows(tmp_path / "out") == read_bad_rows(tmp_path / "undisturbed")
    facts, others = (read_statistics(tmp_path / name) for name in ("out", "undisturbed"))
    assert (
        facts["counted_rows"] == 9 and facts["images"] == others["images"] and facts["captions"] == others["captions"]
    )
    assert facts["bad_rows_by_reason"] == others["bad_rows_by_reason"] == {"cannot be fetched: HTTP 404": 1}


def test_the_same_command_tries_again_until_the_server_is_back(encode, web, url_data, tmp_path, capsys):
    with pytest.raises(
        errors.TryAgain, match=r"3 of 10 rows cannot be fetched now; the first is x\.parquet:0:2: .*503"
    ):
        encode(*FETCH, 0.35, source=url_data)
    assert "fetching 3 rows again" in capsys.readouterr().err and not (tmp_path / "out").exists()
    web.hits.clear()
    web.down["503"] = "good"
    assert encode(*FETCH, 0.35, source=url_data)["rows"] == 9
    assert len(web.hits) == 3


def test_rows_that_can_never_be_fetched_are_bad_rows(encode, web, url_data, tmp_path):
    assert encode(*FETCH, 0.4, source=url_data)["bad_rows"] == 4
    assert [row["key"].rpartition(":")[2] for row in read_bad_rows(tmp_path / "out")] == ["2", "3", "5", "9"]
    found = [row["reason"] for row in read_bad_rows(tmp_path / "out")]
    assert found[2] == "cannot be fetched: HTTP 404"
    assert found[0] == found[1] == found[3] == "cannot be fetched: HTTP 503, also when tried again"
    facts = read_statistics(tmp_path / "out")
    assert facts["bad_rows_by_reason"] == {"cannot be fetched: HTTP 503": 3, "cannot be fetched: HTTP 404": 1}
    assert (facts["bad_rows"], facts["unfetched_rows"], facts["counted_rows"]) == (4, 3, 6)
    web.hits.clear()
    assert encode(*FETCH, 0.4, source=url_data)["rows"] == 6 and not web.hits  # the data set is complete


def test_a_network_that_is_away_ends_the_run_early(encode, web, url_data, stop_at, monkeypatch):
    monkeypatch.setattr(preprocess, "EARLY", 4)
    web.down["good"] = "503"
    seen = stop_at()
    with pytest.raises(errors.TryAgain, match="4 of 4 rows cannot be fetched now"):
        encode(*FETCH, 0.4, source=url_data)
    assert seen == PARTS[:1]


# ---------------------------------------------------------------------------------------------------------------------
# Continuing


def test_a_failed_run_goes_on_where_it_was(encode, stop_at, whole, tmp_path):
    flags = ["--resolutions", 16, 32]
    stop_at(2)
    with pytest.raises(errors.OutOfResource):
        encode(*flags)
    assert not (tmp_path / "out").exists()
    seen = stop_at()
    assert encode(*flags)["rows"] == 10
    assert seen == PARTS[2:]
    assert contents(tmp_path / "out") == contents(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_killed_run_leaves_nothing_half_and_the_next_is_as_if_it_had_not_been(command, encode, whole, tmp_path):
    """SIGKILL while the second part is being written."""
    flags = ["--resolutions", 16, 32]
    code = """
import os, sys
import preprocess
from common import folders
replace = os.replace
def kill(source, target):
    if target.name == "part-000000-0001.parquet":
        os.kill(os.getpid(), 9)
    replace(source, target)
folders.os.replace = kill
preprocess.main(preprocess.parse_args())
"""
    threads = str(torch.get_num_threads())  # as here: another number rounds otherwise
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads}
    arguments = [sys.executable, "-c", code, *command(*flags)]
    killed = subprocess.run(arguments, capture_output=True, text=True, timeout=240, env=environment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = [path.name for path in (tmp_path / "out.work" / "parts").iterdir()]
    assert PARTS[0] in left and PARTS[1] not in left and len(left) == 3
    assert not (tmp_path / "out").exists()
    written = (tmp_path / "out.work" / "parts" / PARTS[0]).stat().st_mtime_ns
    encode(*flags)
    assert (tmp_path / "out" / PARTS[0]).stat().st_mtime_ns == written
    assert contents(tmp_path / "out") == contents(whole)
    assert len(set(read_parts(tmp_path / "out")["key"])) == 10
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_finished_command_returns_at_once_and_writes_nothing(command, whole, data, tmp_path):
    before = tree(whole.parent)
    code = """
import sys
import preprocess
preprocess.main(preprocess.parse_args())
assert not {"torch", "ray", "diffusers", "transformers"} & sys.modules.keys()
"""
    arguments = [sys.executable, "-c", code, *command("--resolutions", "16", "32", folder=whole)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert last_json(done.stdout) == {"output_dir": str(whole), "rows": 10, "bad_rows": 0}
    assert "is complete with 10 rows: nothing to do" in done.stderr
    assert tree(whole.parent) == before


OTHER = {"seed": [1], "crop": ["random"], "random_flip": [], "resolutions": [32], "rows_per_file": [5]}


@pytest.mark.parametrize(("name", "value"), OTHER.items())
def test_other_settings_do_not_touch_a_data_set(name, value, encode, tmp_path):
    flags = [f"--{name}", *value]
    encode()
    before = tree(tmp_path)
    default = json.loads((tmp_path / "out" / "metadata.json").read_text())["settings"][name]
    with pytest.raises(errors.BadInput, match=rf"out holds a run with other settings \({name} was .*--overwrite"):
        encode(*flags)
    assert tree(tmp_path) == before
    encode(*flags, "--overwrite")
    assert json.loads((tmp_path / "out" / "metadata.json").read_text())["settings"][name] != default
    assert len(Folder(tmp_path / "out").names(".parquet")) == 1 + (2 if name == "rows_per_file" else 3)


def test_other_data_or_another_models_encoders_are_other_settings(encode, tmp_path):
    encode()
    with pytest.raises(errors.BadInput, match=r"other settings .input was"):
        encode(source=make_data(tmp_path / "more", count=11))
    other = make_tiny_model(tmp_path / "other", num_train_timesteps=10)
    assert encode(model=other)["rows"] == 10  # the encoders are the same
    name = next((other / "vae").glob("*.safetensors"))
    data = bytearray(name.read_bytes())
    data[-100:] = bytes(100)
    name.write_bytes(data)
    with pytest.raises(errors.BadInput, match=r"other settings .encoders was"):
        encode(model=other)


def test_an_unfinished_run_of_other_settings_is_only_dropped_by_overwrite(encode, stop_at, tmp_path):
    stop_at(1)
    with pytest.raises(errors.OutOfResource):
        encode()
    before = tree(tmp_path)
    with pytest.raises(errors.BadInput, match=r"the unfinished .*out.* holds .*seed was 0, now 1"):
        encode("--seed", 1)
    assert tree(tmp_path).keys() == before.keys()
    seen = stop_at()
    assert encode("--seed", 1, "--overwrite")["rows"] == 10 and seen == PARTS


def test_parts_of_a_run_that_was_killed_before_it_appeared_keep_their_settings(encode, stop_at, tmp_path, monkeypatch):
    def kill(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folders, "publish", kill)
        with pytest.raises(KeyboardInterrupt):
            encode()
    with pytest.raises(errors.BadInput, match="crop was 'center', now 'random'"):
        encode("--crop", "random")
    seen = stop_at()
    assert encode()["rows"] == 10 and seen == []
    assert sorted(tree(tmp_path / "out")) == sorted([*WRITTEN, "manifest.json"])


def test_parts_of_an_older_version_are_kept_and_the_card_says_so(encode, stop_at, tmp_path):
    """Their records have neither statistics nor pictures nor general reasons."""
    source = make_data(tmp_path / "data", bad=[1])
    stop_at(1)
    with pytest.raises(errors.OutOfResource):
        encode("--max_bad_fraction", 0.1, source=source)
    parts = Folder(tmp_path / "out.work" / "parts")
    (record,) = index.read_records(parts, "_index-00000.parquet")
    notes = json.loads(record["notes"])
    old = {name: notes[name] for name in ("bad", "later", "filtered")}
    assert notes.keys() - old.keys() == {"statistics", "pictures", "reasons"}
    parts.write("_index-00000.parquet", index.to_bytes([{**record, "notes": json.dumps(old)}]))
    seen = stop_at()
    assert encode("--max_bad_fraction", 0.1, source=source)["rows"] == 9 and seen == PARTS[1:]
    facts, card = read_statistics(tmp_path / "out"), (tmp_path / "out" / "README.md").read_text()
    assert facts["counted_rows"] == 6 and "Sizes and lengths are known of 6 of the 9 rows" in card
    assert list(facts["bad_rows_by_reason"].values()) == [1]
    assert "\n1. `犬`\n" in card and "\n6. `-`\n" in card


def test_a_damaged_data_set_is_in_the_way(encode, tmp_path):
    encode()
    (tmp_path / "out" / PARTS[1]).write_bytes(b"cut")
    before = tree(tmp_path)
    with pytest.raises(errors.BadInput, match=r"--output_dir .*out is a damaged data set .*: pass --overwrite"):
        encode()
    assert tree(tmp_path) == before
    assert encode("--overwrite")["rows"] == 10
    assert folders.read_manifest(tmp_path / "out", deep=True)


def test_a_folder_that_is_not_ours_is_never_replaced(encode, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "holiday.jpg").write_bytes(noise_png())
    before = tree(tmp_path)
    for flags in ((), ("--overwrite",)):
        with pytest.raises(errors.BadInput, match=r"--output_dir .*out exists and is not an output of this toolkit"):
            encode(*flags)
    assert tree(tmp_path) == before


def test_the_output_does_not_replace_the_input(encode, data):
    with pytest.raises(errors.BadInput, match=r"--output_dir .* would replace --input"):
        encode(folder=data)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def test_another_run_holds_the_output(encode, tmp_path):
    with folders.lock(tmp_path / "out.work" / ".lock"), pytest.raises(errors.TryAgain, match="process") as error:
        encode()
    assert error.value.exit_code == 75
    assert encode()["rows"] == 10


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resolutions", "20"], "--resolutions 20 is not a multiple of 8"),
        (["--resolutions", "16", "17"], "--resolutions 17 is not a multiple of 8"),
        (["--caption_column", "none"], "no column none: .*--caption_column: image, caption"),
        (["--input", "none"], "--input .*none does not exist"),
        (["--model_dir", "none"], "--model_dir .*none is not a folder"),
    ],
)
def test_wrong_input_is_told_before_anything_is_written(flags, message, encode, tmp_path):
    with pytest.raises(errors.BadInput, match=message):
        encode(*flags)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_says_it_in_one_line(command, tmp_path):
    (tmp_path / "file").touch()
    done = run_script("preprocess.py", *command(folder=tmp_path / "file" / "out"))
    assert (done.returncode, done.stdout) == (3, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"preprocess.py: --output_dir {tmp_path}/file/out: ")


# ---------------------------------------------------------------------------------------------------------------------
# Object stores


def test_from_a_store_to_a_store(encode, stop_at, data, s3, whole, tmp_path):
    Folder(s3("in")).write("x.parquet", (data / "x.parquet").read_bytes())
    options = {"source": s3("in"), "folder": s3("deep/out")}
    flags = ["--resolutions", 16, 32]
    stop_at(2)
    with pytest.raises(errors.OutOfResource):
        encode(*flags, **options)
    seen = stop_at()
    assert encode(*flags, **options)["rows"] == 10 and seen == PARTS[2:]
    there = Folder(s3("deep/out"))
    assert list(there.names("")) == WRITTEN
    assert {name: there.read(name) for name in PARTS} == {name: (whole / name).read_bytes() for name in PARTS}
    assert encode(*flags, **options)["rows"] == 10 and seen == PARTS[2:]  # all there
    assert list(tmp_path.iterdir()) == []


def test_overwrite_drops_what_a_store_held(encode, stop_at, s3, tmp_path):
    options = {"folder": s3("out")}
    encode(**options)
    with pytest.raises(errors.BadInput, match="crop was 'center', now 'random'"):
        encode("--crop", "random", **options)
    stop_at(1)
    with pytest.raises(errors.OutOfResource):
        encode("--crop", "random", "--overwrite", **options)
    assert list(Folder(s3("out")).names("")) == [
        "_index-00000.parquet",
        PARTS[0],
        "run.json",
    ]  # no reader takes it for whole
    stop_at()
    assert encode("--crop", "random", **options)["rows"] == 10
    encode("--crop", "random", folder=tmp_path / "here")
    here, there = read_parts(tmp_path / "here"), read_parts(s3("out"))
    assert all(np.array_equal(here[name], there[name]) for name in here)


def test_a_store_folder_of_other_things_is_in_the_way(encode, s3):
    Folder(s3("out")).write("metadata.json", b'{"not": "ours"}')
    with pytest.raises(errors.BadInput, match=r"holds files that preprocess\.py did not write: choose another"):
        encode(folder=s3("out"))
    assert Folder(s3("out")).names("") == {"metadata.json": 15}


# ---------------------------------------------------------------------------------------------------------------------
# On Ray


@pytest.mark.ray
def test_actors_write_what_this_process_does(ray_session, encode, tmp_path):
    source = make_data(tmp_path / "data", bad=[6], row_group_size=5)
    flags = ["--max_bad_fraction", 0.1, "--crop", "random", "--rows_per_file", 3]
    results = [
        encode(*flags, "--num_workers", workers, source=source, folder=tmp_path / name)
        for workers, name in ((0, "here"), ("1", "there"))
    ]
    assert all((result["rows"], result["bad_rows"]) == (9, 1) for result in results)
    here, there = read_parts(tmp_path / "here"), read_parts(tmp_path / "there")
    for name, values in here.items():
        assert (
            np.allclose(values, there[name], rtol=2e-3, atol=2e-3)
            if "latents" in name
            else (values == there[name]).all()
        )
    assert read_bad_rows(tmp_path / "here") == read_bad_rows(tmp_path / "there") != []
    facts = [read_statistics(tmp_path / name) for name in ("here", "there")]
    assert [each.pop("bytes") > 0 for each in facts] == [True, True] and facts[0] == facts[1]  # latents round otherwise
    sheets = [(tmp_path / name / "contact_sheet.jpg").read_bytes() for name in ("here", "there")]
    assert sheets[0] == sheets[1]
