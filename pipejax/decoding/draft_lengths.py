"""Chooses how many tokens to draft for each row, to generate the most tokens for the cost of a call.

The acceptance rate of drafts is estimated during decoding, for each example and each degree of the drafter's trust.

Shapes: B batch, R rows of the grid, D most drafted tokens of a row in a call, K degrees of trust.
"""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

from pipejax.decoding.times import NEVER

Array = jax.Array
MEMORY = 0.9  # the factor by which the weight of earlier calls decays with each call
ROUNDS = 4  # iterations of the search for the drafts to feed
PRIOR = 2.0  # the weight of the prior acceptance rates, in drafted tokens


@flax.struct.dataclass
class TrackRecord:
    """Decaying counts of drafted tokens, for each degree of trust."""

    right: Array  # f32 [B, K], the correct tokens
    judged: Array  # f32 [B, K], the correct tokens, and the first incorrect one of each draft

    @classmethod
    def empty(cls, batch: int, degrees: int) -> "TrackRecord":
        """Returns counts of zero; `batch`: B, `degrees`: K."""
        return cls(jnp.zeros((batch, degrees)), jnp.zeros((batch, degrees)))

    def odds(self, supposed: Sequence[float], trust: Array) -> Array:
        """Returns f32 [B, R], the estimated probability that a drafted token is correct if those before it are correct.

        Args:
          supposed: the prior probabilities, one for each of the K degrees of trust.
          trust: i32 [B, R].
        """
        # The mean of the posterior beta distribution, with a prior that counts as PRIOR tokens.
        odds = (PRIOR * jnp.asarray(supposed) + self.right) / (PRIOR + self.judged)
        return jnp.take_along_axis(jnp.minimum(odds, 0.999), trust, axis=1)

    def add(self, trust: Array, *, drafted: Array, run: Array, counts: Array) -> "TrackRecord":
        """Adds the drafts of a call; of each row the tokens up to the first incorrect one are counted.

        Args:
          trust: i32 [B, R].
          drafted: i32 [B, R], number of drafted tokens.
          run: i32 [B, R], number of drafted tokens before the first incorrect one.
          counts: i32 [B, R], number of accepted drafted tokens; negative if the call accepted no column of the
            row, or not the columns of all forced tokens of the row.
        """
        of = trust[:, :, None] == jnp.arange(self.right.shape[1])
        right = jnp.maximum(counts, 0)
        judged = right + ((counts == run) & (run < drafted))
        sums = (jnp.where(of, x[:, :, None], 0).sum(axis=1) for x in (right, judged))
        return TrackRecord(*(MEMORY * old + new for old, new in zip((self.right, self.judged), sums, strict=True)))


def choose_lengths(
    count: Array, odds: Array, hangs: Array, needed: Array, *, fixed: float, most: int, sizes: Sequence[int] | None
) -> Array:
    """Returns i32 [B, R], how many tokens to draft for each row so that a call generates the most tokens for its cost.

    A call of n columns costs `fixed` + n, and generates one token for each row and the correct drafted tokens. The k-th
    drafted token of a row is correct with the probability odds**k, or odds**(k + 1) for a row in `hangs`. The drafted
    tokens of all rows are sorted by this probability, and the number of them that are fed maximises the expected number
    of generated tokens divided by the cost. As these probabilities decrease along a row, the fed tokens of a row are
    always the first tokens of its draft.

    Args:
      count: i32 [B, R], number of tokens that could be drafted.
      odds: f32 [B, R], the probability that a token is correct if the tokens before it are correct.
      hangs: bool [B, R], rows that are queried only because of a draft of another row; this draft must be correct, too.
      needed: i32 scalar, number of columns without drafts.
      fixed: the fixed cost of a call, in columns.
      most: D.
      sizes: the sizes of calls, if a call costs all columns of its size; None: a call costs the columns that are fed.
    """
    place = jnp.arange(1, most + 1)
    chances = odds[:, :, None] ** (place + hangs[:, :, None])
    chances = jnp.where(place <= count[:, :, None], chances, 0.0)
    if sizes is None:
        # The optimum has every drafted token whose probability exceeds the call's number of tokens per unit of cost.
        mean = needed / (fixed + needed)
        for _ in range(ROUNDS):
            better = chances > mean
            mean = (needed + jnp.where(better, chances, 0).sum()) / (fixed + needed + better.sum())
        return (chances > mean).sum(axis=2)
    chances, columns = chances.reshape(-1), jnp.asarray(sizes)
    best, order = jax.lax.top_k(chances, chances.size)  # stable: the first of equal ones comes first
    right = jnp.pad(jnp.cumsum(best), (1, 0))  # the expected number of correct tokens among the best k
    free = jnp.clip(columns - needed, 0, chances.size)
    speed = (needed + right[free]) / (fixed + jnp.where(columns < needed, NEVER, columns))
    drafted = free[speed.argmax()]
    last = jnp.maximum(drafted - 1, 0)
    better = (chances > best[last]) | ((chances == best[last]) & (jnp.arange(chances.size) <= order[last]))
    return (better.reshape(*count.shape, -1) & (place <= count[:, :, None]) & (drafted > 0)).sum(axis=2)
