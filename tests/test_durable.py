"""Files: the order in which they reach the disk, the detection of damage, and leftovers of kills."""

import errno
import json
import math
import os
import resource
import shutil
import threading
from pathlib import Path

import numpy as np
import orbax.checkpoint
import pytest

from pipejax import config as config_lib
from pipejax.apps.verify.checkpoint_command import main
from pipejax.checkpoint import Best, Store, save_params
from pipejax.checkpoint import arrays as arrays_lib
from pipejax.checkpoint.manifest import Damaged
from pipejax.convert.huggingface import write_hf
from pipejax.system.errors import UserError
from pipejax.system.files import new_directory, new_file, sync_output, write_text
from pipejax.training.run_directory import RunDirectory
from support.steps_of_numbers import CONFIG, fail_with, flip, save_all, tree

DATA = {"data": "a", "dev": "b"}  # fingerprints
EIO = os.strerror(errno.EIO)


def save(directory, *steps, **options):
    save_all(Store(directory, writable=True, **options), *steps)


def newest_of(run):
    """The newest intact step; steps of numbers have no model, so they are no complete runs."""
    return Store(run / "checkpoints").newest(None)


# Loss of power.


class Disk:
    """The synced content of a disk; each rename is judged by the content after a loss of power."""

    def __init__(self, monkeypatch, root):
        self.root, self.synced, self.events = root, {}, []
        fsync, rename, replace = os.fsync, os.rename, os.replace

        def synced(handle):
            fsync(handle)
            path = os.path.realpath(f"/proc/self/fd/{handle}")
            self.synced[path] = self.state(path)
            self.events.append(("sync", path))

        def renamed(how):
            def call(source, target, **options):
                self.events.append(("rename", str(source), str(target), self.lost(Path(source))))
                how(source, target, **options)

            return call

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "rename", renamed(rename))
        monkeypatch.setattr(os, "replace", renamed(replace))

    @staticmethod
    def state(path):
        """The content of a file, or the names in a directory."""
        return sorted(os.listdir(path)) if os.path.isdir(path) else Path(path).read_bytes()

    def lost(self, source):
        """The files of a tree that would be lost or old."""
        paths = [source, *source.rglob("*")]
        return [str(p) for p in paths if self.synced.get(os.path.realpath(p)) != self.state(p)]

    def renames_to(self, target):
        return [i for i, event in enumerate(self.events) if event[0] == "rename" and event[2] == str(target)]

    def check(self, target):
        """Asserts that the last rename to the target lost nothing and was synced."""
        at = self.renames_to(target)[-1]
        assert self.events[at][3] == []
        assert ("sync", str(target.parent)) in self.events[at:]
        return at


def test_step_is_synced_before_commit_and_before_removal_of_older_steps(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, tmp_path)
    save(tmp_path / "checkpoints", 4, 8, keep=1)
    disk.check(tmp_path / "checkpoints/4")
    committed = disk.check(tmp_path / "checkpoints/8")
    synced = disk.events.index(("sync", str(tmp_path / "checkpoints")), committed)
    gone = [i for i, e in enumerate(disk.events) if e[:2] == ("rename", str(tmp_path / "checkpoints/4"))]
    assert len(gone) == 1 and committed < synced < gone[0]
    assert Store(tmp_path / "checkpoints").steps() == [8]
    assert ("sync", str(tmp_path)) in disk.events  # the name checkpoints/


def test_conversions_and_outputs_are_synced(tmp_path, monkeypatch):
    sizes = {"vocab_size": 8, "d_model": 4, "d_kv": 2, "d_ff": 4, "num_heads": 2}
    model = config_lib.T5Config(**sizes, num_layers=1, num_decoder_layers=1)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/vocab").write_text("words")
    disk = Disk(monkeypatch, tmp_path)
    save_params(tmp_path / "a/ours", CONFIG, tree(1.0)["params"], tokenizer_source=tmp_path / "tokenizer")
    disk.check(tmp_path / "a/ours")
    assert ("sync", str(tmp_path)) in disk.events  # the name a/
    assert (tmp_path / "a/ours/tokenizer/vocab").read_text() == "words"
    monkeypatch.setattr("pipejax.convert.huggingface._to_tensors", lambda config, params: {"x": np.ones(3, np.float32)})
    write_hf(model, {}, tmp_path / "theirs", None)
    disk.check(tmp_path / "theirs")
    write_text(tmp_path / "config.json", "{}")
    disk.check(tmp_path / "config.json")
    out = tmp_path / "out.jsonl"
    out.write_text("records")
    sync_output(out)
    assert not disk.lost(out) and disk.events[-1] == ("sync", str(tmp_path))
    sync_output(Path("/dev/null"))


# Places.

MISREAD = ["a[b]", "a*", "a?", "a\\b", "a\\", "gs:/x", "gs:", os.fsdecode(b"\xff")]


@pytest.mark.parametrize("name", MISREAD)
def test_paths_that_orbax_interprets_differently_are_refused(tmp_path, name):
    place = tmp_path / name
    for use in (
        lambda: RunDirectory(place / "run"),
        lambda: Store(place / "checkpoints", writable=True),
        lambda: save_params(place, CONFIG, tree(1.0)["params"]),
    ):
        with pytest.raises(UserError, match=r"found .* expected a .*path"):
            use()
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "good/checkpoints", 4)
    (tmp_path / "good").rename(place) if "/" not in name else shutil.copytree(tmp_path / "good", place)
    with pytest.raises(UserError, match=r"found .* expected a .*path"):
        newest_of(place)
    assert (place / "checkpoints/4").is_dir()
    (tmp_path / "link").symlink_to(place)
    assert newest_of(tmp_path / "link").step == 4


@pytest.mark.parametrize("name", ["a b", "ü", "s3:x", "a%20b", "a#b", "{a}", "$HOME", "~", "a\nb"])
def test_unusual_directory_names_are_supported(tmp_path, name):
    save(tmp_path / name / "checkpoints", 4)
    assert newest_of(tmp_path / name).items["params"]["a"][0, 0] == 4


def test_the_first_save_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax.checkpoint.PyTreeCheckpointHandler, "finalize", lambda self, place: None)
    store = Store(tmp_path / "checkpoints", writable=True)
    with pytest.raises(UserError, match="4: was saved, but cannot be read back"):
        store.save(4, tree(1.0), config=CONFIG, wait=True)


# Damage and other errors.


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("INTERNAL: no idea"),
        ImportError("no module"),
        AttributeError("module 'jax' has no attribute 'Array'"),
        TypeError("unexpected keyword argument"),
        NotImplementedError(),
        OSError(errno.EBUSY, os.strerror(errno.EBUSY)),
        OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG)),
        MemoryError(),
        ValueError("UNAVAILABLE: try again"),
        ValueError('Error parsing object member "base": Invalid file path: "/runs/../x/"'),
        ValueError("zip() argument 2 is shorter than argument 1"),
        KeyError("params"),
        ValueError('Error reading "a": [OS error 5: EIO Input/output error]'),
    ],
    ids=lambda error: f"{type(error).__name__} {error}"[:40],
)
def test_read_errors_raise_and_no_step_is_renamed(tmp_path, monkeypatch, capsys, error):
    save(tmp_path / "checkpoints", 4, 8)

    def read(place, template):
        raise error

    monkeypatch.setattr(arrays_lib, "_open_arrays", read)
    store = Store(tmp_path / "checkpoints", writable=True)
    with pytest.raises(UserError, match=r"checkpoints/8/params: cannot be read at the moment \(") as found:
        store.newest(None, set_aside=True)
    assert "\n" not in str(found.value)
    assert main(["verify", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert [line.split()[:2] for line in told.out.splitlines()] == [[f"checkpoints/{i}", "refused"] for i in (4, 8)]
    assert told.out.count("cannot be read at the moment") == 2 and "2 steps, 0 damaged, 2 refused" in told.err
    assert store.steps() == [8, 4]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda item: (item / "manifest.ocdbt").write_bytes(bytes(40)), "DATA_LOSS: Error decoding local file"),
        (lambda item: flip(item), "ValueError: .*Error (reading|decoding)"),
        (lambda item: [file.unlink() for file in item.glob("d/*")], "NOT_FOUND: Error reading"),
        (
            lambda item: [file.write_bytes(file.read_bytes()[:9]) for file in item.rglob("d/*")],
            "OUT_OF_RANGE|Error (reading|decoding)",
        ),
        (lambda item: (item / "_METADATA").unlink(), r"_METADATA"),
        (lambda item: (item.parent / "manifest/metadata").write_text("{"), "JSONDecodeError"),
        (lambda item: (item.parent / "manifest/metadata").write_bytes(b'{"\xff": 1}'), "UnicodeDecodeError"),
        (lambda item: (item.parent / "manifest/metadata").unlink(), "FileNotFoundError"),
    ],
    ids=["header", "bits", "absent", "cut", "whole file", "no JSON", "no text", "manifest"],
)
def test_errors_about_content_are_damage(tmp_path, spoil, says):
    save(tmp_path / "checkpoints", 4)
    spoil(tmp_path / "checkpoints/4/params")
    with pytest.raises(Damaged, match=f"unreadable .*({says})") as found:
        Store(tmp_path / "checkpoints").restore(4)
    assert "tensorstore_spec" not in str(found.value)


def test_files_without_read_permission_are_not_damaged(tmp_path, monkeypatch):
    """TensorStore's message has no effect; the denial is simulated, as root may read everything."""
    save(tmp_path / "checkpoints", 4)
    flip(tmp_path / "checkpoints/4/params")
    store, opened = Store(tmp_path / "checkpoints"), Path.open

    def denied(self, *args, **kwargs):
        if self.parent.name == "d":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", denied)
        with pytest.raises(UserError, match=r"4/params: cannot be read at the moment \(Permission denied\)"):
            store.newest(None)
    assert store.newest(None) is None


@pytest.mark.parametrize(
    "name, good", [("_sharding", True), ("_METADATA", False), ("array_metadatas/process_0", False)]
)
@pytest.mark.parametrize("how", ["flip", "remove"])
def test_restore_and_verify_agree(tmp_path, name, good, how):
    save(tmp_path / "checkpoints", 4)
    file = tmp_path / "checkpoints/4/params" / name
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes())) if how == "flip" else file.unlink()
    assert main(["verify", str(tmp_path)]) == (0 if good else 1)
    assert (Store(tmp_path / "checkpoints").newest(None) is not None) == good


def test_a_step_without_digests_opens(tmp_path, monkeypatch):
    """Earlier versions saved such steps. Orbax's own files are not read, so they need not be intact."""
    monkeypatch.setattr("pipejax.checkpoint.store.metadata_digests", lambda item: {})
    save(tmp_path, 4)
    assert Store(tmp_path).restore(4).items["params"]["a"][0, 0] == 4
    (tmp_path / "4/params/_METADATA").write_text('{"tree_metadata": {"x": {}}}')
    assert Store(tmp_path).restore(4).items["params"]["a"][0, 0] == 4


# A run that continues while others read it.


def replacing(monkeypatch, directory, *, times):
    """Makes each of the next reads find its step replaced by the next one, as in a run that keeps one step."""
    original, left = arrays_lib.read_item, [times]

    def read(place, *args):
        if left[0]:
            left[0] -= 1
            save(directory, int(place.parent.name) + 1, keep=1)
        return original(place, *args)

    monkeypatch.setattr(arrays_lib, "read_item", read)


def test_readers_retry_if_a_step_is_replaced(tmp_path, monkeypatch, capsys, said):
    save(tmp_path / "checkpoints", 4, keep=1)
    with monkeypatch.context() as patch:
        replacing(patch, tmp_path / "checkpoints", times=2)
        said.clear()
        assert newest_of(tmp_path).step == 6 and said == []
    with monkeypatch.context() as patch:
        replacing(patch, tmp_path / "checkpoints", times=2)
        assert main(["verify", str(tmp_path)]) == 0
        assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["checkpoints/8", "intact"]]
    replacing(monkeypatch, tmp_path / "checkpoints", times=1000)
    with pytest.raises(UserError, match="each step was replaced while it was read"):
        newest_of(tmp_path)


# Failed saves, and their leftovers.


def test_failed_save_blocks_nothing(tmp_path, monkeypatch, said):
    threads = set(threading.enumerate())
    store = Store(tmp_path, writable=True)
    with monkeypatch.context() as patch:
        fail_with(errno.EIO, patch)
        assert not store.save(1, tree(1.0), config=CONFIG, wait=True)
    shutil.rmtree(tmp_path)
    tmp_path.write_text("in the way")
    assert not store.save(2, tree(1.0), config=CONFIG, wait=True)
    assert store.close()
    told = [line.partition("not saved (")[2].partition(")")[0] for line in said]
    assert told == [os.strerror(errno.EIO), os.strerror(errno.ENOTDIR)]
    assert not [t for t in set(threading.enumerate()) - threads if not t.daemon]


def test_a_step_that_cannot_be_removed_costs_one_line(tmp_path, monkeypatch, said):
    rename = Path.rename

    def stuck(self, target):
        if self.name == "1":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stuck)
    save(tmp_path, 1, 2, 3, keep=1)
    assert said == [f"warning: {tmp_path / '1'}: no longer needed, but cannot be removed (Operation not permitted)"]
    assert Store(tmp_path).steps() == [3, 1]


def refuse(monkeypatch, function, number, chosen):
    """Makes a function of os or Path fail for chosen paths."""
    owner, name = function
    original = getattr(owner, name)

    def call(*args, **kwargs):
        if chosen(*args):
            raise OSError(number, os.strerror(number))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


def descriptor_of(handle):
    return os.path.realpath(f"/proc/self/fd/{handle}")


@pytest.mark.parametrize("same", [False, True])
def test_step_with_unsynced_name_is_saved_and_replaces_nothing(tmp_path, monkeypatch, same, said):
    """The reported step exists, and so does the step that it would replace, until the disk has synced it."""
    save(tmp_path, 4, keep=1)
    store = Store(tmp_path, keep=1, writable=True)
    with monkeypatch.context() as patch:
        refuse(patch, (os, "fsync"), errno.EIO, lambda handle: descriptor_of(handle) == str(tmp_path))
        assert store.save(4 if same else 5, tree(7.0), config=CONFIG, wait=True)
        assert store.close()
    step, before = (4, ".replaced-4") if same else (5, "4")
    assert said == [
        f"warning: {tmp_path / str(step)}: saved, but possibly lost if the power fails ({EIO}); older steps are kept"
    ]
    assert Store(tmp_path).restore(step).items["params"]["a"][0, 0] == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([str(step), before])
    save(tmp_path, 6, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["6"]


def test_errors_of_older_steps_do_not_fail_a_save(tmp_path, monkeypatch, said):
    writable = Store(tmp_path, keep=1, writable=True)
    save_all(writable, 1)
    store = Store(tmp_path, keep=1, writable=True)
    with monkeypatch.context() as patch:
        refuse(patch, (Path, "iterdir"), errno.EIO, lambda path: path == tmp_path)
        assert store.save(2, tree(2.0), config=CONFIG, wait=True)
    assert said == [f"warning: {tmp_path}: cannot be listed (Input/output error); older steps are kept"]
    with monkeypatch.context() as patch:
        refuse(patch, (Path, "glob"), errno.EIO, lambda path, *_: path == tmp_path)
        fail_with(errno.ENOSPC, patch)
        assert not store.save(3, tree(3.0), config=CONFIG, wait=True)
        assert store.close()
    assert len(said) == 2 and "3: not saved (No space left on device)" in said[1]
    assert Store(tmp_path).steps() == [2, 1]


def test_remains_of_a_removed_step_have_no_effect(tmp_path, monkeypatch, said):
    """Its name is free: missing paths cause no messages, and the next step of this number can be removed, too."""
    with monkeypatch.context() as patch:
        refuse(patch, (os, "rmdir"), errno.ENOTEMPTY, lambda path, **_: ".gone-" in str(path))
        for _ in range(2):
            save(tmp_path, 1, 2, keep=1)
            assert Store(tmp_path).steps() == [2]
    assert said == []


def test_step_killed_between_two_renames_is_read(tmp_path):
    """No cleanup has happened, and there is no other step."""
    save(tmp_path / "checkpoints", 4)
    (tmp_path / "checkpoints/4").rename(tmp_path / "checkpoints/.replaced-4")
    found = Store(tmp_path / "checkpoints").newest(None)
    assert found is not None and found.step == 4 and found.items["params"]["a"][0, 0] == 4
    assert main(["verify", str(tmp_path)]) == 0
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".replaced-4"]
    Store(tmp_path / "checkpoints", writable=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]


def test_a_tokenizer_that_cannot_be_read_costs_a_save(tmp_path, monkeypatch, said):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text("{}")
    store = Store(tmp_path / "checkpoints", writable=True)
    with monkeypatch.context() as patch:
        refuse(patch, (os, "open"), errno.EIO, lambda path, *flags: Path(path).name == "tokenizer.json")
        assert not store.save(1, tree(1.0), config=CONFIG, wait=True)
    assert len(said) == 1 and "1: not saved (" in said[0] and "tokenizer: cannot be read (" in said[0]
    assert store.save(2, tree(2.0), config=CONFIG, wait=True)
    assert store.describe(2).metadata["tokenizer"].keys() == {"tokenizer.json"}


def test_verify_checks_the_tokenizer(tmp_path, capsys):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/spiece.model").write_text("words")
    save(tmp_path / "checkpoints", 4, 8)
    (tmp_path / "tokenizer/README.md").write_text("words about it")
    assert main(["verify", str(tmp_path)]) == 0
    (tmp_path / "tokenizer/spiece.model").write_text("swords")
    capsys.readouterr()
    assert main(["verify", "--json", str(tmp_path)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["damaged"], report["refused"]) == (0, 2)
    reasons = [step["reason"] for step in report["steps"]]
    assert all("spiece.model: found other content" in reason and "data.tokenizer" in reason for reason in reasons)


def test_unlistable_directory_is_written_to(tmp_path, monkeypatch):
    """Drop boxes are such directories; the denial is simulated, as root may list everything."""
    box = tmp_path / "box"
    box.mkdir()
    refuse(monkeypatch, (os, "open"), errno.EACCES, lambda path, *_: Path(path) == box)
    write_text(box / "a", "words")
    with new_directory(box / "b"):
        pass
    sync_output(box / "a")
    assert (box / "a").read_text() == "words" and (box / "b").is_dir()


def test_unsynced_name_is_not_reported_as_unwritten(tmp_path, monkeypatch):
    refuse(monkeypatch, (os, "fsync"), errno.EIO, lambda handle: descriptor_of(handle) == str(tmp_path))
    unsure = pytest.raises(UserError, match="b: written, but possibly lost")
    with unsure, new_directory(tmp_path / "b"):
        pass
    with pytest.raises(UserError, match="a: written, but possibly lost"):
        write_text(tmp_path / "a", "words")
    assert (tmp_path / "a").read_text() == "words" and (tmp_path / "b").is_dir()


def test_name_of_a_new_log_is_synced(tmp_path, monkeypatch):
    with RunDirectory(tmp_path / "run") as directory:
        disk = Disk(monkeypatch, tmp_path)
        directory.log_metrics({"step": 1})
        assert disk.lost(tmp_path / "run") == [str(tmp_path / "run/.lock")]
        directory.log_metrics({"step": 2})
    assert [event for event in disk.events if event == ("sync", str(tmp_path / "run"))] == disk.events[1:2]


def test_leftovers_of_kills_among_steps_are_removed(tmp_path):
    save(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "1", tmp_path / ".gone-1")
    (tmp_path / ".gone-0/params").mkdir(parents=True)
    shutil.copytree(tmp_path / "1", tmp_path / "3.orbax-checkpoint-tmp")
    shutil.copytree(tmp_path / "1", tmp_path / "4.orbax-checkpoint-tmp-123")
    shutil.copytree(tmp_path / "2", tmp_path / ".replaced-2")
    (tmp_path / "1").rename(tmp_path / ".replaced-1")  # killed immediately before the rename of its successor
    (tmp_path / "corrupt-0").mkdir()
    Store(tmp_path, writable=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "corrupt-0"]
    assert Store(tmp_path).restore(1).items["params"]["a"][0, 0] == 1


def test_a_step_of_the_same_number_is_replaced(tmp_path):
    save(tmp_path, 4)
    store = Store(tmp_path, writable=True)
    assert store.save(4, tree(7.0), config=CONFIG, wait=True) and store.close()
    assert Store(tmp_path).restore(4).items["params"]["a"][0, 0] == 7
    assert [p.name for p in tmp_path.iterdir()] == ["4"]


def test_leftovers_of_kills_in_a_run_are_removed(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").touch()
    (run / "config.json").write_text("{}")
    for name in (".config.json-ab_12xyz", ".metrics.jsonl-00000000"):
        (run / name).touch()
    for name in (".tokenizer-partial", ".tokenizer-partial-abc", ".gone-tokenizer", ".gone-tokenizer-2"):
        (run / name).mkdir()
    (run / ".config.json-mine").touch()
    with RunDirectory(run):
        pass
    assert sorted(p.name for p in run.iterdir()) == [".config.json-mine", ".lock", "config.json"]


def test_failed_start_leaves_no_files(tmp_path):
    with pytest.raises(UserError), RunDirectory(tmp_path / "a/run") as directory:
        Store(directory.path / "checkpoints", writable=True)
        raise UserError("nothing to train on")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError), RunDirectory(tmp_path / "mine"):
        raise UserError("nothing to train on")
    assert [p.name for p in tmp_path.rglob("*")] == ["mine"]


def test_directory_is_created_completely_or_not_at_all(tmp_path):
    with pytest.raises(ValueError, match="no more"), new_directory(tmp_path / "a/b/out") as partial:
        (partial / "half").touch()
        raise ValueError("no more")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".out-partial-4711").mkdir()  # the directory of a killed process
    with new_directory(tmp_path / "out") as first:
        with new_directory(tmp_path / "out") as second:  # the directory of another process at work
            (second / "b").touch()
        assert first.is_dir()
        shutil.rmtree(tmp_path / "out")
        (first / "a").touch()
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["out", "out/a"]


def test_best_step_counts_only_after_it_is_saved(tmp_path, monkeypatch, said):
    best = Best(tmp_path, CONFIG)
    best.offer(1, (1.0,), tree(1.0)["params"])
    with monkeypatch.context() as patch:
        fail_with(errno.ENOSPC, patch, times=2)
        best.offer(2, (5.0,), tree(2.0)["params"])
        best.offer(3, (4.0,), tree(3.0)["params"])  # better than the step on disk, but not than the waiting one
        assert not best.score > (1.0,) and Store(tmp_path).steps() == [1]
        best.offer(4, (3.0,), tree(4.0)["params"])
    assert Store(tmp_path).steps() == [2] and Store(tmp_path).restore(2).items["params"]["a"][0, 0] == 2
    assert best.close() and sum("not saved" in line for line in said) == 2
    with monkeypatch.context() as patch:
        fail_with(errno.ENOSPC, patch, times=9)
        best = Best(tmp_path, CONFIG)
        best.offer(5, (6.0,), tree(5.0)["params"])
        assert not best.close()
    assert Store(tmp_path).steps() == [2]


def test_first_of_equal_scores_stays_the_best(tmp_path):
    best = Best(tmp_path, CONFIG)
    for step in (1, 2):
        best.offer(step, (2.0,), tree(float(step))["params"])
    assert best.close() and Store(tmp_path).steps() == [1]


@pytest.mark.parametrize("reopened", [False, True], ids=["one run", "resumed run"])
def test_finite_loss_replaces_nan_of_an_equal_headline_score(tmp_path, reopened):
    best = Best(tmp_path, CONFIG)
    best.offer(1, (0.0, math.nan), tree(1.0)["params"])
    if reopened:
        assert best.close()
        best = Best(tmp_path, CONFIG)
    best.offer(2, (0.0, math.nan), tree(2.0)["params"])
    best.offer(3, (0.0, -9.0), tree(3.0)["params"])
    best.offer(4, (0.0, math.nan), tree(4.0)["params"])
    assert best.close() and Store(tmp_path).steps() == [3]


@pytest.mark.parametrize("is_renamed", [False, True], ids=["before", "after"])
def test_interrupt_near_the_rename_of_a_file_stays_an_interrupt(tmp_path, monkeypatch, is_renamed):
    replace = os.replace

    def interrupted(source, target):
        if is_renamed:
            replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), new_file(tmp_path / "a") as partial:
        partial.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] * is_renamed


def test_too_few_open_files_are_refused_before_the_work(tmp_path, monkeypatch):
    raised = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
    for limits, refused in (((8, 8), True), ((8, 4096), False), ((4096, 4096), False)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=limits: limits)
        if refused:
            with pytest.raises(UserError, match=r"ulimit -n: found a limit of 8 open files; expected at least 256"):
                Store(tmp_path / "checkpoints", writable=True)
        else:
            Store(tmp_path / "checkpoints", writable=True)
    assert raised == [(256, 4096)]


def test_the_best_of_another_run_is_kept_aside(tmp_path, said):
    """The best step of this run is not: a run killed before its first checkpoint reaches the same step again."""
    other = config_lib.override(CONFIG, ["train.learning_rate=0.5"])
    save(tmp_path / "best", 4)
    directory = RunDirectory(tmp_path / "run")
    directory.path = tmp_path
    directory._set_aside_best(config_lib.override(CONFIG, ["train.steps=7"]), DATA)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best"] and said == []
    directory._set_aside_best(other, DATA)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best-before"] and len(said) == 1


@pytest.mark.parametrize("which", ["data", "dev"])
def test_the_best_of_a_run_on_other_data_is_kept_aside(tmp_path, which):
    """Its score is not comparable, and might never be reached."""
    best = Best(tmp_path / "best", CONFIG, DATA)
    best.offer(4, (9.0,), tree(4.0)["params"])
    assert best.close()
    directory = RunDirectory(tmp_path / "run")
    directory.path = tmp_path
    directory._set_aside_best(CONFIG, DATA)
    assert [p.name for p in tmp_path.iterdir()] == ["best"]
    directory._set_aside_best(CONFIG, DATA | {which: "other"})
    assert [p.name for p in tmp_path.iterdir()] == ["best-before"]


def test_the_best_of_a_run_with_another_tokenizer_is_kept_aside(tmp_path):
    class Words:
        def __init__(self, text):
            self.text = text

        def save(self, directory):
            (directory / "vocab.txt").write_text(self.text)

    with RunDirectory(tmp_path / "run") as directory:
        for text, names in (("a", {"best"}), ("a", {"best"}), ("b", {"best", "best-before"})):
            directory.begin(CONFIG, Words(text), 0, DATA)
            save(tmp_path / "run/best", 4)
            assert {path.name for path in (tmp_path / "run").glob("best*")} == names


def test_a_best_step_without_a_score_is_the_worst(tmp_path):
    """A user has copied this step."""
    store = Store(tmp_path, writable=True)
    assert store.save(3, tree(3.0), config=CONFIG, metadata={"data": "x"}, wait=True) and store.close()
    best = Best(tmp_path, CONFIG)
    best.offer(1, (0.0,), tree(1.0)["params"])
    assert best.close() and Store(tmp_path).steps() == [1]
