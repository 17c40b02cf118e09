"""A branching method (One2Branch): every token whose logit is above 0 continues a phrase, so that phrases branch.

Phrases with a common beginning share it. The rows of a step are the open phrases, each of which sees only its own
tokens. Training lays the phrases out on an anti-diagonal, on which no row sees another row.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax import grid
from pipejax.decoding import TRUNCATIONS, Decoded, Plain, Query, SourceIds
from pipejax.methods import Ids, Method, Spells, Target, spell
from pipejax.system.fields import setting

Array = jax.Array
CHOICES = 8  # the most continuations of a phrase


@flax.struct.dataclass
class State:
    """All arrays except `step` have a first axis of B."""

    step: Array  # i32 scalar
    tokens: Array  # i32 [B, R, T], the tokens of the open phrases
    lineage: Array  # i32 [B, R, T], the row in which each token of a phrase was fed
    live: Array  # bool [B, R]
    found: Array  # i32 [B, R, T], the complete phrases
    lengths: Array  # i32 [B, R], the lengths of the complete phrases
    count: Array  # i32 [B], number of complete phrases
    cut: Array  # bool [B], whether a phrase was given up
    steps: Array  # i32 [B]


def first(flags: Array, most: int) -> tuple[Array, Array]:
    """The indices i32 [B, most] of the first set flags of bool [B, n], and whether there are that many."""
    order = jnp.argsort(~flags, axis=1, stable=True)[:, :most]
    return order, jnp.take_along_axis(flags, order, axis=1)


@dataclasses.dataclass(frozen=True)
class Branches(Plain):
    """At most `rows` open phrases, and as many complete ones, of at most `width` tokens with the end token."""

    rows: int
    width: int
    bos: int
    eos: int

    @property
    def most_queries(self) -> int:
        return self.rows

    @property
    def slots(self) -> int:
        return self.rows * self.width

    def start(self, row: Any) -> Any:
        return 0 * row

    def init(self, batch: int, source: SourceIds | None = None) -> State:
        table, none = jnp.zeros((batch, self.rows, self.width), jnp.int32), jnp.zeros(batch, jnp.int32)
        live = jnp.broadcast_to(jnp.arange(self.rows) == 0, (batch, self.rows))
        return State(jnp.int32(0), table, table, live, table, table[:, :, 0], none, none > 0, none)

    def query(self, state: State) -> tuple[State, Query]:
        last = state.tokens[:, :, jnp.maximum(state.step - 1, 0)]
        fed = jnp.where(state.step == 0, self.bos, last)
        row = jnp.arange(self.rows)[None]
        return state, Query(fed, row, jnp.full_like(row, state.step), state.live, lineage=state.lineage)

    def choose(self, logits: Array) -> tuple[Array, Array]:
        """The most likely tokens i32 [N, CHOICES], and whether each continues a phrase: the first, and all above 0."""
        best, ids = jax.lax.top_k(logits.T, CHOICES)
        return ids, (best > 0) | (jnp.arange(CHOICES) == 0)

    def advance(self, state: State, answers: tuple[Array, Array]) -> State:
        ids, continues = (x.reshape(len(x), -1) for x in answers)
        continues &= jnp.repeat(state.live, CHOICES, axis=1)
        parent = jnp.repeat(jnp.arange(self.rows), CHOICES)

        def at(x: Array, which: Array) -> Array:
            return jnp.take_along_axis(x, which[:, :, None], axis=1)

        ends, goes = continues & (ids == self.eos), continues & (ids != self.eos)
        which, is_end = first(ends, self.rows)
        place = jnp.where(is_end, state.count[:, None] + jnp.cumsum(is_end, axis=1) - 1, self.rows)
        example = jnp.arange(len(ids))[:, None]
        found = state.found.at[example, place].set(at(state.tokens, parent[which]), mode="drop")
        lengths = state.lengths.at[example, place].set(state.step, mode="drop")
        which, live = first(goes, self.rows)
        rows = parent[which]
        tokens = at(state.tokens, rows).at[:, :, state.step].set(jnp.take_along_axis(ids, which, axis=1))
        step = state.step + 1
        lineage = at(state.lineage, rows).at[:, :, step].set(jnp.arange(self.rows), mode="drop")
        is_full = step == self.width
        cut = (goes.sum(axis=1) > self.rows) | (state.count + ends.sum(axis=1) > self.rows)
        return State(
            step=step,
            tokens=tokens,
            lineage=lineage,
            live=live & ~is_full,
            found=found,
            lengths=lengths,
            count=jnp.minimum(state.count + ends.sum(axis=1), self.rows),
            cut=state.cut | cut | (is_full & live.any(axis=1)),
            steps=jnp.where(state.live.any(axis=1), step, state.steps),
        )

    def done(self, state: State) -> Array:
        return ~state.live.any(axis=1)

    def result(self, state: State) -> Decoded:
        code = jnp.where(state.cut, TRUNCATIONS.index("max_length"), TRUNCATIONS.index(None)).astype(jnp.int32)
        return Decoded(state.found, state.lengths, state.steps, code)


@dataclasses.dataclass(frozen=True)
class Branching(Method):
    """A set of phrases."""

    rows: int = setting(6, least=1)
    width: int = setting(6, least=2)

    name: ClassVar[str] = "branching"
    choices: ClassVar[int] = CHOICES

    def target(self, rows: Sequence[str], spells: Spells, ids: Ids, *, most: int, where: str) -> Target:
        spelled = [row for row in spell(rows, spells, ids.ends) if row]
        kept = [row for row in spelled if len(row) < self.width][: min(self.rows, CHOICES)]
        sums = np.cumsum([len(row) + 1 for row in kept])
        kept = kept[: int((sums <= most).sum())] or [[]]
        following = dict[tuple[int, ...], list[int]]()
        for row in kept:
            for j, token in enumerate([*row, ids.eos]):
                if token not in (known := following.setdefault((*row[:j],), [])):
                    known.append(token)
        slots, seen = [], set[tuple[int, ...]]()
        for i, row in enumerate(kept):
            for j, fed in enumerate([ids.bos, *row]):
                rights = following[(*row[:j],)]
                counts = [float((*row[:j],) not in seen)] * len(rights)
                spare = CHOICES - len(rights)
                time = (len(kept) - 1 - i) * self.width + j
                slots.append((fed, [*rights, *[ids.eos] * spare], [*counts, *[0.0] * spare], i, time))
                seen.add((*row[:j],))
        inputs, targets, weights, row_of, times = zip(*slots, strict=True)
        fed_ids, right, row_at, time_at = (np.asarray(x, np.int32) for x in (inputs, targets, row_of, times))
        flat = grid.Flat(fed_ids, right, np.asarray(weights, np.float32), row_at, time_at)
        return Target(flat, len(kept) < len(spelled))

    def most_slots(self, most: int) -> int:
        return max(most, 1)

    def loss(self, logits: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
        """The zero-bounded log-sum-exp loss (Su et al. 2022): target tokens above 0, all others below."""
        is_right = (jax.nn.one_hot(targets, logits.shape[-1]) * weights[..., None]).sum(-2) > 0
        zero = jnp.zeros((*logits.shape[:-1], 1))
        real = weights.max(axis=-1) > 0
        below = jnp.concatenate([zero, jnp.where(is_right, -jnp.inf, logits)], axis=-1)
        above = jnp.concatenate([zero, jnp.where(is_right, -logits, -jnp.inf)], axis=-1)
        found = jax.nn.logsumexp(below, axis=-1) + jax.nn.logsumexp(above, axis=-1)
        return jnp.where(real, found, 0).sum(), real.sum().astype(jnp.float32)

    def strategy(self, ids: Ids) -> Any:
        return Branches(self.rows, self.width, ids.bos, ids.eos)
