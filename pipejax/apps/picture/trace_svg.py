"""The grid of one example, call by call of the decoder: the drafts, and whether they were accepted.

A row of the picture has two lines: the written tokens, and below them the rejected drafts.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from pipejax.apps.markup import count, escape
from pipejax.apps.picture.grid_svg import LEFT, RIGHT, Grid, column_of, open_svg, time_axis, top_of
from pipejax.apps.picture.picture_text import INK, QUIET, dotted, label, shorten

BOX, DRAFT, GAP = 24, 17, 8  # pixels: height of a written token, height of a rejected draft, and the gap between rows
MOST = 20  # columns that fit the page; with more, the page gets wider, so that texts stay readable
FILL = {"own": "#9dc5eb", "accepted": "#cfe39a"}
# Signs in addition to the colours, for readers who cannot tell the colours apart.
MARKS = {"own": "", "accepted": "✓ ", "rejected": "✗ "}
SAID = {"own": "written without a draft", "accepted": "accepted draft", "rejected": "rejected draft"}


class RowCall(NamedTuple):
    """One row in a call, from the trace of a record; drafts are texts."""

    row: int
    written: int
    accepted: int
    drafted: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Mark:
    """A token at a position of the grid: written in a call, or drafted and rejected."""

    row: int
    time: int
    call: int  # number of the call, from 1
    kind: str  # "own", "accepted" or "rejected"
    text: str
    is_written: bool  # whether the finished row has this token at this position
    until: int | None = None  # the call whose rejected draft replaces this one at its position


def marks(grid: Grid, trace: Sequence[Sequence[RowCall]]) -> list[Mark]:
    """Returns the tokens that the calls wrote and the drafts that they rejected, in the order of the calls."""
    texts = {(cell.row, cell.time): cell.text for cell in grid.cells if cell.kind != "bos"}
    found: list[Mark] = []
    next_of: dict[tuple[int, int], int] = {}  # the index of the rejected draft shown last at each position
    fronts: dict[int, int] = {}  # the time of the newest token of each row
    for number, call in enumerate(trace, start=1):
        for row, written, accepted, drafted in call:
            front = fronts.get(row, row * grid.delay)
            for j in range(written):
                place = row, front + 1 + j
                kind = "accepted" if j < accepted else "own"
                found.append(Mark(*place, number, kind, texts[place], True))
            for j, text in enumerate(drafted[accepted:], start=accepted):
                place = row, front + 1 + j
                if place in next_of:
                    found[next_of[place]] = dataclasses.replace(found[next_of[place]], until=number)
                next_of[place] = len(found)
                found.append(Mark(*place, number, "rejected", text, texts.get(place) == text))
            fronts[row] = front + written
    return found


def facts_of_calls(grid: Grid, trace: Sequence[Sequence[RowCall]]) -> str:
    """Describes the numbers of calls, steps and accepted drafts in a sentence."""
    drafted = sum(len(one.drafted) for call in trace for one in call)
    accepted = sum(one.accepted for call in trace for one in call)
    share = f" ({100 * accepted / drafted:.0f} %)" if drafted else ""
    return (
        f"{count(len(trace), 'decoder call')} for {count(grid.steps, 'time-step')}; "
        f"{accepted} of {count(drafted, 'drafted token')} accepted{share}"
    )


def draw(grid: Grid, trace: Sequence[Sequence[RowCall]]) -> str:
    """Returns all calls as one SVG. The page shows one call at a time; without the page, the last call is visible."""
    found, last = marks(grid, trace), len(trace)
    # The first call that covers a row.
    first = {one.row: last - n for n, call in enumerate(reversed(trace)) for one in call}
    height_in_rows = max(first.keys() | {cell.row for cell in grid.cells}, default=-1) + 1
    columns = max([grid.steps, *(mark.time for mark in found)]) + 1
    column, size = column_of((MARKS[mark.kind] + mark.text for mark in found), min(columns, MOST))
    pitch, top = BOX + DRAFT + GAP, top_of(page=True)
    width, height = LEFT + max(columns * column, 240) + RIGHT, top + height_in_rows * pitch + 6
    said = facts_of_calls(grid, trace)
    parts = [
        open_svg(width, height, "calls-title"),
        f'<title id="calls-title">{escape(said)}; the table below says the same in words</title>',
        *time_axis(columns - 1, column, top),
    ]
    for i in range(height_in_rows):
        middle, start = top + i * pitch + GAP / 2 + BOX / 2, LEFT + i * grid.delay * column
        drafted = sum(len(one.drafted) for call in trace for one in call if one.row == i)
        accepted = sum(one.accepted for call in trace for one in call if one.row == i)
        parts.append(label(LEFT - 12, middle + 4, grid.label_of(i), anchor="end"))
        if drafted:
            sums = label(LEFT - 12, middle + BOX / 2 + 12, f"{accepted} of {drafted}", size=10, anchor="end")
            parts.append(sums.replace("<text ", f'<text data-sum="{i}" ', 1))
        if i * grid.delay > 0:
            parts.append(dotted(LEFT + 2, middle, start - 4))
        box = _box(start, top + i * pitch + GAP / 2, column, BOX)
        outline = f'fill="none" stroke="{QUIET}" stroke-opacity=".7" stroke-dasharray="3 3"'
        words = label(start + column / 2, middle + 3.5, "bos", size=10)
        if i in first:
            parts.append(f'<g data-call="{first[i]}"><rect {box} {outline}/>{words}</g>')
    for mark in found:
        y = top + mark.row * pitch + GAP / 2 + (BOX + 1 if mark.kind == "rejected" else 0)
        parts.append(_drawn(mark, grid, last, y=y, column=column, size=size))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(mark: Mark, grid: Grid, last: int, *, y: float, column: int, size: float) -> str:
    """Returns the box of a token as SVG."""
    left, tall = LEFT + mark.time * column, BOX
    early = ", right, but a row above was not so far" if mark.kind == "rejected" and mark.is_written else ""
    tip = f"call {mark.call}, {grid.name_of(mark.row)}, time-step {mark.time}: {mark.text} ({SAID[mark.kind]}{early})"
    classes, extra = [mark.kind], ""
    if mark.kind == "rejected":
        tall, size = DRAFT, 10.0
        extra = f' data-until="{mark.until}"' if mark.until else ""
        classes += ["off"] if mark.until else []
        shape = 'rx="4" fill="none" class="out" stroke-dasharray="3 2"'
    else:
        radius, weight = (BOX / 2, 1.6) if mark.kind == "accepted" else (4, 0.8)
        shape = f'rx="{radius:g}" fill="{FILL[mark.kind]}" stroke="{INK}" stroke-width="{weight}"'
    classes += ["past"] if mark.call < last else []
    shown = shorten(MARKS[mark.kind] + mark.text, (column - 10) / size)
    words = label(left + column / 2, y + tall / 2 + size * 0.35, shown, size=size, ink=INK)
    if mark.kind == "rejected":
        words = words.replace(f'fill="{INK}"', 'class="out"')
    return (
        f'<g class="{" ".join(classes)}" data-row="{mark.row}" data-call="{mark.call}"{extra}>'
        f"<title>{escape(tip)}</title><rect {_box(left, y, column, tall)} {shape}/>{words}</g>"
    )


def table_of_calls(grid: Grid, trace: Sequence[Sequence[RowCall]]) -> str:
    """Returns an HTML table of the drafts and tokens of each row in each call."""
    said: dict[tuple[int, int, str], list[str]] = {}
    for mark in marks(grid, trace):
        said.setdefault((mark.call, mark.row, mark.kind), []).append(mark.text)
    lines = []
    for number, call in enumerate(trace, start=1):
        for one in call:
            texts = [" ".join(said.get((number, one.row, kind), [])) for kind in ("accepted", "rejected", "own")]
            if not one.written:
                texts[-1] = "the row could not begin yet"
            cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
            lines.append(f'<tr><td>{number}</td><th scope="row">{escape(grid.name_of(one.row))}</th>{cells}</tr>')
    names = ("call", "row", "accepted drafts", "rejected drafts", "written without a draft")
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _box(left: float, y: float, column: int, height: int) -> str:
    return f'x="{left + 2:g}" y="{y:g}" width="{column - 4}" height="{height}"'
