"""Input that a command must refuse: exit code 2, one line that names the culprit, and no file changed.

Some input may or must be accepted; then lines must describe how it was interpreted.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from lab.faults import runs
from lab.faults.disks import snapshot
from lab.faults.runs import Commands

TRAIN = ("--config={here}/config.py", "--workdir={here}/new")
RESUME = ("--config={here}/config.py", "--workdir={here}/run", "--set=train.steps=8")
DECODE = ("--checkpoint={here}/run", "--input={here}/in.jsonl", "--output={here}/out.jsonl")
FROM_HF = ("from-hf", "{here}/hf", "{here}/converted")


class Kind(NamedTuple):
    """A kind of wrong or unusual input."""

    name: str
    words: tuple[str, ...]  # words that the line must contain if the input is refused
    command: str  # the module whose `main` is called
    arguments: tuple[str, ...]  # {here} is the directory of this trial
    spoil: Callable[[Path], Any] = lambda here: None
    devices: int = 1
    deny: str = ""  # a path in {here} without permissions while the command runs
    codes: tuple[int, ...] = (2,)  # correct exit codes: 2: refused; 0: accepted
    said: tuple[str, ...] = ()  # words that must each be in some line if the input is accepted


def template(commands: Commands, place: Path) -> Path:
    """Writes a tiny run, its Hugging Face directory, an input and an older output; each trial gets a copy."""
    config = runs.prepare(place)
    assert commands.train(config, place / "run", "train.steps=4").end() == 0
    assert commands.start("pipejax.convert.__main__", "to-hf", str(place / "run"), str(place / "hf")).end() == 0
    (place / "in.jsonl").write_text('{"source": "honey maps"}\n')
    (place / "out.jsonl").write_text("precious\n")
    return place


def many(commands: Commands, scratch: Path, kinds: Sequence[Kind], *, workers: int = 2) -> list[dict[str, Any]]:
    """Tries each kind in a separate directory; returns the results."""
    whole = template(commands, scratch / "template")

    def trial(numbered: tuple[int, Kind]) -> dict[str, Any]:
        number, kind = numbered
        here = scratch / str(number)
        shutil.copytree(whole, here, symlinks=True)
        if "{here}/run" not in " ".join(kind.arguments):  # a resumed run needs its data at the same path
            path = here / "config.py"
            path.write_text(path.read_text().replace(str(whole), str(here)))
        kind.spoil(here)
        before = snapshot(here)
        arguments = [argument.replace("{here}", str(here)) for argument in kind.arguments]
        denied, name = here / kind.deny, kind.command
        if kind.deny:
            mode = denied.stat().st_mode
            denied.chmod(0)
            name, arguments = "support.unprivileged", [kind.command, *arguments]
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
        errors, whole_text = [line for line in said if line.startswith("error: ")], "\n".join(said)
        # A line about skipped lines, or about the start of the run, may come first.
        refused = code == 2 and errors == said[-1:] and len(errors[0]) <= 1100
        words = kind.words if refused else kind.said
        missing = [word for word in words if word.format(here=here) not in (errors[0] if refused else whole_text)]
        taken = code == 0 and not errors
        made = str(here / "out.jsonl") if taken else ""  # the output may exist before the command
        return {
            "kind": kind.name,
            "code": code,
            "line": said[-1][:300].replace(str(scratch), "SCRATCH") if said else "",
            "ok": code in kind.codes and (refused or taken) and not missing and "Traceback" not in whole_text,
            "kept": all(
                after.get(name) == value for name, value in before.items() if "/.lock" not in name and name != made
            ),
        }

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(trial, enumerate(kinds)))


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a part."""
    bad = [result for result in results if not (result["ok"] and result["kept"])]
    return {
        "kinds": len(results),
        "one_line_and_exit_2": sum(result["ok"] and result.get("code", 2) == 2 for result in results),
        "nothing_overwritten": sum(result["kept"] for result in results),
        "ok": not bad,
        "failures": bad[:50],
        "lines": {result["kind"]: result["line"] for result in results},
    }


def fact(directory: Path, **facts: Any) -> None:
    """Changes keys of a Hugging Face directory's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
