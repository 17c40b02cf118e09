"""Checks every step of a run directory, and the tokenizer, against what its manifest says; changes nothing.

    pipejax checkpoint verify DIR [--json]

Exit codes: 0 all steps are good; 1 at least one is damaged, cannot be read now, or has another tokenizer than it was
saved with; 2 DIR is no run directory.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipejax.system import cli
from pipejax.system.errors import UserError


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = cli.Parser(prog="pipejax checkpoint", description=__doc__)
    parser.add_argument("action", choices=["verify"])
    parser.add_argument("directory", metavar="DIR", help="a run directory or a converted checkpoint")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    flags = parser.parse_args(argv)
    directory = Path(flags.directory)
    if not (directory / "checkpoints").is_dir():
        found = "found no checkpoints/" if directory.is_dir() else "no such directory"
        raise UserError(f"{directory}: {found}; expected a run directory or a converted checkpoint")
    reports = []
    for kind in ("checkpoints", "best"):
        for report in verify(directory / kind):
            reports.append(report)
            if not flags.json:
                print(_line(report), flush=True)
    damaged = sum(report["damaged"] for report in reports)
    refused = sum(not report["good"] for report in reports) - damaged
    if flags.json:
        counts = {"damaged": damaged, "refused": refused}
        print(json.dumps({"directory": str(directory), **counts, "steps": reports}, indent=2))
    else:
        cli.note(f"{len(reports)} steps, {damaged} damaged" + (f", {refused} refused" if refused else ""))
    return 1 if damaged or refused else 0


def verify(directory: Path) -> Iterator[dict[str, Any]]:
    """A report on each step of one directory, oldest first: place, step, good, reason, arrays of each item, bytes.

    What is not good is damaged, or would be refused as things are: it cannot be read now, or has another tokenizer. A
    step that its run replaces or removes meanwhile is not reported; one that it adds is.
    """
    from pipejax.checkpoint.manifest import Damaged
    from pipejax.checkpoint.store import Replaced, Store  # starts JAX: after the flags are known to be good

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
                items = store.look(step, check)
            except Replaced:
                continue  # the next look finds what is there instead
            except (Damaged, UserError) as error:
                problem = error
            seen.add(step)
            yield {"place": f"{directory.name}/{step}", "step": step, "good": problem is None} | {
                "damaged": isinstance(problem, Damaged),
                "reason": str(problem) if problem else None,
                "items": items,
                "bytes": _size(store.place(step)),
            }


def _size(path: Path) -> int:
    size = 0
    for file in path.rglob("*") if path.is_dir() else [path]:
        with contextlib.suppress(OSError):  # replaced just now, or not to be looked at
            size += file.stat().st_size if file.is_file() else 0
    return size


def _line(report: dict[str, Any]) -> str:
    items = ", ".join(f"{name} ({count} arrays)" for name, count in report["items"].items())
    if report["good"]:
        return f"{report['place']:<20} good     {items}, {report['bytes'] / 1e6:.1f} MB"
    return f"{report['place']:<20} {'damaged' if report['damaged'] else 'refused'}  {report['reason']}"


if __name__ == "__main__":
    cli.run(main)
