"""Rows with given prefixes, one after the other or all at once, on all backends, against Algorithm 1."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import export as jax_export

from pipejax import checkpoint
from pipejax.apps.export.programs_as_files import export
from pipejax.apps.picture.record_picture import main as draw
from pipejax.apps.serving.answer import Request
from pipejax.apps.serving.engine import Engine
from pipejax.config import Config, DecodeConfig, GridConfig, T5Config, TrainConfig, override
from pipejax.data.encoding import encode_example
from pipejax.data.examples import Example
from pipejax.inference.backends import XLA
from pipejax.inference.generator import Generator
from pipejax.inference.sources import Source
from pipejax.inference.streaming import RowEvent
from pipejax.kernels.backends import OwnKernel
from pipejax.methods import prefix_ids
from pipejax.offline.resume import settings_of
from pipejax.system.errors import UserError
from pipejax.training.loop import fit
from support import oracle, wavefront
from support.refusals import refuses
from support.tiny import MODEL, RUN_ON_ONE, change, metrics

pytestmark = pytest.mark.usefixtures("compiled_once")

SIZES = T5Config(
    vocab_size=48, d_model=32, d_kv=16, d_ff=48, num_heads=2, num_layers=1, num_decoder_layers=2, dropout_rate=0.0
)
NAMES = ("small red", "old", "the baker sang")  # the names are words of the embedded task's tokenizer
EOS = 1


def generator(sizes=SIZES, *, backend=XLA, tokenizer=None, seed=4, decode=None, **grid):
    config = Config(
        model=sizes,
        grid=GridConfig(**{"delay": 0, "time_max": 12, "sub_max": 6, **grid}),
        train=TrainConfig(method="pipelined"),
        decode=DecodeConfig(max_length=14, **(decode or {})),
    )
    params = oracle.random_params(sizes, np.random.default_rng(seed), eos_scale=1.3)
    return Generator(config, params, tokenizer, backend=backend), params


def drawn(made, params, ids, prefixes, count):
    """`count` rows with these beginnings, by Algorithm 1; with a delay the next row is forced to be empty."""
    config, grid = made.architecture, made.config.grid
    forced = [*prefixes, *[[]] * (count - len(prefixes)), *([[EOS]] if count < grid.sub_max and grid.delay else [])]
    return oracle.algorithm1(
        oracle.grid_next_tokens(params, config, oracle.encode(params, config, ids), grid.delay),
        delay=grid.delay,
        time_max=grid.time_max,
        sub_max=grid.sub_max if grid.delay else count,
        stop="empty_row",
        prefixes=forced,
    )


def contents(result, count):
    """The rows in a record with a requested number of rows."""
    return [[token for token in row[1:] if token != EOS] for row in result.all_rows[:count]]


def counted(expected, prefixes, grid):
    """The calls of Algorithm 1 if each call feeds all possible prefix tokens, by definition."""

    def known(row, length):
        return [*prefixes, *[[]] * grid.sub_max][row][length:]

    return wavefront.calls(expected.all_rows, known, delay=grid.delay, time_max=grid.time_max)


def asked(count, seed, *, all_begin):
    """Sources of several lengths, each with its own number of rows and prefixes; `all_begin`: one for each row."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        rows = int(rng.integers(1, 7))
        begin = rows if all_begin else rng.integers(0, rows + 1)
        prefixes = [rng.integers(2, 48, rng.integers(1, 4)).tolist() for _ in range(begin)]
        yield [*rng.integers(2, 48, rng.integers(1, 20)).tolist(), EOS], prefixes, rows


@pytest.mark.parametrize(
    "setting, native",
    [
        ({}, False),
        pytest.param({}, True, marks=pytest.mark.long),
        pytest.param({"delay": 2, "time_max": 20}, False, marks=pytest.mark.slow),
        pytest.param({"decode": {"draft": "source"}}, False, marks=pytest.mark.long),
        pytest.param({"decode": {"draft": "jacobi"}}, True, marks=pytest.mark.long),
    ],
)
def test_requested_rows_equal_algorithm_1(setting, native, request):
    """Examples of a batch have different rows and prefixes, with XLA and the CPU kernel, with drafts and without."""
    backend = OwnKernel("auto", request.getfixturevalue("kernel")) if native else XLA
    cut = saved = 0
    for seed in range(3):
        made, params = generator(backend=backend, seed=seed, **setting)
        given = list(asked(8, seed, all_begin=made.config.grid.delay == 0))
        records = made.decode(
            [{"source_ids": ids, "row_prefixes": prefixes, "max_rows": rows} for ids, prefixes, rows in given]
        )
        for record, (ids, prefixes, rows) in zip(records, given, strict=True):
            expected = drawn(made, params, ids, prefixes, rows)
            found = contents(expected, rows) if made.config.grid.delay == 0 else expected.rows
            assert record["row_ids"] == found
            assert record["steps"] == expected.steps
            calls = counted(expected, prefixes, made.config.grid)
            assert record["calls"] == calls if "decode" not in setting else record["calls"] <= calls
            saved += expected.calls - calls
            assert record["truncated"] == (expected.truncated if expected.truncated == "time_max" else None)
            cut += record["truncated"] is not None
            assert all(row[: len(p)] == p for row, p in zip(record["row_ids"], prefixes, strict=False))
    assert 0 < cut < 24 and saved > 24


def test_rows_that_start_together_without_prefixes_are_equal():
    """Therefore they are refused: for equal tokens attention gives equal results with any weights."""
    firsts = set()
    for seed in range(3):
        params = oracle.random_params(SIZES, np.random.default_rng(seed))
        chosen = oracle.grid_next_tokens(params, SIZES, oracle.encode(params, SIZES, [5, 9, 1]), 0)
        found = oracle.algorithm1(chosen, delay=0, time_max=8, sub_max=4, stop="empty_row")
        (first,) = {row[1] for row in found.all_rows}
        firsts.add(first)
    assert len(firsts) > 1


def test_number_of_prefixes_is_the_number_of_rows():
    made, params = generator()
    (record,) = made.decode([{"source_ids": [5, 9, 1], "row_prefixes": [[4, 5], [6]]}])
    assert record["row_ids"] == contents(drawn(made, params, [5, 9, 1], [[4, 5], [6]], 2), 2)


@pytest.mark.slow
def test_literal_stop_gives_the_requested_number_of_rows():
    """With the literal stop, rows start after an empty row too."""
    made, _ = generator(delay=1, time_max=20, stop="literal")
    rng = np.random.default_rng(1)
    texts = [[*rng.integers(2, 48, 9).tolist(), EOS] for _ in range(8)]
    assert max(len(record["row_ids"]) for record in made.decode(texts)) > 2
    told = made.decode([{"source_ids": ids, "max_rows": 2} for ids in texts])
    assert max(len(record["row_ids"]) for record in told) == 2


@pytest.fixture(scope="module")
def named(tokenizer):
    return generator(MODEL, tokenizer=tokenizer, row_names=NAMES, decode={"scores": True})


TEXTS = ["the baker slept .", "deliver small old red apples .", "the clerk walked past the river . deliver maps ."]


@pytest.mark.parametrize("delay", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_row_names_of_the_grid_begin_every_answer(named, tokenizer, delay):
    made, params = named if delay == 0 else generator(MODEL, tokenizer=tokenizer, row_names=NAMES, delay=1, sub_max=3)
    prefixes = [tokenizer.encode(name) for name in NAMES]
    for text, record in zip(TEXTS, made.decode(TEXTS), strict=True):
        expected = drawn(made, params, [*tokenizer.encode(text), EOS], prefixes, 3)
        assert record["row_ids"] == contents(expected, 3) and record["steps"] == expected.steps
        assert record["calls"] == counted(expected, prefixes, made.config.grid) < expected.calls
        assert all(row.startswith(name) for row, name in zip(record["rows"], NAMES, strict=True))
        assert record["truncated"] == expected.truncated
    own = {"source": TEXTS[0], "row_prefixes": ["new"], "max_rows": 1}  # fields of a record have precedence
    (record,) = made.decode([own])
    assert len(record["rows"]) == 1 and record["rows"][0].startswith("new")
    sequential = made.decode(TEXTS[:1], method="sequential")  # it has no rows
    assert not sequential[0]["text"].startswith(NAMES[0])


def test_score_covers_the_named_rows_only(tokenizer):
    """The grid could have more rows."""
    found = []
    for sub_max in (3, 6):
        made, _ = generator(MODEL, tokenizer=tokenizer, row_names=NAMES, sub_max=sub_max, decode={"scores": True})
        found.append(made.decode(TEXTS))
    for few, many in zip(*found, strict=True):
        assert few["row_ids"] == many["row_ids"]
        assert few["log_prob"] == pytest.approx(many["log_prob"], abs=1e-3)
        ends = sum(map(sum, few["log_probs"])) - few["log_prob"]  # minus the log-probabilities of the end tokens
        assert len(few["row_ids"]) == 3 and ends > (-1e-3 if few["truncated"] else 1e-3)


@pytest.mark.slow
def test_streams_and_engine_generate_named_rows(named):
    made, _ = named
    expected = made.decode(TEXTS, batch_size=1)
    engine = Engine(made, places=2, queue=9)
    answers = [
        engine.submit(Request(Source(i, made.ids_of(Source(i, text))), "pipelined")) for i, text in enumerate(TEXTS)
    ]
    for i, (answer, text) in enumerate(zip(answers, TEXTS, strict=True)):
        *events, record = made.stream_rows(text)
        *tokens, served = answer.events()
        rows = [[e.token for e in events if isinstance(e, RowEvent) and e.row == r and not e.done] for r in range(3)]
        told = [[e.token for e in tokens if e.row == r] for r in range(3)]
        assert rows == told == expected[i]["row_ids"] == record["row_ids"] == served["row_ids"]
        assert [e.row for e in tokens[:6]] == [0, 1, 2, 0, 1, 2]  # at the same times
        for found in (record, served):
            assert found["steps"] > found["calls"] == expected[i]["calls"]
            assert found["steps"] == expected[i]["steps"] and found["truncated"] == expected[i]["truncated"]
            assert found["log_prob"] == pytest.approx(expected[i]["log_prob"], abs=1e-3)
    with pytest.raises(UserError, match="row_prefixes"):
        engine.submit(Request(Source(0, [3, 1], prefixes=([4],)), "pipelined"))
    engine.close(drain=True, seconds=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    "delay, sub_max", [(0, 4), *(pytest.param(*x, marks=pytest.mark.long) for x in ((1, 4), (1, 3), (2, 3)))]
)
def test_picture_shows_named_rows_and_their_drafts(tokenizer, tmp_path, delay, sub_max):
    drafted = {"draft": "jacobi", "trace": True}
    made, _ = generator(MODEL, tokenizer=tokenizer, row_names=NAMES, delay=delay, sub_max=sub_max, decode=drafted)
    records = made.decode(["the clerk slept .", "the baker sang ."])
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, records)))
    for record in records:
        page = tmp_path / f"{record['id']}.html"
        assert (
            draw([f"{tmp_path}/rows.jsonl", "--id", str(record["id"]), "--delay", str(delay), "--output", str(page)])
            == 0
        )
        assert page.read_text().count("<li data-done") == len(NAMES)


@pytest.mark.slow
def test_exported_program_generates_named_rows(named, tokenizer_files, tmp_path, monkeypatch):
    pytest.importorskip("flatbuffers")
    monkeypatch.setenv("PIPEJAX_NATIVE", "off")
    made, params = named
    config = dataclasses.replace(made.config, decode=DecodeConfig(max_length=14))
    checkpoint.save_params(tmp_path / "run", config, params, tokenizer_source=tokenizer_files)
    export(tmp_path / "run", tmp_path / "out", platforms=["cpu"], batch=3, length=16)
    program = jax_export.deserialize((tmp_path / "out" / "pipelined-cpu.jax").read_bytes())
    weights = [*np.load(tmp_path / "out" / "weights.npz").values()]
    ids = [made.ids_of(Source(0, text)) for text in TEXTS]
    source = np.asarray([[*x, *[0] * (16 - len(x))] for x in ids], np.int32)
    found = jax.device_get(jax.jit(program.call)(weights, source, np.asarray(list(map(len, ids)), np.int32)))
    for b, record in enumerate(made.decode(TEXTS)):
        rows = [row[:n].tolist() for row, n in zip(found["tokens"][b], found["lengths"][b], strict=True)]
        assert rows[:3] == record["row_ids"] and not any(rows[3:])
        assert found["steps"][b] == record["steps"]
    with pytest.raises(UserError, match=r"^grid\.delay: found 0 without grid\.row_names; expected the names"):
        export(tmp_path / "run", tmp_path / "no", platforms=["cpu"], overrides=["grid.row_names=[]"])


def test_invalid_numbers_of_rows_are_refused():
    made, _ = generator()
    nothing = r"^grid\.delay: found 0 without grid\.row_names; expected the names of the rows, or row_prefixes in each"
    with pytest.raises(UserError, match=nothing):
        made.decode([[3, 1]])
    with pytest.raises(UserError, match=nothing):
        list(made.stream_rows([3, 1]))
    for given in ({"max_rows": 3}, {"max_rows": 3, "row_prefixes": [[4], [5]]}):
        with pytest.raises(UserError, match=r"[02] row_prefixes and 3 max_rows; expected a prefix for each row"):
            made.decode([{"source_ids": [3, 1], **given}])
    with pytest.raises(
        UserError, match=r"^source 0: found 7 row_prefixes with grid\.delay = 0; expected at most grid\."
    ):
        made.decode([{"source_ids": [3, 1], "row_prefixes": [[4]] * 7}])
    with pytest.raises(UserError, match=r"^grid\.delay: found 0 without grid\.row_names; expected the names"):
        Engine(made, places=1, queue=1)
    with pytest.raises(UserError, match=r"^grid\.row_names: found texts, but the checkpoint has no tokenizer"):
        generator(row_names=NAMES)[0].decode([[3, 1]])


def test_settings_with_names_are_the_same_when_they_are_read_again(named):
    settings = settings_of(named[0], "pipelined", [])
    assert json.loads(json.dumps(settings)) == settings


def test_records_depend_on_drafts_only_if_they_hold_their_trace():
    def settings(**decode):
        config = Config(decode=DecodeConfig(**decode))
        made = SimpleNamespace(config=config, origin={}, tokenizer=None, architecture=SIZES)
        return settings_of(made, "pipelined", [])

    assert settings() == settings(draft="model", draft_checkpoint="one") == settings(draft="jacobi", draft_tokens=3)
    assert settings(draft="jacobi", trace=True) != settings(draft="source", trace=True) != settings(draft="source")


# Training.

ROWS = ("small red apples", "old", "the baker sang near the river")
TRAINED = change(RUN_ON_ONE, grid={"delay": 0, "row_names": NAMES}, data={"task": "jsonl"})


def test_target_has_the_names_at_equal_times(tokenizer):
    flat = encode_example(Example("1", "the clerk slept .", ROWS), tokenizer, TRAINED, MODEL).target
    rows = [tokenizer.encode(row) for row in ROWS]
    for i, row in enumerate(rows):
        here = (flat.row == i) & (flat.weights > 0)
        name = len(tokenizer.encode(NAMES[i]))  # the name is fed, and not generated
        assert flat.targets[here].tolist() == [*row, EOS][name:]
        assert flat.time[here].tolist() == list(range(name, len(row) + 1))
        assert flat.inputs[flat.row == i][: len(row) + 1].tolist() == [0, *row]
    assert set(flat.row.tolist()) == {0, 1, 2}  # no empty row
    just_enough = change(TRAINED, data={"max_target": sum(map(len, rows)) + 3})  # one eos for each row
    assert not encode_example(Example("1", "the clerk slept .", ROWS), tokenizer, just_enough, MODEL).target_was_cut


@pytest.mark.parametrize(
    "rows, words",
    [
        (ROWS[:2], "example 7: found 2 rows; expected 3"),
        ((*ROWS[:2], "the baker slept"), "example 7: found row 3 of ('small red apples', 'old', 'the baker slept')"),
        ((ROWS[1], ROWS[0], ROWS[2]), "example 7: found row 1 of"),
    ],
)
def test_targets_without_the_row_names_are_refused(tokenizer, rows, words):
    with pytest.raises(UserError) as refused:
        encode_example(Example("7", "the clerk slept .", rows), tokenizer, TRAINED, MODEL)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    sequential = change(TRAINED, train={"method": "sequential"})  # it has no rows
    encode_example(Example("7", "the clerk slept .", rows), tokenizer, sequential, MODEL)


def test_refused_example_is_named_and_lost_characters_are_logged(tokenizer, caplog):
    """Ids come from any source; the number of a line can be looked up."""
    with pytest.raises(UserError, match=r"^train\.jsonl:3: found 2 rows; expected 3"):
        encode_example(Example("7", "the clerk slept .", ROWS[:2], "train.jsonl:3"), tokenizer, TRAINED, MODEL)
    assert not caplog.records
    for _ in range(2):
        assert tokenizer.unknown in prefix_ids(tokenizer, "small ☃", "here")
    assert [record.getMessage() for record in caplog.records] == [
        "a row that begins with 'small ☃': '☃' comes back as '' from the tokenizer"
    ]
    for name, found in (("the </s> small", "ends the row"), (" ", "has no token")):
        with pytest.raises(UserError, match=f"here: found '{name}', which {found} for this tokenizer"):
            prefix_ids(tokenizer, name, "here")


def test_training_with_delay_0_needs_row_names(tmp_path):
    with pytest.raises(
        UserError, match=r"^grid\.delay: found 0 without grid\.row_names; expected the names of the rows"
    ):
        fit(change(TRAINED, grid={"row_names": ()}), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_only_rows_that_begin_in_time_are_named(tmp_path):
    """The refusal comes before a training, and not from its first evaluation."""
    grid = {"delay": 10, "time_max": 20}
    with pytest.raises(UserError, match=r"^grid\.row_names: found 3; expected at most 2, the number of rows"):
        fit(change(TRAINED, grid=grid), tmp_path / "run")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"^grid\.row_names: found 3; expected at most 2"):
        generator(row_names=NAMES, **grid)[0].decode([[3, 1]])


@pytest.mark.slow
def test_a_run_is_evaluated_with_its_names(tmp_path, tokenizer_files):
    config = change(TRAINED, data={"tokenizer": str(tokenizer_files)})
    examples = [Example(str(i), f"the baker {word} .", ROWS) for i, word in enumerate(("sang", "slept", "walked") * 8)]
    assert fit(config, tmp_path / "run", given={"train": examples, "dev": examples[:3]}) == 0
    (*_, line) = [line for line in metrics(tmp_path / "run") if line.get("event") == "evaluation"]
    for sample in line["samples"]:
        assert all(row.startswith(name) for row, name in zip(sample["predicted"], NAMES, strict=True))


def test_names_of_rows_that_start_together_must_differ():
    with refuses("grid.row_names", found="a name twice"):
        override(Config(), ["grid.delay=0", 'grid.row_names=["to:", "by:", "to:"]'])
    assert override(Config(), ["grid.delay=1", 'grid.row_names=["to:", "to:"]']).grid.row_names == ("to:", "to:")
