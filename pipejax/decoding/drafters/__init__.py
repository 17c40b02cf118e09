"""Drafters: how a row may go on, guessed without the model. One file each."""

from pipejax.decoding.drafters.interface import Draft, Drafter, Written
from pipejax.decoding.drafters.jacobi import Jacobi
from pipejax.decoding.drafters.source import FromSource

__all__ = ["Draft", "Drafter", "FromSource", "Jacobi", "Written", "make"]


def make(name: str) -> Drafter:
    """The drafter that `decode.draft` calls so."""
    if name == "source":
        return FromSource()
    if name == "jacobi":
        return Jacobi()
    raise AssertionError(f"no drafter is made for {name}")
