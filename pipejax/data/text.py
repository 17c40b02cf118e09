"""Text rules of tasks: templates of fields, and splitting a target into rows."""

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence

from pipejax.system.errors import UserError
from pipejax.system.extras import extra

# SentencePiece's nmt_nfkc removes _CONTROLS, and treats _SPACES as spaces, though Unicode does not.
_CONTROLS = re.compile(r"[\x01-\x08\x0b\x0e-\x1f\x7f\x8f\x9f]")
_SPACES = re.compile(r"[\u061c\u200b\u200c\u200e\u200f\u2581\ufeff\ufffd]")


def normalized(text: str) -> str:
    """Returns the text in the form in which T5 tokenizers read it: NFKC, single spaces, no control characters."""
    return " ".join(unicodedata.normalize("NFKC", _SPACES.sub(" ", _CONTROLS.sub("", text))).split())


def split_rows(text: str, delimiter: str) -> list[str]:
    """Splits a text into rows; blank rows are left out."""
    return [part for part in map(str.strip, text.split(delimiter)) if part]


def sentences(text: str) -> list[str]:
    """Splits an English text into sentences."""
    with extra("metrics", "sentences"):
        import sentencex

    return [sentence for part in sentencex.segment("en", text) if (sentence := part.strip())]


def keyphrases(document: str, phrases: Sequence[str]) -> list[str]:
    """Returns the phrases without duplicates.

    The phrases whose stems occur in the document come first, in the order of the document; then the other phrases (Meng
    2017).
    """
    from pipejax.metrics.keyphrases import stems_of  # imported here, because importing nltk takes time

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

    return sorted(dict.fromkeys(phrases), key=first)  # stable: absent phrases keep the given order


class Template:
    """A text with field names in braces, such as "Question: {question} Context: {context}"."""

    def __init__(self, text: str, *, key: str) -> None:
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise UserError(key, found=f"{text!r} ({error})", expected="fields such as {title}") from error
        self.text = text
        self.fields = tuple(name for _, name, _, _ in parts if name is not None)
        has_format = any(spec or conversion for _, _, spec, conversion in parts)
        if not self.fields or has_format or not all(map(self.can_name, self.fields)):
            raise UserError(key, found=f"{text!r}", expected="the names of fields in braces, such as {title}")
        self._parts = [(literal, name) for literal, name, _, _ in parts]

    @staticmethod
    def can_name(field: str) -> bool:
        """Returns whether a field of this name can be in a template."""
        return field.replace("_", "a").replace("-", "a").isalnum()

    def fill(self, values: Mapping[str, str]) -> str:
        """Returns the text with each field's value in place of its name."""
        return "".join(literal + (values[name] if name is not None else "") for literal, name in self._parts)
