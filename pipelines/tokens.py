"""A model's tokenizer: does its vocabulary fit the text encoder, and what of a prompt the model reads."""

import functools
import re
from pathlib import Path

from common.errors import BadInput, CheckFailed, one_line
from common.messages import say
from pipelines.configs import read_config, read_index, read_json_file

VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("vocab.txt",), ("*.model",))  # a tokenizer has one
WITHOUT_VOCABULARY = ("ByT5Tokenizer",)  # its tokens are bytes
LEAST_TOKENS = 0.9  # of the text encoder's embeddings: some models round their number up, T5's to 32,128 of 32,100


def find_vocabulary(folder):
    """Return the files of a tokenizer's vocabulary; raise BadInput where it lacks some.

    transformers 5 makes a tokenizer of two tokens from a folder without them, to which all texts are the same.
    """
    for names in VOCABULARIES:
        found = [path for name in names for path in sorted(Path(folder).glob(name))]
        if len(found) >= len(names):
            return found
    raise BadInput(f"{folder} lacks its vocabulary (tokenizer.json, or vocab.json and merges.txt): fetch it again")


def read_vocab_size(config):
    """Return how many tokens a text encoder of a configuration has embeddings for, None where it does not say."""
    inner = dict.get(config, "text_config") or {}  # of a model for texts and pictures
    return inner["vocab_size"] if "vocab_size" in inner else config.get("vocab_size")


def check_vocabulary(folder, vocab_size):
    """Raise BadInput unless a folder's tokenizer has as many tokens as its text encoder has embeddings.

    And a merge for each token of several symbols, where they are merged: without them words are read letter by letter.
    """
    files = find_vocabulary(folder)
    if files[0].suffix == ".model":  # only its own library reads it
        return
    try:
        tokens, added, num_merges = _read_vocabulary(files, Path(folder))
        ids = {int(number) for number in (*tokens.values(), *added)}
    except (TypeError, AttributeError, KeyError, ValueError):
        raise CheckFailed(f"{files[0]} is not a tokenizer's vocabulary: fetch the model again") from None
    check_num_tokens(folder, len(ids), max(ids, default=-1), vocab_size)
    special = re.compile(r"<.*>")
    words = [token for token, number in tokens.items() if number not in added and not special.fullmatch(token)]
    num_merged = sum(len(token.removesuffix("</w>")) > 1 for token in words)
    if num_merges is not None and num_merges < LEAST_TOKENS * num_merged:
        raise BadInput(f"{folder} has {num_merges} merges for {num_merged} tokens of several letters: fetch it again")


def check_num_tokens(place, count, highest, vocab_size):
    """Raise BadInput where a tokenizer's tokens, `count` with numbers up to `highest`, are not the text encoder's."""
    if vocab_size and (highest >= vocab_size or count < LEAST_TOKENS * vocab_size):
        raise BadInput(f"{place} has {count} tokens, the text encoder {vocab_size}: fetch the model again")


def _read_vocabulary(files, folder):
    """Return ({token: number}, numbers of added tokens, how many merges, None for a tokenizer without)."""
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
    if isinstance(vocabulary, list):  # Unigram's, of [token, score]
        vocabulary = {each[0]: number for number, each in enumerate(vocabulary)}
    return vocabulary, added, len(model["merges"]) if model.get("type") == "BPE" else None


@functools.lru_cache(maxsize=1)
def _load_tokenizer(model_dir):
    import transformers

    tokenizer = getattr(transformers, read_index(model_dir)["tokenizer"][1]).from_pretrained(f"{model_dir}/tokenizer")
    vocab_size = read_vocab_size(read_config(model_dir, "text_encoder"))
    check_num_tokens(f"{model_dir}/tokenizer", len(tokenizer), len(tokenizer) - 1, vocab_size)
    return tokenizer


def max_tokens(model_dir):
    """Return how many tokens of a prompt a model reads: 77 for Stable Diffusion's."""
    path = Path(model_dir) / "tokenizer" / "tokenizer_config.json"
    recorded = read_json_file(path).get("model_max_length") if path.is_file() else None
    positions = read_config(model_dir, "text_encoder").get("max_position_embeddings")
    known = [each for each in (recorded, positions) if each]
    return min(known) if known else _load_tokenizer(model_dir).model_max_length  # recorded may be 10**30: no limit


def tokenize(model_dir, prompts):
    """Return each prompt's token ids, padded to the text encoder's length, or cut to it."""
    tokenizer, length = _load_tokenizer(model_dir), max_tokens(model_dir)
    return [
        list(tokenizer(text, padding="max_length", max_length=length, truncation=True).input_ids) for text in prompts
    ]


def say_what_is_cut(model_dir, prompts):
    """Print a warning for each prompt that is longer than the model reads, with the words that are lost."""
    length = max_tokens(model_dir)
    for prompt in prompts:
        if len(prompt.encode()) + 2 <= length:  # a token is a byte or more: transformers stays away
            continue
        tokenizer = _load_tokenizer(model_dir)
        ids = tokenizer(prompt, truncation=False, verbose=False).input_ids
        if len(ids) > length:
            said, lost = one_line(prompt, 100), one_line(tokenizer.decode(ids[length - 1 : -1]), 400)
            say(f"warning: the model reads {length} tokens, {said!r} has {len(ids)}: {lost!r} is not read")
