"""Rules: changes of the logits from which the next tokens are chosen.

A `Rule` gets the logits of the N queries of a step. It may use the example, row and time of each query, the tokens of
its row (`Queries.prefix`), the rows above that it sees (`Queries.above`), and a state that the rule keeps for each row.
`DecodingOptions.rules` are applied one after the other, before a token is taken or drawn. Forced tokens and
log-probabilities do not depend on rules: log-probabilities are computed from the logits of the model.

A rule that forbids tokens gives them the logit `FORBIDDEN`. A rule must leave at least one token to each query. If
several rules together leave a query no token, the last of them does not change its logits.

`pipejax.testing.check_rule` checks a rule of a user (docs/methods.md).

Shapes: B batch, R rows of the grid, W times, T the most tokens of a row, N queries of a step, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax import grid
from pipejax.decoding import strategy_checks
from pipejax.decoding.gathering import PROBE, Query, Step, query_coordinates
from pipejax.decoding.strategy import Stepper, Strategy, ends_of, group_of, is_end
from pipejax.decoding.times import count_before
from pipejax.system import Tree
from pipejax.system.errors import UserError, first_line

Array = jax.Array

FORBIDDEN = -jnp.inf  # the logit of a token that must not be chosen


class KnownRows(NamedTuple):
    """The rows of a batch as a step knows them: the generated tokens, and the drafted tokens that the step feeds."""

    tokens: Array  # i32 [B, R, T], without bos; undefined beyond `length`
    length: Array  # i32 [B, R], number of tokens of each row, without bos and end token
    start: Array  # i32 [R], the time of each row's bos
    group: Array | None  # i32 [R], the group of each row; None: all rows are in group 0


def known_rows(strategy: Stepper, state: Tree, query: Query) -> KnownRows:
    """Returns the rows of a batch in a step.

    Args:
      strategy: the strategy. Its `start` gives the place of a fed token in its row: the token that is fed at time
        start + k is the k-th token of the row.
      state: the state of the strategy, after `Stepper.query`.
      query: the queries of the step.
    """
    found = strategy.result(state)
    batch, rows, width = found.tokens.shape
    start = jnp.asarray(cast(Strategy, strategy).start(np.arange(rows)), jnp.int32)
    row = jnp.broadcast_to(query.row, query.live.shape)
    counts = query.live if query.kind is None else query.live & (query.kind != PROBE)
    count = jnp.where(counts, query.time - start[jnp.minimum(row, rows - 1)], 0)  # tokens of the row that are fed
    at = jnp.arange(batch)[:, None], row
    tokens = found.tokens.at[(*at, jnp.where(count > 0, count - 1, width))].set(query.tokens, mode="drop")
    length = jnp.maximum(found.lengths, jnp.zeros((batch, rows), jnp.int32).at[at].max(count, mode="drop"))
    # Fed tokens may include the end token of a row, generated or drafted.
    ends = is_end(tokens, ends_of(strategy)) & (jnp.arange(width) >= found.lengths[:, :, None])
    group = group_of(strategy)
    groups = None if group is None else jnp.asarray(group(jnp.arange(rows)))
    return KnownRows(tokens, jnp.minimum(length, count_before(ends, axis=2)), start, groups)


class Queries:
    """The N queries of a step, as a rule sees them. Some of the queries may be fillers, whose logits do not matter.

    Properties are computed when they are read: a property that no rule reads is not computed. A drafted token counts as
    a token of its row for the queries after it, since these queries are discarded if the drafted token turns out to be
    wrong.
    """

    def __init__(self, step: Step, find_rows: Callable[[], KnownRows]) -> None:
        """Describes the queries of a step.

        Args:
          step: the step.
          find_rows: a function that returns the rows of the batch.
        """
        self.example, self.row, self.time = query_coordinates(step)  # i32 [N] each
        self._find_rows = find_rows

    def pick(self, of_rows: Array | np.ndarray) -> Array:
        """Returns [N, ...], the entry of each query's row in an array [B, R, ...]."""
        return jnp.asarray(of_rows)[self.example, jnp.minimum(self.row, of_rows.shape[1] - 1)]

    def put(self, of_rows: Array, values: Array) -> Array:
        """Returns the array `of_rows` [B, R, ...] with the `values` [N, ...] at the queries' rows."""
        return of_rows.at[self.example, self.row].set(values, mode="drop")

    @property
    def prefix(self) -> Array:
        """i32 [N, T], the tokens of each query's row before the one to choose, without bos; 0 from `length` on."""
        tokens = self.pick(self._find_rows().tokens)
        return jnp.where(jnp.arange(tokens.shape[1]) < self.length[:, None], tokens, 0)

    @property
    def length(self) -> Array:
        """i32 [N], the number of tokens in `prefix`."""
        known = self._find_rows()
        start = known.start[jnp.minimum(self.row, len(known.start) - 1)]
        return jnp.clip(self.time - start, 0, self.pick(known.length))

    @property
    def above(self) -> Array:
        """i32 [N, R, T], the tokens of the rows above each query, without bos and end token; 0 where it sees none."""
        tokens = self._find_rows().tokens[self.example]
        return jnp.where(jnp.arange(tokens.shape[2]) < self.above_length[:, :, None], tokens, 0)

    @property
    def above_length(self) -> Array:
        """i32 [N, R], the number of tokens in `above` that each query sees.

        A query at time t sees the tokens that rows with lower numbers have fed up to time t (`grid.visible`). The
        number is 0 for the query's own row and for the rows below it.
        """
        known = self._find_rows()
        rows = jnp.arange(len(known.start))
        seen = jnp.clip(self.time[:, None] - known.start, 0, known.length[self.example])
        is_seen = rows < self.row[:, None]
        if known.group is not None:
            own = known.group[jnp.minimum(self.row, len(rows) - 1)]
            is_seen &= grid.shares_group(own[:, None], known.group)
        return jnp.where(is_seen, seen, 0)


class Rule:
    """A change of logits. Subclasses are pytrees of arrays, such as a `flax.struct.dataclass`.

    The fields are arrays with a first axis of B, one entry for each example, except numbers and the fields named in
    `shared`, which all examples share. `apply` is a pure function. With drafts, a rule must not have a state.
    """

    shared: ClassVar[tuple[str, ...]] = ()  # the names of arrays that all examples share

    @classmethod
    def create(cls, strategy: Strategy, tokenizer: Any) -> Self:
        """Returns the rule of the setting `decode.rules`. By default all fields have their default values.

        Args:
          strategy: the strategy; `ends_of(strategy)` are the tokens that end a row.
          tokenizer: the tokenizer, a `pipejax.data.tokenizer.Tokenizer`; None: the checkpoint has none.
        """
        return cls()

    def init(self, batch: int, rows: int) -> Tree:
        """Returns the state of each row before its first token, arrays [B, R, ...]; None: the rule has no state.

        Args:
          batch: B.
          rows: R.
        """
        return None

    def apply(self, logits: Array, queries: Queries, state: Tree) -> Array:
        """Returns the changed logits.

        Args:
          logits: f32 [V, N], of the N queries; one column for each.
          queries: the queries.
          state: the state of each row, as `init` and `follow` return it.

        Returns:
          f32 [V, N].
        """
        raise NotImplementedError

    def follow(self, state: Tree, tokens: Array, queries: Queries) -> Tree:
        """Returns the state of each row after a step.

        Rows that have ended may be followed as well, but their states are not used.

        Args:
          state: the state before the step.
          tokens: i32 [N], the token that was chosen for each query.
          queries: the queries.
        """
        return state

    def take(self, numbers: np.ndarray) -> Self:
        """Selects the examples `numbers`, i32 [E, B]: each array gets these two leading axes. In NumPy.

        Fields that all examples share are broadcast to the leading axis E.
        """

        def select(name: str, x: Any) -> Any:
            shared = self._is_shared(name, x)
            return np.broadcast_to(x, (len(numbers), *np.shape(x))) if shared else np.asarray(x)[numbers]

        return self._map(select)

    def put(self, place: int, one: Self) -> Self:
        """Returns this rule with the entry of example `place` taken from `one`, a rule for a single example."""
        others = {field.name: jax.tree.leaves(getattr(one, field.name)) for field in self._fields}

        def replace(name: str, x: Any) -> Any:
            own = others[name].pop(0)
            if self._is_shared(name, x):
                return x
            found = np.array(x)
            found[place] = own[0]
            return found

        return self._map(replace)

    def on_device(self) -> Self:
        """Returns the rule with the arrays that all examples share on the default device."""
        return self._map(lambda name, x: jax.device_put(x) if self._is_shared(name, x) else x)

    def _is_shared(self, name: str, x: Any) -> bool:
        """Returns whether all examples share an array of the field `name`."""
        return name in self.shared or np.ndim(x) == 0

    @property
    def _fields(self) -> list["dataclasses.Field[Any]"]:
        """The fields that hold arrays."""
        fields = dataclasses.fields(cast(Any, self))
        return [field for field in fields if field.metadata.get("pytree_node", True)]

    def _map(self, function: Callable[[str, Any], Any]) -> Self:
        """Returns the rule with `function(name, array)` for each array of each field."""
        changed = {
            field.name: jax.tree.map(lambda x, name=field.name: function(name, x), getattr(self, field.name))
            for field in self._fields
        }
        return cast(Self, dataclasses.replace(cast(Any, self), **changed))


@flax.struct.dataclass
class Allowed(Rule):
    """Allows only some tokens of the vocabulary, in each example its own."""

    tokens: Array | np.ndarray  # bool [B, V]

    def apply(self, logits: Array, queries: Queries, state: Tree) -> Array:
        """See `Rule`."""
        return jnp.where(jnp.asarray(self.tokens)[queries.example].T, logits, FORBIDDEN)


def create_rule(kind: type[Rule], strategy: Strategy, tokenizer: Any, where: str) -> Rule:
    """Returns the rule that `Rule.create` of a user's class returns, with NumPy arrays.

    Args:
      kind: the class.
      strategy: see `Rule.create`.
      tokenizer: see `Rule.create`.
      where: the setting that names the class, for messages.

    Raises:
      UserError: the class is not a rule, or has a field that is neither a number nor in `shared`.
    """
    expected = "a subclass of pipejax.decoding.Rule that is a flax.struct.dataclass"
    if not (isinstance(kind, type) and issubclass(kind, Rule)):
        raise UserError(where, found=f"{kind!r}", expected=expected)
    try:
        made: Any = kind.create(strategy, tokenizer)
    except UserError:
        raise
    except Exception as error:
        found = f"{kind.__name__}, which cannot be created ({type(error).__name__}: {first_line(error)})"
        raise UserError(where, found=found, expected="a class method `create` that sets all fields") from error
    if not isinstance(made, Rule) or any(leaf is made for leaf in jax.tree.leaves(made)):
        raise UserError(where, found=f"{kind.__name__}, which is not a pytree of arrays", expected=expected)
    for field in made._fields:
        if field.name not in made.shared and any(np.ndim(x) for x in jax.tree.leaves(getattr(made, field.name))):
            raise UserError(
                f"{kind.__name__}.{field.name}",
                found="an array without an entry for each example",
                expected="a number, or an array that `shared` names",
            )
    return made._map(lambda _, x: np.asarray(jnp.asarray(x)))


def check_rules(strategy: Stepper, state: Tree, rules: Sequence[Rule], states: Sequence[Tree]) -> None:
    """Raises a UserError if the strategy does not support the rules.

    Args:
      strategy: the strategy.
      state: its state.
      rules: the rules.
      states: the state of each rule.
    """
    rows = strategy.places[0]
    if not rows:
        strategy_checks.refuse(
            strategy, "places", "no rows", f"a grid of rows, as {type(rules[0]).__name__} changes logits"
        )
    if strategy.kept(state) is None and strategy.most_queries == rows:
        return
    # The state of a row is kept for the last token that is certain, and not for each of the row's queries.
    for rule, of_rows in zip(rules, states, strict=True):
        if jax.tree.leaves(of_rows):
            strategy_checks.refuse(
                rule,
                "init",
                "a state, and several queries of a row in a step",
                "no drafts, or None as the state of a rule that reads `Queries.prefix` instead",
            )
