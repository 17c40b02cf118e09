"""The hosts that requests may name if no key is required."""

import socket
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from pipejax.apps.serving import app, serve_command
from pipejax.inference.generator import Generator
from pipejax.system.errors import UserError
from support import oracle, tiny
from support.scripted_engine import ScriptedEngine
from support.served import ask, connect, running, service

PATH, BODY = "/v1/completions", b'{"prompt": "deliver tiny lamps"}'


@pytest.fixture(scope="module")
def generator(tokenizer: Any) -> Generator:
    params = oracle.random_params(tiny.MODEL, np.random.default_rng(7))
    return Generator(tiny.change(tiny.RUN, data={"max_source": 24}, grid={"delay": 1}), params, tokenizer)


@pytest.fixture
def engine(generator: Generator) -> ScriptedEngine:
    return ScriptedEngine(generator)


OWN = ["localhost", "LOCALHOST:8000", "localhost.", "app.localhost", "127.0.0.1:99", "127.3.2.1", "[::1]:8000", "[::1]"]
OWN += ["[::ffff:127.0.0.1]:80", "[0:0:0:0:0:0:0:1]"]
OTHER = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "notlocalhost",
    "10.0.0.1",
]
OTHER += [
    "0.0.0.0",
    "[fe80::1]",
    "localhost@evil.example",
    "user@localhost",
    "localhost/evil",
    "",
    "localhost:x",
    "[::1",
]
OTHER += ["evil.example, localhost", "localhost\\@evil.example", "127.0.0.1#@evil.example", "2130706433"]


@pytest.mark.parametrize("host", [*OWN, *OTHER])
def test_host_of_a_request(engine: ScriptedEngine, host: str) -> None:
    client = connect_with(engine, [])
    for method, path in (("GET", "/health"), ("GET", "/"), ("POST", PATH), ("OPTIONS", PATH), ("GET", "/nowhere")):
        reply = client.request(method, path, headers={"Host": host}, content=BODY if method == "POST" else None)
        assert (reply.status_code == 421) == (host in OTHER), (method, path, reply.text)
        if host in OTHER:
            assert reply.json()["error"]["code"] == "unknown_host" and "x-request-id" in reply.headers
            assert "--allow-host" in reply.json()["error"]["message"]


def connect_with(engine: ScriptedEngine, hosts: list[str] | None, **more: Any) -> TestClient:
    return connect(service(engine, hosts=hosts, **more))


@pytest.mark.parametrize(
    "names, host, status",
    [
        (["gpu1.example"], "GPU1.example.:443", 200),
        (["GPU1.Example."], "gpu1.example", 200),
        (["gpu1.example"], "evil.gpu1.example", 421),
        (["10.0.0.1"], "10.0.0.1:8000", 200),
        (["::2"], "[::2]:8000", 200),
        (["*"], "anything.example", 200),
        ([], "gpu1.example", 421),
        (None, "gpu1.example", 200),
    ],
)
def test_configured_hosts_are_allowed(engine: ScriptedEngine, names: list[str] | None, host: str, status: int) -> None:
    assert connect_with(engine, names).get("/health", headers={"Host": host}).status_code == status


def test_allowed_origin_does_not_allow_host(engine: ScriptedEngine) -> None:
    site = "https://app.example"
    client = connect_with(engine, [], origins=[site])
    for host, status in (("127.0.0.1:8000", 200), ("app.example", 421)):
        reply = client.get("/health", headers={"Host": host, "Origin": site})
        assert reply.status_code == status
    other = client.get("/health", headers={"Host": "evil.example", "Origin": "http://evil.example"})
    assert other.status_code == 421 and "access-control-allow-origin" not in other.headers
    forwarded = {"Host": "evil.example", "X-Forwarded-Host": "localhost", "Forwarded": "host=localhost"}
    assert client.get("/health", headers=forwarded).status_code == 421


def test_request_without_a_host_is_accepted(engine: ScriptedEngine) -> None:
    with running(service(engine, hosts=[])) as port:
        assert ask(port, b"GET /health HTTP/1.0\r\n\r\n").status == 200  # browsers do not send such requests
        assert ask(port, b"GET /health HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n").status == 421
        two = b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
        assert ask(port, two).status == 400


@pytest.mark.parametrize(
    "flags, key, hosts",
    [
        ("", "", ["127.0.0.1"]),
        ("--host localhost", "", ["localhost"]),
        ("--host 127.0.0.5", "", ["127.0.0.5"]),
        ("--allow-host gpu1 --allow-host [::2]", "", ["gpu1", "::2", "127.0.0.1"]),
        ("", "secret", None),
        ("--host 0.0.0.0", "", None),
        ("--host 0.0.0.0 --allow-host gpu1", "secret", ["gpu1", "0.0.0.0"]),
    ],
)
def test_host_header_is_checked_on_loopback_without_key(
    generator: Generator, monkeypatch: pytest.MonkeyPatch, flags: str, key: str, hosts: list[str] | None
) -> None:
    found = list[list[str] | None]()

    def run(own: app.Service, listener: socket.socket, **more: Any) -> None:
        found.append(own.hosts)  # type: ignore[arg-type]
        listener.close()

    monkeypatch.setenv(serve_command.KEY, key) if key else monkeypatch.delenv(serve_command.KEY, raising=False)
    monkeypatch.setattr(serve_command, "run", run)
    monkeypatch.setattr("pipejax.inference.loading.load", lambda *given, **more: generator)
    assert serve_command.main(["--checkpoint", "x", "--port", "0", "--warm-up", "0", *flags.split()]) == 0
    assert found == [hosts]


@pytest.mark.parametrize("name", ["https://a", "a:8000", "a/b", "a b", "", "[::1", "u@a"])
def test_invalid_names_of_hosts_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"--allow-host: found .*; expected a name or an address without a port"):
        serve_command.main(["--checkpoint", "x", f"--allow-host={name}"])
