"""The grid of one example while it fills, as SVG.

Rows and times are as in `pipejax.grid`: the j-th generated token of row i, including eos, is at time i * delay + j,
where i counts from 0 and j from 1.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from pipejax.apps.markup import FONT, count, escape
from pipejax.apps.picture.picture_text import INK, QUIET, dotted, label, shorten, text_width

PALETTE = ((157, 197, 235), (190, 184, 238), (240, 190, 168))  # colours of the first, middle and last time-step
LEFT, RIGHT, TOP = 84, 20, 52  # pixels around the grid
NARROWEST, WIDEST = 46, 104  # pixels: limits of a column's width
ROOM = 1600  # pixels: columns get narrower to keep the grid within this width
STRIP, STRIP_ROOM = 10, 960  # pixels: height and maximum length of a strip of steps
TRUNCATIONS = {
    None: "",
    "sub_max": "; truncated: no further row was allowed (sub_max)",
    "time_max": "; truncated at the last time-step (time_max)",
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One position of the grid, filled at its time."""

    row: int
    time: int
    kind: str  # "bos", "token" or "eos"
    text: str


@dataclasses.dataclass(frozen=True)
class Grid:
    """The filled grid of one answer."""

    rows: tuple[tuple[str, ...], ...]  # token texts, without bos and eos
    delay: int
    steps: int
    truncated: str | None
    cells: tuple[Cell, ...]  # includes the empty last row, if there was one
    sequential: tuple[int, ...]  # the pipelined time of the token of each sequential step; 0: separator or eos
    names: tuple[str | None, ...] = ()  # the name of each row; None: the row has no name

    @property
    def height(self) -> int:
        """The number of rows, including the empty last row."""
        return max((cell.row for cell in self.cells), default=-1) + 1

    def name_of(self, row: int) -> str:
        """Returns the name of a row, or "row" with its number, counted from 1."""
        if row < len(self.names) and (name := self.names[row]):
            return name
        return "empty row" if len(self.rows) == row < self.height else f"row {row + 1}"

    def label_of(self, row: int) -> str:
        """Returns the name of a row, shortened to the space in the margin."""
        return shorten(self.name_of(row), (LEFT - 16) / 11)


def fill(
    rows: Sequence[Sequence[str]],
    *,
    delay: int,
    truncated: str | None = None,
    steps: int | None = None,
    empty_row: bool = True,
    names: Sequence[str | None] = (),
) -> Grid:
    """Places tokens, bos, eos and the empty last row on the grid (paper sections 3.2 and 3.3).

    Args:
      rows: token texts of each row.
      delay: time-steps between the starts of two rows.
      truncated: the limit that cut the answer, or None.
      steps: the number of time-steps; None: computed from the rows.
      empty_row: whether an empty row ended the answer.
      names: the names of the rows; a row without one is shown as "row" and its number.
    """
    if delay < 0:
        raise ValueError(f"delay: expected at least 0; got {delay}")
    if truncated not in TRUNCATIONS:
        raise ValueError(f"truncated: expected None, 'sub_max' or 'time_max'; got {truncated!r}")
    if steps is None:
        ends = [i * delay + len(row) + 1 for i, row in enumerate(rows)]
        if truncated is None and delay:
            ends.append(len(rows) * delay + 1)
        steps = max(max(ends, default=0) - (truncated == "time_max"), 0)
    cells = []
    for i, row in enumerate([*rows, ()]):
        start = i * delay
        if i == len(rows) and (not (empty_row and delay) or truncated == "sub_max" or start >= steps):
            break
        cells.append(Cell(i, start, "bos", "bos"))
        cells += [Cell(i, start + j, "token", text) for j, text in enumerate(row, start=1)]
        if start + len(row) < steps:
            cells.append(Cell(i, start + len(row) + 1, "eos", "eos"))
    sequential: list[int] = []
    for i, row in enumerate(rows):
        sequential += [0] * (i > 0) + [i * delay + j for j in range(1, len(row) + 1)]
    return Grid(tuple(map(tuple, rows)), delay, steps, truncated, tuple(cells), (*sequential, 0), tuple(names))


def svg(grid: Grid, *, page: bool = False) -> str:
    """Returns the grid as a standalone SVG that is legible on light and dark backgrounds.

    Time-steps are horizontal, rows vertical, and the colour shows the time-step. Below the grid are the steps of the
    pipelined decoder and, on the same scale, the steps of a sequential decoder for the same text. With `page`, the SVG
    has no caption, and the page sets the current time-step.
    """
    pitch, top, caption = pitch_of(grid), top_of(page=page), facts(grid)
    column, size = _column_of_tokens(grid)
    width = width_of(grid, page=page)
    bottom = top + grid.height * pitch
    parts = [
        open_svg(width, bottom + 62, "picture-title picture-text"),
        f'<title id="picture-title">{escape(caption)}</title>',
        f'<desc id="picture-text">{escape(_describe(grid))}</desc>',
    ]
    if page:
        parts.append(
            f'<rect class="now" data-left="{LEFT}" data-column="{column}" '
            f'x="{LEFT + grid.steps * column}" y="{top - 20}" width="{column}" '
            f'height="{bottom - top + 22}" rx="6" fill="{QUIET}" fill-opacity=".14"/>'
        )
    else:
        parts.append(label(LEFT, 20, caption, size=13, anchor="start", weight=600))
    parts += time_axis(grid.steps, column, top)
    for i in range(grid.height):
        middle, start = top + (i + 0.5) * pitch, LEFT + i * grid.delay * column
        parts.append(label(LEFT - 12, middle + 4, grid.label_of(i), anchor="end"))
        if 0 < i * grid.delay <= grid.steps:
            parts.append(dotted(LEFT + 2, middle, start - 4))
    written = (cell for cell in grid.cells if cell.time <= grid.steps)
    parts += [_cell(cell, grid, column=column, pitch=pitch, top=top, size=size) for cell in written]
    parts += _strips(grid, top=bottom + 22, room=min(width - LEFT - RIGHT - 60, STRIP_ROOM))
    return "\n".join([*parts, "</svg>"]) + "\n"


def open_svg(width: int, height: int, labels: str) -> str:
    """Returns the start of an SVG element that is described by the elements with these ids."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-labelledby="{labels}" font-family="{FONT}">'
    )


def time_axis(steps: int, column: int, top: int) -> list[str]:
    """Returns the labels of the time-steps as SVG elements."""
    times = [label(LEFT + (time + 0.5) * column, top - 6, str(time)) for time in range(1, steps + 1)]
    return [label(LEFT - 12, top - 6, "time-step", anchor="end"), *times]


def _cell(cell: Cell, grid: Grid, *, column: int, pitch: int, top: int, size: float) -> str:
    """Returns a cell as SVG."""
    x, y, width, height = LEFT + cell.time * column + 2, top + cell.row * pitch + 3, column - 4, pitch - 6
    centre, middle = x + width / 2, y + height / 2
    row = f"row {cell.row + 1}" if cell.row == len(grid.rows) else grid.name_of(cell.row)
    tip = f"{row}, time-step {cell.time}: {cell.text if cell.kind == 'token' else cell.kind}"
    if cell.kind == "token":
        box = f'fill="{_colour(cell.time, grid.steps)}"'
        shown = shorten(cell.text, (width - 6) / size)
        words = label(centre, middle + size * 0.35, shown, size=size, ink=INK)
    else:
        line = (
            f'stroke="{QUIET}" stroke-opacity=".7" stroke-dasharray="3 3"'
            if cell.kind == "bos"
            else f'stroke="{_colour(cell.time, grid.steps)}" stroke-width="1.5"'
        )
        box = f'fill="none" {line}'
        words = label(centre, middle + 3.5, cell.text, size=10)
    return (
        f'<g data-time="{cell.time}"><title>{escape(tip)}</title><rect x="{x}" y="{y}" width="{width}" '
        f'height="{height}" rx="5" {box}/>{words}</g>'
    )


def _strips(grid: Grid, *, top: int, room: float) -> Iterator[str]:
    """Yields the two strips of steps below the grid, pipelined and sequential, as SVG elements."""
    unit = min(room / max(len(grid.sequential), grid.steps), 24.0)
    gap = 1.5 if unit > 6 else 0.5 if unit > 2.5 else 0.0
    for name, times in (("pipelined", range(1, grid.steps + 1)), ("sequential", grid.sequential)):
        yield label(LEFT - 12, top + STRIP - 1, name, anchor="end")
        for step, time in enumerate(times, start=1):
            colour = f'fill="{_colour(time, grid.steps)}"' if time else f'fill="{QUIET}" fill-opacity=".45"'
            yield (
                f'<rect class="step" data-time="{step}" x="{LEFT + (step - 1) * unit:.2f}" y="{top}" '
                f'width="{unit - gap:.2f}" height="{STRIP}" rx="{min(2, unit / 4):.1f}" {colour}/>'
            )
        yield label(LEFT + len(times) * unit + 8, top + STRIP - 1, count(len(times), "step"), anchor="start")
        top += STRIP + 10


def facts(grid: Grid) -> str:
    """Describes the pipelined steps, the sequential steps and their ratio in a line."""
    ratio = f" ({len(grid.sequential) / grid.steps:.1f}×)" if grid.steps else ""
    return (
        f"{count(grid.steps, 'time-step')} instead of {len(grid.sequential)}{ratio}, "
        f"Δt = {grid.delay}{TRUNCATIONS[grid.truncated]}"
    )


def _describe(grid: Grid) -> str:
    """Describes the grid in words, for readers who do not see the picture."""
    names = [f" ({name})" if name else "" for name in (*grid.names, *[None] * len(grid.rows))]
    rows = [
        f"Row {i + 1}{names[i]} starts at time {i * grid.delay}: {' '.join(row)}." for i, row in enumerate(grid.rows)
    ]
    end = "An empty row ends it." if grid.height > len(grid.rows) else "No empty row ends it."
    other = (
        f"A sequential decoder takes {count(len(grid.sequential), 'step')} for the same text, "
        "one token a step; grey steps are separators and the eos."
    )
    return " ".join([*rows, end, other])


def column_of(texts: Iterable[str], columns: int) -> tuple[int, float]:
    """Returns the column width in pixels and the font size, for tokens of these texts in this many columns."""
    size = 10.5 if ROOM / columns < 60 else 12.0
    longest = max(map(text_width, texts), default=0.0)
    return round(min(max(longest * size + 20, NARROWEST), WIDEST, max(ROOM / columns, NARROWEST))), size


def _column_of_tokens(grid: Grid) -> tuple[int, float]:
    return column_of((cell.text for cell in grid.cells if cell.kind == "token"), grid.steps + 1)


def width_of(grid: Grid, *, page: bool) -> int:
    """Returns the width of the SVG in pixels."""
    least = 240 if page else round(text_width(facts(grid)) * 17)
    return LEFT + max((grid.steps + 1) * _column_of_tokens(grid)[0], least) + RIGHT


def pitch_of(grid: Grid) -> int:
    """Returns the distance of two rows in pixels."""
    return 32 if grid.height <= 12 else 27


def top_of(*, page: bool) -> int:
    """Returns the height above the grid in pixels."""
    return TOP - 22 if page else TOP


def _colour(time: int, steps: int) -> str:
    place = (time - 1) / max(steps - 1, 1) * (len(PALETTE) - 1)
    low = min(int(place), len(PALETTE) - 2)
    mixed = (a + (b - a) * (place - low) for a, b in zip(PALETTE[low], PALETTE[low + 1], strict=True))
    return "#" + "".join(f"{round(channel):02x}" for channel in mixed)
