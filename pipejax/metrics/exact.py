"""Exact and partial match of rows that may hold numbers, units or code: all signs count, and repeated rows do.

Unicode's NFKC and white space do not. Values of named rows are compared by type: 1 is 1.0, and is not the text "1".
"""

import decimal
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping

Row = str | tuple[str, object]  # a text, or a name and its value
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?(e[+-]?\d{1,9})?", re.ASCII | re.IGNORECASE)
_ALL_DIGITS = decimal.Context(decimal.MAX_PREC, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)
# Raised, lowered and circled signs of which NFKC makes a digit, + or −: after a digit they would lengthen the number.
_DIGITS = re.compile(r"<\w+> (003\d|002B|2212)")
_MORE = "".join(c for c in map(chr, range(0x80, 0x3400)) if _DIGITS.match(unicodedata.decomposition(c)))
_LENGTHENED = re.compile(rf"(?<=\d)(?=[{_MORE}])")


def fold(text: str) -> str:
    """NFKC, and single spaces; but 10² does not become 102, nor 1½ 11⁄2."""
    return " ".join(unicodedata.normalize("NFKC", _LENGTHENED.sub("^", text)).split())


def spell_rows(rows: Iterable[Row] | Mapping[str, object], *, fold_case: bool) -> list[str]:
    """The texts of rows, the same for rows that are equal by this rule; none for a blank row."""
    spelled: Callable[[str], str] = (lambda text: fold(fold(text).casefold())) if fold_case else fold
    pairs = rows.items() if isinstance(rows, Mapping) else rows
    texts = (spelled(x) if isinstance(x, str) else f"{spelled(x[0])} {_shown(x[1], spelled)}" for x in pairs)
    return [text for text in texts if text]


def named_rows(rows: Iterable[str], readers: Mapping[str, Callable[[str], object]]) -> list[Row]:
    """Each row that begins with a name, as that and its value; `readers`: by name, from the text after it."""
    found = list[Row]()
    for row in rows:
        name = max((name for name in readers if row.startswith(name)), key=len, default="")
        text = row[len(name) :].strip()
        try:
            found.append((name, readers[name](text)) if name else row)
        except (ValueError, KeyError):  # such data breaks its schema
            found.append((name, text))
    return found


def number_or_text(text: str) -> object:
    """The number that JSON would read, with all its digits; else the text."""
    return decimal.Decimal(text) if _NUMBER.fullmatch(text := fold(text)) else text


def _shown(value: object, spell: Callable[[str], str]) -> str:
    """JSON, in which each value has one spelling."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(x, spell) for x in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_shown(str(key), spell)}: {_shown(x, spell)}' for key, x in value.items()))}}}"
    if isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool):
        return str(_ALL_DIGITS.normalize(decimal.Decimal(str(value))) or 0)
    return json.dumps(spell(value) if isinstance(value, str) else value, ensure_ascii=False, sort_keys=True)
