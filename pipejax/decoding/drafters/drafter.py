"""The interface of drafters: the rows that a drafter is given, and the drafts that it returns.

Shapes: B batch, L source length, R rows of the grid, T the most tokens of a row, D the most drafted tokens.
"""

from typing import Protocol, runtime_checkable

import flax.struct

from pipejax.decoding.rows import Rows
from pipejax.decoding.strategy import Array, Model, SourceIds
from pipejax.system import Tree


@flax.struct.dataclass
class Written:
    """The tokens of the rows that are generated so far."""

    tokens: Array  # i32 [B, R, T], the tokens of each row, without bos, with its end token; 0 beyond `length`
    length: Array  # i32 [B, R], number of tokens
    guesses: Array  # i32 [B, R, D], the model's tokens of the previous call for the places from `length` on
    guessed: Array  # i32 [B, R], number of guesses; the model generated them from rejected tokens, so they may be wrong


@flax.struct.dataclass
class Draft:
    """The drafted next tokens of each row. Drafts for rows that have ended or cannot begin are ignored."""

    tokens: Array  # i32 [B, R, D]; an end token may be drafted too, and ends the draft
    count: Array  # i32 [B, R], number of drafted tokens
    trust: Array  # i32 [B, R], index into `odds`


class Drafter(Protocol):
    """Guesses the next tokens of rows. A frozen dataclass, static under jit; its state is a pytree of fixed shapes."""

    @property
    def odds(self) -> tuple[float, ...]:
        """The prior probability, for each degree of trust, that a drafted token is right."""

    def init(self, source: SourceIds, rows: int) -> Tree:
        """The state before the first call, for a grid of `rows` rows."""

    def propose(self, state: Tree, written: Written, most: int) -> tuple[Tree, Draft]:
        """The new state, and a draft of at most D = `most` tokens for every row; traced."""


@runtime_checkable
class Borrower(Protocol):
    """A drafter with a model, whose decoder has to be bound for each batch."""

    def over(self, decoder: Model[Tree], grid: Rows, most: int, *, queries: tuple[int, ...], batch: int) -> Drafter:
        """The drafter for one batch; see `FromModel.over`."""
