"""Bad data, configs, Hugging Face directories and run directories, given to the real commands.

Each must end with exit code 2 and one line that names the culprit, and change no file.
"""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from experiments.faults import runs
from experiments.faults.disks import snapshot
from experiments.faults.runs import Commands

GOOD = {"id": "a", "source": "honey maps", "targets": ["honey"]}
FIRST = "decoder.block.0.layer.0.SelfAttention.q.weight"


class Kind(NamedTuple):
    """One way to be wrong."""

    name: str
    words: tuple[str, ...]  # that the line must hold
    command: str  # whose `main`
    arguments: tuple[str, ...]  # {here} is the directory of this trial
    spoil: Callable[[Path], Any] = lambda here: None
    devices: int = 1


TRAIN = ("--config={here}/config.py", "--workdir={here}/new")
DECODE = ("--checkpoint={here}/run", "--input={here}/in.jsonl", "--output={here}/out.jsonl")
FROM_HF = ("from-hf", "{here}/hf", "{here}/converted")


def _line(name: str, content: bytes, *words: str) -> Kind:
    """A training file whose second line is wrong."""

    def spoil(here: Path) -> None:
        (here / "train.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n" + content)

    return Kind(f"data: {name}", ("train.jsonl:2: ", *words), "train", TRAIN, spoil)


def _example(name: str, *words: str, **changes: Any) -> Kind:
    values = {key: value for key, value in {**GOOD, "id": "b", **changes}.items() if value is not ...}
    return _line(name, json.dumps(values).encode(), *words)


def _file(name: str, content: bytes, *words: str) -> Kind:
    return Kind(
        f"data: {name}",
        ("train.jsonl", *words),
        "train",
        TRAIN,
        lambda here: (here / "train.jsonl").write_bytes(content),
    )


def _set(name: str, assignment: str, *words: str, devices: int = 1) -> Kind:
    return Kind(f"config: {name}", words, "train", (*TRAIN, f"--set={assignment}"), devices=devices)


def _config(name: str, text: str, *words: str) -> Kind:
    return Kind(f"config: {name}", words, "train", TRAIN, lambda here: (here / "config.py").write_text(text))


def _tensors(name: str, change: Callable[[dict[str, Any]], Any], *words: str) -> Kind:
    def spoil(here: Path) -> None:
        tensors = load_file(here / "hf/model.safetensors")
        change(tensors)
        save_file(tensors, here / "hf/model.safetensors", metadata={"format": "pt"})

    return Kind(f"HF: {name}", words, "pipejax.convert", FROM_HF, spoil)


def _hf(name: str, spoil: Callable[[Path], Any], *words: str) -> Kind:
    return Kind(f"HF: {name}", words, "pipejax.convert", FROM_HF, lambda here: spoil(here / "hf"))


def _fact(name: str, *words: str, **facts: Any) -> Kind:
    def spoil(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))

    return _hf(name, spoil, *words)


def _run(name: str, spoil: Callable[[Path], Any], *words: str, more: tuple[str, ...] = ()) -> Kind:
    arguments = ("--config={here}/config.py", "--workdir={here}/run", "--set=train.steps=8", *more)
    return Kind(f"run: {name}", words, "train", arguments, lambda here: spoil(here / "run"))


def _index(directory: Path, place: str) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    places = {**dict.fromkeys(tensors, "shard.safetensors"), FIRST: place}
    del tensors[FIRST]
    save_file(tensors, directory / "shard.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _damage_all(directory: Path) -> None:
    for path in directory.glob("checkpoints/*/params"):
        shutil.rmtree(path)


def _replace(path: Path, kind: str) -> None:
    shutil.rmtree(path)
    if kind == "file":
        path.write_text("precious")
    else:
        path.mkdir()
        (path / "thesis.tex").write_text("precious")


KINDS: tuple[Kind, ...] = (
    _file("empty file", b"", "found no lines"),
    _file("blank lines alone", b"\n\r\n", "found no lines"),
    _line("bad JSON", b'{"id": "b"', "not JSON"),
    _line("a list", b"[1]", "found a list"),
    _line("not UTF-8", b'{"source": "caf\xe9"}', "0xe9"),
    _line("NUL", b'{"source": "a\x00b"}', "not JSON"),
    _line("a torn line of 10 MB", b'{"source": "' + b"x" * 10_000_000, "not JSON"),
    _line("deep nesting", b"[" * 100_000, "not JSON"),
    _example("no source", '"source"', source=...),
    _example("a number for the source", '"source"', source=3),
    _example("empty source", '"source"', source=" "),
    _example("half a surrogate pair", '"source"', source="a\ud800"),
    _example("no targets", '"targets"', targets=...),
    _example("text for the targets", '"targets"', targets="honey"),
    _example("a number among the targets", "targets[1]", targets=["honey", 3]),
    _example("empty target", "targets[0]", targets=[""]),
    _example("duplicate id", "'a' again", "line 1", id="a"),
    _set("the data file is absent", "data.train=/nowhere.jsonl", "/nowhere.jsonl: no such file"),
    _set("a directory for the data file", "data.train=/", "found a directory"),
    _set("no tokenizer", "data.tokenizer=", "data.tokenizer: found none"),
    _set("unknown key", "train.stepz=3", "train.stepz: unknown key", "did you mean train.steps"),
    _set("wrong type", "train.steps=many", "train.steps: found 'many'"),
    _set("out of range", "train.dropout=1.0", "train.dropout: found 1.0; expected less than 1.0"),
    _set("unknown choice", "train.objective=pipelinde", "train.objective", "did you mean pipelined"),
    _set("the batch does not divide", "train.batch_size=9", "train.batch_size: found 9", "multiple of 2", devices=2),
    _set("the mesh is larger than the devices", "mesh.fsdp=16", "mesh: found"),
    _set("the vocabulary is too small", "model.vocab_size=20", "model.vocab_size: found 20"),
    _set("no checkpoint to start from", "train.init_from=/nowhere", "/nowhere: no such checkpoint"),
    Kind("config: absent", ("no.py: no such file",), "train", ("--config={here}/no.py", "--workdir={here}/new")),
    _config("a syntax error", "config = Config(", "config.py:1", "SyntaxError"),
    _config("an exception", "1 / 0", "config.py:1", "ZeroDivisionError"),
    _config("no config in it", "x = 3", "config.py: found no `config = Config(...)`"),
    _tensors("missing tensor", lambda t: t.pop(FIRST), FIRST, "missing"),
    _tensors("extra tensor", lambda t: t.update(classifier=np.ones(3, np.float32)), "classifier"),
    _tensors("mis-shaped tensor", lambda t: t.update({FIRST: np.ones((3, 5), np.float32)}), FIRST, "[3, 5]"),
    _tensors("mistyped tensor", lambda t: t.update({FIRST: t[FIRST].astype(np.int8)}), FIRST, "I8"),
    _tensors("NaN weights", lambda t: t.update({FIRST: t[FIRST] * np.float32("nan")}), FIRST),
    _hf("truncated file", lambda d: _truncate(d / "model.safetensors"), "model.safetensors"),
    _hf("an index that leaves the directory", lambda d: _index(d, "../x.safetensors"), "../x.safetensors"),
    _hf("an absent shard", lambda d: _index(d, "absent.safetensors"), "absent.safetensors"),
    _hf("a .bin file alone", lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "pytorch_model.bin"),
    _hf("no config.json", lambda d: (d / "config.json").unlink(), "config.json"),
    _fact("a config that lies", "d_ff", d_ff=999),
    _fact("another model", "bert", model_type="bert"),
    _fact("a tokenizer larger than the vocabulary", "vocab", vocab_size=20),
    _run("other key", lambda d: None, "train.learning_rate: ", " -> ", more=("--set=train.learning_rate=1.0",)),
    _run("other model", lambda d: None, "model.d_ff: 24 -> 25", more=("--set=model.d_ff=25",)),
    _run("a file in the way", lambda d: _replace(d, "file"), "found a file"),
    _run("other things in it", lambda d: _replace(d, "directory"), "other things"),
    Kind("run: no good step to decode", ("found no good step",), "decode", DECODE, lambda h: _damage_all(h / "run")),
    Kind("run: no checkpoint to decode", ("found no checkpoints/",), "decode", ("--checkpoint={here}/hf", *DECODE[1:])),
    Kind(
        "source: empty file", ("in.jsonl: found no lines",), "decode", DECODE, lambda h: (h / "in.jsonl").write_text("")
    ),
    Kind(
        "source: an id outside the vocabulary",
        ("in.jsonl:1: ", "found id 99"),
        "decode",
        DECODE,
        lambda here: (here / "in.jsonl").write_text('{"source_ids": [99]}\n'),
    ),
    Kind("processes: no coordinator", ("--coordinator: found none",), "train", (*TRAIN, "--processes=2")),
)


def many(commands: Commands, scratch: Path, *, workers: int = 2) -> dict[str, Any]:
    """All kinds, each in a directory of its own, and two trainers in one directory."""
    template = scratch / "template"
    path = runs.prepare(template)
    assert commands.train(path, template / "run", "train.steps=4").end() == 0
    assert commands.start("pipejax.convert", "to-hf", str(template / "run"), str(template / "hf")).end() == 0
    (template / "in.jsonl").write_text('{"source": "honey maps"}\n')
    (template / "out.jsonl").write_text("precious\n")

    def trial(numbered: tuple[int, Kind]) -> dict[str, Any]:
        number, kind = numbered
        here = scratch / str(number)
        shutil.copytree(template, here)
        if not kind.name.startswith("run: "):  # those go on with a run, whose data lies where it lay
            (here / "config.py").write_text(path.read_text().replace(str(template), str(here)))
        kind.spoil(here)
        before = snapshot(here)
        arguments = [argument.format(here=here) for argument in kind.arguments]
        command = commands.start(kind.command, *arguments, devices=kind.devices)
        code, said = command.end(), command.said()
        after = snapshot(here)
        errors = [line for line in said if line.startswith("error: ")]
        wrong = [word for word in kind.words if not said or word not in said[-1]]
        return {
            "kind": kind.name,
            "code": code,
            "line": said[-1][:300] if said else "",
            # A line about what was skipped, or on where the run begins, may come before.
            "ok": code == 2 and errors == said[-1:] and not wrong and "Traceback" not in "".join(said),
            "kept": all(after.get(name) == value for name, value in before.items() if "/.lock" not in name),
        }

    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(trial, enumerate(KINDS)))
    results.append(_two_trainers(commands, scratch / "two"))
    bad = [result for result in results if not (result["ok"] and result["kept"])]
    return {
        "kinds": len(results),
        "one_line_and_exit_2": sum(result["ok"] for result in results),
        "nothing_overwritten": sum(result["kept"] for result in results),
        "ok": not bad,
        "failures": bad[:10],
        "lines": {result["kind"]: result["line"].replace(str(scratch), "SCRATCH") for result in results},
    }


def _two_trainers(commands: Commands, scratch: Path) -> dict[str, Any]:
    config = runs.prepare(scratch)
    first = commands.train(config, scratch / "run", "train.steps=100000", "train.evaluate_every=100000")
    runs.wait_for(lambda: runs.steps_made(scratch / "run") > 1, first)
    second = commands.train(config, scratch / "run")
    code, said = second.end(), second.said()
    first.send(15)
    stopped = first.end()
    line = said[-1] if said else ""
    good = code == 2 and "another trainer is at work" in line and len(said) == 1 and stopped == 143
    return {"kind": "run: two trainers at once", "code": code, "line": line, "ok": good, "kept": stopped == 143}
