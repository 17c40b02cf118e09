"""Forced tokens, such as names of rows, are fed in one call; answers do not change, and calls follow the wavefront."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.decoding import (
    TRUNCATIONS,
    Allowed,
    Beam,
    DecodingOptions,
    Drafts,
    Pipelined,
    Sequential,
    columns_for,
    list_calls,
    with_drafts,
    with_forced,
)
from support import oracle, scripted, wavefront
from support.batches import rows_of
from support.drafter_table import GUESSED, Table

pytestmark = pytest.mark.usefixtures("compiled_once")

EOS = 1


def drawn_answers(rng: np.random.Generator, *, count: int, rows: int) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Rows of answers, and the prefixes of some of the first rows."""
    found = []
    for _ in range(count):
        answer = [rng.integers(2, 9, rng.integers(1, 9)).tolist() for _ in range(rng.integers(1, rows + 1))]
        named = answer[: rng.integers(0, len(answer) + 1)]
        found.append((answer, [row[: rng.integers(0, len(row) + 1)] for row in named]))
    return found


def forced_table(strategy: Any, prefixes: list[list[int]]) -> np.ndarray:
    """i32 [1, R, W]; the table is written by hand, not by `forced_of`."""
    table = np.full((1, *strategy.places), -1, np.int32)
    for row, prefix in enumerate(prefixes[: strategy.places[0]]):
        for j, token in enumerate(prefix):
            if strategy.delay * row + j < strategy.time_max:
                table[0, row, strategy.delay * row + j] = token
    return table


@pytest.mark.parametrize("drafts", [False, True], ids=["forced tokens", "and drafts"])
@pytest.mark.parametrize(
    "delay, time_max, sub_max, literal",
    [
        (0, 12, 5, False),
        (1, 15, 6, False),
        (2, 15, 5, True),
        pytest.param(1, 9, 3, True, marks=pytest.mark.slow),
        pytest.param(3, 20, 5, False, marks=pytest.mark.slow),
        pytest.param(2, 7, 4, False, marks=pytest.mark.slow),
    ],
)
def test_calls_equal_the_wavefront(delay: int, time_max: int, sub_max: int, literal: bool, drafts: bool) -> None:
    """The model is perfect; with drafts, guesses follow the forced tokens, and some of them are wrong."""
    rng = np.random.default_rng([delay, time_max, sub_max, drafts])
    inner = Pipelined(delay=delay, time_max=time_max, sub_max=sub_max, literal=literal)
    most = 4
    drafted = with_drafts(inner, Drafts(Table(), most)) if drafts else inner
    strategy: Any = with_forced(drafted, most)
    saved = 0
    for answer, prefixes in drawn_answers(rng, count=48, rows=sub_max):
        table = [[*row, EOS, *[3] * GUESSED][:GUESSED] for row in [*answer, *[[]] * sub_max][:sub_max]]
        table = [[token if rng.random() > 0.3 else 9 for token in row] for row in table]

        def guess(i: int, length: int, prefixes: Any = prefixes, table: Any = table) -> list[int]:
            own = prefixes[i] if i < len(prefixes) else []
            known = [*own, *(table[i][len(own) :] if drafts else [])]
            return known[length : length + most]

        source = [token for row in table for token in row]
        forced = forced_table(strategy, prefixes)
        found: Any = scripted.decode(strategy, [source], [answer], width=10, forced=forced)
        expected = oracle.algorithm1(
            oracle.scripted_next_tokens(answer),
            delay=delay,
            time_max=time_max,
            sub_max=sub_max,
            stop="literal" if literal else "empty_row",
        )
        written = [row[1 : -1 if row[-1] == EOS else None] for row in expected.all_rows]
        assert [row for row in rows_of(found, 0) if row] == [row for row in written if row]
        assert found.steps[0] == expected.steps
        assert TRUNCATIONS[found.truncated[0]] == expected.truncated
        rule: Any = {"delay": delay, "time_max": time_max, "literal": literal}
        calls = wavefront.trace(expected.all_rows, guess, sub_max=sub_max, **rule)
        assert found.calls[0] == len(calls)
        saved += expected.calls - len(calls)
    assert saved > 24


def test_names_of_rows_that_start_together_cost_one_call() -> None:
    """By hand: three names of 2, 3 and 2 tokens, and values of 1 token each with an end token.

    The first call feeds bos and the names, as far as the first row reaches; it generates the value of row 0, the last
    token of the name of row 1, and the value of row 2.
    """
    answer = [[2, 3, 4], [5, 6, 7, 8], [2, 2, 3]]
    strategy: Any = with_forced(Pipelined(delay=0, time_max=9, sub_max=3), 4)
    forced = forced_table(strategy, [[2, 3], [5, 6, 7], [2, 2]])
    found: Any = scripted.decode(strategy, [[0]], [answer], width=10, forced=forced)
    assert rows_of(found, 0) == answer
    assert (found.steps[0], found.calls[0]) == (5, 3)


def test_a_call_feeds_only_what_it_can_accept() -> None:
    """By hand: six rows with names of 3 tokens and 2 more correct guesses, of which a call feeds 4 for each row.

    The first call feeds row 0 up to time 4. So it can accept one token less for each row below, and row 5 cannot begin.
    """
    answer = [[2 + i] * 7 for i in range(6)]
    drafts = Drafts(Table(), 2, trace=True)
    strategy: Any = with_forced(with_drafts(Pipelined(delay=1, time_max=20, sub_max=6), drafts), 4)
    source = [token for row in answer for token in [*row, EOS, *[3] * GUESSED][:GUESSED]]
    forced = forced_table(strategy, [row[:3] for row in answer])
    found: Any = scripted.decode(strategy, [source], [answer], width=10, forced=forced)
    assert rows_of(found, 0) == answer
    first = list_calls(found.trace, 0, 1)[0]
    assert [(one.row, len(one.drafted), one.accepted) for one in first] == [(i, 4 - i, 4 - i) for i in range(5)]


def test_only_supporting_strategies_feed_forced_tokens_in_one_call() -> None:
    """Other strategies, and strategies without forced tokens, are not changed."""
    forced = np.full((1, 3, 9), -1, np.int32)
    grid = Pipelined(delay=1, time_max=9, sub_max=3)
    assert columns_for(DecodingOptions(forced=forced), grid, "cpu") == 0
    forced[0, 2, 2:5] = 7, 8, EOS  # an end token ends the row
    assert columns_for(DecodingOptions(forced=forced), grid, "cpu") == 2
    forced[0, 1, 1:4] = 7
    assert columns_for(DecodingOptions(forced=forced), grid, "cpu") == 4
    assert columns_for(DecodingOptions(), grid, "cpu") == 0
    many = np.repeat(forced, 18, axis=0)
    assert columns_for(DecodingOptions(forced=many[:17]), grid, "gpu") == 4  # 17 x 3 x 5 columns
    assert columns_for(DecodingOptions(forced=many), grid, "gpu") == 0
    stateless, keeps = Allowed(np.ones((1, 9), bool)), Counting()
    assert columns_for(DecodingOptions(forced=forced, rules=(stateless,)), grid, "cpu") == 4
    assert columns_for(DecodingOptions(forced=forced, rules=(stateless, keeps)), grid, "cpu") == 0
    assert with_forced(grid, 0) is grid
    assert with_forced(Beam(9, 2), 4) == Beam(9, 2)
    assert with_forced(OwnSteps(delay=1, time_max=9, sub_max=3), 4) == OwnSteps(delay=1, time_max=9, sub_max=3)
    assert with_forced(Sequential(9), 4).drafts.forced == 4  # type: ignore[attr-defined]


class Counting(Allowed):
    """A rule with a state."""

    def __init__(self) -> None:
        super().__init__(np.ones((1, 9), bool))

    def init(self, batch: int, rows: int) -> Any:
        return jnp.zeros((batch, rows), jnp.int32)


class OwnSteps(Pipelined):
    """A strategy whose steps do not support drafts."""

    def done(self, state: Any) -> Any:
        return state.done
