"""Tests saves that cannot succeed: the command must end in time, with one line for each save, and must not hang."""

import array
import contextlib
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab.faults import power, runs
from lab.faults.disks import CannotMount
from lab.faults.runs import Command, Commands

BOUND = 60.0  # seconds in which a command must end after saving has become impossible
SHUT_DOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN of linux/ext4.h: every access fails from then on
SETTINGS = ("train.steps=48", "train.evaluate_every=48", "train.checkpoint_every=4")


class CannotTry(Exception):
    """Raised if a fault cannot be produced here, with the reason."""


def many(commands: Commands, scratch: Path, *, short: bool = False) -> dict[str, Any]:
    """Tests directories that accept no files, a disk that fails, and too few open files."""
    config = runs.prepare(scratch / "tiny")
    results = []
    ways = (
        ("checkpoints/ accepts no file", _closed("checkpoints")),
        ("eight open files", _few(8)),
        ("forty open files", _few(40)),
        ("best/ accepts no file", _closed("best")),
        ("the disk fails", _dead),
    )
    for name, way in ways[: 2 if short else None]:
        here = scratch / name.replace(" ", "-").replace("/", "")
        here.mkdir()
        try:
            results.append({"kind": name, **way(commands, config, here)})
        except (CannotTry, CannotMount) as reason:
            results.append({"kind": name, "ok": None, "skipped": str(reason)})
    tried = [result for result in results if result["ok"] is not None]
    seconds = [result["seconds"] for result in tried]
    return {
        "kinds": len(results),
        "tried": len(tried),
        "ended_as_documented": sum(result["ok"] for result in tried),
        "not_tried": [f"{result['kind']}: {result['skipped']}" for result in results if result["ok"] is None],
        "bound": BOUND,
        "seconds_at_most": round(max(seconds), 1) if seconds else None,
        "ok": all(result["ok"] for result in tried) if tried else None,
        "failures": [result for result in tried if not result["ok"]],
    }


def _closed(name: str) -> Callable[[Commands, Path, Path], dict[str, Any]]:
    """A fault by which a directory becomes immutable during a training."""

    def way(commands: Commands, config: Path, here: Path) -> dict[str, Any]:
        run = here / "run"
        settings = (*SETTINGS[:1], "train.evaluate_every=8", *SETTINGS[2:]) if name == "best" else SETTINGS
        command = commands.train(config, run, *settings)
        assert runs.wait_for(lambda: runs.steps_made(run) > 9 and (run / name).is_dir(), command)
        with _immutable(run / name):
            result = _end(command)
            kept = runs.committed(run)
        codes = (0, 1) if name == "best" else (1,)  # a run does not resume from best/
        again = commands.train(config, run, *settings)
        went_on = again.end(timeout=300) == 0 and runs.committed(run)[-1] == 48
        result["ok"] = result["ok"] and result["code"] in codes and bool(kept) and went_on
        return {**result, "kept": kept, "went_on": went_on}

    return way


def _dead(commands: Commands, config: Path, here: Path) -> dict[str, Any]:
    """Trains on a disk that from some moment on returns only errors."""
    with power.image(here / "disk") as disk:
        run = disk / "run"
        command = commands.train(config, run, *SETTINGS)
        assert runs.wait_for(lambda: runs.steps_made(run) > 9, command)
        handle = os.open(disk, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, SHUT_DOWN, array.array("I", [2]))  # without writing the journal
        except OSError as error:
            command.send(9)
            command.end()
            raise CannotTry(f"this kernel cannot shut down a disk: {error.strerror}") from error
        finally:
            os.close(handle)
        result = _end(command)
    return {**result, "ok": result["ok"] and result["code"] in (1, 2)}


def _few(files: int) -> Callable[[Commands, Path, Path], dict[str, Any]]:
    """A fault by which a training may hold only a few files open."""

    def way(commands: Commands, config: Path, here: Path) -> dict[str, Any]:
        result = _end(commands.train(config, here / "run", *SETTINGS, files=files))
        return {**result, "ok": result["ok"] and (result["code"] in (1, 2) or (files > 8 and result["code"] == 0))}

    return way


def _end(command: Command) -> dict[str, Any]:
    """Waits for the end of a command; returns its exit code, last lines, and whether it ended in time, as required."""
    begun = time.monotonic()
    try:
        code = command.end(timeout=BOUND)
    except TimeoutError:
        return {"ok": False, "code": None, "seconds": BOUND, "said": command.said()[-3:]}
    said = command.said()
    last = said[-1] if said else ""
    plain = "Traceback" not in "".join(said) and (code == 0 or last.startswith("error: "))
    return {"ok": plain, "code": code, "seconds": time.monotonic() - begun, "said": said[-3:]}


@contextlib.contextmanager
def _immutable(directory: Path) -> Iterator[None]:
    try:
        done = subprocess.run(["chattr", "+i", str(directory)], check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise CannotTry("found no chattr") from error
    if done.returncode:
        raise CannotTry(f"chattr cannot make a directory immutable here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(directory)], check=False, capture_output=True)
