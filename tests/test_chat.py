"""Chats and responses over HTTP with an engine without a model, and odd requests to all routes that answer."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from pipejax.apps.papers.data_sets import PUBLISHED
from pipejax.config import DataConfig
from pipejax.data import make_task
from pipejax.inference.decoding_options import seed_of
from pipejax.inference.generator import Generator
from support import oracle, tiny
from support.scripted_engine import ScriptedEngine
from support.served import chunks, connect, error, service, wait_until

TEXT = "deliver tiny lamps and new ropes past the river"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "green bread"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]},
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": "bread"},
]
PARTS = [{"type": "text", "text": "deliver tiny lamps and"}, {"type": "text", "text": "new ropes past the river"}]


def with_data(tokenizer: Any, **data: Any) -> ScriptedEngine:
    config = tiny.change(tiny.RUN, data={"max_source": 24, **data}, grid={"delay": 1})
    return ScriptedEngine(Generator(config, oracle.random_params(tiny.MODEL, np.random.default_rng(7)), tokenizer))


@pytest.fixture(scope="module")
def engine_of_all(tokenizer: Any) -> ScriptedEngine:
    return with_data(tokenizer)


@pytest.fixture
def engine(engine_of_all: ScriptedEngine) -> Iterator[ScriptedEngine]:
    engine_of_all.requests.clear()
    engine_of_all.error = None
    yield engine_of_all
    engine_of_all.go_on.set()
    wait_until(lambda: engine_of_all.under_way == 0)


@pytest.fixture
def client(engine: ScriptedEngine) -> TestClient:
    return connect(service(engine))


def text_of(engine: ScriptedEngine) -> str:
    """The rows of the scripted answer to TEXT, three tokens each, as the tokenizer decodes them."""
    tokenizer = engine.generator.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT)
    return " ; ".join(tokenizer.decode(ids[i : i + 3]) for i in range(0, len(ids), 3))


def events(reply: Any) -> list[dict[str, Any]]:
    """The events of a stream of responses, whose names are their types."""
    found = []
    for block in filter(None, reply.text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


@pytest.mark.parametrize("messages", [TURNS, TURNS[3:4], [{"role": "user", "content": PARTS}]])
def test_chat_returns_the_answer(client: TestClient, engine: ScriptedEngine, messages: list[Any]) -> None:
    reply = client.post(CHAT, json={"model": "tiny", "messages": messages}).json()
    assert reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-") and reply["model"] == "tiny"
    (choice,) = reply["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == text_of(engine)
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    (request,) = engine.requests
    tokens = len(request.source.content)
    assert reply["usage"] == {"prompt_tokens": tokens, "completion_tokens": tokens - 1, "total_tokens": 2 * tokens - 1}


def test_streamed_chat_returns_the_answer(client: TestClient, engine: ScriptedEngine) -> None:
    body = {"messages": TURNS, "stream": True, "stream_options": {"include_usage": True}, "temperature": 1, "n": 2}
    *found, last = chunks(client.post(CHAT, json=body | {"seed": 3}))
    whole = client.post(CHAT, json={"messages": TURNS, "temperature": 1, "n": 2, "seed": 3}).json()
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    assert last["choices"] == [] and last["usage"] == whole["usage"] and {chunk["usage"] for chunk in found} == {None}
    for i, expected in enumerate(whole["choices"]):
        first, *own, end = [c for chunk in found for c in chunk["choices"] if c["index"] == i]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"]["content"] for choice in own) == expected["message"]["content"]
        assert {choice["finish_reason"] for choice in own} == {None}
        assert end["delta"] == {} and end["finish_reason"] == "stop"
    assert whole["choices"][0]["message"] != whole["choices"][1]["message"]


def test_chat_returns_rows(client: TestClient, engine: ScriptedEngine) -> None:
    body = {"messages": TURNS, "rows": True}
    record = client.post(CHAT, json=body).json()["choices"][0]["record"]
    assert " ; ".join(record["rows"]) == text_of(engine)
    choices = [chunk["choices"][0] for chunk in chunks(client.post(CHAT, json=body | {"stream": True}))]
    assert choices[-1]["record"] == record
    for row, text in enumerate(record["rows"]):
        assert "".join(choice["delta"]["content"] for choice in choices if choice.get("row") == row) == text


ITEMS = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": TEXT}]}]
CALL = [{"type": "function_call_output", "call_id": "a", "output": "b"}]


@pytest.mark.parametrize("given", [TEXT, TURNS[:4], ITEMS, [*CALL, *ITEMS]])
def test_response_returns_the_answer(client: TestClient, engine: ScriptedEngine, given: Any) -> None:
    reply = client.post(RESPONSES, json={"input": given, "instructions": "be brief", "max_output_tokens": 50}).json()
    assert (reply["object"], reply["status"], reply["error"]) == ("response", "completed", None)
    (message,) = reply["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": text_of(engine), "annotations": [], "logprobs": []}]
    assert engine.requests[0].max_tokens == reply["max_output_tokens"] == 50
    usage = reply["usage"]
    assert usage["input_tokens"] == usage["output_tokens"] + 1 == len(engine.requests[0].source.content)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_streamed_response_returns_the_answer(client: TestClient, engine: ScriptedEngine) -> None:
    found = events(client.post(RESPONSES, json={"input": TEXT, "stream": True}))
    kinds = [event["type"].removeprefix("response.") for event in found]
    before, after = ["created", "in_progress", "output_item.added", "content_part.added"], ["output_text.done"]
    after += ["content_part.done", "output_item.done", "completed"]
    count = len(kinds) - len(before) - len(after)
    assert count > 3 and kinds == [*before, *["output_text.delta"] * count, *after]
    deltas = [event["delta"] for event in found if "delta" in event]
    assert "".join(deltas) == text_of(engine) and all(deltas)
    first, last = found[0]["response"], found[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert found[-4]["text"] == found[-3]["part"]["text"] == last["output"][0]["content"][0]["text"] == text_of(engine)
    assert found[-2]["item"] == last["output"][0] and first["id"] == last["id"]
    assert {event.get("item_id", last["output"][0]["id"]) for event in found} == {last["output"][0]["id"]}


@pytest.mark.parametrize("stream", [False, True])
def test_truncated_response_is_incomplete(
    client: TestClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    whole = engine.record
    monkeypatch.setattr(engine, "record", lambda rows: {**whole(rows), "truncated": "max_tokens"})
    reply = client.post(RESPONSES, json={"input": TEXT, "stream": stream})
    last = events(reply)[-1] if stream else {"type": "response.incomplete", "response": reply.json()}
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    chat = client.post(CHAT, json={"messages": TURNS}).json()
    assert chat["choices"][0]["finish_reason"] == "length"


def test_failed_stream_ends_with_an_error(client: TestClient, engine: ScriptedEngine) -> None:
    engine.error = MemoryError()
    last = events(client.post(RESPONSES, json={"input": TEXT, "stream": True}))[-1]
    assert (last["type"], last["code"], last["error"]["code"]) == ("error", "out_of_memory", "out_of_memory")
    block = client.post(CHAT, json={"messages": TURNS, "stream": True}).text.split("\n\n")[-2]
    assert json.loads(block.removeprefix("data: "))["error"]["code"] == "out_of_memory"


@pytest.mark.parametrize("path, given", [(CHAT, {"messages": TURNS}), (RESPONSES, {"input": TEXT})])
def test_engine_receives_settings_of_the_request(
    client: TestClient, engine: ScriptedEngine, path: str, given: dict[str, Any]
) -> None:
    names = ("max_tokens", "max_completion_tokens") if path == CHAT else ("max_output_tokens",)
    for name in names:
        body = {**given, name: 7, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 11, "method": "sequential"}
        assert client.post(path, json=body).status_code == 200
        request = engine.requests[-1]
        assert request.max_tokens == 7 and request.method == "sequential"
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 4)
        assert sampling.seed == seed_of(request.source, 11)
    stopped = client.post(path, json=given | {"stop": " ; "}).json()
    text = stopped["choices"][0]["message"]["content"] if path == CHAT else stopped["output"][0]["content"][0]["text"]
    assert text == text_of(engine).partition(" ; ")[0]


HARMLESS: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "top_logprobs": 0,
    "safety_identifier": "x",
    "seed": 1,
}


def test_fields_without_effect_are_accepted(client: TestClient, engine: ScriptedEngine) -> None:
    own = {"logprobs": False, "response_format": {"type": "text"}, "reasoning_effort": "low", "logit_bias": {}, "n": 1}
    for path, body in (
        (CHAT, {"messages": TURNS, **own}),
        (RESPONSES, {"input": TEXT, "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}}),
    ):
        assert client.post(path, json={**HARMLESS, **body}).status_code == 200
    one, other = engine.requests
    assert one == other


@pytest.mark.parametrize(
    "path, body, field, said",
    [
        (CHAT, {}, "messages", "messages: found nothing; expected a list of messages"),
        (CHAT, {"messages": []}, "messages", "messages: found []; expected"),
        (CHAT, {"messages": "a"}, "messages", "messages: found 'a'; expected"),
        (CHAT, {"messages": ["a"]}, "messages", "messages 0: found text; expected an object with role"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages", "messages 0: found None; expected a role: one of user,"),
        (CHAT, {"messages": [{"role": ["user"]}]}, "messages", "messages 0: found ['user']; expected a role"),
        (CHAT, {"messages": TURNS[:1]}, "messages", "messages: found no message of a user; expected at least one"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "messages 0: found the content null; expected a text"),
        (CHAT, {"messages": [{"role": "user", "content": " "}]}, "messages", 'messages: "source": found an empty text'),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            "messages",
            "messages 0: found 'image_url'; expected parts with a text",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "a " * 40}]}, "messages", "messages: found 41 tokens; exp"),
        (CHAT, {"messages": TURNS, "max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "max_tokens: found 5; "),
        (CHAT, {"messages": TURNS, "max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens: fou"),
        (CHAT, {"messages": TURNS, "logprobs": True}, "logprobs", "logprobs: found True; expected false or nothing"),
        (CHAT, {"messages": TURNS, "tools": [{"type": "function"}]}, "tools", "tools: found [{'type': 'function'}]; "),
        (CHAT, {"messages": TURNS, "audio": {}}, "audio", "audio: found {}; expected nothing"),
        (CHAT, {"messages": TURNS, "response_format": {"type": "json_object"}}, "response_format", "response_format: "),
        (CHAT, {"messages": TURNS, "n": 2}, "n", "n: found 2; expected 1 at temperature 0"),
        (CHAT, {"messages": TURNS, "prompt": "a"}, "prompt", "prompt: found an unknown field; expected one of mess"),
        (RESPONSES, {}, "input", "input: found nothing; expected a list of messages"),
        (RESPONSES, {"input": CALL}, "input", "input: found no message of a user"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input 0: found 'i"),
        (RESPONSES, {"input": TEXT, "tools": [{"type": "web_search"}]}, "tools", "tools: found"),
        (RESPONSES, {"input": TEXT, "previous_response_id": "a"}, "previous_response_id", "previous_response_id: fo"),
        (RESPONSES, {"input": TEXT, "n": 2}, "n", "n: found 2; expected 1 or nothing"),
        (RESPONSES, {"input": TEXT, "max_tokens": 2}, "max_tokens", "max_tokens: found an unknown field; expected one"),
        (RESPONSES, {"input": TEXT, "rows": True}, "rows", "rows: found an unknown field"),
    ],
)
def test_invalid_requests_are_refused(
    client: TestClient, engine: ScriptedEngine, path: str, body: Any, field: str, said: str
) -> None:
    found = error(client.post(path, json=body), 400)
    assert found["message"].startswith(said), found["message"]
    assert found["param"] == field and found["type"] == "invalid_request_error" and not engine.requests


def test_unread_turns_are_logged_once(engine: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(service(engine))
    with caplog.at_level(logging.WARNING, "pipejax.apps.serving"):
        client.post(CHAT, json={"messages": TURNS[3:4]})
        client.post(RESPONSES, json={"input": TEXT})
        assert not caplog.records
        client.post(RESPONSES, json={"input": TEXT, "instructions": "be brief"})
        assert caplog.records
        client.post(CHAT, json={"messages": TURNS})
    (record,) = caplog.records
    assert "no system message and no earlier turn" in record.message and TEXT not in record.message


TWO = {"task": "csv", "rows": "delimiter", "source_template": "near {title} sang {text}"}


@pytest.mark.parametrize(
    "data, filled",
    [
        (TWO, "{}"),  # one text cannot fill two fields: it is the whole source
        (TWO | {"source_template": "near {text} sang {text}"}, "near {0} sang {0}"),
        ({"task": "jsonl", "source_template": "sang {source}"}, "sang {}"),
        ({"task": "none"}, "{}"),
        *(
            ({"task": name}, task.template.replace("{" + "".join(fields) + "}", "{}") if len(fields) == 1 else "{}")
            for name in PUBLISHED
            for task in [make_task(DataConfig(task=name))]
            for fields in [{part.partition("}")[0] for part in task.template.split("{")[1:]}]
        ),
    ],
)
def test_the_message_fills_a_template_of_one_field(tokenizer: Any, data: dict[str, Any], filled: str) -> None:
    engine = with_data(tokenizer, **data)
    body = {"messages": [{"role": "user", "content": "bread {text}"}], "truncate": True}
    assert connect(service(engine)).post(CHAT, json=body).status_code == 200
    expected = [*tokenizer.encode(filled.format("bread {text}")), tiny.MODEL.eos_token_id]
    assert list(engine.requests[0].source.content)[:-1] == expected[: len(engine.requests[0].source.content) - 1]


# Odd requests.

GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 9, "n": 1, "logprobs": 1, "stop": ["x"], "rows": False},
    CHAT: {"messages": TURNS, "max_completion_tokens": 9, "n": 1, "stop": "x", "user": "me", "tools": []},
    RESPONSES: {"input": ITEMS, "instructions": "a", "max_output_tokens": 9, "text": {"format": {"type": "text"}}},
}
SHARED = {"model": "tiny", "temperature": 0, "top_p": 1, "top_k": 0, "seed": 1, "stream": False, "truncate": False}


def deep(depth: int, rng: np.random.Generator) -> Any:
    value: Any = "a"
    for _ in range(depth):
        value = [value] if rng.integers(2) else {"content": value}
    return value


def odd(rng: np.random.Generator) -> Any:
    numbers = [0, -1, 2, 2**31, 2**63, -(2**64), 10**300, 1.5, -0.0, 1e308, 5e-324, True, False, None]
    texts = ["", " ", "a", "\ud800", "a\udfffb", "\x00", "\ufeff", "é漢🙂", "9" * 50, "user", "null", "a b " * 300]
    others = [
        [],
        {},
        [None],
        [[]],
        [1, "a"],
        [True],
        [1.5],
        [70],
        [-1],
        {"": {}},
        {"role": "user"},
        {"source": "\ud800"},
    ]
    kinds = (numbers, texts, others, [deep(int(rng.integers(1, 300)), rng)])
    kind = kinds[rng.integers(len(kinds))]
    return kind[rng.integers(len(kind))]


def replace(value: Any, rng: np.random.Generator) -> Any:
    """The value with an odd part."""
    if isinstance(value, dict) and value and rng.integers(5):
        key = [*value][rng.integers(len(value))]
        rest = {other: part for other, part in value.items() if other != key}
        return rest if not rng.integers(5) else rest | {key: replace(value[key], rng)}
    if isinstance(value, list) and value and rng.integers(3):
        i = int(rng.integers(len(value)))
        return [*value[:i], replace(value[i], rng), *value[i + 1 :]]
    return odd(rng)


def spoil(body: bytes, rng: np.random.Generator) -> bytes:
    """The bytes, often truncated, changed, in another encoding, or in too many lists."""
    match rng.integers(12):
        case 0:
            return body[: rng.integers(len(body))]
        case 1:
            i = int(rng.integers(len(body)))
            return body[:i] + rng.bytes(1) + body[i + 1 :]
        case 2:
            return body.decode().encode(["utf-16", "utf-32", "utf-16-le", "cp500"][rng.integers(4)])
        case 3:
            return b"[" * 3000 + body
        case 4:
            return body.replace(b"a", b"\xff\xc0\x80", 1)
        case 5:
            return body.replace(b":", b": 1e999, " if rng.integers(2) else b":-Infinity,", 1)
    return body


@pytest.mark.slow
def test_a_thousand_odd_requests_get_an_error_object_or_an_answer(client: TestClient, engine: ScriptedEngine) -> None:
    rng, statuses = np.random.default_rng(0), dict[int, int]()
    for number in range(1000):
        path = [*GOOD][number % len(GOOD)]
        body = replace(SHARED | GOOD[path], rng) if rng.integers(12) else SHARED | GOOD[path]
        if rng.integers(3) == 0 and isinstance(body, dict):
            body = replace(body, rng)
        sent = spoil(json.dumps(body).encode(), rng)
        engine.requests.clear()
        reply = client.post(path, content=sent, headers={"Content-Type": "application/json"})
        statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
        if reply.status_code != 200:
            assert reply.status_code in (400, 404, 413), (path, sent, reply.text)
            error(reply, reply.status_code)
        elif reply.headers["Content-Type"] != "application/json":
            assert '"error":{' not in reply.text and reply.text.startswith(("data: {", "event: response.created"))
        elif json.loads(sent).get("stop", "x") in ("x", ["x"]):
            answer = reply.json()
            first = answer["output"][0]["content"][0] if path == RESPONSES else answer["choices"][0]
            text = first["message"]["content"] if path == CHAT else first["text"]
            expected = engine.record(engine.own_tokens(engine.requests[0]))["text"]
            assert expected is not None and text == expected.partition("x")[0], sent
    assert statuses[200] > 100 and statuses[400] > 500, statuses
