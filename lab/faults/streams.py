"""Tests real commands with standard streams that are closed, full, or lose their reader, as a shell passes them."""

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from lab.faults import refusals, runs
from lab.faults.runs import Commands

ROOT = Path(__file__).parents[2]
FULL = "/dev/full"
TRAIN = "train.py --config={here}/config.py --workdir={here}/new --set=train.steps=6 --set=train.log_every=1"
DECODE = "decode.py --checkpoint={here}/run --input={here}/in.jsonl"
TO_HF = "-m pipejax convert to-hf {here}/run {here}/new"
VERIFY = "-m pipejax checkpoint verify {here}/run"
STATS = "-m pipejax data stats demo"


class Case(NamedTuple):
    """A command in a shell; {here} is a directory with a run."""

    name: str
    line: str  # the command after the name of Python
    code: int
    said: str | None = None  # part of the only line on standard error; None: anything without a traceback
    makes: str = ""  # a path in {here} that must exist afterwards


CASES = (
    Case("train, standard error closed", f"{TRAIN} 2>&-", 0, makes="new/checkpoints/6"),
    Case("train, standard error full", f"{TRAIN} 2>{FULL}", 0, makes="new/checkpoints/6"),
    Case("train, all closed", f"{TRAIN} <&- >&- 2>&-", 0, makes="new/checkpoints/6"),
    Case("decode, standard error closed", f"{DECODE} --output={{here}}/new 2>&-", 0, makes="new"),
    Case("decode, standard error full", f"{DECODE} --output={{here}}/new 2>{FULL}", 0, makes="new"),
    Case("decode to a closed stream", f"{DECODE} --output=- >&-", 2, "found standard output closed"),
    Case("decode to a full stream", f"{DECODE} --output=- >{FULL}", 2, "No space left on device"),
    Case("decode without a reader", f"{DECODE} --output=- | true", 1),
    Case(
        "decode from a closed stream", f"{DECODE.replace('{here}/in.jsonl', '-')} --output=- <&-", 2, "found no lines"
    ),
    Case("convert, standard output closed", f"{TO_HF} >&-", 0, makes="new/config.json"),
    Case("convert, standard output full", f"{TO_HF} >{FULL}", 2, "standard output", makes="new/config.json"),
    Case("verify, standard output full", f"{VERIFY} >{FULL}", 2, "standard output: cannot be written"),
    Case("verify, standard output closed", f"{VERIFY} >&-", 0),
    Case("stats, standard output full", f"{STATS} >{FULL}", 2, "standard output: cannot be written"),
    Case("an error, standard error closed", "decode.py 2>&-", 2, ""),
    Case("an error, standard error full", f"decode.py 2>{FULL}", 2, ""),
    Case("help without a reader", "train.py --help | true", 1),
)


def many(commands: Commands, scratch: Path) -> dict[str, Any]:
    """Tries all cases, and a training that loses the reader of its log."""
    here = refusals.template(commands, scratch / "template")
    with ThreadPoolExecutor(2) as pool:
        results = [*pool.map(lambda case: attempt(case, here, scratch), CASES), _gone(here, scratch)]
    bad = [result for result in results if not result["ok"]]
    return {
        "cases": len(results),
        "as_they_must_be": len(results) - len(bad),
        "ok": not bad,
        "failures": bad[:10],
        "lines": {result["case"]: result["said"] for result in results},
    }


def attempt(case: Case, whole: Path, scratch: Path) -> dict[str, Any]:
    """Tries a case in a copy of the directory."""
    here = scratch / case.name.replace(" ", "-").replace(",", "")
    subprocess.run(["cp", "-r", str(whole), str(here)], check=True)
    line = f"{sys.executable} {case.line.format(here=here)}"
    ended = subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], cwd=ROOT, capture_output=True, check=False)
    said = [text for text in ended.stderr.decode(errors="replace").splitlines() if text.startswith(("error", "Trace"))]
    told = case.said is None or (len(said) == 1 and case.said in said[0]) or (case.said == "" and not said)
    clean = "Traceback" not in ended.stderr.decode(errors="replace") and ended.stdout.count(b"\n") <= 30
    made = not case.makes or (here / case.makes).exists()
    # Messages must not be written to the stream of results, nor to a file with the number of a closed stream.
    unmixed = all(_whole_lines(path) for path in here.glob("new/metrics.jsonl"))
    ok = ended.returncode == case.code and told and clean and made and unmixed
    return {"case": case.name, "code": ended.returncode, "said": " / ".join(said)[:300], "made": made, "ok": ok}


def _whole_lines(path: Path) -> bool:
    return all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())


def _gone(whole: Path, scratch: Path) -> dict[str, Any]:
    here = scratch / "gone"
    subprocess.run(["cp", "-r", str(whole), str(here)], check=True)
    command: Sequence[str] = [sys.executable, *TRAIN.format(here=here).split()]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stderr is not None
    process.stderr.readline()
    process.stderr.close()
    code = process.wait(300)
    steps = runs.committed(here / "new")
    return {"case": "train, the reader is gone", "code": code, "said": str(steps), "ok": code == 0 and steps[-1] == 6}
