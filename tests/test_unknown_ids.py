"""The id of unknown characters is the id in the vocabulary's file."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import sentencepiece
import tokenizers
import transformers
from tokenizers import models, processors

import pipejax
from pipejax.convert import huggingface
from pipejax.data.tokenizer import Tokenizer, check_special_ids
from pipejax.data.tokenizer_file import TokenizerFile
from pipejax.inference.sources import Source
from support import oracle, tiny
from support.tokenizer_kinds import (
    LETTERS,
    WORDS,
    bert,
    gemma,
    numbered,
    rename,
    roberta,
    save,
    train_spiece,
    unigram,
    words,
)

UNKNOWN = ["漢", "the 漢 fox", "漢漢 a", "🙂", "é\u0301", "foxes \ue000", "</s> 漢", ""]
PLAIN = ["the fox", "jumps over a dog"]


def madlad(directory: Path, unknown: int = 0, kind: str = "T5Tokenizer") -> Path:
    """MADLAD's kind: `<unk>` is 0 and an eos is 2, the id of T5's `<unk>`."""
    inner = unigram(["<unk>", "<s>", "</s>", *WORDS, *LETTERS], unknown)
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    save(directory, inner, pad_token="<s>", eos_token="</s>", unk_token="<unk>")
    return rename(directory, kind, extra_ids=0)


def of_library(directory: Path) -> Callable[[str], list[int]]:
    """The encoding of tokenizer.json by the library tokenizers."""
    inner = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    return lambda text: inner.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("unknown", [0, 1, 3, len(WORDS) + 5])
@pytest.mark.parametrize("by_transformers", [False, True])
def test_unknown_id_of_a_tokenizer_json_is_read(unknown: int, by_transformers: bool, tmp_path: Path) -> None:
    """transformers 5 takes 2, here the eos; all other ids are equal."""
    directory = madlad(tmp_path / "it", unknown)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    if by_transformers:
        (directory / "config.json").write_text('{"model_type": "t5"}')
    ours = Tokenizer.load(directory)
    assert isinstance(ours._inner, TokenizerFile) != by_transformers
    ours.save(tmp_path / "saved")
    for text in (*UNKNOWN, *PLAIN):
        expected = of_library(directory)(text)
        assert ours.encode(text) == Tokenizer.load(tmp_path / "saved").encode(text) == expected
        assert (unknown in expected) or (text in PLAIN) or not text
        assert (2 in expected) == ("</s>" in text)
        if text in PLAIN:
            assert theirs(text, add_special_tokens=False).input_ids == expected


def test_unknown_id_of_t5_equals_transformers(tmp_path: Path) -> None:
    directory = save(tmp_path / "it", unigram(["<pad>", "</s>", "<unk>", *WORDS], 2), eos_token="</s>")
    theirs = transformers.AutoTokenizer.from_pretrained(rename(directory, "T5Tokenizer", extra_ids=0))
    for text in (*UNKNOWN, *PLAIN):
        assert Tokenizer.load(directory).encode(text) == theirs(text, add_special_tokens=False).input_ids


def spiece(directory: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    directory.mkdir()
    text = "the quick brown fox jumps over a lazy dog and sleeps under warm bright summer skies by rivers "
    train_spiece(directory, text, 60, **options)
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "spiece.model"))


@pytest.mark.parametrize(
    "options",
    [
        {"unk_id": 0, "bos_id": 1, "eos_id": 2},
        {"unk_id": 0, "pad_id": 3, "eos_id": 1, "bos_id": -1},
        {"unk_id": 3, "pad_id": 0, "eos_id": 1, "bos_id": 2},
        {"unk_id": 2, "pad_id": 0, "eos_id": 1, "bos_id": -1},
    ],
)
def test_spiece_model_without_settings(options: dict[str, int], tmp_path: Path, said: list[str]) -> None:
    theirs = spiece(tmp_path / "it", **options)
    ours = Tokenizer.load(tmp_path / "it")
    ours.save(tmp_path / "saved")
    for text in ("the é fox", "漢", "the quick 漢字 dog", "lazy dog"):
        assert ours.encode(text) == Tokenizer.load(tmp_path / "saved").encode(text) == theirs.encode(text)
    assert not said


def ends_unknown(directory: Path) -> Path:
    """Another kind: words, of which the last is the unknown token."""
    inner = tokenizers.Tokenizer(models.WordLevel(numbered("</s>", "the", "fox", "other"), "other"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return save(directory, inner, eos_token="</s>", unk_token="other")


def byte_free(directory: Path) -> Path:
    inner = tokenizers.Tokenizer(models.BPE(numbered("</s>", "[X]", *LETTERS), [], unk_token="[X]", fuse_unk=True))
    return save(directory, inner, eos_token="</s>", unk_token="[X]")


@pytest.mark.parametrize("make", [bert, roberta, gemma, words, ends_unknown, byte_free])
@pytest.mark.parametrize("text", UNKNOWN)
def test_vocabularies_of_words_and_of_merged_pieces(make: Callable[[Path], Path], text: str, tmp_path: Path) -> None:
    """For these, transformers follows unk_token."""
    directory = make(tmp_path / "it")
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    assert Tokenizer.load(directory).encode(text) == theirs(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("unknown", [3, 0])
def test_other_classes_of_unigram_vocabularies_that_know_their_unk_token(unknown: int, tmp_path: Path) -> None:
    """transformers takes 3, which is unk_token."""
    inner = unigram(["<s>", "<pad>", "</s>", "<unk>", *WORDS, "<mask>"], unknown)
    directory = rename(save(tmp_path / "it", inner, unk_token="<unk>"), "XLMRobertaTokenizer")
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    for text in UNKNOWN:
        assert Tokenizer.load(directory).encode(text) == theirs(text, add_special_tokens=False).input_ids


def test_a_converted_model_reads_unknown_characters_as_unknown(tmp_path: Path, said: list[str]) -> None:
    model = dataclasses.replace(tiny.MODEL, eos_token_id=2, decoder_start_token_id=0, pad_token_id=1)
    params = oracle.random_params(model, np.random.default_rng(0))
    huggingface.write_hf(model, params, tmp_path / "hf", madlad(tmp_path / "tokenizer"))
    huggingface.from_hf(tmp_path / "hf", tmp_path / "run")
    made = pipejax.load(tmp_path / "run")
    (the,) = of_library(tmp_path / "tokenizer")("the")
    found = made.ids_of(Source("", "the 漢"))
    assert [*found] == [the, *of_library(tmp_path / "tokenizer")("漢"), 2] and 0 in found
    assert not [line for line in said if "unknown" in line]


def test_unknown_id_equal_to_eos_is_used_and_reported(tmp_path: Path, said: list[str]) -> None:
    """A run was trained with it, and transformers 5 saves MADLAD's so."""
    directory = madlad(tmp_path / "it")
    transformers.AutoTokenizer.from_pretrained(directory).save_pretrained(tmp_path / "theirs")
    saved = json.loads((tmp_path / "theirs" / "tokenizer.json").read_text())
    assert saved["model"]["unk_id"] == 2
    tokenizer = Tokenizer.load(tmp_path / "theirs")
    assert tokenizer.encode("漢")[-1] == 2 and tokenizer.unknown == 0
    model = dataclasses.replace(tiny.MODEL, eos_token_id=2)
    for trained in (False, True):
        check_special_ids(tokenizer, model, "model.eos_token_id", "it", trained=trained)
    assert len(said) == 2 and "although unk_token is '<unk>' = 0. The token is used" in said[0]


def test_a_vocabulary_without_an_id_for_unknown_characters_opens(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.Unigram([("</s>", 0.0), ("a", -1.0)], None))
    tokenizer = Tokenizer.load(save(tmp_path / "it", inner, eos_token="</s>"))
    assert not tokenizer.unknown_is(0) and tokenizer.encode("a") == [1]


def test_tokenizer_in_the_hubs_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache links to the files."""
    kept = tmp_path / "models--some--madlad"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    directory = madlad(kept / "snapshots" / "abc")
    (directory / "config.json").write_text('{"model_type": "t5"}')
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert Tokenizer.load("some/madlad").encode("漢 a") == of_library(directory)("漢 a")
