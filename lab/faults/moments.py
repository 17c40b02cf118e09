"""Kills runs by kill -9 at chosen file events: in a start, a first save, a replacing save, a best save, and an end.

Each killed run is a separate process. The same command continues it, in a process that has trained before, which saves
compilation. One run in 15 continues in a new process.
"""

import contextlib
import functools
import queue
import random
import re
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from lab.faults import events, runs
from lab.faults.events import Event, Trap
from lab.faults.runs import Command, Commands

TINY = ("train.steps=4", "train.checkpoint_every=2", "train.keep_checkpoints=1", "train.dropout=0.0")
PLAIN = (*TINY, "data.dev=")
SMALL = ("train.evaluate_examples=2", "decode.max_length=2", "grid.time_max=2")
EXAMINED = (*TINY, "train.evaluate_every=2", *SMALL)
FRESH = 15  # one run in 15 continues in a new process


class Plan(NamedTuple):
    """A run to kill at one event."""

    phase: str
    settings: tuple[str, ...]
    begins: Path | None  # the run directory with which the killed run begins; None: an empty one
    event: int


class Warm:
    """A process that runs several trainings one after the other."""

    def __init__(self, commands: Commands) -> None:
        """Starts it."""
        self.context = commands.context
        self._start()

    def _start(self) -> None:
        self.here, there = self.context.Pipe()
        self.process = self.context.Process(target=_serve, args=(there,), daemon=True)
        self.process.start()

    def train(self, config: Path, workdir: Path, settings: tuple[str, ...], said: Path) -> tuple[int, list[str]]:
        """Trains; returns the exit code and the lines on standard error. A process that hangs or dies is replaced."""
        self.here.send((config, workdir, settings, said))
        try:
            code = self.here.recv() if self.here.poll(120.0) else None
        except EOFError:
            code = None
        if code is None:
            self.close()
            self._start()
        return (-1 if code is None else code), said.read_text(errors="replace").splitlines()

    def close(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection) -> None:
    import train
    from pipejax.system import cli
    from pipejax.training import start

    vars(start)["Trainer"] = functools.cache(vars(start)["Trainer"])  # keeps compiled programs
    with contextlib.suppress(EOFError):
        while True:
            config, workdir, settings, said = pipe.recv()
            runs.speak_into(said)
            code = 0
            try:
                cli.run(train.main, [f"--config={config}", f"--workdir={workdir}", *(f"--set={s}" for s in settings)])
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            pipe.send(code)


def one(commands: Commands, scratch: Path, *, trials: int, seed: int, workers: int = 2) -> dict[str, Any]:
    """Kills a run at one event in each trial, and starts it again."""
    if commands.library is None:
        return {"skipped": commands.blind, "ok": None}
    config = runs.prepare(scratch / "tiny")
    undisturbed: dict[tuple[str, ...], dict[str, Any]] = {}
    traces: dict[tuple[str, ...], list[Event]] = {}
    for settings, name in ((PLAIN, "plain"), (EXAMINED, "examined")):
        workdir = scratch / name / "run"
        traces[settings] = _trace(commands, config, workdir, settings)
        undisturbed[settings] = _result(workdir)
    half = _halfway(commands, config, scratch / "half/run", traces[PLAIN])
    again = scratch / "again/run"
    runs.copy(half, again)
    going_on = _trace(commands, config, again, PLAIN)
    plans = _plans(traces[PLAIN], going_on, traces[EXAMINED], half, trials, random.Random(seed))
    free: queue.SimpleQueue[Warm] = queue.SimpleQueue()
    warm = [Warm(commands) for _ in range(workers)]
    for process in warm:
        free.put(process)

    def trial(numbered: tuple[int, Plan]) -> dict[str, Any]:
        number, plan = numbered
        workdir = scratch / f"killed-{number}" / "run"
        killed, event = _kill(commands, config, workdir, plan)
        if number % FRESH:
            process = free.get()
            try:
                code, said = process.train(config, workdir, plan.settings, scratch / f"killed-{number}.err")
            finally:
                free.put(process)
        else:
            command = commands.train(config, workdir, *plan.settings)
            code, said = command.end(), command.said()
        found = _verdict(code, said, workdir, undisturbed[plan.settings])
        if found["identical"] and found["tidy"]:
            runs.fresh(workdir.parent)
        return {"phase": plan.phase, "event": event, "killed": killed, **found}

    try:
        with ThreadPoolExecutor(workers) as pool:
            results = list(pool.map(trial, enumerate(plans)))
    finally:
        for process in warm:
            process.close()
    return _summary(results)


def two(commands: Commands, scratch: Path, *, trials: int, seed: int) -> dict[str, Any]:
    """Kills one of two processes of a run at a file event in each trial, and starts both again."""
    if commands.library is None:
        return {"skipped": commands.blind, "ok": None}
    config = runs.prepare(scratch / "tiny")
    started = commands.pair(config, scratch / "undisturbed/run", *PLAIN)
    assert [command.end() for command in started] == [0, 0], started[0].said()
    undisturbed = _result(scratch / "undisturbed/run")
    logs = [scratch / "0.log", scratch / "1.log"]
    traps = [Trap(scratch / "traced", log) for log in logs]
    (scratch / "traced").mkdir()
    assert [c.end() for c in commands.pair(config, scratch / "traced/run", *PLAIN, traps=traps)] == [0, 0]
    traces, chance, results = [events.read(log) for log in logs], random.Random(seed), []
    for number in range(trials):
        here, victim = scratch / f"killed-{number}", number % 2
        of_them = len([n for n in range(trials) if n % 2 == victim])
        place = (number // 2 + chance.random()) / of_them
        at = traces[victim][int(place * len(traces[victim]))]
        here.mkdir()
        while True:
            trap = Trap(here, here.with_suffix(".log"), at.number)
            traps_now = [trap if i == victim else None for i in (0, 1)]
            pair = commands.pair(config, runs.fresh(here / "run"), *PLAIN, heartbeat=5, traps=traps_now)
            code, hung = pair[victim].end(timeout=120), False
            try:
                pair[1 - victim].end(timeout=65)
            except TimeoutError:
                hung = True
            if code == -signal.SIGKILL:
                break
            at = at._replace(number=max(at.number - 5, 1))  # the last events may not happen
        again = commands.pair(config, here / "run", *PLAIN)
        codes = [command.end(timeout=300) for command in again]
        found = _verdict(max(codes, key=abs), again[0].said(), here / "run", undisturbed)
        found["identical"] = found["identical"] and not hung
        results.append({"phase": f"process {victim}", "event": str(at[:3]), "killed": True, **found})
    return _summary(results)


def _trace(commands: Commands, config: Path, workdir: Path, settings: tuple[str, ...]) -> list[Event]:
    """The events of an undisturbed run."""
    workdir.parent.mkdir(parents=True, exist_ok=True)
    log = workdir.parent.with_suffix(".log")
    assert commands.train(config, workdir, *settings, trap=Trap(workdir.parent, log)).end() == 0
    return events.read(log)


def _halfway(commands: Commands, config: Path, workdir: Path, trace: list[Event]) -> Path:
    """A run directory of a run that was killed at the beginning of its second save."""
    workdir.parent.mkdir(parents=True)
    begun = trace[_first(trace, r"/checkpoints/\D*4\b")].path  # the second save
    trap = Trap(workdir.parent, workdir.parent.with_suffix(".log"), part=f"checkpoints/{begun.name}")
    assert commands.train(config, workdir, *PLAIN, trap=trap).end() == -signal.SIGKILL
    assert runs.committed(workdir) == [2], "the run was killed at another event than expected"
    return workdir


def _plans(
    beginning: list[Event], going_on: list[Event], examined: list[Event], half: Path, trials: int, chance: random.Random
) -> list[Plan]:
    """The runs to kill, spread evenly over the events of each phase."""
    second = _first(going_on, r"/checkpoints/\D*4\b")
    last = max(number for number, event in enumerate(going_on) if "/checkpoints" in str(event.path))
    first = _first(beginning, r"/checkpoints/\D*2\b")
    replaced = _first(beginning, r"/checkpoints/\D*4\b")
    phases = {
        "start": (PLAIN, None, beginning[:first]),
        "first save": (PLAIN, None, beginning[first:replaced]),
        "start of going on": (PLAIN, half, going_on[:second]),
        "save that replaces": (PLAIN, half, going_on[second:last]),
        "end": (PLAIN, half, going_on[last:]),
        "best save": (EXAMINED, None, [event for event in examined if "/best" in str(event.path)]),
    }
    shares = {"first save": 0.3, "save that replaces": 0.3, "best save": 0.16, "start": 0.1, "start of going on": 0.09}
    counts = {phase: max(1, round(share * trials)) for phase, share in shares.items()}
    counts["end"] = max(1, trials - sum(counts.values()))
    plans = []
    for phase, (settings, begins, span) in phases.items():
        for number in range(counts[phase]):
            place = int((number + chance.random()) / counts[phase] * len(span))
            plans.append(Plan(phase, settings, begins, span[place].number))
    return plans


def _first(trace: list[Event], pattern: str) -> int:
    return next(number for number, event in enumerate(trace) if re.search(pattern, str(event.path)))


def _kill(commands: Commands, config: Path, workdir: Path, plan: Plan) -> tuple[bool, str]:
    """Runs until the event. The order of events varies a little between runs, so the last events may not happen."""
    for back in range(0, 100, 5):
        runs.fresh(workdir.parent)
        workdir.parent.mkdir(parents=True)
        log = workdir.parent.with_suffix(".log")
        if plan.begins:
            runs.copy(plan.begins, workdir)
        trap = Trap(workdir.parent, log, max(plan.event - back, 1))
        command: Command = commands.train(config, workdir, *plan.settings, trap=trap)
        if command.end(timeout=300) == -signal.SIGKILL:
            event = events.read(log)[-1]
            log.unlink()
            return True, f"{event.number} {event.kind} {event.path.relative_to(workdir.parent)}"
    return False, f"{plan.event} never came"


def _result(workdir: Path) -> dict[str, Any]:
    """The outcome, and the names of all files without the random names of Orbax."""
    names = sorted(
        str(path.relative_to(workdir.parent)) for path in workdir.parent.rglob("*") if path.parent.name != "d"
    )
    return {**runs.outcome(workdir), "names": names}


def _verdict(code: int, said: list[str], workdir: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Compares the end of a resumed run with the undisturbed run."""
    try:
        found = _result(workdir)
    except Exception as error:  # for example a damaged step
        found = {"names": [], "error": f"{type(error).__name__}: {error}"}
    differ = [key for key in expected if key != "names" and found.get(key) != expected[key]]
    more = sorted(set(found["names"]) - set(expected["names"]))
    fewer = sorted(set(expected["names"]) - set(found["names"]))
    same, tidy = code == 0 and not differ, not more and not fewer
    result: dict[str, Any] = {"identical": same, "tidy": tidy}
    if not (same and tidy):
        result |= {"code": code, "said": said[-2:], "differ": differ, "more": more[:4], "fewer": fewer[:4]}
    return result


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    identical = sum(result["identical"] for result in results)
    tidy = sum(result["tidy"] for result in results)
    killed = sum(result["killed"] for result in results)
    good = [r for r in results if r["identical"] and r["tidy"] and r["killed"]]
    return {
        "trials": len(results),
        "killed_at": dict(Counter(result["phase"] for result in results if result["killed"])),
        "identical": identical,
        "nothing_left_lying": tidy,
        "ok": killed == len(results) and len(good) == len(results),
        "failures": [result for result in results if result not in good][:20],
    }
