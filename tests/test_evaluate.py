"""evaluate.py: a tiny model and a perturbed copy of it, measured by tiny encoders; what is refused, what is redone."""

import html
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, last_json, make_photos, tree
from tiny_models import make_tiny_clip, make_tiny_dino, random_lora, write_lora

from common import errors, objects, targets
from common.actors import map_on_actors
from common.folders import lock
from common.stores import Store
from evaluate import main, parse_args
from evaluation import pictures
from evaluation.measures import MEASURES
from pipelines import drawing

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["photo of a {}", "a {} in the snow"]


@pytest.fixture(scope="module")
def tuned_model(tmp_path_factory, tiny_model):
    """The tiny model with other weights in its UNet and text encoder, and the log of a training."""
    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("models") / "tuned")
    rng = np.random.default_rng(0)
    for path in (*folder.glob("unet/*.safetensors"), *folder.glob("text_encoder/*.safetensors")):
        weights = load_file(path)
        for value in weights.values():
            value += 0.05 * rng.standard_normal(value.shape).astype(value.dtype)
        save_file(weights, path, {"format": "pt"})
    lines = [{"step": step, "loss": 1 / step, "grad_norm": 2.0} for step in range(10, 60, 10)]
    (folder / "training_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def encoders(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("encoders")
    return make_tiny_clip(folder / "clip", tiny_model / "tokenizer"), make_tiny_dino(folder / "dino")


@pytest.fixture(scope="module")
def flags(tmp_path_factory, tiny_model, tuned_model, encoders, photos, class_images):
    """The flags of an evaluation in this process, but --output_dir."""
    prompts_file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    prompts_file.write_text("\n".join(PROMPTS))
    return {
        "model_dir": tuned_model,
        "base_model_dir": tiny_model,
        "instance_images_dir": photos,
        "class_images_dir": class_images,
        "instance_prompt": "photo of a unqtkn dog",
        "class_prompt": "photo of a dog",
        "prompts_file": prompts_file,
        "num_samples_per_prompt": 2,
        "num_class_images": 5,
        "num_inference_steps": 2,
        "clip_model": encoders[0],
        "dino_model": encoders[1],
        "num_workers": 0,
    }


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory):
    """The folder of a finished evaluation."""
    folder = tmp_path_factory.mktemp("finished") / "out"
    pairs = {**flags, "output_dir": folder}.items()
    main(parse_args([str(word) for name, value in pairs for word in (f"--{name}", value)]))
    return folder


@pytest.fixture
def command(flags, tmp_path):
    """Return a function from changed flags to the words of a command line; None leaves a flag out."""

    def words(*more, **changed):
        pairs = {**flags, "output_dir": tmp_path / "out", **changed}.items()
        given = [word for name, value in pairs if value is not None for word in (f"--{name}", value)]
        return [str(word) for word in (*given, *more)]

    return words


@pytest.fixture
def run(command, capsys):
    """Return a function that evaluates in this process and returns the JSON of the last line."""

    def call(*more, **changed):
        capsys.readouterr()
        main(parse_args(command(*more, **changed)))
        return last_json(capsys.readouterr().out)

    return call


def let_nothing_run(monkeypatch):
    """Make drawing and embedding fail."""

    def fail(*arguments, **options):
        raise AssertionError("it draws or embeds")

    monkeypatch.setattr(drawing, "map_on_actors", fail)
    monkeypatch.setattr(pictures, "embed", fail)


@pytest.fixture
def nothing_runs(finished, monkeypatch):
    let_nothing_run(monkeypatch)


def files_of(folder):
    return {name.split("/")[0] if name.endswith(".png") else name for name in tree(folder)}


def pictures_of(folder):
    return {name: facts for name, facts in tree(folder).items() if name.endswith(".png")}


# ---------------------------------------------------------------------------------------------------------------------
# The whole


def test_an_evaluation_and_the_same_again(run, monkeypatch, tmp_path):
    result = run()
    out = tmp_path / "out"
    sets = ("images-tuned", "images-base", "class-tuned")
    records = {f"{name}/metadata.jsonl" for name in sets} | {f"{name}/.lock" for name in sets}
    assert files_of(out) == {*sets, *records, ".lock", "evaluation.json", "report.html"}
    assert result["drawn"] == 2 * 2 * len(PROMPTS) + 5
    assert result["pictures"] == {"tuned": 4, "base": 4, "class_tuned": 5, "photos": 3, "class_base": 5}
    assert result["measures"].keys() == MEASURES.keys() - {"bleed"}
    for found in result["measures"].values():
        for model in ("tuned", "base"):
            estimate = found[model]
            assert -1 <= estimate["low"] <= estimate["value"] <= estimate["high"] <= 2
    stored = json.loads((out / "evaluation.json").read_text())
    assert {name: stored[name] for name in result} == result
    assert stored.keys() - result.keys() == {"settings", "details"}
    assert stored["details"]["prompts"] == ["photo of a unqtkn dog", "a unqtkn dog in the snow"]

    before = tree(tmp_path)
    let_nothing_run(monkeypatch)
    assert run() == {**result, "drawn": 0}
    assert tree(tmp_path) == before


def test_one_pool_draws_all_sets_and_one_embeds_them(run, finished, monkeypatch, tmp_path):
    pools = []

    def count(worker_class, options, items, **pool):
        pools.append((worker_class.__name__, sum(len(item.get("paths", ())) for item in items)))
        return map_on_actors(worker_class, options, items, **pool)

    for module in ("pipelines.drawing", "evaluation.encoders"):
        monkeypatch.setattr(f"{module}.map_on_actors", count)
    whole = run()
    assert pools == [("ImageDrawer", 13), ("Encoders", 2 * 21)]
    measures = json.loads((finished / "evaluation.json").read_text())["measures"]
    assert whole["measures"] == measures

    pools.clear()
    for name in ("class-tuned", "images-base"):
        shutil.rmtree(tmp_path / "out" / name)
    (tmp_path / "out" / "evaluation.json").unlink()
    assert run() == {**whole, "drawn": 9}
    assert pools == [("ImageDrawer", 9), ("Encoders", 2 * 21)]


def test_each_subject_of_a_file_is_evaluated_beside_the_others(run, photos, class_images, tmp_path, monkeypatch):
    make_photos(tmp_path / "cats", 2, seed=9)
    subjects = ((photos, "photo of a unqtkn dog", "photo of a dog"), ("cats", "a zwx cat", "a cat"))
    keys = 'images = "{}"\nprompt = "{}"\nclass_prompt = "{}"\nclass_images = "{}"\n'
    tables = [f"[[subject]]\n{keys.format(*each, class_images)}" for each in subjects]
    (tmp_path / "concepts.toml").write_text("\n".join(tables))
    alone = dict.fromkeys(("instance_images_dir", "instance_prompt", "class_images_dir", "class_prompt"))
    flags = {**alone, "concepts": tmp_path / "concepts.toml", "dino_model": "none"}
    with pytest.raises(errors.ToolError, match=r"^unqtkn dog: --fail_above: bleed \S+ is above -1$"):
        run(**flags, fail_above="bleed=-1")
    let_nothing_run(monkeypatch)
    result = run(**flags)
    assert result["output_dir"] == str(tmp_path / "out") and list(result["subjects"]) == ["unqtkn dog", "zwx cat"]
    for number, found in enumerate(result["subjects"].values(), start=1):
        assert found["output_dir"] == str(tmp_path / "out" / f"subject-{number}") and found["drawn"] == 0
        assert found["measures"]["bleed"]["tuned"]["value"] != found["measures"]["subject_clip"]["tuned"]["value"]
    dog, cat = (found["measures"]["bleed"] for found in result["subjects"].values())
    assert dog["photos"] == cat["photos"] and list(dog["subjects"]) == ["zwx cat"]
    assert "zwx cat: " in (tmp_path / "out" / "subject-1" / "report.html").read_text()


def test_a_bleed_is_between_subjects(run, nothing_runs):
    with pytest.raises(errors.BadInput, match="--fail_above bleed compares several subjects"):
        run(fail_above="bleed=0.5")


def test_both_models_draw_the_same_prompts_with_the_same_seeds(run, tmp_path):
    run(dino_model="none")
    drawn = {}
    for name in ("images-tuned", "images-base"):
        lines = (tmp_path / "out" / name / "metadata.jsonl").read_text().splitlines()
        drawn[name] = {(r["file_name"], r["text"], r["seed"]) for r in map(json.loads, lines)}
    assert drawn["images-tuned"] == drawn["images-base"] and len(drawn["images-base"]) == 4
    pixels = [pictures_of(tmp_path / "out" / name) for name in drawn]
    assert all(pixels[0][name][0] != pixels[1][name][0] for name in pixels[0])


def test_without_dino_its_measure_is_null_and_the_report_says_so(run, tmp_path):
    result = run(dino_model="none")
    assert result["measures"]["subject_dino"] is None and result["encoders"]["dino"] is None
    assert all(result["measures"][name] for name in MEASURES if name not in ("subject_dino", "bleed"))
    assert "not measured: --dino_model none" in (tmp_path / "out" / "report.html").read_text()


def test_without_a_prompts_file_the_instance_prompt_is_drawn(run, tmp_path):
    assert run(prompts_file=None, num_samples_per_prompt=3, dino_model="none")["pictures"]["tuned"] == 3
    details = json.loads((tmp_path / "out" / "evaluation.json").read_text())["details"]
    assert details["prompts"] == ["photo of a unqtkn dog"]


def test_the_same_model_twice_gives_the_same_numbers(run, tiny_model):
    for name, found in run(model_dir=tiny_model, dino_model="none")["measures"].items():
        if found and name not in ("prior_photos", "prior_base", "diversity"):  # of the folder of class images
            assert found["tuned"] == found["base"]


# ---------------------------------------------------------------------------------------------------------------------
# Going on, and other settings


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.faults)])
def test_a_killed_evaluation_goes_on_and_draws_nothing_twice(command, run, tmp_path, number):
    out = tmp_path / "out"
    words = command("--batch_size", 1, dino_model="none")
    process = subprocess.Popen([sys.executable, ROOT / "evaluate.py", *words], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while len(list(out.glob("*/*.png"))) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(10) == {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143}[number]
    before = pictures_of(out)
    assert len(before) >= 2 and not (out / "evaluation.json").exists()
    result = run("--batch_size", 1, dino_model="none")
    after = pictures_of(out)
    assert result["drawn"] == len(after) - len(before)
    assert before.items() <= after.items()


def test_a_lost_report_is_made_again_and_no_picture(run, tmp_path):
    result = run(dino_model="none")
    before = pictures_of(tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_bytes()
    (tmp_path / "out" / "report.html").unlink()
    assert run(dino_model="none") == {**result, "drawn": 0}
    assert (tmp_path / "out" / "report.html").read_bytes() == page
    assert pictures_of(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_samples_per_prompt": 3}, "num_samples_per_prompt was 2, now 3"),
        ({"guidance_scale": 2}, "guidance_scale was 7.5, now 2.0"),
        ({"memorised_above": 0.5}, "memorised_above was 0.95, now 0.5"),
        ({"prompts_file": ROOT / "prompts" / "emoji.txt"}, "prompts was '"),
        ({"dino_model": "none"}, "dino was '"),
    ],
)
def test_other_settings_are_refused(run, nothing_runs, finished, changed, named):
    with pytest.raises(errors.BadInput, match=rf"--output_dir .*{named}.*--overwrite"):
        run(output_dir=finished, **changed)


def test_other_photos_or_weights_are_refused(run, nothing_runs, finished, photos, tuned_model, tmp_path):
    more = shutil.copytree(photos, tmp_path / "photos")
    shutil.copy(more / "00.png", more / "copy.png")
    with pytest.raises(errors.BadInput, match="instance_images_dir was"):
        run(output_dir=finished, instance_images_dir=more)
    with pytest.raises(errors.BadInput, match="model_dir was"):
        run(output_dir=finished, model_dir=more_weights(tuned_model, tmp_path / "other"))


def more_weights(model, folder):
    """Copy a model with another file of its tokenizer: as a file it is another model."""
    shutil.copytree(model, folder)
    (folder / "tokenizer" / "more.txt").write_text("more")
    return folder


def test_overwrite_replaces_an_evaluation_of_other_settings(run, tmp_path):
    first = run(dino_model="none")
    before = pictures_of(tmp_path / "out")
    assert run("--overwrite", dino_model="none", memorised_above=0.1)["drawn"] == 0
    assert pictures_of(tmp_path / "out") == before
    other = run("--overwrite", dino_model="none", seed=1)
    assert other["drawn"] == first["drawn"] and other["measures"] != first["measures"]
    assert run(dino_model="none", seed=1)["drawn"] == 0


def test_an_overwriting_that_fails_leaves_no_result_of_before(run, flags, monkeypatch, tmp_path):
    run(dino_model="none")
    with monkeypatch.context() as broken, pytest.raises(AssertionError):
        let_nothing_run(broken)
        run("--overwrite", dino_model="none", seed=1)
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_another_run_holds_the_folder(run, nothing_runs, tmp_path):
    with lock(tmp_path / "out" / ".lock"), pytest.raises(errors.TryAgain):
        run()


# ---------------------------------------------------------------------------------------------------------------------
# Object stores


@pytest.fixture
def in_store(flags, s3, node_cache):
    """The flags of the folders and the encoders as URIs."""
    names = ("model_dir", "base_model_dir", "instance_images_dir", "class_images_dir", "clip_model", "dino_model")
    for name in names:
        objects.upload_folder(flags[name], s3(name))
    return {name: s3(name) for name in (*names, "output_dir")}


def test_an_evaluation_in_a_store_is_that_of_a_disk(run, in_store, finished, s3, monkeypatch):
    result = run(**in_store)
    assert result["output_dir"] == s3("output_dir") and result["report"] == s3("output_dir/report.html")
    found = {name: Store(s3("output_dir")).read(name) for name in Store(s3("output_dir")).list()}
    on_disk = {name: content for name, (content, _) in tree(finished).items()}
    pictures = {name for name in on_disk if name.endswith((".png", "metadata.jsonl"))}
    assert all(found[name] == on_disk[name] for name in pictures) and len(pictures) == 13 + 3
    here, there = (json.loads(files["evaluation.json"]) for files in (on_disk, found))
    for name in ("measures", "settings", "details", "pictures"):
        assert there[name] == here[name]
    page = found["report.html"].decode()
    assert "Tuned model <b>model_dir</b>, base model <b>base_model_dir</b>" in page and "file:" not in page

    before = Store(s3("output_dir")).list()
    let_nothing_run(monkeypatch)
    assert run(**in_store) == {**result, "drawn": 0}
    assert Store(s3("output_dir")).list() == before


def test_runs_on_one_store_exclude_each_other(run, in_store, nothing_runs, s3):
    with targets.lock(s3("output_dir")), pytest.raises(errors.TryAgain, match="is in use by process"):
        run(**in_store)
    assert [name for name in Store(s3("output_dir")).list() if name[0] != "."] == []


def test_bad_folders_in_a_store_are_named_by_their_uri(run, in_store, nothing_runs, s3):
    with pytest.raises(errors.BadInput, match=r"s3://.*/none\?.* does not exist or is empty"):
        run(**{**in_store, "class_images_dir": s3("none")})
    Store(s3("instance_images_dir")).write("broken.png", b"no picture")
    with pytest.raises(errors.BadInput, match=r"--instance_images_dir s3://\S+: 1 bad files \(broken.png\)"):
        run(**in_store)
    Store(s3("model_dir")).delete("unet/config.json")
    named = r"^s3://[^/]+/model_dir/unet\?\S+ has no config.json"
    with pytest.raises(errors.BadInput, match=named), objects.uris_in_errors():  # as cli.run has it
        run(**in_store)


# ---------------------------------------------------------------------------------------------------------------------
# --fail_under and --fail_above


def test_a_measure_below_its_limit_fails_the_job(run, nothing_runs, finished, capsys):
    limits = [f"--fail_under={limit}" for limit in ("subject_dino=2", "prompt_clip=-1", "diversity=3")]
    with pytest.raises(
        errors.ToolError, match=r"subject_dino [-0-9.]+ is below 2, diversity [-0-9.]+ is below 3"
    ) as low:
        run(*limits, output_dir=finished)
    assert low.value.exit_code == 1
    assert last_json(capsys.readouterr().out)["measures"]
    run("--fail_under", "subject_dino=-1", output_dir=finished)


def test_a_measure_above_its_limit_fails_the_job(run, nothing_runs, finished, capsys):
    limits = ["--fail_above=memorised=-0.5", "--fail_above=prior_photos=-2", "--fail_above=memorised=1"]
    said = r"^--fail_above: memorised [0-9.]+ is above -0.5, prior_photos [-0-9.]+ is above -2$"
    with pytest.raises(errors.ToolError, match=said) as high:
        run(*limits, output_dir=finished)
    assert high.value.exit_code == 1
    assert last_json(capsys.readouterr().out)["measures"]
    with pytest.raises(errors.ToolError, match=r"^--fail_under: diversity .* is below 3; --fail_above: memorised"):
        run("--fail_under=diversity=3", limits[0], output_dir=finished)
    run("--fail_above", "memorised=1", "--fail_above", "prior_photos=1", output_dir=finished)


@pytest.mark.parametrize(
    ("flag", "text", "said"),
    [
        ("--fail_under", "memorised=0.5", "low is better for memorised: use --fail_above"),
        ("--fail_under", "prior_photos", "low is better for prior_photos: use --fail_above"),
        ("--fail_above", "prompt_clip=0.5", "high is better for prompt_clip: use --fail_under"),
        ("--fail_above", "alike=1", "'alike' is not one of prior_photos, memorised"),
        ("--fail_above", "memorised=inf", "NAME=NUMBER"),
    ],
)
def test_a_limit_under_the_wrong_flag_is_a_usage_error(command, capsys, flag, text, said):
    with pytest.raises(SystemExit) as exit_:
        parse_args(command(flag, text))
    assert exit_.value.code == 2 and f"{flag}: " in (error := capsys.readouterr().err) and said in error


@pytest.mark.parametrize("text", ["alike=1", "subject_dino", "subject_dino=", "subject_dino=nan", "=1"])
def test_a_wrong_limit_is_a_usage_error(command, capsys, text):
    with pytest.raises(SystemExit) as exit_:
        parse_args(command("--fail_under", text))
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert (
        "NAME=NUMBER" in said if text.startswith("subject_dino") else "subject_dino, subject_clip, prompt_clip" in said
    )


def test_a_limit_of_what_is_not_measured_is_a_usage_error(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_args(command("--fail_under", "subject_dino=0.5", dino_model="none"))
    assert exit_.value.code == 2 and "--dino_model none" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_class_images": 2}, "--num_class_images: 2 images are too few, measuring diversity needs at least 3"),
        ({"num_samples_per_prompt": 1}, "--num_samples_per_prompt: 2 images are too few, measuring fidelity"),
        ({"class_prompt": "photo of a unqtkn dog"}, "--instance_prompt has no word"),
        ({"model_dir": "none"}, r"--model_dir .*none is not a folder"),
        ({"base_model_dir": "none"}, r"--base_model_dir .*none is not a folder"),
        ({"instance_images_dir": "none"}, r"--instance_images_dir .*none is not a folder"),
        ({"clip_model": "./none"}, r"--clip_model \./none is neither a folder"),
        ({"dino_model": "./none"}, r"--dino_model \./none is neither a folder"),
        ({"prompts_file": os.devnull}, "--prompts_file /dev/null holds no prompts"),
        ({"height": 20}, r"--height 20 .*multiple of 8"),
    ],
)
def test_bad_input_is_said_before_anything_is_drawn(run, nothing_runs, tmp_path, changed, said):
    with pytest.raises(errors.BadInput, match=said) as error:
        run(**changed)
    assert error.value.exit_code == 3 and not (tmp_path / "out").exists()


def test_too_few_or_broken_photos(run, nothing_runs, tmp_path):
    one, two = make_photos(tmp_path / "one", 1), make_photos(tmp_path / "two", 2)
    with pytest.raises(errors.BadInput, match=r"--instance_images_dir .*one: 1 images are too few"):
        run(instance_images_dir=one)
    with pytest.raises(errors.BadInput, match=r"--class_images_dir .*two: 2 images are too few"):
        run(class_images_dir=two)
    (two / "00.png").write_bytes(b"no picture")
    with pytest.raises(errors.BadInput, match=r"1 bad files \(00.png\)"):
        run(instance_images_dir=two)
    with pytest.raises(errors.BadInput, match="1 images are too few"):
        run("--skip_bad_images", instance_images_dir=two)
    assert not (tmp_path / "out").exists()


def test_class_images_that_were_drawn_in_another_way_are_noted(run, tiny_model, class_images, tmp_path, capsys):
    folder = shutil.copytree(class_images, tmp_path / "class")
    line = {"file_name": "00.png", "text": "photo of a dog", "num_inference_steps": 50, "guidance_scale": 7.5}
    (folder / "metadata.jsonl").write_text(json.dumps(line) + "\n")
    run(class_images_dir=folder, dino_model="none")
    notes = json.loads((tmp_path / "out" / "evaluation.json").read_text())["details"]["notes"]
    assert notes == [
        "The base model's class images were drawn with num_inference_steps 50 instead of 2: they may not be comparable."
    ]
    assert notes[0] in html.unescape((tmp_path / "out" / "report.html").read_text())


# ---------------------------------------------------------------------------------------------------------------------
# Ray


@pytest.mark.ray
def test_actors_measure_what_this_process_does(run, finished, ray_session, tmp_path):
    """One actor draws the class pictures with one model, then those of the subject with the other."""
    shutil.copytree(finished, tmp_path / "out")
    (tmp_path / "out" / "evaluation.json").unlink()
    for name in ("class-tuned", "images-base"):
        shutil.rmtree(tmp_path / "out" / name)
    result, here = run(num_workers=1), json.loads((finished / "evaluation.json").read_text())
    assert result["drawn"] == 9
    for name, found in result["measures"].items():
        for model in ("tuned", "base"):
            assert found[model]["value"] == pytest.approx(here["measures"][name][model]["value"], abs=0.02)


def test_a_lora_of_the_base_is_measured(run, tiny_model, tmp_path, finished):
    """Both models are the base's folder; the LoRA belongs to the tuned one alone, and to the settings."""
    path = write_lora(random_lora(tiny_model), tmp_path / "lora.safetensors")
    (tmp_path / "training_log.jsonl").write_text('{"step": 10, "loss": 1.0, "grad_norm": 2.0}\n')
    evaluation = run(model_dir=tiny_model, lora=f"{path}:0.5")
    assert "tiny + " in (tmp_path / "out" / "report.html").read_text()
    measures = evaluation["measures"]["subject_clip"]
    assert measures["tuned"]["value"] != measures["base"]["value"]
    before = targets.read_json(finished, "evaluation.json")["measures"]["subject_clip"]["base"]
    assert measures["base"] == before
    assert run(model_dir=tiny_model, lora=f"{path}:0.5")["drawn"] == 0
    with pytest.raises(errors.BadInput, match="lora was"):
        run(model_dir=tiny_model, lora=path)
