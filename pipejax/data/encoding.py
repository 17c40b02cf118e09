"""Encodes examples as token ids. Only this module cuts sources and targets that are too long.

Shapes: L source length.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pipejax import grid
from pipejax.config import Config, T5Config
from pipejax.data.examples import Example
from pipejax.data.tokenizer import Tokenizer
from pipejax.system.errors import UserError

logger = logging.getLogger(__name__)


class Encoded(NamedTuple):
    """An example as token ids."""

    id: str
    source: np.ndarray  # i32 [L], eos included
    target: grid.Flat
    source_was_cut: bool
    target_was_cut: bool
    target_has_unknown: bool = False  # the target holds text that the tokenizer lacks


def cut_source(ids: Sequence[int], most: int) -> Sequence[int]:
    """The first `most - 1` ids and the last one, which is eos as a rule; all ids if there are at most `most`."""
    return ids if len(ids) <= most else [*ids[: most - 1], ids[-1]]


@functools.lru_cache(maxsize=1024)
def prefix_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The ids of a text with which rows begin: the same few come again with every example."""
    ids = tuple(tokenizer.encode(text))
    if tokenizer.unknown in ids:
        logger.warning(f"a row that begins with {text!r}: the tokenizer lacks some of these characters")
    return ids


def encode(example: Example, tokenizer: Tokenizer, config: Config, model: T5Config) -> Encoded:
    """Encodes an example for training.

    The target becomes rows on the grid, or for the sequential objective one row in which the separator joins the rows.
    A target of more than `data.max_target` tokens loses its last rows, and its end is left out or has weight 0, so that
    the model does not learn to stop there. If the first row alone is too long, that row is cut.

    Args:
      example: the example as text.
      tokenizer: encodes the source and the rows.
      config: for the length bounds, the objective, the separator and the grid.
      model: for the ids of eos and of the decoder's first input.

    Raises:
      UserError: the rows are not those that `grid.row_names` names.
    """
    bos, eos, most = model.decoder_start_token_id, model.eos_token_id, config.data.max_target
    full = [*tokenizer.encode(example.source), eos]
    source = cut_source(full, config.data.max_source)

    def spell(text: str) -> list[int]:
        """The ids of a target's text. An eos that it spells out, as "</s>", would end a row in its middle."""
        return [i for i in tokenizer.encode(text) if i != eos]

    if config.train.objective == "sequential":
        joined, cut = _join(example.targets, spell, config.data.separator, most - 1)
        open_end, final, kept, names = cut, False, [joined], []
    else:
        rows = [row for row in map(spell, example.targets) if row]
        names = [prefix_ids(tokenizer, name) for name in config.grid.row_names]
        if names:
            _check_names(example, rows, names)
        ends = np.cumsum([len(row) + 1 for row in rows])
        empty = int(config.grid.delay > 0)  # the eos of the empty row
        cut = bool(rows) and int(ends[-1]) + empty > most
        kept = rows[: max(int((ends <= most).sum()), 1)] if cut else rows
        open_end, final = cut and len(kept[-1]) + 1 > most, not cut
    kept = [row[: most - 1] for row in kept]
    given = [min(len(name), most - 1) for name in names]
    target = grid.flatten(kept, delay=config.grid.delay, bos=bos, eos=eos, final=final, names=given)
    if open_end:
        target.weights[-1] = 0.0  # the row was cut, so the eos after it is not in the data
    target_has_unknown = any(tokenizer.unknown in row for row in kept)
    return Encoded(example.id, np.asarray(source, np.int32), target, len(source) < len(full), cut, target_has_unknown)


def _check_names(example: Example, rows: Sequence[list[int]], names: Sequence[tuple[int, ...]]) -> None:
    """Raises a UserError unless each row begins with the tokens of its name, as it will in decoding."""
    where = example.place or f"example {example.id}"
    if len(rows) != len(names):
        raise UserError(f"{where}: found {len(rows)} rows; expected {len(names)}, as grid.row_names has")
    for i, (row, name) in enumerate(zip(rows, names, strict=True)):
        if (*row[: len(name)],) != name:
            raise UserError(
                f"{where}: found row {i + 1} of {example.targets}; expected it to begin with the tokens "
                f"of name {i + 1} in grid.row_names"
            )


def _join(rows: Sequence[str], spell: Callable[[str], list[int]], separator: str, most: int) -> tuple[list[int], bool]:
    """The ids of the first rows, joined by the separator, that have at most `most` ids; and whether rows were left out.

    The first row is always kept.
    """

    def joined(count: int) -> list[int]:
        return spell(separator.join(rows[:count]))

    whole = joined(len(rows))
    if len(whole) <= most:
        return whole, False
    fit, beyond = 1, len(rows)  # bisection, because each attempt encodes the text anew
    while beyond - fit > 1:
        middle = (fit + beyond) // 2
        fit, beyond = (middle, beyond) if len(joined(middle)) <= most else (fit, middle)
    return joined(fit), True
