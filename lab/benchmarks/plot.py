"""Draws the results of lab.benchmarks.decode: the times of encoder and decoding of each system, the fastest first.

    python -m lab.benchmarks.plot RESULTS.json --patterns 8x14 --batch 1 --output speed.svg
    python -m lab.benchmarks.plot SEQUENTIAL.json PIPELINED.json --output quality.svg

The second command draws the results of lab.experiments.rounding for trained models: score over milliseconds.
"""

import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.system import cli
from pipejax.system.errors import UserError

COLOURS = ("#0b6e4f", "#4a4e69", "#e8b04b")  # of decoders
OURS, THEIRS = ("#8fd0b0", "#0b6e4f"), ("#d3d3de", "#6b6f8a")  # encoder and decoding
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
    "hf-compiled": "Hugging Face, torch.compile",
    "ct2-fp32": "CTranslate2",
    "ct2-int8": "CTranslate2 int8",
    "ct2-int8-packed": "CTranslate2 int8, packed",
    "openvino-fp32": "OpenVINO",
    "openvino-int8": "OpenVINO int8",
    "onnx-fp32": "ONNX Runtime",
    "onnx-int8": "ONNX Runtime int8",
    "llama-fp32": "llama.cpp",
    "llama-int8": "llama.cpp Q8_0",
}
# The marker, and the distance of the label above it.
MARKERS = {"float32": ("o", 8), "bfloat16": ("s", -14), "int8": ("^", 8)}
PANELS = 2  # panels in a row
LONGEST = 4.0  # longest bar, in medians of a panel; longer bars are cut


def main(argv: Sequence[str]) -> int:
    """Draws."""
    parser = cli.Parser(prog="python -m lab.benchmarks.plot", description=__doc__)
    parser.add_argument(
        "results",
        nargs="+",
        metavar="RESULTS.json",
        help="results of `lab.benchmarks.decode --json` or lab.experiments.rounding",
    )
    parser.add_argument("--patterns", default="", metavar="NxM,...", help="draw only these answers, in this order")
    parser.add_argument("--batch", type=int, default=0, metavar="B", help="draw only results of batches of B examples")
    parser.add_argument("--output", required=True, metavar="FILE", help=".svg, .png or .pdf")
    flags = parser.parse_args(argv)
    cli.check_output_file("--output", flags.output)
    found = [read(path) for path in flags.results]
    if all("score" in result for each in found for result in each["results"]):
        draw_quality([result for each in found for result in each["results"]], flags.output)
    elif len(found) > 1:
        raise UserError(flags.results[1], found="a second file", expected="one file of lab.benchmarks.decode")
    else:
        draw(chosen(found[0]["results"], flags.patterns, flags.batch), title(found[0]), flags.output)
    return 0


def read(path: str) -> dict[str, Any]:
    """Reads the results of a file, with the machine on which they were measured."""
    try:
        found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not all(isinstance(result, dict) for result in found["results"]):
            raise TypeError
    except OSError as error:
        raise UserError(path, f"cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(path, "not a file that lab.benchmarks.decode or lab.experiments.rounding writes") from error
    return found


def title(found: dict[str, Any]) -> str:
    """The title of the picture: the model and the machine."""
    about, source = found.get("machine", {}), found.get("source")
    size = found.get("model", "?").capitalize() + (f", {source} source tokens" if source else "")
    return f"T5-{size}, {about.get('threads')} threads of {about.get('processor')}"


def in_words(pattern: str, batch: int) -> str:
    """The heading for a pattern of rows and tokens: "8x14u" is "8 rows of 14 tokens, one of them 1.5 times as long"."""
    rows, _, tokens = pattern.removesuffix("u").partition("x")
    more = ", one of them 1.5 times as long" if pattern.endswith("u") else ""
    return f"{rows} rows of {tokens} tokens{more}" + (f", {batch} documents at a time" if batch > 1 else "")


def chosen(results: list[dict[str, Any]], patterns: str, batch: int) -> list[dict[str, Any]]:
    """The results for these answers, and for this batch unless it is 0; raises a UserError if there are none."""
    wanted = [text for text in patterns.split(",") if text] or list(dict.fromkeys(r["pattern"] for r in results))
    found = [r for text in wanted for r in results if r["pattern"] == text and batch in (0, r.get("batch", 1))]
    if not found:
        raise UserError(f"--patterns {patterns} --batch {batch}", found="no such results", expected="some")
    return found


def seconds(result: dict[str, Any]) -> float:
    """The seconds of a whole answer."""
    return float(result["encode_s"] + result["decode_s"])


def fastest(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of each system with its fastest weights, the fastest system first."""
    kept: dict[str, dict[str, Any]] = {}
    for result in sorted(results, key=seconds):
        kept.setdefault(re.sub("-(int8|fp32|bf16|packed)", "", result["system"]), result)
    return list(kept.values())


def draw(results: list[dict[str, Any]], heading: str, path: str) -> None:
    """Draws one panel for each answer and batch, each with its own scale: seconds of each system, ours in green."""
    pyplot = opened()
    panels = list(dict.fromkeys((r["pattern"], r.get("batch", 1)) for r in results))
    parts = [fastest([r for r in results if (r["pattern"], r.get("batch", 1)) == panel]) for panel in panels]
    columns = min(PANELS, len(panels))
    shape = -(-len(panels) // columns), columns
    size = (7.6 if columns == 1 else 6.2 * columns), (0.3 * max(map(len, parts)) + 0.75) * shape[0] + 0.5
    figure, axes = pyplot.subplots(*shape, figsize=size, squeeze=False)
    for panel in axes.flat[len(panels) :]:
        panel.set_axis_off()
    for panel, (pattern, batch), mine in zip(axes.flat, panels, parts, strict=False):
        longest = LONGEST * statistics.median(map(seconds, mine))
        places = np.arange(len(mine))[::-1]
        for place, r in zip(places, mine, strict=True):
            light, dark = OURS if r["system"].startswith("pipejax") else THEIRS
            encode, end = min(r["encode_s"], longest), min(seconds(r), longest)
            panel.barh(place, encode, color=light, height=0.7)
            panel.barh(place, end - encode, left=encode, color=dark, height=0.7)
            says = f"{seconds(r):.2f} s" + (", bar cut" if seconds(r) > longest else "")
            if seconds(r) > longest:
                draw_break(panel, place, longest)
            times = f", {seconds(r) / seconds(mine[0]):.1f}x" if r is not mine[0] else ""
            panel.text(end, place, f" {says}{times}", va="center", fontsize=8)
        names = ["pipejax, " * r["system"].startswith("pipejax") + NAMES.get(r["system"], r["system"]) for r in mine]
        panel.set_yticks(places, names, fontsize=9)
        for label, r in zip(panel.get_yticklabels(), mine, strict=True):
            if r["system"].startswith("pipejax"):
                label.set(color=OURS[1], fontweight="bold")
        panel.set_xlim(0, 1.35 * min(longest, max(map(seconds, mine))))
        panel.set_title(in_words(pattern, batch), fontsize=9, loc="left")
        panel.tick_params(axis="x", labelsize=8)
        panel.tick_params(axis="y", length=0)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    says = "seconds: encoder light, decoding dark; ours green; each system with the weights that make it fastest"
    figure.suptitle(f"{heading}\n{says}", fontsize=9)
    write(figure, path)


def draw_break(panel: Any, place: float, longest: float) -> None:
    """Draws two slanted gaps near the end of a bar of the length `longest`."""
    width, slant, top = 0.008 * longest, 0.012 * longest, 0.35  # half of the height
    for x in (0.93 * longest, 0.955 * longest):
        corners = [x, x + width, x + width + slant, x + slant], [place - top, place - top, place + top, place + top]
        panel.fill(*corners, color="white", lw=0, gid="break")


def draw_quality(results: list[dict[str, Any]], path: str) -> None:
    """Draws scores over milliseconds of a document, with a point for each decoder and kind of weights."""
    pyplot = opened()
    figure, axes = pyplot.subplots(figsize=(6.2, 3.4))
    decoders = list(dict.fromkeys(r["strategy"] for r in results))
    for decoder, colour in zip(decoders, COLOURS, strict=False):
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
    axes.set_ylim(0, 1.25 * max(r["score"] for r in results) or 1)  # from zero, so that small differences look small
    axes.set_xlabel("milliseconds a document", fontsize=9)
    axes.set_ylabel(results[0]["metric"].replace("_", " ").replace("f1", "F1"), fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="#e5e5e5", lw=0.6)
    axes.legend(fontsize=8, loc="lower center", ncols=len(decoders), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    write(figure, path)


def opened() -> Any:
    """Imports matplotlib's pyplot without a window, with settings by which equal results give equal files."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("matplotlib", found="none", expected="it", hint="make venv-bench") from error
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "pipejax"
    from matplotlib import pyplot

    return pyplot


def write(figure: Any, path: str) -> None:
    """Writes the figure without the present date."""
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.endswith(".svg") else None)


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
