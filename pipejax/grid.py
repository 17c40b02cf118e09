"""The coordinates of the paper: visibility and distance of tokens, start times of rows, and the layout of a target.

A token has two coordinates, its row (the paper's subsequence i) and its time (the paper's time-step t). Rows and times
are 0-based here, while the paper's i is 1-based: the bos of row i has the time i * delay, and the j-th generated token
of row i (j = 1, 2, ..., eos included) has the time i * delay + j. In time-step t, Algorithm 1 feeds the tokens at
time t - 1 and generates the tokens at time t. `visible`, `shares_group`, `distance`, `position` and `start` also accept
NumPy arrays and traced JAX arrays. This module uses no model and no files.

The delay 0 is not in the paper: all rows start at time 0, and each row begins with a given name. The number of names
is the number of rows, so no empty row ends the answer, and training targets have no empty row either. The rule of
visibility is the same: a row sees the rows above it (the rows with lower numbers) up to its own time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Numbers = Any  # a number, or an array of NumPy or JAX


def visible(query_row: Numbers, query_time: Numbers, key_row: Numbers, key_time: Numbers) -> Numbers:
    """Returns whether a query sees a key (paper section 3.2, eq. 4).

    A query sees the keys of its own row and of earlier rows, up to and including its own time.

    Args:
      query_row, query_time: the coordinates of the query.
      key_row, key_time: the coordinates of the key. Arrays are broadcast against each other.
    """
    return (key_row <= query_row) & (key_time <= query_time)


def shares_group(query_group: Numbers, key_group: Numbers) -> Numbers:
    """Returns whether a query may see a key by their groups: the groups are equal, or the key is in group 0.

    In the paper all rows are in group 0. Rows of different groups above 0 do not see each other.

    Args:
      query_group, key_group: the groups. Arrays are broadcast against each other.
    """
    return (key_group == query_group) | (key_group == 0)


def distance(query_row: Numbers, query_time: Numbers, key_row: Numbers, key_time: Numbers) -> Numbers:
    """Returns the Manhattan distance on the grid, `|t1 - t2| + |i1 - i2|` for rows i and times t (paper section 4.3).

    T5's attention bias is a function of this relative position.

    Args:
      query_row, query_time: the coordinates of the query.
      key_row, key_time: the coordinates of the key. Arrays are broadcast against each other.
    """
    return abs(query_time - key_time) + abs(query_row - key_row)


def position(row: Numbers, time: Numbers) -> Numbers:
    """Returns the position of a slot, row + time.

    The `distance` of a query and a visible key is the query's position minus the key's position, since a visible key
    has neither a later row nor a later time than the query.
    """
    return row + time


def start(row: Numbers, delay: int) -> Numbers:
    """Returns the time of a row's bos (paper section 3.2: "the j-th token in the i-th subsequence")."""
    return row * delay


def count_rows(delay: int, time_max: int, sub_max: int) -> int:
    """Returns the number of rows of the grid: at most `sub_max`, and only rows that start before `time_max`."""
    return min(sub_max, -(-time_max // delay)) if delay else sub_max


class Flat(NamedTuple):
    """A target laid out on the grid as N slots, one for each fed token. There is no padding."""

    inputs: np.ndarray  # i32 [N], the token that the decoder is fed at each slot
    targets: np.ndarray  # i32 [N], the next token of the same row
    # f32 [N], the weight of the slot in the loss: 0 if the slot feeds eos, or its target is a token of a name; else 1
    weights: np.ndarray
    row: np.ndarray  # i32 [N], the row of the fed token
    time: np.ndarray  # i32 [N], its time


def flatten(
    rows: Sequence[Sequence[int]], *, delay: int, bos: int, eos: int, final: bool = True, names: Sequence[int] = ()
) -> Flat:
    """Lays rows of token ids out for teacher forcing (paper section 3.3, eq. 5).

    Each row becomes [bos, tokens, eos]. With `final` the empty row [bos, eos] follows the last row, unless the delay is
    0. The slots that feed bos and the tokens have the next token as their target; the target of the last of these slots
    is eos. If a slot of a later row that feeds bos or a token sees the eos, a further slot, of weight 0, feeds the eos.
    Otherwise the loss does not depend on the eos, and no slot feeds it. One row without `final` is an ordinary T5
    target.

    Args:
      rows: token ids without bos and eos.
      delay: Δt, in time-steps.
      bos, eos: the ids of these tokens.
      final: whether the empty row follows.
      names: the number of tokens at the beginning of each row that decoding forces. These tokens are fed like others,
        but the slots that generate them have weight 0.
    """
    every = [list(row) for row in rows] + ([[]] if final and delay else [])
    last_times = [start(i, delay) + len(row) for i, row in enumerate(every)]  # the time of each row's last query
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
    """Returns the number of time-steps that Algorithm 1 takes to generate given rows, with the default stop rule.

    Args:
      lengths: the lengths of the rows, in tokens without eos.
      delay: Δt, in time-steps.
      sub_max: the largest number of rows.
      time_max: the largest number of time-steps.
    """
    started = [length for i, length in enumerate(lengths[:sub_max]) if start(i, delay) < time_max]
    steps: list[int] = [start(i, delay) + length + 1 for i, length in enumerate(started)]
    if len(started) < sub_max:
        steps.append(start(len(started), delay) + 1)  # the empty row that ends spawning
    return min(max(steps), time_max)


def pipelined_calls(lengths: Sequence[int], *, delay: int, steps: int) -> int:
    """Returns the number of decoder calls of a decode: the time-steps in which at least one row was open.

    Args:
      lengths: the lengths of all rows that started, in tokens without eos; zeros may follow.
      delay: Δt, in time-steps.
      steps: the number of time-steps of the decode.
    """
    asked: set[int] = set()
    for i, length in enumerate(lengths):
        if (begun := int(start(i, delay))) >= steps:
            break
        asked.update(range(begun, min(begun + int(length) + 1, int(steps))))
    return len(asked)


def sequential_steps(lengths: Sequence[int], *, separator: int = 1) -> int:
    """Returns the number of tokens that a sequential decoder generates for the same rows, separators and eos included.

    Args:
      lengths: the lengths of the rows, in tokens.
      separator: the number of tokens of a separator. It is 0 for a space between two sentences, which T5's tokenizer
        joins to the next word.
    """
    return sum(lengths) + separator * max(len(lengths) - 1, 0) + 1
