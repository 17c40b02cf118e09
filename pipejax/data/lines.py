"""Records of unknown origin, as JSON lines, JSON arrays or CSV: every error names the file and the line."""

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
LONGEST = 2**28  # characters of a line: a small archive can hold a file of zeros that fills any memory


def decode_lines(lines: Iterable[bytes], where: str) -> Iterator[tuple[str, str]]:
    """Yields ("FILE:LINE", text) for each line; a BOM and CRLF are dropped.

    Raises:
      UserError: a line is not UTF-8, or longer than any record.
    """
    for number, line in enumerate(_bounded(lines, where), start=1):
        place = f"{where}:{number}"
        try:
            yield place, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{place}: found byte {line[error.start]:#04x} at column {error.start + 1}; expected UTF-8"
            ) from error


def read_objects(lines: Iterable[bytes], where: str) -> Iterator[Placed]:
    """Yields ("FILE:LINE", object) for each line; blank lines are accepted.

    Raises:
      UserError: a line is not UTF-8, not JSON or not an object.
    """
    for place, line in decode_lines(lines, where):
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
    """The same for a file that holds one array of objects, by itself or within an object: `{..., "data": [...]}`."""
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
    """The rows of a CSV file with a line of column names, as objects of texts.

    Raises:
      UserError: not UTF-8, no or doubled column names, or a row of another length; the line is the row's first.
    """
    csv.field_size_limit(LONGEST)  # articles are longer than the 128 KiB that it starts with
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    try:
        yield from _rows(csv.reader(_bounded(text, where), strict=True), where)
    finally:
        text.detach()  # the file is closed by whoever opened it


def _rows(reader: Any, where: str) -> Iterator[Placed]:
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
        elif row:  # a blank line is none
            raise UserError(f"{place}: found {len(row)} columns; expected {len(names)} ({', '.join(names)})")


def _bounded(lines: Iterable[Line], where: str) -> Iterator[Line]:
    """The lines; of a file none is read further than a line may be long."""
    if isinstance(lines, io.IOBase):
        end = "" if isinstance(lines, io.TextIOBase) else b""
        lines = cast(Iterator[Line], iter(functools.partial(lines.readline, LONGEST + 1), end))
    for number, line in enumerate(lines, start=1):
        if len(line) > LONGEST:
            raise UserError(f"{where}:{number}: found a line of more than {LONGEST >> 20} MiB; expected records")
        yield line


def open_file(path: str | Path, expected: str) -> BinaryIO:
    """Opens a file; `expected` says what it should be in the UserError."""
    path = Path(path)
    if (found := look(path)) != "file":  # a pipe is as good as a file
        raise UserError(f"{path}: {'found a directory' if found else 'no such file'}; expected {expected}")
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected {expected}") from error


def read_file(path: str | Path) -> Iterator[Placed]:
    """`read_objects` of a file."""
    with open_file(path, "a file of JSON lines") as file, unpacked(file, str(path)) as lines:
        yield from read_objects(lines, str(path))


@contextlib.contextmanager
def unpacked(file: BinaryIO, where: str) -> Iterator[BinaryIO]:
    """The content of an open file, whether it is packed with gzip or not, whatever its name.

    Raises:
      UserError: it is packed and damaged; from within the block, where it is read.
    """
    packed = file.peek(2)[:2] == b"\x1f\x8b" if isinstance(file, io.BufferedReader) else False
    try:
        yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if packed else file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{where}: damaged gzip data ({error}); expected a whole file") from error


def text_of(value: dict[str, Any], key: str, place: str) -> str:
    """A non-empty text of an object."""
    return check_text(value_of(value, key, place), key, place)


def value_of(value: dict[str, Any], key: str, place: str) -> Any:
    """What an object has under a key."""
    if key not in value:
        raise UserError(f'{place}: found no "{key}"; expected one (keys: {", ".join(map(str, value)) or "none"})')
    return value[key]


def texts_of(value: dict[str, Any], key: str, place: str) -> list[str]:
    """A list of non-empty texts of an object; the list may be empty."""
    if key not in value:
        raise UserError(f'{place}: found no "{key}"; expected a list of texts')
    found = value[key]
    if not isinstance(found, list):
        raise UserError(f'{place}: "{key}": found {kind(found)}; expected a list of texts')
    return [check_text(text, f"{key}[{i}]", place) for i, text in enumerate(found)]


def check_text(value: Any, key: str, place: str) -> str:
    """That value, if it is a text with something in it that can be encoded."""
    if not isinstance(value, str):
        raise UserError(f'{place}: "{key}": found {kind(value)}; expected text')
    if not value.strip():
        raise UserError(f'{place}: "{key}": found an empty text; expected some')
    return _check_unicode(value, key, place)


def id_of(value: dict[str, Any], place: str) -> str | int:
    """The object's id; its line number where it has none."""
    found = value.get("id")
    if found is None:
        return place.rpartition(":")[2]
    if isinstance(found, bool) or not isinstance(found, str | int):
        raise UserError(f'{place}: "id": found {kind(found)}; expected text or a whole number')
    return _check_unicode(found, "id", place) if isinstance(found, str) else found


def _check_unicode(text: str, key: str, place: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f'{place}: "{key}": found half a surrogate pair at character {error.start + 1}; expected valid Unicode'
        ) from error
    return text


def kind(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"the number {value!r}"[:60])
