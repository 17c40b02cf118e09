"""Reads and checks records of JSON lines; every error names the file and the line.

By default the first line that cannot be used ends the work. With `skip` such lines are skipped, counted and logged.
"""

import datetime
import decimal
import functools
import io
import logging
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pipejax.data.storage import open_file, unpacked
from pipejax.system import strict_json
from pipejax.system.errors import UserError, join_hints
from pipejax.system.fields import listed

logger = logging.getLogger(__name__)

Object = Mapping[str, object]  # a record as read
Placed = tuple[str, Object]  # ("FILE:LINE", record)
LONGEST = 2**28  # characters of a line; without a limit, a small archive could unpack to a line that fills the memory
SHOWN = 10  # the number of logged errors; further ones are only counted
Refusal = Callable[[UserError], None]  # gets the error of a line; either raises it, or returns to skip the line


def refuse_line(error: UserError) -> None:
    """Raises the error, so that no line is skipped."""
    try:
        raise error
    finally:
        del error  # else the error would hold its own traceback, and thereby open files


class BadLines:
    """Collects the errors of lines that cannot be used; without `skip` it raises the first one."""

    def __init__(self, where: str, *, skip: bool, most: int = SHOWN, tell: bool = True) -> None:
        self.where, self.skip, self.most, self.tell = where, skip, most, tell
        self.count, self.messages = 0, list[str]()

    def __call__(self, error: UserError) -> None:
        if not self.skip:
            refuse_line(error)
        message = str(error)
        # The files of a stream are read once per pass; the list has at most SHOWN messages.
        if self.tell and message in self.messages:
            return
        self.count += 1
        if self.count <= self.most:
            self.messages.append(message)
        if self.tell and self.count <= SHOWN:
            logger.warning(f"{message}; skipped")

    def end(self, kept: int) -> None:
        """Logs how many lines were skipped.

        Raises:
          UserError: no line was kept.
        """
        if self.count and not kept:
            raise UserError(
                self.where, found=f"{self.count} bad lines and no good one; the first is {self.messages[0]}"
            )
        if self.count:
            lines = "bad line" if self.count == 1 else "bad lines"
            logger.warning(f"{self.where}: {self.count} {lines} skipped, {kept} good ones kept")


def decode_lines(
    lines: Iterable[bytes], where: str, first: int = 1, bad: Refusal = refuse_line
) -> Iterator[tuple[str, str]]:
    """Yields ("FILE:LINE", text) for each line, without BOM and line end; a line that is not UTF-8 goes to `bad`."""
    for number, line in enumerate(bounded_lines(lines, where), start=first):
        try:
            text = decoded(line, where, number)
        except UserError as error:
            bad(error)
            continue
        yield f"{where}:{number}", text.rstrip("\r\n")


def decoded(line: bytes, where: str, number: int) -> str:
    """Returns the text of a line; a BOM is removed from line 1.

    Raises:
      UserError: the line is not UTF-8. The message guesses the encoding.
    """
    if number == 1 and line[:2].count(0) == 1:
        guess = "UTF-16BE" if line[0] == 0 else "UTF-16LE"
        raise UserError(f"{where}:{number}", found="byte 0x00", expected="UTF-8", hint=seems(guess))
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {line[error.start]:#04x} at column {error.start + 1}"
        guess = "UTF-16" if line[:2] in _MARKS else _single_bytes(line)
        raise UserError(f"{where}:{number}", found=found, expected="UTF-8", hint=guess and seems(guess)) from error


_MARKS = (b"\xff\xfe", b"\xfe\xff")  # the byte order marks of UTF-16


def seems(encoding: str) -> str:
    """Returns a hint, for a message, that the file is in another encoding."""
    return f"it seems to be {encoding}: `iconv -f {encoding} -t UTF-8` converts the file if all of it has this encoding"


def _single_bytes(line: bytes) -> str:
    """Returns "CP1252", the Windows encoding of western Europe, if all bytes are printable in it; else ""."""
    text = line.strip().decode("cp1252", "replace")
    return "CP1252" if text.replace("\t", " ").isprintable() and "\ufffd" not in text else ""


def read_objects(lines: Iterable[bytes], where: str, first: int = 1, bad: Refusal = refuse_line) -> Iterator[Placed]:
    """Yields ("FILE:LINE", object) for each line that is not blank; an invalid line goes to `bad`."""
    for place, line in decode_lines(lines, where, first, bad):
        text = line.strip()
        if not text:
            continue
        try:
            value = strict_json.loads(text)
        except strict_json.DuplicateKey as error:
            bad(UserError(place, found=error.found, expected=error.expected))
            continue
        except (ValueError, RecursionError) as error:
            is_list = text.startswith("[") and isinstance(error, ValueError)
            problem = "found the beginning of a list" if is_list else f"not JSON ({error})"
            bad(UserError(place, problem, expected="one object a line"))
            continue
        if isinstance(value, dict):
            yield place, value
        else:
            bad(UserError(place, found=f"{kind(value)}", expected="an object"))


def bounded_lines(lines: Iterable[bytes], where: str) -> Iterator[bytes]:
    """Yields the lines.

    Raises:
      UserError: a line is longer than LONGEST. The rest of a line that is too long is not read.
    """
    if isinstance(lines, io.IOBase):
        lines = cast(Iterator[bytes], iter(functools.partial(lines.readline, LONGEST + 1), b""))
    for number, line in enumerate(lines, start=1):
        if len(line) > LONGEST:
            raise UserError(f"{where}:{number}", found=f"a line of more than {LONGEST >> 20} MiB", expected="records")
        yield line


def read_file(path: str | Path, bad: Refusal = refuse_line) -> Iterator[Placed]:
    """Yields ("FILE:LINE", object) for each line of a file, which may be compressed."""
    with open_file(path, "a file of JSON lines") as file, unpacked(file, str(path)) as lines:
        yield from read_objects(lines, str(path), bad=bad)


def text_of(value: Object, key: str, place: str, *, blank: bool = False) -> str:
    """Returns the text of a key; see `check_text` for the errors."""
    return check_text(value_of(value, key, place), key, place, blank=blank)


def value_of(value: Object, key: str, place: str, expected: str = "one", *, hint: str = "") -> object:
    """Returns the value of a key.

    Raises:
      UserError: the key is absent. The message ends with the `hint`.
    """
    if key not in value:
        keys = f"keys: {listed(value) or 'none'}"
        raise UserError(place, found=f'no "{key}"', expected=expected, hint=join_hints(keys, hint))
    return value[key]


def texts_of(value: Object, key: str, place: str, *, blank: bool = False, hint: str = "") -> list[str]:
    """Returns the list of texts under a key. The list may be empty; its texts may be blank only with `blank`.

    Raises:
      UserError: the key is absent, or its value is not a list of texts.
    """
    found = value_of(value, key, place, "a list of texts", hint=hint)
    if not isinstance(found, list | tuple):
        raise UserError(f'{place}: "{key}"', found=f"{kind(found)}", expected="a list of texts")
    return [check_text(text, f"{key}[{i}]", place, blank=blank) for i, text in enumerate(found)]


def check_text(value: object, key: str, place: str, *, blank: bool = False) -> str:
    """Returns the value if it is valid Unicode text.

    Raises:
      UserError: the value is not text, has a lone surrogate, or is blank without `blank`.
    """
    if not isinstance(value, str):
        raise UserError(f'{place}: "{key}"', found=f"{kind(value)}", expected="text")
    if blank:
        return value
    if not value.strip():
        raise UserError(f'{place}: "{key}"', found="an empty text", expected="text that is not blank")
    return _check_unicode(value, key, place)


def id_of(value: Object, place: str) -> str | int:
    """Returns the object's id, or the line number of its `place` if it has none."""
    found: Any = value.get("id")
    if found != "" and is_blank(found):
        return place.rpartition(":")[2]
    is_float = isinstance(found, numbers.Real) and not isinstance(found, numbers.Integral)
    if (abs(found) < 2**53 if is_float else isinstance(found, decimal.Decimal)) and found % 1 == 0:
        # A table stores whole numbers as floats in a column with gaps; larger floats have lost digits.
        found = int(found)
    # numbers.Integral includes NumPy's integers
    if isinstance(found, bool) or not isinstance(found, str | numbers.Integral):
        raise UserError(f'{place}: "id"', found=f"{kind(found)}", expected="text or a whole number")
    return _check_unicode(found, "id", place) if isinstance(found, str) else int(found)


def _check_unicode(text: str, key: str, place: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f'{place}: "{key}"', found=f"a lone surrogate at character {error.start + 1}", expected="valid Unicode"
        ) from error
    return text


def is_blank(value: object) -> bool:
    """Returns whether a value means no text: null, not a number (which tables use for null), or blank text."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, decimal.Decimal):
        return value.is_nan()
    return value is None or (isinstance(value, float) and math.isnan(value))


_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (str, "text"),
    (bool, "true or false"),
    (Mapping, "an object"),
    ((bytes, bytearray, memoryview), "bytes"),
    (Sequence, "a list"),
    ((datetime.date, datetime.time), "a date or a time"),
    (datetime.timedelta, "a span of time"),
)


def kind(value: object) -> str:
    """Describes the type of a JSON value in words, for messages."""
    if value is None:
        return "null"
    if isinstance(value, numbers.Number) and not isinstance(value, bool):
        return f"the number {value}"[:60]
    return next((name for types, name in _KINDS if isinstance(value, types)), f"a value of type {type(value).__name__}")
