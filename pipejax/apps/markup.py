"""Text, styles and charts of the HTML and SVG pages that the commands write."""

import dataclasses
import html
import importlib.resources
import math
import string
from collections.abc import Iterable, Sequence

FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"

# The style of every page: its colours, font and margins. Each page adds its own `max-width` of `body`.
STYLE = f"""\
:root {{
  color-scheme: light dark;
  --page: #ffffff; --ink: #1d2733; --quiet: #66727f; --line: #d9dee4;
}}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #14181d; --ink: #e4e8ec; --quiet: #93a0ad; --line: #3a434d; }}
}}
* {{ box-sizing: border-box; }}
body {{
  margin: 0 auto; padding: 28px 32px;
  background: var(--page); color: var(--ink); font: 15px/1.5 {FONT};
}}
h1 {{ margin: 0; font-size: 20px; font-weight: 600; overflow-wrap: anywhere; }}
@media (max-width: 760px) {{ body {{ padding: 20px 16px; }} }}"""

COLOURS = 8  # number of colours for the entries of a chart, the classes c0 to c7; further entries reuse them

# The style of pages with charts, a legend and a table of all entries.
CHART_STYLE = """\
:root {
  --line: #e3e7eb;
  --c0: #3457c9; --c1: #cb5c3c; --c2: #2a8a5b; --c3: #8a4fb0;
  --c4: #b58a00; --c5: #0d8c9c; --c6: #c2397c; --c7: #5d6773;
}
@media (prefers-color-scheme: dark) {
  :root {
    --line: #2c343c;
    --c0: #8fa5f5; --c1: #f0936f; --c2: #6cc795; --c3: #c598e4;
    --c4: #e0bf4f; --c5: #5fc9d6; --c6: #ef86b7; --c7: #aab4be;
  }
}
h2 { margin: 0 0 4px; font-size: 15px; font-weight: 600; }
section { margin-top: 24px; }
.quiet { color: var(--quiet); }
svg { display: block; width: 100%; height: auto; }
svg text.quiet { fill: var(--quiet); }
path { fill: none; stroke-width: 2; stroke-linejoin: round; }
path.line { stroke: var(--line); stroke-width: 1; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); } .c3 { stroke: var(--c3); }
.c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); } .c6 { stroke: var(--c6); } .c7 { stroke: var(--c7); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 22px; margin-top: 8px; }
.entry { overflow-wrap: anywhere; }
.entry svg { display: inline-block; margin-right: 7px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px; border-bottom: 1px solid var(--line); }
th, td { text-align: right; font-weight: 400; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
thead th { color: var(--quiet); }"""

_VISIBLE = {**{i: 0x2400 + i for i in range(32)}, **dict.fromkeys([*range(0xD800, 0xE000), 0xFFFE, 0xFFFF], 0xFFFD)}


def escape(text: str) -> str:
    """Escapes text for XML and HTML. Control characters, which XML forbids, become visible symbols."""
    return html.escape(text.translate(_VISIBLE))


def count(number: int, noun: str) -> str:
    """Returns a number with a noun, such as "2 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def tick_step(low: float, high: float, most: int = 5) -> float:
    """Returns the least 1, 2 or 5 times a power of ten that divides low to high into at most `most` parts."""
    rough = (high - low) / most or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Returns the multiples of `tick_step` from low to high: at least 2 and at most `most` + 1."""
    step = tick_step(low, high, most)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def ticks_around(low: float, high: float, most: int = 5) -> list[float]:
    """Returns multiples of `tick_step`, the first at most low and the last at least high."""
    step = tick_step(low, high, most)
    return [i * step for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def template(package: str, name: str) -> string.Template:
    """Returns the template of a page, a file of a package."""
    return string.Template(importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8"))


def legend(names: Iterable[str], sign: str) -> str:
    """Returns the names of the entries of a chart, each behind an SVG; $c in `sign` is the class of its colour."""
    return "".join(
        f'<span class="entry">{string.Template(sign).substitute(c=f"c{i % COLOURS}")}{escape(name)}</span>'
        for i, name in enumerate(names)
    )


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table of texts."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart: its size and margins in pixels, and the values at its edges. The left edge has the value 0."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    last: float  # the value at the right edge
    low: float
    high: float

    def x(self, value: float) -> float:
        """Returns the horizontal place of a value, in pixels."""
        return self.left + (self.width - self.left - self.right) * value / self.last

    def y(self, value: float) -> float:
        """Returns the vertical place of a value, in pixels from the top."""
        return self.top + (self.height - self.top - self.bottom) * (self.high - value) / (self.high - self.low)

    def svg(self, rows: Sequence[float], columns: Iterable[tuple[float, str]], below: int, parts: Iterable[str]) -> str:
        """Returns the chart as SVG.

        Args:
          rows: the values of the horizontal lines.
          columns: values of the horizontal axis, with their labels.
          below: pixels from the lower edge to the labels of the columns.
          parts: SVG elements that are drawn over the axes.
        """
        size = f'viewBox="0 0 {self.width} {self.height}"'
        axes = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-size="12">']
        for value in rows:
            y = self.y(value)
            axes.append(f'<path class="line" d="M{self.left} {y:.1f}H{self.width - self.right}"/>')
            axes.append(f'<text class="quiet" x="{self.left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.6g}</text>')
        for value, label in columns:
            place = f'x="{self.x(value):.1f}" y="{self.height - below}"'
            axes.append(f'<text class="quiet" {place} text-anchor="middle">{label}</text>')
        return "".join([*axes, *parts, "</svg>"])
