"""Drafters: how a row may go on, guessed without the model that writes it. One file each."""

from pipejax.decoding.drafters.interface import Draft, Drafter, Written
from pipejax.decoding.drafters.jacobi import Jacobi
from pipejax.decoding.drafters.model import FromModel
from pipejax.decoding.drafters.source import FromSource

__all__ = ["Draft", "Drafter", "FromModel", "FromSource", "Jacobi", "Written", "make"]


def make(name: str) -> Drafter:
    """The drafter that `decode.draft` calls so."""
    kinds: dict[str, type[FromSource] | type[Jacobi] | type[FromModel]]
    kinds = {"source": FromSource, "jacobi": Jacobi, "model": FromModel}
    return kinds[name]()
