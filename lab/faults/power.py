"""Tests power cuts: a copy of an ext4 disk is mounted, and the run continues there.

The disk is an image file. A copy of the file, taken while it is mounted, has the content of the disk after a power cut:
data in the memory of the kernel are lost, and the journal is replayed when the copy is mounted. Loop devices need root.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab.faults import runs
from lab.faults.disks import CannotMount
from lab.faults.runs import Command, Commands

SIZE = 48 << 20  # bytes
SETTINGS = ("train.steps=16", "train.checkpoint_every=4", "train.evaluate_every=8", "train.keep_checkpoints=1")
DELAYS = (0.0, 1.0, 4.0)  # seconds after a save
LONG_DELAYS = (0.0, 2.0, 8.0, 18.0, 30.0)  # after one of the saves: at the end the kernel has written everything


def cuts(commands: Commands, scratch: Path, *, short: bool = False) -> dict[str, Any]:
    """Cuts after and during saves, after a conversion and after a decode; verifies the copies, and resumes training."""
    config = runs.prepare(scratch / "tiny")
    assert commands.train(config, scratch / "undisturbed", *SETTINGS).end() == 0
    expected = runs.outcome(scratch / "undisturbed")
    try:
        with image(scratch / "disk") as disk:
            saved = _training(commands, config, disk, scratch / "copies", short=short)
            outputs = _outputs(commands, scratch / "undisturbed", disk, scratch / "outputs")
    except CannotMount as reason:
        return {"skipped": str(reason), "ok": None}
    results = [_after(commands, config, copy, promised, expected) for copy, promised in saved]
    results += outputs
    good = [result for result in results if result["ok"]]
    return {
        "cuts": len(results),
        "after_a_save": sum(result["kind"] == "after a save" for result in results),
        "during_a_save": sum(result["kind"] == "during a save" for result in results),
        "newest_saved_step_found": sum(result.get("found", False) for result in results),
        "went_on_to_the_same_end": sum(result.get("identical", False) for result in results),
        "outputs_whole": sum(result["ok"] for result in outputs),
        "ok": bool(results) and len(good) == len(results),
        "failures": [result for result in results if not result["ok"]][:10],
    }


def _training(
    commands: Commands, config: Path, disk: Path, copies: Path, *, short: bool
) -> list[tuple[Path, dict[str, Any]]]:
    """Takes copies of the disk during a training; returns them with the steps that each must have."""
    workdir, taken = disk / "run", list[tuple[Path, dict[str, Any]]]()
    command = commands.train(config, workdir, *SETTINGS)

    def take(kind: str, step: int, delay: float) -> None:
        copies.mkdir(exist_ok=True)
        copy = copies / f"{len(taken)}.img"
        freeze(disk.with_suffix(".img"), copy)
        taken.append((copy, {"kind": kind, "step": step, "delay": delay}))

    for step in (4,) if short else (4, 8, 12):
        # A step is reported as saved before the step after it is logged.
        if not short and runs.wait_for(lambda s=step: bool(_staged(workdir, s)), command):
            with stopped(command):
                take("during a save", _saved(workdir), 0.0)
        if runs.wait_for(lambda s=step: runs.steps_made(workdir) > s, command):
            with stopped(command):
                begun = time.monotonic()
                for delay in DELAYS[:1] if short else LONG_DELAYS if step == 8 else DELAYS:
                    time.sleep(max(0.0, delay - (time.monotonic() - begun)))
                    take("after a save", step, delay)
    assert command.end() == 0, command.said()[-2:]
    take("after a save", 16, 0.0)
    return taken


def _staged(workdir: Path, step: int) -> list[Path]:
    """The paths of an unfinished save of a step, under any name."""
    entries = (workdir / "checkpoints").glob("*") if not (workdir / f"checkpoints/{step}").exists() else ()
    return [path for path in entries if not path.name.isdigit() and str(step) in path.name]


def _saved(workdir: Path) -> int:
    """The newest step that the run counts as saved: it has logged the step after it."""
    made = runs.steps_made(workdir)
    return max((step for step in range(0, 17, 4) if step < made), default=0)


def _after(commands: Commands, config: Path, copy: Path, promised: dict[str, Any], expected: Any) -> dict[str, Any]:
    """Mounts a copy, verifies its steps, and continues the run."""
    with mounted(copy, copy.with_suffix("")) as disk:
        workdir = disk / "run"
        good, damaged = verified(workdir)
        found = not promised["step"] or (bool(good) and good[-1] >= promised["step"])
        again = commands.train(config, workdir, *SETTINGS)
        code = again.end()
        same = code == 0 and runs.outcome(workdir) == expected
        said = again.said()[-2:] if not same else []
    copy.unlink()
    result = {**promised, "found": found, "identical": same, "good": good, "damaged": damaged, "said": said}
    return {**result, "ok": found and same and not damaged}


def _outputs(commands: Commands, run: Path, disk: Path, copies: Path) -> list[dict[str, Any]]:
    """Makes a conversion in each direction and a decode, and cuts the power as soon as each has reported success."""
    copies.mkdir()
    (copies / "in.jsonl").write_text('{"id": 1, "source": "honey maps"}\n' * 4)
    made: list[tuple[str, tuple[str, ...]]] = [
        ("hf", ("pipejax.convert.__main__", "to-hf", str(run), str(disk / "hf"))),
        ("converted", ("pipejax.convert.__main__", "from-hf", str(disk / "hf"), str(disk / "converted"))),
        ("out.jsonl", ("decode", f"--checkpoint={run}", f"--input={copies}/in.jsonl", f"--output={disk}/out.jsonl")),
    ]
    results = []
    for name, (command, *arguments) in made:
        code = commands.start(command, *arguments).end()
        copy = copies / f"{name}.img"
        freeze(disk.with_suffix(".img"), copy)
        with mounted(copy, copies / f"{name}-after") as after:
            same = code == 0 and contents(after / name) == contents(disk / name)
        copy.unlink()
        results.append({"kind": name, "code": code, "ok": same})
    return results


def contents(place: Path) -> dict[str, bytes]:
    """The contents of all files in a directory, or of one file."""
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    return {str(path.relative_to(place)): path.read_bytes() for path in files}


def verified(workdir: Path) -> tuple[list[int], list[str]]:
    """The intact steps of a run, oldest first, and the steps that are not intact, each with the reason."""
    from pipejax.apps.verify.checkpoint_command import verify

    reports = list(verify(workdir / "checkpoints")) if (workdir / "checkpoints").is_dir() else []
    if (workdir / "best").is_dir():
        reports += verify(workdir / "best")
    good = sorted(report["step"] for report in reports if report["good"] and report["place"].startswith("checkpoints"))
    return good, [f"{report['place']}: {report['reason']}" for report in reports if not report["good"]]


@contextlib.contextmanager
def stopped(command: Command) -> Iterator[None]:
    """A context in which the process is stopped, and the kernel continues to write."""
    command.send(signal.SIGSTOP)
    try:
        yield
    finally:
        command.send(signal.SIGCONT)


@contextlib.contextmanager
def image(place: Path) -> Iterator[Path]:
    """A context with a small ext4 disk at `place`; yields its image file in the same folder."""
    file = place.with_suffix(".img")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as made:
        made.truncate(SIZE)
    if shutil.which("mkfs.ext4") is None:
        raise CannotMount("found no mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", str(file)], check=True, capture_output=True)
    with mounted(file, place) as disk:
        yield disk


@contextlib.contextmanager
def mounted(file: Path, place: Path) -> Iterator[Path]:
    """A context with a mounted image; yields its path."""
    if os.geteuid() != 0:
        raise CannotMount("only root may mount an image")
    place.mkdir()
    done = subprocess.run(["mount", "-o", "loop", str(file), str(place)], check=False, capture_output=True, text=True)
    if done.returncode:
        raise CannotMount(done.stderr.strip() or "mount failed")
    try:
        yield place
    finally:
        _patiently(lambda: subprocess.run(["umount", str(place)], check=False, capture_output=True).returncode == 0)


def freeze(file: Path, copy: Path) -> None:
    """Copies the disk at one moment: reads until two copies are equal, since the kernel may write during a copy."""
    before = b""
    for _ in range(50):
        now = file.read_bytes()
        if now == before:
            copy.write_bytes(now)
            return
        before = now
    raise AssertionError(f"{file} changed during every copy")


def _patiently(attempt: Callable[[], bool]) -> None:
    for _ in range(50):
        if attempt():
            return
        time.sleep(0.1)
