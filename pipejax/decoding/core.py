"""The decoding loop.

A strategy is a frozen dataclass of plain numbers (static under jit). It says which tokens a step feeds, at which
places of the grid they stand, and what it takes from the logits; the loop gathers the live ones, keeps the
coordinates of all that was fed, asks the model, and hands the answers back. Nothing here knows the T5.

The grid is the meaning and the output. The work of a step follows what is live: only rows that ask are fed, and they
see a cache about as large as what is in use. XLA wants static shapes, so there are a few sizes of each (`Sizes`). For
each cache size there is a program, and in it for each number of queries a `while_loop`, which runs as long as the steps
need that number: a `switch` inside a single loop would copy the cache. When a step does not fit into the cache, the
program ends, and the program of the next cache size goes on.

Where it takes long to read the condition of a loop, several steps make one turn of it (`Sizes.turn`). All of them are
computed, and those after the end of a loop change nothing but slots that are free.

Shapes: B batch, S rows of the grid, T its time-steps, N queries of a step over the whole batch, Q queries of one
example, C cache slots in reach, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax.decoding import choice, contract
from pipejax.decoding.choice import GREEDILY, Wishes
from pipejax.decoding.gathering import NOWHERE, Filled, Query, Step, count_slots, gather, hide
from pipejax.decoding.interface import Array, Cache, Decoded, Model, Refillable, SourceIds, Stepper
from pipejax.system import Tree
from pipejax.system.errors import UserError

QUERIES = (8, 20, 48, 128)  # live rows of a step over the whole batch, on a CPU


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The static sizes that a decode goes through."""

    queries: tuple[int, ...]  # N, ascending; the last holds every step
    slots: tuple[int, ...]  # C, ascending; the last holds every decode
    turn: int = 1  # steps between two looks at a loop's condition

    @classmethod
    def fit(
        cls,
        strategy: Stepper,
        batch: int,
        *,
        queries: tuple[int, ...] = (),
        slots: tuple[int, ...] = (),
        turn: int = 1,
    ) -> "Sizes":
        """The sizes that hold every decode of that strategy."""
        most = batch * strategy.most_queries
        chosen = (*(n for n in queries if n < most), most)
        holds = strategy.slots + strategy.most_queries  # the last write needs room for its fillers
        return cls(chosen, (*(c for c in slots if min(chosen[0], strategy.most_queries) <= c < holds), holds), turn)

    def full(self) -> UserError:
        """The error of a strategy that fills more slots than it said."""
        return UserError(f"slots: found a cache of {self.slots[-1]}, full before all examples are done; expected more")


@flax.struct.dataclass
class Carry:
    """The state of a decode that goes from step to step."""

    state: Tree
    query: Query  # of the next step
    size: Array  # i32 scalar, index into `Sizes.queries`, the least that holds it
    used: Array  # i32 [B|1], slots that are taken, by each example or by any
    filled: Filled
    cache: Tree
    log_probs: Array | None = None  # as in `Decoded`
    states: Array | None = None  # i32 [B, R], of the rows by `Wishes.grammar`, if there is one
    steps_left: Array | None = None  # i32 scalar, until it pauses; below zero: at once; None: it does not pause


@flax.struct.dataclass
class Stretch:
    """The part of a decode before a step that did not fit into its cache."""

    over: Array  # bool scalar, every example is done; else a larger cache is needed
    decoded: Decoded  # the rows so far; the result, if it is over
    carry: Carry
    steps_left: Array | None = None  # as in `Carry`


def run(decode_stretch: Callable[[int, Carry | None], Stretch], sizes: Sizes) -> Stretch:
    """Decodes with growing caches until every example is done (paper, Algorithm 1).

    Each cache size is a program of its own: a decode that stays short never compiles what a longer one would need.
    """
    carry: Carry | None = None
    for slots in sizes.slots:
        found = decode_stretch(slots, carry)
        if np.all(found.over):
            return found
        carry = found.carry
    raise sizes.full()


def begin(
    strategy: Stepper, model: Model[Cache], state: Tree, sizes: Sizes, *, wishes: Wishes = GREEDILY, apart: bool = False
) -> Carry:
    """The carry that the first step needs, with no slot yet; traced."""
    done = strategy.done(state)
    batch = (jnp.shape(done) or (1,))[0]
    contract.expect(strategy, "done", done, "bool", (batch,))
    none = jnp.zeros((batch, 0), jnp.int32)
    state, query = strategy.query(state)
    contract.check_query(strategy, query, batch)
    return Carry(
        state=state,
        query=query,
        size=_size(query, sizes),
        used=jnp.zeros(batch if apart else 1, jnp.int32),
        filled=Filled(none, none),
        cache=model.cache(0, None),
        log_probs=jnp.zeros((batch, *strategy.places)) if wishes.scores else None,
        states=None if wishes.grammar is None else jnp.asarray(wishes.grammar.starts),
    )


def decode(
    strategy: Stepper,
    model: Model[Cache],
    carry: Carry,
    *,
    sizes: Sizes,
    slots: int,
    wishes: Wishes = GREEDILY,
    pause_after: Array | None = None,
    listen: Callable[[Array], Array] = lambda count: count,
    watched: Array | None = None,
) -> Stretch:
    """Goes on until every example is done, or the next step does not fit into a cache of that many slots; traced.

    It pauses after `pause_after` steps, i32, or as soon as one of the `watched` examples, bool [B], is done.
    """
    loop = _Loop(strategy, model, sizes, slots, wishes, listen, watched)
    carry = dataclasses.replace(grow(model, carry, slots), steps_left=pause_after)
    several = len(sizes.queries) > 1
    carry = jax.lax.while_loop(loop.goes_on, loop.sweep if several else partial(loop.turn, 0), carry)
    decoded = dataclasses.replace(strategy.result(carry.state), log_probs=carry.log_probs)
    contract.check_result(strategy, decoded, len(carry.query.live))
    over, left = strategy.done(carry.state).all(), carry.steps_left
    return Stretch(over, decoded, dataclasses.replace(carry, steps_left=None), left)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The steps of a stretch; `size`: an index into `Sizes.queries`."""

    strategy: Stepper
    model: Model[Tree]
    sizes: Sizes
    slots: int
    wishes: Wishes
    listen: Callable[[Array], Array]
    watched: Array | None

    @property
    def widths(self) -> list[int]:
        """The slots that a step of each size writes, fillers included. One wider than the cache waits for a larger."""
        return [min(n, self.strategy.most_queries) for n in self.sizes.queries]

    def goes_on(self, carry: Carry) -> Array:
        done = self.strategy.done(carry.state)
        limits = jnp.asarray([self.slots - width for width in self.widths], jnp.int32)
        # After a step of a longer turn there must be room for the writes of those that are not taken.
        taken = carry.used if self.sizes.turn == 1 else carry.used + carry.query.live.sum(axis=1)
        goes = ~done.all() & (taken.max() <= limits[carry.size])
        if self.watched is not None:
            goes &= ~(done & self.watched).any()
        return goes if carry.steps_left is None else goes & (carry.steps_left > 0)

    def fits(self, size: int, carry: Carry) -> Array:
        return self.goes_on(carry) & (carry.size == size)

    def sweep(self, carry: Carry) -> Carry:
        for size, width in enumerate(self.widths):
            if width <= self.slots:
                carry = jax.lax.while_loop(partial(self.fits, size), partial(self.turn, size), carry)
        return carry

    def turn(self, size: int, carry: Carry) -> Carry:
        if self.sizes.turn == 1:
            return self.step(size, carry)
        # A loop of a known length is compiled once, and nobody reads its condition.
        found: Carry = jax.lax.fori_loop(0, self.sizes.turn, lambda _, carry: self.step_if_it_fits(size, carry), carry)
        return found

    def step_if_it_fits(self, size: int, carry: Carry) -> Carry:
        takes, new = self.fits(size, carry), self.step(size, carry)
        # To choose a cache would copy it: what a step wrote that does not count stays, in free slots.
        old = dataclasses.replace(carry, cache=new.cache)
        chosen: Carry = jax.tree.map(lambda a, b: a if a is b else jnp.where(takes, a, b), new, old)
        return chosen

    def step(self, size: int, carry: Carry) -> Carry:
        strategy, wishes, queries = self.strategy, self.wishes, self.sizes.queries[size]
        asked, number_of, filled = gather(
            carry.query, carry.filled, carry.used, queries, self.widths[size], strategy.position
        )
        number_of = jnp.minimum(number_of, queries - 1)
        chosen, logits, cache = self.choose(asked, carry)
        states = carry.states
        if wishes.grammar is not None:
            assert states is not None, "as `begin` was told"
            states = choice.follow(states, chosen, asked, wishes.grammar)
        state = strategy.advance(carry.state, jax.tree.map(lambda x: x[number_of], chosen))
        contract.check_state(strategy, carry.state, state)
        live, kept, log_probs = carry.query.live, strategy.kept(state), carry.log_probs
        more = live.sum(axis=1) if kept is None else count_slots(live, kept)
        if kept is not None:
            contract.expect(strategy, "kept", kept, "bool", live.shape)
            filled = hide(live & ~kept, live, filled, carry.used)
        if wishes.scores:
            assert log_probs is not None and logits is not None, "as `begin` was told"
            found = choice.score(logits, chosen, wishes)[number_of]
            log_probs = choice.record_scores(log_probs, found, carry.query, live if kept is None else live & kept)
        state, query = strategy.query(state)
        contract.check_query(strategy, query, len(live))
        return Carry(
            state=state,
            query=query,
            size=_size(query, self.sizes),
            used=carry.used + (more if len(carry.used) == len(more) else more.max()),
            filled=filled,
            cache=cache,
            log_probs=log_probs,
            states=states,
            steps_left=None if carry.steps_left is None else self.listen(carry.steps_left - 1),
        )

    def choose(self, asked: Step, carry: Carry) -> tuple[Tree, Array | None, Tree]:
        """The tokens [N] that are chosen, or all that `Stepper.choose` finds; the logits, if somebody needs them."""
        strategy, wishes, logits = self.strategy, self.wishes, None
        if strategy.choose is None and not wishes.need_logits:
            chosen, cache = self.model.greedy(asked, carry.cache)
        else:
            logits, cache = self.model(asked, carry.cache)
            chosen = choice.choose_tokens(strategy.choose or choice.first_argmax, logits, asked, wishes, carry.states)
        if strategy.choose is not None and (wishes.need_logits or wishes.forced is not None):
            shape = asked.tokens.shape
            contract.expect(strategy, "choose", chosen, "int32", shape, of=", tokens, as something is wished")
        return choice.force_tokens(chosen, asked, wishes), logits, cache


def grow(model: Model[Cache], carry: Carry, slots: int) -> Carry:
    """Grows the cache of a carry to so many slots, at least as many as it has."""
    more = ((0, 0), (0, slots - carry.filled.row.shape[1]))
    filled = jax.tree.map(lambda x: jnp.pad(x, more, constant_values=NOWHERE), carry.filled)
    return dataclasses.replace(carry, filled=filled, cache=model.cache(slots, carry.cache))


def refill(
    strategy: Refillable,
    carry: Carry,
    *,
    begins: Array,
    ends: Array,
    sizes: Sizes,
    wishes: Wishes = GREEDILY,
    source: SourceIds | None = None,
) -> Carry:
    """The carry, whose examples take slots apart, after some begin and some are given up, bool [B] each.

    `source`: the sources of all examples, for a strategy that reads them.
    """

    def put(new: Array, old: Array) -> Array:
        return jnp.where(begins.reshape(-1, *[1] * (new.ndim - 1)), new, old) if len(new) == len(begins) else old

    def begin_anew(old: tuple[Tree, Query]) -> tuple[Tree, Query]:
        fresh: tuple[Tree, Query] = strategy.query(strategy.init(len(begins), source))
        found: tuple[Tree, Query] = jax.tree.map(put, fresh, old)
        return found

    old = strategy.stop(carry.state, ends), carry.query
    if strategy.borrows:  # a small model decodes a draft in the first query, which takes time
        state, query = jax.lax.cond(begins.any(), begin_anew, lambda old: old, old)
    else:
        state, query = begin_anew(old)
    query = dataclasses.replace(query, live=query.live & ~(ends & ~begins)[:, None])
    changes = begins | ends
    filled = dataclasses.replace(carry.filled, row=jnp.where(changes[:, None], NOWHERE, carry.filled.row))
    log_probs = carry.log_probs
    return dataclasses.replace(
        carry,
        state=state,
        query=query,
        size=_size(query, sizes),
        used=jnp.where(changes, 0, carry.used),
        filled=filled,
        log_probs=None if log_probs is None else jnp.where(changes[:, None, None], 0, log_probs),
        states=carry.states if wishes.grammar is None else jax.tree.map(put, wishes.grammar.starts, carry.states),
    )


def _size(query: Query, sizes: Sizes) -> Array:
    total = query.live.sum()
    size: Array = sum((total > n).astype(jnp.int32) for n in sizes.queries[:-1]) + jnp.int32(0)
    return size
