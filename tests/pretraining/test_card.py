"""card.py: what README.md and statistics.json say of a data set, and that a person can follow it."""

import json
import re

import yaml
from PIL import Image

import pretrain
from common.storage import Folder
from pretraining import card
from pretraining.card import _bytes, make_card
from pretraining.index import read_index
from pretraining.latents import METADATA
from pretraining.statistics import QUANTILES
from pretraining.tally import Summary


def code_in(text, language):
    """The blocks of code of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_front_matter_is_what_the_hub_reads(latents):
    text = (latents / "README.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    files = {"config_name": "default", "data_files": [{"split": "train", "path": "part-*.parquet"}]}
    strings, numbers = ("key", "caption"), ("image_latents_16", "image_latents_16_std", "caption_latents")
    kinds = dict.fromkeys(strings, "string") | dict.fromkeys(numbers, "binary")
    assert front == {
        "configs": [files],
        "dataset_info": {"features": [{"name": name, "dtype": kind} for name, kind in kinds.items()]},
        "size_categories": ["n<1K"],
        "tags": ["latents", "stable-diffusion"],
        "task_categories": ["text-to-image"],
    }


def test_the_facts_are_those_of_the_raw_data(latents):
    facts = json.loads((latents / "statistics.json").read_text())
    assert (facts["rows"], facts["counted_rows"], facts["bad_rows"], facts["parts"]) == (23, 23, 0, 5)
    assert facts["bytes"] == sum(path.stat().st_size for path in latents.glob("part-*.parquet"))
    images, captions = facts["images"], facts["captions"]
    sides = [images[name]["histogram"] for name in ("width", "height", "shortest_side")]
    assert sides == [[[24, 23]], [[20, 23]], [[20, 23]]]
    assert images["aspect_ratio"]["quantiles"] == dict.fromkeys(QUANTILES, 1.188) and images["enlarged"] == {"16": 0}
    assert captions["characters"]["histogram"] == [[len("picture 0"), 23]]
    assert (captions["empty"], captions["cut"], captions["max_tokens"]) == (0, 0, 24)
    text = (latents / "README.md").read_text()
    assert "23 images and captions, encoded at 16 pixels" in text and "| in this data set | 23 | 100 % |" in text
    assert "| `image_latents_16_std` | float16 | 4 × 8 × 8 | standard deviation of the VAE's posterior" in text
    assert "| rows_per_file | `5` |" in text and "Sizes and lengths are known" not in text


def test_its_code_runs_as_it_is(latents, monkeypatch):
    text = (latents / "README.md").read_text()
    (example,), (command,) = code_in(text, "python"), code_in(text, "bash")
    monkeypatch.chdir(latents)
    names = {}
    exec(example, names)
    assert names["mean"].shape == names["latents"].shape == (5, 4, 8, 8) and len(names["captions"]) == 5
    args = pretrain.parse_args(command.replace("\\\n", " ").split()[2:])
    assert args.resolution == 16


def test_the_sheet_shows_all_rows_of_a_small_data_set_with_their_captions(latents):
    text = (latents / "README.md").read_text()
    assert "![Images evenly spaced over the data set](contact_sheet.jpg)" in text
    listed = re.findall(r"^\d+\. `(.*)`$", text, re.MULTILINE)
    assert listed == [f"picture {row % 5}" for row in range(23)]
    with Image.open(latents / "contact_sheet.jpg") as sheet:
        assert sheet.format == "JPEG" and sheet.width > 1000


FACTS = {
    "rows": 1_000,
    "bad_rows": 60,
    "bad_rows_by_reason": {f"reason {i} | a": 2 for i in range(30)},
    "unfetched_rows": 7,
    "filtered_rows": {"--where": 940},
    "parts": 4,
    "bytes": 1_234_567,
    "counted_rows": 0,
    "images": {},
    "captions": {},
}


def test_a_card_of_bad_and_filtered_rows_and_of_no_statistics():
    metadata = {"model": "org/name", "revision": "abc", "family": "stable-diffusion", "resolutions": [256, 512]}
    text = make_card({**metadata, "settings": {"seed": 0}}, FACTS, [], None, [])
    for part in (
        "# Latents\n\n1,000 images and captions, encoded at 256 and 512 pixels",
        "`org/name` (revision `abc`)",
        "4 Parquet files, 1.23 MB",
        "size_categories: [1K<n<10K]",
        "| in this data set | 1,000 | 50 % |",
        "| bad (of these 7 could not be fetched) | 60 | 3 % |",
        "| left out by filters | 940 | 47 % |",
        "| `reason 0 \\| a` | 2 | 0.1 % |",
        "| others | 20 | 1 % |",
        "| `--where` | 940 | 47 % |",
        "are known of 0 of the 1,000 rows",
    ):
        assert part in text
    assert "contact_sheet" not in text and "```" not in text


def test_bytes_have_a_unit():
    found = [_bytes(count) for count in (0, 999, 1000, 2_500_000, 3.48e14)]
    assert found == ["0 bytes", "999 bytes", "1 kB", "2.5 MB", "348 TB"]


def test_a_sheet_that_cannot_be_drawn_is_a_warning(latents, tmp_path, capsys):
    metadata = json.loads((latents / METADATA).read_text())
    index = read_index(Folder(latents), metadata["index"]["files"])
    (tmp_path / index.name(0)).write_bytes((latents / index.name(0)).read_bytes())
    card.write_card(Folder(tmp_path), metadata, 77, index, Summary(pictures={0: [["a cat", "bm8gaW1hZ2U="]]}))
    assert "warning: contact_sheet.jpg is left out: cannot identify" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", index.name(0), "statistics.json"]
    assert "contact_sheet" not in (tmp_path / "README.md").read_text()
