"""Answers that follow JSON schemas, wherever they are decoded: against jsonschema, Algorithm 1 and plain Python."""

import json
import logging
from typing import Any

import jsonschema
import numpy as np
import pytest

from pipejax.apps.command import main
from pipejax.data.token_bytes import token_bytes
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import grammar
from pipejax.inference.backends import OwnKernel
from pipejax.inference.engine import Engine, Request
from pipejax.inference.schema import Schema
from pipejax.inference.streaming import RowEvent
from pipejax.system.errors import UserError
from support import oracle, schemas
from support.schemas import PROPERTIES, generator, many, schema

SOURCES = ["a red fish", "2024", "the", "ab ab ab ab", "no", "5 5", "x", "red red"]


@pytest.fixture(scope="module", autouse=True)
def one_size() -> Any:
    """Tables of most schemas have one size, so that few programs are compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "LEAST", 512)
        yield


@pytest.fixture(scope="module")
def made() -> Any:
    return generator()


def check(records: list[Any], asked: dict[str, Any]) -> list[Any]:
    """The objects of records, which jsonschema finds good."""
    judge = jsonschema.Draft202012Validator(asked, format_checker=jsonschema.FormatChecker())
    found = []
    for record in records:
        judge.validate(json.loads(record["text"]))
        assert record["truncated"] is None and [*json.loads(record["text"])] == [*asked["properties"]]
        found.append(json.loads(record["text"]))
    return found


def test_every_property_is_asked_for_in_thirty_schemas() -> None:
    asked = many(30)
    assert {name for one in asked for name in one["properties"]} == {*PROPERTIES} and len(PROPERTIES) == 30


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_answers_are_valid(made: Any, temperature: float) -> None:
    """Of weights that know nothing. Each third answer, or more, would be cut off without its schema."""
    seen = set()
    for i, asked in enumerate(many(30)):
        records = made.decode(SOURCES, schema=asked, temperature=temperature, seed=i, strategy="pipelined")
        seen |= {json.dumps(found) for found in check(records, asked)}
    assert len(seen) > 60


@pytest.mark.long
@pytest.mark.parametrize("delay", [0, 1])
def test_ten_thousand_answers_are_valid(delay: int) -> None:
    made = generator(1, delay=delay, time_max=60)
    for asked in many(30):
        check(made.decode(SOURCES, schema=asked, temperature=1.5, samples=21), asked)


@pytest.mark.parametrize("grid", [{"time_max": 44}, {"time_max": 60, "delay": 2}])
def test_rows_that_reach_their_bound_end_in_time(grid: dict[str, Any]) -> None:
    """A uuid has 36 characters, most of which are a token each; a text would go on for ever."""
    made = generator(3, **grid)
    found = check(made.decode(SOURCES, schema=schema("uuid", "text", "tags"), temperature=3.0), schema("uuid", "text", "tags"))
    assert max(len(one["text"]) for one in found) > 25


def test_a_bound_that_is_too_tight_is_refused() -> None:
    asked = schema("date")  # date: 4 to begin with, or 5 tokens; and the day, in 9 tokens at least
    with pytest.raises(UserError, match=r"properties\.date: found grid\.time_max=9; expected at least (\d+), so") as told:
        generator(time_max=9).decode(["a"], schema=asked)
    least = int(str(told.value).split("at least ")[1].split(",")[0])
    with pytest.raises(UserError, match=f"expected at least {least}"):
        generator(time_max=least - 1).decode(["a"], schema=asked)
    check(generator(time_max=least).decode(SOURCES, schema=asked), asked)


# Against plain Python: the best of the tokens with which some text is still within reach.

FINITE = {"colour": ["red", "redder", "ab"], "mixed": ["5", "null", "19"], "fixed": ["ab"]}


def tokens_needed(text: str, pieces: list[str]) -> int:
    """The fewest tokens that spell a text."""
    best = [0] + [10**6] * len(text)
    for end in range(1, len(text) + 1):
        best[end] = min(
            (best[end - len(p)] + 1 for p in pieces if len(p) <= end and text[end - len(p) : end] == p), default=10**6
        )
    return best[len(text)]


def allowed(written: str, texts: list[str], left: int, pieces: dict[int, str]) -> list[int]:
    """Tokens that may come next; `left`: answers that are left, this one included."""
    spelled, targets = [*pieces.values()], [space + text for text in texts for space in ("", " ")]
    found = [1] if written in targets else []
    for token, piece in pieces.items():
        rests = [text[len(written) + len(piece) :] for text in targets if text.startswith(written + piece)]
        if any(tokens_needed(rest, spelled) + 1 <= left - 1 for rest in rests):
            found.append(token)
    return found


@pytest.mark.parametrize("native, delay", [(False, 0), (False, 2), pytest.param(True, 0, marks=pytest.mark.slow)])
def test_tokens_are_the_best_that_can_still_end(native: bool, delay: int, request: Any) -> None:
    backend = OwnKernel("auto", request.getfixturevalue("kernel")) if native else schemas.XLA
    properties = {name: {"enum": values} for name, values in FINITE.items()}
    asked = {"type": "object", "properties": properties}
    pieces = {i: p.replace("▁", " ") for i, p in enumerate(schemas.PIECES) if i > 2}
    tight = False
    for seed in range(3):
        made = generator(seed, backend=backend, delay=delay, time_max=12 + 2 * delay)
        grid, rows = made.config.grid, made.under(asked).schema.rows
        params = oracle.random_params(schemas.SIZES, np.random.default_rng(seed), eos_scale=1.2)

        def next_tokens(written: list[list[int]], memory: Any = None) -> list[int]:
            found = []
            logits = oracle.grid_logits(params, schemas.SIZES, encoded, written, grid.delay)
            for i, row in enumerate(written):
                after = len(rows[i].beginning) + 1
                if i >= len(rows) or row[-1] == 1 or len(row) < after:
                    found.append(1)
                    continue
                text = "".join(pieces[token] for token in row[after:])
                left = grid.time_max - (len(row) - 1 + delay * i)
                choices = allowed(text, FINITE[rows[i].name], left, pieces)
                assert choices
                nonlocal_tight.append(left <= 3)
                found.append(max(choices, key=lambda token: logits[i][-1][token]))
            return found

        nonlocal_tight: list[bool] = []
        for source in SOURCES[:3]:
            ids = [*made.tokenizer.encode(source), 1]
            encoded = oracle.encode(params, schemas.SIZES, ids)
            prefixes = [list(row.beginning) for row in rows]
            expected = oracle.algorithm1(
                next_tokens if delay == 0 else lambda w: [*next_tokens(w[:3]), *[1] * (len(w) - 3)],
                delay=delay,
                time_max=grid.time_max,
                sub_max=3 if delay == 0 else grid.sub_max,
                stop="empty_row",
                prefixes=prefixes,
            )
            (record,) = made.decode([source], schema=asked)
            assert record["row_ids"] == [[t for t in row[1:] if t != 1] for row in expected.all_rows[:3]]
        tight |= any(nonlocal_tight)
    assert tight or delay


# Wherever answers are decoded.


def test_streams_and_refilled_batches_give_the_same(made: Any) -> None:
    """Requests with other schemas and without one come and go at the same time."""
    asked = [schema("short", "range", "yes"), schema("colour"), None]
    wanted = [made.decode([s], schema=one) if one else made.decode([s], row_names=NAMES) for one in asked for s in SOURCES] if False else []
    expected = [made.decode(SOURCES, schema=one) for one in asked[:2]]
    under = [made.under(one) for one in asked[:2]]
    for records, own in zip(expected, under, strict=True):
        *events, last = list(own.stream_rows(SOURCES[0]))
        assert last["text"] == records[0]["text"] and all(isinstance(event, RowEvent) for event in events)
    engine = Engine(generator(row_names=schemas.NAMES[:6]), places=3, queue=64)
    try:
        for k in range(2):
            answers = [
                (engine.submit(Request(own.source(text, "here", i), "pipelined", log_probs=False)), records[i])
                for records, own in zip(expected, under, strict=True)
                for i, text in enumerate(SOURCES[k:], k)
            ]
            for answer, record in answers:
                *events, last = answer.events()
                assert (last["text"], last["row_ids"]) == (record["text"], record["row_ids"])
    finally:
        engine.close(drain=False, seconds=10)
    assert wanted == []


def test_drafts_are_off_and_one_line_says_so(made: Any, said: list[str]) -> None:
    asked = schema("short", "range")
    drafting = generator(decode={"draft": "jacobi", "trace": True})
    found = [drafting.decode(SOURCES, schema=asked) for _ in range(2)]
    assert [record["text"] for record in found[1]] == [record["text"] for record in made.decode(SOURCES, schema=asked)]
    assert [line for line in said if "drafts" in line] == [
        "a schema is given, so no drafts are verified, and records have no trace"
    ]
    assert "trace" not in found[0][0]


def test_rows_have_the_names_of_training(made: Any, said: list[str]) -> None:
    own = generator(row_names=["yes = ", "short:", "range:"])
    rows = own.under(schema("short", "range", "yes")).schema.rows
    assert [row.name for row in rows] == ["yes", "short", "range"]  # in the order of training
    assert rows[0].beginning == (*own.tokenizer.encode("yes = "),)
    assert [*json.loads(own.decode(["a"], schema=schema("short", "range", "yes"))[0]["text"])] == ["short", "range", "yes"]
    assert not said
    own.under(schema("short", "date"))
    assert said == [
        "schema: properties.date: found no such name in grid.row_names = ['yes = ', 'short:', 'range:']; the model has "
        "not learned to write that row"
    ]


def test_values_that_the_tokenizer_lacks_are_told(made: Any, said: list[str]) -> None:
    asked = {"type": "object", "properties": {"v": {"enum": ["red", "ß", "{}"]}}}
    assert {one["v"] for one in check(made.decode(SOURCES, schema=asked), asked)} == {"red"}
    assert said == ["schema: properties.v: found 'ß' and 1 others, which this tokenizer cannot write"]
    with pytest.raises(UserError, match=r"^schema: properties\.v: found no text that this tokenizer can write"):
        made.decode(["a"], schema={"type": "object", "properties": {"v": {"const": "ß"}}})


# Refusals.


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


REFUSED = {
    "no object": ([], r"^schema: found \[\]; expected a schema"),
    "a list": ({"type": "array"}, r"^schema: type: found 'array'; expected \"object\""),
    "no property": (of(), r"properties: found \{\}"),
    "required": ({**of(a={"type": "null"}), "required": ["b"]}, r"required: found \['b'\]; expected names of prop"),
    "nested": (of(a=of(b={"type": "null"})), r"properties\.a: type: found 'object'; expected one of string"),
    "lists of lists": (of(a={"type": "array", "items": {"type": "array"}}), r"a: items: found .*; expected values"),
    "a reference": (of(a={"$ref": "#/$defs/A"}), r"a: type: found None|a: found '\$ref'"),
    "any of two": (of(a={"anyOf": [{"type": "string"}, {"type": "integer"}]}), r"a: anyOf: found .*; expected none, or"),
    "two types": (of(a={"type": ["string", "integer"]}), r"a: type: found \['string', 'integer'\]; expected one type"),
    "another key": (of(a={"type": "integer", "multipleOf": 3}), r"a: found 'multipleOf'; expected none but type, min"),
    "a key of lists": (of(a={"type": "array", "items": {"type": "null"}, "uniqueItems": True}), r"a: found 'uniqueIt"),
    "definitions": ({**of(a={"type": "null"}), "$defs": {}}, r"^schema: found '\$defs'"),
    "a format": (of(a={"type": "string", "format": "ipv6"}), r"a: format: found 'ipv6'; expected one of date, time"),
    "look-ahead": (of(a={"type": "string", "pattern": "a(?=b)"}), r"a: pattern: found 'a\(\?=b\)' with '\(\?' at cha"),
    "a backreference": (of(a={"type": "string", "pattern": r"(a)\1"}), r"a: pattern: found .* at character 4; expected"),
    "a boundary": (of(a={"type": "string", "pattern": r"\bred"}), r"a: pattern: found .*; expected a regular expression"),
    "an open group": (of(a={"type": "string", "pattern": "(a"}), r"'\(' without '\)' at character 2"),
    "an open set": (of(a={"type": "string", "pattern": "[a"}), r"its end at character 2"),
    "a wrong range": (of(a={"type": "string", "pattern": "[z-a]"}), r"a range of no characters"),
    "an anchor within": (of(a={"type": "string", "pattern": "a$b"}), r"'\$' before its end"),
    "no text": (of(a={"type": "string", "pattern": "^ab$", "maxLength": 1}), r"a: found no text that this tokenizer can"),
    "no number": (of(a={"type": "integer", "minimum": 3, "maximum": 2.5}), r"a: found no whole number from 3 to 2"),
    "a bound of numbers": (of(a={"type": "number", "minimum": 3}), r"a: minimum: found 3; expected 0 or none"),
    "lengths": (of(a={"type": "string", "minLength": 3, "maxLength": 2}), r"a: maxLength: found 2; expected at least"),
    "a length": (of(a={"type": "string", "maxLength": "2"}), r"a: maxLength: found '2'; expected a whole number"),
    "too long": (of(a={"type": "string", "minLength": 10**6}), r"a: minLength: found 1000000; expected at most \d+, si"),
    "an enum of none": (of(a={"enum": []}), r"a: enum: found \[\]; expected a list of values"),
    "an enum of lists": (of(a={"enum": [[]]}), r"a: enum: found \[\]; expected values of type"),
    "an enum of others": (of(a={"type": "string", "enum": [5]}), r"a: enum: found 5; expected values of type string"),
    "a space first": (of(a={"enum": [" a"]}), r"a: enum: found ' a'; expected no space at its beginning"),
    "commas": (of(a={"type": "array", "items": {"enum": ["a,b"]}}), r"a: items: found 'a,b'; expected texts without"),
    "an empty name": (of(**{" ": {"type": "null"}}), r"properties: found 'an empty name'"),
    "rows that begin alike": (of(ß={"type": "null"}, ñ={"type": "null"}), r"properties\.ß: found a row that begins as"),
    "too many": (of(**{f"n{i}": {"type": "null"} for i in range(7)}), r"^schema: found 7 row_prefixes with grid\.delay"),
    "states": (of(a={"type": "string", "pattern": "^(a|b)*a(a|b){18}$"}), r"^schema: found one of more than 32768 sta"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_schemas_that_rows_cannot_follow(case: str, made: Any) -> None:
    asked, words = REFUSED[case]
    with pytest.raises(UserError, match=words) as told:
        made.decode(["a"], schema=asked)
    assert "\n" not in str(told.value)


def test_settings_that_go_against_a_schema(made: Any) -> None:
    asked = schema("yes")
    with pytest.raises(UserError, match=r"^schema: found one with sequential decoding; expected none"):
        made.decode(["a"], schema=asked, strategy="sequential")
    with pytest.raises(UserError, match=r"^decode\.limit: found source with a schema; expected none"):
        made.decode(["a"], schema=asked, limit="source")
    with pytest.raises(UserError, match=r"^grid\.stop: found literal with a schema; expected empty_row"):
        made.decode(["a"], schema=asked, delay=1, stop="literal")
    with pytest.raises(UserError, match=r"^source 0: found row_prefixes or max_rows; expected neither"):
        made.decode([{"source": "a", "row_prefixes": ["yes:"]}], schema=asked)
    with pytest.raises(UserError, match=r"^absent\.json: cannot be read \(No such file or directory\); expected a JSON"):
        made.decode(["a"], schema="absent.json")


# Tokenizers.


def spelled(tokenizer: Tokenizer, ids: list[int]) -> str:
    found = token_bytes(tokenizer, tokenizer.size)
    return b"".join(found[i] for i in ids).decode(errors="ignore").strip()


def test_bytes_of_tokens_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    import tokenizers
    import transformers
    from tokenizers import decoders, models

    from pipejax.data.tokenizer_file import TokenizerFile

    own = schemas.tokenizer()
    pieces = ["</s>", "<unk>", "▁", "a", "▁b", *(f"<0x{byte:02X}>" for byte in range(256))]
    fallback = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    fallback.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fallback.add_special_tokens(["</s>", "<unk>"])
    byte_level = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate("aĠbÃ©")}, []))
    byte_level.decoder = decoders.ByteLevel()
    rng = np.random.default_rng(0)
    for one in (own, tokenizer, Tokenizer(TokenizerFile(fallback, {"eos_token": "</s>"}, False, {}))):
        for _ in range(200):
            ids = rng.integers(0, min(one.size, 128), rng.integers(1, 9)).tolist()
            assert spelled(one, ids) == one.decode(ids)
    assert spelled(Tokenizer(TokenizerFile(fallback, {}, False, {})), [3, 5 + 0xC3, 5 + 0xA9, 4]) == "aé b"
    assert spelled(Tokenizer(TokenizerFile(byte_level, {}, False, {})), [0, 1, 2, 3, 4]) == "a bé"
    assert spelled(Tokenizer(transformers.ByT5Tokenizer()), [*range(3, 131), 0xC3 + 3, 0xA9 + 3, 300, 1]).endswith("~\x7fé")
    word_piece = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    word_piece.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match=r"^tokenizer: found one of \('WordPiece',\); expected one of pieces or of bytes"):
        token_bytes(Tokenizer(TokenizerFile(word_piece, {}, False, {})), 2)


# The command.


def test_the_command(made: Any, tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("pipejax.inference.loading.load", lambda *args, **options: made)
    given, wanted, out = (tmp_path / name for name in ("in.jsonl", "schema.json", "out.jsonl"))
    given.write_text("".join(json.dumps({"id": i, "source": text}) + "\n" for i, text in enumerate(SOURCES)))
    asked = schema("short", "range")
    wanted.write_text(json.dumps(asked))
    flags = ["--checkpoint", "x", "--input", str(given), "--output", str(out), "--schema", str(wanted)]
    assert main(flags) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["text"] for line in lines] == [r["text"] for r in made.decode(SOURCES, schema=asked)]
    check(lines, asked)
    wanted.write_text('{"type": "object", "properties": {"a": {"$ref": "b"}}}')
    kept = out.read_bytes()
    with pytest.raises(UserError, match=r"properties\.a"):
        main(flags)
    wanted.write_text("{")
    with pytest.raises(UserError, match=r"schema\.json: found no JSON \(Expecting property name.*\); expected a JSON"):
        main(flags)
    assert out.read_bytes() == kept


def test_another_schema_is_other_work(made: Any) -> None:
    from pipejax.apps.unfinished import difference, flattened, settings_of

    def settings(*names: str) -> Any:
        own = made.under(schema(*names)) if names else made
        return flattened(settings_of(own, "pipelined", [own.source("a", "here", 0)]))

    assert settings("yes") == settings("yes")
    for other in (("short",), ()):
        assert difference(settings("yes"), settings(*other)).startswith("answers under another schema")


# Real pieces.


def test_the_real_tokenizer_of_t5(real_data: Any) -> None:
    import dataclasses

    from pipejax.config import Config, GridConfig, TrainConfig
    from pipejax.inference.generator import Generator

    sizes = dataclasses.replace(schemas.SIZES, vocab_size=32128)
    grid = GridConfig(delay=0, time_max=32, sub_max=10)
    params = oracle.random_params(sizes, np.random.default_rng(0), eos_scale=1.2)
    own = Generator(
        Config(model=sizes, grid=grid, train=TrainConfig(objective="pipelined")),
        params,
        Tokenizer.load(real_data / "t5_tokenizer"),
    )
    for names in (("date", "text", "price", "tags", "code"), ("moment", "mail", "many", "maybe", "long", "mixed")):
        for temperature in (0.0, 1.0):
            check(own.decode(SOURCES, schema=schema(*names), temperature=temperature), schema(*names))


def test_a_table_is_small(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = made.under(schema("uuid", "text", "date", "code", "price")).schema
    assert isinstance(found, Schema) and found.table.moves.nbytes < 2**22
