"""Captions of single images, which take the place of their folder's prompt or follow it.

A caption is the `text` of the image's line in metadata.jsonl, as Hugging Face's ImageFolder has it, or else the content
of NAME.txt beside NAME.jpg.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import BadInput, one_line
from common.images import CAPTION_SUFFIX, ImageFolder
from common.storage import split
from pipelines.image_folder import METADATA
from pipelines.prompts import name_word, words_of

MODES = ("none", "own", "after")


class Caption(NamedTuple):
    """A caption, and the file that holds it."""

    text: str
    file: Path


def read_captions(found: ImageFolder) -> dict[str, Caption]:
    """Return the captions of a folder's images, by path or URI; images without one are left out.

    Lines of a text file become one. Raises BadInput that names a file that is empty, not UTF-8, or not JSON lines.
    """
    folder = next(iter(found.files.values())).parent
    listed = _read_metadata(folder / METADATA)
    captions = {}
    for image, path in found.files.items():
        beside = path.with_suffix(CAPTION_SUFFIX)
        if path.name in listed:
            captions[image] = _caption(listed[path.name], folder / METADATA, f"the text of {path.name}")
        elif beside.is_file():
            captions[image] = _caption(_read_text(beside), beside, "the file")
    return captions


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text: save it as UTF-8, or pass --captions none") from None


def _read_metadata(path: Path) -> dict[str, Any]:
    """Return {file name: text} of the lines of metadata.jsonl that have a text; there may be no such file."""
    texts = {}
    lines = _read_text(path).split("\n") if path.is_file() else []  # str.splitlines would split JSON at U+2028
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name, text = row["file_name"], row.get("text")
        except (ValueError, KeyError, TypeError, AttributeError):
            wanted = 'a JSON object with "file_name" and "text"'
            raise BadInput(f"{path}: line {number} is not {wanted}: correct it, or pass --captions none") from None
        if text is not None:
            texts[name] = text
    return texts


def _caption(text: Any, file: Path, what: str) -> Caption:
    joined = " ".join(line.strip() for line in text.splitlines()).strip() if isinstance(text, str) else ""
    if not joined:
        raise BadInput(f"{file}: {what} is no caption: write one, remove it, or pass --captions none")
    return Caption(joined, file)


def check_captions(captions: dict[str, Caption], holds: Sequence[str], lacks: Iterable[Sequence[str]] = ()) -> None:
    """Raise BadInput that names the file and the word if captions do not fit the identifiers.

    holds: words of the identifier that captions have to have; lacks: those of identifiers that they must not have.
    """
    for image, (text, file) in captions.items():
        words, shown = words_of(text), one_line(repr(text), 100)
        name = "" if file.suffix == CAPTION_SUFFIX else f" of {split(image)[1]}"
        for word in holds:
            if word not in words:
                remedy = "add it, or pass --captions after, which puts the prompt before captions, or --captions none"
                raise BadInput(f"{file}: the caption{name} {shown} lacks {name_word(word, holds)}: {remedy}")
        for word, identifier in ((word, each) for each in lacks for word in each):
            if word in words:
                what = name_word(word, identifier)
                raise BadInput(f"{file}: the caption{name} {shown} contains {what}: remove it")


def text_of(prompt: str, caption: Caption | None, mode: str) -> str:
    """Return the text that an image is trained with; mode: "none", "own", or "after" for "PROMPT, caption"."""
    if mode == "none" or caption is None or caption.text == prompt:  # run_model.py writes the prompt as the text
        return prompt
    return caption.text if mode == "own" else f"{prompt}, {caption.text}"
