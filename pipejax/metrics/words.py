"""The words of texts in any script."""

import re
import unicodedata

from pipejax.metrics.exact import fold

_MARKS = "".join(c for c in map(chr, range(0x300, 0x1F000)) if unicodedata.category(c).startswith("M"))
# Scripts without spaces, of which each letter is a word: Thai, Lao, Burmese, Khmer, Han, kana.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3021-\u3029\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf"
_UNSPACED += "\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_LETTER = rf"(?:[^\W_{_UNSPACED}]|[{_MARKS}])"
_ALONE = rf"(?![\W_])[{_UNSPACED}][{_MARKS}]*"
_WORD = re.compile(rf"{_ALONE}|{_LETTER}+")
# A number keeps its points, as 1.5 and 1/12 do, and a name its signs, as C++ and C# do; another sign is a term.
_TERM = re.compile(rf"{_ALONE}|(?:{_LETTER}|(?<=\d)[.,:/](?=\d))+(?:[+#]+(?!\w))?|\S")


def words(text: str) -> list[str]:
    """Letters, digits and their marks, without regard to case; nothing else."""
    return _WORD.findall(fold(text).casefold())


def terms(text: str) -> list[str]:
    """All that is not white space, without regard to case: words, numbers, and each other sign alone."""
    return _TERM.findall(fold(text).casefold())
