"""Kills by kill -9 one process, or one of two, at any moment: later results must equal those of an undisturbed run."""

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from lab.faults import runs
from lab.faults.runs import EVERY, Commands

HEARTBEAT = 10


def one(commands: Commands, scratch: Path, *, trials: int, seed: int, workers: int = 2) -> dict[str, Any]:
    """Runs a training in each trial, kills it once, and starts it again. Half of the kills aim at a save."""
    config = runs.prepare(scratch / "tiny")
    reference, seconds = _reference(commands, config, scratch / "undisturbed")
    assert commands.train(config, scratch / "warm", f"train.steps={runs.STEPS // 2}").end() == 0
    assert commands.train(config, scratch / "warm").end() == 0  # a resumed run compiles more than a new one

    def trial(number: int) -> dict[str, Any]:
        chance, workdir = random.Random(seed + number), scratch / f"killed-{number}"
        while True:
            command = commands.train(config, runs.fresh(workdir))
            if number % 2:
                wanted = chance.randrange(1, runs.STEPS // EVERY) * EVERY
                runs.wait_for(partial(_saving, workdir, wanted), command)
                time.sleep(chance.uniform(0, 0.02))
            else:
                time.sleep(chance.uniform(0.2, 1.0) * seconds)
            command.send(signal.SIGKILL)
            if command.end() == -signal.SIGKILL:
                break  # otherwise the run ended before the kill
        found = _found(workdir)
        again = commands.train(config, workdir)
        code = again.end()
        result = runs.outcome(workdir)
        same = code == 0 and result == reference and not runs.saves_under_way(workdir)
        return found | {"identical": same, "said": again.said()[-2:] if not same else []}

    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(trial, range(trials)))
    return _summary(results)


def two(commands: Commands, scratch: Path, *, trials: int, seed: int) -> dict[str, Any]:
    """Runs a training of two processes in each trial, kills one of them, and starts both again."""
    config = runs.prepare(scratch / "tiny")
    started = commands.pair(config, scratch / "undisturbed")
    assert [command.end() for command in started] == [0, 0], started[0].said()
    reference = runs.outcome(scratch / "undisturbed")
    results = []
    for number in range(trials):
        chance, workdir = random.Random(seed + number), scratch / f"killed-{number}"
        while True:
            started = commands.pair(config, runs.fresh(workdir))
            moment = chance.randrange(1, runs.STEPS)
            runs.wait_for(partial(_reached, workdir, moment), started[0])
            time.sleep(chance.uniform(0, 0.05))
            killed = chance.randrange(2)
            started[killed].send(signal.SIGKILL)
            begun = time.monotonic()
            if started[killed].end() == -signal.SIGKILL:
                break
            started[1 - killed].end()
        hung, other = False, 0
        try:
            other = started[1 - killed].end(timeout=HEARTBEAT + 60)
        except TimeoutError:
            hung = True
        seconds = time.monotonic() - begun
        found = _found(workdir)
        again = commands.pair(config, workdir)
        codes = [command.end() for command in again]
        same = codes == [0, 0] and runs.outcome(workdir) == reference
        said = again[0].said()[-2:] if not same else []
        results.append(
            found | {"identical": same, "said": said, "hung": hung, "other": other, "other_seconds": seconds}
        )
    summary = _summary(results)
    slowest = max(result["other_seconds"] for result in results)
    summary["hung"] = sum(result["hung"] for result in results)
    summary["seconds_until_the_other_ended_at_most"] = round(slowest, 1)
    summary["ok"] = summary["ok"] and not summary["hung"] and slowest <= HEARTBEAT + 10
    return summary


def _reference(commands: Commands, config: Path, workdir: Path) -> tuple[dict[str, Any], float]:
    """The outcome and the duration of an undisturbed run."""
    for _ in range(2):  # in the second run everything is compiled
        begun = time.monotonic()
        assert commands.train(config, runs.fresh(workdir)).end() == 0
    return runs.outcome(workdir), time.monotonic() - begun


def _saving(workdir: Path, step: int) -> bool:
    return any(int(path.name.partition(".")[0]) >= step for path in runs.saves_under_way(workdir))


def _reached(workdir: Path, step: int) -> bool:
    return runs.steps_made(workdir) >= step


def _found(workdir: Path) -> dict[str, Any]:
    """The state of the run directory after the kill."""
    made, steps = runs.steps_made(workdir), runs.committed(workdir)
    newest = steps[-1] if steps else 0
    return {
        "during_a_save": bool(runs.saves_under_way(workdir)),
        "lost": made - newest,
    }


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    identical = sum(result["identical"] for result in results)
    lost = max(result["lost"] for result in results)
    return {
        "trials": len(results),
        "during_a_save": sum(result["during_a_save"] for result in results),
        "identical": identical,
        "interval": EVERY,
        "steps_lost_at_most": lost,
        "ok": identical == len(results) and lost <= EVERY,
        "failures": [result for result in results if not result["identical"]],
    }
