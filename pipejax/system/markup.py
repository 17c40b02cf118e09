"""Text for the HTML and SVG pages of `pipejax picture` and `pipejax probe`."""

import html

FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"

_VISIBLE = {**{i: 0x2400 + i for i in range(32)}, **dict.fromkeys([*range(0xD800, 0xE000), 0xFFFE, 0xFFFF], 0xFFFD)}


def escape(text: str) -> str:
    """Escapes text for XML and HTML. Control characters, which XML forbids, become visible symbols."""
    return html.escape(text.translate(_VISIBLE))


def count(number: int, noun: str) -> str:
    """Returns a number with a noun, such as "2 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
