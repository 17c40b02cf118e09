"""`pipejax picture`: draws one record of what `pipejax decode` wrote.

pipejax picture RECORDS.jsonl --id ID --output PICTURE.html
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipejax.config import GRID
from pipejax.inference.picture import record
from pipejax.inference.picture.grid import svg
from pipejax.inference.picture.page import html
from pipejax.system.cli import Parser, whole
from pipejax.system.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Draws one record of what `pipejax decode` wrote."""
    parser = Parser(prog="pipejax picture", description=main.__doc__)
    parser.add_argument("records", metavar="RECORDS.jsonl", help="what `pipejax decode --output` wrote")
    parser.add_argument("--id", help="of the record to draw; default: the first")
    parser.add_argument("--output", required=True, metavar="FILE", help="a name that ends in .html or .svg")
    parser.add_argument("--delay", type=whole(0, GRID), default=1, help="grid.delay of the decode (default: 1)")
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="that decoded it: shows its tokens, where words are made of several"
    )
    parser.add_argument("--input", metavar="FILE.jsonl", help="the decoded file, to show the source (html)")
    flags = parser.parse_args(argv)
    output = Path(flags.output)
    if output.suffix not in (".html", ".svg"):
        raise UserError(f"--output: found {flags.output}; expected a name that ends in .html or .svg")
    place, found = record.find(flags.records, flags.id)
    if flags.checkpoint:
        from pipejax.data.tokenizer import Tokenizer  # takes a second

        found = record.with_pieces(found, Tokenizer.load(Path(flags.checkpoint) / "tokenizer").piece, place)
    rows, texts = record.tokens(found, place)
    steps = record.steps(found, rows, flags.delay, place)
    calls = record.calls(found, flags.delay, place)
    drawing: dict[str, Any] = {
        "delay": flags.delay,
        "truncated": found.get("truncated"),
        "steps": steps,
        # A record does not say it, but a trace does.
        "empty_row": calls is None or any(one.written and one.row == len(rows) for call in calls for one in call),
    }
    if output.suffix == ".svg":
        drawn = svg(rows, **drawing)
    else:
        name = str(found.get("id", place))
        source = (record.find(flags.input, name)[1] if flags.input else found).get("source")
        drawn = html(
            rows,
            **drawing,
            calls=calls,
            texts=texts,
            source=source if isinstance(source, str) else "",
            title=f"Record {name}",
        )
    try:
        output.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror})") from error
    return 0
