"""Tokenizers: check that a vocabulary fits the text encoder, tokenize prompts, warn of truncated ones."""

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import BadInput, CheckFailed, one_line
from common.messages import say
from pipelines.configs import Config, read_config, read_index, read_json_file

VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("vocab.txt",), ("*.model",))  # one is needed
WITHOUT_VOCABULARY = ("ByT5Tokenizer",)  # its tokens are bytes
LEAST_TOKENS = 0.9  # of the text encoder's embeddings; some models pad them, T5 from 32,100 tokens to 32,128


def find_vocabulary(folder: str | Path) -> list[Path]:
    """Return the vocabulary files of a tokenizer; raise BadInput if they are missing.

    From a folder without them transformers 5 makes a tokenizer of two tokens, for which all texts are equal.
    """
    for names in VOCABULARIES:
        found = [path for name in names for path in sorted(Path(folder).glob(name))]
        if len(found) >= len(names):
            return found
    files = "tokenizer.json, or vocab.json and merges.txt"
    raise BadInput(f"{folder} lacks its vocabulary ({files}): fetch the model again")


def read_vocab_size(config: Config) -> int | None:
    """Return the number of token embeddings of a text encoder, or None if its configuration does not contain it."""
    inner = dict.get(config, "text_config") or {}  # in models of both texts and images
    return inner["vocab_size"] if "vocab_size" in inner else config.get("vocab_size")


def check_vocabulary(folder: str | Path, vocab_size: int | None) -> None:
    """Raise BadInput unless a tokenizer has as many tokens as its text encoder has embeddings.

    A BPE tokenizer also needs a merge for each token of several symbols; without merges it splits words into letters.
    Raises CheckFailed if the vocabulary is damaged.
    """
    files = find_vocabulary(folder)
    if files[0].suffix == ".model":  # a SentencePiece file, which only that library can read
        return
    try:
        tokens, added, num_merges = _read_vocabulary(files, Path(folder))
        ids = {int(number) for number in (*tokens.values(), *added)}
    except (TypeError, AttributeError, KeyError, ValueError):
        raise CheckFailed(f"{files[0]} is not a valid tokenizer vocabulary: fetch the model again") from None
    check_num_tokens(folder, len(ids), max(ids, default=-1), vocab_size)
    special = re.compile(r"<.*>")
    words = [token for token, number in tokens.items() if number not in added and not special.fullmatch(token)]
    num_merged = sum(len(token.removesuffix("</w>")) > 1 for token in words)
    if num_merges is not None and num_merges < LEAST_TOKENS * num_merged:
        raise BadInput(f"{folder} has {num_merges} merges for {num_merged} multi-letter tokens: fetch the model again")


def check_num_tokens(place: str | Path, count: int, highest: int, vocab_size: int | None) -> None:
    """Raise BadInput if a tokenizer does not fit a text encoder with `vocab_size` embeddings.

    count: the number of tokens; highest: the largest token id.
    """
    if vocab_size and (highest >= vocab_size or count < LEAST_TOKENS * vocab_size):
        raise BadInput(f"{place} has {count} tokens, but the text encoder has {vocab_size}: fetch the model again")


def _read_vocabulary(files: list[Path], folder: Path) -> tuple[dict[str, int], Iterable[int], int | None]:
    """Return ({token: id}, ids of added tokens, number of merges or None for a tokenizer that has none)."""
    first = files[0]
    if first.suffix == ".txt":
        return {line: number for number, line in enumerate(first.read_text("utf-8").rstrip("\n").split("\n"))}, (), None
    if first.name == "vocab.json":
        path = folder / "added_tokens.json"
        added = read_json_file(path).values() if path.is_file() else ()
        merges = [line for line in files[1].read_text("utf-8").split("\n") if line and not line.startswith("#version")]
        return read_json_file(first), set(added), len(merges)
    parts = read_json_file(first)
    model, added = parts["model"], {each["id"] for each in parts.get("added_tokens") or ()}
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # a Unigram tokenizer lists [token, score]
        vocabulary = {each[0]: number for number, each in enumerate(vocabulary)}
    return vocabulary, added, len(model["merges"]) if model.get("type") == "BPE" else None


def tokenizer_of(encoder: str) -> str:
    """Return the name of the tokenizer whose ids a text encoder reads: "tokenizer_2" for "text_encoder_2"."""
    return encoder.replace("text_encoder", "tokenizer")


@functools.lru_cache(maxsize=3)
def _load_tokenizer(model_dir: str | Path, encoder: str = "text_encoder") -> Any:
    import transformers

    name = tokenizer_of(encoder)
    tokenizer = getattr(transformers, read_index(model_dir)[name][1]).from_pretrained(f"{model_dir}/{name}")
    vocab_size = read_vocab_size(read_config(model_dir, encoder))
    check_num_tokens(f"{model_dir}/{name}", len(tokenizer), len(tokenizer) - 1, vocab_size)
    return tokenizer


def max_tokens(model_dir: str | Path, encoder: str = "text_encoder") -> int:
    """Return the maximum number of tokens per prompt: 77 for Stable Diffusion."""
    path = Path(model_dir) / tokenizer_of(encoder) / "tokenizer_config.json"
    recorded = read_json_file(path).get("model_max_length") if path.is_file() else None
    positions = read_config(model_dir, encoder).get("max_position_embeddings")
    known = [each for each in (recorded, positions) if each]
    return min(known) if known else _load_tokenizer(model_dir, encoder).model_max_length  # 10**30: no limit


def tokenize(
    model_dir: str | Path, prompts: Iterable[str], encoder: str = "text_encoder", length: int | None = None
) -> list[list[int]]:
    """Return the token ids of each prompt, padded or truncated to `length`; default: the text encoder's."""
    tokenizer, length = _load_tokenizer(model_dir, encoder), length or max_tokens(model_dir, encoder)
    return [
        list(tokenizer(text, padding="max_length", max_length=length, truncation=True).input_ids) for text in prompts
    ]


def count_tokens(model_dir: str | Path, prompts: Iterable[str], encoder: str = "text_encoder") -> list[int]:
    """Return the number of tokens of each prompt, with those of its start and end, none of them cut."""
    tokenizer = _load_tokenizer(model_dir, encoder)
    return [len(tokenizer(prompt, truncation=False, verbose=False).input_ids) for prompt in prompts]


def say_what_is_cut(
    model_dir: str | Path, prompts: Iterable[str], encoder: str = "text_encoder", length: int | None = None
) -> None:
    """Print a warning with the truncated words for each prompt that exceeds `length`; default: the text encoder's."""
    length = length or max_tokens(model_dir, encoder)
    for prompt in prompts:
        if len(prompt.encode()) + 2 <= length:  # a token has at least one byte: no need to import transformers
            continue
        tokenizer = _load_tokenizer(model_dir, encoder)
        ids = tokenizer(prompt, truncation=False, verbose=False).input_ids
        if len(ids) > length:
            shown, lost = one_line(prompt, 100), one_line(tokenizer.decode(ids[length - 1 : -1]), 400)
            say(f"warning: the model reads {length} tokens, but {shown!r} has {len(ids)}: {lost!r} is ignored")
