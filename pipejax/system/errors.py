"""The one exception that is meant for the person at the keyboard, and others that say what people can mend."""

import re

_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory|bad_alloc|failed to allocate", re.IGNORECASE)


class UserError(Exception):
    """Bad input. The message is one line: where it is (file, line or key), what was found, what was expected."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: Python's, or that of a device by what XLA's RuntimeError says of it."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    )


def first_line(error: BaseException) -> str:
    """What an exception says, in one line; its type if it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
