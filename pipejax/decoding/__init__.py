"""Decoding strategies: which queries a step asks, what they may see, what becomes of the answers. No model in here."""

from pipejax.config import STRATEGIES, DecodeConfig, GridConfig
from pipejax.decoding import drafters
from pipejax.decoding.beam import Beam
from pipejax.decoding.choice import GREEDILY, Sampling, Wishes
from pipejax.decoding.core import (
    TRUNCATIONS,
    Carry,
    Decoded,
    Model,
    Refillable,
    Sizes,
    SourceIds,
    Strategy,
    Stretch,
    begin,
    decode,
    refilled,
    run,
    with_slots,
)
from pipejax.decoding.drafters import Drafter
from pipejax.decoding.drafting import Drafted
from pipejax.decoding.gathering import Query, Step
from pipejax.decoding.pipelined import Pipelined
from pipejax.decoding.sequential import Sequential
from pipejax.decoding.trace import Asked, Trace, listed
from pipejax.system.errors import UserError, did_you_mean

__all__ = [
    "GREEDILY",
    "STRATEGIES",
    "TRUNCATIONS",
    "Asked",
    "Beam",
    "Carry",
    "Decoded",
    "Drafted",
    "Drafter",
    "Model",
    "Pipelined",
    "Query",
    "Refillable",
    "Sampling",
    "Sequential",
    "Sizes",
    "SourceIds",
    "Step",
    "Strategy",
    "Stretch",
    "Trace",
    "Wishes",
    "begin",
    "check",
    "decode",
    "listed",
    "make",
    "refilled",
    "run",
    "with_slots",
]


def make(
    name: str, grid: GridConfig, decode: DecodeConfig, *, bos: int, eos: int, drafter: Drafter | None = None
) -> Strategy:
    """The strategy of that name with its settings; sequential with several beams is beam search.

    Args:
      name: one of STRATEGIES.
      grid: settings of the pipelined strategy.
      decode: settings of all others.
      bos: what every row begins with.
      eos: what ends it.
      drafter: instead of the one that `decode.draft` names.

    Raises:
      UserError: as `check`.
    """
    check(name, decode, drafts=drafter is not None)
    inner: Pipelined | Sequential
    if name == "sequential" and decode.beams > 1:
        return Beam(decode.max_length, decode.beams, decode.length_penalty, bos=bos, eos=eos)
    if name == "sequential":
        inner = Sequential(max_length=decode.max_length, bos=bos, eos=eos)
    elif name == "pipelined":
        inner = Pipelined(
            delay=grid.delay,
            time_max=grid.time_max,
            sub_max=grid.sub_max,
            literal=grid.stop == "literal",
            bos=bos,
            eos=eos,
            unique=decode.unique_rows,
        )
    else:
        raise AssertionError(f"no strategy is made for {name}")
    if drafter is None and decode.draft != "none":
        drafter = drafters.make(decode.draft)
    return inner if drafter is None else Drafted(inner, drafter, decode.draft_tokens, trace=decode.trace)


def check(name: str, decode: DecodeConfig, *, drafts: bool = False) -> None:
    """Raises a UserError if no strategy has that name, or it has no use for what else is asked for."""
    if name not in STRATEGIES:
        raise UserError(
            f"strategy: found {name!r}; expected one of {', '.join(STRATEGIES)}{did_you_mean(name, STRATEGIES)}"
        )
    if decode.beams > 1 and name != "sequential":
        raise UserError(f"decode.beams: found {decode.beams}; expected 1, since beam search is sequential, not {name}")
    if decode.samples > 1 and decode.temperature == 0:
        raise UserError(
            f"decode.samples: found {decode.samples} with decode.temperature = 0; expected a temperature above 0, "
            "since all of them would be the same"
        )
    for key, wanted in (("temperature", 0.0), ("scores", False), ("limit", "none")):
        if decode.beams > 1 and getattr(decode, key) != wanted:
            raise UserError(
                f"decode.{key}: found {getattr(decode, key)} with decode.beams = {decode.beams}; expected {wanted}, "
                "since it is for decoding without beams"
            )
    if decode.beams > 1 and (drafts or decode.draft != "none"):
        found = "a drafter" if drafts else decode.draft
        raise UserError(
            f"decode.draft: found {found} with decode.beams = {decode.beams}; expected none, since drafts are for "
            "greedy decoding"
        )
    if decode.trace and not drafts and decode.draft == "none":
        raise UserError(
            "decode.trace: found True with decode.draft = none; expected a drafter, since a trace shows drafts"
        )
