"""Reads records from files of JSON lines (gzip too), Parquet files, and directories of Hugging Face datasets."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipejax.data.lines import Placed, read_file
from pipejax.system.errors import UserError, first_line
from pipejax.system.extras import extra

PARQUET = (".parquet", ".pq")
EXPECTED = "JSON lines, Parquet, or a directory that the library datasets has saved"


def read_records(path: str | Path) -> Iterator[Placed]:
    """Yields ("PATH:NUMBER", record) for a file, or for a directory that `datasets.Dataset.save_to_disk` wrote.

    Raises:
      UserError: the path holds neither, is damaged, or the library that reads it is not installed.
    """
    path = Path(path)
    if path.is_dir():
        return _read_dataset(path)
    return _read_parquet(path) if path.suffix.lower() in PARQUET else read_file(path)


def is_dataset(path: Path) -> bool:
    """Whether the path is a directory that the library datasets wrote: of one data set, or of its splits."""
    return path.is_dir() and ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file())


def _read_parquet(path: Path) -> Iterator[Placed]:
    """Yields ("FILE:NUMBER", row as an object) for each row of a Parquet file."""
    if not path.exists():
        raise UserError(f"{path}: no such file; expected {EXPECTED}")
    library, arrow = _library("pyarrow.parquet", "parquet", path), _library("pyarrow", "parquet", path)
    number = 0
    try:
        for batch in library.ParquetFile(path).iter_batches():
            for value in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", value
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise UserError(f"{path}: not Parquet, or damaged ({first_line(error)})") from error


def _read_dataset(path: Path) -> Iterator[Placed]:
    """Yields ("DIR:NUMBER", row as an object) for each row of a saved data set."""
    if not is_dataset(path):
        raise UserError(f"{path}: found a directory; expected {EXPECTED}")
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(found.name for found in path.iterdir() if is_dataset(found)))
        raise UserError(f"{path}: found the splits {splits or 'none'}; expected one of them, such as {path}/train")
    library, arrow = _library("datasets", "datasets", path), _library("pyarrow", "datasets", path)
    try:
        rows = library.load_from_disk(str(path)).with_format(None)  # a saved format would give arrays instead of lists
        for number, value in enumerate(rows, start=1):
            yield f"{path}:{number}", value
    except (OSError, ValueError, KeyError, arrow.ArrowException) as error:
        raise UserError(f"{path}: not a data set, or damaged ({first_line(error)})") from error


def _library(module: str, extra_name: str, path: Path) -> Any:
    """Imports a module of an extra; raises a UserError, which begins with `path`, if it is not installed."""
    with extra(extra_name, path):
        return importlib.import_module(module)
