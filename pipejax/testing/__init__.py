"""Checks custom methods, backbones, rules and drafters by comparing them with a full recomputation on a toy model.

`check_method` and `check_backbone` check a piece by the named rules of a table, METHOD_REQUIREMENTS or
BACKBONE_REQUIREMENTS. Each rule compares the piece with something that does not use the piece's own code: the
teacher-forced pass without a cache, one example alone, Algorithm 1 in plain Python, or differences of the loss.
"""

from pipejax.testing.backbones import BACKBONE_REQUIREMENTS, BackboneCase, check_backbone
from pipejax.testing.drafters import check_drafter
from pipejax.testing.methods import METHOD_REQUIREMENTS, MethodCase, check_method
from pipejax.testing.recomputation import TOY, GivenQueries, random_params, recompute
from pipejax.testing.requirements import Requirement, check_one
from pipejax.testing.rules import check_rule

__all__ = [
    "BACKBONE_REQUIREMENTS",
    "METHOD_REQUIREMENTS",
    "TOY",
    "BackboneCase",
    "GivenQueries",
    "MethodCase",
    "Requirement",
    "check_backbone",
    "check_drafter",
    "check_method",
    "check_one",
    "check_rule",
    "random_params",
    "recompute",
]
