"""The exception for bad input, and functions that classify and shorten other exceptions."""

import difflib
import re
from collections.abc import Iterable

_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory|bad_alloc|failed to allocate", re.IGNORECASE)


class UserError(Exception):
    """Raised for bad input. The text is one line for a person; the attributes are its parts, for programs.

    The text is "PLACE: found FOUND; expected EXPECTED (HINT)", without the parts that are absent. An error that is not
    about a value has a PROBLEM instead of "found FOUND", as in "PLACE: missing; expected EXPECTED".

    Attributes:
      place: the file, line, key or flag, such as "train.jsonl:3" or "grid.delay"; "" if the error has no place.
      problem: the problem in words; None if the value `found` is the problem.
      found: the invalid value at the place, or None.
      expected: the values that are accepted at the place, or None.
      hint: how to correct the input, or the word that was probably meant; None without one.
    """

    def __init__(
        self,
        place: object = "",
        problem: str | None = None,
        *,
        found: str | None = None,
        expected: str | None = None,
        hint: str | None = None,
    ) -> None:
        """Joins the parts; `place` may be a path, and an empty hint counts as none.

        A single argument is a complete text, as in `UserError("grid.delay: too large")`. The text is used unchanged,
        and split at its first ": " into `place` and `problem`; without a ": " there is no place.
        """
        head = str(place)
        if problem is None and found is None and expected is None:
            before, colon, after = head.partition(": ")
            head, problem = (before, after) if colon else ("", head)
        self.place, self.problem, self.found, self.expected, self.hint = head, problem, found, expected, hint or None
        parts = {"": problem, "found ": found, "expected ": expected}
        text = "; ".join(f"{word}{part}" for word, part in parts.items() if part is not None)
        super().__init__((f"{head}: " if head else "") + text + in_parentheses(hint or ""))

    def fields(self) -> dict[str, str]:
        """Returns the attributes that are not empty, by name, for JSON lines and the server's errors."""
        return {name: text for name in FIELDS if (text := getattr(self, name))}

    def within(self, place: object) -> "UserError":
        """Returns the same error at a place inside another one, such as a key inside a file.

        The new text begins with "PLACE: ".
        """
        fields = {name: getattr(self, name) for name in FIELDS}
        return UserError(**(fields | {"place": f"{place}: {self.place}" if self.place else str(place)}))


FIELDS = ("place", "problem", "found", "expected", "hint")


def out_of_memory(error: BaseException) -> bool:
    """Returns whether an error reports a lack of memory, of the host or of a device.

    XLA reports a lack of memory as a RuntimeError with a certain message.
    """
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    )


def did_you_mean(found: object, known: Iterable[str]) -> str:
    """Returns the hint "did you mean X?" with the known word most similar to `found`; "" if none is similar."""
    word, folded = str(found).casefold(), {name.casefold(): name for name in known if name}
    begun = [name for name in folded if word and name.startswith(word)]
    close = begun if len(begun) == 1 else difflib.get_close_matches(word, folded, n=1)
    return f"did you mean {folded[close[0]]}?" if close else ""


def in_parentheses(hint: str) -> str:
    """Returns the hint as the end of a message, " (HINT)"; "" without a hint."""
    return f" ({hint})" if hint else ""


def join_hints(*hints: str | None) -> str:
    """Returns several hints as one, without those that are empty or None."""
    return "; ".join(filter(None, hints))


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or the name of its type if the message is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def described_error(error: BaseException) -> str:
    """Returns the type of an exception and the first line of its message, in at most 200 characters."""
    return f"{type(error).__name__}: {first_line(error)}"[:200]
