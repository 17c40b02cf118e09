"""Drafted decoding writes the tokens of greedy decoding, in the calls of the wavefront rule."""

import dataclasses
import itertools
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import checkpoint
from pipejax import config as config_lib
from pipejax.apps.picture import record_picture as picture
from pipejax.config import DRAFTS, Config, DecodeConfig, GridConfig, TrainConfig
from pipejax.decoding import (
    TRUNCATIONS,
    Drafts,
    Pipelined,
    Sequential,
    Sizes,
    SourceIds,
    draft_lengths,
    drafters,
    list_calls,
    with_drafts,
)
from pipejax.decoding.drafters import FromModel, FromSource, Jacobi
from pipejax.decoding.gathering import NOWHERE, Filled, hide
from pipejax.inference import answers
from pipejax.inference.backends import XLA, call_costs
from pipejax.inference.decoding_options import forced_of
from pipejax.inference.generator import Generator
from pipejax.inference.programs import Programs
from pipejax.inference.report import Report
from pipejax.kernels import cpu_kernel
from pipejax.kernels.backends import OwnKernel
from pipejax.methods import RowPrefixes
from pipejax.model.t5 import Memory
from pipejax.offline.records import as_line
from pipejax.system.errors import UserError
from support import oracle, scripted, wavefront
from support.batches import padded, rows_of, sources
from support.drafter_table import GUESSED, Table
from support.one_program import compiled
from support.strategies import make
from support.tiny import FEW_WORDS as TINY
from support.tiny import MODEL

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.mark.long
def test_batches_of_drafts_compile_with_the_flags_of_users():
    """The flags for XLA in this suite hide a crash of LLVM on AVX-512 with a similar program."""
    program = """
import jax
import numpy as np
from pipejax.config import Config, DecodeConfig, GridConfig, T5Config, TrainConfig
from pipejax.inference.generator import Generator

sizes = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_heads=2, num_layers=1, num_decoder_layers=1)
grid, train = GridConfig(delay=1, time_max=16, sub_max=5), TrainConfig(method="pipelined")
config = Config(model=sizes, grid=grid, train=train, decode=DecodeConfig(draft="source", draft_tokens=4))
shapes = jax.eval_shape(sizes.init_params, jax.random.key(0))  # drawing them is more to compile
generator = Generator(config, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes), None)
print(len(generator.decode([[5, 6, 7, 8, 9, 1]] * 8, batch_size=8)))
"""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False
    )
    assert (found.returncode, found.stdout) == (0, "8\n"), found.stderr


@pytest.mark.parametrize(
    "delay, time_max, sub_max, literal, most, unique",
    [
        (1, 15, 5, False, 4, False),
        (2, 15, 5, True, 4, False),
        (1, 14, 1, False, 4, False),
        (0, 12, 5, False, 4, False),
        (1, 15, 8, False, 4, True),
        (2, 20, 7, False, 5, True),
        pytest.param(3, 20, 7, False, 3, True, marks=pytest.mark.slow),
        pytest.param(2, 15, 7, True, 4, True, marks=pytest.mark.slow),
        pytest.param(1, 9, 3, True, 3, False, marks=pytest.mark.slow),
        pytest.param(2, 13, 6, False, 2, False, marks=pytest.mark.slow),
        pytest.param(3, 10, 4, False, 5, False, marks=pytest.mark.slow),
        pytest.param(3, 16, 4, True, 1, False, marks=pytest.mark.slow),
    ],
)
def test_calls_and_accepted_tokens_equal_the_wavefront(delay, time_max, sub_max, literal, most, unique):
    """The model is perfect, and some guesses are wrong; bounds truncate answers in the middle of a draft.

    With unique rows answers repeat rows, and drafts may have begun rows that then do not begin.
    """
    rng = np.random.default_rng([delay, time_max, sub_max, most])
    answers, tables = [], []
    for _ in range(48):
        answer = [rng.integers(2, 9, rng.integers(1, 9)).tolist() for _ in range(rng.integers(0, 7))]
        if unique:
            answer = [answer[i] for i in rng.integers(0, min(len(answer), 4), 12)] if answer else []
        wrong = rng.random() * 0.6
        table = [[*row, 1, *[3] * GUESSED][:GUESSED] for row in [*answer, *[[]] * sub_max][:sub_max]]
        tables.append([[token if rng.random() > wrong else 9 for token in row] for row in table])
        answers.append(answer)
    inner = Pipelined(delay=delay, time_max=time_max, sub_max=sub_max, literal=literal, unique=unique)
    strategy = with_drafts(inner, Drafts(Table(), most, trace=True))
    saved, in_vain, in_circles = 0, 0, 0
    for answer, table in zip(answers, tables, strict=True):
        found = scripted.decode(strategy, [[token for row in table for token in row]], [answer], width=10)
        expected = oracle.algorithm1(
            oracle.scripted_next_tokens(answer),
            delay=delay,
            time_max=time_max,
            sub_max=sub_max,
            stop="literal" if literal else "empty_row",
            unique=unique,
        )

        def drafts(i, length, table=table):
            return table[i][length : length + most]

        written = [row[1 : -1 if row[-1] == 1 else None] for row in expected.all_rows]
        assert [row for row in rows_of(found, 0) if row] == [row for row in written if row]
        assert found.steps[0] == expected.steps
        assert TRUNCATIONS[found.truncated[0]] == expected.truncated
        calls = wavefront.trace(
            expected.all_rows, drafts, delay=delay, time_max=time_max, sub_max=sub_max, literal=literal, unique=unique
        )
        assert found.calls[0] == len(calls)
        assert list_calls(found.trace, 0, len(calls)) == calls
        saved += expected.calls - len(calls)
        in_vain += sum(not written for call in calls for _, written, _, _ in call)
        in_circles += expected.truncated is None and expected.all_rows[-1] != [0, 1]
    assert saved > 48
    assert in_circles > 4 or literal or not unique
    assert in_vain > 4 or sub_max == 1 or delay == 0  # in these cases all rows begin


def test_time_continues_after_the_last_row_that_fits():
    """By hand: rows start at 0 and 4 and end at 2 and 6; the third row would start at 8, and time ends at 7."""
    inner, answer = Pipelined(delay=4, time_max=7, sub_max=4), [[2], [3]]
    table = [[*row, 1, *[3] * GUESSED][:GUESSED] for row in [*answer, [], []]]
    found = scripted.decode(
        with_drafts(inner, Drafts(Table(), 2)), [[x for row in table for x in row]], [answer], width=8
    )
    plain = oracle.algorithm1(oracle.scripted_next_tokens(answer), delay=4, time_max=7, sub_max=4, stop="empty_row")
    assert found.steps[0] == plain.steps == 7
    assert [row for row in rows_of(found, 0) if row] == answer


def test_unfinished_answer_counts_only_finished_calls():
    strategy = with_drafts(Pipelined(delay=1, time_max=6, sub_max=2), Drafts(Table(), 1))
    source = SourceIds(np.full((1, 2 * GUESSED), 3, np.int32), np.zeros(1, np.int32))
    state = jax.jit(partial(strategy.init, 1))(source)
    ask, advance = jax.jit(strategy.query), jax.jit(strategy.advance)
    for made in range(3):
        state, query = ask(state)
        assert not state.done[0] and strategy.result(state).calls.tolist() == [made]
        state = advance(state, jnp.full_like(query.tokens, 4))
    assert strategy.result(state).calls.tolist() == [3]


def test_trace_belongs_to_its_example_and_is_optional():
    """In a batch each example has its trace; without traces the loop carries no additional state."""
    answers = [[[2, 3, 4], [5]], [[6] * 5, [7, 8], [2]], []]
    tables = [[[*row, 1, *[3] * GUESSED][:GUESSED] for row in [*answer, [], [], [], []][:4]] for answer in answers]
    tables[1][0][2] = 9
    inner = Pipelined(delay=2, time_max=12, sub_max=4)
    strategy = with_drafts(inner, Drafts(Table(), 3, trace=True))
    sources_ = [[token for row in table for token in row] for table in tables]
    found = scripted.decode(strategy, sources_, answers, width=8)
    for b, (answer, table) in enumerate(zip(answers, tables, strict=True)):
        rows = oracle.algorithm1(
            oracle.scripted_next_tokens(answer), delay=2, time_max=12, sub_max=4, stop="empty_row"
        ).all_rows
        calls = wavefront.trace(rows, lambda i, n, table=table: table[i][n : n + 3], delay=2, time_max=12, sub_max=4)
        assert list_calls(found.trace, b, int(found.calls[b])) == calls
    # By hand: the guess for the first row's third token is wrong; then all are correct up to the eos, in row 2 too.
    assert list_calls(found.trace, 1, 2) == [
        [(0, 3, 2, [6, 6, 9]), (1, 1, 0, [7])],
        [(0, 3, 3, [6, 6, 1]), (1, 2, 2, [8, 1]), (2, 2, 2, [2, 1]), (3, 1, 1, [1])],
    ]
    untraced = with_drafts(inner, Drafts(Table(), 3))
    state = jax.eval_shape(
        partial(untraced.init, 3), SourceIds(np.zeros((3, 4 * GUESSED), np.int32), np.zeros(3, np.int32))
    )
    assert state.drafts.trace is None
    same = scripted.decode(untraced, sources_, answers, width=8)
    assert same.trace is None
    assert_equal(same, found, 3)
    assert same.calls.tolist() == found.calls.tolist()


@pytest.mark.parametrize("name, beams", [("pipelined", 1), ("sequential", 1), ("sequential", 2)])
def test_a_trace_without_a_drafter_is_refused(name, beams):
    with pytest.raises(UserError, match=r"^decode\.trace: found True with decode\.draft = none; expected a drafter"):
        make(name, GridConfig(), DecodeConfig(beams=beams, trace=True), bos=0, eos=1)


MODELS = 46  # random models for each setting: more than 500 for each drafter in total
NAMES = ((2, 3), (4,), (2, 5, 6))  # the first tokens of rows
# delay, time_max, sub_max, literal, batch, names; without a delay decoding is sequential, and time_max is max_length
SETTINGS = [
    (1, 12, 5, False, 7, ()),
    (1, 12, 5, True, 4, ()),
    (2, 15, 6, False, 5, ()),
    (2, 9, 4, True, 3, ()),
    (3, 14, 4, False, 8, ()),
    (3, 16, 20, True, 1, ()),
    (1, 6, 20, False, 3, ()),
    (1, 20, 2, False, 4, ()),
    (1, 1, 1, False, 2, ()),
    (None, 14, 1, False, 6, ()),
    (None, 30, 1, False, 1, ()),
    (0, 12, 3, False, 5, NAMES),
    (0, 9, 3, True, 1, NAMES),
    (1, 12, 5, True, 3, NAMES),
    (2, 14, 4, False, 4, NAMES),
    (3, 16, 3, False, 6, NAMES),
]


def strategy_of(delay, time_max, sub_max, literal):
    if delay is None:
        return Sequential(max_length=time_max)
    return Pipelined(delay=delay, time_max=time_max, sub_max=sub_max, literal=literal)


def assert_equal(found, expected, batch):
    for b in range(batch):
        assert rows_of(found, b)[: len(expected.lengths[b])] == rows_of(expected, b)
    assert found.steps.tolist() == expected.steps.tolist()
    assert found.truncated.tolist() == expected.truncated.tolist()


DRAFTERS = (FromSource(), Jacobi(), FromModel(least=0.2))


def marks(setting, drafter):
    """The marks of slow cases.

    The quick tests of each drafter are below, in `wavefront` and in `test_unique_rows.py`.
    """
    return pytest.mark.slow if (setting, drafter) == (SETTINGS[0], FromSource()) else pytest.mark.long


@pytest.mark.parametrize(
    "numbers, dtype, drafted",
    [
        (10**6, np.float32, "00 11 10"),
        (10**8, np.float32, "11 21 10"),
        (10**8, jnp.bfloat16, "10 21 10"),
        (10**8, np.int8, "10 21 10"),
    ],
    ids=["cached", "float32", "bfloat16", "int8"],
)
def test_calls_that_read_longer_draft_more(numbers, dtype, drafted):
    """Three tokens are each correct in 30 or 12 of 100 cases; expected by hand: (1 + correct) / (reading + columns)."""
    weights = np.broadcast_to(np.zeros((), dtype), numbers)
    none = jnp.zeros((1, 1), jnp.int32)
    narrow = next(level for level in cpu_kernel.LEVELS if level.name == "vnni")
    for backend, each in zip((XLA, OwnKernel(level=narrow), OwnKernel()), drafted.split(), strict=True):
        costs = call_costs(weights, backend)
        drafted = with_drafts(Sequential(20), Drafts(FromSource(), 3))
        strategy = drafted.tuned_for("cpu", costs=costs, skips_fillers=backend.skips_fillers)
        for odds, tokens in zip((0.3, 0.12), each, strict=True):
            assert strategy.drafts.choose_lengths(
                strategy, none + 3, none + jnp.float32(odds), none, jnp.int32(1)
            ) == int(tokens)


@pytest.mark.parametrize(
    "setting, drafter",
    [pytest.param(setting, drafter, marks=marks(setting, drafter)) for setting in SETTINGS for drafter in DRAFTERS],
    ids=lambda x: "-".join([*map(str, x[:-1]), *["names"] * bool(x[-1])]) if isinstance(x, tuple) else type(x).__name__,
)
def test_drafted_answers_equal_undrafted_answers(setting, drafter):
    *shape, batch, names = setting
    plain = strategy_of(*shape)
    forced = forced_of(RowPrefixes(names), plain)
    rounded = batch % 2 == 0
    drafts = Drafts(drafter, 4, query_counts=(batch + 2,), fixed=3.0 if rounded else 10.0, rounded=rounded)
    drafted = with_drafts(plain, drafts)
    without = compiled(TINY, plain, forced=forced)
    sizes = Sizes.fit(
        drafted, batch, query_counts=drafted.queries, slots=tuple(sorted({batch + 3, drafted.most_queries + 3}))
    )
    drafts_itself = isinstance(drafter, FromModel)
    program = compiled(TINY, drafted, sizes, small=TINY if drafts_itself else None, forced=forced)
    fewer = 0
    for seed in range(MODELS):
        rng = np.random.default_rng([seed, *(x or 0 for x in shape)])
        params, texts = oracle.random_params(TINY, rng), sources(rng, batch, TINY.vocab_size)
        source, length = padded(texts)
        expected = jax.device_get(without(params, source, length))
        small = (resembling(params, rng, seed % 4 / 4),) if drafts_itself else ()
        found = jax.device_get(program(params, source, length, *small))
        assert_equal(found, expected, batch)
        calls = plain.calls(expected)
        assert (found.calls <= calls).all()
        fewer += (calls - found.calls).sum()
    assert fewer > 0 or drafted.rows > drafted.time_max // 2  # if decoding ends at time_max, drafts save no calls


def resembling(params, rng, noise):
    """Parameters with noise relative to each parameter's size; with much noise they are another model's."""
    return jax.tree.map(lambda x: (x + noise * x.std() * rng.standard_normal(x.shape)).astype(np.float32), params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "delay, time_max, sub_max, literal",
    [
        (None, 30, 1, False),
        pytest.param(1, 14, 5, False, marks=pytest.mark.slow),
        pytest.param(2, 12, 4, True, marks=pytest.mark.long),
        pytest.param(3, 16, 4, False, marks=pytest.mark.long),
    ],
)
def test_a_t5_drafts_for_itself(delay, time_max, sub_max, literal):
    """Its drafts are always correct, so calls equal the wavefront with perfect guesses, also in batches."""
    most, batch = 4, 3
    drafted = with_drafts(strategy_of(delay, time_max, sub_max, literal), Drafts(FromModel(least=0.0), most))
    program = compiled(TINY, drafted, Sizes.fit(drafted, batch), small=TINY)
    for seed in range(8 if delay else 3):
        rng = np.random.default_rng([seed, time_max])
        params, texts = oracle.random_params(TINY, rng), sources(rng, batch, TINY.vocab_size)
        found = jax.device_get(program(params, *padded(texts), params))
        for b, text in enumerate(texts):
            expected = oracle.algorithm1(
                oracle.grid_next_tokens(params, TINY, oracle.encode(params, TINY, text), delay or 1),
                delay=delay or 1,
                time_max=time_max,
                sub_max=sub_max,
                stop="literal" if literal else "empty_row",
            )
            rows = expected.all_rows
            calls = wavefront.calls(
                rows,
                lambda i, length, rows=rows: rows[i][1 + length : 1 + length + most],
                delay=delay or 1,
                time_max=time_max,
                literal=literal,
            )
            assert [row for row in rows_of(found, b) if row] == expected.rows
            assert found.calls[b] == calls


def test_beams_with_a_draft_are_refused():
    beams = DecodeConfig(beams=2, draft="source")
    line = r"^decode\.draft: found source with decode\.beams = 2, which does not verify drafts; expected none$"
    with pytest.raises(UserError, match=line):
        make("sequential", GridConfig(), beams, bos=0, eos=1)


def test_t5s_that_cannot_draft_are_refused(tmp_path):
    """The refusal is one line, before any compilation."""
    config = Config(model=MODEL, grid=GridConfig(delay=2), train=TrainConfig(method="pipelined"))
    params = oracle.random_params(MODEL, np.random.default_rng(5))

    def opened(name="small", **changes):
        other = dataclasses.replace(config, **changes)
        if name == "small" and other.model is not None:
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            small = oracle.random_params(other.model, np.random.default_rng(6))
            checkpoint.save_params(tmp_path / name, other, small)
        decode = DecodeConfig(draft="model", draft_checkpoint=str(tmp_path / name))
        return Generator(dataclasses.replace(config, decode=decode), params, None)

    where = re.escape(f"decode.draft_checkpoint: {tmp_path / 'small'}: ")
    with pytest.raises(UserError, match=rf"^{where}found a T5 with vocab_size = 65; expected 64"):
        opened(model=dataclasses.replace(MODEL, vocab_size=65))
    with pytest.raises(UserError, match=r"^decode\.draft_checkpoint: .*absent: no such checkpoint directory"):
        opened("absent")
    with pytest.raises(UserError, match=rf"^{where}found a T5 trained with grid\.delay = 1; expected 2$"):
        opened(grid=GridConfig(delay=1)).decode([[5, 1]])
    with pytest.raises(UserError, match=rf"^{where}found a T5 trained for sequential decoding; expected pipelined$"):
        opened(train=TrainConfig(method="sequential")).decode([[5, 1]])
    assert opened(train=TrainConfig(method="none"), grid=GridConfig(delay=1)).make_strategy("pipelined")
    with pytest.raises(
        UserError, match=r"decode\.draft_checkpoint: found nothing with decode\.draft = model; expected"
    ):
        config_lib.override(Config(), ["decode.draft=model"])
    with pytest.raises(UserError, match=r"^decode\.draft: found the drafter FromModel, .*; expected model"):
        Generator(config, params, None).decode([[5, 1]], drafter=FromModel())


def test_names_of_drafters_are_checked():
    assert make("sequential", GridConfig(), DecodeConfig(draft="source"), bos=0, eos=1).drafts is not None
    with pytest.raises(UserError, match=r"decode\.draft: found 'x'; expected one of"):
        config_lib.override(Config(), ["decode.draft=x"])
    for name in DRAFTS[1:]:
        assert drafters.make(name).odds


def test_the_drafter_of_the_page():
    """It has a few lines, and saves calls for rows with equal beginnings, as on the page."""
    page = (Path(__file__).parents[1] / "docs" / "drafting.md").read_text()
    code = re.search(r"^```python\n(import dataclasses\n.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    names = {}
    exec(compile(code, "docs/drafting.md", "exec"), names)
    strategy = with_drafts(Pipelined(delay=3, time_max=20, sub_max=4), Drafts(names["AsAbove"](), 3))
    alike, other = [[5, 6, 7, 8]] * 3, [[5, 6, 7], [8, 3, 4], [7]]
    found = scripted.decode(strategy, [[2], [3]], [alike, other])
    assert [rows_of(found, b)[:3] for b in range(2)] == [alike, other]
    assert found.steps.tolist() == [11, 10]
    assert found.calls[0] < 9 and found.calls[1] <= 10


@pytest.mark.parametrize(
    "strategy, draft, rows",
    [
        pytest.param("pipelined", "source", 7, marks=pytest.mark.long),
        pytest.param("sequential", "source", 7, marks=pytest.mark.long),
        pytest.param("pipelined", "jacobi", 7, marks=pytest.mark.long),
        pytest.param("sequential", "jacobi", 7, marks=pytest.mark.long),
        pytest.param("pipelined", "model", 7, marks=pytest.mark.long),
        pytest.param("sequential", "model", 7, marks=pytest.mark.long),
        pytest.param("pipelined", "model", 3, marks=pytest.mark.slow),  # there are fewer sizes to compile
    ],
)
def test_records_equal_records_without_drafts(strategy, draft, rows, tmp_path):
    """Sizes are the usual ones, sources have many lengths, on several devices; programs are compiled ahead, too."""
    config = Config(
        model=MODEL,
        grid=GridConfig(delay=2, time_max=30 if rows == 7 else 12, sub_max=rows),
        train=TrainConfig(method=strategy),
        decode=DecodeConfig(max_length=40, batch_size=4 if rows == 7 else 2),
    )
    params = oracle.random_params(MODEL, np.random.default_rng(5))
    rng = np.random.default_rng(6)
    # One of two sizes, or all sizes.
    lengths = rng.integers(1, 60, 12) if rows == 7 else rng.choice([3, 14, 33, 46], 12)
    texts = [rng.integers(2, 9, length).tolist() for length in lengths]
    plain = Generator(config, params, None)
    expected = plain.decode(texts)
    small = dataclasses.replace(MODEL, d_model=12, num_heads=3, num_decoder_layers=2)
    drafts = oracle.random_params(small, np.random.default_rng(7))
    checkpoint.save_params(tmp_path / "small", dataclasses.replace(config, model=small), drafts)
    own = {"draft": draft, "draft_tokens": 5 if rows == 7 else 2, "draft_checkpoint": str(tmp_path / "small")}
    drafting = dataclasses.replace(config, decode=dataclasses.replace(config.decode, **own))
    generator = Generator(drafting, params, None, devices=jax.local_devices()[:2])
    found = generator.decode(texts)
    assert [{**record, "calls": 0} for record in found] == [{**record, "calls": 0} for record in expected]
    assert all(record["calls"] <= one["calls"] for record, one in zip(found, expected, strict=True))
    if draft != "model":  # a drafter without a checkpoint
        given = plain.decode(texts[:3], drafter=drafters.make(draft))
        assert [{**record, "calls": 0} for record in given] == [{**record, "calls": 0} for record in expected[:3]]
    one = Generator(drafting, params, None)
    assert one.warm_up([48], batch_sizes=[1]).shapes > 1
    report = Report()
    sources_ = [one.source(text, "", i) for i, text in enumerate(texts) if 32 < len(text) <= 48]
    assert list(one.stream(sources_, method=None, batch_size=1, report=report))
    assert report.shapes == 0


@pytest.mark.parametrize(
    "strategy", [pytest.param("pipelined", marks=pytest.mark.slow), pytest.param("sequential", marks=pytest.mark.long)]
)
def test_records_hold_the_trace(strategy, tokenizer, tmp_path, monkeypatch):
    """The trace adds up to the answer, and the page can be drawn from it, even if tokens are no text."""
    config = Config(
        model=MODEL,
        grid=GridConfig(delay=2, time_max=20, sub_max=5),
        train=TrainConfig(method=strategy),
        decode=DecodeConfig(max_length=20, draft_tokens=3, trace=True),
    )
    rng = np.random.default_rng(6)
    texts = [rng.integers(2, 9, 12).tolist() for _ in range(4)]
    generator = Generator(config, oracle.random_params(MODEL, np.random.default_rng(5)), tokenizer)
    found = generator.decode(texts, drafter=Jacobi((0.99,)), batch_size=1)
    if strategy == "pipelined":
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "decode", lambda ids: " " if ids == found[0]["row_ids"][0] else "text")
            (blank,) = generator.decode(texts[:1], drafter=Jacobi((0.99,)), batch_size=1)
        assert blank["row_ids"] == found[0]["row_ids"] and not blank["rows"][0].strip()
        assert blank["text"] == config.data.separator.join(row for row in blank["rows"] if row == "text")
        found.append({**blank, "id": "blank"})
    drafted = 0
    for record in found:
        assert len(record["trace"]) == record["calls"]
        rows = [[one for call in record["trace"] for one in call if one.row == i] for i in range(5)]
        written = [sum(one.written for one in row) for row in rows]
        cut = record["truncated"] is not None
        for row, ids in enumerate(record["row_ids"]):
            assert written[row] in (len(ids) + 1, len(ids) + 1 - cut)
            front = 0
            for one in rows[row]:
                assert [*ids, 1][front : front + one.accepted] == one.drafted[: one.accepted]
                front += one.written
                drafted += len(one.drafted)
        for i in {
            *itertools.chain(*record["row_ids"]),
            *(i for call in record["trace"] for one in call for i in one.drafted),
        }:
            assert record["pieces"][str(i)] == tokenizer.piece(i)
    assert drafted > 20
    lines = tmp_path / "records.jsonl"
    lines.write_text("".join(as_line(record) for record in found))
    if strategy == "pipelined":
        for record in found:
            page = tmp_path / f"{record['id']}.html"
            assert picture.main([str(lines), "--id", str(record["id"]), "--delay", "2", "--output", str(page)]) == 0
            assert f"{len(record['trace'])} decoder calls for {record['steps']} time-steps" in page.read_text()


@pytest.mark.slow
def test_a_trace_numbers_rows_as_the_record_does(monkeypatch):
    """With the literal stop a row without a token may precede other rows; the record does not contain it."""
    config = Config(
        model=TINY,
        grid=GridConfig(time_max=16, sub_max=6, stop="literal"),
        train=TrainConfig(method="pipelined"),
        decode=DecodeConfig(draft="source", trace=True),
    )
    generator = Generator(config, oracle.random_params(TINY, np.random.default_rng(3)), None)
    rng = np.random.default_rng(3)
    given = [rng.integers(2, 9, rng.integers(2, 9)).tolist() for _ in range(16)]
    of_grid, record_of = [], answers.record_of

    def noted(source, strategy, found, place, **settings):
        of_grid.append(np.trim_zeros(found.lengths[place], "b"))
        return record_of(source, strategy, found, place, **settings)

    monkeypatch.setattr("pipejax.inference.generator.record_of", noted)
    for record in generator.decode(given, batch_size=1):
        written = [0] * 7
        for one in itertools.chain(*record["trace"]):
            written[one.row] += one.written
        lengths = [len(row) for row in record["row_ids"]]
        assert all(n in (length, length + 1) for n, length in zip(written, lengths, strict=False))
    assert any(0 in lengths for lengths in of_grid)


@pytest.mark.parametrize("is_drafted", [False, True])
def test_source_ids_are_padded_to_the_memory_for_drafters_only(is_drafted):
    programs = Programs(TINY, jnp.dtype("float32"), devices=jax.local_devices()[:1], backend=XLA)
    programs.set_params(oracle.random_params(TINY, np.random.default_rng(0)))
    strategy = Pipelined(1, 9, 3)
    if is_drafted:
        strategy = with_drafts(strategy, Drafts(FromSource(), 3))
    source, lengths = np.asarray([[[5, 6, 1], [7, 1, 0]]], np.int32), np.asarray([[3, 2]], np.int32)

    def encode(self, name, *given):
        return Memory((), (), np.arange(8) < lengths[..., None])

    _, _, read = programs._encode(encode, strategy, source, lengths, None, Report())
    if not is_drafted:
        assert read is None
        return
    np.testing.assert_array_equal(read.ids, [[[5, 6, 1, 0, 0, 0, 0, 0], [7, 1, 0, 0, 0, 0, 0, 0]]])
    np.testing.assert_array_equal(read.length, lengths)


@pytest.mark.parametrize("apart", [False, True])
def test_rejected_queries_are_hidden_from_later_queries(apart: bool) -> None:
    """Compared with plain lists: slots of rejected queries get the row NOWHERE, and nothing else changes."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        live, start = rng.random((3, 4)) < 0.6, rng.integers(0, 9, 3 if apart else 1)
        rejected, (row, time) = live & (rng.random((3, 4)) < 0.5), rng.integers(0, 9, (2, 3, 12))
        expected = row.copy()
        for b in range(3):
            slot = start[b if apart else 0]
            for s in np.flatnonzero(live[b]):  # live queries are written one after the other
                expected[b, slot] = NOWHERE if rejected[b, s] else expected[b, slot]
                slot += 1
        before = Filled(*(jnp.asarray(x, jnp.int32) for x in (row, time)))
        found = hide(jnp.asarray(rejected), jnp.asarray(live), before, jnp.asarray(start, jnp.int32))
        np.testing.assert_array_equal(found.row, expected)
        np.testing.assert_array_equal(found.time, time)


def test_draft_lengths_generate_the_most_tokens_for_the_cost() -> None:
    """Compared with plain Python that tries every number of the best drafts; a call costs the columns that it feeds."""
    rng, choose = np.random.default_rng(0), jax.jit(draft_lengths.choose_lengths, static_argnames=("most", "sizes"))
    for _ in range(400):
        count, odds, hangs = rng.integers(0, 9, (3, 5)), rng.random((3, 5), np.float32), rng.random((3, 5)) < 0.3
        needed, fixed = int(rng.integers(1, 20)), float(rng.choice([0.5, 3.0, 7.0, 20.0, 60.0]))
        chances = [
            [float(p) ** (k + int(h)) for k in range(1, n + 1)]
            for n, p, h in zip(count.flat, odds.flat, hangs.flat, strict=True)
        ]

        def speed(drafted: list[float], needed: int = needed, fixed: float = fixed) -> float:
            return (needed + sum(drafted)) / (fixed + needed + len(drafted))

        ordered = sorted(itertools.chain(*chances), reverse=True)
        best = max(speed(ordered[:k]) for k in range(len(ordered) + 1))
        lengths = choose(count, odds, hangs, jnp.int32(needed), fixed=fixed, most=8, sizes=None).ravel().tolist()
        fed = [chance for row, n in zip(chances, lengths, strict=True) for chance in row[:n]]
        assert speed(fed) == pytest.approx(best, rel=1e-6)


def test_odds_are_the_decayed_rates_after_two_tokens_of_prior_knowledge() -> None:
    """By hand, for three rows with two degrees of trust; the newest token of the third row does not count."""

    @jax.jit
    def odds() -> list[jax.Array]:
        trust, none = jnp.asarray([[0, 1, 0]]), jnp.zeros((1, 3), jnp.int32)
        drafted, run, counts = (jnp.asarray([x]) for x in ([3, 2, 2], [1, 2, 0], [1, 2, -1]))
        records = [draft_lengths.TrackRecord.empty(1, 2)]
        records.append(records[0].add(trust, drafted=drafted, run=run, counts=counts))  # 1 of 2 and 2 of 2 were correct
        records.append(records[1].add(trust, drafted=none, run=none, counts=none))
        return [record.odds((0.5, 0.25), trust)[0, :2] for record in records]

    by_hand = [[0.5, 0.25], [(1 + 1) / (2 + 2), (0.5 + 2) / (2 + 2)], [1.9 / 3.8, (0.5 + 1.8) / 3.8]]
    np.testing.assert_allclose(odds(), by_hand, rtol=1e-6)
