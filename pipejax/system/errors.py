"""The exception for bad input, and functions that classify and shorten other exceptions."""

import difflib
import re
from collections.abc import Iterable

_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory|bad_alloc|failed to allocate", re.IGNORECASE)


class UserError(Exception):
    """Raised for bad input. The message is one line for the user: the place (file, line or key) and the problem."""


def out_of_memory(error: BaseException) -> bool:
    """Whether the error reports a lack of memory, of the host or of a device.

    XLA reports it as a RuntimeError with a certain message.
    """
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    )


def did_you_mean(found: object, known: Iterable[str]) -> str:
    """Returns the hint " (did you mean X?)" with the known word most similar to `found`; "" if none is similar."""
    word, folded = str(found).casefold(), {name.casefold(): name for name in known if name}
    begun = [name for name in folded if word and name.startswith(word)]
    close = begun if len(begun) == 1 else difflib.get_close_matches(word, folded, n=1)
    return f" (did you mean {folded[close[0]]}?)" if close else ""


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or the name of its type if the message is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def described_error(error: BaseException) -> str:
    """Returns the type of an exception and the first line of its message, in at most 200 characters."""
    return f"{type(error).__name__}: {first_line(error)}"[:200]
