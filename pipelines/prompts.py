"""Read files of prompts; check the identifier that names a subject."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from common.cli import check_text
from common.errors import BadInput


def read_prompts_file(path: str | Path) -> list[str]:
    """Return the unique prompts in the file of --prompts_file, one per line; raise BadInput if it is unreadable."""
    try:
        return unique_prompts(Path(path).read_text(encoding="utf-8-sig").split("\n"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--prompts_file {path}: {error}") from None


def unique_prompts(prompts: Iterable[str]) -> list[str]:
    """Return prompts in order, without surrounding whitespace, empty prompts and repetitions."""
    return list(dict.fromkeys(prompt.strip() for prompt in prompts if prompt.strip()))


def words_of(prompt: str) -> list[str]:
    """Return the words of a prompt in lower case, without punctuation around them."""
    return [word.strip(".,;:!?\"'()") for word in prompt.lower().split()]


def name_word(word: str, identifier: Sequence[str]) -> str:
    """Return what messages call a word of an identifier."""
    whole = " ".join(identifier)
    return f"the identifier {word!r}" if whole == word else f"{word!r} of the identifier {whole!r} (see unique_token)"


def check_prompts(
    instance_prompt: str,
    class_prompt: str | None = None,
    unique_token: str | None = None,
    names: tuple[str, str] = ("--instance_prompt", "--class_prompt"),
) -> tuple[str, ...]:
    """Return the words of the identifier; raise BadInput unless the instance prompt has them and the class prompt none.

    unique_token: the identifier; default: the words of the instance prompt that the class prompt lacks. Without both,
    the identifier is unknown, (). names: what messages call the two prompts.
    """
    of_instance, of_class = names
    for name, text in ((of_instance, instance_prompt), (of_class, class_prompt or "")):
        check_text(name, text)
    instance, other, token = (words_of(text or "") for text in (instance_prompt, class_prompt, unique_token))
    token = token or [word for word in instance if word not in other]
    if not token:
        raise BadInput(f"{of_instance} has no word that {of_class} lacks: add an identifier such as unqtkn")
    for word in token:
        if word not in instance:
            raise BadInput(f"{of_instance} {instance_prompt!r} lacks the identifier {word!r}: add it")
        if word in other:
            raise BadInput(f"{of_class} {class_prompt!r} contains the identifier {word!r}: remove it")
    return tuple(token) if class_prompt or unique_token else ()
