"""What is wished for in the answers of a batch, from the settings and what the sources say, for `decoding.choice`."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax import grid
from pipejax.config import DecodeConfig, GridConfig
from pipejax.data.encoding import prefix_ids
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import Drafted, Pipelined, Sampling, Sequential, Strategy, Wishes
from pipejax.inference.sources import Source
from pipejax.system.errors import UserError


class Rows(NamedTuple):
    """What is known of the rows of an answer before it is written."""

    prefixes: tuple[Sequence[int], ...] = ()  # with which they begin, in turn
    most: int | None = None  # after so many the answer ends; None: the model decides


def check_names(config: GridConfig) -> None:
    """Raises a UserError if the grid names rows that would not begin in time, or none of those that start at once."""
    if config.delay == 0 and not config.row_names:
        raise UserError(
            "grid.delay: found 0 without grid.row_names; expected the names of the rows, since nothing else tells rows "
            "apart that start at once"
        )
    fit, names = grid.beginning(config.delay, config.time_max, config.sub_max), len(config.row_names)
    if names > fit:
        raise UserError(
            f"grid.row_names: found {names}; expected at most {fit}, the rows that begin under grid.sub_max = "
            f"{config.sub_max}, grid.time_max = {config.time_max} and grid.delay = {config.delay}"
        )


def rows_of(source: Source, strategy: str, config: GridConfig, tokenizer: Tokenizer | None) -> Rows:
    """What the source says of its rows; if it says nothing, what the grid says of those of every answer.

    Args:
      source: whose answer they are.
      strategy: that decodes. The grid is the pipelined one's.
      config: of the grid.
      tokenizer: for texts.

    Raises:
      UserError: there are more prefixes than rows that can begin; all rows start at once, and not each of them has a
        prefix; a name has no token, or one that ends its row; or nobody has a tokenizer.
    """
    prefixes, count, where = source.prefixes, source.max_rows, f"source {source.id}"
    if strategy == "pipelined":
        if not prefixes and count is None and config.row_names:
            check_names(config)
            prefixes, count, where = config.row_names, len(config.row_names), "grid.row_names"
        if config.delay == 0:
            # T5 has no positions: rows that see nothing but bos would all write the same token first.
            if not prefixes and count is None and not config.row_names:  # the setting is at fault, not a source
                raise UserError(
                    "grid.delay: found 0 without grid.row_names; expected the names of the rows, or row_prefixes in "
                    "each source, since nothing else tells rows apart that start at once"
                )
            if not prefixes or (count or 0) > len(prefixes):
                otherwise = "no max_rows, for those of grid.row_names" if config.row_names else "grid.row_names"
                raise UserError(
                    f"source {source.id}: found grid.delay = 0, {len(prefixes)} row_prefixes and "
                    f"{'no' if count is None else count} max_rows; expected a prefix for each row, or {otherwise}, "
                    "since nothing else tells rows apart that start at once"
                )
            if (count := len(prefixes)) > config.sub_max:
                raise UserError(
                    f"source {source.id}: found {count} row_prefixes with grid.delay = 0; expected at most "
                    f"grid.sub_max = {config.sub_max}, since all rows start at once"
                )
        elif len(prefixes) > (fit := grid.beginning(config.delay, config.time_max, config.sub_max)):
            raise UserError(
                f"source {source.id}: found {len(prefixes)} rows with prefixes; expected at most {fit}, the rows that "
                f"begin under grid.sub_max={config.sub_max}, grid.time_max={config.time_max}, grid.delay={config.delay}"
            )

    def ids(prefix: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prefix, str):
            return prefix
        if tokenizer is None:  # the prefixes of a source were checked
            raise UserError("grid.row_names: found texts, but the checkpoint has no tokenizer; expected none")
        return prefix_ids(tokenizer, prefix, where)

    return Rows(tuple(map(ids, prefixes)), count)


def forced_of(rows: Rows, strategy: Strategy) -> np.ndarray | None:
    """i32 [R, W], the token of each row and time that is no choice of the model's, -1 elsewhere; None: all are."""
    if not rows.prefixes and rows.most is None:
        return None
    number, times, delay, eos = _shape(strategy)
    forced = np.full((number, times), -1, np.int32)
    for row, prefix in enumerate(rows.prefixes[:number]):
        here = forced[row, grid.start(row, delay) :]
        here[: len(prefix)] = prefix[: len(here)]
    for row in range(number if rows.most is None else rows.most, number):  # empty rows, the first of which ends it
        forced[row, grid.start(row, delay)] = eos
    return forced


def of_batch(
    sources: Sequence[Source],
    ids: Sequence[Sequence[int]],
    decode: DecodeConfig,
    strategy: Strategy,
    *,
    rows: Sequence[Rows],
    separator: Sequence[int],
    vocabulary: int,
) -> Wishes:
    """Arrays [B, ...] in NumPy.

    Args:
      sources: of the batch.
      ids: of each source.
      decode: the settings.
      strategy: that decodes.
      rows: what is known of those of each answer.
      separator: ids that part the rows of a sequential answer.
      vocabulary: V.
    """
    sampling = None
    if decode.temperature > 0:
        sampling = Sampling(
            temperature=np.full(len(ids), decode.temperature, np.float32),
            top_k=np.full(len(ids), decode.top_k, np.int32),
            top_p=np.full(len(ids), decode.top_p, np.float32),
            seed=np.asarray([seed_of(source, decode.seed) for source in sources], np.uint32),
        )
    forced = allowed = None
    number, times, _, eos = _shape(strategy)
    tables = [forced_of(one, strategy) for one in rows]
    if any(table is not None for table in tables):
        free = np.full((number, times), -1, np.int32)
        forced = np.stack([free if table is None else table for table in tables])
    if decode.limit == "source":
        allowed = np.zeros((len(ids), vocabulary), bool)
        allowed[:, [eos, *separator]] = True
        for b, of_source in enumerate(ids):
            allowed[b, np.asarray(of_source)] = True
    return Wishes(sampling=sampling, forced=forced, allowed=allowed, scores=decode.scores)


def seed_of(source: Source, seed: int) -> int:
    """A number of 32 bits for a source's answer: by its id and the number of the sample, whatever the batch."""
    digest = hashlib.sha256(f"{seed}/{source.sample}/{source.id}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def _shape(strategy: Strategy) -> tuple[int, int, int, int]:
    """Rows, times, delay and eos."""
    inner = strategy.grid if isinstance(strategy, Drafted) else strategy
    if isinstance(inner, Pipelined):
        return inner.rows, inner.time_max, inner.delay, inner.eos
    if isinstance(inner, Sequential):
        return 1, inner.max_length, 1, inner.eos
    return 0, 0, 1, 0  # beams, for which nothing is wished
