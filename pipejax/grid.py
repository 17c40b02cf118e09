"""The paper in integers: who sees whom, how far apart, and how a target lies on the grid.

Rows and times are 0-based here (the paper's i is 1-based): the bos of row i stands at time i * delay and its
j-th generated token (j = 1, 2, ..., eos included) at time i * delay + j. The time-step t of Algorithm 1 feeds the
tokens at time t - 1 and generates those at time t. Everything works on NumPy and on traced arrays alike; no model, no
files.

With a delay of 0, which the paper does not have, all rows start at time 0, side by side, each with a name that is
given. The names say how many there are: no empty row ends the answer, so training has none either. Who sees whom stays
as it is: a row sees those above it up to its own time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Numbers = Any  # a number, or an array of NumPy or JAX


def visible(query_row: Numbers, query_time: Numbers, key_row: Numbers, key_time: Numbers) -> Numbers:
    """Whether a query may see a key: its own and earlier rows, up to its own time (paper section 3.2, eq. 4).

    Args:
      query_row, query_time: coordinates of the query.
      key_row, key_time: those of the key; arrays are broadcast.
    """
    return (key_row <= query_row) & (key_time <= query_time)


def distance(query_row: Numbers, query_time: Numbers, key_row: Numbers, key_time: Numbers) -> Numbers:
    """Manhattan distance on the grid, the relative position of T5's bias (paper section 4.3).

    Args:
      query_row, query_time: coordinates of the query.
      key_row, key_time: those of the key; arrays are broadcast.
    """
    return abs(query_time - key_time) + abs(query_row - key_row)


def position(row: Numbers, time: Numbers) -> Numbers:
    """Where a slot stands: a query lies as far from a key that it sees as its position exceeds the key's."""
    return row + time


def start(row: Numbers, delay: int) -> Numbers:
    """The time of a row's bos (paper section 3.2: "the j-th token in the i-th subsequence")."""
    return row * delay


def is_start(time: Numbers, delay: int) -> Numbers:
    """Whether a row starts at that time."""
    return time % delay == 0 if delay else time == 0


def next_start(time: Numbers, delay: int) -> Numbers:
    """The first time from `time` on at which a row starts; `time` itself if none does any more."""
    return -(-time // delay) * delay if delay else time


def count_rows(delay: int, time_max: int, sub_max: int) -> int:
    """The number of rows that start before time runs out."""
    return min(sub_max, -(-time_max // delay)) if delay else sub_max


def count_starts(delay: int, rows: int) -> int:
    """The number, of so many rows, that start at a time at which any does."""
    return 1 if delay else rows


class Flat(NamedTuple):
    """A target laid out on the grid as N slots, real tokens only."""

    inputs: np.ndarray  # i32 [N], what is fed
    targets: np.ndarray  # i32 [N], the next token of the same row
    weights: np.ndarray  # f32 [N], 1 where `targets` counts, 0 at a fed eos
    row: np.ndarray  # i32 [N]
    time: np.ndarray  # i32 [N]


def flatten(
    rows: Sequence[Sequence[int]], *, delay: int, bos: int, eos: int, final: bool = True, names: Sequence[int] = ()
) -> Flat:
    """Lays rows of token ids out for teacher forcing (paper section 3.3, eq. 5).

    Each row becomes [bos, tokens, eos]; with `final` the empty row [bos, eos] follows the last, unless the delay is 0.
    An eos is fed, without a target of its own, only where a token that has a target can see it: elsewhere the slot
    would change nothing. One row without `final` is an ordinary T5 target.

    Args:
      rows: token ids without bos and eos.
      delay: Δt.
      bos, eos: ids.
      final: whether the empty row follows.
      names: how many tokens at the beginning of each row decoding puts there: they are fed like others, with weight 0.
    """
    every = [list(row) for row in rows] + ([[]] if final and delay else [])
    last_times = [start(i, delay) + len(row) for i, row in enumerate(every)]  # of each row's last query
    inputs: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    row_of: list[int] = []
    time_of: list[int] = []
    for i, row in enumerate(every):
        eos_is_seen = max(last_times[i + 1 :], default=-1) > last_times[i]
        fed = [bos, *row] + ([eos] if eos_is_seen else [])
        inputs += fed
        targets += [*row, eos] + ([eos] if eos_is_seen else [])
        name = names[i] if i < len(names) else 0
        weights += [0.0] * name + [1.0] * (len(row) + 1 - name) + ([0.0] if eos_is_seen else [])
        row_of += [i] * len(fed)
        time_of += range(start(i, delay), start(i, delay) + len(fed))
    int_arrays = (np.asarray(x, np.int32) for x in (inputs, targets, row_of, time_of))
    inputs_array, targets_array, row_array, time_array = int_arrays
    return Flat(inputs_array, targets_array, np.asarray(weights, np.float32), row_array, time_array)


def pipelined_steps(lengths: Sequence[int], *, delay: int, sub_max: int, time_max: int) -> int:
    """Time-steps that Algorithm 1 takes for rows under the default stop.

    Args:
      lengths: of the rows, in tokens without eos.
      delay: Δt.
      sub_max: rows at the most.
      time_max: time-steps at the most.
    """
    started = [length for i, length in enumerate(lengths[:sub_max]) if start(i, delay) < time_max]
    steps: list[int] = [start(i, delay) + length + 1 for i, length in enumerate(started)]
    if len(started) < sub_max:
        steps.append(start(len(started), delay) + 1)  # the empty row that ends spawning
    return min(max(steps), time_max)


def pipelined_calls(lengths: Sequence[int], *, delay: int, steps: int) -> int:
    """Of the time-steps of a decode those in which a row was open, so that the decoder was asked.

    Args:
      lengths: of all rows that started, in tokens, and perhaps zeros after them.
      delay: Δt.
      steps: that the decode took.
    """
    asked: set[int] = set()
    for i, length in enumerate(lengths):
        if (begun := int(start(i, delay))) >= steps:
            break
        asked.update(range(begun, min(begun + int(length) + 1, int(steps))))
    return len(asked)


def sequential_steps(lengths: Sequence[int], *, separator: int = 1) -> int:
    """Tokens that a sequential decoder generates for the same rows, the eos included.

    Args:
      lengths: of the rows, in tokens.
      separator: tokens of each separator; T5 spends none on a space between two sentences.
    """
    return sum(lengths) + separator * max(len(lengths) - 1, 0) + 1
