"""What train.py trains on: the photos and class images of its subjects, and the text of each image."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from common import folders
from common.errors import BadInput
from common.images import ImageFolder, check_images, find_images
from common.messages import say
from common.storage import split
from pipelines.captions import Caption, check_captions, read_captions, text_of
from pipelines.subjects import PromptedFolder, Subject

T = TypeVar("T")
Texts = list[tuple[str, str]]  # (path or URI of an image, its text)


@dataclass(frozen=True)
class Material:
    """The usable images of a run and their texts, in the order of dataset.Pairs; skipped_images: names of others."""

    photos: Texts
    class_images: Texts
    skipped_images: list[str]

    @functools.cached_property
    def texts(self) -> list[str]:
        """The texts, each once."""
        return list(dict.fromkeys(text for _, text in self.photos + self.class_images))

    @property
    def text_of(self) -> list[int]:
        """The number of the text of each photo, then of each class image."""
        numbers = {text: number for number, text in enumerate(self.texts)}
        return [numbers[text] for _, text in self.photos + self.class_images]


@dataclass(frozen=True)
class Folders:
    """The folders of all subjects, none of whose images was opened.

    images: by location of the folder. captions: by path or URI of the image; how: see captions.text_of.
    """

    subjects: list[Subject]
    images: dict[str, ImageFolder]
    captions: dict[str, Caption]
    how: str

    @property
    def pairs_per_epoch(self) -> int:
        """Number of pairs in an epoch, if no image turns out to be bad."""
        return len(self.subjects) * max(len(found.files) for found in self.images.values())

    def texts(self, folder: PromptedFolder, images: Iterable[str]) -> Texts:
        """Return images of a folder with the text that each is trained with."""
        return [(image, text_of(folder.prompt, self.captions.get(image), self.how)) for image in images]

    def settings(self) -> dict[str, Any]:
        """Return the prompts and the digests of the images; with captions, the digest of the texts that they change."""
        digests = {location: folders.digest_files(found.files.values()) for location, found in self.images.items()}
        settings: dict[str, list] = {}
        captions = []
        for subject in self.subjects:
            for name, folder in (("instance", subject.photos), ("class", subject.class_images)):
                settings.setdefault(f"{name}_prompt", []).append(folder and folder.prompt)
                settings.setdefault(f"{name}_images_dir", []).append(folder and digests[folder.location])
            for folder in subject.folders:
                texts = self.texts(folder, self.images[folder.location].files)
                captions.append({split(image)[1]: text for image, text in texts if text != folder.prompt})
        alone = {name: values[0] for name, values in settings.items()}
        return alone | ({"captions": folders.digest_values(captions)} if any(captions) else {})

    def check(self, skip_bad_images: bool, pairs_per_step: int) -> Material:
        """Decode each image once and return the usable ones; raise BadInput as check_images does."""
        usable = {location: check_images(found, skip_bad_images) for location, found in self.images.items()}
        left_out = [image for at, found in self.images.items() for image in found.files if image not in usable[at]]
        halves: tuple[list[Texts], list[Texts]] = ([], [])
        for subject in self.subjects:
            for half, folder in zip(halves, subject.folders, strict=False):
                half.append(self.texts(folder, usable[folder.location]))
        needed = -(-pairs_per_step // len(self.subjects))
        for subject, texts in zip(self.subjects, halves[1], strict=False):
            if subject.class_images and len(texts) < needed:
                holds = f"{subject.class_images.flag} holds {len(texts)} images, a step takes {needed} pairs"
                say(f"warning: {holds}: some images are used several times in a step")
        return Material(mix(halves[0]), mix(halves[1]), [split(image)[1] for image in left_out])


def mix(parts: Sequence[Sequence[T]]) -> list[T]:
    """Return the items of several parts in turn, as many of each: shorter parts begin again."""
    longest = max(map(len, parts), default=0)
    return [part[place % len(part)] for place in range(longest) for part in parts]


def find_folders(subjects: list[Subject], how: str | None) -> Folders:
    """Find the images and captions of all subjects; print how many captions there are, if they are used.

    how: see captions.text_of; None: "own" if a photo has a caption, else "none". Raises BadInput for a folder without
    images, and for captions that cannot be read or that do not fit the identifiers.
    """
    images: dict[str, ImageFolder] = {}
    for folder in (folder for subject in subjects for folder in subject.folders):
        if folder.location not in images:
            images[folder.location] = find_images(folder.location, folder.flag)
    captions: dict[str, Caption] = {}
    if how != "none":
        for subject in subjects:
            captions |= read_captions(images[subject.photos.location])
        how = how or ("own" if captions else "none")
    if how != "none":
        captions |= _check_captions(subjects, images, captions, how)
    return Folders(subjects, images, captions, how)


def _check_captions(
    subjects: list[Subject], images: dict[str, ImageFolder], of_photos: dict[str, Caption], how: str
) -> dict[str, Caption]:
    """Check the captions of photos, and return those of the class images; print how many there are of each."""
    classes = dict.fromkeys(subject.class_images.location for subject in subjects if subject.class_images)
    of_classes = {}
    for location in classes:
        of_classes |= read_captions(images[location])
    check_captions(of_classes, (), [subject.identifier for subject in subjects])
    for subject in subjects if how == "own" else ():
        own = {image: of_photos[image] for image in images[subject.photos.location].files if image in of_photos}
        if own and not subject.identifier:
            raise BadInput(
                "--captions own checks that each caption of a photo contains the identifier: give it as --unique_token"
            )
        check_captions(own, subject.identifier)
    of = f"{len(of_photos)} of {sum(len(found.files) for each, found in images.items() if each not in classes)} photos"
    if classes:
        of += f" and {len(of_classes)} of {sum(len(images[each].files) for each in classes)} class images"
    use = "replace the prompt" if how == "own" else "follow the prompt"
    say(f"captions of {of} {use} (--captions {how})")
    return of_classes
