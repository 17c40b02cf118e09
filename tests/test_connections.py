"""Connections of the server over real sockets: how many, how much work each causes, and how each is closed."""

import asyncio
import contextlib
import errno
import http.client
import json
import logging
import re
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pipejax.apps.serving import connections, serve_command
from pipejax.inference.generator import Generator
from pipejax.system import cli
from pipejax.system.errors import UserError
from support import oracle, tiny
from support.logged import logged
from support.scripted_engine import ScriptedEngine
from support.served import Reply, ask, parse_reply, read_reply, running, service, wait_until

PATH = "/v1/completions"
BODY = json.dumps({"prompt": "deliver tiny lamps"}).encode()
MIB = 2**20


@pytest.fixture(scope="module")
def generator(tokenizer: Any) -> Generator:
    params = oracle.random_params(tiny.MODEL, np.random.default_rng(7))
    return Generator(tiny.change(tiny.RUN, data={"max_source": 24}, grid={"delay": 1}), params, tokenizer)


@pytest.fixture
def engine(generator: Generator) -> Iterator[ScriptedEngine]:
    made = ScriptedEngine(generator)
    yield made
    made.go_on.set()


def post(*headers: str, path: str = PATH) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode()


def chunks(body: bytes, size: int) -> bytes:
    """The body in chunks of `size` bytes."""
    parts = (body[i : i + size] for i in range(0, len(body), size))
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def error_of(reply: Reply) -> dict[str, Any]:
    assert re.fullmatch("[0-9a-f]{32}", reply.headers["x-request-id"])
    found: dict[str, Any] = json.loads(reply.body)["error"]
    return found


def get(port: int, path: str = "/health") -> int:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


# An answer before the body has arrived.


@pytest.mark.parametrize(
    "path, keys, headers, status",
    [
        (PATH, (), [f"Content-Length: {20 * MIB}"], 413),
        (PATH, (), ["Transfer-Encoding: chunked"], 413),
        (PATH, ("key",), [f"Content-Length: {20 * MIB}"], 401),
        ("/v1/nowhere", (), [f"Content-Length: {20 * MIB}"], 404),
        ("/health", (), [f"Content-Length: {20 * MIB}"], 405),
        (PATH, (), [f"Content-Length: {20 * MIB}", "Content-Encoding: gzip"], 415),
        (PATH, (), [f"Content-Length: {20 * MIB}", "Expect: 100-continue"], 413),
    ],
)
def test_client_sending_20_mb_receives_refusal(
    engine: ScriptedEngine, path: str, keys: tuple[str, ...], headers: list[str], status: int
) -> None:
    body = b"a" * 20 * MIB
    sent = chunks(body, MIB) if "chunked" in headers[0] else body
    with running(service(engine, *keys)) as port:
        reply = ask(port, post(*headers, path=path), sent)
        assert reply.status == status and error_of(reply) and not reply.rest
        assert get(port) == 200
    assert not engine.requests


def test_refusal_comes_before_the_body(engine: ScriptedEngine) -> None:
    with running(service(engine)) as port, socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(post("Content-Length: 5000"))
        assert parse_reply(connection.recv(2**16)).status == 413


def test_endless_body_is_read_for_limited_time(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "DISCARDED", 4 * MIB)
    with running(service(engine)) as port, socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(post(f"Content-Length: {2**40}"))
        with pytest.raises(ConnectionError):
            for _ in range(200):
                connection.sendall(b"a" * MIB)


def test_silent_client_is_disconnected(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SILENCE", 0.1)
    own = service(engine)
    with running(own) as port, socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(post("Content-Length: 5000") + b"a" * 1000)
        assert read_reply(connection).status == 413
        time.sleep(0.4)
        with pytest.raises(ConnectionError):
            for _ in range(3):
                connection.sendall(b"a")
                time.sleep(0.05)


def test_small_body_of_a_refused_request_keeps_the_connection(engine: ScriptedEngine) -> None:
    with running(service(engine, "key")) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        with contextlib.closing(connection):
            for _ in range(3):
                connection.request("POST", PATH, BODY, {"Content-Type": "application/json"})
                reply = connection.getresponse()
                reply.read()
                assert reply.status == 401 and not reply.will_close
                assert connection.sock is not None


# Bounded work.


def test_chunks_of_one_byte_are_refused_at_once(engine: ScriptedEngine) -> None:
    body = b'{"prompt": "' + b"a" * 10**6 + b'"}'
    with running(service(engine, body=2**20)) as port:
        cpu = time.process_time()
        reply = ask(port, post("Transfer-Encoding: chunked"), chunks(body, 1))
        assert time.process_time() - cpu < 2 and reply.status == 400
        assert error_of(reply)["code"] == "chunks_too_small"


@pytest.mark.parametrize("size", [1, 7, 64, 4000])
def test_usual_bodies_may_come_in_chunks_of_any_size(engine: ScriptedEngine, size: int) -> None:
    """A body of a few kilobytes arrives in chunks of a byte, and a large body in chunks of 64 bytes."""
    content = "deliver " * (300 if size < 64 else 30_000)
    body = json.dumps({"prompt": content, "truncate": True}).encode()
    with running(service(engine, body=2**20)) as port:
        reply = ask(port, post("Transfer-Encoding: chunked", "Connection: close"), chunks(body, size))
        assert reply.status == 200, reply


@pytest.mark.parametrize("framing", ["extensions", "trailers"])
def test_other_framing_is_bounded_as_well(engine: ScriptedEngine, framing: str) -> None:
    if framing == "extensions":
        sent = (b"1;" + b"e" * 1000 + b"\r\na\r\n") * 300
    else:
        sent = b"1\r\na\r\n0\r\n" + b"A: " + b"b" * 300_000 + b"\r\n\r\n"
    with running(service(engine, body=2**20)) as port:
        assert ask(port, post("Transfer-Encoding: chunked"), sent).status == 400


def test_other_requests_are_answered_while_small_chunks_arrive(engine: ScriptedEngine) -> None:
    """This holds for any number of clients, since a connection is read a few kilobytes at a time."""
    body, waits = chunks(b"a" * 10**6, 1), list[float]()
    with running(service(engine, body=2**20)) as port:
        threads = [
            threading.Thread(target=ask, args=(port, post("Transfer-Encoding: chunked"), body)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for _ in range(20):
            begun = time.monotonic()
            assert get(port) == 200
            waits.append(time.monotonic() - begun)
        for thread in threads:
            thread.join()
    assert max(waits) < 1, waits


@pytest.mark.parametrize(
    "headers",
    [["Content-Length: 5", "Transfer-Encoding: chunked"], ["Transfer-Encoding: chunked", "Content-Length: 999"]],
)
def test_request_with_length_and_chunks_closes_connection(engine: ScriptedEngine, headers: list[str]) -> None:
    second = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running(service(engine)) as port:
        reply = ask(port, post(*headers) + chunks(BODY, 9) + second)
        assert reply.status == 200 and reply.headers["connection"] == "close" and not reply.rest
        one = ask(
            port, post("Transfer-Encoding: chunked") + chunks(BODY, 9) + second[:-2] + b"Connection: close\r\n\r\n"
        )
        assert one.status == 200 and one.rest.startswith(b"HTTP/1.1 200")


def test_request_with_length_and_chunks_closes_stream_connection(engine: ScriptedEngine) -> None:
    body = json.dumps({"prompt": "deliver", "stream": True}).encode()
    with running(service(engine)) as port:
        reply = ask(port, post("Content-Length: 5", "Transfer-Encoding: chunked") + chunks(body, 99))
    assert reply.headers["connection"] == "close" and b"[DONE]" in reply.body


# The ceiling.


def test_idle_connections_are_closed_for_new_ones(engine: ScriptedEngine, said: list[str]) -> None:
    with running(service(engine), connections=8) as port, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(30)]
        for _ in range(5):
            assert get(port) == 200
        idle[0].settimeout(5)
        with contextlib.suppress(ConnectionError):
            assert idle[0].recv(1) == b""
        idle[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert read_reply(idle[-1]).status == 200  # the newest is still open
    assert len([line for line in said if line.startswith("warning: 8 connections are open")]) == 1


@pytest.mark.parametrize("sent", [b"GET /health HT", post("Content-Length: 50") + b"{"])
def test_half_sent_requests_are_idle(engine: ScriptedEngine, sent: bytes) -> None:
    with running(service(engine), connections=8) as port, contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)).sendall(sent)
        assert get(port) == 200


def test_new_connection_is_refused_if_all_others_wait_for_answers(engine: ScriptedEngine) -> None:
    engine.go_on.clear()
    own = service(engine)
    with running(own, connections=3) as port, contextlib.ExitStack() as stack:
        under_way = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(3)]
        for connection in under_way:
            connection.sendall(post(f"Content-Length: {len(BODY)}", "Connection: close") + BODY)
        wait_until(lambda: engine.under_way == 3)
        refused = ask(port, post(f"Content-Length: {20 * MIB}"), b"a" * 20 * MIB)
        assert refused.status == 503 and error_of(refused)["code"] == "too_many_connections"
        engine.go_on.set()
        assert [read_reply(connection).status for connection in under_way] == [200] * 3
        assert get(port) == 200


def test_server_without_descriptors_logs_one_line_and_continues(
    engine: ScriptedEngine, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The file limit is lower than the connection limit assumes, as other files may be open."""
    log = list[logging.LogRecord]()
    caplog.set_level(logging.ERROR, logger="asyncio")
    handler = logging.Handler()
    handler.emit = log.append  # type: ignore[method-assign,assignment]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    logging.getLogger("asyncio").addHandler(handler)
    with running(service(engine)) as port, contextlib.ExitStack() as stack:
        assert get(port) == 200
        clients = [socket.socket() for _ in range(20)]
        for client in clients:
            stack.callback(client.close)
        used = max(client.fileno() for client in clients)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, before[1]))
        try:
            cpu, begun = time.process_time(), time.monotonic()
            for client in clients:
                client.connect(("127.0.0.1", port))
            time.sleep(1)
            busy = (time.process_time() - cpu) / (time.monotonic() - begun)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert busy < 0.5
        assert get(port) == 200
    logging.getLogger("asyncio").removeHandler(handler)
    assert (
        not log
        and len([line for line in said if "no connection can be accepted now (Too many open files" in line]) == 1
    )


@pytest.mark.parametrize(
    "limit, given, found", [(1024, None, 864), (256, None, 96), (10**6, None, 4096), (1024, 500, 500), (400, 900, 900)]
)
def test_connection_limit_follows_file_limit(
    monkeypatch: pytest.MonkeyPatch, limit: int, given: int | None, found: int
) -> None:
    raised = list[int]()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, 2000))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits[0]))
    assert serve_command.most_connections(given) == found
    assert raised == ([1060] if limit == 400 else [])


def test_connection_limit_above_file_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    with pytest.raises(UserError, match=r"--connections 900: found .* 1024 open files .*; expected at least 1060"):
        serve_command.most_connections(900)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (160, 160))
    with pytest.raises(UserError, match=r"^pipejax serve: found .* 160 open files .*; expected at least 161"):
        serve_command.most_connections(None)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert serve_command.most_connections(None) == 4096 and serve_command.most_connections(10**5) == 10**5


# Bytes that are no request.


def test_json_log_has_only_json_lines(
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, logger="asyncio")  # which a command may have silenced for Orbax
    monkeypatch.setattr(cli._lines, "as_json", True)
    with (
        logged(),
        cli.adopted("pipejax", *serve_command.OTHERS),
        running(service(engine, access_log=True), shown=False) as port,
    ):
        malformed = ask(port, b"nonsense\r\n\r\n")
        engine.error = RuntimeError("by a test")
        failed = ask(port, post(f"Content-Length: {len(BODY)}", "Connection: close") + BODY)
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            loop.call_exception_handler({"message": "of asyncio", "exception": ValueError("x")})
        logging.getLogger("uvicorn.error").error("of uvicorn")
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert malformed.status == 400 and failed.status == 500
    assert any(line.get("request") == malformed.headers["x-request-id"] and line["status"] == 400 for line in lines)
    (mistake,) = [
        line for line in lines if line.get("request") == failed.headers["x-request-id"] and "traceback" in line
    ]
    assert mistake["level"] == "error" and "RuntimeError: by a test" in mistake["traceback"]
    assert {"of asyncio", "of uvicorn"} <= {line["message"] for line in lines}
    assert "Invalid HTTP request received." not in {line["message"] for line in lines}


@pytest.mark.parametrize("level, count", [("warning", 0), ("error", 0), ("info", 2)])
def test_level_of_the_log_holds_for_all_lines(
    engine: ScriptedEngine, capfd: pytest.CaptureFixture[str], level: str, count: int
) -> None:
    logger = logging.getLogger("pipejax")
    before = logger.level
    logger.setLevel(level.upper())
    with cli.adopted("pipejax"), running(service(engine)) as port:
        assert ask(port, b"nonsense\r\n\r\n").status == 400
    logger.setLevel(before)
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["serving", "stopped"][:count]


# The end.


def test_requests_that_have_not_begun_get_503_at_the_end(engine: ScriptedEngine) -> None:
    """32 clients send requests repeatedly, over new and kept connections: no connection is reset."""
    own, found, strange = service(engine), list[int](), list[str]()
    ended = threading.Event()

    def client(keeps: bool) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        while not ended.is_set():
            try:
                connection.request("POST", PATH, BODY, {"Content-Type": "application/json"})
                reply = connection.getresponse()
                reply.read()
                found.append(reply.status)
                if not keeps:
                    connection.close()
            except ConnectionRefusedError:
                return
            except (OSError, http.client.HTTPException) as error:
                strange.append(repr(error))
                connection.close()

    with running(own) as port:
        threads = [threading.Thread(target=client, args=(i % 2 == 0,)) for i in range(32)]
        for thread in threads:
            thread.start()
        wait_until(lambda: 200 in found)
    ended.set()
    for thread in threads:
        thread.join()
    assert not strange and found.count(503) > 10 and set(found) <= {200, 429, 503}


def test_connection_requests_at_the_end_are_ignored_and_then_refused(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client between the last accepted connection and the closed socket: its connection would be reset."""
    ignores, answers = list[bool](), list[list[Any]]()
    stop, close = connections.Listener.stop, connections.Listener.close

    async def stopped(listener: connections.Listener) -> bool:
        ignores.append(await stop(listener))
        return ignores[0]

    def closed(listener: connections.Listener) -> None:
        if ignores == [True]:
            assert client.connect_ex(("127.0.0.1", port)) == errno.EINPROGRESS
            answers.append(select.select([], [client], [], 0.3)[1])
        close(listener)

    monkeypatch.setattr(connections.Listener, "stop", stopped)
    monkeypatch.setattr(connections.Listener, "close", closed)
    with socket.socket() as client:
        client.setblocking(False)
        with running(service(engine)) as port:
            assert get(port) == 200
        if ignores == [False]:
            pytest.skip("this system cannot ignore connection requests")
        assert answers == [[]]  # the client got no answer before the socket was closed
        select.select([], [client], [], 20)
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED


def test_waiting_connections_are_answered_at_the_end(engine: ScriptedEngine) -> None:
    """Connections in the system's backlog, which the server has not accepted yet."""
    own = service(engine)
    with contextlib.ExitStack() as stack:
        with running(own) as port:
            own.draining = True
            waiting = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(40)
            ]
            for connection in waiting:
                connection.sendall(post(f"Content-Length: {len(BODY)}") + BODY)
        assert [read_reply(connection).status for connection in waiting] == [503] * 40


def test_idle_clients_do_not_delay_the_end_for_long(engine: ScriptedEngine) -> None:
    with contextlib.ExitStack() as stack:
        with running(service(engine)) as port:
            for _ in range(5):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            assert get(port) == 200
            begun = time.monotonic()
        assert time.monotonic() - begun < 5
