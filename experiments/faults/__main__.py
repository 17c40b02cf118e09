"""Runs the faults and writes what came of them, as JSON and as a table."""

import datetime
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.faults.runs import Commands
from pipejax import cli
from pipejax.errors import UserError
from pipejax.files import write_text

Part = Callable[[Commands, Path, bool], dict[str, Any]]
LEFT_OUT = ("ok", "failures", "by_kind", "lines", "seconds", "skipped")


def _kills(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import kills

    return kills.one(commands, scratch, trials=2 if short else 100, seed=0)


def _pairs(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import kills

    return kills.two(commands, scratch, trials=1 if short else 10, seed=0)


def _damage(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import damage

    return damage.many(commands, scratch, trials=13 if short else 507)


def _signals(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import signals

    return signals.many(commands, scratch, trials=4 if short else 32, seed=0)


def _full(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import disks

    return disks.full(commands, scratch, trials=1 if short else 6)


def _read_only(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import disks

    return disks.read_only(commands, scratch)


def _poison(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import poison

    return poison.many(commands, scratch, trials=4 if short else 20, seed=0)


def _meshes(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import meshes

    return meshes.many(commands, scratch)


def _repeats(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import repeats

    return repeats.twice(commands, scratch)


def _malformed(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import malformed

    return malformed.many(commands, scratch)


def _permissions(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import permissions

    return permissions.many(commands, scratch)


def _archives(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import archives

    return archives.many(commands, scratch)


def _forged(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import forged

    return forged.many(commands, scratch)


def _streams(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import streams

    return streams.many(commands, scratch)


def _environment(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import environment

    return environment.many(commands, scratch)


def _moments(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import moments

    return moments.one(commands, scratch, trials=8 if short else 300, seed=0)


def _moments_of_two(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import moments

    return moments.two(commands, scratch, trials=1 if short else 20, seed=0)


def _order(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import durable

    return durable.order(commands, scratch)


def _power(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import power

    return power.cuts(commands, scratch, short=short)


def _bits(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import bits

    return bits.many(commands, scratch, trials=10 if short else 400)


def _readers(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import readers

    return readers.during(commands, scratch, calls=3 if short else 60)


def _hangs(commands: Commands, scratch: Path, short: bool) -> dict[str, Any]:
    from experiments.faults import hangs

    return hangs.many(commands, scratch, short=short)


PARTS: dict[str, tuple[str, Part]] = {
    "repeats": ("The same command twice; a finished run repeated", _repeats),
    "malformed": ("Malformed data, configs, HF directories, run directories", _malformed),
    "permissions": ("What may not be read or written; names that are too long", _permissions),
    "archives": ("Damaged, encrypted and overfull zips", _archives),
    "forged": ("Sealed manifests and configs that lie", _forged),
    "streams": ("Standard streams that are closed, full or gone", _streams),
    "environment": ("Settings of JAX and XLA in the shell", _environment),
    "kills": ("kill -9 at random moments", _kills),
    "pairs": ("Two processes, one killed", _pairs),
    "moments": ("kill -9 at chosen file events", _moments),
    "moments2": ("Two processes, one killed at a chosen file event", _moments_of_two),
    "order": ("Order of write, fsync and rename", _order),
    "power": ("Power cuts", _power),
    "signals": ("SIGTERM, SIGINT in compile, step, evaluation, save", _signals),
    "full": ("Full disk", _full),
    "readonly": ("Read-only disk", _read_only),
    "hangs": ("Saves that cannot succeed", _hangs),
    "readers": ("verify, decode and to-hf during a training", _readers),
    "meshes": ("Six meshes of eight devices", _meshes),
    "damage": ("Damaged checkpoints", _damage),
    "bits": ("Flipped bits in the tokenizer", _bits),
    "poison": ("Poisoned batches", _poison),
}


def main(argv: Sequence[str]) -> int:
    """The command line; exit code 1 if any figure is not as it must be."""
    parser = cli.Parser(prog="python -m experiments.faults", description=__doc__)
    parser.add_argument("--json", required=True, metavar="FILE", help="results of parts that do not run now stay in it")
    parser.add_argument("--table", metavar="FILE", help="the same as a Markdown table")
    parser.add_argument("--only", metavar="PARTS", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--short", action="store_true", help="a few trials of each")
    parser.add_argument("--scratch", metavar="DIR", help="where the runs go; default: a temporary directory")
    flags = parser.parse_args(argv)
    chosen = flags.only.split(",")
    if unknown := set(chosen) - PARTS.keys():
        raise UserError(f"--only: found {', '.join(sorted(unknown))}; expected some of {', '.join(PARTS)}")
    jax.config.update("jax_platforms", "cpu")
    cli.check_output("--json", flags.json)
    cli.check_output("--table", flags.table)
    out = Path(flags.json)
    results: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"parts": {}}
    with tempfile.TemporaryDirectory(prefix="faults-", dir=flags.scratch) as scratch:
        commands = Commands(Path(scratch) / "commands")
        for name in [name for name in PARTS if name in chosen]:
            cli.note(f"{PARTS[name][0]} ...")
            begun = time.monotonic()
            try:
                result = PARTS[name][1](commands, Path(scratch) / name, flags.short)
            except Exception as error:  # one part that breaks costs no other its figures
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
    """Markdown: a line a part."""
    lines = ["| | as it must be | figures | seconds |", "|---|---|---|---|"]
    for name, (title, _) in PARTS.items():
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
