"""Runs the faults, and writes the results as JSON and as a table."""

import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from lab.faults.runs import Commands
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.system.files import write_text

LEFT_OUT = ("ok", "failures", "by_kind", "lines", "seconds", "skipped")


# The title of each part, the function of this package that runs it, and its options in a short run and in a whole run.
PARTS: dict[str, tuple[str, str, dict[str, tuple[Any, Any]]]] = {
    "repeats": ("The same command twice; a finished run repeated", "repeats.twice", {}),
    "malformed": ("Malformed data, configs, HF directories, run directories", "malformed.many", {}),
    "odd": ("Odd inputs: special ids, tables, encodings, archives, templates, names", "odd.many", {}),
    "permissions": ("Files without permissions; names that are too long", "permissions.many", {}),
    "archives": ("Damaged, encrypted and overfull zips", "archives.many", {}),
    "forged": ("Sealed manifests and configs with wrong content", "forged.many", {}),
    "streams": ("Standard streams that are closed, full or without a reader", "streams.many", {}),
    "environment": ("Settings of JAX and XLA in the shell", "environment.many", {}),
    "kills": ("kill -9 at random moments", "kills.one", {"trials": (2, 100), "seed": (0, 0)}),
    "pairs": ("Two processes, one killed", "kills.two", {"trials": (1, 10), "seed": (0, 0)}),
    "moments": ("kill -9 at chosen file events", "moments.one", {"trials": (8, 300), "seed": (0, 0)}),
    "moments2": (
        "Two processes, one killed at a chosen file event",
        "moments.two",
        {"trials": (1, 20), "seed": (0, 0)},
    ),
    "order": ("Order of write, fsync and rename", "durable.order", {}),
    "power": ("Power cuts", "power.cuts", {"short": (True, False)}),
    "signals": (
        "SIGTERM, SIGINT in compile, step, evaluation, save",
        "signals.many",
        {"trials": (4, 32), "seed": (0, 0)},
    ),
    "full": ("Full disk", "disks.full", {"trials": (1, 6)}),
    "readonly": ("Read-only disk", "disks.read_only", {}),
    "hangs": ("Saves that cannot succeed", "hangs.many", {"short": (True, False)}),
    "readers": ("verify, decode and to-hf during a training", "readers.during", {"calls": (3, 60)}),
    "meshes": ("Six meshes of eight devices", "meshes.many", {}),
    "damage": ("Damaged checkpoints", "damage.many", {"trials": (13, 507)}),
    "bits": ("Flipped bits in the tokenizer", "bits.many", {"trials": (10, 400)}),
    "poison": ("Poisoned batches", "poison.many", {"trials": (4, 20), "seed": (0, 0)}),
}


def _run(part: str, commands: Commands, scratch: Path, *, short: bool) -> dict[str, Any]:
    _, place, options = PARTS[part]
    module, _, function = place.rpartition(".")
    run = getattr(importlib.import_module(f"lab.faults.{module}"), function)  # each part imports only what it needs
    result: dict[str, Any] = run(
        commands, scratch, **{name: few if short else all_ for name, (few, all_) in options.items()}
    )
    return result


def main(argv: Sequence[str]) -> int:
    """Runs the parts; the exit code is 1 if a result is not as it must be."""
    parser = cli.Parser(prog="python -m lab.faults", description=__doc__)
    parser.add_argument(
        "--json", required=True, metavar="FILE", help="file for the results; it keeps the results of other parts"
    )
    parser.add_argument("--table", metavar="FILE", help="file for a Markdown table of the results")
    parser.add_argument("--only", metavar="PARTS", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--short", action="store_true", help="make only a few trials of each part")
    parser.add_argument("--scratch", metavar="DIR", help="folder of the runs; default: a temporary directory")
    flags = parser.parse_args(argv)
    chosen = flags.only.split(",")
    if unknown := set(chosen) - PARTS.keys():
        raise UserError("--only", found=", ".join(sorted(unknown)), expected=f"some of {', '.join(PARTS)}")
    jax.config.update("jax_platforms", "cpu")
    cli.check_output_file("--json", flags.json)
    cli.check_output_file("--table", flags.table)
    if flags.scratch:
        Path(flags.scratch).mkdir(parents=True, exist_ok=True)
    out = Path(flags.json)
    results: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"parts": {}}
    with tempfile.TemporaryDirectory(prefix="faults-", dir=flags.scratch) as scratch:
        commands = Commands(Path(scratch) / "commands")
        for name in [name for name in PARTS if name in chosen]:
            cli.note(f"{PARTS[name][0]} ...")
            begun = time.monotonic()
            try:
                result = _run(name, commands, Path(scratch) / name, short=flags.short)
            except Exception as error:  # an error in one part must not stop the other parts
                traceback.print_exc()
                result = {"ok": False, "failures": [f"{type(error).__name__}: {error}"[:500]]}
            results["parts"][name] = {**result, "seconds": round(time.monotonic() - begun)}
            cli.note(f"  {json.dumps({k: v for k, v in results['parts'][name].items() if k not in ('lines',)})}")
            results["made"] = _made(flags.short)
            write_text(out, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
            if flags.table:
                write_text(Path(flags.table), table(results))
    return 1 if any(results["parts"][name]["ok"] is False for name in chosen) else 0


def _made(short: bool) -> dict[str, Any]:
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "short": short,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def table(results: dict[str, Any]) -> str:
    """A Markdown table with a line for each part."""
    lines = ["| | as it must be | figures | seconds |", "|---|---|---|---|"]
    for name, (title, *_) in PARTS.items():
        part = results["parts"].get(name)
        if part is None:
            continue
        verdict = {True: "yes", False: "**no**", None: "not run"}[part["ok"]]
        figures = [f"{key.replace('_', ' ')} {_figure(value)}" for key, value in part.items() if key not in LEFT_OUT]
        if "skipped" in part:
            figures = [part["skipped"]]
        lines.append(f"| {title} | {verdict} | {'; '.join(figures)} | {part['seconds']} |")
    return "\n".join(lines) + "\n"


def _figure(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_figure(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_figure, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2g}" if isinstance(value, float) and abs(value) < 0.01 else str(value)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    cli.run(main)
