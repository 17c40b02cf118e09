"""`pipejax serve` as a process, with real sockets, clients and signals; it gives the same answers as `decode`."""

import contextlib
import http.client
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import pipejax
from pipejax import checkpoint
from pipejax.apps import demo
from support import oracle, tiny

ROOT = Path(__file__).parents[1]
KEY = "of-this-test"
TEXTS = [example.source for example in demo.examples("test")[:12]]
# All tokens are nearly equally likely, so that an answer is long until eos is drawn; the seed gives a long answer.
LONG = {"method": "sequential", "prompt": TEXTS[0], "temperature": 100, "seed": 20}
pytestmark = pytest.mark.slow


class Server(NamedTuple):
    process: subprocess.Popen[str]
    port: int
    directory: Path  # of its checkpoint

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def ask(self, path: str, body: Any = None) -> tuple[int, str]:
        """The status and text of the answer to a GET, or with a body to a POST."""
        connection = self.connect()
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", path, content, headers)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()

    def complete(self, **body: Any) -> dict[str, Any]:
        status, text = self.ask("/v1/completions", body)
        assert status == 200, text
        found: dict[str, Any] = json.loads(text)
        return found

    def metric(self, name: str) -> float:
        found = re.search(rf"^pipejax_{name} (\S+)$", self.ask("/metrics")[1], re.MULTILINE)
        assert found
        return float(found[1])

    def wait_until(self, name: str, value: float) -> None:
        ends = time.monotonic() + 60
        while self.metric(name) != value:
            assert time.monotonic() < ends, f"{name} is not {value}"
            time.sleep(0.02)


@contextlib.contextmanager
def serve(directory: Path, *flags: str) -> Iterator[Server]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PIPEJAX_API_KEY": KEY, "PIPEJAX_NATIVE": "off"}
    command = [sys.executable, "-m", "pipejax", "serve", "--checkpoint", str(directory), "--port", "0", *flags]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.match(r"serving .* at http://127\.0\.0\.1:(\d+)$", line):
                yield Server(process, int(found[1]), directory)
                return
        raise AssertionError("it did not start")
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tokenizer_files: Path) -> Path:
    """A run with long sequential answers."""
    directory = tmp_path_factory.mktemp("served") / "tiny"
    params = oracle.random_params(tiny.MODEL, np.random.default_rng(7))
    config = tiny.change(tiny.RUN, decode={"max_length": 2000})
    checkpoint.save_params(directory, config, params, tokenizer_source=tokenizer_files)
    return directory


@pytest.fixture(scope="module")
def server(trained: Path) -> Iterator[Server]:
    with serve(trained, "--places", "4", "--queue", "60", "--max-body", "20000", "--warm-up", "16") as started:
        yield started


@pytest.fixture(scope="module")
def openai() -> Any:
    """Imports OpenAI's client library, which takes a second; the quick tests collect this file, too."""
    return importlib.import_module("openai")


@pytest.fixture(scope="module")
def client(openai: Any, server: Server) -> Iterator[Any]:
    """OpenAI's client."""
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(trained: Path) -> dict[str, list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPEJAX_NATIVE", "off")
        generator = pipejax.load(trained, overrides=["decode.max_length=40"])
    return {name: generator.decode(TEXTS, method=name) for name in ("pipelined", "sequential")}


def test_answers_equal_records_of_decode(server: Server, expected: dict[str, list[Any]]) -> None:
    """Many requests of both methods run at a time, streamed or not."""

    def ask(i: int) -> None:
        method = "sequential" if i % 3 == 0 else "pipelined"
        k = i % len(TEXTS)
        body = {"prompt": TEXTS[k], "method": method, "rows": True}
        if method == "sequential":
            body["max_tokens"] = 40
        if i % 2:
            (choice,) = server.complete(**body)["choices"]
        else:
            events = server.ask("/v1/completions", body | {"stream": True})[1].split("\n\n")
            choice = json.loads(events[-3].removeprefix("data: "))["choices"][0]
        record, wanted = choice["record"], expected[method][k]
        assert (record["row_ids"], record["rows"], record["text"]) == (
            wanted["row_ids"],
            wanted["rows"],
            wanted["text"],
        )

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(48)))


def test_samples_equal_samples_of_decode(server: Server, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEJAX_NATIVE", "off")
    settings = ("decode.temperature=1", "decode.seed=3", "decode.samples=2")
    wanted = pipejax.load(trained, overrides=settings).decode(TEXTS[:2])
    found = server.complete(prompt=TEXTS[:2], temperature=1, seed=3, n=2)
    assert [choice["text"] for choice in found["choices"]] == [record["text"] for record in wanted]
    assert len({record["text"] for record in wanted}) == 4


def test_the_client_of_openai(openai: Any, server: Server, client: Any, expected: dict[str, list[Any]]) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "pipejax"
    found = client.completions.create(model="tiny", prompt=TEXTS[:3], logprobs=1)
    texts = [record["text"] for record in expected["pipelined"]]
    assert [choice.text for choice in found.choices] == texts[:3]
    for choice in found.choices:
        assert "".join(choice.logprobs.tokens) == choice.text
        assert all(value <= 0 for value in choice.logprobs.token_logprobs)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    stream = client.completions.create(
        model="tiny", prompt=TEXTS[0], stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == texts[0]
    assert chunks[0].choices[0].row == 0 and chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert last.choices == [] and last.usage.completion_tokens > 0
    settings = {"model": "tiny", "prompt": TEXTS[0], "temperature": 1.0, "seed": 3, "n": 2}
    one, other = (client.completions.create(**settings, extra_body={"rows": True}) for _ in range(2))
    assert [c.text for c in one.choices] == [c.text for c in other.choices]
    assert one.choices[0].text != one.choices[1].text and one.choices[1].record["sample"] == 1
    with pytest.raises(openai.BadRequestError, match="temperature: found -1") as raised:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert raised.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="model: found 'gpt'"):
        client.completions.create(model="gpt", prompt="a")
    stranger = openai.OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError, match="found another key"):
        stranger.models.list()


def test_chats_and_responses_of_the_client_of_openai(
    openai: Any, server: Server, client: Any, expected: dict[str, list[Any]]
) -> None:
    texts = [record["text"] for record in expected["pipelined"]]
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": TEXTS[1]}]
    chat = client.chat.completions.create(model="tiny", messages=turns)
    assert chat.choices[0].message.content == texts[1]
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    given = {"model": "tiny", "messages": turns, "stream": True, "stream_options": {"include_usage": True}}
    first, *chunks, last = client.chat.completions.create(**given)
    assert first.choices[0].delta.role == "assistant" and last.usage == chat.usage
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == texts[1]
    assert chunks[-1].choices[0].finish_reason == chat.choices[0].finish_reason
    response = client.responses.create(model="tiny", input=TEXTS[1], instructions="be brief")
    assert response.output_text == texts[1]
    assert response.usage.output_tokens == chat.usage.completion_tokens
    with client.responses.stream(model="tiny", input=turns) as events:
        *before, last = events
    pieces = [event.delta for event in before if event.type == "response.output_text.delta"]
    assert last.type == f"response.{response.status}" and last.response.usage == response.usage
    assert "".join(pieces) == last.response.output_text == texts[1]
    cut = client.responses.create(model="tiny", input=TEXTS[1], max_output_tokens=2)
    assert cut.status == "incomplete" and cut.usage.output_tokens == 2
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(model="tiny", messages=image)


CLIENTS = ROOT / "build" / "peers" / "clients" / "bin" / "python"


@pytest.mark.long
@pytest.mark.skipif(not CLIENTS.exists(), reason="make venv-clients builds the environment")
def test_clients_of_langchain_and_litellm(server: Server, expected: dict[str, list[Any]]) -> None:
    script = ROOT / "tests" / "support" / "other_clients.py"
    command = [str(CLIENTS), str(script), f"http://127.0.0.1:{server.port}/v1", KEY, TEXTS[2]]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert len(found) == 12 and found == dict.fromkeys(found, expected["pipelined"][2]["text"])


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_receives_the_same_answers(server: Server, expected: dict[str, list[Any]]) -> None:
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    given = [
        "curl",
        "-s",
        "-N",
        url,
        "-H",
        "Content-Type: application/json",
        "-H",
        f"Authorization: Bearer {KEY}",
        "-d",
    ]

    def curl(body: str) -> str:
        return subprocess.run([*given, body], capture_output=True, text=True, check=True).stdout

    body = json.dumps({"prompt": TEXTS[0]})
    assert json.loads(curl(body))["choices"][0]["text"] == expected["pipelined"][0]["text"]
    assert curl(body[:-1] + ', "stream": true}').endswith("data: [DONE]\n\n")
    given[3] = url.replace("completions", "responses")
    assert curl(json.dumps({"input": TEXTS[0], "stream": True})).startswith("event: response.created\ndata: {")
    given[3] = url
    assert "found no JSON" in json.loads(curl("{"))["error"]["message"]
    large = json.loads(curl(json.dumps({"prompt": "a " * 20000})))  # curl asks before it sends a large body
    assert large["error"]["code"] == "body_too_large"


def test_disconnected_clients_free_their_places(server: Server) -> None:
    """They disconnect at any moment, also while sending; other clients get their answers."""
    rng = np.random.default_rng(0)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    for i in range(30):
        body = json.dumps(LONG | {"stream": bool(i % 2)})
        sent = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(sent if i % 3 else sent[: int(rng.integers(1, len(sent)))])
            time.sleep(float(rng.uniform(0, 0.05)))
    server.wait_until("active_requests", 0)
    server.wait_until("places_in_use", 0)
    assert server.metric("queue_length") == 0
    assert server.complete(prompt=TEXTS[0])["choices"][0]["finish_reason"]


def test_malformed_and_oversized_bodies(server: Server) -> None:
    rng = np.random.default_rng(1)
    good = json.dumps({"prompt": TEXTS[0], "temperature": 0, "stop": ["a", "b"]}).encode()
    for i in range(50):
        body = rng.bytes(100) if i % 3 == 0 else good[: int(rng.integers(0, len(good)))] if i % 3 == 1 else good * 500
        status, text = server.ask("/v1/completions", body)
        assert status == (413 if i % 3 == 2 else 400)
        assert set(json.loads(text)) == {"error"} and "Traceback" not in text
    assert server.ask("/health")[0] == 200


def test_large_body_without_a_length_is_refused(server: Server) -> None:
    connection = server.connect()
    with contextlib.closing(connection):
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        parts = (b'{"prompt": "' + b"a" * 5000 for _ in range(10))
        connection.request("POST", "/v1/completions", parts, headers, encode_chunked=True)
        reply = connection.getresponse()
        assert reply.status == 413 and json.loads(reply.read())["error"]["code"] == "body_too_large"


def test_replaced_checkpoint_does_not_change_answers(server: Server, expected: dict[str, list[Any]]) -> None:
    away = server.directory.with_name("away")
    server.directory.rename(away)
    try:
        server.directory.mkdir()
        (server.directory / "config.json").write_text("{}")
        texts = [choice["text"] for choice in server.complete(prompt=TEXTS)["choices"]]
    finally:
        shutil.rmtree(server.directory)
        away.rename(server.directory)
    assert texts == [record["text"] for record in expected["pipelined"]]


def test_sigterm_drains_the_server(trained: Path) -> None:
    with serve(trained, "--places", "1", "--queue", "9", "--warm-up", "0") as server:
        with ThreadPoolExecutor(9) as pool:  # the first request waits for compilation
            waiting = [pool.submit(server.complete, **LONG) for _ in range(9)]
            server.wait_until("active_requests", 9)
            server.process.send_signal(signal.SIGTERM)
            server.wait_until("draining", 1)
            status, text = server.ask("/v1/completions", {"prompt": "a"})
            assert status == 503 and json.loads(text)["error"]["code"] == "draining"
            assert server.ask("/health")[0] == 503
            replies = [one.result() for one in waiting]
        texts = {reply["choices"][0]["text"] for reply in replies}
        assert len(texts) == 1 and texts != {""}
        assert server.process.wait(60) == 0


@pytest.mark.long
def test_second_sigterm_ends_the_server_at_once(trained: Path) -> None:
    with serve(trained, "--warm-up", "0") as server, contextlib.closing(server.connect()) as connection:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(LONG | {"stream": True}), headers)
        server.wait_until("active_requests", 1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until("draining", 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--port", "{used}"], "error: --host 127.0.0.1 --port {used}: cannot listen there (Address already in use)"),
        (["--host", "192.0.2.1"], "error: --host 192.0.2.1 --port 0: cannot listen there (Cannot assign"),
        (["--api-key-file", "nowhere"], "error: --api-key-file nowhere: cannot be read (No such file"),
        (["--checkpoint", "nowhere"], "error: nowhere: "),
        (["--places", "0"], "error: --places: found 0; expected at least 1"),
    ],
)
def test_invalid_server_arguments_are_refused(tmp_path: Path, flags: list[str], said: str) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = str(used.getsockname()[1])
        command = [sys.executable, "-m", "pipejax", "serve", "--checkpoint", "x", "--port", "0"]
        given = [flag.format(used=port) for flag in flags]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        ended = subprocess.run([*command, *given], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith(said.format(used=port)) and len(ended.stderr.splitlines()) == 1
