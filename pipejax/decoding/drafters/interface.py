"""The questions to a drafter, and its answers. It never sees the model.

Shapes: B batch, L source length, R rows of the grid, T the most tokens of a row, D the most drafted tokens.
"""

from typing import Protocol, runtime_checkable

import flax.struct

from pipejax.decoding.interface import Array, Model, SourceIds
from pipejax.decoding.rows import Rows
from pipejax.system import Tree


@flax.struct.dataclass
class Written:
    """The rows as far as they are written when drafts are asked for."""

    tokens: Array  # i32 [B, R, T], of each row, without bos and with the end token of an ended one; 0 beyond `length`
    length: Array  # i32 [B, R], how many
    guesses: Array  # i32 [B, R, D], the model's answers at places after `length`, of the call before this one
    guessed: Array  # i32 [B, R], how many; they rest on tokens that proved wrong, or whose rows above were not known


@flax.struct.dataclass
class Draft:
    """The tokens by which each row may go on. Drafts for rows that have ended or cannot begin are ignored."""

    tokens: Array  # i32 [B, R, D]; an end token is a guess as well, and ends the draft
    count: Array  # i32 [B, R], how many count
    trust: Array  # i32 [B, R], index into `odds`


class Drafter(Protocol):
    """Guesses how rows go on. A frozen dataclass, static under jit; its state is a pytree of fixed shapes."""

    @property
    def odds(self) -> tuple[float, ...]:
        """By degree of trust: how often a drafted token may be right. It only says where learning this begins."""

    def init(self, source: SourceIds, rows: int) -> Tree:
        """The state before the first call."""

    def propose(self, state: Tree, written: Written, most: int) -> tuple[Tree, Draft]:
        """Drafts of D = `most` tokens at the most for every row; traced."""


@runtime_checkable
class Borrower(Protocol):
    """A drafter that is a model itself, and borrows its decoder of each batch."""

    def over(self, decoder: Model[Tree], grid: Rows, most: int, *, queries: tuple[int, ...], batch: int) -> Drafter:
        """The drafter for one batch; arguments as of `FromModel.over`."""
