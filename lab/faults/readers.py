"""Tests commands that read a run during its training with keep_checkpoints=1: each must find an intact step."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.faults import runs
from lab.faults.runs import Commands

SETTINGS = ("train.steps=100000", "train.checkpoint_every=1", "train.evaluate_every=4", "train.keep_checkpoints=1")
SMALL = ("train.evaluate_examples=2", "decode.max_length=2", "grid.time_max=2")


def during(commands: Commands, scratch: Path, *, calls: int) -> dict[str, Any]:
    """Calls verify, decode and to-hf in turn, mostly verify, while a training saves at every step."""
    config = runs.prepare(scratch / "tiny")
    (scratch / "in.jsonl").write_text('{"id": 1, "source": "honey maps"}\n')
    run = scratch / "run"
    training = commands.train(config, run, *SETTINGS, *SMALL)
    assert runs.wait_for(lambda: bool(runs.committed(run, "best")), training), training.said()
    ended, failures = Counter[str](), []
    started_at = runs.steps_made(run)
    for number, (name, command, arguments) in zip(range(calls), _calls(scratch, run), strict=False):
        called = commands.start(command, *arguments)
        code, said = called.end(timeout=300), called.said()
        good = code == 0 and "Traceback" not in "".join(said)
        ended[name] += good
        if not good:
            failures.append({"call": f"{number}: {name}", "code": code, "said": said[-3:]})
    saves, alive = runs.steps_made(run) - started_at, training.running()
    training.send(15)
    code = training.end(timeout=300)
    return {
        "calls": calls,
        "good": dict(ended),
        "steps_saved_meanwhile": saves,
        "ok": not failures and alive and code == 143 and saves > 0,
        "failures": failures[:10],
    }


def _calls(scratch: Path, run: Path) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    verify = ("verify", "pipejax.apps.verify.checkpoint_command", ("verify", str(run)))
    decode = (f"--checkpoint={run}", f"--input={scratch}/in.jsonl", "--output=-")
    number = 0
    while True:
        number += 1
        yield verify
        yield "decode", "decode", decode
        yield verify
        yield "to_hf", "pipejax.convert.__main__", ("to-hf", str(run), str(scratch / f"hf-{number}"))
        yield verify
        yield "decode_best", "decode", (*decode, "--best")
