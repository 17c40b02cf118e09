"""Text and axes for the HTML and SVG pages of the commands."""

import html
import math

FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"

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
