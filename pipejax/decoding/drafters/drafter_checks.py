"""Checks a drafter; raises a one-line error at the first rule of `Drafter` that it breaks.

Shapes as in `drafter`.
"""

import dataclasses
from typing import Any

from pipejax.decoding.drafters.drafter import WANTS, Draft
from pipejax.decoding.strategy_checks import expect, refuse
from pipejax.system.errors import UserError, did_you_mean


def check_members(drafter: Any) -> None:
    """Raises a UserError if a drafter lacks a member, or if a member has a wrong type.

    Args:
      drafter: any object.
    """
    if isinstance(drafter, type) or not dataclasses.is_dataclass(drafter) or type(drafter).__hash__ is None:
        raise UserError(
            "drafter", found=f"{drafter!r:.100}", expected="an object of a frozen dataclass, such as FromSource()"
        )
    wanted = getattr(drafter, "wants", ())
    if not isinstance(wanted, set | frozenset | tuple | list):
        refuse(drafter, "wants", repr(wanted), f"a set with some of {', '.join(WANTS)}")
    for what in wanted:
        if what not in WANTS:
            name, hint = type(drafter).__name__, did_you_mean(str(what), WANTS)
            raise UserError(f"{name}.wants", found=f"{what!r}", expected=f"some of {', '.join(WANTS)}", hint=hint)
    for part in ("init", "propose"):
        if not callable(getattr(drafter, part, None)):
            refuse(drafter, part, "no such method", "the method that Drafter describes")
    probes = getattr(drafter, "probes", 0)
    if not isinstance(probes, int) or probes < 0:
        refuse(drafter, "probes", repr(probes), "a number of columns")
    odds = getattr(drafter, "odds", None)
    if not (isinstance(odds, tuple) and odds and all(isinstance(x, float) and 0 < x < 1 for x in odds)):
        refuse(drafter, "odds", repr(odds), "a tuple of probabilities between 0 and 1, one for each degree of trust")


def check_draft(drafter: Any, draft: Any, shape: tuple[int, ...]) -> None:
    """Raises a UserError for a draft of wrong shapes or dtypes; traced.

    Args:
      drafter: the drafter.
      draft: the second result of its `propose`.
      shape: B, R and D.
    """
    if not isinstance(draft, Draft):
        refuse(drafter, "propose", f"{type(draft).__name__} as the second result", "a Draft")
    expect(drafter, "propose: tokens", draft.tokens, "int32", shape)
    expect(drafter, "propose: count", draft.count, "int32", shape[:2])
    expect(drafter, "propose: trust", draft.trust, "int32", shape[:2])
    if not (probes := getattr(drafter, "probes", 0)):
        return
    if draft.probes is None:
        refuse(drafter, "propose: probes", "None", f"the {probes} probes of each row")
    for name, kind in (("tokens", "int32"), ("place", "int32"), ("live", "bool")):
        expect(drafter, f"propose: probes: {name}", getattr(draft.probes, name), kind, (*shape[:2], probes))
