"""The entry point of a script and its exit codes, signals, flags and their help."""

import argparse
import importlib
import os
import re
import signal
import sys
from unittest import mock

import pytest
from conftest import ROOT, SCRIPTS, raiser, run_main, run_script

from common import cli, errors, objects
from common.stores import Store

pytestmark = pytest.mark.usefixtures("as_script")


# ---------------------------------------------------------------------------------------------------------------------
# Exit codes and signals


def test_debug_shows_the_traceback_and_the_same_line(capsys):
    assert run_main(raiser(errors.BadInput("wrong")), debug=True) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and any("in main" in line for line in lines)
    assert lines[-1] == "script.py: wrong"


def test_success_is_0_and_a_usage_error_stays_2(capsys):
    assert run_main(lambda args: None) == 0
    assert run_main(raiser(SystemExit(2))) == 2
    assert capsys.readouterr().err == ""


def test_sigterm_becomes_143(capsys):
    def main(args):
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal came late")

    assert run_main(main) == 143
    assert "SIGTERM" in capsys.readouterr().err


def run_as_script(script, **flags):
    """Return the exit code of a script in this process."""
    module = importlib.import_module(script)
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with pytest.raises(SystemExit) as exit_:
        cli.run(module.main, module.parse_args(words))
    return exit_.value.code


def flags_in(s3, script):
    """Return the flags of a script whose folders are in a store."""
    given = {"model_dir": s3("model"), "output_dir": s3("out"), "num_workers": 0}
    more = {
        "run_model": {"prompts": "a cat"},
        "train": {"instance_images_dir": s3("photos"), "instance_prompt": "a cat", "prior_loss_weight": 0}
        | {"captions": "none"},  # those of raw data do not name the subject
        "preprocess": {"input": s3("photos"), "max_bad_fraction": 0},
        "pretrain": {"data": s3("latents")},
    }
    return {**given, **more[script]}


@pytest.mark.parametrize("script", ["run_model", "train", "preprocess", "pretrain"])
def test_a_fault_of_a_model_in_a_store_is_named_by_its_uri(script, s3, node_cache, tiny_model, capsys):
    objects.upload_folder(tiny_model, s3("model"))
    Store(s3("model")).delete("unet/config.json")
    assert run_as_script(script, **flags_in(s3, script)) == 3
    said = capsys.readouterr().err
    assert f"{s3('model/unet')} has no config.json" in said and str(node_cache) not in said


@pytest.mark.parametrize("script", ["train", "preprocess"])
def test_a_damaged_photo_in_a_store_is_named_by_its_uri(script, s3, node_cache, raw_data, tiny_model, capsys):
    objects.upload_folder(tiny_model, s3("model"))
    objects.upload_folder(raw_data, s3("photos"))
    Store(s3("photos")).write("07.png", (raw_data / "07.png").read_bytes()[:99])
    assert run_as_script(script, **flags_in(s3, script)) == 3
    said = capsys.readouterr().err
    if script == "train":
        assert f"{s3('photos/07.png')}: damaged" in said
        assert f"--instance_images_dir {s3('photos')}: 1 bad files (07.png)" in said
    else:
        assert re.search(rf"--input {re.escape(s3('photos'))}: 1 of 23 rows .*: 07.png: damaged", said)
    assert str(node_cache) not in said


def test_no_secret_of_a_uri_is_shown_or_written(s3, tiny_model, photos, tmp_path):
    """Of runs that succeed, of one that has nothing to do, and of one that fails; the same settings are recognised."""
    secrets = {"access_key": "AKIDOFNOBODY", "secret_key": "hush%2Fhush"}

    def uri(name):
        return "&".join([s3(name), *(f"{option}={value}" for option, value in secrets.items())])

    objects.upload_folder(tiny_model, uri("model"))
    objects.upload_folder(photos, uri("photos"))

    def run(script, **more):
        flags = {**flags_in(uri, script), **more}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        switches = ["--debug", *(["--keep_checkpoints"] if script == "train" else [])]
        done = run_script(f"{script}.py", *words, *switches, DREAMBOOTH_CACHE=str(tmp_path / "cache"))
        said = done.stdout + done.stderr
        assert not any(secret in said for secret in ("AKIDOFNOBODY", "hush")), said
        return done.returncode, said

    train = {"output_dir": uri("tuned"), "max_train_steps": 2, "validation_prompts": "a cat"}
    assert run("run_model", num_inference_steps=2) == (0, mock.ANY)
    assert run("train", **train) == (0, mock.ANY)
    code, said = run("train", **train)
    assert code == 0 and "secret_key=*** is already trained for 2 steps: nothing to do" in said
    code, said = run("train", **{**train, "instance_images_dir": uri("none")})
    assert code == 3 and "none?" in said and "access_key=***&secret_key=*** does not exist" in said
    code, said = run("run_model", no_such_flag=uri("x"))
    assert code == 2 and "secret_key=***" in said

    store = Store(s3(""))
    written = {name: store.read(name) for name in store.list()}
    assert {"out/metadata.jsonl", "tuned/README.md", "tuned.work/run.json", "tuned.work/.lock"} <= written.keys()
    assert any(name.startswith("tuned.work/posteriors/") for name in written)
    assert not [name for name, data in written.items() if b"AKIDOFNOBODY" in data or b"hush" in data]


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("cache_model", {"model_name": "hf://nobody/model", "model_dir": "cache"}),
        ("run_model", {"model_dir": "hf://nobody/model", "output_dir": "out", "prompts": "a cat"}),
        ("train", {"instance_images_dir": "hf://datasets/nobody/photos"}),
        ("preprocess", {"input": "hf://datasets/nobody/photos"}),
    ],
)
def test_a_location_on_the_hub_is_one_line_that_says_what_to_do(script, flags, tiny_model, tmp_path, capsys):
    here = {"train": {"instance_prompt": "a cat", "prior_loss_weight": 0}, "preprocess": {}}
    if script in here:
        flags = {"model_dir": tiny_model, "output_dir": tmp_path / "out", **here[script], **flags}
    assert run_as_script(script, **flags) == 3
    uri = next(value for value in flags.values() if str(value).startswith("hf://"))
    expected = f"{uri}: hf:// is not an object store: pass a model's name to cache_model.py --model_name, and download "
    assert capsys.readouterr().err == f"script.py: {expected}photos with `hf download` first\n"


def test_a_new_secret_leaves_the_settings_of_a_data_set(s3, raw_data, tiny_model):
    preprocess = importlib.import_module("preprocess")
    objects.upload_folder(raw_data, s3("photos"))
    settings = []
    for secret in ("one", "two"):
        words = ["--input", f"{s3('photos')}&access_key=test&secret_key={secret}", "--output_dir", "x"]
        settings.append(preprocess.read_settings(preprocess.parse_args([*words, "--model_dir", str(tiny_model)]))[0])
    assert settings[0] == settings[1]


def test_a_signal_becomes_a_request_to_stop(capsys):
    asked = []
    earlier = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with cli.stopping(lambda: asked.append("stop")) as received:
        assert asked == received == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked == ["stop"] and received == [signal.SIGTERM]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == earlier
    assert "stopping" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Flags


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (cli.positive_int, {"1": 1, "20": 20}, ["0", "-1", "1.5", "x", "", "inf"]),
        (cli.non_negative_int, {"0": 0, "7": 7}, ["-1", "0.5", "x", "nan"]),
        (cli.failures, {"0": 0, "7": 7, "-1": cli.MOST_FAILURES}, ["-2", "0.5", "x"]),
        (cli.non_negative_float, {"0": 0, "0.5": 0.5, "1e-6": 1e-6}, ["-0.1", "nan", "inf", "x"]),
        (cli.positive_float, {"0.5": 0.5, "5e-6": 5e-6}, ["0", "0.0", "-1", "nan", "inf", "x"]),
    ],
)
def test_numbers_of_flags(kind, good, bad):
    assert {text: kind(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)


def make_example_parser():
    parser = cli.make_parser("What it does.\n\n    python example.py --steps 2")
    group = cli.add_shared_flags(parser)
    group.add_argument("--steps", type=cli.positive_int, default=50, help="steps to take")
    group.add_argument("--first", type=cli.non_negative_int, default=0, help="first step")
    cli.add_compute_flags(group)
    return parser


def test_help_shows_the_docstring_and_the_defaults():
    text = make_example_parser().format_help()
    assert "What it does.\n\n    python example.py --steps 2\n" in text
    words = " ".join(text.split())
    assert "steps to take (default: 50)" in words and "first step (default: 0)" in words
    assert "fp32 on a CPU (default: auto)" in words
    assert "None" not in text and "False" not in text


def test_a_wrong_flag_ends_with_2(capsys):
    for arguments in (["--steps", "0"], ["--step", "3"], ["--mixed_precision", "fp8"], ["--cpus_per_worker", "0"]):
        with pytest.raises(SystemExit) as exit_:
            make_example_parser().parse_args(arguments)
        assert exit_.value.code == 2
        assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["gpus_per_worker", "num_workers"])
@pytest.mark.parametrize(
    ("name", "required"),
    [
        ("train", "--instance_images_dir i --instance_prompt p --prior_loss_weight 0"),
        ("pretrain", "--data d"),
        ("preprocess", "--input i"),
        ("run_model", "--prompts p"),
        ("evaluate", "--base_model_dir b --instance_images_dir i --instance_prompt p --class_prompt c"),
    ],
)
def test_a_type_of_gpus_without_gpus_is_a_usage_error(name, required, flag, capsys):
    words = f"--model_dir m --output_dir o {required} --accelerator_type A100 --{flag} 0".split()
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module(name).parse_args(words)
    assert exit_.value.code == 2
    assert f"--accelerator_type chooses among GPUs of Ray, --{flag} 0 uses none" in capsys.readouterr().err


def test_there_are_scripts_to_test():
    assert {"run_model", "train"} <= set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_of_every_script(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module(name).parse_args(["--help"])
    assert exit_.value.code == 0
    assert f"python {name}.py" in capsys.readouterr().out


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_of_every_script_has_help_and_the_fields_spelling(name, monkeypatch):
    class Caught(Exception):
        pass

    def catch(parser, *args):
        raise Caught(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", catch)
    with pytest.raises(Caught) as caught:
        importlib.import_module(name).parse_args([])
    actions = caught.value.args[0]._actions
    assert len(actions) > 3
    assert [action.dest for action in actions if not action.help] == []
    flags = [flag for action in actions for flag in action.option_strings if flag.startswith("--")]
    assert [flag for flag in flags if "-" in flag[2:] and not flag.startswith("--no-")] == []
    assert [action.dest for action in actions if not action.option_strings] == []


# A flag that goes, or changes its name, breaks other people's scripts.

RAW_FLAGS = """
    image_column caption_column crop random_flip timeout retries max_bad_fraction max_bad_files rows_per_file
    encoding_batch_size
"""


FILTERS = "where min_side max_aspect"  # pretrain.py refuses them


SHARED_FLAGS = """
    debug dry_run num_workers address insecure_cluster cpus_per_worker gpus_per_worker accelerator_type max_failures
    start_timeout mixed_precision model_dir output_dir overwrite
"""


PRETRAIN_FLAGS = """
    data validation_data online resolution latents_column caption_latents_column prescaled_latents num_validation_rows
    shuffle_window unet_config init_from_pretrained storage_path experiment_name sample_prompts max_steps max_epochs
    batch_size_per_worker gradient_accumulation_steps lr lr_scheduler lr_warmup_steps adam_weight_decay max_grad_norm
    snr_gamma ema_decay caption_dropout gradient_checkpointing seed validation_steps checkpointing_steps
    checkpoints_total_limit keep_checkpoints log_every num_data_loading_workers data_loading_accelerator_type
    prefetch_batches strategy fsdp_sharding guidance_scale push_to_hub hub_public use_8bit_adam reduce_dtype compile
"""


RUN_MODEL_FLAGS = """
    checkpoint no_safety_checker prompts prompts_file num_samples_per_prompt seed sampler num_inference_steps
    guidance_scale negative_prompt height width batch_size lora
"""


TRAIN_FLAGS = """
    work_dir instance_images_dir class_images_dir skip_bad_images instance_prompt class_prompt unique_token resolution
    random_crop random_flip max_variants train_batch_size gradient_accumulation_steps num_epochs max_train_pairs
    max_train_steps lr lr_scheduler lr_warmup_steps prior_loss_weight snr_gamma max_grad_norm adam_weight_decay
    use_8bit_adam reduce_dtype train_text_encoder gradient_checkpointing compile seed validation_prompts
    validation_steps num_validation_images guidance_scale checkpointing_steps checkpoints_total_limit
    keep_checkpoints log_every push_to_hub hub_public text_encoder_lr lora lora_alpha lora_dropout lora_layers rslora
    save_dtype merge buckets captions concepts base_bits
"""


EVALUATE_FLAGS = """
    base_model_dir instance_images_dir class_images_dir skip_bad_images no_safety_checker instance_prompt class_prompt
    unique_token class_name prompts_file num_samples_per_prompt num_class_images seed sampler num_inference_steps
    guidance_scale negative_prompt height width clip_model dino_model memorised_above fail_under fail_above batch_size
    lora concepts
"""


DRAW = "--model_dir m --output_dir o --prompts p"
THEIR_NAMES = {  # of Diffusers' train_dreambooth.py, for flags of ours
    "train": {
        "pretrained_model_name_or_path": "model_dir",
        "instance_data_dir": "instance_images_dir",
        "class_data_dir": "class_images_dir",
        "num_train_epochs": "num_epochs",
        "learning_rate": "lr",
        "validation_prompt": "validation_prompts",
        "rank": "lora",
    },
    "run_model": {"sample_batch_size": "batch_size"},
}


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("pretrain", PRETRAIN_FLAGS + RAW_FLAGS + FILTERS),
        ("preprocess", f"input resolutions seed caption_latents {RAW_FLAGS} {FILTERS}"),
        ("evaluate", EVALUATE_FLAGS),
        ("train", TRAIN_FLAGS),
        ("run_model", RUN_MODEL_FLAGS),
    ],
)
def test_the_flags_are_frozen(monkeypatch, name, flags):
    parsers = []
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_args", lambda parser, argv: parsers.append(parser) or sys.exit()
    )
    with pytest.raises(SystemExit):
        importlib.import_module(name).parse_args([])
    found = {action.dest for action in parsers[0]._actions} - {"help"}
    assert found == set(f"{flags} {SHARED_FLAGS}".split())
    options = {option for action in parsers[0]._actions for option in action.option_strings}
    others = {option for option in options if not option.startswith(("-h", "--no-"))} - {f"--{name}" for name in found}
    assert others == {f"--{theirs}" for theirs in THEIR_NAMES.get(name, ())} | {"--help"}


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        (
            "train",
            "--pretrained_model_name_or_path m --output_dir o --instance_data_dir i --instance_prompt p "
            "--class_data_dir c --class_prompt q --learning_rate 1e-5 --num_train_epochs 2 --validation_prompt v",
            "--model_dir m --output_dir o --instance_images_dir i --instance_prompt p "
            "--class_images_dir c --class_prompt q --lr 1e-5 --num_epochs 2 --validation_prompts v",
        ),
        ("run_model", f"{DRAW} --sample_batch_size 2", f"{DRAW} --batch_size 2"),
    ],
)
def test_diffusers_names_are_those_of_our_flags(capsys, name, theirs, ours):
    parse = importlib.import_module(name).parse_args
    assert parse(theirs.split()) == parse(ours.split()) != parse([*ours.split(), "--seed", "7"])
    with pytest.raises(SystemExit):
        parse([])
    assert "--output_dir" in capsys.readouterr().err


# The flags of examples/dreambooth/train_dreambooth.py at 58eb52c08 of huggingface/diffusers, and their defaults.
DIFFUSERS = {
    "pretrained_model_name_or_path": None, "revision": None, "variant": None, "tokenizer_name": None,
    "instance_data_dir": None, "class_data_dir": None, "instance_prompt": None, "class_prompt": None,
    "with_prior_preservation": False, "prior_loss_weight": 1.0, "num_class_images": 100,
    "output_dir": "dreambooth-model", "seed": None, "resolution": 512, "center_crop": False,
    "train_text_encoder": False, "train_batch_size": 4, "sample_batch_size": 4, "num_train_epochs": 1,
    "max_train_steps": None, "checkpointing_steps": 500, "checkpoints_total_limit": None,
    "resume_from_checkpoint": None, "gradient_accumulation_steps": 1, "gradient_checkpointing": False,
    "learning_rate": 5e-6, "scale_lr": False, "lr_scheduler": "constant", "lr_warmup_steps": 500, "lr_num_cycles": 1,
    "lr_power": 1.0, "use_8bit_adam": False, "dataloader_num_workers": 0, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_weight_decay": 1e-2, "adam_epsilon": 1e-08, "max_grad_norm": 1.0, "push_to_hub": False, "hub_token": None,
    "hub_model_id": None, "logging_dir": "logs", "allow_tf32": False, "report_to": "tensorboard",
    "validation_prompt": None, "num_validation_images": 4, "validation_steps": 100, "mixed_precision": None,
    "prior_generation_precision": None, "local_rank": -1, "enable_xformers_memory_efficient_attention": False,
    "set_grads_to_none": False, "offset_noise": False, "snr_gamma": None, "pre_compute_text_embeddings": False,
    "tokenizer_max_length": None, "text_encoder_use_attention_mask": False, "skip_save_text_encoder": False,
    "validation_images": None, "class_labels_conditioning": None,
    "validation_scheduler": "DPMSolverMultistepScheduler",
}  # fmt: skip


def test_the_training_guides_table_is_true_of_every_flag_of_diffusers(monkeypatch):
    """`the same` are those that train.py takes under that name; defaults are named where they differ."""
    parsers = []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda *given: parsers.append(given[0]) or sys.exit())
    with pytest.raises(SystemExit):
        importlib.import_module("train").parse_args([])
    actions = parsers[0]._option_string_actions
    section = (ROOT / "docs" / "training.md").read_text().split("\n## From Diffusers")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]
    named = [(flag, here, defaults) for flags, here, defaults in rows for flag in re.findall(r"`--(\w+)`", flags)]
    assert sorted(flag for flag, _, _ in named) == sorted(DIFFUSERS)
    for flag, here, defaults in named:
        action = actions.get(f"--{flag}")
        assert (action is not None) == here.startswith("the same"), flag
        if action is not None:
            assert here.startswith("the same as") == (action.dest != flag), flag
            own = None if action.default == [] else action.default
            assert (own != DIFFUSERS[flag]) == bool(defaults), flag
            numbers = {value for value in (DIFFUSERS[flag], own) if type(value) is int}
            assert not defaults or {int(word) for word in re.findall(r"\b\d+\b", defaults)} == numbers, flag
