"""Decoding of prompts that do not see each other."""

import dataclasses

from pipejax.decoding import Pipelined
from pipejax.grid import Numbers


@dataclasses.dataclass(frozen=True)
class Prompts(Pipelined):
    """Algorithm 1 with a delay of 0 and a group for each row."""

    def group(self, row: Numbers) -> Numbers:
        """Returns the group of a row, see `grid.shares_group`."""
        return row + 1
