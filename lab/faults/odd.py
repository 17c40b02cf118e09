"""Unusual inputs: contradictory special ids, tables, encodings, archives, templates, prefixes, names, numbers.

If a command accepts an input, a line must describe the interpretation. If it refuses the input, the refusal is one line
that names the culprit. In both cases existing files do not change, and there is no traceback.
"""

import bz2
import gzip
import json
import lzma
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.numpy import load_file, save_file

from lab.faults import refusals
from lab.faults.refusals import DECODE, FROM_HF, TRAIN, Kind
from lab.faults.runs import Commands

Spoil = Callable[[Path], Any]
REFUSED, TAKEN, EITHER = (2,), (0,), (0, 2)
SHORT = (
    *(*TRAIN, "--set=train.steps=1", "--set=train.warmup_steps=0", "--set=data.dev="),
    *("--set=data.max_source=64", "--set=data.max_target=32"),
)
CSV = (*SHORT, "--set=data.task=csv", "--set=data.rows=delimiter", "--set=data.delimiter=;")
CSV_TRAIN = (*CSV, "--set=data.train={here}/t.csv")
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 990345061\n"
GOOD = b'{"source": "honey maps"}\n'
EXAMPLE = b'{"source": "honey maps", "targets": ["honey"]}\n'
TABLE = b"source,targets\nhoney maps,honey\nbells maps,bells\n"
CUT = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
BOM = b"\xef\xbb\xbf"


def _put(name: str, content: bytes) -> Spoil:
    """A change that writes a file in the trial's directory."""

    def spoil(here: Path) -> None:
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    return spoil


def _json(name: str, change: Callable[[Any], Any]) -> Spoil:
    """A change of a JSON file in place."""

    def spoil(here: Path) -> None:
        value = json.loads((here / name).read_text())
        change(value)
        (here / name).write_text(json.dumps(value))

    return spoil


def _tensors(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Spoil:
    def spoil(here: Path) -> None:
        path = here / "hf/model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return spoil


def _prefixed(prefix: str) -> Spoil:
    return _tensors(lambda tensors: {prefix + name: value for name, value in tensors.items()})


def _cast(dtype: str) -> Spoil:
    return _tensors(lambda tensors: {name: value.astype(dtype) for name, value in tensors.items()})


def _added(content: str, **more: Any) -> dict[str, Any]:
    """The entry of an added token of a tokenizer."""
    entry = {"id": 60, "content": content, "single_word": False, "lstrip": False, "rstrip": False}
    return entry | {"normalized": False, "special": True} | more


def _swap(tokenizer: dict[str, Any], one: str, other: str) -> None:
    """Exchanges the ids of two words in all places of a tokenizer."""
    words = tokenizer["model"]["vocab"]
    words[one], words[other] = words[other], words[one]
    for entry in tokenizer["added_tokens"]:
        entry["id"] = words[entry["content"]]
    for entry in tokenizer["post_processor"]["special_tokens"].values():
        entry["ids"] = [words[token] for token in entry["tokens"]]


def _replaced(name: str, *others: str) -> Spoil:
    """A change that copies the file `name` to each of the other names, and removes it."""

    def spoil(here: Path) -> None:
        content = (here / name).read_bytes()
        (here / name).unlink()
        for other in others:
            (here / other).write_bytes(content)

    return spoil


def _all(*spoils: Spoil) -> Spoil:
    def spoil(here: Path) -> None:
        for each in spoils:
            each(here)

    return spoil


def _linked_to_itself(here: Path) -> None:
    path = here / "hf/model.safetensors"
    path.unlink()
    path.symlink_to(path.name)


class Case(NamedTuple):
    """An input, as in the tables below; all fields except the first two are fields of `refusals.Kind`."""

    name: str
    what: Any  # its content, or a function that makes it
    words: tuple[str, ...]
    codes: tuple[int, ...]
    said: tuple[str, ...]
    more: tuple[str, ...] = ()  # arguments


Table = tuple[tuple[Any, ...], ...]  # one case in each entry

# The second line of a file to train on.
LINES: Table = (
    ("a key twice", b'{"source": "a", "source": "b", "targets": ["c"]}', ("train.jsonl:2",), EITHER, ()),
    ("NaN for the source", b'{"source": NaN, "targets": ["c"]}', ("train.jsonl:2",), REFUSED, ()),
    ("Infinity among the targets", b'{"source": "a", "targets": [Infinity]}', ("train.jsonl:2",), REFUSED, ()),
    ("an id of 1e400", b'{"id": 1e400, "source": "a", "targets": ["c"]}', ("train.jsonl:2", '"id"'), REFUSED, ()),
    ("single quotes", b"{'source': 'a', 'targets': ['c']}", ("train.jsonl:2", "not JSON"), REFUSED, ()),
    ("a comma at the end", b'{"source": "a", "targets": ["c"],}', ("train.jsonl:2", "not JSON"), REFUSED, ()),
    ("a comment", b'// {"source": "a"}', ("train.jsonl:2", "not JSON"), REFUSED, ()),
    ("a pointer of Git LFS", LFS, ("train.jsonl:2",), REFUSED, ()),
    ("objects for the targets", b'{"source": "a", "targets": {"0": "c"}}', ('"targets"',), REFUSED, ()),
    ("true for the source", b'{"source": true, "targets": ["c"]}', ('"source"',), REFUSED, ()),
    ("BOM within", BOM + EXAMPLE, ("train.jsonl:2",), EITHER, ()),
    ("JSON 900 deep", b'{"source": "a", "targets": ["c"], "x": ' + b"[" * 900 + b"]" * 900 + b"}", (), EITHER, ()),
    ("a source of zero-width spaces", '{"source": "\u200b\u200b", "targets": ["c"]}'.encode(), (), EITHER, ()),
    (
        "a target of U+FEFF",
        '{"source": "maps", "targets": ["\ufeff"]}'.encode(),
        ("train.jsonl",),
        EITHER,
        ("warning",),
    ),
    ("a target of </s>", b'{"source": "maps", "targets": ["</s>"]}', ("train.jsonl",), EITHER, ("warning",)),
    ("a target of <pad>", b'{"source": "maps", "targets": ["<pad> maps"]}', ("train.jsonl",), EITHER, ("warning",)),
    ("a target of unknown words", b'{"source": "maps", "targets": ["zzz"]}', ("train.jsonl",), EITHER, ("warning",)),
)
# Tables to train on.
TABLES: Table = (
    ("semicolons", b"source;targets\nhoney maps;honey\n", ("t.csv", "delimiter"), EITHER, ("t.csv",)),
    ("tabs", b"source\ttargets\nhoney maps\thoney\n", ("t.csv", "delimiter"), EITHER, ("t.csv",)),
    ("bars", b"source|targets\nhoney maps|honey\n", ("t.csv", "delimiter"), EITHER, ("t.csv",)),
    ("BOM", BOM + TABLE, (), TAKEN, ()),
    ("CR LF", TABLE.replace(b"\n", b"\r\n"), (), TAKEN, ()),
    ("CR alone", TABLE.replace(b"\n", b"\r"), ("t.csv",), EITHER, ()),
    ("UTF-16", TABLE.decode().encode("utf-16"), ("t.csv", "UTF-16"), REFUSED, ()),
    ("Windows-1252 on line 3", TABLE[:-6] + b"caf\xe9\n", ("t.csv:3", "UTF-8"), REFUSED, ()),
    ("NUL", TABLE[:-6] + b"a\x00b\n", ("t.csv:3",), EITHER, ()),
    ("a column too many", TABLE + b"a,b,c\n", ("t.csv:4",), REFUSED, ()),
    ("a column too many, skipped", TABLE + b"a,b,c\n", (), TAKEN, ("t.csv:4",), ("--skip-bad",)),
    ("spaces in the header", TABLE.replace(b"source,", b" source ,"), (), TAKEN, ()),
    ("upper case in the header", TABLE.replace(b"source,", b"Source,"), ('"source"',), REFUSED, ()),
    ("columns without a name", b"source,targets,,\nhoney maps,honey,,\n", ("t.csv",), EITHER, ()),
    ("the header again", TABLE + b"source,targets\n", (), EITHER, ()),
    ("an empty title", TABLE + b",honey\n", ("t.csv:4",), REFUSED, ()),
    ("an empty label", TABLE + b"maps,\n", ("t.csv",), EITHER, ("empty",)),
    ("a quote within", b'source,targets\nhoney "maps",honey\n', ("t.csv:2",), EITHER, ()),
    ("a line break within quotes", b'source,targets\n"honey\nmaps",honey\n', (), TAKEN, ()),
    ("a cell of 1 MB", b"source,targets\n" + b"maps " * 200_000 + b",honey\n", ("t.csv:2",), EITHER, ("cut",)),
    ("Excel's first line", b"sep=;\nsource;targets\nhoney maps;honey\n", ("t.csv",), EITHER, ()),
    ("a pointer of Git LFS", LFS, ("t.csv",), REFUSED, ()),
    ("a page of HTML", b"<!DOCTYPE html><html><body>404</body></html>\n", ("t.csv",), REFUSED, ()),
)
# Lines to decode, after a good line.
SOURCES: Table = (
    ("NaN", b'{"source": NaN}', ("in.jsonl:2",), REFUSED, ()),
    ("an id of 1e400", b'{"id": 1e400, "source": "maps"}', ("in.jsonl:2", '"id"'), REFUSED, ()),
    ("an id with a line break", b'{"id": "a\\nb", "source": "maps"}', ("in.jsonl:2",), EITHER, ()),
    ("an empty id", b'{"id": "", "source": "maps"}', ("in.jsonl:2",), EITHER, ()),
    ("an id of 1 MB", b'{"id": "' + b"i" * 1_000_000 + b'", "source": "maps"}', ("in.jsonl:2",), EITHER, ()),
    ("an id among a list", b'{"id": ["a"], "source": "maps"}', ('"id"',), REFUSED, ()),
    ("ids of floats", b'{"source_ids": [3.0, 4.0]}', ("in.jsonl:2", "source_ids"), REFUSED, ()),
    ("ids of nothing", b'{"source_ids": null}', ("in.jsonl:2",), REFUSED, ()),
    ("an id of 1e400 among ids", b'{"source_ids": [1e400]}', ("in.jsonl:2",), REFUSED, ()),
    ("ids in a list", b'{"source_ids": [[3, 4]]}', ("in.jsonl:2",), REFUSED, ()),
    ("BOM within", BOM + GOOD, ("in.jsonl:2",), EITHER, ()),
    ("UTF-32", '{"source": "maps"}'.encode("utf-32"), ("in.jsonl:2",), REFUSED, ()),
    ("a tail of NULs", bytes(4096), ("in.jsonl:2",), REFUSED, ()),
    ("zero-width spaces alone", '{"source": "\u200b"}'.encode(), ("in.jsonl:2",), EITHER, ()),
    ("two bad lines, skipped", b"[1]\n{}\n", (), TAKEN, ("in.jsonl:2",), ("--skip-bad",)),
)
# Files to decode, by name.
FILES: Table = (
    ("BOM", ("in.jsonl", BOM + GOOD), (), TAKEN, ()),
    ("gzip", ("in.jsonl.gz", gzip.compress(GOOD)), (), TAKEN, ()),
    ("text with the ending of gzip", ("in.jsonl.gz", GOOD), ("in.jsonl.gz",), EITHER, ()),
    ("gzip cut off", ("in.jsonl.gz", gzip.compress(GOOD * 999)[:-20]), ("in.jsonl.gz",), REFUSED, ()),
    ("gzip with a tail", ("in.jsonl.gz", gzip.compress(GOOD) + b"tail"), ("in.jsonl.gz",), EITHER, ()),
    ("gzip twice", ("in.jsonl.gz", gzip.compress(gzip.compress(GOOD))), ("in.jsonl.gz",), REFUSED, ()),
    ("gzip of nothing", ("in.jsonl.gz", b""), ("in.jsonl.gz",), REFUSED, ()),
    ("gzip without its ending", ("in.jsonl", gzip.compress(GOOD)), ("in.jsonl",), EITHER, ()),
    ("bzip2", ("in.jsonl.bz2", bz2.compress(GOOD)), ("in.jsonl.bz2",), EITHER, ()),
    ("bzip2 cut off", ("in.jsonl.bz2", bz2.compress(GOOD * 999)[:-20]), ("in.jsonl.bz2",), REFUSED, ()),
    ("xz", ("in.jsonl.xz", lzma.compress(GOOD)), ("in.jsonl.xz",), EITHER, ()),
    ("text with the ending of Zstandard", ("in.jsonl.zst", GOOD), ("in.jsonl.zst",), EITHER, ()),
    ("a table", ("in.csv", b"source\nhoney maps\n"), ("in.csv",), EITHER, ()),
    ("a table of semicolons", ("in.csv", b"id;source\n1;maps\n"), ("in.csv",), EITHER, ("in.csv",)),
    ("a table cut off in a quote", ("in.csv", b'source\n"honey'), ("in.csv",), REFUSED, ()),
    ("zeros with the marks of Parquet", ("in.parquet", b"PAR1" + bytes(64) + b"PAR1"), ("in.parquet",), REFUSED, ()),
    ("Parquet cut off", ("in.parquet", b"PAR1"), ("in.parquet",), REFUSED, ()),
    ("Parquet without its ending", ("in.jsonl", b"PAR1" + bytes(64) + b"PAR1"), ("in.jsonl",), REFUSED, ()),
    ("a pointer of Git LFS", ("in.jsonl", LFS), ("in.jsonl",), REFUSED, ()),
    ("spaces and a percent sign", ("a %s b.jsonl", GOOD), (), TAKEN, ()),
    ("braces", ("{x}.jsonl", GOOD), (), TAKEN, ()),
    ("another script", ("données ✓.jsonl", GOOD), (), TAKEN, ()),
    ("a line break", ("a\nb.jsonl", GOOD), ("b.jsonl",), EITHER, ()),
)
START = ("decoder_start_token_id",)
# Keys of config.json.
FACTS: Table = (
    ("an end token that the tokenizer lacks", {"eos_token_id": 2}, ("eos",), EITHER, ("eos",)),
    ("a pad token that the tokenizer lacks", {"pad_token_id": 3}, ("pad",), EITHER, ("pad",)),
    ("no end", {"eos_token_id": None}, ("eos",), EITHER, ()),
    ("a negative end token", {"eos_token_id": -1}, ("eos_token_id",), EITHER, ("eos_token_id",)),
    ("an end token as text", {"eos_token_id": "</s>"}, ("eos_token_id",), EITHER, ("eos_token_id",)),
    ("true for a pad token", {"pad_token_id": True}, ("pad_token_id",), EITHER, ("pad_token_id",)),
    ("a start token beyond the vocabulary", {"decoder_start_token_id": 64}, START, EITHER, START),
    ("a list for a width", {"d_model": [16]}, ("d_model",), REFUSED, ()),
    ("a fraction for a vocabulary", {"vocab_size": 64.0}, ("vocab_size",), REFUSED, ()),
    ("a word for a tie", {"tie_word_embeddings": "yes"}, ("tie_word_embeddings",), REFUSED, ()),
    ("a number for an activation", {"feed_forward_proj": 3}, ("feed_forward_proj",), REFUSED, ()),
    ("a list for a kind", {"model_type": ["t5"]}, ("model_type",), REFUSED, ()),
    ("no kind", {"model_type": None}, ("model_type",), EITHER, ()),
    ("an object for an epsilon", {"layer_norm_epsilon": {"a": 1}}, ("layer_norm_epsilon",), REFUSED, ()),
    ("weights of four bits", {"quantization_config": {"load_in_4bit": True}}, ("quantization_config",), EITHER, ()),
    ("an encoder alone", {"architectures": ["T5EncoderModel"]}, (), EITHER, ()),
)
# Keys of generation_config.json.
GENERATION: Table = (
    ("another end", {"eos_token_id": 3}, ("eos_token_id",), EITHER, ("eos_token_id",)),
    ("several ends", {"eos_token_id": [1, 3]}, ("eos_token_id",), REFUSED, ()),
    ("an end token in a list", {"eos_token_id": [1]}, ("eos_token_id",), EITHER, ()),
    ("another start", {"decoder_start_token_id": 5}, ("decoder_start_token_id",), EITHER, ("decoder_start_token_id",)),
    ("a start token as text", {"decoder_start_token_id": "<pad>"}, ("decoder_start_token_id",), REFUSED, ()),
    ("a start token beyond the vocabulary", {"decoder_start_token_id": 99}, ("decoder_start_token_id",), REFUSED, ()),
    ("a negative pad token", {"pad_token_id": -1}, ("pad_token_id",), EITHER, ()),
    ("an unknown key", {"nonsense": {"deep": [1]}}, (), TAKEN, ()),
)
# The tokenizer of a Hugging Face directory.
TOKENIZERS: Table = (
    ("the end token has a word's id", lambda t: _swap(t, "</s>", ";"), ("eos",), EITHER, ("eos",)),
    ("the pad token has a word's id", lambda t: _swap(t, "<pad>", ";"), START, EITHER, START),
    ("end and pad tokens exchanged", lambda t: _swap(t, "</s>", "<pad>"), ("eos",), EITHER, ("eos",)),
    ("an added word twice", lambda t: t["added_tokens"].append(_added("</s>", id=1)), ("tokenizer",), EITHER, ()),
    ("an added id beyond", lambda t: t["added_tokens"].append(_added("<x>", id=4096)), ("hf",), EITHER, ()),
    ("words without ids", lambda t: t["model"].update(vocab={"a": None}), ("{here}/hf",), REFUSED, ()),
    ("no model", lambda t: t.pop("model"), ("{here}/hf",), REFUSED, ()),
    ("an unknown model", lambda t: t["model"].update(type="Nonsense"), ("{here}/hf",), REFUSED, ()),
    ("it truncates at two tokens", lambda t: t.update(truncation=CUT), ("tokenizer",), EITHER, ()),
)
# The weights of a Hugging Face directory.
WEIGHTS: Table = (
    ("of torch.compile", _prefixed("_orig_mod."), (), TAKEN, ("_orig_mod.",)),
    ("of DataParallel", _prefixed("module."), (), TAKEN, ("module.",)),
    ("of PEFT", _prefixed("base_model.model."), (), TAKEN, ("base_model.model.",)),
    ("of two wrappers", _prefixed("module._orig_mod."), ("module._orig_mod.",), EITHER, ("_orig_mod.",)),
    ("of another model", _prefixed("bert.encoder."), ("model.safetensors",), EITHER, ("bert.encoder.",)),
    ("float16", _cast("float16"), (), TAKEN, ()),
    ("float64", _cast("float64"), ("F64",), EITHER, ()),
    ("complex", _cast("complex64"), ("model.safetensors",), REFUSED, ()),
    ("a pointer of Git LFS", _put("hf/model.safetensors", LFS), ("hf/model.safetensors", "LFS"), REFUSED, ()),
    ("a tokenizer as a pointer", _put("hf/tokenizer.json", LFS), ("{here}/hf", "tokenizer.json", "LFS"), REFUSED, ()),
    ("a config as a pointer", _put("hf/config.json", LFS), ("hf/config.json",), REFUSED, ()),
    ("of TensorFlow", _replaced("hf/model.safetensors", "hf/tf_model.h5"), ("tf_model.h5",), REFUSED, ()),
    (
        "of TensorFlow, with a Trainer's arguments",
        _replaced("hf/model.safetensors", "hf/tf_model.h5", "hf/training_args.bin"),
        ("tf_model.h5",),
        REFUSED,
        (),
    ),
    ("an adapter", _replaced("hf/model.safetensors", "hf/adapter_model.safetensors"), ("adapter",), REFUSED, ()),
    (
        "an index that is a list",
        _all(
            _replaced("hf/model.safetensors", "hf/s.safetensors"),
            _put("hf/model.safetensors.index.json", b'{"weight_map": ["s.safetensors"]}'),
        ),
        ("model.safetensors.index.json",),
        REFUSED,
        (),
    ),
    (
        "an index with a number for a file",
        _all(
            _replaced("hf/model.safetensors", "hf/s.safetensors"),
            _put("hf/model.safetensors.index.json", b'{"weight_map": {"shared.weight": 3}}'),
        ),
        ("model.safetensors.index.json",),
        REFUSED,
        (),
    ),
    (
        "a link in a circle",
        _linked_to_itself,
        ("model.safetensors",),
        REFUSED,
        (),
    ),
)
TITLED = b'{"title": "honey", "text": "maps", "targets": ["honey"]}\n'
# Files to train on through a template with the fields "title" and "text".
TEMPLATES: Table = (
    ("null in a field", TITLED + b'{"title": null, "text": "maps", "targets": ["honey"]}\n', (), TAKEN, ()),
    ("a field is absent", TITLED + b'{"text": "maps", "targets": ["honey"]}\n', (), TAKEN, ()),
    ("a blank field", TITLED + b'{"title": " ", "text": "maps", "targets": ["honey"]}\n', (), TAKEN, ()),
    ("null in all", TITLED + b'{"title": null, "text": null, "targets": ["honey"]}\n', ("train.jsonl:2",), REFUSED, ()),
    (
        "an object in a field",
        TITLED + b'{"title": {}, "text": "a", "targets": ["c"]}\n',
        ("train.jsonl:2",),
        REFUSED,
        (),
    ),
    ("braces in a field", TITLED + b'{"title": "{text}", "text": "a", "targets": ["c"]}\n', (), TAKEN, ()),
)
# Arguments of commands: good arguments, then unusual ones.
FLAGS: Table = (
    ("a method misspelt", ("decode", *DECODE, "--method=seqential"), ("did you mean sequential",), REFUSED, ()),
    (
        "a split misspelt",
        ("pipejax.offline.evaluation", "--checkpoint={here}/run", "--split=tset"),
        ("did you mean test",),
        REFUSED,
        (),
    ),
    ("a delimiter of two", ("train", *CSV, "--set=data.csv_delimiter=::"), ("data.csv_delimiter",), REFUSED, ()),
    (
        "empty targets in nonsense",
        ("train", *SHORT, "--set=data.empty_targets=no"),
        ("data.empty_targets",),
        REFUSED,
        (),
    ),
    ("shares with a sum above one", ("train", *SHORT, "--set=data.split=0.8,0.8"), ("data.split",), REFUSED, ()),
    ("shares of zero", ("train", *SHORT, "--set=data.split=0,0,0"), ("data.split",), REFUSED, ()),
    ("shares in words", ("train", *SHORT, "--set=data.split=most,few"), ("data.split",), REFUSED, ()),
    (
        "an unknown value for unique rows",
        ("decode", *DECODE, "--set=decode.unique_rows=2"),
        ("unique_rows",),
        REFUSED,
        (),
    ),
    (
        "another tokenizer than the start's",
        ("train", *SHORT, "--set=train.init_from={here}/run", "--set=data.tokenizer={here}/other"),
        ("data.tokenizer",),
        REFUSED,
        (),
    ),
    ("a device for data", ("train", *SHORT, "--set=data.train=/dev/null"), ("/dev/null",), REFUSED, ()),
    ("an output that is a device", ("decode", *DECODE, "--output=/dev/full"), ("/dev/full",), REFUSED, ()),
    (
        "an output in an unknown format",
        ("decode", *DECODE, "--output={here}/out.xlsx"),
        (".xlsx",),
        EITHER,
        (),
    ),
)


def _another_tokenizer(here: Path) -> None:
    """Writes a tokenizer that has none of the words of the data."""
    shutil.copytree(here / "tokenizer", here / "other")
    _json("other/tokenizer.json", lambda t: t["model"].update(vocab=_backwards(t["model"]["vocab"])))(here)


def _backwards(words: dict[str, int]) -> dict[str, int]:
    return {word if word.startswith("<") else word[::-1]: number for word, number in words.items()}


def _kinds() -> Iterator[Kind]:
    """Yields all cases as `refusals.many` tries them."""

    def kinds(family: str, table: Table, command: str, arguments: tuple[str, ...], make: Callable[[Any], Spoil]) -> Any:
        for case in (Case(*row) for row in table):
            name, given = f"{family}: {case.name}", (*arguments, *case.more)
            yield Kind(name, case.words, command, given, make(case.what), codes=case.codes, said=case.said)

    def changed(name: str) -> Callable[[Any], Spoil]:
        return lambda facts: _json(name, lambda value: value.update(facts))

    convert, template = "pipejax.convert.__main__", "--set=data.source_template={title} {text}"
    yield from kinds("line", LINES, "train", SHORT, lambda line: _put("train.jsonl", EXAMPLE + line))
    yield from kinds("template", TEMPLATES, "train", (*SHORT, template), lambda lines: _put("train.jsonl", 4 * lines))
    yield from kinds("table", TABLES, "train", CSV_TRAIN, lambda table: _put("t.csv", table))
    yield from kinds("source", SOURCES, "decode", DECODE, lambda line: _put("in.jsonl", GOOD + line))
    for row in FILES:
        place, _ = row[1]
        yield from kinds("file", (row,), "decode", (*DECODE, f"--input={{here}}/{place}"), lambda x: _put(*x))
    yield from kinds("config.json", FACTS, convert, FROM_HF, changed("hf/config.json"))
    yield from kinds("generation_config.json", GENERATION, convert, FROM_HF, changed("hf/generation_config.json"))
    yield from kinds("tokenizer", TOKENIZERS, convert, FROM_HF, lambda change: _json("hf/tokenizer.json", change))
    yield from kinds("weights", WEIGHTS, convert, FROM_HF, lambda spoil: spoil)
    for row in FLAGS:
        command, *arguments = row[1]
        yield from kinds("flags", (row,), command, tuple(arguments), lambda _: _another_tokenizer)


KINDS = tuple(_kinds())


def many(commands: Commands, scratch: Path) -> dict[str, Any]:
    """Tries all cases."""
    results = refusals.many(commands, scratch, KINDS)
    return {"taken": sum(result["code"] == 0 for result in results), **refusals.summary(results)}
