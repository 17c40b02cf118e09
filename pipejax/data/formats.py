"""Reads records from JSON lines, CSV, Parquet and Hugging Face datasets; the path determines the format."""

import contextlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.data.lines import Placed, Refusal, read_file, refuse_line
from pipejax.data.storage import inner_name, is_remote, open_file, open_remote, unpacked
from pipejax.data.tables import FOUND, Dialect, TextTable, is_table, lines_of
from pipejax.system.errors import UserError, first_line
from pipejax.system.extras import module
from pipejax.system.fields import shown_value

PARQUET = (".parquet", ".pq")
BATCH = 1024  # rows of Parquet that are held as Python objects at a time
EXPECTED = "JSON lines, CSV, Parquet, or a directory that the library datasets has saved"


def read_records(
    path: str | Path, *, table: bool = False, dialect: Dialect = FOUND, bad: Refusal = refuse_line
) -> Iterator[Placed]:
    """Yields ("PATH:NUMBER", record) for a file, or for a directory written by `datasets.Dataset.save_to_disk`."""
    if not is_remote(path) and Path(path).is_dir():
        yield from _read_dataset(Path(path))
    elif is_parquet(path):
        yield from read_parquet(path)
    elif table or is_table(path):
        with open_file(path, "a CSV file") as file, unpacked(file, str(path)) as content:
            yield from TextTable(lines_of(content, str(path)), str(path), dialect).records(bad=bad)
    else:
        yield from read_file(path, bad)


def is_parquet(path: str | Path) -> bool:
    """Returns whether a path has the name of a Parquet file."""
    return Path(inner_name(path)).suffix.lower() in PARQUET


def is_dataset(path: Path) -> bool:
    """Returns whether a directory was written by `save_to_disk` of Hugging Face datasets."""
    return path.is_dir() and ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file())


def read_parquet(path: str | Path, first: int = 1, count: int | None = None) -> Iterator[Placed]:
    """Yields ("FILE:NUMBER", object) for `count` rows from `first` on (None: all).

    Row groups without any of these rows are not read.
    """
    with _parquet(path) as file:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        ends = list(itertools.accumulate(sizes))
        last = file.metadata.num_rows if count is None else first + count - 1
        groups = [i for i, end in enumerate(ends) if end >= first and end - sizes[i] < last]
        before = ends[groups[0]] - sizes[groups[0]] if groups else 0  # rows before the current batch
        for batch in file.iter_batches(batch_size=BATCH, row_groups=groups):
            skipped, stop = max(first - 1 - before, 0), min(last - before, len(batch))
            if skipped < stop:
                part = batch.slice(skipped, stop - skipped)
                for number, value in enumerate(_rows_of(part), before + skipped + 1):
                    yield f"{path}:{number}", value
            before += len(batch)


@contextlib.contextmanager
def _parquet(path: str | Path) -> Iterator[Any]:
    """Returns a context manager that yields an opened Parquet file, local or remote.

    Raises:
      UserError: the file does not exist, is not Parquet, or has two columns with the same name.
    """
    if not (remote := is_remote(path)) and not Path(path).exists():
        raise UserError(path, "no such file", expected=EXPECTED)
    library, arrow = module("pyarrow.parquet", "parquet", path), module("pyarrow", "parquet", path)
    try:
        with library.ParquetFile(open_remote(str(path), EXPECTED) if remote else path) as file:
            _check_columns(file.schema_arrow.names, str(path))
            yield file
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise UserError(path, f"not Parquet, or damaged ({first_line(error)})") from error


def _check_columns(names: Sequence[object], where: str) -> None:
    """Raises a UserError if two columns have the same name, because a record would keep only the last of them."""
    if twice := [str(name) for i, name in enumerate(names) if name in names[:i]]:
        raise UserError(where, found=f'the column "{twice[0]}" twice', expected="each name once")


def _read_dataset(path: Path) -> Iterator[Placed]:
    """Yields ("PATH:NUMBER", record) for each row of a saved Hugging Face dataset."""
    if not is_dataset(path):
        raise UserError(path, found="a directory", expected=EXPECTED)
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(found.name for found in path.iterdir() if is_dataset(found)))
        raise UserError(path, found=f"the splits {splits or 'none'}", expected=f"one of them, such as {path}/train")
    library, arrow = module("datasets", "datasets", path), module("pyarrow", "datasets", path)
    try:
        for number, value in enumerate(rows_in(library.load_from_disk(str(path)), str(path)), start=1):
            yield f"{path}:{number}", value
    except (OSError, ValueError, KeyError, arrow.ArrowException) as error:
        raise UserError(path, f"not a data set, or damaged ({first_line(error)})") from error


def rows_in(given: Any, name: str) -> Iterator[Any]:
    """Yields the rows of a table in memory as objects; the items of any other iterable are yielded unchanged."""
    rows: Iterable[Any]
    kinds: Iterable[tuple[Any, Any]] = ()  # columns and their types, where float32 numbers are read as Python's floats
    if hasattr(given, "to_pylist"):  # Arrow
        _check_columns(getattr(given, "column_names", []), name)
        rows = _rows_of(given)
    elif hasattr(given, "iter_rows"):  # Polars
        kinds = zip(given.columns, getattr(given, "dtypes", ()), strict=False)
        rows = given.iter_rows(named=True)
    elif hasattr(given, "columns") and hasattr(given, "to_dict"):  # pandas
        _check_columns(list(given.columns), name)
        kinds = list(getattr(given, "dtypes", {}).items())
        half = [column for column, dtype in kinds if str(dtype) == "float16"]
        if half:  # pandas writes their shortest decimal texts
            given = given.astype(dict.fromkeys(half, "str")).astype(dict.fromkeys(half, "float64"))
        rows = given.to_dict("records")
    elif hasattr(given, "columns") or not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise UserError(name, found=shown_value(given), expected="a list, a data frame or another table of records")
    elif hasattr(given, "with_format"):  # datasets
        kinds = (getattr(given, "features", None) or {}).items()
        rows = given.with_format(None)  # another format would return arrays instead of lists
    else:
        rows = given
    narrow = {column for column, kind in kinds if _FLOAT32.search(str(kind))}
    return (
        {str(key): _shortest(_plain_cell(x)) if key in narrow else _plain_cell(x) for key, x in row.items()}
        if isinstance(row, Mapping)
        else row
        for row in rows
    )


def _rows_of(table: Any) -> list[Any]:
    """Returns the rows of an Arrow table, batch or array of structs as objects; float32 numbers become `_shortest`."""
    rows: list[Any] = table.to_pylist()
    fields = table.schema if hasattr(table, "schema") else table.type  # the type of structs has fields, as a schema has
    for column in (x.name for x in (fields if isinstance(fields, Iterable) else ()) if _FLOAT32.search(str(x.type))):
        for row in rows:
            if isinstance(row, dict):
                row[column] = _shortest(row[column])
    return rows


# In the names of types: "large_list<item: float>" of Arrow, "List(Float32)" of Polars, "Value('float32')" of datasets.
_FLOAT32 = re.compile(r"\bfloat(32)?\b", re.IGNORECASE)


def _shortest(value: object) -> object:
    """Converts the float32 numbers of a cell, which may be in lists and objects.

    Each becomes the number with its shortest decimal text: 19.99, and not 19.989999771118164.
    """
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            narrow = np.float32(value)
        return float(str(narrow)) if narrow == value else value  # a float64 number of the same cell is unchanged
    if isinstance(value, Mapping):
        return {key: _shortest(x) for key, x in value.items()}
    return [_shortest(x) for x in value] if isinstance(value, list) else value


_FINE = re.compile(r"(datetime64|timedelta64)\[\d*(?:ns|ps|fs|as)\]")  # the name of a dtype of NumPy


def _plain_cell(value: object) -> object:
    """Converts a cell to its JSON form: None for a missing value, which pandas stores as NaN, and lists for arrays.

    NumPy's float16 and float32 become the numbers with their shortest decimal text, as by `_shortest`. NumPy's dates
    and spans of time with a finer unit than microseconds, which `tolist` would return as integers, become dates and
    spans of Python.
    """
    kind = str(getattr(value, "dtype", ""))
    if fine := _FINE.fullmatch(kind):
        value = value.astype(f"{fine[1]}[us]")  # type: ignore[attr-defined]
    if kind in ("float16", "float32"):
        value = [*value] if getattr(value, "shape", ()) else float(str(value))  # type: ignore[misc]
    value = value.tolist() if hasattr(value, "tolist") else value
    if type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and math.isnan(value)):
        return None
    return [_plain_cell(x) for x in value] if isinstance(value, list | tuple) else value
