"""Subjects to learn, each with its class."""

import argparse
from dataclasses import dataclass
from typing import NamedTuple

from pipelines.prompts import check_prompts


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


def read_subjects(args: argparse.Namespace) -> list[Subject]:
    """Return the subject of the flags --instance_*, --class_* and --unique_token; raise BadInput as check_prompts."""
    identifier = check_prompts(args.instance_prompt, args.class_prompt, args.unique_token)
    photos = PromptedFolder(args.instance_images_dir, args.instance_prompt, "--instance_images_dir")
    class_images = PromptedFolder(args.class_images_dir, args.class_prompt, "--class_images_dir")
    return [Subject(photos, class_images if args.class_images_dir else None, identifier)]
