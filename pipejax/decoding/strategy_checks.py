"""Checks a strategy by its shapes and by a dry run without a model; raises a one-line error at the first violation.

Shapes as in `core`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.decoding.gathering import Query
from pipejax.decoding.strategy import Decoded, Refillable, SourceIds, Stepper, Strategy, ends_of
from pipejax.system import Tree
from pipejax.system.errors import UserError

Walked = tuple[Query, Any, Decoded, np.ndarray]  # a step: queries, answers, rows so far, kept queries


def refuse(owner: object, place: str, found: object, expected: object) -> NoReturn:
    """Raises a UserError about a part of a method, strategy, rule or backbone.

    Args:
      owner: the object; the message begins with the name of its class.
      place: the attribute or method, and the part of its result.
      found: the value, shape or behaviour that was found.
      expected: the expected one.
    """
    raise UserError(f"{type(owner).__name__}.{place}", found=f"{found}", expected=f"{expected}")


def expect(owner: object, place: str, x: Any, kind: str, *shapes: tuple[int, ...], of: str = "") -> None:
    """Raises a UserError unless an array has the given dtype and one of the given shapes.

    Args:
      owner: the object that returned the array.
      place: the method that returned it, and the part of the result.
      x: the array, or an abstract array.
      kind: the name of the dtype.
      shapes: the accepted shapes.
      of: an addition to the message.
    """
    wanted = [f"{kind}{[*shape]}" for shape in dict.fromkeys(shapes)]
    if _kind(x) not in wanted:
        refuse(owner, place, _kind(x), " or ".join(wanted) + of)


def check_query(strategy: Stepper, query: Query, batch: int) -> None:
    """Raises a UserError for a query of wrong dtypes or of a width other than `most_queries`, while JAX traces it."""
    shape = batch, strategy.most_queries
    expect(strategy, "query: live", query.live, "bool", shape, of=", most_queries for each example")
    expect(strategy, "query: tokens", query.tokens, "int32", shape)
    if query.kind is not None:
        expect(strategy, "query: kind", query.kind, "int32", shape)
    expect(strategy, "query: row", query.row, "int32", shape, (1, shape[1]))
    expect(strategy, "query: time", query.time, "int32", shape, (1, shape[1]))


def check_state(owner: object, before: Tree, after: Tree, *, method: str = "advance") -> None:
    """Raises a UserError if `method` changed shapes or dtypes of a state, while JAX traces the method.

    A loop can carry a state only if its shapes and dtypes stay the same.
    """
    old, new = (jax.tree_util.tree_leaves_with_path(jax.tree.map(_kind, tree)) for tree in (before, after))
    for was, now in zip(old, new, strict=False):
        if was != now:
            refuse(owner, f"{method}: {jax.tree_util.keystr(now[0])}", now[1], f"{was[1]}, as before")
    shapes = [str(jax.tree.structure(tree)) for tree in (before, after)]
    if shapes[0] != shapes[1]:
        refuse(owner, method, shapes[1], shapes[0])


def check_rows(owner: object, method: str, state: Tree, shape: tuple[int, ...]) -> None:
    """Raises a UserError unless the first axes of all arrays of a state are `shape`, while JAX traces the method.

    `shape` is (B, R) or (B,).
    """
    axes = "the first two axes, batch and rows" if len(shape) == 2 else "the first axis, the batch"
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if jnp.shape(x)[: len(shape)] != shape:
            refuse(owner, f"{method}: {jax.tree_util.keystr(path)}", _kind(x), f"{[*shape]} as {axes}")


def check_result(strategy: Stepper, decoded: Decoded, batch: int) -> None:
    """Raises a UserError for a result of wrong shapes, while JAX traces the decode."""
    rows, width = (*jnp.shape(decoded.tokens), 0, 0)[1:3]
    expect(strategy, "result: tokens", decoded.tokens, "int32", (batch, strategy.places[0] or rows, width))
    expect(strategy, "result: lengths", decoded.lengths, "int32", (batch, rows))
    expect(strategy, "result: steps", decoded.steps, "int32", (batch,))
    expect(strategy, "result: truncated", decoded.truncated, "int32", (batch,))


def walk(
    strategy: Strategy, answer: Callable[[Query], Tree], batch: int = 1, stops: Sequence[int] = ()
) -> Iterator[Walked]:
    """Runs the steps of a batch until all its examples are done, with answers from a function instead of a model.

    Args:
      strategy: the strategy.
      answer: maps the queries of a step to the tokens i32 [B, S] that are generated from them, or to the arrays
        [B, S, ...] of `Stepper.choose`.
      batch: B.
      stops: the examples that `Refillable.stop` ends after the first step.

    Yields:
      For each step the queries, the answers, the result so far, and bool [B, S], the live queries that are kept; all of
      them are NumPy arrays.

    Raises:
      UserError: a shape is wrong, or an example is not done after far more steps than it has slots.
    """
    source = None
    if strategy.reads_source:
        source = SourceIds(np.full((batch, 4), 2, np.int32), np.full(batch, 4, np.int32))
    state, most = _begin(strategy, batch, source), 2 * strategy.slots + 64
    for _ in range(most):
        state, query = jax.device_get(_ask(strategy, state, batch))
        answers = answer(query)
        state, kept, done, decoded = jax.device_get(_take(strategy, state, answers, batch))
        yield query, answers, decoded, query.live & kept
        if stops:
            which = jnp.asarray(np.isin(np.arange(batch), stops))
            state, stops = cast(Refillable, strategy).stop(state, which), ()
        if done.all():
            return
    refuse(strategy, "done", f"an answer that continues after {most} steps", f"its end, since slots = {strategy.slots}")


@partial(jax.jit, static_argnums=(0, 1))
def _begin(strategy: Strategy, batch: int, source: SourceIds | None) -> Tree:
    """Runs `Stepper.init`."""
    return strategy.init(batch, source)


@partial(jax.jit, static_argnums=(0, 2))
def _ask(strategy: Strategy, state: Tree, batch: int) -> tuple[Tree, Query]:
    """Runs `Stepper.query`, and checks the queries."""
    state, query = strategy.query(state)
    check_query(strategy, query, batch)
    return state, query


@partial(jax.jit, static_argnums=(0, 3))
def _take(
    strategy: Strategy, state: Tree, answers: Tree, batch: int
) -> tuple[Tree, jax.Array | bool, jax.Array, Decoded]:
    """Runs `Stepper.advance`, and checks the results.

    Args:
      strategy: the strategy.
      state: the state after `Stepper.query`.
      answers: i32 [B, S], the generated tokens, or the arrays of `Stepper.choose`.
      batch: B.

    Returns:
      The new state; bool [B, S], the queries that are kept, or True for all; bool [B], whether each example is done;
      and the result so far.
    """
    new = strategy.advance(state, answers)
    check_state(strategy, state, new)
    kept, done, decoded = strategy.kept(new), strategy.done(new), strategy.result(new)
    expect(strategy, "done", done, "bool", (batch,))
    check_result(strategy, decoded, batch)
    return new, True if kept is None else kept, done, decoded


def dry_run(strategy: Strategy, *, ordered: str, grows: str) -> None:
    """Decodes an example with random tokens, and raises a UserError if the rows break a rule of some abilities.

    Args:
      strategy: the strategy.
      ordered: the abilities that need a row's tokens to be generated at consecutive times, for the message; "": none.
      grows: the abilities that need rows to grow at their end, for the message; "": none.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(jax.eval_shape(lambda: strategy.init(7))) if grows else ():
        if x.shape[:1] != (7,):
            refuse(
                strategy, f"init: {jax.tree_util.keystr(path)}", _kind(x), f"the batch as the first axis, for {grows}"
            )
    rng, said, slots = np.random.default_rng(0), dict[tuple[int, int], int](), 0
    rows: list[list[int]] = []

    def answer(query: Query) -> np.ndarray:
        drawn = rng.integers(2, 9, query.live.shape)
        return np.where(rng.random(drawn.shape) < 0.2, rng.choice(ends_of(strategy)), drawn).astype(np.int32)

    for query, answers, decoded, kept in walk(strategy, answer):
        before, slots = rows, slots + int(query.live.sum())
        rows = [row[:n].tolist() for row, n in zip(decoded.tokens[0], decoded.lengths[0], strict=True)]
        if grows and any(new[: len(old)] != old for old, new in zip(before, rows, strict=False)):
            refuse(strategy, "result", f"{before}, then {rows}", f"rows that grow at their end, for {grows}")
        said |= {(int(query.row[0, s]), int(query.time[0, s])): int(answers[0, s]) for s in np.flatnonzero(kept[0])}
    if slots > strategy.slots:
        refuse(strategy, "slots", strategy.slots, f"{slots} or more, the number of queries in all steps")
    for i, row in enumerate(rows) if ordered else ():
        found = [said.get((i, int(strategy.start(i)) + j)) for j in range(len(row))]
        if row != found:
            refuse(
                strategy,
                "result: tokens",
                f"{row} in row {i}",
                f"{found}, generated from time start({i}) on, for {ordered}",
            )


def _kind(x: Any) -> str:
    """Returns the dtype and shape of an array for messages, such as "int32[2, 3]"; the text form of other values."""
    return f"{jnp.result_type(x)}{[*x.shape]}" if hasattr(x, "shape") else repr(x)
