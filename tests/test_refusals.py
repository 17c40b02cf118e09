"""Bad input to commands gives exit code 2 and a last line that names the culprit, and changes no existing file."""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import decode
import train
from pipejax import checkpoint
from pipejax.config import Config, DataConfig, T5Config, TrainConfig
from pipejax.convert.__main__ import main as convert_main
from pipejax.inference import programs
from pipejax.inference.loading import load
from pipejax.system import cli, environment, files
from pipejax.system.errors import UserError
from support import oracle

ROOT = Path(__file__).parents[1]
MODEL = T5Config(vocab_size=64, d_model=8, d_kv=4, d_ff=8, num_heads=2, num_layers=1, num_decoder_layers=1)
GOOD = b'{"id": "a", "source": "deliver honey ."}\n'
PRECIOUS = "an older result\n"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, tokenizer_files):
    """Random weights with a tokenizer, the same without one, and paths that are no checkpoints."""
    root = tmp_path_factory.mktemp("checkpoints")
    shutil.copytree(tokenizer_files, root / "tokenizer")
    config = Config(model=MODEL, data=DataConfig(task="none", separator=" "), train=TrainConfig(method="none"))
    params = oracle.random_params(MODEL, np.random.default_rng(0))
    checkpoint.save_params(root / "good", config, params, tokenizer_source=root / "tokenizer")
    checkpoint.save_params(root / "bare", config, params)
    (root / "empty").mkdir()
    (root / "file").write_text("x")
    (root / "other").mkdir()
    (root / "other" / "thesis.tex").write_text("x")
    (root / "hollow" / "checkpoints").mkdir(parents=True)
    (root / "hollow" / "best").mkdir()
    (root / "hf").mkdir()
    (root / "hf" / "config.json").write_text('{"model_type": "t5"}')
    save_file({"shared.weight": np.zeros((2, 2), np.float32)}, root / "hf" / "model.safetensors")
    return root


@pytest.fixture(scope="module", autouse=True)
def opened_once(checkpoints):
    """Two checkpoints for all tests; compilation fails a test."""
    known = {str(checkpoints / name): load(checkpoints / name) for name in ("good", "bare")}

    def load_known(path, *, best=False, overrides=()):
        if overrides or best or path not in known:
            return load(path, best=best, overrides=overrides)
        return known[path]

    def compiles(*_):
        pytest.fail("the model was compiled before all input was checked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipejax.inference.loading.load", load_known)
        patch.setattr(programs, "decode_batch", compiles)
        yield


@pytest.fixture
def places(checkpoints, tmp_path):
    """The values of {name} in flags."""
    (tmp_path / "in.jsonl").write_bytes(GOOD)
    (tmp_path / "out.jsonl").write_text(PRECIOUS)
    (tmp_path / "directory").mkdir()
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    (tmp_path / "astray.jsonl").symlink_to("nowhere/out.jsonl")
    os.link(tmp_path / "in.jsonl", tmp_path / "twin.jsonl")
    (tmp_path / "config.py").write_text(
        "from pipejax.config import *\n"
        "model = T5Config(vocab_size=64, d_model=8, d_kv=4, d_ff=8, num_heads=2, num_layers=1, num_decoder_layers=1)\n"
        f"config = Config(model=model, data=DataConfig(tokenizer={str(checkpoints / 'tokenizer')!r}, train='in.jsonl'))"
    )
    return {"tmp": tmp_path, "checkpoints": checkpoints, "root": ROOT}


def snapshot(directory):
    return {
        path: (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in sorted(directory.rglob("*"))
    }


@pytest.fixture
def refused(places, capsys, monkeypatch):
    """Runs a command that must fail; returns the last line on standard error after the other checks."""
    monkeypatch.chdir(places["tmp"])

    def run(main, *flags, words=()):
        before = snapshot(places["tmp"])
        with pytest.raises(SystemExit) as caught:
            cli.run(main, [str(flag).format(**places) for flag in flags])
        out, err = capsys.readouterr()
        assert caught.value.code == 2, err
        assert out == "" and "Traceback" not in err and "usage:" not in err
        last = err.splitlines()[-1]
        assert last.startswith("error: ") and err.count("error: ") == 1
        for word in words:
            assert word.format(**places) in last
        assert snapshot(places["tmp"]) == before
        return last

    return run


DECODE = {"--checkpoint": "{checkpoints}/good", "--input": "{tmp}/in.jsonl", "--output": "{tmp}/out.jsonl"}


def decode_flags(**changes):
    """The flags of a good run, with changes; None removes a flag."""
    flags = DECODE | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return [part for name, value in flags.items() if value is not None for part in (name, value)]


# Flags and places.


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], ["--checkpoint", "--input", "--output"]),
        (decode_flags(output=None), ["--output"]),
        ([*decode_flags(), "--nonsense", "3"], ["--nonsense"]),
        ([*decode_flags(), "stray"], ["stray"]),
        ([*decode_flags(), "--batch_size", "3"], ["--batch_size"]),
        ([*decode_flags(), "--strat", "sequential"], ["--strat"]),  # no abbreviations
        (["--checkpoint"], ["--checkpoint", "expected one argument"]),
        ([*decode_flags(), "--set"], ["--set"]),
        (decode_flags(method="nonsense"), ["--method", "'nonsense'", "pipelined", "sequential"]),
        (decode_flags(batch_size="0"), ["--batch-size: found 0"]),
        (decode_flags(batch_size="-3"), ["--batch-size: found -3"]),
        (decode_flags(batch_size="many"), ["--batch-size", "'many'"]),
        (decode_flags(set="grid.dealy=2"), ["grid.dealy: unknown key (did you mean grid.delay?)"]),
        (decode_flags(set="grid.delay=fast"), ["grid.delay: found 'fast'; expected a whole number"]),
        (decode_flags(set="grid.delay=-1"), ["grid.delay: found -1; expected at least 0"]),
        (decode_flags(set="grid.delay"), ["grid.delay: found no '='"]),
        (decode_flags(set="grid=3"), ["grid: found a section"]),
        (decode_flags(set="decode.beams=3", method="pipelined"), ["decode.beams: found 3; expected 1", "pipelined"]),
        (decode_flags(set="decode.beams=9999"), ["decode.beams: found 9999", "half of model.vocab_size"]),
        (decode_flags(set="train.steps=3"), ["train.steps", "cannot be changed", "grid, decode"]),
        (decode_flags(set="model.d_model=8"), ["model.d_model", "cannot be changed"]),
        # Otherwise it would have no effect.
        (decode_flags(set="data.tokenizer=/x"), ["data.tokenizer", "cannot be changed"]),
        (decode_flags(set="name=x"), ["name", "cannot be changed"]),
        (decode_flags(input="{tmp}/no.jsonl"), ["--input {tmp}/no.jsonl: no such file"]),
        (decode_flags(input="{tmp}/directory"), ["--input {tmp}/directory: found a directory"]),
        (decode_flags(input=""), ["--input"]),
        (decode_flags(output="{tmp}/in.jsonl"), ["--output {tmp}/in.jsonl: found the input file"]),
        (decode_flags(output="{tmp}/directory/../in.jsonl"), ["in.jsonl: found the input file"]),
        (decode_flags(output="in.jsonl"), ["--output in.jsonl: found the input file"]),
        (decode_flags(output="{tmp}/link.jsonl"), ["link.jsonl: found the input file"]),
        (decode_flags(output="{tmp}/twin.jsonl"), ["twin.jsonl: found the input file"]),
        (decode_flags(input="{tmp}/link.jsonl", output="{tmp}/in.jsonl"), ["in.jsonl: found the input file"]),
        (decode_flags(output="{tmp}/nowhere/out.jsonl"), ["--output {tmp}/nowhere/out.jsonl", "directory"]),
        (decode_flags(output="{tmp}/astray.jsonl"), ["--output {tmp}/astray.jsonl", "{tmp}/nowhere"]),
        (decode_flags(output="{tmp}/in.jsonl/out.jsonl"), ["--output {tmp}/in.jsonl/out.jsonl", "directory"]),
        (decode_flags(output="{tmp}/directory"), ["--output {tmp}/directory: found a directory"]),
        (decode_flags(checkpoint="{checkpoints}/no"), ["{checkpoints}/no: no such checkpoint directory"]),
        (decode_flags(checkpoint="google/flan-t5-base"), ["-base: found a Hugging Face model, and no cache"]),
        (decode_flags(checkpoint="{checkpoints}/good/checkpoints"), ["it is part of {checkpoints}/good:"]),
        (decode_flags(checkpoint="{checkpoints}/good/checkpoints/0"), ["it is part of {checkpoints}/good:"]),
        (decode_flags(checkpoint="{checkpoints}/file"), ["{checkpoints}/file: found a file; expected the directory"]),
        (decode_flags(checkpoint="{checkpoints}/empty"), ["{checkpoints}/empty: found no checkpoints/"]),
        (decode_flags(checkpoint="{checkpoints}/other"), ["{checkpoints}/other: found no checkpoints/"]),
        (decode_flags(checkpoint="{checkpoints}/hollow"), ["hollow/checkpoints: found no intact step", "--best"]),
        (decode_flags(checkpoint="{checkpoints}/hf"), ["{checkpoints}/hf", "pipejax convert from-hf"]),
        (["--best", *decode_flags()], ["{checkpoints}/good: found no best/"]),
        (["--ouput", "x", *decode_flags()[:4]], ["--ouput: no such option (did you mean --output?)"]),
        (["--no-such=x", *decode_flags()], ["--no-such: no such option (a setting is given as --set SECTION.KEY="]),
        (["--set", "decode.beams", "4", *decode_flags()], ["--set decode.beams: found no '='; expected key=value"]),
        (decode_flags(checkpoint="{checkpoints}/bare"), ["in.jsonl:1: found text", "no tokenizer", "source_ids"]),
    ],
)
def test_decode_refuses_invalid_flags(refused, flags, words):
    refused(decode.main, *flags, words=words)


# Sources. Each is in the last line, after good lines.

SOURCES = {
    "not JSON": (b'{"source": "x"', ["not JSON"]),
    "two on a line": (b'{"source": "x"} {"source": "x"}', ["not JSON"]),
    "a number": (b"3", ["found the number 3; expected an object"]),
    "a list": (b'["x"]', ["found a list"]),
    "null": (b"null", ["found null"]),
    "not UTF-8": (b'{"source": "caf\xe9"}', ["byte 0xe9 at column 16", "UTF-8"]),
    "UTF-16": ('{"source": "x"}'.encode("utf-16"), ["byte 0xff", "UTF-8"]),
    "NUL": (b'{"source": "a\x00b"}', ["not JSON"]),
    "deeply nested": (b'{"source": ' + b"[" * 100_000, ["not JSON"]),
    "a number too long": (b'{"source": "x", "id": ' + b"1" * 5000 + b"}", ["not JSON"]),
    "no source": (b'{"id": 3, "text": "x"}', ['found no "source"', "id, text"]),
    "nothing": (b"{}", ['found no "source"', "none"]),
    "an int": (b'{"source": 3}', ['"source": found the number 3; expected text']),
    "null source": (b'{"source": null}', ['"source": found null; expected text']),
    "a list of texts": (b'{"source": ["x"]}', ['"source": found a list; expected text']),
    "empty": (b'{"source": ""}', ['"source": found an empty text']),
    "blank": (b'{"source": " \\n\\t"}', ['"source": found an empty text']),
    "lone surrogate": (b'{"source": "ab\\ud800"}', ['"source": found a lone surrogate at character 3']),
    "both": (b'{"source": "x", "source_ids": [3]}', ['found "source" and "source_ids"']),
    "ids a text": (b'{"source_ids": "3 4"}', ['"source_ids": found text; expected a list of whole numbers']),
    "ids null": (b'{"source_ids": null}', ['"source_ids": found null']),
    "ids empty": (b'{"source_ids": []}', ['"source_ids": found no ids']),
    "ids with text": (b'{"source_ids": [3, "4"]}', ["\"source_ids\": found '4' among the ids"]),
    "ids with true": (b'{"source_ids": [3, true]}', ['"source_ids": found True among the ids']),
    "ids with a float": (b'{"source_ids": [3, 4.0]}', ['"source_ids": found 4.0 among the ids']),
    "ids with NaN": (b'{"source_ids": [NaN]}', ['"source_ids": found nan among the ids']),
    "ids with null": (b'{"source_ids": [null]}', ['"source_ids": found None among the ids']),
    "ids nested": (b'{"source_ids": [[3]]}', ['"source_ids": found [3] among the ids']),
    "ids negative": (b'{"source_ids": [3, -1]}', ['"source_ids": found id -1; expected 0 to 63']),
    "ids beyond": (b'{"source_ids": [64]}', ['"source_ids": found id 64; expected 0 to 63']),
    "ids far beyond": (b'{"source_ids": [99999999999999999999]}', ['"source_ids": found id 99999999999999999999']),
    "id true": (b'{"id": true, "source": "x"}', ['"id": found true or false']),
    "id a float": (b'{"id": 1.5, "source": "x"}', ['"id": found the number 1.5']),
    "id a list": (b'{"id": [], "source": "x"}', ['"id": found a list']),
    "id half a pair": (b'{"id": "\\udc00", "source": "x"}', ['"id": found a lone surrogate']),
}


@pytest.mark.parametrize("case", SOURCES)
def test_invalid_source_is_refused_with_its_line(refused, places, case):
    line, words = SOURCES[case]
    (places["tmp"] / "in.jsonl").write_bytes(GOOD * 40 + b"\r\n" + line)
    refused(decode.main, *decode_flags(), words=["{tmp}/in.jsonl:42: ", *(w.replace("{", "{{") for w in words)])


@pytest.mark.parametrize("content", [b"", b"\n", b"\xef\xbb\xbf", b" \r\n\r\n"])
def test_input_without_sources_is_refused(refused, places, monkeypatch, content):
    (places["tmp"] / "in.jsonl").write_bytes(content)
    refused(decode.main, *decode_flags(), words=["{tmp}/in.jsonl: found no lines; expected at least one source"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    refused(decode.main, *decode_flags(input="-"), words=["standard input: found no lines"])


def test_standard_input_has_lines_too(refused, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'\n{"source": 3}\n')))
    refused(decode.main, *decode_flags(input="-"), words=['standard input:2: "source": found the number 3'])


# Training.

TRAIN = ["--config", "{tmp}/config.py", "--workdir"]


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], ["--config", "--workdir"]),
        (["--config", "{tmp}/config.py"], ["--workdir"]),
        (TRAIN, ["--workdir", "expected one argument"]),
        ([*TRAIN, "w", "--nonsense"], ["--nonsense"]),
        (["--config", "{tmp}/no.py", "--workdir", "w"], ["{tmp}/no.py: no such file"]),
        (["--config", "{tmp}", "--workdir", "w"], ["{tmp}: found a directory"]),
        (["--config", "{tmp}/in.jsonl", "--workdir", "w"], ["{tmp}/in.jsonl: found no `config = Config(...)`"]),
        ([*TRAIN, "w", "--set", "trian.steps=3"], ["trian.steps", "train.steps?"]),
        ([*TRAIN, "w", "--set", "train.steps=few"], ["train.steps: found 'few'"]),
        ([*TRAIN, "w", "--set", "train.steps=-3"], ["train.steps: found -3"]),
        ([*TRAIN, "w", "--set", "train.steps"], ["train.steps: found no '='"]),
        ([*TRAIN, "w", "--set", "data.task=x"], ["data.task: found 'x'"]),
        ([*TRAIN, "w", "--set", "data.train="], ["data.train: found nothing"]),
        ([*TRAIN, "w", "--set", "data.train=no"], ["no: no such file"]),
        (
            ["--config", "{tmp}/config.py", "--workdir", "w", "--set", "data.train=directory"],
            ["directory: found a directory"],
        ),
        (["--config", "{tmp}/config.py", "--workdir", "in.jsonl", "--set", "data.task=demo"], ["in.jsonl: found a"]),
        ([*TRAIN, "{tmp}", "--set", "data.task=demo"], ["{tmp}", "other files"]),
    ],
)
def test_train_refuses_invalid_flags(refused, flags, words):
    refused(train.main, *flags, words=words)


ROW = b'{"id": "%d", "source": "deliver honey .", "targets": ["honey"]}\n'

EXAMPLES = {
    "not JSON": (b"{", ["not JSON"]),
    "a list": (b"[]", ["found a list; expected an object"]),
    "not UTF-8": (b'{"source": "\xff"}', ["byte 0xff", "UTF-8"]),
    "no source": (b'{"targets": ["x"]}', ['found no "source"']),
    "empty source": (b'{"source": " ", "targets": ["x"]}', ['"source": found an empty text']),
    "no targets": (b'{"source": "x"}', ['found no "targets"; expected a list of texts']),
    "targets a text": (b'{"source": "x", "targets": "y"}', ['"targets": found text; expected a list']),
    "targets null": (b'{"source": "x", "targets": null}', ['"targets": found null; expected a list']),
    "a row a number": (b'{"source": "x", "targets": ["y", 3]}', ['"targets[1]": found the number 3; expected text']),
    "a row empty": (b'{"source": "x", "targets": ["y", ""]}', ['"targets[1]": found an empty text']),
    "a row half a pair": (b'{"source": "x", "targets": ["\\ud83d"]}', ['"targets[0]": found a lone surrogate']),
    "an id again": (b'{"id": "1", "source": "x", "targets": []}', ["\"id\": found '1' again", "line 2"]),
    "an id again, as a number": (b'{"id": 1, "source": "x", "targets": []}', ["\"id\": found '1' again", "line 2"]),
    "id half a pair": (b'{"id": "\\ud800", "source": "x", "targets": []}', ['"id": found a lone surrogate']),
}


@pytest.mark.parametrize("split", ["train", "dev"])
@pytest.mark.parametrize("case", EXAMPLES)
def test_invalid_examples_are_refused(refused, places, case, split):
    line, words = EXAMPLES[case]
    good = ROW % 0 + ROW % 1 + ROW.replace(b'"id": "%d", ', b"")
    (places["tmp"] / "in.jsonl").write_bytes(good)
    (places["tmp"] / "bad.jsonl").write_bytes(good + line)
    flags = [*TRAIN, "w", "--set", f"data.{split}=bad.jsonl"]
    refused(train.main, *flags, words=["bad.jsonl:4: ", *words])


def test_file_of_only_bad_examples_is_refused(refused, places):
    (places["tmp"] / "in.jsonl").write_bytes(b"{\n[]\n")
    words = ["in.jsonl: found 2 bad lines", "in.jsonl:1: not JSON"]
    refused(train.main, *TRAIN, "w", "--skip-bad", words=words)


def test_file_without_examples_is_refused(refused, places):
    (places["tmp"] / "in.jsonl").write_bytes(b"\n")
    words = ["in.jsonl: found no lines; expected at least one example"]
    refused(train.main, *TRAIN, "w", words=words)


# Conversion; tests/test_convert_refusals.py tests errors in the directories.


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], ["from-hf", "to-hf"]),
        (["nonsense", "a", "b"], ["'nonsense'", "from-hf", "to-hf"]),
        (["from-hf"], ["SRC", "OUT"]),
        (["to-hf", "{checkpoints}/good"], ["OUT"]),
        (["from-hf", "{checkpoints}/hf", "new", "--best"], ["--best"]),
        (["to-hf", "{checkpoints}/good", "new", "more"], ["more"]),
        (["to-hf", "{checkpoints}/no", "new"], ["{checkpoints}/no: no such checkpoint directory"]),
        (["to-hf", "{checkpoints}/good", "{tmp}/out.jsonl"], ["{tmp}/out.jsonl: found an existing file"]),
    ],
)
def test_convert_refuses_invalid_flags(refused, flags, words):
    refused(convert_main, *flags, words=words)


# How a command ends.


@pytest.mark.parametrize(
    "main, flags",
    [(decode.main, decode_flags(batch_size="0")), (train.main, ["--set"]), (convert_main, ["to-hf", "no", "new"])],
)
@pytest.mark.parametrize("first", [True, False])
def test_debug_shows_the_traceback(places, capsys, main, flags, first):
    flags = [str(flag).format(**places) for flag in flags]
    with pytest.raises(SystemExit) as caught:
        cli.run(main, ["--debug", *flags] if first else [*flags, "--debug"])
    lines = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert lines[0] == "Traceback (most recent call last):" and lines[-1].startswith("error: ")


def test_end_of_a_command_has_one_line_and_an_exit_code(capsys, monkeypatch):
    monkeypatch.setattr("os._exit", sys.exit)  # of an interrupted command

    def raises(error):
        def main(argv):
            raise error

        return main

    for error, code, last in (
        (UserError("x:\ntwo\r\nlines"), 2, "error: x: two lines"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory.\nmore"), 1, "error: RESOURCE_EXHAUSTED: Out"),
        (RuntimeError("INTERNAL: Generated function failed: Out of memory: 4096 bytes"), 1, "error: INTERNAL: Gen"),
        (MemoryError(), 1, "error: out of memory (a smaller batch size"),
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), 2, "error: /a/b: Permission denied"),
        (OSError(errno.EMFILE, "Too many open files"), 2, "error: Too many open files"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.run(raises(error), [])
        (said,) = capsys.readouterr().err.splitlines()
        assert caught.value.code == code and said.startswith(last)
    for error in (
        RuntimeError("x"),
        FileNotFoundError(errno.ENOENT, "x", "/of/ours"),
        BrokenPipeError(errno.EPIPE, "x"),  # an error of some socket, and not of the reader of our output
    ):
        with pytest.raises(SystemExit) as caught:
            cli.run(raises(error), [])
        said = capsys.readouterr().err  # internal errors are not hidden
        assert caught.value.code == 70 and said.startswith("Traceback") and type(error).__name__ in said
    for number in (0, 143):
        with pytest.raises(SystemExit) as caught:
            cli.run(lambda argv, number=number: number, [])
        assert caught.value.code == number


def test_error_line_has_limited_length(capsys):
    def fails(argv):
        raise UserError(f"{'x' * 10**6}: found too much; expected less")

    with pytest.raises(SystemExit):
        cli.run(fails, [])
    (said,) = capsys.readouterr().err.splitlines()
    assert len(said) < 1100 and said.startswith("error: xxx") and said.endswith("found too much; expected less")


@pytest.mark.parametrize(
    "path, found", [("", "directory"), ("file", "file"), ("no", ""), ("file/no", ""), ("/dev/null", "file")]
)
def test_look_gives_the_kind_of_file(tmp_path, path, found):
    (tmp_path / "file").touch()
    assert files.look(tmp_path / path) == found


@pytest.mark.parametrize(
    "path, reason",
    [("x" * 300, "File name too long"), ("/x" * 4000, "File name too long"), ("a\0b", "null (byte|character)")],
)
def test_invalid_path_is_refused(path, reason):
    with pytest.raises(UserError, match=rf"^--flag .*{reason}"):
        files.look(path, "--flag")


def test_files_that_may_be_open(tmp_path):
    """The limit is below the need of a save: it is raised if possible; otherwise the command is refused immediately."""
    text = "from pipejax.system import cli; import resource; limit = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
    text += "cli.run(lambda argv: print(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) or 0)"
    for limit, code, out, err in (
        ("-S -n 64", 0, f"{environment.FILES}\n", ""),
        (
            "-n 8",
            2,
            "",
            f"error: ulimit -n: found a limit of 8 open files; expected at least {environment.FILES}\n",
        ),
    ):
        drop = "from tests.support.unprivileged import drop; drop();"  # root may always raise it
        command = ["sh", "-c", f'ulimit {limit}; exec "$@"', "sh", sys.executable, "-c", drop + text]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (code, out, err)


@pytest.mark.parametrize("main", [decode.main, train.main, convert_main])
def test_help_is_no_error(capsys, main):
    with pytest.raises(SystemExit) as caught:
        cli.run(main, ["--help"])
    out, err = capsys.readouterr()
    assert caught.value.code == 0 and "usage:" in out and err == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, words",
    [
        (["{root}/decode.py", *decode_flags(method="nonsense")], ["--method", "'nonsense'"]),
        (["{root}/decode.py", *decode_flags(input="-", output="{tmp}/in.jsonl")], ["found the input file"]),
        (["{root}/train.py", "--config", "{tmp}/no.py", "--workdir", "w"], ["{tmp}/no.py: no such file"]),
        (["-m", "pipejax", "convert", "nonsense"], ["'nonsense'"]),
    ],
    ids=["decode", "input and output", "train", "convert"],
)
def test_shell_gets_exit_code_and_last_line(places, command, words):
    before = snapshot(places["tmp"])
    with (places["tmp"] / "in.jsonl").open("rb") as file:
        ended = subprocess.run(
            [sys.executable, *(part.format(**places) for part in command)],
            cwd=ROOT, stdin=file, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (2, "")
    (said,) = ended.stderr.splitlines()
    assert said.startswith("error: ") and all(word.format(**places) in said for word in words)
    assert snapshot(places["tmp"]) == before
    assert json.loads((places["tmp"] / "in.jsonl").read_bytes()) == json.loads(GOOD)
