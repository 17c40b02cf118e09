"""Libraries that only part of the package needs: its extras, as pyproject.toml lists them."""

import contextlib
from collections.abc import Iterator

from pipejax.system.errors import UserError


@contextlib.contextmanager
def extra(name: str, place: object) -> Iterator[None]:
    """Around the import of libraries that belong to that extra; `place`: what needs them, for the error.

    Raises:
      UserError: one of them is not installed.
    """
    try:
        yield
    except ImportError as error:
        missing = (error.name or str(error)).partition(".")[0]
        raise UserError(
            f"{place}: found no {missing}; expected what the extra pipejax[{name}] installs (pip install {missing})"
        ) from error
