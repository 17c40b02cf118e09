"""Checks every step of a run directory against its manifest; changes nothing.

    python -m pipejax.checkpoint verify DIR [--json]

Exit codes: 0 all steps are good, 1 at least one is damaged, 2 DIR is no run directory.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipejax import cli
from pipejax.errors import UserError


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = cli.Parser(prog="python -m pipejax.checkpoint", description=__doc__)
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
    damaged = sum(not report["good"] for report in reports)
    if flags.json:
        print(json.dumps({"directory": str(directory), "damaged": damaged, "steps": reports}, indent=2))
    else:
        cli.note(f"{len(reports)} steps, {damaged} damaged")
    return 1 if damaged else 0


def verify(directory: Path) -> Iterator[dict[str, Any]]:
    """A report on each step of one directory, oldest first: place, step, good, reason, arrays of each item, bytes.

    A step that its run replaces or removes meanwhile is not reported; one that it adds is.
    """
    from pipejax.checkpoint.manifest import Damaged
    from pipejax.checkpoint.store import Replaced, Store  # starts JAX: after the flags are known to be good

    store, seen = Store(directory), set[int]()
    while steps := [step for step in reversed(store.steps()) if step not in seen]:
        for step in steps:
            reason, items = None, dict[str, int]()
            try:
                items = store.look(step, store.verify)
            except Replaced:
                continue  # the next look finds what is there instead
            except Damaged as damage:
                reason = str(damage)
            seen.add(step)
            yield {"place": f"{directory.name}/{step}", "step": step, "good": reason is None, "reason": reason} | {
                "items": items,
                "bytes": _size(directory / str(step)),
            }


def _size(path: Path) -> int:
    size = 0
    for file in path.rglob("*") if path.is_dir() else [path]:
        with contextlib.suppress(FileNotFoundError):  # replaced just now
            size += file.stat().st_size if file.is_file() else 0
    return size


def _line(report: dict[str, Any]) -> str:
    items = ", ".join(f"{name} ({count} arrays)" for name, count in report["items"].items())
    said = f"good     {items}, {report['bytes'] / 1e6:.1f} MB" if report["good"] else f"damaged  {report['reason']}"
    return f"{report['place']:<20} {said}"


if __name__ == "__main__":
    cli.run(main)
