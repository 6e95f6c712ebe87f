"""run_model.py: names, what depends on what, resuming, the safety checker; with a tiny model, or a drawer of noise."""

import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, last_json, tree
from PIL import Image

import run_model
from common import cli, cluster, errors
from common.folders import lock, sha256_file
from pipelines import drawing, loading
from pipelines.drawing import MAX_REDRAWS, ImageDrawer, make_items
from pipelines.families import say_what_is_cut
from pipelines.image_folder import image_name
from pipelines.samplers import SAMPLER
from utils import image_seed

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = re.compile(r"[a-z0-9][a-z0-9-]*-[0-9a-f]{8}-\d{5}\.png")


@pytest.fixture
def draw(tiny_model, tmp_path, capsys):
    """Run run_model.main in this process on `out`, or another folder; return its JSON."""

    def call(*flags, prompts=("a cat",), folder=tmp_path / "out", model=tiny_model, steps=2):
        arguments = ["--model_dir", model, "--output_dir", folder, "--num_inference_steps", steps]
        arguments += [part for prompt in prompts for part in ("--prompts", prompt)]
        if "--num_workers" not in flags:
            arguments += ["--num_workers", 0]
        capsys.readouterr()
        run_model.main(run_model.parse_args([str(part) for part in (*arguments, *flags)]))
        return last_json(capsys.readouterr().out)

    return call


def images_of(folder):
    return sorted(path.name for path in Path(folder).glob("*.png"))


def records_of(folder):
    lines = (Path(folder) / "metadata.jsonl").read_text().splitlines()
    return {record["file_name"]: record for record in map(json.loads, lines)}


def pixels_of(folder):
    return {name: np.asarray(Image.open(Path(folder) / name)).astype(int) for name in images_of(folder)}


def seeds_of(calls):
    return [seed for _, seeds in calls for seed in seeds]


# ---------------------------------------------------------------------------------------------------------------------
# Names

ODD_PROMPTS = [
    "../../etc/passwd",
    "a/b\\c:d*e?f",
    "line\nbreak\ttab",
    "very long " * 100,
    "犬の写真",
    "...",
    "-rf",
    "A CAT, sitting, on a mat!",
    "con.png",
]


def test_names_are_plain_whatever_the_prompt():
    names = [image_name(prompt, index) for prompt in ODD_PROMPTS for index in (0, 123456)]
    for name in names:
        assert re.fullmatch(r"[a-z0-9][a-z0-9-]*-[0-9a-f]{8}-\d{5,}\.png", name) and len(name) <= 100
    assert len(set(names)) == len(names)


def test_a_name_is_a_function_of_prompt_and_index():
    assert image_name("a cat", 3) == image_name("a cat", 3) == "a-cat-51e46741-00003.png"


def test_prompts_that_read_alike_have_their_own_files(draw, drawn, tmp_path):
    prompts = ["a cat!", "a cat?", "A cat", "a cat", "a  cat"]
    assert draw("--num_samples_per_prompt", 2, prompts=prompts)["drawn"] == 10
    records = records_of(tmp_path / "out")
    assert len(images_of(tmp_path / "out")) == len(records) == 10
    assert sorted({record["text"] for record in records.values()}) == sorted(prompts)


def test_odd_prompts_stay_inside_the_folder(draw, drawn, tmp_path):
    draw("--num_samples_per_prompt", 1, prompts=[*ODD_PROMPTS[:6], *ODD_PROMPTS[7:]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    names = images_of(tmp_path / "out")
    assert len(names) == 8 and all(NAME.fullmatch(name) for name in names)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*names, "metadata.jsonl", ".lock"}
    assert {record["text"] for record in records_of(tmp_path / "out").values()} == {
        prompt.strip() for prompt in [*ODD_PROMPTS[:6], *ODD_PROMPTS[7:]]
    }


def test_commas_are_part_of_a_prompt(draw, drawn):
    draw("--num_samples_per_prompt", 3, prompts=["a cat, a dog, and a bird"])
    assert [prompts for prompts, _ in drawn] == [["a cat, a dog, and a bird"] * 3]


# ---------------------------------------------------------------------------------------------------------------------
# Prompts and flags


def test_a_prompts_file_has_a_prompt_a_line(draw, drawn, tmp_path):
    text = "\ufeffa cat\r\n\r\n  a dog, sitting  \r\na cat\r\n\n犬\n"
    (tmp_path / "prompts.txt").write_bytes(text.encode())
    draw("--num_samples_per_prompt", 1, "--prompts_file", tmp_path / "prompts.txt", prompts=["a bird", "a cat"])
    assert [prompts for prompts, _ in drawn] == [["a bird", "a cat", "a dog, sitting", "犬"]]


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n", b"\xef\xbb\xbf", b"caf\xe9\n", None])
def test_a_prompts_file_without_prompts_is_bad_input(draw, tmp_path, content):
    if content is not None:
        (tmp_path / "prompts.txt").write_bytes(content)
    with pytest.raises(errors.BadInput, match="--prompts_file"):
        draw("--prompts_file", tmp_path / "prompts.txt", prompts=[])
    assert not (tmp_path / "out").exists()


def test_workers_are_a_number_or_a_range():
    assert [cli.pool_size(text) for text in ("0", "4", "1:4", "2:2")] == [0, 4, (1, 4), (2, 2)]


@pytest.mark.parametrize(
    "flags",
    [
        *[["--num_workers", text] for text in ("x", "-1", "2:1", "0:2", "1:2:3", "1.5", "", ":")],
        ["--batch_size", "0"],
        ["--num_samples_per_prompt", "0"],
        ["--seed", "-1"],
        ["--guidance_scale", "nan"],
    ],
)
def test_wrong_flags_are_usage_errors(flags, capsys):
    with pytest.raises(SystemExit) as exit_:
        run_model.parse_args(["--model_dir", "m", "--output_dir", "o", "--prompts", "p", *flags])
    assert exit_.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_no_prompt_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as exit_:
        run_model.parse_args(["--model_dir", "m", "--output_dir", "o"])
    assert exit_.value.code == 2 and "--prompts" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--height", "--width"])
def test_a_size_that_the_vae_does_not_divide_is_bad_input(draw, flag):
    for size in (17, 20):  # Diffusers takes multiples of 8, whatever the VAE's factor
        with pytest.raises(errors.BadInput, match=rf"{flag} {size} .*multiple of 8"):
            draw(flag, size)


def test_a_size_that_the_family_cannot_draw_is_bad_input(draw, tiny_families):
    with pytest.raises(errors.BadInput, match=r"--height 18 .*multiple of 4"):
        draw("--height", 18, model=tiny_families["flux"])
    with pytest.raises(errors.BadInput, match=r"--width 36 is larger than 32, the largest side"):
        draw("--width", 36, model=tiny_families["sd3"])


def test_a_checkpoint_without_modules_is_bad_input(draw, tmp_path):
    (tmp_path / "checkpoint-000001").mkdir()
    for folder in ("checkpoint-000001", "none"):
        with pytest.raises(errors.BadInput, match=f"--checkpoint .*{folder}"):
            draw("--checkpoint", tmp_path / folder)


def test_bad_input_leaves_no_folder(draw, tmp_path):
    with pytest.raises(errors.BadInput, match="--model_dir"):
        draw(model=tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(errors.BadInput, match="--output_dir"):
        draw(folder=tmp_path / "file" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_items_are_of_one_model_and_sampler_not_of_one_prompt():
    """Those of a model in a row; a prompt of many images is many items, so that it keeps all actors busy."""
    sampler = dict.fromkeys(SAMPLER)
    images = [
        (f"{model}{steps}{text}{i}", {"model_dir": model}, {**sampler, "text": text, "num_inference_steps": steps})
        for steps in (5, 6)
        for model in "AB"
        for text in "xy"
        for i in range(1 + (steps == 6))
    ]
    items = make_items(images, 3)
    assert [item["paths"] for item in items] == [
        ["A5x0", "A5y0"], ["A6x0", "A6x1", "A6y0"], ["A6y1"], ["B5x0", "B5y0"], ["B6x0", "B6x1", "B6y0"], ["B6y1"]
    ]  # fmt: skip
    found = [each for item in items for each in zip(item["paths"], item["records"], strict=True)]
    assert dict(found) == {path: record for path, _, record in images} and len(found) == len(images)
    assert all(item["model"]["model_dir"] == path[0] for item in items for path in item["paths"])
    assert json.loads(json.dumps(items)) == items


def test_prompts_share_batches(draw, drawn):
    prompts = [f"a cat, the {number}th" for number in range(8)]
    draw("--num_samples_per_prompt", 1, "--batch_size", 4, prompts=prompts)
    assert drawn == [(prompts[:4], [image_seed(0, 0)] * 4), (prompts[4:], [image_seed(0, 0)] * 4)]


@pytest.mark.parametrize(("text", "size"), [("3", 3), ("1:4", (1, 4))])
def test_the_pool_is_as_asked_for(draw, monkeypatch, text, size):
    asked = {}
    monkeypatch.setattr(drawing, "map_on_actors", lambda *args, **pool: asked.update(pool) or [])
    words = ["--address", "ray://x:1", "--cpus_per_worker", 0.5, "--gpus_per_worker", 0.25, "--accelerator_type", "L4"]
    draw("--num_workers", text, *words)
    place = {"address": "ray://x:1", "insecure_cluster": False, "cpus_per_worker": 0.5, "gpus_per_worker": 0.25}
    place["accelerator_type"] = "L4"
    assert asked == {"num_workers": size, "max_failures": 3, "start_timeout": 1800, **place}


# ---------------------------------------------------------------------------------------------------------------------
# What an image depends on


@pytest.fixture(scope="module")
def reference(tiny_model, tmp_path_factory):
    """A folder of five images of a prompt, drawn one at a time by the tiny model."""
    folder = tmp_path_factory.mktemp("reference") / "out"
    draw_tiny(tiny_model, folder, "--batch_size", 1)
    return folder


def draw_tiny(model, folder, *flags, samples=5, workers=0):
    arguments = ["--model_dir", model, "--output_dir", folder, "--prompts", "a cat", "--num_inference_steps", 3]
    arguments += ["--num_samples_per_prompt", samples, "--num_workers", workers]
    run_model.main(run_model.parse_args([str(part) for part in (*arguments, *flags)]))


def assert_same_images(folder, reference, count=5):
    found, expected = pixels_of(folder), pixels_of(reference)
    assert len(found) == count
    for name, pixels in found.items():
        assert pixels.shape == (16, 16, 3)
        assert np.abs(pixels - expected[name]).max() <= 2


def test_images_of_a_prompt_differ(reference):
    images = list(pixels_of(reference).values())
    assert len(images) == 5
    for first in range(5):
        for second in range(first):
            assert np.abs(images[first] - images[second]).mean() > 5


def test_an_image_does_not_depend_on_its_batch(reference, tiny_model, tmp_path):
    draw_tiny(tiny_model, tmp_path / "out", "--batch_size", 2)
    assert_same_images(tmp_path / "out", reference)


def test_an_image_does_not_depend_on_the_order(reference, tiny_model, tmp_path):
    records = [
        {key: value for key, value in record.items() if key not in ("file_name", "seed", "sha256", "redraws")}
        for _, record in sorted(records_of(reference).items())
    ]
    (tmp_path / "out").mkdir()
    drawer = ImageDrawer()
    model = {"model_dir": str(tiny_model), "checkpoint": None, "mixed_precision": "auto", "safety_checker": True}
    for batch in (records[4:2:-1], records[2::-1]):
        paths = [str(tmp_path / "out" / image_name("a cat", record["index"])) for record in batch]
        drawer({"model": model, "paths": paths, "records": batch})
    assert_same_images(tmp_path / "out", reference)


def test_an_image_does_not_depend_on_the_prompts_beside_it(draw, tmp_path, monkeypatch):
    """Of another length, and with a negative prompt and guidance: one batch of all against batches of one."""
    prompts = ["a", "a cat", "a dog sits in the snow, 7", "9, " * 20]
    flags = ["--negative_prompt", "grey, blurred", "--guidance_scale", 30, "--num_samples_per_prompt", 2]
    sizes, draw_images = [], loading.draw_images
    monkeypatch.setattr(
        loading, "draw_images", lambda *args, **sampler: sizes.append(len(args[2])) or draw_images(*args, **sampler)
    )
    for size in (8, 1):
        draw(*flags, "--batch_size", size, prompts=prompts, folder=tmp_path / str(size), steps=3)
    assert sizes == [8] + [1] * 8
    assert_same_images(tmp_path / "8", tmp_path / "1", count=8)
    images = [pixels_of(tmp_path / "8")[image_name(prompt.strip(), 0)] for prompt in prompts]
    for first in range(4):  # the prompts matter: these have the same seed
        assert all(np.abs(images[first] - images[second]).max() > 4 for second in range(first))


def test_another_seed_or_prompt_or_setting_gives_other_images(reference, tiny_model, tmp_path):
    draw_tiny(tiny_model, tmp_path / "seed", "--seed", 1)
    draw_tiny(tiny_model, tmp_path / "scale", "--guidance_scale", 1)
    for folder in ("seed", "scale"):
        for name, pixels in pixels_of(tmp_path / folder).items():
            assert np.abs(pixels - pixels_of(reference)[name]).mean() > 1, folder


def test_a_size_is_drawn_as_asked(draw, tmp_path):
    draw("--height", 24, "--width", 32, "--num_samples_per_prompt", 1)
    assert [pixels.shape for pixels in pixels_of(tmp_path / "out").values()] == [(24, 32, 3)]


@pytest.mark.parametrize(("flag", "shape"), [("--height", (24, 16, 3)), ("--width", (16, 24, 3))])
def test_a_height_or_width_alone_is_drawn_as_asked(draw, tmp_path, flag, shape):
    draw(flag, 24, "--num_samples_per_prompt", 1)
    assert [pixels.shape for pixels in pixels_of(tmp_path / "out").values()] == [shape]


def test_a_stable_diffusion_3_without_t5_draws(draw, tiny_families, tmp_path, capsys):
    """Its folder names T5 as [null, null]; CLIP then reads the prompt, here 16 tokens of it."""
    folder = shutil.copytree(tiny_families["sd3"], tmp_path / "small")
    index = json.loads((folder / "model_index.json").read_text())
    for name in ("text_encoder_3", "tokenizer_3"):
        shutil.rmtree(folder / name)
        index[name] = [None, None]
    (folder / "model_index.json").write_text(json.dumps(index))
    assert draw("--num_samples_per_prompt", 1, model=folder, prompts=["a cat " * 300])["images"] == 1
    say_what_is_cut(folder, ["a cat " * 300])
    assert "the model reads 16 tokens" in capsys.readouterr().err


def test_redrawn_images_are_equal_to_the_byte(reference, tiny_model, tmp_path, capsys):
    folder = shutil.copytree(reference, tmp_path / "out")
    before = tree(folder)
    names = images_of(folder)
    (folder / names[0]).unlink()
    (folder / names[3]).write_bytes(before[names[3]][0][:200])
    (folder / names[4]).write_bytes(b"")
    draw_tiny(tiny_model, folder, "--batch_size", 1)
    captured = capsys.readouterr()
    assert last_json(captured.out)["drawn"] == 3
    assert f"{names[3]} is damaged" in captured.err and f"{names[4]} is damaged" in captured.err
    after = tree(folder)
    assert {name: data for name, (data, _) in after.items() if name != ".lock"} == {
        name: data for name, (data, _) in before.items() if name != ".lock"
    }
    assert [name for name in names if after[name] != before[name]] == [names[0], names[3], names[4]]
    assert after["metadata.jsonl"] == before["metadata.jsonl"]


def test_a_checkpoints_modules_draw(reference, tiny_model, tmp_path):
    from safetensors.torch import load_file, save_file

    checkpoint = tmp_path / "checkpoint-000002"
    shutil.copytree(tiny_model / "unet", checkpoint / "unet")
    weights = next((checkpoint / "unet").glob("*.safetensors"))
    save_file({key: value * 1.5 for key, value in load_file(weights).items()}, weights, metadata={"format": "pt"})
    draw_tiny(tiny_model, tmp_path / "out", "--checkpoint", checkpoint)
    for name, pixels in pixels_of(tmp_path / "out").items():
        assert np.abs(pixels - pixels_of(reference)[name]).mean() > 1
    with pytest.raises(errors.BadInput, match="model"):
        draw_tiny(tiny_model, tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------------------
# Records


def test_a_record_says_how_an_image_was_made(reference, tiny_model):
    records = records_of(reference)
    assert sorted(records) == images_of(reference)
    for index, name in enumerate(sorted(records)):
        record = records[name]
        assert name == image_name("a cat", index)
        assert record["sha256"] == sha256_file(reference / name)
        del record["sha256"]
        assert re.fullmatch(r"[0-9a-f]{64}", record.pop("model"))
        assert record == {
            "file_name": name,
            "text": "a cat",
            "index": index,
            "seed": image_seed(0, index),
            "base_seed": 0,
            "redraws": 0,
            "sampler": "model",
            "num_inference_steps": 3,
            "guidance_scale": 7.5,
            "negative_prompt": "",
            "height": None,
            "width": None,
            "mixed_precision": "auto",
            "safety_checker": True,
        }


def test_a_second_run_writes_nothing(draw, drawn, tmp_path):
    draw("--num_samples_per_prompt", 3)
    before, folder_time = tree(tmp_path / "out"), (tmp_path / "out").stat().st_mtime_ns
    drawn.clear()
    result = draw("--num_samples_per_prompt", 3)
    assert result == {"output_dir": str(tmp_path / "out"), "drawn": 0, "images": 3}
    assert drawn == [] and tree(tmp_path / "out") == before
    assert (tmp_path / "out").stat().st_mtime_ns == folder_time


def test_a_finished_run_needs_no_lock(draw, drawn, tmp_path):
    draw("--num_samples_per_prompt", 1)
    with lock(tmp_path / "out" / ".lock"):
        assert draw("--num_samples_per_prompt", 1)["drawn"] == 0
        with pytest.raises(errors.TryAgain, match=r"out is in use by process \d+"):
            draw("--num_samples_per_prompt", 2)


def test_only_what_is_missing_is_drawn(draw, drawn, tmp_path):
    draw("--num_samples_per_prompt", 6)
    before = tree(tmp_path / "out")
    names = images_of(tmp_path / "out")
    for name in names[1:3]:
        (tmp_path / "out" / name).unlink()
    drawn.clear()
    assert draw("--num_samples_per_prompt", 6)["drawn"] == 2
    assert seeds_of(drawn) == [image_seed(0, 1), image_seed(0, 2)]
    after = tree(tmp_path / "out")
    assert all(after[name] == before[name] for name in (names[0], *names[3:]))
    assert all(after[name][0] == before[name][0] for name in (*names, "metadata.jsonl"))


def test_a_changed_image_is_noticed(draw, drawn, tmp_path):
    """Cut in the middle of its pixels, not only too short; and a picture of someone else under our name."""
    draw("--num_samples_per_prompt", 3)
    before = tree(tmp_path / "out")
    names = images_of(tmp_path / "out")
    data = bytearray(before[names[0]][0])
    data[len(data) // 2] ^= 255
    (tmp_path / "out" / names[0]).write_bytes(data)
    Image.new("RGB", (16, 16)).save(tmp_path / "out" / names[1])
    drawn.clear()
    assert draw("--num_samples_per_prompt", 3)["drawn"] == 2
    assert seeds_of(drawn) == [image_seed(0, 0), image_seed(0, 1)]
    assert {name: data for name, (data, _) in tree(tmp_path / "out").items() if name != ".lock"} == {
        name: data for name, (data, _) in before.items() if name != ".lock"
    }


@pytest.mark.parametrize("left", [None, "", "half", "nonsense"])
def test_metadata_is_rebuilt_from_the_images(draw, drawn, tmp_path, left):
    draw("--num_samples_per_prompt", 3)
    path = tmp_path / "out" / "metadata.jsonl"
    before, names = path.read_text(), images_of(tmp_path / "out")
    times = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in names}
    if left is None:
        path.unlink()
    else:
        path.write_text({"half": before[: len(before) // 2], "nonsense": '[1]\n"x"\n{}\nnull\n\n'}.get(left, left))
    drawn.clear()
    assert draw("--num_samples_per_prompt", 3) == {"output_dir": str(tmp_path / "out"), "drawn": 0, "images": 3}
    assert drawn == [] and path.read_text() == before
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in names} == times


def test_metadata_is_rebuilt_whatever_the_pool(draw, drawn, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "start_ray", lambda *_: {"CPU": 2.0})
    draw("--num_samples_per_prompt", 3)
    (tmp_path / "out" / "metadata.jsonl").unlink()
    assert draw("--num_samples_per_prompt", 3, "--num_workers", 2)["drawn"] == 0


def test_metadata_that_is_no_text_is_rebuilt(draw, drawn, tmp_path):
    draw("--num_samples_per_prompt", 1)
    path = tmp_path / "out" / "metadata.jsonl"
    before = path.read_bytes()
    path.write_bytes(b"\xff\xfe\0\0" + before)
    assert draw("--num_samples_per_prompt", 1)["drawn"] == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--seed", 1], "base_seed was 0, now 1"),
        (["--guidance_scale", 3], "guidance_scale was 7.5, now 3.0"),
        (["--negative_prompt", "grey"], "negative_prompt was '', now 'grey'"),
        (["--height", 8], "height was None, now 8"),
        (["--no_safety_checker"], "safety_checker was True, now False"),
    ],
)
def test_other_settings_on_the_same_folder_are_bad_input(draw, drawn, tmp_path, flags, name):
    draw("--num_samples_per_prompt", 2)
    before = tree(tmp_path / "out")
    with pytest.raises(errors.BadInput, match=re.escape(name)) as error:
        draw("--num_samples_per_prompt", 2, *flags)
    assert "--output_dir" in str(error.value) and "--overwrite" in str(error.value)
    assert tree(tmp_path / "out") == before


def test_another_model_on_the_same_folder_is_bad_input(draw, drawn, tiny_v_model):
    draw("--num_samples_per_prompt", 1)
    with pytest.raises(errors.BadInput, match="model was '"):
        draw("--num_samples_per_prompt", 1, model=tiny_v_model)


def test_a_copy_of_the_model_elsewhere_is_the_same_model(draw, drawn, tiny_model, tmp_path):
    draw("--num_samples_per_prompt", 1)
    assert draw("--num_samples_per_prompt", 1, model=shutil.copytree(tiny_model, tmp_path / "copy"))["drawn"] == 0


def test_overwrite_draws_again(draw, drawn, tmp_path):
    draw("--num_samples_per_prompt", 2)
    before = tree(tmp_path / "out")
    assert draw("--num_samples_per_prompt", 2, "--seed", 1, "--overwrite")["drawn"] == 2
    names = images_of(tmp_path / "out")
    assert all(tree(tmp_path / "out")[name][0] != before[name][0] for name in names)
    assert [record["base_seed"] for record in records_of(tmp_path / "out").values()] == [1, 1]
    assert draw("--num_samples_per_prompt", 2, "--seed", 1)["drawn"] == 0
    assert draw("--num_samples_per_prompt", 2, "--seed", 1, "--overwrite")["drawn"] == 0


def test_more_samples_and_prompts_keep_the_earlier(draw, drawn, tmp_path):
    draw("--num_samples_per_prompt", 2)
    before = tree(tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    drawn.clear()
    result = draw("--num_samples_per_prompt", 5, prompts=["a dog", "a cat"])
    assert (result["drawn"], result["images"]) == (8, 10)
    assert [seeds for _, seeds in drawn] == [
        [image_seed(0, index) for index in indexes] for indexes in ((0, 1, 2, 3), (4, 2, 3, 4))
    ]
    assert [prompts for prompts, _ in drawn] == [["a dog"] * 4, ["a dog", *["a cat"] * 3]]
    after = tree(tmp_path / "out")
    assert all(after[name] == before[name] for name in before if name.endswith(".png"))
    assert len(records_of(tmp_path / "out")) == 10 and after["notes.txt"][0] == b"mine"
    drawn.clear()
    assert draw("--num_samples_per_prompt", 1)["drawn"] == 0  # fewer than are there
    assert drawn == [] and tree(tmp_path / "out") == after


def test_metadata_lists_what_lies_in_the_folder(draw, drawn, tmp_path):
    """What this run did not ask for stays listed; what is gone does not."""
    draw("--num_samples_per_prompt", 4)
    names = images_of(tmp_path / "out")
    for name in (names[0], names[3]):
        (tmp_path / "out" / name).unlink()
    assert draw("--num_samples_per_prompt", 1)["drawn"] == 1
    assert images_of(tmp_path / "out") == sorted(records_of(tmp_path / "out")) == names[:3]


def test_what_was_drawn_before_a_fault_is_kept(draw, drawn, tmp_path):
    drawn.fail_at = 2
    with pytest.raises(OSError):
        draw("--num_samples_per_prompt", 6, "--batch_size", 2)
    names = images_of(tmp_path / "out")
    assert len(names) == 4 and sorted(records_of(tmp_path / "out")) == names
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*names, "metadata.jsonl", ".lock"}
    drawn.fail_at = None
    drawn.clear()
    assert draw("--num_samples_per_prompt", 6, "--batch_size", 2)["drawn"] == 2
    assert seeds_of(drawn) == [image_seed(0, 4), image_seed(0, 5)]


# ---------------------------------------------------------------------------------------------------------------------
# The safety checker


def test_a_flagged_image_is_redrawn_with_the_next_seed(draw, drawn, tmp_path):
    """Index 1 is flagged twice, index 2 once: what is saved is never what was flagged."""
    flagged = {image_seed(0, 1), image_seed(0, 1, 1), image_seed(0, 2)}
    drawn.flag = flagged.__contains__
    assert draw("--num_samples_per_prompt", 4)["drawn"] == 4
    assert [seeds for _, seeds in drawn] == [
        [image_seed(0, index) for index in range(4)],
        [image_seed(0, 1, 1), image_seed(0, 2, 1)],
        [image_seed(0, 1, 2)],
    ]
    records = [record for _, record in sorted(records_of(tmp_path / "out").items())]
    assert [record["redraws"] for record in records] == [0, 2, 1, 0]
    assert [record["seed"] for record in records] == [
        image_seed(0, 0), image_seed(0, 1, 2), image_seed(0, 2, 1), image_seed(0, 3)
    ]  # fmt: skip
    key = zlib.crc32(
        json.dumps(
            [
                "a cat",
                {"sampler": "model", "num_inference_steps": 2, "guidance_scale": 7.5, "negative_prompt": ""}
                | {"height": None, "width": None},
            ],
            sort_keys=True,
        ).encode()
    )
    for record in records:
        expected = np.random.default_rng([record["seed"], key]).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        assert (pixels_of(tmp_path / "out")[record["file_name"]] == expected).all()
    drawn.clear()
    assert draw("--num_samples_per_prompt", 4)["drawn"] == 0 and drawn == []


def test_flagged_images_of_a_batch_are_redrawn_with_their_own_prompts(draw, drawn, tmp_path):
    drawn.flag = {image_seed(0, 1)}.__contains__
    assert draw("--num_samples_per_prompt", 2, prompts=["a cat", "a dog"])["drawn"] == 4
    assert drawn == [
        (["a cat", "a cat", "a dog", "a dog"], [image_seed(0, 0), image_seed(0, 1)] * 2),
        (["a cat", "a dog"], [image_seed(0, 1, 1)] * 2),
    ]
    records = records_of(tmp_path / "out")
    for prompt in ("a cat", "a dog"):
        assert [records[image_name(prompt, index)]["redraws"] for index in (0, 1)] == [0, 1]
        assert records[image_name(prompt, 1)]["text"] == prompt


def test_an_image_that_is_always_flagged_is_an_error(draw, drawn, tmp_path):
    attempts = [image_seed(0, 1, attempt) for attempt in range(MAX_REDRAWS + 50)]
    drawn.flag = set(attempts).__contains__
    with pytest.raises(
        errors.BadInput, match=rf"flagged 1 images {MAX_REDRAWS + 1} times, .*--no_safety_checker"
    ) as error:
        draw("--num_samples_per_prompt", 3)
    names = images_of(tmp_path / "out")
    assert names == [image_name("a cat", 0), image_name("a cat", 2)] == sorted(records_of(tmp_path / "out"))
    assert image_name("a cat", 1) in str(error.value)
    assert [seed for seed in seeds_of(drawn) if seed in attempts] == attempts[: MAX_REDRAWS + 1]


def test_the_checker_is_on_unless_turned_off(draw, drawn, monkeypatch, tmp_path):
    asked = []

    class Pipeline:
        def to(self, device):
            return self

    monkeypatch.setattr(loading, "load_pipeline", lambda *args: asked.append(args[3]) or Pipeline())
    draw("--num_samples_per_prompt", 1, folder=tmp_path / "on")
    draw("--num_samples_per_prompt", 1, "--no_safety_checker", folder=tmp_path / "off")
    assert asked == [True, False]


# ---------------------------------------------------------------------------------------------------------------------
# Whole


def test_a_finished_run_imports_nothing_heavy(reference, tiny_model, tmp_path):
    folder = shutil.copytree(reference, tmp_path / "out")
    before = tree(folder)
    flags = ["--model_dir", tiny_model, "--output_dir", folder, "--prompts", "a cat", "--num_inference_steps", 3]
    flags += ["--num_samples_per_prompt", 5]
    code = (
        "import json, sys, run_model\n"
        f"run_model.main(run_model.parse_args({[str(flag) for flag in flags]!r}))\n"
        "print(json.dumps([name for name in ('torch', 'diffusers', 'transformers', 'ray') if name in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    result, modules = map(json.loads, done.stdout.splitlines())
    assert result["drawn"] == 0 and modules == []
    assert tree(folder) == before


@pytest.mark.ray
def test_two_actors_draw_what_this_process_draws(ray_session, reference, tiny_model, tmp_path, capsys):
    draw_tiny(tiny_model, tmp_path / "out", "--batch_size", 1, samples=6, workers=2)
    captured = capsys.readouterr()
    assert last_json(captured.out) == {"output_dir": str(tmp_path / "out"), "drawn": 6, "images": 6}
    draw_tiny(tiny_model, tmp_path / "here", "--batch_size", 6, samples=6)
    assert_same_images(tmp_path / "out", tmp_path / "here", count=6)
    assert sorted(records_of(tmp_path / "out")) == images_of(tmp_path / "out")
    ours, theirs = records_of(tmp_path / "here"), records_of(tmp_path / "out")
    assert all({**ours[name], "sha256": theirs[name]["sha256"]} == theirs[name] for name in ours)


def make_checked_model(tiny_model, folder):
    """Save the tiny model with Diffusers' own safety checker, of random weights and thresholds that flag any image."""
    from diffusers import StableDiffusionPipeline
    from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
    from transformers import CLIPConfig, CLIPImageProcessor

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    checker = StableDiffusionSafetyChecker(
        CLIPConfig(vision_config={**sizes, "image_size": 32, "patch_size": 16}, projection_dim=8)
    )
    for embeds in (checker.concept_embeds, checker.special_care_embeds):
        embeds.data.normal_()
    checker.concept_embeds_weights.data.fill_(-5)
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    pipeline = StableDiffusionPipeline.from_pretrained(
        tiny_model, safety_checker=checker, feature_extractor=processor, requires_safety_checker=True
    )
    pipeline.save_pretrained(folder)
    return folder


def test_a_models_own_safety_checker_is_on_until_it_is_turned_off(tiny_model, tmp_path, capsys):
    model = make_checked_model(tiny_model, tmp_path / "checked")
    with pytest.raises(errors.BadInput, match="--no_safety_checker"):
        draw_tiny(model, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.png"))
    draw_tiny(model, tmp_path / "off", "--no_safety_checker")
    assert len(list((tmp_path / "off").glob("*.png"))) == len(records_of(tmp_path / "off")) == 5


def test_dpm_solver_is_refused_where_it_cannot_replace_the_models_own(tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    index = json.loads((model / "model_index.json").read_text())
    index["scheduler"][1] = "FlowMatchEulerDiscreteScheduler"
    (model / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(errors.BadInput, match="--sampler dpm"):
        draw_tiny(model, tmp_path / "out", "--sampler", "dpm++")
