"""Makes the tables of docs/gpu.md from the results of a run of `lab.benchmarks.gpu`.

    python -m lab.benchmarks.gpu_tables runs/gpu/summary.json

The summary is copied to `RESULTS`, from which the page is built, and its tables are printed. Rehearsals on a CPU, and
runs on devices other than GPUs, are refused. The program needs only the standard library.
"""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parent / "results" / "gpu.json"
GIB = 2**30
KERNELS = 6  # the number of kernels of a call that a table names


class Column(NamedTuple):
    """A column of a table: a figure of each result."""

    head: str
    key: str
    form: str  # the format of the figure, for `format`
    scale: float = 1.0  # multiplies the figure


class Table(NamedTuple):
    """A table of the results of some parts that have a figure in common."""

    title: str
    parts: tuple[str, ...]
    has: str  # the key of a figure that all of its results have
    first: str  # the head of the first column, which has the names of the results
    columns: tuple[Column, ...]


def gib(head: str, key: str) -> Column:
    """A column of GiB."""
    return Column(head, key, ".1f", 1 / GIB)


STEPS = ("train", "large", "long", "auto", "transformers")
DECODES = ("decode", "launch", "graph")
TABLES = (
    Table(
        "A training step in bfloat16 with dropout. The share of the peak counts the model's own operations, and not "
        "the operations that are computed again",
        STEPS,
        "compile_s",
        "setting",
        (
            Column("remat", "remat", ""),
            Column("examples", "batch", ""),
            Column("seconds", "step_s", ".3f"),
            Column("of the peak", "utilisation", ".1%"),
            Column("compiled in, s", "compile_s", ".1f"),
            gib("peak, GiB", "peak_bytes"),
            gib("compiler, GiB", "compiled_bytes"),
            gib("`pipejax plan`, GiB", "estimate_bytes"),
        ),
    ),
    Table(
        "Errors of attention compared with float32: the norm of the difference, divided by the norm",
        ("attention",),
        "xla_error",
        "attention",
        (
            Column("array", "array", ""),
            Column("in blocks, bfloat16", "blocks_error", ".4f"),
            Column("XLA, bfloat16", "xla_error", ".4f"),
        ),
    ),
    Table(
        "Attention of a layer with dropout, six examples: the output, and the output with all gradients",
        ("attention",),
        "forward_s",
        "attention",
        (
            Column("output, ms", "forward_s", ".3f", 1e3),
            Column("with gradients, ms", "both_s", ".3f", 1e3),
            Column("ps for each score", "ps", ".3f"),
        ),
    ),
    Table(
        "Decoding of one source of 512 tokens by T5-Base in bfloat16. A decode takes its fixed time and the time of "
        "its steps. Tokens are compared with the first line that has as many queries. A loop of the host is outside "
        "the CUDA graphs. The profiler measures the time in kernels",
        DECODES,
        "step_s",
        "decoder",
        (
            Column("ms a step", "step_s", ".3f", 1e3),
            Column("ms fixed", "fixed_s", ".2f", 1e3),
            Column("in kernels, ms a step", "kernels_s", ".3f", 1e3),
            Column("encoder, ms", "encoder_s", ".2f", 1e3),
            Column("first decode, s", "first_s", ".1f"),
            Column("equal tokens", "equal", ".0%"),
            Column("loops of the host", "host_loops", ""),
            Column("failed", "failed", ""),
            Column("choice", "configuration", ""),
        ),
    ),
    Table(
        "Kernels compared with XLA's",
        ("attention", "launch", "agreement"),
        "agrees",
        "compared",
        (
            Column("agrees", "agrees", ""),
            Column("difference", "apart", ".3g"),
            Column("XLA's own", "apart_xla", ".3g"),
            Column("equal tokens", "equal", ".0%"),
            Column("seconds of the trial", "trial_s", ".1f"),
            Column("verdict", "verdict", ""),
        ),
    ),
)


def short(summary: dict[str, Any]) -> list[str]:
    """One line for each part, with its status."""
    lines = [f"installed from wheels: {name}" for name in summary["wheels"]["installed"]]
    lines += [f"not installed: {failure}" for failure in summary["wheels"]["failures"]]
    for part in summary["parts"]:
        times = (
            f"{part['seconds']:6.1f} s, {part['device_s']:5.1f} s of them on the device" if "seconds" in part else ""
        )
        lines.append(f"{part['name']:<14}{part['status']:<13}{times}".rstrip())
    return lines


def where(summary: dict[str, Any]) -> str:
    """The device, the versions, the day and the time of the run."""
    if summary["rehearsal"]:
        return "A rehearsal on a CPU with tiny sizes: its figures mean nothing."
    device = device_of(summary)
    memory = f" with {device['memory'] / GIB:.0f} GiB for JAX" if device.get("memory") else ""
    versions = ", ".join(f"{name} {version}" for name, version in device.get("versions", {}).items())
    day = time.strftime("%Y-%m-%d", time.gmtime(summary["began"]))
    cache = "with programs in the cache" if summary["cache_filled"] else "with an empty cache of compiled programs"
    return f"{device['kind']}{memory}; {versions}; {day}, {summary.get('seconds', summary['limit']):.0f} s, {cache}."


def device_of(summary: dict[str, Any]) -> dict[str, Any]:
    """The device that the parts found."""
    return next((part["device"] for part in summary["parts"] if "device" in part), {"platform": None, "kind": "none"})


def page(summary: dict[str, Any] | None) -> list[str]:
    """The lines of the section in Markdown. `summary`: None if there are no results."""
    if summary is None:
        return ["This table has not been measured on a GPU yet."]
    lines, parts = [where(summary)], {part["name"]: part for part in summary["parts"]}
    for each in TABLES:
        rows = [r for name in each.parts for r in results(parts, name) if each.has in r]
        if rows:
            lines += ["", f"{each.title}:", "", *table(each, rows)]
    for name, part in parts.items():
        for r in part["results"]:
            if "profile" in r and name in ("train", "attention", "decode"):
                lines += kernels(r) if "XLA" not in r["name"] else []
    lines += notes(parts.values())
    return lines


def results(parts: dict[str, dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The results of a part, and figures that follow from them."""
    found = parts.get(name, {"results": []})["results"]
    return [r | ({"ps": 1e12 * r["both_s"] / r["scores"]} if "scores" in r else {}) for r in found]


def table(which: Table, rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table in Markdown. Columns without a figure are left out; times that compilers disturbed have an asterisk."""
    columns = [column for column in which.columns if any(r.get(column.key) is not None for r in rows)]

    def cell(column: Column, value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        if value is None or isinstance(value, str):
            return value or ""
        return format(value * column.scale if column.form else value, column.form)

    lines = [[r["name"] + ("*" if r.get("compiling") else ""), *(cell(x, r.get(x.key)) for x in columns)] for r in rows]
    head = [which.first, *(column.head for column in columns)]
    text = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] + ["--:"] * len(columns), *lines)]
    disturbed = ["", "\\* Other parts compiled on the same machine at that time."]
    return text + (disturbed if any(r.get("compiling") for r in rows) else [])


def kernels(result: dict[str, Any]) -> list[str]:
    """A table of the kernels that take most of the time of a call."""
    found = result["profile"]
    title = f"{result['name']}: {1e3 * found['seconds']:.2f} ms, {found['kernels']:,} kernels that take "
    lines = ["", f"{title}{1e3 * found['busy_s']:.2f} ms:", "", "| kernel | starts | ms |", "| --- | --: | --: |"]
    shown = ((x["name"].replace("|", "/"), x["count"], 1e3 * x["seconds"]) for x in found["most"][:KERNELS])
    return lines + [f"| `{name}` | {count:,} | {ms:.2f} |" for name, count, ms in shown]


def notes(parts: Iterable[dict[str, Any]]) -> list[str]:
    """One line for each part that failed, was cut off, or was skipped."""
    lines = []
    for part in parts:
        lines += [f"- {part['about']}, {r['name']}: `{plain(r['error'])}`." for r in part["results"] if "error" in r]
        reasons = [r["no_profile"] for r in part["results"] if "no_profile" in r]
        lines += [f"- {part['about']}: no profile, `{plain(reasons[0])}`."] if reasons else []
        why = part.get("cut") or part.get("skipped")
        if part["status"] == "failed" and not any("error" in r for r in part["results"]):
            why = f"`{last_line(part['log'])}`"
        if why or part["status"] == "not started":
            lines.append(f"- {part['about']}: {part['status']}{f', {why}' if why else ''}.")
    return ["", "Not measured, or not completely:", "", *lines] if lines else []


def plain(text: str) -> str:
    """Text that fits between backticks in a line."""
    return text.replace("`", "'").replace("\n", " ")[:300]


def last_line(text: str) -> str:
    """The last line of a log that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return plain(lines[-1]) if lines else "nothing"


def main(argv: Sequence[str]) -> int:
    """The command line."""
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        summary = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
        lines = page(summary)
        if summary["rehearsal"] or device_of(summary)["platform"] != "gpu":
            found = "a rehearsal" if summary["rehearsal"] else f"a run on {device_of(summary)['kind']}"
            print(f"error: {argv[0]}: found {found}; expected a run on a GPU", file=sys.stderr)
            return 2
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {argv[0]}: found no summary of lab/benchmarks/gpu.sh ({error})", file=sys.stderr)
        return 2
    RESULTS.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print("\n".join([*lines, "", f"{RESULTS} is written; docs/gpu.md shows it"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
