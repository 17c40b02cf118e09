"""Decoding strategies: which queries a step asks, what they may see, what becomes of the answers. No model in here."""

from pipejax.config import STRATEGIES, DecodeConfig, GridConfig
from pipejax.decoding.core import TRUNCATIONS, Decoded, Model, Query, Schedule, Step, Strategy, run
from pipejax.decoding.pipelined import Pipelined
from pipejax.decoding.sequential import Sequential
from pipejax.errors import UserError

__all__ = [
    "STRATEGIES",
    "TRUNCATIONS",
    "Decoded",
    "Model",
    "Pipelined",
    "Query",
    "Schedule",
    "Sequential",
    "Step",
    "Strategy",
    "make",
    "run",
]


def make(name: str, grid: GridConfig, decode: DecodeConfig, *, bos: int, eos: int) -> Strategy:
    """The strategy of that name with its settings."""
    if name == "pipelined":
        return Pipelined(
            delay=grid.delay,
            time_max=grid.time_max,
            sub_max=grid.sub_max,
            literal=grid.stop == "literal",
            bos=bos,
            eos=eos,
        )
    if name == "sequential":
        return Sequential(max_length=decode.max_length, bos=bos, eos=eos)
    raise UserError(f"strategy: found {name!r}; expected one of {', '.join(STRATEGIES)}")
