"""A small vocabulary of pieces as T5's, a model of random weights for it, and JSON schemas that rows can follow."""

import dataclasses
import datetime
import json
import string
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from pipejax.config import Config, DecodeConfig, GridConfig, TrainConfig
from pipejax.data.tokenizer import Tokenizer
from pipejax.data.tokenizer_file import TokenizerFile
from pipejax.inference.backends import XLA, Backend
from pipejax.inference.generator import Generator
from support import oracle
from support.tiny import IN_BLOCKS

WORDS = ("▁", "true", "▁fal", "se", "null", "▁null", "▁20", "19", "202", "-0", "▁red", "▁a", "ab", ",▁", "é", "ö", '"')
PIECES = ("<pad>", "</s>", "<unk>", *WORDS, *string.ascii_letters, *string.digits, *"-+.,:@_ ;")
NAMES = [f"n{i}:" for i in range(9)]

FORMATS = jsonschema.FormatChecker(("date", "email", "uuid"))
FORMATS.checks("time", ValueError)(lambda text: bool(datetime.time.fromisoformat(text).tzinfo))
FORMATS.checks("date-time", ValueError)(lambda text: bool(datetime.datetime.fromisoformat(text).tzinfo))

DATE = {"type": "string", "format": "date"}
PROPERTIES: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "short": {"type": "string", "maxLength": 5, "title": "a few characters"},
    "long": {"type": "string", "minLength": 4, "maxLength": 9},
    "none": {"type": "string", "maxLength": 0},
    "date": DATE,
    "time": {"type": "string", "format": "time"},
    "moment": {"type": "string", "format": "date-time"},
    "mail": {"type": "string", "format": "email", "maxLength": 14},
    "id": {"type": "string", "pattern": "^[0-9a-f]{12}$"},
    "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
    "part": {"type": "string", "pattern": "ab|ö"},
    "class": {"type": "string", "pattern": r"^\w[^a-z]*\d$", "maxLength": 8},
    "doubt": {"type": ["string", "null"], "maxLength": 3},
    "whole": {"type": "integer"},
    "range": {"type": "integer", "minimum": -17, "maximum": 23},
    "open": {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 120},
    "price": {"type": "number"},
    "weight": {"type": "number", "minimum": 0},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "yes": {"type": "boolean"},
    "either": {"type": ["boolean", "null"]},
    "nothing": {"type": "null"},
    "colour": {"type": "string", "enum": ["red", "blue", "green fish", ""]},
    "mixed": {"enum": ["red", 5, 2.5, True, None, "5"]},
    "fixed": {"const": "always"},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
    "pair": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2},
    "many": {"type": "array", "items": {"enum": ["red", "a", "ab"]}, "minItems": 1},
    "void": {"type": "array", "items": {"type": "string"}, "maxItems": 0},
    "ages": {"type": "array", "items": {"type": ["number", "null"]}},
}


def schema(*names: str) -> dict[str, Any]:
    """The schema of an object with those properties."""
    properties = {name: PROPERTIES[name] for name in names}
    return {"type": "object", "properties": properties, "required": [*names], "additionalProperties": False}


def many(count: int) -> list[dict[str, Any]]:
    """Schemas of one to four properties each, in which all of them are."""
    names, rng = [*PROPERTIES], np.random.default_rng(0)
    return [schema(names[i % len(names)], *rng.permutation(names[:i] + names[i + 1 :])[: i % 4]) for i in range(count)]


def tokenizer(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """Of the pieces."""
    made = _backend()
    if normalizer:
        made.normalizer = normalizer
    return Tokenizer(TokenizerFile(made, {"eos_token": "</s>", "unk_token": "<unk>"}, False, {}))


def _backend() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.Unigram([(piece, -float(len(PIECES))) for piece in PIECES], unk_id=2))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return made


SIZES = dataclasses.replace(IN_BLOCKS, vocab_size=len(PIECES) + 3)  # as T5's, it is larger than its tokenizer


def generator(seed: int = 0, *, backend: Backend = XLA, decode: dict[str, Any] | None = None, **grid: Any) -> Generator:
    """A generator of random weights; `decode` and `grid`: its settings."""
    config = Config(
        model=SIZES,
        grid=GridConfig(**{"delay": 0, "time_max": 32, "sub_max": 4, **grid}),
        train=TrainConfig(objective="pipelined"),
        decode=DecodeConfig(**(decode or {})),
    )
    params = oracle.random_params(SIZES, np.random.default_rng(seed), eos_scale=1.2)
    return Generator(config, params, tokenizer(), backend=backend)


def save(directory: Path) -> Path:
    """Writes the tokenizer's files into a directory."""
    _backend().save(str(directory / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return directory
