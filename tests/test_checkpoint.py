"""Saving in the background, kept steps, failed saves, and messages about damaged steps."""

import contextlib
import errno
import gc
import json
import os
import shutil
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest

from pipejax import config as config_lib
from pipejax.apps.verify.checkpoint_command import main
from pipejax.checkpoint import Store, arrays, check_place, manifest, open_run, save_params
from pipejax.checkpoint.manifest import Damaged, on_host
from pipejax.system import compile_cache
from pipejax.system.errors import UserError
from pipejax.training.loop import fit
from pipejax.training.run_directory import RunDirectory
from support import tiny_run as runs
from support.manifests import seal
from support.steps_of_numbers import CONFIG, fail_with, flip, save_all, tree


def test_buffers_may_be_donated_while_they_are_saved(tmp_path):
    step = jax.jit(lambda items: jax.tree.map(lambda x: x * 1.5 + 1, items), donate_argnums=0)
    items, store, expected = {"params": {"a": jnp.ones((1000, 1000))}}, Store(tmp_path, writable=True), {}
    for number in range(1, 4):
        items = step(items)
        expected[number] = np.array(items["params"]["a"])
        assert store.save(number, items, config=CONFIG)
        for _ in range(20):
            items = step(items)
    assert store.close()
    for number, value in expected.items():
        np.testing.assert_array_equal(Store(tmp_path).restore(number).items["params"]["a"], value)


@pytest.mark.parametrize(
    "name, words", [("\udcff", "found a path that is not UTF-8"), ("\udcc3\udca9", "PYTHONUTF8=1")]
)
def test_path_that_is_not_utf_8_or_is_misread_is_refused(name, words):
    """With PYTHONUTF8=0 Python keeps the bytes of a valid name as halves of surrogate pairs."""
    with pytest.raises(UserError, match=words):
        check_place(Path("/runs") / name)


@pytest.mark.parametrize("spelling", ["../runs/x", "away/../y/.", "./z//", "link/../w", "../runs/link/../v"])
def test_run_is_found_by_any_path_to_its_directory(tmp_path, monkeypatch, spelling):
    """`link/..` is the parent of the link's target, as for the system."""
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    for made in (runs / "away", elsewhere / "inside"):
        made.mkdir(parents=True)
    (runs / "link").symlink_to(elsewhere / "inside")
    monkeypatch.chdir(runs)
    save_params(spelling, CONFIG, tree(1)["params"])
    plain = (elsewhere if "link" in spelling else runs) / Path(spelling).name
    for name in (Path(spelling), plain):
        assert Store(name / "checkpoints").restore(0).path == plain / "checkpoints" / "0"
        assert main(["verify", str(name)]) == 0
        assert RunDirectory(name / ".." / "new").path == plain.parent / "new"


@pytest.mark.parametrize("spelling", ["../runs/cache", "away/../cache", "link/../cache"])
def test_cache_is_found_by_any_path_to_its_directory(tmp_path, monkeypatch, spelling):
    (tmp_path / "runs" / "away").mkdir(parents=True)
    (tmp_path / "elsewhere" / "inside").mkdir(parents=True)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere" / "inside")
    monkeypatch.chdir(tmp_path / "runs")
    monkeypatch.setenv(compile_cache.VARIABLE, spelling)
    expected = tmp_path / ("elsewhere" if "link" in spelling else "runs") / "cache"
    assert compile_cache.safe_directory() == expected and expected.is_dir()


@pytest.mark.parametrize("keep, keep_every, expected", [(2, 0, [5, 4]), (1, 3, [5, 3]), (None, 0, [5, 4, 3, 2, 1])])
def test_newest_steps_are_kept(tmp_path, keep, keep_every, expected):
    save_all(Store(tmp_path, keep=keep, keep_every=keep_every, writable=True), 1, 2, 3, 4, 5)
    assert Store(tmp_path).steps() == expected


def test_a_failed_save_costs_one_line_and_no_other_step(tmp_path, monkeypatch, said):
    store = Store(tmp_path, keep=3, writable=True)
    assert store.save(1, tree(1.0), config=CONFIG, wait=True)
    with monkeypatch.context() as patch:
        fail_with(errno.ENOSPC, patch)
        assert not store.save(2, tree(2.0), config=CONFIG, wait=True)
    assert said == [
        f"warning: {tmp_path / '2'}: not saved (No space left on device); earlier checkpoints are unchanged"
    ]
    assert store.save(3, tree(3.0), config=CONFIG, wait=True) and store.close()
    assert len(said) == 1 and sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]
    assert [Store(tmp_path).restore(step).items["params"]["a"][0, 0] for step in (1, 3)] == [1.0, 3.0]


def test_writes_that_outlive_a_failed_save_leave_nothing(tmp_path, monkeypatch):
    """On a full disk one write fails while other writes continue and create their directories again."""
    store, staging = Store(tmp_path, writable=True), tmp_path / "2.orbax-checkpoint-tmp"
    fail_with(errno.ENOSPC, monkeypatch)
    assert not store.save(2, tree(2.0), config=CONFIG, wait=True)

    def write():
        with contextlib.suppress(FileNotFoundError):  # the cleanup may happen between the two directories
            (staging / "params").mkdir(parents=True)

    late = threading.Timer(0.1, write)
    late.start()
    assert store.close()
    late.join()
    assert list(tmp_path.iterdir()) == []


def test_arrays_of_another_step_are_damage(tmp_path):
    """The files are intact; only the digests in the manifest show the difference."""
    save_all(Store(tmp_path, keep=2, writable=True), 1, 2)
    shutil.rmtree(tmp_path / "2/params")
    shutil.copytree(tmp_path / "1/params", tmp_path / "2/params")
    with pytest.raises(Damaged, match="params: "):
        Store(tmp_path).restore(2)
    assert Store(tmp_path).restore(1).items["params"]["a"][0, 0] == 1


def test_metadata_is_read_from_an_intact_step(tmp_path, said):
    save_all(Store(tmp_path, writable=True), 1, 2, 3)
    assert Store(tmp_path).newest_metadata() == {"score": [3]}
    flip(tmp_path / "3/params")
    (tmp_path / "2/manifest/metadata").write_text("{}")
    assert Store(tmp_path).newest_metadata() == {"score": [1]}
    assert "damaged, params" in said[0] and said[0].endswith("renamed to corrupt-3")
    assert "damaged, manifest does not match its seal; renamed to corrupt-2" in said[1]
    assert Store(tmp_path).steps() == [1]


def test_older_step_beside_its_successor_is_removed(tmp_path):
    save_all(Store(tmp_path, writable=True), 1, 2)
    assert Store(tmp_path).newest_metadata() == {"score": [2]} and Store(tmp_path).steps() == [2, 1]
    store = Store(tmp_path, keep=1, writable=True)
    assert store.newest_metadata() == {"score": [2]} and store.steps() == [2]
    save_all(store, 3)
    assert store.steps() == [3] and Store(tmp_path).restore(3).items["params"]["a"][0, 0] == 3


def test_step_removed_while_its_bytes_are_counted(tmp_path, monkeypatch, capsys):
    """A training removes the folders of the step one after the other after it was verified."""
    save_all(Store(tmp_path / "checkpoints", writable=True), 4, 8)
    scan, store = os.scandir, Store(tmp_path / "checkpoints")
    innermost = {max((folder for folder, *_ in os.walk(store.place(step))), key=len) for step in (4, 8)}

    def scandir(place="."):
        if str(place) in innermost:
            shutil.rmtree(place)
        return scan(place)

    monkeypatch.setattr(Store, "verify", lambda store, step: {})
    monkeypatch.setattr(os, "scandir", scandir)
    assert main(["verify", str(tmp_path)]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["intact", "intact"]


def test_verify_reports_intact_and_damaged_steps(tmp_path, capsys):
    save_all(Store(tmp_path / "checkpoints", writable=True), 4, 8)
    save_all(Store(tmp_path / "best", writable=True), 4)
    assert main(["verify", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.err == "2 steps and 1 best, 0 damaged\n"
    assert [line.split()[:2] for line in told.out.splitlines()] == [
        ["checkpoints/4", "intact"],
        ["checkpoints/8", "intact"],
        ["best/4", "intact"],
    ]
    flip(tmp_path / "checkpoints/8")
    (tmp_path / "checkpoints/99").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert main(["verify", "--json", str(tmp_path)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["damaged"] == 2
    assert [(step["place"], step["good"]) for step in report["steps"]] == [
        ("checkpoints/4", True),
        ("checkpoints/8", False),
        ("checkpoints/99", False),
        ("best/4", True),
    ]
    good, bad, empty, _ = report["steps"]
    assert good["items"] == {"params": 2} and good["bytes"] > 1000
    assert "params" in bad["reason"] and "manifest" in empty["reason"]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name, found", [("nowhere", "no such directory"), ("", "found no checkpoints/")])
def test_verify_refuses_a_directory_without_a_run(tmp_path, name, found):
    with pytest.raises(UserError, match=f"{found}; expected a run directory"):
        main(["verify", str(tmp_path / name)])


def test_conversion_on_a_full_disk_leaves_no_files(tmp_path, monkeypatch):
    fail_with(errno.ENOSPC, monkeypatch)
    with pytest.raises(UserError, match=r"new: cannot be written \(.*No space left on device"):
        save_params(tmp_path / "new", CONFIG, tree(1.0)["params"])
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_that_cannot_be_copied_raises_one_line(tmp_path):
    """The line names the run, and not the directory that the files are copied from, which may be temporary."""
    (tmp_path / "passing").mkdir()
    (tmp_path / "passing" / "tokenizer.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError) as caught:
        save_params(tmp_path / "new", CONFIG, tree(1.0)["params"], tokenizer_source=tmp_path / "passing")
    assert str(caught.value) == f"{tmp_path / 'new'}: cannot be written ([Errno 2] No such file or directory)"
    assert [path.name for path in tmp_path.iterdir()] == ["passing"]


def test_lines_of_the_log_wait_for_space_on_the_disk(tmp_path, monkeypatch, said):
    path = tmp_path / "run/metrics.jsonl"
    with RunDirectory(tmp_path / "run") as directory:
        directory.log_metrics({"step": 1})

        def full(handle):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            directory.log_metrics({"step": 2})
            directory.log_metrics({"step": 3})
        assert path.read_text() == '{"step": 1}\n'
        directory.log_metrics({"step": 4})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    assert said == [
        f"warning: {path}: cannot be written (No space left on device); its lines are kept until there is space"
    ]


# Whole runs.


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = runs.prepare(tmp_path_factory.mktemp("tiny"))
    return config_lib.load(path, ["train.steps=8", "train.evaluate_every=8", "mesh.data=1"])


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory, compiled_once):
    directory = tmp_path_factory.mktemp("runs") / "whole"
    assert fit(config, directory) == 0
    return directory


@pytest.mark.slow
def test_training_continues_after_failed_saves_except_the_last(config, finished, tmp_path, monkeypatch, said):
    with monkeypatch.context() as patch:
        fail_with(errno.ENOSPC, patch, times=2)  # params and state of step 4
        assert fit(config, tmp_path / "a") == 0
    assert sum("checkpoints/4: not saved (No space left on device)" in line for line in said) == 1
    assert runs.committed(tmp_path / "a") == [8]
    assert runs.metrics(tmp_path / "a") == runs.metrics(finished)
    said.clear()
    with monkeypatch.context() as patch:
        fail_with(errno.ENOSPC, patch, times=100)
        assert fit(config, tmp_path / "b") == 1
    assert said[-1] == "error: step 8 was not written; the same command resumes from the checkpoint before"
    assert runs.committed(tmp_path / "b") == []


def host(value):
    """The expected shape and dtype of an array."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=on_host())


def test_checkpoints_of_orbax_and_pipejax_are_exchangeable(tmp_path):
    """Arrays have all kinds, whole and in parts; Orbax's defaults compress."""
    rng, mesh = np.random.default_rng(0), jax.make_mesh((4, 2), ("x", "y"))
    parts = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    wide = rng.normal(size=(8, 6)).astype(np.float32)
    values = {"a": {"b": wide}, "count": np.int32(7)}
    values |= {"half": jnp.asarray(wide, jnp.bfloat16), "small": rng.integers(-9, 9, (3, 5)).astype(np.int8)}
    saved = jax.tree.map(jnp.asarray, values) | {"parts": jax.device_put(wide, parts)}
    for write in arrays.begin_item(tmp_path / "ours", saved):
        write.result()
    arrays.finish_item(tmp_path / "ours")
    theirs, epath = orbax.checkpoint.StandardCheckpointHandler(), orbax.checkpoint.utils.epath
    theirs.save(epath.Path(tmp_path / "theirs"), args=orbax.checkpoint.args.StandardSave(saved))
    theirs.finalize(epath.Path(tmp_path / "theirs"))
    wanted = jax.tree.map(host, saved)
    read = theirs.restore(epath.Path(tmp_path / "ours"), args=orbax.checkpoint.args.StandardRestore(wanted))
    jax.tree.map(np.testing.assert_array_equal, read, saved)
    for place in (tmp_path / "ours", tmp_path / "theirs"):
        arrays.check_item(place, wanted, {})
        for across in (on_host(), parts):
            target = wanted | {"parts": jax.ShapeDtypeStruct((8, 6), np.float32, sharding=across)}
            found = arrays.read_item(place, target, {})
            jax.tree.map(np.testing.assert_array_equal, found, saved)
            assert found["parts"].sharding == across


@pytest.mark.parametrize(
    "wanted, problem",
    [
        ({"a": np.zeros((2, 3), np.float32)}, r"array b is unexpected"),
        ({"a": np.zeros((2, 3), np.float32), "b": np.zeros(2), "c": np.zeros(2)}, "array c is missing"),
        ({"a": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float32)}, r"a: found float32 \[2, 3\]; expected"),
        ({"a": np.zeros((2, 3), np.int32), "b": np.zeros(2, np.float32)}, r"expected int32 \[2, 3\]"),
    ],
)
def test_unexpected_arrays_are_damage(tmp_path, wanted, problem):
    for write in arrays.begin_item(tmp_path / "x", {"a": jnp.zeros((2, 3)), "b": jnp.zeros(2)}):
        write.result()
    arrays.finish_item(tmp_path / "x")
    for look in (arrays.read_item, arrays.check_item):
        with pytest.raises(Damaged, match=problem):
            look(tmp_path / "x", jax.tree.map(host, wanted), {})


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda params: params | {"more": np.zeros(2, np.float32)}, "array more is missing"),
        (lambda params: {}, "array a is unexpected"),
        (
            lambda params: {key: np.zeros((9, 9), np.int32) for key in params},
            "array a: found float32 .*; expected int32",
        ),
    ],
)
def test_step_with_other_arrays_than_expected_is_an_error(tmp_path, change, problem):
    """The message lists missing and additional arrays of the step."""
    store = Store(tmp_path, writable=True)
    save_all(store, 1)
    params = tree(1.0)["params"]
    with pytest.raises(
        UserError, match=rf"params: {problem}.* \(this version of pipejax saves other arrays; the step was"
    ):
        store.restore(1, lambda config: {"params": jax.tree.map(host, change(params))})


def test_abandoned_reads_log_nothing(tmp_path):
    """All arrays are read at the same time; the first damaged array ends the reads."""
    save_all(Store(tmp_path, writable=True), 1)
    flip(tmp_path / "1/params")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(Damaged):
            Store(tmp_path).restore(1)
        gc.collect()
    assert not told


@pytest.mark.slow
def test_run_without_intact_step_starts_again(config, finished, tmp_path, said):
    shutil.copytree(finished, tmp_path / "run")
    for step in (4, 8):
        flip(tmp_path / f"run/checkpoints/{step}/params")
    assert fit(config, tmp_path / "run") == 0
    told = [line for line in said if "no intact step" in line]
    assert len(told) == 1 and "starts again from the beginning" in told[0]
    assert sum("renamed to corrupt-" in line for line in said) == 2
    assert runs.metrics(tmp_path / "run") == runs.metrics(finished)
    whole, again = (Store(d / "checkpoints").describe(8).arrays for d in (finished, tmp_path / "run"))
    assert whole == again


@pytest.mark.slow
def test_resume_keeps_damaged_best_step_aside(config, finished, tmp_path, said):
    shutil.copytree(finished, tmp_path / "run")
    flip(tmp_path / f"run/best/{Store(finished / 'best').steps()[0]}")
    longer = config_lib.override(config, ["train.steps=9"])
    assert fit(longer, tmp_path / "run") == 0
    assert sum("best" in line and "renamed to corrupt-" in line for line in said) == 1
    assert open_run(tmp_path / "run", best=True).step == 9  # the first step that was evaluated since then


@pytest.mark.slow
def test_last_line_is_written_after_a_kill_before_it(config, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run/metrics.jsonl"
    path.write_text(path.read_text()[:-30])  # torn
    for _ in range(2):
        assert fit(config, tmp_path / "run") == 0
        assert runs.metrics(tmp_path / "run") == runs.metrics(finished)


@pytest.mark.slow
def test_a_run_killed_before_older_steps_were_removed_removes_them(config, finished, tmp_path, said):
    shutil.copytree(finished, tmp_path / "run")
    assert runs.committed(tmp_path / "run") == [4, 8]
    fewer = config_lib.override(config, ["train.keep_checkpoints=1"])
    assert fit(fewer, tmp_path / "run") == 0
    assert "already trained" in said[-1] and runs.committed(tmp_path / "run") == [8]


@pytest.mark.slow
def test_run_resumes_on_another_mesh(config, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    longer = ["train.steps=9", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]
    assert fit(config_lib.override(config, longer), tmp_path / "run") == 0
    assert open_run(tmp_path / "run").config.mesh.fsdp == 2
    lines = runs.metrics(tmp_path / "run")
    assert lines[:8] == runs.metrics(finished)[:8]
    losses = [line["loss"] for line in lines if line["event"] == "train"]
    assert len(losses) == 9 and np.isfinite(losses[-1])
    assert lines[-1]["event"] == "end" and lines[-1]["step"] == 9


@pytest.mark.parametrize("form", ["1", True, 1.0, 2, None])
def test_a_manifest_of_another_format_is_refused_with_its_place(form: object) -> None:
    sealed = seal({"format": form, "step": 3})
    with pytest.raises(UserError, match=r"^runs/3 \(manifest\): format: found .*; expected the number 1$"):
        manifest.check_manifest(sealed, 3, Path("runs/3"))
