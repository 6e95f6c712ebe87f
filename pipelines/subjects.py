"""Subjects to learn, each with its class: by flags, or by the file of --concepts."""

import argparse
import itertools
import json
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import BadInput
from common.storage import absolute, is_remote
from pipelines.prompts import check_prompts, name_word, words_of

FLAGS = ("instance_images_dir", "instance_prompt", "class_images_dir", "class_prompt", "unique_token")
REQUIRED, OPTIONAL = ("images", "prompt", "class_prompt"), ("class_images", "unique_token")
OF_DIFFUSERS = {"instance_data_dir": "images", "instance_prompt": "prompt", "class_data_dir": "class_images"}
NUM_CLASS_IMAGES = 200  # of the command that draws them


class PromptedFolder(NamedTuple):
    """A folder of images by path or URI, and their prompt. flag: what messages call the folder."""

    location: str
    prompt: str
    flag: str


@dataclass(frozen=True)
class Subject:
    """A subject and its class. class_images: None without prior preservation; identifier: its words, () if unknown."""

    photos: PromptedFolder
    class_images: PromptedFolder | None
    identifier: tuple[str, ...]

    @property
    def folders(self) -> list[PromptedFolder]:
        """The folder of the photos and, if there is one, that of the class images."""
        return [self.photos, *([self.class_images] if self.class_images else [])]


def add_concepts_flag(group: argparse._ArgumentGroup) -> None:
    """Add --concepts."""
    concepts = "file of several subjects, TOML or JSON, in place of the flags of one: --instance_*, --class_*, "
    group.add_argument("--concepts", metavar="FILE", help=f"{concepts}--unique_token")


def check_subject_flags(parser: argparse.ArgumentParser, args: argparse.Namespace, required: Sequence[str]) -> None:
    """End with a usage error unless the flags name one subject, with those that are required, or --concepts several."""
    given = [name for name in FLAGS if getattr(args, name) is not None]
    missing = [f"--{name}" for name in required if name not in given]
    if args.concepts and given:
        parser.error(f"--{given[0]} and --concepts both name subjects: use only one of them")
    if not args.concepts and missing:
        parser.error(f"the following arguments are required: {', '.join(missing)}, or --concepts")


def read_subjects(args: argparse.Namespace, model_dir: str | None) -> list[Subject]:
    """Return the subject of the flags, or the subjects of --concepts; raise BadInput if their prompts are alike.

    model_dir: the model that draws class images; None if there are to be none.
    """
    if args.concepts:
        return _read_concepts(args.concepts, model_dir)
    identifier = check_prompts(args.instance_prompt, args.class_prompt, args.unique_token)
    photos = PromptedFolder(args.instance_images_dir, args.instance_prompt, "--instance_images_dir")
    class_images = PromptedFolder(args.class_images_dir, args.class_prompt, "--class_images_dir")
    return [Subject(photos, class_images if model_dir else None, identifier)]


# ---------------------------------------------------------------------------------------------------------------------
# The file of --concepts


def _read_concepts(path: str, model_dir: str | None) -> list[Subject]:
    """Return the subjects of a file; model_dir: the model that draws class images, None if there are to be none."""
    rows, subjects = _read_rows(path), []
    for number, row in enumerate(rows, start=1):
        place = f"--concepts {path}, subject {number}"
        _check_row(row, place)
        try:
            prompts = row["prompt"], row["class_prompt"], row.get("unique_token")
            identifier = check_prompts(*prompts, names=("prompt", "class_prompt"))
        except BadInput as error:
            raise BadInput(f"{place}: {error}") from None
        if model_dir and "class_images" not in row:
            raise BadInput(f"{place} has no class images: {_how_to_draw(path, number, row['class_prompt'], model_dir)}")
        photos = PromptedFolder(_locate(path, row["images"]), row["prompt"], f"{place}: images")
        class_images = None
        if model_dir:
            location = _locate(path, row["class_images"])
            class_images = PromptedFolder(location, row["class_prompt"], f"{place}: class_images")
        subjects.append(Subject(photos, class_images, identifier))
    _check_identifiers(path, rows, [subject.identifier for subject in subjects])
    return subjects


def _read_rows(path: str) -> list[Any]:
    """Return the tables [[subject]] of a TOML file, or the objects of a JSON list with the names of `REQUIRED`."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
        content = {"subject": json.loads(text)} if path.endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError) as error:  # of the decoders too
        raise BadInput(f"--concepts {path}: {error}") from None
    rows = content.pop("subject", [])
    if content or not rows or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        wanted = "a list of objects" if path.endswith(".json") else "tables [[subject]] alone"
        raise BadInput(f"--concepts {path} must hold {wanted}, one for each subject: correct it")
    return [{OF_DIFFUSERS.get(name, name): value for name, value in row.items()} for row in rows]


def _check_row(row: dict[str, Any], place: str) -> None:
    unknown = [name for name in row if name not in REQUIRED + OPTIONAL]
    if unknown:
        raise BadInput(f"{place} has the unknown key {unknown[0]!r}: the keys are {', '.join(REQUIRED + OPTIONAL)}")
    for name in REQUIRED:
        if name not in row:
            raise BadInput(f"{place} has no {name}: add it")
    for name, value in row.items():
        if not isinstance(value, str) or not value.strip():
            raise BadInput(f"{place}: {name} must be a text that is not empty, not {value!r}")


def _locate(path: str, location: str) -> str:
    """Return a folder of the file as an absolute path, relative ones being relative to the file, or as its URI."""
    return location if is_remote(location) else absolute(Path(path).resolve().parent / Path(location).expanduser())


def _how_to_draw(path: str, number: int, class_prompt: str, model_dir: str) -> str:
    folder = f"class-images-{number}"
    words = ["python", "run_model.py", "--model_dir", model_dir, "--prompts", class_prompt]
    words += ["--num_samples_per_prompt", str(NUM_CLASS_IMAGES), "--output_dir", _locate(path, folder)]
    entry = f'"class_data_dir": "{folder}"' if path.endswith(".json") else f'class_images = "{folder}"'
    return f"run {shlex.join(words)} and add {entry}"


def _check_identifiers(path: str, rows: list[dict[str, Any]], identifiers: list[tuple[str, ...]]) -> None:
    """Raise BadInput if a prompt of a subject contains a word of another subject's identifier."""
    for (own, row), (other, identifier) in itertools.product(enumerate(rows, 1), enumerate(identifiers, 1)):
        for name, word in itertools.product(("prompt", "class_prompt"), identifier):
            if own != other and word in words_of(row[name]):
                raise BadInput(
                    f"--concepts {path}: the {name} of subject {own}, {row[name]!r}, contains "
                    f"{name_word(word, identifier)} of subject {other}: each subject needs a word of its own"
                )
