"""Decoding strategies: which queries a step asks, what they may see, what becomes of the answers. No model in here."""

from pipejax.config import STRATEGIES, DecodeConfig, GridConfig
from pipejax.decoding.beam import Beam
from pipejax.decoding.core import (
    TRUNCATIONS,
    Carry,
    Decoded,
    Model,
    Query,
    Sizes,
    Step,
    Strategy,
    Stretch,
    begin,
    decode,
    run,
)
from pipejax.decoding.pipelined import Pipelined
from pipejax.decoding.sequential import Sequential
from pipejax.system.errors import UserError

__all__ = [
    "STRATEGIES",
    "TRUNCATIONS",
    "Beam",
    "Carry",
    "Decoded",
    "Model",
    "Pipelined",
    "Query",
    "Sequential",
    "Sizes",
    "Step",
    "Strategy",
    "Stretch",
    "begin",
    "check",
    "decode",
    "make",
    "run",
]


def make(name: str, grid: GridConfig, decode: DecodeConfig, *, bos: int, eos: int) -> Strategy:
    """The strategy of that name with its settings; sequential with several beams is beam search.

    Raises:
      UserError: as `check`.
    """
    check(name, decode)
    if name == "pipelined":
        return Pipelined(
            delay=grid.delay,
            time_max=grid.time_max,
            sub_max=grid.sub_max,
            literal=grid.stop == "literal",
            bos=bos,
            eos=eos,
        )
    if name == "sequential" and decode.beams == 1:
        return Sequential(max_length=decode.max_length, bos=bos, eos=eos)
    if name == "sequential":
        return Beam(decode.max_length, decode.beams, decode.length_penalty, bos=bos, eos=eos)
    raise AssertionError(f"no strategy is made for {name}")


def check(name: str, decode: DecodeConfig) -> None:
    """Raises a UserError if no strategy has that name, or it has no use for the beams that are asked for."""
    if name not in STRATEGIES:
        raise UserError(f"strategy: found {name!r}; expected one of {', '.join(STRATEGIES)}")
    if decode.beams > 1 and name != "sequential":
        raise UserError(f"decode.beams: found {decode.beams}; expected 1, since beam search is sequential, not {name}")
