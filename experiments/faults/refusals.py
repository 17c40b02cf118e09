"""Input that a command must refuse: exit code 2, one line that names the culprit, and no file changed."""

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from experiments.faults import runs
from experiments.faults.disks import snapshot
from experiments.faults.runs import Commands

TRAIN = ("--config={here}/config.py", "--workdir={here}/new")
RESUME = ("--config={here}/config.py", "--workdir={here}/run", "--set=train.steps=8")
DECODE = ("--checkpoint={here}/run", "--input={here}/in.jsonl", "--output={here}/out.jsonl")
FROM_HF = ("from-hf", "{here}/hf", "{here}/converted")


class Kind(NamedTuple):
    """One way to be wrong."""

    name: str
    words: tuple[str, ...]  # that the line must hold
    command: str  # whose `main`
    arguments: tuple[str, ...]  # {here} is the directory of this trial
    spoil: Callable[[Path], Any] = lambda here: None
    devices: int = 1
    deny: str = ""  # what in {here} may not be entered, read or written while the command runs


def template(commands: Commands, place: Path) -> Path:
    """A tiny run, its Hugging Face directory, an input and an older output, which each trial gets a copy of."""
    config = runs.prepare(place)
    assert commands.train(config, place / "run", "train.steps=4").end() == 0
    assert commands.start("pipejax.convert.__main__", "to-hf", str(place / "run"), str(place / "hf")).end() == 0
    (place / "in.jsonl").write_text('{"source": "honey maps"}\n')
    (place / "out.jsonl").write_text("precious\n")
    return place


def many(commands: Commands, scratch: Path, kinds: Sequence[Kind], *, workers: int = 2) -> list[dict[str, Any]]:
    """What came of each kind, tried in a directory of its own."""
    whole = template(commands, scratch / "template")

    def trial(numbered: tuple[int, Kind]) -> dict[str, Any]:
        number, kind = numbered
        here = scratch / str(number)
        shutil.copytree(whole, here, symlinks=True)
        if "{here}/run" not in " ".join(kind.arguments):  # a run goes on with its data, which lies where it lay
            path = here / "config.py"
            path.write_text(path.read_text().replace(str(whole), str(here)))
        kind.spoil(here)
        before = snapshot(here)
        arguments = [argument.replace("{here}", str(here)) for argument in kind.arguments]
        denied, name = here / kind.deny, kind.command
        if kind.deny:
            mode = denied.stat().st_mode
            denied.chmod(0)
            name, arguments = "experiments.faults.unprivileged", [kind.command, *arguments]
        try:
            command = commands.start(name, *arguments, devices=kind.devices)
            code, said = command.end(120), command.said()
        except TimeoutError as error:
            code, said = -1, [str(error)]
        finally:
            if kind.deny:
                denied.chmod(mode)
        after = snapshot(here)
        shutil.rmtree(here)
        errors = [line for line in said if line.startswith("error: ")]
        wrong = [word for word in kind.words if not said or word.format(here=here) not in said[-1]]
        return {
            "kind": kind.name,
            "code": code,
            "line": said[-1][:300].replace(str(scratch), "SCRATCH") if said else "",
            # A line about what was skipped, or on where the run begins, may come before.
            "ok": code == 2
            and errors == said[-1:]
            and not wrong
            and len(errors[0]) <= 1100
            and "Traceback" not in "".join(said),
            "kept": all(after.get(name) == value for name, value in before.items() if "/.lock" not in name),
        }

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(trial, enumerate(kinds)))


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a part."""
    bad = [result for result in results if not (result["ok"] and result["kept"])]
    return {
        "kinds": len(results),
        "one_line_and_exit_2": sum(result["ok"] for result in results),
        "nothing_overwritten": sum(result["kept"] for result in results),
        "ok": not bad,
        "failures": bad[:10],
        "lines": {result["kind"]: result["line"] for result in results},
    }


def fact(directory: Path, **facts: Any) -> None:
    """Changes keys of a Hugging Face directory's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
