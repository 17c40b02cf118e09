"""Forced tokens, such as row names: tokens that are known before decoding, so one call can feed several of them.

Forced tokens are drafts that need no comparison, since `choice.force_tokens` replaces the model's tokens by forced
tokens. End tokens are left out, because no token of the row follows an end token.

Shapes: B batch, R rows of the grid, W times, D the most tokens of a row that a drafter drafts in a call, C the most
drafted and forced tokens of a row in a call.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.decoding.choice import DecodingOptions
from pipejax.decoding.rows import Rows, RowState
from pipejax.decoding.strategy import Array, Strategy, ends_of, is_end
from pipejax.decoding.times import count_before

# On devices other than CPUs, a call of at most this number of columns takes as long as a call of few.
COLUMNS = 256


def count_forced(forced: np.ndarray, strategy: Strategy) -> np.ndarray:
    """Returns i32 [B, R], the number of forced tokens with which each row begins, without end tokens; in NumPy.

    Args:
      forced: i32 [B, R, W], as in `DecodingOptions`.
      strategy: the strategy.
    """
    count: np.ndarray = ((forced >= 0) & ~np.isin(forced, ends_of(strategy))).sum(axis=2, dtype=np.int32)
    return count


def columns_for(options: DecodingOptions, strategy: Strategy, platform: str) -> int:
    """Returns the most forced tokens of a row that a call feeds beside its newest token, rounded up to a power of two.

    The result is 0, and each step feeds one token of a row, if no tokens are forced, if a rule keeps a state that
    follows each single token, or if larger calls take longer than they save.

    Args:
      options: the options of a batch, NumPy arrays [B, ...].
      strategy: the strategy.
      platform: JAX's name of the platform.
    """
    if options.forced is None:
        return 0
    rows, forced = strategy.places[0], np.asarray(options.forced)
    if any(jax.tree.leaves(jax.eval_shape(partial(rule.init, len(forced), rows))) for rule in options.rules):
        return 0
    most = int(count_forced(forced, strategy).max(initial=0))
    count = 1 << (most - 1).bit_length() if most else 0
    return count if platform == "cpu" or len(forced) * rows * (1 + count) <= COLUMNS else 0


def find_forced(forced: Array, rows: Rows, state: RowState, most: int) -> tuple[Array, Array]:
    """Returns the forced tokens that follow the generated tokens of each row.

    Args:
      forced: i32 [B, R, W], as in `DecodingOptions`.
      rows: the strategy.
      state: the rows.
      most: C.

    Returns:
      i32 [B, R, C], the tokens; i32 [B, R], the number of these tokens that can be fed before `time_max`.
    """
    time = (rows.first + state.length)[:, :, None] + jnp.arange(most)  # the time of each token's query
    tokens = jnp.take_along_axis(forced, jnp.minimum(time, forced.shape[2] - 1), axis=2)
    goes_on = (tokens >= 0) & ~is_end(tokens, ends_of(rows)) & (time < rows.time_max - 1)
    return tokens, count_before(~goes_on, axis=2)


def append_forced(tokens: Array, length: Array, forced: Array, count: Array) -> Array:
    """Returns i32 [B, R, T], the tokens of rows with `count` forced tokens after the first `length` ones.

    Args:
      tokens: i32 [B, R, T].
      length: i32 [B, R].
      forced: i32 [B, R, C].
      count: i32 [B, R], at most C.
    """
    place = jnp.arange(tokens.shape[2]) - length[:, :, None]
    found = jnp.take_along_axis(forced, jnp.clip(place, 0, forced.shape[2] - 1), axis=2)
    return jnp.where((place >= 0) & (place < count[:, :, None]), found, tokens)


def after_forced(drafted: Array, begin: Array, forced: Array, count: Array) -> Array:
    """Returns i32 [B, R, C], the drafts of rows: `count` forced tokens, then drafted tokens.

    Args:
      drafted: i32 [B, R, D], tokens for the places from `begin` on.
      begin: i32 [B, R].
      forced: i32 [B, R, C].
      count: i32 [B, R].
    """
    place = jnp.arange(forced.shape[2])
    after = jnp.clip(place - begin[:, :, None], 0, drafted.shape[2] - 1)
    return jnp.where(place < count[:, :, None], forced, jnp.take_along_axis(drafted, after, axis=2))
