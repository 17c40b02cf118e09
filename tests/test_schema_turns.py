"""Work outside the event loop: clients take turns, and new schemas do not block requests with compiled ones."""

import functools
import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import pytest

from pipejax.apps.schemas.expressions import Expressions, TooLarge
from pipejax.apps.serving.answer import Full
from pipejax.apps.serving.turns import Share, Turns
from pipejax.inference.answer_format import Effort, Uncompiled
from pipejax.inference.generator import Generator
from pipejax.system.errors import UserError
from support import schemas
from support.scripted_engine import ScriptedEngine
from support.served import connect, error, service, wait_until

PATH = "/v1/completions"
# Each is refused after all steps of work, or after all entries of a table.
BAD: list[Any] = ["a.{15}b", "^(.{0,99}x){0,99}$"]
BAD += [pytest.param(one, marks=pytest.mark.slow) for one in ("^((a{0,999}){0,1000}){0,1000}$", "(a|b|ab)*c.{12}d")]


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.fixture(scope="module")
def made() -> Generator:
    return schemas.generator()


def hold(begun: threading.Event, go_on: threading.Event) -> None:
    begun.set()
    assert go_on.wait(20)


# Turns.


def test_clients_take_turns() -> None:
    work, done, go_on = Turns("test", 99), list[str](), threading.Event()
    begun = threading.Event()
    first = work.submit("a", functools.partial(hold, begun, go_on))
    assert begun.wait(20)
    given = [f"a{i}" for i in range(5)] + ["b0", "c0", "b1"]
    futures = [work.submit(name[0], functools.partial(done.append, name)) for name in given]
    go_on.set()
    for future in (first, *futures):
        future.result(20)
    assert done == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]


def test_waiting_work_of_a_client_is_bounded() -> None:
    work, go_on = Turns("test", 2), threading.Event()
    begun = threading.Event()
    work.submit("a", functools.partial(hold, begun, go_on))
    assert begun.wait(20)
    waiting = [work.submit("a", lambda: 1) for _ in range(2)]
    with pytest.raises(Full):
        work.submit("a", lambda: 1)
    other = work.submit("b", lambda: 2)
    go_on.set()
    assert [future.result(20) for future in waiting] == [1, 1] and other.result(20) == 2
    assert work.submit("a", lambda: 3).result(20) == 3


def test_cancelled_work_is_not_begun() -> None:
    work, go_on, done = Turns("test", 9), threading.Event(), list[int]()
    begun = threading.Event()
    work.submit("a", functools.partial(hold, begun, go_on))
    assert begun.wait(20)
    gone, stays = work.submit("a", lambda: done.append(1)), work.submit("a", lambda: done.append(2))
    assert gone.cancel()
    go_on.set()
    stays.result(20)
    with pytest.raises(CancelledError):
        gone.result(0)
    assert done == [2]


@pytest.mark.parametrize("raised", [ValueError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_failed_work_does_not_end_thread(raised: BaseException) -> None:
    work = Turns("test", 9)

    def fail() -> None:
        raise raised

    with pytest.raises(type(raised)):
        work.submit("a", fail).result(20)
    assert work.submit("a", lambda: 1).result(20) == 1


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_pauses_keep_the_share_of_the_time(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    now, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.sleep", sleep)
    pause = Share(share)
    for _ in range(10_000):
        now[0] += 0.0001
        pause()
    assert 1 / now[0] == pytest.approx(share, rel=0.05) and len(slept) > 100


# Effort.


@pytest.mark.parametrize("name", schemas.PROPERTIES)
def test_usual_schemas_need_little_effort(made: Generator, name: str) -> None:
    pauses = list[int]()
    asked = of(**{f"{name}x": schemas.PROPERTIES[name]})
    with pytest.raises(Uncompiled):
        made.under(asked, effort=None)
    try:
        quick = made.under(asked, effort=Effort.QUICK, pause=lambda: pauses.append(1)).answer_format
    except UserError:  # for a row that is too short: that takes little effort, too
        with pytest.raises(UserError):
            made.under(asked, effort=None)
        return
    assert quick is made.under(asked, effort=None).answer_format is made.under(asked).answer_format and pauses


@pytest.mark.parametrize("pattern", BAD)
def test_bad_schemas_take_bounded_work(made: Generator, pattern: str) -> None:
    asked = of(a={"type": "string", "pattern": pattern})
    for _ in range(2):  # it is no refusal, so it is not cached
        with pytest.raises(Uncompiled):
            made.under(asked, effort=Effort.QUICK)
    cpu, pauses = time.thread_time(), list[int]()
    with pytest.raises(UserError, match=r"found a schema of more than (32768 states|262144 steps of work);"):
        made.under(asked, pause=lambda: pauses.append(1))
    assert time.thread_time() - cpu < 5 and len(pauses) > 100
    with pytest.raises(UserError):
        made.under(asked, effort=None)


def test_steps_of_work_are_bounded_by_the_effort() -> None:
    for most in (100, 10_000):
        made = Expressions(most)
        with pytest.raises(TooLarge, match=f"more than {most} steps"):
            for i in range(most):
                made.text(f"{i}")


def test_warnings_of_a_schema_are_logged_once(said: list[str]) -> None:
    own = schemas.generator()
    asked = of(a={"type": "string", "enum": ["日本", "a"]}, b={"type": "string", "pattern": "a.{6}b"})
    with pytest.raises(Uncompiled):
        own.under(asked, effort=Effort.QUICK)
    own.under(asked)
    assert len([line for line in said if "which this tokenizer cannot encode" in line]) == 1


# The server.


@pytest.fixture
def engine(made: Generator) -> ScriptedEngine:
    return ScriptedEngine(made)


def asking(**properties: Any) -> dict[str, Any]:
    return {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": of(**properties)}}}


def test_new_schemas_do_not_wait_for_bad_ones(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad schemas take long, in a separate thread."""
    go_on, under, begun = threading.Event(), Generator.under, list[int]()

    def slow(generator: Generator, schema: Any, strategy: Any, **more: Any) -> Any:
        if more["effort"] == Effort.WHOLE:
            begun.append(1)
            assert go_on.wait(20)
            raise UserError("schema: found too much; expected less")
        return under(generator, schema, strategy, **more)

    monkeypatch.setattr(Generator, "under", slow)
    own, replies = service(engine, body=10**5), list[Any]()
    client = connect(own)
    bad = [asking(a={"type": "string", "pattern": f"q{i}a.{{15}}b"}) for i in range(4)]
    threads = [threading.Thread(target=lambda body=body: replies.append(client.post(PATH, json=body))) for body in bad]
    for thread in threads:
        thread.start()
    wait_until(lambda: bool(begun))
    assert client.post(PATH, json=asking(b={"type": "string", "maxLength": 5})).status_code != 504
    assert client.post(PATH, json={"prompt": "a"}).status_code == 200 and not replies
    go_on.set()
    for thread in threads:
        thread.join()
    assert [error(reply, 400)["param"] for reply in replies] == ["response_format"] * 4


def test_too_many_bad_schemas_of_a_client_are_refused(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow(generator: Generator, schema: Any, strategy: Any, **more: Any) -> Any:
        if more["effort"] != Effort.WHOLE:
            raise Uncompiled
        assert go_on.wait(20)
        raise UserError("schema: found too much; expected less")

    monkeypatch.setattr(Generator, "under", slow)
    own, replies = service(engine, "one", "two"), list[Any]()
    client = connect(own)

    def post(key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        replies.append(client.post(PATH, json=asking(a={"type": "string"}), headers=headers))

    threads = [threading.Thread(target=post, args=("one",)) for _ in range(9)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(replies) == 4)
    assert {error(reply, 429)["code"] for reply in replies} == {"queue_full"}
    threads.append(threading.Thread(target=post, args=("two",)))  # requests of another client are accepted
    threads[-1].start()
    time.sleep(0.1)
    assert len(replies) == 4
    go_on.set()
    for thread in threads:
        thread.join()
    assert sorted(reply.status_code for reply in replies) == [400] * 6 + [429] * 4


def test_client_is_identified_by_key_or_address(engine: ScriptedEngine) -> None:
    def scope(key: bytes, address: str) -> dict[str, Any]:
        return {"headers": [(b"authorization", key)], "client": (address, 5)}

    open_to_all, keyed = service(engine), service(engine, "one")
    assert open_to_all._client_of(scope(b"x", "1.1.1.1")) == open_to_all._client_of(scope(b"y", "1.1.1.1"))
    assert open_to_all._client_of(scope(b"x", "1.1.1.1")) != open_to_all._client_of(scope(b"x", "1.1.1.2"))
    assert keyed._client_of(scope(b"x", "1.1.1.1")) == keyed._client_of(scope(b"x", "1.1.1.2"))
    assert keyed._client_of({"headers": [], "client": None}) == b""
