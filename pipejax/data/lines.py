"""Reads and checks records of JSON lines, JSON arrays and CSV; every error names the file and the line."""

import contextlib
import csv
import functools
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from pipejax.system.errors import UserError
from pipejax.system.files import look

Line = TypeVar("Line", str, bytes)
Placed = tuple[str, dict[str, Any]]  # ("FILE:LINE", record)
LONGEST = 2**28  # characters of a line; without a bound a small archive could unpack to a line that fills memory


def decode_lines(lines: Iterable[bytes], where: str, first: int = 1) -> Iterator[tuple[str, str]]:
    """Yields ("FILE:LINE", text) for each line, the first being line `first`; a BOM and CRLF are dropped.

    Raises:
      UserError: a line is not UTF-8 or longer than LONGEST.
    """
    for number, line in enumerate(bounded(lines, where), start=first):
        place = f"{where}:{number}"
        try:
            yield place, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{place}: found byte {line[error.start]:#04x} at column {error.start + 1}; expected UTF-8"
            ) from error


def read_objects(lines: Iterable[bytes], where: str, first: int = 1) -> Iterator[Placed]:
    """Yields ("FILE:LINE", object) for each line that is not blank; the first of them is line `first` of its file.

    Raises:
      UserError: a line is not UTF-8, not JSON or not an object.
    """
    for place, line in decode_lines(lines, where, first):
        text = line.strip()
        if not text:
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: not JSON ({error}); expected one object a line") from error
        if not isinstance(value, dict):
            raise UserError(f"{place}: found {kind(value)}; expected an object")
        yield place, value


def read_array(data: bytes, where: str) -> Iterator[Placed]:
    """Yields ("FILE:LINE: record NUMBER", object) for each object of one JSON array.

    The array is the whole file, or a value of one object as in `{..., "data": [...]}`.

    Raises:
      UserError: the data is not UTF-8, not JSON or not such an array.
    """
    text = "\n".join(line for _, line in decode_lines(data.splitlines(), where))
    head = re.match(r'\s*(\{[^\[\]{}]*"\w+"\s*:\s*)?\[\s*', text)
    if head is None:
        raise UserError(f"{where}:1: found no JSON array; expected an array of objects")
    decoder, at, line, number = json.JSONDecoder(), head.end(), 1, 0
    counted = 0
    while text[at : at + 1] != "]":
        number, line, counted = number + 1, line + text.count("\n", counted, at), at
        place = f"{where}:{line}: record {number}"
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: not JSON ({error}); expected an object") from error
        if not isinstance(value, dict):
            raise UserError(f"{place}: found {kind(value)}; expected an object")
        yield place, value
        following = re.compile(r"\s*(,\s*|(?=\]))").match(text, at)
        if following is None:
            raise UserError(f"{place}: found no comma or ] after it; expected the array to go on or to end")
        at = following.end()
    if head[1] is None and (rest := text[at + 1 :].strip()):
        raise UserError(f"{where}: found {rest[:20]!r} after the array; expected nothing")


def read_table(file: BinaryIO, where: str) -> Iterator[Placed]:
    """Yields ("FILE:LINE", {column name: text}) for each row of a CSV file whose first line has the column names.

    LINE is the row's first line: a row may have several.

    Raises:
      UserError: the file is not CSV in UTF-8, column names are absent or repeated, or a row has another length.
    """
    csv.field_size_limit(LONGEST)  # articles are longer than csv's default of 128 KiB
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    try:
        yield from _rows(csv.reader(bounded(text, where), strict=True), where)
    finally:
        text.detach()  # else the wrapper would close the file, which is the caller's


def _rows(reader: Any, where: str) -> Iterator[Placed]:
    """Yields as `read_table`; the first row has the column names."""
    names: list[str] | None = None
    while True:
        place = f"{where}:{reader.line_num + 1}"
        try:
            row = next(reader, None)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{place}: not CSV in UTF-8 ({error})") from error
        if row is None:
            return
        if names is None:
            names = row
            if len(set(names)) < len(names) or not any(names):
                raise UserError(f"{place}: found the column names {', '.join(names)}; expected each once")
        elif len(row) == len(names):
            yield place, dict(zip(names, row, strict=True))
        elif row:  # a blank line is skipped
            raise UserError(f"{place}: found {len(row)} columns; expected {len(names)} ({', '.join(names)})")


def bounded(lines: Iterable[Line], where: str) -> Iterator[Line]:
    """Yields the lines; raises a UserError for one longer than LONGEST, without reading the rest of it."""
    if isinstance(lines, io.IOBase):
        end = "" if isinstance(lines, io.TextIOBase) else b""
        lines = cast(Iterator[Line], iter(functools.partial(lines.readline, LONGEST + 1), end))
    for number, line in enumerate(lines, start=1):
        if len(line) > LONGEST:
            raise UserError(f"{where}:{number}: found a line of more than {LONGEST >> 20} MiB; expected records")
        yield line


def open_file(path: str | Path, expected: str) -> BinaryIO:
    """Opens a file to read bytes; raises a UserError, which says `expected`, if that is impossible."""
    path = Path(path)
    if (found := look(path)) != "file":  # `look` calls pipes files, too
        raise UserError(f"{path}: {'found a directory' if found else 'no such file'}; expected {expected}")
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected {expected}") from error


def read_file(path: str | Path) -> Iterator[Placed]:
    """Yields as `read_objects` the objects of a file, which may be packed with gzip."""
    with open_file(path, "a file of JSON lines") as file, unpacked(file, str(path)) as lines:
        yield from read_objects(lines, str(path))


@contextlib.contextmanager
def unpacked(file: BinaryIO, where: str) -> Iterator[BinaryIO]:
    """Gives the content of an open file, unpacked if its first bytes are those of gzip; the name does not matter.

    Raises:
      UserError: the gzip data is damaged; raised in the block that reads it.
    """
    packed = file.peek(2)[:2] == b"\x1f\x8b" if isinstance(file, io.BufferedReader) else False
    try:
        yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if packed else file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{where}: damaged gzip data ({error}); expected a whole file") from error


def text_of(value: dict[str, Any], key: str, place: str) -> str:
    """The text that an object has under a key; raises a UserError if it is absent, no text or empty."""
    return check_text(value_of(value, key, place), key, place)


def value_of(value: dict[str, Any], key: str, place: str, expected: str = "one") -> Any:
    """The value that an object has under a key; raises a UserError if it is absent."""
    if key not in value:
        keys = ", ".join(map(str, value)) or "none"
        raise UserError(f'{place}: found no "{key}"; expected {expected} (keys: {keys})')
    return value[key]


def texts_of(value: dict[str, Any], key: str, place: str) -> list[str]:
    """The list of texts that an object has under a key; the list may be empty, its texts may not."""
    found = value_of(value, key, place, "a list of texts")
    if not isinstance(found, list):
        raise UserError(f'{place}: "{key}": found {kind(found)}; expected a list of texts')
    return [check_text(text, f"{key}[{i}]", place) for i, text in enumerate(found)]


def check_text(value: Any, key: str, place: str) -> str:
    """Returns the value; raises a UserError unless it is text, not blank, and valid Unicode."""
    if not isinstance(value, str):
        raise UserError(f'{place}: "{key}": found {kind(value)}; expected text')
    if not value.strip():
        raise UserError(f'{place}: "{key}": found an empty text; expected text that is not blank')
    return _check_unicode(value, key, place)


def id_of(value: dict[str, Any], place: str) -> str | int:
    """The object's id, or the line number of its `place` if it has none."""
    found = value.get("id")
    if found is None:
        return place.rpartition(":")[2]
    if isinstance(found, bool) or not isinstance(found, str | int):
        raise UserError(f'{place}: "id": found {kind(found)}; expected text or a whole number')
    return _check_unicode(found, "id", place) if isinstance(found, str) else found


def _check_unicode(text: str, key: str, place: str) -> str:
    """Returns the text; raises a UserError if it has a lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f'{place}: "{key}": found half a surrogate pair at character {error.start + 1}; expected valid Unicode'
        ) from error
    return text


def kind(value: Any) -> str:
    """The type of a JSON value in words; a number is given itself."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"the number {value!r}"[:60])
