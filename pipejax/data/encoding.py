"""Encodes examples as token ids. Only this module cuts sources and targets that are too long.

Shapes: L source length.
"""

import functools
import logging
import unicodedata
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


def cut_source(ids: Sequence[int], most: int) -> Sequence[int]:
    """The first `most - 1` ids and the last one, which is eos as a rule; all ids if there are at most `most`."""
    return ids if len(ids) <= most else [*ids[: most - 1], ids[-1]]


def spell(targets: Sequence[str], tokenizer: Tokenizer, eos: int | None) -> list[list[int]]:
    """The ids of each row of a target; a row of which no id is left is none, neither in training nor in an answer.

    An eos that a text spells out, as "</s>", would end its row in the middle, so it is left out.
    """
    return [[i for i in tokenizer.encode(row) if i != eos] for row in targets]


def prefix_ids(tokenizer: Tokenizer, text: str, where: str, eos: int | None = None) -> tuple[int, ...]:
    """The ids of a text with which rows begin; `eos` is the model's, which not every tokenizer names.

    Raises:
      UserError: it has no id, or one that would end the row; the message begins with `where`.
    """
    ids = _prefix_ids(tokenizer, text)
    if not ids or tokenizer.eos in ids or eos in ids:
        found = "ends the row" if ids else "has no token"
        raise UserError(f"{where}: found {text!r}, which {found} for this tokenizer; expected text that begins one")
    return ids


@functools.lru_cache(maxsize=1024)
def _prefix_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The same few come again with every example."""
    ids = tuple(tokenizer.encode(text))
    if ids and (change := tokenizer.change(text, ids)):
        logger.warning(f"a row that begins with {text!r}: {shown(change)} from the tokenizer")
    return ids


def shown(change: tuple[str, str]) -> str:
    """What `Tokenizer.change` says, in words."""
    composed = (unicodedata.normalize("NFC", text) for text in change)
    show = ascii if len({*composed}) == 1 else repr  # else both may look alike
    was, now = (show(text if len(text) <= 40 else f"{text[:40]}...") for text in change)
    return f"{was} comes back as {now}"


def answered(examples: Sequence[Example], tokenizer: Tokenizer | None, empty: str) -> Sequence[Example]:
    """The training examples, as `data.empty_targets` says; says how many have no answer.

    Those of a prepared data set are not counted if they are kept, as that would read all of it.

    Args:
      examples: all of them.
      tokenizer: says which rows vanish; None: none does.
      empty: "keep", "skip" or "refuse" those without a row.

    Raises:
      UserError: one has no answer and is refused, or none is left.
    """
    if empty == "keep" and not isinstance(examples, list | tuple):
        return examples
    kept, lost = list[Example](), list[Example]()
    for example in examples:
        has_rows = any(tokenizer is None or not tokenizer.vanishes(row) for row in example.targets)
        (kept if has_rows else lost).append(example)
    if not lost:
        return examples
    found = f"{len(lost)} of {len(examples)} training examples have no answer"
    first = place_of(lost[0])
    if empty == "refuse":
        raise UserError(f"{first}: found no answer ({found}); expected one, as data.empty_targets = refuse")
    if empty == "skip" and not kept:
        raise UserError(f"data.empty_targets: found skip, but {found}; expected some that have one")
    becomes = "are left out" if empty == "skip" else "teach the model to write nothing"
    logger.info(f"{found}, such as {first}; they {becomes} (data.empty_targets = {empty})")
    return kept if empty == "skip" else examples


def place_of(example: Example) -> str:
    """Where an example is, for people."""
    return example.place or f"example {example.id}"


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

    if config.train.objective == "sequential":
        targets = [row for row in example.targets if not tokenizer.vanishes(row)]
        joined, cut = _join(targets, lambda text: spell([text], tokenizer, eos)[0], config.data.separator, most - 1)
        open_end, final, kept, names = cut, False, [joined], []
    else:
        rows = [row for row in spell(example.targets, tokenizer, eos) if row]
        names = [prefix_ids(tokenizer, name, "grid.row_names", eos) for name in config.grid.row_names]
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
    return Encoded(example.id, np.asarray(source, np.int32), target, len(source) < len(full), cut)


def _check_names(example: Example, rows: Sequence[list[int]], names: Sequence[tuple[int, ...]]) -> None:
    """Raises a UserError unless each row begins with the tokens of its name, as it will in decoding."""
    where = place_of(example)
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
