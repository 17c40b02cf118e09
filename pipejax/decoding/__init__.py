"""Decoding strategies: which queries a step asks, what they may see, what becomes of the answers. No model in here."""

from pipejax.decoding.beam import Beam
from pipejax.decoding.choice import GREEDILY, MOST_LIKELY, Sampling, Wishes
from pipejax.decoding.core import QUERIES, Carry, Sizes, Stretch, begin, decode, refilled, run, with_slots
from pipejax.decoding.drafters import Drafter
from pipejax.decoding.drafting import Drafted, drafted
from pipejax.decoding.gathering import Query, Step
from pipejax.decoding.interface import TRUNCATIONS, Decoded, Model, Plain, Refillable, SourceIds, Stepper, Strategy
from pipejax.decoding.pipelined import Pipelined
from pipejax.decoding.sequential import Sequential
from pipejax.decoding.trace import Asked, Trace, listed

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
    "Trace",
    "Wishes",
    "begin",
    "decode",
    "drafted",
    "listed",
    "refilled",
    "run",
    "with_slots",
]
