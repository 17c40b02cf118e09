"""The exception for bad input, and functions that classify and shorten other exceptions."""

import re

_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory|bad_alloc|failed to allocate", re.IGNORECASE)


class UserError(Exception):
    """Bad input. The message is one line for the user: place (file, line or key), what was found, what was expected."""


def out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory ran out: the host's, or a device's by the message of XLA's RuntimeError."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    )


def first_line(error: BaseException) -> str:
    """The first line of an exception's message; the name of its type if the message is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
