"""UserError has its parts as attributes, in logs and the server's errors too; tests/messages.txt has all messages."""

import copy
import json
import pickle

import pytest

from pipejax import UserError
from pipejax.apps.serving.refusals import Refused, unsuitable
from pipejax.config import Config, override
from pipejax.system import cli
from tools import messages


def test_snapshot_has_the_messages_of_the_source():
    assert messages.TARGET.read_text(encoding="utf-8") == messages.collected(), "python -m tools.messages rewrites it"


@pytest.mark.parametrize(
    "error, text",
    [
        (UserError("grid.delay", found="-1", expected="at least 0"), "grid.delay: found -1; expected at least 0"),
        (UserError("a.json", "missing"), "a.json: missing"),
        (UserError("a.json", "missing", expected="a file"), "a.json: missing; expected a file"),
        (UserError(found="no GPU", expected="one"), "found no GPU; expected one"),
        (UserError("--x", "no such option", hint="did you mean --y?"), "--x: no such option (did you mean --y?)"),
        (UserError("--x", found="1", expected="2", hint=""), "--x: found 1; expected 2"),
        (UserError("id", found="", expected="a name"), "id: found ; expected a name"),
        (UserError("a: b: c"), "a: b: c"),
        (UserError("no place"), "no place"),
    ],
)
def test_text_of_an_error_joins_its_parts(error, text):
    assert str(error) == text


def test_single_text_is_split_at_its_first_colon():
    error = UserError("train.jsonl:3: found 1; expected 2")
    assert error.fields() == {"place": "train.jsonl:3", "problem": "found 1; expected 2"}
    assert UserError("no place").place == ""


def test_error_within_a_file_has_both_places():
    inner = UserError("grid.delay", found="-1", expected="at least 0", hint="try 1")
    outer = inner.within("config.json")
    assert str(outer) == "config.json: grid.delay: found -1; expected at least 0 (try 1)"
    assert outer.fields() == inner.fields() | {"place": "config.json: grid.delay"}
    assert UserError(found="none").within("config.json").place == "config.json"


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_copies_keep_the_parts(copied):
    error = UserError("grid.delay", found="-1", expected="at least 0", hint="try 1")
    assert str(copied(error)) == str(error) and copied(error).fields() == error.fields()


def test_refused_setting_has_its_parts():
    with pytest.raises(UserError) as refused:
        override(Config(), ["grid.delay=-1"])
    assert refused.value.fields() == {"place": "--set: grid.delay", "found": "-1", "expected": "at least 0"}
    with pytest.raises(UserError) as refused:
        override(Config(), ["grid.dealy=1"])
    assert refused.value.fields() == {
        "place": "grid.dealy",
        "problem": "unknown key",
        "hint": "did you mean grid.delay?",
    }


def test_refused_flag_is_the_place():
    parser = cli.Parser(prog="x")
    parser.add_number("--limit", "a number")
    with pytest.raises(UserError) as refused:
        parser.parse_args(["--limit", "0"])
    assert refused.value.fields() == {"place": "--limit", "found": "0", "expected": "at least 1"}


def test_json_line_of_an_error_has_its_parts(capfd, monkeypatch):
    monkeypatch.setattr(cli._lines, "as_json", True)
    error = UserError("grid.delay", found="-1", expected="at least 0")
    assert cli.explain(error, debug=False) == cli.EXIT_BAD_INPUT
    line = json.loads(capfd.readouterr().err)
    assert line["message"] == f"error: {error}" and line["level"] == "error"
    assert {name: line[name] for name in error.fields()} == error.fields()


def test_server_error_has_the_parts_and_openais_fields():
    body = unsuitable("top_p", 3, "a number above 0, at most 1").body()["error"]
    assert body == {
        "message": "top_p: found 3; expected a number above 0, at most 1",
        "type": "invalid_request_error",
        "param": "top_p",
        "code": None,
        "place": "top_p",
        "found": "3",
        "expected": "a number above 0, at most 1",
    }
    assert Refused(503, "busy").body()["error"].keys() == {"message", "type", "param", "code"}


def test_long_parts_are_shortened_for_clients():
    body = Refused(400, UserError("prompt", found="x" * 5000, expected="less")).body()["error"]
    assert max(len(text) for text in body.values() if text) < 1100 and body["expected"] == "less"
