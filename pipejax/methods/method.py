"""The interface of a method: one object from target to text.

A method says how a target is laid out for training, by which loss it is learned, which strategy decodes it, and how
rows and text are read off the result. It also names its abilities: a wish beyond them is refused in one line. The
trainer, the generator, the server and bulk decoding ask it, and none of them asks for its name or type.

A method of your own is a frozen dataclass in a file of your own: see docs/methods.md. Importing this room does not
import JAX: data are read without it. So what computes with JAX is imported when it is asked for.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypedDict

from pipejax import grid
from pipejax.methods.spelling import Spells
from pipejax.system.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from jax import Array

    from pipejax.decoding import Strategy
    from pipejax.model.backbone import Backbone

# What may be wished for beside plain decoding. Each is refused unless `Method.can` names it.
ABILITIES = {
    "sample": "draw tokens by a temperature",
    "score": "keep log-probabilities",
    "limit": "write tokens of the source alone",
    "unique": "leave out rows that repeat one above",
    "draft": "verify drafts",
    "stream": "show rows as they are written",
    "serve": "decode requests that come and go",
    "prefix": "begin a row as it is told",
    "rows": "begin several rows as they are told, or end after so many",
    "draw": "write rows that `pipejax picture` can draw",
    "probe": "lay targets out in rows that `pipejax probe` can hide from one another",
    "export": "write rows that are read without its class: those of the grid, from the first",
    "generate": "be written by transformers' generate",
}


class Ids(NamedTuple):
    """Token ids that a model gives a meaning."""

    bos: int  # the token that every row begins with
    eos: int  # the token that training writes at the end of a row
    other_ends: tuple[int, ...] = ()  # further tokens that end a row in decoding

    @classmethod
    def of(cls, backbone: "Backbone") -> "Ids":
        """The ids of a backbone."""
        eos, *others = backbone.end_token_ids
        return cls(backbone.decoder_start_token_id, eos, (*others,))

    @property
    def ends(self) -> tuple[int, ...]:
        """All tokens that end a row, `eos` first."""
        return self.eos, *self.other_ends


class RowPrefixes(NamedTuple):
    """The known part of the rows of an answer before it is written."""

    prefixes: tuple[str | Sequence[int], ...] = ()  # texts or ids with which they begin, in turn
    most: int | None = None  # after so many the answer ends; None: the model decides
    where: str = ""  # the place that says so, for messages


class Target(NamedTuple):
    """A target laid out for training."""

    flat: grid.Flat
    was_cut: bool = False  # rows or tokens of it are left out, as it is too long


class InTorch(TypedDict):
    """The settings with which `pipejax/convert/rows_in_torch.py` writes the answers of a method."""

    delay: int
    time_max: int
    sub_max: int
    literal: bool
    unique: bool
    row_names: Sequence[str]  # texts


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to write an answer; subclasses are frozen dataclasses whose fields are settings (`fields.setting`)."""

    name: ClassVar[str] = ""  # as commands and records call it
    can: ClassVar[frozenset[str]] = frozenset()  # of ABILITIES
    choices: ClassVar[int] = 0  # right tokens of a slot, if there are several: targets and weights are [N, choices]
    rival: ClassVar[str] = "sequential"  # the method whose steps for the same rows stand beside its own in reports
    parts_text: ClassVar[bool] = False  # whether rows are parts of one text, so that nobody knows their token ids

    @property
    def label(self) -> str:
        """The method as messages call it."""
        return f"{self.name} decoding"

    @property
    def about(self) -> str:
        """The sentence that tells people what a model that was trained for it writes."""
        return f"A T5 that was trained for {self.label}."

    @property
    def generated(self) -> str:
        """The sentence that says what transformers' `generate` writes with such a model."""
        return f"`generate` does not know {self.label}: what it writes means little."

    @property
    def in_torch(self) -> InTorch | None:
        """The settings with which transformers writes the same answers; None: nothing does."""
        return None

    @property
    def setting(self) -> str:
        """The setting by which it was asked for, for messages."""
        return f"strategy: found {self.name}"

    def check(self) -> None:
        """Raises a UserError if its settings contradict each other."""

    def check_text(self, spells: Spells) -> None:
        """Raises a UserError if rows cannot be read off an answer with this tokenizer."""

    def target(self, rows: Sequence[str], spells: Spells, ids: Ids, *, most: int, where: str) -> Target:
        """Lays the rows of a target out for training.

        Args:
          rows: texts.
          spells: gives the ids of a text, without special tokens.
          ids: the ids of bos and of the tokens that end a row.
          most: tokens, eos included, to which the target is cut.
          where: the example, for messages.

        Raises:
          UserError: these rows cannot be written.
        """
        raise NotImplementedError

    def rows_of(self, flat: grid.Flat, rows: Sequence[str], spells: Spells, ids: Ids) -> "np.ndarray":
        """i32 [N], the row of the answer to which each slot of a target belongs: that of the token it generates.

        Args:
          flat: of `target`.
          rows: texts.
          spells: gives the ids of a text, without special tokens.
          ids: the ids of bos and of the tokens that end a row.
        """
        return flat.row

    def most_slots(self, most: int) -> int:
        """Slots that a target of so many tokens takes at the most."""
        return 2 * most

    def loss(self, logits: "Array", targets: "Array", weights: "Array") -> "tuple[Array, Array]":
        """The loss of a part of a batch, summed, and what it is divided by: f32 scalars, which add up over parts.

        Args:
          logits: f32 [G, N, V].
          targets: i32 [G, N], or [G, N, choices].
          weights: f32 of the same shape, 0 at padding.
        """
        from pipejax.methods.losses import cross_entropy

        return cross_entropy(logits, targets, weights)

    def strategy(self, ids: Ids) -> "Strategy":
        """The strategy that decodes it; static under jit."""
        raise NotImplementedError

    def given(self, given: RowPrefixes) -> RowPrefixes:
        """The same with all that the method knows, such as names; raises a UserError if rows cannot begin so."""
        return given

    def exist(self, rows: int, most: int | None) -> int:
        """The number of rows of the grid that an answer has, of so many that began; `most`: as in `RowPrefixes`."""
        return rows

    def allowed(self, spells: Spells) -> list[int]:
        """Ids, other than end tokens, that an answer may contain even if its source does not."""
        return []

    def order(self, lengths: Sequence[int]) -> list[int]:
        """Which rows of the grid are the rows of an answer, in its order; `lengths`: tokens of each."""
        return [row for row, length in enumerate(lengths) if length]

    def read(self, texts: Sequence[str], separator: str) -> tuple[str, list[str]]:
        """The whole answer and its rows, from the texts of the rows in `order`."""
        return separator.join(text for text in texts if text.strip()), [*texts]

    def rival_steps(self, lengths: Sequence[int], *, separator: int) -> int:
        """Steps that `rival` would take for rows of so many tokens; `separator`: tokens of one."""
        return grid.sequential_steps(lengths, separator=separator)

    def learned(self) -> dict[str, object]:
        """The settings that weights learn, by key: with other values, what they write means little."""
        return {f"method.{field.name}": getattr(self, field.name) for field in dataclasses.fields(self)}

    def require(self, ability: str, wish: str = "", expected: object = "none") -> None:
        """Raises a UserError unless the method has the ability.

        Args:
          ability: one of ABILITIES.
          wish: the setting or request that needs it, as found; "": that it is this method.
          expected: in the place of the wish.
        """
        if ability not in self.can:
            if not wish:
                raise UserError(f"{self.setting}; expected another, since it does not {ABILITIES[ability]}")
            raise UserError(f"{wish} with {self.label}, which does not {ABILITIES[ability]}; expected {expected}")
