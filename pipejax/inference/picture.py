"""A picture of one example's grid as it fills: SVG, or a page that plays it. Standard library only.

    pipejax picture RECORDS.jsonl --id ID --output PICTURE.html

Rows and times are those of `pipejax.grid`: the j-th generated token of row i, eos included, stands at time
i * delay + j, where i counts from 0 and j from 1.
"""

import dataclasses
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipejax.config import GRID
from pipejax.data.lines import id_of, read_file
from pipejax.inference.picture_page import PAGE, escape, mark, shorten, text_width
from pipejax.system.cli import Parser, whole
from pipejax.system.errors import UserError

PALETTE = ((157, 197, 235), (190, 184, 238), (240, 190, 168))  # first, middle and last time-step
INK, QUIET = "#1d2733", "#768290"  # on a coloured cell; on the page, which may be white or dark
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
LEFT, RIGHT, TOP = 84, 20, 52  # pixels around the grid
NARROWEST, WIDEST = 46, 104  # columns
ROOM = 1600  # columns get narrower to keep the grid within it
STRIP, STRIP_ROOM = 10, 960  # height of a strip of steps, and its greatest length
TRUNCATIONS = {
    None: "",
    "sub_max": "; truncated: no further row was allowed (sub_max)",
    "time_max": "; truncated at the last time-step (time_max)",
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One place of the grid, filled at its time."""

    row: int
    time: int
    kind: str  # "bos", "token" or "eos"
    text: str


@dataclasses.dataclass(frozen=True)
class Grid:
    """What the decoder did for one example."""

    rows: tuple[tuple[str, ...], ...]  # token texts, without bos and eos
    delay: int
    steps: int
    truncated: str | None
    cells: tuple[Cell, ...]  # with the empty last row, if there was one
    sequential: tuple[int, ...]  # for each sequential step: its token's time here; 0: separator or eos

    @property
    def height(self) -> int:
        """Rows, the empty one included."""
        return max((cell.row for cell in self.cells), default=-1) + 1


def fill(rows: Sequence[Sequence[str]], *, delay: int, truncated: str | None = None, steps: int | None = None) -> Grid:
    """Places tokens, bos, eos and the empty last row on the grid (paper sections 3.2 and 3.3).

    Args:
      rows: token texts of each row, without bos and eos.
      delay: time-steps between the starts of two rows; with 0 there is no empty row.
      truncated: as in a record: None, "sub_max" (no empty row) or "time_max" (a row may lack its eos).
      steps: the time-steps that were run; default: as many as the rows need.

    Raises:
      ValueError: the delay or `truncated` is none of these.
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
        if i == len(rows) and (truncated == "sub_max" or start >= steps or not delay):
            break
        cells.append(Cell(i, start, "bos", "bos"))
        cells += [Cell(i, start + j, "token", text) for j, text in enumerate(row, start=1)]
        if start + len(row) < steps:
            cells.append(Cell(i, start + len(row) + 1, "eos", "eos"))
    sequential: list[int] = []
    for i, row in enumerate(rows):
        sequential += [0] * (i > 0) + [i * delay + j for j in range(1, len(row) + 1)]
    return Grid(tuple(map(tuple, rows)), delay, steps, truncated, tuple(cells), (*sequential, 0))


def svg(
    rows: Sequence[Sequence[str]],
    *,
    delay: int,
    until: int | None = None,
    truncated: str | None = None,
    steps: int | None = None,
) -> str:
    """The grid as a standalone SVG that reads well on white and on dark.

    Time-steps run across, rows down, and a colour is a time-step. Beneath, on one scale: the steps of the
    pipelined decoder, and those that a sequential one takes for the same text.

    Args:
      rows: token texts of each row, without bos and eos.
      delay: time-steps between the starts of two rows.
      until: draw the state after this time-step; default: the last.
      truncated: see `fill`.
      steps: see `fill`.
    """
    grid = fill(rows, delay=delay, truncated=truncated, steps=steps)
    return _draw(grid, until=until, page=False)


def html(
    rows: Sequence[Sequence[str]],
    *,
    delay: int,
    truncated: str | None = None,
    steps: int | None = None,
    source: str = "",
    texts: Sequence[str] | None = None,
    highlight: bool = True,
    title: str = "Pipelined decoding, step by step",
) -> str:
    """One page that loads nothing from elsewhere and fills the grid step by step.

    Args:
      rows: token texts of each row, without bos and eos.
      delay: time-steps between the starts of two rows.
      truncated: see `fill`.
      steps: see `fill`.
      source: the document, shown above the grid.
      texts: the text of each row, shown beside it; default: its tokens with spaces between them.
      highlight: mark the rows that occur in the source.
      title: the page's.
    """
    grid = fill(rows, delay=delay, truncated=truncated, steps=steps)
    texts = [" ".join(row) for row in rows] if texts is None else texts
    ends = {cell.row: cell.time for cell in grid.cells if cell.kind == "eos"}
    finished = [ends.get(i, grid.steps) for i in range(len(rows))]
    items = [
        f'<li data-done="{end}" title="{escape(text)}">{escape(text)}</li>'
        for text, end in zip(texts, finished, strict=True)
    ]
    marked = mark(source, texts if highlight else [], finished)
    return string.Template(PAGE).substitute(
        title=escape(title),
        facts=escape(_facts(grid)),
        font=FONT,
        steps=grid.steps,
        items="".join(items),
        source=f'<section><h2>Source</h2><p class="source">{marked}</p></section>' if source else "",
        drawing=_draw(grid, until=None, page=True),
        pitch=_pitch(grid),
        top=_top(page=True),
    )


def _draw(grid: Grid, *, until: int | None, page: bool) -> str:
    last = grid.steps if until is None else max(min(until, grid.steps), 0)
    columns, pitch, top, caption = grid.steps + 1, _pitch(grid), _top(page=page), _facts(grid)
    size = 10.5 if ROOM / columns < 60 else 12.0  # of a token's text
    longest = max((text_width(cell.text) for cell in grid.cells if cell.kind == "token"), default=0.0)
    column = round(min(max(longest * size + 20, NARROWEST), WIDEST, max(ROOM / columns, NARROWEST)))
    width = LEFT + max(columns * column, 240 if page else round(text_width(caption) * 17)) + RIGHT
    bottom = top + grid.height * pitch
    height = bottom + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="picture-title picture-text" '
        f'font-family="{FONT}">',
        f'<title id="picture-title">{escape(caption)}</title>',
        f'<desc id="picture-text">{escape(_describe(grid))}</desc>',
    ]
    if not page:
        parts.append(_text(LEFT, 20, caption, size=13, anchor="start", weight=600))
    if page or until is not None:  # the current time-step; the page moves it
        parts.append(
            f'<rect class="now" data-left="{LEFT}" data-column="{column}" '
            f'x="{LEFT + last * column}" y="{top - 20}" width="{column}" '
            f'height="{bottom - top + 22}" rx="6" fill="{QUIET}" fill-opacity=".14"/>'
        )
    parts.append(_text(LEFT - 12, top - 6, "time-step", anchor="end"))
    parts += [_text(LEFT + (time + 0.5) * column, top - 6, str(time)) for time in range(1, columns)]
    for i in range(grid.height):
        middle, start = top + (i + 0.5) * pitch, LEFT + i * grid.delay * column
        name = f"row {i + 1}" if i < len(grid.rows) else "empty row"
        parts.append(_text(LEFT - 12, middle + 4, name, anchor="end"))
        if 0 < i * grid.delay <= last:
            parts.append(
                f'<path d="M{LEFT + 2} {middle:g}H{start - 4}" stroke="{QUIET}" stroke-opacity=".4" '
                'stroke-dasharray="1 5" stroke-linecap="round"/>'
            )
    parts += [
        _cell(cell, grid, column=column, pitch=pitch, top=top, size=size) for cell in grid.cells if cell.time <= last
    ]
    parts += _strips(grid, last, top=bottom + 22, room=min(width - LEFT - RIGHT - 60, STRIP_ROOM))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _cell(cell: Cell, grid: Grid, *, column: int, pitch: int, top: int, size: float) -> str:
    x, y, width, height = LEFT + cell.time * column + 2, top + cell.row * pitch + 3, column - 4, pitch - 6
    centre, middle = x + width / 2, y + height / 2
    if cell.kind == "token":
        tip = f"row {cell.row + 1}, time-step {cell.time}: {cell.text}"
        box = f'fill="{_colour(cell.time, grid.steps)}"'
        shown = shorten(cell.text, (width - 6) / size)
        label = _text(centre, middle + size * 0.35, shown, size=size, ink=INK)
    else:
        tip = f"row {cell.row + 1}, time-step {cell.time}: {cell.kind}"
        line = (
            f'stroke="{QUIET}" stroke-opacity=".7" stroke-dasharray="3 3"'
            if cell.kind == "bos"
            else f'stroke="{_colour(cell.time, grid.steps)}" stroke-width="1.5"'
        )
        box = f'fill="none" {line}'
        label = _text(centre, middle + 3.5, cell.text, size=10)
    return (
        f'<g data-time="{cell.time}"><title>{escape(tip)}</title><rect x="{x}" y="{y}" width="{width}" '
        f'height="{height}" rx="5" {box}/>{label}</g>'
    )


def _strips(grid: Grid, last: int, *, top: int, room: float) -> Iterator[str]:
    """Two strips of steps on one scale: the pipelined decoder's, and a sequential one's for the same text."""
    unit = min(room / max(len(grid.sequential), grid.steps), 24.0)
    gap = 1.5 if unit > 6 else 0.5 if unit > 2.5 else 0.0
    for name, times in (("pipelined", range(1, grid.steps + 1)), ("sequential", grid.sequential)):
        yield _text(LEFT - 12, top + STRIP - 1, name, anchor="end")
        for step, time in enumerate(times, start=1):
            colour = f'fill="{_colour(time, grid.steps)}"' if time else f'fill="{QUIET}" fill-opacity=".45"'
            faint = ' opacity=".2"' if last < grid.steps and step > last else ""
            yield (
                f'<rect class="step" data-time="{step}" x="{LEFT + (step - 1) * unit:.2f}" y="{top}" '
                f'width="{unit - gap:.2f}" height="{STRIP}" rx="{min(2, unit / 4):.1f}" {colour}{faint}/>'
            )
        yield _text(LEFT + len(times) * unit + 8, top + STRIP - 1, _count(len(times), "step"), anchor="start")
        top += STRIP + 10


def _facts(grid: Grid) -> str:
    ratio = f" ({len(grid.sequential) / grid.steps:.1f}×)" if grid.steps else ""
    return (
        f"{_count(grid.steps, 'time-step')} instead of {len(grid.sequential)}{ratio}, "
        f"Δt = {grid.delay}{TRUNCATIONS[grid.truncated]}"
    )


def _describe(grid: Grid) -> str:
    rows = [f"Row {i + 1} starts at time {i * grid.delay}: {' '.join(row)}." for i, row in enumerate(grid.rows)]
    end = "An empty row ends it." if grid.height > len(grid.rows) else "No empty row ends it."
    other = (
        f"A sequential decoder takes {_count(len(grid.sequential), 'step')} for the same text, "
        "one token a step; grey steps are separators and the eos."
    )
    return " ".join([*rows, end, other])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _pitch(grid: Grid) -> int:
    """Pixels from row to row."""
    return 32 if grid.height <= 12 else 27


def _top(*, page: bool) -> int:
    """Pixels above the first row; the page has the caption in its head."""
    return TOP - 22 if page else TOP


def _colour(time: int, steps: int) -> str:
    place = (time - 1) / max(steps - 1, 1) * (len(PALETTE) - 1)
    low = min(int(place), len(PALETTE) - 2)
    mixed = (a + (b - a) * (place - low) for a, b in zip(PALETTE[low], PALETTE[low + 1], strict=True))
    return "#" + "".join(f"{round(channel):02x}" for channel in mixed)


def _text(
    x: float, y: float, text: str, *, size: float = 11, ink: str = QUIET, anchor: str = "middle", weight: int = 400
) -> str:
    extra = (f' font-weight="{weight}"' if weight != 400 else "") + (' class="quiet"' if ink == QUIET else "")
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{ink}"{extra}>'
        f"{escape(text)}</text>"
    )


def main(argv: Sequence[str]) -> int:
    """Draws one record of what `pipejax decode` wrote."""
    parser = Parser(prog="pipejax picture", description=main.__doc__)
    parser.add_argument("records", metavar="RECORDS.jsonl", help="what `pipejax decode --output` wrote")
    parser.add_argument("--id", help="of the record to draw; default: the first")
    parser.add_argument("--output", required=True, metavar="FILE", help="a name that ends in .html or .svg")
    parser.add_argument("--delay", type=whole(0, GRID), default=1, help="grid.delay of the decode (default: 1)")
    parser.add_argument("--input", metavar="FILE.jsonl", help="the decoded file, to show the source (html)")
    flags = parser.parse_args(argv)
    output = Path(flags.output)
    if output.suffix not in (".html", ".svg"):
        raise UserError(f"--output: found {flags.output}; expected a name that ends in .html or .svg")
    place, record = _find(flags.records, flags.id)
    rows, texts = _tokens(record, place)
    drawing = {
        "delay": flags.delay,
        "truncated": record.get("truncated"),
        "steps": _steps(record, rows, flags.delay, place),
    }
    if output.suffix == ".svg":
        drawn = svg(rows, **drawing)
    else:
        name = str(record.get("id", place))
        source = (_find(flags.input, name)[1] if flags.input else record).get("source")
        drawn = html(
            rows, **drawing, texts=texts, source=source if isinstance(source, str) else "", title=f"Record {name}"
        )
    try:
        output.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror})") from error
    return 0


def _find(path: str, name: str | None) -> tuple[str, dict[str, Any]]:
    """The record with that id (the line number where it has none), or the first, and where it stands."""
    for place, record in read_file(path):
        if name is None or str(id_of(record, place)) == name:
            return place, record
    raise UserError(f"{path}: found no record{'' if name is None else f' with the id {name}'}; expected one")


def _tokens(record: dict[str, Any], place: str) -> tuple[list[list[str]], list[str]]:
    """Token texts and whole text of each row: from `row_tokens`, or the row's words, or numbered pieces."""
    ids: Any = record.get("row_ids")
    texts: Any = record.get("rows")
    tokens: Any = record.get("row_tokens")
    if not _is_table(ids):
        raise UserError(f"{place}: row_ids: found no list of lists; expected a record of pipejax decode")
    if texts is None:  # decoded without a tokenizer
        tokens = ids if tokens is None else tokens
        texts = [" ".join(map(str, row)) for row in ids]
    if not isinstance(texts, list) or len(texts) != len(ids):
        raise UserError(
            f"{place}: rows: found no text for each of the {len(ids)} rows of row_ids; "
            "expected a record of the pipelined strategy"
        )
    texts = [str(text) for text in texts]
    if tokens is None:
        words = [text.split() for text in texts]
        tokens = [
            row if len(row) == len(numbers) else [f"piece {j + 1}" for j in range(len(numbers))]
            for row, numbers in zip(words, ids, strict=True)
        ]
    elif not _is_table(tokens) or list(map(len, tokens)) != list(map(len, ids)):
        raise UserError(f"{place}: row_tokens: found another shape than row_ids; expected a token an id")
    return [[str(token) for token in row] for row in tokens], texts


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, list) for row in value)


def _steps(record: dict[str, Any], rows: list[list[str]], delay: int, place: str) -> int:
    """The record's steps, once they agree with its rows: with another delay the picture would be wrong."""
    steps, truncated = record.get("steps"), record.get("truncated")
    if not (truncated is None or truncated in ("sub_max", "time_max")):
        raise UserError(
            f"{place}: truncated: found {truncated!r}; expected null, sub_max or time_max, "
            "as in a record of the pipelined strategy"
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise UserError(f"{place}: steps: found {steps!r}; expected a whole number")
    ends = max((i * delay + len(row) + 1 for i, row in enumerate(rows)), default=1)
    needed = fill(rows, delay=delay, truncated=truncated).steps
    # A decode that ran out of time may have gone on with no row open; the literal stop may need no empty row.
    if not (steps >= ends - 1 if truncated == "time_max" else steps in (needed, ends)):
        raise UserError(f"{place}: steps: found {steps}; expected {needed} for these rows at --delay {delay}")
    return steps
