"""The fate of drafts, call by call, for people who want to see it. Only kept if `Drafts.trace` asks for it.

Shapes: B batch, C calls at the most, R rows of the grid, D drafted tokens of a row in a call, at the most.
"""

import dataclasses
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

Array = jax.Array


@flax.struct.dataclass
class Trace:
    """Of each call and row what was drafted, and what came of it."""

    drafted: Array  # i32 [B, C, R, D], tokens; meaningless beyond `count`
    count: Array  # i32 [B, C, R], drafted tokens that were fed; -1 if the row was not asked
    accepted: Array  # i32 [B, C, R], how many of them count
    written: Array  # i32 [B, C, R], by how many tokens the row grew, the model's own one included


class Asked(NamedTuple):
    """A row in a call."""

    row: int
    written: (
        int  # tokens by which it grew: those accepted, then the model's own, unless an accepted end token ended the row
    )
    accepted: int  # the first so many of the drafted ones; none of a row that could not begin yet
    drafted: list[int]


def empty(batch: int, calls: int, rows: int, drafts: int) -> Trace:
    """A trace in which nobody was asked."""
    none = jnp.zeros((batch, calls, rows), jnp.int32)
    return Trace(jnp.zeros((batch, calls, rows, drafts), jnp.int32), none - 1, none, none)


def record(trace: Trace, call: Array, **found: Array) -> Trace:
    """Writes the findings of a call into the trace.

    Args:
      trace: of all calls so far.
      call: i32 [B], the number of the call for each example; findings of a number beyond C are dropped.
      found: i32 [B, R] or [B, R, D], by the names of the trace's fields.
    """
    at = jnp.arange(len(call)), call
    return dataclasses.replace(trace, **{k: getattr(trace, k).at[at].set(x, mode="drop") for k, x in found.items()})


def list_calls(trace: Trace, place: int, calls: int) -> list[list[Asked]]:
    """Lists of each of so many calls the rows that were asked, ascending; of the example at a place, in NumPy."""
    drafted, count, accepted, written = (
        x[place, :calls].tolist() for x in (trace.drafted, trace.count, trace.accepted, trace.written)
    )
    return [
        [
            Asked(row, written[call][row], accepted[call][row], drafted[call][row][:n])
            for row, n in enumerate(count[call])
            if n >= 0
        ]
        for call in range(calls)
    ]
