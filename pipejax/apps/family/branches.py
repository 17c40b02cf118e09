"""Decoding of the branching decoder (One2Branch, Huang et al., ICLR 2024, algorithm 1).

Shapes: B batch, R the most phrases, T the most tokens of a phrase, N queries of a step, V vocabulary, K candidates of a
query.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from pipejax.decoding import TRUNCATIONS, Decoded, Plain, Query, SourceIds, ends_of
from pipejax.decoding.strategy import is_end
from pipejax.grid import Numbers

Array = jax.Array


@flax.struct.dataclass
class BranchState:
    """The state after `step` steps: the open phrases, and the ended ones in descending order of their means."""

    step: Array  # i32 scalar
    tokens: Array  # i32 [B, R, T], of the open phrases
    last: Array  # i32 [B, R], the newest tokens of the open phrases
    lineage: Array  # i32 [B, R, T], the row in which each token of an open phrase was fed
    scores: Array  # f32 [B, R], the sums of the logits of the open phrases' tokens
    live: Array  # bool [B, R], which rows have an open phrase
    found: Array  # i32 [B, R, T], the tokens of the ended phrases
    lengths: Array  # i32 [B, R], the numbers of tokens of the ended phrases, without end tokens
    means: Array  # f32 [B, R], the means of the logits of the ended phrases' tokens and end tokens; -inf: no phrase
    ended: Array  # i32 [B], number of phrases that have ended
    cut: Array  # bool [B], whether `rows` or `times` cut off a phrase that could be in the answer
    steps: Array  # i32 [B], steps until the example was done


@dataclasses.dataclass(frozen=True)
class Branches(Plain):
    """Keeps the best `rows` continuations of all open phrases in each step, if their logits are above 0.

    If fewer than `least` phrases have ended, the best continuations below 0 are kept as well, up to the missing number.
    The answer has the ended phrases whose mean logit is above 0; if there is none, the ended phrase with the highest
    mean.
    """

    rows: int
    times: int
    least: int
    bos: int = 0
    eos: int = 1
    other_ends: tuple[int, ...] = ()  # further tokens that end a phrase

    @property
    def most_queries(self) -> int:
        """One query for each open phrase."""
        return self.rows

    @property
    def slots(self) -> int:
        """One slot for bos, then one for each phrase and step."""
        return 1 + self.rows * (self.times - 1)

    def start(self, row: Numbers) -> Numbers:
        """Returns 0 for all rows."""
        return 0 * row

    def init(self, batch: int, source: SourceIds | None = None) -> BranchState:
        """Returns the state with one open phrase, which has no token."""
        table, none = jnp.zeros((batch, self.rows, self.times), jnp.int32), jnp.zeros(batch, jnp.int32)
        return BranchState(
            step=jnp.int32(0),
            tokens=table,
            last=table[:, :, 0] + self.bos,
            lineage=table,
            scores=jnp.zeros((batch, self.rows)),
            live=jnp.broadcast_to(jnp.arange(self.rows) == 0, (batch, self.rows)),
            found=table,
            lengths=table[:, :, 0],
            means=jnp.full((batch, self.rows), -jnp.inf),
            ended=none,
            cut=none > 0,
            steps=none,
        )

    def query(self, state: BranchState) -> tuple[BranchState, Query]:
        """Feeds the newest token of each open phrase, which sees the tokens of its lineage."""
        row = jnp.arange(self.rows)[None]
        return state, Query(state.last, row, jnp.full_like(row, state.step), state.live, lineage=state.lineage)

    def choose(self, logits: Array) -> tuple[Array, Array]:
        """Returns the highest logits f32 [N, K] of each query, and the ids i32 [N, K] of these candidates."""
        best, ids = jax.lax.top_k(logits.T, min(self.rows + 1, len(logits)))
        return best, ids

    def advance(self, state: BranchState, answers: tuple[Array, Array]) -> BranchState:
        """Continues the open phrases with the best candidates, and moves the phrases that end to the ended ones."""
        logits, ids = answers
        batch, step = len(logits), state.step + 1
        logits = jnp.where(state.live[:, :, None], logits, -jnp.inf)
        best, place = jax.lax.top_k(logits.reshape(batch, -1), self.rows)
        parent, last = place // logits.shape[2], jnp.take_along_axis(ids.reshape(batch, -1), place, axis=1)
        missing = (self.least - state.ended)[:, None]
        takes = (best > -jnp.inf) & ((best > 0) | (jnp.arange(self.rows) < missing))

        def of_parent(x: Array) -> Array:
            return jnp.take_along_axis(x, parent.reshape(batch, self.rows, *[1] * (x.ndim - 2)), axis=1)

        tokens, scores = of_parent(state.tokens), of_parent(state.scores) + jnp.where(takes, best, 0)
        ends = takes & is_end(last, ends_of(self))
        continues, is_full = takes & ~ends, step == self.times
        means = jnp.concatenate([state.means, jnp.where(ends, scores / step, -jnp.inf)], axis=1)
        means, order = jax.lax.top_k(means, 2 * self.rows)

        def best_of(old: Array, new: Array) -> Array:
            both = jnp.concatenate([old, new], axis=1)
            which = order[:, : self.rows].reshape(batch, self.rows, *[1] * (old.ndim - 2))
            return jnp.take_along_axis(both, which, axis=1)

        ended = state.ended + ends.sum(axis=1)
        cut = ((logits > 0).sum(axis=(1, 2)) > self.rows) | (means[:, self.rows :] > 0).any(axis=1)
        cut |= is_full & continues.any(axis=1) & ((continues & (scores > 0)).any(axis=1) | (ended == 0))
        row = jnp.arange(self.rows)
        return BranchState(
            step=step,
            tokens=tokens.at[:, :, step - 1].set(last, mode="drop"),
            last=last,
            lineage=of_parent(state.lineage).at[:, :, step].set(row, mode="drop"),
            scores=scores,
            live=continues & ~is_full,
            found=best_of(state.found, tokens),
            lengths=best_of(state.lengths, jnp.full_like(last, step - 1)),
            means=means[:, : self.rows],
            ended=ended,
            cut=state.cut | cut,
            steps=jnp.where(state.live.any(axis=1), step, state.steps),
        )

    def done(self, state: BranchState) -> Array:
        """Returns bool [B], whether no phrase is open."""
        return ~state.live.any(axis=1)

    def result(self, state: BranchState) -> Decoded:
        """Returns the ended phrases with a mean above 0, in descending order; without any, the best ended phrase."""
        is_part = (state.means > 0) | ((jnp.arange(self.rows) == 0) & (state.means > -jnp.inf))
        code = jnp.where(state.cut, TRUNCATIONS.index("max_length"), TRUNCATIONS.index(None)).astype(jnp.int32)
        return Decoded(state.found, jnp.where(is_part, state.lengths, 0), state.steps, code)
