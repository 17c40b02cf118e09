"""Checks every step of a run directory, and its tokenizer, against the step's manifest; changes nothing.

    pipejax checkpoint verify DIR [--json]

Exit codes: 0 if all steps are intact; 1 if a step is damaged, cannot be read at the moment, or was saved with another
tokenizer; 2 if DIR is not a run directory.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

from pipejax import config
from pipejax.system import cli
from pipejax.system.errors import UserError


class StepReport(TypedDict):
    """The result of verifying one step."""

    place: str
    step: int
    good: bool
    damaged: bool
    reason: str | None
    items: dict[str, int]  # the number of arrays by item
    bytes: int


def main(argv: Sequence[str]) -> int:
    parser = cli.Parser(prog="pipejax checkpoint", description=__doc__)
    parser.add_argument("action", choices=["verify"])
    parser.add_argument("directory", metavar="DIR", help="a run directory or a converted checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_overrides()
    flags = parser.parse_args(argv)
    config.backbone(flags.overrides)
    directory = Path(flags.directory)
    if not (directory / "checkpoints").is_dir():
        problem = "found no checkpoints/" if directory.is_dir() else "no such directory"
        raise UserError(directory, problem, expected="a run directory or a converted checkpoint")
    reports = []
    for kind in ("checkpoints", "best"):
        for report in verify(directory / kind):
            reports.append(report)
            if not flags.json:
                print(_report_line(report), flush=True)
    damaged = sum(report["damaged"] for report in reports)
    refused = sum(not report["good"] for report in reports) - damaged
    if flags.json:
        counts = {"damaged": damaged, "refused": refused}
        print(json.dumps({"directory": str(directory), **counts, "steps": reports}, indent=2))
    else:
        # `best/` holds a copy of a step, and the same step may be in `checkpoints/`, so it is counted separately.
        best = sum(report["place"].startswith("best/") for report in reports)
        steps = len(reports) - best
        counted = f"{steps} step{'s' * (steps != 1)}" + (f" and {best} best" if best else "")
        cli.note(f"{counted}, {damaged} damaged" + (f", {refused} refused" if refused else ""))
    return 1 if damaged or refused else 0


def verify(directory: Path) -> Iterator[StepReport]:
    """Yields a report on each step, oldest first. Steps that a training run replaces meanwhile are skipped."""
    from pipejax.checkpoint.manifest import Damaged
    from pipejax.checkpoint.store import Replaced, Store  # imported here, because this import starts JAX

    store, seen = Store(directory), set[int]()

    def check(step: int) -> dict[str, int]:
        items = store.verify(step)
        store.describe(step).tokenizer_files()
        return items

    while steps := [step for step in reversed(store.steps()) if step not in seen]:
        for step in steps:
            problem: Exception | None = None
            items = dict[str, int]()
            try:
                items = store.read_unless_replaced(step, check)
            except Replaced:
                continue  # the step is gone; the next listing has its successor
            except (Damaged, UserError) as error:
                problem = error
            seen.add(step)
            yield {
                "place": f"{directory.name}/{step}",
                "step": step,
                "good": problem is None,
                "damaged": isinstance(problem, Damaged),
                "reason": str(problem) if problem else None,
                "items": items,
                "bytes": _bytes_in(store.place(step)),
            }


def _bytes_in(path: Path) -> int:
    """Returns the bytes of the files below `path`, without files that disappear meanwhile or cannot be read."""
    inside = (os.path.join(place, name) for place, _, names in os.walk(path) for name in names)
    size = 0
    for file in inside if path.is_dir() else [str(path)]:
        with contextlib.suppress(OSError):
            size += os.path.getsize(file)
    return size


def _report_line(report: StepReport) -> str:
    items = ", ".join(f"{name} ({count} arrays)" for name, count in report["items"].items())
    if report["good"]:
        return f"{report['place']:<20} intact   {items}, {report['bytes'] / 1e6:.1f} MB"
    return f"{report['place']:<20} {'damaged' if report['damaged'] else 'refused'}  {report['reason']}"


if __name__ == "__main__":
    cli.run(main)
