"""The decoding loop and the interface of a strategy.

A strategy is a frozen dataclass of plain numbers (static under jit). It says which tokens a step feeds, at which
places of the grid they stand, and what it takes from the logits; the loop gathers the live ones, keeps the
coordinates of all that was fed, asks the model, and hands the answers back. Nothing here knows the T5.

The grid is the meaning and the output. The work of a step follows what is live: only rows that ask are fed, and they
see a cache about as large as what is in use. XLA wants static shapes, so there are a few sizes of each (`Sizes`). A
program holds one `while_loop` a number of queries, each running as long as the decode fits it: a `switch` inside one
loop would copy the cache. When the cache is full the program ends, and the next one goes on with a larger cache.

Shapes: B batch, S rows of the grid, T its time-steps, N queries of a step over the whole batch, Q queries of one
example, C cache slots in reach, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax import grid

Array = jax.Array
Cache = TypeVar("Cache")

TRUNCATIONS = (None, "time_max", "sub_max", "max_length")  # what the codes in Decoded.truncated stand for
NOWHERE = 2**30  # the row of an empty slot and of a filler query: later than every real row, so none sees it


@flax.struct.dataclass
class SourceIds:
    """A batch of sources, for strategies that read them."""

    ids: Any  # i32 [B, L]
    length: Any  # i32 [B], how many are real


@flax.struct.dataclass
class Query:
    """What one step may ask."""

    tokens: Array  # i32 [B, S]
    row: Array  # i32 [B|1, S], coordinates on the grid
    time: Array  # i32 [B|1, S]
    live: Array  # bool [B, S], True: this one is fed; at least one is until every example is done
    lineage: Array | None = None  # i32 [B, S, T], the one row that it sees at each time; None: what the grid says


@flax.struct.dataclass
class Step:
    """What the model is asked: N live queries, gathered; the last may be fillers, which stand for no query.

    Where every example has all its Q places among the N, the two index arrays are None.
    """

    tokens: Array  # i32 [N]
    query_at_place: Array | None  # i32 [B, Q], index among the N of the query at each place of an example; N: none
    place_of_query: Array | None  # i32 [N], index of each query's place among all B * Q; B * Q: it is a filler
    mask: Array  # bool [B, Q, C], True: the query sees that slot, its own included
    distance: Array  # i32 [B, Q, C]
    start: Array  # i32 scalar: keys of place q go to slot start + q


@flax.struct.dataclass
class Decoded:
    """The result of a strategy: rows of tokens without bos and eos."""

    tokens: Array  # i32 [B, R, W], R rows, W their longest; meaningless beyond `lengths`
    lengths: Array  # i32 [B, R], 0 for empty rows and rows that never started
    steps: Array  # i32 [B], time-steps of Algorithm 1 (paper section 3.4), those without an open row included
    truncated: Array  # i32 [B], index into TRUNCATIONS
    calls: Any = None  # i32 [B], decoder calls; None: `Strategy.calls` knows


class Strategy(Protocol):
    """What a decoding strategy offers. Its state is a pytree of fixed shapes."""

    @property
    def rows(self) -> int:
        """S, the most queries of an example in one step."""

    @property
    def slots(self) -> int:
        """The most slots a decode can fill: the most queries of each step, summed over the steps."""

    def init(self, batch: int, source: SourceIds | None = None) -> Any:
        """The state before the first step; `source`: for strategies that read it."""

    def query(self, state: Any) -> tuple[Any, Query]:
        """Opens the next step: the state with any new rows, and what to ask."""

    def choose(self, logits: Array) -> Any:
        """What it takes from logits f32 [V, N]: arrays [N, ...], the answers."""

    def advance(self, state: Any, answers: Any) -> Any:
        """Takes the answers [B, S, ...] to that step's live queries. A finished example must not change any more."""

    def kept(self, state: Any) -> Array | None:
        """bool [B, S], True at queries of the last step that later ones may see; None: at all."""

    def done(self, state: Any) -> Array:
        """bool [B], True at finished examples."""

    def result(self, state: Any) -> Decoded:
        """The rows, once all are done."""

    def calls(self, decoded: Decoded) -> Any:
        """i32 [B], decoder calls that an example takes by itself, in NumPy."""


class Model(Protocol[Cache]):
    """The decoder of a batch, as the loop sees it."""

    def cache(self, slots: int, old: Cache | None) -> Cache:
        """A cache of that many slots: those of `old`, if there is one, and zeroed ones after them."""

    def __call__(self, step: Step, cache: Cache) -> tuple[Array, Cache]:
        """Logits f32 [V, N] over the cache, and the cache with the step's keys and values written."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The static sizes that a decode goes through."""

    queries: tuple[int, ...]  # N, ascending; the last holds every step
    slots: tuple[int, ...]  # C, ascending; the last holds every decode

    @classmethod
    def fit(
        cls, strategy: Strategy, batch: int, *, queries: tuple[int, ...] = (), slots: tuple[int, ...] = ()
    ) -> "Sizes":
        """The sizes that hold every decode of that strategy.

        Args:
          strategy: says how much that can be.
          batch: B.
          queries: wanted values of N; those too large fall away, the largest that is needed comes in addition.
          slots: wanted values of C, likewise.
        """
        most, widest = batch * strategy.rows, strategy.rows
        holds = strategy.slots + widest  # the last write needs room for its fillers
        return cls((*(n for n in queries if n < most), most), (*(c for c in slots if widest <= c < holds), holds))


@flax.struct.dataclass
class Filled:
    """Coordinates of the slots of the cache."""

    row: Array  # i32 [B, C], NOWHERE where nothing was fed
    time: Array  # i32 [B, C]


@flax.struct.dataclass
class Carry:
    """What goes from step to step."""

    state: Any
    query: Query  # of the next step
    size: Array  # i32 scalar, index into `Sizes.queries`, the least that holds it
    used: Array  # i32 scalar, slots that are taken, by any example
    filled: Filled
    cache: Any


@flax.struct.dataclass
class Stretch:
    """What a decode came to before its cache was full."""

    over: Array  # bool scalar, every example is done; else the cache is full
    decoded: Decoded  # the result, if it is over
    carry: Carry


def run(decode_stretch: Callable[[int, Carry | None], Stretch], sizes: Sizes) -> Stretch:
    """Decodes with growing caches until every example is done (paper, Algorithm 1).

    Each cache size is a program of its own: a decode that stays short never compiles what a longer one would need.

    Args:
      decode_stretch: `decode`, compiled: takes the number of slots and what the stretch before it left.
      sizes: of the caches, in turn; results do not depend on them.
    """
    carry: Carry | None = None
    for slots in sizes.slots:
        found = decode_stretch(slots, carry)
        if np.all(found.over):
            break
        carry = found.carry
    return found


def begin(strategy: Strategy, model: Model[Cache], state: Any, sizes: Sizes) -> Carry:
    """What the first step needs, from `strategy.init(batch)`, with no slot yet."""
    zero, none = jnp.int32(0), jnp.zeros((strategy.done(state).shape[0], 0), jnp.int32)
    return _open_step(strategy, sizes, state, zero, Filled(none, none), model.cache(0, None))


def decode(strategy: Strategy, model: Model[Cache], carry: Carry, *, sizes: Sizes, slots: int) -> Stretch:
    """Goes on until every example is done, or a cache of that many slots is full; traced."""
    widths = [min(n, strategy.rows) for n in sizes.queries]
    limits = jnp.asarray([slots - w for w in widths], jnp.int32)  # a step writes `width` slots, its fillers included
    more = ((0, 0), (0, slots - carry.filled.row.shape[1]))
    filled = jax.tree.map(lambda x: jnp.pad(x, more, constant_values=NOWHERE), carry.filled)
    carry = dataclasses.replace(carry, filled=filled, cache=model.cache(slots, carry.cache))

    def going(carry: Carry) -> Array:
        return ~strategy.done(carry.state).all() & (carry.used <= limits[carry.size])

    def fits(size: int, carry: Carry) -> Array:
        return going(carry) & (carry.size == size)

    def step(size: int, carry: Carry) -> Carry:
        queries = sizes.queries[size]
        asked, number_of, filled = gather(carry.query, carry.filled, carry.used, queries, widths[size])
        logits, cache = model(asked, carry.cache)
        answers = jax.tree.map(lambda x: x[jnp.minimum(number_of, queries - 1)], strategy.choose(logits))
        used = carry.used + carry.query.live.sum(axis=1).max()
        state = strategy.advance(carry.state, answers)
        kept = strategy.kept(state)
        if kept is not None:
            filled = without(carry.query.live & ~kept, carry.query.live, filled, carry.used)
            used = carry.used + taken(carry.query.live, kept)
        return _open_step(strategy, sizes, state, used, filled, cache)

    def sweep(carry: Carry) -> Carry:
        for i in range(len(widths)):
            carry = jax.lax.while_loop(partial(fits, i), partial(step, i), carry)
        return carry

    carry = jax.lax.while_loop(going, sweep if len(widths) > 1 else partial(step, 0), carry)
    return Stretch(strategy.done(carry.state).all(), strategy.result(carry.state), carry)


def _open_step(strategy: Strategy, sizes: Sizes, state: Any, used: Array, filled: Filled, cache: Any) -> Carry:
    state, query = strategy.query(state)
    total = query.live.sum()
    size = sum((total > n).astype(jnp.int32) for n in sizes.queries[:-1]) + jnp.int32(0)
    return Carry(state, query, size, used, filled, cache)


def first_argmax(logits: Array) -> Array:
    """Greedy choice i32 [N] from logits [V, N]; the lowest id wins a tie."""
    # Else XLA may compute them once for the maximum and once to compare, rounded otherwise: none would be equal.
    logits = jax.lax.optimization_barrier(logits)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    return jnp.where(logits == logits.max(axis=0), ids, logits.shape[0] - 1).min(axis=0)


def taken(live: Array, kept: Array) -> Array:
    """i32 scalar, slots of a step up to the last that is kept; those after it are free for the next step."""
    return jnp.where(live & kept, jnp.cumsum(live, axis=1), 0).max()


def without(rejected: Array, live: Array, filled: Filled, start: Array) -> Filled:
    """The coordinates, where nobody sees the rejected ones [B, S] of the live queries that were fed from `start` on."""
    slot = jnp.where(rejected, start + jnp.cumsum(live, axis=1) - 1, filled.row.shape[1])
    example = jnp.arange(live.shape[0])[:, None]
    return Filled(filled.row.at[example, slot].set(NOWHERE, mode="drop"), filled.time)


def gather(query: Query, filled: Filled, start: Array, queries: int, width: int) -> tuple[Step, Array, Filled]:
    """Gathers the live queries of a batch into N = `queries`, at most Q = `width` an example.

    Returns:
      what to ask the model; for each of the [B, S] queries its number among the N; the coordinates with theirs.
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
    here = row[:, :, None], time[:, :, None], filled.row[:, None], filled.time[:, None]
    if query.lineage is None:
        # Fillers stand at NOWHERE as well, and would see the empty slots.
        mask, distance = grid.visible(*here) & (filled.row < NOWHERE)[:, None], grid.distance(*here)
    else:  # whatever rows it runs through, a line is as long as it took
        line = jnp.take_along_axis(query.lineage, at_places(jnp.arange(rows)[None], 0)[:, :, None], axis=1)
        seen = jnp.take_along_axis(line, filled.time[:, None], axis=2, mode="clip")
        mask, distance = seen == filled.row[:, None], grid.distance(0, here[1], 0, here[3])
    tokens = at_places(query.tokens, 0)
    if queries == batch * width:
        number = place + width * jnp.arange(batch)[:, None]
        return Step(tokens.reshape(-1), None, None, mask, distance, start), number, filled

    before = (jnp.cumsum(live.sum(axis=1)) - live.sum(axis=1))[:, None]  # live queries of earlier examples
    number = before + place  # [B, S], of a live query among all
    query_at_place = at_places(number, queries)
    numbers = jnp.arange(queries)
    example = (before[:, 0] <= numbers[:, None]).sum(axis=1) - 1
    place_of_query = jnp.where(numbers < live.sum(), example * width + numbers - before[:, 0][example], batch * width)
    gathered = jnp.append(tokens.reshape(-1), 0)[place_of_query]
    return Step(gathered, query_at_place, place_of_query, mask, distance, start), number, filled
