"""The server's application with a scripted engine, and functions that read its replies."""

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from starlette.testclient import TestClient

from pipejax.apps.serving import app, serve_command
from pipejax.apps.serving.compiler import LAST
from pipejax.apps.serving.engine import Engine
from pipejax.system.errors import FIELDS
from support.scripted_engine import ScriptedEngine


def service(engine: ScriptedEngine, *keys: str, body: int = 4000, seconds: float = 20.0, **more: Any) -> app.Service:
    limits = app.Limits(body=body, seconds=seconds, answers=4)
    return app.Service(engine.generator, engine, name="tiny", limits=limits, keys=keys, **more)  # type: ignore[arg-type]


def connect(asked_for: app.Service) -> TestClient:
    return TestClient(app.make_app(asked_for), raise_server_exceptions=False)


def chunks(reply: Any) -> list[dict[str, Any]]:
    """The data of a stream's events; the last event must mark the end."""
    events = [event for event in reply.text.split("\n\n") if event]
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def error(reply: Any, status: int) -> dict[str, Any]:
    """The error object of a reply with a status; asserts that it contains no details of the machine."""
    assert reply.status_code == status, reply.text
    found = reply.json()["error"]
    assert set(found) - {*FIELDS} == {"message", "type", "param", "code"}
    assert not re.search(r"Traceback|/\w+/\w+/|\.py", found["message"]) and "\n" not in found["message"]
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "the condition did not become true"
        time.sleep(0.005)


def wait_until_compiled(engine: Engine) -> None:
    """Waits until all programs of a warm-up are compiled, including the ones that are not counted as planned."""
    done = threading.Event()
    wait_until(lambda: engine.compiler.prepared == engine.compiler.planned, 300)
    engine.compiler.ask({"the last": done.set}, LAST)
    assert done.wait(300)


@contextlib.contextmanager
def running(own: app.Service, **settings: Any) -> Iterator[int]:
    """A context with a server on real sockets; yields its port."""
    listener = serve_command.listen("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    listener.listen()  # a client that connects before the server has started waits
    thread = threading.Thread(target=serve_command.run, args=(own, listener), kwargs=settings)
    thread.start()
    try:
        yield port
    finally:
        own.draining = True
        thread.join(20)
        assert not thread.is_alive()


class Reply(NamedTuple):
    """A response and the way in which its connection ended."""

    status: int
    headers: dict[str, str]  # by lower-case name
    body: bytes
    rest: bytes  # bytes after the first response


def read_reply(connection: socket.socket) -> Reply:
    """Reads to the end of the connection; a reset raises ConnectionResetError."""
    found = b""
    while part := connection.recv(2**16):
        found += part
    return parse_reply(found)


def ask(port: int, *sent: bytes) -> Reply:
    """Sends bytes over a new connection, and reads to its end."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for part in sent:
            connection.sendall(part)
        return read_reply(connection)


def parse_reply(found: bytes) -> Reply:
    head, _, rest = found.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    size = int(headers.get("content-length", len(rest)))
    return Reply(int(first.split()[1]), headers, rest[:size], rest[size:])
