"""A record of the drafts of each call and their acceptance, for inspection. It exists only if `Drafts.trace` is set.

Shapes: B batch, C most calls, R rows of the grid, D most drafted tokens of a row in a call.
"""

import dataclasses
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

Array = jax.Array


@flax.struct.dataclass
class Trace:
    """The drafted, accepted and written tokens of each call and row."""

    drafted: Array  # i32 [B, C, R, D], tokens; undefined beyond `count`
    count: Array  # i32 [B, C, R], number of drafted tokens that were fed; -1 if the row had no query
    accepted: Array  # i32 [B, C, R], number of accepted tokens
    written: Array  # i32 [B, C, R], number of tokens appended to the row, as in `Asked`


class Asked(NamedTuple):
    """A row that had queries in a call."""

    row: int
    # The number of appended tokens: the accepted ones and one of the model, unless an accepted token ended the row; 0
    # for a row that could not begin yet.
    written: int
    accepted: int  # number of accepted tokens, the first of `drafted`; 0 for a row that could not begin yet
    drafted: list[int]


def empty(batch: int, calls: int, rows: int, drafts: int) -> Trace:
    """Returns a trace of `calls` calls without queries."""
    none = jnp.zeros((batch, calls, rows), jnp.int32)
    return Trace(jnp.zeros((batch, calls, rows, drafts), jnp.int32), none - 1, none, none)


def record(trace: Trace, call: Array, **found: Array) -> Trace:
    """Adds a call to the trace.

    Args:
      trace: the trace of all calls so far.
      call: i32 [B], the number of the call for each example; examples with a number of C or more are skipped.
      found: i32 [B, R] or [B, R, D], the values of the trace's fields, by name.
    """
    at = jnp.arange(len(call)), call
    return dataclasses.replace(trace, **{k: getattr(trace, k).at[at].set(x, mode="drop") for k, x in found.items()})


def list_calls(trace: Trace, place: int, calls: int) -> list[list[Asked]]:
    """Lists the rows with queries of each of the first `calls` calls, for the example at an index; in NumPy."""
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
