"""A picture of what benchmarks.decode wrote: decoding time of each system by pattern, and the encoder's below it.

python -m benchmarks.plot RESULTS.json --output speed.svg
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
PANELS = 2  # beside each other


def main(argv: Sequence[str]) -> int:
    """Draws."""
    parser = cli.Parser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("results", metavar="RESULTS.json", help="what `benchmarks.decode --json` wrote")
    parser.add_argument("--output", required=True, metavar="FILE", help=".svg, .png or .pdf")
    flags = parser.parse_args(argv)
    cli.check_output("--output", flags.output)
    try:
        found = json.loads(Path(flags.results).read_text(encoding="utf-8"))
        results = found["results"]
    except OSError as error:
        raise UserError(f"{flags.results}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{flags.results}: not what benchmarks.decode writes") from error
    draw(results, title(found), flags.output)
    return 0


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
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "pipejax"  # the same results give the same file
    from matplotlib import pyplot

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
    figure.suptitle(f"{heading}\nseconds; grey: encoder; figures: decoding alone", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.endswith(".svg") else None)


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
