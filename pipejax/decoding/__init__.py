"""Decoding strategies and the decoding loop, independent of the model."""

import dataclasses
from typing import cast

from pipejax import moved
from pipejax.config import DecodeConfig
from pipejax.decoding import drafters
from pipejax.decoding.beam import Beam
from pipejax.decoding.choice import GREEDILY, MOST_LIKELY, DecodingOptions, Sampling
from pipejax.decoding.core import (
    QUERY_COUNTS,
    Carry,
    Segment,
    Sizes,
    begin,
    decode,
    grow,
    refill,
    run,
    run_in_one_program,
)
from pipejax.decoding.drafters import Drafter
from pipejax.decoding.drafting import Drafts
from pipejax.decoding.forced import columns_for, count_forced
from pipejax.decoding.gathering import Query, Step
from pipejax.decoding.grid_strategy import GridStrategy, Pipelined, Sequential
from pipejax.decoding.repetition import Repetition
from pipejax.decoding.rows import OnGrid, Rows, RowState
from pipejax.decoding.rules import FORBIDDEN, Allowed, Queries, Rule, create_rule
from pipejax.decoding.strategy import (
    TRUNCATIONS,
    Decoded,
    Model,
    Plain,
    Refillable,
    SourceIds,
    Stepper,
    Strategy,
    ends_of,
    group_of,
)
from pipejax.decoding.trace import Asked, Trace, list_calls
from pipejax.system.errors import UserError

# With drafts, `GridStrategy` uses its own versions of these methods, so overrides in a subclass would be ignored.
REPLACED = (
    *("init", "query", "choose", "advance", "settle", "kept", "done", "result", "start", "rows", "first"),
    *("has_started", "find_open", "is_closed", "find_unfed", "find_circle", "may_begin"),
)

__all__ = [
    "FORBIDDEN",
    "GREEDILY",
    "MOST_LIKELY",
    "QUERY_COUNTS",
    "TRUNCATIONS",
    "Allowed",
    "Asked",
    "Beam",
    "Carry",
    "Decoded",
    "DecodingOptions",
    "Drafter",
    "Drafts",
    "GridStrategy",
    "Model",
    "Pipelined",
    "Plain",
    "Queries",
    "Query",
    "Refillable",
    "Repetition",
    "RowState",
    "Rows",
    "Rule",
    "Sampling",
    "Segment",
    "Sequential",
    "Sizes",
    "SourceIds",
    "Step",
    "Stepper",
    "Strategy",
    "Trace",
    "begin",
    "columns_for",
    "count_forced",
    "create_rule",
    "decode",
    "drafted",
    "ends_of",
    "group_of",
    "grow",
    "list_calls",
    "refill",
    "run",
    "run_in_one_program",
    "with_drafts",
    "with_forced",
]

__getattr__ = moved.renamed(
    "pipejax.decoding", {"Wishes": "DecodingOptions", "Stretch": "Segment", "QUERIES": "QUERY_COUNTS"}
)


def drafted(inner: Strategy, decode: DecodeConfig, drafter: Drafter | None = None) -> GridStrategy:
    """Returns the strategy with drafts by `drafter`, or by the drafter that `decode.draft` names.

    Raises:
      UserError: the drafter breaks a rule of `Drafter`, or the class of `inner` overrides steps.
    """
    if drafter is None:
        drafter = drafters.make(decode.draft)
    drafters.check_members(drafter)
    return with_drafts(cast(OnGrid, inner), Drafts(drafter, decode.draft_tokens, trace=decode.trace))


def with_drafts(inner: OnGrid, drafts: Drafts) -> GridStrategy:
    """Returns the strategy of Algorithm 1 that generates the same answers as `inner`, with drafts.

    Raises:
      UserError: the class of `inner` overrides steps, which drafts would not follow.
    """
    followed, own = _find_own_steps(inner)
    if own:
        raise UserError(
            f"{type(inner).__name__}.{own[0]}",
            f"drafts follow {followed.__name__}.{own[0]} instead",
            expected="no drafts, or an `on_grid` method with the same answers",
        )
    grid = cast(GridStrategy, inner.on_grid)
    return grid.replace(drafts=dataclasses.replace(drafts, names=None if grid is inner else inner))


def _find_own_steps(inner: OnGrid) -> tuple[type, list[str]]:
    """Returns the class whose `on_grid` is used, and the methods in REPLACED that a subclass of it overrides."""
    kinds = type(inner).__mro__
    followed = next(i for i, kind in enumerate(kinds) if "on_grid" in vars(kind))
    return kinds[followed], [name for kind in kinds[:followed] for name in REPLACED if name in vars(kind)]


def with_forced(strategy: Strategy, count: int) -> Strategy:
    """Returns the strategy that generates the same answers, and feeds up to `count` forced tokens of a row in one call.

    The result is `strategy` itself if its steps cannot be drafted.
    """
    drafts = getattr(strategy, "drafts", None)
    if drafts is not None:
        return cast(GridStrategy, strategy).replace(drafts=dataclasses.replace(drafts, forced=count))
    if not count or not hasattr(strategy, "on_grid") or not hasattr(strategy, "cut"):
        return strategy
    inner = cast(OnGrid, strategy)
    return strategy if _find_own_steps(inner)[1] else with_drafts(inner, Drafts(None, 0, forced=count))
