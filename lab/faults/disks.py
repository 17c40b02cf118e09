"""Tests disks that are full or read-only. The tests mount a small tmpfs, which requires root."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.faults import runs
from lab.faults.runs import Commands

KEEP = "train.keep_checkpoints=50"


class CannotMount(Exception):
    """Raised if the small disk cannot be mounted, with the reason."""


def full(commands: Commands, scratch: Path, *, trials: int) -> dict[str, Any]:
    """Runs a training on a disk that fills up in each trial; then there is space, and the same command continues."""
    config = runs.prepare(scratch / "tiny")
    assert commands.train(config, scratch / "undisturbed", KEEP).end() == 0
    reference = runs.outcome(scratch / "undisturbed")
    words = {step: runs.state_word(scratch / "undisturbed", step) for step in runs.committed(scratch / "undisturbed")}
    whole = sum(path.stat().st_size for path in (scratch / "undisturbed").rglob("*") if path.is_file())
    results: list[dict[str, Any]] = []
    for number in range(trials):
        size = int(whole * (0.15 + 0.7 * number / max(trials - 1, 1)))
        try:
            with _small_disk(scratch / f"disk-{number}", size) as disk:
                workdir = disk / "run"
                command = commands.train(config, workdir, KEEP)
                code, said = command.end(), command.said()
                kept = runs.committed(workdir)
                done = max(words) in kept  # the last save found space again, after failed saves
                intact = all(runs.state_word(workdir, step) == words[step] for step in kept)
                tidy = not runs.saves_under_way(workdir)
                _mount("remount", disk, 64 * whole)
                again = commands.train(config, workdir, KEEP).end()
                results.append(
                    {
                        "bytes": size,
                        "code": code,
                        "kept": kept,
                        "intact": intact and tidy,
                        "one_line_each": _plain(said, done=done),
                        "done": done,
                        "identical_with_room": again == 0 and runs.outcome(workdir)["state"] == reference["state"],
                        "said": said[-3:],
                    }
                )
        except CannotMount as reason:
            return {"skipped": str(reason), "ok": None}
    good = [
        r
        for r in results
        if r["code"] in ((0,) if r["done"] else (1, 2))
        if r["intact"] and r["one_line_each"] and r["identical_with_room"]
    ]
    return {
        "trials": trials,
        "earlier_checkpoints_intact": sum(result["intact"] for result in results),
        "one_line_each": sum(result["one_line_each"] for result in results),
        "went_on_with_room": sum(result["identical_with_room"] for result in results),
        "steps_kept": [len(result["kept"]) for result in results],
        "ok": len(good) == trials,
        "failures": [result for result in results if result not in good][:5],
    }


def read_only(commands: Commands, scratch: Path) -> dict[str, Any]:
    """Starts a new run, resumes a run, and converts, on a read-only disk."""
    config = runs.prepare(scratch / "tiny")
    try:
        with _small_disk(scratch / "disk", 64 << 20) as disk:
            assert commands.train(config, disk / "run", f"train.steps={runs.EVERY}").end() == 0
            before = snapshot(disk)
            _mount("remount,ro", disk, 64 << 20)
            started = {
                "a new run": commands.train(config, disk / "new"),
                "going on": commands.train(config, disk / "run"),
                "a conversion": commands.start(
                    "pipejax.convert.__main__", "to-hf", str(disk / "run"), str(disk / "hf")
                ),
            }
            results = {}
            for name, command in started.items():
                code, said = command.end(), command.said()
                results[name] = code == 2 and said[-1].startswith("error: ") and "Traceback" not in "".join(said)
            unchanged = snapshot(disk) == before
    except CannotMount as reason:
        return {"skipped": str(reason), "ok": None}
    return {"trials": len(results), **results, "nothing_changed": unchanged, "ok": all(results.values()) and unchanged}


def snapshot(directory: Path) -> dict[str, Any]:
    """The contents and times of all files."""
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in sorted(directory.rglob("*"))
    }


def _plain(said: list[str], *, done: bool) -> bool:
    """Whether there is exactly one line for each failed save; best/ is saved again at the end."""
    failed = [line.removeprefix("warning: ").partition(":")[0] for line in said if "not saved" in line]
    tries = {place: failed.count(place) for place in failed}
    once = all(times <= (2 if "/best/" in place else 1) for place, times in tries.items())
    ended = said[-1].startswith("trained for " if done else "error: ")
    return once and ended and bool(failed or not done) and "Traceback" not in "".join(said)


@contextlib.contextmanager
def _small_disk(place: Path, size: int) -> Iterator[Path]:
    place.mkdir(parents=True)
    _mount("", place, size)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=False, capture_output=True)


def _mount(options: str, place: Path, size: int) -> None:
    if os.geteuid() != 0:
        raise CannotMount("only root may mount a small disk")
    wanted = ",".join(filter(None, (options, f"size={size}")))
    command = ["mount", "-t", "tmpfs", "-o", wanted, "tmpfs", str(place)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise CannotMount(done.stderr.strip() or "mount failed")
