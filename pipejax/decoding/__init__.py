"""Decoding strategies: which queries a step asks, what they may see, what becomes of the answers. No model in here."""

from typing import cast

from pipejax.config import DecodeConfig
from pipejax.decoding import contract, drafters
from pipejax.decoding.beam import Beam
from pipejax.decoding.choice import GREEDILY, MOST_LIKELY, Sampling, Wishes
from pipejax.decoding.core import QUERIES, Carry, Sizes, Stretch, begin, decode, grow, refill, run
from pipejax.decoding.drafters import Drafter
from pipejax.decoding.drafting import Drafted
from pipejax.decoding.gathering import Query, Step
from pipejax.decoding.grammar import Grammar, Table
from pipejax.decoding.interface import (
    TRUNCATIONS,
    Decoded,
    Model,
    Plain,
    Refillable,
    SourceIds,
    Stepper,
    Strategy,
    ends_of,
)
from pipejax.decoding.pipelined import OnGrid, Pipelined
from pipejax.decoding.sequential import Sequential
from pipejax.decoding.trace import Asked, Trace, list_calls
from pipejax.system.errors import UserError

# Of a strategy with drafts nobody asks these: they say what its steps are.
UNASKED = ("init", "query", "choose", "advance", "kept", "done", "result", "start", "rows", "_open", "_align")

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
    "contract",
    "decode",
    "drafted",
    "ends_of",
    "grow",
    "list_calls",
    "refill",
    "run",
]


def drafted(inner: Strategy, decode: DecodeConfig, drafter: Drafter | None = None) -> Drafted:
    """The strategy with drafts of `drafter`, or of the one that `decode.draft` names."""
    on_grid = cast(OnGrid, inner)  # the method said that it can
    kinds = type(inner).__mro__
    followed = next(i for i, kind in enumerate(kinds) if "on_grid" in vars(kind))
    if own := [name for kind in kinds[:followed] for name in UNASKED if name in vars(kind)]:
        raise UserError(
            f"{type(inner).__name__}.{own[0]}: found with drafts, which follow {kinds[followed].__name__}.{own[0]}; "
            "expected no drafts, or an `on_grid` of its own with the same answers"
        )
    return Drafted(on_grid, drafter or drafters.make(decode.draft), decode.draft_tokens, trace=decode.trace)
