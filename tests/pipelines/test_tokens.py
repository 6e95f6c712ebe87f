"""Vocabularies that fit or do not fit the text encoder, token ids, truncated prompts."""

import json
import shutil
import sys

import pytest
from conftest import ROOT

from common import errors
from pipelines import tokens
from pipelines.model_folder import (
    check_pipeline,
)
from pipelines.tokens import check_vocabulary, count_tokens, max_tokens, say_what_is_cut, tokenize


@pytest.fixture
def model(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


def test_a_tokenizer_without_its_vocabulary_is_refused(model):
    (model / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(errors.BadInput, match=r"tokenizer lacks its vocabulary \(tokenizer\.json, or vocab"):
        check_pipeline(model)
    (model / "tokenizer" / "vocab.json").write_text('{"a": 0}')  # transformers 5 would take it without merges.txt
    with pytest.raises(errors.BadInput, match=r"lacks its vocabulary"):
        check_pipeline(model)


def as_slow_tokenizer(model):
    """Keep a model's vocabulary in vocab.json and merges.txt, as libraries did before tokenizer.json; return it."""
    path = model / "tokenizer" / "tokenizer.json"
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    path.unlink()
    (model / "tokenizer" / "vocab.json").write_text(json.dumps(vocabulary))
    (model / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    return vocabulary


def test_a_vocabulary_in_two_files_passes(model):
    before = tokenize(str(model), ["a dog"])
    as_slow_tokenizer(model)
    check_pipeline(model)
    tokens._load_tokenizer.cache_clear()
    assert tokenize(str(model), ["a dog"]) == before


@pytest.mark.parametrize("change", ["two", "more", "added"])
def test_a_tokenizer_of_another_text_encoder_is_refused(model, change):
    vocabulary = as_slow_tokenizer(model)
    count, tokenizer = len(vocabulary), model / "tokenizer"
    if change == "two":
        (tokenizer / "vocab.json").write_text('{"<|startoftext|>": 0, "<|endoftext|>": 1}')
    elif change == "more":
        (tokenizer / "vocab.json").write_text(json.dumps(vocabulary | {"dog</w>": count}))
    else:
        (tokenizer / "added_tokens.json").write_text(json.dumps({"<sks>": count}))
    found = 2 if change == "two" else count + 1
    with pytest.raises(errors.BadInput, match=f"tokenizer has {found} tokens, but the text encoder has {count}"):
        check_pipeline(model)


def test_a_tokenizer_with_half_of_its_merges_is_refused(tmp_path):
    """It reads words letter by letter: its text encoder has never seen them so."""
    for name, half in (("merges.txt", lambda text: text[: len(text) // 2]), ("merges.txt", lambda text: "")):
        folder = shutil.copytree(ROOT / "models" / "emoji-64" / "tokenizer", tmp_path / "tokenizer", dirs_exist_ok=True)
        check_vocabulary(folder, 2500)
        (folder / "tokenizer.json").unlink()
        check_vocabulary(folder, 2500)
        (folder / name).write_text(half((folder / name).read_text()))
        with pytest.raises(errors.BadInput, match=r"has \d+ merges for 1986 multi-letter tokens"):
            check_vocabulary(folder, 2500)


@pytest.mark.parametrize("text", ["[]", '{"model": null}', '{"model": {"vocab": {"a": "x"}}}', '{"added_tokens": [1]}'])
def test_a_vocabulary_that_is_none_fails_the_check(model, text):
    (model / "tokenizer" / "tokenizer.json").write_text(text)
    with pytest.raises(errors.CheckFailed, match=r"tokenizer\.json is not a"):
        check_pipeline(model)


def test_tokenizers_of_other_kinds_pass(tmp_path):
    """Unigram's vocabulary is a list, WordPiece's a text file in which a line may hold what else ends lines."""
    unigram = {"model": {"type": "Unigram", "vocab": [["a", 0.0], ["dog", -1.0]]}, "added_tokens": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    check_vocabulary(tmp_path, 2)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("a\n\u2028\n\x85\ndog\n", "utf-8")
    check_vocabulary(tmp_path, 4)


def test_a_tokenizer_of_bytes_has_no_vocabulary(model):
    index = json.loads((model / "model_index.json").read_text())
    index["tokenizer"] = ["transformers", "ByT5Tokenizer"]
    (model / "model_index.json").write_text(json.dumps(index))
    (model / "tokenizer" / "tokenizer.json").unlink()
    check_pipeline(model)


def test_tokens_rounded_up_and_vocabularies_of_other_libraries_pass(model):
    path = model / "text_encoder" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 3}))
    check_pipeline(model)
    (model / "tokenizer" / "tokenizer.json").unlink()
    (model / "tokenizer" / "spiece.model").write_bytes(b"sentencepiece")
    check_pipeline(model)


@pytest.fixture
def length(tiny_model):
    """Tokens that the tiny text encoder reads: a letter each, but for the first and the last."""
    return json.loads((tiny_model / "tokenizer" / "tokenizer_config.json").read_text())["model_max_length"]


def test_prompts_become_ids_of_the_encoders_length(tiny_model, length, capsys):
    ids = tokenize(tiny_model, ["a cat", "", "a dog"])
    assert [len(row) for row in ids] == [length] * 3
    assert all(isinstance(i, int) for row in ids for i in row)
    assert ids[0][:2] == ids[2][:2] and ids[0][2] != ids[2][2]
    assert len(set(ids[1])) == 2  # begin, then end and padding
    assert capsys.readouterr().err == ""


def test_the_length_is_known_without_transformers_or_from_the_text_encoder(model, length, monkeypatch):
    path = model / "tokenizer" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)
        assert max_tokens(model) == length
    path.write_text(json.dumps({name: value for name, value in settings.items() if name != "model_max_length"}))
    assert max_tokens(model) == length
    path.write_text(json.dumps({**settings, "model_max_length": 10**30}))
    assert max_tokens(model) == length


def test_what_of_a_long_prompt_is_cut_is_said(tiny_model, length, capsys):
    fits = "abcdefghij"[: (length - 2) % 10] + "abcdefghij" * ((length - 2) // 10)
    kept, cut = tokenize(tiny_model, [fits, fits + "xyz"])
    say_what_is_cut(tiny_model, [fits, fits + "xyz"])
    assert len(kept) == len(cut) == length and kept[:-2] == cut[:-2]  # the last letter ends a word or not
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert f"{length} tokens" in said[0] and f"has {length + 3}" in said[0] and "'xyz'" in said[0]
    assert fits + "xyz" in said[0]


def test_all_tokens_of_a_prompt_are_counted(tiny_model, caplog):
    """Those of the tiny tokenizer are single letters; nothing is said of prompts that are cut elsewhere."""
    empty, three, many = count_tokens(str(tiny_model), ["", "abc", "a" * 100])
    assert empty == 2 and three == 5 and many == 102 > max_tokens(tiny_model)
    assert not caplog.records
