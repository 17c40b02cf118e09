"""The rule against repetition: a penalty for tokens that an answer already has, and a ban on repeated n-grams.

The penalty and the ban are defined as in transformers' `generate` (`RepetitionPenaltyLogitsProcessor`,
`NoRepeatNGramLogitsProcessor`), where the tokens of an answer include its bos. On a grid the tokens that count are
those of the row itself and, unless `by_row` is set, the tokens of the rows above that the row sees by `grid.visible`.
An n-gram lies within one row; the bos of a row counts only in this row.

Some tokens are exempt: the given beginning of a row, such as its name, and the separators of a sequential answer.
Exempt tokens are not penalised, and n-grams that contain them may be repeated.

Shapes as in `rules`; H tokens of a row, M rows.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax.decoding.rules import FORBIDDEN, Queries, Rule
from pipejax.decoding.strategy import is_end

Array = jax.Array
History = tuple[Array, Array]  # tokens i32 [N, M, H], and bool of the same shape, whether each of them counts


@flax.struct.dataclass
class Repetition(Rule):
    """Divides the positive logits of repeated tokens by a penalty, and forbids tokens that would repeat an n-gram."""

    penalty: Array | np.ndarray  # f32 [B], divides positive logits and multiplies negative ones; 1: no penalty
    ngram: Array | np.ndarray  # i32 [B], the length n of n-grams that occur only once; 0: all may occur again
    given: Array | np.ndarray  # i32 [B, R], the number of first tokens of each row that are exempt
    bos: int = flax.struct.field(pytree_node=False)
    separators: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())  # tokens that are exempt
    by_row: bool = flax.struct.field(pytree_node=False, default=False)  # whether only the tokens of the same row count

    def apply(self, logits: Array, queries: Queries, state: Any) -> Array:
        """See `Rule`."""
        penalty, ngram = (jnp.asarray(x)[queries.example] for x in (self.penalty, self.ngram))

        def change(logits: Array) -> Array:
            histories = [self._own(queries)]
            if not self.by_row and self.given.shape[1] > 1:
                histories.append(self._above(queries))
            there = _mark(histories, [counts for _, counts in histories], logits.shape)
            penalised = jnp.where(logits < 0, logits * penalty, logits / penalty)
            logits = jnp.where(there & (penalty != 1), penalised, logits)
            repeats = _find_repeats(histories, queries.length + 1, ngram)
            return jnp.where(_mark(histories, repeats, logits.shape), FORBIDDEN, logits)

        changed: Array = jax.lax.cond(((penalty != 1) | (ngram > 0)).any(), change, lambda logits: logits, logits)
        return changed

    def _own(self, queries: Queries) -> History:
        """Returns the tokens of each query's row, M = 1, with its bos."""
        tokens = jnp.pad(queries.prefix, ((0, 0), (1, 0)), constant_values=self.bos)
        at, given = jnp.arange(tokens.shape[1]), queries.pick(self.given)[:, None]
        known = at <= queries.length[:, None]
        separates = known & (at > 0) & self._separates(tokens)
        counts = known & ~separates & ((at == 0) | (at > given))
        if self.by_row:  # a row of a sequential answer begins after a separator
            counts &= at > jnp.where(separates, at, -1).max(axis=1, keepdims=True)
        return tokens[:, None], counts[:, None]

    def _above(self, queries: Queries) -> History:
        """Returns the tokens of the rows above each query, M = R."""
        tokens, given = queries.above, jnp.asarray(self.given)[queries.example]
        at = jnp.arange(tokens.shape[2])
        counts = (at >= given[:, :, None]) & (at < queries.above_length[:, :, None])
        return tokens, counts & ~self._separates(tokens)

    def _separates(self, tokens: Array) -> Array:
        """Returns bool, of the shape of `tokens`: whether each token is a separator."""
        return is_end(tokens, self.separators) if self.separators else jnp.zeros(tokens.shape, bool)


def _find_repeats(histories: list[History], length: Array, ngram: Array) -> list[Array]:
    """Returns bool [N, M, H] for each history: the tokens that end an n-gram which the query's next token could repeat.

    Args:
      histories: the tokens; the first history is the query's row.
      length: i32 [N], the number of tokens in the query's row, bos included.
      ngram: i32 [N], n; 0: nothing is found.
    """
    own, own_counts = (x[:, 0] for x in histories[0])

    def compare(back: Array, found: list[Array]) -> list[Array]:
        """Compares the tokens `back` places before each token with the token `back` places before the next one."""
        at = jnp.maximum(length - back, 0)[:, None]
        last, counts = (jnp.take_along_axis(x, at, axis=1)[:, :, None] for x in (own, own_counts))
        counts &= (back <= length)[:, None, None]

        def is_same(tokens: Array, whole: Array) -> Array:
            there = jnp.arange(tokens.shape[2]) >= back
            return there & jnp.roll(whole, back, axis=2) & (jnp.roll(tokens, back, axis=2) == last) & counts

        ends = (back >= ngram)[:, None, None]  # all tokens of the n-gram have been compared
        return [x & (ends | is_same(*history)) for x, history in zip(found, histories, strict=True)]

    found = [counts & (ngram > 0)[:, None, None] for _, counts in histories]
    repeats: list[Array] = jax.lax.fori_loop(1, ngram.max(), compare, found)
    return repeats


def _mark(histories: list[History], counts: list[Array], shape: tuple[int, ...]) -> Array:
    """Returns bool [V, N] (`shape`), True for the tokens of the histories that count."""
    marked, number = jnp.zeros(shape, bool), jnp.arange(shape[1])[:, None]
    for (tokens, _), chosen in zip(histories, counts, strict=True):
        marked = marked.at[tokens.reshape(shape[1], -1), number].max(chosen.reshape(shape[1], -1), mode="drop")
    return marked
