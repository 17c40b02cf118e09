"""The decoding loop and the interface of a strategy.

A strategy is a frozen dataclass of plain numbers (static under jit). It says which tokens a step feeds, at which
places of the grid they stand, and what it takes from the logits; the loop packs them, keeps the coordinates of all that
was fed, asks the model, and hands the answers back. Nothing here knows the T5.

The grid is the meaning and the output. The work of a step follows what is live: only rows that ask are fed, and they
see only the stretch of cache in use. XLA wants static shapes, so there are a few sizes of each (`Schedule`), and one
`while_loop` a pair of sizes, each running as long as the decode fits it. A `switch` inside one loop would copy the
cache.

Shapes: B batch, S rows of the grid, T its time-steps, N queries of a step over the whole batch, Q queries of one
example, C cache slots in reach, V vocabulary.
"""

import dataclasses
import itertools
from functools import partial
from typing import Any, Protocol, TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from pipejax import grid

Array = jax.Array
Cache = TypeVar("Cache")

TRUNCATIONS = (None, "time_max", "sub_max", "max_length")  # what the codes in Decoded.truncated stand for
NOWHERE = 2**30  # the row of a slot that holds nothing: above every query, hence visible to none


@flax.struct.dataclass
class Query:
    """What one step may ask: a token a row at most."""

    tokens: Array  # i32 [B, S]
    row: Array  # i32 [B|1, S], coordinates on the grid
    time: Array  # i32 [B|1, S]
    live: Array  # bool [B, S], True: this one is fed; at least one is until every example is done
    lineage: Array | None = None  # i32 [B, S, T], the one row that it sees at each time; None: what the grid says


@flax.struct.dataclass
class Step:
    """What the model is asked: N queries, packed. `places` and `home` are None if B = 1, where N = Q."""

    tokens: Array  # i32 [N]
    places: Array | None  # i32 [B, Q], number of the query at each place of an example; N: none stands there
    home: Array | None  # i32 [N], place of each query, counted through [B * Q]; B * Q: it is a filler
    mask: Array  # bool [B, Q, C], True: the query sees that slot, its own included
    distance: Array  # i32 [B, Q, C]
    start: Array  # i32 scalar: keys of place q go to slot start + q of the last stretch


@flax.struct.dataclass
class Decoded:
    """The result of a strategy: rows of tokens without bos and eos."""

    tokens: Array  # i32 [B, R, W], R rows, W their longest; meaningless beyond `lengths`
    lengths: Array  # i32 [B, R], 0 for empty rows and rows that never started
    steps: Array  # i32 [B], time-steps of Algorithm 1 (paper section 3.4)
    truncated: Array  # i32 [B], index into TRUNCATIONS


class Strategy(Protocol):
    """What a decoding strategy offers. Its state is a pytree of fixed shapes."""

    @property
    def rows(self) -> int:
        """S, the most queries of an example in one step."""

    @property
    def slots(self) -> int:
        """The most slots a decode can fill: the most queries of each step, summed over the steps."""

    def init(self, batch: int) -> Any:
        """The state before the first step."""

    def query(self, state: Any) -> tuple[Any, Query]:
        """Opens the next step: the state with any new rows, and what to ask."""

    def choose(self, logits: Array) -> Any:
        """What it takes from logits f32 [V, N]: arrays [N, ...], the answers."""

    def advance(self, state: Any, answers: Any) -> Any:
        """Takes the answers [B, S, ...] to that step's live queries. A finished example must not change any more."""

    def done(self, state: Any) -> Array:
        """bool [B], True at finished examples."""

    def result(self, state: Any) -> Decoded:
        """The rows, once all are done."""


class Model(Protocol[Cache]):
    """The decoder of a batch, as the loop sees it."""

    def stretch(self, slots: int) -> Cache:
        """A piece of cache of that many zeroed slots."""

    def __call__(self, step: Step, past: tuple[Cache, ...], current: Cache) -> tuple[Array, Cache]:
        """Logits f32 [V, N] over all stretches, and the current one with the step's keys and values written."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The static sizes that a decode goes through."""

    queries: tuple[int, ...]  # N, ascending; the last holds every step
    stretches: tuple[int, ...]  # slots of each stretch of cache, in order of use; together they hold every decode

    @classmethod
    def fit(
        cls, strategy: Strategy, batch: int, *, queries: tuple[int, ...] = (), prefixes: tuple[int, ...] = ()
    ) -> "Schedule":
        """The sizes that hold every decode of that strategy.

        Args:
          strategy: says how much that can be.
          batch: B.
          queries: wanted values of N; those too large fall away, the largest that is needed comes in addition.
          prefixes: wanted totals of slots after each stretch, likewise.
        """
        most, widest = batch * strategy.rows, strategy.rows
        totals = [0, *(p for p in prefixes if widest <= p < strategy.slots)]
        stretches = [b - a for a, b in itertools.pairwise(totals)]
        if any(s < widest for s in stretches):
            raise ValueError(f"prefixes: found {prefixes}; expected steps of at least {widest}")
        # Each change of stretch may leave slots unused, and the last write needs room for its fillers.
        rest = strategy.slots - totals[-1] + widest * (len(stretches) + 1)
        return cls((*(n for n in queries if n < most), most), (*stretches, rest))


@flax.struct.dataclass
class Filled:
    """Coordinates of the slots of one stretch."""

    row: Array  # i32 [B, C], NOWHERE where nothing was fed
    time: Array  # i32 [B, C]


@flax.struct.dataclass
class Carry:
    """What changes from step to step."""

    state: Any
    query: Query  # the next one
    size: Array  # i32 scalar, index into Schedule.queries that it needs
    used: Array  # i32 scalar, slots used of the current stretch
    calls: Array  # i32 scalar, decoder calls so far


def first_argmax(logits: Array) -> Array:
    """Greedy choice i32 [N] from logits [V, N]; the lowest id wins a tie."""
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    return jnp.where(logits == logits.max(axis=0), ids, logits.shape[0] - 1).min(axis=0)


def run(strategy: Strategy, model: Model[Cache], state: Any, *, schedule: Schedule) -> tuple[Decoded, Array]:
    """Decodes until every example is done (paper, Algorithm 1).

    Args:
      strategy: static.
      model: of the same batch.
      state: `strategy.init(batch)`.
      schedule: the static sizes; results do not depend on them.

    Returns:
      the rows, and the number of decoder calls (i32 scalar).
    """
    batch = strategy.done(state).shape[0]
    widths = [min(n, strategy.rows) for n in schedule.queries]

    def opened(state: Any, used: Array, calls: Array) -> Carry:
        state, query = strategy.query(state)
        total = query.live.sum()
        size = sum((total > n).astype(jnp.int32) for n in schedule.queries[:-1]) + jnp.int32(0)
        return Carry(state, query, size, used, calls)

    def stage(number: int, carry: Carry, past: tuple[tuple[Cache, Filled], ...]) -> Carry:
        slots = schedule.stretches[number]
        nothing = jnp.full((batch, slots), NOWHERE, jnp.int32)
        start = carry, model.stretch(slots), Filled(nothing, nothing)
        limits = jnp.asarray([slots - w for w in widths], jnp.int32)

        def going(loop: tuple[Carry, Cache, Filled]) -> Array:
            carry = loop[0]
            return ~strategy.done(carry.state).all() & (carry.used <= limits[carry.size])

        def fits(size: int, loop: tuple[Carry, Cache, Filled]) -> Array:
            return going(loop) & (loop[0].size == size)

        def step(size: int, loop: tuple[Carry, Cache, Filled]) -> tuple[Carry, Cache, Filled]:
            carry, cache, filled = loop
            asked, number_of, filled = pack(
                carry.query, [f for _, f in past], filled, carry.used, schedule.queries[size], widths[size]
            )
            logits, cache = model(asked, tuple(c for c, _ in past), cache)
            number_of = jnp.minimum(number_of, schedule.queries[size] - 1)
            answers = jax.tree.map(lambda x: x[number_of], strategy.choose(logits))
            used = carry.used + carry.query.live.sum(axis=1).max()
            return opened(strategy.advance(carry.state, answers), used, carry.calls + 1), cache, filled

        def sweep(loop: tuple[Carry, Cache, Filled]) -> tuple[Carry, Cache, Filled]:
            for i in range(len(widths)):
                loop = jax.lax.while_loop(partial(fits, i), partial(step, i), loop)
            return loop

        if len(widths) == 1:
            carry, cache, filled = jax.lax.while_loop(going, partial(step, 0), start)
        else:
            carry, cache, filled = jax.lax.while_loop(going, sweep, start)
        if number + 1 == len(schedule.stretches):
            return carry
        past = (*past, (cache, filled))
        carry = dataclasses.replace(carry, used=jnp.int32(0))
        # Once in a decode: what never comes this far pays for no further stretch.
        return jax.lax.cond(
            strategy.done(carry.state).all(), lambda c, p: c, lambda c, p: stage(number + 1, c, p), carry, past
        )

    zero = jnp.int32(0)
    last = stage(0, opened(state, zero, zero), ())
    return strategy.result(last.state), last.calls


def pack(
    query: Query, past: list[Filled], filled: Filled, start: Array, queries: int, width: int
) -> tuple[Step, Array, Filled]:
    """Gathers the live queries of a batch into N = `queries`, at most Q = `width` an example.

    Returns:
      what to ask the model; for each of the [B, S] queries its number among the N; the stretch's coordinates.
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
    filled = Filled(
        jax.lax.dynamic_update_slice_in_dim(filled.row, row, start, axis=1),
        jax.lax.dynamic_update_slice_in_dim(filled.time, time, start, axis=1),
    )
    key_row, key_time = (jnp.concatenate([getattr(f, x) for f in (*past, filled)], axis=1) for x in ("row", "time"))
    here = row[:, :, None], time[:, :, None], key_row[:, None], key_time[:, None]
    if query.lineage is None:
        mask, distance = grid.visible(*here) & (key_row < NOWHERE)[:, None], grid.distance(*here)
    else:  # whatever rows it runs through, a line is as long as it took
        line = jnp.take_along_axis(query.lineage, at_places(jnp.arange(rows)[None], 0)[:, :, None], axis=1)
        seen = jnp.take_along_axis(line, key_time[:, None], axis=2, mode="clip")
        mask, distance = seen == key_row[:, None], grid.distance(0, here[1], 0, here[3])
    tokens = at_places(query.tokens, 0)
    if batch == 1:
        return Step(tokens[0], None, None, mask, distance, start), place, filled

    before = jnp.cumsum(live.sum(axis=1)) - live.sum(axis=1)  # live queries of earlier examples
    number = before[:, None] + place  # [B, S], of a live query among all
    places = at_places(number, queries)
    every = places.reshape(-1)
    home = jnp.where(every[None] == jnp.arange(queries)[:, None], jnp.arange(batch * width), batch * width).min(axis=1)
    packed = jnp.append(tokens.reshape(-1), 0)[home]
    return Step(packed, places, home, mask, distance, start), number, filled
