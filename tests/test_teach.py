"""Training on unlabelled sources: labels, held-out sources, resume after a kill, and refusals."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import pipejax
from pipejax import checkpoint
from pipejax import config as config_lib
from pipejax.apps import demo
from pipejax.apps.teach import labels, lessons, teach_command
from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, MeshConfig, TrainConfig
from pipejax.data.batches import pack_size
from pipejax.data.examples import Example
from pipejax.inference.sources import Source
from pipejax.offline import resume
from pipejax.system.errors import UserError
from pipejax.training import loop
from support import oracle
from support.foreign_auxiliary import Even
from support.refusals import refuses
from support.tiny import MODEL, change, metrics

pytestmark = pytest.mark.usefixtures("compiled_once")
CONFIGS = sorted(path for path in (Path(__file__).parents[1] / "configs").glob("*.py") if path.stem != "paper")
SETTINGS = (
    *("train.steps=4", "train.warmup_steps=0", "train.log_every=1", "train.evaluate_every=2"),
    *("train.checkpoint_every=2", "train.batch_size=8", "train.shapes=2", "train.length_group=2"),
)
SEED = 7
TEACHER = Config(
    name="teacher",
    model=MODEL,
    grid=GridConfig(time_max=12, sub_max=4),
    data=DataConfig(task="none", separator=" ; "),
    train=TrainConfig(method="none"),
    decode=DecodeConfig(max_length=16),
    mesh=MeshConfig(data=1),
)


@pytest.fixture(scope="module")
def given(tmp_path_factory, tokenizer_files):
    """Random weights as a converted checkpoint, and a file of 40 sources, two of them equal."""
    root = tmp_path_factory.mktemp("given")
    params = oracle.random_params(MODEL, np.random.default_rng(SEED))
    checkpoint.save_params(root / "teacher", TEACHER, params, tokenizer_source=tokenizer_files)
    texts = [e.source for e in demo.examples("train")[:39]]
    texts.append(texts[3])
    lines = [json.dumps({"id": f"s{i}", "source": text}) + "\n" for i, text in enumerate(texts)]
    (root / "sources.jsonl").write_text("".join(lines))
    return root


def run(given, workdir, *overrides, held_out=6):
    source = str(given / "sources.jsonl")
    return lessons.teach(str(given / "teacher"), source, workdir, held_out=held_out, overrides=[*SETTINGS, *overrides])


@pytest.fixture(scope="module")
def taught(given, tmp_path_factory, compiled_once):
    workdir = tmp_path_factory.mktemp("runs") / "taught"
    assert run(given, workdir) == 0
    return workdir


def contents(workdir):
    """The files of a directory, without values that depend on the clock."""
    answers, found = (
        (workdir / "labels" / labels.ANSWERS).read_bytes(),
        json.loads((workdir / "agreement.json").read_text()),
    )
    return answers, found, [line.get("params_fp") for line in metrics(workdir) if line["event"] != "train"]


# Labels.


def test_labels_equal_output_of_decode(given, taught):
    """The labels are answers of the sequential decoder, split at the separator of the settings."""
    t5 = pipejax.load(given / "teacher", overrides=["data.separator= ; "])
    sources = [json.loads(line) for line in (given / "sources.jsonl").read_text().splitlines()]
    expected = t5.decode(sources, method="sequential")
    answers = [json.loads(line) for line in (taught / "labels" / labels.ANSWERS).read_text().splitlines()]
    assert answers == expected
    counts = json.loads((taught / "agreement.json").read_text())["labels"]
    ended = [record for record in expected if not record["truncated"]]
    assert counts["truncated"] == len(expected) - len(ended) > 0
    assert counts["train"] + counts["held_out"] == len(ended)
    assert counts["empty"] == sum(not record["rows"] for record in ended)
    assert counts["single"] == sum(len(set(record["rows"])) == 1 for record in ended)


@pytest.mark.slow
def test_beams_of_the_checkpoint_are_used(given, tmp_path):
    """Beams write the labels; rows are written greedily."""
    assert run(given, tmp_path / "run", "decode.beams=2") == 0
    t5 = pipejax.load(given / "teacher", overrides=["data.separator= ; ", "decode.beams=2"])
    sources = [json.loads(line) for line in (given / "sources.jsonl").read_text().splitlines()]
    answers = [json.loads(line) for line in (tmp_path / "run/labels" / labels.ANSWERS).read_text().splitlines()]
    assert answers == t5.decode(sources, method="sequential")
    assert pipejax.load(tmp_path / "run").config.decode.beams == 1


def test_labels_are_never_sampled(given, tmp_path, tokenizer_files, monkeypatch, caplog):
    """Neither does the run sample; both are opened, and nothing is labelled."""
    decode = dataclasses.replace(TEACHER.decode, temperature=0.7, top_k=5, samples=2)
    params = checkpoint.open_run(given / "teacher").items["params"]
    drawing = dataclasses.replace(TEACHER, decode=decode)
    checkpoint.save_params(tmp_path / "teacher", drawing, params, tokenizer_source=tokenizer_files)
    opened = []

    def stop(generator, source):
        opened.append(generator.config.decode)
        raise UserError("enough")

    monkeypatch.setattr(labels, "read_unlabelled", stop)
    caplog.set_level("INFO")
    with pytest.raises(UserError, match="enough"):
        lessons.teach(str(tmp_path / "teacher"), str(given / "sources.jsonl"), tmp_path / "run", overrides=SETTINGS)
    assert opened == [TEACHER.decode]
    assert "whose answers are generated greedily" in caplog.text


def test_held_out_examples_are_never_trained_on(given, tmp_path, monkeypatch):
    read, trained, examined = loop.TrainingBatches, [], []

    def watched(examples, *args):
        trained.extend(examples)
        return read(examples, *args)

    def examine(run, made):
        examined.extend(made.held_out)
        return measure(run, made)

    measure = lessons.measure_agreement
    monkeypatch.setattr(loop, "TrainingBatches", watched)
    monkeypatch.setattr(lessons, "measure_agreement", examine)
    assert run(given, tmp_path / "run") == 0
    ids, texts = ({getattr(e, key) for e in examined} for key in ("id", "source"))
    assert examined and trained
    assert not ids & {e.id for e in trained} and not texts & {e.source for e in trained}


@pytest.mark.parametrize("seed", range(5))
def test_equal_texts_are_in_one_part(seed):
    sources = [Source(i, f"text {i % 20}") for i in range(60)]
    chosen = labels.choose_held_out(sources, 4, seed)
    assert len(chosen) == 12 and {i % 20 for i in chosen} == {i % 20 for i in range(60) if i in chosen}
    assert len({i % 20 for i in chosen}) == 4
    assert chosen == labels.choose_held_out(sources, 4, seed) != labels.choose_held_out(sources, 4, seed + 1)


def test_equivalent_texts_are_in_one_part():
    for seed in range(20):
        sources = [Source(i, text) for i, text in enumerate(["a b", "a  b ", "c", "\uff43\n", "d", "e"])]
        chosen = labels.choose_held_out(sources, 2, seed)
        assert (0 in chosen) == (1 in chosen) and (2 in chosen) == (3 in chosen)
        assert len({sources[i].content.strip() for i in chosen} - {"a  b", "\uff43"}) == 2


@pytest.mark.parametrize("count, expected", [(2, 1), (25, 2), (9000, 512)])
def test_a_tenth_is_held_out(count, expected):
    assert len(labels.choose_held_out([Source(i, str(i)) for i in range(count)], None, 0)) == expected


def test_answers_are_split_into_rows():
    texts = ["a b ; c ; a b", "", "d", "e ; f", "g ; h", "i ; j"]
    made = [{"text": text, "truncated": None, "steps": i} for i, text in enumerate(texts)]
    made[3]["truncated"] = "max_length"
    sources = [Source(i, f"text {i}") for i in range(6)]
    found = lessons.part(labels.Answered(sources, made, frozenset({3, 4})), Config())
    assert [(e.source, e.targets) for e in found.train] == [
        ("text 0", ("a b", "c")),
        ("text 1", ()),
        ("text 2", ("d",)),
        ("text 5", ("i", "j")),
    ]
    assert [e.targets for e in found.held_out] == [("g", "h")] and found.steps == [4]
    assert found.counts == {
        "sources": 6, "truncated": 1, "repeated": 1, "empty": 1, "single": 1, "train": 4, "held_out": 1, "rows": 5,
    }  # fmt: skip


def test_blank_separator_splits_answers_into_sentences():
    made = [{"text": "It rained. Nobody came.", "truncated": None, "steps": 9}] * 2
    config = change(Config(), data={"separator": " "})
    answered = labels.Answered([Source(0, "a"), Source(1, "b")], made, frozenset({1}))
    found = lessons.part(answered, config)
    assert found.train[0].targets == ("It rained.", "Nobody came.") == found.held_out[0].targets


# The run.


def test_teach_takes_a_quarter_of_the_updates_and_keeps_other_settings():
    saved = change(
        Config(model=MODEL),
        train={
            "method": "sequential",
            "steps": 700,
            "warmup_steps": 50,
            "learning_rate": 2e-3,
            "batch_size": 16,
            "accumulate": 2,
            "init_from": "other",
        },
        data={"task": "demo", "train": "train.jsonl", "tokenizer": "somewhere"},
        mesh={"data": 1},
    )
    config = lessons.lesson(saved, "/runs/teacher", ["train.weight_decay=0.5"])
    assert (config.train.steps, config.train.warmup_steps, config.train.weight_decay) == (175, 13, 0.5)
    assert (config.train.batch_size, config.train.accumulate, config.train.learning_rate) == (64, 8, 4e-3)
    assert (config.train.method, config.train.init_from) == ("pipelined", "/runs/teacher")
    assert config.data == change(saved, data={"train": "", "tokenizer": ""}).data
    converted = lessons.lesson(TEACHER, "/checkpoints/t5", [])
    assert (converted.train.steps, converted.data.task, converted.model) == (500, "jsonl", MODEL)
    assert converted.train.schedule == "constant"
    adafactor = change(saved, train={"optimizer": "adafactor"})
    assert lessons.lesson(adafactor, "/runs/teacher", []).train.learning_rate == 2e-3


def test_a_run_with_auxiliary_parameters_teaches_its_model() -> None:
    """The lesson trains the whole model, without auxiliary parameters."""
    saved = change(Config(model=MODEL), train={"method": "sequential", "freeze": "backbone", "init_from": "other"})
    config = lessons.lesson(dataclasses.replace(saved, auxiliary=Even()), "/runs/head", [])
    assert config.auxiliary is None and config.train.freeze == "none"


@pytest.mark.parametrize("more", [{"row_prefixes": ["red"]}, {"max_rows": 1}])
def test_sources_with_settings_of_rows_are_refused(given, tmp_path, more):
    lines = (given / "sources.jsonl").read_text().splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), **more})
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    with refuses(f"{tmp_path / 'in.jsonl'}:3", found="row_prefixes or max_rows"):
        labels.read_unlabelled(pipejax.load(given / "teacher"), str(tmp_path / "in.jsonl"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_checkpoint_of_any_config_can_be_taught_from(file):
    """The parts of a batch have the size and packing of the checkpoint's training."""
    overrides = ["train.method=sequential", "mesh.data=1", "mesh.fsdp=1"]
    saved = dataclasses.replace(config_lib.load(file, overrides), model=MODEL)
    config = lessons.lesson(saved, "/runs/teacher", [])
    before, after = saved.train, config.train
    assert after.batch_size // after.accumulate == before.batch_size // before.accumulate
    assert pack_size(after) == pack_size(before)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.batch_size=6"], r"^train\.batch_size: found 6; expected a multiple of 4 "),
        (["grid.delay=0"], r"^grid\.delay: found 0 without grid\.row_names; "),
        (["grid.delay=10", 'grid.row_names=["a:", "b:", "c:"]'], r"^grid\.row_names: found 3; expected at most 2, "),
    ],
)
def test_training_errors_are_raised_before_labelling(given, tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        run(given, tmp_path / "run", *overrides)
    assert not (tmp_path / "run" / "labels").exists()


def test_agreement_compares_the_run_with_the_checkpoint(given, taught):
    sources = [json.loads(line) for line in (given / "sources.jsonl").read_text().splitlines()]
    answers = [json.loads(line) for line in (taught / "labels" / labels.ANSWERS).read_text().splitlines()]
    chosen = labels.choose_held_out([Source(s["id"], s["source"]) for s in sources], 6, 0)
    pairs = [(sources[i]["source"], answers[i]) for i in chosen if not answers[i]["truncated"]]
    t5 = pipejax.load(taught)
    assert t5.default_method == "pipelined"
    decoded = t5.decode([source for source, _ in pairs])
    found = json.loads((taught / "agreement.json").read_text())
    same = [set(answer["rows"]) & set(record["rows"]) for (_, answer), record in zip(pairs, decoded, strict=True)]
    gold = sum(max(len(set(answer["rows"])), 1) for _, answer in pairs)
    assert found["em_recall"] == pytest.approx(100 * sum(map(len, same)) / gold)
    equal = [set(a["rows"]) == set(r["rows"]) for (_, a), r in zip(pairs, decoded, strict=True)]
    assert found["equal_answers"] == pytest.approx(100 * sum(equal) / len(pairs))
    assert (found["step"], found["examples"]) == (4, len(pairs))
    assert found["steps"] == pytest.approx(sum(r["steps"] for r in decoded) / len(pairs))
    assert found["checkpoint_steps"] == pytest.approx(sum(a["steps"] for _, a in pairs) / len(pairs))
    assert found["steps_saved"] == pytest.approx(100 - 100 * found["steps"] / found["checkpoint_steps"])


class _Killed(BaseException):
    pass


def killed_at(monkeypatch, where, name, count):
    """Makes the process end at call number `count` of a function."""
    call, calls = getattr(where, name), []

    def until(*args, **kwargs):
        calls.append(0)
        if len(calls) == count:
            raise _Killed
        return call(*args, **kwargs)

    monkeypatch.setattr(where, name, until)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where, name, count",
    [
        (resume, "write_whole", 1),
        (resume, "write_whole", 11),
        (resume.Unfinished, "end", 1),
        (lessons, "part", 1),
        (lessons, "fit", 1),
        (loop.Run, "make_step", 4),
        (lessons, "measure_agreement", 1),
    ],
)
def test_killed_run_ends_like_an_uninterrupted_run(given, taught, tmp_path, monkeypatch, where, name, count):
    with monkeypatch.context() as patch, pytest.raises(_Killed):
        killed_at(patch, where, name, count)
        run(given, tmp_path / "run")
    before = tmp_path / "run" / "labels" / labels.ANSWERS
    whole = (taught / "labels" / labels.ANSWERS).read_bytes()
    kept = before.read_bytes() if before.exists() else b""
    assert whole.startswith(kept) and (len(kept) == len(whole)) == (name != "write_whole")
    assert run(given, tmp_path / "run") == 0
    assert contents(tmp_path / "run") == contents(taught)


def test_labels_are_written_once(given, taught, tmp_path, monkeypatch):
    shutil.copytree(taught, tmp_path / "run")
    monkeypatch.setattr(labels, "decode_file", None)  # a call of it would fail
    assert run(given, tmp_path / "run") == 0
    assert contents(tmp_path / "run") == contents(taught)
    assert run(given, tmp_path / "run", "train.steps=6") == 0
    assert json.loads((tmp_path / "run" / "agreement.json").read_text())["step"] == 6


# Bad input.


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["data.train=x.jsonl"], r"^--set: data\.train cannot be changed when rows are taught"),
        (["train.method=sequential"], r"^--set: train\.method cannot be changed"),
        (["train.init_from=x"], r"^--set: train\.init_from cannot be changed"),
        (["model.d_model=8"], r"^--set: model\.d_model cannot be changed"),
        (["train.step=3"], r"^train\.step: unknown key \(did you mean train\.steps\?\)"),
        (["decode.beams=2", "decode.draft=source"], r"^decode\.draft: found source with decode\.beams = 2"),
        (
            ["data.separator= deliver deliver "],
            r"^data\.separator: found ' deliver deliver '",
        ),
        (["decode.max_length=1"], r"^decode\.max_length: found 1"),
    ],
)
def test_unsuitable_settings_are_refused(given, tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        run(given, tmp_path / "run", *overrides)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    "content, message",
    [
        ("", r"in\.jsonl: found no lines; expected at least two sources"),
        ('{"source": "honey"}\n', r"--held-out: found 1; expected fewer than the 1 different sources"),
        ('{"source": "honey"}\n{"source_ids": [3, 1]}\n', r'in\.jsonl:2: found "source_ids"; expected a text source'),
        ('{"source": "honey"}\n{"text": "bread"}\n', r'in\.jsonl:2: found no "source"'),
        ('{"source": "honey"}\n{"source"\n', r"in\.jsonl:2: not JSON"),
    ],
)
def test_unsuitable_sources_are_refused(given, tmp_path, content, message):
    (tmp_path / "in.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        lessons.teach(str(given / "teacher"), str(tmp_path / "in.jsonl"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unsuitable_paths_are_refused(given, taught, tmp_path, tokenizer_files):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with refuses(tmp_path / "other"):
        run(given, tmp_path / "other")
    (tmp_path / "trained").mkdir()
    for name in (".lock", "config.json"):
        (tmp_path / "trained" / name).touch()
    with refuses(tmp_path / "trained"):
        run(given, tmp_path / "trained")
    with refuses("taught"):
        lessons.teach(str(taught), str(given / "sources.jsonl"), tmp_path / "run")
    params = oracle.random_params(MODEL, np.random.default_rng(0))
    checkpoint.save_params(tmp_path / "bare", TEACHER, params)
    with refuses("bare", found="no tokenizer"):
        lessons.teach(str(tmp_path / "bare"), str(given / "sources.jsonl"), tmp_path / "run")
    with pytest.raises(UserError, match=r"^--input -: found standard input"):
        teach_command.main(["--checkpoint", "x", "--input", "-", "--workdir", "y"])
    with pytest.raises(UserError, match=r"^--input absent\.jsonl: no such file"):
        teach_command.main(["--checkpoint", "x", "--input", "absent.jsonl", "--workdir", "y"])


def test_changed_settings_need_a_new_directory(given, taught, tmp_path):
    before = contents(taught)
    with pytest.raises(UserError, match=r"--held-out: 6 -> 7; expected no change"):
        run(given, taught, held_out=7)
    with pytest.raises(UserError, match=r"decode\.max_length: 16 -> 20; expected no change"):
        run(given, taught, "decode.max_length=20")
    with pytest.raises(UserError, match=r"train\.learning_rate: 0\.0002 -> 0\.001; expected no change on resume"):
        run(given, taught, "train.learning_rate=0.001")
    lines = (given / "sources.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "fewer.jsonl").write_text("".join(lines[1:]))
    with refuses("--input"):
        lessons.teach(str(given / "teacher"), str(tmp_path / "fewer.jsonl"), taught, held_out=6, overrides=SETTINGS)
    params = oracle.random_params(MODEL, np.random.default_rng(SEED + 1))
    checkpoint.save_params(tmp_path / "teacher", TEACHER, params, tokenizer_source=given / "teacher" / "tokenizer")
    with refuses("--checkpoint"):
        lessons.teach(str(tmp_path / "teacher"), str(given / "sources.jsonl"), taught, held_out=6, overrides=SETTINGS)
    assert contents(taught) == before


def test_foreign_answers_are_refused(given, taught, tmp_path):
    shutil.copytree(taught, tmp_path / "run")
    answers = tmp_path / "run" / "labels" / labels.ANSWERS
    lines = answers.read_text().splitlines(keepends=True)
    answers.write_text("".join([*lines[:5], *lines[6:], lines[5]]))
    with pytest.raises(UserError, match=r"answers\.jsonl:6: found no answer to the source 's5'"):
        run(given, tmp_path / "run")
    answers.write_text("".join(lines[:-1]))
    with pytest.raises(UserError, match=r"answers\.jsonl: found 39 answers; expected 40"):
        run(given, tmp_path / "run")


def test_agreement_is_measured_by_the_exact_rule(tmp_path, monkeypatch):
    """A row that is written once instead of twice is a difference; the order has no effect."""
    examples = [Example(str(i), "x", rows) for i, rows in enumerate([("1.5", "b", "b"), ("c", "d"), ("e",)])]
    answers = [["b", "1.5"], ["d", "c "], ["e"]]
    generator = SimpleNamespace(batch_size_for=lambda size: size, config=Config(), origin={})
    asked = []

    def evaluate(generator, examples, *, metric, **rest):
        asked.append(metric)
        scores = dict.fromkeys(("examples", "em_precision", "em_recall", "em_f1", "pm_f1", "truncated"), 1.0)
        return scores | {"steps": 2.0}, [{"rows": rows} for rows in answers]

    monkeypatch.setattr(lessons, "load", lambda run: generator)
    monkeypatch.setattr(lessons, "evaluate", evaluate)
    found = lessons.measure_agreement(tmp_path, SimpleNamespace(held_out=examples, steps=[4], counts={}))
    assert asked == ["exact"] and found["equal_answers"] == pytest.approx(200 / 3)
    assert json.loads((tmp_path / "agreement.json").read_text()) == found
