"""`pipejax picture`: draws one record of the output of `pipejax decode`, or the curves of runs.

pipejax picture RECORDS.jsonl --id ID --output PICTURE.html
pipejax picture RUN [RUN ...] --output CURVES.html
"""

from collections.abc import Sequence
from pathlib import Path

from pipejax.apps.markup import count
from pipejax.apps.picture import curves, record_picture
from pipejax.system.cli import note
from pipejax.system.errors import UserError
from pipejax.system.files import look, writing


def main(argv: Sequence[str]) -> int:
    """Draws one record of the output of `pipejax decode`, or the curves of runs."""
    parser = record_picture.make_parser()
    flags = parser.parse_args(argv)
    are_runs = [look(Path(path), "") == "directory" for path in flags.inputs]
    if not any(are_runs):
        return record_picture.draw(flags)
    if not all(are_runs):
        file = flags.inputs[are_runs.index(False)]
        raise UserError(file, found="a file among run directories", expected="RUN [RUN ...], or a single file")
    output = Path(flags.output)
    if output.suffix != ".html":
        raise UserError("--output", found=f"{flags.output}", expected="a name that ends in .html, for curves")
    of_records = {"--id": flags.id, "--delay": flags.delay, "--sub-max": flags.sub_max, "--input": flags.input}
    of_records["--checkpoint"] = flags.checkpoint
    if given := [flag for flag, value in of_records.items() if value is not None]:
        raise UserError(given[0], found="with a run", expected="with a file of records")
    drawn = curves.page(*flags.inputs)
    with writing(output):
        output.write_text(drawn, encoding="utf-8")
    note(f"{output}: curves of {count(len(flags.inputs), 'run')}")
    return 0
