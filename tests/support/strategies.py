"""Strategies by the names that commands use."""

from pipejax import methods
from pipejax.config import Config, DecodeConfig, GridConfig
from pipejax.decoding import Strategy
from pipejax.methods import Ids


def make(name: str, grid: GridConfig, decode: DecodeConfig, *, bos: int, eos: int) -> Strategy:
    """Makes a strategy as a generator does."""
    return methods.make_strategy(methods.make(name, Config(grid=grid, decode=decode)), decode, Ids(bos, eos))
