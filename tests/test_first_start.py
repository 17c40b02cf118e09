"""The first start on a machine: errors are reported before a kernel is compiled, which takes a minute."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipejax
from pipejax import checkpoint
from pipejax.__main__ import main
from pipejax.apps.bulk import workers
from pipejax.apps.bulk.blocks import cut
from pipejax.apps.serving.engine import Engine
from pipejax.config import Config, DataConfig, GridConfig, MeshConfig, TrainConfig
from pipejax.kernels import cpu_kernel, processor
from pipejax.kernels.cpu_kernel import Level
from pipejax.system.errors import UserError
from support import oracle
from support.tiny import IN_BLOCKS

MODEL = dataclasses.replace(IN_BLOCKS, vocab_size=64)  # sizes that the kernel supports
CONFIG = Config(
    model=MODEL,
    grid=GridConfig(time_max=6, sub_max=3),
    data=DataConfig(task="jsonl", source_template="{title} {text}"),
    train=TrainConfig(method="pipelined"),
    mesh=MeshConfig(data=1),
)
GOOD = {"title": "a note", "text": "the baker sang .", "targets": ["the baker"]}


class Compiled(Exception):
    """Raised if the kernel would be compiled."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tokenizer_files: Path) -> Path:
    """A pipelined run and a sequential run."""
    directory = tmp_path_factory.mktemp("runs")
    params = oracle.random_params(MODEL, np.random.default_rng(2))
    checkpoint.save_params(directory / "rows", CONFIG, params, tokenizer_source=tokenizer_files)
    sequential = dataclasses.replace(CONFIG, train=TrainConfig(method="sequential"))
    checkpoint.save_params(directory / "line", sequential, params, tokenizer_source=tokenizer_files)
    return directory


@pytest.fixture
def here(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the runs; compiling a kernel fails the test."""
    (tmp_path / "run").symlink_to(runs / "rows")
    (tmp_path / "line").symlink_to(runs / "line")

    def refuse() -> Level | None:
        raise Compiled

    monkeypatch.setattr(cpu_kernel, "use", refuse)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, seventh: object) -> None:
    """Writes nine records; the seventh is the given record or text."""
    lines = [json.dumps(GOOD)] * 9
    lines[6] = seventh if isinstance(seventh, str) else json.dumps(seventh)
    path.write_text("\n".join(lines) + "\n")


BAD = {
    "no JSON": ('{"title": "a', "in.jsonl:7: not JSON"),
    "blank": ({"title": " ", "text": ""}, "in.jsonl:7: .*found an empty text"),
    "a number": ({"title": 7, "text": "b"}, 'in.jsonl:7: "title": found the number 7'),
    "ids": ({"source_ids": [3, 64]}, "in.jsonl:7.*found id 64; expected 0 to 63"),
    "prefixes": ({**GOOD, "row_prefixes": [[3]] * 9}, "9 .*expected at most 3"),
}
DECODE = "decode --checkpoint run --input in.jsonl --output out.jsonl"


@pytest.mark.parametrize(
    "kind, more", [*((kind, "") for kind in BAD), ("blank", " --stream"), ("ids", " --skip-bad --set decode.beams=2")]
)
def test_invalid_seventh_line_is_refused_before_compilation(here: Path, kind: str, more: str) -> None:
    seventh, line = BAD[kind]
    line = "decode.beams: found 2" if "skip" in more else line
    write(here / "in.jsonl", seventh)
    with pytest.raises(UserError, match=line):
        main((DECODE + more).split())
    write(here / "in.jsonl", GOOD)
    with pytest.raises(UserError if "beams" in more else Compiled):
        main((DECODE + more).split())


@pytest.mark.parametrize(
    "command, line",
    [
        (f"{DECODE} --set grid.delay=0", r"^grid\.delay: found 0 without grid\.row_names; expected the names"),
        (f"{DECODE} --resume", r"--resume: .*out\.jsonl"),
        (f"{DECODE} --set decode.draft=model --set decode.draft_checkpoint=no", r"decode\.draft_checkpoint: no: no"),
        (f"{DECODE} --set decode.samples=2", r"decode\.samples: found 2 with decode\.temperature = 0"),
        (f"{DECODE} --set decode.beams=2", r"decode\.beams: found 2; expected 1"),
        ("evaluate --checkpoint run --set data.test=in.jsonl", r"in\.jsonl:7: "),
        ("evaluate --checkpoint run --set data.test=no.jsonl", r"no\.jsonl: no such file"),
        ("evaluate --checkpoint run", r"data\.test: found no file"),
        ("teach --checkpoint line --input in.jsonl --workdir taught", r"in\.jsonl:7: "),
    ],
)
def test_invalid_setting_or_file_is_refused_before_compilation(here: Path, command: str, line: str) -> None:
    seventh: object = {"title": "a", "text": "b", "targets": "no list"} if "evaluate" in command else '{"title": '
    write(here / "in.jsonl", GOOD if DECODE in command else seventh)
    (here / "out.jsonl").write_text('{"id": "of other work"}\n')
    with pytest.raises(UserError, match=line) as refused:
        main(command.split())
    assert "source 1" not in str(refused.value) and (here / "out.jsonl").read_text() == '{"id": "of other work"}\n'


UNNEEDED = {"transformers", "torch", "orbax", "optax", "grain", "tensorflow", "pandas", "pyarrow", "nltk"}


def test_decoding_imports_only_needed_libraries(here: Path) -> None:
    """Libraries for training, saving or other tokenizers are not imported."""
    write(here / "in.jsonl", GOOD)
    code = f"import sys; from pipejax.__main__ import main; main(sys.argv[1:]); print({UNNEEDED} & set(sys.modules))"
    environment = {**os.environ, cpu_kernel.VARIABLE: "off", "PYTHONPATH": str(Path(pipejax.__file__).parents[1])}
    command = [sys.executable, "-c", code, *DECODE.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"
    assert len((here / "out.jsonl").read_text().splitlines()) == 9


def test_a_worker_reads_its_block_first(here: Path) -> None:
    write(here / "in.jsonl", BAD["blank"][0])
    (block,) = cut("in.jsonl", 1000)
    work = workers.BulkWork(checkpoint=str(here / "run"), output=str(here / "out"), root=str(here), run="x")
    work = dataclasses.replace(work, settings=workers.describe(work)["settings"])
    (here / "out" / "shards").mkdir(parents=True)
    said = workers.Worker(work)("000000.jsonl", block)
    assert said["kind"] == "user" and said["error"]["place"].startswith("in.jsonl:7")


@pytest.mark.parametrize("key, value", [("decode.limit", "source"), ("grid.delay", 0), ("decode.beams", 2)])
def test_unservable_settings_are_refused_before_listening(here: Path, key: str, value: object) -> None:
    line = here / "line" if key == "decode.beams" else here / "run"
    with pytest.raises(UserError, match=f"^{key}: found "):
        Engine(pipejax.load(line, overrides={key: value}), places=1, queue=1)


def test_calls_from_python_are_checked_before_weights_are_laid_out(here: Path) -> None:
    t5 = pipejax.load(here / "run", overrides={"decode.temperature": 0.5})
    bad: list[Any] = [[""], [GOOD, {"title": 3}], [[64]], [GOOD, {**GOOD, "max_rows": 0}]]
    for given in bad:
        with pytest.raises(UserError):
            t5.decode(given)
    refused: list[Callable[[], Any]] = [
        lambda: t5.decode([GOOD], top_p=2),
        lambda: t5.stream_rows(""),
        lambda: t5.warm_up([9], delay=-1),
    ]
    for call in refused:
        with pytest.raises(UserError):
            call()
    assert t5.decode([]) == [] and "0.0 M" in repr(t5)
    started: list[Callable[[], Any]] = [
        lambda: t5.decode([GOOD]),
        lambda: next(t5.stream_rows(GOOD)),
        lambda: t5.warm_up([9]),
    ]
    for call in started:
        with pytest.raises(Compiled):
            call()


def test_decode_after_failed_compilation_works(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t5 = pipejax.load(here / "run")
    with pytest.raises(Compiled):
        t5.decode([GOOD])
    monkeypatch.setattr(cpu_kernel, "use", lambda: None)
    assert t5.decode([GOOD])[0]["steps"] > 0


@pytest.mark.parametrize("machine, flag", [("aarch64", False), ("arm64", False), ("x86_64", True), ("riscv64", True)])
def test_arm_processor_compiles_only_the_level_native(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str], machine: str, flag: bool
) -> None:
    """Its compilers know no x86's levels, and some of them no -march=native."""
    commands: list[list[str]] = []
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(processor, "features", lambda: frozenset({"fp", "asimd", "asimddp", "bf16", "i8mm", "sve"}))
    monkeypatch.setattr(cpu_kernel, "_tried", {})
    monkeypatch.setenv("PIPEJAX_CACHE", str(tmp_path / "cache"))

    def build(level: Level, compiler: str, library: Path) -> str:
        commands.append([level.name, *cpu_kernel._flags(level)])
        library.touch()
        return ""

    monkeypatch.setattr(cpu_kernel, "build", build)
    monkeypatch.setattr(cpu_kernel, "_load", lambda library, level: True)
    for wanted in ("", "amx", "native"):
        monkeypatch.setenv(cpu_kernel.VARIABLE, wanted)
        found = cpu_kernel.use()
        assert found is not None and found.name == "native"
    (command,) = commands
    assert command[0] == "native" and ("-march=native" in command) == flag
    assert not any(part.startswith(("-mavx", "-mamx", "-march=x86")) for part in command)
    line = f"compiling a kernel for this processor, once, in 20 to 60 s; it is stored in {tmp_path / 'cache'}"
    assert said == [line]
