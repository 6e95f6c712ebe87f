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

    @property
    def halves(self) -> tuple[list[str], list[str]]:
        """The photos and the class images, without their texts."""
        return [image for image, _ in self.photos], [image for image, _ in self.class_images]

    @property
    def images(self) -> set[str]:
        """All images."""
        return {image for half in self.halves for image in half}

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

    images: by location of the folder. captions: by path or URI of the image; mode: see captions.text_of.
    """

    subjects: list[Subject]
    images: dict[str, ImageFolder]
    captions: dict[str, Caption]
    mode: str

    @property
    def pairs_per_epoch(self) -> int:
        """Number of pairs in an epoch, if no image turns out to be bad."""
        return len(self.subjects) * max(len(found.files) for found in self.images.values())

    def texts(self, folder: PromptedFolder, images: Iterable[str]) -> Texts:
        """Return images of a folder with the text that each is trained with."""
        return [(image, text_of(folder.prompt, self.captions.get(image), self.mode)) for image in images]

    def settings(self) -> dict[str, Any]:
        """Return the prompts and the digests of the images, lists of them for several subjects.

        With captions, a digest of the texts that they change too.
        """
        digests = {location: folders.digest_files(found.files.values()) for location, found in self.images.items()}
        settings: dict[str, Any] = {}
        captions = []
        for subject in self.subjects:
            for name, folder in (("instance", subject.photos), ("class", subject.class_images)):
                settings.setdefault(f"{name}_prompt", []).append(folder and folder.prompt)
                settings.setdefault(f"{name}_images_dir", []).append(folder and digests[folder.location])
            for folder in subject.folders:
                texts = self.texts(folder, self.images[folder.location].files)
                captions.append({split(image)[1]: text for image, text in texts if text != folder.prompt})
        if len(self.subjects) == 1:
            settings = {name: values[0] for name, values in settings.items()}
        return settings | ({"captions": folders.digest_values(captions)} if any(captions) else {})

    def check(self, skip_bad_images: bool, pairs_per_step: int) -> Material:
        """Decode each image once and return the usable ones; raise BadInput as check_images does."""
        usable = {location: check_images(found, skip_bad_images) for location, found in self.images.items()}
        left_out = [image for at, found in self.images.items() for image in found.files if image not in usable[at]]
        photos = [self.texts(each.photos, usable[each.photos.location]) for each in self.subjects]
        classes = [each.class_images for each in self.subjects if each.class_images]
        class_images = [self.texts(folder, usable[folder.location]) for folder in classes]
        needed = -(-pairs_per_step // len(self.subjects))
        for folder, texts in zip(classes, class_images, strict=True):
            if len(texts) < needed:
                holds = f"{folder.flag} holds {len(texts)} images, a step takes {needed} pairs"
                say(f"warning: {holds}: some images are used several times in a step")
        return Material(mix(photos), mix(class_images), [split(image)[1] for image in left_out])


def mix(parts: Sequence[Sequence[T]]) -> list[T]:
    """Return the items of several parts in turn, as many of each: shorter parts begin again."""
    longest = max(map(len, parts), default=0)
    return [part[place % len(part)] for place in range(longest) for part in parts]


def find_folders(subjects: list[Subject], mode: str | None) -> Folders:
    """Find the images and captions of all subjects; print how many captions there are, if they are used.

    mode: see captions.text_of; None: "own" if a photo has a caption, else "none". Raises BadInput for a folder without
    images, and for captions that cannot be read or that do not fit the identifiers.
    """
    images: dict[str, ImageFolder] = {}
    for folder in (folder for subject in subjects for folder in subject.folders):
        if folder.location not in images:
            images[folder.location] = find_images(folder.location, folder.flag)
    photos = {subject.photos.location: images[subject.photos.location] for subject in subjects}
    classes = {location: found for location, found in images.items() if location not in photos}
    captions: dict[str, Caption] = {}
    if mode != "none":
        captions = _read_all(photos)
        mode = mode or ("own" if captions else "none")
    if mode != "none":
        captions |= _read_all(classes)
        _check(subjects, images, captions, mode)
        groups = {"photos": photos, "class images": classes}
        counted = [_count(found, captions, what) for what, found in groups.items() if found]
        use = "replaces" if mode == "own" else "follows"
        say(f"captions: {' and '.join(counted)} have one, which {use} the prompt (--captions {mode})")
    return Folders(subjects, images, captions, mode)


def _read_all(images: dict[str, ImageFolder]) -> dict[str, Caption]:
    return {image: caption for found in images.values() for image, caption in read_captions(found).items()}


def _count(group: dict[str, ImageFolder], captions: dict[str, Caption], what: str) -> str:
    images = [image for found in group.values() for image in found.files]
    return f"{sum(image in captions for image in images)} of {len(images)} {what}"


def _check(subjects: list[Subject], images: dict[str, ImageFolder], captions: dict[str, Caption], mode: str) -> None:
    """Raise BadInput if a caption lacks the identifier that it needs, or if one of a class image has any."""

    def of(folder: PromptedFolder) -> dict[str, Caption]:
        return {image: captions[image] for image in images[folder.location].files if image in captions}

    for subject in subjects:
        if subject.class_images:
            check_captions(of(subject.class_images), (), [each.identifier for each in subjects])
        if mode == "own" and of(subject.photos) and not subject.identifier:
            what = "that each caption of a photo contains the identifier"
            raise BadInput(f"--captions own checks {what}: give it as --unique_token, or pass --captions none")
        if mode == "own":
            check_captions(of(subject.photos), subject.identifier)
