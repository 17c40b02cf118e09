"""The decoding loop and the interface of a strategy.

A strategy is a frozen dataclass of ints (static under jit). It says which tokens a step feeds, what they may see and
how far apart they are; the loop asks the model and hands the answers back. Nothing here knows the T5.

Shapes: B batch, Q queries of a step, C cache slots, R rows, W longest row, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import flax.struct
import jax
import jax.numpy as jnp

Array = jax.Array
Cache = TypeVar("Cache")

TRUNCATIONS = (None, "time_max", "sub_max", "max_length")  # what the codes in Decoded.truncated stand for


@flax.struct.dataclass
class Query:
    """What one step asks of the decoder."""

    tokens: Array  # i32 [B, Q]
    mask: Array  # bool [B|1, Q, C], True: the query sees that slot
    distance: Array  # i32 [B|1, Q, C]
    start: Array  # i32 scalar, the first of the Q slots that this call writes


@flax.struct.dataclass
class Decoded:
    """The result of a strategy: rows of tokens without bos and eos."""

    tokens: Array  # i32 [B, R, W], meaningless beyond `lengths`
    lengths: Array  # i32 [B, R], 0 for empty rows and rows that never started
    steps: Array  # i32 [B], time-steps of Algorithm 1 (paper section 3.4)
    truncated: Array  # i32 [B], index into TRUNCATIONS


class Strategy(Protocol):
    """What a decoding strategy offers. Its state is a pytree of fixed shapes."""

    @property
    def slots(self) -> int:
        """Cache slots C that a decode needs."""

    def init(self, batch: int) -> Any:
        """The state before the first step."""

    def query(self, state: Any) -> tuple[Any, Query]:
        """Opens the next step: the state with any new rows, and what to ask."""

    def advance(self, state: Any, next_tokens: Array) -> Any:
        """Takes the answers i32 [B, Q] to that step's queries. A finished example must not change any more."""

    def done(self, state: Any) -> Array:
        """bool [B], True at finished examples."""

    def result(self, state: Any) -> Decoded:
        """The rows, once all are done."""


def first_argmax(logits: Array) -> Array:
    """Greedy choice i32 [...] from logits [..., V]; the lowest id wins a tie."""
    best = logits.max(axis=-1, keepdims=True)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(logits == best, ids, logits.shape[-1] - 1).min(axis=-1)


def run(
    strategy: Strategy, decode: Callable[[Query, Cache], tuple[Array, Cache]], cache: Cache, *, batch: int
) -> Decoded:
    """Decodes greedily until every example is done, in one `while_loop` (paper, Algorithm 1).

    Args:
      strategy: static.
      decode: logits [B, Q, V] of a query and the cache with the query's slots written.
      cache: any pytree, `strategy.slots` slots.
      batch: B.
    """

    def going(carry: tuple[Any, Cache]) -> Array:
        return ~strategy.done(carry[0]).all()

    def step(carry: tuple[Any, Cache]) -> tuple[Any, Cache]:
        state, query = strategy.query(carry[0])
        logits, cache = decode(query, carry[1])
        return strategy.advance(state, first_argmax(logits)), cache

    state, _ = jax.lax.while_loop(going, step, (strategy.init(batch), cache))
    return strategy.result(state)
