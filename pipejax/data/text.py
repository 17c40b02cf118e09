"""What tasks do to text: spelling that T5's pieces can hold, templates, and the rules that part a target into rows."""

import re
import string
from collections.abc import Mapping, Sequence

from pipejax.system.errors import UserError
from pipejax.system.extras import extra

# The backtick is not among T5's pieces; these are the quotation marks of treebank tokenizers.
_QUOTES = (("``", '"'), ("''", '"'), ("`", "'"))


def plain(text: str, placeholders: Sequence[tuple[str, str]] = ()) -> str:
    """The text with straight quotes, single spaces and no line break; placeholders (old, new) are replaced."""
    for old, new in (*placeholders, *_QUOTES):
        text = text.replace(old, new)
    return " ".join(text.split())


def lines(text: str) -> list[str]:
    """The lines that are not blank."""
    return split(text, "\n")


def split(text: str, delimiter: str) -> list[str]:
    """The parts between delimiters, stripped; empty ones are left out."""
    return [part for part in map(str.strip, text.split(delimiter)) if part]


def sentences(text: str) -> list[str]:
    """The sentences of English text."""
    with extra("metrics", "sentences"):
        import sentencex

    return [sentence for part in sentencex.segment("en", text) if (sentence := part.strip())]


def keyphrases(document: str, phrases: Sequence[str]) -> list[str]:
    """The phrases, each once: those present in the document as they first appear there, then the absent ones as given.

    Present means that the phrase's words, lower-cased and stemmed, follow one another somewhere in the document (Meng
    et al. 2017).
    """
    from pipejax.metrics.keyphrases import stems_of  # nltk takes its time: only those who order phrases wait for it

    words = stems_of(document)
    starts: dict[str, list[int]] = {}
    for i, word in enumerate(words):
        starts.setdefault(word, []).append(i)

    def first(phrase: str) -> float:
        stems = stems_of(phrase)
        if not stems:
            return float("inf")
        places = (i for i in starts.get(stems[0], ()) if words[i : i + len(stems)] == stems)
        return next(places, float("inf"))

    return sorted(dict.fromkeys(phrases), key=first)  # a stable sort: equal ones stay as given


class Template:
    """Text with the names of fields in braces, such as "Question: {question} Context: {context}"."""

    def __init__(self, text: str, *, key: str) -> None:
        """`key` names the setting in errors.

        Raises:
          UserError: a lone brace, a field without a name, or no field at all.
        """
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise UserError(f"{key}: found {text!r} ({error}); expected fields such as {{title}}") from error
        self.fields = tuple(name for _, name, _, _ in parts if name is not None)
        odd = any(spec or conversion for _, _, spec, conversion in parts)
        if (
            not self.fields
            or odd
            or not all(name.replace("_", "a").replace("-", "a").isalnum() for name in self.fields)
        ):
            raise UserError(f"{key}: found {text!r}; expected the names of fields in braces, such as {{title}}")
        self._parts = [(literal, name) for literal, name, _, _ in parts]

    def fill(self, values: Mapping[str, str]) -> str:
        """The text with a value in the place of each field."""
        return "".join(literal + (values[name] if name is not None else "") for literal, name in self._parts)


def tells_rows_apart(separator: str) -> bool:
    """Whether rows can be found again in a text that joins them with it: spaces alone separate nothing."""
    return bool(separator.strip(" "))


def split_rows(text: str, separator: str) -> list[str]:
    """The rows of a sequential text; at either end a separator may lack its spaces."""
    if not tells_rows_apart(separator):
        return [text] if text else []
    parts = re.split(separator_pattern(separator), text)
    return [row for row in map(str.strip, parts) if row]


def separator_pattern(separator: str) -> str:
    """Matches the separator; tokenizers are free with the number of spaces around it, and with those at the ends."""
    core = separator.strip(" ")
    before = r"(?:^| +|(?<= ))" if separator.startswith(" ") else ""
    after = r"(?:$| +)" if separator.endswith(" ") else ""
    return before + re.escape(core) + after
