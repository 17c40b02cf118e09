"""Drafters, which guess the next tokens of rows without the large model. One module for each."""

from pipejax import config as config_lib
from pipejax.config import DRAFTS
from pipejax.decoding.drafters.drafter import WANTS, Draft, Drafter, Probed, Probes, Setting, TargetModel, Written
from pipejax.decoding.drafters.drafter_checks import check_members
from pipejax.decoding.drafters.jacobi import Jacobi
from pipejax.decoding.drafters.model_drafter import FromModel, SmallModel
from pipejax.decoding.drafters.source import FromSource
from pipejax.decoding.strategy import wants

__all__ = [
    "WANTS",
    "Draft",
    "Drafter",
    "FromModel",
    "FromSource",
    "Jacobi",
    "Probed",
    "Probes",
    "Setting",
    "SmallModel",
    "TargetModel",
    "Written",
    "check_members",
    "make",
    "wants",
]


def make(name: str) -> Drafter:
    """The drafter of a value of `decode.draft`: one of `DRAFTS` without "none", or MODULE:CLASS.

    Raises:
      UserError: the module is not imported yet, or the class is not a drafter.
    """
    if name not in DRAFTS:
        drafter: Drafter = config_lib.made({"class": name}, "decode.draft")
        check_members(drafter)
        return drafter
    kinds: dict[str, type[FromSource] | type[Jacobi] | type[FromModel]]
    kinds = {"source": FromSource, "jacobi": Jacobi, "model": FromModel}
    return kinds[name]()
