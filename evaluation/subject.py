"""The prompts of an evaluation: how they name the subject and its class, and templates with {} for either name."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from common.errors import BadInput, one_line
from common.targets import join_name
from pipelines.prompts import check_prompts, read_prompts_file
from pipelines.subjects import read_subjects


@dataclass(frozen=True)
class Prompts:
    """The prompts to evaluate. subject: "unqtkn dog"; class_name: "dog"; templates: prompts with {} for either."""

    subject: str
    class_name: str
    templates: tuple[str, ...]

    @property
    def of_subject(self) -> list[str]:
        """The templates with the name of the subject."""
        return [template.replace("{}", self.subject) for template in self.templates]

    @property
    def of_class(self) -> list[str]:
        """The templates with the name of the class."""
        return [template.replace("{}", self.class_name) for template in self.templates]


def find_subject(
    instance_prompt: str, class_prompt: str, unique_token: str | None = None, class_name: str | None = None
) -> tuple[str, str]:
    """Return the names of the subject and of its class in the prompts, for example ("unqtkn dog", "dog").

    The identifier is found as in check_prompts. The class name is the words that follow it and that the class prompt
    contains too. Raises BadInput if either cannot be found.
    """
    check_prompts(instance_prompt, class_prompt, unique_token)
    words = instance_prompt.split()
    plain, others, token = (
        [word.strip(".,;:!?\"'()") for word in text.lower().split()]
        for text in (instance_prompt, class_prompt, unique_token or "")
    )
    places = [i for i, word in enumerate(plain) if word in token or (not token and word not in others)]
    first, end = places[0], places[-1] + 1
    if end - first != len(places):
        differing = ", ".join(words[place] for place in places)
        raise BadInput(
            f"--instance_prompt has several words that --class_prompt lacks ({differing}): give the identifier with "
            "--unique_token"
        )
    last = next((i for i in range(end, len(words)) if plain[i] not in others), len(words))
    class_name = class_name or " ".join(words[end:last]).strip(".,;:!?\"'()")
    if not class_name:
        raise BadInput(f"--instance_prompt {instance_prompt!r} names no class after the identifier: give --class_name")
    return f"{' '.join(words[first:end])} {class_name}", class_name


def read_templates(prompts_file: str | Path | None, instance_prompt: str, subject: str) -> list[str]:
    """Return the prompts of a file with {} for the subject, without duplicates, or the instance prompt if it is None.

    Raises BadInput if the file cannot be read, or if a prompt does not name the subject.
    """
    if not prompts_file:
        if subject not in instance_prompt:
            raise BadInput(f"--instance_prompt {instance_prompt!r} lacks {subject!r}: give --prompts_file")
        return [instance_prompt.replace(subject, "{}", 1)]
    templates = read_prompts_file(prompts_file)
    if not templates:
        raise BadInput(f"--prompts_file {prompts_file} holds no prompts: write one per line")
    for template in templates:
        if "{}" not in template:
            raise BadInput(f"--prompts_file {prompts_file}: {one_line(template, 100)!r} has no {{}} for the subject")
    return templates


def split_subjects(args: argparse.Namespace) -> dict[str, argparse.Namespace]:
    """Return {subject: the flags of its evaluation}, of the flags of one subject or of the subjects of --concepts.

    The flags have `other_photos`, {other subject: (folder of its photos, what messages call the folder)}. Several
    subjects have a folder each in --output_dir, subject-1 and so on.
    """
    if not args.concepts:
        args.other_photos = {}
        prompts = args.instance_prompt, args.class_prompt, args.unique_token, args.class_name
        return {find_subject(*prompts)[0]: args}
    subjects, found = read_subjects(args, args.base_model_dir), {}
    for number, subject in enumerate(subjects, start=1):
        assert subject.class_images
        prompts = subject.photos.prompt, subject.class_images.prompt, " ".join(subject.identifier)
        try:
            name, _ = find_subject(*prompts, args.class_name)
        except BadInput as error:
            raise BadInput(f"--concepts {args.concepts}, subject {number}: {error}") from None
        values = dict(zip(("instance_prompt", "class_prompt", "unique_token"), prompts, strict=True))
        values |= {"instance_images_dir": subject.photos.location, "class_images_dir": subject.class_images.location}
        if len(subjects) > 1:
            values["output_dir"] = join_name(args.output_dir, f"subject-{number}")
        found[name] = argparse.Namespace(**{**vars(args), **values})
    photos = {name: subject.photos for name, subject in zip(found, subjects, strict=True)}
    for name, flags in found.items():
        flags.other_photos = {other: (each.location, each.flag) for other, each in photos.items() if other != name}
    return found
