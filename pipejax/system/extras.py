"""Optional libraries, which pyproject.toml lists as extras: a missing one is a UserError that says what to install."""

import contextlib
from collections.abc import Iterator

from pipejax.system.errors import UserError


@contextlib.contextmanager
def extra(name: str, place: object) -> Iterator[None]:
    """A block that imports libraries of the extra `name`; the error begins with `place`, the user of the libraries.

    Raises:
      UserError: a library is not installed.
    """
    try:
        yield
    except ImportError as error:
        missing = (error.name or str(error)).partition(".")[0]
        raise UserError(
            f"{place}: found no {missing}; expected what the extra pipejax[{name}] installs (pip install {missing})"
        ) from error
