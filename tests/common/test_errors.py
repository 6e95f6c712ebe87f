"""Errors as one line and an exit code, also those that Ray wraps; remedies for a full memory."""

import errno
import importlib
import pickle
import signal

import pytest
from conftest import SCRIPTS, raiser, run_main

from common import cli, errors

pytestmark = pytest.mark.usefixtures("as_script")


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
    assert run_main(raiser(error)) == code
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
    assert run_main(raiser(errors.BadInput("several\n  lines\n" + "long " * 1000))) == 3
    line = capsys.readouterr().err
    assert line.startswith("script.py: several lines long") and line.count("\n") == 1 and len(line) < 1000
    assert line.endswith("...\n")


def test_an_unknown_error_shows_its_last_line(capsys):
    assert run_main(raiser(RuntimeError("Traceback ...\n  File x\nthe point of it"))) == 1
    assert "RuntimeError: the point of it (--debug shows the traceback)" in capsys.readouterr().err


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
    ("train", f"{TRAIN} --lora 4 --use_8bit_adam --gradient_checkpointing --no-train_text_encoder",
     "try --base_bits 4, then a smaller --resolution"),
    ("pretrain", PRETRAIN, "try --use_8bit_adam, then --gradient_checkpointing, then a smaller "
     f"--batch_size_per_worker {REST}, then --strategy fsdp, then a smaller --resolution"),
    ("pretrain", f"{PRETRAIN} --use_8bit_adam --gradient_checkpointing --batch_size_per_worker 1",
     "try a smaller --resolution"),
    ("pretrain", f"{PRETRAIN} --strategy fsdp --gradient_checkpointing --batch_size_per_worker 1",
     "try a smaller --resolution"),
    ("pretrain", f"{PRETRAIN} --online --gradient_checkpointing --batch_size_per_worker 1 --num_workers 1",
     "try --use_8bit_adam, then a smaller --encoding_batch_size, then a smaller --resolution"),
    ("run_model", DRAW, "try a smaller --batch_size, then smaller --height and --width"),
    ("run_model", f"{DRAW} --batch_size 1", "try smaller --height and --width"),
    ("evaluate", EVALUATE, "try a smaller --batch_size"),
    ("evaluate", f"{EVALUATE} --batch_size 1", "use a machine or a GPU with more memory"),
    ("preprocess", ENCODE, "try a smaller --encoding_batch_size"),
    ("preprocess", f"{ENCODE} --encoding_batch_size 1", "use a machine or a GPU with more memory"),
    ("push_model", "--model_dir m --push_to_hub r", "use a machine or a GPU with more memory"),
    ("cache_model", "--model_name n --model_dir m", "use a machine or a GPU with more memory"),
    ("copy_photos", "--instance_images_dir i --output_dir o", "use a machine or a GPU with more memory"),
    ("export", "--model_dir m --output_file o.safetensors", "use a machine or a GPU with more memory"),
    ("import_model", "--from_file f --model_dir m --output_dir o", "use a machine or a GPU with more memory"),
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
