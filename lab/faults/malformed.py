"""Tests the real commands with bad data, configs, Hugging Face directories and run directories.

Each command must end with exit code 2 and one line that names the culprit, and must change no file.
"""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from lab.faults import refusals, runs
from lab.faults.refusals import DECODE, FROM_HF, RESUME, TRAIN, Kind
from lab.faults.runs import Commands

GOOD = {"id": "a", "source": "honey maps", "targets": ["honey"]}
GENERATION = "generation_config.json"
FIRST = "decoder.block.0.layer.0.SelfAttention.q.weight"
VERIFY, METRICS = "pipejax.apps.verify.checkpoint_command", "pipejax.apps.scoring.metrics_command"
DATA = "pipejax.apps.statistics.data_command"


def _line(name: str, content: bytes, *words: str) -> Kind:
    """A kind with a training file whose second line is wrong."""

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

    return Kind(f"HF: {name}", words, "pipejax.convert.__main__", FROM_HF, spoil)


def _hf(name: str, spoil: Callable[[Path], Any], *words: str) -> Kind:
    return Kind(f"HF: {name}", words, "pipejax.convert.__main__", FROM_HF, lambda here: spoil(here / "hf"))


def _fact(name: str, *words: str, **facts: Any) -> Kind:
    return _hf(name, lambda directory: refusals.fact(directory, **facts), *words)


def _run(name: str, spoil: Callable[[Path], Any], *words: str, more: tuple[str, ...] = ()) -> Kind:
    return Kind(f"run: {name}", words, "train", (*RESUME, *more), lambda here: spoil(here / "run"))


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


def _csv(name: str, content: bytes, *words: str) -> Kind:
    arguments = (*TRAIN, "--set=data.task=csv", "--set=data.rows=delimiter")
    spoil = _writes("train.jsonl", content)
    return Kind(f"data: CSV, {name}", ("train.jsonl", *words), "train", arguments, spoil)


def _writes(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda here: (here / name).write_bytes(content)


def _flags(name: str, command: str, flags: tuple[str, ...], *words: str) -> Kind:
    """A kind with flags after the flags of a good run, which they replace."""
    good = {"train": TRAIN, "decode": DECODE}.get(command, ())
    return Kind(f"flags: {name}", words, command, (*good, *flags), _writes("in.csv", b"text\nx\n"))


def _source(name: str, line: bytes, *words: str) -> Kind:
    """A kind with a file to decode whose second line is wrong."""
    spoil = _writes("in.jsonl", b'{"source": "honey maps"}\n' + line)
    return Kind(f"source: {name}", ("in.jsonl:2: ", *words), "decode", DECODE, spoil)


def _header(directory: Path, length: int | None, header: bytes) -> None:
    """Writes a safetensors file that begins with a length and a header."""
    length = len(header) if length is None else length
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", length) + header + bytes(8))


def _msgpack(directory: Path, content: bytes) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "flax_model.msgpack").write_bytes(content)


_CONFIG = "from pipejax.config import *\nconfig = Config({})"
_TWO = ("--processes=2", "--process-id=0")
_BEYOND = b'{"shared.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 99]}}'


KINDS: tuple[Kind, ...] = (
    _file("empty file", b"", "found no lines"),
    _file("only blank lines", b"\n\r\n", "found no lines"),
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
    _set("unknown choice", "train.method=pipelinde", "train.method", "did you mean pipelined"),
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
    _fact("a wrong config", "d_ff", d_ff=999),
    _fact("another model", "bert", model_type="bert"),
    _fact("a tokenizer larger than the vocabulary", "vocab", vocab_size=20),
    _run("other key", lambda d: None, "train.learning_rate: ", " -> ", more=("--set=train.learning_rate=1.0",)),
    _run("other model", lambda d: None, "model.d_ff: 24 -> 25", more=("--set=model.d_ff=25",)),
    _run("a file in the way", lambda d: _replace(d, "file"), "found a file"),
    _run("other things in it", lambda d: _replace(d, "directory"), "other files"),
    Kind(
        "run: no intact step to decode", ("found no intact step",), "decode", DECODE, lambda h: _damage_all(h / "run")
    ),
    Kind("run: no checkpoint to decode", ("found no checkpoints/",), "decode", ("--checkpoint={here}", *DECODE[1:])),
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
    # More data.
    _line("UTF-16", '{"source": "x"}'.encode("utf-16"), "0xff"),
    _line("two objects", b'{"source": "x"} {"source": "y"}', "not JSON"),
    _line("a number", b"3", "found the number 3"),
    _line("null", b"null", "found null"),
    _line("a number of 5,000 digits", b'{"source": "x", "id": ' + b"1" * 5000 + b"}", "not JSON"),
    _example("null source", '"source"', source=None),
    _example("a list for the source", '"source"', source=["x"]),
    _example("an object for the source", '"source"', source={}),
    _example("null targets", '"targets"', targets=None),
    _example("a list among the targets", "targets[0]", targets=[["x"]]),
    _example("half a pair among the targets", "targets[0]", targets=["\udc00"]),
    _example("true for an id", '"id"', id=True),
    _example("a float for an id", '"id"', id=1.5),
    _example("a list for an id", '"id"', id=[]),
    _example("half a pair for an id", '"id"', id="\ud800"),
    _example("a number where a delimiter splits rows", '"targets"', targets=3),
    _csv("doubled column", b"source,source\na,b\n", "expected each once"),
    _csv("ragged row", b"source,targets\na\n", "found 1 column"),
    _csv("not UTF-8", b"source,targets\na,\xe9\n", "train.jsonl:2: found byte 0xe9", "CP1252"),
    _csv("an open quote", b'source,targets\n"a,b\n', "not CSV"),
    _csv("no rows", b"source,targets\n", "found no lines"),
    _csv("nothing", b"", "found no lines"),
    _csv("another column", b"text,targets\na,b\n", '"source"'),
    _csv("a misspelt column", b"sources,targets\na,b\n", 'found no "source"'),
    _csv("another column of targets", b"source,tagets\na,b\n", 'found no "targets"', 'did you mean "tagets"'),
    _csv("UTF-16", "source,targets\na,b\n".encode("utf-16"), ":1: found byte 0xff", "UTF-16"),
    _csv("UTF-16 without a mark", "source,targets\na,b\n".encode("utf-16-le"), ":1: found byte 0x00", "UTF-16LE"),
    _csv("a workbook", b"PK\x03\x04\x14\x00\x06\x00", "found a zip archive or a workbook"),
    _csv("text after a quote", b'source,targets\n"a"b,c\n', "train.jsonl:2: not CSV"),
    _csv("a row of several lines too long", b'source,targets\n"a\nb",c,d\n', "found 3 columns in lines 2 to 3"),
    _csv("rows of another delimiter", b"source,targets\na;b\n", "found 1 column"),
    _csv("a blank source", b"source,targets\n  ,b\n", "found an empty text"),
    _csv("a duplicate id", b"id,source,targets\n1,a,b\n1,a,b\n", "'1' again"),
    _csv("no names", b",\na,b\n", "expected each once"),
    _file("packed with zstd", b"\x28\xb5\x2f\xfd\x04\x58", "found data packed with zstd"),
    _file("Parquet with another ending", b"PAR1\x15\x04", "found Parquet", ".parquet"),
    _file("a pointer of Git LFS", b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
    _file("damaged bzip2", b"BZh91AY&SY" + b"x" * 40, "damaged bzip2 data"),
    _file("damaged xz", b"\xfd7zXZ\x00" + b"x" * 40, "damaged xz data"),
    _example("a misspelt source", 'found no "source"', source=..., sourse="a"),
    _example("another kind of id", '"id": found an object', id={}),
    _example("a source of dates", '"source": found a list', source=["2024-01-02"]),
    _line("UTF-16 from the second line on", '{"source": "x"}'.encode("utf-16-le"), "not JSON"),
    _line("a line of Windows", '{"source": "“x”", "targets": []}'.encode("cp1252"), "found byte 0x93", "CP1252"),
    _set("shares with the sum two", "data.split=1,0.5,0.5", "data.split: found '1,0.5,0.5'"),
    _set("shares in percent", "data.split=80%,10%,10%", "data.split: found '80%,10%,10%'"),
    _set("one share", "data.split=1", "data.split: found '1'"),
    _set("shares and a file", "data.split=0.8,0.1,0.1", "and a file as data.dev"),
    _set("a negative seed", "data.split_seed=-1", "data.split_seed: found -1"),
    _set("a delimiter of two characters", "data.csv_delimiter=\\t", "found two characters"),
    _set("a quote as the delimiter", 'data.csv_delimiter="', "data.csv_delimiter"),
    _set("an unknown choice for empty targets", "data.empty_targets=drop", "data.empty_targets: found 'drop'"),
    _set("an unknown value for skip_bad", "data.skip_bad=perhaps", "data.skip_bad: found 'perhaps'"),
    # Settings.
    _set("a list from a column", "data.task=csv", "data.rows: found 'list'"),
    _set("true for a number", "train.steps=true", "train.steps: found 'true'"),
    _set("a fraction for a whole number", "train.steps=1.5", "train.steps: found '1.5'"),
    _set("a number of 400 digits", f"train.steps={10**400}", "train.steps", "more than 30 digits"),
    _set("a rate of 400 digits", f"train.learning_rate={10**400}", "train.learning_rate: found inf"),
    _set("a number of 5,000 digits", "train.steps=" + "9" * 5000, "train.steps"),
    _set("beyond 32 bits", f"train.log_every={2**40}", "train.log_every", "at most 2147483647"),
    _set("a batch that is too large", f"train.batch_size={10**30}", "train.batch_size", "at most"),
    _set("a decoding batch that is too large", f"decode.batch_size={10**30}", "decode.batch_size", "at most"),
    _set("a huge model", f"model.d_model={10**9}", "model.d_model", "at most"),
    _set("no layers", "model.num_layers=0", "model.num_layers: found 0"),
    _set("NaN", "train.learning_rate=nan", "train.learning_rate: found nan"),
    _set("infinite", "train.weight_decay=inf", "train.weight_decay: found inf"),
    _set("no key", "=3", "found no key"),
    _set("no value", "train.steps", "found no '='"),
    _set("a section", "train=3", "train: found a section"),
    _set("a key of a key", "train.steps.more=3", "steps is not a section"),
    _set("unknown section", "trian.steps=3", "did you mean train.steps"),
    _set("a mesh of no device", "mesh.data=0", "mesh.data: found 0"),
    _set("unknown task", "data.task=nonsense", "data.task: found 'nonsense'"),
    _set("unknown metric", "data.metric=bleu", "data.metric: found 'bleu'"),
    _set("a delimiter of rows of two characters", "data.delimiter=\\t", "expected one"),
    _set("half a template", "data.source_template={source", "data.source_template"),
    _set("a template without fields", "data.source_template=x", "data.source_template"),
    _set("a template with a number's format", "data.source_template={source:3d}", "data.source_template"),
    _set("a template for another field", "data.source_template={nonsense}", "nonsense"),
    _set("beams with the pipelined method", "decode.beams=3", "decode.beams: found 3"),
    _set("LoRA without initial weights", "train.lora_rank=4", "train.lora_rank: found 4"),
    _set("eos beyond the vocabulary", "model.eos_token_id=99999", "model.eos_token_id"),
    _set("too few buckets", "model.relative_attention_num_buckets=3", "at least 4"),
    _set("distances below the buckets", "model.relative_attention_max_distance=16", "more than half"),
    _set("negative dropout", "train.dropout=-0.1", "train.dropout: found -0.1"),
    _set("an unknown dtype", "train.dtype=float16", "train.dtype: found 'float16'"),
    _set("accumulation that does not divide", "train.accumulate=3", "train.batch_size"),
    _set("a pack that does not divide", "train.pack=5", "train.pack: found 5"),
    _set("a file for the tokenizer", "data.tokenizer={here}/in.jsonl", "found a file"),
    _set("no such tokenizer", "data.tokenizer=/nowhere", "/nowhere: found no such directory"),
    _set("a directory that is no tokenizer", "data.tokenizer={here}/run", "found no tokenizer"),
    _set("a file for a checkpoint", "train.init_from={here}/in.jsonl", "in.jsonl: found a file"),
    Kind(
        "config: a grid that is too large",
        ("grid: found 1073741824 places",),
        "train",
        (*TRAIN, "--set=grid.time_max=32768", "--set=grid.sub_max=32768"),
    ),
    Kind("config: a directory", ("found a directory",), "train", ("--config={here}", "--workdir={here}/new")),
    Kind(
        "config: sequential rows without a separator",
        ("data.separator: found nothing",),
        "train",
        (*TRAIN, "--set=train.method=sequential", "--set=data.separator="),
    ),
    _config("it exits", "import sys; sys.exit(3)", "config.py:1", "SystemExit"),
    _config("it imports a missing module", "import nonsense_of_nobody", "config.py:1", "ModuleNotFoundError"),
    _config("it calls itself", "def f(): f()\nf()", "config.py:1", "RecursionError"),
    _config("a dict for a config", "config = {}", "found no `config"),
    _config("an unknown key", "from pipejax.config import *\nConfig(nam='x')", "config.py:2", "TypeError"),
    _config("a number for a section", "from pipejax.config import *\nconfig = Config(train=3)", "train: found 3"),
    _config("text for a number", _CONFIG.format("train=TrainConfig(steps='3')"), "train.steps: found '3'"),
    _config("true for a number", _CONFIG.format("train=TrainConfig(steps=True)"), "train.steps: found True"),
    _config("a number of 400 digits", _CONFIG.format("train=TrainConfig(learning_rate=10**400)"), "30 digits"),
    _config("a number of 5,000 digits", _CONFIG.format("train=TrainConfig(steps=10**5000)"), "30 digits"),
    _config("half a pair", _CONFIG.format("name='\\ud800'"), "name: found", "valid Unicode"),
    _config("a name of 100,000 letters", _CONFIG.format("name=3, data='x' * 100000"), "name: found 3"),
    Kind(
        "config: not UTF-8",
        ("config.py", "SyntaxError"),
        "train",
        TRAIN,
        lambda here: (here / "config.py").write_bytes(b"x = '\xe9'"),
    ),
    Kind("config: NUL", ("config.py",), "train", TRAIN, lambda here: (here / "config.py").write_bytes(b"x = 1\x00")),
    # Flags.
    _flags("unknown", "train", ("--nonsense",), "--nonsense"),
    _flags("abbreviated", "train", ("--conf=x",), "--conf"),
    _flags("one too many", "train", ("stray",), "stray"),
    _flags("no value", "train", ("--set",), "--set"),
    _flags("a negative number of steps to trace", "train", ("--profile=-1",), "--profile", "found -1"),
    _flags("no processes", "train", ("--processes=0",), "--processes", "found 0"),
    _flags("a port that is too large", "train", (*_TWO, "--coordinator=localhost:70000"), "65535"),
    _flags("no port", "train", (*_TWO, "--coordinator=localhost"), "HOST:PORT"),
    _flags("a port of 400 digits", "train", (*_TWO, "--coordinator=localhost:" + "1" * 400), "--coordinator"),
    _flags("the third of two processes", "train", ("--processes=2", "--process-id=2", "--coordinator=h:1"), "0 to 1"),
    _flags("no number of the process", "train", ("--processes=2", "--coordinator=h:1"), "--process-id"),
    _flags("no heartbeat", "train", ("--heartbeat=0",), "--heartbeat", "found 0"),
    _flags("an endless heartbeat", "train", (f"--heartbeat={10**30}",), "--heartbeat"),
    _flags("unknown method", "decode", ("--method=nonsense",), "--method", "'nonsense'"),
    _flags("a batch of none", "decode", ("--batch-size=0",), "--batch-size", "found 0"),
    _flags("a batch that is too large", "decode", (f"--batch-size={10**30}",), "--batch-size", "65536"),
    _flags("a batch of letters", "decode", ("--batch-size=many",), "--batch-size", "'many'"),
    _flags("another model", "decode", ("--set=model.d_ff=25",), "model.d_ff", "cannot be changed"),
    _flags("the input for the output", "decode", ("--output={here}/in.jsonl",), "found the input file"),
    _flags("no directory for the output", "decode", ("--output={here}/no/out.jsonl",), "found no directory"),
    _flags("a directory for the output", "decode", ("--output={here}/run",), "found a directory"),
    _flags("a table without a source", "decode", ("--input={here}/in.csv",), 'in.csv: found no "source"', "text"),
    _flags("a packed output", "decode", ("--output={here}/out.jsonl.gz",), "found the name of a compressed file"),
    _flags("a table of a directory", "decode", ("--output={here}/hf.csv/out.csv",), "found no directory"),
    _flags("a table that is complete", "decode", ("--output={here}/in.csv", "--resume"), "in.csv: complete"),
    _flags("a delimiter of two", "decode", ("--set=data.csv_delimiter=ab",), "data.csv_delimiter: found 'ab'"),
    _flags("a dirty file without a good line", "decode", ("--input={here}/config.py", "--skip-bad"), "no good one"),
    _flags("no such input", "decode", ("--input={here}/no.jsonl",), "no such file"),
    _flags("no such checkpoint", "decode", ("--checkpoint={here}/no",), "no such checkpoint"),
    _flags("the hub's name for a checkpoint", "decode", ("--checkpoint=google/t5",), "nor a reachable hub id"),
    _flags("a step for a checkpoint", "decode", ("--checkpoint={here}/run/checkpoints/4",), "it is part of"),
    _flags("decoding a model of another grid", "decode", ("--set=grid.delay=-1",), "grid.delay: found -1"),
    _flags(
        "--limit of none",
        "pipejax.offline.evaluation",
        ("--checkpoint={here}/run", "--limit=0"),
        "--limit",
        "found 0",
    ),
    _flags(
        "a split without a file",
        "pipejax.offline.evaluation",
        ("--checkpoint={here}/run",),
        "data.test: found no file",
    ),
    _flags(
        "negative memory",
        "pipejax.apps.plan.plan_command",
        ("--config={here}/config.py", "--memory=-1"),
        "--memory",
    ),
    _flags(
        "too many devices",
        "pipejax.apps.plan.plan_command",
        ("--config={here}/config.py", f"--devices={10**30}"),
        "--devices",
    ),
    _flags(
        "an unknown size",
        "pipejax.apps.plan.plan_command",
        ("--config={here}/config.py", "--model=huge"),
        "model: found 'huge'",
    ),
    _flags("an unknown command", "pipejax.convert.__main__", ("nonsense", "a", "b"), "'nonsense'"),
    _flags("no place to write to", "pipejax.convert.__main__", ("to-hf", "{here}/run"), "OUT"),
    _flags(
        "an output that exists",
        "pipejax.convert.__main__",
        ("to-hf", "{here}/run", "{here}/hf"),
        "found an existing file",
    ),
    _flags("nothing to verify", VERIFY, ("verify", "{here}/hf"), "found no checkpoints/"),
    _flags("nowhere to verify", VERIFY, ("verify", "{here}/no"), "no such directory"),
    _flags("an unknown data set", DATA, ("prepare", "nonsense"), "'nonsense'"),
    _flags("data that is not there", DATA, ("stats", "msqa", "--data-dir={here}"), "found no msqa"),
    _flags("an unknown family of scores", METRICS, ("bleu", "{here}/in.jsonl"), "'bleu'"),
    _flags("no predictions", METRICS, ("spans", "{here}/in.jsonl"), "in.jsonl:1", '"gold"'),
    _flags(
        "a picture without a record",
        "pipejax.apps.picture.picture_command",
        ("{here}/in.jsonl", "--output={here}/x.svg"),
        "row_ids",
    ),
    _flags(
        "a picture of another kind",
        "pipejax.apps.picture.picture_command",
        ("{here}/in.jsonl", "--output={here}/x.png"),
        ".svg",
    ),
    _flags(
        "a delay that is too large",
        "pipejax.apps.picture.picture_command",
        (f"--delay={10**30}", "x", "--output={here}/x.svg"),
        "--delay",
    ),
    # Sources to decode.
    _source("not JSON", b'{"source": "x"', "not JSON"),
    _source("not UTF-8", b'{"source": "caf\xe9"}', "0xe9"),
    _source("both", b'{"source": "x", "source_ids": [3]}', 'found "source" and'),
    _source("nothing to read", b'{"text": "x"}', '"source"'),
    _source("an empty text", b'{"source": ""}', "found an empty text"),
    _source("half a pair", b'{"source": "\\ud800"}', "a lone surrogate"),
    _source("ids as text", b'{"source_ids": "3"}', "source_ids"),
    _source("no ids", b'{"source_ids": []}', "found no ids"),
    _source("a text among the ids", b'{"source_ids": ["3"]}', "among the ids"),
    _source("true among the ids", b'{"source_ids": [true]}', "True among the ids"),
    _source("a negative id", b'{"source_ids": [-1]}', "found id -1"),
    _source("an id of 20 digits", b'{"source_ids": [99999999999999999999]}', "found id 9999"),
    _source("a prefix that ends its row", b'{"source": "x", "row_prefixes": ["</s> a"]}', "ends the row"),
    _source("ids of a prefix that end its row", b'{"source": "x", "row_prefixes": [[5, 1]]}', "1 ends the row"),
    _source("a blank prefix", b'{"source": "x", "row_prefixes": [" "]}', "has no token"),
    _source("an empty prefix", b'{"source": "x", "row_prefixes": [""]}', "found an empty prefix at 0"),
    _source("an id of 4,000 digits", b'{"source_ids": [' + b"9" * 4000 + b"]}", "found id 9999"),
    # Hugging Face directories.
    _fact("text for a size", "d_ff", d_ff="24"),
    _fact("true for a depth", "num_layers", num_layers=True),
    _fact("a negative number of heads", "num_heads: found -3", num_heads=-3),
    _fact("a null vocabulary", "vocab_size", vocab_size=None),
    _fact("NaN in the config", "layer_norm_epsilon", layer_norm_epsilon=float("nan")),
    _fact("a size of 400 digits", "d_kv", "30 digits", d_kv=10**400),
    _fact("a depth that is too large", "num_layers", "at most", num_layers=10**9),
    _fact("a wrong depth", "num_layers: found 3; expected 1", num_layers=3),
    _fact("a wrong width", "d_model", d_model=18),
    _fact("wrong heads", "num_heads", num_heads=2, d_kv=8),
    _fact("wrong buckets", "num_buckets", relative_attention_num_buckets=16),
    _hf("two ends", lambda d: (d / GENERATION).write_text('{"eos_token_id": [1, 2]}'), f"{GENERATION}: eos_token_id"),
    _fact("another activation", "feed_forward", feed_forward_proj="gated-tanh", dense_act_fn="tanh"),
    _fact("another gelu", "dense_act_fn", dense_act_fn="gelu"),
    _hf("a list for config.json", lambda d: (d / "config.json").write_text("[]"), "config.json: found []"),
    _hf("a damaged config.json", lambda d: (d / "config.json").write_text("{'a': 1}"), "config.json: found no JSON"),
    _hf("config.json nested deep", lambda d: (d / "config.json").write_text("[" * 100_000), "config.json: found no"),
    _hf("generation_config.json", lambda d: (d / GENERATION).write_text("{"), GENERATION),
    _hf("a tokenizer of two letters", lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer"),
    _hf("a damaged tokenizer", lambda d: _truncate(d / "tokenizer.json"), "tokenizer"),
    _hf("an empty file of weights", lambda d: (d / "model.safetensors").write_bytes(b""), "damaged"),
    _hf("a header of 2**62 bytes", lambda d: _header(d, 2**62, b"{}"), "model.safetensors"),
    _hf("a header that is no JSON", lambda d: _header(d, 3, b"{a}"), "model.safetensors"),
    _hf("offsets beyond the end", lambda d: _header(d, None, _BEYOND), "model.safetensors"),
    _hf(
        "a shape of 2**60 numbers", lambda d: _header(d, None, _BEYOND.replace(b"[2]", b"[1152921504606846976]")), "mod"
    ),
    _hf("weights of msgpack, damaged", lambda d: _msgpack(d, b"\xdf\xff\xff\xff\xff"), "flax_model.msgpack"),
    _hf("weights of msgpack, none", lambda d: _msgpack(d, b""), "flax_model.msgpack"),
    _hf("weights of msgpack, a list", lambda d: _msgpack(d, b"\x93\x01\x02\x03"), "flax_model.msgpack"),
    _hf("weights of msgpack, nested deep", lambda d: _msgpack(d, b"\x91" * 100_000), "flax_model.msgpack"),
)


def many(commands: Commands, scratch: Path) -> dict[str, Any]:
    """Tries all kinds, and two trainers in one directory."""
    results = refusals.many(commands, scratch, KINDS)
    return refusals.summary([*results, _two_trainers(commands, scratch / "two")])


def _two_trainers(commands: Commands, scratch: Path) -> dict[str, Any]:
    config = runs.prepare(scratch)
    first = commands.train(config, scratch / "run", "train.steps=100000", "train.evaluate_every=100000")
    runs.wait_for(lambda: runs.steps_made(scratch / "run") > 1, first)
    second = commands.train(config, scratch / "run")
    code, said = second.end(), second.said()
    first.send(15)
    stopped = first.end()
    line = said[-1] if said else ""
    good = code == 2 and "in use by another training process" in line and len(said) == 1 and stopped == 143
    return {"kind": "run: two trainers at once", "code": code, "line": line, "ok": good, "kept": stopped == 143}
