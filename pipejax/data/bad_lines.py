"""Lines that cannot be used: the first one ends the work, or all are left out, counted, and named."""

import logging
from collections.abc import Callable

from pipejax.system.errors import UserError

logger = logging.getLogger(__name__)

SHOWN = 10  # errors that are logged; the others are counted
Refusal = Callable[[UserError], None]  # takes the error of a line, and raises it or not


def refuse(error: UserError) -> None:
    """Raises the error: no line may be left out."""
    try:
        raise error
    finally:
        del error  # else it would hold its own traceback, and with that open files


class BadLines:
    """The lines of an input that are left out; without `skip` the first one is refused."""

    def __init__(self, where: str, *, skip: bool, most: int = SHOWN, tell: bool = True) -> None:
        """None yet.

        Args:
          where: the input, for people.
          skip: whether lines may be left out.
          most: how many errors are kept as `messages`; all are counted.
          tell: whether the first SHOWN are logged as they come.
        """
        self.where, self.skip, self.most, self.tell = where, skip, most, tell
        self.count, self.messages = 0, list[str]()

    def __call__(self, error: UserError) -> None:
        """Leaves a line out, or raises its error."""
        if not self.skip:
            try:
                raise error
            finally:
                del error  # as in `refuse`
        self.count += 1
        if self.count <= self.most:
            self.messages.append(str(error))
        if self.tell and self.count <= SHOWN:
            logger.warning(f"{error}; skipped")

    def end(self, kept: int) -> None:
        """Says how many were left out of an input of which so many lines were kept.

        Raises:
          UserError: none was kept.
        """
        if self.count and not kept:
            raise UserError(f"{self.where}: found {self.count} bad lines and no good one; first {self.messages[0]}")
        if self.count:
            logger.warning(f"{self.where}: {self.count} bad lines skipped, {kept} good ones kept")
