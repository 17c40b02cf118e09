"""Models whose rows end at any of several tokens, like chat models, equal Algorithm 1 and `generate`."""

import dataclasses
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
import torch
import transformers

from pipejax import checkpoint, testing
from pipejax.config import (
    Config,
    DataConfig,
    DecodeConfig,
    GridConfig,
    TrainConfig,
    check,
    from_json,
    override,
    to_json,
)
from pipejax.convert import huggingface
from pipejax.data.encoding import answered, encode_example
from pipejax.data.examples import Example
from pipejax.data.tokenizer import Affixes
from pipejax.decoding import TRUNCATIONS, Drafts, Pipelined, Sizes, ends_of, with_drafts
from pipejax.decoding.drafters import FromModel, FromSource, Jacobi, TargetModel
from pipejax.decoding.strategy_checks import walk
from pipejax.inference import drafter_parameters
from pipejax.inference.decoding_options import of_batch
from pipejax.inference.generator import Generator
from pipejax.inference.streaming import RowEvent
from pipejax.methods import Ids, PipelinedMethod, prefix_ids, spell
from pipejax.model.t5_config import T5Config
from pipejax.system.errors import UserError
from pipejax.training.run_directory import choose_end, resolve_model
from support import oracle, schemas, scripted
from support.batches import padded, rows_of, sources
from support.foreign import Uneven
from support.in_transformers import check_beams, check_greedy_tokens, written_module
from support.one_program import compiled
from support.tiny import FEW_WORDS, MORE_WORDS

pytestmark = pytest.mark.usefixtures("compiled_once")

SEVERAL = dataclasses.replace(FEW_WORDS, other_eos_token_ids=(5,))
SHALLOW = dataclasses.replace(SEVERAL, num_decoder_layers=1)  # as transformers' cache requires
GRIDS: list[Any] = [
    (1, 12, 5, False),
    (2, 9, 4, True),
    (3, 14, 4, False),
    (0, 9, 4, False),
    (1, 10, 5, True),
    (2, 14, 6, False),
]


def ends_in(rows: list[list[int]], model: Any = SEVERAL) -> Counter[tuple[int, bool]]:
    """The numbers of rows, and of empty rows, by end token."""
    return Counter((row[-1], len(row) == 2) for row in rows if row[-1] in model.end_token_ids)


def in_torch(model: T5Config, params: Any, place: Path) -> Any:
    huggingface.write_hf(model, params, place, None)
    return transformers.T5ForConditionalGeneration.from_pretrained(place).eval()


def of_algorithm_1(model: T5Config, params: Any, source: list[int], setting: Any, **more: Any) -> oracle.GridResult:
    delay, time_max, sub_max, literal = setting
    chooses = oracle.grid_next_tokens(params, model, oracle.encode(params, model, source), delay)
    bounds = {"delay": delay, "time_max": time_max, "sub_max": sub_max}
    stop = "literal" if literal else "empty_row"
    return oracle.algorithm1(chooses, **bounds, stop=stop, eos=model.end_token_ids, **more)


@pytest.mark.parametrize(
    "setting, unique, drafter",
    [
        (GRIDS[0], False, None),
        *(pytest.param(setting, False, None, marks=pytest.mark.slow) for setting in GRIDS[1:]),
        pytest.param((1, 16, 9, False), True, None, marks=pytest.mark.slow),
        pytest.param(GRIDS[0], False, FromSource(), marks=pytest.mark.slow),
        pytest.param(GRIDS[5], False, FromModel(least=0.2), marks=pytest.mark.slow),
        pytest.param(GRIDS[1], False, Jacobi(), marks=pytest.mark.long),
        pytest.param((1, 16, 9, False), True, FromSource(), marks=pytest.mark.long),
    ],
)
def test_rows_of_random_models_equal_algorithm_1(setting: Any, unique: bool, drafter: Any) -> None:
    """Rows, including empty rows, end at each end token, and later rows see the generated token."""
    delay, *_, literal = setting
    model = dataclasses.replace(SEVERAL, other_eos_token_ids=(5, 7)) if delay == 3 else SEVERAL
    strategy: Any = dataclasses.replace(Pipelined(*setting), unique=unique, other_ends=model.other_eos_token_ids)
    strategy = strategy if drafter is None else with_drafts(strategy, Drafts(drafter, 4))
    drafts = model if isinstance(drafter, FromModel) else None
    program, seen, in_circles = compiled(model, strategy, Sizes.fit(strategy, 4), small=drafts), Counter[Any](), 0
    for seed in range(12):
        rng = np.random.default_rng([seed, *setting])
        params, texts = oracle.random_params(model, rng), sources(rng, 4, model.vocab_size)
        decoded = jax.device_get(
            program(params, *padded(texts), *((oracle.random_params(model, rng),) if drafts else ()))
        )
        for b, text in enumerate(texts):
            expected = of_algorithm_1(model, params, text, setting, unique=unique)
            found = rows_of(decoded, b)
            found = [row for i, row in enumerate(found) if row and not (unique and row in found[:i])]
            assert found == expected.rows
            assert decoded.steps[b] == expected.steps
            assert TRUNCATIONS[decoded.truncated[b]] == expected.truncated
            seen += ends_in(expected.all_rows, model)
            contents = [row[1:-1] for row in expected.all_rows if row[-1] in model.end_token_ids]
            others = [row for row in expected.all_rows if row[1:-1] in contents and contents.count(row[1:-1]) > 1]
            in_circles += len({row[-1] for row in others}) > 1
    kinds = [
        (end, empty) for end in model.end_token_ids for empty in ((False,) if literal or not delay else (False, True))
    ]
    assert all(seen[kind] for kind in kinds), seen
    assert in_circles or not unique  # rows that differ only in their end tokens are equal


@pytest.mark.parametrize(
    "setting", [(1, 15, 5, False), pytest.param((2, 15, 5, True), marks=pytest.mark.slow), (0, 12, 5, False)]
)
def test_drafts_end_rows_at_any_end_token(setting: Any) -> None:
    """Drafts are correct and wrong, and include an end token that differs from the model's."""
    delay, time_max, sub_max, literal = setting
    rng, answers, texts = np.random.default_rng(setting), [], []
    for _ in range(40):
        rows = [
            [*rng.integers(2, 5, rng.integers(0 if rng.random() < 0.1 else 1, 7)).tolist(), int(rng.choice([1, 6, 8]))]
            for _ in range(rng.integers(0, 6))
        ]
        answers.append(rows)
        near = [token if rng.random() < 0.8 else int(rng.choice([1, 6, 8])) for row in rows for token in row]
        texts.append([*near, 1])
    strategy = with_drafts(dataclasses.replace(Pipelined(*setting), other_ends=(6, 8)), Drafts(FromSource(), 4))
    decoded: Any = scripted.decode(strategy, texts, answers, length=48, width=9)
    saved = 0
    for b, rows in enumerate(answers):
        expected = oracle.algorithm1(
            oracle.scripted_next_tokens(rows),
            delay=delay,
            time_max=time_max,
            sub_max=sub_max,
            stop="literal" if literal else "empty_row",
            eos=(1, 6, 8),
        )
        assert [row for row in rows_of(decoded, b) if row] == expected.rows
        assert decoded.steps[b] == expected.steps and TRUNCATIONS[decoded.truncated[b]] == expected.truncated
        saved += expected.calls - decoded.calls[b]
    assert saved > 20


def test_generated_end_token_is_fed() -> None:
    """It is fed once, at its place: rows below see exactly this token (A5 of the contract)."""
    steps, fed = iter([[3, 0, 0], [8, 4, 0], [4, 4, 4], [5, 6, 5], [5, 5, 1]]), list[tuple[int, ...]]()
    for query, *_ in walk(Pipelined(1, 8, 3, other_ends=(6, 8)), lambda query: np.asarray([next(steps)], np.int32)):
        live = np.flatnonzero(query.live[0])
        fed += [(int(query.row[0, i]), int(query.time[0, i]), int(query.tokens[0, i])) for i in live]
    assert [cell for cell in fed if cell[2] in (1, 6, 8)] == [(0, 2, 8), (1, 4, 6)]
    assert len({cell[:2] for cell in fed}) == len(fed)


@pytest.mark.slow
def test_greedy_answers_equal_generate(tmp_path: Path) -> None:
    """`eos_token_id` is a list in both files; each of its tokens ends some answer."""
    params = oracle.random_params(SHALLOW, np.random.default_rng(11), eos_scale=1.2)
    assert {1, 5} <= check_greedy_tokens(SHALLOW, params, in_torch(SHALLOW, params, tmp_path / "hf"), lowest=3).keys()


@pytest.mark.slow
@pytest.mark.parametrize("ends", [(5,), (5, 7, 4)])
def test_beams_equal_generate(ends: tuple[int, ...], tmp_path: Path) -> None:
    """There are as many candidates as in transformers with several end tokens; none of these is the first."""
    model = dataclasses.replace(MORE_WORDS, num_decoder_layers=1, other_eos_token_ids=ends)
    seen = Counter[int]()
    for seed in range(4):
        params = oracle.random_params(model, np.random.default_rng(seed), eos_scale=1.6)
        torchs = in_torch(model, params, tmp_path / str(seed))
        seen += check_beams(model, params, torchs, lowest=3, beams=2 + seed % 2 * (not ends[1:]), least=0)
    assert {*ends} <= seen.keys() and seen[-1] > 3


@pytest.mark.slow
def test_log_probabilities_of_samples_equal_torch(tmp_path: Path) -> None:
    """Each token and the sampled end token, which `log_prob` includes, are compared."""
    params = oracle.random_params(SHALLOW, np.random.default_rng(1), eos_scale=1.0)
    decode = DecodeConfig(temperature=1.0, scores=True, samples=6, max_length=12)
    config = Config(model=SHALLOW, decode=decode, train=TrainConfig(method="none"))
    torchs, texts = in_torch(SHALLOW, params, tmp_path / "hf"), [[3, 4, 6, 1], [7, 2, 2, 8, 1]]
    ended = Counter[int]()
    for i, record in enumerate(Generator(config, params, None).decode(texts)):
        (row,), (log_probs,) = record["row_ids"], record["log_probs"]
        given = {"input_ids": torch.tensor([texts[i // 6]]), "decoder_input_ids": torch.tensor([[0, *row]])}
        with torch.no_grad():
            expected = torchs(**given).logits[0].log_softmax(-1).numpy()
        assert log_probs == pytest.approx([expected[j, token] for j, token in enumerate(row)], abs=1e-3)
        if record["truncated"] is None:
            last = record["log_prob"] - sum(log_probs)
            near = [end for end in SHALLOW.end_token_ids if abs(expected[len(row), end] - last) < 1e-3]
            assert near
            ended += Counter(near)
    assert {*ended} == {1, 5}


def test_a_stream_names_the_token_that_ended_each_row() -> None:
    params = oracle.random_params(SEVERAL, np.random.default_rng(1))
    config = Config(model=SEVERAL, grid=GridConfig(1, 12, 5), train=TrainConfig(method="pipelined"))
    generator, rng, seen = Generator(config, params, None), np.random.default_rng(0), Counter[Any]()
    for text in sources(rng, 8, SEVERAL.vocab_size):
        expected = of_algorithm_1(SEVERAL, params, text, GRIDS[0])
        *events, record = list[Any](generator.stream_rows(text))
        ends = {event.row: event.token for event in events if isinstance(event, RowEvent) and event.done}
        rows = {i: row for i, row in enumerate(expected.all_rows) if len(row) > 2 and row[-1] in (1, 5)}
        assert ends == {i: row[-1] for i, row in rows.items()} and record["row_ids"] == expected.rows
        seen += Counter(ends.values())
    assert {*seen} == {1, 5}


class Words:
    """A tokenizer of single words, some of them special."""

    eos, affixes, words = 1, Affixes(suffix=(1,)), ("<pad>", "</s>", "<unk>", "red", "blue", "<end>", ";", "<over>")

    def encode(self, text: str) -> list[int]:
        return [self.words.index(word) for word in text.split()]

    def decode(self, ids: Any) -> str:
        return " ".join(self.words[i] for i in ids)

    def vanishes(self, text: str, ends: Any = ()) -> bool:
        return {self.eos, *ends}.issuperset(self.encode(text))

    def change(self, text: str, ids: Any = None) -> None:
        return None


@pytest.mark.parametrize("objective", ["pipelined", "sequential"])
@pytest.mark.parametrize("named", [-1, 5, 7])
def test_training_writes_one_end_token(objective: str, named: int) -> None:
    """It is the first, or the one in `train.eos_token_id`; end tokens in the text of a target are left out."""
    model = dataclasses.replace(MORE_WORDS, other_eos_token_ids=(5, 7))
    train, words = TrainConfig(method=objective, eos_token_id=named), Words()
    config = choose_end(Config(model=model, train=train, data=DataConfig(separator=" ; ")))
    assert config.model is not None and {*config.model.end_token_ids} == {1, 5, 7}
    example = Example("a", "red", ("red <end> blue", "<over>", "blue </s>"))
    (flat,) = [encode_example(example, words, config, config.model).target]  # type: ignore[arg-type]
    eos = 1 if named < 0 else named
    rows = [[3, 4, eos], [4, eos], [eos]] if objective == "pipelined" else [[3, 4, 6, 4, eos]]
    written = [flat.targets[(flat.row == i) & (flat.weights > 0)].tolist() for i in range(flat.row.max() + 1)]
    assert written == rows
    assert {*flat.inputs.tolist()} & {1, 5, 7} <= {eos}  # and feeds it, so that rows below see it
    assert spell(example.targets, words, Ids.of(model).ends) == [[3, 4], [], [4]]
    empty = [Example("b", "red", ("<end>", "</s> <over>"))]
    with pytest.raises(UserError, match="found skip"):
        answered(empty, words, "skip", model.end_token_ids)  # type: ignore[arg-type]


def test_eos_token_id_must_be_end_token_of_model() -> None:
    several = Config(model=SEVERAL, train=TrainConfig(eos_token_id=5))
    started = resolve_model(dataclasses.replace(several, model=None), Config(model=SEVERAL))
    assert started.model is not None and started.model.end_token_ids == (5, 1)
    assert resolve_model(choose_end(several), Config(model=SEVERAL)) == started == choose_end(started)
    with pytest.raises(UserError, match=r"^train\.eos_token_id: found 4; expected an end token of the model, 1 or 5$"):
        choose_end(override(several, ["train.eos_token_id=4"], where="--set"))
    assert choose_end(Config(train=TrainConfig(eos_token_id=5))).model is None  # a checkpoint will provide the model


@pytest.mark.parametrize(
    "ends, line",
    [
        ((9,), "model.other_eos_token_ids: found 9; expected ids from 0 to below model.vocab_size = 9"),
        ((5, -1), "model.other_eos_token_ids: found -1; expected ids from 0 to below model.vocab_size = 9"),
        ((5, 5), "model.other_eos_token_ids: found 5 twice; expected different ids"),
        ((1,), "model.other_eos_token_ids: found 1 twice; expected different ids"),
        ((5.0,), "model.other_eos_token_ids: found (5.0,); expected a list of whole numbers, such as [107]"),
        ((True,), "model.other_eos_token_ids: found (True,); expected a list of whole numbers, such as [107]"),
        ([5], None),
    ],
)
def test_end_tokens_of_a_config(ends: Any, line: str | None) -> None:
    if line is None:
        config = override(Config(model=FEW_WORDS), {"model.other_eos_token_ids": ends}, where="here")
        assert config.model == SEVERAL == from_json(to_json(config), where="there").model
        assert override(Config(model=FEW_WORDS), ["model.other_eos_token_ids=[5]"], where="--set") == config
        return
    with pytest.raises(UserError) as caught:
        check(Config(model=dataclasses.replace(FEW_WORDS, other_eos_token_ids=ends)), where="here")
    assert str(caught.value).startswith(f"here: {line}")


def test_beams_need_large_enough_vocabulary() -> None:
    """Each beam has a candidate for each end token, and one that continues."""
    model = dataclasses.replace(FEW_WORDS, other_eos_token_ids=(5, 6))
    check(Config(model=model, decode=DecodeConfig(beams=2)), where="")
    with pytest.raises(UserError, match=r"decode\.beams: found 3; expected at most 1/4 of model\.vocab_size = 9"):
        check(Config(model=model, decode=DecodeConfig(beams=3)), where="")


# Hugging Face's files.

IDS = {"decoder_start_token_id": 0, "pad_token_id": 0}


def directory(place: Path, generate: Any, config: dict[str, Any], model: Any = FEW_WORDS) -> Path:
    """A T5 for transformers with other ids in its files; None: without generation_config.json."""
    huggingface.write_hf(model, oracle.random_params(FEW_WORDS, np.random.default_rng(0)), place, None)
    facts = json.loads((place / "config.json").read_text()) | config
    (place / "config.json").write_text(json.dumps(facts))
    file = place / "generation_config.json"
    file.unlink() if generate is None else file.write_text(json.dumps(IDS | generate))
    return place


@pytest.mark.parametrize(
    "generate, config, ends",
    [
        ({"eos_token_id": [1, 5]}, {"eos_token_id": 1}, (1, 5)),
        ({"eos_token_id": [5, 1]}, {"eos_token_id": 1}, (5, 1)),
        ({"eos_token_id": 7}, {"eos_token_id": [1, 5]}, (7,)),
        ({}, {"eos_token_id": [1, 5]}, (1, 5)),
        (None, {"eos_token_id": [1, 5, 7]}, (1, 5, 7)),
        ({"eos_token_id": [5, 1, 5]}, {"eos_token_id": [5, 1]}, (5, 1)),
        ({"eos_token_id": [5]}, {}, (5,)),
    ],
)
def test_end_tokens_come_from_the_file_that_transformers_reads(
    generate: Any, config: Any, ends: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This is generation_config.json if it exists, otherwise config.json; `to-hf` writes the list again."""
    source = directory(tmp_path / "hf", generate, config)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(source).generation_config.eos_token_id
    if generate != {}:  # then `generate` would never end
        assert [*dict.fromkeys(np.ravel(theirs).tolist())] == [*ends]
    model, params = huggingface.read_hf(source)
    assert model.end_token_ids == ends
    told = capsys.readouterr().err
    assert ("takes precedence over config.json" in told) == bool(
        generate and config.get("eos_token_id", 1) != generate["eos_token_id"]
    )
    huggingface.write_hf(model, params, tmp_path / "again", None)
    written = [*ends] if ends[1:] else ends[0]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "again" / name).read_text())["eos_token_id"] == written
    assert huggingface.read_hf(tmp_path / "again")[0] == model
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "again").generation_config
    assert again.eos_token_id == written


class OneEnd(T5Config):
    """A custom backbone from before the field existed."""

    __dataclass_fields__: ClassVar = {
        key: x for key, x in T5Config.__dataclass_fields__.items() if key != "other_eos_token_ids"
    }


@pytest.mark.parametrize(
    "generate, line",
    [
        ({"eos_token_id": []}, "eos_token_id: found an empty list"),
        ({"eos_token_id": [1, 70]}, "eos_token_id: found 70; expected ids from 0 to below vocab_size = 9"),
        ({"eos_token_id": [70, 1]}, "eos_token_id: found 70; expected an id below vocab_size = 9"),
        ({"eos_token_id": [1, "</s>"]}, "eos_token_id: found (1, '</s>')"),
        ({"eos_token_id": [1, True]}, "eos_token_id: found (True,); expected a list of whole numbers"),
        ({"decoder_start_token_id": [0, 3]}, "decoder_start_token_id: found [0, 3]; expected a single id"),
    ],
)
def test_invalid_end_tokens_are_refused(generate: Any, line: str, tmp_path: Path) -> None:
    source = directory(tmp_path / "hf", {"eos_token_id": 1} | generate, {})
    with pytest.raises(UserError) as caught:
        huggingface.read_hf(source)
    said = str(caught.value)
    assert said.startswith(f"{source}/generation_config.json: ") and line.split("found (1")[0] in said, said


def test_backbone_with_one_end_token_refuses_several(tmp_path: Path) -> None:
    source = directory(tmp_path / "hf", {"eos_token_id": [1, 5]}, {})
    with pytest.raises(
        UserError, match=r"eos_token_id: found \[1, 5\]; expected a single id, since OneEnd has no field"
    ):
        huggingface.read_hf(source, OneEnd)


# Settings of decoding.


def test_limits_prefixes_and_bounds_use_all_end_tokens() -> None:
    config = Config(model=SEVERAL, grid=GridConfig(1, 12, 5), decode=DecodeConfig(limit="source"))
    generator = Generator(config, None, None)
    method, strategy = generator.method("pipelined"), Pipelined(1, 12, 5, other_ends=(5,))
    source = generator.source({"source_ids": [3, 4, 1], "max_rows": 2}, "here", 0)
    options: Any = of_batch([source], [[3, 4, 1]], method, strategy, config=config, tokenizer=None)
    assert np.flatnonzero(options.rules[0].tokens[0]).tolist() == [1, 3, 4, 5]
    assert options.forced[0, 2, 2] == 1  # the row after the last ends as in training
    with pytest.raises(UserError, match=r'"row_prefixes": found \[3, 5\], in which 5 ends the row'):
        generator.source({"source_ids": [3, 1], "row_prefixes": [[3, 5]]}, "here", 0)
    with pytest.raises(UserError, match="here: found 'red <end>', which ends the row"):
        prefix_ids(Words(), "red <end>", "here", SEVERAL.end_token_ids)
    assert prefix_ids(Words(), "red <end>", "here", 7) == (3, 5)


def of_schemas(end: int) -> Generator:
    """A generator of random weights for the schemas' vocabulary, with an additional end token."""
    made = schemas.generator(delay=1, time_max=14)
    model = dataclasses.replace(made.architecture, other_eos_token_ids=(end,))  # type: ignore[type-var]
    params = oracle.random_params(model, np.random.default_rng(3), eos_scale=2.0)
    return Generator(dataclasses.replace(made.config, model=model), params, made.tokenizer)


COLOURS = ["red", "a", "c"]
SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": COLOURS}, "y": {"type": "integer", "minimum": 0, "maximum": 30}},
}


def test_grammar_allows_all_end_tokens_at_end_of_text() -> None:
    """They are allowed nowhere else, independent of their texts, and leave the state unchanged."""
    end = schemas.PIECES.index("b")
    generator = of_schemas(end)
    found = generator.under(SCHEMA).answer_format
    assert found is not None
    grammar: Any = found.rule(generator.make_strategy("pipelined"), [None])
    assert grammar.ends == (1, end)
    states, may_end = np.arange(len(grammar.table.distance)), np.asarray(grammar.table.distance) == 0
    allowed = np.asarray(grammar.allow(states, np.full(len(states), 9)))
    assert (allowed[1] == may_end).all() and (allowed[end] == may_end).all() and may_end.any()
    assert not allowed[end, grammar.starts[0, :2]].any()
    assert (np.asarray(grammar.move(states, np.full(len(states), end))) == states).all()


@pytest.mark.slow
def test_answers_of_a_schema_end_at_each_end_token() -> None:
    end, seen = schemas.PIECES.index("b"), Counter[int]()
    generator = of_schemas(end)
    for seed in range(8):
        *events, record = list[Any](generator.under(SCHEMA).stream_rows("a red fish", temperature=5.0, seed=seed))
        value = json.loads(record["text"])
        assert value["x"] in COLOURS and 0 <= value["y"] <= 30 and record["truncated"] is None
        seen += Counter(event.token for event in events if isinstance(event, RowEvent) and event.done)
    assert {*seen} == {1, end}


# Custom methods and strategies.


def test_method_with_one_end_token_ends_rows_at_it(caplog: pytest.LogCaptureFixture) -> None:
    """A line lists once the model's other end tokens, which end no row."""
    config = Config(model=dataclasses.replace(FEW_WORDS, other_eos_token_ids=(5, 7)), method=Uneven())
    generator = Generator(config, None, None)
    assert [ends_of(generator.make_strategy("uneven")) for _ in range(2)] == [(1,), (1,)]
    line = "uneven decoding: end token 5 and 7 of the model ends no row, because it is not in `other_ends`"
    assert [record.message for record in caplog.records] == [line]
    assert Ids(0, 1) == Ids(bos=0, eos=1) and Ids(0, 1).ends == (1,) and Ids(0, 1).eos == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "ours"])
def test_methods_pass_checks_with_several_end_tokens(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """One method has only `eos`, and one is pipejax's under another name."""
    ours: Any = type("Ours", (PipelinedMethod,), {"name": "ours"})(GridConfig(2, 14, 4))
    model = dataclasses.replace(testing.TOY, other_eos_token_ids=(60, 61))
    assert "answers agree with recomputation" in testing.check_method(Uneven() if kind == "own" else ours, model=model)
    assert ("ends no row" in caplog.text) == (kind == "own")


def test_strategies_of_methods_have_all_end_tokens() -> None:
    ids = Ids.of(SEVERAL)
    assert (ids.bos, ids.eos, ids.ends) == (0, 1, (1, 5))
    generator = Generator(Config(model=SEVERAL, decode=DecodeConfig(draft="source")), None, None)
    for name in ("pipelined", "sequential"):
        made = generator.method(name).strategy(ids)
        drafted = with_drafts(made, Drafts(FromSource()))  # type: ignore[arg-type]
        assert ends_of(made) == ends_of(drafted) == (1, 5)
    beams = Generator(Config(model=SEVERAL, decode=DecodeConfig(beams=2)), None, None).method("sequential")
    assert ends_of(beams.strategy(ids)) == (1, 5)


@pytest.mark.parametrize("eos, fits", [(1, True), (5, True), (6, False)])
def test_drafting_model_may_have_any_end_token_as_eos(eos: int, fits: bool, tmp_path: Path) -> None:
    """The large model verifies drafts, so drafts with another end only cost calls."""
    other = Config(model=dataclasses.replace(FEW_WORDS, eos_token_id=eos))
    checkpoint.save_params(tmp_path / "small", other, oracle.random_params(other.model, np.random.default_rng(0)))
    decode = DecodeConfig(draft="model", draft_checkpoint=str(tmp_path / "small"))
    config = Config(model=SEVERAL, decode=decode)
    if fits:
        assert drafter_parameters.load(TargetModel(config)) is not None
        return
    with pytest.raises(UserError, match="found a T5 with eos_token_id = 6; expected 1"):
        drafter_parameters.load(TargetModel(config))


# transformers' `generate` with rows.


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module that `to-hf` writes."""
    config = Config(model=SEVERAL, grid=GridConfig(delay=1, time_max=12, sub_max=5))
    return written_module(config, tmp_path_factory.mktemp("several_ends"))


def test_custom_generate_ends_rows_at_each_end_token(written: Any, tmp_path: Path) -> None:
    seen = Counter[Any]()
    for seed, setting in enumerate(GRIDS[:3]):
        params = oracle.random_params(SEVERAL, np.random.default_rng([seed, 7]))
        torchs = in_torch(SEVERAL, params, tmp_path / str(seed))
        given = dict(zip(("delay", "time_max", "sub_max", "literal"), setting, strict=True))
        for text in sources(np.random.default_rng(seed), 6, SEVERAL.vocab_size):
            ids = torch.tensor([text])
            how = {"attention_mask": torch.ones_like(ids), "return_dict_in_generate": True, "separator": [2]}
            found = written.generate(torchs, ids, **how, **given)
            expected = of_algorithm_1(SEVERAL, params, text, setting)
            assert (found.rows, found.steps, found.truncated) == (
                [expected.rows],
                [expected.steps],
                [expected.truncated],
            )
            assert found.sequences[0, -1] == 1
            seen += ends_in(expected.all_rows)
    assert all(seen[end, empty] for end in (1, 5) for empty in (False, True)), seen
    with pytest.raises(ValueError, match=r"eos_token_id: found 1; expected \[1, 5\]"):
        written.generate(torchs, ids, eos_token_id=[1])
    assert written.generate(torchs, ids, eos_token_id=[5, 1]) is not None


def test_rows_differing_only_in_end_token_are_repeated(written: Any) -> None:
    """In `custom_generate` and in the strategy, two such rows in succession end an answer."""
    settings = written.Settings(delay=1, time_max=20, sub_max=9, unique=True)
    rows = [[3, 1], [4, 1], [3, 5], [4, 5], [6, 1], [7, 1], *[[1, 1]] * 3]

    def says(time: int) -> list[int]:
        return [row[min(max(time - i, 0), 1)] for i, row in enumerate(rows)]

    answer = written.AnswerRows(settings, 0, [1, 5])
    while not answer.done:
        answer.query()
        answer.advance([says(answer.time)[i] for i in answer.open])
    assert answer.result() == [[3], [4], [6]]
    times = itertools.count()
    strategy = Pipelined(1, 20, 9, unique=True, other_ends=(5,))
    *_, (_, _, decoded, _) = walk(strategy, lambda _: np.asarray([says(next(times))], np.int32))
    assert int(decoded.steps[0]) == answer.steps and decoded.truncated[0] == 0
    assert [row[0, 0].tolist() for row in np.split(decoded.tokens[0], 9)][:5] == [3, 4, 3, 4, 6]
