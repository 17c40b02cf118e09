"""The flags of `pipejax picture`, and the picture of a record."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipejax import config, methods
from pipejax.apps.picture import record
from pipejax.apps.picture.grid_svg import fill, svg
from pipejax.apps.picture.picture_page import html
from pipejax.apps.picture.trace_svg import RowCall
from pipejax.config import GRID, Config, GridConfig
from pipejax.data.lines import Object
from pipejax.inference.sources import of_record
from pipejax.system.cli import Parser, note
from pipejax.system.errors import UserError
from pipejax.system.files import writing


def make_parser() -> Parser:
    """Returns the parser of the command."""
    what = "Draws one record of what `pipejax decode` wrote, or the curves of runs."
    parser = Parser(prog="pipejax picture", description=what)
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="RECORDS.jsonl | RUN",
        help="the output of `pipejax decode`, or one or more run directories",
    )
    parser.add_argument("--id", help="id of the record to draw (default: the first record)")
    parser.add_argument("--output", required=True, metavar="FILE", help="a name that ends in .html or .svg")
    parser.add_number(
        "--delay",
        "grid.delay of the decode (default: the checkpoint's; without a checkpoint the smallest "
        "one that fits the record's steps)",
        least=0,
        most=GRID,
    )
    parser.add_number("--sub-max", "grid.sub_max of the decode (default: the checkpoint's)", most=GRID)
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="the checkpoint that decoded the file, for the grid, the source template and the pieces of words",
    )
    parser.add_argument("--input", metavar="FILE", help="the input of the decode, to show the source (html)")
    parser.add_overrides()
    return parser


def main(argv: Sequence[str]) -> int:
    """Draws one record of the output of `pipejax decode`."""
    return draw(make_parser().parse_args(argv))


def draw(flags: argparse.Namespace) -> int:
    """Draws the picture of one record and writes the page."""
    if len(flags.inputs) > 1:
        raise UserError(flags.inputs[1], found="a second file", expected="one file of records, or directories of runs")
    config.backbone(flags.overrides)
    output = Path(flags.output)
    if output.suffix not in (".html", ".svg"):
        raise UserError("--output", found=f"{flags.output}", expected="a name that ends in .html or .svg")
    place, found = record.find_record(flags.inputs[0], flags.id)
    settings, can_draw = None, [*methods.methods_with(Config(), "draw")]
    if flags.checkpoint:
        from pipejax.data.tokenizer import Tokenizer  # the import takes a second

        settings = config.load(Path(flags.checkpoint) / "config.json", imports=False)
        if settings.method is not None:
            methods.trained(settings).require("draw", place, f"a record of {flags.checkpoint}")
            can_draw = [*methods.methods_with(Config(method=settings.method), "draw")]
        if (Path(flags.checkpoint) / "tokenizer").is_dir():
            found = record.with_pieces(found, Tokenizer.load(Path(flags.checkpoint) / "tokenizer").piece, place)
    # Records of older releases do not contain the method.
    if (name := found.get("method")) is not None and name not in can_draw:
        raise UserError(
            f"{place}: method", found=f"{name!r}", expected=f"{' or '.join(can_draw)}, whose rows can be drawn"
        )
    known = settings.grid if settings is not None else None
    rows, texts = record.tokens(found, place)
    delay, said = _delay(found, rows, place, given=flags.delay, grid=known)
    steps = record.steps(found, rows, delay, place)
    trace = record.trace_of(found, delay, place)
    sub_max = flags.sub_max or (known.sub_max if known is not None else None)
    empty_row, doubt = _empty_row(found, rows, trace, is_due=len(rows) * delay < steps, sub_max=sub_max)
    if known is not None and known.stop == "literal":
        doubt.append("after a row without a token, which grid.stop = literal lets pass, rows are drawn too early")
    truncated = record.end_of(found, place)[1]
    names = record.names(found, texts, settings)
    grid = fill(rows, delay=delay, truncated=truncated, steps=steps, empty_row=empty_row, names=names)
    name = str(found.get("id", place))
    if output.suffix == ".svg":
        drawn = svg(grid)
    else:
        source, unknown = _source(flags.input, name, settings) if flags.input else (found.get("source"), [])
        doubt += unknown
        source = source if isinstance(source, str) else ""
        drawn = html(grid, trace=trace, texts=texts, source=source, title=f"Record {name}")
    with writing(output):
        output.write_text(drawn, encoding="utf-8")
    note("; ".join([f"{output}: record {name}, drawn at Δt = {delay}", *said, *doubt]))
    return 0


def _delay(
    found: Object, rows: list[list[str]], place: str, *, given: int | None, grid: GridConfig | None
) -> tuple[int, list[str]]:
    """Returns the time-steps between the starts of two rows, and remarks on how they were determined."""
    if given is not None:
        return given, []
    fit = record.delays(found, rows, place)
    if grid is not None and (grid.delay in fit or grid.stop == "literal"):
        return grid.delay, []
    likely = [delay for delay in fit if delay] or fit  # with delay 0 rows have names, which is rare
    said = [f"its steps do not fit the checkpoint's {grid.delay}"] if grid is not None and fit else []
    if len(fit) > 1 and rows:
        others = [str(delay) for delay in fit if delay != likely[0]]
        shown = ", ".join(others[:3]) + (", ..." if others[3:] else "")
        said.append(f"its steps also fit {shown}; --delay or --checkpoint decides")
    return (likely or [grid.delay if grid else 1])[0], said


def _source(path: str, name: str, settings: Config | None) -> tuple[object, list[str]]:
    place, given = record.find_record(path, name)
    if settings is not None:
        return of_record(given, place, name, settings).content, []
    known = "source" in given or "source_ids" in given
    return given.get("source"), [] if known else [f"{place} has no source: --checkpoint fills in its template"]


def _empty_row(
    found: Object, rows: list[list[str]], trace: list[list[RowCall]] | None, *, is_due: bool, sub_max: int | None
) -> tuple[bool, list[str]]:
    """Returns whether an empty row began, provided that there was time for one, and remarks if that is unknown."""
    if trace is not None:  # a trace shows it, the record itself does not
        return any(one.written and one.row == len(rows) for call in trace for one in call), []
    if found.get("truncated") != "time_max" or not is_due:
        return True, []
    if sub_max is None or sub_max < len(rows):
        return True, ["pass --sub-max or --checkpoint to decide whether the empty row was there"]
    return len(rows) < sub_max, []
