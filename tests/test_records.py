"""decode.py from end to end: lines of sources in, records out, in order, in batches of any size."""

import bz2
import contextlib
import csv
import dataclasses
import errno
import gzip
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest

import decode
import pipejax
from pipejax import checkpoint
from pipejax import config as config_lib
from pipejax.apps import demo
from pipejax.apps.teach import labels
from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, TrainConfig
from pipejax.data.lines import BadLines
from pipejax.decoding import Decoded, Segment
from pipejax.inference import programs, sources
from pipejax.inference.generator import Generator
from pipejax.inference.loading import load
from pipejax.methods import PipelinedMethod
from pipejax.offline import records, resume
from pipejax.system import cli, compile_cache
from pipejax.system.errors import UserError
from support import oracle
from support.refusals import refuses
from support.tiny import MODEL

ROOT = Path(__file__).parents[1]
PARAMS = oracle.random_params(MODEL, np.random.default_rng(314))  # varied, and far from ties
GRID = GridConfig(delay=1, time_max=12, sub_max=4)
KEYS = ["id", "text", "rows", "row_ids", "steps", "calls", "truncated", "method"]
# Notes of 1 to 15 and of 25 to 30 words, in random order, have two compiled shapes. SHORT notes share one.
NOTES = [demo.examples("test")[i].source.split() for i in range(20)]
TEXTS = [" ".join(note[: 25 + i % 6 if i % 3 == 1 else 1 + i * 7 % 15]) for i, note in enumerate(NOTES)]
SHORT = [text for text in TEXTS if len(text.split()) < 16]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, tokenizer_files):
    """The same random weights as a converted checkpoint, and as trained with either method."""
    root = tmp_path_factory.mktemp("checkpoints")
    for objective in ("none", "pipelined", "sequential"):
        data = DataConfig(task="none", separator=" ") if objective == "none" else DataConfig(task="demo")
        train, limits = TrainConfig(method=objective), DecodeConfig(max_length=16)
        config = Config(name=objective, model=MODEL, grid=GRID, data=data, train=train, decode=limits)
        checkpoint.save_params(root / objective, config, PARAMS, tokenizer_source=tokenizer_files)
    return root


@pytest.fixture(scope="module", autouse=True)
def opened_once(checkpoints):
    """Shares generators of equal checkpoint and settings, which avoids compilation."""
    known = dict[tuple[Any, ...], Generator]()

    def load_once(path, *, best=False, overrides=(), where="--set", method=None, adapters=None):
        assert adapters is None
        key = str(path), best, str(overrides), method
        known[key] = known.get(key) or load(path, best=best, overrides=overrides, where=where, method=method)
        known[key]._logged.clear()  # a generator that is opened has not warned yet
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipejax.inference.loading.load", load_once)
        yield


def as_lines(values) -> str:
    return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)


def run(*flags) -> tuple[list[str], str]:
    """The lines that `python decode.py` with these flags writes to standard output, and its standard error."""
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as caught:
        cli.run(decode.main, [str(flag) for flag in flags])
    assert caught.value.code == 0, err.getvalue()
    written: Any = out.buffer
    return written.getvalue().decode().splitlines(), err.getvalue()


@pytest.fixture
def decoded(checkpoints, tmp_path):
    """Decodes values, or the bytes of a file, with a checkpoint; returns records and standard error."""

    def decode_values(values, *flags, model="none"):
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_bytes(values if isinstance(values, bytes) else as_lines(values).encode())
        out, err = run("--checkpoint", checkpoints / model, "--input", source, "--output", target, *flags)
        assert out == []
        return [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()], err

    return decode_values


@contextlib.contextmanager
def interrupted_after(count):
    """Interrupts after this many records are written."""
    write, left = resume.write_whole, [count]

    def cut(*given):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        write(*given)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(resume, "write_whole", cut)
        yield


def without_ids(found):
    return [{key: value for key, value in record.items() if key != "id"} for record in found]


@pytest.mark.slow
def test_records_equal_the_oracle(decoded, tokenizer):
    """Texts get an eos, ids are used unchanged; fields, rows, steps and truncation equal Algorithm 1 in plain lists."""
    ids = [tokenizer.encode(text) for text in SHORT[:6]]
    values = [{"id": f"t{i}", "source": text} for i, text in enumerate(SHORT[:6])]
    values += [{"id": f"e{i}", "source_ids": [*x, 1]} for i, x in enumerate(ids)]
    values += [{"id": f"i{i}", "source_ids": x} for i, x in enumerate(ids)]
    grids, _ = decoded(values, model="pipelined")
    chains, _ = decoded(values, model="sequential")
    assert [r["id"] for r in grids] == [r["id"] for r in chains] == [v["id"] for v in values]
    for found in (grids, chains):
        assert all(list(record) == KEYS for record in found)
        assert without_ids(found[:6]) == without_ids(found[6:12])
        assert without_ids(found[:6]) != without_ids(found[12:])
    for source, grid, chain in zip([*[[*x, 1] for x in ids], *ids], grids[6:], chains[6:], strict=True):
        encoded = oracle.encode(PARAMS, MODEL, source)
        said = oracle.sequential(PARAMS, MODEL, encoded, 16)
        text = tokenizer.decode(said.tokens)
        rows = [row.strip() for row in text.split(";") if row.strip()]
        counts = [said.steps, said.steps]
        expected = [text, rows, [said.tokens], *counts, said.truncated, "sequential"]
        assert [chain[k] for k in KEYS[1:]] == expected
        chosen = oracle.grid_next_tokens(PARAMS, MODEL, encoded, 1)
        drawn = oracle.algorithm1(chosen, delay=1, time_max=12, sub_max=4, stop="empty_row")
        rows = [tokenizer.decode(row) for row in drawn.rows]
        counts = [drawn.steps, drawn.calls]
        expected = [" ; ".join(rows), rows, drawn.rows, *counts, drawn.truncated, "pipelined"]
        assert [grid[k] for k in KEYS[1:]] == expected
    assert {len(r["rows"]) for r in chains} > {1}  # some were split at the separator
    assert len({len(r["rows"]) for r in grids}) > 2


def test_rows_contain_no_eos_and_no_empty_rows(decoded):
    """With the stop `literal`, rows continue after an empty one."""
    found, _ = decoded([{"source": text} for text in SHORT], "--set", "grid.stop=literal", model="pipelined")
    rows = [row for record in found for row in record["row_ids"]]
    assert len(rows) > len(found) and all(row and 1 not in row for row in rows)
    assert all(len(record["rows"]) == len(record["row_ids"]) for record in found)


@pytest.mark.slow
@pytest.mark.parametrize("model, texts", [("pipelined", TEXTS), ("none", SHORT)], ids=["pipelined", "sequential"])
def test_records_do_not_depend_on_the_batch(decoded, model, texts):
    """Records have the order of the input, and are equal alone and with other lines, with little or much padding."""
    values = [{"source": text} for text in texts]
    found = {size: decoded(values, "--batch-size", size, model=model)[0] for size in (1, 3, 8)}
    assert [record["id"] for record in found[1]] == [str(i + 1) for i in range(len(values))]
    assert found[1] == found[3] == found[8] == decoded(values, model=model)[0]
    assert len({json.dumps(record["row_ids"]) for record in found[1]}) > 5
    assert without_ids(decoded(values[::-1], model=model)[0]) == without_ids(found[1][::-1])


def test_files_with_usual_irregularities_are_read(decoded):
    clean, _ = decoded([{"source": text} for text in SHORT])
    lines = as_lines([{"source": text} for text in SHORT]).splitlines()
    windows = "\ufeff" + "\r\n".join(["", lines[0], "  ", "", *lines[1:]])  # no newline at the end
    found, _ = decoded(windows.encode())
    assert without_ids(found) == without_ids(clean)
    assert [record["id"] for record in found] == ["2", *(str(i + 4) for i in range(1, len(SHORT)))]
    marked, _ = decoded(("\ufeff" + "\n".join(lines)).encode())
    assert marked == clean


def test_ids_are_returned_unchanged(decoded):
    ids = [7, "7", "", None, -1, 2**70, "Grüße 👋\n", "x" * 5000, 0]
    values = [{"id": i, "source": "the baker sang ."} for i in ids] + [{"source": "the baker sang .", "more": [1]}]
    found, _ = decoded(values)
    assert [record["id"] for record in found] == [7, "7", "", "4", -1, 2**70, "Grüße 👋\n", "x" * 5000, 0, "10"]


def test_records_without_a_tokenizer_have_ids_only(checkpoints, decoded, tokenizer):
    bare = checkpoints / "bare"
    shutil.copytree(checkpoints / "pipelined", bare, ignore=shutil.ignore_patterns("tokenizer"))
    values = [{"source_ids": [*tokenizer.encode(text), 1]} for text in SHORT]
    for strategy in ("pipelined", "sequential"):
        found, err = decoded(values, "--method", strategy, model="bare")
        full, _ = decoded(values, "--method", strategy, model="pipelined")
        assert found == [record | {"text": None, "rows": None} for record in full]
        assert all(list(record) == KEYS for record in found) and f"{len(SHORT)} examples" in err


@pytest.mark.parametrize(
    "model, flag, used, warnings",
    [
        ("none", None, "sequential", 0),
        ("none", "sequential", "sequential", 0),
        ("none", "pipelined", "pipelined", 1),
        ("pipelined", None, "pipelined", 0),
        ("pipelined", "sequential", "sequential", 1),
        ("sequential", None, "sequential", 0),
        ("sequential", "pipelined", "pipelined", 1),
    ],
)
def test_method_is_chosen_by_flag(decoded, model, flag, used, warnings):
    found, err = decoded([{"source": SHORT[2]}] * 8, *(["--method", flag] if flag else []), model=model)
    lines = err.splitlines()
    warned = [line for line in lines if line.startswith("warning: ")]
    assert len(warned) == warnings and all(used in line for line in warned)
    assert len(lines) == warnings + 3 and all(line.startswith(f"{used}: ") for line in lines[warnings:])
    assert (len(found[0]["row_ids"]) == 1) == (used == "sequential")


@pytest.mark.parametrize(
    "model, setting, warned",
    [
        ("pipelined", "grid.delay=2", "warning: grid.delay: found 2, but these weights were trained with 1; "),
        ("pipelined", 'grid.row_names=["a"]', "warning: grid.row_names: found ('a',), but these weights were trained"),
        ("sequential", "grid.delay=2", ""),  # it has no rows
        ("pipelined", "grid.sub_max=5", ""),  # bounds are free
    ],
)
def test_changed_grid_is_reported(checkpoints, caplog, model, setting, warned):
    opened = load(checkpoints / model, overrides=[setting])
    for _ in range(2):
        opened.make_strategy(opened.default_method)
    told = [f"{record.levelname.lower()}: {record.getMessage()}" for record in caplog.records]
    assert len(told) == bool(warned) and all(line.startswith(warned) for line in told)


@pytest.mark.slow
def test_settings_apply_and_truncation_is_reported(decoded, tokenizer):
    values, seen = [{"source": text} for text in SHORT], Counter[str | None]()
    encoded = [oracle.encode(PARAMS, MODEL, [*tokenizer.encode(text), 1]) for text in SHORT[:3]]
    for delay, time_max, sub_max, mark in ((3, 12, 4, " # "), (1, 4, 4, " ; "), (1, 30, 1, " ; ")):
        bounds = {
            "grid.delay": delay,
            "grid.time_max": time_max,
            "grid.sub_max": sub_max,
            "data.separator": f"'{mark}'",
        }
        found, err = decoded(values, *(f"--set={key}={x}" for key, x in bounds.items()), model="pipelined")
        for one, record in zip(encoded, found, strict=False):
            chosen = oracle.grid_next_tokens(PARAMS, MODEL, one, delay)
            drawn = oracle.algorithm1(chosen, delay=delay, time_max=time_max, sub_max=sub_max, stop="empty_row")
            found_here = [record[k] for k in KEYS[3:-1]]
            assert found_here == [drawn.rows, drawn.steps, drawn.calls, drawn.truncated]
        assert all(record["text"] == mark.join(record["rows"]) for record in found)
        told = Counter(record["truncated"] for record in found if record["truncated"])
        cuts = ", ".join(f"{count} by {name}" for name, count in sorted(told.items())) or "none"
        assert f"\npipelined: truncated: {cuts}; sources cut at data.max_source: 0\n" in err
        seen.update(record["truncated"] for record in found)
    found, err = decoded(values, "--set", "decode.max_length=6")
    assert all(record["steps"] <= 6 and len(record["row_ids"][0]) <= 6 for record in found)
    cut = sum(record["truncated"] == "max_length" for record in found)
    assert cut and f"truncated: {cut} by max_length;" in err
    seen.update(record["truncated"] for record in found)
    assert seen.keys() == {None, "time_max", "sub_max", "max_length"}


def test_summary_has_steps_and_times(decoded, tokenizer):
    """It has measured and ideal steps, examples per second, and compilation; standard error has nothing else."""
    for model, name in (("pipelined", "pipelined"), ("sequential", "sequential")):
        found, err = decoded([{"source": text} for text in TEXTS], model=model)
        steps = np.mean([record["steps"] for record in found])
        if name == "pipelined":
            rows = [[len(row) for row in record["row_ids"]] for record in found]
            grid, chain = steps, np.mean([sum(lengths) + max(len(lengths) - 1, 0) + 1 for lengths in rows])
        else:
            rows = [[len(tokenizer.encode(row)) for row in record["rows"]] for record in found]
            grid, chain = np.mean([oracle.pipelined_steps(lengths, 1, 99, 999) for lengths in rows]), steps
        first, second, third = err.splitlines()
        assert re.fullmatch(
            rf"{name}: 20 examples, \d+\.\d\d examples/s \(compilation left out: \d+\.\d s for \d shapes\)", first
        )
        ratio = f"ideal step ratio sequential/pipelined {chain / grid:.2f} ({chain:.1f} / {grid:.1f})"
        assert second == f"{name}: {steps:.1f} steps on average; {ratio}"
        assert third.startswith(f"{name}: truncated: ")


def test_an_over_long_source_is_cut(decoded, tokenizer):
    ids, most = [tokenizer.encode(text) for text in SHORT], 8
    short = [{"source_ids": [*x[: most - 1], 1] if len(x) >= most else [*x, 1]} for x in ids]
    found, err = decoded([{"source": text} for text in SHORT], "--set", f"data.max_source={most}")
    assert found == decoded(short)[0]
    cut = sum(len(x) >= most for x in ids)
    assert 0 < cut < len(ids) and f"sources cut at data.max_source: {cut}\n" in err


def test_an_older_output_is_replaced_whole(decoded, tmp_path):
    (tmp_path / "out.jsonl").write_text("old\n" * 10_000)
    assert len(decoded([{"source": text} for text in SHORT])[0]) == len(SHORT)


def test_repeated_ids_are_reported(decoded):
    found, err = decoded([{"id": name, "source": SHORT[0]} for name in ("a", "b", "a")])
    assert [record["id"] for record in found] == ["a", "b", "a"]
    assert "some ids are not unique, such as a" in err
    assert "unique" not in decoded([{"source": SHORT[0]}] * 3)[1]


def test_damaged_step_is_skipped(checkpoints, decoded, tmp_path):
    shutil.copytree(checkpoints / "none", tmp_path / "run")
    shutil.copytree(tmp_path / "run/checkpoints/0/params", tmp_path / "run/checkpoints/7/params")
    _, err = decoded([{"source": SHORT[0]}], model=tmp_path / "run")
    assert f"warning: {tmp_path}/run/checkpoints/7: damaged, manifest" in err
    assert f"{tmp_path}/run/checkpoints/0: used instead, as the newest intact step" in err


def test_standard_output_has_only_records(checkpoints, decoded, tmp_path):
    expected, _ = decoded([{"source": text} for text in SHORT])
    out, err = run("--checkpoint", checkpoints / "none", "--input", tmp_path / "in.jsonl", "--output", "-")
    assert [json.loads(line) for line in out] == expected and len(err.splitlines()) == 3


def test_lengths_share_a_handful_of_compiled_programs(checkpoints, tmp_path, monkeypatch):
    """Compiled programs are not compiled again."""
    compiled = []

    def nothing(model, strategy, weights, memory, carry, *more, sizes, slots, backend):
        compiled.append(memory.mask.shape)
        none = jnp.zeros(len(memory.mask), jnp.int32)
        decoded = Decoded(tokens=none[:, None, None], lengths=none[:, None], steps=none, truncated=none)
        return Segment(over=none[0] == 0, decoded=decoded, carry=none)

    monkeypatch.setattr(programs, "decode_batch", nothing)
    generator = pipejax.load(str(checkpoints / "none"), overrides=["decode.max_length=99"])
    (tmp_path / "in.jsonl").write_text(as_lines({"source_ids": [5] * length} for length in range(1, 43)))
    for again in (False, True):
        flags = str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")
        report = records.decode_file(generator, *flags, method=None, batch_size=4)
        assert report.examples == 42
        assert compiled == [(4, 64)]  # one decoder for all; the last batch is filled up
        assert (report.shapes, report.compile_seconds == 0) == ((0, True) if again else (1 + 4, False))


def test_python_gives_the_same_records(checkpoints, decoded, tokenizer, monkeypatch):
    generator = pipejax.load(checkpoints / "pipelined")
    for strategy, texts in ((None, TEXTS), ("sequential", SHORT)):
        flags = ["--method", strategy] if strategy else []
        expected, _ = decoded([{"source": text} for text in texts], *flags, model="pipelined")
        expected = [record | {"id": i} for i, record in enumerate(expected)]
        assert generator.decode(texts, method=strategy) == expected
        monkeypatch.setattr(programs, "decode_batch", None)  # any further compilation fails
        assert generator.decode(iter(texts), method=strategy, batch_size=8) == expected
        ids = [np.asarray([*tokenizer.encode(text), 1]) for text in texts]
        assert generator.decode(ids, method=strategy) == expected
        monkeypatch.undo()
    assert generator.decode([]) == []
    assert generator.decode([{"source": SHORT[0], "id": "x"}]) == [generator.decode(SHORT[:1])[0] | {"id": "x"}]


@pytest.mark.parametrize(
    "given, found",
    [
        ("a text", "a text"),
        ({"source": ["a"]}, r"one record \(dict\)"),
        (SimpleNamespace(columns=["source"]), r"namespace\(columns=\['source'\]\)"),
        (5, "5"),
    ],
)
def test_python_refuses_values_that_iterate_over_column_names(checkpoints, given, found):
    with pytest.raises(UserError, match=f"sources: found {found}; expected a list"):
        load(checkpoints / "none").decode(given)


@pytest.mark.slow
def test_lists_of_all_lengths_share_a_few_programs(checkpoints, monkeypatch):
    """Warmed-up lengths compile nothing."""
    opened = []
    monkeypatch.setattr(compile_cache, "use_cache", lambda: opened.append(1))
    generator = load(checkpoints / "pipelined")
    assert opened  # the cache on disk, as in the commands
    for count in range(1, 9):
        assert len(generator.decode([SHORT[0]] * count)) == count
    batches = {key[2][1] for key in generator.programs._compiled}
    assert batches == {1, 2, 4, 8}
    fresh = load(checkpoints / "pipelined")
    took = fresh.warm_up([16, 40], batch_sizes=(1, 2))
    assert took.shapes == len(fresh.programs._compiled) > 4
    monkeypatch.setattr(programs, "decode_batch", None)  # any further compilation fails
    monkeypatch.setattr(programs, "encode_batch", None)
    assert fresh.decode([[5] * 16, [6] * 10]) and fresh.decode([[5] * 40])
    asked = []
    monkeypatch.setattr(fresh.programs, "warm_up", lambda chosen, *, options, **shape: asked.append(shape))
    report = fresh.warm_up([10**6], batch_sizes=(500,))  # limited as in `decode`: cut sources, small batches
    assert asked == [{"batch_size": 8, "length": fresh.config.data.max_source, "report": report, "adapter": None}]


def test_named_pipe_is_read(checkpoints, decoded, tmp_path):
    expected, _ = decoded([{"source": text} for text in SHORT])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(as_lines({"source": text} for text in SHORT),))
    writer.start()
    out, _ = run("--checkpoint", checkpoints / "none", "--input", pipe, "--output", "-")
    writer.join()
    assert [json.loads(line) for line in out] == expected


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_full_disk_raises_one_line(checkpoints, decoded, tmp_path):
    decoded([{"source": text} for text in SHORT])
    generator, source = load(checkpoints / "none"), str(tmp_path / "in.jsonl")
    with pytest.raises(UserError, match=r"--output /dev/full: cannot be written \(No space left"):
        records.decode_file(generator, source, "/dev/full", method=None, batch_size=None)


TEMPLATE = {"task": "jsonl", "source_template": "Question: {question} Context: {context}"}
SUMMARIZE = {"task": "csv", "source_template": "summarize: {source}", "rows": "delimiter"}
ASKED = {"question": "who sang it", "context": "It was  sung."}


@pytest.mark.parametrize(
    ("data", "value", "read"),
    [
        (TEMPLATE, ASKED, "Question: who sang it Context: It was  sung."),
        (TEMPLATE, {"source": "as it is"}, "as it is"),
        (TEMPLATE, {**ASKED, "source": "web"}, "Question: who sang it Context: It was  sung."),  # as in training
        (TEMPLATE, {"question": "who"}, "Question: who Context: "),
        (TEMPLATE, {"question": None, "context": " a "}, "Question:  Context:  a "),
        (TEMPLATE, {"question": float("nan"), "context": "a"}, "Question:  Context: a"),
        (TEMPLATE, {"question": "who", "contxt": "a"}, 'found no "context"; expected one.*did you mean "contxt"'),
        (TEMPLATE, {"question": "who", "Context": "a"}, 'found no "context"; expected one.*did you mean "Context"'),
        (TEMPLATE, {"question": "\t", "context": None}, '"question", "context": found an empty text'),
        (TEMPLATE, {"passage": "a"}, 'found no "question"; expected one'),
        (TEMPLATE, {**ASKED, "context": 3}, '"context": found the number 3'),
        (SUMMARIZE, {"source": "a"}, "summarize: a"),
        ({"task": "jsonl"}, {"source": "a"}, "a"),
        ({"task": "none"}, {"source": "a"}, "a"),  # converted weights
        ({"task": "demo"}, {"source": "a"}, "a"),
        ({"task": "msqa"}, ASKED, "Question: who sang it Context: It was sung."),
        ({"task": "kp20k"}, {"title": "``T''", "abstract": "<digit> owls"}, 'Title: "T" Context: # owls'),
        ({"task": "cnn_dailymail"}, {"article": "a b"}, "summarize: a b"),
        ({"task": "cnn_dailymail"}, {"source": "``a''"}, "``a''"),
        ({"task": "msqa"}, {"question": "who"}, 'found no "context"'),
        ({"task": "msqa"}, {"question": ["who"], "context": "a"}, '"question": found a list'),
    ],
    ids=str,
)
def test_fields_are_read_as_in_training(data, value, read):
    config, value = Config(data=DataConfig(**data)), {"id": "1", **value}
    if read.startswith(("found", '"')):
        with pytest.raises(UserError, match=f"FILE:7: {read}"):
            sources.of_record(value, "FILE:7", 7, config)
    else:
        assert sources.of_record(value, "FILE:7", 7, config)[:2] == ("1", read)


def test_resume_continues_after_the_last_whole_record(checkpoints, decoded, tmp_path):
    """The output has the bytes of an uninterrupted run, also if a kill cut a line; the note is removed at the end."""
    values = [{"id": f"t{i}", "source": text} for i, text in enumerate(SHORT)]
    decoded(values, model="pipelined")
    target = tmp_path / "out.jsonl"
    whole = target.read_bytes()
    assert not (tmp_path / "out.jsonl.unfinished").exists()
    lines, resume, stop = whole.splitlines(keepends=True), tmp_path / "out.jsonl.unfinished", 3
    flags = "--checkpoint", checkpoints / "pipelined", "--input", tmp_path / "in.jsonl", "--output", target

    for tail in (b"", lines[stop][:9]):
        with interrupted_after(stop):
            decode.main([str(flag) for flag in flags])
        assert target.read_bytes() == b"".join(lines[:stop]) and resume.exists()
        target.write_bytes(target.read_bytes() + tail)
        _, err = run(*flags, "--resume")
        assert target.read_bytes() == whole and not resume.exists()
        assert f"{len(SHORT) - stop} examples" in err
    (tmp_path / "new.jsonl").unlink(missing_ok=True)
    run(*flags[:-1], tmp_path / "new.jsonl", "--resume")  # there is nothing to resume: it starts from the beginning
    assert (tmp_path / "new.jsonl").read_bytes() == whole


def test_the_note_of_an_output_outlives_its_work(checkpoints, tmp_path, monkeypatch):
    """It is valid from the first kept record until the output is on the disk, whenever a kill happens."""
    source, target, note = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "out.jsonl.unfinished"))
    source.write_text(as_lines({"source": text} for text in SHORT[:3]))
    generator = load(checkpoints / "none")
    more = {"method": None, "batch_size": None, "resume": True}
    work = partial(records.decode_file, generator, str(source), str(target), **more)
    work()
    lines = target.read_bytes().splitlines(keepends=True)
    checked = list(records.read_sources(generator, records.read_records(source), "sequential"))
    settings = resume.settings_of(generator, "sequential", checked)
    assert settings["decode.dtype"] == "float32"  # not "auto", which depends on the machine
    target.write_bytes(lines[0])
    note.write_text(json.dumps(settings))
    seen, sync_output = [], resume.sync_output

    def killed(place):
        seen.append(json.loads(note.read_text()))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(resume, "writing", killed)
        work()
    assert seen == [settings]

    def synced(path):
        seen.append(json.loads(note.read_text()))
        sync_output(path)

    monkeypatch.setattr(resume, "sync_output", synced)
    work()
    assert seen[1:] == [settings] and not note.exists() and target.read_bytes() == b"".join(lines)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda root: (root / "out.jsonl.unfinished").unlink(), "found no out.jsonl.unfinished in"),
        (
            lambda root: (root / "out.jsonl").write_text('{"id": "b"}\n'),
            "out.jsonl:1: found a line that is not the record of this source; expected the id '1'",
        ),
        (
            lambda root: (root / "in.jsonl").write_text(as_lines([{"source": "x"}] * 3)),
            "found answers to another --input",
        ),
        (lambda root: (root / "out.jsonl").write_text("{}\n" * 9), "out.jsonl:1: found a line that is not the record"),
    ],
)
def test_resume_refuses_output_of_other_settings(checkpoints, tmp_path, spoil, words):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(as_lines({"source": text} for text in SHORT[:3]))
    generator = load(checkpoints / "none")
    checked = list(records.read_sources(generator, records.read_records(source), "sequential"))
    target.write_text(as_lines([{"id": "1"}]))
    settings, ids = resume.settings_of(generator, "sequential", checked), [source.id for source in checked]
    (tmp_path / "out.jsonl.unfinished").write_text(json.dumps(settings))

    def kept(settings):
        output = resume.Unfinished(str(target), settings)
        output.resume(ids)
        return output.records, output.size

    assert kept(settings) == (1, target.stat().st_size)
    nested = {key: value for key, value in settings.items() if key.startswith("grid.") and key != "grid.row_names"}
    older = {key: value for key, value in settings.items() if not key.startswith("grid.")}
    older["grid"] = {key.removeprefix("grid."): value for key, value in nested.items()}
    (tmp_path / "out.jsonl.unfinished").write_text(json.dumps(older))  # of a version without this key
    assert kept(settings) == (1, target.stat().st_size)
    older = {"strategy" if key == "--method" else key: value for key, value in settings.items()}
    (tmp_path / "out.jsonl.unfinished").write_text(json.dumps(older))  # of a version with the key "strategy"
    assert kept(settings) == (1, target.stat().st_size)
    with pytest.raises(UserError, match="found --method = 'sequential'; expected 'pipelined'"):
        kept(settings | {"--method": "pipelined"})
    spoil(tmp_path)
    before = target.read_bytes()
    with pytest.raises(UserError, match=words):
        records.decode_file(generator, str(source), str(target), method=None, batch_size=None, resume=True)
    assert target.read_bytes() == before
    with pytest.raises(UserError, match="--resume: found --input - "):
        records.check_paths("-", str(target), resume=True)


class OwnRows(PipelinedMethod):
    """A custom method with a setting that is a section."""

    name = "own_rows"


@pytest.mark.parametrize("nested", [False, True], ids=["present", "of an older release"])
def test_output_of_a_method_with_a_section_is_resumed(nested: bool, tmp_path: Path) -> None:
    own, target, note = OwnRows(GRID), tmp_path / "out.jsonl", tmp_path / "out.jsonl.unfinished"

    def settings(method: OwnRows) -> dict[str, object]:
        return resume.settings_of(Generator(Config(model=MODEL, method=method), PARAMS, None), "own_rows", [])

    noted = settings(own)
    if nested:  # {"method": {"class": ..., "grid": {"delay": ...}}}
        noted = {key: value for key, value in noted.items() if not key.startswith("method.")}
        noted["method"] = config_lib.described(own)
    note.write_text(json.dumps(noted))
    target.write_text(as_lines([{"id": "1"}]))
    output = resume.Unfinished(str(target), settings(own))
    output.resume(["1", "2"])
    assert output.records == 1
    other = resume.Unfinished(str(target), settings(OwnRows(dataclasses.replace(GRID, delay=2))))
    with pytest.raises(UserError, match=r"found method\.grid\.delay = 1; expected 2"):
        other.resume(["1", "2"])


def test_compressed_lines_and_parquet_are_read(checkpoints, decoded, tmp_path):
    values = [{"id": f"t{i}", "source": text} for i, text in enumerate(SHORT)]
    expected, _ = decoded(values)
    assert decoded(gzip.compress(as_lines(values).encode()))[0] == expected  # for any name
    flags = "--checkpoint", checkpoints / "none", "--output", tmp_path / "out.jsonl"
    table = pyarrow.Table.from_pylist(values)
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet", row_group_size=4)
    run(*flags, "--input", tmp_path / "in.parquet")
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == expected
    for name, content, words in (
        ("cut.jsonl.gz", gzip.compress(as_lines(values).encode())[:-20], "damaged gzip data"),
        ("bad.gz", b"\x1f\x8b" + b"x" * 40, "damaged gzip data"),
        ("bad.parquet", b"PAR1" + b"x" * 40, "not Parquet, or damaged"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name}.*: {words}"):
            list(records.read_records(tmp_path / name))
    for kind in (pyarrow.ArrowNotImplementedError, pyarrow.ArrowKeyError):  # neither OSError nor ValueError

        def refuse(path, kind=kind):
            raise kind("not that")

        damaged = pytest.raises(UserError, match=r"in\.parquet: not Parquet, or damaged")
        with pytest.MonkeyPatch.context() as patch, damaged:
            patch.setattr(pyarrow.parquet, "ParquetFile", refuse)
            list(records.read_records(tmp_path / "in.parquet"))


def as_cells(record):
    """A record as a row of CSV: null is empty, and lists are JSON."""
    cells = {key: json.dumps(x, ensure_ascii=False) if isinstance(x, list) else x for key, x in record.items()}
    return {key: "" if value is None else str(value) for key, value in cells.items()}


def test_tables_are_read_and_written(checkpoints, decoded, tmp_path):
    """CSV, TSV and Parquet as input and output have the content of lines of JSON."""
    values = [{"id": f"t{i}", "source": f'{text} ; "x"\n' if i == 2 else text} for i, text in enumerate(SHORT[:5])]
    flags = "--set", "decode.scores=true", "--checkpoint", checkpoints / "pipelined"
    expected, _ = decoded(values, *flags)
    for name, delimiter, pack in (
        ("in.csv", ",", bytes),
        ("in.csv", ";", gzip.compress),
        ("in.tsv.bz2", "\t", bz2.compress),
    ):
        text = io.StringIO()
        rows = csv.DictWriter(text, ["source", "id", "note"], delimiter=delimiter)
        rows.writeheader()
        rows.writerows([value | {"note": "a, b; c"} for value in values])
        (tmp_path / name).write_bytes(pack(text.getvalue().encode()))
        read = [*flags, "--set=data.csv_quotes=quote"] if ".tsv" in name else flags
        _, err = run(*read, "--input", tmp_path / name, "--output", tmp_path / "from.jsonl")
        assert [json.loads(line) for line in (tmp_path / "from.jsonl").read_text().splitlines()] == expected
        assert ("columns are separated by ';'" in err) == (delimiter == ";")
    given = "--input", tmp_path / "in.jsonl"
    for name, delimiter in (("out.csv", ","), ("out.TSV", "\t")):
        run(*flags, *given, "--output", tmp_path / name)
        with (tmp_path / name).open(newline="") as file:
            assert list(csv.DictReader(file, delimiter=delimiter)) == [as_cells(record) for record in expected]
    (tmp_path / "out.parquet").write_text("older")
    run(*flags, *given, "--output", tmp_path / "out.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist() == expected
    assert not list(tmp_path.glob("*.records*")) and not list(tmp_path.glob(".*"))
    # Ids of several kinds are texts in a column, only whole numbers are numbers; a trace is JSON.
    for ids, column in (([7, 3], [7, 3]), ([7, "b", 2**70], ["7", "b", str(2**70)]), ([1, None, 2], ["1", "2", "2"])):
        lines = [{"id": name, "source": SHORT[0]} for name in ids]
        (tmp_path / "in.jsonl").write_text(as_lines(lines))
        run("--checkpoint", checkpoints / "none", *given, "--output", tmp_path / "ids.parquet")
        assert pyarrow.parquet.read_table(tmp_path / "ids.parquet").column("id").to_pylist() == column


@pytest.mark.parametrize("skip_bad", [False, True])
def test_each_line_of_a_tsv_is_a_source(checkpoints, tmp_path, skip_bad):
    """Labels are read too; a CSV whose rows are lost in a quote is refused, and none of its lines is answered."""
    lines = [f"r{i}\tthe baker {i}" for i in range(40)]
    lines[3], lines[30], lines[35] = 'r3\t"the baker', 'r30\tsang"', 'r35\tthe 12" baker'
    (tmp_path / "in.tsv").write_text("\n".join(["id\tsource", *lines]))
    generator, bad = load(checkpoints / "none"), BadLines("in", skip=skip_bad)
    checked = records._check_whole(generator, str(tmp_path / "in.tsv"), "sequential", bad)
    assert [(source.id, source.content) for source in checked] == [tuple(line.split("\t")) for line in lines]
    assert labels.read_unlabelled(generator, str(tmp_path / "in.tsv")) == checked
    (tmp_path / "in.csv").write_text("\n".join(["id,source", *lines]).replace("\t", ","))
    table = str(tmp_path / "in.csv")
    for read in (
        lambda own: records._check_whole(own, table, "sequential", bad),
        lambda own: labels.read_unlabelled(own, table),
    ):
        with pytest.raises(UserError, match=r"in\.csv:5: found a quoted cell .* rows in lines 5 to 32"):
            read(generator)
        letters = load(checkpoints / "none", overrides=["data.csv_quotes=letters"])
        assert [(source.id, source.content) for source in read(letters)] == [tuple(x.split("\t")) for x in lines]


def test_table_output_is_resumed(checkpoints, tmp_path, monkeypatch):
    """Until it is complete, records are in a file of lines; an older output is kept until then, also on a full disk."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.csv"
    source.write_text(as_lines({"source": text} for text in SHORT[:4]))
    target.write_text("older")
    beside, note = tmp_path / "out.csv.records", tmp_path / "out.csv.records.unfinished"
    generator = load(checkpoints / "none")

    def work(resume):
        records.decode_file(generator, str(source), str(target), method=None, batch_size=None, resume=resume)

    with interrupted_after(2):
        work(False)
    assert target.read_text() == "older" and len(beside.read_text().splitlines()) == 2 and note.exists()
    records.check_paths(str(source), str(target), resume=True)

    @contextlib.contextmanager
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "new_file", full)
        with pytest.raises(UserError, match=r"out\.csv: cannot be written .No space.*; .*out\.csv\.records has"):
            work(True)
    assert target.read_text() == "older" and len(beside.read_text().splitlines()) == 4 and note.exists()
    work(True)
    made = target.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.csv"]
    with pytest.raises(UserError, match=r"--resume: .*out\.csv: complete; expected .*out\.csv\.records"):
        records.check_paths(str(source), str(target), resume=True)
    records.check_paths(str(source), str(tmp_path / "new.csv"), resume=True)  # without an output it starts
    work(False)
    assert target.read_bytes() == made and made.count(b"\n") == 5


def test_cells_of_a_table_are_unchanged(tmp_path):
    """Cells have line ends of all kinds, quotes and delimiters; lists are lists in Parquet, and JSON elsewhere."""
    texts = ["a\rb", "a\nb", "a\r\nb", 'a"b', "a,b\tc", "é"]
    values = [{"id": text, "text": text, "repeated": [i]} for i, text in enumerate(texts)]
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t"), ("a.parquet", "")):
        lines = Path(records.lines_for(str(tmp_path / name)))
        lines.write_text(as_lines(values))
        records.write_table(lines, str(tmp_path / name))
        if delimiter:
            with (tmp_path / name).open(newline="") as file:
                found = list(csv.DictReader(file, delimiter=delimiter))
            found = [row | {"repeated": json.loads(row["repeated"])} for row in found]
        else:
            found = pyarrow.parquet.read_table(tmp_path / name).to_pylist()
        assert found == values


def test_unsuitable_table_outputs_are_refused(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text("{}")
    for name in ("a.jsonl.gz", "a.csv.GZ", "a.zst"):
        with pytest.raises(UserError, match="found the name of a compressed file"):
            records.check_paths(str(tmp_path / "in.jsonl"), str(tmp_path / name))
    with pytest.raises(UserError, match=r"found the name of a workbook; expected \.csv, \.tsv"):
        records.check_paths(str(tmp_path / "in.jsonl"), str(tmp_path / "a.XLSX"))
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(UserError, match=r"pipe\.csv: found no regular file"):
        records.check_paths(str(tmp_path / "in.jsonl"), str(tmp_path / "pipe.csv"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"--output .*a\.parquet: found no pyarrow; expected"):
        records.check_paths(str(tmp_path / "in.jsonl"), str(tmp_path / "a.parquet"))


SPOILT = [
    b'{"source": "x"',
    b'{"source": "caf\xe9"}',
    b'{"source": " "}',
    b'{"source_ids": [99]}',
    b'{"source": "x", "row_prefixes": ["</s>"]}',
    b'{"source": "x", "row_prefixes": ["the", "a"]}',  # of a sequential answer
    b'{"source": "x", "max_rows": 0}',
    b'{"sauce": "x"}',
]


def test_bad_lines_are_skipped(checkpoints, decoded, tmp_path, monkeypatch):
    """Each is reported with its place, then the count; by default the first ends decoding, which can be resumed."""
    good = [{"id": f"g{i}", "source": text} for i, text in enumerate(SHORT[:4])]
    expected, _ = decoded(good)
    lines = [line.encode() for line in as_lines(good).splitlines()]
    content = b"\n".join([*lines[:2], *SPOILT, *lines[2:]]) + b"\n"
    flags = "--checkpoint", checkpoints / "none", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"
    found, err = decoded(content, "--skip-bad")
    assert found == expected
    said = [line for line in err.splitlines() if line.endswith("; skipped")]
    places = [line.removeprefix("warning: ").partition(": ")[0] for line in said]
    assert sorted(places) == sorted(f"{tmp_path}/in.jsonl:{number}" for number in range(3, 11))
    assert f"{tmp_path}/in.jsonl: 8 bad lines skipped, 4 good ones kept" in err
    with pytest.raises(UserError, match=r"in\.jsonl:3: not JSON"):
        decode.main([str(flag) for flag in flags])
    whole = (tmp_path / "out.jsonl").read_bytes()
    with interrupted_after(2):
        decode.main([str(flag) for flag in (*flags, "--skip-bad")])
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 2
    run(*flags, "--skip-bad", "--resume")
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(SPOILT))
    with refuses("in.jsonl", found="in.jsonl:1: not JSON"):
        decode.main([str(flag) for flag in (*flags, "--skip-bad")])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    out, err = run("--checkpoint", checkpoints / "none", "--input", "-", "--output", "-", "--skip-bad")
    assert [json.loads(line) for line in out] == expected and "standard input: 8 bad lines skipped" in err
    drawn, err = decoded(content, "--skip-bad", "--set=decode.samples=2", "--set=decode.temperature=1")
    assert len(drawn) == 8 and f"{tmp_path}/in.jsonl: 8 bad lines skipped, 4 good ones kept" in err


def test_blank_id_counts_as_absent():
    """This is like null; an empty id is an id, as in lines of JSON."""
    config = Config(model=MODEL)
    given = ({"id": " "}, {"id": None}, {"id": float("nan")}, {}, {"id": ""}, {"id": 7})
    found = [sources.of_record(value | {"source": "x"}, "source 0", 0, config).id for value in given]
    assert found == [0, 0, 0, 0, "", 7]


def test_field_missing_from_all_records_is_refused(tmp_path):
    """This holds for files, lists, and the first line of a pipe; otherwise a field may be absent."""
    config = Config(model=MODEL, data=DataConfig(**TEMPLATE))
    fields = sources.fields_of(config)
    assert fields == ("question", "context") and sources.fields_of(Config(data=DataConfig(task="demo"))) == ()
    for second in ({"context": None}, {"source": "b"}, {"source_ids": [1]}):
        sources.check_fields(fields, [{"question": "a"}, second], "here")
    sources.check_fields(fields, [], "here")
    rename = r'^here: found no "context" in any record; .*keys: question, text; rename the field .* to "context"\)$'
    with pytest.raises(UserError, match=rename):
        sources.check_fields(fields, [{"question": "a", "text": "b"}, {"question": "c"}], "here")
    generator: Any = SimpleNamespace(
        config=config,
        source=lambda value, place, name: sources.of_record(value, place, name, config),
        samples_of=lambda given, strategy: iter(given),
    )
    placed = [("-:1", {"question": "a"}), ("-:2", {"question": "a", "context": "b"})]
    assert len(list(records.read_sources(generator, placed, "pipelined"))) == 2
    with pytest.raises(UserError, match=r'^-:1: found no "context"'):
        list(records.read_sources(generator, placed, "pipelined", at_once=True))
    assert len(list(records.read_sources(generator, placed[::-1], "pipelined", at_once=True))) == 2


def test_saved_data_set_is_read(tmp_path, monkeypatch):
    """The library's own reader reads it; its splits, and a missing library, are reported."""
    (tmp_path / "set" / "train").mkdir(parents=True)
    (tmp_path / "set" / "dataset_dict.json").write_text("{}")
    (tmp_path / "set" / "train" / "state.json").write_text("{}")
    with refuses(tmp_path / "set", found="train"):
        list(records.read_records(tmp_path / "set"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"found no datasets; expected the packages of the extra pipejax\[datasets\]"):
        list(records.read_records(tmp_path / "set" / "train"))

    class Saved:  # with `with_format("numpy")`
        def __init__(self, path, kind=np.asarray):
            self.path, self.kind = path, kind

        def with_format(self, kind):
            assert kind is None
            return Saved(self.path, list)

        def __iter__(self):
            return iter([{"id": self.path, "source_ids": self.kind([3, 4])}])

    library = SimpleNamespace(load_from_disk=Saved)
    monkeypatch.setitem(sys.modules, "datasets", library)
    place = str(tmp_path / "set" / "train")
    assert list(records.read_records(place)) == [(f"{place}:1", {"id": place, "source_ids": [3, 4]})]
    records.check_paths(place, "-")


# In separate processes.


@contextlib.contextmanager
def process(*flags, **pipes):
    """Starts `python decode.py`; it is killed after two minutes, or at the end of the test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # if it is ignored, children ignore it too
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, str(ROOT / "decode.py"), *map(str, flags)]
    running = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, **pipes)
    signal.signal(signal.SIGINT, before)
    watch = threading.Timer(120, running.kill)
    watch.start()
    try:
        yield running
    finally:
        watch.cancel()
        running.kill()
        running.wait()


@pytest.mark.slow
def test_a_pipe_is_answered_line_by_line(checkpoints, decoded):
    expected, _ = decoded([{"source": text} for text in SHORT])
    flags = "--checkpoint", checkpoints / "none", "--input", "-", "--output", "-"
    with process(*flags, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        for text, record in zip(SHORT, expected, strict=True):
            running.stdin.write(json.dumps({"source": text}).encode() + b"\n")
            running.stdin.flush()
            assert json.loads(running.stdout.readline()) == record  # before the next one is sent
        out, err = running.communicate()
    assert running.returncode == 0 and out == b""
    assert err.decode().startswith(f"sequential: {len(SHORT)} examples, ")


@pytest.mark.slow
def test_interrupted_decode_leaves_complete_records(checkpoints, tmp_path):
    """Ctrl-C, and a kill that no program sees coming."""
    source, targets = tmp_path / "in.jsonl", [tmp_path / "interrupted.jsonl", tmp_path / "killed.jsonl"]
    source.write_text(as_lines({"source_ids": [5 + i % 50, 7, 9, 1]} for i in range(20_000)))
    flags = "--checkpoint", checkpoints / "none", "--input", source, "--batch-size", "2", "--output"
    with process(*flags, targets[0]) as first, process(*flags, targets[1]) as second:
        for running, target, number in zip((first, second), targets, (signal.SIGINT, signal.SIGKILL), strict=True):
            while running.poll() is None and not (target.is_file() and target.stat().st_size > 10_000):
                time.sleep(0.01)
            running.send_signal(number)
        said = [running.communicate()[1].decode() for running in (first, second)]
    assert (first.returncode, second.returncode) == (130, -signal.SIGKILL), said
    count = len(targets[0].read_bytes().splitlines())
    told = f"{targets[0]}: contains the records of the first {count} of 20000 lines; --resume continues after them"
    assert said[0].splitlines()[-2:] == [told, "interrupted"]
    for target in targets:
        content = target.read_bytes()
        found = [json.loads(line) for line in content.splitlines()]
        assert content.endswith(b"\n") and 10 < len(found) < 20_000
        assert [record["id"] for record in found] == [str(i + 1) for i in range(len(found))]


def test_appended_lines_keep_their_note(tmp_path):
    """If a kill came between the removal of a note and the new note, the output could not be resumed."""
    target, note = tmp_path / "out.jsonl", tmp_path / "out.jsonl.unfinished"
    first = resume.Unfinished(str(target), {"input": "a"})
    first.write(b'{"id": 1}\n')
    first.close()
    before = note.stat().st_ino
    assert json.loads(note.read_text()) == {"input": "a"}
    second = resume.Unfinished(str(target), {"input": "a"})
    second.resume([1, 2])
    second.write(b'{"id": 2}\n')
    second.close()
    assert target.read_bytes() == b'{"id": 1}\n{"id": 2}\n' and note.stat().st_ino == before
    second.end()
    assert not note.exists()


def test_output_of_another_command_has_no_note(tmp_path):
    target, note = tmp_path / "out.jsonl", tmp_path / "out.jsonl.unfinished"
    target.write_text('{"id": 7}\n')
    output = resume.Unfinished(str(target))
    output.write(b'{"id": 1}\n')
    output.close()
    assert target.read_bytes() == b'{"id": 1}\n' and not note.exists()
