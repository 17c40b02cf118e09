"""The server's application above a scripted engine, and what its replies hold."""

import json
import re
import time
from collections.abc import Callable
from typing import Any

from starlette.testclient import TestClient

from pipejax.apps.serving import app
from support.scripted_engine import ScriptedEngine


def service(
    engine: ScriptedEngine, *keys: str, body: int = 4000, seconds: float = 20.0, access_log: bool = False
) -> app.Service:
    limits = app.Limits(body=body, seconds=seconds, answers=4)
    more = {"name": "tiny", "limits": limits, "keys": keys, "access_log": access_log}
    return app.Service(engine.generator, engine, **more)  # type: ignore[arg-type]


def connect(asked_for: app.Service) -> TestClient:
    return TestClient(app.make_app(asked_for), raise_server_exceptions=False)


def chunks(reply: Any) -> list[dict[str, Any]]:
    """What the events of a stream say; the last says that it is the last."""
    events = [event for event in reply.text.split("\n\n") if event]
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def error(reply: Any, status: int) -> dict[str, Any]:
    """The error object of a reply with that status, which says nothing of the machine."""
    assert reply.status_code == status, reply.text
    found = reply.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert not re.search(r"Traceback|/\w+/\w+/|\.py", found["message"]) and "\n" not in found["message"]
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.005)
