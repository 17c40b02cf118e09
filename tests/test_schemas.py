"""Answers that follow JSON schemas, in all ways of decoding, against jsonschema, Algorithm 1 and plain Python."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import json
import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jsonschema
import numpy as np
import pytest
from starlette.testclient import TestClient

from pipejax.apps.schemas import grammar, json_schema
from pipejax.apps.schemas import row_schema as schema_lib
from pipejax.apps.schemas.row_schema import Schema
from pipejax.apps.schemas.token_bytes import token_bytes
from pipejax.apps.serving import app
from pipejax.apps.serving.answer import Request
from pipejax.apps.serving.compiler import LAST
from pipejax.apps.serving.engine import Engine
from pipejax.data.examples import Example
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import Sampling
from pipejax.inference.answer_format import Effort, Uncompiled
from pipejax.inference.backends import XLA
from pipejax.inference.loading import load
from pipejax.inference.running_batch import StepKind, Steps
from pipejax.inference.streaming import RowEvent
from pipejax.kernels.backends import OwnKernel
from pipejax.offline.decode_command import main
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.system.fields import named
from pipejax.training.loop import fit
from support import oracle, schemas
from support.refusals import refuses
from support.schemas import FORMATS, PROPERTIES, generator, many, schema
from support.served import wait_until_compiled
from support.tiny import RUN_ON_ONE, change

SOURCES = ["a red fish", "2024", "the", "ab ab ab ab", "no", "5 5", "x", "red red"]


pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def made() -> Any:
    return generator()


def check(records: list[Any], asked: dict[str, Any]) -> list[Any]:
    """The objects of records, which jsonschema must accept."""
    judge = jsonschema.Draft202012Validator(asked, format_checker=FORMATS)
    found = []
    for record in records:
        judge.validate(json.loads(record["text"]))
        assert record["truncated"] is None and [*json.loads(record["text"])] == [*asked["properties"]]
        found.append(json.loads(record["text"]))
    return found


def test_thirty_schemas_contain_every_property_kind() -> None:
    asked = many(30)
    assert {name for one in asked for name in one["properties"]} == {*PROPERTIES} and len(PROPERTIES) == 30


_allow, _move = jax.jit(grammar.Grammar.allow), jax.jit(grammar.Grammar.move)


def walk(found: Any, strategy: Any, rng: np.random.Generator, count: int = 16) -> list[str]:
    """Answers of random tokens among the tokens that the grammar allows."""
    asked = found.rule(strategy, [None])
    rows = np.repeat(np.arange(asked.starts.shape[1]), count)
    states, over, written = asked.starts[0, rows], rows >= len(found.rows), list[np.ndarray]()
    for step in range(asked.first.min(), asked.last.max() + 1):
        allowed = np.asarray(_allow(asked, states, asked.last[0, rows] - step))
        drawn = rng.random(allowed.shape)
        drawn[[*asked.ends]] *= 1 + np.arange(len(rows)) % 2  # half of them end soon
        tokens = np.where(allowed, drawn, -1.0).argmax(axis=0)
        begun = ~over & (step >= asked.first[0, rows])
        assert (allowed.any(axis=0) | ~begun).all(), "a row that can go nowhere"
        states = np.where(begun, _move(asked, states, tokens), states)
        over |= begun & (np.isin(tokens, asked.ends))
        written.append(np.where(begun & ~over, tokens, -1))
    assert over.all(), "a row without an end"
    texts = [[token for token in column if token >= 0] for column in np.array(written).T.tolist()]
    given = [list(row.beginning) for row in found.rows]
    return [found.dump([one + texts[i * count + k] for i, one in enumerate(given)]) for k in range(count)]


def test_every_allowed_answer_is_valid() -> None:
    """With any preferred tokens, rows end in time, and jsonschema accepts the object."""
    made, rng, seen = generator(time_max=30, delay=2), np.random.default_rng(1), set[str]()
    for asked in many(30):
        texts = walk(made.under(asked).answer_format, made.make_strategy("pipelined"), rng)
        check([{"text": text, "truncated": None} for text in texts], asked)
        seen |= {*texts}
    assert len(seen) > 200


@pytest.mark.long
@pytest.mark.parametrize("delay", [0, 1])
def test_ten_thousand_answers_are_valid(delay: int) -> None:
    made = generator(1, delay=delay)
    for asked in many(30):
        check(made.decode(SOURCES, schema=asked, temperature=1.5, samples=21), asked)


@pytest.mark.slow
def test_rows_that_start_later_end_in_time() -> None:
    """An id has 12 characters, most of which are a token each; a text would never end."""
    made, asked = generator(3, time_max=26, delay=2), schema("text", "id", "tags")
    found = check(made.decode(SOURCES, schema=asked, temperature=3.0), asked)
    assert max(len(one["text"]) for one in found) > 15


@pytest.mark.slow
def test_a_bound_that_is_too_tight_is_refused() -> None:
    asked = schema("date")  # date: 4 or 5 tokens at first, and the day, in 9 tokens at least
    with pytest.raises(UserError, match=r"\.date: found grid\.time_max=9; expected at least \d+") as told:
        generator(time_max=9).decode(["a"], schema=asked)
    least = int(str(told.value).split("at least ")[1].split(",")[0])
    with pytest.raises(UserError, match=f"expected at least {least}"):
        generator(time_max=least - 1).decode(["a"], schema=asked)
    check(generator(time_max=least).decode(SOURCES, schema=asked), asked)


# The reference in plain Python: the best of the tokens after which some text can still be completed.


@pytest.mark.parametrize(
    "native, delay",
    [(False, 0), pytest.param(False, 2, marks=pytest.mark.slow), pytest.param(True, 0, marks=pytest.mark.slow)],
)
def test_tokens_are_the_best_after_which_rows_can_end(native: bool, delay: int, request: Any) -> None:
    backend = OwnKernel("auto", request.getfixturevalue("kernel")) if native else XLA
    asked = of(**{name: {"enum": values} for name, values in schemas.FINITE.items()})
    near = list[bool]()
    made: Any = generator(2, backend=backend, delay=delay, time_max=12 + 2 * delay)
    rows = made.under(asked).answer_format.rows
    params = oracle.random_params(schemas.SIZES, np.random.default_rng(2), eos_scale=1.2)
    for source in SOURCES[:4]:
        encoded = oracle.encode(params, schemas.SIZES, made.ids_of(made.source(source, "here", 0)))

        def last(written: list[list[int]], encoded: Any = encoded) -> list[np.ndarray]:
            return [x[-1] for x in oracle.grid_logits(params, schemas.SIZES, encoded, written, delay)]

        expected = oracle.algorithm1(
            schemas.choices(made, last, rows, near),
            delay=delay,
            time_max=made.config.grid.time_max,
            sub_max=4 if delay else 3,
            stop="empty_row",
            prefixes=[row.beginning for row in rows],
        )
        (record,) = made.decode([source], schema=asked)
        assert record["row_ids"] == [[token for token in row[1:] if token != 1] for row in expected.all_rows[:3]]
    assert any(near) or delay


# All ways of decoding.


@pytest.mark.slow
def test_streams_and_refilled_batches_give_the_same() -> None:
    """Requests with other schemas, and without one, join and leave at the same time."""
    served = generator(row_names=(*schemas.NAMES[:4],))
    ways = [served.under(schema("short", "range", "yes")), served.under(schema("colour")), served]
    expected = [way.decode(SOURCES[:4]) for way in ways]
    for way, records in zip(ways[:2], expected, strict=False):
        *events, last = list(way.stream_rows(SOURCES[0]))
        assert isinstance(last, dict) and last["text"] == records[0]["text"]
        assert events and all(isinstance(event, RowEvent) for event in events)
    engine = Engine(served, places=3, queue=64)
    try:
        for k in range(2):
            answers = [
                (engine.submit(Request(way.source(text, "here", i), "pipelined", log_probs=False)), records[i])
                for way, records in zip(ways, expected, strict=True)
                for i, text in enumerate(SOURCES[k:4], k)
            ]
            for answer, record in answers:
                *_, found = answer.events()
                assert isinstance(found, dict)
                assert (found["text"], found["row_ids"]) == (record["text"], record["row_ids"])
    finally:
        engine.close(drain=False, seconds=10)


def test_schema_disables_drafts_with_one_warning(made: Any, said: list[str]) -> None:
    asked = schema("short", "range")
    drafting = generator(decode={"draft": "jacobi", "trace": True})
    found = [drafting.decode(SOURCES, schema=asked) for _ in range(2)]
    assert [record["text"] for record in found[1]] == [record["text"] for record in made.decode(SOURCES, schema=asked)]
    assert [line for line in said if "drafts" in line] == [
        "warning: a schema is given, so no drafts are verified, and records have no trace"
    ]
    assert "trace" not in found[0][0]


def test_rows_have_the_names_of_training(made: Any, said: list[str]) -> None:
    own: Any = generator(row_names=("yes - ", "short:", "range:"))
    rows = own.under(schema("short", "range", "yes")).answer_format.rows
    assert [row.name for row in rows] == ["yes", "short", "range"]  # in the order of training
    assert rows[0].beginning == (*own.tokenizer.encode("yes - "),)
    (record,) = own.decode(["a"], schema=schema("short", "range", "yes"))
    assert [*json.loads(record["text"])] == ["short", "range", "yes"]
    assert not said
    own.under(schema("short", "date"))
    assert len(said) == 1 and said[0].startswith(
        "warning: schema: properties.date: found a name that is not in grid.row_names = ['yes - ', 'short:', 'range:']"
    )


def test_values_that_the_tokenizer_cannot_write_are_reported(made: Any, said: list[str]) -> None:
    asked = {"type": "object", "properties": {"v": {"enum": ["red", "ß", "{}"]}}}
    assert {one["v"] for one in check(made.decode(SOURCES, schema=asked), asked)} == {"red"}
    assert said == ["warning: schema: properties.v: found 'ß' and 1 others, which this tokenizer cannot encode"]
    with refuses("schema: properties.v", found="no text"):
        made.decode(["a"], schema={"type": "object", "properties": {"v": {"const": "ß"}}})


# Refusals.


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


REFUSED = {
    "no object": ([], r"^schema: found \[\]; expected a schema"),
    "a list": ({"type": "array"}, r"^schema: type: found 'array'; expected \"object\""),
    "half a surrogate pair": (of(a={"enum": ["\ud800"]}), r"^schema: found no JSON .*surrogates not allowed"),
    "no number of JSON": (of(a={"enum": [float("inf")]}), r"^schema: found no JSON "),
    "a huge bound": (of(a={"type": "integer", "minimum": 10**400}), r"^schema: properties\.a: minimum: found 1000"),
    "lists as names": (of(a={"type": "null"}) | {"required": [["a"]]}, r"required: found \['a'\]; expected texts"),
    "a huge count": (
        of(a={"type": "string", "pattern": f"a{{{'9' * 5000}}}"}),
        r"with '\{9{19}'\.\.\. at .*; expected at most 1000",
    ),
    "no property": (of(), r"properties: found \{\}; expected at least one"),
    "required": ({**of(a={"type": "null"}), "required": ["b"]}, r"required: found 'b'; expected names that are in"),
    "nested": (of(a=of(b={"type": "null"})), r"properties\.a: type: found 'object'; expected no object"),
    "lists of lists": (
        of(a={"type": "array", "items": {"type": "array"}}),
        "a: items: type: found 'array'; expected no list in a",
    ),
    "a reference": (of(a={"$ref": "#/$defs/A"}), r"a: \$ref: found '#/\$defs/A'; expected a place in this schema"),
    "any of two": (
        of(a={"anyOf": [{"type": "string"}, {"type": "integer"}]}),
        "a: anyOf: found .*; expected a schema and null",
    ),
    "two types": (of(a={"type": ["string", "integer"]}), r"a: type: found \['string', 'integer'\]; expected one type"),
    "another key": (of(a={"type": "integer", "multipleOf": 3}), r"a: found 'multipleOf'; expected one of type, min"),
    "a key of lists": (of(a={"type": "array", "items": {"type": "null"}, "uniqueItems": True}), r"a: found 'uniqueIt"),
    "definitions": ({**of(a={"type": "null"}), "$defs": 5}, r"^schema: \$defs: found 5; expected an object of sch"),
    "a format": (of(a={"type": "string", "format": "ipv6"}), r"a: format: found 'ipv6'; expected one of date, time"),
    "look-ahead": (
        of(a={"type": "string", "pattern": "a(?=b)"}),
        r"a: pattern: found 'a\(\?=b\)' with '\(\?=' at .* no look-a",
    ),
    "a backreference": (
        of(a={"type": "string", "pattern": r"(a)\1"}),
        "a: pattern: found .* at character 4; expected no backref",
    ),
    "a boundary": (of(a={"type": "string", "pattern": r"\bred"}), "a: pattern: found .*; expected no boundary"),
    "an open group": (of(a={"type": "string", "pattern": "(a"}), r"'\(' without '\)' at character 2"),
    "an open set": (of(a={"type": "string", "pattern": "[a"}), r"'\[' without '\]' at character 2"),
    "a wrong range": (of(a={"type": "string", "pattern": "[z-a]"}), r"a range of no characters"),
    "an anchor within": (of(a={"type": "string", "pattern": "a$b"}), r"'\$' before its end"),
    "no text": (of(a={"type": "string", "pattern": "^ab$", "maxLength": 1}), "a: found no text that this tokenizer"),
    "no number": (
        of(a={"type": "integer", "minimum": 3, "maximum": 2.5}),
        r"a: found whole numbers from 3 to 2, an empty range",
    ),
    "a bound of numbers": (of(a={"type": "number", "minimum": 3}), r"a: minimum: found 3; expected 0 or none"),
    "lengths": (of(a={"type": "string", "minLength": 3, "maxLength": 2}), r"a: maxLength: found 2; expected at least"),
    "a length": (of(a={"type": "string", "maxLength": "2"}), r"a: maxLength: found '2'; expected a whole number"),
    "too long": (of(a={"type": "string", "minLength": 10**6}), r"a: minLength: found 1000000; expected at most \d"),
    "an enum of none": (of(a={"enum": []}), r"a: enum: found \[\]; expected at least one value"),
    "an enum of lists": (of(a={"enum": [[]]}), r"a: enum: found \[\]; expected texts, numbers"),
    "an enum of others": (of(a={"type": "string", "enum": [5]}), r"a: enum: found 5; expected values of type string"),
    "an enum of parts": (
        of(a={"type": "integer", "enum": [2.0, 2.5]}),
        r"a: enum: found 2\.5; expected values of type int",
    ),
    "a space first": (of(a={"enum": [" a"]}), r"a: enum: found ' a'"),
    "commas": (of(a={"type": "array", "items": {"enum": ["a,b"]}}), r"a: items: found 'a,b'; expected texts without"),
    "an empty name": (of(**{" ": {"type": "null"}}), r"properties: found a blank name"),
    "rows that begin alike": (of(ß={"type": "null"}, ñ={"type": "null"}), "found rows of ß and ñ that begin with the"),
    "too many": (
        of(**{f"n{i}": {"type": "null"} for i in range(5)}),
        "^schema: properties: found 5; expected at most 4",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_schemas_that_rows_cannot_follow_are_refused(case: str, made: Any) -> None:
    asked, words = REFUSED[case]
    with pytest.raises(UserError, match=words) as told:
        made.decode(["a"], schema=asked)
    assert "\n" not in str(told.value)


# Similar errors with different causes.
ALIKE: dict[str, list[Any]] = {
    "types": [
        *({"type": "strin"}, {"type": None}, {}, {"type": []}, {"type": ["string", "integer"]}, {"type": "object"}),
        *({"type": ["array", "null"]}, {"type": "array", "items": {"type": "array"}}),
    ],
    "unions": [
        *({"anyOf": 5}, {"anyOf": []}, {"anyOf": [{"type": "string"}] * 3}, {"anyOf": [{"type": "null"}] * 2}),
        *({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"anyOf": [{"type": "null"}], "type": "string"}),
        *({"allOf": []}, {"allOf": 5}, {"allOf": [{}, {}]}),
    ],
    "values": [
        *({"enum": "red"}, {"enum": []}, {"enum": [["red"]]}, {"enum": ["red"], "const": "red"}, {"const": [1]}),
        *({"type": "string", "const": 5}, {"type": "integer", "enum": [True]}, {"const": " a"}),
    ],
    "numbers": [
        *({"type": "integer", "minimum": 5, "maximum": 4}, {"type": "integer", "minimum": 10**18}),
        *({"type": "integer", "maximum": -(10**18)}, {"type": "integer", "minimum": True}),
        *({"type": "integer", "minimum": 10**300}, {"type": "number", "minimum": 1}, {"type": "number", "maximum": 1}),
    ],
    "lists": [
        *({"type": "array"}, {"type": "array", "items": None}, {"type": "array", "items": {"enum": ["a,b"]}}),
        *({"type": "array", "items": {"enum": [""]}}, {"type": "array", "items": {"type": "object"}}),
    ],
    "patterns": [
        {"type": "string", "pattern": pattern}
        for pattern in (
            *("(?=a)", "(?<=a)", "(?<a>b)", "(?i)a", "(a", "a)", "[a", "a{3,2}", "a{2000}", "*a", "{", "]"),
            *(r"\1", r"\b", r"\p{L}", r"\cA", r"\y", r"\u12", "a\\", r"\u{110000}", "[z-a]"),
            *(r"[\d-x]", "(a$)", "a$b", "(^a)", "a^b"),
        )
    ],
}


@pytest.mark.parametrize("kind", ALIKE)
def test_each_refusal_names_its_own_cause(kind: str, made: Any) -> None:
    """Without the found value, no two refusals are equal."""
    said = list[str]()
    for one in ALIKE[kind]:
        with pytest.raises(UserError) as told:
            made.under(of(a=one))
        said.append(str(told.value))
    assert all(len(line) < 400 and "\n" not in line for line in said)
    bare = [re.sub(r"found '.*?' with ('.*?')", r"found \1", line) for line in said]
    bare = [re.sub(r"found (\[.*?\]|\{.*?\}|[^ ;]+)(?=;| at)", "found it", line) for line in bare]
    bare = [re.sub(r" at character \d+", "", line) for line in bare]
    twice = {line: [one for one, other in zip(ALIKE[kind], bare, strict=True) if other == line] for line in bare}
    assert {line: ones for line, ones in twice.items() if len(ones) > 1} == {}


@pytest.mark.parametrize(
    "asked, words",
    [
        ({"properties": {"a": {"type": "null"}}}, '^schema: found no type; expected "type": "object"$'),
        ({"type": "object"}, "^schema: found no properties; expected an object of schemas"),
        ({"type": "object", "properties": {}}, r"^schema: properties: found \{\}; expected at least one"),
        ({"type": "object", "properties": []}, r"^schema: properties: found \[\]; expected an object of schemas"),
        ({**of(a={"type": "null"}), "required": "a"}, "^schema: required: found 'a'; expected a list of names"),
        ({**of(a={"type": "null"}), "required": [5]}, "^schema: required: found 5; expected texts"),
        ({**of(a={"type": "null"}), "required": ["a", "b"]}, "^schema: required: found 'b'; expected names that are"),
    ],
)
def test_refusals_of_a_whole_schema(asked: Any, words: str, made: Any) -> None:
    with pytest.raises(UserError, match=words):
        made.under(asked)


def test_equality_of_values_follows_json_schema() -> None:
    """The library jsonschema is the reference, for `const`."""
    values: list[Any] = [0, 1, 1.0, True, False, None, "1", "", [], [1], [True], [1.0], {}, {"a": 1}, {"a": True}]
    values += [{"a": 1.0}, {"a": [False]}, {"a": [0]}, {"b": 1}, [[1], [True]], [[True], [1]], 2**60, float(2**60)]
    for one in values:
        judge = jsonschema.Draft202012Validator({"const": one})
        for other in values:
            assert json_schema.equal(one, other) == judge.is_valid(other), (one, other)


SHAPES: list[Any] = [5, True, None, 2.5, "x", "a\n\x1b[31mb", [], ["a"], [5], [[]], {}, {"a": 1}, {"type": "string"}]
SHAPES += ["#/x", -1, 10**30]
KEYS = [
    *("type", "properties", "required", "additionalProperties", "$schema", "$id", "$defs", "definitions", "$ref"),
    *("allOf", "anyOf", "enum", "const", "items", "minItems", "maxItems", "minLength", "maxLength", "pattern"),
    *("format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "nullable", "title"),
    *("default", "oneOf", "not"),
]
SEEDS = [*PROPERTIES.values(), {"$ref": "#/$defs/C"}, {"allOf": [{"$ref": "#/$defs/C"}]}, of(a={"type": "null"})]


def is_taken(made: Any, asked: object) -> bool:
    """Whether a schema is accepted; otherwise one bounded line of a UserError must have the reason."""
    try:
        made.under(asked)
    except UserError as error:
        said = str(error)
        assert said.isprintable() and len(said) < 700 and re.match(r"schema: ", said), said
        return False
    return True


@pytest.mark.parametrize("key", KEYS)
def test_key_with_any_value_is_accepted_or_refused_in_one_line(key: str, made: Any) -> None:
    taken = []
    for value in SHAPES:
        for asked in (
            {**of(a={"type": "string"}), key: value},
            {**of(a={"$ref": "#/$defs/C"}), "$defs": {"C": {"type": "string", key: value}}},
            of(a={"type": "string", key: value}),
            of(a={key: value}),
            of(a={"type": "array", "items": {"type": "integer", key: value}}),
            of(a={"anyOf": [{"type": "null", key: value}, {"type": "integer"}]}),
            of(a={"anyOf": [{"enum": ["a"], key: value}, {"type": "null"}]}),
        ):
            taken.append(is_taken(made, asked))
    assert not all(taken) or key in ("title", "default")


def test_malformed_schemas_are_refused_in_a_line(made: Any) -> None:
    rng = np.random.default_rng(0)

    def spoil(value: Any) -> Any:
        if isinstance(value, dict) and value and rng.random() < 0.8:
            keys = [*value]
            key = keys[rng.integers(len(keys))]
            return {**value, (key if rng.random() < 0.8 else KEYS[rng.integers(len(KEYS))]): spoil(value[key])}
        if isinstance(value, list) and value and rng.random() < 0.5:
            return [*value[1:], spoil(value[0])]
        return SHAPES[rng.integers(len(SHAPES))]

    taken = 0
    for _ in range(600):
        asked: Any = of(a=SEEDS[rng.integers(len(SEEDS))], b=SEEDS[rng.integers(len(SEEDS))])
        asked |= {"required": ["a"], "$defs": {"C": {"enum": ["red", "ab"]}}}
        for _ in range(rng.integers(1, 4)):
            asked = spoil(asked)
        taken += isinstance(asked, dict) and is_taken(made, asked)
    assert 20 < taken < 500


IGNORED = {
    "const beside enum": of(a={"anyOf": [{"enum": ["a", "b"], "const": "a"}, {"type": "null"}]}),
    "const beside enum elsewhere": of(a={"enum": ["a", "b"], "const": "a"}),
    "const beside null": of(a={"type": "null", "const": 5}),
    "enum beside null": of(a={"type": "null", "enum": [5]}),
    "minLength beside null": of(a={"type": "null", "minLength": 5}),
    "a null of no value in a union": of(a={"anyOf": [{"type": "string"}, {"type": "null", "enum": [5]}]}),
    "a bound beside boolean": of(a={"type": "boolean", "minimum": 1}),
    "nullable": of(a={"type": "string", "nullable": True}),
    "not": of(a={"type": "string", "not": {"const": "a"}}),
    "a rule of all": {**of(a={"type": "string"}), "not": {}},
}


@pytest.mark.parametrize("case", IGNORED)
def test_no_keyword_is_ignored(case: str, made: Any) -> None:
    assert not is_taken(made, IGNORED[case])


COLOUR = {"enum": ["red", "ab"], "type": "string", "title": "Color"}
REFERENCES = {
    "an enum": ({"$ref": "#/$defs/Color"}, COLOUR),
    "with words beside it": ({"$ref": "#/$defs/Color", "default": "red", "description": "x"}, COLOUR),
    "in allOf": ({"allOf": [{"$ref": "#/$defs/Color"}], "default": "red"}, COLOUR),
    "in anyOf": ({"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}, {"anyOf": [COLOUR, {"type": "null"}]}),
    "null in anyOf": ({"anyOf": [{"$ref": "#/$defs/Null"}, {"type": "integer"}]}, {"type": ["integer", "null"]}),
    "of items": ({"type": "array", "items": {"$ref": "#/$defs/Color"}}, {"type": "array", "items": COLOUR}),
    "a list": ({"$ref": "#/$defs/Colors"}, {"type": "array", "items": COLOUR}),
    "one after another": ({"$ref": "#/definitions/Again"}, COLOUR),
    "rules beside it": ({"$ref": "#/$defs/Short", "minLength": 1}, {"type": "string", "maxLength": 3, "minLength": 1}),
    "the same rule twice": ({"$ref": "#/$defs/Short", "maxLength": 3}, {"type": "string", "maxLength": 3}),
    "with escapes": ({"$ref": "#/$defs/a~1b~0c%25d%20"}, {"type": "integer"}),
    "an escape of an escape": ({"$ref": "#/$defs/~01"}, {"type": "integer"}),
    "to a property": ({"$ref": "#/properties/b"}, {"type": "boolean"}),
    "a union in a union": (
        {"anyOf": [{"anyOf": [COLOUR, {"type": "null"}]}, {"type": "null"}]},
        {"anyOf": [COLOUR, {"type": "null"}]},
    ),
    "to an item": ({"$ref": "#/$defs/Pair/prefixItems/0"}, {"type": "integer"}),
    "to another item": ({"$ref": "#/$defs/Pair/prefixItems/1"}, {"type": "boolean"}),
    "to one of anyOf": ({"$ref": "#/$defs/Either/anyOf/1"}, COLOUR),
    "to an item of an item": ({"$ref": "#/$defs/Either/prefixItems/0/0"}, {"type": "null"}),
    "to a member, with a rule": (
        {"$ref": "#/$defs/Either/anyOf/0", "maxLength": 3},
        {"type": "string", "maxLength": 3},
    ),
    "equal numbers": ({"$ref": "#/$defs/One", "const": 1.0}, {"const": 1.0}),
    "a whole number of another kind": ({"$ref": "#/$defs/Short", "maxLength": 3.0}, {"type": "string", "maxLength": 3}),
    "a list of one type": ({"type": ["array"], "items": COLOUR}, {"type": "array", "items": COLOUR}),
}
DEFINED: dict[str, Any] = {
    "$defs": {
        "Color": COLOUR,
        "Colors": {"type": "array", "items": {"$ref": "#/$defs/Color"}},
        "Null": {"type": "null"},
        "Short": {"type": "string", "maxLength": 3},
        "Union": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Union"}]},
        "One": {"const": 1},
        "True": {"const": True},
        "Deep": {"type": "array", "items": {"minimum": 1}},
        "Pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}]},
        "Either": {"anyOf": [{"type": "string"}, COLOUR], "prefixItems": [[{"type": "null"}]]},
        "Far": {"$ref": "#/$defs/a1"},
        **{f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1, 40)},
        "a/b~c%d ": {"type": "integer"},
        "~1": {"type": "integer"},
        "Loop": {"$ref": "#/$defs/Pool"},
        "Pool": {"allOf": [{"$ref": "#/$defs/Loop"}]},
        "List": {"type": "array", "items": {"$ref": "#/$defs/List"}},
    },
    "definitions": {"Again": {"$ref": "#/$defs/Color"}},
}


@pytest.mark.parametrize("case", REFERENCES)
def test_references_mean_the_schema_that_they_name(case: str, made: Any) -> None:
    given, wanted = (of(a=one, b={"type": "boolean"}) for one in REFERENCES[case])
    ours, theirs = made.under({**given, **DEFINED}).answer_format, made.under(wanted).answer_format
    for name in ("kinds", "moves", "distance"):
        np.testing.assert_array_equal(getattr(ours.table, name), getattr(theirs.table, name))
    whole = {"$ref": "#/$defs/M", "$defs": {**DEFINED["$defs"], "M": given}, "definitions": DEFINED["definitions"]}
    if case != "to a property":
        assert made.under(whole).answer_format.names == ("a", "b")


@pytest.mark.parametrize(
    "reference, words",
    [
        ({"$ref": "#/$defs/Loop"}, r"a: \$ref: found .*; expected .* lead back to itself"),
        ({"$ref": "#/$defs/Far"}, r"a: \$ref: found '#/\$defs/a32'; expected a chain of at most 32 references"),
        ({"$ref": "#/$defs/Union"}, "a: anyOf: found 32 nested unions"),
        ({"$ref": "#/$defs/List"}, "a: items: type: found 'array'; expected no list in a list"),
        ({"$ref": "#"}, "a: type: found 'object'; expected"),
        ({"$ref": ""}, "a: type: found 'object'; expected"),
        ({"$ref": "#Color"}, "expected a JSON pointer such as .*anchors"),
        (
            {"$ref": "https://example.org/s#/$defs/Color"},
            "a place in this schema, such as .*other documents",
        ),
        ({"$ref": "#/$defs/Colour"}, r"a place in this schema; #/\$defs has no Colour$"),
        ({"$ref": "#/$defs/Color/enum/0"}, r"a: \$ref: found '#/\$defs/Color/enum/0', which refers to 'red'; expected"),
        (
            {"$ref": "#/$defs/Color/enum/2"},
            r"a place in this schema; #/\$defs/Color/enum is a list of 2, without 2$",
        ),
        ({"$ref": "#/$defs/Color/enum/-"}, r"schema; #/\$defs/Color/enum is a list of 2, without -$"),
        ({"$ref": "#/$defs/Color/enum/01"}, r"schema; #/\$defs/Color/enum is a list of 2, without 01$"),
        ({"$ref": "#/$defs/Color/enum/\u0661"}, r"schema; #/\$defs/Color/enum is a list of 2, without \u0661$"),
        ({"$ref": "#/$defs/Color/title/0"}, r"schema; #/\$defs/Color/title is neither an object nor a list$"),
        ({"$ref": "#/$defs/Color/title"}, r"a: \$ref: found .*, which refers to 'Color'"),
        ({"$ref": ["#/$defs/Color"]}, r"a: \$ref: found .*; expected a text such as"),
        ({"$ref": "#/$defs/Short", "maxLength": 2}, r"a: maxLength: found 2; expected 3, as in \$ref"),
        ({"allOf": [{"$ref": "#/$defs/Color"}, {"type": "string"}]}, "a: allOf: found 2 schemas"),
        ({"allOf": {"type": "string"}}, "a: allOf: found .*; expected a list of one schema"),
        ({"$ref": "#/$defs/One", "const": True}, r"a: const: found True; expected 1, as in \$ref"),
        ({"$ref": "#/$defs/True", "const": 1}, r"a: const: found 1; expected True, as in \$ref"),
        ({"$ref": "#/$defs/True", "const": 1.0}, r"a: const: found 1\.0; expected True, as in \$ref"),
        ({"allOf": [{"enum": [0, "a"]}], "enum": [False, "a"]}, r"a: enum: found \[False, 'a'\]; expected \[0, 'a'\]"),
        ({"$ref": "#/$defs/Deep", "items": {"minimum": True}}, "a: items: found .*'minimum': True.*; expected .*1"),
    ],
)
def test_unresolvable_references_are_refused(reference: Any, words: str, made: Any) -> None:
    with pytest.raises(UserError, match=words):
        made.under({**of(a=reference), **DEFINED})


def test_schemas_and_refusals_are_compiled_once(made: Any, monkeypatch: Any) -> None:
    calls, make = [], schema_lib.make

    def counted(*args: Any, **named: Any) -> Any:
        calls.append(args)
        return make(*args, **named)

    monkeypatch.setattr(schema_lib, "make", counted)
    monkeypatch.setattr(schema_lib, "KEPT", 3)
    own = generator()
    with pytest.raises(Uncompiled):
        own.under(schema("yes"), effort=None)
    first = own.under(schema("yes")).answer_format
    large = of(a={"type": "string", "pattern": "(a"})
    for _ in range(3):
        for at_once in (False, True):
            if at_once or len(calls) == 1:
                with pytest.raises(UserError, match="without '\\)'"):
                    own.under(large, effort=None if at_once and len(calls) > 1 else Effort.WHOLE)
    assert len(calls) == 2
    for i in range(9):  # a refused request takes no place
        with pytest.raises(UserError):
            own.under(of(a={"enum": [[i]]}))
    count = len(calls)
    with pytest.raises(UserError, match="without '\\)'"):
        own.under(large)
    own.under(schema("range"))
    own.under(schema("short"))
    assert own.under(schema("yes"), effort=None).answer_format is first and len(calls) == count + 2
    own.under(schema("colour"))
    assert own.under(schema("yes"), effort=None).answer_format is first  # asked for later than the others
    with pytest.raises(Uncompiled):
        own.under(schema("range"), effort=None)


def test_a_schema_is_compiled_for_each_way_to_name_rows(made: Any) -> None:
    asked = schema("short", "yes")
    beginnings = [
        [row.beginning for row in way.under(asked).answer_format.rows]
        for names in ((), ("yes - ", "short = "), ("short:", "yes:"), ())
        for way in [copy.copy(made)]
        for way.config in [change(made.config, grid={"row_names": names})]
    ]
    encode = made.tokenizer.encode
    assert beginnings == [
        [(*encode("short:"),), (*encode("yes:"),)],
        [(*encode("yes - "),), (*encode("short = "),)],
        [(*encode("short:"),), (*encode("yes:"),)],
        [(*encode("short:"),), (*encode("yes:"),)],
    ]


def test_only_short_visible_names_are_unquoted() -> None:
    assert [named(text) for text in ("due date", "é", "a\nb", "\x1b[31m", "a\u202eb")] == [
        *("due date", "é"),
        *("'a\\nb'", "'\\x1b[31m'", "'a\\u202eb'"),
    ]
    assert named("x" * 61) == f"'{'x' * 61}'" and len(named("x" * 10**6)) <= 100


def test_names_of_strangers_cannot_write_lines_of_the_log(capsys: Any, monkeypatch: Any) -> None:
    evil = "a\n2026-01-01 warning: all is well\x1b[31m\u202e\x85" + "x" * 1500
    monkeypatch.setattr(logging.getLogger("pipejax"), "handlers", [cli._LineHandler()])
    own = generator(row_names=("yes:",), time_max=2000)
    own.under(of(**{evil: {"type": "null"}}))
    own.under(of(b={"enum": ["red", f"ß{evil}"]}))
    logging.getLogger("pipejax.any").warning("read %s", evil)
    lines = capsys.readouterr().err.split("\n")
    assert len(lines) >= 5 and lines[-1] == ""
    assert all(line.isprintable() and len(line) < 1100 and line.startswith("warning: ") for line in lines[:-1])
    for asked in (
        of(a={"type": evil}),
        of(a={"type": "string", "enum": [5], evil: 1}),
        of(a={"$ref": evil}),
        {**of(a={"type": "null"}), "required": [evil]},
        {**of(a={"type": "null"}), evil: 5},
        of(**{evil * 50: {"type": "null"}}),
        of(**{evil: {"type": "string", "pattern": evil + "("}}),
        of(a={"type": evil, "enum": ["a"]}),
        of(a={"type": "string", "format": evil}),
    ):
        assert not is_taken(own, asked)


def test_too_large_schemas_are_refused(made: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("pipejax.apps.schemas.row_schema.STATES", 500)
    with pytest.raises(UserError, match=r"^schema: found a schema of more than 500 states; expected shorter"):
        made.decode(["a"], schema=of(a={"type": "string", "pattern": "^(a|b)*a(a|b){12}$"}))
    monkeypatch.setattr("pipejax.apps.schemas.row_schema.ENTRIES", 500)
    with pytest.raises(UserError, match=r"^schema: found a schema of more than 500 entries in its table; exp"):
        made.decode(["a"], schema=schema("code", "date"))
    with pytest.raises(
        UserError, match=r"^schema: properties\.a: pattern: found groups nested too deeply; expected few"
    ):
        made.decode(["a"], schema=of(a={"type": "string", "pattern": "(" * 5000}))


def test_settings_that_contradict_a_schema_are_refused(made: Any) -> None:
    asked = schema("yes")
    with pytest.raises(UserError, match=r"^schema: found a schema with sequential .*; expected method pipelined$"):
        made.decode(["a"], schema=asked, method="sequential")
    with pytest.raises(UserError, match=r"^decode\.limit: found source with a schema; expected none"):
        made.decode(["a"], schema=asked, limit="source")
    with pytest.raises(UserError, match=r"^decode\.limit: found source with a schema; expected none"):
        made.under(asked).decode(["a"], limit="source")
    with pytest.raises(UserError, match=r"^grid\.stop: found literal with a schema; expected empty_row"):
        made.decode(["a"], schema=asked, delay=1, stop="literal")
    with pytest.raises(UserError, match=r"^source 0: found row_prefixes or max_rows; expected neither"):
        made.decode([{"source": "a", "row_prefixes": ["yes:"]}], schema=asked)
    with pytest.raises(UserError, match=r"^absent\.json: cannot be read"):
        made.decode(["a"], schema="absent.json")


# Tokenizers.


def spelled(tokenizer: Tokenizer, ids: list[int]) -> str:
    found = token_bytes(tokenizer, tokenizer.size)
    return b"".join(found[i] for i in ids).decode(errors="ignore").strip()


def test_bytes_of_tokens_equal_bytes_of_the_text(tokenizer: Tokenizer) -> None:
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
            ids = [5, *rng.integers(0, min(one.size, 128), rng.integers(1, 9)).tolist()]  # after a word, as in a row
            assert spelled(one, ids) == one.decode(ids)
    assert spelled(Tokenizer(TokenizerFile(fallback, {}, False, {})), [3, 5 + 0xC3, 5 + 0xA9, 4]) == "aé b"
    assert spelled(Tokenizer(TokenizerFile(byte_level, {}, False, {})), [0, 1, 2, 3, 4]) == "a bé"
    ids = [*range(3, 131), 0xC3 + 3, 0xA9 + 3, 300, 1]
    assert spelled(Tokenizer(transformers.ByT5Tokenizer()), ids).endswith("~\x7fé")
    word_piece = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    word_piece.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match=r"^tokenizer: found the decoding steps WordPiece"):
        token_bytes(Tokenizer(TokenizerFile(word_piece, {}, False, {})), 2)


# The server.


def posted(client: Any, **body: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": SOURCES[0], **body})


@contextlib.contextmanager
def serving(own: Any, **limits: Any) -> Iterator[Any]:
    engine = Engine(own, places=2, queue=8)
    service = app.Service(own, engine, name="tiny", limits=app.Limits(10_000, 60.0, 4, **limits))
    try:
        client: Any
        with TestClient(app.make_app(service), raise_server_exceptions=False) as client:
            client.service = service
            yield client
    finally:
        engine.close(drain=False, seconds=10)


def form_of(asked: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": asked}}


def test_a_server_follows_response_format() -> None:
    own, asked = generator(row_names=(*schemas.NAMES[:4],)), schema("short", "range", "yes")
    (wanted,) = own.decode(SOURCES[:1], schema=asked)
    form = form_of(asked)
    with serving(own) as client:
        (choice,) = posted(client, response_format=form).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (wanted["text"], "stop")
        events = posted(client, response_format=form, stream=True).text.split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == wanted["text"]
        assert len(chunks) == 4  # one for each property, and the end
        least = 3 * 10  # tokens: "short:", "range:" and a digit have ten at the most
        (choice,) = posted(client, response_format=form, max_tokens=least).json()["choices"]
        check([{"text": choice["text"], "truncated": None}], asked)
        assert choice["finish_reason"] == "stop"
        plain = posted(client, response_format={"type": "text"}).json()["choices"][0]["text"]
        assert plain == posted(client).json()["choices"][0]["text"] != wanted["text"]
        turns = [{"role": "user", "content": SOURCES[0]}]
        reply = client.post("/v1/chat/completions", json={"messages": turns, "response_format": form})
        assert reply.json()["choices"][0]["message"]["content"] == wanted["text"]
        named = {"format": {"type": "json_schema", "name": "x", "schema": asked}}
        reply = client.post("/v1/responses", json={"input": SOURCES[0], "text": named})
        assert reply.json()["output"][0]["content"][0]["text"] == wanted["text"]
        assert reply.json()["text"] == named and reply.json()["max_output_tokens"] is None
        asks = {"input": SOURCES[0], "text": named, "max_output_tokens": least}
        assert client.post("/v1/responses", json=asks).json()["max_output_tokens"] == least
        odd = b'{"input": "a", "text": {"format": {"type": "text", "x": 1e999}}}'
        reply = client.post("/v1/responses", content=odd, headers={"Content-Type": "application/json"})
        assert reply.json()["text"] == {"format": {"type": "text"}}
        text: object
        for text, words in (
            ("plain", "text: found 'plain'; expected an object such as"),
            ({"format": {"type": "json_schema", "json_schema": {}}}, "text.format json_schema: found .*; expected"),
        ):
            reply = client.post("/v1/responses", json={"input": SOURCES[0], "text": text})
            assert reply.status_code == 400 and re.match(words, reply.json()["error"]["message"])
        for body, words in (
            ({"response_format": form, "max_tokens": 9}, r"max_tokens: found 9 for 3 rows \(schema: properties\.s"),
            ({"response_format": form, "stop": ";"}, r"stop: found ';'; expected none with a schema"),
            ({"response_format": form, "logprobs": 1}, r"logprobs: found 1; expected none with a schema"),
            ({"response_format": form, "rows": True, "stream": True}, "rows: found True; expected none with a"),
            ({"response_format": {"type": "json_objects"}}, "response_format: found .*; expected an object whose ty"),
            ({"response_format": {"type": "json_schema"}}, r"response_format json_schema: found None; expected an"),
            ({"response_format": form_of(of(a=of()))}, r"response_format: schema: properties\.a: type: found 'object'"),
        ):
            reply = posted(client, **body)
            error = reply.json()["error"]
            assert reply.status_code == 400 and re.match(words, error["message"]), error
            assert error["param"] in body and "\n" not in error["message"]


def test_a_json_object_has_the_rows_that_the_model_names() -> None:
    with serving(generator(row_names=("short:", "yes - "))) as client:
        reply = posted(client, response_format={"type": "json_object"}).json()
        found = json.loads(reply["choices"][0]["text"])
        assert [*found] == ["short", "yes"] and all(isinstance(value, str) for value in found.values())
        asked = of(short={"type": "string"}, yes={"type": "string"})
        same = posted(client, response_format=form_of(asked)).json()
        assert reply["choices"][0]["text"] == same["choices"][0]["text"]
        turns = [{"role": "user", "content": SOURCES[0]}]
        form = {"type": "json_object"}
        reply = client.post("/v1/chat/completions", json={"messages": turns, "response_format": form})
        assert json.loads(reply.json()["choices"][0]["message"]["content"]) == found
        reply = client.post("/v1/responses", json={"input": SOURCES[0], "text": {"format": {"type": "json_object"}}})
        assert json.loads(reply.json()["output"][0]["content"][0]["text"]) == found
        assert reply.json()["text"] == {"format": {"type": "json_object"}}


def test_a_json_object_of_rows_without_names_is_refused(made: Any) -> None:
    with serving(generator(delay=1)) as client:
        said = posted(client, response_format={"type": "json_object"}).json()["error"]["message"]
        assert said.startswith('response_format: found \'json_object\'; expected {"type": "json_schema", ...} with')
        reply = client.post("/v1/responses", json={"input": "a", "text": {"format": {"type": "json_object"}}})
        assert re.match("text.format: found 'json_object'; expected", reply.json()["error"]["message"])


def test_schemas_can_be_switched_off() -> None:
    with serving(generator(row_names=("short:",)), schemas=False) as client:
        for given in (form_of(schema("yes")), form_of([]), {"type": "json_object"}):
            reply = posted(client, response_format=given)
            assert reply.status_code == 400
            assert reply.json()["error"]["message"].endswith("this server does not support schemas")
        named = {"format": {"type": "json_schema", "name": "x", "schema": schema("yes")}}
        assert client.post("/v1/responses", json={"input": "a", "text": named}).status_code == 400
        assert posted(client, response_format={"type": "text"}).status_code == 200


def test_cached_schema_is_not_blocked_by_compilation(monkeypatch: Any) -> None:
    """Ten schemas compile endlessly, more than there are threads for requests; their time is limited as usual."""
    known, over, compiling, make = schema("yes"), threading.Event(), list[int](), schema_lib.make

    def slow(*args: Any, **named: Any) -> Any:
        compiling.append(1)
        over.wait(10)
        return make(*args, **named)

    with serving(generator(row_names=(*schemas.NAMES[:4],))) as client:
        assert posted(client, response_format=form_of(known)).status_code == 200 == posted(client).status_code
        monkeypatch.setattr(schema_lib, "make", slow)
        client.service.limits = dataclasses.replace(client.service.limits, seconds=3.0)
        with concurrent.futures.ThreadPoolExecutor(10) as pool:
            new = [
                pool.submit(posted, client, response_format=form_of(of(a={"type": "string", "maxLength": i})))
                for i in range(10)
            ]
            while not compiling:
                time.sleep(0.01)
            assert posted(client).status_code == 200
            assert posted(client, response_format=form_of(known)).status_code == 200
            assert posted(client, response_format=form_of([])).status_code == 400
            assert client.get("/health").status_code == 200
            assert not any(one.done() for one in new)
            assert [one.result().status_code for one in new] == [504] * 10
        assert len(compiling) == 1  # the others were cancelled before they began
        over.set()


@pytest.mark.parametrize("asked", [{"required": 5}, {"properties": 5}, {"properties": {"a": {"enum": 5}}}])
def test_malformed_schema_is_an_error_of_the_client(asked: Any) -> None:
    with serving(generator(delay=1)) as client:
        for _ in range(2):
            reply = posted(client, response_format=form_of({**of(a={"type": "null"}), **asked}))
            assert reply.status_code == 400 and reply.json()["error"]["message"].startswith("response_format: schema: ")


# The command.


def test_decode_command_follows_a_schema(made: Any, tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
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
    for _ in range(2):  # the second refusal was cached
        with pytest.raises(UserError, match=rf"^{re.escape(str(wanted))}: properties\.a"):
            main(flags)
    wanted.write_text("{")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^schema\.json: found no JSON \(Expecting property name.*\); expected a JSON"):
        main([*flags[:-1], wanted.name])
    assert out.read_bytes() == kept


def test_changed_schema_is_not_resumed(made: Any) -> None:
    from pipejax.offline.resume import first_difference, settings_of

    def settings(*names: str) -> Any:
        own = made.under(schema(*names)) if names else made
        return settings_of(own, "pipelined", [own.source("a", "here", 0)])

    assert settings("yes") == settings("yes")
    for other in (("short",), ()):
        assert first_difference(settings("yes"), settings(*other)).startswith("answers with another schema")


@pytest.mark.long
def test_trained_model_writes_learned_values_within_the_schema(tmp_path: Any, said: list[str]) -> None:
    """For the source "red 7" it has learned the rows "num: 7" and "colour: red"; it knows no other words."""
    (tmp_path / "tokenizer").mkdir()
    words = [f"{colour} {number}" for colour in ("red", "ab", "null") for number in range(10)]
    rows = [(f"num: {word[-1]}", f"colour: {word[:-2]}") for word in words]
    config = change(
        RUN_ON_ONE,
        grid={"delay": 0, "time_max": 16, "row_names": ("num:", "colour:")},
        data={"task": "jsonl", "tokenizer": str(schemas.save(tmp_path / "tokenizer"))},
        train={"steps": 150, "learning_rate": 1e-2, "dropout": 0.0, "evaluate_every": 150, "checkpoint_every": 150},
    )
    config = dataclasses.replace(config, model=dataclasses.replace(schemas.SIZES, dropout_rate=0.0))
    examples = [Example(str(i), word, row) for i, (word, row) in enumerate(zip(words, rows, strict=True))]
    assert fit(config, tmp_path / "run", given={"train": examples, "dev": examples[:4]}) == 0
    made = load(tmp_path / "run")
    asked = of(colour={"enum": ["red", "ab"]}, num={"type": "integer", "minimum": 3, "maximum": 12})
    free = [record["rows"] for record in made.decode(words)]
    learned = [i for i, word in enumerate(words) if free[i] == [*rows[i]]]
    found = check(made.decode(words, schema=asked), asked)
    assert len(learned) > 20
    for i in learned:
        if words[i][:-2] != "null" and int(words[i][-1]) >= 3:
            assert found[i] == {"colour": words[i][:-2], "num": int(words[i][-1])}


# Real pieces.


def test_schemas_work_with_the_real_tokenizer_of_t5(real_data: Any) -> None:
    from pipejax.config import Config, GridConfig, TrainConfig
    from pipejax.inference.generator import Generator

    sizes = dataclasses.replace(schemas.SIZES, vocab_size=32128)
    grid = GridConfig(delay=0, time_max=24, sub_max=5)
    params = oracle.random_params(sizes, np.random.default_rng(0), eos_scale=1.2)
    own = Generator(
        Config(model=sizes, grid=grid, train=TrainConfig(method="pipelined")),
        params,
        Tokenizer.load(real_data / "t5_tokenizer"),
    )
    for names in (("date", "text", "price", "tags", "code"), ("moment", "mail", "many", "maybe", "long")):
        for temperature in (0.0, 1.0):
            check(own.decode(SOURCES, schema=schema(*names), temperature=temperature), schema(*names))


USUAL = [("id",), ("text", "date"), ("id", "text", "date", "code"), ("short", "range", "yes")]


@pytest.mark.parametrize("names", USUAL)
def test_tables_of_usual_schemas_have_one_shape(made: Any, names: tuple[str, ...]) -> None:
    table = made.under(schema(*names)).answer_format.table
    expected = schema_lib.Schemas().usual(len(table.kinds)).table
    for field in ("kinds", "moves", "distance"):
        found, usual = getattr(table, field), getattr(expected, field)
        assert (found.shape, found.dtype) == (usual.shape, usual.dtype)


def test_table_of_1025_states_is_padded_to_2048() -> None:
    moves = np.tile(np.arange(1025, dtype=np.int32), (3, 1))
    accepts = np.arange(1025) % 2 == 1
    table = grammar.Table._padded(np.zeros(7, np.int32), moves, accepts)
    assert table.moves.shape == (512, 2048) and table.distance.shape == (2048,)
    assert (np.asarray(table.moves)[:3, :1025] == moves).all() and not np.asarray(table.moves)[3:].any()
    assert (np.asarray(table.distance)[1025:] == grammar.FAR).all()


def submit_all(engine: Engine, own: Any, asked: Sequence[Any], **more: Any) -> list[Any]:
    answers = []
    for one in asked:
        under = own.under(one)
        request = Request(under.source(SOURCES[0], "a test", 0), own.default_method, log_probs=False, **more)
        answers.append(engine.submit(request))
    return [list(answer.events())[-1] for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"delay": 1}, {}),
        ({"row_names": (*schemas.NAMES[:4],)}, {}),
        ({"delay": 1}, {"sampling": Sampling(1.0, 0, 1.0, 3)}),
    ],
)
def test_new_schemas_of_a_usual_shape_compile_nothing(settings: Any, more: Any) -> None:
    """This holds after the warm-up, alone and together, greedy and sampled; answers equal decoding."""
    own = generator(**settings)
    engine = Engine(own, places=2, queue=8)
    try:
        engine.warm_up(8, schemas=True)
        wait_until_compiled(engine)
        asked = [schema("yes", "range"), schema("range"), schema("short", "yes")]
        before = len(engine.compiler.compiled)
        lone = submit_all(engine, own, asked[:1], **more)
        beside = submit_all(engine, own, [asked[1]] * 2, **more)
        third = submit_all(engine, own, asked[2:], **more)
        assert len(engine.compiler.compiled) == before
    finally:
        engine.close(drain=False, seconds=10)
    if not more:
        for records, one in ((lone, asked[0]), (beside, asked[1]), (third, asked[2])):
            (wanted,) = own.decode(SOURCES[:1], schema=one)
            assert {record["text"] for record in records} == {wanted["text"]}
    for records, one in ((lone, asked[0]), (beside, asked[1]), (third, asked[2])):
        check(records, one)


def test_a_generator_under_a_schema_is_warmed_up_for_its_answers() -> None:
    own = generator(delay=1).under(schema("yes", "range"))
    own.warm_up([len(own.ids_of(own.source(SOURCES[0], "x", 0)))], batch_sizes=(1,))
    before = len(own.programs._compiled)
    own.decode(SOURCES[:1])
    assert len(own.programs._compiled) == before > 1


def test_a_second_schema_of_a_shape_compiles_nothing_without_a_warm_up() -> None:
    own = generator(delay=1)
    engine = Engine(own, places=1, queue=8)
    try:
        submit_all(engine, own, [schema("yes", "range")])
        before = len(engine.compiler.compiled)
        submit_all(engine, own, [schema("short")])
        assert len(engine.compiler.compiled) == before
    finally:
        engine.close(drain=False, seconds=10)


@pytest.mark.parametrize(
    ("settings", "schemas_on", "expected"),
    [
        ({}, True, {"a schema of a new shape (512 kinds of tokens, 1024 states)"}),
        ({}, False, set()),
        ({"stop": "literal"}, True, set()),  # a method that follows no schema
        ({"row_names": ("a:", "b:"), "stop": "literal"}, True, set()),
        ({"row_names": ("a:", "b:"), "delay": 0}, True, {"a schema of a new shape (512 kinds of tokens, 1024 states)"}),
    ],
)
def test_warm_up_plans_schemas_last(settings: Any, schemas_on: bool, expected: Any, monkeypatch: Any) -> None:
    """Programs of schemas are the last, alone and together, plain and sampled."""
    own, asked = generator(**{"delay": 1, **settings}), list[tuple[Any, int]]()
    engine = Engine(own, places=2, queue=8)
    try:
        monkeypatch.setattr(engine.compiler, "ask", lambda needs, order=0: asked.extend((key, order) for key in needs))
        engine.scheduler.plan(8, schemas=schemas_on)
        keys = [key for key, _ in asked if isinstance(key, Steps)]
        assert {key.answer_format for key in keys if key.answer_format} == expected
        formed = [(key, order) for key, order in asked if isinstance(key, Steps) and key.answer_format]
        later = [(key.places, key.kind, order) for key, order in formed]
        assert {*later} == (
            {(n, kind, LAST) for n in (1, 2) for kind in (StepKind.TOKENS, StepKind.LOGITS)} if expected else set()
        )
        assert all(key.answer_format for key in keys[len(keys) - len(later) :])
    finally:
        engine.close(drain=False, seconds=10)


def test_table_of_a_schema_takes_less_than_4_mib(made: Any) -> None:
    found = made.under(schema("id", "text", "date", "code")).answer_format
    assert isinstance(found, Schema) and found.table.moves.nbytes < 2**22
