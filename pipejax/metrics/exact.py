"""Exact and partial match of rows that may contain numbers, units or code: all signs and repeated rows count.

Texts are compared after Unicode's NFKC and without regard to white space. Values of named rows are compared by type: 1
equals 1.0, but not the text "1".
"""

import decimal
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence

from pipejax.config.row_names import bare_name, split_row
from pipejax.system import strict_json
from pipejax.system.strict_json import JsonMapping

Row = str | tuple[str, object]  # a text, or a name and its value
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?(e[+-]?\d{1,9})?", re.ASCII | re.IGNORECASE)
_ALL_DIGITS = decimal.Context(decimal.MAX_PREC, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)
# Superscript, subscript and circled signs that NFKC turns into a digit, + or −. After a digit they would extend the
# number.
_DIGITS = re.compile(r"<\w+> (003\d|002B|2212)")
_MORE = "".join(c for c in map(chr, range(0x80, 0x3400)) if _DIGITS.match(unicodedata.decomposition(c)))
_LENGTHENED = re.compile(rf"(?<=\d)(?=[{_MORE}])")


def fold(text: str) -> str:
    """Returns the text in NFKC with single spaces. A "^" keeps 10² from becoming 102, and 1½ from becoming 11⁄2."""
    return " ".join(unicodedata.normalize("NFKC", _LENGTHENED.sub("^", text)).split())


def spell_rows(rows: Iterable[Row] | Mapping[str, object], *, fold_case: bool) -> list[str]:
    """Returns one text per row such that equal rows have the same text; blank rows are left out."""
    spelled = _fold_case if fold_case else fold
    pairs = rows.items() if isinstance(rows, Mapping) else rows
    texts = (spelled(x) if isinstance(x, str) else f"{spelled(bare_name(x[0]))} {_shown(x[1], spelled)}" for x in pairs)
    return [text for text in texts if text]


def _fold_case(text: str) -> str:
    return fold(fold(text).casefold())


def named_rows(
    rows: Iterable[Row], readers: Mapping[str, Callable[[str], object]], *, fold_case: bool = False
) -> list[Row]:
    """Replaces rows that begin with a name by (name, value).

    Args:
      rows: texts; a row that is already a (name, value) pair is unchanged.
      readers: by name, a function from the text after the name to the value. If it raises a ValueError or a KeyError,
        the value is the text.
      fold_case: whether names match in any case.
    """
    found = list[Row]()
    for row in rows:
        parts = split_row(row, readers, _fold_case if fold_case else fold) if isinstance(row, str) else None
        if parts is None:
            found.append(row)
            continue
        name, text = parts
        try:
            found.append((name, readers[name](text)))
        except (ValueError, KeyError):  # the data breaks its schema
            found.append(parts)
    return found


def match_object(
    rows: Sequence[Row] | JsonMapping, other: Sequence[Row] | JsonMapping, *, fold_case: bool = False
) -> Sequence[Row] | JsonMapping:
    """Replaces rows that begin with a key of `other` by (key, value), if `other` is an object."""
    if isinstance(rows, Mapping) or not isinstance(other, Mapping):
        return rows
    readers = {bare_name(str(key)): _reader_like(value) for key, value in other.items()}
    return named_rows(rows, readers, fold_case=fold_case)


def _reader_like(value: object) -> Callable[[str], object]:
    """Returns a function that parses a text as a value of this type; items of a list are separated by commas."""
    if isinstance(value, str):
        return str
    if isinstance(value, list | tuple):
        item = _reader_like(value[0] if value else 0)
        return lambda text: [item(part.strip()) for part in text.split(",")] if text else []
    if isinstance(value, Mapping):
        return strict_json.loads
    if isinstance(value, bool) or value is None:
        spelled = {"true": True, "false": False, "null": None, "": None}
        return lambda text: spelled[text] if text in spelled else number_or_text(text)
    return number_or_text


def number_or_text(text: str) -> object:
    """Returns the number that JSON would read, with all its digits; else the text."""
    return decimal.Decimal(text) if _NUMBER.fullmatch(text := fold(text)) else text


def _shown(value: object, spell: Callable[[str], str]) -> str:
    """Returns JSON in which each value has exactly one spelling."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(x, spell) for x in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_shown(str(key), spell)}: {_shown(x, spell)}' for key, x in value.items()))}}}"
    if isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool):
        return str(_ALL_DIGITS.normalize(decimal.Decimal(str(value))) or 0)
    return json.dumps(spell(value) if isinstance(value, str) else value, ensure_ascii=False, sort_keys=True)
