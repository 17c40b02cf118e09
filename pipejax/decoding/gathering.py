"""The queries of a step: the live ones of a batch, gathered, and the coordinates of all that was fed before.

Shapes as in `core`: B batch, S queries that an example may ask, N queries of a step over the whole batch, Q queries of
one example, C cache slots in reach, T time-steps. A query has a place among the Q of its example, and a number among
the N of the step.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from pipejax import grid
from pipejax.grid import Numbers

Array = jax.Array

NOWHERE = 2**30  # the row of an empty slot and of a filler query: later than every real row, so none sees it


@flax.struct.dataclass
class Query:
    """The queries that one step may ask."""

    tokens: Array  # i32 [B, S]
    row: Array  # i32 [B|1, S], coordinates on the grid
    time: Array  # i32 [B|1, S]
    live: Array  # bool [B, S], True: this one is fed; at least one is until every example is done
    lineage: Array | None = None  # i32 [B, S, T], the one row that it sees at each time; None: what the grid says


@flax.struct.dataclass
class Filled:
    """Coordinates of the slots of the cache."""

    row: Array  # i32 [B, C], NOWHERE where nothing was fed
    time: Array  # i32 [B, C]


@flax.struct.dataclass
class Step:
    """The question to the model: N live queries, gathered; the last may be fillers, which stand for no query.

    Where every example has all its Q places among the N, the two index arrays are None.
    """

    tokens: Array  # i32 [N]
    query_at_place: Array | None  # i32 [B, Q], index among the N of the query at each place of an example; N: none
    place_of_query: Array | None  # i32 [N], index of each query's place among all B * Q; B * Q: it is a filler
    mask: Array  # bool [B, Q, C], True: the query sees that slot, its own included
    position: Array  # i32 [B, Q]; less a key's that the query sees, it is how far that lies back
    key_position: Array  # i32 [B, C]
    row: Array  # i32 [B, Q], coordinates of the queries; NOWHERE at fillers
    time: Array  # i32 [B, Q]
    start: Array  # i32 [B|1]: keys of an example's place q go to slot start + q
    filled: Filled  # theirs included


def count_slots(live: Array, kept: Array) -> Array:
    """Counts, i32 [B], the slots of a step up to the last that is kept; the next step takes those after it."""
    return jnp.where(live & kept, jnp.cumsum(live, axis=1), 0).max(axis=1)


def hide(rejected: Array, live: Array, filled: Filled, start: Array) -> Filled:
    """Hides rejected queries, bool [B, S], of those fed: nobody sees them by the coordinates that come back."""
    slot = jnp.where(rejected, start[:, None] + jnp.cumsum(live, axis=1) - 1, filled.row.shape[1])
    example = jnp.arange(live.shape[0])[:, None]
    return Filled(filled.row.at[example, slot].set(NOWHERE, mode="drop"), filled.time)


def gather(
    query: Query,
    filled: Filled,
    start: Array,
    queries: int,
    width: int,
    position: Callable[[Numbers, Numbers], Numbers] = grid.position,
) -> tuple[Step, Array, Filled]:
    """The live queries of a batch as a question to the model, whose slots begin at `start`, i32 [B|1].

    Beside it for each of the [B, S] queries its number among the N, and the coordinates with theirs.
    """
    batch, rows = query.live.shape
    coordinates = (jnp.broadcast_to(x, (batch, rows)) for x in (query.row, query.time))
    live = query.live.astype(jnp.int32)
    place = jnp.cumsum(live, axis=1) - 1  # of a live query within its example

    def at_places(x: Array, otherwise: int) -> Array:
        """[B, S] -> [B, Q]: what is live, moved together."""
        hit = query.live[:, :, None] & (place[:, :, None] == jnp.arange(width))
        return jnp.where(hit.any(axis=1), jnp.where(hit, x[:, :, None], 0).sum(axis=1), otherwise)

    row, time = (at_places(x, NOWHERE) for x in coordinates)
    filled = Filled(_put(filled.row, row, start), _put(filled.time, time, start))
    here = row[:, :, None], time[:, :, None], filled.row[:, None], filled.time[:, None]
    if query.lineage is None:
        # Fillers stand at NOWHERE as well, and would see the empty slots.
        mask = grid.visible(*here) & (filled.row < NOWHERE)[:, None]
        positions = position(row, time), position(filled.row, filled.time)  # twice NOWHERE wraps: unseen
    else:  # whatever rows it runs through, a line is as long as it took
        line = jnp.take_along_axis(query.lineage, at_places(jnp.arange(rows)[None], 0)[:, :, None], axis=1)
        seen = jnp.take_along_axis(line, filled.time[:, None], axis=2, mode="clip")
        mask, positions = seen == filled.row[:, None], (time, filled.time)
    tokens = at_places(query.tokens, 0)
    if queries == batch * width:
        number = place + width * jnp.arange(batch)[:, None]
        return Step(tokens.reshape(-1), None, None, mask, *positions, row, time, start, filled), number, filled

    before = (jnp.cumsum(live.sum(axis=1)) - live.sum(axis=1))[:, None]  # live queries of earlier examples
    number = before + place  # [B, S], of a live query among all
    query_at_place = at_places(number, queries)
    numbers = jnp.arange(queries)
    example = (before[:, 0] <= numbers[:, None]).sum(axis=1) - 1
    place_of_query = jnp.where(numbers < live.sum(), example * width + numbers - before[:, 0][example], batch * width)
    gathered = jnp.append(tokens.reshape(-1), 0)[place_of_query]
    return Step(gathered, query_at_place, place_of_query, mask, *positions, row, time, start, filled), number, filled


def _put(old: Array, new: Array, start: Array) -> Array:
    """The old array [B, C], with the new [B, Q] from slot `start` i32 [B|1] on."""
    if len(start) == 1:
        return jax.lax.dynamic_update_slice_in_dim(old, new, start[0], axis=1)
    place = jnp.arange(old.shape[1]) - start[:, None]
    found = jnp.take_along_axis(new, jnp.clip(place, 0, new.shape[1] - 1), axis=1)
    return jnp.where((place >= 0) & (place < new.shape[1]), found, old)
