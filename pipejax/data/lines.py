"""Reads and checks records of JSON lines and JSON arrays; every error names the file and the line.

Lines that cannot be used: the first one ends the work, or all are left out, counted, and named.
"""

import datetime
import decimal
import functools
import io
import logging
import math
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pipejax.data.packed import open_file, unpacked
from pipejax.system import strict_json
from pipejax.system.errors import UserError
from pipejax.system.fields import listed

logger = logging.getLogger(__name__)

Object = Mapping[str, object]  # a record as it was read
Placed = tuple[str, Object]  # ("FILE:LINE", record)
LONGEST = 2**28  # characters of a line; without a bound a small archive could unpack to a line that fills memory
SHOWN = 10  # errors that are logged; the others are counted
Refusal = Callable[[UserError], None]  # takes the error of a line, and raises it or not


def refuse_line(error: UserError) -> None:
    """Raises the error: no line may be left out."""
    try:
        raise error
    finally:
        del error  # else it would hold its own traceback, and with that open files


class BadLines:
    """The lines of an input that are left out; without `skip` the first one is refused."""

    def __init__(self, where: str, *, skip: bool, most: int = SHOWN, tell: bool = True) -> None:
        self.where, self.skip, self.most, self.tell = where, skip, most, tell
        self.count, self.messages = 0, list[str]()

    def __call__(self, error: UserError) -> None:
        if not self.skip:
            refuse_line(error)
        message = str(error)
        if self.tell and message in self.messages:  # a stream is read pass after pass; these are SHOWN at the most
            return
        self.count += 1
        if self.count <= self.most:
            self.messages.append(message)
        if self.tell and self.count <= SHOWN:
            logger.warning(f"{message}; skipped")

    def end(self, kept: int) -> None:
        """Says how many were left out of an input of which so many lines were kept."""
        if self.count and not kept:
            raise UserError(f"{self.where}: found {self.count} bad lines and no good one; first {self.messages[0]}")
        if self.count:
            lines = "bad line" if self.count == 1 else "bad lines"
            logger.warning(f"{self.where}: {self.count} {lines} skipped, {kept} good ones kept")


def decode_lines(
    lines: Iterable[bytes], where: str, first: int = 1, bad: Refusal = refuse_line
) -> Iterator[tuple[str, str]]:
    """Yields ("FILE:LINE", text) for each line, without BOM and CRLF; one that is not UTF-8 goes to `bad`."""
    for number, line in enumerate(bounded_lines(lines, where), start=first):
        try:
            text = decoded(line, where, number)
        except UserError as error:
            bad(error)
            continue
        yield f"{where}:{number}", text.rstrip("\r\n")


def decoded(line: bytes, where: str, number: int) -> str:
    """The text of a line, the first one without a BOM; raises a UserError, which guesses, if it is not UTF-8."""
    if number == 1 and line[:2].count(0) == 1:
        guess = "UTF-16BE" if line[0] == 0 else "UTF-16LE"
        raise UserError(f"{where}:{number}: found byte 0x00; expected UTF-8{seems(guess)}")
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        found = f"{where}:{number}: found byte {line[error.start]:#04x} at column {error.start + 1}"
        guess = "UTF-16" if line[:2] in _MARKS else _single_bytes(line)
        raise UserError(f"{found}; expected UTF-8{guess and seems(guess)}") from error


_MARKS = (b"\xff\xfe", b"\xfe\xff")  # with which UTF-16 begins


def seems(encoding: str) -> str:
    return f" (it seems to be {encoding}: `iconv -f {encoding} -t UTF-8` converts a file that is so throughout)"


def _single_bytes(line: bytes) -> str:
    """The encoding of Windows in western Europe, if all bytes are printable in it."""
    text = line.strip().decode("cp1252", "replace")
    return "CP1252" if text.replace("\t", " ").isprintable() and "\ufffd" not in text else ""


def read_objects(lines: Iterable[bytes], where: str, first: int = 1, bad: Refusal = refuse_line) -> Iterator[Placed]:
    """Yields ("FILE:LINE", object) for each line that is not blank; one that is no object in UTF-8 goes to `bad`."""
    for place, line in decode_lines(lines, where, first, bad):
        text = line.strip()
        if not text:
            continue
        try:
            value = strict_json.loads(text)
        except strict_json.DuplicateKey as error:
            bad(UserError(f"{place}: {error}"))
            continue
        except (ValueError, RecursionError) as error:
            is_list = text.startswith("[") and isinstance(error, ValueError)
            found = "found the beginning of a list" if is_list else f"not JSON ({error})"
            bad(UserError(f"{place}: {found}; expected one object a line"))
            continue
        if isinstance(value, dict):
            yield place, value
        else:
            bad(UserError(f"{place}: found {kind(value)}; expected an object"))


def read_array(data: bytes, where: str) -> Iterator[Placed]:
    """Yields ("FILE:LINE: record NUMBER", object) of an array: the file, or a value as in `{..., "data": [...]}`."""
    text = "\n".join(line for _, line in decode_lines(data.splitlines(), where))
    head = re.match(r'\s*(\{[^\[\]{}]*"\w+"\s*:\s*)?\[\s*', text)
    if head is None:
        raise UserError(f"{where}:1: found no JSON array; expected an array of objects")
    at, line, number, counted = head.end(), 1, 0, 0
    while text[at : at + 1] != "]":
        number, line, counted = number + 1, line + text.count("\n", counted, at), at
        place = f"{where}:{line}: record {number}"
        try:
            value, at = strict_json.DECODER.raw_decode(text, at)
        except strict_json.DuplicateKey as error:
            raise UserError(f"{place}: {error}") from error
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


def bounded_lines(lines: Iterable[bytes], where: str) -> Iterator[bytes]:
    """Yields the lines; raises a UserError for one longer than LONGEST, without reading the rest of it."""
    if isinstance(lines, io.IOBase):
        lines = cast(Iterator[bytes], iter(functools.partial(lines.readline, LONGEST + 1), b""))
    for number, line in enumerate(lines, start=1):
        if len(line) > LONGEST:
            raise UserError(f"{where}:{number}: found a line of more than {LONGEST >> 20} MiB; expected records")
        yield line


def read_file(path: str | Path, bad: Refusal = refuse_line) -> Iterator[Placed]:
    with open_file(path, "a file of JSON lines") as file, unpacked(file, str(path)) as lines:
        yield from read_objects(lines, str(path), bad=bad)


def text_of(value: Object, key: str, place: str, *, blank: bool = False) -> str:
    return check_text(value_of(value, key, place), key, place, blank=blank)


def value_of(value: Object, key: str, place: str, expected: str = "one", *, hint: str = "") -> object:
    """The value of a key; raises a UserError, which ends with the `hint`, if it is absent."""
    if key not in value:
        raise UserError(f'{place}: found no "{key}"; expected {expected} (keys: {listed(value) or "none"}){hint}')
    return value[key]


def texts_of(value: Object, key: str, place: str, *, blank: bool = False, hint: str = "") -> list[str]:
    """The list of texts that an object has under a key; the list may be empty, its texts if they may be `blank`."""
    found = value_of(value, key, place, "a list of texts", hint=hint)
    if not isinstance(found, list | tuple):
        raise UserError(f'{place}: "{key}": found {kind(found)}; expected a list of texts')
    return [check_text(text, f"{key}[{i}]", place, blank=blank) for i, text in enumerate(found)]


def check_text(value: object, key: str, place: str, *, blank: bool = False) -> str:
    """Returns the value; raises a UserError unless it is text and, if it may not be `blank`, some of valid Unicode."""
    if not isinstance(value, str):
        raise UserError(f'{place}: "{key}": found {kind(value)}; expected text')
    if blank:
        return value
    if not value.strip():
        raise UserError(f'{place}: "{key}": found an empty text; expected text that is not blank')
    return _check_unicode(value, key, place)


def id_of(value: Object, place: str) -> str | int:
    """The object's id, or the line number of its `place` if it has none."""
    found: Any = value.get("id")
    if found != "" and is_blank(found):
        return place.rpartition(":")[2]
    is_float = isinstance(found, numbers.Real) and not isinstance(found, numbers.Integral)
    if (abs(found) < 2**53 if is_float else isinstance(found, decimal.Decimal)) and found % 1 == 0:
        found = int(found)  # which a column that lacks some has as this; larger floats have lost digits
    if isinstance(found, bool) or not isinstance(found, str | numbers.Integral):  # of NumPy, too
        raise UserError(f'{place}: "id": found {kind(found)}; expected text or a whole number')
    return _check_unicode(found, "id", place) if isinstance(found, str) else int(found)


def _check_unicode(text: str, key: str, place: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f'{place}: "{key}": found half a surrogate pair at character {error.start + 1}; expected valid Unicode'
        ) from error
    return text


def is_blank(value: object) -> bool:
    """Whether a value stands for no text: null, not a number (as tables have for null), or blank text."""
    if isinstance(value, str):
        return not value.strip()
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
    if value is None:
        return "null"
    if isinstance(value, numbers.Number) and not isinstance(value, bool):
        return f"the number {value}"[:60]
    return next((name for types, name in _KINDS if isinstance(value, types)), f"a value of type {type(value).__name__}")
