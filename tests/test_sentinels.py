"""Sentinels without embeddings, which T5's class adds, for example to MADLAD's vocabulary."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from pipejax.convert import huggingface
from pipejax.data.tokenizer import Tokenizer
from pipejax.system.errors import UserError
from support import oracle, tiny
from support.tokenizer_kinds import T5_IDS, train_spiece

MODEL = dataclasses.replace(tiny.MODEL, vocab_size=46)
T5_CLASS = {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
LINES = ["the quick brown fox", "jumps over a lazy dog", "under warm summer skies"]


@pytest.fixture(scope="module")
def without_sentinels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with only a spiece.model, of 46 pieces."""
    place = tmp_path_factory.mktemp("pieces")
    return train_spiece(place, " ".join(LINES), 46, **T5_IDS)


def with_config(place: Path, settings: dict[str, Any]) -> None:
    (place / "tokenizer_config.json").write_text(json.dumps(T5_CLASS | settings))


def saved_again(place: Path) -> None:
    """The tokenizer as transformers saves it: tokenizer.json has the sentinels."""
    with_config(place, {})
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    (place / "spiece.model").unlink()
    tokenizer.save_pretrained(place)
    assert "<extra_id_99>" in (place / "tokenizer.json").read_text()


SENTINELS: dict[str, Callable[[Path], None]] = {
    "a vocabulary alone": lambda place: None,
    "a class without extra_ids": lambda place: with_config(place, {}),
    "more of them": lambda place: with_config(place, {"extra_ids": 130}),
    "named ones": lambda place: with_config(
        place, {"additional_special_tokens": ["<extra_id_0>", "<extra_id_1>"], "extra_ids": 2}
    ),
    "saved by transformers": saved_again,
}


QUICK = ("a class without extra_ids", "saved by transformers")


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in SENTINELS]
)
def test_sentinels_beyond_the_vocabulary_are_left_out(
    case: str, without_sentinels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids equal those of transformers, and a vocabulary with room keeps the sentinels."""
    files = Path(shutil.copytree(without_sentinels, tmp_path / "files"))
    SENTINELS[case](files)
    model = MODEL
    params = oracle.random_params(model, np.random.default_rng(0))
    huggingface.write_hf(model, params, tmp_path / "hf", files)
    huggingface.from_hf(tmp_path / "hf", tmp_path / "out")
    assert "sentinels beyond the vocabulary of 46, which are left out" in capsys.readouterr().err
    found = Tokenizer.load(tmp_path / "out" / "tokenizer")
    theirs = transformers.AutoTokenizer.from_pretrained(files) if case != "a vocabulary alone" else None
    theirs = theirs or transformers.T5Tokenizer.from_pretrained(files)
    assert found.size == 46 < len(theirs)
    for line in LINES:
        assert found.encode(line) == theirs(line, add_special_tokens=False).input_ids
    huggingface.to_hf(tmp_path / "out", tmp_path / "back")
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "back")) == 46
    large = dataclasses.replace(model, vocab_size=256)
    params = oracle.random_params(large, np.random.default_rng(0))
    huggingface.write_hf(large, params, tmp_path / "large", files)
    huggingface.from_hf(tmp_path / "large", tmp_path / "whole")
    assert Tokenizer.load(tmp_path / "whole" / "tokenizer").size == len(theirs)


def test_other_tokens_beyond_the_vocabulary_are_refused(without_sentinels: Path, tmp_path: Path) -> None:
    files = Path(shutil.copytree(without_sentinels, tmp_path / "files"))
    with_config(files, {"additional_special_tokens": ["<2de>"]})
    model = MODEL
    huggingface.write_hf(model, oracle.random_params(model, np.random.default_rng(0)), tmp_path / "hf", files)
    with pytest.raises(UserError, match=r"found a tokenizer of \d+ ids; expected at most 46"):
        huggingface.from_hf(tmp_path / "hf", tmp_path / "out")
