"""The choice of how many tokens to draft for each row: those that get on fastest, by what a call costs.

How often drafts are right is learned as they are judged, for each example and each degree of the drafter's trust.

Shapes: B batch, R rows of the grid, D drafted tokens of a row in a call, at the most, K degrees of trust.
"""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

from pipejax.decoding.times import NEVER

Array = jax.Array
MEMORY = 0.9  # the share of their weight that calls keep after another, in the estimate of how often drafts are right
ROUNDS = 4  # of the search for the drafts to feed; each comes nearer to the best choice
PRIOR = 2.0  # weight of what is supposed before the first draft, in drafted tokens


@flax.struct.dataclass
class TrackRecord:
    """The drafted tokens that were judged so far, by trust; sums that forget."""

    right: Array  # f32 [B, K]
    judged: Array  # f32 [B, K]

    @classmethod
    def empty(cls, batch: int, degrees: int) -> "TrackRecord":
        """Nothing was judged; `batch`: B, `degrees`: K."""
        return cls(jnp.zeros((batch, degrees)), jnp.zeros((batch, degrees)))

    def odds(self, supposed: Sequence[float], trust: Array) -> Array:
        """f32 [B, R], how often a token of that trust is right if those before it are; `supposed`: at first."""
        odds = (PRIOR * jnp.asarray(supposed) + self.right) / (PRIOR + self.judged)
        return jnp.take_along_axis(jnp.minimum(odds, 0.999), trust, axis=1)

    def add(self, trust: Array, *, drafted: Array, run: Array, counts: Array) -> "TrackRecord":
        """The record with a call's drafts, i32 [B, R] each; those up to a row's first wrong one are judged.

        `run`: those before the first wrong one; `counts`: those that count, -1 if not even the row's newest token does.
        """
        of = trust[:, :, None] == jnp.arange(self.right.shape[1])
        right = jnp.maximum(counts, 0)
        judged = right + ((counts == run) & (run < drafted))
        sums = (jnp.where(of, x[:, :, None], 0).sum(axis=1) for x in (right, judged))
        return TrackRecord(*(MEMORY * old + new for old, new in zip((self.right, self.judged), sums, strict=True)))


def choose_lengths(
    count: Array, odds: Array, hangs: Array, needed: Array, *, fixed: float, most: int, sizes: Sequence[int] | None
) -> Array:
    """i32 [B, R], how many to draft of the `count` tokens at hand: as many as get on fastest.

    A call of n columns costs `fixed` + n. It writes one token for each row, and those drafted ones that are right. The
    best drafts come first, and so many of them that the call writes most at the cost of one column. `odds`: f32 [B, R];
    `hangs`: bool [B, R], rows that are asked only if a draft of another one is right.
    """
    place = jnp.arange(1, most + 1)
    chances = odds[:, :, None] ** (place + hangs[:, :, None])
    chances = jnp.where(place <= count[:, :, None], chances, 0.0)
    if sizes is None:
        # The best choice are all drafts that write more than the mean column of the call in which they are fed.
        mean = needed / (fixed + needed)
        for _ in range(ROUNDS):
            better = chances > mean
            mean = (needed + jnp.where(better, chances, 0).sum()) / (fixed + needed + better.sum())
        return (chances > mean).sum(axis=2)
    chances, columns = chances.reshape(-1), jnp.asarray(sizes)
    best, order = jax.lax.top_k(chances, chances.size)  # of equals the first comes first
    right = jnp.pad(jnp.cumsum(best), (1, 0))  # of the best k, how many will be
    free = jnp.clip(columns - needed, 0, chances.size)
    speed = (needed + right[free]) / (fixed + jnp.where(columns < needed, NEVER, columns))
    drafted = free[speed.argmax()]
    last = jnp.maximum(drafted - 1, 0)
    better = (chances > best[last]) | ((chances == best[last]) & (jnp.arange(chances.size) <= order[last]))
    return (better.reshape(*count.shape, -1) & (place <= count[:, :, None]) & (drafted > 0)).sum(axis=2)
