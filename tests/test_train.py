"""train.py run whole on a tiny model, in this process and on Ray workers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT, last_json, make_photos, run_script, tree
from fake_hub import TOKEN

import train
from common import board, errors, folders, objects
from pipelines.families import find_family
from pipelines.objectives import Diffusion
from pipelines.subjects import read_subjects
from training import checkpoints, logs, loop, validation
from training.subjects import find_folders


@pytest.fixture
def command(tiny_model, photos, class_images, tmp_path):
    """Return a function that runs train.py here with some flags changed; it returns the JSON of the last line."""

    def arguments(**flags):
        flags = {
            "model_dir": tiny_model,
            "output_dir": tmp_path / "out",
            "instance_images_dir": photos,
            "instance_prompt": "photo of unqtkn dog",
            "class_images_dir": class_images,
            "class_prompt": "photo of a dog",
            "num_workers": 0,
            "max_train_steps": 4,
            "log_every": 1,
            "keep_checkpoints": True,  # to look into them
            **flags,
        }
        words = []
        for name, value in flags.items():
            if value is True:
                words.append(f"--{name}")
            elif value is False:
                words.append(f"--no-{name}")
            elif value is not None:
                words += [f"--{name}", str(value)]
        return words

    def run(**flags):
        train.main(train.parse_args(arguments(**flags)))

    run.arguments = arguments
    run.output_dir, run.work_dir = tmp_path / "out", tmp_path / "out.work"
    return run


@pytest.fixture(autouse=True)
def no_card_images(monkeypatch):
    """Draw one sample image in two steps: the card's own numbers would take most of the time of these tests."""
    monkeypatch.setattr("train.CARD_IMAGES", 1)
    monkeypatch.setattr("training.validation.NUM_INFERENCE_STEPS", 2)


def weights(folder):
    """Return {"unet.name": tensor} of the trained modules in a folder."""
    from safetensors.torch import load_file

    found = {}
    for part in ("unet", "text_encoder"):
        for path in (Path(folder) / part).glob("*.safetensors"):
            tensors = load_file(path).items()
            found |= {f"{part}.{name.removeprefix('text_model.')}": tensor for name, tensor in tensors}
    return found


def assert_equal_weights(one, other):
    import torch

    one, other = weights(one), weights(other)
    assert one.keys() == other.keys() and one
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"{len(different)} of {len(one)} tensors differ, {different[0]} the first"


def losses(work_dir):
    return [line["loss"] for line in folders.read_json_lines(Path(work_dir) / logs.LOG)]


def steps_kept(work_dir):
    return {step for step, _ in checkpoints.list_checkpoints(work_dir)}


# ---------------------------------------------------------------------------------------------------------------------
# A whole run


def test_files_pipeline_and_card(command, capsys):
    command(checkpointing_steps=2)
    assert last_json(capsys.readouterr().out) == {"output_dir": str(command.output_dir), "steps": 4, "trained": 4}
    assert {path.name for path in command.output_dir.iterdir()} == {
        *("README.md", "manifest.json", "model_index.json", "samples", "training_log.jsonl"),
        *("scheduler", "text_encoder", "tokenizer", "unet", "vae"),
    }
    assert {path.name for path in command.work_dir.iterdir()} == {
        *("checkpoint-000002", "checkpoint-000004", "latest", "log.jsonl", "posteriors", "run.json"),
        *("tensorboard", ".lock"),
    }
    assert (command.work_dir / "latest").resolve().name == "checkpoint-000004"
    card = (command.output_dir / "README.md").read_text()
    for part in ("`tiny`, fine-tuned", "photo of unqtkn dog", "license:", "samples/0.png", "| lr | 5e-06 |"):
        assert part in card
    texts = [path.read_text() for path in command.output_dir.rglob("*.json")]
    assert len(texts) > 5 and not any(str(command.output_dir.parent) in text for text in texts)
    assert [line["step"] for line in folders.read_json_lines(command.output_dir / "training_log.jsonl")] == [1, 2, 3, 4]
    assert any((command.work_dir / "tensorboard").glob("events*"))


def test_result_and_checkpoint_load_with_diffusers(command):
    import torch
    from diffusers import DiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel

    command(max_train_steps=2)
    pipeline = DiffusionPipeline.from_pretrained(command.output_dir)
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline("photo of unqtkn dog", num_inference_steps=2).images[0]
    assert image.size == (16, 16)
    latest = command.work_dir / "checkpoint-000002"
    unet = UNet2DConditionModel.from_pretrained(latest / "unet")
    text_encoder = CLIPTextModel.from_pretrained(latest / "text_encoder")
    for own, published in ((unet, pipeline.unet), (text_encoder, pipeline.text_encoder)):
        assert all(torch.equal(*pair) for pair in zip(own.parameters(), published.parameters(), strict=True))


@pytest.mark.parametrize("rank", [None, 4])
def test_checkpoints_kept_and_only_missing_steps_run(rank, command, capsys):
    command(checkpointing_steps=2, max_train_steps=6, lora=rank)
    assert steps_kept(command.work_dir) == {4, 6}
    (command.work_dir / "checkpoint-stray").mkdir()
    (command.work_dir / "checkpoint-12-old").write_text("a stray file")
    command(checkpointing_steps=2, max_train_steps=8, lora=rank)
    assert steps_kept(command.work_dir) == {6, 8}
    assert last_json(capsys.readouterr().out)["trained"] == 2
    assert [line["step"] for line in folders.read_json_lines(command.work_dir / logs.LOG)] == list(range(1, 9))


def test_what_only_a_longer_run_needs_goes_with_the_publishing(command, tiny_model, capsys):
    """A checkpoint of Stable Diffusion 1.x is 11.8 GB, and two are kept while it trains."""
    flags = {"keep_checkpoints": False, "checkpointing_steps": 2}
    command(max_train_steps=2, **flags)
    assert {path.name for path in command.work_dir.iterdir()} == {"log.jsonl", "run.json", "tensorboard", ".lock"}
    assert folders.read_manifest(command.output_dir, deep=True)["step"] == 2
    before = tree(command.output_dir.parent)
    command(max_train_steps=2, **flags)
    assert tree(command.output_dir.parent) == before
    with pytest.raises(errors.BadInput, match=r"trained for 2 steps.*no checkpoint.*--overwrite.*--keep_checkpoints"):
        command(max_train_steps=4, **flags)
    assert tree(command.output_dir.parent) == before
    command(max_train_steps=4, overwrite=True, keep_checkpoints=True)
    assert last_json(capsys.readouterr().out) == {"output_dir": str(command.output_dir), "steps": 4, "trained": 4}
    assert steps_kept(command.work_dir) == {4}
    command(max_train_steps=4, **flags)  # it was started to keep them
    assert steps_kept(command.work_dir) == {4}


def test_folders_that_are_not_ours_stay(command):
    """Accelerate's checkpoints have such names, and so have copies of ours."""
    others = [command.work_dir / name for name in ("checkpoint-100000", "checkpoint-000001-best", "posteriors")]
    for folder in others:
        folder.mkdir(parents=True)
        (folder / "weights").write_text("a person's")
    command(max_train_steps=1, keep_checkpoints=False)
    assert all((folder / "weights").is_file() for folder in others[:2]) and steps_kept(command.work_dir) == set()
    command(max_train_steps=1, lr=1e-3, overwrite=True)
    assert all((folder / "weights").is_file() for folder in others[:2])


def test_checkpoints_of_a_longer_run_outlive_the_command_of_a_shorter_one(command, power_cut):
    command(max_train_steps=2, keep_checkpoints=True)
    with power_cut():
        command(max_train_steps=8, keep_checkpoints=False, checkpointing_steps=1)
    assert 3 in steps_kept(command.work_dir)
    command(max_train_steps=2, keep_checkpoints=False)
    assert 3 in steps_kept(command.work_dir)
    with pytest.raises(errors.BadInput, match="checkpoint of step 3, more than 1"):
        command(max_train_steps=1, output_dir=command.output_dir.with_name("other"), work_dir=command.work_dir)
    command(max_train_steps=8, keep_checkpoints=False)
    assert steps_kept(command.work_dir) == set() and folders.read_manifest(command.output_dir)["step"] == 8


def test_a_run_that_is_stopped_without_a_signal_drops_nothing(command, monkeypatch):
    real = loop.accumulate_gradients

    def stop(run, step, *rest):
        board.current().ask_to_stop()
        return real(run, step, *rest)

    with monkeypatch.context() as patch, pytest.raises(errors.Stopped):
        patch.setattr(loop, "accumulate_gradients", stop)
        command(max_train_steps=8, keep_checkpoints=False)
    assert steps_kept(command.work_dir) == {1} and not command.output_dir.exists()


def test_a_kill_before_checkpoints_are_dropped_is_made_up_for(command, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(
            "training.resuming.drop_checkpoints", lambda work_dir: (_ for _ in ()).throw(RuntimeError("killed"))
        )
        command(max_train_steps=2, keep_checkpoints=False)
    assert steps_kept(command.work_dir) == {2} and folders.read_manifest(command.output_dir)
    with folders.lock(command.work_dir / ".lock"):
        command(max_train_steps=2, keep_checkpoints=False)  # ends well beside another run in that folder
    assert steps_kept(command.work_dir) == {2}
    command(max_train_steps=2, keep_checkpoints=False)
    assert steps_kept(command.work_dir) == set() and not (command.work_dir / "posteriors").exists()


def test_same_command_writes_nothing_and_imports_no_torch(command):
    command(max_train_steps=1)
    before = tree(command.output_dir) | tree(command.work_dir)
    code = "import sys, train; train.main(train.parse_args(sys.argv[1:])); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *command.arguments(max_train_steps=1)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert last_json(done.stdout)["trained"] == 0
    assert tree(command.output_dir) | tree(command.work_dir) == before


@pytest.mark.parametrize(
    ("flags", "num_workers", "steps"),
    [
        ({"max_train_pairs": 800}, 0, 800),
        ({"max_train_pairs": 800}, 1, 800),
        ({"max_train_pairs": 800}, 8, 100),
        ({"max_train_pairs": 800, "train_batch_size": 2, "gradient_accumulation_steps": 2}, 2, 100),
        ({"max_train_pairs": 801}, 8, 101),
        ({"max_train_steps": 800}, 8, 800),
        ({"num_epochs": 4}, 1, 32),  # of 3 photos and 8 class images
        ({"num_epochs": 4}, 3, 11),
    ],
)
def test_the_steps_follow_from_the_pairs(command, flags, num_workers, steps):
    args, settings = train.parse_args(command.arguments(**{"max_train_steps": None, **flags})), {}
    found = find_folders(read_subjects(args, args.model_dir), None)
    assert train.plan_steps(args, settings, found, num_workers) == steps
    assert "max_train_steps" not in settings  # of a constant learning rate: the result may be trained further


def test_a_run_of_pairs_is_drawn_in_quarters(command):
    command(max_train_steps=None, max_train_pairs=17, train_batch_size=2, validation_prompts="a dog", log_every=9)
    assert [line["step"] for line in folders.read_json_lines(command.work_dir / logs.LOG)] == [9]
    assert list(validation.read_rows(command.work_dir / validation.VALIDATION)) == [0, 3, 6, 9]


def test_a_step_of_more_pairs_than_class_images_is_trained_and_said(command, tmp_path, capsys):
    """The pairs walk in a circle: eight class images, sixteen pairs a step."""
    command(max_train_steps=2, train_batch_size=16)
    holds = "--class_images_dir holds 8 images, a step takes 16 pairs"
    warning = f"warning: {holds}: some images are used several times in a step"
    assert capsys.readouterr().err.splitlines().count(warning) == 1
    assert all(loss > 0 for loss in losses(command.work_dir))
    command(output_dir=tmp_path / "parts", max_train_steps=2, train_batch_size=4, gradient_accumulation_steps=4)
    assert losses(tmp_path / "parts.work") == pytest.approx(losses(command.work_dir), abs=1e-5)
    capsys.readouterr()
    command(output_dir=tmp_path / "eight", max_train_steps=1, train_batch_size=8)
    assert "warning" not in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# The same numbers


def test_resume_is_bit_equal_after_a_crash(command, tmp_path, power_cut):
    command(output_dir=tmp_path / "whole", lr_scheduler="linear", lr_warmup_steps=2)
    flags = {"checkpointing_steps": 2, "lr_scheduler": "linear", "lr_warmup_steps": 2}
    with power_cut():
        command(**flags)
    assert not command.output_dir.exists() and steps_kept(command.work_dir) == {2}
    command(**flags)
    assert_equal_weights(tmp_path / "whole", command.output_dir)
    assert losses(command.work_dir) == losses(tmp_path / "whole.work")


def test_resume_with_8_bit_adam_is_bit_equal(command, tmp_path, power_cut):
    command(output_dir=tmp_path / "whole", use_8bit_adam=True)
    with power_cut():
        command(use_8bit_adam=True, checkpointing_steps=2)
    command(use_8bit_adam=True, checkpointing_steps=2)
    assert_equal_weights(tmp_path / "whole", command.output_dir)
    command(output_dir=tmp_path / "usual")
    assert losses(command.work_dir) == pytest.approx(losses(tmp_path / "usual.work"), abs=1e-3)
    assert losses(command.work_dir) != losses(tmp_path / "usual.work")


def test_accumulation_equals_a_larger_batch(command, tmp_path):
    command(output_dir=tmp_path / "batch", train_batch_size=4, max_train_steps=3)
    command(output_dir=tmp_path / "steps", train_batch_size=2, gradient_accumulation_steps=2, max_train_steps=3)
    assert losses(tmp_path / "batch.work") == pytest.approx(losses(tmp_path / "steps.work"), abs=1e-5)


def test_gradient_checkpointing_changes_no_loss(command, tmp_path):
    command(output_dir=tmp_path / "plain", max_train_steps=2)
    command(output_dir=tmp_path / "again", max_train_steps=2, gradient_checkpointing=True)
    assert losses(tmp_path / "plain.work") == pytest.approx(losses(tmp_path / "again.work"), abs=1e-6)


@pytest.mark.faults  # not one, but two minutes of a compiler
def test_compiled_steps_have_the_same_losses_and_gradients(command, tmp_path):
    command(output_dir=tmp_path / "plain", max_train_steps=2)
    command(output_dir=tmp_path / "compiled", max_train_steps=2, compile=True)
    assert losses(tmp_path / "plain.work") == pytest.approx(losses(tmp_path / "compiled.work"), abs=1e-4)
    logged = [folders.read_json_lines(tmp_path / name / logs.LOG) for name in ("plain.work", "compiled.work")]
    norms = [[line["grad_norm"] for line in lines] for lines in logged]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.parametrize("num_pairs", [1, 2, 3])
@pytest.mark.parametrize("model", ["tiny_model", "tiny_v_model"])
def test_training_step_by_hand(request, model, num_pairs):
    """The whole step against the formulas written out, for both prediction types."""
    import torch
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler.from_pretrained(request.getfixturevalue(model), subfolder="scheduler")
    torch.manual_seed(num_pairs)
    rows, shape = 2 * num_pairs, (4, 8, 8)
    batch = {name: torch.randn(rows, *shape) for name in ("mean", "std", "noise", "posterior_noise")}
    batch |= {
        "timesteps": torch.randint(0, 1000, (rows,)),
        "text_encoder.ids": torch.zeros(rows, 24, dtype=torch.int64),
    }

    def constant_model(noisy_latents, timesteps, batch):
        return 0.5 * noisy_latents

    found = train.training_step(constant_model, batch, Diffusion(scheduler), {"scaling_factor": 0.6}, num_pairs, 0.25)
    each = []
    for i in range(rows):
        latents = (batch["mean"][i] + batch["std"][i] * batch["posterior_noise"][i]) * 0.6
        signal_rate = scheduler.alphas_cumprod[batch["timesteps"][i]]
        root, rest = signal_rate.sqrt(), (1 - signal_rate).sqrt()
        noisy = root * latents + rest * batch["noise"][i]
        target = batch["noise"][i] if model == "tiny_model" else root * batch["noise"][i] - rest * latents
        each.append(((0.5 * noisy - target) ** 2).mean().item())
    instance, other = sum(each[:num_pairs]) / num_pairs, sum(each[num_pairs:]) / num_pairs
    assert [part.item() for part in found] == pytest.approx([instance + 0.25 * other, instance, other], rel=1e-5)


def test_min_snr_weighs_each_row_of_both_halves(tiny_model):
    """Rows of timestep 0 have a large SNR and lose weight; rows of timestep 999 keep theirs (arXiv 2303.09556)."""
    import torch
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler.from_pretrained(tiny_model, subfolder="scheduler")
    batch = {name: torch.zeros(4, 4, 8, 8) for name in ("mean", "std", "posterior_noise")}
    batch |= {"noise": torch.ones(4, 4, 8, 8), "timesteps": torch.tensor([0, 999, 0, 999])}
    found = train.training_step(
        lambda *_: torch.zeros(4, 4, 8, 8), batch, Diffusion(scheduler, 5), {"scaling_factor": 1.0}, 2, 1.0
    )
    first = scheduler.alphas_cumprod[0].item()
    half = (5 / (first / (1 - first)) + 1.0) / 2
    assert [part.item() for part in found] == pytest.approx([2 * half, half, half], rel=1e-4)


def test_hidden_states_are_those_that_the_pipeline_draws_with(tiny_model):
    """Not the pooled projection, not another layer: what StableDiffusionPipeline.encode_prompt gives."""
    import torch
    from diffusers import StableDiffusionPipeline

    from pipelines.tokens import tokenize

    pipeline = StableDiffusionPipeline.from_pretrained(tiny_model)
    seen = []

    class Spy(torch.nn.Module):
        def forward(self, noisy_latents, timesteps, hidden_states):
            seen.append(hidden_states)
            return pipeline.unet(noisy_latents, timesteps, hidden_states)

    prompt_ids = torch.tensor(tokenize(tiny_model, ["photo of unqtkn dog"]))
    model = train.join_modules(find_family(tiny_model), {"text_encoder": pipeline.text_encoder, "unet": Spy()})
    with torch.no_grad():
        model(torch.zeros(1, 4, 8, 8), torch.tensor([5]), {"text_encoder.ids": prompt_ids})
        expected, _ = pipeline.encode_prompt("photo of unqtkn dog", torch.device("cpu"), 1, False)
    assert torch.equal(seen[0], expected)


def test_no_report_stalls_the_loop():
    """ray.train.report holds a step until the controller, which looks every two seconds, has taken the one before."""
    for path in (ROOT / "train.py", *(ROOT / "training").glob("*.py")):
        calls = path.read_text().count("ray.train.report(")
        assert calls == (2 if path.name == "workers.py" else 0)  # there in a thread, see workers.Reports


# ---------------------------------------------------------------------------------------------------------------------
# What learns


def test_weights_move_at_the_usual_learning_rate(command, tiny_model):
    command(max_train_steps=20)
    before, after = weights(tiny_model), weights(command.output_dir)
    moved = total = 0
    for name, value in after.items():
        if "token_embedding" in name or "position_embedding" in name:
            continue  # rows of tokens that are in no prompt get no gradient
        moved += (value != before[name]).sum().item()
        total += value.numel()
    assert moved / total > 0.99, f"{moved} of {total} weights moved"


def test_frozen_text_encoder(command, tiny_model):
    command(max_train_steps=2, train_text_encoder=False)
    before, after = weights(tiny_model), weights(command.output_dir)
    changed = {name.split(".")[0] for name in after if not before[name].equal(after[name])}
    assert changed == {"unet"}
    assert not (command.work_dir / "checkpoint-000002" / "text_encoder").exists()


def test_frozen_text_encoder_gives_the_same_first_loss(command, tmp_path):
    command(output_dir=tmp_path / "frozen", max_train_steps=1, train_text_encoder=False)
    command(output_dir=tmp_path / "trained", max_train_steps=1)
    assert losses(tmp_path / "frozen.work") == pytest.approx(losses(tmp_path / "trained.work"), abs=1e-6)


def test_without_prior_preservation(command):
    command(prior_loss_weight=0, class_images_dir=None, class_prompt=None, max_train_steps=2)
    assert all(line["class_loss"] == 0 for line in folders.read_json_lines(command.work_dir / logs.LOG))


def test_learning_rate_schedule_is_logged_as_used(command):
    command(lr_scheduler="constant_with_warmup", lr_warmup_steps=2, lr=1e-3)
    rates = [line["lr"] for line in folders.read_json_lines(command.work_dir / logs.LOG)]
    assert rates == pytest.approx([0, 5e-4, 1e-3, 1e-3])


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_half_precision_base_is_trained_in_float32(command, tiny_model, tmp_path, variant):
    """What was not trained is copied as it is, under plain names; a type is asked for to load both."""
    import torch
    from diffusers import DiffusionPipeline

    half = DiffusionPipeline.from_pretrained(tiny_model, dtype=torch.float16)
    half.save_pretrained(tmp_path / "half", variant=variant)
    command(model_dir=tmp_path / "half", max_train_steps=1, train_text_encoder=False)
    types = {name.partition(".")[0]: value.dtype for name, value in weights(command.output_dir).items()}
    assert types == {"unet": torch.float32, "text_encoder": torch.float16}
    assert not list(command.output_dir.rglob("*.fp16.*"))
    for dtype in (torch.float32, torch.bfloat16):
        result = DiffusionPipeline.from_pretrained(command.output_dir, dtype=dtype)
        assert {result.unet.dtype, result.text_encoder.dtype, result.vae.dtype} == {dtype}


def files_of(folder, *parts):
    """Return {path below a folder: bytes} of the files in some of its folders."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for part in parts
        for path in Path(folder, part).rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("train_text_encoder", [True, False])
def test_what_was_not_trained_is_the_bases_own(command, tiny_model, tmp_path, train_text_encoder):
    """To the byte, as other releases of the libraries read it; nothing that the pipeline does not use comes along."""
    import shutil

    base = shutil.copytree(tiny_model, tmp_path / "base")
    for path in base.rglob("*.json"):
        path.write_text(path.read_text() + "\n")  # as no library would write it
    for name in ("README.md", "model.ckpt", "unet/diffusion_pytorch_model.bin", "vae/old.bin", "notes/settings.json"):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text("{}")
    kept = ["scheduler", "tokenizer", "vae"] + ["text_encoder"] * (not train_text_encoder)
    expected = files_of(base, *kept)
    del expected["vae/old.bin"]
    command(model_dir=base, max_train_steps=1, train_text_encoder=train_text_encoder)
    assert files_of(command.output_dir, *kept) == expected
    assert (command.output_dir / "model_index.json").read_bytes() == (base / "model_index.json").read_bytes()
    assert not list(command.output_dir.rglob("*.bin")) and not (command.output_dir / "notes").exists()
    assert len({path.stat().st_mode for path in command.output_dir.rglob("*") if path.is_file()}) == 1


def test_what_was_trained_is_saved_as_all_releases_read_it(command, tmp_path):
    from diffusers import UNet2DConditionModel
    from safetensors.torch import load_file

    command(max_train_steps=1)
    latest = command.work_dir / "checkpoint-000001"
    for folder in (command.output_dir, latest):
        text_encoder = load_file(folder / "text_encoder" / "model.safetensors")
        assert all(name.startswith("text_model.") for name in text_encoder)
    UNet2DConditionModel.from_pretrained(latest / "unet").save_pretrained(tmp_path / "unet")
    name = "diffusion_pytorch_model.safetensors"
    assert (command.output_dir / "unet" / name).read_bytes() == (tmp_path / "unet" / name).read_bytes()


@pytest.mark.filterwarnings("ignore:.*torch_dtype.*:FutureWarning")  # the name that all releases of Diffusers know
def test_the_card_says_how_to_draw(command):
    command(max_train_steps=1, instance_prompt='photo of "unqtkn" dog')
    card = (command.output_dir / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0].replace(").images", ", num_inference_steps=2).images")
    code, names = code.replace("path/to/this/folder", str(command.output_dir)), {}
    exec(code, names)
    assert names["image"].size == (16, 16)


def test_a_base_with_a_safety_checker_keeps_it(command, tmp_path):
    """And names it as the first models did, whatever the libraries call it today."""
    from diffusers import DiffusionPipeline

    from benchmarks.plain_diffusers import save_tiny_model

    base = tmp_path / "base"
    save_tiny_model(base)
    assert '"CLIPFeatureExtractor"' in (base / "model_index.json").read_text()
    command(model_dir=base, max_train_steps=1)
    parts = ("feature_extractor", "safety_checker", "tokenizer")
    assert files_of(command.output_dir, *parts) == files_of(base, *parts)
    assert (command.output_dir / "model_index.json").read_bytes() == (base / "model_index.json").read_bytes()
    assert DiffusionPipeline.from_pretrained(command.output_dir).safety_checker is not None


def test_a_model_that_does_not_say_its_latents_scale_trains_with_that_of_its_class(command, tiny_model, tmp_path):
    """Models saved before diffusers 0.12 have no scaling_factor; AutoencoderKL's is 0.18215."""
    for name, change in {"silent": {}, "said": {"scaling_factor": 0.18215}}.items():
        model = shutil.copytree(tiny_model, tmp_path / name)
        path = model / "vae" / "config.json"
        config = json.loads(path.read_text())
        del config["scaling_factor"]
        path.write_text(json.dumps(config | change))
        command(model_dir=model, output_dir=tmp_path / f"{name}-out", max_train_steps=1)
    assert losses(tmp_path / "silent-out.work") == losses(tmp_path / "said-out.work") != []


def test_a_signal_at_a_skipped_step_saves_at_the_next_good_one(command, monkeypatch):
    """fp16 skips steps as a matter of course; what was trained before them must not be lost."""
    real = loop.accumulate_gradients

    def overflow(run, step, *rest):
        losses = real(run, step, *rest)
        if step in (2, 3):
            run.optimizer.parameters[0].grad.fill_(float("inf"))
        if step == 2:
            signal.raise_signal(signal.SIGTERM)
        return losses

    with monkeypatch.context() as patch, pytest.raises(errors.Stopped):
        patch.setattr(loop, "accumulate_gradients", overflow)
        command(max_train_steps=8)
    assert steps_kept(command.work_dir) == {5}


def test_a_diverged_run_publishes_nothing(command, monkeypatch):
    real = train.training_step

    def poisoned(*arguments, **options):
        return [part * float("nan") for part in real(*arguments, **options)]

    command(max_train_steps=2, checkpointing_steps=2)
    monkeypatch.setattr(train, "training_step", poisoned)
    before = tree(command.output_dir)
    with pytest.raises(errors.CheckFailed, match="diverged"):
        command(max_train_steps=30)
    assert tree(command.output_dir) == before
    assert steps_kept(command.work_dir) == {2}


# ---------------------------------------------------------------------------------------------------------------------
# Bad input: refused before a model is loaded


@pytest.fixture
def no_models(monkeypatch):
    def loaded(*arguments, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("pipelines.loading.load_models", loaded)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"instance_prompt": "photo of a dog"}, "--instance_prompt"),
        ({"instance_prompt": "photo of zwx dog", "unique_token": "unqtkn"}, "--instance_prompt"),
        ({"class_prompt": "photo of unqtkn dog", "unique_token": "unqtkn"}, "--class_prompt"),
        ({"resolution": 17}, "--resolution 17"),
        ({"model_dir": "/nowhere"}, "--model_dir"),
        ({"instance_images_dir": "/nowhere"}, "--instance_images_dir"),
        ({"output_dir": "/dev/null/out"}, "--output_dir"),
    ],
)
def test_bad_input(command, no_models, flags, words):
    with pytest.raises(errors.BadInput, match=words):
        command(**flags)


def test_a_model_that_the_node_of_a_worker_lacks_is_one_line(command, monkeypatch, tmp_path):
    monkeypatch.setattr("training.loop.same_copy", lambda location, flag: objects.same_copy(tmp_path / "none", flag))
    with pytest.raises(errors.BadInput, match=r"^--model_dir \S+/none does not exist on node \S+: use a folder"):
        command()


def test_a_name_on_the_hub_is_sent_to_cache_model(command):
    """Under Diffusers' name of the flag too, which takes one there."""
    name, flag = "CompVis/stable-diffusion-v1-4", "pretrained_model_name_or_path"
    done = run_script("train.py", *command.arguments(model_dir=None, **{flag: name}))
    assert done.returncode == 3 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("train.py: --model_dir ") and f"{name} is not a folder" in done.stderr
    assert "download a Hub model with cache_model.py" in done.stderr


@pytest.mark.parametrize("flags", [{"use_8bit_adam": True}, {"base_bits": 8, "lora": 4}])
def test_8_bits_ask_for_their_package(command, no_models, monkeypatch, flags):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(errors.BadInput, match=rf"--{next(iter(flags))} .* pip install bitsandbytes"):
        command(**flags)


def test_a_pipeline_of_another_kind_is_refused(command, no_models, tiny_model, tmp_path):
    """One of no family, and one that lacks a part of its family, as SD 3 without T5 does."""
    import shutil

    others = {
        "KandinskyPipeline": "supported: StableDiffusionPipeline",
        "StableDiffusionXLPipeline": "no text_encoder_2",
    }
    for name, said in others.items():
        shutil.copytree(tiny_model, tmp_path / name)
        index = tmp_path / name / "model_index.json"
        index.write_text(index.read_text().replace('"StableDiffusionPipeline"', f'"{name}"'))
        with pytest.raises(errors.BadInput, match=said):
            command(model_dir=tmp_path / name)


def test_bad_folders(command, no_models, tmp_path, tiny_model):
    import shutil

    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.BadInput, match="contains no images"):
        command(instance_images_dir=tmp_path / "empty")
    shutil.copytree(tiny_model, tmp_path / "partial")
    shutil.rmtree(tmp_path / "partial" / "vae")
    with pytest.raises(errors.BadInput, match="vae"):
        command(model_dir=tmp_path / "partial")
    bad = make_photos(tmp_path / "bad", 2)
    (bad / "01.png").write_bytes((bad / "01.png").read_bytes()[:200])
    with pytest.raises(errors.BadInput, match=r"01\.png"):
        command(instance_images_dir=bad)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    with pytest.raises(errors.BadInput, match="not an output of this toolkit"):
        command(output_dir=tmp_path / "full")
    assert (tmp_path / "full" / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize(
    "flags",
    [
        {"class_prompt": None},
        {"lr": 0},
        {"lr": "nan"},
        {"lr_warmup_steps": 5},
        {"num_workers": -1},
        {"lr_scheduler": "x"},
        {"max_train_pairs": 4, "max_train_steps": 4},
        {"max_train_pairs": 0, "max_train_steps": None},
        {"hub_public": True},
    ],
)
def test_usage_errors(command, flags):
    with pytest.raises(SystemExit) as stop:
        command(**flags)
    assert stop.value.code == 2


def test_the_result_is_uploaded_once(command, capsys, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    command(max_train_steps=1, push_to_hub="someone/rex")
    line = last_json(capsys.readouterr().out)
    assert line == {
        "output_dir": str(command.output_dir),
        "steps": 1,
        "trained": 1,
        "pushed_to": f"{hub.url}/someone/rex",
    }
    uploaded = {name: data for name, data in hub.repositories["someone/rex"].files.items() if name != ".gitattributes"}
    assert uploaded == {name: data for name, (data, _) in tree(command.output_dir).items()}
    assert hub.repositories["someone/rex"].private
    hub.requests.clear()
    before = tree(command.output_dir.parent)
    command(max_train_steps=1, push_to_hub="someone/rex")
    assert last_json(capsys.readouterr().out) == {**line, "trained": 0}
    assert {method for method, _ in hub.requests} == {"GET"} and tree(command.output_dir.parent) == before
    command(max_train_steps=1)
    assert "pushed_to" not in last_json(capsys.readouterr().out)


@pytest.mark.usefixtures("no_models")
@pytest.mark.parametrize("token", [None, "hf_of_nobody"])
def test_an_upload_that_cannot_be_is_told_before_training(command, hub, monkeypatch, token):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(errors.BadInput, match="--push_to_hub someone/rex"):
        command(push_to_hub="someone/rex")
    assert not command.work_dir.exists() and not hub.repositories


@pytest.mark.parametrize("status", [503, 403])
def test_an_upload_that_fails_loses_nothing(command, capsys, hub, monkeypatch, status):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.faults = [["POST", "/commit/", status, 1]]
    with pytest.raises(
        errors.TryAgain, match=f"{status}.*the result is in .*out: run the same command again to upload"
    ):
        command(max_train_steps=1, push_to_hub="someone/rex")
    assert folders.read_manifest(command.output_dir, deep=True)["step"] == 1
    assert capsys.readouterr().out == "" and list(hub.repositories["someone/rex"].files) == [".gitattributes"]
    command(max_train_steps=1, push_to_hub="someone/rex", hub_public=True)
    captured = capsys.readouterr()
    assert last_json(captured.out)["trained"] == 0 and "is private and stays so" in captured.err
    assert "model_index.json" in hub.repositories["someone/rex"].files


def test_other_settings_are_refused_and_overwrite_replaces(command):
    command(max_train_steps=1)
    with pytest.raises(errors.BadInput, match=r"lr was 5e-06, now 0\.001"):
        command(max_train_steps=1, lr=1e-3)
    before = weights(command.output_dir)
    command(max_train_steps=1, lr=1e-3, overwrite=True)
    assert any(not before[name].equal(value) for name, value in weights(command.output_dir).items())
    assert len(losses(command.work_dir)) == 1


def test_a_second_run_on_one_output_is_sent_away(command):
    with folders.lock(command.work_dir / ".lock"), pytest.raises(errors.TryAgain, match=str(os.getpid())):
        command()


def test_skip_bad_images(command, tmp_path, photos):
    folder = make_photos(tmp_path / "some", 3)
    (folder / "broken.jpg").write_text("no image")
    command(instance_images_dir=folder, skip_bad_images=True, max_train_steps=1)
    images = folders.read_manifest(command.work_dir / "posteriors")["images"]
    assert "broken.jpg" not in {Path(path).name for path, _ in images}
    assert "left out, as they could not be read: broken.jpg." in (command.output_dir / "README.md").read_text()


# ---------------------------------------------------------------------------------------------------------------------
# Signals and Ray


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_goes_on_bit_equal(command, tmp_path, sent):
    steps = 60
    flags = {"max_train_steps": steps, "checkpointing_steps": 1000 if sent == signal.SIGTERM else 4}
    process = subprocess.Popen(
        [sys.executable, ROOT / "train.py", *command.arguments(**flags)], stderr=subprocess.PIPE, text=True
    )
    log = command.work_dir / logs.LOG

    def is_under_way():  # a checkpoint is sealed beside the next steps
        return len(folders.read_json_lines(log)) >= 6 and (sent == signal.SIGTERM or steps_kept(command.work_dir))

    while not is_under_way() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == (143 if sent == signal.SIGTERM else -signal.SIGKILL), stderr
    saved = max(steps_kept(command.work_dir))
    assert 4 <= saved < steps and not command.output_dir.exists()
    command(**flags)
    command(output_dir=tmp_path / "whole", **flags)
    assert_equal_weights(tmp_path / "whole", command.output_dir)
    assert losses(command.work_dir) == losses(tmp_path / "whole.work")


@pytest.mark.ray
def test_one_ray_worker_equals_this_process(command, tmp_path, ray_session):
    command(output_dir=tmp_path / "here", max_train_steps=3)
    command(max_train_steps=3, num_workers=1)
    assert_equal_weights(tmp_path / "here", command.output_dir)
    assert losses(command.work_dir) == losses(tmp_path / "here.work")


@pytest.mark.ray
@pytest.mark.parametrize("kills", [[10], pytest.param([10, 20], marks=pytest.mark.faults)])
def test_two_workers_one_killed(kills, command, tmp_path, ray_session):
    """Two workers, one of them killed on the way, end bit-equal to two undisturbed, and log the losses of one.

    One failure is allowed: a second one follows a newer checkpoint.
    """
    import psutil

    steps = 30
    killed = []

    def kill():
        for step in kills:
            while not (tmp_path / "killed.work" / f"checkpoint-{step:06d}").exists():
                time.sleep(0.02)
            for process in psutil.Process().children(recursive=True):
                if "RayTrainWorker" in " ".join(process.cmdline()):
                    process.send_signal(signal.SIGKILL)
                    killed.append(step)
                    break

    flags = {"max_train_steps": steps, "checkpointing_steps": 10}
    command(output_dir=tmp_path / "one", train_batch_size=2, **flags)
    command(output_dir=tmp_path / "two", num_workers=2, **flags)
    threading.Thread(target=kill, daemon=True).start()
    command(output_dir=tmp_path / "killed", num_workers=2, max_failures=1, **flags)
    assert killed == kills
    assert_equal_weights(tmp_path / "two", tmp_path / "killed")
    assert losses(tmp_path / "two.work") == losses(tmp_path / "killed.work")
    assert losses(tmp_path / "two.work") == pytest.approx(losses(tmp_path / "one.work"), abs=1e-5)
