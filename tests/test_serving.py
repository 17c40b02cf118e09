"""The HTTP server above an engine without a model: requests, answers, refusals and limits."""

import argparse
import copy
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from pipejax import checkpoint
from pipejax.apps.papers.data_sets import PUBLISHED
from pipejax.apps.serving import app, requests, serve_command
from pipejax.apps.serving.engine import Engine
from pipejax.apps.serving.example import example_of
from pipejax.apps.serving.row_text import Writing
from pipejax.config import DataConfig
from pipejax.data import make_task
from pipejax.data.encoding import encode_source
from pipejax.data.tokenizer import Growing
from pipejax.inference.answer_format import Uncompiled
from pipejax.inference.decoding_options import seed_of
from pipejax.inference.generator import Generator
from pipejax.inference.sources import Source
from pipejax.system import cli
from pipejax.system.errors import UserError
from support import oracle, tiny
from support.scripted_engine import ScriptedEngine
from support.served import chunks, connect, error, service, wait_until

TEXT = "deliver tiny lamps and new ropes past the river"
PATH = "/v1/completions"
OLD = sys.version_info < (3, 12)  # later versions read as many nested lists as a body here can have


@pytest.fixture(scope="module")
def params() -> Any:
    return oracle.random_params(tiny.MODEL, np.random.default_rng(7))


@pytest.fixture(scope="module")
def generator(tokenizer: Any, params: Any) -> Generator:
    return Generator(tiny.change(tiny.RUN, data={"max_source": 24}, grid={"delay": 1}), params, tokenizer)


@pytest.fixture
def engine(generator: Generator) -> ScriptedEngine:
    return ScriptedEngine(generator)


@pytest.fixture
def lines_on_stderr() -> Iterator[None]:
    """Writes the lines of the log as commands do."""
    logger = logging.getLogger("pipejax")
    before = logger.level
    logger.setLevel(logging.INFO)
    with cli.adopted("pipejax"):
        yield
    logger.setLevel(before)


@pytest.fixture
def client(engine: ScriptedEngine) -> TestClient:
    return connect(service(engine))


# Answers.


def test_completion_returns_the_answer(client: TestClient, generator: Generator) -> None:
    assert generator.tokenizer is not None
    reply = client.post(PATH, json={"model": "tiny", "prompt": TEXT}).json()
    ids = generator.tokenizer.encode(TEXT)
    expected = " ; ".join(generator.tokenizer.decode(ids[i : i + 3]) for i in range(0, len(ids), 3))
    assert reply["object"] == "text_completion" and reply["model"] == "tiny"
    assert reply["choices"] == [{"index": 0, "text": expected, "logprobs": None, "finish_reason": "stop"}]
    n = len(ids)
    assert reply["usage"] == {"prompt_tokens": n + 1, "completion_tokens": n, "total_tokens": 2 * n + 1}


def test_engine_receives_settings_of_the_request(client: TestClient, engine: ScriptedEngine) -> None:
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.25, "max_tokens": 7}
    settings |= {"repetition_penalty": 1.5, "no_repeat_ngram_size": 3}
    prompts = [[5, 6, 1], [7, 1]]
    body = {"prompt": prompts, "n": 2, "seed": 2**31 - 1, "method": "sequential", **settings}
    reply = client.post(PATH, json=body).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    sources = [Source(i, ids, sample=k) for i, ids in enumerate(prompts) for k in (0, 1)]
    assert [r.source for r in engine.requests] == sources
    for request, source in zip(engine.requests, sources, strict=True):
        found = {**vars(request.sampling), "max_tokens": request.max_tokens}
        assert found == {**settings, "seed": seed_of(source, 2**31 - 1)}  # as decode samples
    assert {r.method for r in engine.requests} == {"sequential"}


def test_defaults_equal_an_offline_decode(client: TestClient, engine: ScriptedEngine) -> None:
    client.post(PATH, json={"prompt": TEXT, "temperature": None, "stop": None, "echo": False, "best_of": 1})
    (request,) = engine.requests
    drawn = request.sampling
    assert (drawn.temperature, drawn.top_k, drawn.top_p, request.max_tokens) == (0, 0, 1, None)
    assert request.method == "pipelined"


def test_rows_are_the_record(client: TestClient, engine: ScriptedEngine) -> None:
    record = client.post(PATH, json={"prompt": TEXT, "rows": True, "logprobs": 0}).json()["choices"][0]["record"]
    expected = engine.record(engine.own_tokens(engine.requests[0]))
    assert record == expected
    record = client.post(PATH, json={"prompt": TEXT, "rows": True}).json()["choices"][0]["record"]
    assert expected.pop("log_prob") and expected.pop("log_probs") and record == expected
    body = {"prompt": TEXT, "rows": True, "temperature": 1, "n": 2}
    assert [c["record"]["sample"] for c in client.post(PATH, json=body).json()["choices"]] == [0, 1]


@pytest.mark.parametrize("rows", [False, True])
def test_stream_equals_whole_answer(client: TestClient, rows: bool) -> None:
    body = {"prompt": [TEXT, "green bread"], "rows": rows}
    whole = client.post(PATH, json=body).json()
    found = chunks(client.post(PATH, json=body | {"stream": True, "stream_options": {"include_usage": True}}))
    assert {chunk["object"] for chunk in found} == {"text_completion"} and len({c["id"] for c in found}) == 1
    assert found[-1]["choices"] == [] and found[-1]["usage"] == whole["usage"]
    choices = [chunk["choices"][0] for chunk in found[:-1]]
    for i, expected in enumerate(whole["choices"]):
        own = [choice for choice in choices if choice["index"] == i]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
        *own, last = own
        assert last.get("record") == expected.get("record")
        assert sorted(choice["row"] for choice in own) != [] and all(choice["token"] != 1 for choice in own)
        if rows:  # in each row they equal the record's
            texts = ["".join(c["text"] for c in own if c["row"] == row) for row in range(len(last["record"]["rows"]))]
            assert texts == last["record"]["rows"]
        else:
            assert "".join(choice["text"] for choice in own) == expected["text"]


@pytest.mark.parametrize("rows", [False, True])
def test_a_row_that_is_left_out_has_no_chunk(generator: Generator, rows: bool) -> None:
    other = copy.copy(generator)
    other.config = tiny.change(generator.config, decode={"unique_rows": True})
    client = connect(service(ScriptedEngine(other)))
    prompt = [5, 6, 7, 5, 6, 7, 8, 9, 5, 8, 9, 1]  # three tokens make a row
    found = chunks(client.post(PATH, json={"prompt": prompt, "stream": True, "rows": rows}))
    told = [(chunk["choices"][0].get("row"), chunk["choices"][0].get("token")) for chunk in found[:-1]]
    assert sorted(told) == [(0, 5), (0, 6), (0, 7), (2, 5), (2, 8), (2, 9), (3, 8), (3, 9)]


def test_rows_are_sent_as_written_or_in_order(client: TestClient) -> None:
    body = {"prompt": TEXT, "stream": True}
    orders = [
        [chunk["choices"][0].get("row") for chunk in chunks(client.post(PATH, json=body | {"rows": rows}))][:-1]
        for rows in (False, True)
    ]
    assert orders[0] == sorted(orders[0]) != orders[1]
    assert sorted(orders[1]) == orders[0]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_completion(client: TestClient, stream: bool) -> None:
    body = {"prompt": TEXT, "logprobs": 1, "stream": stream}
    reply = client.post(PATH, json=body)
    if stream:
        choices = [chunk["choices"][0] for chunk in chunks(reply)][:-1]
        text = "".join(choice["text"] for choice in choices)
        parts = [choice["logprobs"] for choice in choices]
        found = {name: [value for part in parts for value in part[name]] for name in parts[0]}
    else:
        (choice,) = reply.json()["choices"]
        text, found = choice["text"], choice["logprobs"]
    assert "".join(found["tokens"]) == text
    assert [text[a : a + len(t)] for a, t in zip(found["text_offset"], found["tokens"], strict=True)] == found["tokens"]
    assert set(found["token_logprobs"]) == {-0.25}
    assert found["top_logprobs"] == [{token: -0.25} for token in found["tokens"]]


@pytest.mark.parametrize("stop", [" ; ", "lamps", ["nowhere", "ps ; n"], "d"])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_cuts_the_text(client: TestClient, stop: Any, stream: bool) -> None:
    full = client.post(PATH, json={"prompt": TEXT}).json()["choices"][0]["text"]
    expected = re.split("|".join(map(re.escape, [stop] if isinstance(stop, str) else stop)), full)[0]
    reply = client.post(PATH, json={"prompt": TEXT, "stop": stop, "stream": stream})
    choices = [chunk["choices"][0] for chunk in chunks(reply)] if stream else reply.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == expected != full
    assert choices[-1]["finish_reason"] == "stop"


def test_stop_text_frees_the_place(client: TestClient, engine: ScriptedEngine) -> None:
    engine.go_on.clear()  # nothing comes after the first token
    reply = client.post(PATH, json={"prompt": TEXT, "stop": TEXT[0]})
    assert reply.json()["choices"][0]["text"] == "" and len(engine.cancelled) == 1


def test_without_a_tokenizer_the_record_is_the_answer(generator: Generator, params: Any) -> None:
    engine = ScriptedEngine(Generator(generator.config, params, None))
    (choice,) = connect(service(engine)).post(PATH, json={"prompt": [5, 6, 7, 8, 1]}).json()["choices"]
    assert choice["text"] == "" and choice["record"]["row_ids"] == [[5, 6, 7], [8]]


# Records instead of texts.


def with_data(tokenizer: Any, params: Any, **data: Any) -> ScriptedEngine:
    config = tiny.change(tiny.RUN, data={"max_source": 24, **data}, grid={"delay": 1})
    return ScriptedEngine(Generator(config, params, tokenizer))


TEMPLATE = {"task": "csv", "rows": "delimiter", "source_template": "near {title} sang {text} . {title}"}


@pytest.mark.parametrize(
    "data, prompt, filled",
    [
        (TEMPLATE, {"title": "lamps", "text": "river"}, ["near lamps sang river . lamps"]),
        (TEMPLATE, {"title": "lamps", "text": None, "targets": "a", "other": 5}, ["near lamps sang  . lamps"]),
        (TEMPLATE, [{"title": "", "text": "bread"}, {"text": "tiny"}], ["near  sang bread . ", "near  sang tiny . "]),
        (TEMPLATE, {"source": "green {title}"}, ["green {title}"]),
        (TEMPLATE, "green {title}", ["green {title}"]),
        ({"task": "jsonl", "source_template": "sang {source}"}, {"source": "bread"}, ["sang bread"]),
        ({"task": "jsonl"}, {"source": "bread", "title": "lamps"}, ["bread"]),
        ({"task": "kp20k"}, {"title": "lamps", "abstract": "``river''"}, ['Title: lamps Context: "river"']),
        ({"task": "none"}, {"source": "{bread}"}, ["{bread}"]),  # a converted checkpoint
    ],
)
def test_a_template_is_filled_as_decode_fills_it(
    tokenizer: Any, params: Any, data: dict[str, Any], prompt: Any, filled: list[str]
) -> None:
    engine = with_data(tokenizer, params, **data)
    assert connect(service(engine)).post(PATH, json={"prompt": prompt}).status_code == 200
    expected = [[*tokenizer.encode(text), tiny.MODEL.eos_token_id] for text in filled]
    assert [list(request.source.content) for request in engine.requests] == expected
    for one, ids in zip(prompt if isinstance(prompt, list) else [prompt], expected, strict=True):
        assert engine.generator.ids_of(engine.generator.source(one, "", 0)) == ids


def test_ids_of_records_are_kept(client: TestClient, engine: ScriptedEngine) -> None:
    prompts = [{"id": "a1", "source_ids": [5, 1]}, {"id": 7, "source": TEXT}, {"id": None, "source_ids": [6, 1]}]
    client.post(PATH, json={"prompt": prompts, "temperature": 1, "seed": 4})
    assert [request.source.id for request in engine.requests] == ["a1", 7, 2]
    assert list(engine.requests[2].source.content) == [6, 1]
    assert engine.requests[0].sampling.seed == seed_of(Source("a1", [5, 1]), 4)  # as decode samples for that id


@pytest.mark.parametrize(
    "prompt, said",
    [
        ({"title": "a"}, 'prompt: found no "text" in any record'),
        ({"titel": "a", "text": "b"}, 'prompt: found no "title" in any record'),
        ([{"title": "a", "text": "b"}, {"titel": "a", "text": "b"}], 'prompt 1: found no "title"; expected one'),
        ({"title": " ", "text": None}, 'prompt: "title", "text", "title": found an empty text'),
        ({"title": ["a"], "text": "b"}, 'prompt: "title": found a list; expected text'),
        ({"title": "a " * 30, "text": "b"}, "prompt: found 65 tokens; expected at most 24, or truncate: true"),
    ],
)
def test_fields_that_fill_no_template(tokenizer: Any, params: Any, prompt: Any, said: str) -> None:
    engine = with_data(tokenizer, params, **TEMPLATE)
    found = error(connect(service(engine)).post(PATH, json={"prompt": prompt}), 400)
    assert found["message"].startswith(said) and found["param"] == "prompt" and not engine.requests


def test_filled_template_is_cut_on_request(tokenizer: Any, params: Any) -> None:
    engine = with_data(tokenizer, params, **TEMPLATE)
    body = {"prompt": {"title": "lamps", "text": "river " * 30}, "truncate": True}
    usage = connect(service(engine)).post(PATH, json=body).json()["usage"]
    whole = tokenizer.encode(f"near lamps sang {'river ' * 30} . lamps")
    assert list(engine.requests[0].source.content) == [*whole[:23], 1]
    assert usage["prompt_tokens"] == 24 and usage["cut_tokens"] == len(whole) + 1 - 24


@pytest.mark.parametrize(
    "data, template, fields",
    [
        (TEMPLATE, TEMPLATE["source_template"], ["title", "text"]),
        ({"task": "jsonl"}, "{source}", ["source"]),
        ({"task": "none"}, "{source}", ["source"]),
        ({"task": "msqa"}, "Question: {question} Context: {context}", ["question", "context"]),
        ({"task": "pubmed"}, "summarize: {article}", ["article"]),
    ],
)
def test_models_show_the_template(tokenizer: Any, params: Any, data: Any, template: str, fields: list[str]) -> None:
    found = connect(service(with_data(tokenizer, params, **data))).get("/v1/models/tiny").json()
    assert (found["template"], found["fields"], found["has_tokenizer"]) == (template, fields, True)


@pytest.mark.parametrize(
    "data",
    [
        TEMPLATE,
        {"task": "none"},
        {"task": "none", "max_source": 3},
        {"task": "none", "max_source": 512},
        {"task": "msqa", "max_source": 40},
        {"task": "demo"},
        {"task": "demo_long", "max_source": 512},
        {"task": "jsonl", "source_template": "{a} {b} {a}", "max_source": 512},
    ],
)
def test_the_example_of_a_model_is_answered_whole(tokenizer: Any, params: Any, data: dict[str, Any]) -> None:
    """It fits the model's template, and is not truncated."""
    engine = with_data(tokenizer, params, **data)
    own, client = engine.generator, connect(service(engine))
    (model,) = client.get("/v1/models").json()["data"]
    example = model["example"]
    if model["template"] == "{source}":
        assert isinstance(example, str) and example.strip()
    else:
        assert [*example] == model["fields"] and all(text.strip() for text in example.values())
    encoded = encode_source(own.source(example, "x", 0).content, own.config.data, tokenizer, own.architecture)
    assert not encoded.left_out
    reply = client.post(PATH, json={"prompt": example})
    assert reply.status_code == 200 and "cut_tokens" not in reply.json()["usage"], reply.text


@pytest.mark.parametrize("most", [1, 4, 512])
def test_the_example_of_a_model_without_a_tokenizer_is_ids(params: Any, tokenizer: Any, most: int) -> None:
    own = with_data(tokenizer, params, max_source=most).generator
    own.tokenizer = None
    ids = example_of(own)
    assert isinstance(ids, list) and 0 < len(ids) <= most and ids[-1] == 1 and not {0, 1} & {*ids[:-1]}
    own.source(ids, "x", 0)


def test_a_text_that_the_tokenizer_refuses_is_no_example(params: Any, tokenizer: Any, monkeypatch: Any) -> None:
    own = with_data(tokenizer, params, task="none").generator

    def refuse(*given: Any) -> None:
        raise UserError("no such text")

    monkeypatch.setattr("pipejax.apps.serving.example.encode_source", refuse)
    assert example_of(own) is None


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_template_of_a_published_task_makes_its_sources(name: str) -> None:
    task = make_task(DataConfig(task=name))
    record = {field: f"of the {field}" for field in ("title", "abstract", "article", "text", "question", "context")}
    record["answer"] = "of the answer"
    assert task.template.format(**record) == task.source(record, "") != task.template


# Pieces of text.


def test_pieces_of_a_row_are_its_text(tokenizer: Any) -> None:
    """The row may have any length, and tokens that are no text."""
    ids = np.random.default_rng(0).integers(0, tokenizer.size, 400).tolist()
    growing = Growing(tokenizer)
    text = "".join([*map(growing.add, ids), growing.rest()])
    assert text == tokenizer.decode(ids)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    size = 256

    def decode_known(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace").strip()

    def settles(self, token: int) -> bool:
        return True


@pytest.mark.parametrize("text", ["naïve – 漢字 🙂 end", "漢", "a" + "🙂" * 90])
def test_incomplete_character_is_held_back(text: str) -> None:
    growing = Growing(Bytes())  # type: ignore[arg-type]
    pieces = [growing.add(byte) for byte in text.encode()]
    assert "".join([*pieces, growing.rest()]) == text
    assert not any("\ufffd" in piece for piece in pieces)
    broken = text.encode()[:-1]
    growing = Growing(Bytes())  # type: ignore[arg-type]
    assert "".join([*map(growing.add, broken), growing.rest()]) == broken.decode("utf-8", "replace")


def write(rows: list[str], *, delay: int = 1, order: int = 99, **settings: Any) -> str:
    """The text after rows of letters are written on the grid up to a number of letters; "|" marks their ends."""
    writing = Writing(Bytes(), start=lambda row: row * delay, separator=" ; ", **settings)  # type: ignore[arg-type]
    letters = sorted((i * delay + j, i, byte) for i, row in enumerate(rows) for j, byte in enumerate(row.encode()))
    said = [writing.add(row, byte, 0.0) for _, row, byte in letters[:order]]
    return "".join(piece.text for pieces in said for piece in pieces) + "|" + "".join(p.text for p in writing.end())


@pytest.mark.parametrize(
    "rows, delay, said",
    [
        (["abc", "de"], 1, "abc|; de"),  # only the end shows that the first row has ended
        (["abc", "def"], 1, "abc ; def|"),
        (["ab", "cdef", "gh"], 2, "ab ; cdef| ; gh"),
        (["a", "", "bc"], 3, "a ; bc|"),  # a row without a token, and one without a letter, are no rows of the text
        (["ab", "  ", "cd"], 1, "ab ; cd|"),
        (["", "ab"], 2, "ab|"),
        ([], 1, "|"),
    ],
)
def test_rows_are_joined_in_order(rows: list[str], delay: int, said: str) -> None:
    found = write(rows, delay=delay)
    assert found.replace("|", "") == said.replace("|", "").replace("c;", "c ;")
    assert found.startswith(said.partition("|")[0])


@pytest.mark.parametrize("seed", range(5))
def test_random_rows_are_joined_in_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = ["".join(rng.choice([*"abc é漢"], rng.integers(0, 9))) for _ in range(rng.integers(0, 9))]
    expected = " ; ".join(row.strip() for row in rows if row.strip())
    assert write(rows, delay=int(rng.integers(1, 5))).replace("|", "") == expected


def test_row_is_sent_as_soon_as_the_row_above_has_ended() -> None:
    assert write(["ab", "cdef"], delay=1, order=5) == "ab ; cde|"
    assert write(["ab", "cdef"], delay=1, order=4) == "ab ; cd|"
    assert write(["ab", "cdef"], delay=1, order=3) == "ab| ; c"  # the first row could continue in this step


def test_beginning_of_a_stop_text_is_held_back() -> None:
    assert write(["abcx"], stop=("bcd",)) == "abcx|"
    assert write(["abc"], stop=("bcd",)) == "a|bc"
    assert write(["abcd"], stop=("bcd",)) == "a|"


# Refusals.


@pytest.mark.parametrize(
    "body, field, said",
    [
        (b"{", None, "body: found no JSON"),
        (b"", None, "body: found no JSON"),
        (b"\xff\xfe{\x00}\x00", None, "body: found no JSON (byte 0xff at 0 is not UTF-8)"),
        (b'{"prompt": "caf\xe9"}', None, "body: found no JSON (byte 0xe9 at 15 is not UTF-8)"),
        (b"\xef\xbb\xbf" * 2 + b"{}", None, "body: found no JSON (Unexpected UTF-8 BOM"),
        (b'{"prompt": "a", "seed": NaN}', None, "body: found NaN; expected numbers of JSON, which are finite"),
        (b'{"prompt": [-Infinity]}', None, "body: found -Infinity; expected numbers"),
        (b'{"seed": -' + b"9" * 3980 + b"}", "prompt", "prompt: found nothing"),
        (
            b"[" * 3000,
            None,
            "body: found no JSON (" + ("lists or objects nested too deeply" if OLD else "Expecting value"),
        ),
        (b'{"prompt": "a", "seed": ' + b"9" * 3900 + b"}", "seed", "seed: found 999"),
        (b"[1]", None, "body: found a list; expected a JSON object"),
        ({}, "prompt", "prompt: found nothing; expected a text"),
        ({"prompt": ""}, "prompt", "prompt: found an empty text"),
        ({"prompt": []}, "prompt", "prompt: found []; expected"),
        ({"prompt": [[]]}, "prompt", "prompt: found no ids"),
        ({"prompt": ["a", " "]}, "prompt", "prompt 1: found an empty text"),
        ({"prompt": ["a", 3]}, "prompt", "prompt: found a list of texts and numbers; expected a text, an object"),
        ({"prompt": [{}, "x"]}, "prompt", "prompt: found a list of objects and texts"),
        ({"prompt": [[1], True]}, "prompt", "prompt: found a list of lists and booleans"),
        ({"prompt": [None]}, "prompt", "prompt: found a list of null"),
        ({"prompt": [3.0, 4.0]}, "prompt", "prompt: found 3.0 among the ids; expected whole numbers"),
        ({"prompt": [True, 1]}, "prompt", "prompt: found True among the ids"),
        ({"prompt": [[1, 2.0]]}, "prompt", "prompt: found 2.0 among the ids"),
        ({"prompt": [["a"]]}, "prompt", "prompt: found 'a' among the ids"),
        ({"prompt": 2.5}, "prompt", "prompt: found 2.5; expected a text, an object"),
        ({"prompt": {}}, "prompt", 'prompt: found no "source"; expected one (keys: none)'),
        ({"prompt": {"source": " "}}, "prompt", 'prompt: "source": found an empty text'),
        ({"prompt": [{"source": "a"}, {"source": 3}]}, "prompt", 'prompt 1: "source": found the number 3'),
        ({"prompt": {"source": "a", "source_ids": [3]}}, "prompt", 'prompt: found "source" and "source_ids"'),
        ({"prompt": {"source_ids": [3.0]}}, "prompt", 'prompt: "source_ids": found 3.0 among the ids'),
        ({"prompt": {"source": "a", "max_rows": 2}}, "prompt", 'prompt: found "max_rows"; expected none'),
        ({"prompt": [{"source": "a", "row_prefixes": ["b"]}]}, "prompt", 'prompt: found "row_prefixes"; expected none'),
        ({"prompt": {"id": [1], "source": "a"}}, "prompt", 'prompt: "id": found a list'),
        ({"prompt": [3, 64]}, "prompt", "prompt: found id 64; expected 0 to 63"),
        ({"prompt": [3, True]}, "prompt", "prompt: found True among the ids"),
        ({"prompt": {"a": 1}}, "prompt", 'prompt: found no "source"; expected one (keys: a)'),
        ({"prompt": ["a"] * 5}, "prompt", "prompt: found 5 prompts; expected at most 4"),
        ({"prompt": list(range(2, 40))}, "prompt", "prompt: found 38 tokens; expected at most 24, or truncate: true"),
        ({"prompt": "a", "temperature": "1"}, "temperature", "temperature: found '1'; expected a number from 0 to 100"),
        ({"prompt": "a", "temperature": -1}, "temperature", "temperature: found -1; expected"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature", "temperature: found inf; expected"),
        ({"prompt": "a", "top_p": 0}, "top_p", "top_p: found 0; expected a number above 0"),
        ({"prompt": "a", "min_p": 1.5}, "min_p", "min_p: found 1.5; expected a number from 0 to 1"),
        (
            {"prompt": "a", "repetition_penalty": 0},
            "repetition_penalty",
            "repetition_penalty: found 0; expected a number",
        ),
        (
            {"prompt": "a", "no_repeat_ngram_size": -1},
            "no_repeat_ngram_size",
            "no_repeat_ngram_size: found -1; expected",
        ),
        ({"prompt": "a", "rules": "os:path"}, "rules", "rules: found an unknown field; expected one of prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens: found 0; expected a whole number from 1 to"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "max_tokens: found -1; expected a whole number from 1 to"),
        ({"prompt": "a", "max_tokens": 5.0}, "max_tokens", "max_tokens: found 5.0; expected"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens", "max_tokens: found True; expected"),
        ({"prompt": "a", "seed": 2**63}, "seed", "seed: found 9223372036854775808; expected a whole number from -9"),
        ({"prompt": "a", "seed": -(2**63) - 1}, "seed", "seed: found -9223372036854775809; expected"),
        ({"prompt": "a", "seed": "1"}, "seed", "seed: found '1'; expected a whole number"),
        ({"prompt": "a", "seed": 1.5}, "seed", "seed: found 1.5; expected a whole number"),
        ({"prompt": "a", "n": 2}, "n", "n: found 2; expected 1 at temperature 0"),
        ({"prompt": "a", "n": 5, "temperature": 1}, "n", "n: found 5; expected a whole number from 1 to 4"),
        ({"prompt": "a", "logprobs": 5}, "logprobs", "logprobs: found 5; expected a whole number from 0 to 1"),
        ({"prompt": "a", "logprobs": 1, "temperature": 1}, "logprobs", "logprobs: found 1; expected 0 above"),
        ({"prompt": "a", "stream": 1}, "stream", "stream: found 1; expected true or false"),
        ({"prompt": "a", "stream_options": {}, "stream": "no"}, "stream", "stream: found 'no'"),
        ({"prompt": "a", "stop": ["a", ""]}, "stop", "stop: found ''; expected texts of 1 to"),
        ({"prompt": "a", "stop": "a", "rows": True}, "stop", "stop: found 'a'; expected none with rows"),
        ({"prompt": "a", "method": "best"}, "method", "method: found 'best'; expected one of"),
        ({"prompt": "a", "echo": True}, "echo", "echo: found True; expected false or nothing"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "suffix: found 'b'; expected"),
        ({"prompt": "a", "temprature": 1}, "temprature", "temprature: found an unknown field; expected one of prompt"),
        ({"prompt": "a", "messages": []}, "messages", "messages: found an unknown field"),
    ],
)
def test_invalid_body_gets_400_with_the_field(
    client: TestClient, engine: ScriptedEngine, body: Any, field: Any, said: str
):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = error(client.post(PATH, content=content, headers={"Content-Type": "application/json"}), 400)
    assert found["message"].startswith(said), found["message"]
    assert found["param"] == field and found["type"] == "invalid_request_error"
    assert len(found["message"]) < 400 and not engine.requests


@pytest.mark.parametrize(
    "field, meant",
    [("temprature", "temperature"), ("max_completion_tokens", "max_tokens"), ("Seed", "seed"), ("topk", "top_k")],
)
def test_unknown_field_gets_a_suggestion(client: TestClient, field: str, meant: str) -> None:
    message = error(client.post(PATH, json={"prompt": "a", field: 1}), 400)["message"]
    assert message.endswith(f'(did you mean "{meant}"?)')


@pytest.mark.parametrize("seed", [-1, 0, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)])
def test_seeds_are_all_whole_numbers_of_64_bits(client: TestClient, engine: ScriptedEngine, seed: int) -> None:
    client.post(PATH, json={"prompt": TEXT, "temperature": 1, "seed": seed})
    (request,) = engine.requests
    assert request.sampling.seed == seed_of(request.source, seed)
    assert request.sampling.seed not in {seed_of(request.source, seed + n) for n in (-1, 1, 2**32)}


def test_null_counts_as_absent(client: TestClient, engine: ScriptedEngine) -> None:
    body = {"prompt": TEXT} | dict.fromkeys(("max_tokens", "seed", "stop", "logprobs", "stream", "rows", "suffix"))
    assert client.post(PATH, json=body).status_code == 200 and engine.requests[0].max_tokens is None


def test_a_byte_order_mark_is_no_part_of_a_body(client: TestClient) -> None:
    content = b"\xef\xbb\xbf" + json.dumps({"prompt": TEXT}).encode()
    assert client.post(PATH, content=content, headers={"Content-Type": "application/json"}).status_code == 200


def test_long_prompt_is_cut_only_on_request(client: TestClient, engine: ScriptedEngine) -> None:
    ids = [*range(2, 40), 1]
    found = error(client.post(PATH, json={"prompt": ids}), 400)
    assert found["code"] == "context_length_exceeded"
    usage = client.post(PATH, json={"prompt": ids, "truncate": True}).json()["usage"]
    assert list(engine.requests[0].source.content) == [*range(2, 25), 1]  # as decode truncates it
    assert usage["prompt_tokens"] == 24 and usage["cut_tokens"] == 15


@pytest.mark.parametrize(
    "method, path, status, said",
    [
        ("GET", PATH, 405, f"found GET {PATH}; expected one of POST {PATH}"),
        ("PUT", "/health", 405, "found PUT /health"),
        ("POST", "/v1/embeddings", 404, "found POST /v1/embeddings; expected one of"),
        ("GET", "/v1/models/other", 404, "model: found 'other'; expected 'tiny'"),
        ("GET", "/../../etc/passwd", 404, "found GET "),
    ],
)
def test_unknown_paths_and_methods_get_404_and_405(
    client: TestClient, method: str, path: str, status: int, said: str
) -> None:
    reply = client.request(method, path)
    assert reply.status_code == status and reply.json()["error"]["message"].startswith(said)
    assert (status == 405) == ("Allow" in reply.headers)


@pytest.mark.parametrize(
    "path", ["/", *app.POSTS, "/v1/models", "/v1/models/tiny", "/health", "/livez", "/readyz", "/metrics"]
)
@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_every_path_names_its_allowed_methods(engine: ScriptedEngine, path: str, keys: tuple[str, ...]) -> None:
    client = connect(service(engine, *keys))
    reply = client.options(path)
    assert reply.status_code == 204 and reply.content == b""
    assert reply.headers["Allow"] == ("OPTIONS, POST" if path in app.POSTS else "GET, HEAD, OPTIONS")
    assert "Access-Control-Allow-Origin" not in reply.headers
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    head, get = (client.request(method, path, headers=headers) for method in ("HEAD", "GET"))
    assert head.status_code == get.status_code == (405 if path in app.POSTS else 200)
    assert head.headers["Content-Type"] == get.headers["Content-Type"]
    assert client.options("/v1/nowhere").status_code == 404


SITE = "https://app.example"


@pytest.mark.parametrize("origins", [[SITE, "http://localhost:3000"], ["*"]])
def test_allowed_origins_get_cors_headers(engine: ScriptedEngine, origins: list[str]) -> None:
    own = service(engine, "secret")
    own.origins = origins
    client = connect(own)
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}
    reply = client.options(PATH, headers={"Origin": SITE, **asks})  # a browser asks without a key
    named = "*" if origins == ["*"] else SITE
    assert reply.status_code == 200 and reply.headers["Access-Control-Allow-Origin"] == named
    assert {"POST", "GET"} <= set(reply.headers["Access-Control-Allow-Methods"].split(", "))
    assert reply.headers["Access-Control-Allow-Headers"] == asks["Access-Control-Request-Headers"]
    assert "Origin" in reply.headers["Vary"]
    for key, status in (("secret", 200), ("wrong", 401)):  # pages may read the texts of errors, too
        headers = {"Origin": SITE, "Authorization": f"Bearer {key}"}
        for body in ({"prompt": TEXT}, {"prompt": TEXT, "stream": True}):
            reply = client.post(PATH, json=body, headers=headers)
            assert reply.status_code == status and reply.headers["Access-Control-Allow-Origin"] == named
            assert "Access-Control-Allow-Credentials" not in reply.headers
            assert named == "*" or reply.headers["Vary"] == "Origin"
    if named != "*":
        for stranger in ("https://other.example", "http://app.example", f"{SITE}:8443", "null"):
            for reply in (client.options(PATH, headers={"Origin": stranger, **asks}), client.get("/health")):
                assert "Access-Control-Allow-Origin" not in reply.headers
    assert client.get("/health").status_code == 200


def test_responses_to_other_sites_have_no_cors_headers_by_default(client: TestClient) -> None:
    asks = {"Origin": SITE, "Access-Control-Request-Method": "POST"}
    for reply in (client.options(PATH, headers=asks), client.get("/v1/models", headers=asks)):
        assert reply.status_code in (200, 204)
        assert not [name for name in reply.headers if name.lower().startswith("access-control")]


SPELT = ["*", "https://app.example", "http://127.0.0.1:3000", "http://[::1]:3000"]
MISSPELT = ["https://app.example/", "https://App.Example", "https://app.example:443", "https://me@app.example/page?x"]
MISSPELT += ["app.example", "https://app.example:port", "null", "https://bücher.example", ""]


@pytest.mark.parametrize("text", [*SPELT, *MISSPELT])
def test_an_origin_is_spelt_as_browsers_spell_it(text: str) -> None:
    if text in SPELT:
        assert serve_command.origin(text) == text
        return
    with pytest.raises(argparse.ArgumentTypeError, match=rf"^found '.*'; expected .* such as {SITE}, or \*$"):
        serve_command.origin(text)


def test_unknown_model_is_refused(client: TestClient) -> None:
    found = error(client.post(PATH, json={"prompt": "a", "model": "gpt"}), 404)
    assert found["code"] == "model_not_found" and found["param"] == "model"


def test_a_body_that_is_no_json_by_its_header(client: TestClient) -> None:
    headers = {"Content-Type": "text/plain"}  # a page of another site may send that
    found = error(client.post(PATH, content=b'{"prompt": "a"}', headers=headers), 415)
    assert found["message"] == "Content-Type: found text/plain; expected application/json"


@pytest.mark.parametrize("is_declared", [False, True])
def test_large_body_is_refused(client: TestClient, engine: ScriptedEngine, is_declared: bool) -> None:
    body = json.dumps({"prompt": "a" * 5000}).encode()
    parts: Any = body if is_declared else iter([body[:3000], body[3000:]])
    found = error(client.post(PATH, content=parts, headers={"Content-Type": "application/json"}), 413)
    assert found["message"] == "body: found more than 4000 bytes; expected at most that many"
    assert client.post(PATH, json={"prompt": "a"}).status_code == 200 and len(engine.requests) == 1


def test_requests_need_a_valid_key(engine: ScriptedEngine) -> None:
    client = connect(service(engine, "one", "two"))
    for given in (None, "Bearer three", "Bearer ", "Basic one", "one"):
        headers = {} if given is None else {"Authorization": given}
        for path in (PATH, "/v1/models", "/v1/nowhere"):
            reply = client.post(path, json={"prompt": "a"}, headers=headers)
            assert error(reply, 401)["code"] == "invalid_api_key" and "one" not in reply.text
    for key in ("one", "two"):
        assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert client.get("/health").status_code == client.get("/metrics").status_code == client.get("/").status_code == 200
    assert not engine.requests


@pytest.mark.parametrize("text, keys", [("a\n\n b \n", ["a", "b"]), ("", None), (None, None), (b"\xff", None)])
def test_keys_are_read_from_a_file(tmp_path: Any, text: Any, keys: Any) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    if keys:
        assert serve_command.read_keys(str(path)) == keys
        return
    with pytest.raises(UserError, match=r"^--api-key-file .*keys: (found no key|cannot be read)"):
        serve_command.read_keys(str(path))


def test_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serve_command.KEY, raising=False)
    assert serve_command.read_keys(None) == []
    monkeypatch.setenv(serve_command.KEY, "secret")
    assert serve_command.read_keys(None) == ["secret"]
    monkeypatch.setenv(serve_command.KEY, " ")
    with pytest.raises(UserError, match="PIPEJAX_API_KEY: found no key"):
        serve_command.read_keys(None)


@pytest.mark.parametrize(
    "content, keys",
    [
        (b"\xef\xbb\xbfsecret\r\n", ["secret"]),
        (b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n", ["one", "two"]),  # two concatenated files
        (b"\xef\xbb\xbf\n  three \n", ["three"]),
        ("schlüssel\n".encode(), ["schlüssel"]),
        ("secret".encode("utf-16"), None),
        (b"\xef\xbb\xbf", None),
        (b"a\x00b\n", None),
        ("a\u200bb\n".encode(), None),
    ],
)
def test_byte_order_mark_is_not_part_of_key(tmp_path: Path, content: bytes, keys: list[str] | None) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    if keys is not None:
        assert serve_command.read_keys(str(file)) == keys
        return
    with pytest.raises(UserError, match=r"keys: (cannot be read|found no key|line 1: found an invisible character)"):
        serve_command.read_keys(str(file))


def test_byte_order_mark_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(serve_command.KEY, "\ufeffsecret")
    assert serve_command.read_keys(None) == ["secret"]


# Load and faults.


def test_full_queue_gives_an_error(client: TestClient, engine: ScriptedEngine) -> None:
    engine.go_on.clear()
    replies: list[Any] = []

    def post() -> None:
        replies.append(client.post(PATH, json={"prompt": TEXT}))

    threads = [threading.Thread(target=post) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: engine.under_way == 3)
    reply = client.post(PATH, json={"prompt": ["a", "b"]})  # one request fits, so neither is accepted
    assert error(reply, 429)["code"] == "queue_full" and int(reply.headers["Retry-After"]) > 0
    assert engine.under_way == 3 and client.get("/health").status_code == 200
    assert "pipejax_queue_length 1.0" in client.get("/metrics").text
    engine.go_on.set()
    for thread in threads:
        thread.join()
    assert [reply.status_code for reply in replies] == [200] * 3 and engine.under_way == 0


@pytest.mark.parametrize("stream", [False, True])
def test_time_is_limited(engine: ScriptedEngine, stream: bool) -> None:
    engine.go_on.clear()
    reply = connect(service(engine, seconds=0.2)).post(PATH, json={"prompt": TEXT, "stream": stream})
    if stream:
        event = reply.text.split("\n\n")[-2]
        found = json.loads(event.removeprefix("data: "))["error"]
        assert reply.status_code == 200
    else:
        found = error(reply, 504)
    assert found["code"] == "timeout" and found["type"] == "server_error"
    assert engine.under_way == 0 and len(engine.cancelled) == 1


@pytest.mark.usefixtures("lines_on_stderr")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "raised, status, code",
    [
        (RuntimeError("/secret/place.py is wrong"), 500, "internal_error"),
        (UserError("temperature: found 1; expected 0 with beams"), 400, None),
        (MemoryError(), 503, "out_of_memory"),
    ],
)
def test_failed_engine_gives_an_error(
    client: TestClient, engine: ScriptedEngine, capfd: Any, raised: Exception, status: int, code: str, stream: bool
) -> None:
    engine.error = raised
    reply = client.post(PATH, json={"prompt": TEXT, "stream": stream})
    found = json.loads(reply.text.split("\n\n")[-2].removeprefix("data: "))["error"] if stream else error(reply, status)
    assert found["code"] == code and "secret" not in reply.text
    assert ("Traceback" in capfd.readouterr().err) == (status == 500)
    engine.error = None
    assert client.post(PATH, json={"prompt": TEXT}).status_code == 200  # the server keeps running
    assert f'pipejax_requests_total{{status="{200 if stream else status}"}} ' in client.get("/metrics").text


def test_draining_server_refuses_requests(engine: ScriptedEngine) -> None:
    own = service(engine)
    client = connect(own)
    own.draining = True
    reply = client.post(PATH, json={"prompt": TEXT})
    assert error(reply, 503)["code"] == "draining" and "Retry-After" in reply.headers
    assert client.get("/health").status_code == 503 and not engine.requests


# The rest.


def test_models_endpoint_lists_the_model(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    (model,) = listed["data"]
    assert listed["object"] == "list" and model["id"] == "tiny" and client.get("/v1/models/tiny").json() == model
    assert model["delays"] == {"pipelined": 1, "sequential": 0} and model["max_prompt_tokens"] == 24


def test_metrics_endpoint_counts_requests_and_tokens(client: TestClient) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    usage = client.post(PATH, json={"prompt": TEXT}).json()["usage"]
    client.post(PATH, json={"prompt": ""})
    families = text_string_to_metric_families(client.get("/metrics").text)
    found = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    assert found["pipejax_requests_total", "200"] == found["pipejax_requests_total", "400"] == 1
    assert found["pipejax_prompt_tokens_total",] == usage["prompt_tokens"]
    assert found["pipejax_generated_tokens_total",] == usage["completion_tokens"]
    assert found["pipejax_answers_total", "stop"] == 1
    assert found["pipejax_request_seconds_count",] == found["pipejax_first_token_seconds_count",] == 1
    assert found["pipejax_places",] == 2 and found["pipejax_places_in_use",] == found["pipejax_queue_length",] == 0


@pytest.fixture(scope="module")
def port(generator: Generator) -> Iterator[int]:
    """The port of a server with real sockets."""
    own, listener = service(ScriptedEngine(generator), "key"), serve_command.listen("127.0.0.1", 0)
    found: int = listener.getsockname()[1]
    listener.listen()  # clients that connect before the start wait
    thread = threading.Thread(target=serve_command.run, args=(own, listener))
    thread.start()
    yield found
    own.draining = True
    thread.join(20)
    assert not thread.is_alive()


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # without a host
        b"GET /health HTTP/1.1\r\nHost: x\r\nA B: c\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"c" * 100_000,  # without an end
        POST + b"Content-Length: many\r\n\r\n{}",
        POST + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nnonsense\r\n\r\n",  # after an answer
    ],
)
def test_request_that_is_no_http_gets_an_error_object(port: int, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(sent)
        found = b""
        while part := connection.recv(2**16):
            found += part
    head, _, body = found[found.index(b"HTTP/1.1 400") :].partition(b"\r\n\r\n")
    assert b"application/json" in head and f"Content-Length: {len(body)}".encode() in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert json.loads(body)["error"]["message"].startswith("request: found")
    asks = b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:  # the server continues
        connection.sendall(asks)
        found = connection.recv(2**16)
    assert found.startswith(b"HTTP/1.1 200 ") and found.endswith(b"\r\n\r\n")  # without a body
    assert "WebSocket" not in caplog.text


def test_answers_are_sent_without_nagles_delay() -> None:
    """asyncio leaves Nagle's algorithm on for listeners that do not name TCP: an answer then takes 40 ms longer."""
    with serve_command.listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_the_page_loads_nothing_from_elsewhere(client: TestClient) -> None:
    reply = client.get("/")
    assert reply.headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    assert not re.search(r"https?://|src=|@import|url\(", reply.text)
    assert 'name="truncate"' in reply.text  # as the refusal of a long prompt advises


PAGE = r"""
const elements = {}, states = JSON.parse(process.argv[2]), timers = [];
const make = () => new Proxy(function () {}, {
  get: (own, name) => name in own ? own[name] : name === Symbol.toPrimitive ? () => "" : make(),
  set: (own, name, value) => { own[name] = value; return true; },
  apply: () => make(),
});
const warming = {};
globalThis.document = {querySelector: (name) => name === ".warming" ? warming : make(), createElement: make};
globalThis.setTimeout = (call) => timers.push(call);
globalThis.fetch = async (path) => {
  if (path !== "readyz") return new Promise(() => {});
  const state = states.shift();
  if (!state) throw new TypeError("gone");
  return {json: async () => state};
};
const shown = [];
eval(require("fs").readFileSync(0, "utf8"));
(async () => {
  for (;;) {
    for (let i = 0; i < 20; i++) await null;
    shown.push(warming.hidden ? null : warming.textContent);
    if (!timers.length) break;
    timers.shift()();
  }
  console.log(JSON.stringify(shown));
})();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the script of the page")
@pytest.mark.parametrize(
    "states, counts",
    [
        (["ok"], [None]),
        (["warming up", "warming up", "ok"], ["3 of 9 programs", "3 of 9 programs", None]),
        (["warming up", "draining"], ["3 of 9 programs", None]),
        (["warming up", None], ["3 of 9 programs", None]),  # the server has ended
    ],
)
def test_the_page_shows_that_the_server_compiles(client: TestClient, states: list[Any], counts: list[Any]) -> None:
    script = client.get("/").text.partition("<script>")[2].partition("</script>")[0]
    given = [state and {"status": state, "programs": {"prepared": 3, "planned": 9}} for state in states]
    serve_command = ["node", "-e", PAGE, "page", json.dumps(given)]
    found = json.loads(subprocess.run(serve_command, input=script, capture_output=True, text=True, check=True).stdout)
    assert len(found) == len(counts)
    assert all(count in text if count else text is None for text, count in zip(found, counts, strict=True))


@pytest.mark.usefixtures("lines_on_stderr")
@pytest.mark.parametrize("flags, said", [(["*"], 1), ([SITE], 0), ([], 0)])
def test_a_server_for_all_pages_without_a_key(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str], flags: list[str], said: int
) -> None:
    own = service(engine)
    own.origins, own.draining = flags, True
    serve_command.run(own, serve_command.listen("127.0.0.1", 0))
    assert capsys.readouterr().err.count("warning: --allow-origin * and no API key") == said


@pytest.mark.usefixtures("lines_on_stderr")
def test_start_compiles_for_all_prompts_unless_limited(
    params: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default idle connections are kept longer than by proxies, and shutdown waits as long as a request may take."""
    checkpoint.save_params(tmp_path / "run", tiny.RUN, params)
    lengths, kept = list[tuple[int, bool]](), list[tuple[int, int]]()

    def run(service: Any, listener: socket.socket, *, keep_alive: int, drain: int, **more: Any) -> None:
        kept.append((keep_alive, drain))
        listener.close()

    monkeypatch.setattr(Engine, "warm_up", lambda engine, length, *, schemas: lengths.append((length, schemas)))
    monkeypatch.setattr(serve_command, "run", run)
    for more in ("", "--warm-up 16 --timeout 20", "--warm-up 500 --keep-alive 9 --no-schemas", "--warm-up 0 --drain 0"):
        flags = ["--checkpoint", str(tmp_path / "run"), "--port", "0", "--set=data.max_source=80", *more.split()]
        assert serve_command.main(flags) == 0
    assert lengths == [(80, True), (16, True), (80, False)]
    assert kept == [(75, 300), (75, 20), (9, 300), (75, 0)]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("compiling")]
    then = {True: "sampling, scores and schemas", False: "sampling and scores"}
    assert [line.partition(":")[0] for line in lines] == [
        f"compiling for prompts of up to {length} tokens, then for {then[schemas]}" for length, schemas in lengths
    ]


# Requirements of operators.


PLACES = ("/health/", "/metrics/", "/v1/models/", "/v1/models/tiny/", "/livez/", "/v1//models")


@pytest.mark.parametrize("path", [*PLACES, *(f"{path}/" for path in app.POSTS)])
def test_no_path_redirects_to_another_host(client: TestClient, path: str) -> None:
    for method in ("GET", "POST"):
        reply = client.request(method, path, headers={"Host": "evil.example"}, json={}, follow_redirects=False)
        assert reply.status_code in (404, 405) and "Location" not in reply.headers
        assert "evil" not in reply.text


def test_metrics_do_not_depend_on_the_text_of_requests(client: TestClient) -> None:
    """The metrics are numbers of requests, answers and tokens, times, and the present state."""
    client.post(PATH, json={"prompt": TEXT})
    names = {line.split()[2] for line in client.get("/metrics").text.splitlines() if line.startswith("# TYPE")}
    counted = {"requests_total", "answers_total", "prompt_tokens_total", "generated_tokens_total"}
    timed = {"request_seconds", "first_token_seconds"}
    now = {"active_requests", "places", "places_in_use", "queue_length", "draining", "warming_up"}
    created = {f"{name.removesuffix('_total')}_created" for name in counted | timed}
    assert names == {f"pipejax_{name}" for name in counted | timed | now | created}


@pytest.mark.parametrize("given", ["a1", "0f8-fad_5b", "Root=1-67891233:abc/9@x.y+z", "x" * 128])
def test_an_id_of_the_client_is_kept(client: TestClient, given: str) -> None:
    for path, body in ((PATH, {"prompt": TEXT}), (PATH, {"prompt": TEXT, "stream": True}), ("/nowhere", {})):
        assert client.post(path, json=body, headers={"X-Request-Id": given}).headers["X-Request-Id"] == given


@pytest.mark.parametrize(
    "given", [b"", b"x" * 129, b"a b", b"a\tb", b"caf\xe9", b"<b>", b'"', b"\x1b[31m", b"a\xc2\x85b", b"{}"]
)
def test_another_id_is_replaced(engine: ScriptedEngine, given: bytes, said: Any) -> None:
    client = connect(service(engine, access_log=True))
    replies = [client.get("/health", headers=[(b"x-request-id", given)]) for _ in range(2)]
    ids = [reply.headers["X-Request-Id"] for reply in replies]
    assert ids[0] != ids[1] and all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)
    lines = said()
    assert [line.rpartition(" ")[2] for line in lines] == ids and all(line.isprintable() for line in lines)


def test_every_answer_has_an_id(engine: ScriptedEngine, capfd: Any, said: Any) -> None:
    client = connect(service(engine, "key"))
    headers = {"Authorization": "Bearer key"}
    replies = [client.get("/"), client.get("/v1/models"), client.options(PATH), client.put("/health")]
    engine.error = RuntimeError("by a test")
    replies.append(client.post(PATH, json={"prompt": TEXT}, headers=headers))
    assert [reply.status_code for reply in replies] == [200, 401, 204, 405, 500]
    assert len({reply.headers["X-Request-Id"] for reply in replies}) == 5
    assert said() == [f"request {replies[-1].headers['X-Request-Id']} failed because of an error in the server"]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """The lines of the server's log."""
    logger = logging.getLogger("pipejax.apps.serving")
    with caplog.at_level(logging.INFO, logger="pipejax"):
        logger.addHandler(caplog.handler)  # others may have told it not to propagate
        yield lambda: [record.getMessage() for record in dict.fromkeys(caplog.records)]
        logger.removeHandler(caplog.handler)


def test_access_log_has_one_line_for_each_request_without_texts(engine: ScriptedEngine, said: Any) -> None:
    client = connect(service(engine, access_log=True))
    headers = {"X-Request-Id": "a1"}
    client.post(PATH, json={"prompt": TEXT}, headers=headers)
    client.post(PATH + "?secret", json={"prompt": TEXT, "stream": True}, headers=headers)
    client.get("/v1/a%0a%1b[31mb" + "c" * 999, headers=headers)
    first, second, third = said()
    assert re.fullmatch(rf"POST {PATH} 200 in 0\.\d+ s, request a1", first)
    assert re.fullmatch(rf"POST {PATH} 200 in 0\.\d+ s, request a1", second)
    assert third.startswith("GET /v1/a%0A%1B%5B31mbcc") and len(third) < 300
    connect(service(engine)).get("/health")
    assert len(said()) == 3  # none if it is not requested


def test_log_lines_are_json_objects_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli._lines, "as_json", False)
    cli.note("plain")
    cli.write_json()
    cli.note('a "b"\nc', request="x")
    cli._lines.emit(logging.makeLogRecord({"msg": "slow", "levelno": 30, "levelname": "WARNING", "fields": {"n": 1.5}}))
    plain, *lines = capsys.readouterr().err.splitlines()
    found = [json.loads(line) for line in lines]
    assert plain == "plain" and len(found) == 2
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]{12}\+00:00", one.pop("time")) for one in found)
    assert found == [
        {"level": "info", "message": 'a "b"\nc', "request": "x"},
        {"level": "warning", "message": "slow", "n": 1.5},
    ]


def test_readiness_follows_warm_up_and_draining(client: TestClient, engine: ScriptedEngine) -> None:
    own = service(engine)
    client = connect(own)

    def states() -> list[int]:
        return [client.get(path).status_code for path in ("/livez", "/health", "/readyz")]

    assert states() == [200, 200, 200]
    engine.compiler.planned, engine.compiler.prepared = 5, 4
    assert states() == [200, 200, 503]
    assert client.get("/readyz").json() == {"status": "warming up", "programs": {"prepared": 4, "planned": 5}}
    assert "pipejax_warming_up 1.0" in client.get("/metrics").text
    assert client.post(PATH, json={"prompt": TEXT}).status_code == 200  # since its programs are compiled
    engine.compiler.prepared = 5
    assert states() == [200, 200, 200]
    own.draining = True
    assert states() == [200, 503, 503] and client.get("/readyz").json()["status"] == "draining"


@pytest.mark.usefixtures("lines_on_stderr")
def test_unanswered_request_gets_an_error_at_shutdown(engine: ScriptedEngine, capsys: Any) -> None:
    own, listener = service(engine), serve_command.listen("127.0.0.1", 0)
    listener.listen()
    engine.go_on.clear()
    thread = threading.Thread(target=serve_command.run, args=(own, listener), kwargs={"drain": 0.3})
    thread.start()
    body = json.dumps({"prompt": TEXT}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(listener.getsockname()[:2], timeout=20) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: engine.under_way == 1)
        own.draining = True
        assert connection.recv(2**16).startswith(b"HTTP/1.1 503 ")
    thread.join(20)
    assert not thread.is_alive() and "1 requests are not finished after 0.3 s" in capsys.readouterr().err


def test_idle_connections_are_kept_longer_than_by_proxies(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import uvicorn

    made, seconds = uvicorn.Config, []

    def config(*given: Any, **more: Any) -> Any:
        seconds.append(more["timeout_keep_alive"])
        return made(*given, **more)

    monkeypatch.setattr(uvicorn, "Config", config)
    given: tuple[dict[str, Any], ...] = ({}, {"keep_alive": 3})
    for more in given:
        own = service(engine)
        own.draining = True
        serve_command.run(own, serve_command.listen("127.0.0.1", 0), **more)
    assert seconds == [75, 3] and seconds[0] > 60


def test_waiting_for_schemas_blocks_no_other_requests(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of requests that wait for compilation has no effect."""
    go_on, begun, came = threading.Event(), list[int](), list[int]()

    def slow(generator: Generator, schema: Any, strategy: Any, *, effort: Any, pause: Any) -> Any:
        if effort is None:
            came.append(1)
            raise Uncompiled
        begun.append(1)
        assert go_on.wait(20)
        raise UserError("schema: found too much; expected less")

    monkeypatch.setattr(Generator, "under", slow)
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    asks = [(PATH, {"prompt": TEXT, "response_format": schema})] * 6
    asks += [("/v1/responses", {"input": TEXT, "text": {"format": {"type": "json_schema", "schema": {}}}})] * 3
    replies: list[Any] = []
    threads = [threading.Thread(target=lambda a=a: replies.append(client.post(a[0], json=a[1]))) for a in asks]
    for thread in threads:
        thread.start()
    wait_until(lambda: begun == [1] and len(came) == len(asks))
    assert client.post(PATH, json={"prompt": TEXT}).status_code == 200
    plain: tuple[dict[str, Any], ...] = ({"text": {"format": {"type": "text"}}}, {"text": {}}, {})
    for more in plain:
        assert client.post("/v1/responses", json={"input": TEXT, **more}).status_code == 200
    assert not replies
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert [reply.status_code for reply in replies] == [400] * 9


def test_response_echoes_the_settings_of_the_request(client: TestClient) -> None:
    asks = {"instructions": "be brief", "metadata": {"a": "b"}, "max_output_tokens": 9, "user": "u1"}
    asks |= {"safety_identifier": "s1", "prompt_cache_key": "p", "max_tool_calls": 3}
    found = client.post("/v1/responses", json={"input": TEXT, **asks}).json()
    assert {name: found[name] for name in asks} == asks and found["truncation"] == "disabled"
    plain = client.post("/v1/responses", json={"input": TEXT, "truncate": True, "metadata": None}).json()
    assert (plain["instructions"], plain["metadata"], plain["max_output_tokens"]) == (None, {}, None)
    assert plain["truncation"] == "auto" and not {"user", "safety_identifier"} & plain.keys()
    events = client.post("/v1/responses", json={"input": TEXT, "stream": True, **asks}).text.split("\n\n")
    for event in (events[0], events[1], events[-2]):
        told = json.loads(event.partition("data: ")[2])["response"]
        assert {name: told[name] for name in asks} == asks


def test_a_bound_under_a_schema_is_echoed_too(
    client: TestClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a schema it bounds each row, otherwise the whole answer; the response has the client's value."""
    monkeypatch.setattr(requests, "apply_format", lambda given, generator, strategy, apply: generator)
    for each, whole in ((3, None), (None, 9)):
        monkeypatch.setattr(requests, "bound_rows", lambda *given, each=each: each)
        schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
        body = {"input": TEXT, "max_output_tokens": 9, "text": {"format": schema}}
        found = client.post("/v1/responses", json=body).json()
        assert (found["max_output_tokens"], found["text"]) == (9, {"format": schema})
        assert (engine.requests[-1].row_tokens, engine.requests[-1].max_tokens) == (each, whole)


def test_a_method_that_cannot_stream_is_refused_in_one_line(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipejax.methods import PipelinedMethod

    monkeypatch.setattr(PipelinedMethod, "can", PipelinedMethod.can - {"stream"})
    said = "none: pipelined decoding does not stream rows"
    for path, source in ((PATH, {"prompt": TEXT}), ("/v1/responses", {"input": TEXT})):
        message = error(client.post(path, json={**source, "stream": True}), 400)["message"]
        assert message == f"stream: found True; expected {said}"
        assert error(client.post(path, json={**source, "stop": "a"}), 400)["param"] == "stop"
    chat = {"messages": [{"role": "user", "content": TEXT}], "stream": True}
    assert error(client.post("/v1/chat/completions", json=chat), 400)["param"] == "stream"
    taken: list[dict[str, Any]] = [{}, {"stream": False}, {"stop": []}, {"stream": True, "method": "sequential"}]
    for more in taken:
        assert client.post(PATH, json={"prompt": TEXT, **more}).status_code == 200


def test_user_error_is_answered_with_status_400(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """This holds for every part of the server."""
    for name in ("requests.encode_source", "requests.bound_rows", "answering.Writing"):
        with monkeypatch.context() as patch:

            def refuse(*given: Any, **more: Any) -> Any:
                raise UserError("grid.x: found 1; expected 2")

            patch.setattr(f"pipejax.apps.serving.{name}", refuse)
            assert error(client.post(PATH, json={"prompt": TEXT}), 400)["message"] == "grid.x: found 1; expected 2"
    assert "Traceback" not in capfd.readouterr().err


def test_model_list_has_the_step_of_the_checkpoint(generator: Generator) -> None:
    other = copy.copy(generator)
    other.origin = {"step": 7, "params_fp": "x"}
    assert connect(service(ScriptedEngine(other))).get("/v1/models/tiny").json()["step"] == 7
    assert connect(service(ScriptedEngine(generator))).get("/v1/models/tiny").json()["step"] is None


@pytest.mark.usefixtures("lines_on_stderr")
def test_sigterm_during_start_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, serve_command.ending_on_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().err == "stopped by SIGTERM before the server had started\n"


def test_every_field_is_described() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[1] / "docs" / "serving.md").read_text()
    forms = [form for form, _ in app.POSTS.values()]
    fields = {field for form in forms for field in (*form.fields, *form.neutral, *form.unused)}
    assert len(forms) == 3 and not [field for field in sorted(fields) if f"`{field}`" not in page]


@pytest.fixture(autouse=True)
def nothing_is_left(engine: ScriptedEngine) -> Iterator[None]:
    yield
    engine.go_on.set()
    wait_until(lambda: engine.under_way == 0)
