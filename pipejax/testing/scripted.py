"""Checks the accounting of a strategy and the independence of examples, with scripted answers instead of a model.

A script maps a row and a time to the token that is generated there. For strategies whose rows are the rows of Algorithm
1, the expected result comes from Algorithm 1 in plain Python.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.config import DecodeConfig
from pipejax.decoding import TRUNCATIONS, Decoded, Query, Strategy, drafted, ends_of, strategy_checks
from pipejax.decoding.rows import Rows
from pipejax.system import Tree
from pipejax.system.errors import UserError
from pipejax.testing.recomputation import History, choose, follow

Script = Callable[[int, int], int]  # the token generated at a row and a time
Rights = Sequence[Sequence[int]]  # the tokens that each query should generate, the best one first
# The probabilities of an end token in scripts: rows that never end, that end soon, and that all are empty.
END_SHARES = (0.0, 0.15, 0.5, 1.0)


class Answers(NamedTuple):
    """An answer of an example: its rows, and the numbers that records report."""

    rows: list[list[int]]
    steps: int
    calls: int
    truncated: str | None


def of_example(strategy: Strategy, decoded: Decoded, example: int = 0) -> Answers:
    """Returns the answer of one example of a decoded batch."""
    tokens, lengths = decoded.tokens[example], decoded.lengths[example]
    rows = [row[:n].tolist() for row, n in zip(tokens, lengths.tolist(), strict=True)]
    calls = int(np.asarray(strategy.calls(decoded))[example])
    return Answers(rows, int(decoded.steps[example]), calls, TRUNCATIONS[int(decoded.truncated[example])])


def chosen(strategy: Strategy, rights: Rights, vocabulary: int) -> Tree:
    """Returns the argument [n, ...] of `Stepper.advance` for logits in which only the tokens of `rights` are likely."""
    if strategy.choose is None:
        return np.asarray([right[0] for right in rights], np.int32)
    logits = np.full((len(rights), vocabulary), -10.0, np.float32)
    for query, right in enumerate(rights):
        logits[query, [*right]] = 10.0 - np.arange(len(right))
    return choose(strategy, logits)


def follow_script(strategy: Strategy, script: Script, vocabulary: int) -> tuple[History, Decoded, int]:
    """Decodes one example with a script; see `recomputation.follow`."""

    def answer(history: History, new: Sequence[int]) -> Tree:
        return chosen(strategy, [[script(*history.cells[slot][:2])] for slot in new], vocabulary)

    return follow(strategy, answer)


def random_script(strategy: Strategy, seed: int, share: float, vocabulary: int) -> Script:
    """Returns a script of random tokens, in which an end token has the probability `share`.

    A row of the script may be long or empty.
    """
    rng, ends = np.random.default_rng(seed), ends_of(strategy)
    words = [token for token in range(3, vocabulary) if token not in ends]
    known = dict[tuple[int, int], int]()

    def script(row: int, time: int) -> int:
        if (row, time) not in known:
            is_end = rng.random() < share
            known[row, time] = int(rng.choice(ends) if is_end else rng.choice(words))
        return known[row, time]

    return script


def rules_of(strategy: Strategy) -> Rows | None:
    """Returns the rules of Algorithm 1 whose answers a strategy gives.

    The result is None if the strategy has other rows, or overrides their steps.
    """
    if not hasattr(strategy, "on_grid"):
        return None
    try:
        return drafted(strategy, DecodeConfig(draft="source"))
    except UserError:
        return None


def algorithm_1(rules: Rows, script: Script) -> Answers:
    """Runs Algorithm 1 of the paper (section 3.4) with a script, token by token in plain Python.

    Without `literal`, no row starts after an empty one, and decoding stops when no more rows can start and all rows
    have ended. With `unique`, no row starts after two neighbouring rows that repeat rows above them, either.
    """
    ends, rows, calls, steps = ends_of(rules), list[list[int]](), 0, 0
    is_over = is_complete = False
    while steps < rules.time_max and not is_over:
        may_start = len(rows) < rules.sub_max and not is_complete
        if rules.delay == 0 and steps == 0:
            rows = [[] for _ in range(rules.sub_max)]
        elif rules.delay and steps % rules.delay == 0 and may_start:
            rows.append([])
        is_open = [not row or row[-1] not in ends for row in rows]
        calls += any(is_open)
        for number in np.flatnonzero(is_open).tolist():
            rows[number].append(script(number, steps))
        steps += 1
        has_ended = [row[-1] in ends for row in rows]
        if not rules.literal and rules.delay:
            is_complete = any(len(row) == 1 and row[-1] in ends for row in rows)
            is_complete |= rules.unique and _is_circle(rows, has_ended)
        no_more = rules.delay == 0 or rules.literal or is_complete or len(rows) == rules.sub_max
        is_over = all(has_ended) and no_more
    is_complete |= any(len(row) == 1 and row[-1] in ends for row in rows)
    if not all(row[-1] in ends for row in rows):
        truncated = "time_max"
    elif is_complete or rules.delay == 0:
        truncated = None
    elif len(rows) == rules.sub_max:
        truncated = "sub_max"
    else:
        truncated = None if rules.literal else "time_max"
    return Answers([row[:-1] if row[-1] in ends else row for row in rows], steps, calls, truncated)


def _is_circle(rows: Sequence[Sequence[int]], has_ended: Sequence[bool]) -> bool:
    """Returns whether two neighbouring rows have ended, and each of them equals a row above it."""
    same = [
        ended and any(has_ended[k] and rows[k][:-1] == row[:-1] for k in range(i))
        for i, (row, ended) in enumerate(zip(rows, has_ended, strict=True))
    ]
    return any(map(all, itertools.pairwise(same)))


def check_accounting(strategy: Strategy, vocabulary: int, *, is_ordered: bool) -> None:
    """Compares rows, `steps`, `calls` and `truncated` with Algorithm 1, or with bounds that hold for every strategy.

    `is_ordered`: whether the tokens of row i are generated at the times start(i), start(i) + 1, ...
    """
    rules = rules_of(strategy)
    for seed, share in enumerate(END_SHARES * 2):
        script = random_script(strategy, seed, share, vocabulary)
        history, decoded, calls = follow_script(strategy, script, vocabulary)
        found = of_example(strategy, decoded)
        if found.calls != calls:
            strategy_checks.refuse(strategy, "calls", found.calls, f"{calls}, the number of calls of `query`")
        if rules is not None:
            _check_algorithm_1(strategy, found, algorithm_1(rules, script))
        else:
            _check_bounds(strategy, history, found, is_endless=share == 0)
            if is_ordered:
                _check_ends(strategy, history, found, script)


def _check_algorithm_1(strategy: Strategy, found: Answers, expected: Answers) -> None:
    """Raises a UserError unless an answer equals the answer of Algorithm 1, except for the name of the limit."""
    empty: list[list[int]] = [[] for _ in found.rows[len(expected.rows) :]]
    for part, here, there in (
        ("tokens", found.rows, expected.rows + empty),
        ("steps", found.steps, expected.steps),
        ("truncated", (found.truncated or "").replace("max_length", "time_max"), expected.truncated or ""),
    ):
        if here != there:
            strategy_checks.refuse(strategy, f"result: {part}", here or None, f"{there or None}, as in Algorithm 1")


def _check_bounds(strategy: Strategy, history: History, found: Answers, *, is_endless: bool) -> None:
    """Raises a UserError unless `steps` is within its bounds, and an answer without end tokens is truncated."""
    least, last = found.calls, max((time for _, time, _ in history.cells), default=0) + 1
    most = max(least, last, strategy.places[1] if found.truncated else 0)
    if not least <= found.steps <= most:
        limit = "of the grid" if found.truncated else "up to the last query"
        expected = f"at least {least}, the number of calls, and at most {most}, the number of time-steps {limit}"
        strategy_checks.refuse(strategy, "result: steps", found.steps, expected)
    if is_endless and found.truncated is None:
        strategy_checks.refuse(strategy, "result: truncated", None, "a limit, since no end token was generated")


def _check_ends(strategy: Strategy, history: History, found: Answers, script: Script) -> None:
    """Raises a UserError unless `truncated` is None exactly if the rows have end tokens."""
    asked, ends = {cell[:2] for cell in history.cells}, ends_of(strategy)
    places = [(row, int(strategy.start(row)) + len(tokens)) for row, tokens in enumerate(found.rows)]
    has_end = [place in asked and script(*place) in ends for place in places]
    was_cut = any(tokens and not ended for tokens, ended in zip(found.rows, has_end, strict=True))
    if was_cut and found.truncated is None:
        strategy_checks.refuse(strategy, "result: truncated", None, "a limit, since a row has no end token")
    if all(has_end) and found.truncated not in (None, "sub_max"):
        strategy_checks.refuse(strategy, "result: truncated", found.truncated, "None, since all rows have ended")


def check_batches(strategy: Strategy, vocabulary: int, stops: Sequence[int] = ()) -> None:
    """Compares examples of one batch with the same examples alone; the entries of queries that are not live differ.

    `stops`: examples that `stop` ends after the first step; these must have no more queries.
    """
    scripts = [random_script(strategy, 20 + i, share, vocabulary) for i, share in enumerate((0.15, 1.0, 0.5, 0.3))]
    alone = [of_example(strategy, follow_script(strategy, script, vocabulary)[1]) for script in scripts]
    rng, batch, asked = np.random.default_rng(0), len(scripts), list[np.ndarray]()

    def answers(query: Query) -> Tree:
        live = np.asarray(query.live)
        asked.append(np.asarray(live.any(axis=1)))
        row, time = (np.broadcast_to(x, live.shape) for x in (query.row, query.time))
        rights = [[scripts[b](int(row[b, s]), int(time[b, s]))] for b, s in np.argwhere(live)]

        def spread(x: Any) -> np.ndarray:
            x = np.asarray(x)
            found = np.array(rng.integers(0, 9, (*live.shape, *x.shape[1:])).astype(x.dtype))
            found[live] = x
            return found

        return jax.tree.map(spread, chosen(strategy, rights, vocabulary))

    *_, (_, _, together, _) = strategy_checks.walk(strategy, answers, batch, stops)
    for example, expected in enumerate(alone):
        if example in stops:
            if any(flags[example] for flags in asked[1:]):
                strategy_checks.refuse(strategy, "stop", "queries of an example that was stopped", "none")
            continue
        found = of_example(strategy, together, example)
        for part, here, there in zip(Answers._fields, found, expected, strict=True):
            if here != there:
                place = f"advance: {part} of example {example} of {batch}"
                strategy_checks.refuse(strategy, place, here, f"{there}, as without the other examples")
