"""Decodes by full recomputation: without a cache, without packed queries and without batches; and a toy model for it.

At every step the teacher-forced model runs on all tokens fed so far, with the mask of training and the strategy's
positions. The toy model has few words and random weights.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import ArrayLike

from pipejax import grid
from pipejax.config import T5Config
from pipejax.decoding import Decoded, Queries, Query, Rule, Strategy, ends_of, group_of, strategy_checks
from pipejax.model.backbone import Backbone
from pipejax.system import Tree

SHORT, LONGEST = 12, 40  # the most tokens of short sources, and of all
NEAR = 1e-4  # relative differences below this are explained by rounding
TOY = T5Config(64, 16, 8, 24, 2, 1, 1, relative_attention_num_buckets=8, relative_attention_max_distance=20)
Cell = tuple[int, int, int]  # row, time, token


class GivenQueries(Queries):
    """Queries with given prefixes and rows above, for which nothing has to be computed."""

    def __init__(self, example: ArrayLike, row: ArrayLike, time: ArrayLike, known: Sequence[ArrayLike]) -> None:
        """Stores the queries; `known` contains `prefix`, `length`, `above` and `above_length`."""
        self.example, self.row, self.time = (jnp.asarray(x, jnp.int32) for x in (example, row, time))
        self._known = tuple(jnp.asarray(x, jnp.int32) for x in known)

    @classmethod
    def of_slot(cls, strategy: Strategy, row: int, time: int, fed: Sequence[Cell]) -> "GivenQueries":
        """Returns the query at a row and time, from the row, time and token of all fed slots."""
        rows, width = strategy.places
        known, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
        for r, t, token in sorted(fed):
            count = t - int(strategy.start(r))
            if t <= time and r <= row and count > 0 and token not in ends_of(strategy):
                known[r, count - 1], lengths[r] = token, count
        group = group_of(strategy) or np.zeros_like
        is_seen = grid.shares_group(group(np.asarray(row)), group(np.arange(rows))) & (np.arange(rows) < row)
        above = np.where(is_seen, lengths, 0)
        shown = known[None, row], lengths[None, row], known[None], above[None]
        return cls(np.asarray([0]), np.asarray([row]), np.asarray([time]), shown)

    @property
    def prefix(self) -> jax.Array:
        """See `Queries`."""
        return self._known[0]

    @property
    def length(self) -> jax.Array:
        """See `Queries`."""
        return self._known[1]

    @property
    def above(self) -> jax.Array:
        """See `Queries`."""
        return self._known[2]

    @property
    def above_length(self) -> jax.Array:
        """See `Queries`."""
        return self._known[3]


@dataclasses.dataclass
class History:
    """The slots that the queries of one example have filled, in the order in which they were fed."""

    strategy: Strategy
    cells: list[Cell] = dataclasses.field(default_factory=list)
    is_kept: list[bool] = dataclasses.field(default_factory=list)  # whether later queries may see the slot
    # For each slot, i32 [T], the one row that it sees at each time; None: the slot sees what `grid.visible` says.
    lineages: list[np.ndarray | None] = dataclasses.field(default_factory=list)

    def add(self, query: Query) -> list[int]:
        """Adds the live queries of a step for one example, and returns the numbers of their slots."""
        live, first = np.asarray(query.live[0]), len(self.cells)
        row, time, token = (np.asarray(x[0])[live].tolist() for x in (query.row, query.time, query.tokens))
        self.cells += zip(row, time, token, strict=True)
        self.is_kept += [True] * len(row)
        self.lineages += [None] * len(row) if query.lineage is None else [*np.asarray(query.lineage[0])[live]]
        return [*range(first, len(self.cells))]

    def keep(self, query: Query, kept: np.ndarray) -> None:
        """Hides the slots of the last step that are not kept; `kept`: bool [1, S]."""
        live = np.asarray(query.live[0])
        self.is_kept[len(self.cells) - int(live.sum()) :] = np.asarray(kept)[0][live].tolist()

    def seen_by(self, queries: Sequence[int]) -> np.ndarray:
        """Returns bool [n, slots], the slots that each of the given slots sees."""
        if not self.cells:
            return np.zeros((len(queries), 0), bool)
        row, time, _ = np.asarray(self.cells).T
        found = np.asarray(grid.visible(row[[*queries], None], time[[*queries], None], row, time))
        if (group := group_of(self.strategy)) is not None:
            found &= np.asarray(grid.shares_group(group(row)[[*queries], None], group(row)))
        for i, lineage in enumerate(self.lineages[query] for query in queries):
            if lineage is not None:
                found[i] = (time < len(lineage)) & (lineage[np.minimum(time, len(lineage) - 1)] == row)
        return found & np.asarray(self.is_kept)

    def position(self, slot: int) -> int:
        """Returns the position of a slot.

        The position of a slot with a lineage is its time, since the tokens that it sees are in several rows.
        """
        row, time, _ = self.cells[slot]
        return time if self.lineages[slot] is not None else int(self.strategy.position(row, time))

    def query(self, slot: int) -> GivenQueries:
        """Returns the query of a slot, as a rule on logits receives it."""
        fed = [cell for cell, kept in zip(self.cells, self.is_kept, strict=True) if kept]
        return GivenQueries.of_slot(self.strategy, *self.cells[slot][:2], fed)

    def context(self, query: int) -> tuple[tuple[int, int], ...]:
        """Returns the distance and the token of each slot that a slot sees.

        A model with relative positions sees nothing else of the answer.
        """
        here = self.position(query)
        keys = np.flatnonzero(self.seen_by([query])[0]).tolist()
        return tuple(sorted((here - self.position(key), self.cells[key][2]) for key in keys))


# Returns the arrays [n, ...] that are passed to `Strategy.advance` for n new slots, given the history and the slots.
Answer = Callable[[History, Sequence[int]], Tree]


def follow(strategy: Strategy, answer: Answer) -> tuple[History, Decoded, int]:
    """Decodes one example with answers from a function instead of a model.

    Args:
      strategy: the strategy.
      answer: returns tokens i32 [n], or the arrays [n, ...] of `strategy.choose`, for the n new slots of a step.

    Returns:
      The filled slots, the result, and the number of steps of the decoding loop.
    """
    history, decoded, calls = History(strategy), None, 0

    def spread(live: np.ndarray, x: Any) -> np.ndarray:
        found = np.zeros((*live.shape, *np.shape(x)[1:]), np.asarray(x).dtype)
        found[live] = x
        return found

    def answers(query: Query) -> Tree:
        chosen = answer(history, history.add(query))
        return jax.tree.map(partial(spread, np.asarray(query.live)), chosen)

    for query, _, decoded, kept in strategy_checks.walk(strategy, answers):  # noqa: B007
        history.keep(query, kept)
        calls += 1
    assert decoded is not None, "a strategy takes at least one step"
    return history, decoded, calls


def recompute(
    model: Backbone,
    params: Tree,
    strategy: Strategy,
    source: Sequence[int],
    forced: np.ndarray | None = None,
    rules: Sequence[Rule] = (),
) -> tuple[Decoded, dict[tuple[int, int], float], float]:
    """Decodes a source by full recomputation.

    Args:
      model: the backbone.
      params: its parameters.
      strategy: the strategy.
      source: the ids of the source.
      forced: i32 [R, W], the token to generate at each row and time, -1: any; None: none.
      rules: changes of logits, each of which leaves a token to every query.

    Returns:
      The result, as a batch of one, with the number of decoder calls; the log-probability of the token generated at
      each row and time, empty if the strategy's `choose` gives no tokens; and the smallest difference between the two
      highest logits of a query, inf if all tokens are forced. For a strategy with `choose` this number is instead inf,
      or 0 if rounding may change what it chooses.
    """
    log_probs, margins, noise = dict[tuple[int, int], float](), [np.inf], np.random.default_rng(0)
    size = 1 << (strategy.slots - 1).bit_length()  # one size for all passes, so that the model is compiled once
    longest = SHORT if len(source) <= SHORT else LONGEST
    ids = np.resize([*source, *[0] * longest], (1, longest)).astype(np.int32)
    real = np.arange(longest)[None] < len(source)
    states = [rule.init(1, strategy.places[0]) for rule in rules]

    def logits_of(history: History, new: Sequence[int]) -> np.ndarray:
        slots, count = [*range(len(history.cells))], len(history.cells)
        token, position, mask = (
            np.zeros((1, size), np.int32),
            np.zeros((1, size), np.int32),
            np.zeros((size, size), bool),
        )
        token[0, :count] = [fed for _, _, fed in history.cells]
        position[0, :count] = [history.position(slot) for slot in slots]
        mask[:count, :count] = history.seen_by(slots)
        given = ids, real, token, mask[None], position
        return np.asarray(teacher_forced(model.module(), params, *given))[0][[*new]]

    def answer(history: History, new: Sequence[int]) -> Tree:
        logits = own = logits_of(history, new)
        queries = [history.query(slot) for slot in new] if rules else []
        for rule, state in zip(rules, states, strict=True):
            pairs = zip(jnp.asarray(logits)[:, :, None], queries, strict=True)
            logits = np.asarray([rule.apply(x, query, state)[:, 0] for x, query in pairs])
        if strategy.choose is not None:
            other = logits * (1 + NEAR * noise.choice([-1, 1], logits.shape))
            chosen, again = choose(strategy, logits), choose(strategy, other)
            margins.append(np.inf if _same_numbers(chosen, again) else 0.0)
        else:
            chosen, top = logits.argmax(axis=1).astype(np.int32), np.sort(logits, axis=1)[:, -2:]
        if not isinstance(chosen, np.ndarray) or chosen.dtype != np.int32 or chosen.shape != (len(new),):
            return chosen  # arrays in the strategy's own format
        chosen = chosen.copy()
        for i, (row, time, _) in enumerate(history.cells[slot] for slot in new):
            wanted = -1 if forced is None else int(forced[row, time])
            chosen[i] = chosen[i] if wanted < 0 else wanted
            log_probs[row, time] = float(own[i, chosen[i]] - np.logaddexp.reduce(own[i]))
            if wanted < 0 and strategy.choose is None:
                margins.append(float(top[i, 1] - top[i, 0]))
            for number, rule in enumerate(rules):
                states[number] = rule.follow(states[number], jnp.asarray(chosen[i : i + 1]), queries[i])
        return chosen

    _, decoded, calls = follow(strategy, answer)
    return dataclasses.replace(decoded, calls=np.asarray([calls], np.int32)), log_probs, min(margins)


def choose(strategy: Strategy, logits: np.ndarray) -> Tree:
    """Returns the arrays [n, ...] that a strategy chooses from the logits f32 [n, V] of n queries; NumPy arrays."""
    size = 1 << max(len(logits) - 1, strategy.most_queries - 1).bit_length()  # few sizes, since each is compiled
    padded = np.zeros((logits.shape[1], size), np.float32)
    padded[:, : len(logits)] = logits.T
    found: Tree = jax.tree.map(lambda x: x[: len(logits)], jax.device_get(_choose(strategy, padded)))
    return found


@partial(jax.jit, static_argnums=0)
def _choose(strategy: Strategy, logits: Any) -> Tree:
    """Runs `Stepper.choose` on logits f32 [V, N]."""
    assert strategy.choose is not None, "the caller has tested it"
    return strategy.choose(logits)


def _same_numbers(one: Tree, other: Tree) -> bool:
    """Returns whether the whole numbers and flags of two trees are equal; other numbers may differ by rounding."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs if np.asarray(a).dtype.kind in "bi")


def random_params(config: Backbone, eos: int, seed: int = 0) -> Tree:
    """Returns random parameters with which greedy answers vary.

    With the negative scale of the decoder's last norm, a token makes its own repetition unlikely. The embedding of
    `eos` is scaled by 1.5, so that it is generated more often.
    """
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    drawn, fresh = flatten_dict(jax.eval_shape(config.init_params, key), sep="/"), dict[str, Any]()
    for path, x in drawn.items():
        gain = 3 if re.search("(?<!cross_)attention/output", path) else 1
        if path.endswith("norm/scale"):
            center, scale = -1 if path == "decoder/norm/scale" else 1, 0.2
        elif path.endswith("kernel"):
            center, scale = 0, gain * x.shape[0] ** -0.5
        elif path.endswith("embedding"):
            center, scale = 0, 4 if "relative_bias" in path else 1.5
        else:
            fresh = fresh or flatten_dict(jax.jit(config.init_params)(key), sep="/")
            center, scale = fresh[path], 0.2
        drawn[path] = np.asarray(center + scale * rng.standard_normal(x.shape), np.float32)
        if path in config.tables:
            drawn[path][eos] *= 1.5
    return unflatten_dict(drawn, sep="/")


def compiled(function: Callable[..., Any]) -> Any:
    """Returns a function compiled by `jax.jit`, for a program that runs only a few times.

    On a CPU, the program is optimised less, which halves the time of compiling.
    """
    quickly = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=quickly)


def teacher_forced(module: Any, params: Tree, *given: Any) -> Any:
    """Returns the teacher-forced logits of a module. The program is compiled once for each module and shape."""
    return _program_of(module)({"params": params}, *given)


@functools.lru_cache(maxsize=64)
def _program_of(module: Any) -> Any:
    """Returns the compiled call of a module."""
    return compiled(module.apply)


def draw_ids(rng: np.random.Generator, model: Backbone, most: int, least: int = 1) -> list[int]:
    """Returns `least` to `most` random ids of words, without ids that a method may use for itself."""
    return rng.integers(5, min(model.vocab_size, 58) - 4, rng.integers(least, most + 1)).tolist()
