"""Decoding strategies: which queries a step asks, what they may see, what becomes of the answers. No model in here."""

from typing import cast

from pipejax.config import DecodeConfig
from pipejax.decoding import drafters
from pipejax.decoding.beam import Beam
from pipejax.decoding.choice import GREEDILY, MOST_LIKELY, Sampling, Wishes
from pipejax.decoding.core import QUERIES, Carry, Sizes, Stretch, begin, decode, grow, refill, run
from pipejax.decoding.drafters import Drafter
from pipejax.decoding.drafting import Drafted
from pipejax.decoding.gathering import Query, Step
from pipejax.decoding.grammar import Grammar, Table
from pipejax.decoding.interface import TRUNCATIONS, Decoded, Model, Plain, Refillable, SourceIds, Stepper, Strategy
from pipejax.decoding.pipelined import OnGrid, Pipelined
from pipejax.decoding.sequential import Sequential
from pipejax.decoding.trace import Asked, Trace, list_calls

__all__ = [
    "GREEDILY",
    "MOST_LIKELY",
    "QUERIES",
    "TRUNCATIONS",
    "Asked",
    "Beam",
    "Carry",
    "Decoded",
    "Drafted",
    "Drafter",
    "Grammar",
    "Model",
    "Pipelined",
    "Plain",
    "Query",
    "Refillable",
    "Sampling",
    "Sequential",
    "Sizes",
    "SourceIds",
    "Step",
    "Stepper",
    "Strategy",
    "Stretch",
    "Table",
    "Trace",
    "Wishes",
    "begin",
    "decode",
    "drafted",
    "grow",
    "list_calls",
    "refill",
    "run",
]


def drafted(inner: Strategy, decode: DecodeConfig, drafter: Drafter | None = None) -> Drafted:
    """The strategy with drafts of `drafter`, or of the one that `decode.draft` names."""
    on_grid = cast(OnGrid, inner)  # the method said that it can
    return Drafted(on_grid, drafter or drafters.make(decode.draft), decode.draft_tokens, trace=decode.trace)
