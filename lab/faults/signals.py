"""Sends SIGTERM and SIGINT while a run compiles, makes steps, evaluates or saves."""

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab.faults import runs
from lab.faults.runs import Command, Commands

PHASES = ("compile", "step", "evaluation", "save")
SETTINGS = ("train.steps=300", "train.evaluate_every=150", "train.checkpoint_every=100", "decode.batch_size=1")


def many(commands: Commands, scratch: Path, *, trials: int, seed: int, workers: int = 2) -> dict[str, Any]:
    """Stops a run once in each trial, and starts it again."""
    config = runs.prepare(scratch / "tiny")
    assert commands.train(config, scratch / "undisturbed", *SETTINGS).end() == 0
    reference = runs.outcome(scratch / "undisturbed")

    def trial(number: int) -> dict[str, Any]:
        chance, workdir = random.Random(seed + number), runs.fresh(scratch / f"stopped-{number}")
        phase, which = PHASES[number % len(PHASES)], (signal.SIGTERM, signal.SIGINT)[number // len(PHASES) % 2]
        command = commands.train(config, workdir, *SETTINGS, cold=phase == "compile")
        reached = _wait(phase, command, workdir, chance)
        made, evaluations = runs.steps_made(workdir), _evaluations(workdir)
        command.send(which)
        code = command.end()
        logged, steps = runs.steps_made(workdir), runs.committed(workdir)
        # The running step is finished; another step may have been made before the signal arrived.
        prompt = bool(steps) and steps[-1] == logged and logged <= made + 3
        if phase == "evaluation":  # an evaluation ends at once
            reached, prompt = reached and evaluations == 0, prompt and _evaluations(workdir) == 0
        again = commands.train(config, workdir, *SETTINGS).end()
        return {
            "phase": phase,
            "signal": which.name,
            "reached": reached,
            "code": code,
            "stopped_at": logged,
            "prompt": prompt and code == 128 + which,
            "identical": again == 0 and runs.outcome(workdir) == reference,
            "said": command.said()[-2:],
        }

    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(trial, range(trials)))
    good = [result for result in results if result["reached"] and result["prompt"] and result["identical"]]
    return {
        "trials": trials,
        "by_phase": {phase: sum(result["phase"] == phase for result in good) for phase in PHASES},
        "checkpoint_at_the_next_step": sum(result["prompt"] for result in results),
        "identical": sum(result["identical"] for result in results),
        "ok": len(good) == trials,
        "failures": [result for result in results if result not in good][:5],
    }


def _evaluations(workdir: Path) -> int:
    return sum(line["event"] == "evaluation" for line in runs.metrics(workdir))


def _wait(phase: str, command: Command, workdir: Path, chance: random.Random) -> bool:
    if phase == "compile":
        came = runs.wait_for(lambda: "training: compiling" in "".join(command.said()), command)
        time.sleep(chance.uniform(0, 1.0))
        return came and runs.steps_made(workdir) <= 1
    if phase == "step":
        wanted = chance.randrange(1, 100)
        return runs.wait_for(lambda: runs.steps_made(workdir) >= wanted, command)
    if phase == "evaluation":
        # The step is logged before the evaluation begins.
        came = runs.wait_for(lambda: runs.steps_made(workdir) >= 150, command)
        time.sleep(chance.uniform(0, 0.2))
        return came
    return runs.wait_for(lambda: any(workdir.glob("checkpoints/*.orbax-checkpoint-tmp*")), command)
