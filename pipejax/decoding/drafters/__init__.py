"""Drafters: how a row may go on, guessed without the model that writes it. One file each."""

from pipejax.decoding.drafters.interface import Draft, Drafter, Written
from pipejax.decoding.drafters.jacobi import Jacobi
from pipejax.decoding.drafters.model import FromModel
from pipejax.decoding.drafters.source import FromSource

__all__ = ["Draft", "Drafter", "FromModel", "FromSource", "Jacobi", "Written", "make"]


def make(name: str) -> Drafter:
    """The drafter that `decode.draft` calls so."""
    if name == "source":
        return FromSource()
    if name == "jacobi":
        return Jacobi()
    if name == "model":
        return FromModel()
    raise AssertionError(f"no drafter is made for {name}")
