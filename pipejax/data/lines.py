"""JSON lines of unknown origin: every error names the file and the line."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipejax.errors import UserError


def read_objects(lines: Iterable[bytes], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("FILE:LINE", object) for each line; a BOM, CRLF and blank lines are accepted.

    Raises:
      UserError: a line is not UTF-8, not JSON or not an object.
    """
    for number, line in enumerate(lines, start=1):
        place = f"{where}:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{place}: found byte {line[error.start]:#04x} at column {error.start + 1}; expected UTF-8"
            ) from error
        if not text:
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: not JSON ({error}); expected one object a line") from error
        if not isinstance(value, dict):
            raise UserError(f"{place}: found {kind(value)}; expected an object")
        yield place, value


def read_file(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same for a file."""
    path = Path(path)
    if path.is_dir() or not path.exists():  # a pipe is as good as a file
        found = "found a directory" if path.is_dir() else "no such file"
        raise UserError(f"{path}: {found}; expected a file of JSON lines")
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a file of JSON lines") from error
    with file:
        yield from read_objects(file, str(path))


def text_of(value: dict[str, Any], key: str, place: str) -> str:
    """A non-empty text of an object."""
    if key not in value:
        raise UserError(f'{place}: found no "{key}"; expected one (keys: {", ".join(map(str, value)) or "none"})')
    return check_text(value[key], key, place)


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
