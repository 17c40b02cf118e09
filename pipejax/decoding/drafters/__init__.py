"""Drafters, which guess the next tokens of rows without the large model. One module for each."""

from pipejax import config as config_lib
from pipejax import registry
from pipejax.decoding.drafters.drafter import WANTS, Draft, Drafter, Probed, Probes, Setting, TargetModel, Written
from pipejax.decoding.drafters.drafter_checks import check_members
from pipejax.decoding.drafters.jacobi import Jacobi
from pipejax.decoding.drafters.model_drafter import FromModel, SmallModel
from pipejax.decoding.drafters.source import FromSource
from pipejax.decoding.strategy import wants
from pipejax.registry import DRAFTERS

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
    """Returns the drafter that a value of `decode.draft` names: one of `registry.DRAFTERS`, or MODULE:CLASS.

    Raises:
      UserError: the module is not imported yet, or the class is not a drafter.
    """
    drafter: Drafter
    if name in DRAFTERS:
        drafter = registry.find(DRAFTERS[name])()
    else:
        drafter = config_lib.made({"class": name}, "decode.draft")
        check_members(drafter)
    return drafter
