"""Packs the live queries of a batch into one step, and keeps the coordinates of the cache slots.

A strategy returns S queries for each example, and only some of them are live. `gather` packs the live queries. Each of
them gets a place among the Q places of its example, which determines its cache slot, and a number among the N queries
of the step, which is its column in the matrix products. So matrix products have N columns, and attention has Q queries
for each example. Places without a query are masked; numbers without a query are fillers.

Example with B = 2 examples, S = 3, Q = 3 and N = 4:

- `live` is [[1, 0, 1], [0, 1, 0]].
- The live queries of example 0 get the places 0 and 1 and the numbers 0 and 1; the live query of example 1 gets the
  place 0 and the number 2. Number 3 is a filler.
- `query_at_place` is [[0, 1, 4], [2, 4, 4]], where 4 = N means that the place has no query.
- `place_of_query` is [0, 1, 3, 6], as indices into the B * Q = 6 places, where 6 means that the query is a filler.
- If `start` is [7, 5], the queries of example 0 are written to the slots 7 and 8, and the query of example 1 to slot 5.
  Slot 9 of example 0 and the slots 6 and 7 of example 1 are written as well, but their row is NOWHERE, and the next
  step overwrites them.

The mask follows from the coordinates of queries and slots (`grid.visible`; paper section 3.2, eq. 4). So the order in
which rows are fed does not matter, and a slot is hidden by changing its row to NOWHERE.

Shapes as in `core`: B batch, S queries of an example, live or not, N queries of a step over the whole batch, Q most
live queries of one example, C cache slots of the program, T time-steps.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from pipejax import grid
from pipejax.grid import Numbers

Array = jax.Array

NOWHERE = 2**30  # the row of empty slots and of fillers: greater than all real rows, so that no query sees such a slot

CERTAIN, DRAFTED, PROBE = 0, 1, 2  # the kinds of queries


@flax.struct.dataclass
class Query:
    """The queries of one step, before `gather` packs the live queries."""

    tokens: Array  # i32 [B, S]
    row: Array  # i32 [B|1, S], coordinates on the grid
    time: Array  # i32 [B|1, S]
    live: Array  # bool [B, S], whether the query is fed; at least one query is live until every example is done
    lineage: Array | None = None  # i32 [B, S, T], the one row that a query sees at each time; None: `grid.visible`
    # i32 [B, S], CERTAIN, DRAFTED or PROBE. Queries of other kinds see no probe, and a probe sees no drafted token.
    # None: there are no probes.
    kind: Array | None = None


@flax.struct.dataclass
class Filled:
    """The coordinates of the slots of the cache."""

    row: Array  # i32 [B, C], NOWHERE for empty slots
    time: Array  # i32 [B, C]


@flax.struct.dataclass
class Step:
    """The input of the model: N packed queries. The last queries may be fillers.

    If N = B * Q, every place of every example has a query, and the two index arrays are None.
    """

    tokens: Array  # i32 [N]
    query_at_place: Array | None  # i32 [B, Q], the number among N of the query at each place; N: no query
    place_of_query: Array | None  # i32 [N], the place of each query, as an index into B * Q; B * Q: a filler
    mask: Array  # bool [B, Q, C], whether the query sees the slot; a query sees its own slot
    position: Array  # i32 [B, Q]; the relative distance of a key is this position minus the key's position
    key_position: Array  # i32 [B, C]
    row: Array  # i32 [B, Q], coordinates of the queries; NOWHERE for fillers
    time: Array  # i32 [B, Q]
    start: Array  # i32 [B|1], the first slot to write: place q is written to slot start + q
    filled: Filled  # the coordinates of all slots, with the slots of this step


def count_slots(live: Array, kept: Array) -> Array:
    """Returns i32 [B], the number of a step's slots up to the last kept slot. The next step overwrites later slots.

    Args:
      live: bool [B, S], the queries that were fed.
      kept: bool [B, S], the queries that later queries may see.
    """
    return jnp.where(live & kept, jnp.cumsum(live, axis=1), 0).max(axis=1)


def hide(rejected: Array, live: Array, filled: Filled, start: Array) -> Filled:
    """Returns the coordinates of the slots, with the rejected queries hidden from all later queries.

    Args:
      rejected: bool [B, S], the queries to hide.
      live: bool [B, S], the queries that were fed.
      filled: the coordinates of the slots, with the slots of this step.
      start: i32 [B|1], the first slot of this step.
    """
    slot = jnp.where(rejected, start[:, None] + jnp.cumsum(live, axis=1) - 1, filled.row.shape[1])
    example = jnp.arange(live.shape[0])[:, None]
    return Filled(filled.row.at[example, slot].set(NOWHERE, mode="drop"), filled.time)


def gather(
    query: Query,
    filled: Filled,
    start: Array,
    count: int,
    width: int,
    position: Callable[[Numbers, Numbers], Numbers] = grid.position,
    group: Callable[[Numbers], Numbers] | None = None,
) -> tuple[Step, Array, Filled]:
    """Packs the live queries of a batch into the input of the model.

    Args:
      query: the queries of a step.
      filled: the coordinates of the slots before the step.
      start: i32 [B|1], the first slot to write.
      count: N.
      width: Q.
      position: the position of a row and time.
      group: the group of a row; None: all rows are in group 0.

    Returns:
      The step; i32 [B, S], the index of each live query among the N; and `filled` with the coordinates of this step.
    """
    batch, rows = query.live.shape
    coordinates = (jnp.broadcast_to(x, (batch, rows)) for x in (query.row, query.time))
    live = query.live.astype(jnp.int32)
    place = jnp.cumsum(live, axis=1) - 1  # the place of each live query within its example

    def at_places(x: Array, otherwise: int) -> Array:
        """Returns x [B, S] as [B, Q], with the live entries moved to the front, and `otherwise` in the rest."""
        hit = query.live[:, :, None] & (place[:, :, None] == jnp.arange(width))
        return jnp.where(hit.any(axis=1), jnp.where(hit, x[:, :, None], 0).sum(axis=1), otherwise)

    row, time = (at_places(x, NOWHERE) for x in coordinates)
    filled = Filled(_put(filled.row, row, start), _put(filled.time, time, start))
    here = row[:, :, None], time[:, :, None], filled.row[:, None], filled.time[:, None]
    if query.lineage is None:
        # Fillers have the row NOWHERE as well, so they would see the empty slots.
        mask = grid.visible(*here) & (filled.row < NOWHERE)[:, None]
        if group is not None:
            mask &= grid.shares_group(group(row)[:, :, None], group(filled.row)[:, None])
        if query.kind is not None:  # no probe and no rejected draft is kept, so all slots of earlier steps are certain
            kind = at_places(query.kind, CERTAIN)
            of_slot = _put(jnp.full_like(filled.row, CERTAIN), kind, start)[:, None]
            mask &= of_slot != jnp.where(kind == PROBE, DRAFTED, PROBE)[:, :, None]
        positions = position(row, time), position(filled.row, filled.time)  # NOWHERE + NOWHERE overflows, but is masked
    else:  # a beam's tokens are in several rows, so only times count for positions
        line = jnp.take_along_axis(query.lineage, at_places(jnp.arange(rows)[None], 0)[:, :, None], axis=1)
        seen = jnp.take_along_axis(line, filled.time[:, None], axis=2, mode="clip")
        mask, positions = seen == filled.row[:, None], (time, filled.time)
    tokens = at_places(query.tokens, 0)
    if count == batch * width:
        number = place + width * jnp.arange(batch)[:, None]
        return Step(tokens.reshape(-1), None, None, mask, *positions, row, time, start, filled), number, filled

    before = (jnp.cumsum(live.sum(axis=1)) - live.sum(axis=1))[:, None]  # number of live queries of earlier examples
    number = before + place  # [B, S], the number of each live query among all
    query_at_place = at_places(number, count)
    numbers = jnp.arange(count)
    example = (before[:, 0] <= numbers[:, None]).sum(axis=1) - 1
    place_of_query = jnp.where(numbers < live.sum(), example * width + numbers - before[:, 0][example], batch * width)
    gathered = jnp.append(tokens.reshape(-1), 0)[place_of_query]
    return Step(gathered, query_at_place, place_of_query, mask, *positions, row, time, start, filled), number, filled


def query_coordinates(step: Step) -> tuple[Array, Array, Array]:
    """Returns the example, row and time of the queries, i32 [N] each. The row of a filler is NOWHERE."""
    batch, width = step.row.shape
    place = jnp.arange(batch * width) if step.place_of_query is None else step.place_of_query
    row, time = (jnp.append(x.reshape(-1), x.max())[place] for x in (step.row, step.time))
    return jnp.minimum(place // width, batch - 1), row, time


def _put(old: Array, new: Array, start: Array) -> Array:
    """Returns the array `old` [B, C] with `new` [B, Q] written from slot `start`, i32 [B|1], on."""
    if len(start) == 1:
        return jax.lax.dynamic_update_slice_in_dim(old, new, start[0], axis=1)
    place = jnp.arange(old.shape[1]) - start[:, None]
    found = jnp.take_along_axis(new, jnp.clip(place, 0, new.shape[1] - 1), axis=1)
    return jnp.where((place >= 0) & (place < new.shape[1]), found, old)
