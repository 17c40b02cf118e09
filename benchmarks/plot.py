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


def draw(results: list[dict[str, Any]], heading: str, path: str) -> None:
    """One panel a pattern, each with its own scale: seconds of an answer, and how many times the fastest they are."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    patterns = list(dict.fromkeys(r["pattern"] for r in results))
    figure, axes = pyplot.subplots(1, len(patterns), figsize=(3.6 * len(patterns) + 1.2, 3.4), squeeze=False)
    names = list(dict.fromkeys(r["system"] for r in results))
    for panel, pattern in zip(axes[0], patterns, strict=True):
        mine = {r["system"]: r for r in results if r["pattern"] == pattern}
        own = mine[names[0]]["decode_s"]
        places = np.arange(len(names))[::-1]
        for place, name, colour in zip(places, names, COLOURS * 2, strict=False):
            r = mine[name]
            panel.barh(place, r["encode_s"], color="#d9d9d9", height=0.7)
            panel.barh(place, r["decode_s"], left=r["encode_s"], color=colour, height=0.7)
            label = f" {r['decode_s']:.2f} s, {r['steps']} steps" + (
                f", {r['decode_s'] / own:.1f}x" if name != names[0] else ""
            )
            panel.text(r["encode_s"] + r["decode_s"], place, label, va="center", fontsize=8)
        panel.set_yticks(places, names if panel is axes[0][0] else [""] * len(names), fontsize=9)
        panel.set_xlim(0, 1.55 * max(r["encode_s"] + r["decode_s"] for r in mine.values()))
        panel.set_title(pattern, fontsize=10)
        panel.set_xlabel("seconds (grey: encoder)", fontsize=8)
        panel.tick_params(axis="x", labelsize=8)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    figure.suptitle(heading, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
