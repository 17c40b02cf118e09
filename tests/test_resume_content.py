"""A run resumes with input of equal content at any path; and the step at which it resumes."""

import dataclasses
import gzip
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pipejax import checkpoint
from pipejax.apps import demo
from pipejax.apps.teach import lessons
from pipejax.checkpoint import Restored, Store
from pipejax.config import Config
from pipejax.data.examples import fingerprint
from pipejax.model import dropout
from pipejax.system.errors import UserError
from pipejax.training.loop import Examples, fit
from pipejax.training.run_directory import PLACES, check_places, check_resume
from support import oracle
from support.refusals import refuses
from support.tiny import MODEL, RUN_ON_ONE, change, metrics

pytestmark = pytest.mark.usefixtures("compiled_once")
COUNT = 1500  # more than the fingerprint of former versions covered


def lines(first: int = 0, count: int = COUNT) -> list[str]:
    notes = demo.examples("train")
    made = (notes[i % len(notes)] for i in range(first, first + count))
    return [json.dumps({"source": x.source, "targets": x.targets[:2]}) + "\n" for x in made]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, tokenizer_files: Path, compiled_once: Any) -> Path:
    """Initial weights, data, and a run with them."""
    root = tmp_path_factory.mktemp("here")
    base = change(RUN_ON_ONE, data={"task": "none"}, train={"method": "none"})
    for name, seed in (("weights", 1), ("others", 2)):
        params = oracle.random_params(MODEL, np.random.default_rng(seed))
        checkpoint.save_params(root / name, base, params, tokenizer_source=tokenizer_files)
    shutil.copytree(tokenizer_files, root / "tokenizer")
    (root / "train.jsonl").write_text("".join(lines()))
    (root / "dev.jsonl").write_text("".join(lines(COUNT, 4)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert fit(config(), "run") == 0
    return root


def config(**data: Any) -> Config:
    """The config of the run, with other values of data, or of `init_from` and `init_best`."""
    train = {"init_from": "weights", "steps": 1, "evaluate_every": 1, "evaluate_examples": 0, "checkpoint_every": 1}
    train |= {key: data.pop(key) for key in ("init_from", "init_best") if key in data}
    own = {"task": "jsonl", "train": "train.jsonl", "dev": "dev.jsonl", "tokenizer": "tokenizer"}
    return change(RUN_ON_ONE, data=own | data, train=train)


# By name: a key, and a path with equal content.
SAME: dict[str, tuple[str, Any]] = {
    "./": ("train", "./train.jsonl"),
    "absolute": ("train", "{here}/train.jsonl"),
    "renamed": ("train", "away/renamed.jsonl"),
    "gzip": ("train", "away/packed.jsonl.gz"),
    "other spaces in JSON": ("train", "away/spaced.jsonl"),
    "a link": ("train", "away/link.jsonl"),
    "dev": ("dev", "away/dev.jsonl"),
    "tokenizer": ("tokenizer", "away/tokenizer"),
    "the run's own tokenizer": ("tokenizer", "run/tokenizer"),
    "weights": ("init_from", "away/weights"),
    "weights, absolute": ("init_from", "{here}/weights"),
    "a test split": ("test", "absent.jsonl"),
    "no bad line to skip": ("skip_bad", True),
}


@pytest.fixture(scope="module")
def away(here: Path) -> Path:
    """Copies of the run's input, and other files."""
    away = here / "away"
    away.mkdir()
    shutil.copy(here / "train.jsonl", away / "renamed.jsonl")
    (away / "packed.jsonl.gz").write_bytes(gzip.compress((here / "train.jsonl").read_bytes()))
    (away / "spaced.jsonl").write_text("".join(line.replace(": ", ":   ") for line in lines()))
    (away / "link.jsonl").symlink_to(here / "train.jsonl")
    shutil.copy(here / "dev.jsonl", away / "dev.jsonl")
    for name in ("tokenizer", "weights"):
        shutil.copytree(here / name, away / name)
    changed = lines()
    changed[777] = lines(COUNT, 1)[0]  # one between the examples that are compared in published data
    (away / "one.jsonl").write_text("".join(changed))
    (away / "fewer.jsonl").write_text("".join(lines()[:-1]))
    (away / "order.jsonl").write_text("".join(reversed(lines())))
    (away / "dev2.jsonl").write_text("".join(lines(COUNT, 3)))
    shutil.copytree(here / "tokenizer", away / "tokenizer2")
    settings = json.loads((away / "tokenizer2" / "tokenizer.json").read_text())
    settings["added_tokens"][-1]["lstrip"] = not settings["added_tokens"][-1]["lstrip"]
    (away / "tokenizer2" / "tokenizer.json").write_text(json.dumps(settings))
    return away


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_run_resumes_if_the_content_of_its_files_is_equal(
    here: Path, away: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(here)
    key, value = SAME[name]
    value = value.format(here=here) if isinstance(value, str) else value
    before = step(here)
    assert fit(config(**{key: value}), "./run") == 0
    assert step(here) == before and before.metadata["init"]


@pytest.mark.parametrize(
    "key, value, line",
    [
        ("train", "away/one.jsonl", "data.train: found examples that differ"),
        ("train", "away/fewer.jsonl", "data.train: found examples that differ"),
        ("train", "away/order.jsonl", "data.train: found examples that differ"),
        ("dev", "away/dev2.jsonl", "data.dev: 'dev.jsonl' -> 'away/dev2.jsonl'; expected the same on resume"),
        ("dev", "", "data.dev: 'dev.jsonl' -> ''; expected the same on resume"),
        ("tokenizer", "away/tokenizer2", "data.tokenizer: 'tokenizer' -> 'away/tokenizer2'; expected the same"),
        ("tokenizer", "", "data.tokenizer: 'tokenizer' -> ''; expected the same"),
        ("tokenizer", "away/none", "away/none"),
        ("init_from", "others", "train.init_from: 'weights' -> 'others'; expected the same on resume"),
        ("init_from", "", "train.init_from: 'weights' -> ''; expected the same on resume"),
        ("init_from", "away/none", "train.init_from: 'weights' -> 'away/none'"),
        ("separator", " # ", "data.separator: ' ; ' -> ' # '; expected no change on resume"),
    ],
)
def test_changed_content_is_refused(
    here: Path, away: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, line: str
) -> None:
    monkeypatch.chdir(here)
    with pytest.raises(UserError) as refused:
        fit(config(**{key: value}), "run")
    assert line in str(refused.value) and "--" not in str(refused.value)


def test_the_same_path_with_other_content_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    old = (here / "train.jsonl").read_text()
    try:
        (here / "train.jsonl").write_text("".join(lines()[:777] + lines(COUNT, 1) + lines()[778:]))
        with pytest.raises(UserError, match=r"data.train: found examples that differ"):
            fit(config(), "run")
    finally:
        (here / "train.jsonl").write_text(old)


def step(here: Path) -> Restored:
    return Store(here / "run" / "checkpoints").describe(1)


def test_run_of_former_version_resumes_at_equal_paths(here: Path, away: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoints have no digests of content, so a copy may differ."""
    monkeypatch.chdir(here)
    bare = dataclasses.replace(step(here), metadata={})
    prints = Examples.of(config()).fingerprints
    for name, (key, value) in SAME.items():
        value = value.format(here=here) if isinstance(value, str) else value
        if name in ("./", "absolute", "a link", "weights, absolute", "a test split"):
            check_places(bare, config(**{key: value}), prints, here / "run")
        else:
            with pytest.raises(UserError, match=r"expected the same on resume"):
                check_places(bare, config(**{key: value}), prints, here / "run")
                pytest.fail(name)


def test_fingerprint_of_a_former_version_is_compared_in_part(here: Path, away: Path) -> None:
    """It covered at most a thousand examples."""
    before = Examples.of(config(train=str(here / "train.jsonl"), dev="")).fingerprints
    now = Examples.of(config(train=str(away / "one.jsonl"), dev="")).fingerprints
    assert before["data"] == now["data"] and before["data_whole"] != now["data_whole"]
    few = demo.examples("train")[:900]
    assert fingerprint(few) == fingerprint(few, None)


def test_only_paths_are_compared_by_content() -> None:
    """All other keys are compared by value, and each key is compared in one of the two ways."""
    old, new = config(), config(train="x", dev="y", tokenizer="z", init_from="w", init_best=True, skip_bad=True)
    check_resume(old, new, Path("run"))
    assert {key for key in PLACES if key.startswith("train.")} == {"train.init_from", "train.init_best"}


# The best step.


@pytest.fixture(scope="module")
def run_with_best(tmp_path_factory: pytest.TempPathFactory, tokenizer_files: Path) -> Path:
    """A run whose best step, 3, is not its newest, 5, with other weights."""
    root = tmp_path_factory.mktemp("best") / "run"
    base = change(RUN_ON_ONE, data={"task": "none"}, train={"method": "sequential"})
    best = oracle.random_params(MODEL, np.random.default_rng(7))
    newest = jax.tree.map(lambda x: 1.02 * x, best)
    checkpoint.save_params(root, base, newest, tokenizer_source=tokenizer_files)
    store = Store(root / "best", writable=True)
    assert store.save(3, {"params": best}, config=base, metadata={"score": [1.0]}, wait=True)
    store.close()
    return root


def begun(tmp_path: Path, caplog: pytest.LogCaptureFixture, run: Callable[[], Any]) -> list[str]:
    """The lines about the start of a training."""
    caplog.set_level(logging.INFO, "pipejax")
    caplog.clear()
    run()
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith(("starting", "learning"))]


@pytest.mark.slow
def test_a_training_starts_from_the_best_step(
    here: Path, run_with_best: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(here)
    told, starts = [], []
    for best in (False, True):
        own, workdir = config(init_from=str(run_with_best), init_best=best), tmp_path / str(best)
        told += begun(tmp_path, caplog, lambda own=own, workdir=workdir: fit(own, workdir))  # type: ignore[misc]
        starts.append(Store(workdir / "checkpoints").describe(1).metadata["init"])
    assert told == [f"starting from {run_with_best} ({step})" for step in ("step 0", "best step 3")]
    kept = [Store(run_with_best / kind).describe(n).arrays["params"] for kind, n in (("checkpoints", 0), ("best", 3))]
    assert starts == [checkpoint.fingerprint.digest(arrays) for arrays in kept] and starts[0] != starts[1]
    with pytest.raises(UserError, match=r"train.init_best: True -> False; expected the same on resume"):
        fit(config(init_from=str(run_with_best)), tmp_path / "True")
    moved = shutil.copytree(run_with_best, tmp_path / "moved")
    assert fit(config(init_from=str(moved), init_best=True), tmp_path / "True") == 0


def test_a_run_without_a_best_step_is_refused(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    with pytest.raises(UserError, match=r"weights: found no best/; expected a run that was evaluated"):
        fit(config(init_best=True), tmp_path / "run")
    with pytest.raises(UserError, match=r"train.init_best: found true without train.init_from"):
        fit(config(init_best=True, init_from=""), tmp_path / "run")


@pytest.mark.long
def test_rows_are_taught_by_the_best_step(
    here: Path, run_with_best: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in.jsonl").write_text("".join(lines(0, 40)))
    answers = []
    for best in (False, True):
        workdir = tmp_path / str(best)
        more = ["train.steps=1", "train.batch_size=4", "train.accumulate=1", "train.evaluate_every=1"]

        def taught(best: bool = best, workdir: Path = workdir, more: list[str] = more) -> None:
            source = str(tmp_path / "in.jsonl")
            assert lessons.teach(str(run_with_best), source, workdir, best=best, held_out=6, overrides=more) == 0

        told = begun(tmp_path, caplog, taught)
        name = "best step 3" if best else "step 0"
        way = f"learning from {run_with_best}, {name}, whose answers are generated greedily"
        assert told[0] == way and told[1].endswith(f"({name})")
        answers.append(json.loads((workdir / "labels" / "settings.json").read_text())["weights"])
        taught()  # a repetition has nothing to do
    assert answers[0] != answers[1]
    with refuses("labels: --checkpoint"):
        lessons.teach(str(run_with_best), str(tmp_path / "in.jsonl"), tmp_path / "True", held_out=6, overrides=more)


@pytest.fixture
def old_run(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of one step, of three, with the dropout of an older release."""
    monkeypatch.chdir(here)
    with monkeypatch.context() as patch:
        patch.setattr(dropout, "VERSION", 1)
        assert fit(config(), tmp_path / "old") == 0
    return tmp_path / "old"


def test_new_dropout_continues_run_with_older_masks(old_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    longer = change(config(), train={"steps": 2})
    with pytest.raises(UserError, match=r"dropout masks differ; expected train.new_dropout=true") as refused:
        fit(longer, old_run)
    assert "\n" not in str(refused.value) and [line["event"] for line in metrics(old_run)][-1] == "end"
    assert fit(change(longer, train={"new_dropout": True}), old_run) == 0
    assert "from step 2 on the run uses the dropout masks of this release" in caplog.text
    assert fit(change(longer, train={"steps": 3}), old_run) == 0  # the run has these masks now


def test_older_run_that_is_finished_or_has_no_dropout_is_not_refused(old_run: Path, here: Path, tmp_path: Path) -> None:
    assert fit(config(), old_run) == 0
    bare = change(config(), train={"dropout": 0.0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dropout, "VERSION", 1)
        assert fit(bare, tmp_path / "bare") == 0
    assert fit(change(bare, train={"steps": 2}), tmp_path / "bare") == 0
