"""Errors and exit codes, flags and their help, progress, shares of a cluster."""

import argparse
import errno
import importlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT

from common import cli, cluster, errors, messages

SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py") if "\ndef parse_args(" in path.read_text())


@pytest.fixture(autouse=True)
def keep_signals(monkeypatch):
    """`run` sets a handler, a variable and stdout for the process that a script is: put them back."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setattr(sys, "argv", ["/somewhere/script.py"])
    earlier = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stdout = sys.stdout
    yield
    sys.stdout, messages._results = stdout, None
    for number, handler in earlier.items():
        signal.signal(number, handler)


def run(main, debug=False):
    """Return the exit code of `cli.run`."""
    with pytest.raises(SystemExit) as exit_:
        cli.run(main, SimpleNamespace(debug=debug))
    return exit_.value.code


def raiser(error):
    def main(args):
        raise error

    return main


# ---------------------------------------------------------------------------------------------------------------------
# Exit codes


class OutOfMemoryError(RuntimeError):
    """Named as torch's own."""


class RayTaskErrorLike(Exception):
    """Ray keeps what a task raised in `.cause`."""

    def __init__(self, cause):
        super().__init__("ray::task() (pid=1)\n  File ...\nlots of text")
        self.cause = cause


class WorkerGroupErrorLike(Exception):
    """Ray Train keeps what the workers raised in `.worker_failures`, by rank."""

    def __init__(self, *failures):
        super().__init__("Training failed due to worker errors")
        self.worker_failures = dict(enumerate(failures))


class ControllerErrorLike(Exception):
    def __init__(self, failure):
        super().__init__("Training failed due to controller error")
        self.controller_failure = failure


ERRORS = [
    (errors.ToolError("some fault"), 1, "some fault"),
    (errors.BadInput("--flag is wrong: mend it"), 3, "--flag is wrong: mend it"),
    (errors.OutOfResource("no room"), 4, "no room"),
    (errors.CheckFailed("file x is damaged"), 5, "file x is damaged"),
    (errors.TryAgain("in use"), 75, "in use"),
    (errors.Stopped(signal.SIGTERM), 143, "SIGTERM"),
    (errors.Stopped(signal.SIGINT), 130, "SIGINT"),
    (KeyboardInterrupt(), 130, "SIGINT"),
    (OSError(errno.ENOSPC, "No space left on device", "/out/x.png"), 4, "disk full while writing /out/x.png"),
    (OSError(errno.EDQUOT, "Disk quota exceeded", "/out/y.png"), 4, "disk full while writing /out/y.png"),
    (MemoryError(), 4, "out of memory"),
    (OutOfMemoryError("CUDA out of memory"), 4, "out of memory"),
    (ValueError("bad thing"), 1, "ValueError: bad thing (--debug shows the traceback)"),
    (OSError(errno.EACCES, "Permission denied", "/out"), 1, "--debug"),
    (AssertionError(), 1, "AssertionError"),
]


@pytest.mark.parametrize(("error", "code", "text"), ERRORS, ids=[f"{type(e[0]).__name__}-{e[1]}" for e in ERRORS])
def test_an_error_is_one_line_and_an_exit_code(capsys, error, code, text):
    assert run(raiser(error)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("script.py: ") and text in lines[0]


WRAPPERS = {
    "raised from": lambda error: chain(RuntimeError("outer"), error),
    "a Ray task": RayTaskErrorLike,
    "a worker group": WorkerGroupErrorLike,
    "a controller": ControllerErrorLike,
    "a worker group of Ray tasks": lambda error: WorkerGroupErrorLike(RayTaskErrorLike(error)),
    "all of them": lambda error: chain(
        ValueError("x"), WorkerGroupErrorLike(RayTaskErrorLike(chain(KeyError(), error)))
    ),
}


def chain(outer, inner):
    try:
        raise outer from inner
    except Exception as error:
        return error


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize(("error", "code", "text"), ERRORS[1:5] + ERRORS[8:13])
def test_a_workers_error_is_found_in_what_wraps_it(wrap, error, code, text):
    found, line = errors.describe_error(wrap(error))
    assert found == code and text in line and "\n" not in line


def test_errors_that_cause_each_other_end():
    first, second = RayTaskErrorLike(None), RayTaskErrorLike(None)
    first.cause, second.cause = second, first
    code, line = errors.describe_error(first)
    assert code == 1 and line.startswith("RayTaskErrorLike")


def test_a_long_error_of_many_lines_becomes_one_short_line(capsys):
    assert run(raiser(errors.BadInput("several\n  lines\n" + "long " * 1000))) == 3
    line = capsys.readouterr().err
    assert line.startswith("script.py: several lines long") and line.count("\n") == 1 and len(line) < 1000
    assert line.endswith("...\n")


def test_an_unknown_error_shows_its_last_line(capsys):
    assert run(raiser(RuntimeError("Traceback ...\n  File x\nthe point of it"))) == 1
    assert "RuntimeError: the point of it (--debug shows the traceback)" in capsys.readouterr().err


def test_debug_shows_the_traceback_and_the_same_line(capsys):
    assert run(raiser(errors.BadInput("wrong")), debug=True) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and any("in main" in line for line in lines)
    assert lines[-1] == "script.py: wrong"


def test_success_is_0_and_a_usage_error_stays_2(capsys):
    assert run(lambda args: None) == 0
    assert run(raiser(SystemExit(2))) == 2
    assert capsys.readouterr().err == ""


def test_sigterm_becomes_143(capsys):
    def main(args):
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal came late")

    assert run(main) == 143
    assert "SIGTERM" in capsys.readouterr().err


def test_errors_keep_their_code_through_pickle():
    """A worker's error comes to the driver as a pickle."""
    for error in (
        errors.BadInput("x"),
        errors.CheckFailed("y"),
        errors.OutOfMemory("z"),
        errors.Stopped(signal.SIGINT),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert (copy.exit_code, str(copy)) == (error.exit_code, str(error))


TRAIN = "--model_dir m --output_dir o --instance_images_dir i --instance_prompt p --prior_loss_weight 0"
PRETRAIN = "--data d --model_dir m --output_dir o"
DRAW = "--model_dir m --output_dir o --prompts p"
EVALUATE = "--model_dir m --base_model_dir b --output_dir o --instance_images_dir i --class_images_dir c"
EVALUATE += " --instance_prompt p --class_prompt q"
ENCODE = "--input i --model_dir m --output_dir o"
REST = "with more --gradient_accumulation_steps"
REMEDIES = [
    ("train", TRAIN, "try --use_8bit_adam, then --gradient_checkpointing, then --no-train_text_encoder, then "
     "a smaller --resolution"),
    ("train", f"{TRAIN} --use_8bit_adam --train_batch_size 2", "try --gradient_checkpointing, then a smaller "
     f"--train_batch_size {REST}, then --no-train_text_encoder, then a smaller --resolution"),
    ("train", f"{TRAIN} --use_8bit_adam --gradient_checkpointing --no-train_text_encoder",
     "try a smaller --resolution"),
    ("pretrain", PRETRAIN, f"try --gradient_checkpointing, then a smaller --batch_size_per_worker {REST}, then "
     "--strategy fsdp, then a smaller --resolution"),
    ("pretrain", f"{PRETRAIN} --online --gradient_checkpointing --batch_size_per_worker 1 --num_workers 1",
     "try a smaller --encoding_batch_size, then a smaller --resolution"),
    ("run_model", DRAW, "try a smaller --batch_size, then smaller --height and --width"),
    ("run_model", f"{DRAW} --batch_size 1", "try smaller --height and --width"),
    ("evaluate", EVALUATE, "try a smaller --batch_size"),
    ("evaluate", f"{EVALUATE} --batch_size 1", "use a machine or a GPU with more memory"),
    ("preprocess", ENCODE, "try a smaller --encoding_batch_size"),
    ("preprocess", f"{ENCODE} --encoding_batch_size 1", "use a machine or a GPU with more memory"),
    ("cache_model", "--model_name n --model_dir m", "use a machine or a GPU with more memory"),
]  # fmt: skip


@pytest.mark.parametrize("sent", [False, True], ids=["here", "from an actor"])
@pytest.mark.parametrize(("name", "flags", "remedy"), REMEDIES)
def test_a_full_memory_names_flags_of_the_script_that_help(capsys, name, flags, remedy, sent):
    """None of another script, and none that has its smallest value already."""
    assert {row[0] for row in REMEDIES} == set(SCRIPTS)
    error = OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    error = pickle.loads(pickle.dumps(errors.as_tool_error(error))) if sent else RayTaskErrorLike(error)
    with pytest.raises(SystemExit) as exit_:
        cli.run(raiser(error), importlib.import_module(name).parse_args(flags.split()))
    assert exit_.value.code == 4
    assert capsys.readouterr().err == f"script.py: out of memory: {remedy}\n"
    with pytest.raises(SystemExit):
        importlib.import_module(name).parse_args(["--help"])
    help_text = "".join(capsys.readouterr())  # `run` has put stdout aside
    assert all(flag in help_text for flag in remedy.replace(",", "").split() if flag.startswith("--"))


def test_a_signal_becomes_a_file_that_workers_look_for(tmp_path, capsys):
    path = tmp_path / "stop"
    path.touch()  # of an earlier run that was killed
    earlier = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with cli.stop_file(path) as received:
        assert not path.exists() and received == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert path.exists() and received == [signal.SIGTERM]
    assert not path.exists()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == earlier
    assert "stopping" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Flags


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (cli.positive_int, {"1": 1, "20": 20}, ["0", "-1", "1.5", "x", "", "inf"]),
        (cli.non_negative_int, {"0": 0, "7": 7}, ["-1", "0.5", "x", "nan"]),
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
    cli.add_compute_flags(group)
    return parser


def test_help_shows_the_docstring_and_the_defaults():
    text = make_example_parser().format_help()
    assert "What it does.\n\n    python example.py --steps 2\n" in text
    words = " ".join(text.split())
    assert "steps to take (default: 50)" in words
    assert "fp32 on a CPU (default: auto)" in words
    assert "None" not in text and "False" not in text


def test_a_wrong_flag_ends_with_2(capsys):
    for arguments in (["--steps", "0"], ["--step", "3"], ["--mixed_precision", "fp8"], ["--cpus_per_worker", "0"]):
        with pytest.raises(SystemExit) as exit_:
            make_example_parser().parse_args(arguments)
        assert exit_.value.code == 2
        assert arguments[0] in capsys.readouterr().err


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
    image_column caption_column crop random_flip timeout retries max_bad_fraction rows_per_file encoding_batch_size
"""
SHARED_FLAGS = """
    debug num_workers address insecure_cluster cpus_per_worker gpus_per_worker max_failures mixed_precision model_dir
    output_dir overwrite
"""
PRETRAIN_FLAGS = """
    data online resolution latents_column caption_latents_column prescaled_latents num_validation_rows shuffle_window
    unet_config init_from_pretrained storage_path experiment_name sample_prompts max_steps max_epochs
    batch_size_per_worker gradient_accumulation_steps lr lr_scheduler lr_warmup_steps adam_weight_decay max_grad_norm
    snr_gamma ema_decay caption_dropout gradient_checkpointing seed validation_steps checkpointing_steps
    checkpoints_total_limit keep_checkpoints log_every num_data_loading_workers prefetch_batches strategy fsdp_sharding
    guidance_scale
"""


RUN_MODEL_FLAGS = """
    checkpoint no_safety_checker prompts prompts_file num_samples_per_prompt seed sampler num_inference_steps
    guidance_scale negative_prompt height width batch_size
"""
TRAIN_FLAGS = """
    work_dir instance_images_dir class_images_dir skip_bad_images instance_prompt class_prompt unique_token resolution
    random_crop random_flip max_variants train_batch_size gradient_accumulation_steps num_epochs max_train_pairs
    max_train_steps lr lr_scheduler lr_warmup_steps prior_loss_weight snr_gamma max_grad_norm adam_weight_decay
    use_8bit_adam reduce_dtype train_text_encoder gradient_checkpointing compile seed validation_prompts
    validation_steps num_validation_images guidance_scale checkpointing_steps checkpoints_total_limit
    keep_checkpoints log_every
"""


EVALUATE_FLAGS = """
    base_model_dir instance_images_dir class_images_dir skip_bad_images no_safety_checker instance_prompt class_prompt
    unique_token class_name prompts_file num_samples_per_prompt num_class_images seed sampler num_inference_steps
    guidance_scale negative_prompt height width clip_model dino_model memorised_above fail_under fail_above batch_size
"""


THEIR_NAMES = {  # of Diffusers' train_dreambooth.py, for flags of ours
    "train": {
        "pretrained_model_name_or_path": "model_dir",
        "instance_data_dir": "instance_images_dir",
        "class_data_dir": "class_images_dir",
        "num_train_epochs": "num_epochs",
        "learning_rate": "lr",
        "validation_prompt": "validation_prompts",
    },
    "run_model": {"sample_batch_size": "batch_size"},
}


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("pretrain", PRETRAIN_FLAGS + RAW_FLAGS),
        ("preprocess", f"input resolutions seed {RAW_FLAGS}"),
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


# ---------------------------------------------------------------------------------------------------------------------
# Output


def test_the_result_is_one_json_line(capsys):
    messages.print_result(output_dir="/a b/ü", images=3)
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and json.loads(out) == {"output_dir": "/a b/ü", "images": 3}


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


def test_progress_off_a_terminal_is_a_line_now_and_then(monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr(messages, "time", clock)
    with messages.Progress("train", 100, "steps", initial=20) as progress:
        for _ in range(10):
            clock.now += 3
            progress.update(5, loss=0.25)
        so_far = capsys.readouterr()
        assert so_far.out == ""
        assert so_far.err.splitlines() == [
            "train: 40/100 steps, 1.67 steps/s, loss 0.25",
            "train: 60/100 steps, 1.67 steps/s, loss 0.25",
        ]
    assert capsys.readouterr().err == "train: 70/100 steps, 1.67 steps/s, loss 0.25\n"


def test_progress_ends_with_a_line_when_it_fails(capsys):
    with pytest.raises(ValueError), messages.Progress("draw", 4, "images") as progress:
        progress.update(1)
        raise ValueError
    assert capsys.readouterr().err.startswith("draw: 1/4 images")


# ---------------------------------------------------------------------------------------------------------------------
# Shares of a cluster


@pytest.mark.parametrize(
    ("resources", "num_workers", "flags", "share"),
    [
        ({"CPU": 8.0}, 1, {}, (8, 0)),
        ({"CPU": 8.0}, 3, {}, (2, 0)),
        ({"CPU": 2.0}, 2, {}, (1, 0)),
        ({"CPU": 2.0}, 3, {}, (0.66, 0)),
        ({"CPU": 8.0, "GPU": 2.0}, 2, {}, (4, 1)),
        ({"CPU": 8.0, "GPU": 1.0}, 2, {"gpus_per_worker": 0.5}, (4, 0.5)),
        ({"CPU": 8.0}, 2, {"cpus_per_worker": 1.5}, (1.5, 0)),
        ({"CPU": 8.0}, 8, {"cpus_per_worker": 1.0}, (1, 0)),
        ({}, 1, {}, (1, 0)),
    ],
)
def test_workers_share_the_cluster_evenly(resources, num_workers, flags, share):
    assert cluster.share_resources(resources, num_workers, **flags) == share


@pytest.mark.parametrize("cpus", [1.0, 2.0, 4.0, 16.0])
def test_an_even_share_always_fits(cpus):
    for num_workers in range(1, 64):
        share, _ = cluster.share_resources({"CPU": cpus}, num_workers)
        assert 0 < share * num_workers <= cpus
        assert share >= 0.5 * cpus / num_workers


@pytest.mark.parametrize(("cpus", "num_workers", "flags"), [(7.0, 25, {}), (3.3, 3, {"cpus_per_worker": 1.1})])
def test_a_share_that_fits_exactly_is_not_refused_for_rounding(cpus, num_workers, flags):
    cluster.share_resources({"CPU": cpus}, num_workers, **flags)


@pytest.mark.parametrize(
    ("resources", "num_workers", "flags", "said"),
    [
        ({"CPU": 8.0, "GPU": 1.0}, 2, {}, "2 of 1 GPUs each need 2, the cluster has 1"),
        ({"CPU": 8.0}, 1, {"gpus_per_worker": 1.0}, "1 of 1 GPUs each need 1, the cluster has 0"),
        ({"CPU": 4.0}, 3, {"cpus_per_worker": 2.0}, "3 of 2 CPUs each need 6, the cluster has 4"),
        ({"CPU": 4.0, "GPU": 1.0}, 3, {"gpus_per_worker": 0.5}, "3 of 0.5 GPUs each need 1.5, the cluster has 1"),
    ],
)
def test_what_the_cluster_can_never_hold_is_refused(resources, num_workers, flags, said):
    with pytest.raises(errors.BadInput, match=f"--num_workers {said}"):
        cluster.share_resources(resources, num_workers, **flags)


def test_stdout_holds_the_last_line_alone(tmp_path):
    """Ray prints there, in a thread of its own, what its processes die of."""
    script = tmp_path / "script.py"
    script.write_text(
        "import argparse\n"
        "from common import cli, messages\n"
        "def main(args):\n"
        "    print('a worker died')\n"
        "    messages.print_result(done=1)\n"
        "    print('another one')\n"
        "cli.run(main, argparse.Namespace(debug=False))\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stdout) == (0, '{"done": 1}\n')
    assert done.stderr == "a worker died\nanother one\n"
