"""Data sets without caption latents: preprocess.py leaves them out, pretrain.py encodes the captions in training."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import last_json
from safetensors.torch import load_file, save_file
from test_pretrain import assert_equal, assert_same_state, log_of, losses, short_sampling, weights  # noqa: F401

import preprocess
from common import errors
from pipelines import loading

NAMES = ("sd", "sdxl")


def encode(raw_data, model_dir, folder, *flags):
    words = ["--input", raw_data, "--model_dir", model_dir, "--output_dir", folder, "--num_workers", 0, *flags]
    preprocess.main(preprocess.parse_args([*map(str, words), "--rows_per_file", "5"]))
    return folder


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory, raw_data, tiny_families):
    """{family: (latents with those of captions, latents without)}."""
    folder, flags = tmp_path_factory.mktemp("latents"), ["--no-caption_latents"]
    return {
        name: tuple(encode(raw_data, tiny_families[name], folder / f"{name}{len(more)}", *more) for more in ((), flags))
        for name in NAMES
    }


@pytest.fixture
def command(pretrain_command, data_sets, one_thread):
    """Return a function that pre-trains here on a data set of SD without caption latents."""

    def run(**flags):
        pretrain_command(**{"data": data_sets["sd"][1], "caption_dropout": 0.4, **flags})

    run.arguments, run.output_dir, run.work_dir = (
        pretrain_command.arguments,
        pretrain_command.output_dir,
        pretrain_command.work_dir,
    )
    return run


@pytest.mark.parametrize("name", NAMES)
def test_the_captions_are_kept_and_what_the_encoders_say_is_not(name, data_sets, tiny_families):
    whole, lean = data_sets[name]
    for path in sorted(whole.glob("part-*.parquet")):
        tables = [pq.read_table(folder / path.name) for folder in (whole, lean)]
        left_out = set(tables[0].column_names) - set(tables[1].column_names)
        assert left_out == {each for each in tables[0].column_names if each.startswith("caption_")} and left_out
        assert tables[0].drop_columns(list(left_out)).equals(tables[1])
    facts = [json.loads((folder / "metadata.json").read_text()) for folder in (whole, lean)]
    assert facts[1]["settings"]["caption_latents"] is False
    assert "caption_latents" not in facts[0]["settings"], "as in older data sets"
    assert facts[0]["shapes"].keys() - facts[1]["shapes"].keys() == left_out
    assert sum(map(len, facts[1]["shapes"].values())) < sum(map(len, facts[0]["shapes"].values()))


def test_no_text_encoder_is_loaded_to_leave_its_latents_out(raw_data, tiny_model, tmp_path, monkeypatch, capsys):
    loaded, real = [], loading.load_models
    monkeypatch.setattr(
        loading, "load_models", lambda folder, names, *rest: loaded.extend(names) or real(folder, names, *rest)
    )
    encode(raw_data, tiny_model, tmp_path / "out", "--no-caption_latents")
    assert loaded == ["vae"] and last_json(capsys.readouterr().out)["rows"] == 23
    encode(raw_data, tiny_model, tmp_path / "out", "--no-caption_latents")
    assert "nothing to do" in capsys.readouterr().err
    with pytest.raises(errors.BadInput, match="caption_latents was False, now None"):
        encode(raw_data, tiny_model, tmp_path / "out")


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_on_stored_caption_latents(name, command, data_sets, tiny_families, tmp_path):
    """Bit for bit, validation too; about two fifths of the rows have no caption."""
    flags = {"model_dir": tiny_families[name], "num_validation_rows": 3, "validation_steps": 2}
    for kind, data in zip(("stored", "encoded"), data_sets[name], strict=True):
        command(data=data, output_dir=tmp_path / kind, **flags)
    assert log_of(tmp_path / "stored.work") == log_of(tmp_path / "encoded.work")
    assert_equal(weights(tmp_path / "stored"), weights(tmp_path / "encoded"))
    command(data=data_sets[name][1], output_dir=tmp_path / "none", caption_dropout=1, **flags)
    assert losses(tmp_path / "none.work") != losses(tmp_path / "encoded.work")


def test_resume_is_bit_equal_after_a_crash(command, tmp_path, power_cut):
    flags = {"checkpointing_steps": 2, "num_validation_rows": 3, "validation_steps": 2}
    command(output_dir=tmp_path / "whole", **flags)
    with power_cut():
        command(**flags)
    command(**flags)
    assert_same_state(tmp_path / "whole.work", command.work_dir, 4)
    assert log_of(command.work_dir) == log_of(tmp_path / "whole.work")


@pytest.mark.faults  # a minute
@pytest.mark.ray
@pytest.mark.parametrize("name", NAMES)
def test_two_workers_with_fsdp_and_actors_that_read(name, command, data_sets, tiny_families, tmp_path, ray_session):
    flags = {"model_dir": tiny_families[name], "num_workers": 2, "strategy": "fsdp", "num_data_loading_workers": 1}
    for kind, data in zip(("stored", "encoded"), data_sets[name], strict=True):
        command(data=data, output_dir=tmp_path / kind, max_steps=2, num_validation_rows=3, **flags)
    assert log_of(tmp_path / "stored.work") == log_of(tmp_path / "encoded.work")


def test_published_samples_with_text_are_trained_on(command, data_sets, tmp_path, capsys):
    """Of another program: no metadata, and text in place of embeddings."""
    whole, _ = data_sets["sd"]
    for kind, dropped in {
        "both": ["image_latents_16_std"],
        "text": ["image_latents_16_std", "caption_latents"],
    }.items():
        (tmp_path / kind).mkdir()
        for path in whole.glob("part-*.parquet"):
            pq.write_table(pq.read_table(path).drop_columns(dropped), tmp_path / kind / path.name)
        command(data=tmp_path / kind, prescaled_latents=True, output_dir=tmp_path / f"{kind}-out", max_steps=2)
        assert ("has no caption latents" in capsys.readouterr().err) == (kind == "text")
    assert losses(tmp_path / "both-out.work") == losses(tmp_path / "text-out.work")


def halve(model_dir, part):
    """Make a component of a model another one."""
    (path,) = (model_dir / part).glob("*.safetensors")
    save_file({name: tensor / 2 for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    return model_dir


def test_another_text_encoder_may_read_the_captions_but_the_vae_is_that_of_the_data(
    refused, command, data_sets, tiny_model, tmp_path
):
    text, vae = (halve(shutil.copytree(tiny_model, tmp_path / part), part) for part in ("text_encoder", "vae"))
    assert "with the VAE or text encoder of another model" in refused(data=data_sets["sd"][0], model_dir=text)
    assert "was encoded with the VAE of another model" in refused(model_dir=vae)
    command(model_dir=text, max_steps=1)
    command(output_dir=tmp_path / "usual", max_steps=1)
    assert losses(command.work_dir) != losses(tmp_path / "usual.work")


def rewrite(folder, copy, change):
    """Copy a data set without its index, its tables changed."""
    copy.mkdir()
    for path in folder.glob("part-*.parquet"):
        pq.write_table(change(pq.read_table(path).drop_columns("image_latents_16_std")), copy / path.name)
    return copy


def test_data_with_neither_is_refused(refused, data_sets, tmp_path):
    _, lean = data_sets["sd"]
    data = rewrite(lean, tmp_path / "neither", lambda table: table.drop_columns("caption"))
    line = refused(data=data, prescaled_latents=True)
    assert "has neither caption_latents nor the text in a column caption: its columns are key, image" in line
    assert "has no column x" in refused(caption_latents_column="x")


@pytest.mark.parametrize(
    ("values", "words"), [([None], "holds 1 null values"), ([1], "holds int64, not text: choose another column")]
)
def test_captions_that_are_no_text(values, words, command, data_sets, tmp_path):
    def spoil(table):
        captions = pa.array(
            [*values, *(table["caption"].to_pylist()[1:] if None in values else [1] * (len(table) - 1))]
        )
        return table.set_column(table.column_names.index("caption"), "caption", captions)

    data = rewrite(data_sets["sd"][1], tmp_path / "spoilt", spoil)
    with pytest.raises(errors.CheckFailed, match=f"column caption {words}"):
        command(data=data, prescaled_latents=True)


def test_the_text_encoders_count_as_memory_of_the_trainer(command, data_sets, tiny_families, capsys):
    for name in NAMES:
        said = []
        for data in data_sets[name]:
            command(data=data, model_dir=tiny_families[name], dry_run=True)
            said.append(last_json(capsys.readouterr().out)["gpu_bytes_in_bf16"])
        family = ("text_encoder",) if name == "sd" else ("text_encoder", "text_encoder_2")
        count = sum(loading.empty_model(tiny_families[name], each).num_parameters() for each in family)
        assert said[1].pop("text_encoders") == 2 * count == said[1].pop("sum") - said[0].pop("sum")
        assert said[0] == said[1]
