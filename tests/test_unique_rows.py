"""Rows that repeat a row above: omitted from records, streams and chunks, and the end of repeating answers."""

import dataclasses
import operator
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import transformers

from pipejax import methods
from pipejax.apps.picture import record as picture
from pipejax.apps.serving.answer import Event, Request
from pipejax.apps.serving.engine import Engine
from pipejax.apps.serving.row_text import Writing
from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, TrainConfig
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import (
    TRUNCATIONS,
    Decoded,
    Drafts,
    Pipelined,
    Sampling,
    Sequential,
    Trace,
    repeated_parts,
    with_drafts,
)
from pipejax.decoding.drafters import FromModel, FromSource, Jacobi
from pipejax.decoding.times import NEVER
from pipejax.inference import streaming
from pipejax.inference.answers import count, record_of
from pipejax.inference.decoding_options import seed_of
from pipejax.inference.generator import Generator
from pipejax.inference.report import Report
from pipejax.inference.sources import Source
from pipejax.inference.streaming import RowEvent
from pipejax.offline.resume import settings_of
from pipejax.system.errors import UserError
from support import oracle
from support.batches import padded, rows_of, sources
from support.one_program import compiled
from support.tiny import FEW_WORDS, MODEL, MORE_WORDS

pytestmark = pytest.mark.usefixtures("compiled_once")

A, B, C = 2, 3, 4


def generator(tokenizer=None, model=MODEL, **decode):
    config = Config(
        model=model,
        grid=GridConfig(delay=2, time_max=24, sub_max=9),
        train=TrainConfig(method="pipelined"),
        decode=DecodeConfig(unique_rows=True, max_length=24, scores=True, **decode),
    )
    return Generator(config, oracle.random_params(model, np.random.default_rng(4)), tokenizer)


@pytest.fixture(scope="module")
def made(tokenizer):
    return generator(tokenizer)


def decoded(rows, *, truncated=None, **more):
    """A batch of one with these rows; each token's log-probability is minus its time."""
    width = 24
    tokens = np.zeros((1, len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[0, i, : len(row)] = row
    return Decoded(
        tokens=tokens,
        lengths=np.asarray([list(map(len, rows))]),
        steps=np.asarray([17]),
        truncated=np.asarray([TRUNCATIONS.index(truncated)]),
        calls=np.asarray([2]),
        log_probs=np.broadcast_to(-np.arange(width, dtype=np.float32), (1, len(rows), width)),
        **more,
    )


METHOD = methods.make("pipelined", Config())


def record(of: Generator, source: Source, strategy: str, found: Any, place: int) -> Any:
    start = of.make_strategy(strategy).start
    return record_of(source, of.method(strategy), found, place, start=start, config=of.config, tokenizer=of.tokenizer)


def counted(of: Generator, one: Any, strategy: str, report: Report) -> None:
    count(one, of.method(strategy), report, config=of.config, tokenizer=of.tokenizer)


def test_a_record_has_no_two_equal_rows(made):
    """Omitted rows are listed by their number on the grid; all other fields describe the remaining rows."""
    written = [[A, B], [C], [A, B], [], [A], [C], [C, C], []]
    found = record(made, Source("x", [1]), "pipelined", decoded(written), 0)
    assert found["row_ids"] == [[A, B], [C], [A], [C, C]]
    assert found["repeated"] == [2, 5]
    assert found["rows"] == [made.tokenizer.decode(row) for row in found["row_ids"]]
    assert found["text"] == " ; ".join(row for row in found["rows"] if row.strip())
    assert found["log_probs"] == [[0, -1], [-2], [-8], [-12, -13]]  # row i begins at time 2 i
    # The tokens of all written rows, with each row's eos; the eos of empty rows counts, since the model wrote it.
    ends = [2 * i + len(row) for i, row in enumerate(written)]
    assert found["log_prob"] == -sum(t for i, end in enumerate(ends) for t in range(2 * i, end + 1))
    assert (found["steps"], found["truncated"]) == (17, None)
    report = Report()
    counted(made, found, "pipelined", report)
    counted(made, record(made, Source("y", [1]), "pipelined", decoded([[A], [A], []]), 0), "pipelined", report)
    assert Report.of_all([report, report]).repeated == 6
    assert report.lines(METHOD)[-1].endswith("; rows left out, as they repeat one above: 3")


def test_without_the_setting_repeated_rows_are_kept_and_not_reported(made):
    plain = dataclasses.replace(made.config, decode=dataclasses.replace(made.config.decode, unique_rows=False))
    other = Generator.__new__(Generator)
    vars(other).update(vars(made), config=plain)
    found = record(other, Source("x", [1]), "pipelined", decoded([[A], [A]]), 0)
    assert found["row_ids"] == [[A], [A]] and "repeated" not in found
    report = Report()
    counted(other, found, "pipelined", report)
    assert "repeat" not in "".join(report.lines(METHOD))


def test_unfinished_row_that_equals_a_row_so_far_is_left_out(made):
    """The answer is truncated by time or by a request: no two rows of a record are equal."""
    found = record(made, Source("x", [1]), "pipelined", decoded([[A, B], [A], [A, B]], truncated="time_max"), 0)
    assert (found["row_ids"], found["repeated"], found["truncated"]) == ([[A, B], [A]], [2], "time_max")


def test_a_sequential_answer_keeps_its_text(made, monkeypatch):
    """Its rows are split from the text, and repeated rows are omitted from the list; text and ids are not changed."""
    text = "lamps ; ropes ; lamps ; tents ; ropes"
    monkeypatch.setattr(made.tokenizer, "decode", lambda ids: text)
    found = record(made, Source("x", [1]), "sequential", decoded([[A, B, C]]), 0)
    assert found["rows"] == ["lamps", "ropes", "tents"] and found["repeated"] == [2, 4]
    assert found["text"] == text and found["row_ids"] == [[A, B, C]]
    assert found["log_probs"] == [[0, -1, -2]]


def test_trace_omits_repeated_rows(made):
    """Rows are numbered as in the record; the empty row after them is the next, as without the setting."""
    written = [[A, B], [A, B], [C], [C], []]
    calls = np.asarray([[[1, 0, -1, -1, -1], [0, 1, 0, 0, 0]]])  # drafted tokens of each row in two calls; -1: no query
    trace = Trace(np.full((1, 2, 5, 1), B), calls, np.maximum(calls, 0), np.maximum(calls, 0) + (calls >= 0))
    found = record(made, Source("x", [1]), "pipelined", decoded(written, trace=trace), 0)
    assert found["row_ids"] == [[A, B], [C]] and found["repeated"] == [1, 3]
    assert [[(one.row, one.written) for one in call] for call in found["trace"]] == [[(0, 2)], [(0, 1), (1, 1), (2, 1)]]
    with pytest.raises(UserError, match=r"^r:1: repeated: found \[1, 3\], rows that decode.unique_rows left out"):
        picture.steps(found, [["a", "b"], ["c"]], 2, "r:1")


def test_unique_rows_is_a_setting_of_resumed_decodes(made):
    assert settings_of(made, "pipelined", [])["decode.unique_rows"] is True


def told(rows, *, delay, ended, order=None):
    """Row events of given rows, in slices of steps as in a stream: tokens, then the rows that ended."""
    letters = sorted((i * delay + j, i, token) for i, row in enumerate(rows) for j, token in enumerate(row))
    last = max((time for time, _, _ in letters), default=0) + 2
    waiting = [i for i, row in enumerate(rows) if row and ended[i]]
    for until in [*(order or range(1, last)), last]:
        while letters and letters[0][0] < until:
            _, row, token = letters.pop(0)
            yield RowEvent(row, token, None, False)
        for i in [i for i in waiting if i * delay + len(rows[i]) < until]:
            waiting.remove(i)
            yield RowEvent(i, 1, None, True)
    yield decoded(rows or [[]])


def answers(seed, *, end=True):
    rng = np.random.default_rng(seed)
    few = [[A], [A, B], [A, B, C], [C], [B, B, B, B]][: rng.integers(1, 6)]
    rows = [few[i] if i < len(few) else [] for i in rng.integers(0, len(few) + rng.integers(0, 2), rng.integers(0, 9))]
    cut = int(rng.integers(0, 12)) if not end else 99
    delay = int(rng.integers(1, 4))
    ended = [i * delay + len(row) < cut for i, row in enumerate(rows)]
    return [row[: max(cut - i * delay, 0)] for i, row in enumerate(rows)], delay, ended


@pytest.mark.parametrize("end", [True, False], ids=["whole", "cut"])
def test_stream_omits_events_of_repeated_rows(end):
    """This holds for any slices of steps; events of a row are sent as soon as it differs from all rows above."""
    waited = 0
    for seed in range(200):
        rows, delay, ended = answers([seed, end], end=end)
        slices = sorted(np.random.default_rng(seed).integers(0, 20, 3).tolist()) if seed % 2 else None
        *events, last = streaming._of_unique_rows(told(rows, delay=delay, ended=ended, order=slices))
        assert isinstance(last, Decoded)
        stays = [i for i, row in enumerate(rows) if row and row not in rows[:i]]
        for i, row in enumerate(rows):
            own = [event for event in events if event.row == i]
            assert [event.token for event in own if not event.done] == (row if i in stays else [])
            assert [event.done for event in own] == ([False] * len(row) + [True] * ended[i] if i in stays else [])
        every = list(told(rows, delay=delay, ended=ended, order=slices))[:-1]
        waited += events != [event for event in every if event.row in stays]
    assert waited > 10  # some came later than they were written, all others in the order of steps


def test_row_is_streamed_as_soon_as_it_differs():
    given = [RowEvent(0, A, None, False), RowEvent(0, B, None, False), RowEvent(1, A, None, False)]
    found = streaming._of_unique_rows([*given, RowEvent(1, C, None, False), RowEvent(2, C, None, False)])
    assert list(found) == [*given, RowEvent(1, C, None, False), RowEvent(2, C, None, False)]
    held = streaming._of_unique_rows([*given, RowEvent(1, B, None, False)])
    assert list(held) == given[:2]


class Letters:
    """A tokenizer in which each id is a letter."""

    size = 99

    def decode_known(self, ids: list[int]) -> str:
        return "".join("  abc"[i] for i in ids)

    def settles(self, token: int) -> bool:
        return True


@pytest.mark.parametrize("as_written", [False, True], ids=["in order", "as written"])
@pytest.mark.parametrize("end", [True, False], ids=["whole", "cut"])
def test_chunks_add_up_to_the_record(made, end, as_written):
    """The joined texts of a server's chunks are the record's text; an omitted row has no chunk."""
    some_waited = 0
    for seed in range(200):
        rows, delay, _ = answers([seed, end, 7], end=end)
        tokenizer: Any = Letters()
        writing = Writing(
            tokenizer, start=partial(operator.mul, delay), separator=" ; ", as_written=as_written, unique=True
        )
        letters = sorted((i * delay + j, i, token) for i, row in enumerate(rows) for j, token in enumerate(row))
        pieces = [piece for _, row, token in letters for piece in writing.add(row, token, 0.0)]
        some_waited += len(pieces) < len(letters)
        pieces += writing.end()
        stays = [row for i, row in enumerate(rows) if row and row not in rows[:i]]
        found = [[piece.token for piece in pieces if piece.row == i] for i in range(len(rows))]
        assert [row for row in found if row] == stays
        if not as_written:
            assert "".join(piece.text for piece in pieces) == " ; ".join(map(tokenizer.decode_known, stays))
    assert some_waited > 50


# Random models.

# delay, time_max, sub_max, literal, batch
SETTINGS = [(1, 16, 9, False, 5), (2, 24, 8, False, 4), (3, 24, 7, False, 3), (2, 16, 6, True, 3)]
DRAFTERS = [None, FromSource(), Jacobi(), FromModel(least=0.2)]


@pytest.mark.parametrize(
    "setting, drafter",
    [
        pytest.param(setting, drafter, marks=pytest.mark.slow if i == j else pytest.mark.long)
        for i, setting in enumerate(SETTINGS)
        for j, drafter in enumerate(DRAFTERS)
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else type(x).__name__,
)
def test_batches_of_random_models_are_algorithm_1_with_unique_rows(setting, drafter):
    """With drafts that are often wrong, answers, steps and truncations are the same."""
    delay, time_max, sub_max, literal, batch = setting
    strategy: Any = Pipelined(delay=delay, time_max=time_max, sub_max=sub_max, literal=literal, unique=True)
    strategy = strategy if drafter is None else with_drafts(strategy, Drafts(drafter, 4))
    small = FEW_WORDS if isinstance(drafter, FromModel) else None
    program = compiled(FEW_WORDS, strategy, small=small)
    in_circles = 0
    for seed in range(8):
        rng = np.random.default_rng([seed, *setting])
        params, texts = oracle.random_params(FEW_WORDS, rng), sources(rng, batch, FEW_WORDS.vocab_size)
        other = (oracle.random_params(FEW_WORDS, rng),) if small else ()
        found = jax.device_get(program(params, *padded(texts), *other))
        for b, text in enumerate(texts):
            expected = oracle.algorithm1(
                oracle.grid_next_tokens(params, FEW_WORDS, oracle.encode(params, FEW_WORDS, text), delay),
                delay=delay,
                time_max=time_max,
                sub_max=sub_max,
                stop="literal" if literal else "empty_row",
                unique=True,
            )
            written = [row[1 : -1 if row[-1] == 1 else None] for row in expected.all_rows]
            assert rows_of(found, b)[: len(written)] == written
            assert found.steps[b] == expected.steps
            assert TRUNCATIONS[found.truncated[b]] == expected.truncated
            in_circles += expected.truncated is None and [0, 1] not in expected.all_rows
    assert in_circles > 1 or literal


def same(found, wanted):
    """Asserts that two records are equal; log-probabilities may differ by rounding."""
    scores = "log_prob", "log_probs"
    assert {k: v for k, v in found.items() if k not in scores} == {k: v for k, v in wanted.items() if k not in scores}
    assert found["log_prob"] == pytest.approx(wanted["log_prob"], abs=1e-3)
    assert list(map(len, found["log_probs"])) == list(map(len, wanted["row_ids"]))


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.3, 0.0])
def test_streams_and_running_batches_give_the_records_of_decode(temperature):
    """Places are reused and answers bounded: the same rows remain with any other requests."""
    made = generator(model=MORE_WORDS, temperature=temperature)
    rng = np.random.default_rng(3)
    given = [Source(i, [*rng.integers(2, 12, rng.integers(1, 15)).tolist(), 1]) for i in range(16)]
    expected = made.decode([{"source_ids": one.content, "id": one.id} for one in given], batch_size=8)
    assert sum(len(record["repeated"]) for record in expected) > 10

    for source, wanted in zip(given, expected, strict=True):
        *events, record = made.stream_source(source, "pipelined")
        same(record, wanted)
        by_row = [[e.token for e in events if e.row == row and not e.done] for row in range(9)]
        assert [row for row in by_row if row] == wanted["row_ids"]
    engine = Engine(made, places=3, queue=99)
    requests = [
        Request(source, "pipelined", Sampling(temperature, seed=seed_of(source, 0)), max_tokens=most)
        for most in (None, 4)
        for source in given
    ]
    with engine.scheduler.waiting.lock:  # the requests arrive together: one batch is compiled
        submitted = [engine.submit(request) for request in requests]
    answers = [list(answer.events()) for answer in submitted]
    engine.close(drain=True, seconds=60)
    for wanted, (*_, record) in zip(expected, answers, strict=False):
        same(record, wanted)
    for wanted, (*events, record) in zip(expected, answers[len(given) :], strict=True):
        assert all(isinstance(event, Event) for event in events) and len(events) <= 4
        rows = [[event.token for event in events if event.row == i] for i in range(9)]
        assert record["row_ids"] == [row for i, row in enumerate(rows) if row and row not in rows[:i]]
        assert record["truncated"] in ("max_tokens", wanted["truncated"])


@pytest.mark.slow
def test_rows_with_prefixes_may_repeat():
    """Forced tokens count as written: equal beginnings lead to repeated rows, also for named rows."""
    config = Config(
        model=FEW_WORDS,
        grid=GridConfig(delay=1, time_max=16, sub_max=9),
        train=TrainConfig(method="pipelined"),
        decode=DecodeConfig(unique_rows=True),
    )
    params, left_out, in_circles = oracle.random_params(FEW_WORDS, np.random.default_rng(39)), 0, 0
    made, rng = Generator(config, params, None), np.random.default_rng(9)
    for i in range(8):
        ids, prefixes = rng.integers(2, 9, 9).tolist(), [rng.integers(2, 4, 1 + i % 2).tolist() for _ in range(6)]
        given = {"source_ids": ids, "row_prefixes": prefixes, "max_rows": 7}
        (found,) = made.decode([given])
        chooses = oracle.grid_next_tokens(params, FEW_WORDS, oracle.encode(params, FEW_WORDS, ids), 1)
        told = [*prefixes, [], [1], [1]]
        expected = oracle.algorithm1(
            chooses, delay=1, time_max=16, sub_max=9, stop="empty_row", prefixes=told, unique=True
        )
        assert found["row_ids"] == expected.rows
        assert (found["steps"], found["truncated"]) == (expected.steps, expected.truncated)
        left_out += len(found["repeated"])
        in_circles += expected.truncated is None and [0, 1] not in expected.all_rows
    assert left_out > 8 and in_circles > 1


# Sequential answers.


@pytest.mark.parametrize(
    "method, separator, why",
    [
        ("sequential", " ; ", None),
        ("none", " ; ", "pipejax did not train these weights"),
        ("sequential", " small old ", "data.separator ' small old ' is not a single token of this tokenizer"),
        ("sequential", " ", "data.separator ' ' is not a single token of this tokenizer"),
    ],
)
def test_separator_of_one_token_ends_repetitive_answers(method, separator, why, tokenizer, caplog) -> None:
    config = Config(
        model=MODEL,
        data=DataConfig(separator=separator),
        train=TrainConfig(method=method),
        decode=DecodeConfig(unique_rows=True),
    )
    of = Generator(config, oracle.random_params(MODEL, np.random.default_rng(4)), tokenizer)
    strategy: Any = of.make_strategy("sequential")
    lines = [line for line in caplog.messages if line.startswith("decode.unique_rows")]
    if why is None:
        assert (tokenizer.piece(strategy.separator).strip("\u2581 "), lines) == (";", [])
    else:
        assert strategy.separator is None
        assert lines == [f"decode.unique_rows: repeated rows are left out, but do not end an answer: {why}"]


def test_separator_may_be_white_space_other_than_a_space() -> None:
    """ByT5's token of a byte is the byte plus 3; a space by itself never separates rows."""
    spells, ids = Tokenizer(transformers.ByT5Tokenizer()), methods.Ids.of(MODEL)
    for separator, token in (("\n", 13), ("\t", 12), (";", 62), (" ", None), ("\n\n", None)):
        method: Any = methods.make("sequential", Config(data=DataConfig(separator=separator)))
        strategy, why = method.end_repetitions(method.strategy(ids), spells)
        assert (strategy.separator, bool(why)) == (token, token is None)


def first_repetition(tokens: list[int], separator: int) -> int | None:
    """The number of tokens up to the separator after two consecutive rows that both equal rows before them."""
    rows: list[list[int]] = [[]]
    was_repeated = False
    for number, token in enumerate(tokens, 1):
        if token != separator:
            rows[-1].append(token)
            continue
        is_repeated = bool(rows[-1]) and rows[-1] in rows[:-1]
        if is_repeated and was_repeated:
            return number
        was_repeated = is_repeated
        rows.append([])
    return None


def test_first_repetition_equals_plain_python() -> None:
    """In answers of two to four different tokens, of which several are new since the last call."""
    rng, found, some = np.random.default_rng(0), jax.jit(repeated_parts.find_end, static_argnums=3), 0
    for _ in range(300):
        tokens = rng.integers(3, 3 + rng.integers(2, 5), (4, 24)).astype(np.int32)
        after = rng.integers(0, 25, 4)
        wholes = [first_repetition(line[:n].tolist(), 3) for line, n in zip(tokens, after, strict=True)]
        before = [int(rng.integers(0, whole or n + 1)) for whole, n in zip(wholes, after, strict=True)]
        ends = found(tokens[:, None], np.asarray(before, np.int32)[:, None], after.astype(np.int32)[:, None], 3)
        assert ends[:, 0].tolist() == [NEVER if whole is None else whole for whole in wholes]
        some += sum(whole is not None for whole in wholes)
    assert some > 50


@pytest.mark.parametrize(
    "drafter",
    [None, pytest.param(Jacobi(), marks=pytest.mark.slow), FromModel(least=0.0)],
    ids=lambda x: type(x).__name__,
)
def test_sequential_answers_of_random_models_end_at_the_first_repetition(drafter: Any) -> None:
    """The token 3 is the separator; with drafts several rows may be repeated in a single call."""
    strategy: Any = Sequential(24, separator=3)
    strategy = strategy if drafter is None else with_drafts(strategy, Drafts(drafter, 6))
    small = FEW_WORDS if isinstance(drafter, FromModel) else None
    program, plain = compiled(FEW_WORDS, strategy, small=small), compiled(FEW_WORDS, Sequential(24))
    repeated = 0
    for seed in range(40):
        rng = np.random.default_rng([seed, 5])
        params, texts = oracle.random_params(FEW_WORDS, rng), sources(rng, 4, FEW_WORDS.vocab_size)
        params["shared"]["embedding"][3] *= 2
        other = (params,) if small else ()
        found, whole = (
            jax.device_get(x) for x in (program(params, *padded(texts), *other), plain(params, *padded(texts)))
        )
        for b in range(len(texts)):
            (tokens,) = rows_of(whole, b)
            expected = tokens, int(whole.steps[b]), TRUNCATIONS[whole.truncated[b]]
            if (count := first_repetition(tokens, 3)) is not None:
                expected, repeated = (tokens[: count - 1], count, None), repeated + 1
            assert (*rows_of(found, b), int(found.steps[b]), TRUNCATIONS[found.truncated[b]]) == expected
    assert repeated > 8


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["none", pytest.param("jacobi", marks=pytest.mark.long)])
def test_streams_and_running_batches_of_sequential_answers_end_at_the_first_repetition(draft: str, tokenizer) -> None:
    """Offline decoding, streams and an engine end an answer at the same token; the token 3 is the separator."""
    params = oracle.random_params(MORE_WORDS, np.random.default_rng(8), eos_scale=0.6)
    params["shared"]["embedding"][3] *= 2
    made: Any = Generator(generator(model=MORE_WORDS, draft=draft).config, params, tokenizer)
    rng = np.random.default_rng(0)
    given = [Source(i, [*rng.integers(3, 12, rng.integers(1, 15)).tolist(), 1]) for i in range(12)]
    asked = [{"source_ids": one.content, "id": one.id} for one in given]
    whole = made.decode(asked, method="sequential", unique_rows=False, draft="none")
    expected = made.decode(asked, method="sequential", batch_size=4)
    repeated = 0
    for free, record in zip(whole, expected, strict=True):
        (tokens,), steps, truncated = free["row_ids"], free["steps"], free["truncated"]
        if (count := first_repetition(tokens, 3)) is not None:
            tokens, steps, truncated, repeated = tokens[: count - 1], count, None, repeated + 1
        assert (record["row_ids"], record["steps"], record["truncated"]) == ([tokens], steps, truncated)
        assert record["log_probs"][0] == pytest.approx(free["log_probs"][0][: len(tokens)], abs=1e-3)
    assert 2 < repeated < len(given)

    for source, wanted in zip(given, expected, strict=True):
        *events, record = made.stream_source(source, "sequential")
        same({**record, "calls": 0}, {**wanted, "calls": 0})
        assert [[event.token for event in events if not event.done]] == wanted["row_ids"]
        assert [event.done for event in events[-1:]] == [wanted["truncated"] is None]
        assert events[-1].text == wanted["text"]
    engine = Engine(made, places=3, queue=99)
    requests = [Request(source, "sequential", max_tokens=most) for most in (None, 9) for source in given]
    with engine.scheduler.waiting.lock:  # the requests arrive together: one batch is compiled
        submitted = [engine.submit(request) for request in requests]
    answers: Any = [list(answer.events()) for answer in submitted]
    engine.close(drain=True, seconds=60)
    for wanted, (*events, record), request in zip(expected * 2, answers, requests, strict=True):
        (tokens,) = wanted["row_ids"]
        assert [[event.token for event in events]] == record["row_ids"] == [tokens[: request.max_tokens]]
        if request.max_tokens is None or request.max_tokens > len(tokens):
            same({**record, "calls": 0}, {**wanted, "calls": 0})
        else:
            assert (record["truncated"], record["steps"]) == ("max_tokens", request.max_tokens)
