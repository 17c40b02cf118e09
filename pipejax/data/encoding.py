"""Encodes examples as token ids, and finds texts that change when they are encoded and decoded.

This module is the only one that cuts sources and targets that are too long.

Shapes: L source length.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax import grid, methods
from pipejax.config import Config, DataConfig
from pipejax.data.examples import Example
from pipejax.data.tokenizer import Tokenizer, source_affixes
from pipejax.methods import Ids, joined_change, shown
from pipejax.model.backbone import Backbone
from pipejax.system.errors import UserError

logger = logging.getLogger(__name__)


class Encoded(NamedTuple):
    """An example as token ids, and whether its source or target was cut."""

    id: str
    source: np.ndarray  # i32 [L], including special ids
    target: grid.Flat
    source_was_cut: bool
    target_was_cut: bool


class SourceIds(NamedTuple):
    """The ids of a source, as input of the encoder."""

    ids: Sequence[int]  # at most `data.max_source` ids
    left_out: int  # the number of ids that were cut


def encode_source(
    content: str | Sequence[int] | np.ndarray, data: DataConfig, tokenizer: Tokenizer | None, model: Backbone
) -> SourceIds:
    """Encodes the text of a source, adds special ids and truncates the result; token ids are only truncated.

    If a text has no ids, and no special ids are added, the source is a single eos, because an encoder needs a token.
    """
    affixes = source_affixes(tokenizer, model, data.special_tokens)
    if isinstance(content, str):
        assert tokenizer is not None, "the caller checks it"
        text = tokenizer.encode(content)
        ids, kept = affixes.around(text), affixes.around(text, data.max_source) or [model.eos_token_id]
        return SourceIds(kept, max(len(ids) - len(kept), 0))
    ids = [int(i) for i in content]
    found = affixes.cut(ids, data.max_source)
    return SourceIds(found, len(ids) - len(found))


def answered(
    examples: Sequence[Example], tokenizer: Tokenizer | None, empty: str, ends: Collection[int] = ()
) -> Sequence[Example]:
    """Returns the training examples that `data.empty_targets` does not exclude.

    Args:
      examples: the examples that were read.
      tokenizer: determines which rows become empty; None: no row does.
      empty: `data.empty_targets`.
      ends: the tokens that end a row of the model.

    Raises:
      UserError: an example has no answer and `empty` is "refuse", or no example has one and `empty` is "skip".
    """
    if empty == "keep" and not isinstance(examples, list | tuple):
        return examples
    kept, lost = list[Example](), list[Example]()
    for example in examples:
        has_rows = any(tokenizer is None or not tokenizer.vanishes(row, ends) for row in example.targets)
        (kept if has_rows else lost).append(example)
    if not lost:
        return examples
    found = f"{len(lost)} of {len(examples)} training examples have no answer"
    first = place_of_example(lost[0])
    if empty == "refuse":
        raise UserError(first, found=f"no answer ({found})", expected="an answer, because data.empty_targets = refuse")
    if empty == "skip" and not kept:
        raise UserError("data.empty_targets", found=f"skip, but {found}", expected="examples with an answer")
    becomes = "are left out" if empty == "skip" else "teach the model to generate no rows"
    logger.info(f"{found}, such as {first}; they {becomes} (data.empty_targets = {empty})")
    return kept if empty == "skip" else examples


def place_of_example(example: Example) -> str:
    """Returns the name of an example in messages: its "FILE:LINE" or, if unknown, its id."""
    return example.place or f"example {example.id}"


def encode_example(example: Example, tokenizer: Tokenizer, config: Config, model: Backbone) -> Encoded:
    """Encodes an example for training; the method determines how its target is laid out.

    A target of more than `data.max_target` tokens loses its last rows, and its end is left out or gets weight 0, so
    that the model does not learn to stop there. If the first row alone is too long, that row is cut.
    """
    ids = Ids.of(model)
    source = encode_source(example.source, config.data, tokenizer, model)
    most, where = config.data.max_target, place_of_example(example)
    method = methods.trained(config)
    target = method.target(example.targets, tokenizer, ids, most=most, where=where)
    methods.check_target(target, method, vocabulary=model.vocab_size, most=most, where=where)
    return Encoded(example.id, np.asarray(source.ids, np.int32), target.flat, source.left_out > 0, target.was_cut)


SOURCES, TARGETS, JOINED = "sources", "targets", "joined"
CHANGED: Mapping[str, tuple[str, str]] = {
    TARGETS: ("targets that the tokenizer does not give back", "so no answer can equal them"),
    SOURCES: ("sources that the tokenizer does not give back", "so the model reads other text"),
    JOINED: ("rows that contain data.separator", "so they are split when an answer is read"),
}


def describe_changes(
    examples: Iterable[Example], tokenizer: Tokenizer, separator: str, *, kinds: Iterable[str] = CHANGED, of: int = 0
) -> list[str]:
    """Returns a line for each kind of text that changes: the number of such examples, and the first of them.

    Args:
      examples: the examples to check.
      tokenizer: the model's tokenizer.
      separator: `data.separator`, if the method joins rows with it, else "".
      kinds: keys of CHANGED.
      of: the total number of examples, if only some are checked.
    """
    looked, counts, first = 0, dict.fromkeys(kinds, 0), dict[str, str]()
    for example in examples:
        looked += 1
        for kind in counts:
            if kind == JOINED:
                change = joined_change(example.targets, tokenizer, separator) if separator else None
            elif kind == SOURCES:
                change = tokenizer.change(example.source)
            else:
                change = next(filter(None, map(tokenizer.change, example.targets)), None)
            if change:
                counts[kind] += 1
                first.setdefault(kind, f"{shown(change)} ({place_of_example(example)})")
    part = f" that were looked at, of {of}," if looked < of else ""
    return [
        f"{count} of {looked} examples{part} have {', '.join(CHANGED[kind])}: {first[kind]}"
        for kind, count in counts.items()
        if count
    ]
