"""pretrain.py run whole on a tiny model, in this process and on Ray workers."""

import json
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, last_json, tree
from fake_hub import TOKEN
from tiny_models import RESOLUTION, make_tiny_clip

import preprocess
import pretrain
from common import errors, folders, objects, targets
from common.storage import Folder
from pipelines.configs import model_resolution
from pipelines.families import SD
from pipelines.objectives import Diffusion
from pretraining.index import IndexWriter, describe_part, read_index, read_records
from pretraining.latents import digest_encoders
from training import checkpoints, logs, workers


@pytest.fixture
def command(pretrain_command):
    return pretrain_command


@pytest.fixture(autouse=True)
def short_sampling(monkeypatch):
    monkeypatch.setattr("training.validation.NUM_INFERENCE_STEPS", 2)


def weights(folder):
    """Return the UNet's weights in a folder, in one file or several."""
    return dict(checkpoints.read_shares(Path(folder) / "unet", checkpoints.WEIGHTS))


def assert_equal(one, other):
    assert one.keys() == other.keys() and one
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"{len(different)} of {len(one)} tensors differ, {different[0]} the first"


def assert_same_state(one, other, step):
    """Weights, averages and optimizer in the checkpoints of two work folders."""
    files = [sorted(checkpoints.local_checkpoint(folder, step).rglob("*.safetensors")) for folder in (one, other)]
    assert [path.name for path in files[0]] == [path.name for path in files[1]] and files[0]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))


def log_of(work_dir):
    return folders.read_json_lines(Path(work_dir) / logs.LOG)


def losses(work_dir):
    return [line["loss"] for line in log_of(work_dir)]


# ---------------------------------------------------------------------------------------------------------------------
# A step by hand


@pytest.mark.parametrize("num_rows", [1, 2, 3])
@pytest.mark.parametrize("prescaled", [False, True])
@pytest.mark.parametrize("snr_gamma", [None, 5.0])
@pytest.mark.parametrize("model", ["tiny_model", "tiny_v_model"])
def test_losses_by_hand(request, model, snr_gamma, prescaled, num_rows):
    """The whole step against the formulas written out, for both prediction types."""
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler.from_pretrained(request.getfixturevalue(model), subfolder="scheduler")
    torch.manual_seed(num_rows)
    batch = {name: torch.randn(num_rows, 4, 3, 2) for name in ("mean", "std", "noise", "posterior_noise")}
    batch |= {"timesteps": torch.tensor([3, 500, 999])[:num_rows], "text_encoder.hidden": torch.randn(num_rows, 5, 6)}
    if prescaled:
        del batch["std"]

    def half(noisy_latents, timesteps, prompt):
        assert torch.equal(timesteps, batch["timesteps"]) and torch.equal(prompt, batch["text_encoder.hidden"])
        return SimpleNamespace(sample=0.5 * noisy_latents)

    options = {"family": SD(), "objective": Diffusion(scheduler, snr_gamma), "vae_config": {"scaling_factor": 0.6}}
    expected = []
    for i in range(num_rows):
        latents = batch["mean"][i]
        if not prescaled:
            latents = (latents + batch["std"][i] * batch["posterior_noise"][i]) * 0.6
        signal_rate = scheduler.alphas_cumprod[batch["timesteps"][i]]
        root, rest = signal_rate.sqrt(), (1 - signal_rate).sqrt()
        noisy = root * latents + rest * batch["noise"][i]
        snr = signal_rate / (1 - signal_rate)
        target, weight = batch["noise"][i], min(snr, 5) / snr
        if model == "tiny_v_model":
            target, weight = root * batch["noise"][i] - rest * latents, min(snr, 5) / (snr + 1)
        loss = ((0.5 * noisy - target) ** 2).mean().item()
        expected.append(loss if snr_gamma is None else loss * weight.item())
    assert pretrain.denoising_losses(half, batch, **options).tolist() == pytest.approx(expected, rel=1e-4)
    (loss,) = pretrain.training_step(batch, model=half, **options)
    assert loss.item() == pytest.approx(sum(expected) / num_rows, rel=1e-4)


def test_validation_loss_is_the_weighted_sum(monkeypatch):
    rows = iter([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 50.0])])
    monkeypatch.setattr(pretrain, "denoising_losses", lambda batch, model: next(rows))
    batches = [({}, torch.tensor([1 / 3, 1 / 3])), ({}, torch.tensor([1 / 3, 0.0]))]
    place = workers.Place(0, 1, torch.device("cpu"))
    found = pretrain.validation_loss(batches, place, torch.float32, model=torch.nn.Identity())
    assert found == pytest.approx(2.0)


# ---------------------------------------------------------------------------------------------------------------------
# Two phases: few pixels, then more


@pytest.fixture(scope="module")
def two_resolutions(tmp_path_factory, raw_data, tiny_model):
    """Latents of 16 and of 32 pixels."""
    folder = tmp_path_factory.mktemp("latents") / "both"
    words = ["--input", raw_data, "--model_dir", tiny_model, "--num_workers", 0, "--rows_per_file", 5]
    words += ["--output_dir", folder, "--resolutions", RESOLUTION, 2 * RESOLUTION]
    preprocess.main(preprocess.parse_args(list(map(str, words))))
    return folder


@pytest.fixture
def phases(command, two_resolutions, tmp_path):
    """The results of a phase of few pixels and of one of more that goes on from it, on the same latents."""
    one, two = tmp_path / "one", tmp_path / "two"
    command(data=two_resolutions, output_dir=one, max_steps=2)
    flags = {"init_from_pretrained": True, "resolution": 2 * RESOLUTION, "max_steps": 2}
    command(data=two_resolutions, model_dir=one, output_dir=two, **flags)
    return one, two


def test_a_second_phase_goes_on_from_the_first(phases, command, two_resolutions, tiny_model, tmp_path):
    one, two = phases
    assert model_resolution(one) == RESOLUTION and model_resolution(two) == 2 * RESOLUTION
    assert len({digest_encoders(folder, SD()) for folder in (two, one, tiny_model)}) == 1
    flags = {"output_dir": tmp_path / "slow", "resolution": 2 * RESOLUTION, "max_steps": 1, "lr": 1e-9, "ema_decay": 0}
    command(data=two_resolutions, model_dir=one, init_from_pretrained=True, **flags)
    went_on, first = weights(tmp_path / "slow"), weights(one)
    assert all(torch.allclose(went_on[name], first[name], atol=1e-6) for name in first), "it starts from the first's"


def test_the_result_of_two_phases_is_a_base_to_tune_and_to_measure(phases, tiny_model, photos, tmp_path, capsys):
    import evaluate
    import train

    subject = ["--instance_images_dir", photos, "--instance_prompt", "photo of unqtkn dog", "--num_workers", 0]
    words = [*subject, "--model_dir", phases[1], "--output_dir", tmp_path / "tuned", "--prior_loss_weight", 0]
    train.main(train.parse_args(list(map(str, [*words, "--max_train_steps", 1]))))
    assert model_resolution(tmp_path / "tuned") == 2 * RESOLUTION
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("photo of a {}")
    words = [
        *subject,
        "--model_dir",
        tmp_path / "tuned",
        "--base_model_dir",
        phases[1],
        "--class_prompt",
        "photo of a dog",
    ]
    words += ["--prompts_file", prompts, "--num_samples_per_prompt", 3, "--num_class_images", 3]
    words += ["--num_inference_steps", 2, "--clip_model", make_tiny_clip(tmp_path / "clip", tiny_model / "tokenizer")]
    words += ["--dino_model", "none", "--class_images_dir", photos, "--output_dir", tmp_path / "evaluation"]
    evaluate.main(evaluate.parse_args(list(map(str, words))))
    assert (tmp_path / "evaluation" / "report.html").is_file()


# ---------------------------------------------------------------------------------------------------------------------
# A whole run


def test_files_pipeline_and_card(command, capsys):
    from diffusers import DiffusionPipeline

    command(checkpointing_steps=2, sample_prompts="picture 1", num_validation_rows=3)
    assert last_json(capsys.readouterr().out) == {"output_dir": str(command.output_dir), "steps": 4, "trained": 4}
    assert {path.name for path in command.output_dir.iterdir()} == {
        *("README.md", "manifest.json", "model_index.json", "samples", "training_log.jsonl"),
        *("scheduler", "text_encoder", "tokenizer", "unet", "vae"),
    }
    assert {path.name for path in command.work_dir.iterdir()} == {
        *("checkpoint-000002", "checkpoint-000004", "latest", "log.jsonl", "run.json", "tensorboard", ".lock"),
    }
    card = (command.output_dir / "README.md").read_text()
    for part in ("library_name: diffusers", "4 steps of 4 images", "- picture 1", "samples/0.png", "| lr | 0.001 |"):
        assert part in card
    texts = [card, *(path.read_text() for path in command.output_dir.rglob("*.json"))]
    assert len(texts) > 5 and not any(str(command.output_dir.parent) in text for text in texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline = DiffusionPipeline.from_pretrained(command.output_dir)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline("picture 1", num_inference_steps=2).images[0].size == (16, 16)
    assert_equal(dict(pipeline.unet.state_dict()), weights(command.output_dir))


def test_the_result_is_uploaded(command, capsys, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    command(max_steps=1, push_to_hub="team/base", hub_public=True)
    assert last_json(capsys.readouterr().out)["pushed_to"] == f"{hub.url}/team/base"
    repository = hub.repositories["team/base"]
    assert repository.files.keys() - {".gitattributes"} == tree(command.output_dir).keys() and not repository.private


def test_same_command_writes_nothing_and_imports_no_torch(command):
    command(max_steps=1)
    before = tree(command.output_dir) | tree(command.work_dir)
    code = "import sys, pretrain; pretrain.main(pretrain.parse_args(sys.argv[1:])); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *command.arguments(max_steps=1)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert last_json(done.stdout)["trained"] == 0
    assert tree(command.output_dir) | tree(command.work_dir) == before


def test_everything_goes_to_a_store_and_nothing_to_a_folder_of_its_name(command, s3, tmp_path, monkeypatch, capsys):
    """The result beside the checkpoints and logs, or apart from them with --storage_path."""
    monkeypatch.chdir(tmp_path)
    command(max_steps=2)
    for name, work_dir, flags in (("a", "a.work", {}), ("b", "runs/b.work", {"storage_path": s3("runs")})):
        command(max_steps=2, output_dir=s3(name), **flags)
        assert_equal(weights(objects.local_copy(s3(name))), weights(command.output_dir))
        assert targets.read_manifest(targets.join_name(s3(work_dir), "checkpoint-000002"), deep=True)
        capsys.readouterr()
        command(max_steps=2, output_dir=s3(name), **flags)
        assert last_json(capsys.readouterr().out) == {"output_dir": s3(name), "steps": 2, "trained": 0}
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.work"}


def test_epochs_are_of_the_rows_that_are_not_held_out(command, capsys):
    command(max_steps=None, max_epochs=2, num_validation_rows=2)
    assert last_json(capsys.readouterr().out)["steps"] == 11  # 2 x 21 rows by 4


@pytest.mark.parametrize("num_validation_rows", [0, 3])
def test_resume_is_bit_equal_after_a_crash(command, tmp_path, power_cut, num_validation_rows):
    flags = {"num_validation_rows": num_validation_rows, "validation_steps": 1, "max_steps": 6}
    flags |= {"lr_scheduler": "cosine", "lr_warmup_steps": 2, "checkpointing_steps": 2}
    command(output_dir=tmp_path / "whole", **flags)
    with power_cut():
        command(**flags)
    assert not command.output_dir.exists() and checkpoints.newest_checkpoint(command.work_dir)[0] == 2
    command(**flags)
    assert_equal(weights(tmp_path / "whole"), weights(command.output_dir))
    assert_same_state(tmp_path / "whole.work", command.work_dir, 6)
    assert log_of(command.work_dir) == log_of(tmp_path / "whole.work")


def test_validation_changes_nothing(command, tmp_path):
    command(output_dir=tmp_path / "often", num_validation_rows=5, validation_steps=2, max_steps=5)
    command(output_dir=tmp_path / "once", num_validation_rows=5, validation_steps=1000, max_steps=5)
    assert losses(tmp_path / "often.work") == losses(tmp_path / "once.work")
    assert_same_state(tmp_path / "often.work", tmp_path / "once.work", 5)
    found = [
        {line["step"]: line["validation_loss"] for line in log_of(tmp_path / name) if "validation_loss" in line}
        for name in ("often.work", "once.work")
    ]
    assert list(found[0]) == [2, 4, 5] and list(found[1]) == [5] and found[0][5] == found[1][5]
    assert 0.1 < found[0][5] < 10


def test_the_averages_are_published(command, tmp_path):
    command(max_steps=3)
    folder = checkpoints.local_checkpoint(command.work_dir, 3)
    raw, averages = weights(folder), weights(folder / "ema")
    assert_equal(averages, weights(command.output_dir))
    assert any(not torch.equal(raw[name], averages[name]) for name in raw)
    command(output_dir=tmp_path / "raw", ema_decay=0, max_steps=3)
    folder = checkpoints.local_checkpoint(tmp_path / "raw.work", 3)
    assert not (folder / "ema").exists()
    assert_equal(weights(folder), weights(tmp_path / "raw"))
    assert_equal(raw, weights(folder))


def test_online_and_offline_give_the_same_losses(command, tmp_path, raw_data):
    flags = {"max_steps": 6, "num_validation_rows": 3, "validation_steps": 3}
    command(output_dir=tmp_path / "offline", **flags)
    command(output_dir=tmp_path / "online", data=raw_data, online=True, rows_per_file=5, **flags)
    offline, online = log_of(tmp_path / "offline.work"), log_of(tmp_path / "online.work")
    for name in ("loss", "validation_loss", "grad_norm"):
        pair = [[line.get(name, 0.0) for line in lines] for lines in (offline, online)]
        assert pair[0] == pytest.approx(pair[1], abs=1e-6)


def test_every_weight_moves_and_the_gradient_is_clipped(command, monkeypatch):
    seen, real = [], pretrain.make_optimizer

    def watched(*arguments):
        optimizer = real(*arguments)
        started.append([parameter.detach().clone() for parameter in optimizer.parameters])
        optimizer.adamw.register_step_pre_hook(
            lambda *_: seen.append(torch.cat([p.grad.flatten() for p in optimizer.parameters]).norm().item())
        )
        return optimizer

    started = []
    monkeypatch.setattr(pretrain, "make_optimizer", watched)
    command(max_steps=10, max_grad_norm=0.01)
    assert seen == pytest.approx([0.01] * 10, rel=1e-3)
    assert min(line["grad_norm"] for line in log_of(command.work_dir)) > 0.1
    unet = weights(checkpoints.local_checkpoint(command.work_dir, 10)).values()
    before, after = (torch.cat(sorted_flat(tensors)) for tensors in (started[0], unet))
    assert (before != after).float().mean() > 0.99


def sorted_flat(tensors):
    """Names are not kept in an optimizer: compare what moved by the sorted numbers."""
    return [torch.cat([tensor.flatten() for tensor in tensors]).sort().values]


def test_it_learns(command):
    command(max_steps=60, lr=3e-3, ema_decay=0)
    found = losses(command.work_dir)
    assert sum(found[-10:]) < 0.8 * sum(found[:10])


def test_accumulation_and_gradient_checkpointing_change_no_loss(command, tmp_path):
    command(output_dir=tmp_path / "batch")
    command(output_dir=tmp_path / "steps", batch_size_per_worker=2, gradient_accumulation_steps=2)
    command(output_dir=tmp_path / "again", gradient_checkpointing=True)
    assert losses(tmp_path / "steps.work") == pytest.approx(losses(tmp_path / "batch.work"), abs=1e-5)
    assert losses(tmp_path / "again.work") == pytest.approx(losses(tmp_path / "batch.work"), abs=1e-6)


def test_the_published_layout_is_trained_on(command, tmp_path):
    rng = np.random.default_rng(0)
    image = rng.standard_normal((12, 4 * 8 * 8), dtype=np.float32)
    columns = {"image_latents_16": list(image), "caption_embeddings": list(rng.standard_normal((12, 24 * 16)))}
    (tmp_path / "published").mkdir()
    pq.write_table(pa.table({name: pa.array(rows) for name, rows in columns.items()}), tmp_path / "published/0.parquet")
    flags = {"data": tmp_path / "published", "max_steps": 3}
    with pytest.raises(errors.BadInput, match="--prescaled_latents"):
        command(**flags)
    command(prescaled_latents=True, **flags)
    assert len(losses(command.work_dir)) == 3
    command(output_dir=tmp_path / "named", prescaled_latents=True, latents_column="image_latents_16", **flags)
    assert losses(tmp_path / "named.work") == losses(command.work_dir)


def test_a_unet_of_another_configuration(command, tiny_model, tmp_path):
    config = json.loads((tiny_model / "unet" / "config.json").read_text())
    (tmp_path / "unet.json").write_text(json.dumps({**config, "block_out_channels": [8, 16]}))
    command(unet_config=tmp_path / "unet.json", max_steps=1)
    assert json.loads((command.output_dir / "unet" / "config.json").read_text())["block_out_channels"] == [8, 16]
    assert weights(command.output_dir)["conv_in.weight"].shape[0] == 8


def test_new_weights_are_the_seeds_and_others_the_models(command, tiny_model, tmp_path):
    flags = {"max_steps": 1, "lr": 1e-12, "adam_weight_decay": 0, "ema_decay": 0}
    for name, more in {"0": {}, "1": {"seed": 1}, "kept": {"init_from_pretrained": True}}.items():
        command(output_dir=tmp_path / name, **flags, **more)
    model, zero, one, kept = (
        weights(folder)["conv_in.weight"] for folder in (tiny_model, *(tmp_path / n for n in ("0", "1", "kept")))
    )
    assert torch.allclose(kept, model, atol=1e-9)
    assert not torch.allclose(zero, one) and not torch.allclose(zero, model) and not torch.allclose(one, model)


def test_other_settings_are_refused_and_overwrite_replaces(command):
    command(max_steps=1)
    with pytest.raises(errors.BadInput, match=r"lr was 0\.001, now 0\.01"):
        command(max_steps=1, lr=1e-2)
    with pytest.raises(errors.BadInput, match="rows_per_step was 4, now 8"):
        command(max_steps=1, batch_size_per_worker=8)
    before = weights(command.output_dir)
    command(max_steps=1, lr=1e-2, overwrite=True)
    assert any(not before[name].equal(value) for name, value in weights(command.output_dir).items())
    assert len(losses(command.work_dir)) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Ray


@pytest.mark.ray
def test_two_workers_with_fsdp_publish_a_pipeline(command, capsys, tmp_path, ray_session):
    """Two workers with FSDP begin, this process goes on: with the rows that it would have had from the start."""
    from diffusers import DiffusionPipeline

    command(num_workers=2, strategy="fsdp", fsdp_sharding="SHARD_GRAD_OP", max_steps=3, num_validation_rows=5)
    unet = DiffusionPipeline.from_pretrained(command.output_dir).unet
    folder = checkpoints.local_checkpoint(command.work_dir, 3)
    assert len(list((folder / "unet").glob("*.safetensors"))) == 2
    assert_equal(dict(unet.state_dict()), weights(folder / "ema"))
    assert log_of(command.work_dir)[-1]["validation_loss"] > 0
    alone = {"num_workers": 0, "batch_size_per_worker": 8, "num_validation_rows": 5}
    command(max_steps=4, **alone)
    assert last_json(capsys.readouterr().out)["trained"] == 1
    assert [line["step"] for line in log_of(command.work_dir)] == [1, 2, 3, 4]
    command(output_dir=tmp_path / "alone", max_steps=4, shuffle_window=4, **alone)
    assert losses(tmp_path / "alone.work") == pytest.approx(losses(command.work_dir), abs=1e-5)


def test_a_run_goes_on_in_its_order_with_other_numbers_of_workers(command, tmp_path, monkeypatch):
    """Streams are counted for the workers that begin a run; a result of an older version, without any, stays one."""
    seen = []
    monkeypatch.setattr(pretrain.launch, "run_workers", lambda loop, task, **place: seen.append(task) or 1 / 0)

    def streams(**flags):
        with pytest.raises(ZeroDivisionError):
            command(**flags)
        return seen[-1].pretraining.num_streams, seen[-1].compute.min_workers, seen[-1].compute.num_workers

    assert streams(num_workers="1:2") == (4, 1, 2)
    assert streams(num_workers=0, gradient_accumulation_steps=2) == (4, 0, 0)
    assert streams(num_workers=4, batch_size_per_worker=2) == (4, 4, 4)
    assert streams(num_workers=0) == (2, 0, 0)  # other steps
    record = json.loads((command.work_dir / "run.json").read_text())
    del record["settings"]["num_streams"]
    (command.work_dir / "run.json").write_text(json.dumps(record))
    assert streams(num_workers=0, max_steps=9) == (2, 0, 0)
    assert "num_streams" not in json.loads((command.work_dir / "run.json").read_text())["settings"]


@pytest.mark.faults  # a minute; in this process it is in every run, and so are two workers with FSDP
@pytest.mark.ray
def test_two_workers_online_as_offline(command, tmp_path, raw_data, ray_session):
    flags = {"max_steps": 2, "num_workers": 2}
    command(output_dir=tmp_path / "offline", **flags)
    command(output_dir=tmp_path / "online", data=raw_data, online=True, rows_per_file=5, **flags)
    assert losses(tmp_path / "online.work") == pytest.approx(losses(tmp_path / "offline.work"), abs=1e-6)


def spoil(folder, name, column):
    """Make the values of a part not finite, as an encoder that does not check them would have written it."""
    table = pq.read_table(folder / name)
    width = table.schema.field(column).type.byte_width
    values = pa.array([np.full(width // 2, np.nan, np.float16).tobytes()] * len(table), pa.binary(width))
    pq.write_table(
        table.set_column(table.column_names.index(column), table.schema.field(column), values), folder / name
    )
    place, (index,) = Folder(folder), [path.name for path in folder.glob("_index-*")]
    with IndexWriter(place, 0, read_records(place, index)) as writer:
        writer.add(describe_part(name, (folder / name).read_bytes()))
    metadata = json.loads((folder / "metadata.json").read_text())
    metadata["index"]["sha256"] = read_index(place, [index]).digest
    (folder / "metadata.json").write_text(json.dumps(metadata))


@pytest.mark.ray
def test_an_error_of_one_worker_ends_the_run(command, latents, tmp_path, ray_session):
    """The other worker waits for its gradients meanwhile, for half an hour if nobody tells it."""
    from ray.train import WorkerGroupError

    copy = shutil.copytree(latents, tmp_path / "copy")
    spoil(copy, "part-000000-0003.parquet", "image_latents_16")
    start = time.monotonic()
    with pytest.raises(WorkerGroupError) as caught:
        command(data=copy, max_steps=20, num_workers=2, shuffle_window=1, batch_size_per_worker=1)
    code, line = errors.describe_error(caught.value)
    assert code == 5 and "part-000000-0003.parquet: column image_latents_16 holds values that are not" in line
    assert time.monotonic() - start < 150
