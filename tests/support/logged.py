"""The log of pipejax, as lines of the command line."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pipejax.system.cli import line_of


@contextmanager
def logged() -> Iterator[list[str]]:
    """A context with a list, to which each logged line is appended."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(line_of(record))  # type: ignore[method-assign]
    logger = logging.getLogger("pipejax")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
