"""Text rules of published data sets: JSON arrays as records, and spelling for T5's vocabulary."""

import re
from collections.abc import Iterator, Sequence

from pipejax.data.lines import Placed, decode_lines, kind
from pipejax.system import strict_json
from pipejax.system.errors import UserError

# Treebank tokenizers write quotation marks like this, but T5's vocabulary has no backtick.
_QUOTES = (("``", '"'), ("''", '"'), ("`", "'"))


def read_array(data: bytes, where: str) -> Iterator[Placed]:
    """Yields ("FILE:LINE: record NUMBER", object) of a JSON array.

    The array is the whole file, or the value of a key, as in `{..., "data": [...]}`.
    """
    text = "\n".join(line for _, line in decode_lines(data.splitlines(), where))
    head = re.match(r'\s*(\{[^\[\]{}]*"\w+"\s*:\s*)?\[\s*', text)
    if head is None:
        raise UserError(f"{where}:1", found="no JSON array", expected="an array of objects")
    at, line, number, counted = head.end(), 1, 0, 0
    while text[at : at + 1] != "]":
        number, line, counted = number + 1, line + text.count("\n", counted, at), at
        place = f"{where}:{line}: record {number}"
        try:
            value, at = strict_json.DECODER.raw_decode(text, at)
        except strict_json.DuplicateKey as error:
            raise UserError(place, found=error.found, expected=error.expected) from error
        except (ValueError, RecursionError) as error:
            raise UserError(place, f"not JSON ({error})", expected="an object") from error
        if not isinstance(value, dict):
            raise UserError(place, found=f"{kind(value)}", expected="an object")
        yield place, value
        following = re.compile(r"\s*(,\s*|(?=\]))").match(text, at)
        if following is None:
            raise UserError(place, found="no comma or ] after the record", expected="the array to continue or end")
        at = following.end()
    if head[1] is None and (rest := text[at + 1 :].strip()):
        raise UserError(where, found=f"{rest[:20]!r} after the array", expected="the end of the file")


def plain_text(text: str, placeholders: Sequence[tuple[str, str]] = ()) -> str:
    """Returns the text with straight quotes, single spaces and no line breaks.

    Each placeholder `old` is replaced by `new`.
    """
    for old, new in (*placeholders, *_QUOTES):
        text = text.replace(old, new)
    return " ".join(text.split())
