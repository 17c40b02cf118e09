"""Decodes with rules that change logits equal Algorithm 1 in plain Python, for random models."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import decoding
from pipejax.apps.schemas import grammar
from pipejax.decoding import (
    FORBIDDEN,
    Allowed,
    Beam,
    Decoded,
    DecodingOptions,
    Drafts,
    Pipelined,
    Queries,
    Repetition,
    Rule,
    Sequential,
    Sizes,
    SourceIds,
    Strategy,
    core,
    with_drafts,
)
from pipejax.decoding import rules as rules_lib
from pipejax.decoding.drafters import FromModel, FromSource, Jacobi
from pipejax.inference.decoding_options import forced_of
from pipejax.methods import RowPrefixes
from pipejax.system.errors import UserError
from support import oracle
from support.hashed import Hashed, bound_to
from support.plain_repetition import without_repetition

WORDS, BATCH = 8, 3
EOS = 1


def forbid(logits: jax.Array, tokens: jax.Array, counts: jax.Array) -> jax.Array:
    """Forbids the tokens [N, M] that count, bool [N, M], except the end token."""
    number = jnp.arange(logits.shape[1])[:, None]
    found = jnp.zeros(logits.shape, bool).at[tokens, number].max(counts & (tokens != EOS), mode="drop")
    return jnp.where(found, FORBIDDEN, logits)


class Plain:
    """A rule that forbids tokens, in plain Python."""

    def plain(self, example: int, prefix: list[int], above: list[list[int]]) -> set[int]:
        """The forbidden tokens."""
        raise NotImplementedError

    def change(self, logits: np.ndarray, example: int, prefix: list[int], above: list[list[int]]) -> np.ndarray:
        """The logits of a query [V] after the rule."""
        forbidden = self.plain(example, prefix, above) - {EOS}
        return np.asarray([-np.inf if token in forbidden else x for token, x in enumerate(logits)], np.float32)


@flax.struct.dataclass
class Repeats(Repetition):
    """The rule against repetition, which is also in plain Python."""

    def change(self, logits: np.ndarray, example: int, prefix: list[int], above: list[list[int]]) -> np.ndarray:
        settings: dict[str, Any] = {"penalty": float(self.penalty[example]), "ngram": int(self.ngram[example])}
        settings |= {"given": self.given[example].tolist(), "separators": self.separators, "by_row": self.by_row}
        return without_repetition(logits, prefix, above, **settings)


@flax.struct.dataclass
class NoneTwice(Plain, Rule):
    """Forbids the tokens of the row's prefix, in the examples where it is on."""

    on: Any  # bool [B]

    def apply(self, logits: jax.Array, queries: Queries, state: Any) -> jax.Array:
        counts = jnp.arange(queries.prefix.shape[1]) < queries.length[:, None]
        return forbid(logits, queries.prefix, counts & jnp.asarray(self.on)[queries.example][:, None])

    def plain(self, example: int, prefix: list[int], above: list[list[int]]) -> set[int]:
        return {*prefix} if self.on[example] else set()


@flax.struct.dataclass
class NoneOfAbove(Plain, Rule):
    """Forbids the tokens that the rows above have."""

    def apply(self, logits: jax.Array, queries: Queries, state: Any) -> jax.Array:
        counts = jnp.arange(queries.above.shape[2]) < queries.above_length[:, :, None]
        return forbid(logits, *(x.reshape(len(x), -1) for x in (queries.above, counts)))

    def plain(self, example: int, prefix: list[int], above: list[list[int]]) -> set[int]:
        return {token for row in above for token in row}


@flax.struct.dataclass
class Sums(Plain, Rule):
    """Forbids tokens by its state, the sum of the row's tokens, and by a divisor that all examples share."""

    shared: ClassVar[tuple[str, ...]] = ("divisor",)
    first: Any  # i32 [B], the sum over zero tokens
    divisor: Any  # i32 [1]

    def init(self, batch: int, rows: int) -> Any:
        return {"sum": jnp.broadcast_to(jnp.asarray(self.first)[:, None], (batch, rows))}

    def apply(self, logits: jax.Array, queries: Queries, state: Any) -> jax.Array:
        ids = jnp.arange(logits.shape[0])[:, None]
        found = ((ids + queries.pick(state["sum"])) % self.divisor[0] == 0) & (ids != EOS)
        return jnp.where(found, FORBIDDEN, logits)

    def follow(self, state: Any, tokens: jax.Array, queries: Queries) -> Any:
        return {"sum": queries.put(state["sum"], queries.pick(state["sum"]) + tokens)}

    def plain(self, example: int, prefix: list[int], above: list[list[int]]) -> set[int]:
        total = int(self.first[example]) + sum(prefix)
        return {token for token in range(WORDS) if (token + total) % int(self.divisor[0]) == 0}


RULES: dict[str, Callable[[], Any]] = {
    "prefix": lambda: NoneTwice(np.asarray([True, False, True])),
    "above": NoneOfAbove,
    "state": lambda: Sums(np.asarray([0, 1, 5], np.int32), np.asarray([3], np.int32)),
}


def mix(*numbers: Any) -> Any:
    """The hash of `support.hashed.mix`, in NumPy."""
    found: Any = np.uint32(0x9E3779B9)
    with np.errstate(over="ignore"):
        for number in numbers:
            found = (found ^ np.asarray(number).astype(np.uint32)) * np.uint32(0x85EBCA6B)
            found = (found ^ (found >> 13)) * np.uint32(0xC2B2AE35)
            found = found ^ (found >> 16)
    return found


def plain_decode(
    model: int,
    source: int,
    example: int,
    rules: Sequence[Any],
    *,
    prefixes: Sequence[Sequence[int]] = (),
    delay: int,
    time_max: int,
    sub_max: int,
    stop: str,
) -> oracle.GridResult:
    """Algorithm 1 over the model of `Hashed`, with rules in plain Python, which get tokens as lists."""

    def next_token(rows: list[list[int]], row: int) -> int:
        cells = oracle.coordinates(rows, delay)
        tokens = [token for one in rows for token in one]
        time = row * delay + len(rows[row]) - 1
        sees = [k_row <= row and k_time <= time for k_row, k_time in cells]
        back = [row + time - k_row - k_time for k_row, k_time in cells]
        hashes = [int(mix(mix(model, token), far)) for token, far, seen in zip(tokens, back, sees, strict=True) if seen]
        found = mix(model, source, sum(hashes) % 2**32)
        ids = np.arange(WORDS)
        whole = (mix(ids, found) % 4096).astype(np.int64)
        whole[EOS] += int(mix(model, 77) % 5) * 160
        logits = (whole / 512).astype(np.float32)
        contents = [[token for token in one[1:] if token != EOS] for one in rows]
        above = [content[: max(time - j * delay, 0)] for j, content in enumerate(contents[:row])]
        for rule in rules:
            changed = rule.change(logits, example, contents[row], above)
            logits = changed if (changed > -np.inf).any() else logits
        return int(np.argmax(logits))

    return oracle.algorithm1(
        lambda rows: [
            next_token(rows, i) if rows[i][-1] != EOS or len(rows[i]) == 1 else EOS for i in range(len(rows))
        ],
        delay=delay,
        time_max=time_max,
        sub_max=sub_max,
        stop=stop,
        prefixes=prefixes,
    )


def traced(strategy: Strategy, model: Any, source: SourceIds, options: DecodingOptions) -> Decoded:
    hashed = Hashed(model, jnp.asarray(source.ids).sum(axis=1), WORDS)
    bound = bound_to(strategy, hashed, source) if strategy.reads_source else strategy
    sizes = Sizes.fit(strategy, BATCH, query_counts=(4,))
    state = bound.init(BATCH, source if strategy.reads_source else None)
    carry = decoding.begin(bound, hashed, state, sizes, options=options)
    return decoding.decode(bound, hashed, carry, sizes=sizes, slots=sizes.slots[-1], options=options).decoded


decode = jax.jit(traced, static_argnames="strategy")


def sources(seed: int) -> SourceIds:
    rng = np.random.default_rng(seed)
    return SourceIds(rng.integers(2, WORDS, (BATCH, 9)).astype(np.int32), np.full(BATCH, 9, np.int32))


def check(
    strategy: Strategy,
    rules: Sequence[Any],
    seeds: range,
    drafts: Drafts | None = None,
    prefixes: Sequence[Sequence[int]] = (),
) -> list[int]:
    """Compares decodes with `plain_decode`; gives the tokens that rules changed, and the calls that drafts saved."""
    rules, grid, forced = tuple(rules), cast(Any, strategy), None
    if prefixes:
        known = forced_of(RowPrefixes((*prefixes,)), strategy)
        assert known is not None
        forced = np.repeat(known[None], BATCH, axis=0)
    used = with_drafts(grid, drafts) if drafts else strategy
    changed = saved = 0
    for seed in seeds:
        source = sources(seed)
        found = jax.device_get(decode(used, np.int32(seed), source, DecodingOptions(forced=forced, rules=rules)))
        free = jax.device_get(decode(strategy, np.int32(seed), source, DecodingOptions(forced=forced)))
        without = strategy.calls(dataclasses.replace(found, calls=None))
        for b in range(BATCH):
            rows = [row[:n].tolist() for row, n in zip(found.tokens[b], found.lengths[b], strict=True)]
            stop = "literal" if grid.literal else "empty_row"
            sizes = {"delay": grid.delay, "time_max": grid.time_max, "sub_max": grid.sub_max, "stop": stop}
            expected = plain_decode(seed, int(source.ids[b].sum()), b, rules, prefixes=prefixes, **sizes)
            assert [row for row in rows if row] == expected.rows
            assert found.steps[b] == expected.steps
            changed += rows != [row[:n].tolist() for row, n in zip(free.tokens[b], free.lengths[b], strict=True)]
            saved += int(without[b] - found.calls[b]) if drafts else 0
    return [changed, saved]


GRIDS = {
    "delay 1": Pipelined(1, 10, 4),
    "delay 2, literal": Pipelined(2, 12, 5, literal=True),
    "delay 0": Pipelined(0, 7, 3),
    "one row": Sequential(9),
}


ALL = ("state", "prefix", "above")
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "grid, names",
    [
        *(("delay 1", names) for names in (("prefix",), ("above",), ("state",), ALL)),
        ("delay 2, literal", ALL),
        ("delay 0", ("above",)),
        pytest.param("delay 0", ALL, marks=slow),
        ("one row", ("prefix",)),
        pytest.param("one row", ALL, marks=slow),
    ],
)
def test_decode_with_rules_equals_plain_python(grid: str, names: tuple[str, ...]) -> None:
    changed, _ = check(GRIDS[grid], [RULES[name]() for name in names], range(12))
    assert changed > 5


@pytest.mark.parametrize(
    "grid, drafter",
    [
        ("delay 1", FromModel(least=0.0)),
        pytest.param("delay 2, literal", FromModel(least=0.0), marks=slow),
        pytest.param("one row", FromModel(least=0.0), marks=slow),
        pytest.param("delay 0", FromModel(least=0.0), marks=slow),
        *(pytest.param(grid, drafter, marks=slow) for grid in GRIDS for drafter in (Jacobi(), FromSource())),
    ],
)
def test_decode_with_rules_and_drafts_equals_plain_python(grid: str, drafter: Any) -> None:
    """A drafted token belongs to the prefix of the columns after it."""
    changed, saved = check(GRIDS[grid], [RULES["prefix"](), RULES["above"]()], range(12), Drafts(drafter, 3))
    assert changed > 5 and (saved > 5 or not isinstance(drafter, FromModel))


def repetition(grid: str, prefixes: Sequence[Sequence[int]] = (), **more: Any) -> Repeats:
    """Rules with another penalty and another length in each example."""
    strategy = GRIDS[grid]
    given = np.zeros((BATCH, strategy.places[0]), np.int32)
    for row, prefix in enumerate(prefixes):
        given[:, row] = len(prefix)
    return Repeats(np.asarray([1.5, 1.0, 4.0], np.float32), np.asarray([2, 1, 3], np.int32), given, 0, **more)


NAMES = ((2, 3), (2, 4), (5,))  # the rows of GRIDS["delay 0"]


@pytest.mark.parametrize(
    "grid, prefixes, more",
    [
        ("delay 1", (), {}),
        pytest.param("delay 1", NAMES, {}, marks=slow),
        pytest.param("delay 1", (), {"by_row": True}, marks=slow),
        ("delay 0", NAMES, {}),
        pytest.param("one row", (), {"separators": (3,)}, marks=slow),
        ("one row", (), {"separators": (3, 4), "by_row": True}),
        pytest.param("one row", ((2, 3, 4),), {}, marks=slow),
        pytest.param("delay 2, literal", (), {}, marks=slow),
        pytest.param("delay 2, literal", NAMES, {"by_row": True}, marks=slow),
        pytest.param("delay 1", NAMES, {"separators": (6,)}, marks=slow),
    ],
)
def test_decode_without_repetition_equals_plain_python(grid: str, prefixes: Any, more: dict[str, Any]) -> None:
    changed, _ = check(GRIDS[grid], [repetition(grid, prefixes, **more)], range(12), prefixes=prefixes)
    assert changed > 5


@pytest.mark.parametrize(
    "grid, prefixes, more, drafter",
    [
        pytest.param("delay 1", NAMES, {}, FromModel(least=0.0), marks=slow),
        ("one row", (), {"separators": (3,), "by_row": True}, FromModel(least=0.0)),
        *(
            pytest.param(grid, prefixes, {}, drafter, marks=slow)
            for grid, prefixes in (("delay 1", ()), ("delay 0", NAMES), ("delay 2, literal", ()), ("one row", ()))
            for drafter in (FromModel(least=0.0), Jacobi(), FromSource())
        ),
    ],
)
def test_decode_without_repetition_and_with_drafts_equals_plain_python(
    grid: str, prefixes: Any, more: dict[str, Any], drafter: Any
) -> None:
    rule = repetition(grid, prefixes, **more)
    changed, _ = check(GRIDS[grid], [rule], range(12), Drafts(drafter, 3), prefixes=prefixes)
    assert changed > 5


def test_rule_that_would_leave_no_token_does_not_change_the_query() -> None:
    """If two rules forbid complementary tokens, the first is followed."""
    even = np.arange(WORDS) % 2 == 0
    source, strategy = sources(0), Sequential(6)
    alone = decode(strategy, np.int32(0), source, DecodingOptions(rules=(Allowed(np.tile(even, (BATCH, 1))),)))
    rules = tuple(Allowed(np.tile(x, (BATCH, 1))) for x in (even, ~even))
    both = decode(strategy, np.int32(0), source, DecodingOptions(rules=rules))
    np.testing.assert_array_equal(both.tokens, alone.tokens)
    assert (np.asarray(both.tokens)[:, 0] % 2 == 0).all() and (np.asarray(both.lengths) == 6).all()


def test_rows_are_computed_only_for_rules_that_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, found = list[int](), rules_lib.known_rows

    def counted(strategy: Any, state: Any, query: Any) -> rules_lib.KnownRows:
        computed.append(1)
        return found(strategy, state, query)

    monkeypatch.setattr(core, "known_rows", counted)
    for name, reads in (("state", False), ("prefix", True), ("above", True)):
        computed.clear()
        jax.eval_shape(
            lambda options: traced(Pipelined(1, 6, 2), np.int32(0), sources(0), options),
            DecodingOptions(rules=(RULES[name](),)),
        )
        assert bool(computed) == reads, name


def test_rule_takes_examples_of_a_batch() -> None:
    rule = RULES["state"]()
    taken = rule.take(np.asarray([[2, 0], [1, 1]]))
    assert taken.first.tolist() == [[5, 0], [1, 1]] and taken.divisor.tolist() == [[3], [3]]


def test_rule_of_one_example_replaces_one_of_a_batch() -> None:
    rule, one = RULES["state"](), Sums(np.asarray([9], np.int32), np.asarray([7], np.int32))
    assert rule.put(1, one).first.tolist() == [0, 9, 5] and rule.put(1, one).divisor.tolist() == [3]
    assert rule.first.tolist() == [0, 1, 5], "the given rule is not changed"


@flax.struct.dataclass
class Wrong(Rule):
    """A rule that breaks one requirement of rules."""

    how: str = flax.struct.field(pytree_node=False)

    def init(self, batch: int, rows: int) -> Any:
        return jnp.zeros((batch + (self.how == "init"), rows), jnp.int32)

    def apply(self, logits: jax.Array, queries: Queries, state: Any) -> jax.Array:
        return logits.T if self.how == "apply" else logits

    def follow(self, state: Any, tokens: jax.Array, queries: Queries) -> Any:
        return state.astype(jnp.float32) if self.how == "follow" else state


@pytest.mark.parametrize(
    "how, strategy, line",
    [
        ("init", Sequential(5), r"Wrong.init: : found int32\[4, 1\]; expected \[3, 1\] as the first two axes"),
        ("apply", Sequential(5), r"Wrong.apply: found float32\[3, 8\]; expected float32\[8, 3\], the logits"),
        ("follow", Sequential(5), r"Wrong.follow: : found float32\[3, 1\]; expected int32\[3, 1\], as before"),
        ("", with_drafts(Sequential(5), Drafts(FromSource())), "Wrong.init: found a state, and several queries"),
        ("", Beam(5, 2), "Beam.places: found no rows; expected a grid of rows, as Wrong changes logits"),
    ],
    ids=["init", "apply", "follow", "drafts", "beam"],
)
def test_unsupported_rule_is_refused(how: str, strategy: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        decode(strategy, np.int32(0), sources(0), DecodingOptions(rules=(Wrong(how),)))


@pytest.mark.parametrize("name", ["Grammar", "Table"])
def test_former_names_of_the_grammar_give_the_present_classes_with_a_warning(name: str) -> None:
    line = f"pipejax.decoding.{name} is now pipejax.apps.schemas.grammar.{name}"
    with pytest.warns(DeprecationWarning, match=line):
        assert getattr(decoding, name) is getattr(grammar, name)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = getattr(decoding, "Nothing")  # noqa: B009
