"""Token by token: the whole answer is one row, in which a separator parts its rows. Greedily, or by beam search."""

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
    """The ordinary decoder of T5, the baseline."""

    max_length: int  # tokens of an answer, eos included
    separator: str  # between the rows of a target
    delay: int  # of the pipelined decoder whose steps are reported beside

    name: ClassVar[str] = "sequential"
    can: ClassVar[frozenset[str]] = frozenset(
        ("sample", "score", "limit", "unique", "draft", "stream", "serve", "prefix", "export", "generate", "probe")
    )
    rival: ClassVar[str] = "pipelined"
    parts_text: ClassVar[bool] = True

    @classmethod
    def of(cls, config: Config) -> "SequentialMethod":
        """With the settings of a config."""
        return cls(config.decode.max_length, config.data.separator, config.grid.delay)

    @property
    def about(self) -> str:
        """In one piece."""
        between = self.separator
        parted = (
            f"Its rows are parted by {between!r}." if tells_rows_apart(between) else "Nothing tells its rows apart."
        )
        return f"A T5 that was trained to write an answer in one piece. {parted}"

    @property
    def generated(self) -> str:
        """All of it."""
        return "`generate` writes the whole answer."

    def check_text(self, spells: Spells) -> None:
        """A target can be taken apart again only if the tokenizer knows what parts its rows."""
        between = self.separator
        if (
            tells_rows_apart(between)
            and len(split_rows(spells.decode(spells.encode(f"the{between}the")), between)) != 2
        ):
            raise UserError(
                f"data.separator: found {between!r}, which this tokenizer does not give back; expected text that it "
                "does, or spaces where rows need not be told apart"
            )

    def target(self, rows: Sequence[str], spells: Spells, ids: Ids, *, most: int, where: str) -> Target:
        """One row. If it is too long, its last rows are left out, and the end after them is not learned."""
        kept = [row for row in rows if not spells.vanishes(row, ids.ends)]
        joined, cut = _join(kept, lambda text: spell([text], spells, ids.ends)[0], self.separator, most - 1)
        flat = grid.flatten([joined[: most - 1]], delay=1, bos=ids.bos, eos=ids.eos, final=False)
        if cut:
            flat.weights[-1] = 0.0  # what follows is not in the data
        return Target(flat, cut)

    def most_slots(self, most: int) -> int:
        """One a token."""
        return most

    def rows_of(self, flat: grid.Flat, rows: Sequence[str], spells: Spells, ids: Ids) -> np.ndarray:
        """A separator ends the row before it. Its last token is fed where the next row begins, as bos of a grid is."""
        kept, whole = [row for row in rows if not spells.vanishes(row, ids.ends)], flat.targets.tolist()
        starts = []
        for count in range(1, len(kept)):
            begun = spell([self.separator.join(kept[:count]) + self.separator], spells, ids.ends)[0]
            same = [a == b for a, b in zip(begun, whole, strict=False)]
            starts.append(same.index(False) if False in same else len(same))  # a token of both rows is the later's
        return np.searchsorted(starts, np.arange(len(whole)), side="right").astype(np.int32)

    def strategy(self, ids: Ids) -> "Strategy":
        """Greedy decoding."""
        from pipejax.decoding.grid_strategy import Sequential

        return Sequential(self.max_length, ids.bos, ids.eos, ids.other_ends)

    def allowed(self, spells: Spells) -> list[int]:
        """Those that part rows."""
        between = self.separator
        letter, begun, whole = (spells.encode(text) for text in ("a", f"a{between}", f"a{between}a"))
        if begun[: len(letter)] != letter or whole[: len(letter)] != letter:
            return whole
        # What follows has other ids after a separator that ends within a word, so it is told by what comes before.
        parts = begun[len(letter) :]
        joined = whole[: len(begun)] != begun  # its end becomes one token with what follows
        return [*dict.fromkeys(parts + whole[len(letter) :])] if joined else parts

    def order(self, lengths: Sequence[int]) -> list[int]:
        """The only row, even if it is empty."""
        return [0]

    def read(self, texts: Sequence[str], separator: str) -> tuple[str, list[str]]:
        """The text as it is, and its parts."""
        return texts[0], split_rows(texts[0], separator)

    def rival_steps(self, lengths: Sequence[int], *, separator: int) -> int:
        """Algorithm 1 without bounds."""
        return grid.pipelined_steps(lengths, delay=self.delay, sub_max=GRID, time_max=GRID**2)

    def learned(self) -> dict[str, object]:
        """None: bounds may be others."""
        return {}


@dataclasses.dataclass(frozen=True)
class Beams(SequentialMethod):
    """Beam search, the stronger baseline."""

    beams: int = 2  # hypotheses side by side
    length_penalty: float = 1.0  # they compare log-probability / length**this

    can: ClassVar[frozenset[str]] = frozenset(("unique", "export", "generate"))

    @property
    def label(self) -> str:
        """By its setting."""
        return f"decode.beams = {self.beams}"

    @property
    def setting(self) -> str:
        """By its setting."""
        return f"decode.beams: found {self.beams}"

    def strategy(self, ids: Ids) -> "Strategy":
        """Beam search."""
        from pipejax.decoding.beam import Beam

        return Beam(self.max_length, self.beams, self.length_penalty, ids.bos, ids.eos, ids.other_ends)


def tells_rows_apart(separator: str) -> bool:
    """Whether rows can be found again in a text that joins them with it: spaces alone separate nothing."""
    return bool(separator.strip(" "))


def split_rows(text: str, separator: str) -> list[str]:
    """Splits a decoded sequential target into rows; if the separator is only spaces, the whole text is one row."""
    if not tells_rows_apart(separator):
        return [text] if text else []
    parts = re.split(separator_pattern(separator), text)
    return [row for row in map(str.strip, parts) if row]


def joined_change(rows: Sequence[str], spells: Spells, separator: str) -> tuple[str, str] | None:
    """The first row that is not found again in the text that joins all, and the one in its place; None: all are.

    Rows are compared as the tokenizer gives them back one by one; white space does not count.
    """
    kept = [row for row in rows if not spells.vanishes(row)]
    if not kept or not tells_rows_apart(separator):
        return None
    texts = map(spells.decode, spell([*kept, separator.join(kept)], spells, spells.eos))
    *alone, whole = (" ".join(text.split()) for text in texts)
    before, after = [text for text in alone if text], [" ".join(text.split()) for text in split_rows(whole, separator)]
    return next((pair for pair in itertools.zip_longest(before, after, fillvalue="") if pair[0] != pair[1]), None)


def separator_pattern(separator: str) -> str:
    """An expression for the separator in decoded text, around which tokenizers change or drop spaces."""
    core = separator.strip(" ")
    before = r"(?:^| +|(?<= ))" if separator.startswith(" ") else ""
    after = r"(?:$| +)" if separator.endswith(" ") else ""
    return before + re.escape(core) + after


def _join(rows: Sequence[str], spell: Callable[[str], list[int]], separator: str, most: int) -> tuple[list[int], bool]:
    """The joined ids of the first rows, one at least, that have at most `most` ids; and whether rows were left out."""

    def joined(count: int) -> list[int]:
        return spell(separator.join(rows[:count]))

    whole = joined(len(rows))
    if len(whole) <= most:
        return whole, False
    fit, beyond = 1, len(rows)  # bisection, because each attempt encodes the text anew
    while beyond - fit > 1:
        middle = (fit + beyond) // 2
        fit, beyond = (middle, beyond) if len(joined(middle)) <= most else (fit, middle)
    return joined(fit), True
