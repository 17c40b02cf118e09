"""Monitoring of a training run: clocks, log lines, skipped steps, and curves on boards."""

import contextlib
import hashlib
import json
import queue
import re
import shutil
import struct
import sys
import threading
import time
import types
from collections import Counter

import numpy as np
import pytest
from tokenizers import normalizers

from pipejax import checkpoint
from pipejax import config as config_lib
from pipejax.apps import demo
from pipejax.apps.trackers import trackers
from pipejax.apps.trackers.trackers import Trackers, name_of
from pipejax.config import TrainConfig
from pipejax.data import batches
from pipejax.data.examples import Example
from pipejax.data.shapes import Shapes
from pipejax.metrics import score as scores_of
from pipejax.model import dropout
from pipejax.system import distributed
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress
from pipejax.training import examiner, loop, monitoring, start
from pipejax.training.loop import fit
from pipejax.training.monitoring import Clock, warn_of_examples
from pipejax.training.run_directory import RunDirectory
from support import schemas
from support.tiny import RUN_ON_ONE as CONFIG
from support.tiny import change, metrics

pytestmark = pytest.mark.usefixtures("compiled_once")


def poisoned(monkeypatch, numbers):
    """Makes batches with these numbers (from 0) contain a NaN."""
    draw = batches.TrainingBatches.__getitem__

    def get(self, index):
        batch = draw(self, index)
        if index not in numbers:
            return batch
        weights = batch.arrays["weights"].copy()
        weights[0, 0] = np.nan
        return batch._replace(arrays=batch.arrays | {"weights": weights})

    monkeypatch.setattr(batches.TrainingBatches, "__getitem__", get)


def test_times_of_laps_add_up():
    clock, begun = Clock(), time.perf_counter()
    for _ in range(2):
        with clock("data"):
            time.sleep(0.02)
        time.sleep(0.01)
    lap = clock.lap()
    assert lap["data"] >= 0.04 and lap["step"] >= 0.02 and lap["compile"] == 0
    assert sum(lap.values()) <= time.perf_counter() - begun
    assert clock.lap()["data"] == 0 and clock.totals["data"] == lap["data"]


@pytest.mark.slow
def test_poisoned_steps_are_left_out_and_named(tmp_path, monkeypatch, capsys):
    poisoned(monkeypatch, {1, 4})
    assert fit(CONFIG, tmp_path / "run") == 0
    lines = metrics(tmp_path / "run")
    left_out = [line for line in lines if line["event"] == "left_out"]
    assert [line["step"] for line in left_out] == [2, 5] and all(len(line["ids"]) == 8 for line in left_out)
    steps = [line for line in lines if line["event"] == "train"]
    assert [line["bad_steps"] for line in steps] == [0, 1, 0, 0, 1, 0]
    assert [line["loss"] is None for line in steps] == [False, True, False, False, True, False]
    assert "step 2: loss nan" in capsys.readouterr().err
    for leaf in checkpoint.open_run(tmp_path / "run").items["params"]["shared"].values():
        assert np.isfinite(leaf).all()


@pytest.mark.slow
def test_cuts_and_losses_of_examples_are_logged_once(tmp_path, tokenizer_files, said):
    texts = ["the baker sang .", "the clerk slept .", "~", "the baker slept ."]
    examples = [Example(str(i), text, ["{", "the baker sang", "sang"][: 1 + i % 3]) for i, text in enumerate(texts * 4)]
    config = change(CONFIG, data={"task": "jsonl", "tokenizer": str(tokenizer_files), "max_source": 4, "max_target": 6})
    assert fit(config, tmp_path / "run", given={"train": examples, "dev": []}) == 0
    counts = [line for line in metrics(tmp_path / "run") if line["event"] == "train"]
    for key in ("cut_sources", "cut_targets"):
        assert sum(line[key] for line in counts) > 0
    for words in (
        "% of the sources are cut at data.max_source = 4",
        "% of the targets are cut at data.max_target = 6",
        "16 of 16 examples have targets that the tokenizer does not give back",
    ):
        assert sum(words in line for line in said) == 1


def test_texts_changed_by_the_tokenizer_are_reported_at_the_start(tokenizer, said):
    """The line has their number among the sampled examples, and the first of them in random order."""
    rows = [("sang",), ("sang", "the ~ slept ."), ("</s>",), ()]
    examples = [Example(f"e{i}", "the  baker" if i % 10 else "the {", rows[i % 4], f"a.jsonl:{i}") for i in range(40)]
    warn_of_examples(examples, tokenizer, CONFIG)
    assert len(said) == 2
    begin, _, first = said[0].partition(", so no answer can equal them: ")
    assert begin == "warning: 20 of 40 examples have targets that the tokenizer does not give back"
    assert first.partition(" (")[0] in ("'~' comes back as ''", "'</s>' comes back as ''")
    assert said[1].startswith("warning: 4 of 40 examples have sources that the tokenizer does not give back")
    assert ": '{' comes back as '' (a.jsonl:" in said[1] and said[1].endswith("0)")
    said.clear()
    warn_of_examples([examples[4]] * 3, tokenizer, CONFIG)
    found = "train.batch_size: found 8, more than the 3 training examples"
    assert said == [f"warning: {found}; each update sees them 2.7 times, so a smaller value suffices"]
    said.clear()
    many = [Example(str(i), "~", ("sang",)) for i in range(21_000)]
    warn_of_examples(many, tokenizer, change(CONFIG, train={"batch_size": 2000, "length_group": 16}))
    assert said[0] == "21000 examples are encoded before the first step, as many as train.length_group batches"
    assert "1000 of 1000 examples that were looked at, of 21000, have sources" in said[1] and len(said) == 2


@pytest.mark.parametrize(
    "separator, rows, change_of",
    [
        (" ; ", ("baker ; clerk", "river"), "'baker ; clerk' comes back as 'baker'"),
        (" ; ", ("baker ; clerk",), "'baker ; clerk' comes back as 'baker'"),
        (" ; ", ("baker", "; clerk", "river"), "'; clerk' comes back as 'clerk'"),
        (" ; ", ("baker ;", "clerk"), "'baker ;' comes back as 'baker'"),
        (" ; ", ("river", ";"), "';' comes back as ''"),
        (", ", ("baker, the old", "river"), "'baker, the old' comes back as 'baker'"),
        (" , ", ("baker", "clerk , river"), "'clerk , river' comes back as 'clerk'"),
        (" ,; ", ("baker ,", "; clerk ,; river"), "'; clerk ,; river' comes back as '; clerk'"),
        (";", ("baker", "river; clerk"), "'river; clerk' comes back as 'river'"),
        (" ; ", ("baker \uff1b clerk", "river"), "'baker ; clerk' comes back as 'baker'"),  # equal for the tokenizer
        (" ; ", ("baker;clerk", "river"), ""),
        (" ; ", ("baker, clerk", "river", "baker, clerk"), ""),
        (" ; ", ("</s>", "~"), ""),
        (" ; ", (), ""),
        (" ", ("baker ; clerk", "river"), ""),  # rows need no separator
    ],
)
def test_rows_with_the_separator_are_reported_at_the_start(separator, rows, change_of, said):
    """This applies only to answers in one piece: on the grid a row is a row."""
    tokenizer = schemas.tokenizer(normalizers.NFKC())
    examples = [Example(str(i), "the baker", rows if i == 3 else ("baker", "clerk"), f"a.jsonl:{i}") for i in range(8)]
    for objective in ("sequential", "pipelined"):
        config = change(CONFIG, data={"separator": separator}, train={"method": objective})
        said.clear()
        warn_of_examples(examples, tokenizer, config)
        told = [line for line in said if "data.separator" in line]
        begin = (
            "warning: 1 of 8 examples have rows that contain data.separator, so they are split when an answer is read: "
        )
        assert told == ([f"{begin}{change_of} (a.jsonl:3)"] if change_of and objective == "sequential" else [])


@pytest.mark.slow
def test_large_batches_of_few_examples(tokenizer, monkeypatch):
    """Each example is encoded once, although a draw has it repeatedly; the choice of shapes reads a bounded number."""
    seen, looked, encode, order = Counter(), [], batches.encode_example, Shapes.order

    def counted(example, *more):
        seen[example.id] += 1
        return encode(example, *more)

    monkeypatch.setattr(batches, "encode_example", counted)
    monkeypatch.setattr(Shapes, "order", lambda self, lengths: looked.append(len(lengths)) or order(self, lengths))
    examples = demo.examples("train")[:800]
    config = change(CONFIG, train={"batch_size": 2000, "length_group": 16, "shapes": 4})
    shapes = batches.choose_shapes(examples, tokenizer, config, CONFIG.model)
    assert max(Counter(seen).values()) == 1 and sum(looked) <= 5 * max(2**17, 16 * 2000)
    seen.clear()
    drawn = batches.TrainingBatches(examples, tokenizer, config, CONFIG.model, shapes)
    found = Counter(name for i in range(16) for name in drawn[i].ids)
    assert set(seen.values()) == {1} and set(found.values()) == {16 * 2000 // 800}


def test_examples_without_an_answer_may_be_left_out_or_refused(tmp_path, tokenizer_files, said):
    """The refusal comes before compilation, and before any file is written."""
    examples = [Example(str(i), "the baker sang .", ("sang",) if i % 3 else ("</s>",)) for i in range(16)]
    config = change(CONFIG, data={"task": "jsonl", "tokenizer": str(tokenizer_files), "empty_targets": "refuse"})
    with pytest.raises(UserError, match=r"^example 0: found no answer .6 of 16 training examples have no answer"):
        fit(config, tmp_path / "run", given={"train": examples, "dev": []})
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_training_without_the_examples_that_have_no_answer(tmp_path, tokenizer_files, said):
    examples = [Example(str(i), "the baker sang .", ("sang",) if i % 3 else ("</s>",)) for i in range(16)]
    config = change(CONFIG, data={"task": "jsonl", "tokenizer": str(tokenizer_files), "empty_targets": "skip"})
    assert fit(config, tmp_path / "run", given={"train": examples, "dev": []}) == 0
    for words in ("6 of 16 training examples have no answer, such as example 0; they are", ", 10 training examples, "):
        assert any(words in line for line in said)
    assert not any("does not give back" in line for line in said)


@pytest.mark.slow
def test_one_bad_batch_gives_no_general_warning(tmp_path, tokenizer_files, said):
    examples = [Example(str(i), "the baker" if i else "the baker sang and slept", ["sang"]) for i in range(40)]
    config = change(CONFIG, data={"task": "jsonl", "tokenizer": str(tokenizer_files), "max_source": 4})
    assert fit(config, tmp_path / "run", given={"train": examples, "dev": []}) == 0
    counts = [line["cut_sources"] for line in metrics(tmp_path / "run") if line["event"] == "train"]
    assert 1 in counts and sum(counts) < 8 * 6 * 0.05
    assert not any("sources are cut" in line for line in said)


@pytest.mark.slow
def test_too_many_bad_steps_end_the_run(tmp_path, monkeypatch):
    poisoned(monkeypatch, {2, 3, 4, 5})
    config = change(CONFIG, train={"max_bad_steps": 3, "checkpoint_every": 1})
    with pytest.raises(UserError, match=r"step 5: found loss nan, .* 3 such steps in a row \(the last examples: .*\)"):
        fit(config, tmp_path / "run")
    good = checkpoint.open_run(tmp_path / "run")
    assert all(np.isfinite(leaf).all() for leaf in good.items["params"]["shared"].values())
    ids = next(line["ids"] for line in metrics(tmp_path / "run") if line["step"] == 5 and line["event"] == "left_out")
    assert len(ids) == 8


@pytest.mark.slow
def test_every_line_is_json_without_nan(tmp_path, monkeypatch):
    poisoned(monkeypatch, {0})
    fit(change(CONFIG, train={"steps": 2}), tmp_path / "run")

    def refuse(constant):
        raise AssertionError(constant)

    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


@pytest.mark.slow
def test_stop_mark_stays_until_the_run_resumes(tmp_path, monkeypatch):
    asked = loop.Stop.asked

    def after_two(self):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 3:
            self.signal = 15
        return asked(self)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Stop, "asked", after_two)
        assert fit(CONFIG, tmp_path / "run") == 143
    last = metrics(tmp_path / "run")[-1]
    assert last["event"] == "stopped" and last["step"] == 2 and len(last["params_fp"]) == 16
    assert fit(CONFIG, tmp_path / "run") == 0
    lines = metrics(tmp_path / "run")
    assert [line["event"] for line in lines].count("stopped") == 0
    assert lines[-1]["event"] == "end" and set(lines[-1]["seconds"]) >= {"compile", "data", "step", "checkpoint"}


@pytest.mark.slow
def test_tensorboard_gets_the_numbers_of_the_log(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    fit(change(CONFIG, train={"steps": 3, "tensorboard": True}), tmp_path / "run")
    found = {}
    for file in (tmp_path / "run/tensorboard").iterdir():
        data = file.read_bytes()
        while data:  # a record: length, its checksum, content, its checksum
            size = struct.unpack("<Q", data[:8])[0]
            event = Event.FromString(data[12 : 12 + size])
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            data = data[16 + size :]
    losses = {line["step"]: line["loss"] for line in metrics(tmp_path / "run") if line["event"] == "train"}
    assert len(losses) == 3
    for step, loss in losses.items():
        assert abs(found["train/loss", step] - loss) < 1e-5 * loss


@pytest.mark.parametrize("count, expected", [(0, []), (2, [("begins", 5), ("ends", 7)]), (9, [("begins", 5)])])
def test_profile_covers_requested_steps_from_the_third(monkeypatch, tmp_path, count, expected):
    """In a run resumed at step 3, steps are counted when they are made."""
    seen = []

    @contextlib.contextmanager
    def trace(directory):
        assert directory == tmp_path / "profile"
        seen.append(("begins", run.step))
        yield
        seen.append(("ends", run.step))

    monkeypatch.setattr(loop.jax.profiler, "trace", trace)
    monkeypatch.setattr(loop.sharding, "put_batch", lambda arrays, mesh: arrays)
    run = loop.Run.__new__(loop.Run)
    run.step, run.saved, run.state, run.config = 3, 3, None, CONFIG
    run.batches, run.store = iter([types.SimpleNamespace(arrays={})] * 6), types.SimpleNamespace(settle=lambda: True)
    run.directory = types.SimpleNamespace(path=tmp_path)
    run.window = types.SimpleNamespace(settle=lambda: None, add=lambda *given: None)
    run.shapes, run.evaluates = types.SimpleNamespace(in_use=lambda step: []), False
    run.trainer = types.SimpleNamespace(mesh=None, prepare=lambda pairs: None, dropout_key=lambda step: step)
    run._program, run.clock = lambda batch: lambda state, arrays, key: (state, {}), Clock()
    run.trace_steps(count)
    for _ in range(6):
        run.make_step()
    assert seen == expected
    run.profile.close()  # like an error
    assert len(seen) in (0, 2)


def test_an_evaluation_shows_its_first_documents(monkeypatch):
    """Predicted and expected rows have a line each; the log has all rows."""
    made, lines, logged = examiner.Examiner.__new__(examiner.Examiner), [], []
    rows = [["a"] * 9, [], ["b"], ["c"]]
    made.examples = [Example(str(i), "s", tuple(gold)) for i, gold in enumerate([["x"], ["y"], [], ["z"]])]
    made.config = made_config = CONFIG
    programs = types.SimpleNamespace(set_params=lambda params: None, forget_params=lambda: None)
    made.generator = types.SimpleNamespace(programs=programs, config=made_config)
    made.best, made.write, made.highest, made.without_better = None, logged.append, [0.0, 0.0], 0
    made._dev_loss = lambda params, stopped: 1.0
    records = [{"rows": one} for one in rows]
    found = {"metric": "exact", "em_f1": 1.0, "steps": 2.0}
    monkeypatch.setattr(examiner, "evaluate", lambda *given, **more: (found, records))
    monkeypatch.setattr(examiner, "texts", lambda record: record["rows"])
    assert made.evaluate(3, {}, types.SimpleNamespace(line=lines.append), lambda: False)
    assert lines[0].startswith("step 3: dev loss 1.0000, ")
    assert lines[1:] == [
        "  0: a, a, a, a, a, a, a, a and 1 more  (expected: x)",
        "  1: (nothing)  (expected: y)",
        "  2: b  (expected: (nothing))",
    ]
    assert [sample["predicted"] for sample in logged[0]["samples"]] == rows[:3]


def test_last_loss_is_shown_without_a_terminal(capsys):
    progress = Progress("training", 3, unit="step", every=0.0)
    progress.add(1, "loss 2.0")
    progress.add(1)
    lines = capsys.readouterr().err.splitlines()
    assert [line[: len("training: 1/3 steps")] for line in lines] == ["training: 1/3 steps", "training: 2/3 steps"]
    assert all(line.endswith("  loss 2.0") for line in lines)


def test_rates_exclude_pauses_of_the_work(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = Progress("training", 100, unit="step", every=10.0)
    for seconds in (300, 200):
        with progress.aside("compiling", "for sources of 32 tokens"):
            now[0] += seconds
    now[0] += 50  # the first waits for a compiler
    progress.add(1)
    now[0] += 10
    progress.add(20)
    assert capsys.readouterr().err.splitlines() == [
        "training: compiling for sources of 32 tokens",
        "training: compiling for sources of 32 tokens, 300 s the last time",
        "training: 1/100 steps",
        "training: 21/100 steps, 2.00/s, 40 s left",
    ]


def test_long_side_work_reports_that_it_continues(capsys, monkeypatch):
    progress, waits = Progress("training", 3, unit="step", every=0.0), []

    real = threading.Event.wait

    def wait(self, seconds=None):
        if seconds is None:  # the time of a thread that starts
            return real(self)
        waits.append(seconds)
        return len(waits) > 2 or self.is_set()

    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", wait)
        with progress.aside("compiling", "for sources of 32 tokens", ", a minute"):
            time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training: compiling for sources of 32 tokens, a minute"
    assert lines[1] == "training: compiling for sources of 32 tokens, a minute, 0 s so far" and waits[0] == 1.0
    before = threading.active_count()
    with progress.aside("compiling", "again", ", a minute"):
        pass
    assert threading.active_count() == before
    assert capsys.readouterr().err.splitlines() == ["training: compiling again, 0 s the last time"]


def test_side_work_shows_its_progress(capsys, monkeypatch):
    progress, waits, steps = Progress("training", 3, unit="step", every=0.0), [], queue.Queue()
    real, asked = threading.Event.wait, 1

    def wait(self, seconds=None):
        if seconds is None:  # the time of a thread that starts
            return real(self)
        waits.append(seconds)
        return steps.get()

    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", wait)
        with progress.aside("evaluating", "8 examples") as reach:
            for count in ("", "3 of 8 answers"):
                if count:
                    reach(count)
                steps.put(False)
                asked += 1
                while len(waits) < asked:  # until the line is written
                    time.sleep(0.001)
            steps.put(True)
    assert capsys.readouterr().err.splitlines() == [
        "training: evaluating 8 examples",
        "training: evaluating 8 examples, 0 s so far",
        "training: evaluating 8 examples, 3 of 8 answers, 0 s so far",
    ]


def test_bar_shows_the_progress_of_side_work():
    progress, shown = Progress("training", 3, unit="step", shown=False), []
    progress.bar = types.SimpleNamespace(set_postfix_str=shown.append, start_t=0.0, last_print_t=0.0)
    with progress.aside("evaluating", "8 examples") as reach:
        reach("3 of 8 answers")
    assert shown == ["evaluating 8 examples", "evaluating 8 examples, 3 of 8 answers", ""]


@pytest.mark.parametrize(
    ("processes", "ticks", "expected"),
    [
        (1, [2, 2, 1], ["2 of 5 answers", "4 of 5 answers", "5 of 5 answers"]),
        (2, [1, 1, 1], ["2 of 5 answers", "4 of 5 answers", "5 of 5 answers"]),
        (4, [1, 1], ["4 of 5 answers", "5 of 5 answers"]),
    ],
)
def test_an_evaluation_counts_its_answers(monkeypatch, processes, ticks, expected):
    """All processes decode equal numbers at a time, and each decodes all of the rest."""
    made, reached = examiner.Examiner.__new__(examiner.Examiner), []
    made.examples, made.config = [Example(str(i), "s", ()) for i in range(5)], CONFIG
    programs = types.SimpleNamespace(set_params=lambda params: None, forget_params=lambda: None)
    made.generator = types.SimpleNamespace(programs=programs, config=CONFIG)
    made.best, made.write, made.highest, made.without_better = None, lambda line: None, [0.0, 0.0], 0
    made._dev_loss = lambda params, stopped: 1.0
    monkeypatch.setattr("jax.process_count", lambda: processes)
    monkeypatch.setattr(examiner, "distributed", types.SimpleNamespace(same=lambda found: found))

    def evaluate(generator, examples, *, batch_size, tick):
        for count in ticks:
            tick(count)
        return {"metric": "exact", "em_f1": 1.0, "steps": 2.0}, []

    monkeypatch.setattr(examiner, "evaluate", evaluate)
    assert made.evaluate(3, {}, types.SimpleNamespace(line=print), lambda: False, reached.append)
    assert reached == [*expected, "the loss of the dev split"]


@pytest.mark.slow
def test_warmup_as_long_as_training_is_reported(tmp_path, said):
    fit(change(CONFIG, train={"steps": 2, "warmup_steps": 2}), tmp_path)
    for words in ("train.warmup_steps: found 2; expected fewer than train.steps (2)", "trained for 2 steps (loss "):
        assert sum(words in line for line in said) == 1


@pytest.mark.slow
def test_wandb_gets_the_numbers_of_the_log(tmp_path, monkeypatch):
    logged, opened, axes, ended = [], [], {}, []
    run = types.SimpleNamespace(
        define_metric=lambda name, step_metric: axes.update({name: step_metric}),
        log=logged.append,
        finish=lambda: ended.append(1),
    )
    fake = types.SimpleNamespace(init=lambda **options: opened.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    fit(change(CONFIG, train={"steps": 2, "wandb": "ours"}), tmp_path / "run")
    assert opened[0]["project"] == "ours" and opened[0]["resume"] == "allow"
    assert [values["step"] for values in logged if "train/loss" in values] == [1, 2]
    assert {name.partition("/")[0] for values in logged for name in values} == {"step", "train", "evaluation"}
    assert axes == {"train/*": "step", "evaluation/*": "step"}
    assert ended == [1]


@pytest.mark.slow
def test_mlflow_receives_log_numbers_and_resumes_its_run(tmp_path, monkeypatch):
    """The board is in memory, with MLflow's functions and arguments."""
    runs, logged, under_way = dict[str, dict[str, str]](), list[tuple[str, int, set[str]]](), list[str]()

    def search_runs(*, filter_string, output_format, max_results):
        key, _, value = filter_string.removeprefix("tags.").partition(" = ")
        assert (output_format, max_results) == ("list", 1)
        found = [name for name, tags in runs.items() if tags[key] == value.strip("'")]
        return [types.SimpleNamespace(info=types.SimpleNamespace(run_id=name)) for name in found]

    def start_run(*, run_id, run_name, tags):
        under_way.append(run_id or f"id {len(runs)} of {run_name}")
        runs.setdefault(under_way[-1], {}).update(tags)

    fake = types.SimpleNamespace(
        set_experiment=lambda name: None,
        search_runs=search_runs,
        start_run=start_run,
        log_metrics=lambda values, step: logged.append((under_way[-1], step, set(values))),
        end_run=lambda: under_way.append(""),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    for steps in (1, 2):
        fit(change(CONFIG, train={"steps": steps, "mlflow": "ours"}), tmp_path / "run")
    assert under_way == ["id 0 of run", ""] * 2
    assert [step for _, step, names in logged if "train/loss" in names] == [1, 2]
    assert {name for name, _, _ in logged} == {"id 0 of run"}
    shutil.move(tmp_path / "run", tmp_path / "moved")  # the run resumes, and a new run in its place gets another id
    fit(change(CONFIG, train={"steps": 3, "mlflow": "ours"}), tmp_path / "moved")
    fit(change(CONFIG, train={"steps": 1, "mlflow": "ours"}), tmp_path / "run")
    assert under_way[4:] == ["id 0 of run", "", "id 1 of run", ""]


@pytest.fixture
def boards(tmp_path, monkeypatch):
    """Opens trackers with a W&B that `take` replaces, and records the ids."""

    def opening(take, run="a1", step=0):
        run_of = types.SimpleNamespace(define_metric=lambda name, step_metric: None, log=take, finish=lambda: None)
        fake = types.SimpleNamespace(init=lambda **options: opened.append(options["id"]) or run_of)
        monkeypatch.setitem(sys.modules, "wandb", fake)
        return Trackers(TrainConfig(wandb="ours"), tmp_path, step, run)

    opened: list[str] = []
    return opening, opened


def begin_from(monkeypatch, place, metadata):
    """The start of a run in a folder whose newest checkpoint has this metadata; None: it has none."""
    items = {"params": {}, "state": {}}
    own = types.SimpleNamespace(metadata=metadata, config=CONFIG, step=3, path=place, items=items)
    store = types.SimpleNamespace(
        steps=lambda: [] if metadata is None else [3],
        newest=lambda expect, set_aside: None if metadata is None else (expect(CONFIG), own)[1],
        directory=place,
    )
    trainer = types.SimpleNamespace(config=CONFIG, templates=dict, fresh=lambda params: None)
    monkeypatch.setattr(start, "Trainer", lambda config: trainer)
    monkeypatch.setattr(start, "_prepare_trainer", lambda config, memory: (trainer, None, None))
    monkeypatch.setattr(start, "check_places", lambda *arguments: None)
    monkeypatch.setattr(checkpoint, "tokenizer_of", lambda found: types.SimpleNamespace())
    return start.start_run(CONFIG, RunDirectory(place), store, {"dev": ""})


def test_resumed_run_keeps_its_id_and_a_new_run_gets_a_new_id(tmp_path, monkeypatch):
    """The directory has no effect: a moved run resumes, and a new run starts in its old place."""
    first, other = (begin_from(monkeypatch, tmp_path / "run", None) for _ in range(2))
    assert first.run != other.run and re.fullmatch(r"[0-9a-f]{16}", first.run)
    for name in ("run", "moved"):
        assert begin_from(monkeypatch, tmp_path / name, {"run": first.run, "dropout": dropout.VERSION}).run == first.run
    place = (tmp_path / "run").absolute()
    former = hashlib.sha256(str(place).encode()).hexdigest()[:16]  # the name in a former version
    assert begin_from(monkeypatch, place, {"dropout": dropout.VERSION}).run == former


def test_boards_are_opened_with_the_id_of_the_run(boards, tmp_path, monkeypatch):
    opening, opened = boards
    for run in ("a1", "b2"):
        opening(lambda values: None, run)
    there, started = [], []
    fake = types.SimpleNamespace(
        set_experiment=lambda name: None,
        search_runs=lambda filter_string, **rest: [x for x in there if filter_string == f"tags.pipejax = '{x.tag}'"],
        start_run=lambda **given: started.append(given),
        log_metrics=None,
        end_run=None,
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    for run in ("c3", "d4", "c3"):
        Trackers(TrainConfig(mlflow="ours"), tmp_path, 0, run)
        there = [types.SimpleNamespace(tag="c3", info=types.SimpleNamespace(run_id="r7"))]
    assert opened == ["a1", "b2"]
    new = {"run_id": None, "run_name": tmp_path.name}
    assert started == [
        {**new, "tags": {"pipejax": "c3"}},
        {**new, "tags": {"pipejax": "d4"}},
        {"run_id": "r7", "run_name": None, "tags": {"pipejax": "c3"}},  # it continues the existing run
    ]


def test_the_trainer_gives_boards_and_checkpoints_the_id(tmp_path, monkeypatch):
    class Seen(Exception):
        pass

    def seen(self):
        raise Seen(self.metadata["run"])

    given = []
    monkeypatch.setattr(trackers, "Trackers", lambda *arguments: given.append(arguments) or Trackers(*arguments))
    monkeypatch.setattr(loop.Run, "is_over", seen)
    hexadecimal = types.SimpleNamespace(hex="0123456789abcdef0")
    monkeypatch.setattr(start, "uuid", types.SimpleNamespace(uuid4=lambda: hexadecimal))
    with pytest.raises(Seen, match=r"^0123456789abcdef$"):
        fit(change(CONFIG, train={"tensorboard": True}), tmp_path / "run")
    assert [arguments[2:] for arguments in given] == [(0, "0123456789abcdef")]


LINE = {"event": "evaluation", "step": 3, "dev_loss": 2.0, "present_f1@5": 1.0, "metric": "keyphrases", "steps": 4}


@pytest.mark.parametrize("name", list(config_lib.METRICS))
def test_names_of_scores_are_valid_for_all_trackers(boards, name):
    """MLflow allows letters, digits and _-./: and spaces, TensorBoard no space or colon, W&B no dot or dash."""
    opening, _ = boards
    scores = scores_of(name, ["x"], [["x"]], [["x"]])
    taken: list[dict[str, float]] = []
    opening(taken.append).write({"event": "evaluation", "step": 3, **scores})
    assert len(taken[0]) == len(scores) + 1  # all names stay different
    assert all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(/[A-Za-z0-9_]+)*", key) for key in taken[0])


def test_names_for_trackers_are_escaped():
    assert name_of("evaluation", "present_f1@5") == "evaluation/present_f1_at_5"
    assert name_of("train", "loss") == "train/loss"
    assert name_of("train", "a b:c-d.e%é") == "train/a_b_c_d_e__"


@pytest.mark.parametrize("bad", ["dev_loss", "steps", "present_f1_at_5", "dev_loss, steps", "present_f1_at_5, steps"])
def test_value_refused_by_a_tracker_does_not_prevent_other_values(boards, said, bad):
    """Two refused values do not either, if a value between them is accepted."""
    opening, _ = boards
    taken: list[dict[str, float]] = []
    lost = [f"evaluation/{name}" for name in bad.split(", ")]

    def take(values):
        if not values.keys().isdisjoint(lost):
            raise ValueError("Invalid\nvalue")
        taken.append(values)

    trackers = opening(take)
    for step in (3, 4):
        trackers.write(LINE | {"step": step})
    trackers.write({"event": "train", "step": 5, "loss": 1.0})
    names = {"evaluation/dev_loss", "evaluation/present_f1_at_5", "evaluation/steps"} - {*lost}
    for step in (3, 4):
        assert {key for values in taken if values["step"] == step for key in values} == names | {"step"}
    assert taken[-1] == {"step": 5, "train/loss": 1.0}
    assert said == [f"warning: W&B: ValueError: Invalid value; left out: {', '.join(lost)}"]  # once


@pytest.mark.parametrize("failing", [1, 2])
def test_tracker_continues_after_one_failure(boards, said, failing):
    """The connection is lost once, in a line of several values and in one of a single value."""
    opening, _ = boards
    taken, failures = list[dict[str, float]](), [OSError("lost")] * failing

    def take(values):
        if failures:
            raise failures.pop()
        taken.append(values)

    trackers = opening(take)
    trackers.write(LINE if failing == 1 else {"event": "train", "step": 3, "loss": 1.0})
    trackers.write({"event": "train", "step": 5, "loss": 1.0})
    assert taken[-1] == {"step": 5, "train/loss": 1.0}
    assert len(said) == failing - 1


def test_tracker_that_refuses_all_values_is_dropped_after_three_tries(boards, said):
    opening, _ = boards
    tries = []

    def take(values):
        tries.append(values)
        raise OSError("no route")

    trackers = opening(take)
    trackers.write(LINE)
    trackers.write(LINE)
    assert len(tries) == 3
    assert said == ["warning: W&B: OSError: no route; the run continues without it"]


@pytest.mark.slow
def test_a_board_that_fails_is_dropped(tmp_path, monkeypatch, said):
    def full(values):
        raise OSError(28, "No space left on device")

    run = types.SimpleNamespace(define_metric=lambda name, step_metric: None, log=full, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **options: run))
    assert fit(change(CONFIG, train={"steps": 3, "wandb": "ours"}), tmp_path / "run") == 0
    (line,) = (line for line in said if "W&B" in line)
    assert "No space left on device; the run continues without it" in line
    assert [line["step"] for line in metrics(tmp_path / "run") if line["event"] == "train"] == [1, 2, 3]


def test_tracker_that_cannot_start_raises_one_line(tmp_path, monkeypatch):
    def refuse(**options):
        raise RuntimeError("No API key\nconfigured")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    with pytest.raises(UserError, match=r"train\.wandb: No API key configured; expected W&B to be ready"):
        fit(change(CONFIG, train={"wandb": "ours"}), tmp_path / "run")


@pytest.mark.slow
def test_logged_rate_equals_the_used_rate(tmp_path, monkeypatch):
    """A skipped step does not advance the schedule."""
    poisoned(monkeypatch, {1})
    config = change(CONFIG, train={"schedule": "linear", "warmup_steps": 1, "learning_rate": 1.0, "clip_norm": 1e-9})
    fit(config, tmp_path / "run")
    rates = [line["learning_rate"] for line in metrics(tmp_path / "run") if line["event"] == "train"]
    np.testing.assert_allclose(rates, [1.0, 1.0, 1.0, 0.8, 0.6, 0.4], rtol=1e-5)


@pytest.mark.slow
def test_stop_after_a_failed_save_saves_again(tmp_path, monkeypatch):
    save, asked = checkpoint.Store.save, loop.Stop.asked
    failing = []

    def once(self, step, *args, **kwargs):
        if step == 3 and not failing:
            failing.append(step)
            return False
        return save(self, step, *args, **kwargs)

    def stop(self):
        self.signal = 15 if failing else None
        return asked(self)

    monkeypatch.setattr(checkpoint.Store, "save", once)
    monkeypatch.setattr(loop.Stop, "asked", stop)
    config = change(CONFIG, train={"evaluate_every": 100})
    assert fit(config, tmp_path / "run") == 143
    assert checkpoint.open_run(tmp_path / "run").step == 3


@pytest.mark.slow
def test_best_step_of_a_lost_run_is_kept_aside(tmp_path, said):
    """Without an intact checkpoint it is another run, with another tokenizer and best step."""
    fit(CONFIG, tmp_path / "run")
    for path in (tmp_path / "run/checkpoints").iterdir():
        shutil.rmtree(path)
    (tmp_path / "run/tokenizer/tokenizer.json").write_text("of another")
    other = change(CONFIG, model={"dropout_rate": 0.25})  # no program has been compiled for this rate
    assert fit(other, tmp_path / "run") == 0
    assert any("renamed to best-before" in line for line in said)
    assert checkpoint.open_run(tmp_path / "run", best=True).config.model.dropout_rate == 0.25
    assert "of another" not in (tmp_path / "run/tokenizer/tokenizer.json").read_text()


@pytest.mark.parametrize(
    "key, value, library",
    [("tensorboard", True, "tensorboardX"), ("wandb", "ours", "wandb"), ("mlflow", "ours", "mlflow")],
)
def test_absent_library_raises_one_line(tmp_path, monkeypatch, key, value, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        UserError, match=rf"train\.{key}: found no {library}; expected the packages of the extra pipejax\[{key}\]"
    ):
        fit(change(CONFIG, train={key: value}), tmp_path / "run")


def test_peaks_are_known_by_the_name_of_the_device():
    def device(kind):
        return types.SimpleNamespace(device_kind=kind)

    assert monitoring.peak(device("NVIDIA H200")) == 989e12
    assert monitoring.peak(device("NVIDIA L40S")) == 362e12 and monitoring.peak(device("NVIDIA L4")) == 121e12
    assert monitoring.peak(device("NVIDIA H100 PCIe")) is None and monitoring.peak(device("cpu")) is None


def test_batches_have_the_shapes_that_process_0_chose(tmp_path, monkeypatch):
    """Other processors round differently and might choose other shapes, and processes would wait forever."""
    theirs, used = Shapes((48,), ((48, 40), (16, 24)), (64, 96), (12.5, 1 / 3)), []

    class Seen(Exception):
        pass

    def batches(train, tokenizer, config, model, shapes, *more):
        used.append(shapes)
        raise Seen

    def same(value):
        is_choice = isinstance(value, dict) and "pairs" in value
        return json.loads(json.dumps(theirs.to_json() if is_choice else value))

    monkeypatch.setattr(loop, "TrainingBatches", batches)
    monkeypatch.setattr(distributed, "same", same)
    with pytest.raises(Seen):
        fit(CONFIG, tmp_path / "run")
    assert used == [theirs]
