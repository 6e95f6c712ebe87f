"""The commands of docs/pretraining.md that lead from URLs to a model in two phases, run in small from end to end."""

import importlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, last_json
from safetensors.torch import load_file
from test_docs import split_code, split_commands

from common import folders
from pipelines.configs import model_resolution

HEADING = "\n## From URLs to a 512-pixel model\n"
SCRIPTS = ["preprocess.py", "pretrain.py", "pretrain.py"]
IN_SMALL = {
    "preprocess.py": ["--num_workers", "0", "--rows_per_file", "5"],
    "pretrain.py": ["--num_workers", "0", "--batch_size_per_worker", "2", "--max_steps", "2", "--log_every", "1"],
}
FROZEN = ("vae", "text_encoder", "tokenizer")


@pytest.fixture
def table(web, tmp_path):
    """A folder with a table of URLs as LAION's: nine good rows, and one of each kind that is left out."""
    rows = [{"URL": f"{web.address}/large/{row}", "WIDTH": 48, "HEIGHT": 40, "punsafe": 0.01} for row in range(9)]
    rows += [{**rows[0], "URL": f"{web.address}/large/narrow", "WIDTH": 28}]
    rows += [{**rows[0], "URL": f"{web.address}/large/unsafe", "punsafe": 0.9}]
    rows += [{**rows[0], "URL": f"{web.address}/good/shrunk"}, {**rows[0], "URL": f"{web.address}/404/gone"}]
    (tmp_path / "laion").mkdir()
    captions = [f"picture {row}" for row in range(len(rows))]
    pq.write_table(pa.Table.from_pylist(rows).append_column("TEXT", [captions]), tmp_path / "laion" / "part-0.parquet")
    return tmp_path


@pytest.fixture
def run_guide(tiny_model, table, capsys):
    """Return a function that runs the commands of the guide in order; it returns the results that they print."""
    section = (ROOT / "docs/pretraining.md").read_text().split(HEADING)[1].split("\n## ")[0]
    commands = [command for line in split_code(section)[1] for command in split_commands(line)]
    assert [command[:2] for command in commands] == [["python", script] for script in SCRIPTS]
    smaller = {"s3://bucket": str(table), "MODEL": str(tiny_model), "512": "32", "256": "16"}

    def in_small(word):
        for old, new in smaller.items():
            word = word.replace(old, new)
        return word

    def run():
        results = []
        for seed, (_, name, *words) in enumerate(commands):  # another seed: new weights would be others
            script = importlib.import_module(name.removesuffix(".py"))
            script.main(script.parse_args([*map(in_small, words), *IN_SMALL[name], "--seed", str(seed)]))
            results.append(last_json(capsys.readouterr().out))
        return results

    return run


def read_frozen(model_dir):
    """Return {path: bytes} of the files of the parts that are not trained."""
    files = [path for name in FROZEN for path in (model_dir / name).rglob("*") if path.is_file()]
    return {path.relative_to(model_dir).as_posix(): path.read_bytes() for path in files}


def test_the_guide_leads_from_urls_to_a_model_of_two_phases(run_guide, table, web, tiny_model):
    results = run_guide()
    counts = {"rows": 9, "bad_rows": 1, "filtered_rows": {"--where": 2, "side < 32": 1}}
    assert results[0] == {"output_dir": str(table / "latents"), **counts}
    assert {hit.split("/")[-1] for hit in web.hits} == {*map(str, range(9)), "shrunk", "gone"}  # the others stay unread
    one, two = table / "base-16", table / "base-32"
    assert results[1:] == [{"output_dir": str(folder), "steps": 2, "trained": 2} for folder in (one, two)]
    assert [model_resolution(folder) for folder in (one, two)] == [16, 32]
    base = read_frozen(tiny_model)
    assert {name.split("/")[0] for name in base} == set(FROZEN) and base == read_frozen(one) == read_frozen(two)
    rows = [folders.read_manifest(folder)["settings"]["rows_per_step"] for folder in (one, two)]
    assert rows == [2, 4]  # --gradient_accumulation_steps 2
    unets = [load_file(folder / "unet/diffusion_pytorch_model.safetensors") for folder in (tiny_model, one, two)]

    def is_near(other, another):  # two steps of the warm-up move a weight by 1e-7
        return all(torch.allclose(other[name], another[name], atol=1e-6) for name in other)

    assert is_near(unets[1], unets[2]) and not is_near(unets[0], unets[1])  # from the first phase, from random weights
