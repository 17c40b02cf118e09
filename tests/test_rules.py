"""Rules that change logits: decodes with rules equal Algorithm 1 in plain Python, over a random model."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import decoding
from pipejax.apps.schemas import grammar
from pipejax.decoding import (
    FORBIDDEN,
    Beam,
    Decoded,
    DecodingOptions,
    Drafts,
    Pipelined,
    Queries,
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
from pipejax.system.errors import UserError
from support import oracle
from support.hashed import Hashed

WORDS, BATCH = 8, 3
EOS = 1


def forbid(logits: jax.Array, tokens: jax.Array, counts: jax.Array) -> jax.Array:
    """Forbids the tokens [N, M] that count, bool [N, M], except the end token."""
    number = jnp.arange(logits.shape[1])[:, None]
    found = jnp.zeros(logits.shape, bool).at[tokens, number].max(counts & (tokens != EOS), mode="drop")
    return jnp.where(found, FORBIDDEN, logits)


@flax.struct.dataclass
class NoneTwice(Rule):
    """Forbids the tokens of the row's prefix, in the examples where it is on."""

    on: Any  # bool [B]

    def apply(self, logits: jax.Array, queries: Queries, state: Any) -> jax.Array:
        counts = jnp.arange(queries.prefix.shape[1]) < queries.length[:, None]
        return forbid(logits, queries.prefix, counts & jnp.asarray(self.on)[queries.example][:, None])

    def plain(self, example: int, prefix: list[int], above: list[list[int]]) -> set[int]:
        return {*prefix} if self.on[example] else set()


@flax.struct.dataclass
class NoneOfAbove(Rule):
    """Forbids the tokens that the rows above have."""

    def apply(self, logits: jax.Array, queries: Queries, state: Any) -> jax.Array:
        counts = jnp.arange(queries.above.shape[2]) < queries.above_length[:, :, None]
        return forbid(logits, *(x.reshape(len(x), -1) for x in (queries.above, counts)))

    def plain(self, example: int, prefix: list[int], above: list[list[int]]) -> set[int]:
        return {token for row in above for token in row}


@flax.struct.dataclass
class Sums(Rule):
    """Forbids tokens by the sum of the row's tokens, which is its state, and by a divisor that all examples share."""

    shared: ClassVar[tuple[str, ...]] = ("divisor",)
    first: Any  # i32 [B], the sum of no tokens
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
    """As `support.hashed.mix`, in NumPy."""
    found: Any = np.uint32(0x9E3779B9)
    with np.errstate(over="ignore"):
        for number in numbers:
            found = (found ^ np.asarray(number).astype(np.uint32)) * np.uint32(0x85EBCA6B)
            found = (found ^ (found >> 13)) * np.uint32(0xC2B2AE35)
            found = found ^ (found >> 16)
    return found


def plain_decode(
    model: int, source: int, example: int, rules: Sequence[Any], *, delay: int, time_max: int, sub_max: int, stop: str
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
        logits = (mix(ids, found) % 4096).astype(np.int64)
        logits[EOS] += int(mix(model, 77) % 5) * 160
        contents = [[token for token in one[1:] if token != EOS] for one in rows]
        above = [content[: max(time - j * delay, 0)] for j, content in enumerate(contents[:row])]
        forbidden = set().union(*(rule.plain(example, contents[row], above) for rule in rules)) - {EOS}
        return max((id for id in range(WORDS) if id not in forbidden), key=lambda id: (logits[id], -id))

    return oracle.algorithm1(
        lambda rows: [
            next_token(rows, i) if rows[i][-1] != EOS or len(rows[i]) == 1 else EOS for i in range(len(rows))
        ],
        delay=delay,
        time_max=time_max,
        sub_max=sub_max,
        stop=stop,
    )


def traced(strategy: Strategy, model: Any, source: SourceIds, options: DecodingOptions) -> Decoded:
    hashed = Hashed(model, jnp.asarray(source.ids).sum(axis=1), WORDS)
    bound = strategy.bind_draft_model(hashed, BATCH) if strategy.needs_draft_model else strategy
    sizes = Sizes.fit(strategy, BATCH, queries=(4,))
    state = bound.init(BATCH, source if strategy.reads_source else None)
    carry = decoding.begin(bound, hashed, state, sizes, options=options)
    return decoding.decode(bound, hashed, carry, sizes=sizes, slots=sizes.slots[-1], options=options).decoded


decode = jax.jit(traced, static_argnames="strategy")


def sources(seed: int) -> SourceIds:
    rng = np.random.default_rng(seed)
    return SourceIds(rng.integers(2, WORDS, (BATCH, 9)).astype(np.int32), np.full(BATCH, 9, np.int32))


def check(strategy: Strategy, names: Sequence[str], seeds: range, drafts: Drafts | None = None) -> list[int]:
    """Compares decodes with `plain_decode`; gives the tokens that rules changed, and the calls that drafts saved."""
    rules = tuple(RULES[name]() for name in names)
    grid: Any = strategy
    used = with_drafts(grid, drafts) if drafts else strategy
    changed = saved = 0
    for seed in seeds:
        source = sources(seed)
        found = jax.device_get(decode(used, np.int32(seed), source, DecodingOptions(rules=rules)))
        free = jax.device_get(decode(strategy, np.int32(seed), source, DecodingOptions()))
        without = strategy.calls(dataclasses.replace(found, calls=None))
        for b in range(BATCH):
            rows = [row[:n].tolist() for row, n in zip(found.tokens[b], found.lengths[b], strict=True)]
            stop = "literal" if grid.literal else "empty_row"
            sizes = {"delay": grid.delay, "time_max": grid.time_max, "sub_max": grid.sub_max, "stop": stop}
            expected = plain_decode(seed, int(source.ids[b].sum()), b, rules, **sizes)
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
    changed, _ = check(GRIDS[grid], names, range(12))
    assert changed > 5


@pytest.mark.parametrize(
    "grid, drafter",
    [
        ("delay 1", FromModel(least=0.0)),
        ("delay 2, literal", FromModel(least=0.0)),
        ("one row", FromModel(least=0.0)),
        pytest.param("delay 0", FromModel(least=0.0), marks=slow),
        *(pytest.param(grid, drafter, marks=slow) for grid in GRIDS for drafter in (Jacobi(), FromSource())),
    ],
)
def test_decode_with_rules_and_drafts_equals_plain_python(grid: str, drafter: Any) -> None:
    """A drafted token belongs to the prefix of the columns after it."""
    changed, saved = check(GRIDS[grid], ("prefix", "above"), range(12), Drafts(drafter, 3))
    assert changed > 5 and (saved > 5 or not isinstance(drafter, FromModel))


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
    """Breaks one rule of rules."""

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
