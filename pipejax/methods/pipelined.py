"""Rows side by side: Algorithm 1 of the paper, with free rows or with rows that begin as they are named."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pipejax import grid
from pipejax.config import Config, GridConfig
from pipejax.methods.method import ABILITIES, Ids, InTorch, Method, RowPrefixes, Target
from pipejax.methods.spelling import Spells, prefix_ids, spell
from pipejax.system.errors import UserError

if TYPE_CHECKING:
    from pipejax.decoding import Strategy


@dataclasses.dataclass(frozen=True)
class PipelinedMethod(Method):
    """A new row every Δt steps, and a token a step for every open row."""

    grid: GridConfig
    unique: bool = False  # an answer that runs in circles ends

    name: ClassVar[str] = "pipelined"
    can: ClassVar[frozenset[str]] = frozenset(ABILITIES) - {"generate"}

    @classmethod
    def of(cls, config: Config) -> "PipelinedMethod":
        """With the settings of a config."""
        named = config.grid.row_names or config.grid.delay == 0
        return (NamedRows if named else cls)(config.grid, config.decode.unique_rows)

    @property
    def about(self) -> str:
        """Rows side by side."""
        delay, names = self.grid.delay, self.grid.row_names
        begun = (
            f"a new one every {f'{delay} steps' if delay > 1 else 'step'}" if delay else "all from the first step on"
        )
        named = f" Each row begins as told, in turn: {', '.join(map(repr, names))}." if names else ""
        return (
            f"A T5 that was trained to write the rows of an answer side by side, {begun} (pipelined decoding), with at "
            f"most {self.grid.sub_max} rows and {self.grid.time_max} steps.{named}"
        )

    @property
    def generated(self) -> str:
        """The first row."""
        return "`generate` writes the first row of an answer alone: it knows no other rows, and no beginnings of rows."

    @property
    def in_torch(self) -> InTorch | None:
        """Algorithm 1, unless a subclass decodes or reads answers in another way."""
        ours = PipelinedMethod.strategy, PipelinedMethod.order, PipelinedMethod.read
        if (type(self).strategy, type(self).order, type(self).read) != ours:
            return None
        return {
            "delay": self.grid.delay,
            "time_max": self.grid.time_max,
            "sub_max": self.grid.sub_max,
            "literal": self.grid.stop == "literal",
            "unique": self.unique,
            "row_names": self.grid.row_names,
        }

    def target(self, rows: Sequence[str], spells: Spells, ids: Ids, *, most: int, where: str) -> Target:
        """A row of the grid for each; the last are left out if there are too many (paper section 3.3, eq. 5)."""
        return self._laid_out([row for row in spell(rows, spells, ids.ends) if row], ids, most=most)

    def _laid_out(self, rows: Sequence[list[int]], ids: Ids, *, most: int, names: Sequence[int] = ()) -> Target:
        """The target of rows of ids; `names`: how many tokens at the beginning of each are given."""
        delay, ends = self.grid.delay, np.cumsum([len(row) + 1 for row in rows])
        cut = bool(rows) and int(ends[-1]) + (delay > 0) > most  # the empty row has an eos of its own
        kept = rows[: max(int((ends <= most).sum()), 1)] if cut else rows
        is_open = cut and len(kept[-1]) + 1 > most
        kept, names = [row[: most - 1] for row in kept], [min(length, most - 1) for length in names]
        flat = grid.flatten(kept, delay=delay, bos=ids.bos, eos=ids.eos, final=not cut, names=names)
        if is_open:
            flat.weights[-1] = 0.0  # the row was cut, so the eos after it is not in the data
        return Target(flat, cut)

    def most_slots(self, most: int) -> int:
        """One a token, and one for each row whose eos is fed: a row but the last has at least two tokens."""
        return most + (most - 1) // 2

    def strategy(self, ids: Ids) -> "Strategy":
        """Algorithm 1."""
        from pipejax.decoding.grid_strategy import Pipelined

        return Pipelined(
            delay=self.grid.delay,
            time_max=self.grid.time_max,
            sub_max=self.grid.sub_max,
            literal=self.grid.stop == "literal",
            bos=ids.bos,
            eos=ids.eos,
            unique=self.unique,
            other_ends=ids.other_ends,
        )

    def given(self, given: RowPrefixes) -> RowPrefixes:
        """As the source says, if so many rows begin in time."""
        fit = grid.count_rows(self.grid.delay, self.grid.time_max, self.grid.sub_max)
        if len(given.prefixes) > fit:
            raise UserError(
                f"{given.where}: found {len(given.prefixes)} rows with prefixes; expected at most {fit}, the rows that "
                f"begin under grid.sub_max={self.grid.sub_max}, grid.time_max={self.grid.time_max}, "
                f"grid.delay={self.grid.delay}"
            )
        return given

    def learned(self) -> dict[str, object]:
        """When rows start, and what they begin with."""
        return {f"grid.{key}": getattr(self.grid, key) for key in ("delay", "row_names")}


class NamedRows(PipelinedMethod):
    """Rows that begin as they are named, by the grid or by a source. With a delay of 0 they all start at once."""

    def check(self) -> None:
        """Raises a UserError if the grid names rows that begin too late, or none of those that start at once."""
        delay, names = self.grid.delay, len(self.grid.row_names)
        if delay == 0 and not names:
            raise UserError(
                "grid.delay: found 0 without grid.row_names; expected the names of the rows, since nothing else tells "
                "rows apart that start at once"
            )
        fit = grid.count_rows(delay, self.grid.time_max, self.grid.sub_max)
        if names > fit:
            raise UserError(
                f"grid.row_names: found {names}; expected at most {fit}, the rows that begin under grid.sub_max = "
                f"{self.grid.sub_max}, grid.time_max = {self.grid.time_max} and grid.delay = {delay}"
            )

    def target(self, rows: Sequence[str], spells: Spells, ids: Ids, *, most: int, where: str) -> Target:
        """Names are fed like other tokens, and have weight 0: decoding puts them there."""
        found = [row for row in spell(rows, spells, ids.ends) if row]
        names = [prefix_ids(spells, name, "grid.row_names", ids.ends) for name in self.grid.row_names]
        if names and len(found) != len(names):
            raise UserError(f"{where}: found {len(found)} rows; expected {len(names)}, as grid.row_names has")
        for i, (row, name) in enumerate(zip(found, names, strict=False)):
            if (*row[: len(name)],) != name:  # as it will in decoding
                raise UserError(
                    f"{where}: found row {i + 1} of {tuple(rows)}; expected it to begin with the tokens of name "
                    f"{i + 1} in grid.row_names"
                )
        return self._laid_out(found, ids, most=most, names=[*map(len, names)])

    def given(self, given: RowPrefixes) -> RowPrefixes:
        """If the source says nothing, as the grid names them."""
        names, says_nothing = self.grid.row_names, not given.prefixes and given.most is None
        if says_nothing and self.grid.delay == 0 and not names:  # the setting is at fault, not a source
            raise UserError(
                "grid.delay: found 0 without grid.row_names; expected the names of the rows, or row_prefixes in each "
                "source, since nothing else tells rows apart that start at once"
            )
        if says_nothing and names:
            self.check()
            given = RowPrefixes(names, len(names), "grid.row_names")
        if self.grid.delay:
            return super().given(given)
        # T5 has no positions: rows that see nothing but bos would all write the same token first.
        if not given.prefixes or (given.most or 0) > len(given.prefixes):
            otherwise = "no max_rows, for those of grid.row_names" if names else "grid.row_names"
            raise UserError(
                f"{given.where}: found grid.delay = 0, {len(given.prefixes)} row_prefixes and "
                f"{'no' if given.most is None else given.most} max_rows; expected a prefix for each row, or "
                f"{otherwise}, since nothing else tells rows apart that start at once"
            )
        if (count := len(given.prefixes)) > self.grid.sub_max:
            raise UserError(
                f"{given.where}: found {count} row_prefixes with grid.delay = 0; expected at most "
                f"grid.sub_max = {self.grid.sub_max}, since all rows start at once"
            )
        return given._replace(most=count)

    def exist(self, rows: int, most: int | None) -> int:
        """Of rows that start at once those that have a name: the others end as they begin."""
        return rows if self.grid.delay else most or 0
