"""The documents: each command, flag, variable, file, link, heading and function that they name exists."""

import argparse
import ast
import contextlib
import functools
import importlib
import io
import itertools
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest
from conftest import ROOT

from pipelines.families import FAMILIES
from pretraining.latents import SUPPORTED

SCRIPTS = ("copy_photos", "cache_model", "run_model", "train", "preprocess", "pretrain", "evaluate", "push_model")
SCRIPTS += ("export", "import_model")
PACKAGES = ("common", "pipelines", "training", "pretraining", "evaluation")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "recipes", "assets", "prompts", "models", "docs", "deploy", ".ci")
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
FOREIGN_FILES = {"train_custom_diffusion.py", "train_dreambooth.py", "train_dreambooth_lora.py"}  # of Diffusers
FOREIGN_VARIABLES = {"RAY_ADDRESS", "RAY_AUTH_MODE", "AWS_REGION"}
OPERATORS = {"&&", "||", "|", ";", "&", ">", ">>", "<", "(", ")"}


# ---------------------------------------------------------------------------------------------------------------------
# What a document says


def split_code(text):
    """Return (prose, lines of code blocks): a block is fenced or indented by four; continued lines are joined."""
    prose, code, is_fenced = [], [], False
    for line in text.splitlines():
        is_fence = line.lstrip().startswith("```")
        is_fenced ^= is_fence
        is_code = is_fence or is_fenced or line.startswith("    ")
        (code if is_code else prose).append(line)
        (prose if is_code else code).append("")
    return "\n".join(prose), re.sub(r"\\\n\s*", " ", "\n".join(code)).splitlines()


def read_spans(prose):
    """Return the inline code of a document; a line break in it is a blank."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def drop_foreign_flags(prose):
    """Return a document without the first column of its table of Diffusers' flags."""
    before, heading, after = prose.partition("\n## From Diffusers")
    return before + heading + re.sub(r"^\|[^|]*", "", after, flags=re.MULTILINE)


def split_commands(line):
    """Return the commands of a line of a shell as lists of words; [] for a line that is none."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands = [[]]
    try:
        for word in lexer:
            commands.append([]) if word in OPERATORS else commands[-1].append(word)
    except ValueError:  # an apostrophe in a tree of files
        return []
    return [command for command in commands if command]


def split_variables(words):
    """Return ({name: value} before a command or after export, the command)."""
    words = words[1:] if words[0] in ("export", "time") else words
    count = next((i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), len(words))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def make_anchor(heading):
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# ---------------------------------------------------------------------------------------------------------------------
# What there is


@functools.cache
def parser_of(script):
    """Return a script's parser."""

    class Caught(Exception):
        pass

    def catch(parser, *arguments):
        raise Caught(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", catch), pytest.raises(Caught) as caught:
        importlib.import_module(script).parse_args([])
    return caught.value.args[0]


def flags_of(script):
    """Return the flags of a script."""
    return set(parser_of(script)._option_string_actions)


@functools.cache
def flags_in(path):
    """Return ({flags}, {those that are required}) of a program by its source, without importing what it imports."""
    source = path.read_text()
    known, required = {"--help"} | ({"--debug"} if "add_shared_flags(" in source else set()), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            flags = {each.value for each in node.args if isinstance(each, ast.Constant) and each.value.startswith("--")}
            known |= flags
            if any(each.arg == "required" and each.value.value for each in node.keywords):
                required |= flags
    return known, required


@functools.cache
def all_flags():
    """Return the flags of all programs of the project, and those of pytest and pip that documents name."""
    programs = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "recipes").rglob("*.py"), ROOT / "tests/faults/long.py"]
    return set().union(*map(flags_of, SCRIPTS), *(flags_in(path)[0] for path in programs))


@functools.cache
def run_sh_variables():
    """Return the variables of run.sh that can be set from outside."""
    return set(re.findall(r"^ *([A-Z_]+)=\$\{\1:-", (ROOT / "run.sh").read_text(), re.MULTILINE))


@functools.cache
def file_names():
    """Return the bare names of all files of the project."""
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))
    return {path.name for path in (*files, *ROOT.glob("*.*"))}


def has_name(dotted):
    """Return whether a function, class, constant or module of the project is there."""
    root, *names = dotted.split(".")
    if root in ("benchmarks", "recipes"):
        return (ROOT / dotted.replace(".", "/")).with_suffix(".py").is_file()
    found = importlib.import_module(root)
    for i, name in enumerate(names):
        if not hasattr(found, name):
            with contextlib.suppress(ImportError):
                importlib.import_module(".".join([root, *names[: i + 1]]))
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Faults of a command


def check_parses(parse, words):
    """Yield what a parser says against some words."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parse(words)
    except SystemExit:
        yield said.getvalue().strip().splitlines()[-1]


def check_script(script, words, is_short):
    """Yield the faults of a script's command line.

    is_short: only its flags are looked at. One with `...` lacks flags, but those that it has must parse.
    """
    if is_short:
        yield from check_flags({word.split("=")[0] for word in words if word.startswith("--")}, flags_of(script))
    elif "..." in words:
        parser = parser_of(script)
        actions = [action for action in parser._actions if action.required]
        with contextlib.ExitStack() as stack:
            for action in actions:
                stack.enter_context(mock.patch.object(action, "required", False))
            yield from check_parses(parser.parse_args, [word for word in words if word != "..."])
    else:
        yield from check_parses(importlib.import_module(script).parse_args, words)


def check_flags(named, known):
    """Yield the flags that are not known."""
    yield from (f"no flag {flag}" for flag in sorted(named - known))


def check_program(path, words):
    """Yield the faults of the command line of another program of the project: flags unknown or left out."""
    if not path.is_file():
        yield "no such program"
        return
    known, required = flags_in(path)
    named = {word.split("=")[0] for word in words if word.startswith("--")}
    yield from check_flags(named, known)
    if "..." not in words:
        yield from (f"{flag} is required" for flag in sorted(required - named))


def check_run_sh(variables, words):
    """Yield the faults of a command line of run.sh."""
    yield from (f"no variable {name}" for name in sorted(variables.keys() - run_sh_variables() - FOREIGN_VARIABLES))
    for name, script in (("TRAIN_FLAGS", "train"), ("DRAW_FLAGS", "run_model")):
        yield from check_script(script, shlex.split(variables.get(name, "")), is_short=True)
    what, *rest = words or ["all"]
    if what not in ("all", "settings", "test", *"0123456"):
        yield f"no step {what}"
    if what != "test":
        return
    options = dict(itertools.pairwise(rest))
    files = [ROOT / word for word in rest if word.endswith(".py") and (ROOT / word).is_file()]
    names = [name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())]
    if "-k" in options and not any(options["-k"] in name for name in names):
        yield f"no test of {options['-k']}"
    if options.get("-m", "ray") not in ("", *re.findall(r'"(\w+): ', (ROOT / "pyproject.toml").read_text())):
        yield f"no mark {options['-m']}"


def check_command(words, is_short=False):
    """Yield the faults of a command; one that is not of this project has none. is_short: `python` may be left out."""
    variables, words = split_variables(words)
    if words[:1] == ["sbatch"] and "deploy/slurm.sh" in words:
        words = words[words.index("deploy/slurm.sh") + 1 :]
    if words[:1] == ["deploy/submit.sh"]:
        words = words[1:]
        if words and words[0].isdigit():
            for step in words:
                yield from check_run_sh(variables, [step])
            return
    if not words or words[0] == "./run.sh":
        yield from check_run_sh(variables, words[1:])
        return
    if Path(words[0]).name == "python":
        words = words[1:]
    elif not is_short or words[0] not in [f"{script}.py" for script in SCRIPTS]:
        return
    if words and words[0] == "-m" and words[1].split(".")[0] in ("benchmarks", "recipes"):
        yield from check_program((ROOT / words[1].replace(".", "/")).with_suffix(".py"), words[2:])
    elif words and words[0].endswith(".py"):
        script = words[0].removesuffix(".py")
        is_script = script in SCRIPTS
        yield from check_script(script, words[1:], is_short) if is_script else check_program(ROOT / words[0], words[1:])


# ---------------------------------------------------------------------------------------------------------------------
# Faults of a document


def check_path(word, is_span):
    """Yield a fault where a word names a file or folder of the project that is not there."""
    word = word.split("::")[0].rstrip(":,;.)").lstrip("(").removeprefix("./")
    if "/" in word and word.split("/")[0] in FOLDERS:
        if not (any(ROOT.glob(word)) if "*" in word else (ROOT / word).exists()):
            yield f"no file {word}"
    elif is_span and re.fullmatch(r"[\w-]+\.(py|sh|md|toml|jinja)", word) and word not in file_names() | FOREIGN_FILES:
        yield f"no file {word}"


def check_span(span):
    """Yield the faults of a piece of inline code."""
    for command in split_commands(span):
        yield from check_command(command, is_short=True)
    if span.startswith("--"):
        yield from check_flags({word.split("=")[0] for word in span.split() if word.startswith("--")}, all_flags())
    roots = (*SCRIPTS, *PACKAGES, "dataset", "utils", "benchmarks", "recipes")
    is_name = re.fullmatch(r"\w+(\.\w+)+", span) and span.split(".")[0] in roots and not span.endswith((".py", ".json"))
    if is_name and not has_name(span):
        yield f"no {span}"
    for word in span.split():
        yield from check_path(word, is_span=True)


def check_tables(prose):
    """Yield the flags in the first column of a table `flag of x.py` that x.py does not have."""
    script = None
    for line in prose.splitlines():
        if not line.startswith("|"):
            script = None
            continue
        first = line.split("|")[1]
        header = re.search(r"flag of `(\w+)\.py`", first)
        script = header[1] if header else script
        if script:
            yield from check_flags(set(re.findall(r"`(--[\w-]+)", first)), flags_of(script))


def check_links(prose, folder):
    """Yield the links and pictures of a document in `folder` that lead nowhere."""
    text = re.sub(r"`[^`]*`", "", prose)
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (folder / path).resolve() if path else None
        if file and not file.exists():
            yield f"no file {target}"
        elif anchor:
            headings = re.findall(r"^#+ (.+)", split_code(file.read_text() if file else prose)[0], re.MULTILINE)
            if anchor not in map(make_anchor, headings):
                yield f"no heading {target}"


def find_faults(text, folder=ROOT):
    """Return what a document in `folder` says that is not so."""
    prose, code = split_code(text)
    faults = [fault for line in code for command in split_commands(line) for fault in check_command(command)]
    faults += [fault for line in code for word in line.split() for fault in check_path(word, is_span=False)]
    faults += [fault for span in read_spans(drop_foreign_flags(prose)) for fault in check_span(span)]
    return [*faults, *check_tables(prose), *check_links(prose, folder)]


# ---------------------------------------------------------------------------------------------------------------------
# Tests


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_true(name):
    path = ROOT / name
    assert find_faults(path.read_text(), path.parent) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_commands_of_a_docstring_are_true(script):
    text = importlib.import_module(script).__doc__
    assert find_faults(text) == []
    commands = [command for line in split_code(text)[1] for command in split_commands(line)]
    assert len(commands) >= 2 and all(command[:2] == ["python", f"{script}.py"] for command in commands)


def test_the_table_of_families_is_what_the_code_says():
    section = (ROOT / "docs/training.md").read_text().split("\n## Model families\n")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    table = {re.sub(r"[\[(:].*", "", line[0].lstrip("[")).strip().rstrip("]"): line[1:] for line in lines}
    assert len(table) == len(lines)  # no row twice

    def numbers(row):
        return [[float(each) for each in cell.split(",")] for cell in table[row]]

    families, said = list(FAMILIES.values()), {True: "yes", False: "no"}
    assert table["all weights"] == [said[each.trains_whole] for each in families]
    assert table["pre-train"] == [said[each.pipeline in SUPPORTED] for each in families]
    assert table["as one file"] == ["yes" if each.webui else "the LoRA alone" for each in families]
    once = ["if not trained" if each.trainable else "yes" for each in families]  # shown in test_conditions.py
    assert table["texts encoded once, without the encoders in memory"] == once
    defaults = [said[each.trains_text_encoders] if each.trainable else "–" for each in families]
    assert table["text encoders trained by default"] == defaults
    assert numbers("learning rate") == [[each.lora_lr, each.lr][: 1 + each.trains_whole] for each in families]
    assert numbers("steps, guidance scale of images") == [
        [each.num_inference_steps, each.guidance_scale] for each in families
    ]


def test_commands_are_found():
    """Those that a newcomer copies, among others."""
    found = {}
    for name in DOCUMENTS:
        lines = split_code((ROOT / name).read_text())[1]
        found[name] = [split_variables(words)[1] for line in lines for words in split_commands(line)]
    assert [words for words in found["README.md"] if words[:1] == ["./run.sh"]] == [["./run.sh"]] * 2
    scripts = {words[1] for words in found["docs/training.md"] if words[:1] == ["python"]}
    assert scripts == {
        f"{name}.py" for name in ("cache_model", "run_model", "train", "evaluate", "export", "import_model")
    }
    assert sum(words[:2] == ["python", "pretrain.py"] for words in found["docs/pretraining.md"]) == 5
    long = next(words for words in found["docs/training.md"] if words[:2] == ["python", "train.py"])
    assert long[-2:] == ["--max_train_pairs", "800"]  # on the third line


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("    python cache_model.py --model_name m --model_dir d", None),
        ("    .venv/bin/python cache_model.py --model_name m --model_dir d  # a comment", None),
        ("    python cache_model.py --model_name m \\\n        --model_dirs d", "--model_dir"),
        ("```\npython cache_model.py --model_name m --model_dir d --wrong\n```", "--wrong"),
        ("    cd x && .venv/bin/python run_model.py --model_dir m --output_dir o", "--prompts"),
        ("    python run_model.py --model_dir m --output_dir o --prompts p --sampler ddim", "ddim"),
        ("    python train.py --model_dir m --num_workers 2 ...", None),
        ("    python train.py --model_dir m --num_workers two ...", "two"),
        ("    python train.py ... --number_workers 2", "--number_workers"),
        ("    python trainer.py --model_dir m", "no such program"),
        ("    python assets/contact_sheet.py --output o assets/subject", None),
        ("    python -m benchmarks.samplers --output FILE", None),
        ("    python -m benchmarks.samplers", "--output is required"),
        ("    python -m benchmarks.samplers --output FILE --number 3", "no flag --number"),
        ("    python -m benchmarks.sampler", "no such program"),
        ("    python -m recipes.emoji.pictures --cache_dir d", None),
        ("    DATA_PREFIX=rex ./run.sh 3", None),
        ("    PREFIX=rex ./run.sh", "no variable PREFIX"),
        ("    ./run.sh 7", "no step 7"),
        ("    CLASS_NAME=dog deploy/submit.sh 2 3", None),
        ("    CLASS=dog deploy/submit.sh 2", "no variable CLASS"),
        ("    deploy/submit.sh 2 7", "no step 7"),
        ("    deploy/submit.sh python train.py ... --number_workers 2", "--number_workers"),
        ("    sbatch --nodes=2 deploy/slurm.sh .venv/bin/python train.py ... --number_workers 2", "--number_workers"),
        ('    export TRAIN_FLAGS="--use_8bit_adam --use_4bit_adam"', "no flag --use_4bit_adam"),
        ("    ./run.sh test -m faults", None),
        ("    ./run.sh test -m fault", "no mark fault"),
        ("`./run.sh test tests/test_train.py -k bit_equal`", None),
        ("`./run.sh test tests/test_train.py -k bit_unequal`", "no test of bit_unequal"),
        ("`./run.sh test tests/test_trains.py`", "no file tests/test_trains.py"),
        ("`train.py --lr`, `python train.py\n--num_workers N`", None),
        ("`train.py --learn`", "no flag --learn"),
        ("`--lr`, `--no-random_flip`, `--fail_under subject_clip=0.6`", None),
        ("`--lrs`", "no flag --lrs"),
        ("| flag of `run_model.py` | x |\n|---|---|\n| `--sampler`, `--lr` | x |", "no flag --lr"),
        ("`common/folders.py`, `common/`, `folders.py`, `train_dreambooth.py`, `data/any.py`", None),
        ("`common/folder.py`", "no file common/folder.py"),
        ("`folder.py`", "no file folder.py"),
        ("    commons/  a tree, and the tree's leaves\n    common/images.py/x  y", "no file common/images.py/x"),
        ("    cp assets/subject/*.png data", None),
        ("    cp assets/subject/*.jpg data", "no file"),
        ("`common.images.read_image`, `pipelines.posteriors.PosteriorEncoder`, `utils.row_rng`, `vae.config`", None),
        ("`common.images.read_picture`", "no common.images.read_picture"),
        ("`common.pictures.read_image`", "no common.pictures.read_image"),
        ("`training.optimizer.Optimizer.leap`", "no training.optimizer.Optimizer.leap"),
        ("`benchmarks.speeds`", "no benchmarks.speeds"),
        ("# One two: `train.py`?\n\n[a](#one-two-trainpy) [b](LICENSE) [c](https://x.org/y)", None),
        ("# One\n\n[a](#two)", "no heading #two"),
        ("[a](README.md#no-such-heading)", "no heading README.md#no-such-heading"),
        ("![a](assets/none.png)", "no file assets/none.png"),
        ('<img src="assets/none.png">', "no file assets/none.png"),
    ],
)
def test_a_fault_is_found(text, fault):
    faults = find_faults(text)
    assert len(faults) == bool(fault), faults
    assert not fault or fault in faults[0]
