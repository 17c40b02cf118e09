"""The sequential method: the decoder generates the whole answer as one row, in which separators divide its rows.

`SequentialMethod` decodes greedily or by sampling, `Beams` by beam search.
"""

import dataclasses
import itertools
import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pipejax import grid
from pipejax.config import GRID, Config
from pipejax.methods.method import Ids, Method, Target
from pipejax.methods.spelling import Spells, spell
from pipejax.system.errors import UserError

if TYPE_CHECKING:
    from pipejax.decoding import Strategy

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SequentialMethod(Method):
    """The ordinary decoder of T5, the paper's baseline."""

    max_length: int  # the most tokens of an answer, eos included
    separator: str  # the text between the rows of a target
    delay: int  # the delay of the pipelined decoder with which reports compare numbers of steps

    name: ClassVar[str] = "sequential"
    can: ClassVar[frozenset[str]] = frozenset(
        (
            *("sample", "score", "limit", "rules", "unique", "draft", "stream", "serve", "prefix", "export"),
            *("generate", "probe"),
        )
    )
    baseline: ClassVar[str] = "pipelined"
    parts_text: ClassVar[bool] = True

    @classmethod
    def of(cls, config: Config) -> "SequentialMethod":
        """Returns the method with the settings of a config."""
        return cls(config.decode.max_length, config.data.separator, config.grid.delay)

    @property
    def about(self) -> str:
        """See `Method`. The sentence contains the separator."""
        between = self.separator
        separated = (
            f"Its rows are separated by {between!r}."
            if tells_rows_apart(between)
            else "Its rows are joined without a separator, so they cannot be distinguished."
        )
        return f"A T5 that was trained to write an answer in one piece. {separated}"

    @property
    def generated(self) -> str:
        """See `Method`. `generate` writes the whole answer."""
        return "`generate` writes the whole answer."

    def check_text(self, spells: Spells) -> None:
        """Raises a UserError if encoding and decoding lose the separator, since rows could not be split again."""
        between = self.separator
        if (
            tells_rows_apart(between)
            and len(split_rows(spells.decode(spells.encode(f"the{between}the")), between)) != 2
        ):
            raise UserError(
                "data.separator",
                found=f"{between!r}, which this tokenizer does not decode unchanged",
                expected="a text that it decodes unchanged, or spaces if rows need not be distinguished",
            )

    def target(self, rows: Sequence[str], spells: Spells, ids: Ids, *, most: int, where: str) -> Target:
        """See `Method`. The rows are joined into one row of the grid.

        If the joined text exceeds `most` tokens, the last rows are left out, and the slot after the kept rows has
        weight 0.
        """
        kept = [row for row in rows if not spells.vanishes(row, ids.ends)]
        joined, cut = _join(kept, lambda text: spell([text], spells, ids.ends)[0], self.separator, most - 1)
        flat = grid.flatten([joined[: most - 1]], delay=1, bos=ids.bos, eos=ids.eos, final=False)
        if cut:
            flat.weights[-1] = 0.0  # the data does not contain an eos at this place
        return Target(flat, cut)

    def most_slots(self, most: int) -> int:
        """See `Method`. A target has one slot for each token."""
        return most

    def rows_of(self, flat: grid.Flat, rows: Sequence[str], spells: Spells, ids: Ids) -> np.ndarray:
        """See `Method`. The tokens of a separator belong to the row before it.

        The slot that feeds the last token of a separator generates the first token of the next row, so it belongs to
        the next row, like the slot that feeds bos on a grid.
        """
        kept, whole = [row for row in rows if not spells.vanishes(row, ids.ends)], flat.targets.tolist()
        starts = []
        for count in range(1, len(kept)):
            begun = spell([self.separator.join(kept[:count]) + self.separator], spells, ids.ends)[0]
            same = [a == b for a, b in zip(begun, whole, strict=False)]
            # A token that contains the end of one row and the beginning of the next belongs to the next row.
            starts.append(same.index(False) if False in same else len(same))
        return np.searchsorted(starts, np.arange(len(whole)), side="right").astype(np.int32)

    def strategy(self, ids: Ids) -> "Strategy":
        """Returns the strategy of greedy decoding, `Sequential`."""
        from pipejax.decoding.grid_strategy import Sequential

        return Sequential(self.max_length, ids.bos, ids.eos, ids.other_ends)

    def end_repetitions(self, strategy: "Strategy", spells: Spells) -> "tuple[Strategy, str]":
        """See `Method`. The separator must be a single token, to which only spaces may be added."""
        from pipejax.decoding.grid_strategy import Sequential

        assert isinstance(strategy, Sequential), "`Beams` lacks the ability"
        letter, begun, whole = self._encoded(spells)
        # After the separator's own tokens, the encodings may differ by a space that belongs to the next row.
        same = [a == b for a, b in zip(begun, whole, strict=False)]
        own, core = whole[len(letter) : [*same, False].index(False)], self.separator.strip(" ")
        # The token is decoded between two letters, because `decode` strips line breaks from the ends of a text.
        alone = spells.decode(letter)
        decoded = spells.decode([*letter, *own, *letter]).removeprefix(alone).removesuffix(alone).strip(" ")
        if not core or len(own) != 1 or decoded != core:
            return strategy, f"data.separator {self.separator!r} is not a single token of this tokenizer"
        return strategy.replace(separator=own[0]), ""

    def extra_allowed_ids(self, spells: Spells) -> list[int]:
        """See `Method`. These are the ids of the separator between two rows."""
        letter, begun, whole = self._encoded(spells)
        if begun[: len(letter)] != letter or whole[: len(letter)] != letter:
            return whole
        # If a separator ends within a word, the row after it has other ids than at the beginning of a text. So the
        # separator's ids are found from the text before it, not from the text after it.
        parts = begun[len(letter) :]
        joined = whole[: len(begun)] != begun  # the end of the separator and the next row share a token
        return [*dict.fromkeys(parts + whole[len(letter) :])] if joined else parts

    def _encoded(self, spells: Spells) -> tuple[list[int], list[int], list[int]]:
        """Returns the ids of a letter, of a letter before the separator, and of two letters around the separator."""
        between = self.separator
        return spells.encode("a"), spells.encode(f"a{between}"), spells.encode(f"a{between}a")

    def order(self, lengths: Sequence[int]) -> list[int]:
        """Returns [0], the only row of the grid, even if this row is empty."""
        return [0]

    def read(self, texts: Sequence[str], separator: str) -> tuple[str, list[str]]:
        """Returns the decoded text without changes, and the rows into which the separator splits it."""
        return texts[0], split_rows(texts[0], separator)

    def baseline_steps(self, lengths: Sequence[int], *, separator: int) -> int:
        """Returns the number of steps of Algorithm 1 without bounds on rows and times."""
        return grid.pipelined_steps(lengths, delay=self.delay, sub_max=GRID, time_max=GRID**2)

    def learned(self) -> dict[str, object]:
        """Returns no settings, since `max_length` may differ from training."""
        return {}


@dataclasses.dataclass(frozen=True)
class Beams(SequentialMethod):
    """Beam search, the stronger baseline."""

    beams: int = 2  # the number of hypotheses
    length_penalty: float = 1.0  # the exponent p of the score log-probability / length**p

    can: ClassVar[frozenset[str]] = frozenset(("export", "generate"))

    @property
    def label(self) -> str:
        """See `Method`. Messages name beam search by its setting."""
        return f"decode.beams = {self.beams}"

    @property
    def setting(self) -> tuple[str, str]:
        """See `Method`. Beam search is selected by `decode.beams`."""
        return "decode.beams", f"{self.beams}"

    def strategy(self, ids: Ids) -> "Strategy":
        """Returns the strategy of beam search, `Beam`."""
        from pipejax.decoding.beam import Beam

        return Beam(self.max_length, self.beams, self.length_penalty, ids.bos, ids.eos, ids.other_ends)


def tells_rows_apart(separator: str) -> bool:
    """Returns whether rows joined with a separator can be split again. Rows joined with only spaces cannot."""
    return bool(separator.strip(" "))


def split_rows(text: str, separator: str) -> list[str]:
    """Splits a decoded sequential answer into its rows. If the separator has only spaces, the whole text is one row."""
    if not tells_rows_apart(separator):
        return [text] if text else []
    parts = re.split(separator_pattern(separator), text)
    return [row for row in map(str.strip, parts) if row]


def joined_change(rows: Sequence[str], spells: Spells, separator: str) -> tuple[str, str] | None:
    """Finds a row that changes when the rows are joined, encoded, decoded and split again.

    Rows are compared with their texts after encoding and decoding each row alone. Differences in white space are
    ignored.

    Returns:
      The first row that changes and the row found in its place; None if no row changes. If there are fewer rows before
      or after the change, the missing row is "".
    """
    kept = [row for row in rows if not spells.vanishes(row)]
    if not kept or not tells_rows_apart(separator):
        return None
    texts = map(spells.decode, spell([*kept, separator.join(kept)], spells, spells.eos))
    *alone, whole = (" ".join(text.split()) for text in texts)
    before, after = [text for text in alone if text], [" ".join(text.split()) for text in split_rows(whole, separator)]
    return next((pair for pair in itertools.zip_longest(before, after, fillvalue="") if pair[0] != pair[1]), None)


def separator_pattern(separator: str) -> str:
    """Returns a regular expression for the separator in decoded text.

    Tokenizers may change or drop the spaces around the separator.
    """
    core = separator.strip(" ")
    before = r"(?:^| +|(?<= ))" if separator.startswith(" ") else ""
    after = r"(?:$| +)" if separator.endswith(" ") else ""
    return before + re.escape(core) + after


def _join(rows: Sequence[str], spell: Callable[[str], list[int]], separator: str, most: int) -> tuple[list[int], bool]:
    """Joins as many of the first rows as fit into `most` token ids, but at least one row.

    Returns:
      The ids of the joined text, and whether rows were left out.
    """

    def joined(count: int) -> list[int]:
        return spell(separator.join(rows[:count]))

    whole = joined(len(rows))
    if len(whole) <= most:
        return whole, False
    fit, beyond = 1, len(rows)  # bisection, because each attempt encodes the joined text again
    while beyond - fit > 1:
        middle = (fit + beyond) // 2
        fit, beyond = (middle, beyond) if len(joined(middle)) <= most else (fit, middle)
    return joined(fit), True
