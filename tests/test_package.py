"""An installed pipejax decodes without the libraries of its extras, and all of its commands start."""

import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipejax
from pipejax import checkpoint
from pipejax.apps import demo
from pipejax.registry import COMMANDS
from support import oracle, tiny

ROOT = Path(__file__).parents[1]
# Modules that no library of the core imports, so that they can be removed.
ABSENT = (
    "tensorflow_datasets",
    "importlib_resources",
    "grain",
    "nltk",
    "rouge_score",
    "sentencex",
    "starlette",
    "uvicorn",
)
BLOCKED = f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))\n"  # None: its import fails


def python(
    *arguments: str, folder: Path = ROOT, more: Mapping[str, str] = types.MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), **more}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_decoding_needs_no_extra(tokenizer_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command without extras writes the rows of the API with extras, and reports nothing as missing."""
    trained = tmp_path / "run"
    params = oracle.random_params(tiny.MODEL, np.random.default_rng(7))
    checkpoint.save_params(trained, tiny.RUN, params, tokenizer_source=tokenizer_files)
    monkeypatch.setenv("PIPEJAX_NATIVE", "off")  # avoids a compilation of C++
    texts = [demo.examples("test")[i].source for i in range(2)]
    expected = pipejax.load(trained).decode(texts, method="pipelined")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"source": text}) + "\n" for text in texts))
    code = f"{BLOCKED}from pipejax.__main__ import script; script()"
    flags = ("--checkpoint", str(trained), "--input", "in.jsonl", "--output", "out.jsonl", "--method", "pipelined")
    ended = python("-c", code, "decode", *flags, folder=tmp_path)
    assert ended.returncode == 0 and "extra" not in ended.stderr, ended.stderr
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert any(record["rows"] for record in found)
    assert [record["rows"] for record in found] == [record["rows"] for record in expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, line",
    [
        ("metrics rouge in.jsonl", "metrics: found no nltk; expected the packages of the extra pipejax[metrics]"),
        ("data prepare msqa --manual-dir .", "data prepare: found no tensorflow_datasets; expected"),
        ("data stats msqa --data-dir .", "data.task=msqa: found no tensorflow_datasets; expected"),
        ("data stats jsonl --set data.train=text.jsonl --set data.rows=sentences", "sentences: found no sentencex"),
        (
            "train --config {root}/configs/demo.py --workdir run",
            "training: found no grain; expected the packages of the extra",
        ),
        (
            "serve --checkpoint x",
            "pipejax serve: found no starlette; expected the packages of the extra pipejax[serve]",
        ),
        (
            "teach --checkpoint x --input in.jsonl --workdir run",
            "training: found no grain; expected the packages of the extra",
        ),
    ],
)
def test_absent_extra_raises_one_line(tmp_path: Path, command: str, line: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"gold": ["a b"], "pred": ["a c"]}\n')
    (tmp_path / "text.jsonl").write_text('{"source": "a", "targets": "One. Two."}\n')
    arguments = command.format(root=ROOT).split()
    ended = python("-c", f"{BLOCKED}from pipejax.__main__ import script; script()", *arguments, folder=tmp_path)
    last = ended.stderr.splitlines()[-1]
    assert ended.returncode == 2 and last.startswith(f"error: {line}") and "pip install" in last, ended.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_absent_library_raises_one_line() -> None:
    code = "import sys; sys.modules['jax'] = None; from pipejax.__main__ import script; script()"
    ended = python("-c", code, "train", "--config", "configs/demo.py", "--workdir", "run")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: found no jax for {sys.executable}; expected what requirements.txt installs")
    assert len(ended.stderr.splitlines()) == 1


# Commands.


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(COMMANDS[name][1]).main(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: pipejax {name} ")


@pytest.mark.parametrize("name", ["convert", "data", "metrics", "checkpoint"])
def test_packages_run_as_modules(name: str) -> None:
    ended = python("-m", f"pipejax.{name}", "--help")
    assert ended.returncode == 0 and ended.stdout.startswith(f"usage: pipejax {name} "), ended.stderr


def test_unknown_command_raises_one_line() -> None:
    ended = python("-m", "pipejax", "decodes")
    assert ended.returncode == 2 and ended.stdout == ""
    assert (
        ended.stderr
        == f"error: pipejax: found 'decodes'; expected one of {', '.join(COMMANDS)} (did you mean decode?)\n"
    )


@pytest.mark.parametrize(
    "line, expected",
    [
        ("pipejax co", {"convert", "compare"}),
        ("pipejax decode --b", {"--best", "--batch-size"}),
        ("pipejax metrics rou", {"rouge", "rouge_score"}),
        ("pipejax decodes --b", set()),
    ],
)
def test_a_shell_completes_commands_and_flags(tmp_path: Path, line: str, expected: set[str]) -> None:
    """argcomplete's shell function asks by variables, and the answer is written to a file."""
    pytest.importorskip("argcomplete")
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": " ", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer")}
    position = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    python("-m", "pipejax", more=asked | position)
    answer = tmp_path / "answer"
    assert set((answer.read_text() if answer.exists() else "").split()) == expected


def test_line_is_logged_once_with_handlers_of_libraries() -> None:
    """Some versions of libraries that JAX and TFDS import call `logging.basicConfig`."""
    code = (
        "import logging; logging.basicConfig(level=logging.INFO)\n"
        "from pipejax.system import cli\n"
        "cli.run(lambda argv: logging.getLogger('pipejax.training').info('step 1') or 0, [])"
    )
    assert python("-c", code).stderr == "step 1\n"
