"""The interface of a method: one object that covers all steps from target to text.

A method lays a target out for training, defines the loss, makes the strategy that decodes, and reads rows and text from
the decoded tokens. A method also declares its abilities; a request that needs another ability raises a one-line
UserError. The trainer, the generator, the server and bulk decoding use only this interface: their code does not depend
on the name or type of a method.

A custom method is a frozen dataclass in a file outside pipejax: see docs/methods.md. Importing this package does not
import JAX, because the data pipeline runs without it. Functions that need JAX import it when they are called.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict

from pipejax import grid
from pipejax.methods.spelling import Spells
from pipejax.system.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from jax import Array

    from pipejax.decoding import Strategy
    from pipejax.model.backbone import Backbone


class Ability(NamedTuple):
    """An ability beyond plain decoding, and its requirements on the strategy of the method."""

    does: str  # the verb phrase that error messages use
    by_place: bool = False  # whether the ability locates tokens by the row and time of a query
    grows: bool = False  # whether the ability reads unfinished rows, to which tokens may only be appended
    needs: tuple[str, ...] = ()  # attributes of the strategy that not every strategy has


# The abilities by name. A request that needs an ability raises a UserError unless `Method.can` contains the name.
ABILITIES = {
    "sample": Ability("sample tokens"),
    "score": Ability("return log-probabilities", by_place=True),
    "limit": Ability("restrict answers to tokens of the source"),
    "rules": Ability("change logits by the tokens of an answer", by_place=True),
    "unique": Ability("end an answer whose rows repeat"),
    "draft": Ability("verify drafts", needs=("on_grid", "cut")),
    "prefix": Ability("support row prefixes", by_place=True),
    "rows": Ability("support several row prefixes or a given number of rows", by_place=True),
    "stream": Ability("stream rows", by_place=True, grows=True, needs=("stop",)),
    "serve": Ability("decode requests that join and leave a batch", by_place=True, grows=True, needs=("stop",)),
    "draw": Ability("write rows that `pipejax picture` can draw"),
    "probe": Ability("lay targets out in rows that `pipejax probe` can hide from one another"),
    "export": Ability("write rows that can be read without its class"),
    "generate": Ability("write answers that transformers' generate also writes"),
}

# The present names of attributes of `Method`, by former names that subclasses may define until the next release.
FORMER = {
    "given": "add_prefixes",
    "exist": "count_rows",
    "allowed": "extra_allowed_ids",
    "rival": "baseline",
    "rival_steps": "baseline_steps",
}


class Ids(NamedTuple):
    """The ids of the special tokens of a model."""

    bos: int  # the token with which every row begins
    eos: int  # the token that training puts at the end of a row
    other_ends: tuple[int, ...] = ()  # further tokens that end a row in decoding

    @classmethod
    def of(cls, backbone: "Backbone") -> "Ids":
        """Returns the ids of a backbone."""
        eos, *others = backbone.end_token_ids
        return cls(backbone.decoder_start_token_id, eos, (*others,))

    @property
    def ends(self) -> tuple[int, ...]:
        """All tokens that end a row, `eos` first."""
        return self.eos, *self.other_ends


class RowPrefixes(NamedTuple):
    """The part of an answer's rows that is given before decoding."""

    prefixes: tuple[str | Sequence[int], ...] = ()  # the text or ids with which each row begins, from the first row on
    most: int | None = None  # the number of rows after which the answer ends; None: the model decides
    where: str = ""  # the setting or field that gave the prefixes, for messages


class Target(NamedTuple):
    """A target laid out for training."""

    flat: grid.Flat
    was_cut: bool = False  # whether rows or tokens were left out because the target was too long


class InTorch(TypedDict):
    """The settings with which `pipejax/convert/rows_in_torch.py` generates the same answers as a method."""

    delay: int
    time_max: int
    sub_max: int
    literal: bool
    unique: bool
    row_names: Sequence[str]  # the texts of the names


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to generate an answer. Subclasses are frozen dataclasses whose fields are settings (`fields.setting`)."""

    name: ClassVar[str] = ""  # the name in commands and records
    can: ClassVar[frozenset[str]] = frozenset()  # the abilities, a subset of ABILITIES
    choices: ClassVar[int] = 0  # number of target tokens of a slot; targets and weights are [N, choices], or [N] if 0
    baseline: ClassVar[str] = "sequential"  # the method with which reports compare this method's number of steps
    parts_text: ClassVar[bool] = False  # whether rows are parts of one decoded text, so that a row has no token ids

    def __init_subclass__(cls, **options: Any) -> None:
        """Lets a subclass define attributes by their former names, with a warning, and call them on its base class."""
        super().__init_subclass__(**options)
        for former, name in FORMER.items():
            # The class itself or a mixin that is not a method; other bases were bridged when they were defined.
            owners = [kind for kind in cls.__mro__ if kind is cls or not issubclass(kind, Method)]
            if any(name in vars(kind) for kind in owners):
                setattr(cls, former, inspect.getattr_static(cls, name))
            elif any(former in vars(kind) for kind in owners):
                line = f"{cls.__name__}.{former} is now {name}; the former name will be removed in the next release"
                warnings.warn(line, DeprecationWarning, stacklevel=2)
                setattr(cls, name, inspect.getattr_static(cls, former))

    @property
    def label(self) -> str:
        """The noun phrase by which messages name the method."""
        return f"{self.name} decoding"

    @property
    def about(self) -> str:
        """The sentence of a model card that describes the output of a model trained with the method."""
        return f"A T5 that was trained for {self.label}."

    @property
    def generated(self) -> str:
        """The sentence of a model card that describes the output of transformers' `generate` for such models."""
        return f"`generate` does not support {self.label}; its output will be wrong."

    @property
    def in_torch(self) -> InTorch | None:
        """The settings with which `rows_in_torch.py` generates the same answers; None: it cannot generate them."""
        return None

    @property
    def setting(self) -> tuple[str, str]:
        """The setting that selects the method, and its value, for messages."""
        return "method", self.name

    def check(self) -> None:
        """Raises a UserError if settings of the method contradict each other."""

    def check_text(self, spells: Spells) -> None:
        """Raises a UserError if the rows of an answer cannot be recovered from its text with the tokenizer `spells`."""

    def target(self, rows: Sequence[str], spells: Spells, ids: Ids, *, most: int, where: str) -> Target:
        """Lays the rows of a target out for training.

        Args:
          rows: the texts of the rows.
          spells: the tokenizer, which encodes text without special tokens.
          ids: the ids of bos and of the tokens that end a row.
          most: the number of tokens, eos included, to which the target is cut.
          where: the name of the example, for messages.

        Raises:
          UserError: the method cannot generate these rows.
        """
        raise NotImplementedError

    def rows_of(self, flat: grid.Flat, rows: Sequence[str], spells: Spells, ids: Ids) -> "np.ndarray":
        """Returns i32 [N], the row of the answer to which the token generated at each slot of a target belongs.

        Args:
          flat: the layout of the target, from `target`.
          rows: the texts of the rows.
          spells: the tokenizer, which encodes text without special tokens.
          ids: the ids of bos and of the tokens that end a row.
        """
        return flat.row

    def most_slots(self, most: int) -> int:
        """Returns the largest number of slots of a target of `most` tokens, eos tokens included."""
        return 2 * most

    def loss(self, logits: "Array", targets: "Array", weights: "Array") -> "tuple[Array, Array]":
        """Computes the loss of a part of a batch. The default is `losses.cross_entropy` (paper section 3.3, eq. 6).

        Args:
          logits: f32 [G, N, V].
          targets: i32 [G, N], or [G, N, choices].
          weights: f32 of the same shape, 0 at padding.

        Returns:
          Two f32 scalars, the summed loss and its divisor. The trainer adds each of them over the parts of a batch, and
          then divides the sums.
        """
        from pipejax.methods.losses import cross_entropy

        return cross_entropy(logits, targets, weights)

    def strategy(self, ids: Ids) -> "Strategy":
        """Returns the decoding strategy of the method: a hashable object, static under jit."""
        raise NotImplementedError

    def add_prefixes(self, given: RowPrefixes) -> RowPrefixes:
        """Adds prefixes that the method defines, such as row names, to the prefixes given by a source.

        Raises:
          UserError: rows cannot begin with these prefixes.
        """
        return given

    def count_rows(self, rows: int, most: int | None) -> int:
        """Returns the number of rows of the grid that belong to an answer.

        Args:
          rows: R, the number of rows of the grid.
          most: the number of given rows, as in `RowPrefixes`.
        """
        return rows

    def end_repetitions(self, strategy: "Strategy", spells: Spells) -> "tuple[Strategy, str]":
        """Returns the strategy whose answers end when their rows repeat, for `decode.unique_rows`, and "".

        A method that splits a text into rows (`parts_text`) may be unable to end answers in this way. It then returns
        the unchanged strategy and the reason.
        """
        return strategy, ""

    def extra_allowed_ids(self, spells: Spells) -> list[int]:
        """Returns the ids, other than end tokens, that an answer may contain even if its source does not."""
        return []

    def order(self, lengths: Sequence[int]) -> list[int]:
        """Returns the indices of the grid rows that are the rows of an answer, in the order of the answer.

        Args:
          lengths: the number of tokens of each grid row, without end tokens.
        """
        return [row for row, length in enumerate(lengths) if length]

    def read(self, texts: Sequence[str], separator: str) -> tuple[str, list[str]]:
        """Returns the text of an answer and the texts of its rows.

        Args:
          texts: the texts of the grid rows that `order` selects, in its order.
          separator: the text that joins rows, `data.separator`.
        """
        return separator.join(text for text in texts if text.strip()), [*texts]

    def baseline_steps(self, lengths: Sequence[int], *, separator: int) -> int:
        """Returns the number of steps that the method `baseline` would take for the same rows.

        Args:
          lengths: the number of tokens of each row, without end tokens.
          separator: the number of tokens of a separator.
        """
        return grid.sequential_steps(lengths, separator=separator)

    def learned(self) -> dict[str, object]:
        """Returns the settings that the weights have learned, by key: decoding with other values gives poor output."""
        return {f"method.{field.name}": getattr(self, field.name) for field in dataclasses.fields(self)}

    def require(self, ability: str, place: str = "", found: str = "", expected: object = "none") -> None:
        """Raises a UserError unless the method has the ability.

        Args:
          ability: one of ABILITIES.
          place: the setting or request that needs the ability, for the error; "": the choice of this method.
          found: the value of the setting or request.
          expected: a value that does not need the ability.
        """
        if ability not in self.can:
            lacks = f"not {ABILITIES[ability].does}"
            if not place:
                place, found = self.setting
                raise UserError(place, found=found, expected=f"another value, since {self.label} does {lacks}")
            raise UserError(place, found=f"{found} with {self.label}, which does {lacks}", expected=f"{expected}")

    # The former names, which subclasses may also call on their base class; see `__init_subclass__`.
    given, exist, allowed = add_prefixes, count_rows, extra_allowed_ids
    rival, rival_steps = baseline, baseline_steps
