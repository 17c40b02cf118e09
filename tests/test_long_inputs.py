"""Very long lines, names and texts that a library cannot take: each is refused in one short line."""

import json
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from starlette.testclient import TestClient
from tokenizers import models, pre_tokenizers

from pipejax import checkpoint
from pipejax.data.formats import read_records
from pipejax.data.own_files import require_fields
from pipejax.data.tokenizer import Tokenizer
from pipejax.data.tokenizer_file import TokenizerFile
from pipejax.inference.generator import Generator
from pipejax.inference.loading import load
from pipejax.system import cli, environment
from pipejax.system.errors import UserError
from pipejax.system.fields import listed
from support import oracle, tiny
from support.scripted_engine import ScriptedEngine
from support.served import connect, error, service

PATH, LONG = "/v1/completions", "n" * 500_000
SLOW = "a" * 30 + "x" * 40 + "!"  # the regular expression of `panicking` fails on it


# Tables.


@pytest.mark.parametrize("name", ["x" * 140_000, '"' + "x" * 140_000 + '"', "é" * 300_000])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_names_of_columns_may_be_long(tmp_path: Path, name: str, delimiter: str) -> None:
    file = tmp_path / "a.csv"
    file.write_text(f"{name}{delimiter}source\n1{delimiter}two\n", encoding="utf-8")
    ((_, record),) = read_records(file)
    assert record == {name.strip('"'): "1", "source": "two"}


def test_many_columns_are_accepted(tmp_path: Path) -> None:
    file, names = tmp_path / "a.csv", [f"c{i}" for i in range(200_000)]
    file.write_text(",".join(names) + "\n" + ",".join(["1"] * 200_000) + "\n1,2\n")
    rows = read_records(file)
    assert [*next(rows)[1]] == names
    with pytest.raises(
        UserError, match=r":3: found 2 columns; expected 200000 \(c0, c1, .* and 1999\d\d others\)"
    ) as told:
        next(rows)
    assert len(str(told.value)) < 500
    with pytest.raises(UserError, match=r'found no "source" in any record; .*keys: c0, c1, .* others') as told:
        require_fields(["source"], [dict.fromkeys(names)], "a.csv")
    assert len(str(told.value)) < 500


@pytest.mark.parametrize("line", ["," * 10**6, ",".join(["same"] * 10**5), "a" * 200_000 + "," + "a" * 200_000])
def test_invalid_names_of_many_columns_are_refused_in_one_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "a.csv"
    file.write_text(f"{line}\n1,2\n")
    with pytest.raises(UserError, match=r"a.csv:1: found the column names ") as told:
        next(read_records(file))
    assert len(str(told.value)) < 600


@pytest.mark.parametrize(
    "names, said",
    [([], ""), (["a", "b"], "a, b"), ([LONG, "b"], None), (("n" * 9 for _ in range(10**5)), None), ([1, "x\ny"], None)],
)
def test_listed_names_are_shortened_to_one_line(names: Any, said: str | None) -> None:
    found = listed(names)
    assert said is None or found == said
    assert len(found) < 400 and found.isprintable()


# Tokenizers that fail.


def panicking() -> Tokenizer:
    """A tokenizer whose regular expression fails after too many steps, like a panic of Rust."""
    inner = tokenizers.Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "b": 3}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(x+x+)+y"), "isolated")
    inner.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return Tokenizer(TokenizerFile(inner, {"eos_token": "</s>", "unk_token": "<unk>"}, False, {}))


@pytest.fixture(scope="module")
def generator() -> Generator:
    params = oracle.random_params(tiny.MODEL, np.random.default_rng(7))
    return Generator(tiny.change(tiny.RUN, data={"max_source": 24}, grid={"delay": 1}), params, panicking())


@pytest.fixture
def client(generator: Generator) -> TestClient:
    return connect(service(ScriptedEngine(generator), body=2**20))


def test_panic_of_a_tokenizer_is_an_error_object(client: TestClient) -> None:
    for path, body in ((PATH, {"prompt": SLOW}), (PATH, {"prompt": ["b", SLOW]}), ("/v1/responses", {"input": SLOW})):
        found = error(client.post(path, json={**body, "stream": False}), 400)
        assert "tokenizer: cannot encode a text of 71 characters (Onig: Regex search error" in found["message"]
    assert client.post(PATH, json={"prompt": "b"}).status_code == 200
    metrics = client.get("/metrics").text
    assert (
        'pipejax_requests_total{status="400"} 3.0' in metrics and 'pipejax_requests_total{status="200"} 1.0' in metrics
    )


def test_panic_of_a_tokenizer_is_a_user_error(generator: Generator) -> None:
    with pytest.raises(UserError, match=r"^source 1: tokenizer: cannot encode a text of 71 characters \(Onig"):
        generator.decode(["b", SLOW])


@pytest.mark.parametrize("method", ["encode", "decode"])
def test_other_failures_of_the_library(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The library raises `Exception` itself, with a message; an interruption is not changed."""
    made = panicking()

    class Failing:
        raised: BaseException = Exception("WordLevel error: Missing [UNK] token\nfrom the vocabulary")

        def encode(self, *given: Any, **more: Any) -> None:
            raise self.raised

        decode = encode

    monkeypatch.setattr(made, "_backend", Failing())
    call = (lambda: made.encode("ab")) if method == "encode" else (lambda: made.decode([3, 3]))
    with pytest.raises(UserError, match=r"tokenizer: cannot .*\(WordLevel error: Missing \[UNK\] token\)$"):
        call()
    Failing.raised = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        call()


def test_decode_of_a_command_ends_in_a_line(
    tmp_path: Path, tokenizer_files: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from pipejax.offline import decode_command

    params = oracle.random_params(tiny.MODEL, np.random.default_rng(7))
    checkpoint.save_params(tmp_path / "run", tiny.RUN, params, tokenizer_source=tokenizer_files)

    def opened(*given: Any, **more: Any) -> Generator:
        made = load(*given, **more)
        made.tokenizer = panicking()
        return made

    monkeypatch.setattr("pipejax.inference.loading.load", opened)
    (tmp_path / "in.jsonl").write_text(json.dumps({"source": SLOW}) + "\n")
    with pytest.raises(SystemExit) as ended:
        cli.run(
            decode_command.main,
            [
                "--checkpoint",
                str(tmp_path / "run"),
                "--input",
                str(tmp_path / "in.jsonl"),
                "--output",
                str(tmp_path / "out"),
            ],
        )
    lines = capfd.readouterr().err.splitlines()
    assert ended.value.code == 2 and "Traceback" not in "\n".join(lines)
    assert any(line.startswith("error: ") and "tokenizer: cannot encode" in line for line in lines), lines


# Messages of the server.


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "b", LONG: 1},
        {"prompt": "b", "method": LONG},
        {"prompt": "b", "model": LONG},
        {"prompt": {LONG: "b"}},
        {"prompt": {f"key{i}": "b" for i in range(50_000)}},
        {"prompt": [LONG, 1]},
        {"prompt": "b", "stop": [LONG]},
        {"prompt": "b", "stream": True, "stream_options": {LONG: 1}},
        {"prompt": "b", "response_format": {"type": LONG}},
        {"prompt": "b", "response_format": {"type": "json_schema", "json_schema": {"schema": {LONG: 1}}}},
        {
            "prompt": "b",
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "object", "properties": {LONG: {}}}},
            },
        },
        {"prompt": "b", "x\r\ny": 1},
    ],
)
def test_names_in_refusals_of_requests_are_shortened(client: TestClient, body: dict[str, Any]) -> None:
    reply = client.post(PATH, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert reply.status_code in (400, 404) and len(reply.content) < 3000
    found = error(reply, reply.status_code)
    assert found["message"].isprintable() and (found["param"] is None or len(found["param"]) <= 100)


# Too little memory.


@pytest.mark.parametrize("kib", [100_000, 1_000_000, 2_097_151])
def test_too_little_address_space_gives_one_line(kib: int) -> None:
    decode_command = f"ulimit -v {kib}; exec {shlex.quote(sys.executable)} -m pipejax decode --checkpoint x"
    done = subprocess.run(["sh", "-c", decode_command], capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"error: ulimit -v: found {kib} KiB of address space; expected")


def test_sufficient_address_space_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed in (environment.MEMORY, resource.RLIM_INFINITY, 2**40):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, allowed=allowed: (allowed, allowed))
        environment.check_memory()
