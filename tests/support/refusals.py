"""Assertions about a UserError by its place, so that tests do not depend on the words of messages."""

import contextlib
from collections.abc import Iterator

import pytest

from pipejax import UserError


@contextlib.contextmanager
def refuses(
    place: object, *texts: str, found: str = "", expected: str = ""
) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """A context that must raise a UserError of one line about a place, with the given texts.

    Args:
      place: the end of the error's place, such as "grid.delay"; "" if the texts name the place.
      texts: values and hints that the line contains. tests/messages.txt holds the wording of all messages.
      found: a part of the error's `found`.
      expected: a part of the error's `expected`.
    """
    with pytest.raises(UserError) as caught:
        yield caught
    error, line = caught.value, str(caught.value)
    assert "\n" not in line, line
    assert error.place.endswith(str(place)), f"place {error.place!r}, not {place!r}, in: {error}"
    assert found in (error.found or "") and expected in (error.expected or ""), line
    assert not [text for text in texts if text not in line], line
