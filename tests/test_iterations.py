"""Several steps in one iteration of a loop give the answers, steps, pauses and states of one step in an iteration."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import decoding
from pipejax.apps.schemas.grammar import Grammar, Table
from pipejax.config import Config, DecodeConfig, GridConfig, TrainConfig
from pipejax.decoding import (
    Allowed,
    Beam,
    Carry,
    DecodingOptions,
    Drafts,
    Pipelined,
    Sampling,
    Segment,
    Sequential,
    Sizes,
    SourceIds,
    Strategy,
    with_drafts,
)
from pipejax.decoding.drafters import FromModel, FromSource, Jacobi
from pipejax.decoding.gathering import NOWHERE
from pipejax.inference import programs
from pipejax.inference.generator import Generator
from pipejax.methods import Ids
from support import oracle
from support.foreign import Pairs
from support.hashed import Hashed, bound_to
from support.schemas import generator as with_schemas
from support.schemas import schema
from support.tiny import MORE_WORDS

WORDS = 12  # of the vocabulary
NO_END = 1 << 20  # steps


@dataclasses.dataclass(frozen=True)
class Setting:
    """The settings of a compiled decode."""

    strategy: Strategy
    batch: int = 3
    queries: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    wished: tuple[str, ...] = ()
    steps: int = 3

    def sizes(self, steps: int) -> Sizes:
        return Sizes.fit(self.strategy, self.batch, query_counts=self.queries, slots=self.slots, steps=steps)


def wishes_of(setting: Setting, rng: np.random.Generator) -> DecodingOptions:
    """Random options of the requested kinds."""
    (rows, width), batch, wished = setting.strategy.places, setting.batch, setting.wished
    found = DecodingOptions(scores="scores" in wished)
    if "sampling" in wished:
        values: dict[str, list[Any]] = {
            "temperature": [0.0, 0.7, 1.5],
            "top_k": [0, 3],
            "top_p": [1.0, 0.8],
            "min_p": [0.0, 0.3],
            "seed": [1, 2, 3],
        }
        each = [Sampling(**{name: rng.choice(x) for name, x in values.items()}) for _ in range(batch)]
        found = dataclasses.replace(found, sampling=Sampling.together(each))
    if "forced" in wished:
        forced = np.where(rng.random((batch, rows, width)) < 0.1, rng.integers(1, WORDS, (batch, rows, width)), -1)
        found = dataclasses.replace(found, forced=forced.astype(np.int32))
    if "allowed" in wished:
        allowed = Allowed((rng.random((batch, WORDS)) < 0.8) | (np.arange(WORDS) == 1))
        found = dataclasses.replace(found, rules=(*found.rules, allowed))
    if "grammar" in wished:
        # Letters change the state; state 0 is dead, and a row may end in states 2 and 3.
        moves = np.asarray([[0, 2, 3, 1], [0, 3, 1, 2], [0, 0, 2, 0]], np.int32)
        automaton = np.arange(256, dtype=np.int32) % 3, moves, np.asarray([False, False, True, True])
        table = Table.lift(automaton, [b"", b"", *(bytes([i, i // 2]) for i in range(WORDS - 2))], most=10_000)
        ones, first = np.ones((batch, rows), np.int32), setting.strategy.start(np.arange(rows))
        last = np.full((batch, rows), width - 1, np.int32)
        grammar = Grammar(table, ones, np.broadcast_to(np.asarray(first, np.int32), ones.shape), last)
        found = dataclasses.replace(found, rules=(grammar, *found.rules))
    return found


@dataclasses.dataclass(frozen=True)
class Given:
    """The random model and sources of a decode."""

    model: Any
    source: Any
    options: DecodingOptions

    @classmethod
    def draw(cls, setting: Setting, seed: int) -> "Given":
        rng = np.random.default_rng([seed, setting.batch])
        ids = rng.integers(2, WORDS, (setting.batch, 14)).astype(np.int32)
        length = rng.integers(1, 15, setting.batch).astype(np.int32)
        return cls(np.int32(rng.integers(1 << 20)), SourceIds(ids, length), wishes_of(setting, rng))


jax.tree_util.register_dataclass(Given, ["model", "source", "options"], [])


def lent(setting: Setting, given: Given) -> tuple[Any, Hashed]:
    """The strategy and the model for its batch; a small model that drafts is often correct."""
    numbers = jnp.asarray(given.source.ids).sum(axis=1)
    model, strategy = Hashed(given.model, numbers, WORDS), setting.strategy
    return (bound_to(strategy, model, given.source) if strategy.reads_source else strategy), model


@partial(jax.jit, static_argnames=("setting", "steps", "slots"))
def stretch(setting: Setting, steps: int, slots: int, given: Given, carry: Carry | None) -> Segment:
    (strategy, model), sizes, options = lent(setting, given), setting.sizes(steps), given.options
    if carry is None:
        state = strategy.init(setting.batch, given.source if strategy.reads_source else None)
        carry = decoding.begin(strategy, model, state, sizes, options=options)
    return decoding.decode(strategy, model, carry, sizes=sizes, slots=slots, options=options)


@partial(jax.jit, static_argnames=("setting", "steps", "slots"))
def go_on(
    setting: Setting,
    steps: int,
    slots: int,
    given: Given,
    carry: Carry | None,
    begins: Any,
    ends: Any,
    *pause: Any,
) -> tuple[Segment, Any]:
    """Continues like a running batch; `pause`: the steps before a pause, by remaining tokens and watched examples."""
    (strategy, model), sizes, options = lent(setting, given), setting.sizes(steps), given.options
    if carry is None:
        state = strategy.stop(strategy.init(setting.batch), jnp.ones(setting.batch, bool))
        carry = decoding.begin(strategy, model, state, sizes, options=options, apart=True)
    carry = decoding.grow(model, carry, slots)
    carry = decoding.refill(strategy, carry, begins=begins, ends=ends, sizes=sizes, options=options)
    most, hears, watched = pause
    found = decoding.decode(
        strategy,
        model,
        carry,
        sizes=sizes,
        slots=slots,
        options=options,
        pause_after=most,
        listen=lambda count: jnp.where(count == hears, -count, count),
        watched=watched,
    )
    return found, strategy.done(found.carry.state)


def equal(found: Any, expected: Any) -> None:
    """Asserts equal whole numbers; other numbers may differ in the last digits."""
    if np.issubdtype(np.asarray(expected).dtype, np.floating):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(found, expected)


def same(found: Segment, expected: Segment) -> None:
    """Asserts equal carries, except in free slots: rows, steps, calls, scores, traces, states, queries and slots."""
    here, there = (jax.device_get((x.over, x.decoded)) for x in (found, expected))
    jax.tree.map(equal, here, there)
    carries = [jax.device_get(x.carry) for x in (found, expected)]
    held = [np.argwhere(x.filled.row < NOWHERE) for x in carries]
    np.testing.assert_array_equal(held[0], held[1])
    at = tuple(held[0].T)
    for name in ("row", "time"):
        np.testing.assert_array_equal(*(getattr(x.filled, name)[at] for x in carries))
    np.testing.assert_array_equal(*(x.cache[at] for x in carries))
    rest = [dataclasses.replace(x, filled=None, cache=None) for x in carries]
    if getattr(rest[0].state, "drafts", None) is not None:  # a drafter's memory has free slots as well
        drafts = [dataclasses.replace(x.state.drafts, drafter=None) for x in rest]
        rest = [
            dataclasses.replace(x, state=dataclasses.replace(x.state, drafts=own))
            for x, own in zip(rest, drafts, strict=True)
        ]
    jax.tree.map(equal, *rest)


def whole(setting: Setting, steps: int, given: Given) -> tuple[Segment, int]:
    """The end of a decode, and the number of times that its cache grew."""
    sizes, stretches = setting.sizes(steps), 0

    def one(slots: int, carry: Carry | None) -> Segment:
        nonlocal stretches
        stretches += 1
        return stretch(setting, steps, slots, given, carry)

    return decoding.run(one, sizes), stretches - 1


def check(setting: Setting, seeds: range) -> dict[str, int]:
    """Compares decodes of random models with one step and with several steps in an iteration; counts the cases."""
    seen = {"grown": 0, "apart": 0, "cut": 0}
    for seed in seeds:
        given = Given.draw(setting, seed)
        (expected, _), (found, grown) = (whole(setting, steps, given) for steps in (1, setting.steps))
        same(found, expected)
        taken = np.asarray(expected.decoded.steps)
        seen["grown"] += grown > 0
        seen["apart"] += len({*taken.tolist()}) > 1
        seen["cut"] += bool((taken % setting.steps).any())
    return seen


def check_stream(setting: Setting, seeds: range) -> int:
    """Returns the number of answers of running batches with pauses, with one step and several in an iteration."""
    answers = 0
    for seed in seeds:
        given, runs = Given.draw(setting, seed), list[list[Any]]()
        for steps in (1, setting.steps):
            rng, carry, events, slots = np.random.default_rng([seed, 3]), None, list[Any](), setting.sizes(steps).slots
            size, in_use = 0, np.zeros(setting.batch, bool)
            for _ in range(14):
                begins = ~in_use & (rng.random(setting.batch) < 0.7)
                begins[np.argmin(in_use)] |= not in_use.any()
                ends = in_use & (rng.random(setting.batch) < 0.1)
                in_use = (in_use | begins) & ~ends
                left, hears = int(rng.choice([1, 2, 5, NO_END])), int(rng.integers(0, 5))
                answers += int(begins.sum())
                while True:
                    pause = np.int32(left), np.int32(hears), in_use
                    found, done = go_on(setting, steps, slots[size], given, carry, begins, ends, *pause)
                    carry, begins, ends = found.carry, 0 * begins > 0, 0 * ends > 0
                    told, done = int(found.steps_left), np.asarray(done)
                    left = abs(told)
                    if told <= 0 or done[in_use].any() or done.all():
                        break
                    size += 1
                events.append((found, left, done.tolist()))
                in_use = in_use & ~done
            runs.append(events)
        for (expected, left, done), (found, left_here, done_here) in zip(*runs, strict=True):
            assert (left_here, done_here) == (left, done)
            same(found, expected)
    return answers // 2


GRID = Pipelined(delay=1, time_max=10, sub_max=4)


def test_grid_with_a_growing_cache() -> None:
    """A step that does not fit must not write, since a larger cache needs the slots."""
    seen = check(Setting(GRID, slots=(9,), steps=4), range(12))
    assert min(seen.values()) > 3, seen


def test_drafts_that_are_scored() -> None:
    drafted = with_drafts(Pipelined(delay=1, time_max=9, sub_max=3), Drafts(FromSource(), tokens=2, trace=True))
    seen = check(Setting(drafted, 2, wished=("scores",), steps=3), range(8))
    assert seen["apart"] > 1 and seen["cut"] > 1, seen


def test_rows_by_a_grammar_token_by_token() -> None:
    seen = check(Setting(Sequential(9), slots=(4,), wished=("grammar", "scores", "forced"), steps=2), range(8))
    assert min(seen.values()) > 0, seen


def test_a_longer_iteration_leaves_room_for_one_step_more() -> None:
    """With one step in an iteration, a cache is filled to its end."""
    setting = Setting(Sequential(9), 1, slots=(4,), steps=2)
    for steps, used in ((1, 4), (2, 3)):
        firsts = [stretch(setting, steps, 4, Given.draw(setting, seed), None) for seed in range(4)]
        assert {int(x.carry.used[0]) for x in firsts if not x.over} == {used}


def test_beam_search_gives_equal_answers_with_several_steps_in_an_iteration() -> None:
    """The first step has one query for each example, and later steps have more: they have another loop."""
    seen = check(Setting(Beam(7, 3), 2, (4,), steps=7), range(6))
    assert seen["apart"] > 1 and seen["cut"] > 1, seen


@pytest.mark.slow
def test_running_batches_have_equal_answers() -> None:
    assert check_stream(Setting(GRID, 2, slots=(14,), steps=3), range(5)) > 25


def setting_of(number: int) -> tuple[Setting, bool]:
    """A random setting, and whether its answers join and leave a batch."""
    rng = np.random.default_rng([number, 8])

    def pick(*of: Any) -> Any:
        return of[rng.integers(len(of))]

    delay, time_max, sub_max = pick(0, 1, 1, 2, 3), int(rng.integers(4, 12)), int(rng.integers(1, 6))
    grid = Pipelined(delay, time_max, sub_max, pick(False, False, True), unique=pick(False, True))
    inner = pick(grid, grid, Sequential(int(rng.integers(3, 13))))
    kind, most = pick("plain", "plain", "drafts", "drafts", "beam", "own", "stream", "stream"), int(rng.integers(1, 5))
    strategy: Any = inner
    if kind == "drafts":
        drafter = pick(FromSource(), Jacobi(), FromModel(least=0.0))
        strategy = with_drafts(inner, Drafts(drafter, most, query_counts=pick((), (5,)), trace=pick(False, True)))
    elif kind == "beam":
        strategy = Beam(int(rng.integers(2, 9)), int(rng.integers(2, 5)), pick(1.0, 0.5))
    elif kind == "own" or (kind == "stream" and pick(False, False, True)):
        strategy = Pairs().strategy(Ids(0, 1))
    wished = [x for x in ("sampling", "scores", "forced", "allowed", "grammar") if rng.random() < 0.3]
    batch, widest = int(rng.integers(1, 5)), strategy.most_queries
    slots = sorted({widest + int(x) for x in rng.integers(0, 25, rng.integers(0, 3))})
    queries = sorted({int(x) for x in rng.integers(1, 12, rng.integers(0, 2))})
    wished = [] if kind == "beam" else wished
    if strategy.most_queries > strategy.places[0]:  # a rule with a state needs one query of each row
        wished = [x for x in wished if x != "grammar"]
    return Setting(strategy, batch, (*queries,), (*slots,), (*wished,), pick(2, 3, 4, 7)), kind == "stream"


def test_each_device_has_its_number_of_steps_in_an_iteration() -> None:
    def steps_of(strategy: Strategy) -> list[int]:
        return [programs.schedule(strategy, 1, platform).steps for platform in ("", "cpu", "tpu", "gpu", "cuda")]

    assert steps_of(GRID) == steps_of(with_drafts(GRID, Drafts(FromSource()))) == [1, 1, 1, 4, 4]
    assert steps_of(with_drafts(GRID, Drafts(FromModel()))) == [1] * 5


@pytest.mark.parametrize("steps", [1, 5])
def test_an_iteration_is_a_loop_of_known_length_that_chooses_no_cache(steps: int) -> None:
    """One step is traced in each loop; only the outer loops have a condition."""
    setting = Setting(GRID, queries=(5,))
    given, slots = Given.draw(setting, 0), setting.sizes(steps).slots[-1]
    traced = stretch.trace(setting, steps, slots, given, None)
    text = traced.lower().as_text()
    assert re.findall(r"\blength=(\d+)", str(traced.jaxpr)) == [str(steps)] * 2 * (steps > 1)
    assert text.count("stablehlo.while") == 3 + 2 * (steps > 1)
    cache = f"tensor<{setting.batch}x{slots}xui32>"
    assert cache in text
    assert not [line for line in text.splitlines() if "select" in line and line.rstrip().endswith(cache)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "schema"])
def test_a_t5_decodes_and_streams_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records with log-probabilities, and events of a stream, are equal in caches that grow."""
    monkeypatch.setattr(programs, "SLOTS", (16, 4000))
    monkeypatch.setattr(programs, "QUERY_COUNTS", ())
    texts, runs = [[3, 5, 7, 4, 1], [9, 8, 1], [2, 3, 4, 5, 6, 7, 8, 9, 1]], list[list[Any]]()
    for steps in (1, 3):
        monkeypatch.setitem(programs.ITERATION_STEPS, "cpu", steps)
        if kind == "schema":
            made = with_schemas(decode={"scores": True}, time_max=16)
            runs.append(made.decode(texts, schema=schema("whole", "colour", "yes"), batch_size=2))
            continue
        grid, decode = GridConfig(delay=1, time_max=10, sub_max=4), DecodeConfig(scores=True, temperature=0.8, seed=5)
        config = Config(model=MORE_WORDS, grid=grid, train=TrainConfig(method="pipelined"), decode=decode)
        made = Generator(config, oracle.random_params(MORE_WORDS, np.random.default_rng(4)), None)
        runs.append([*made.decode(texts, batch_size=2), *(x for text in texts[1:] for x in made.stream_rows(text))])
    (here, there), (tree, expected) = zip(*map(jax.tree.flatten, runs), strict=True)
    assert tree == expected and len(here) > 30
    for x, y in zip(here, there, strict=True):
        assert x == (pytest.approx(y, abs=1e-4) if isinstance(y, float) else y)


@pytest.mark.long
@pytest.mark.parametrize("number", range(50))
def test_five_hundred_random_decodes(number: int) -> None:
    setting, is_stream = setting_of(number)
    if is_stream:
        assert check_stream(setting, range(10)) > 40
    else:
        check(setting, range(10))
