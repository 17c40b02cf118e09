"""Splits texts of any script into words."""

import re
import unicodedata

from pipejax.metrics.exact import fold

_MARKS = "".join(c for c in map(chr, range(0x300, 0x1F000)) if unicodedata.category(c).startswith("M"))
# Scripts without spaces, in which each letter counts as a word: Thai, Lao, Burmese, Khmer, Han, kana.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3021-\u3029\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf"
_UNSPACED += "\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_LETTER = rf"(?:[^\W_{_UNSPACED}]|[{_MARKS}])"
_ALONE = rf"(?![\W_])[{_UNSPACED}][{_MARKS}]*"
_WORD = re.compile(rf"{_ALONE}|{_LETTER}+")
# A number keeps its points, like 1.5 and 1/12, and a name its signs, like C++ and C#; any other sign is a term.
_TERM = re.compile(rf"{_ALONE}|(?:{_LETTER}|(?<=\d)[.,:/](?=\d))+(?:[+#]+(?!\w))?|\S")


def words(text: str) -> list[str]:
    """Returns letters, digits and their marks as words, in lower case; all other characters are dropped."""
    return _WORD.findall(fold(text).casefold())


def terms(text: str) -> list[str]:
    """Returns words, numbers and each other sign as terms, in lower case; only white space is dropped."""
    return _TERM.findall(fold(text).casefold())
