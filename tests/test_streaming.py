"""Streamed rows equal the record of decoding."""

import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

from pipejax import methods
from pipejax.config import Config, DecodeConfig, GridConfig, TrainConfig
from pipejax.inference.generator import Generator
from pipejax.inference.running_batch import RunningBatch
from pipejax.inference.streaming import RowEvent, Screen
from pipejax.offline.records import decode_file
from pipejax.system.errors import UserError
from support import oracle
from support.tiny import MORE_WORDS

pytestmark = pytest.mark.usefixtures("compiled_once")


def generator(**decode):
    config = Config(
        model=MORE_WORDS,
        grid=GridConfig(delay=2, time_max=20, sub_max=6),
        train=TrainConfig(method="pipelined"),
        decode=DecodeConfig(max_length=20, **decode),
    )
    return Generator(config, oracle.random_params(MORE_WORDS, np.random.default_rng(4)), None)


def texts(count):
    rng = np.random.default_rng(count)
    return [[*rng.integers(2, 12, rng.integers(1, 40)).tolist(), 1] for _ in range(count)]


@pytest.mark.parametrize("method", ["pipelined", pytest.param("sequential", marks=pytest.mark.slow)])
def test_events_add_up_to_the_record(method):
    made, given = generator(temperature=0.8, scores=True), texts(6)
    expected = made.decode(given, method=method, batch_size=4)
    for i, (ids, one) in enumerate(zip(given, expected, strict=True)):
        *events, record = made.stream_rows({"source_ids": ids, "id": i}, method=method)
        assert record["row_ids"] == one["row_ids"] and record["truncated"] == one["truncated"]
        assert record["steps"] == one["steps"] and record["calls"] == one["calls"]
        assert record["log_prob"] == pytest.approx(one["log_prob"], abs=1e-3)
        rows, ended = {}, set()
        for event in events:
            assert isinstance(event, RowEvent) and event.row not in ended
            if event.done:
                assert event.token == 1
                ended.add(event.row)
            else:
                rows.setdefault(event.row, []).append(event.token)
        assert [rows[i] for i in sorted(rows)] == [row for row in record["row_ids"] if row]
        if record["truncated"] is None:
            assert ended == {*rows}


def test_the_order_of_events_does_not_depend_on_the_steps_taken_at_once(monkeypatch):
    made, found = generator(), {}
    for steps in (1, 3, 1000):
        monkeypatch.setattr(RunningBatch, "advance", lambda self, steps=steps: self._run_steps(steps)[:2])
        found[steps] = [[*made.stream_rows(ids)] for ids in texts(6)]
    assert found[1] == found[3] == found[1000]
    assert any(event.done for events in found[1] for event in events[:-4])


@pytest.mark.parametrize(
    "draft", ["source", pytest.param("jacobi", marks=pytest.mark.slow), pytest.param("unique", marks=pytest.mark.slow)]
)
def test_drafts_do_not_change_stream_events(draft):
    """Their order is the same: rows that drafts write ahead wait for the others."""
    settings = {"unique_rows": True} if draft == "unique" else {}
    plain, drafting = generator(**settings), generator(draft="source" if draft == "unique" else draft, **settings)
    saved = 0
    for ids in texts(5):
        (*expected, wanted), (*events, record) = plain.stream_rows(ids), drafting.stream_rows(ids)
        assert events == expected
        assert {**record, "calls": 0} == {**wanted, "calls": 0}
        saved += wanted["calls"] - record["calls"]
    assert saved > 0


def test_streams_of_one_generator_may_run_at_the_same_time(caplog):
    made, given = generator(), texts(2)
    expected = [list(made.stream_rows(ids))[-1] for ids in given]
    streams = [made.stream_rows(ids) for ids in given]
    with jax.log_compiles():
        begun = [next(stream) for stream in streams]
    assert "Compiling" not in caplog.text  # the second one runs the programs of the first
    beside = [[event, *stream] for event, stream in zip(begun, streams, strict=True)]
    for (*events, record), wanted in zip(beside, expected, strict=True):
        assert record == wanted
        rows = [[e.token for e in events if e.row == row and not e.done] for row in range(len(wanted["row_ids"]))]
        assert rows == wanted["row_ids"]
    first = made.stream_rows(given[0])  # a stream that is not read to its end
    next(first)
    first.close()
    (batches,) = made._streams.values()
    assert len(batches.free) == 2  # its batch is available again
    assert list(made.stream_rows(given[1]))[-1] == expected[1]


def test_streams_in_threads_equal_streams_alone():
    """They have different settings, so the batches of one strategy take turns."""
    made, given = generator(), texts(4)
    settings = [{}, {"scores": True}, {"temperature": 0.7, "seed": 3}, {"repetition_penalty": 1.4}]
    expected = [list(made.stream_rows(ids, **own)) for ids, own in zip(given, settings, strict=True)]
    barrier = threading.Barrier(len(given))

    def stream(i: int) -> list[Any]:
        barrier.wait()
        return list(made.stream_rows(given[i], **settings[i]))

    for _ in range(3):
        with ThreadPoolExecutor(len(given)) as threads:
            assert list(threads.map(stream, range(len(given)))) == expected


def test_batch_of_a_failed_stream_is_cleared(monkeypatch):
    made, (ids,) = generator(), texts(1)
    *_, expected = made.stream_rows(ids)

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        (batches,) = made._streams.values()
        (batch,) = batches.free
        patch.setattr(batch, "_run_steps", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            list(made.stream_rows(ids))
    assert batch._carry is None and batch._encoded is None and not batch._in_use.any()
    assert list(made.stream_rows(ids))[-1] == expected


def test_event_has_the_text_of_its_row_so_far(tokenizer):
    made = generator()
    made.tokenizer = tokenizer
    for ids in texts(6):
        *events, record = made.stream_rows(ids)
        rows = {}
        for event in events:
            rows.setdefault(event.row, []).extend([] if event.done else [event.token])
            assert event.text == tokenizer.decode(rows[event.row])
        assert rows and [rows[i] for i in sorted(rows)] == [row for row in record["row_ids"] if row]


def test_unsupported_stream_settings_are_refused_before_output(tmp_path, capsys):
    limited, (given, out) = generator(limit="source"), (tmp_path / name for name in ("in.jsonl", "out"))
    given.write_text('{"source_ids": [3, 1]}\n')
    with pytest.raises(UserError, match=r"^decode\.limit: found source"):
        list(limited.stream_rows([3, 1]))
    with pytest.raises(UserError, match=r"^decode\.limit: found source"):
        decode_file(limited, str(given), str(out), method=None, batch_size=None, live=True)
    assert not out.exists() and "0:" not in capsys.readouterr().err
    with pytest.raises(UserError, match="row_prefixes"):
        list(generator().stream_rows({"source_ids": [3, 1], "row_prefixes": [[4]]}))


def test_samples_have_separate_headings(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"id": "a", "source_ids": [3, 1]}\n')
    made = generator(samples=2, temperature=1.0)
    source, target = str(tmp_path / "in.jsonl"), str(tmp_path / "out")
    decode_file(made, source, target, method=None, batch_size=None, live=True)
    headed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("a")]
    assert headed == ["a, sample 0:", "a, sample 1:"]


class Terminal(io.StringIO):
    """Records the content of its lines, like a terminal."""

    def isatty(self):
        return True

    def lines(self):
        rows, at = [""], 0
        for part in self.getvalue().replace("\r", "").split("\x1b["):
            if part[:1].isdigit() and part[1:2] in "AB":
                at += int(part[0]) * (1 if part[1] == "B" else -1)
                part = part[2:]
            elif part.startswith("2K"):
                rows[at], part = "", part[2:]
            for i, piece in enumerate(part.split("\n")):
                at += i > 0
                rows += [""] * (at + 1 - len(rows))
                rows[at] += piece
        return rows


def test_rows_grow_in_place_on_a_terminal():
    screen = Screen("7:", Terminal())
    for event in [
        RowEvent(0, 5, "one", False),
        RowEvent(1, 6, "a", False),
        RowEvent(0, 5, "one two", False),
        RowEvent(0, 1, "one two", True),
        RowEvent(1, 6, "a b", False),
    ]:
        screen.show(event)
    assert screen.out.lines() == ["7:", "  0: one two", "  1: a b _", ""]


@pytest.mark.slow
def test_output_that_is_no_terminal_has_a_line_for_each_row(tmp_path, capsys):
    """And the output is the one without --stream."""
    source, made = tmp_path / "in.jsonl", generator()
    source.write_text("".join(json.dumps({"id": i, "source_ids": ids}) + "\n" for i, ids in enumerate(texts(4))))
    for live in (False, True):
        report = decode_file(made, str(source), str(tmp_path / f"{live}"), method=None, batch_size=None, live=live)
        assert report.examples == 4
        assert ("(compilation included)" in report.lines(methods.make("pipelined", Config()))[0]) == live
    assert (tmp_path / "True").read_bytes() == (tmp_path / "False").read_bytes()
    lines = capsys.readouterr().err.splitlines()
    records = [json.loads(line) for line in (tmp_path / "True").read_text().splitlines()]
    assert [line for line in lines if line.startswith("0:")] == ["0:"]
    whole = [row for record in records if record["truncated"] is None for row in record["row_ids"]]
    assert len([line for line in lines if line.startswith("  ")]) >= len(whole)
