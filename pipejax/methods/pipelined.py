"""The pipelined method: rows are generated side by side by Algorithm 1 of the paper, with or without row names."""

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
    """The pipelined decoder: a new row starts every Δt steps, and each step generates one token for every open row."""

    grid: GridConfig
    unique: bool = False  # whether an answer ends when its rows begin to repeat, see `Rows.find_circle`

    name: ClassVar[str] = "pipelined"
    can: ClassVar[frozenset[str]] = frozenset(ABILITIES) - {"generate"}

    @classmethod
    def of(cls, config: Config) -> "PipelinedMethod":
        """Returns the method with the settings of a config; a `NamedRows` if rows have names or the delay is 0."""
        named = config.grid.row_names or config.grid.delay == 0
        return (NamedRows if named else cls)(config.grid, config.decode.unique_rows)

    @property
    def about(self) -> str:
        """See `Method`. The sentence contains the bounds of the grid and the names of rows."""
        delay, names = self.grid.delay, self.grid.row_names
        begun = (
            f"a new one every {f'{delay} steps' if delay > 1 else 'step'}" if delay else "all from the first step on"
        )
        named = f" The rows begin with, in order: {', '.join(map(repr, names))}." if names else ""
        return (
            f"A T5 that was trained to write the rows of an answer side by side, {begun} (pipelined decoding), with at "
            f"most {self.grid.sub_max} rows and {self.grid.time_max} steps.{named}"
        )

    @property
    def generated(self) -> str:
        """See `Method`. `generate` writes only the first row."""
        return "`generate` writes only the first row of an answer; it supports neither other rows nor row prefixes."

    @property
    def in_torch(self) -> InTorch | None:
        """See `Method`. The value is None for a subclass that overrides `strategy`, `order` or `read`."""
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
        """See `Method`. Each row of the target is a row of the grid (paper section 3.3, eq. 5).

        If the rows with their eos tokens exceed `most` tokens, the last rows are left out; a first row that is too long
        alone is cut.
        """
        return self._laid_out([row for row in spell(rows, spells, ids.ends) if row], ids, most=most)

    def _laid_out(self, rows: Sequence[list[int]], ids: Ids, *, most: int, names: Sequence[int] = ()) -> Target:
        """Returns the target whose rows have the token ids `rows`, cut to `most` tokens.

        `names`: the number of forced tokens at the beginning of each row.
        """
        delay, ends = self.grid.delay, np.cumsum([len(row) + 1 for row in rows])
        cut = bool(rows) and int(ends[-1]) + (delay > 0) > most  # the final empty row has an eos, too
        kept = rows[: max(int((ends <= most).sum()), 1)] if cut else rows
        is_open = cut and len(kept[-1]) + 1 > most
        kept, names = [row[: most - 1] for row in kept], [min(length, most - 1) for length in names]
        flat = grid.flatten(kept, delay=delay, bos=ids.bos, eos=ids.eos, final=not cut, names=names)
        if is_open:
            flat.weights[-1] = 0.0  # the row was cut, so the data has no eos at this place
        return Target(flat, cut)

    def most_slots(self, most: int) -> int:
        """See `Method`. A target has one slot for each token, and one more for each row whose eos is fed.

        The last row's eos is never fed, and every other row has at least two tokens, its eos included.
        """
        return most + (most - 1) // 2

    def strategy(self, ids: Ids) -> "Strategy":
        """Returns the strategy of Algorithm 1, `Pipelined`."""
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

    def add_prefixes(self, given: RowPrefixes) -> RowPrefixes:
        """Returns the prefixes of the source.

        Raises:
          UserError: there are more prefixes than rows that can start.
        """
        fit = grid.count_rows(self.grid.delay, self.grid.time_max, self.grid.sub_max)
        if len(given.prefixes) > fit:
            raise UserError(
                given.where,
                found=f"{len(given.prefixes)} rows with prefixes",
                expected=f"at most {fit}, the number of rows that can start under "
                f"grid.sub_max={self.grid.sub_max}, grid.time_max={self.grid.time_max}, "
                f"grid.delay={self.grid.delay}",
            )
        return given

    def learned(self) -> dict[str, object]:
        """Returns the delay and the row names."""
        return {f"grid.{key}": getattr(self.grid, key) for key in ("delay", "row_names")}


class NamedRows(PipelinedMethod):
    """The pipelined decoder with named rows, whose names come from `grid.row_names` or from a source.

    With a delay of 0 all rows start at once.
    """

    def check(self) -> None:
        """Raises a UserError if a named row would not start in time, or if the delay is 0 and rows have no names."""
        delay, names = self.grid.delay, len(self.grid.row_names)
        if delay == 0 and not names:
            raise UserError(
                "grid.delay",
                found="0 without grid.row_names",
                expected="the names of the rows, since without them rows that start together cannot be distinguished",
            )
        fit = grid.count_rows(delay, self.grid.time_max, self.grid.sub_max)
        if names > fit:
            raise UserError(
                "grid.row_names",
                found=f"{names}",
                expected=f"at most {fit}, the number of rows that can start under grid.sub_max = "
                f"{self.grid.sub_max}, grid.time_max = {self.grid.time_max} and "
                f"grid.delay = {delay}",
            )

    def target(self, rows: Sequence[str], spells: Spells, ids: Ids, *, most: int, where: str) -> Target:
        """See `Method`. The slots that generate the tokens of names have weight 0, since decoding forces these tokens.

        Raises:
          UserError: the number of rows is not the number of names, or a row does not begin with its name.
        """
        found = [row for row in spell(rows, spells, ids.ends) if row]
        names = [prefix_ids(spells, name, "grid.row_names", ids.ends) for name in self.grid.row_names]
        if names and len(found) != len(names):
            raise UserError(where, found=f"{len(found)} rows", expected=f"{len(names)}, as in grid.row_names")
        for i, (row, name) in enumerate(zip(found, names, strict=False)):
            if (*row[: len(name)],) != name:  # decoding forces these tokens
                raise UserError(
                    where,
                    found=f"row {i + 1} of {tuple(rows)}",
                    expected=f"a row that begins with the tokens of name {i + 1} in grid.row_names",
                )
        return self._laid_out(found, ids, most=most, names=[*map(len, names)])

    def add_prefixes(self, given: RowPrefixes) -> RowPrefixes:
        """Returns the prefixes of the source, or `grid.row_names` if the source has neither prefixes nor `max_rows`.

        Raises:
          UserError: more rows have prefixes than can start, or the delay is 0 and a row has no prefix.
        """
        names, says_nothing = self.grid.row_names, not given.prefixes and given.most is None
        if says_nothing and self.grid.delay == 0 and not names:  # the message names the setting, not a source
            raise UserError(
                "grid.delay",
                found="0 without grid.row_names",
                expected="the names of the rows, or row_prefixes in each source, since without "
                "them rows that start together cannot be distinguished",
            )
        if says_nothing and names:
            self.check()
            given = RowPrefixes(names, len(names), "grid.row_names")
        if self.grid.delay:
            return super().add_prefixes(given)
        # T5 has no absolute positions, so rows that see only bos would all generate the same first token.
        if not given.prefixes or (given.most or 0) > len(given.prefixes):
            otherwise = "no max_rows, for the prefixes in grid.row_names" if names else "grid.row_names"
            raise UserError(
                given.where,
                found=f"grid.delay = 0, {len(given.prefixes)} row_prefixes and "
                f"{'no' if given.most is None else given.most} max_rows",
                expected=f"a prefix for each row, or {otherwise}, since without them rows that "
                "start together cannot be distinguished",
            )
        if (count := len(given.prefixes)) > self.grid.sub_max:
            raise UserError(
                given.where,
                found=f"{count} row_prefixes with grid.delay = 0",
                expected=f"at most grid.sub_max = {self.grid.sub_max}, since all rows start together",
            )
        return given._replace(most=count)

    def count_rows(self, rows: int, most: int | None) -> int:
        """See `Method`. If all rows start at once, only named rows count: other rows end with their first token."""
        return rows if self.grid.delay else most or 0
