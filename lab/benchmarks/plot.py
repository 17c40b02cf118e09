"""A picture of what lab.benchmarks.decode wrote: decoding time of each system by pattern, and the encoder's beside it.

    python -m lab.benchmarks.plot RESULTS.json --output speed.svg
    python -m lab.benchmarks.plot SEQUENTIAL.json PIPELINED.json --output quality.svg

The second draws what lab.experiments.rounding wrote for trained models of one task: score against milliseconds.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.system import cli
from pipejax.system.errors import UserError

COLOURS = ("#0b6e4f", "#6bbf8f", "#4a4e69", "#c9762c", "#e8b04b", "#9a8c98")
NAMES = {
    "pipejax-pipelined": "pipelined",
    "pipejax-sequential": "sequential",
    "pipejax-pipelined-bf16": "pipelined bfloat16",
    "pipejax-sequential-bf16": "sequential bfloat16",
    "pipejax-pipelined-int8": "pipelined int8",
    "pipejax-sequential-int8": "sequential int8",
    "hf": "Hugging Face",
    "hf-bf16": "Hugging Face bfloat16",
    "hf-int8": "Hugging Face int8",
    "ct2-fp32": "CTranslate2",
    "ct2-int8": "CTranslate2 int8",
}
MARKERS = {"float32": ("o", 8), "bfloat16": ("s", -14), "int8": ("^", 8)}  # and how far above it its name stands
PANELS = 2  # beside each other


def main(argv: Sequence[str]) -> int:
    """Draws."""
    parser = cli.Parser(prog="python -m lab.benchmarks.plot", description=__doc__)
    parser.add_argument(
        "results",
        nargs="+",
        metavar="RESULTS.json",
        help="what `lab.benchmarks.decode --json` or lab.experiments.rounding wrote",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help=".svg, .png or .pdf")
    flags = parser.parse_args(argv)
    cli.check_output("--output", flags.output)
    found = [read(path) for path in flags.results]
    if all("score" in result for each in found for result in each["results"]):
        draw_quality([result for each in found for result in each["results"]], flags.output)
    elif len(found) > 1:
        raise UserError(f"{flags.results[1]}: found a second file; expected one of lab.benchmarks.decode alone")
    else:
        draw(found[0]["results"], title(found[0]), flags.output)
    return 0


def read(path: str) -> dict[str, Any]:
    """Results, with what they were measured on."""
    try:
        found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not all(isinstance(result, dict) for result in found["results"]):
            raise TypeError
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not what lab.benchmarks.decode or lab.experiments.rounding writes") from error
    return found


def title(found: dict[str, Any]) -> str:
    """What was measured on what."""
    about, batch = found.get("machine", {}), found["results"][0].get("batch", 1)
    size = found.get("model", "?").capitalize()
    return f"T5-{size}, batch {batch}, {about.get('threads')} threads of {about.get('processor')}"


def in_words(pattern: str) -> str:
    """A pattern of rows and tokens as a heading: "8x14u" is "8 rows of 14 tokens, one half as long again"."""
    rows, _, tokens = pattern.removesuffix("u").partition("x")
    return f"{rows} rows of {tokens} tokens" + (", one half as long again" if pattern.endswith("u") else "")


def draw(results: list[dict[str, Any]], heading: str, path: str) -> None:
    """One panel a pattern, each with its own scale: seconds of an answer, and how many times the fastest they are."""
    pyplot = opened()
    patterns = list(dict.fromkeys(r["pattern"] for r in results))
    systems = list(dict.fromkeys(r["system"] for r in results))
    columns = min(PANELS, len(patterns))
    shape = -(-len(patterns) // columns), columns
    size = 4.2 * shape[1] + 0.9, (0.3 * len(systems) + 0.75) * shape[0] + 0.5
    figure, axes = pyplot.subplots(*shape, figsize=size, squeeze=False)
    places = np.arange(len(systems))[::-1]
    for panel in axes.flat[len(patterns) :]:
        panel.set_axis_off()
    for panel, pattern in zip(axes.flat, patterns, strict=False):
        mine = {r["system"]: r for r in results if r["pattern"] == pattern}
        own = mine[systems[0]]["decode_s"]
        for place, name, colour in zip(places, systems, COLOURS * 2, strict=False):
            encode, decode, steps = (mine[name][key] for key in ("encode_s", "decode_s", "steps"))
            panel.barh(place, encode, color="#d9d9d9", height=0.7)
            panel.barh(place, decode, left=encode, color=colour, height=0.7)
            times = f", {decode / own:.1f}x" if name != systems[0] else ""
            panel.text(encode + decode, place, f" {decode:.2f} s, {steps} steps{times}", va="center", fontsize=8)
        first = panel in axes[:, 0]
        panel.set_yticks(places, [NAMES.get(name, name) if first else "" for name in systems], fontsize=9)
        panel.set_xlim(0, 1.6 * max(r["encode_s"] + r["decode_s"] for r in mine.values()))
        panel.set_title(in_words(pattern), fontsize=9, loc="left")
        panel.tick_params(axis="x", labelsize=8)
        panel.tick_params(axis="y", length=0)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    first = NAMES.get(systems[0], systems[0])
    says = f"seconds; grey: encoder; figures: decoding alone, x: times as long as {first}"
    figure.suptitle(f"{heading}\n{says}", fontsize=9)
    write(figure, path)


def draw_quality(results: list[dict[str, Any]], path: str) -> None:
    """Score against milliseconds of a document: a point for each decoder and kind of weights, a colour a decoder."""
    pyplot = opened()
    figure, axes = pyplot.subplots(figsize=(6.2, 3.4))
    decoders = list(dict.fromkeys(r["strategy"] for r in results))
    for decoder, colour in zip(decoders, COLOURS[::2], strict=False):
        mine = [r for r in results if r["strategy"] == decoder]
        axes.plot([r["milliseconds"] for r in mine], [r["score"] for r in mine], color=colour, lw=0.8, label=decoder)
        for r in mine:
            (marker, above), place = MARKERS[r["weights"]], (r["milliseconds"], r["score"])
            axes.plot(*place, marker, color=colour, markersize=6)
            axes.annotate(r["weights"], place, xytext=(0, above), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xscale("log")
    least, most = (f(r["milliseconds"] for r in results) for f in (min, max))
    axes.set_xlim(least / 1.5, most * 1.5)
    digits = 10.0 ** np.arange(-3, 9)
    marks = [x for x in np.outer(digits, (1, 2, 5)).ravel() if least / 1.5 <= x <= most * 1.5]
    axes.set_xticks(marks, [f"{x:g}" for x in marks])
    axes.minorticks_off()
    axes.set_ylim(0, 1.25 * max(r["score"] for r in results) or 1)  # from zero: small differences look small
    axes.set_xlabel("milliseconds a document", fontsize=9)
    axes.set_ylabel(results[0]["metric"].replace("_", " ").replace("f1", "F1"), fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="#e5e5e5", lw=0.6)
    axes.legend(fontsize=8, loc="lower center", ncols=len(decoders), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    write(figure, path)


def opened() -> Any:
    """matplotlib's pyplot, without a window; the same results give the same file."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("matplotlib: found none; expected it (make venv-bench)") from error
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "pipejax"
    from matplotlib import pyplot

    return pyplot


def write(figure: Any, path: str) -> None:
    """Without the date of today."""
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.endswith(".svg") else None)


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
