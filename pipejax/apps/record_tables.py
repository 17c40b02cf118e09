"""Records as a table: CSV, TSV or Parquet, made in the end of the lines of JSON that were decoded."""

import csv
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pipejax.data.formats import is_parquet
from pipejax.data.lines import Object, read_file
from pipejax.system.errors import UserError
from pipejax.system.extras import module
from pipejax.system.files import look, new_file

DELIMITERS = {".csv": ",", ".tsv": "\t"}
GROUP = 1000  # rows of a group in Parquet
# The type of a column in Parquet, and how many lists are around it; others hold JSON.
_TYPES = {
    "text": ("string", 0),
    "rows": ("string", 1),
    "row_ids": ("int32", 2),
    "repeated": ("int64", 1),
    "steps": ("int64", 0),
    "calls": ("int64", 0),
    "truncated": ("string", 0),
    "method": ("string", 0),
    "sample": ("int64", 0),
    "log_prob": ("float64", 0),
    "log_probs": ("float64", 2),
}


def lines_for(target: str) -> str:
    """The file for the lines of which the table `target` is made; `target` itself if its name is no table's."""
    made = is_parquet(target) or Path(target).suffix.lower() in DELIMITERS
    return f"{os.path.realpath(target)}.records" if made else target


def check_table(target: str, *, resume: bool) -> None:
    if (lines := lines_for(target)) == target:
        return
    if (found := look(target)) and not Path(target).is_file():
        raise UserError(f"--output {target}: found no regular {found}; expected one, or none, for a table")
    if resume and found and not look(lines):
        raise UserError(f"--resume: {target}: is complete; expected {lines}, from a decode that was interrupted")
    if is_parquet(target):
        module("pyarrow", "parquet", f"--output {target}")


def write_table(lines: Path, target: str) -> None:
    """Makes the table of the records in `lines`, as a whole or not at all, and removes these; fields are columns."""
    try:
        with new_file(Path(os.path.realpath(target))) as partial:
            (_write_parquet if is_parquet(target) else _write_text)(lines, partial, target)
    except OSError as error:
        raise UserError(
            f"--output {target}: cannot be written ({error.strerror or error}); {lines} has the records, and --resume "
            "makes the table of them"
        ) from error
    lines.unlink()


def _records(lines: Path) -> Iterator[Object]:
    return (record for _, record in read_file(lines))


def _write_text(lines: Path, partial: Path, target: str) -> None:
    with partial.open("w", encoding="utf-8", newline="") as file:
        delimiter = DELIMITERS[Path(target).suffix.lower()]
        rows = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        # Older Pythons quote a carriage return only where lines end with one.
        quoted = csv.writer(file, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
        for number, record in enumerate(_records(lines)):
            if number == 0:
                rows.writerow(record)
            cells = [_json(value) if isinstance(value, list | dict) else value for value in record.values()]
            (quoted if any("\r" in x for x in cells if isinstance(x, str)) else rows).writerow(cells)


def _write_parquet(lines: Path, partial: Path, target: str) -> None:
    arrow, parquet = (module(name, "parquet", f"--output {target}") for name in ("pyarrow", "pyarrow.parquet"))
    whole = all(isinstance(record["id"], int) and abs(record["id"]) < 2**63 for record in _records(lines))
    fields = []
    for name in next(_records(lines), {}):
        kind, depth = ("int64" if whole else "string", 0) if name == "id" else _TYPES.get(name, ("string", 0))
        type_ = getattr(arrow, kind)()
        for _ in range(depth):
            type_ = arrow.list_(type_)
        fields.append(arrow.field(name, type_))

    def cell(name: str, value: object) -> object:
        if name == "id":
            return value if whole else str(value)
        return value if name in _TYPES else _json(value)

    records = _records(lines)
    with parquet.ParquetWriter(partial, arrow.schema(fields)) as writer:
        while group := [{name: cell(name, x) for name, x in r.items()} for r in islice(records, GROUP)]:
            writer.write_table(arrow.Table.from_pylist(group, schema=writer.schema))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
