"""Optional libraries, which pyproject.toml lists as extras: a missing one is a UserError that says what to install."""

import contextlib
import importlib.util
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
            f"{place}: found no {missing}; expected what the extra pipejax[{name}] installs "
            f"(pip install 'pipejax[{name}]', or in a clone pip install -e '.[{name}]')"
        ) from error


def absent(error: ModuleNotFoundError) -> str:
    """The library that is not installed; "" if it is, and only a part of it is missing."""
    library = (error.name or "").partition(".")[0]
    return library if library and importlib.util.find_spec(library) is None else ""
