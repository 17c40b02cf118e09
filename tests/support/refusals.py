"""Assertions about a UserError by its place, so that tests do not depend on the words of messages."""

import contextlib
from collections.abc import Iterator

import pytest

from pipejax import UserError


@contextlib.contextmanager
def refuses(place: object, *, found: str = "", expected: str = "") -> Iterator[pytest.ExceptionInfo[UserError]]:
    """A block that must raise a UserError whose place ends with `place`, and whose parts contain the given texts."""
    with pytest.raises(UserError) as caught:
        yield caught
    error = caught.value
    assert error.place.endswith(str(place)), f"place {error.place!r}, not {place!r}, in: {error}"
    assert found in (error.found or "") and expected in (error.expected or ""), str(error)
