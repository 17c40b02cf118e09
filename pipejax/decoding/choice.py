"""Chooses tokens from logits, for all strategies: greedily, by sampling, or after rules have changed the logits.

A strategy chooses the token with the highest logit; `choose_tokens` replaces this choice as `DecodingOptions` describe.
The random number of a sample depends only on the seed and on the coordinates on the grid. So a sample does not depend
on the other examples of the batch, and is the same with drafts: a drafted token is accepted if it equals the sample.

Shapes as in `core`: B batch, R rows of the grid, W times, N queries of a step, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax.decoding import strategy_checks
from pipejax.decoding.gathering import Query
from pipejax.decoding.rules import FORBIDDEN, Queries, Rule
from pipejax.grid import Numbers
from pipejax.system import Tree

Array = jax.Array
BLOCK = 256  # the number of tokens in a block of `_find`


@flax.struct.dataclass
class Sampling:
    """The settings by which tokens are chosen: scalars for one answer, or arrays [B] for a batch."""

    temperature: Numbers = 0.0  # f32 [B], the divisor of logits; 0: the most likely token is taken
    top_k: Numbers = 0  # i32 [B], draw among this number of most likely tokens; 0: among all
    top_p: Numbers = 1.0  # f32 [B], draw among the fewest most likely tokens of this total probability; 1: among all
    seed: Numbers = 0  # u32 [B]
    min_p: Numbers = 0.0  # f32 [B], draw among the tokens of at least this share of the highest probability; 0: all
    repetition_penalty: Numbers = 1.0  # f32 [B], see `Repetition`
    no_repeat_ngram_size: Numbers = 0  # i32 [B], see `Repetition`

    @classmethod
    def of(cls, settings: object, seed: int) -> "Sampling":
        """Reads all fields but the seed from the attributes of an object, such as a `DecodeConfig`."""
        return cls(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(cls)} | {"seed": seed})

    @classmethod
    def together(cls, each: "Sequence[Sampling]") -> "Sampling":
        """Stacks the settings of B answers into NumPy arrays [B]."""
        dtypes: dict[type, type] = {float: np.float32, int: np.int32}
        found: dict[str, np.ndarray] = {
            field.name: np.asarray([getattr(x, field.name) for x in each], dtypes[type(field.default)])
            for field in dataclasses.fields(cls)
            if field.name != "seed"
        }
        return cls(**found, seed=np.asarray([x.seed for x in each], np.uint32))

    @property
    def is_limited(self) -> Array:
        """bool [B], whether tokens are drawn from a part of the vocabulary: by top k, top p or min_p."""
        found: Array = (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))
        return found

    @property
    def limits_repetition(self) -> Any:
        """bool [B], whether the logit of a token may change because the answer has this token."""
        return (self.repetition_penalty != 1) | (self.no_repeat_ngram_size > 0)


MOST_LIKELY = Sampling()


@flax.struct.dataclass
class DecodingOptions:
    """Options by which the tokens of a batch are chosen."""

    sampling: Sampling | None = None  # None: greedy decoding
    forced: Array | np.ndarray | None = None  # i32 [B, R, W], the token to generate at each row and time; -1: any
    rules: tuple[Rule, ...] = ()  # changes of logits, applied in this order; their number is static
    scores: bool = flax.struct.field(pytree_node=False, default=False)  # whether `Carry` has log-probabilities
    scored: Array | np.bool | None = None  # bool scalar, whether the step computes log-probabilities; None: it does

    @property
    def need_logits(self) -> bool:
        """Whether choosing requires the logits, and not only the argmax token of each query."""
        return self.scores or bool(self.rules) or self.sampling is not None

    def take(self, numbers: np.ndarray) -> "DecodingOptions":
        """Selects the examples `numbers`, i32 [E, B]: each array gets these two leading axes. In NumPy."""
        rest: DecodingOptions = jax.tree.map(lambda x: x[numbers], dataclasses.replace(self, rules=()))
        return dataclasses.replace(rest, rules=tuple(rule.take(numbers) for rule in self.rules))


GREEDILY = DecodingOptions()


def first_argmax(logits: Array) -> Array:
    """Returns the most likely tokens i32 [N], given logits [V, N]; the lowest id wins a tie."""
    # Without the barrier XLA may compute the logits twice, for the maximum and for the comparison, with different
    # rounding, so that no logit equals the maximum.
    logits = jax.lax.optimization_barrier(logits)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    return jnp.where(logits == logits.max(axis=0), ids, logits.shape[0] - 1).min(axis=0)


def choose_tokens(
    greedy: Callable[[Array], Array],
    logits: Array,
    queries: Queries,
    options: DecodingOptions,
    states: Sequence[Tree] = (),
) -> Array:
    """Chooses tokens i32 [N] as the options say.

    Args:
      greedy: the strategy's choice [N] from logits [V, N].
      logits: f32 [V, N].
      queries: the N queries.
      options: the options.
      states: the state of each rule.
    """
    for rule, state in zip(options.rules, states, strict=True):
        changed = rule.apply(logits, queries, state)
        strategy_checks.expect(rule, "apply", changed, "float32", logits.shape, of=", the logits that it was given")
        logits = jnp.where((changed > FORBIDDEN).any(axis=0), changed, logits)
    tokens = greedy(logits)
    if options.sampling is not None:
        sampling = jax.tree.map(lambda x: x[queries.example], options.sampling)
        warm = sampling.temperature > 0
        drawn = jax.lax.cond(warm.any(), _draw, lambda *_: tokens, logits, sampling, queries.row, queries.time)
        tokens = jnp.where(warm, drawn, tokens)
    return tokens


def force_tokens(tokens: Array, queries: Queries, options: DecodingOptions) -> Array:
    """Replaces the chosen tokens i32 [N] by the tokens of `DecodingOptions.forced`, except where these are -1."""
    if options.forced is None:
        return tokens
    place = queries.example, queries.row, queries.time
    forced = jnp.asarray(options.forced).at[place].get(mode="fill", fill_value=-1)
    return jnp.where(forced < 0, tokens, forced)


def begin_rules(options: DecodingOptions, batch: int, rows: int) -> tuple[Tree, ...]:
    """Returns the states of the rules before the first step, arrays [B, R, ...]; `batch`: B, `rows`: R."""
    states = tuple(rule.init(batch, rows) for rule in options.rules)
    for rule, state in zip(options.rules, states, strict=True):
        strategy_checks.check_rows(rule, "init", state, (batch, rows))
    return states


def follow_rules(states: Sequence[Tree], tokens: Array, queries: Queries, options: DecodingOptions) -> tuple[Tree, ...]:
    """Returns the states of the rules after the tokens i32 [N] were chosen."""
    found = []
    for rule, state in zip(options.rules, states, strict=True):
        found.append(rule.follow(state, tokens, queries))
        strategy_checks.check_state(rule, state, found[-1], method="follow")
    return tuple(found)


def score(logits: Array, tokens: Array, options: DecodingOptions) -> Array:
    """Returns the log-probabilities f32 [N] of tokens i32 [N], given logits [V, N].

    The result is zeros if `options.scored` is False.
    """

    def compute(logits: Array) -> Array:
        return jnp.take_along_axis(logits, tokens[None], axis=0)[0] - jax.nn.logsumexp(logits, axis=0)

    if options.scored is None:
        return compute(logits)
    found: Array = jax.lax.cond(options.scored, compute, lambda x: jnp.zeros(x.shape[1]), logits)
    return found


def record_scores(log_probs: Array, found: Array, query: Query, counts: Array) -> Array:
    """Writes log-probabilities `found`, f32 [B, S], into `log_probs`, f32 [B, R, W], where `counts`, bool [B, S]."""
    row = jnp.where(counts, query.row, log_probs.shape[1])
    example = jnp.arange(len(counts))[:, None]
    return log_probs.at[example, row, jnp.broadcast_to(query.time, counts.shape)].set(found, mode="drop")


def _draw(logits: Array, sampling: Sampling, row: Array, time: Array) -> Array:
    """Draws a token i32 [N] from each column of the logits [V, N]; settings, row and time are [N].

    The random number of a query is a function of the seed, the row and the time.
    """
    warm = sampling.temperature > 0
    wide = (logits - logits.max(axis=0)) / jnp.where(warm, sampling.temperature, 1.0)
    weights = jax.lax.cond(sampling.is_limited.any(), _limit, lambda x, _: jnp.exp(x), wide, sampling)

    def share(seed: Array, row: Array, time: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), time)
        return jax.random.uniform(key)

    return _find(weights, jax.vmap(share)(sampling.seed, row, time))


def _limit(logits: Array, sampling: Sampling) -> Array:
    """Returns the weights [V, N] for sampling, with zeros for tokens that must not be drawn.

    The limits are applied in the order of transformers' `generate`: tokens outside the top k are removed, then tokens
    outside the top p of the remaining weights, then tokens below the share min_p of the highest weight.
    """
    # The bits of non-negative floats, as integers, have the order of the floats, so a bisection over bits finds a
    # threshold without sorting. Tokens with equal weights are all kept or all removed.
    weights = jnp.exp(logits)
    order = jax.lax.bitcast_convert_type(weights, jnp.int32)

    def least(enough: Callable[[Array], Array]) -> Array:
        """Returns the highest threshold i32 [N] for which `enough` is True; determined bit by bit."""

        def add(number: Array, order: Array) -> Array:
            higher = order | (1 << (30 - number))
            return jnp.where(enough(higher), higher, order)

        found: Array = jax.lax.fori_loop(0, 31, add, jnp.zeros(logits.shape[1], jnp.int32))
        return found

    k = jnp.where(sampling.top_k > 0, sampling.top_k, logits.shape[0])
    weights = jnp.where(order >= least(lambda x: (order >= x).sum(axis=0) >= k), weights, 0)
    p = jnp.where(sampling.top_p < 1, sampling.top_p * weights.sum(axis=0), 0)
    most = least(lambda x: jnp.where(order >= x, weights, 0).sum(axis=0) >= p)
    weights = jnp.where((order >= most) | (sampling.top_p >= 1), weights, 0)
    return jnp.where(weights >= sampling.min_p * weights.max(axis=0), weights, 0)


def _find(weights: Array, share: Array) -> Array:
    """Returns the first token i32 [N] at which the cumulative sum of the weights [V, N] exceeds a share of their total.

    `share`: f32 [N] in [0, 1).
    """
    blocks = jnp.pad(weights, ((0, -weights.shape[0] % BLOCK), (0, 0))).reshape(-1, BLOCK, weights.shape[1])
    sums = jnp.cumsum(blocks.sum(axis=1), axis=0)
    wanted = share * sums[-1]
    # Because of rounding, it is possible that no sum exceeds the share; then the last token with a non-zero weight is
    # taken.
    block = jnp.minimum((sums <= wanted).sum(axis=0), _last(blocks.any(axis=1)))
    inside = jnp.take_along_axis(blocks, block[None, None], axis=0)[0]
    before = jnp.where(block > 0, jnp.take_along_axis(sums, jnp.maximum(block - 1, 0)[None], axis=0)[0], 0)
    passed = (before + jnp.cumsum(inside, axis=0) <= wanted).sum(axis=0)
    return block * BLOCK + jnp.minimum(passed, _last(inside > 0))


def _last(is_there: Array) -> Array:
    """Returns i32 [N], the index of the last True in each column of bool [M, N]."""
    numbers = jax.lax.broadcasted_iota(jnp.int32, is_there.shape, 0)
    return jnp.where(is_there, numbers, 0).max(axis=0)
