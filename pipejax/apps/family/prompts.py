"""Prompt-in-decoder (PiD, Lu et al., arXiv 2403.13112): the source is encoded once, and several prompts decode it.

Each row begins with its prompt and sees the source and itself alone, so all rows are generated at the same time.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pipejax import grid
from pipejax.config import GridConfig
from pipejax.methods import Ids, NamedRows, Spells, Target
from pipejax.system.errors import UserError

if TYPE_CHECKING:
    from pipejax.decoding import Strategy


@dataclasses.dataclass(frozen=True)
class PromptInDecoder(NamedRows):
    """Named rows that start at once and do not see each other; `grid.row_names` are the prompts."""

    grid: GridConfig = dataclasses.field(default_factory=lambda: GridConfig(delay=0))

    name: ClassVar[str] = "prompt_in_decoder"
    can: ClassVar[frozenset[str]] = NamedRows.can - {"probe", "unique", "draw"}  # no row depends on another one

    def check(self) -> None:
        """Raises a UserError if rows would not start at once, or if they have no prompts."""
        if self.grid.delay:
            raise UserError("method.grid.delay", found=f"{self.grid.delay}", expected="0, since all rows start at once")
        super().check()

    def target(self, rows: Sequence[str], spells: Spells, ids: Ids, *, most: int, where: str) -> Target:
        """See `Method`. Lays rows out as `NamedRows` does, without end tokens, which no other row would see."""
        flat, was_cut = super().target(rows, spells, ids, most=most, where=where)
        return Target(grid.Flat(*(x[flat.inputs != ids.eos] for x in flat)), was_cut)

    def strategy(self, ids: Ids) -> "Strategy":
        """Returns the strategy `Prompts`."""
        from pipejax.apps.family.prompt_rows import Prompts

        return Prompts(0, self.grid.time_max, self.grid.sub_max, bos=ids.bos, eos=ids.eos, other_ends=ids.other_ends)
