"""Statistics of a split: sizes and words (the paper's Table 1), lengths in tokens, and the shares cut by the limits."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NotRequired, TypedDict

import numpy as np

from pipejax import grid
from pipejax.config import DataConfig, GridConfig
from pipejax.data.encoding import place_of_example
from pipejax.data.examples import Example
from pipejax.data.tokenizer import Tokenizer
from pipejax.grid import pipelined_steps, sequential_steps
from pipejax.methods import joined_change, shown, spell, tells_rows_apart

_UNBOUNDED = 2**30  # a limit that no target reaches
# Texts that may change when they are encoded and decoded; "joined": the rows of a text that `data.separator` joins.
TEXTS = ("sources", "targets", "joined")
COLUMNS = ("source", "rows", "row", "pipelined_steps", "sequential_steps")  # the columns of `tokens`


class Statistics(TypedDict):
    """The statistics of a split; the optional values need a tokenizer."""

    examples: int
    without_target: int  # rows for which the tokenizer has no tokens do not count as rows
    words_per_target: float  # the mean, as for the next two
    rows_per_target: float
    words_per_row: float
    # median, percentile_95 and most (the maximum), by the names in COLUMNS: rows of a target, tokens of a row
    tokens: NotRequired[dict[str, dict[str, float]]]
    step_ratio: NotRequired[float]  # the sum of sequential steps divided by the sum of pipelined steps
    # Examples cut by max_source, max_target (of the pipelined method), time_max and sub_max, and by either of the
    # last two.
    cut_percent: NotRequired[dict[str, float]]
    kept_percent: NotRequired[float]  # tokens of rows within time_max and sub_max
    # Sequential steps divided by the pipelined steps within time_max and sub_max: the steps for all tokens, and for the
    # kept ones.
    bounded_ratio: NotRequired[float]
    kept_ratio: NotRequired[float]
    changed_percent: NotRequired[dict[str, float]]  # the percentage of examples whose text changes, for each of TEXTS
    changed_first: NotRequired[dict[str, str]]  # the first such example and what changes, for each of TEXTS


@dataclasses.dataclass
class _Lengths:
    """The lengths whose spread `Statistics.tokens` gives, and the examples that each limit cuts."""

    of: dict[str, list[int]] = dataclasses.field(default_factory=lambda: {name: [] for name in COLUMNS})
    bounded: int = 0  # pipelined steps within the limits
    kept: int = 0  # tokens of rows within the limits
    kept_steps: int = 0  # sequential steps for these tokens
    cuts: dict[str, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(("max_source", "max_target", "time_max", "sub_max", "either"), 0)
    )
    # The number of examples whose text changes.
    changed: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(TEXTS, 0))
    first: dict[str, str] = dataclasses.field(default_factory=dict)  # where a text first changes, and how


def measure_split(
    examples: Sequence[Example],
    tokenizer: Tokenizer | None,
    data: DataConfig,
    bounds: GridConfig,
    *,
    tick: Callable[[int], None] = lambda count: None,
) -> Statistics:
    """Computes the statistics of a split.

    The lengths of sources include special ids, and the steps include eos; the other counts do not.

    Args:
      examples: the examples of the split.
      tokenizer: the tokenizer of the task; None: only words are counted.
      data: the settings `max_source`, `max_target` and `separator`.
      bounds: the settings `delay`, `time_max` and `sub_max`.
      tick: called with 1 after each example.
    """
    lengths, words, rows = _Lengths(), 0, list[int]()
    for example in examples:
        kept = _count(example, tokenizer, data, bounds, lengths) if tokenizer is not None else example.targets
        words += sum(len(row.split()) for row in kept)
        rows.append(len(kept))
        tick(1)
    size, row_count = max(len(rows), 1), sum(rows)
    result: Statistics = {
        "examples": len(rows),
        "without_target": rows.count(0),
        "words_per_target": words / size,
        "rows_per_target": row_count / size,
        "words_per_row": words / max(row_count, 1),
    }
    if tokenizer is not None:
        result["tokens"] = {name: _spread(found) for name, found in (lengths.of | {"rows": rows}).items()}
        steps, bounded = sum(lengths.of["sequential_steps"]), max(lengths.bounded, 1)
        result["step_ratio"] = steps / max(sum(lengths.of["pipelined_steps"]), 1)
        result["bounded_ratio"] = steps / bounded
        result["kept_ratio"] = lengths.kept_steps / bounded
        result["kept_percent"] = 100 * lengths.kept / max(sum(lengths.of["row"]), 1)
        result["cut_percent"] = {name: 100 * count / size for name, count in lengths.cuts.items()}
        result["changed_percent"] = {name: 100 * count / size for name, count in lengths.changed.items()}
        result["changed_first"] = lengths.first
    return result


def _count(
    example: Example, tokenizer: Tokenizer, data: DataConfig, bounds: GridConfig, lengths: _Lengths
) -> Sequence[str]:
    """Adds an example to `lengths`; returns its rows that have tokens."""
    ids, spelled = tokenizer.encode(example.source), spell(example.targets, tokenizer, tokenizer.eos)
    changes = (
        tokenizer.change(example.source, ids),
        next(filter(None, map(tokenizer.change, example.targets, spelled)), None),
        joined_change(example.targets, tokenizer, data.separator),
    )
    for name, change in zip(TEXTS, changes, strict=True):
        if change:
            lengths.changed[name] += 1
            lengths.first.setdefault(name, f"{place_of_example(example)}: {shown(change)}")
    source = len(tokenizer.affixes.around(ids)) if data.special_tokens != "eos" else len(ids) + 1
    rows = [len(row) for row in spelled if row]
    lengths.of["source"].append(source)
    lengths.of["row"] += rows
    separator = tells_rows_apart(data.separator)
    lengths.of["sequential_steps"].append(sequential_steps(rows, separator=separator))
    steps = partial(pipelined_steps, rows, delay=bounds.delay)
    lengths.of["pipelined_steps"].append(steps(sub_max=_UNBOUNDED, time_max=_UNBOUNDED))
    lengths.bounded += steps(sub_max=bounds.sub_max, time_max=bounds.time_max)
    starts = [grid.start(i, bounds.delay) for i in range(min(len(rows), bounds.sub_max))]
    fit = [min(length, bounds.time_max - at) for length, at in zip(rows, starts, strict=False) if at < bounds.time_max]
    lengths.kept += sum(fit)
    lengths.kept_steps += sequential_steps(fit, separator=separator)
    # Only the first sub_max rows are decoded; each needs a place before time_max for its tokens and its eos.
    ends = [at + length + 1 for length, at in zip(rows, starts, strict=False)]
    late, many = max(ends, default=1) > bounds.time_max, len(rows) > bounds.sub_max
    cuts = lengths.cuts
    cuts["max_source"] += source > data.max_source
    # The target also has the eos of its last, empty row.
    cuts["max_target"] += sum(rows) + len(rows) + (bounds.delay > 0) > data.max_target
    cuts["time_max"] += late
    cuts["sub_max"] += many
    cuts["either"] += late or many
    return [row for row, found in zip(example.targets, spelled, strict=True) if found]


def _spread(values: Sequence[int]) -> dict[str, float]:
    if not values:
        return {"median": 0.0, "percentile_95": 0.0, "most": 0.0}
    median, high = np.percentile(values, (50, 95))
    return {"median": float(median), "percentile_95": float(high), "most": float(max(values))}


def table_lines(splits: dict[str, Statistics]) -> list[str]:
    """Returns the statistics of splits as the lines of text tables."""
    lines = [f"{'split':8}{'examples':>10}{'words/target':>14}{'rows':>7}{'words/row':>11}{'no target':>11}"]
    for name, s in splits.items():
        lines.append(
            f"{name:8}{s['examples']:>10,}{s['words_per_target']:>14.1f}{s['rows_per_target']:>7.2f}"
            f"{s['words_per_row']:>11.2f}{s['without_target']:>11,}"
        )
    measured = {name: s for name, s in splits.items() if "tokens" in s}
    if not measured:
        return lines
    heads = ("source", "rows", "row length", "pipelined steps", "sequential steps")
    lines += ["", "tokens: median / 95 % / most", f"{'split':8}" + "".join(f"{h:>20}" for h in heads) + f"{'ratio':>8}"]
    for name, s in measured.items():
        cells = (s["tokens"][c] for c in COLUMNS)
        spreads = (f"{c['median']:.0f} / {c['percentile_95']:.0f} / {c['most']:.0f}" for c in cells)
        lines.append(f"{name:8}" + "".join(f"{spread:>20}" for spread in spreads) + f"{s['step_ratio']:>8.2f}")
    lines += ["", "in %: examples cut, tokens kept by the bounds, texts that the tokenizer does not give back,"]
    lines += ["and rows that are not found again in a sequential answer, which joins them by data.separator"]
    lines += [f"{'split':8}" + "".join(f"{n:>14}" for n in (*_Lengths().cuts, "kept", *TEXTS))]
    for name, s in measured.items():
        percents = (*s["cut_percent"].values(), s["kept_percent"], *s["changed_percent"].values())
        lines.append(f"{name:8}" + "".join(f"{percent:>14.1f}" for percent in percents))
    found = [f"{name}, {which}: {first}" for name, s in measured.items() for which, first in s["changed_first"].items()]
    return [*lines, *(["", "not given back, such as", *found] if found else [])]
