"""The decoding loop.

A strategy is a frozen dataclass of plain numbers (static under jit). The strategy determines which tokens a step feeds,
the coordinates of these tokens on the grid, and which tokens are chosen from the logits. The loop packs the live
queries of a batch, records the coordinates of all cache slots, calls the model, and passes the generated tokens back to
the strategy. This module does not depend on a particular model.

The work of a step is proportional to the live queries: only open rows are fed, and they attend to a cache that is
about as large as the slots in use. XLA requires static shapes, so code is compiled for a few numbers of queries and a
few cache sizes (`Sizes`). Each cache size has a separate program. The program contains one `while_loop` for each number
of queries; the loop runs as long as the steps need that number. (A `switch` inside a single loop would copy the cache.)
When a step does not fit into the cache, the program returns, and the program of the next cache size continues.

On devices where reading the condition of a loop takes long, one iteration of the loop computes several steps
(`Sizes.steps`). Steps after the end of a decode are computed as well, but change only free slots.

Shapes: B batch, S most queries of an example in a step (one for each row, unless there are drafts), T time-steps of the
grid, N queries of a step over the whole batch, Q queries of one example, C cache slots of the program, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax.decoding import choice, strategy_checks
from pipejax.decoding.choice import GREEDILY, DecodingOptions
from pipejax.decoding.gathering import NOWHERE, Filled, Query, Step, count_slots, gather, hide
from pipejax.decoding.rules import Queries, check_rules, known_rows
from pipejax.decoding.strategy import (
    Array,
    Cache,
    Decoded,
    Model,
    ModelWithHidden,
    Refillable,
    SourceIds,
    Stepper,
    group_of,
    wants,
)
from pipejax.system import Tree
from pipejax.system.errors import UserError

QUERY_COUNTS = (8, 20, 48, 128)  # numbers of live queries of a step over the whole batch, on a CPU


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The static sizes for which the programs of a decode are compiled."""

    query_counts: tuple[int, ...]  # values of N, ascending; the last suffices for every step
    slots: tuple[int, ...]  # values of C, ascending; the last suffices for every decode
    steps: int = 1  # number of steps in one iteration of a loop

    @classmethod
    def fit(
        cls,
        strategy: Stepper,
        batch: int,
        *,
        query_counts: tuple[int, ...] = (),
        slots: tuple[int, ...] = (),
        steps: int = 1,
    ) -> "Sizes":
        """Chooses sizes that suffice for every decode of a strategy.

        Args:
          strategy: the strategy.
          batch: B.
          query_counts: the values of N to choose from; the largest possible one is always added.
          slots: the cache sizes to choose from; the largest possible size is always added.
          steps: steps in one iteration of a loop.
        """
        most = batch * strategy.most_queries
        chosen = (*(n for n in query_counts if n < most), most)
        holds = strategy.slots + strategy.most_queries  # the last step also writes its fillers
        return cls(chosen, (*(c for c in slots if min(chosen[0], strategy.most_queries) <= c < holds), holds), steps)

    def full(self) -> UserError:
        """Returns the error for a strategy that fills more slots than its `slots`."""
        return UserError(
            "slots",
            found=f"a cache of {self.slots[-1]} slots, which is full before all examples are finished",
            expected="more slots",
        )


@flax.struct.dataclass
class Carry:
    """The state of a decode, carried from step to step."""

    state: Tree  # the state of the strategy
    query: Query  # the queries of the next step
    size: Array  # i32 scalar, index into `Sizes.query_counts` of the smallest size that suffices for `query`
    used: Array  # i32 [B|1], number of used slots: of each example, or of the batch if examples share slots
    filled: Filled  # the coordinates of the slots
    cache: Tree  # the cache of the model
    log_probs: Array | None = None  # f32 [B, R, W], as in `Decoded`
    states: tuple[Tree, ...] = ()  # the state of each of `DecodingOptions.rules`, arrays [B, R, ...]
    steps_left: Array | None = None  # i32 scalar, steps until the loop pauses; None: the loop does not pause


@flax.struct.dataclass
class Segment:
    """The result of one program: the steps of a decode that fit into its cache."""

    over: Array  # bool scalar, whether every example is done; if not, a larger cache is needed or the loop has paused
    decoded: Decoded  # the rows so far, or the final result if `over`
    carry: Carry  # the carry for the next program
    steps_left: Array | None = None  # as in `Carry`


def run(decode_segment: Callable[[int, Carry | None], Segment], sizes: Sizes) -> Segment:
    """Decodes with growing caches until every example is done (paper, Algorithm 1, lines 4-14).

    Each cache size has a separate program, so a short decode never compiles the programs of a long one.

    Args:
      decode_segment: runs the program of a cache size C from a carry (None: from the beginning).
      sizes: the sizes of the caches.

    Raises:
      UserError: the strategy fills more slots than the largest cache has.
    """
    carry: Carry | None = None
    for slots in sizes.slots:
        found = decode_segment(slots, carry)
        if np.all(found.over):
            return found
        carry = found.carry
    raise sizes.full()


def run_in_one_program(decode_segment: Callable[[int, Carry | None], Segment], sizes: Sizes) -> Decoded:
    """Decodes with growing caches like `run`, but traced: one program contains the loops of all cache sizes.

    A larger cache is used only if an example of the batch is not done. The function is for programs that are exported:
    all sizes are compiled, however short the answers are.

    Args:
      decode_segment: as for `run`, but traced.
      sizes: the sizes of the caches.

    Returns:
      The final result. If the strategy fills more slots than the largest cache has, the rows so far.
    """

    def continue_with(slots: tuple[int, ...], carry: Carry | None) -> Decoded:
        found = decode_segment(slots[0], carry)
        if not slots[1:]:
            return found.decoded
        result: Decoded = jax.lax.cond(found.over, lambda: found.decoded, lambda: continue_with(slots[1:], found.carry))
        return result

    return continue_with(sizes.slots, None)


def begin(
    strategy: Stepper,
    model: Model[Cache],
    state: Tree,
    sizes: Sizes,
    *,
    options: DecodingOptions = GREEDILY,
    apart: bool = False,
) -> Carry:
    """Returns the carry before the first step, with a cache of no slots; traced.

    Args:
      strategy: the strategy.
      model: the decoder of a batch.
      state: the strategy's initial state.
      sizes: as for `decode`.
      options: as for `decode`.
      apart: whether each example counts its used slots separately, as examples of a running batch do.
    """
    done = strategy.done(state)
    batch = (jnp.shape(done) or (1,))[0]
    strategy_checks.expect(strategy, "done", done, "bool", (batch,))
    none = jnp.zeros((batch, 0), jnp.int32)
    state, query = strategy.query(state)
    strategy_checks.check_query(strategy, query, batch)
    states = choice.begin_rules(options, batch, strategy.places[0])
    if options.rules:
        check_rules(strategy, state, options.rules, states)
    return Carry(
        state=state,
        query=query,
        size=_size(query, sizes),
        used=jnp.zeros(batch if apart else 1, jnp.int32),
        filled=Filled(none, none),
        cache=model.cache(0, None),
        log_probs=jnp.zeros((batch, *strategy.places)) if options.scores else None,
        states=states,
    )


def decode(
    strategy: Stepper,
    model: Model[Cache],
    carry: Carry,
    *,
    sizes: Sizes,
    slots: int,
    options: DecodingOptions = GREEDILY,
    pause_after: Array | None = None,
    listen: Callable[[Array], Array] = lambda count: count,
    watched: Array | None = None,
) -> Segment:
    """Decodes until every example is done, the loop pauses, or a step does not fit into the cache; traced.

    Each iteration is one time-step of Algorithm 1 (lines 4-13); with drafts an iteration may be several time-steps of a
    row.

    Args:
      strategy: the strategy.
      model: the decoder of a batch.
      carry: from `begin`, or from an earlier call with fewer slots.
      sizes: the numbers of queries to compile for.
      slots: C, the size of the cache.
      options: how tokens are chosen.
      pause_after: i32 scalar, the loop pauses after this number of steps; None: there is no such limit.
      listen: a function that maps the number of steps left to a new number after each step, so that the host can lower
        this number.
      watched: bool [B], the loop pauses as soon as one of these examples is done; None: done examples cause no pause.
    """
    loop = _Loop(strategy, model, sizes, slots, options, listen, watched)
    carry = dataclasses.replace(grow(model, carry, slots), steps_left=pause_after)
    several = len(sizes.query_counts) > 1
    carry = jax.lax.while_loop(loop.can_continue, loop.run_all_sizes if several else partial(loop.iterate, 0), carry)
    decoded = dataclasses.replace(strategy.result(carry.state), log_probs=carry.log_probs)
    strategy_checks.check_result(strategy, decoded, len(carry.query.live))
    over, left = strategy.done(carry.state).all(), carry.steps_left
    return Segment(over, decoded, dataclasses.replace(carry, steps_left=None), left)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The loops of `decode`. In its methods `size` is an index into `Sizes.query_counts`.

    The outer loop, whose body is `run_all_sizes`, continues while `can_continue` is True. Its body is a sequence of
    inner loops, one for each size, in ascending order. An inner loop runs while the next step needs exactly its size. A
    decode whose steps grow and then shrink thus takes few iterations of the outer loop.
    """

    strategy: Stepper
    model: Model[Tree]
    sizes: Sizes
    slots: int
    options: DecodingOptions
    listen: Callable[[Array], Array]
    watched: Array | None

    @property
    def widths(self) -> list[int]:
        """Q for each size: the slots that a step writes, fillers included. Sizes that exceed the cache are not used."""
        return [min(n, self.strategy.most_queries) for n in self.sizes.query_counts]

    def can_continue(self, carry: Carry) -> Array:
        """Returns a bool scalar: whether the next step fits into the cache, no pause is due, and not all are done."""
        done = self.strategy.done(carry.state)
        limits = jnp.asarray([self.slots - width for width in self.widths], jnp.int32)
        # Steps after the end of an iteration still write to the cache, so there must be room for one more step.
        taken = carry.used if self.sizes.steps == 1 else carry.used + carry.query.live.sum(axis=1)
        goes = ~done.all() & (taken.max() <= limits[carry.size])
        if self.watched is not None:
            goes &= ~(done & self.watched).any()
        return goes if carry.steps_left is None else goes & (carry.steps_left > 0)

    def fits(self, size: int, carry: Carry) -> Array:
        """Returns a bool scalar: whether the loop can continue and the next step has this size."""
        return self.can_continue(carry) & (carry.size == size)

    def run_all_sizes(self, carry: Carry) -> Carry:
        """Runs the loop of each size once, as long as the steps have this size."""
        for size, width in enumerate(self.widths):
            if width <= self.slots:
                carry = jax.lax.while_loop(partial(self.fits, size), partial(self.iterate, size), carry)
        return carry

    def iterate(self, size: int, carry: Carry) -> Carry:
        """Computes one iteration of the loop of a size: `Sizes.steps` steps."""
        if self.sizes.steps == 1:
            return self.step(size, carry)
        # A loop of static length compiles the step once, and has no condition that the host would have to read.
        found: Carry = jax.lax.fori_loop(0, self.sizes.steps, lambda _, carry: self.step_if_it_fits(size, carry), carry)
        return found

    def step_if_it_fits(self, size: int, carry: Carry) -> Carry:
        """Takes a step if it fits. A step that does not fit is also computed, but the carry keeps the old values."""
        takes, new = self.fits(size, carry), self.step(size, carry)
        # Selecting one of two caches would copy a cache. The new cache is used in both cases, because a step that does
        # not fit writes only to free slots.
        old = dataclasses.replace(carry, cache=new.cache)
        chosen: Carry = jax.tree.map(lambda a, b: a if a is b else jnp.where(takes, a, b), new, old)
        return chosen

    def step(self, size: int, carry: Carry) -> Carry:
        """Takes a step (lines 5-13 of Algorithm 1).

        The queries of the carry are packed, the model computes logits or tokens, the strategy takes the tokens, slots
        of rejected queries are hidden, and the strategy returns the queries of the next step.
        """
        strategy, options, most = self.strategy, self.options, self.sizes.query_counts[size]
        width, group = self.widths[size], group_of(strategy)
        asked, number_of, filled = gather(carry.query, carry.filled, carry.used, most, width, strategy.position, group)
        number_of = jnp.minimum(number_of, most - 1)
        queries = Queries(asked, partial(known_rows, strategy, carry.state, carry.query))
        chosen, logits, hidden, cache = self.choose(asked, queries, carry)
        states = choice.follow_rules(carry.states, chosen, queries, options) if options.rules else carry.states
        answers = chosen if hidden is None else (chosen, hidden)
        state = strategy.advance(carry.state, jax.tree.map(lambda x: x[number_of], answers))
        strategy_checks.check_state(strategy, carry.state, state)
        live, kept, log_probs = carry.query.live, strategy.kept(state), carry.log_probs
        more = live.sum(axis=1) if kept is None else count_slots(live, kept)
        if kept is not None:
            strategy_checks.expect(strategy, "kept", kept, "bool", live.shape)
            filled = hide(live & ~kept, live, filled, carry.used)
        if options.scores:
            assert log_probs is not None and logits is not None, "`begin` had the same options"
            found = choice.score(logits, chosen, options)[number_of]
            log_probs = choice.record_scores(log_probs, found, carry.query, live if kept is None else live & kept)
        state, query = strategy.query(state)
        strategy_checks.check_query(strategy, query, len(live))
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

    def choose(self, asked: Step, queries: Queries, carry: Carry) -> tuple[Tree, Array | None, Array | None, Tree]:
        """Calls the model, and chooses tokens.

        Returns:
          The chosen tokens [N], or the arrays of `Stepper.choose`; the logits f32 [V, N] if needed; the outputs of the
          decoder [N, W] if a drafter wants them; and the new cache.
        """
        strategy, options, logits, hidden = self.strategy, self.options, None, None
        reads_hidden = wants(strategy.drafter, "hidden")
        if strategy.choose is None and not options.need_logits and not reads_hidden:
            chosen, cache = self.model.greedy(asked, carry.cache)
        else:
            if reads_hidden:
                model = cast(ModelWithHidden[Tree], self.model)
                logits, hidden, cache = model.with_hidden(asked, carry.cache)
            else:
                logits, cache = self.model(asked, carry.cache)
            greedy = strategy.choose or choice.first_argmax
            chosen = choice.choose_tokens(greedy, logits, queries, options, carry.states)
        if strategy.choose is not None and (options.need_logits or options.forced is not None):
            shape = asked.tokens.shape
            strategy_checks.expect(strategy, "choose", chosen, "int32", shape, of=", tokens, as the options require")
        return choice.force_tokens(chosen, queries, options), logits, hidden, cache


def grow(model: Model[Cache], carry: Carry, slots: int) -> Carry:
    """Grows the cache of a carry to `slots`, C, which must not be less than the current size of the cache."""
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
    options: DecodingOptions = GREEDILY,
    source: SourceIds | None = None,
) -> Carry:
    """Replaces examples of a running batch: some examples begin anew, other examples are stopped.

    Args:
      strategy: the strategy.
      carry: the carry of a batch whose examples count their slots separately (`apart` of `begin`).
      begins: bool [B], the examples that begin anew, with the sources now at their places.
      ends: bool [B], the examples to stop.
      sizes: as for `decode`.
      options: as for `decode`; the options of all examples, including the new examples.
      source: the sources of all examples, for a strategy that reads sources.
    """

    def put(new: Array, old: Array) -> Array:
        """Returns `new` for examples that begin, else `old`; `old` for arrays without a first axis of B, like `row`."""
        return jnp.where(begins.reshape(-1, *[1] * (new.ndim - 1)), new, old) if len(new) == len(begins) else old

    def put_queried(new: Array, old: Array) -> Array:
        """Returns the result of `put`, but takes arrays without a first axis of B from `new`."""
        return put(new, old) if len(new) == len(begins) else new

    def begin_anew(old: tuple[Tree, Query]) -> tuple[Tree, Query]:
        # The query writes to the cache of a drafter, which has no axis B: to the slots of the examples that begin, and
        # to free slots, where it writes drafts of the running examples.
        state = jax.tree.map(put, strategy.init(len(begins), source), old[0])
        found: tuple[Tree, Query] = jax.tree.map(put_queried, strategy.query(state), old)
        return found

    old = strategy.stop(carry.state, ends), carry.query
    if strategy.drafter:  # the first query computes the first drafts; skipped if no example begins
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
        states=jax.tree.map(put, choice.begin_rules(options, len(begins), strategy.places[0]), carry.states),
    )


def _size(query: Query, sizes: Sizes) -> Array:
    """Returns an i32 scalar, the index of the smallest of `Sizes.query_counts` that suffices for the live queries."""
    total = query.live.sum()
    size: Array = sum((total > n).astype(jnp.int32) for n in sizes.query_counts[:-1]) + jnp.int32(0)
    return size
