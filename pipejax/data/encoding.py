"""Examples as tokens: the one place that cuts sources and targets.

Shapes: L source length.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax import grid
from pipejax.config import Config, T5Config
from pipejax.data.examples import Example
from pipejax.data.tokenizer import Tokenizer


class Encoded(NamedTuple):
    """An example in tokens."""

    id: str
    source: np.ndarray  # i32 [L], eos included
    target: grid.Flat
    source_was_cut: bool
    target_was_cut: bool


def cut_source(ids: Sequence[int], most: int) -> Sequence[int]:
    """At most that many ids; the last one, as a rule eos, is kept."""
    return ids if len(ids) <= most else [*ids[: most - 1], ids[-1]]


def encode(example: Example, tokenizer: Tokenizer, config: Config, model: T5Config) -> Encoded:
    """An example as the model is trained on it: rows on the grid, or one row joined by the separator.

    A target of more than `data.max_target` tokens loses its last rows; then nothing teaches the model to stop there. If
    its first row alone is longer, that row is cut.
    """
    bos, eos, most = model.decoder_start_token_id, model.eos_token_id, config.data.max_target
    full = [*tokenizer.encode(example.source), eos]
    source = cut_source(full, config.data.max_source)
    if config.train.objective == "sequential":
        joined, cut = _join(example.targets, tokenizer, config.data.separator, most - 1)
        open_end, final, kept = cut, False, [joined]
    else:
        spelt = (tokenizer.encode(text) for text in example.targets)
        # A row ends at its eos: one that a text spells out, as "</s>", would end it in the middle.
        rows = [row for row in ([i for i in ids if i != eos] for ids in spelt) if row]
        ends = np.cumsum([len(row) + 1 for row in rows])
        cut = bool(rows) and int(ends[-1]) + 1 > most
        kept = rows[: max(int((ends <= most).sum()), 1)] if cut else rows
        open_end, final = cut and len(kept[-1]) + 1 > most, not cut
    kept = [row[: most - 1] for row in kept]
    target = grid.flatten(kept, delay=config.grid.delay, bos=bos, eos=eos, final=final)
    if open_end:
        target.weights[-1] = 0.0  # the row goes on: an eos here would not be the truth
    return Encoded(example.id, np.asarray(source, np.int32), target, len(source) < len(full), cut)


def _join(rows: Sequence[str], tokenizer: Tokenizer, separator: str, most: int) -> tuple[list[int], bool]:
    """Ids of as many rows as fit, the first at least, with the separator between; and whether that are not all."""

    def joined(count: int) -> list[int]:
        return tokenizer.encode(separator.join(rows[:count]))

    whole = joined(len(rows))
    if len(whole) <= most:
        return whole, False
    fit, beyond = 1, len(rows)  # bisected: each attempt reads the text anew
    while beyond - fit > 1:
        middle = (fit + beyond) // 2
        fit, beyond = (middle, beyond) if len(joined(middle)) <= most else (fit, middle)
    return joined(fit), True
