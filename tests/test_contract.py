"""Custom methods and backbones: a violated rule is one line, and classes that follow all rules decode."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipejax
from pipejax import decoding, grid, methods, testing
from pipejax.apps import demo
from pipejax.config import Config, DecodeConfig, GridConfig, T5Config
from pipejax.data.encoding import encode_example
from pipejax.data.examples import Example
from pipejax.decoding import Decoded, Pipelined, Sizes
from pipejax.inference.generator import Generator
from pipejax.methods import Ids, Target
from pipejax.model import t5
from pipejax.system.errors import UserError
from support import oracle
from support.foreign import BLANK, Backwards, Lines, Pairs, Uneven
from support.scripted import NoModel
from support.staggered import Staggered
from support.tiny import FEW_WORDS, MODEL, RUN

IDS = Ids(0, 1)


def broken(base: type[Uneven] = Uneven, method: dict[str, Any] | None = None, **steps: Any) -> Any:
    """A method with other parts, and a strategy with other parts."""
    own = type("Steps", (Lines,), steps)
    return type("Broken", (base,), {"name": "broken", "steps": own, **(method or {})})()


@contextlib.contextmanager
def refused(line: str) -> Iterator[None]:
    """A context that must be refused by one line with a given beginning. Notes of JAX on exceptions are ignored."""
    with pytest.raises(UserError) as caught:
        yield
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value), str(caught.value)


# Strategies.


@flax.struct.dataclass
class Shared:
    """A state with a scalar that all examples share."""

    inner: Any
    clock: jax.Array


def at_times(times: int) -> Any:
    return property(lambda self: (len(self.starts), times))


def turned(self: Lines, state: Any) -> Decoded:
    """The tokens of each row in reverse order."""
    found = Lines.result(self, state)
    last, column = found.lengths[:, :, None] - 1, jnp.arange(self.width)
    place = jnp.where(column <= last, last - column, 0)
    return dataclasses.replace(found, tokens=jnp.take_along_axis(found.tokens, place, axis=2))


def settling(self: Lines, state: Any) -> Decoded:
    """The tokens of each row in reverse order until the answer is complete."""
    found = Lines.result(self, state)
    is_done = Lines.done(self, state)[:, None, None]
    return dataclasses.replace(found, tokens=jnp.where(is_done, found.tokens, turned(self, state).tokens))


def turned_once_ended(self: Lines, state: Any) -> Decoded:
    """The tokens of each ended row in reverse order."""
    found = Lines.result(self, state)
    tokens = jnp.where(state.ended[:, :, None], turned(self, state).tokens, found.tokens)
    return dataclasses.replace(found, tokens=tokens)


def endless(self: Lines, state: Any, answers: Any) -> Any:
    """Each row continues up to its width."""
    return dataclasses.replace(Lines.advance(self, state, answers), ended=state.ended)


def shifted(self: Lines, state: Any) -> Decoded:
    """Rows without their first token."""
    found = Lines.result(self, state)
    tokens = jnp.roll(found.tokens, -1, axis=2)
    return dataclasses.replace(found, tokens=tokens, lengths=jnp.maximum(found.lengths - 1, 0))


def first_two(self: Lines, state: Any) -> Decoded:
    """The first two rows only."""
    found: Decoded = jax.tree.map(lambda x: x[:, :2] if x.ndim > 1 else x, Lines.result(self, state))
    return found


def with_result(**arrays: Any) -> Any:
    def result(self: Lines, state: Any) -> Decoded:
        return dataclasses.replace(Lines.result(self, state), **{k: f(state) for k, f in arrays.items()})

    return result


def with_query(**arrays: Any) -> Any:
    def query(self: Lines, state: Any) -> Any:
        state, found = Lines.query(self, state)
        return state, dataclasses.replace(found, **{k: f(getattr(found, k)) for k, f in arrays.items()})

    return query


def forgets(self: Lines, state: Any, answers: Any) -> Any:
    """The count of a state becomes a floating-point number."""
    found = Lines.advance(self, state, answers)
    return dataclasses.replace(found, count=found.count.astype(jnp.float32))


ROWS_ALONE = property(lambda self: len(self.starts))
SCORES, STREAM = frozenset({"score"}), frozenset({"stream"})
CASES: dict[str, tuple[Any, str]] = {
    "the number of rows, where a step asks two queries of each": (
        broken(Pairs, most_queries=ROWS_ALONE),
        "Steps.query: live: found bool[1, 6]; expected bool[1, 3], most_queries for each example",
    ),
    "more than a step asks": (
        broken(most_queries=7),
        "Steps.query: live: found bool[1, 3]; expected bool[1, 7], most_queries for each example",
    ),
    "flags as numbers": (
        broken(query=with_query(live=lambda x: x.astype(jnp.int32))),
        "Steps.query: live: found int32[1, 3]; expected bool[1, 3], most_queries for each example",
    ),
    "tokens with a point": (
        broken(query=with_query(tokens=lambda x: x.astype(jnp.float32))),
        "Steps.query: tokens: found float32[1, 3]; expected int32[1, 3]",
    ),
    "times without a batch": (
        broken(query=with_query(time=lambda x: x[0])),
        "Steps.query: time: found int32[3]; expected int32[1, 3]",
    ),
    "a state that changes": (
        broken(advance=forgets),
        "Steps.advance: .count: found float32[1, 3]; expected int32[1, 3], as before",
    ),
    "one flag for all": (
        broken(done=lambda self, state: Lines.done(self, state).all()),
        "Steps.done: found bool[]; expected bool[1]",
    ),
    "lengths with a point": (
        broken(result=with_result(lengths=lambda state: state.count * 1.0)),
        "Steps.result: lengths: found float32[1, 3]; expected int32[1, 3]",
    ),
    "no code": (
        broken(result=with_result(truncated=lambda state: None)),
        "Steps.result: truncated: found None; expected int32[1]",
    ),
    "fewer rows than places": (
        broken(result=first_two),
        "Steps.result: tokens: found int32[1, 2, 6]; expected int32[1, 3, 6]",
    ),
    "too few slots": (broken(slots=6), "Steps.slots: found 6; expected "),
    "scores of tokens written from the end": (broken(result=turned, method={"can": SCORES}), "Steps.result: tokens: "),
    "scores of tokens turned where a row ends": (
        broken(result=turned_once_ended, method={"can": SCORES}),
        "Steps.result: tokens: ",
    ),
    "scores of tokens after the first": (broken(result=shifted, method={"can": SCORES}), "Steps.result: tokens: found"),
    "scores at another time": (
        broken(start=lambda self, row: np.asarray(self.starts)[row] + 1, method={"can": SCORES}),
        "Steps.result: tokens: found ",
    ),
    "a stream of rows that grow at their beginning": (
        broken(result=turned, method={"can": STREAM}),
        "Steps.result: found [[",
    ),
    "a stream of rows that settle at the end": (
        broken(result=settling, method={"can": STREAM}),
        "Steps.result: found [[",
    ),
    "a stream without places": (broken(places=(0, 0), method={"can": STREAM}), "Steps.places: found (0, 0); expected"),
    "prefixes without places": (
        broken(places=(0, 0), method={"can": frozenset({"prefix"})}),
        "Steps.places: found (0, 0); expected at least one row",
    ),
    "starts beyond the times": (
        broken(places=at_times(3)),
        "Steps.start: found [0, 1, 4] for rows 0, 1, ...; expected a time for each of 3 rows, below 3",
    ),
    "positions that fall with the row": (
        broken(position=lambda self, row, time: time - row),
        "Steps.position: found [[0, 1, 2, 3], [-1, 0, 1, 2]] for rows 0, 1 and times 0 to 3; expected whole numbers",
    ),
    "positions with a point": (
        broken(position=lambda self, row, time: (row + time) / 2),
        "Steps.position: found [[0.0, 0.5, 1.0, 1.5], [0.5, 1.0, 1.5, 2.0]] for rows 0, 1 and times 0 to 3; expected",
    ),
    "an ability that nobody has": (
        broken(method={"can": frozenset({"streams"})}),
        "Broken.can: found 'streams'; expected some of sample, score, ",
    ),
    "drafts without a grid": (
        broken(method={"can": frozenset({"draft"})}),
        "Steps.cut: missing; expected the attribute that Strategy describes, for draft",
    ),
    "a list among its numbers": (
        broken(__hash__=None),
        "Broken.strategy: found Steps, which is not hashable; expected a frozen dataclass of numbers",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_strategy_that_breaks_a_rule_is_refused_by_the_first_check(case: str) -> None:
    """The refusal comes before any compilation for a model."""
    method, line = CASES[case]
    generator = Generator(Config(model=FEW_WORDS, method=method), {"w": np.zeros(1)}, None)
    with refused(line):
        generator.decode([[5, 1]])


def test_queries_of_all_steps_need_slots() -> None:
    """Three rows of six tokens have 18 queries in ten steps."""
    with refused("Steps.slots: found 17; expected 18 or more"):
        methods.strategy_of(broken(advance=endless, slots=17), IDS)
    assert methods.strategy_of(broken(advance=endless, slots=18), IDS)


def test_answer_that_is_not_kept_adds_no_token() -> None:
    """Each step queries again for the tokens of the previous step, at its times."""

    def query(self: Lines, state: Any) -> Any:
        state, found = Lines.query(self, state)
        again = dataclasses.replace(found, time=jnp.maximum(found.time - 1, 0))
        return state, jax.tree.map(lambda *pair: jnp.concatenate(pair, axis=1), found, again)

    steps: dict[str, Any] = {
        "most_queries": property(lambda self: 2 * len(self.starts)),
        "slots": property(lambda self: 2 * len(self.starts) * self.width),
        "query": query,
        "advance": lambda self, state, answers: Lines.advance(self, state, answers[:, : len(self.starts)]),
        "kept": lambda self, state: jnp.broadcast_to(jnp.arange(6) < 3, (len(state.ended), 6)),
    }
    assert methods.strategy_of(broken(method={"can": SCORES}, **steps), IDS)


def test_scalar_state_cannot_be_served() -> None:
    """The scalar of a batch would be wrong for examples that join or leave it."""
    steps: dict[str, Any] = {
        "init": lambda self, batch, source=None: Shared(Lines.init(self, batch), jnp.int32(0)),
        "query": lambda self, state: (state, Lines.query(self, state.inner)[1]),
        "advance": lambda self, state, x: Shared(Lines.advance(self, state.inner, x), state.clock + 1),
        "done": lambda self, state: Lines.done(self, state.inner if isinstance(state, Shared) else state),
        "result": lambda self, state: Lines.result(self, state.inner),
    }
    with refused("Steps.init: .clock: found int32[]; expected the batch as the first axis, for stream and serve"):
        methods.strategy_of(broken(**steps), IDS)
    # Batches of this method do not change.
    assert methods.strategy_of(broken(method={"can": frozenset({"score"})}, **steps), IDS)


@pytest.mark.parametrize("part", ["most_queries", "start", "eos", "calls", "stop", "init"])
def test_missing_part_is_named(part: str) -> None:
    """A strategy with the former name of `most_queries` lacks a part."""

    class Old:
        reads_source = False
        queries = choose = drafter = None
        slots, most_queries, places, eos = 3, 3, (1, 3), 1

    named = (*(name for kind in decoding.Strategy.__mro__[:2] for name in vars(kind) if name[0] != "_"), "stop")
    for name in named:
        if not hasattr(Old, name):
            setattr(Old, name, lambda self, *given: np.zeros_like(given[0]))
    delattr(Old, part)
    method = type("Broken", (Uneven,), {"strategy": lambda self, ids: Old(), "can": frozenset({"stream"})})()
    with pytest.raises(UserError, match=rf"^Old\.{part}: missing; expected the attribute"):
        methods.strategy_of(method, IDS)


def test_a_training_is_refused_before_its_first_step() -> None:
    from pipejax.training.step import Trainer

    with pytest.raises(UserError, match=r"^Steps\.position: found"):
        Trainer(dataclasses.replace(RUN, method=broken(position=lambda self, row, time: -row)))


def test_wrong_shapes_are_refused_while_tracing() -> None:
    """The strategy is used without a method."""
    for strategy, line in (
        (broken(Pairs, most_queries=ROWS_ALONE), "Steps.query: live: found bool[2, 6]; expected bool[2, 3]"),
        (broken(done=lambda self, state: 0), "Steps.done: found 0; expected bool[1]"),
    ):
        made = strategy.strategy(IDS)
        with refused(line):
            decoding.begin(made, NoModel(), made.init(2), Sizes((3,), (30,)))
    sizes, kept = Sizes((6,), (30,)), broken(kept=lambda self, state: state.ended.astype(jnp.int32)).strategy(IDS)
    for made, line in (
        (kept, "Steps.kept: found int32[2, 3]; expected bool[2, 3]"),
        (broken(advance=forgets).strategy(IDS), "Steps.advance: .count: found float32"),
        (broken(result=with_result(steps=lambda s: s.count)).strategy(IDS), "Steps.result: steps: found int32[2, 3]"),
    ):
        carry = decoding.begin(made, NoModel(), made.init(2), sizes)
        with refused(line):
            jax.make_jaxpr(lambda x, made=made: decoding.decode(made, NoModel(), x, sizes=sizes, slots=30))(carry)


def test_built_in_strategies_skip_the_dry_run() -> None:
    """Only their facts are checked, for any size."""
    made = methods.strategy_of(methods.PipelinedMethod(GridConfig(time_max=900, sub_max=400)), IDS)
    assert made.places == (400, 900)


# Drafts.


class Longer(Pipelined):
    """Algorithm 1 with an additional rule."""

    def advance(self, state: Any, next_tokens: Any) -> Any:
        return super().advance(state, next_tokens)


@pytest.mark.parametrize("part", ["init", "query", "advance", "result", "done", "kept", "find_open"])
def test_drafts_do_not_replace_the_rules_of_a_subclass(part: str) -> None:
    own = type("Own", (Pipelined,), {part: getattr(Pipelined, part)})
    line = rf"^Own\.{part}: drafts follow GridStrategy\.{part} instead; expected no drafts, or an `on_grid`"
    with pytest.raises(UserError, match=line):
        decoding.drafted(own(1, 9, 3), DecodeConfig(draft="source"))
    again = type("Again", (own,), {})  # nor by the rules of its base class
    with pytest.raises(UserError, match=rf"^Again\.{part}: drafts follow"):
        decoding.drafted(again(1, 9, 3), DecodeConfig(draft="source"))


def test_strategy_that_declares_drafts_is_drafted() -> None:
    on_grid = property(lambda self: Pipelined(self.delay, self.time_max, self.sub_max))
    says = type("Says", (Longer,), {"on_grid": on_grid})
    apart = type("Apart", (Pipelined,), {"position": lambda self, row, time: 5 * row + time})
    draft = DecodeConfig(draft="source")
    drafted: dict[type, Any] = {kind: decoding.drafted(kind(1, 9, 3), draft) for kind in (says, apart)}
    assert (type(drafted[says]), drafted[says].drafts.names) == (Pipelined, says(1, 9, 3))
    assert (type(drafted[apart]), drafted[apart].drafts.names) == (apart, None)


# Targets.


def with_flat(**parts: Any) -> Any:
    """The method with other arrays in its layout."""

    def target(self: Any, *given: Any, **more: Any) -> Target:
        found = Uneven.target(self, *given, **more)
        return found._replace(flat=found.flat._replace(**{k: f(getattr(found.flat, k)) for k, f in parts.items()}))

    return broken(method={"target": target})


def put(x: np.ndarray, value: Any) -> np.ndarray:
    changed = x.copy()
    changed[3] = value
    return changed


@pytest.mark.parametrize(
    "parts, line",
    [
        ({"targets": lambda x: put(x, 64)}, "targets: found 64; expected 0 or more, below 64"),
        ({"targets": lambda x: put(x, -1)}, "targets: found -1; expected 0 or more, below 64"),
        ({"inputs": lambda x: put(x, 99)}, "inputs: found 99; expected 0 or more, below 64"),
        ({"time": lambda x: put(x, -2)}, "time: found -2; expected 0 or more, below 16777216"),
        ({"row": lambda x: put(x, -1)}, "row: found -1; expected 0 or more"),
        ({"row": lambda x: put(x, 2**30)}, "row: found 1073741824; expected 0 or more, below 16777216"),
        ({"weights": lambda x: put(x, -1)}, "weights: found -1.0; expected 0 or more"),
        ({"weights": lambda x: put(x, np.nan)}, "weights: found nan; expected 0 or more"),
        ({"weights": lambda x: put(x, np.inf)}, "weights: found inf; expected 0 or more"),
        ({"weights": lambda x: x[:-1]}, "weights: found float32[6]; expected float32[7]"),
        ({"time": lambda x: x[:-1]}, "time: found int32[6]; expected int32[7]"),
        ({"targets": lambda x: x[:, None]}, "targets: found int32[7, 1]; expected int32[7]"),
        ({"inputs": lambda x: x.astype(np.int64)}, "inputs: found int64[7]; expected int32[7]"),
        ({"weights": lambda x: x.astype(float)}, "weights: found float64[7]; expected float32[7]"),
        ({"row": lambda x: x.tolist()}, "row: found list[7]; expected int32[7]"),
    ],
)
def test_layout_that_breaks_a_rule_raises_one_line(parts: Any, line: str) -> None:
    example, tokenizer = Example("x", "the baker smiled .", ("red roses", "old lamps")), demo.DemoTask().tokenizer()
    config = dataclasses.replace(RUN, method=with_flat(**parts))
    with refused("example x: Broken.target: " + line):
        encode_example(example, tokenizer, config, MODEL)
    assert len(encode_example(example, tokenizer, dataclasses.replace(RUN, method=Uneven()), MODEL).target.inputs) == 7


@pytest.mark.parametrize("slots, line", [(6, "found 7 slots; expected 1 to 6"), (0, "found 7 slots; expected 1 to 0")])
def test_more_slots_than_declared_raise_one_line(slots: int, line: str) -> None:
    example, tokenizer = Example("x", "the baker smiled .", ("red roses", "old lamps")), demo.DemoTask().tokenizer()
    config = dataclasses.replace(RUN, method=broken(method={"most_slots": lambda self, most: slots}))
    with pytest.raises(
        UserError, match=rf"^example x: Broken\.target: {line}, the result of most_slots for \d+ tokens$"
    ):
        encode_example(example, tokenizer, config, MODEL)
    with pytest.raises(UserError, match=r"^example x: Broken\.target: found 0 slots; expected 1 to 18"):
        parts = {name: lambda x: x[:0] for name in grid.Flat._fields}
        encode_example(example, tokenizer, dataclasses.replace(RUN, method=with_flat(**parts)), MODEL)


# Settings that no method reads.


def test_settings_unread_by_a_method_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(model=FEW_WORDS, method=Uneven(), grid=GridConfig(delay=3), decode=DecodeConfig(max_length=9))
    generator = Generator(config, {"w": np.zeros(1)}, None)
    for _ in range(2):
        generator.make_strategy()
    (told,) = caplog.records
    assert told.getMessage() == "grid.delay, decode.max_length: uneven decoding does not read them"


@pytest.mark.parametrize(
    "name, settings, line",
    [
        # Its default, but requested explicitly.
        ("uneven", {"time_max": 50}, "grid.time_max: uneven decoding does not read it"),
        ("uneven", {"draft_tokens": 2}, "decode.draft_tokens: uneven decoding does not read it"),
        ("pipelined", {"max_length": 9, "delay": 2}, "decode.max_length: pipelined decoding does not read it"),
        ("sequential", {"max_length": 9, "delay": 2}, "grid.delay: sequential decoding does not read it"),
        ("sequential", {"max_length": 9, "draft_tokens": 2}, None),
        ("uneven", {"scores": True, "batch_size": 2}, None),
    ],
)
def test_unread_settings_of_a_call_are_logged(
    name: str, settings: dict[str, Any], line: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    generator = Generator(Config(model=FEW_WORDS, method=Uneven()), {"w": np.zeros(1)}, None)
    generator._with("decode", settings).make_strategy(name)
    assert [record.getMessage() for record in caplog.records] == ([line] if line else [])


# Whole methods.


class LateTime(Uneven):
    """A method whose second row is trained one time-step later than it is decoded."""

    def target(self, *given: Any, **more: Any) -> Target:
        found = super().target(*given, **more)
        return found._replace(flat=found.flat._replace(time=found.flat.time + (found.flat.row == 1).astype(np.int32)))


class OtherBlank(Pairs):
    """A method that is trained with another placeholder than it is decoded with."""

    def target(self, *given: Any, **more: Any) -> Target:
        found = super().target(*given, **more)
        inputs = np.where(found.flat.inputs == BLANK, 3, found.flat.inputs)
        return found._replace(flat=found.flat._replace(inputs=inputs))


class NoBlank(Pairs):
    """A method whose layout lacks the placeholder after an end, which later rows see."""

    def target(self, *given: Any, **more: Any) -> Target:
        found = super().target(*given, **more)
        counts = found.flat.weights > 0
        return found._replace(flat=grid.Flat(*(x[counts] for x in found.flat)))


class Turned(Backwards):
    """A method that reads its rows in the order of the grid."""

    def order(self, lengths: Any) -> list[int]:
        return Uneven.order(self, lengths)


class Twice(Uneven):
    """A method whose layout has two slots at one place."""

    def target(self, *given: Any, **more: Any) -> Target:
        found = super().target(*given, **more)
        return found._replace(flat=grid.Flat(*(np.concatenate([x, x[:1]]) for x in found.flat)))


class Cut(Uneven):
    """A method that never lays out a whole target."""

    def target(self, *given: Any, **more: Any) -> Target:
        return super().target(*given, **more)._replace(was_cut=True)


@pytest.mark.parametrize(
    "kind, line",
    [
        (LateTime, "LateTime.target: target 0: the slot at row 1, time 2: found (row, time, token) "),
        (
            OtherBlank,
            "OtherBlank.target: target 0: the slot at row 0, time 1: found (row, time, token) [(0, 1, 3)] only in",
        ),
        (NoBlank, "NoBlank.target: target "),
        (Turned, "Turned.read: target 1: found "),
        (Twice, "Twice.target: target 0: found two slots at the same row and time; expected one"),
        (Cut, "Cut.target: found only cut targets (9); expected a target that is not cut"),
    ],
)
def test_layout_that_is_not_decoded_raises_one_line(kind: Any, line: str) -> None:
    with refused(line):
        testing.check_method(kind())


def test_custom_targets_are_laid_out() -> None:
    with refused("Cut.target: found only cut targets (1); expected"):
        testing.check_method(Cut(), targets=[["red", "blue"]])


@pytest.fixture(scope="module")
def params() -> Any:
    return oracle.random_params(FEW_WORDS, np.random.default_rng(2), eos_scale=2.0)


def written(method: Uneven, params: Any, source: list[int]) -> tuple[list[list[int]], list[list[float]], int]:
    """Rows, log-probabilities including the ends, and steps of a decode, in plain Python."""
    encoded, rows = oracle.encode(params, FEW_WORDS, source), [list[int]() for _ in method.starts]
    probs, cells, fed, step = [list[float]() for _ in rows], list[tuple[int, int]](), list[int](), 0
    while any(len(row) < method.width and 1 not in row for row in rows):
        now = method.together * step
        begun = [(i, row) for i, row in enumerate(rows) if method.starts[i] <= now]
        going = [i for i, row in begun if len(row) < method.width and 1 not in row]
        for i in going:
            cells += [(i, now + j) for j in range(method.together)]
            fed += [rows[i][-1] if rows[i] else 0, *[BLANK] * (method.together - 1)]
        if going:
            between = oracle.visibility(cells), oracle.distances(cells)
            logits = oracle.decoder_logits(params, FEW_WORDS, encoded, fed, *between)[-len(going) * method.together :]
            for k, x in enumerate(logits):
                i = going[k // method.together]
                if 1 not in rows[i]:
                    rows[i].append(int(x.argmax()))
                    probs[i].append(-float(np.log(np.exp(x - x.max()).sum())))
        step += 1
    return [[token for token in row if token != 1] for row in rows], probs, step


@pytest.mark.parametrize("method", [Uneven(), Pairs(), Backwards()], ids=lambda method: method.name)
def test_valid_methods_decode_as_plain_python(method: Uneven, params: Any) -> None:
    """Batches have mixed lengths, and scores are compared, too."""
    rng, seen = np.random.default_rng(7), set[str]()
    texts = [[*rng.integers(2, FEW_WORDS.vocab_size, rng.integers(1, 9)).tolist(), 1] for _ in range(12)]
    generator = Generator(Config(model=FEW_WORDS, method=method, decode=DecodeConfig(scores=True)), params, None)
    for text, record in zip(texts, generator.decode(texts, batch_size=4), strict=True):
        rows, probs, steps = written(method, params, text)
        assert record["row_ids"] == [rows[i] for i in method.order([len(row) for row in rows])]
        assert record["steps"] == steps
        assert record["log_prob"] == pytest.approx(sum(map(sum, probs)), abs=1e-2)
        seen.add(str(rows))
    assert len(seen) > 4


@pytest.mark.slow
@pytest.mark.parametrize("method", [Uneven(), Pairs(), Backwards(), Staggered(rows=3, width=5)], ids=lambda m: m.name)
def test_valid_methods_pass(method: Any) -> None:
    found = testing.check_method(method)
    assert re.fullmatch(r"\w+: \d layouts and \d+ answers agree with recomputation \(decode, stream\)", found), found


def test_answer_that_differs_from_its_recomputation_raises_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """This would detect a mistake of the loop."""

    def decode(self: Any, given: Any, **more: Any) -> Any:
        return [record | {"steps": record["steps"] + (i == 2)} for i, record in enumerate(whole(self, given, **more))]

    whole = Generator.decode
    monkeypatch.setattr(Generator, "decode", decode)
    with pytest.raises(
        UserError, match=r"^Plain\.decode: source 2: steps: found (\d+); expected \d+, as recomputed \(rule: "
    ):
        testing.check_method(type("Plain", (Uneven,), {"can": frozenset()})())


# Backbones.


class Absolute(t5.Decoder):
    """A backbone whose bias depends on the absolute place of a query."""

    def bias(self, mask: Any, query: Any, key: Any) -> Any:
        return super().bias(mask, query, key) * (1 + 0.1 * query[:, None, :, None])


class Counting(t5.Decoder):
    """A backbone whose bias depends on the order of slots."""

    def bias(self, mask: Any, query: Any, key: Any) -> Any:
        return super().bias(mask, query, key) + 0.5 * jnp.arange(mask.shape[2])


class Seeing(t5.Decoder):
    """A backbone that sees hidden slots."""

    def bias(self, mask: Any, query: Any, key: Any) -> Any:
        return jnp.maximum(super().bias(mask, query, key), -1.0)


class Leaking(t5.Decoder):
    """A backbone whose steps see hidden slots, which training does not see."""

    def step(self, *given: Any) -> Any:
        found, caches = super().step(*given)
        return found + 0.1 * caches[0][0].mean(), caches


class Keeping(t5.Decoder):
    """A backbone whose steps see the former content of the next slots, which is zero unless a step was undone."""

    def step(self, *given: Any) -> Any:
        found, caches = super().step(*given)
        return found + self.left(*given), caches

    def left(self, x: Any, *given: Any) -> Any:
        """The sum of the keys in the slots that this step will write."""
        caches, start = given[4:]
        place = start[:, None] + jnp.arange(x.shape[1])
        keys = jnp.take_along_axis(caches[0][0], place[:, None, :, None], axis=2)
        return 0.1 * keys.sum(axis=(1, 3))[:, :, None]


class Padded(t5.Encoder):
    """A backbone that sees padding."""

    def __call__(self, x: Any, mask: Any, deterministic: bool) -> Any:
        return super().__call__(x, mask | True, deterministic)


class Forgetful(t5.DecoderLayer):
    """A backbone whose steps add something that training does not."""

    def __call__(self, x: Any, cache: Any, *given: Any) -> Any:
        found, cache = super().__call__(x, cache, *given)
        return (found if cache is None else found + 2.0 * jnp.sin(3.0 * x)), cache


def backbone(decoder: Any = t5.Decoder, encoder: Any = t5.Encoder, **parts: Any) -> Any:
    module = type("Module", (t5.T5,), {"decoder_stack": decoder, "encoder_stack": encoder})
    parts = {"module": lambda self, **options: module(self, **options), "__hash__": T5Config.__hash__, **parts}
    return type("Own", (T5Config,), parts)(**vars(testing.TOY))


def check(rule: str, config: Any) -> None:
    """Checks a backbone by one rule."""
    requirement = next(requirement for requirement in testing.BACKBONE_REQUIREMENTS if requirement.name == rule)
    testing.check_one(requirement, testing.BackboneCase(config))


def renamed(self: Any) -> Any:
    table = T5Config.tensors(self)
    return table | {"decoder/norm/scale": table["encoder/norm/scale"]}


@pytest.mark.parametrize(
    "made, line",
    [
        (
            lambda: backbone(tensors=renamed),
            "Own.tensors: found encoder.final_layer_norm.weight for encoder/norm/scale and decoder/norm/scale",
        ),
        (lambda: backbone(sharding=((r".*/scale", ("tensor", "fsdp")), *T5Config.sharding)), "Own.sharding: "),
        (lambda: backbone(sharding=T5Config.sharding[:-1]), "decoder/layers_0/cross_attention/norm/scale: found no"),
        (
            lambda: backbone(tables=("shared/table",)),
            "Own.tables: found shared/table; expected the path of a parameter: ",
        ),
        (
            lambda: backbone(tensors=lambda self: T5Config.tensors(self) | {"lm_head/kernel": ("x", "DV")}),
            "Own: lm_head/kernel: missing; expected ",
        ),
    ],
)
def test_backbone_whose_names_break_a_rule_raises_one_line(made: Any, line: str) -> None:
    with refused(line):
        testing.check_backbone(made())


@pytest.mark.parametrize(
    "made, rule, line",
    [
        (lambda: backbone(Absolute), "differences of positions", "positions that all lie 7 farther"),
        (lambda: backbone(Counting), "order of slots", "the order of slots"),
        (lambda: backbone(Seeing), "visible slots", "a slot that no query sees, at row 0, time 1"),
        (lambda: backbone(encoder=Padded), "padding of sources", "the padding of a source"),
        (lambda: backbone(Leaking), "steps", "step"),
        (lambda: backbone(Keeping), "steps", "step after one that was undone"),
    ],
)
def test_backbone_that_reads_hidden_tokens_raises_one_line(made: Any, rule: str, line: str) -> None:
    with pytest.raises(UserError, match=rf"^Own\.module: {line}: found logits that change by [^\n]*; expected"):
        check(rule, made())


class Louder(t5.Decoder):
    """A backbone with a bias that is twice as large, also for attention in blocks."""

    def bias(self, mask: Any, query: Any, key: Any) -> Any:
        return jnp.where(mask[:, None], 2 * self.relative_bias(query, key), t5.MASKED)

    def distances(self) -> Any:
        told: Any = super().distances()
        return dataclasses.replace(told, table=2 * told.table)


@pytest.mark.slow
@pytest.mark.parametrize("says", [True, False])
def test_backbone_with_different_block_attention_raises_one_line(says: bool) -> None:
    decoder = Louder if says else type("Decoder", (Louder,), {"distances": t5.Decoder.distances})
    config = backbone(decoder, head_width=lambda self: self.d_kv)
    if says:
        check("attention in blocks", config)
    else:
        with refused("Own.module: attention in blocks: found logits that change by "):
            check("attention in blocks", config)


def test_head_width_that_differs_from_the_keys_raises_one_line() -> None:
    config = backbone(head_width=lambda self: 16)
    with refused("Own.module: encode: keys: found bfloat16[2, 2, 8, 40]; expected bfloat16[2, 2, 16, 40]"):
        check("dtypes", config)


@pytest.mark.slow
def test_step_that_training_does_not_take_raises_one_line() -> None:
    decoder = type("Decoder", (t5.Decoder,), {"layer": Forgetful})
    with pytest.raises(UserError, match=r"^Own\.module: step: found logits that change by [^\n]*rule: steps\)$"):
        testing.check_backbone(backbone(decoder))


@pytest.mark.slow
def test_valid_backbones_pass() -> None:
    for config in (testing.TOY, dataclasses.replace(testing.TOY, feed_forward="gated-gelu", tied_head=False)):
        found = testing.check_backbone(config)
        assert re.fullmatch(r"T5Config: \d+ parameters, and \d answers agree with recomputation", found)


def test_testing_is_a_public_name() -> None:
    assert pipejax.testing is testing
