"""The texts of a picture: measured, shortened and placed; and a source in which the rows found in it are marked."""

import re
import unicodedata
from collections.abc import Sequence

from pipejax.apps.markup import escape

INK, QUIET = "#1d2733", "#768290"  # colours of text on a cell, and on the page, which may be light or dark


_WIDTHS = {**dict.fromkeys("iljtfrI.,:;'|!()[] ", 0.34), **dict.fromkeys("mwMW@%—", 0.95)}  # in units of the font size


def text_width(text: str) -> float:
    """Returns the approximate width of a text in units of its font size, because the page's font is unknown."""
    widths = (
        1.0 if unicodedata.east_asian_width(c) in "WF" else _WIDTHS.get(c, 0.7 if c.isupper() else 0.62)
        for c in text
        if not unicodedata.combining(c)
    )
    return sum(widths)


def shorten(text: str, room: float) -> str:
    """Returns the text, cut with an ellipsis if it is wider than `room`, in units of the font size."""
    if text_width(text) <= room:
        return text
    while text and text_width(text) + 0.7 > room:
        text = text[:-1]
    return text.rstrip() + "…"


def label(
    x: float, y: float, text: str, *, size: float = 11, ink: str = QUIET, anchor: str = "middle", weight: int = 400
) -> str:
    """Returns a text as an SVG element."""
    extra = (f' font-weight="{weight}"' if weight != 400 else "") + (' class="quiet"' if ink == QUIET else "")
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{ink}"{extra}>'
        f"{escape(text)}</text>"
    )


def dotted(left: float, y: float, right: float) -> str:
    """Returns a dotted line as SVG, for a row that waits for its start."""
    line = f'<path d="M{left} {y:g}H{right}" stroke="{QUIET}" stroke-opacity=".4" stroke-dasharray="1 5"'
    return f'{line} stroke-linecap="round"/>'


def mark(source: str, texts: Sequence[str], finished: Sequence[int]) -> str:
    """Returns the source with the rows found in it marked.

    Each row is looked up in the source after the place of the previous row, and if it is not there, from the beginning.
    """
    found: list[tuple[int, int, int]] = []  # start, end, row
    position = 0
    for row, text in enumerate(texts):
        pattern = re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")
        for match in (pattern.search(source, position), *pattern.finditer(source)) if text else ():
            if match and all(match.end() <= start or end <= match.start() for start, end, _ in found):
                found.append((match.start(), match.end(), row))
                position = match.end()
                break
    parts, position = [], 0
    for start, end, row in sorted(found):
        words = _lines(source[start:end])
        parts.append(_lines(source[position:start]))
        parts.append(f'<mark data-done="{finished[row]}">{words}<sup>{row + 1}</sup></mark>')
        position = end
    return "".join([*parts, _lines(source[position:])])


def _lines(text: str) -> str:
    return "\n".join(map(escape, text.split("\n")))
