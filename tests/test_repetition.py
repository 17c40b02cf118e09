"""Repetition penalty and n-grams: as in transformers' `generate` on one row, and in all ways of decoding."""

import itertools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor, T5ForConditionalGeneration

from pipejax import methods
from pipejax.apps import demo
from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, TrainConfig
from pipejax.convert import description, generation, huggingface
from pipejax.decoding import Repetition, Sampling
from pipejax.inference.answers import Record
from pipejax.inference.backends import XLA
from pipejax.inference.generator import Generator
from pipejax.inference.streaming import RowEvent
from pipejax.methods import Ids
from pipejax.system.errors import UserError
from pipejax.testing import GivenQueries
from support import oracle, schemas
from support.plain_repetition import without_repetition
from support.tiny import MORE_WORDS

pytestmark = pytest.mark.usefixtures("compiled_once")
slow = pytest.mark.slow


def processed(ids: list[int], logits: np.ndarray, penalty: float, ngram: int) -> np.ndarray:
    """The logits [V] after transformers' processors, in its order."""
    history, scores = torch.tensor([ids]), torch.from_numpy(logits)[None].clone()
    if penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(penalty)(history, scores)
    if ngram:
        scores = NoRepeatNGramLogitsProcessor(ngram)(history, scores)
    return scores[0].numpy()


def test_logits_of_one_row_equal_those_of_transformers() -> None:
    """600 random rows have few different tokens, so that many n-grams are repeated; each has its own settings."""
    rng, count, width, size = np.random.default_rng(0), 600, 12, 9
    prefix, length = rng.integers(0, size, (count, width)), rng.integers(0, width + 1, count)
    logits = (3 * rng.standard_normal((size, count))).astype(np.float32)
    penalty, ngram = rng.choice(np.asarray([1, 0.5, 1.3, 4], np.float32), count), rng.integers(0, 6, count)
    rule = Repetition(penalty, ngram.astype(np.int32), np.zeros((count, 1), np.int32), 0)
    above = np.zeros((count, 1, width)), np.zeros((count, 1))
    queries = GivenQueries(np.arange(count), np.zeros(count), length, (prefix, length, *above))
    found = np.asarray(rule.apply(jnp.asarray(logits), queries, None)).T
    expected = [
        processed([0, *row[:n].tolist()], x, float(p), int(k))
        for row, n, x, p, k in zip(prefix, length, logits.T, penalty, ngram, strict=True)
    ]
    np.testing.assert_allclose(found, np.asarray(expected), rtol=5e-7)  # XLA multiplies by the reciprocal
    assert (found != logits.T).any(axis=1).mean() > 0.5 and np.isinf(found).any(axis=1).mean() > 0.2


def test_plain_reference_equals_transformers() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        row, logits = rng.integers(0, 6, rng.integers(0, 12)).tolist(), rng.standard_normal(6).astype(np.float32)
        penalty, ngram = float(rng.choice([1, 1.3, 4])), int(rng.integers(0, 5))
        expected = processed([0, *row], logits, penalty, ngram)
        np.testing.assert_array_equal(without_repetition(logits, row, [], penalty=penalty, ngram=ngram), expected)


SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"repetition_penalty": 2.5, "no_repeat_ngram_size": 1},
]


def compare_with_generate(seeds: range, directory: Path) -> tuple[int, int]:
    """Compares answers with transformers' `generate`; returns their number, and the number of changed ones."""
    compared = changed = 0
    for seed in seeds:
        rng = np.random.default_rng([seed, 5])
        params = oracle.random_params(MORE_WORDS, rng, eos_scale=1.1)
        if seed % 2:
            params["decoder"]["norm"]["scale"] *= -1  # such a model repeats its last token
        huggingface.write_hf(MORE_WORDS, params, directory / str(seed), None)
        torchs = T5ForConditionalGeneration.from_pretrained(directory / str(seed)).eval()
        generator = Generator(Config(model=MORE_WORDS, train=TrainConfig(method="none")), params, None)
        texts = [[*rng.integers(2, 12, n).tolist(), 1] for n in (3, 5, 8)]
        plain = generator.decode(texts, method="sequential", max_length=14)
        for settings in SETTINGS:
            records = generator.decode(texts, method="sequential", max_length=14, **settings)
            for text, record, free in zip(texts, records, plain, strict=True):
                more: dict[str, Any] = {"output_scores": True, "return_dict_in_generate": True, "do_sample": False}
                answer = torchs.generate(torch.tensor([text]), max_new_tokens=14, **more, **settings)
                best = torch.stack(answer.scores).squeeze(1).topk(2).values
                if (best[:, 0] - best[:, 1]).min() < 1e-4:
                    continue  # rounding may decide
                expected = answer.sequences[0, 1:].tolist()
                assert record["row_ids"] == [expected[: expected.index(1)] if 1 in expected else expected], (
                    seed,
                    settings,
                )
                compared, changed = compared + 1, changed + (record["row_ids"] != free["row_ids"])
    return compared, changed


@pytest.mark.parametrize(
    "seeds",
    [
        range(2),
        pytest.param(range(2, 22), marks=slow),
        pytest.param(range(22, 200), marks=pytest.mark.long),
    ],
)
def test_answers_equal_those_of_generate(seeds: range, tmp_path: Path) -> None:
    compared, changed = compare_with_generate(seeds, tmp_path)
    assert compared > 6 * len(seeds) and changed > 2.5 * len(seeds)


def generator(method: str = "pipelined", **decode: Any) -> Generator:
    """A generator with random weights and few words."""
    params = oracle.random_params(MORE_WORDS, np.random.default_rng(4), eos_scale=1.1)
    config = Config(
        model=MORE_WORDS,
        grid=GridConfig(time_max=10, sub_max=4),
        data=DataConfig(separator=" ; "),
        train=TrainConfig(method=method),
        decode=DecodeConfig(max_length=20, **decode),
    )
    return Generator(config, params, None, backend=XLA)


SOURCES = [[5, 6, 7, 1], [2, 9, 4, 4, 1], [11, 3, 1], [8, 8, 2, 1]]


def plain(found: Record) -> list[Any]:
    return [found["row_ids"], found["steps"]]


WAYS: list[dict[str, Any]] = [{}, {"scores": True}, {"draft": "source"}, {"draft": "jacobi"}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, ways",
    [("pipelined", WAYS[:2]), *(pytest.param(name, WAYS[2:], marks=slow) for name in ("pipelined", "sequential"))],
)
def test_batches_streams_drafts_and_scores_agree(strategy: str, ways: list[dict[str, Any]]) -> None:
    made = generator(strategy)
    settings: dict[str, Any] = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "method": strategy}
    alone = [made.decode([source], **settings)[0] for source in SOURCES]
    free = made.decode(SOURCES, method=strategy)
    assert sum(a["row_ids"] != b["row_ids"] for a, b in zip(alone, free, strict=True)) > 1
    for more in ways:
        assert [*map(plain, made.decode(SOURCES, **settings, **more))] == [*map(plain, alone)], more
    for source, record in zip(SOURCES, alone, strict=True):
        *events, last = made.stream_rows(source, **settings)
        assert isinstance(last, dict) and plain(last) == plain(record)
        rows: dict[int, list[int]] = {}
        for event in events:
            assert isinstance(event, RowEvent)
            if not event.done:
                rows.setdefault(event.row, []).append(event.token)
        assert [*rows.values()] == [row for row in record["row_ids"] if row]


def test_scores_are_those_of_the_model() -> None:
    """The log-probability of a token does not depend on the rule if the tokens before it do not."""
    made = generator("sequential")
    free, ruled = (made.decode(SOURCES, scores=True, no_repeat_ngram_size=n) for n in (0, 1))
    for one, other in zip(free, ruled, strict=True):
        same = 0
        for a, b in zip(one["row_ids"][0], other["row_ids"][0], strict=False):
            if a != b:
                break
            same += 1
        np.testing.assert_allclose(one["log_probs"][0][:same], other["log_probs"][0][:same], atol=1e-5)


def test_sampled_tokens_repeat_nothing() -> None:
    records = generator("sequential").decode(SOURCES, temperature=1.5, samples=4, no_repeat_ngram_size=1)
    for record in records:
        (row,) = record["row_ids"]
        assert len({*row}) == len(row) and 0 not in row  # bos counts, as in transformers


@pytest.mark.parametrize("penalty, ngram", [(50.0, 0), pytest.param(1.0, 1, marks=slow)])
def test_answers_by_a_schema_are_the_best_of_the_allowed_tokens(
    penalty: float, ngram: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of properties are exempt. If only repeated tokens are allowed by the schema, they are written."""
    texts = ["".join(letters) for letters in itertools.product("abc", repeat=4)][::2]
    monkeypatch.setattr(schemas, "FINITE", {"one": texts, "two": [*texts, "null"], "three": ["ababab", "aaa"]})
    asked = {"type": "object", "properties": {name: {"enum": values} for name, values in schemas.FINITE.items()}}
    made: Any = schemas.generator(2, time_max=12)
    rows = made.under(asked).answer_format.rows
    params = oracle.random_params(schemas.SIZES, np.random.default_rng(2), eos_scale=1.2)
    given, changed = [len(row.beginning) for row in rows], 0
    for text in ("a", "red 20", "true null ab", "é"):
        encoded = oracle.encode(params, schemas.SIZES, made.ids_of(made.source(text, "here", 0)))

        def last(written: list[list[int]], encoded: Any = encoded, penalty: float = penalty, ngram: int = ngram) -> Any:
            found = [x[-1] for x in oracle.grid_logits(params, schemas.SIZES, encoded, written, 0)]
            contents = [[token for token in row[1:] if token != 1] for row in written]
            return [
                without_repetition(
                    logits,
                    contents[i],
                    [above[: len(written[i]) - 1] for above in contents[:i]],
                    penalty=penalty,
                    ngram=ngram,
                    given=given,
                    forbidden=-1e6,
                )
                for i, logits in enumerate(found)
            ]

        expected = oracle.algorithm1(
            schemas.choices(made, last, rows, []),
            delay=0,
            time_max=12,
            sub_max=3,
            stop="empty_row",
            prefixes=[row.beginning for row in rows],
        )
        (record,) = made.decode([text], schema=asked, repetition_penalty=penalty, no_repeat_ngram_size=ngram)
        assert record["row_ids"] == [[token for token in row[1:] if token != 1] for row in expected.all_rows[:3]]
        json.loads(record["text"])
        changed += record["row_ids"] != made.decode([text], schema=asked)[0]["row_ids"]
    assert changed


def test_separators_and_names_are_exempt() -> None:
    """The name's tokens and n-grams may occur in all rows."""
    made = schemas.generator(3, decode={"repetition_penalty": 50.0}, row_names=(*schemas.NAMES[:3],))
    names = [made.tokenizer.encode(name) for name in schemas.NAMES[:3]] if made.tokenizer else []
    (record,) = made.decode(["red ab"])
    assert [row[: len(name)] for row, name in zip(record["row_ids"], names, strict=True)] == names
    joined = schemas.generator(3, decode={"max_length": 40})
    method, separators = (
        joined.method("sequential"),
        {joined.tokenizer.encode(" ; ")[-1]} if joined.tokenizer else set(),
    )
    from pipejax.inference.decoding_options import rule_settings

    assert separators and separators <= {*rule_settings(joined.config, method, joined.tokenizer).separators}


def test_naming_the_default_method_exempts_no_separator() -> None:
    """Weights that pipejax did not train write no separators, also if `pipejax.load` gets the name "sequential"."""
    params = oracle.random_params(MORE_WORDS, np.random.default_rng([1, 5]), eos_scale=1.1)
    params["decoder"]["norm"]["scale"] *= -1  # such a model repeats its last token
    plain = Config(model=MORE_WORDS, train=TrainConfig(method="none"), decode=DecodeConfig(max_length=14))
    for config in (plain, methods.choose(plain, "sequential")):
        made = Generator(config, params, demo.DemoTask().tokenizer())
        rows = [record["row_ids"][0] for record in made.decode(SOURCES, no_repeat_ngram_size=1)]
        assert any(3 in row for row in rows)  # the separator " ; "
        assert all(len({*row}) == len(row) for row in rows)


@pytest.mark.parametrize(
    "settings, line",
    [
        ({"repetition_penalty": 1.5}, "decode.repetition_penalty: found 1.5 with decode.beams = 2, which does not "),
        ({"no_repeat_ngram_size": 2}, "decode.no_repeat_ngram_size: found 2 with decode.beams = 2, which does not "),
    ],
)
def test_beams_are_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        generator("sequential").decode(SOURCES, beams=2, **settings)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_slower_steps_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    made = generator("sequential", no_repeat_ngram_size=2)
    for _ in range(2):
        made.make_strategy()
    lines = [record.getMessage() for record in caplog.records if "logits" in record.getMessage()]
    assert lines == [
        "decode.no_repeat_ngram_size: each step returns all logits; kernels that return only the best tokens "
        "are not used"
    ]


def test_generation_config_is_read_and_written() -> None:
    """Both settings are converted for a sequential decoder; with beams, a line reports that they are ignored."""
    given = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    made = generation.Generation(Path("g.json"), given)
    decode, lines = generation.decoding(made, MORE_WORDS)
    assert (decode.repetition_penalty, decode.no_repeat_ngram_size) == (1.3, 3)
    assert lines == ["g.json: used as decode.repetition_penalty=1.3, decode.no_repeat_ngram_size=3"]
    config = Config(model=MORE_WORDS, decode=decode, train=TrainConfig(method="sequential"))
    written = generation.of_run(config)
    assert {key: written[key] for key in given} == given
    assert not {*given} & generation.of_run(Config(model=MORE_WORDS, train=TrainConfig(method="sequential"))).keys()
    decode, lines = generation.decoding(generation.Generation(Path("g.json"), {"num_beams": 2, **given}), MORE_WORDS)
    assert decode == DecodeConfig(beams=2)
    assert lines[-1].endswith("pipejax does not support: repetition_penalty=1.3, no_repeat_ngram_size=3")


def test_program_for_transformers_reports_the_settings_that_it_ignores(tmp_path: Path) -> None:
    params = oracle.random_params(MORE_WORDS, np.random.default_rng(4))
    huggingface.write_hf(MORE_WORDS, params, tmp_path, None)
    made = generator("pipelined", no_repeat_ngram_size=2)
    lines = description.write_files(tmp_path, "name", made.config, tokenizer=None)
    expected = "decode.no_repeat_ngram_size: only pipejax decodes the rows of this directory with it; transformers"
    assert [line for line in lines if line.startswith("decode.")] == [f"{expected} ignores it"]


def test_settings_of_a_request_are_in_its_sampling() -> None:
    """The settings of `decode` are the defaults of requests."""
    found = Sampling.of(DecodeConfig(repetition_penalty=1.5), 7)
    assert (found.repetition_penalty, found.no_repeat_ngram_size, found.seed) == (1.5, 0, 7)
    assert Ids.of(MORE_WORDS).bos == 0
