"""Encodes examples as token ids. Only this module cuts sources and targets that are too long.

Shapes: L source length.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax import grid, methods
from pipejax.config import Config
from pipejax.data.examples import Example
from pipejax.data.tokenizer import Tokenizer, source_ids
from pipejax.methods import Ids
from pipejax.model.interface import Backbone
from pipejax.system.errors import UserError

logger = logging.getLogger(__name__)


class Encoded(NamedTuple):
    id: str
    source: np.ndarray  # i32 [L], eos included
    target: grid.Flat
    source_was_cut: bool
    target_was_cut: bool


def cut_source(ids: Sequence[int], most: int) -> Sequence[int]:
    """The first `most - 1` ids and the last one, which is eos as a rule; all ids if there are at most `most`."""
    return ids if len(ids) <= most else [*ids[: most - 1], ids[-1]]


def answered(examples: Sequence[Example], tokenizer: Tokenizer | None, empty: str) -> Sequence[Example]:
    """The training examples, as `data.empty_targets` says; `tokenizer` says which rows vanish (None: none does)."""
    if empty == "keep" and not isinstance(examples, list | tuple):
        return examples
    kept, lost = list[Example](), list[Example]()
    for example in examples:
        has_rows = any(tokenizer is None or not tokenizer.vanishes(row) for row in example.targets)
        (kept if has_rows else lost).append(example)
    if not lost:
        return examples
    found = f"{len(lost)} of {len(examples)} training examples have no answer"
    first = place_of_example(lost[0])
    if empty == "refuse":
        raise UserError(f"{first}: found no answer ({found}); expected one, as data.empty_targets = refuse")
    if empty == "skip" and not kept:
        raise UserError(f"data.empty_targets: found skip, but {found}; expected some that have one")
    becomes = "are left out" if empty == "skip" else "teach the model to write nothing"
    logger.info(f"{found}, such as {first}; they {becomes} (data.empty_targets = {empty})")
    return kept if empty == "skip" else examples


def place_of_example(example: Example) -> str:
    return example.place or f"example {example.id}"


def encode_example(example: Example, tokenizer: Tokenizer, config: Config, model: Backbone) -> Encoded:
    """Encodes an example for training; the method says how its target is laid out.

    A target of more than `data.max_target` tokens loses its last rows, and its end is left out or has weight 0, so that
    the model does not learn to stop there. If the first row alone is too long, that row is cut.
    """
    ids = Ids.of(model)
    full = source_ids(example.source, tokenizer, model)
    source = cut_source(full, config.data.max_source)
    most, where = config.data.max_target, place_of_example(example)
    method = methods.trained(config)
    target = method.target(example.targets, tokenizer, ids, most=most, where=where)
    methods.check_target(target, method, vocabulary=model.vocab_size, most=most, where=where)
    return Encoded(example.id, np.asarray(source, np.int32), target.flat, len(source) < len(full), target.was_cut)
