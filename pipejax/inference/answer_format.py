"""Answer formats: the interface of the core to forms that answers can have, such as objects of a JSON schema.

A format determines the rows of an answer and their first tokens, restricts the tokens of each row by a rule, and makes
the text of an answer from its rows. Formats of one kind are compiled by an `AnswerFormats`, which the core finds in
`registry.RULES`.
"""

import abc
import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from pipejax.config import Config
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import Rule, Strategy
from pipejax.methods import Method, RowPrefixes


class Effort(enum.Enum):
    """The work that compiling a format may take."""

    QUICK = "quick"  # enough for usual formats
    WHOLE = "whole"  # the most work that a format may need


class Uncompiled(Exception):
    """The format is not compiled, or could not be compiled with the given effort."""


@dataclasses.dataclass(frozen=True)
class FormatRow:
    """A row of the answers of a format."""

    name: str
    beginning: tuple[int, ...]  # the first tokens of the row
    value: Callable[[str], object]  # maps the text of the row, without its beginning, to its value


@dataclasses.dataclass(frozen=True, eq=False)
class AnswerFormat(abc.ABC):
    """A format, compiled for a tokenizer and for names of rows. Two formats are equal only if they are one object."""

    label: ClassVar[str] = "an answer format"  # the kind of format in messages, with its article

    where: str  # the place of the format in messages: a file, or the name of an argument
    text: str  # the definition of the format; equal texts define the same format
    names: tuple[str, ...]  # the names of the rows, in the order in which the text of an answer contains them
    rows: tuple[FormatRow, ...]  # the rows, in the order of the grid

    @property
    def prefixes(self) -> RowPrefixes:
        """The number of rows and their beginnings, which are known before decoding."""
        return RowPrefixes(tuple(row.beginning for row in self.rows), len(self.rows), self.where)

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """The number of the row of each part of the text, in the order of the text."""
        numbers = {row.name: i for i, row in enumerate(self.rows)}
        return tuple(numbers[name] for name in self.names)

    @property
    @abc.abstractmethod
    def program_label(self) -> str:
        """The size of the rule, in words for a log. Formats with the same words share compiled programs."""

    @abc.abstractmethod
    def check(self, method: Method, config: Config) -> None:
        """Raises a UserError if answers of the method cannot have the format with these settings."""

    @abc.abstractmethod
    def rule(self, strategy: Strategy, bounds: Sequence[int | None]) -> Rule:
        """Returns the rule of a batch.

        Args:
          strategy: the strategy.
          bounds: the most tokens of a row, including its beginning and end token, for each of the B examples; None: the
            bounds of the grid.

        Raises:
          UserError: a row cannot end within its bound.
        """

    @abc.abstractmethod
    def part(self, place: int, tokens: Sequence[int]) -> str:
        """Returns a part of the text of an answer; the text is the parts of all rows, in the order of `names`.

        Args:
          place: the index into `names`.
          tokens: all tokens of the row, including its beginning, without the end token.
        """

    def dump(self, rows: Sequence[Sequence[int]]) -> str:
        """Returns the text of an answer, from the tokens of each row of the grid."""
        return "".join(self.part(place, rows[row]) for place, row in enumerate(self.order))


class AnswerFormats(abc.ABC):
    """Compiles the formats of one kind, and keeps the latest ones. Thread-safe."""

    @abc.abstractmethod
    def find(
        self,
        given: Mapping[str, object] | str | Path,
        method: Method,
        strategy: Strategy,
        config: Config,
        tokenizer: Tokenizer | None,
        *,
        effort: Effort | None = Effort.WHOLE,
        pause: Callable[[], None] | None = None,
    ) -> AnswerFormat:
        """Returns a compiled format.

        Args:
          given: the definition of the format, or the path of its file.
          method: the method of the answers.
          strategy: the strategy of the method.
          config: the settings.
          tokenizer: the tokenizer, if there is one.
          effort: the work that compiling may take; None: a format is only returned if it is compiled already.
          pause: a function that is called from time to time while a format is compiled, to let other threads work.

        Raises:
          Uncompiled: the format is new and `effort` is None, or more work than `effort` is needed.
          UserError: the format is not valid, or answers of the method cannot have it.
        """

    @abc.abstractmethod
    def usual(self, size: int) -> AnswerFormat:
        """Returns a format for a vocabulary of `size` tokens whose rule has the size of common ones.

        It is used to compile programs before a request arrives.
        """
