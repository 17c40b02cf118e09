"""Drafters, which guess the next tokens of rows without the large model. One module for each."""

from pipejax.decoding.drafters.drafter import Draft, Drafter, Written
from pipejax.decoding.drafters.jacobi import Jacobi
from pipejax.decoding.drafters.model_drafter import FromModel
from pipejax.decoding.drafters.source import FromSource

__all__ = ["Draft", "Drafter", "FromModel", "FromSource", "Jacobi", "Written", "make"]


def make(name: str) -> Drafter:
    """The drafter of this name, a value of `decode.draft`."""
    kinds: dict[str, type[FromSource] | type[Jacobi] | type[FromModel]]
    kinds = {"source": FromSource, "jacobi": Jacobi, "model": FromModel}
    return kinds[name]()
