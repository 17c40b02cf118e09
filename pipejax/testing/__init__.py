"""Checks custom methods, backbones, rules and drafters by comparing them with a full recomputation on a toy model.

`check_method` and `check_backbone` check a piece by the named rules of a table, METHOD_DEMANDS or BACKBONE_DEMANDS.
Each rule compares the piece with something that does not use the piece's own code: the teacher-forced pass without a
cache, one example alone, Algorithm 1 in plain Python, or differences of the loss.
"""

from pipejax.testing.backbones import BACKBONE_DEMANDS, BackboneCase, check_backbone
from pipejax.testing.demands import Demand, check_one
from pipejax.testing.drafters import check_drafter
from pipejax.testing.methods import METHOD_DEMANDS, MethodCase, check_method
from pipejax.testing.recomputation import TOY, GivenQueries, random_params, recompute
from pipejax.testing.rules import check_rule

__all__ = [
    "BACKBONE_DEMANDS",
    "METHOD_DEMANDS",
    "TOY",
    "BackboneCase",
    "Demand",
    "GivenQueries",
    "MethodCase",
    "check_backbone",
    "check_drafter",
    "check_method",
    "check_one",
    "check_rule",
    "random_params",
    "recompute",
]
