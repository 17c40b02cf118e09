"""A small vocabulary of pieces like T5's, a model of random weights for it, and JSON schemas for rows."""

import dataclasses
import datetime
import json
import string
from collections.abc import Callable, Sequence
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
from pipejax.model.backbone import Backbone
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
    """The schema of an object with these properties."""
    properties = {name: PROPERTIES[name] for name in names}
    return {"type": "object", "properties": properties, "required": [*names], "additionalProperties": False}


def many(count: int) -> list[dict[str, Any]]:
    """Schemas of one to four properties each, which together have all properties."""
    names, rng = [*PROPERTIES], np.random.default_rng(0)
    return [schema(names[i % len(names)], *rng.permutation(names[:i] + names[i + 1 :])[: i % 4]) for i in range(count)]


def tokenizer(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """A tokenizer with the pieces."""
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


# The reference in plain Python: the best of the tokens after which some text can still be completed.

FINITE = {"colour": ["red", "redder", "ab"], "mixed": ["5", "null", "19"], "fixed": ["ab"]}


def tokens_needed(text: str, pieces: list[str]) -> int:
    """The fewest tokens that spell a text."""
    best = [0] + [10**6] * len(text)
    for end in range(1, len(text) + 1):
        best[end] = min(
            (best[end - len(p)] + 1 for p in pieces if len(p) <= end and text[end - len(p) : end] == p), default=10**6
        )
    return best[len(text)]


def allowed(written: str, texts: list[str], left: int, pieces: dict[int, str]) -> list[int]:
    """The allowed next tokens; `left`: the number of remaining tokens, this one included."""
    spelled, targets = [*pieces.values()], [space + text for text in texts for space in ("", " ")]
    found = [1] if written in targets else []
    for token, piece in pieces.items():
        rests = [text[len(written) + len(piece) :] for text in targets if text.startswith(written + piece)]
        if any(tokens_needed(rest, spelled) + 1 <= left - 1 for rest in rests):
            found.append(token)
    return found


def choices(
    made: Generator,
    last: Callable[[list[list[int]]], Sequence[np.ndarray] | np.ndarray],
    rows: Any,
    near: list[bool],
    margins: list[float] | None = None,
) -> oracle.NextTokens:
    """Returns for `oracle.algorithm1` the best allowed token of each row; rows that are not open get any token.

    `last`: gives the logits [V] after each row's last token. `near` gets whether a row's end is near, `margins` the
    differences between the best and the second-best logit.
    """
    pieces = {i: piece.replace("▁", " ") for i, piece in enumerate(PIECES) if i > 2}
    delay, time_max = made.config.grid.delay, made.config.grid.time_max

    def next_tokens(written: list[list[int]]) -> list[int]:
        found, logits = [1] * len(written), last(written)
        for i, (row, tokens) in enumerate(zip(rows, written, strict=False)):
            begun = len(row.beginning) + 1
            if tokens[-1] != 1 and len(tokens) >= begun:
                text = "".join(pieces[token] for token in tokens[begun:])
                left = time_max - (len(tokens) - 1 + delay * i)
                may = allowed(text, FINITE[row.name], left, pieces)
                found[i] = may[int(np.argmax(logits[i][may]))]
                near.append(left <= 3)
                if margins is not None and len(may) > 1:
                    margins.append(oracle.margin(logits[i][may]))
        return found

    return next_tokens


SIZES = dataclasses.replace(IN_BLOCKS, vocab_size=len(PIECES) + 3)  # larger than the tokenizer's vocabulary, as in T5


def generator(
    seed: int = 0,
    *,
    backend: Backend | None = XLA,
    decode: dict[str, Any] | None = None,
    of: tuple[Backbone, Any] | None = None,
    **grid: Any,
) -> Generator:
    """A generator with random weights, or with a backbone and parameters; `decode` and `grid`: its settings."""
    model, params = of or (SIZES, oracle.random_params(SIZES, np.random.default_rng(seed), eos_scale=1.2))
    config = Config(
        model=model,
        grid=GridConfig(**{"delay": 0, "time_max": 32, "sub_max": 4, **grid}),
        train=TrainConfig(method="pipelined"),
        decode=DecodeConfig(**(decode or {})),
    )
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
