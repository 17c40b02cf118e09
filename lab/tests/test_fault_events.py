"""File events that `lab.faults` records in a process, and the losses that it derives from them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab.faults import events
from lab.faults.durable import losses
from lab.faults.events import Event, Trap

ROOT = Path(__file__).parents[2]
WORK = """
import os, shutil, sys
from pathlib import Path
from lab.faults.events import Trap, arm
here, library = Path(sys.argv[1]), Path(sys.argv[2])
arm(Trap(here, Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5]), library)
os.mkdir(here / "a")
handle = os.open(here / "a/f", os.O_WRONLY | os.O_CREAT)
os.write(handle, b"12")
os.fsync(handle)
os.close(handle)
os.rename(here / "a/f", here / "a/g")
(here.parent / "elsewhere").write_bytes(b"not counted")
shutil.rmtree(here / "a")
"""
SEEN = ["mkdir a", "open a/f", "write a/f", "fsync a/f", "rename a/f", "unlink a/g", "rmdir a"]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    try:
        return events.build(tmp_path_factory.mktemp("library"))
    except events.CannotWatch as reason:
        pytest.skip(str(reason))


def _work(tmp_path, library, number, part=""):
    here, log = tmp_path / "here", tmp_path / "log"
    shutil.rmtree(here, ignore_errors=True)
    log.unlink(missing_ok=True)
    here.mkdir()
    command = [sys.executable, "-c", WORK, str(here), str(library), str(log), str(number), part]
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    names = [f"{event.kind} {event.path.relative_to(here)}" for event in events.read(log)]
    return ended.returncode, names, here


def test_all_events_of_the_directory_are_recorded_and_no_others(tmp_path, library):
    code, names, here = _work(tmp_path, library, 0)
    assert code == 0 and names == SEEN and not any(here.iterdir())


@pytest.mark.parametrize(("number", "left"), [(1, []), (3, ["a", "a/f"]), (6, ["a", "a/g"]), (7, ["a"])])
def test_process_killed_at_an_event_keeps_earlier_writes(tmp_path, library, number, left):
    code, names, here = _work(tmp_path, library, number)
    assert code == -9 and names == [SEEN[number - 1]]
    assert sorted(str(path.relative_to(here)) for path in here.rglob("*")) == left
    if number == 3:
        assert (here / "a/f").read_bytes() == b"1"  # the process died during the write


def test_a_process_dies_at_the_first_event_of_a_chosen_file(tmp_path, library):
    code, names, here = _work(tmp_path, library, 0, "a/g")
    assert code == -9 and names == ["unlink a/g"] and (here / "a/g").read_bytes() == b"12"


def test_arming_without_the_library_is_refused(tmp_path):
    with pytest.raises(events.CannotWatch, match="without the library"):
        events.arm(Trap(tmp_path, tmp_path / "log"), tmp_path / "events.so")


def _happened(*lines):
    found = []
    for number, line in enumerate(lines, 1):
        kind, path, *to = line.split()
        found.append(Event(number, kind, Path("/w", path), Path("/w", *to) if to else None))
    return found


SAVE = ["mkdir S.tmp", "open S.tmp/a", "write S.tmp/a", "fsync S.tmp/a", "fsync S.tmp", "rename S.tmp S"]
SAFE = [
    "mkdir checkpoints",
    "fsync .",
    *(line.replace("S", "checkpoints/2") for line in SAVE),
    "fsync checkpoints",
    *(line.replace("S", "checkpoints/4") for line in SAVE),
    "fsync checkpoints",
    "unlink checkpoints/2/a",
    "rmdir checkpoints/2",
]


def test_a_save_in_the_right_order_loses_nothing():
    assert losses(Path("/w"), _happened(*SAFE)) == []


@pytest.mark.parametrize(
    ("left_out", "loss"),
    [
        (1, "checkpoints/2: removed before"),  # the directory of all steps has no name yet
        (5, "checkpoints/2: renamed with 1 not on disk (a"),
        (6, "checkpoints/2: renamed with 1 not on disk (a"),
        (12, "checkpoints/4: renamed with 1 not on disk (a"),
        (13, "checkpoints/4: renamed with 1 not on disk (a"),
        (15, "checkpoints/2: removed before a newer step is on disk"),
    ],
)
def test_each_missing_fsync_is_a_loss(left_out, loss):
    assert SAFE[left_out].startswith("fsync")
    found = losses(Path("/w"), _happened(*SAFE[:left_out], *SAFE[left_out + 1 :]))
    assert any(line.startswith(loss) for line in found), found


def test_late_fsync_is_a_loss():
    order = [*SAFE[:12], SAFE[14], SAFE[12].replace("4.tmp", "4"), SAFE[13].replace("4.tmp", "4"), *SAFE[15:]]
    assert losses(Path("/w"), _happened(*order)) == ["checkpoints/4: renamed with 1 not on disk (a, ...)"]


def test_step_moved_away_before_its_successor_is_committed_is_lost():
    early = [*SAFE[:15], "rename checkpoints/2 checkpoints/old", SAFE[15], "unlink checkpoints/old/a"]
    assert "checkpoints/2: removed before a newer step is on disk" in losses(Path("/w"), _happened(*early))
    late = [*SAFE[:16], "rename checkpoints/2 checkpoints/old", "unlink checkpoints/old/a", "rmdir checkpoints/old"]
    assert losses(Path("/w"), _happened(*late)) == []


def test_unrecorded_writes_count_as_lost():
    happened = _happened("open a", "fsync a", "open d", "write d", "fsync .", "open c")  # the first name of b was d
    there = (Path("/w", name) for name in "abc")
    at_risk = [f"{name} may not be on disk at the end" for name in ("c: its content", "c: its name", "b: its content")]
    assert losses(Path("/w"), happened, there) == at_risk
