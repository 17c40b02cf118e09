"""Drafters of a user that need parameters and the encoder's outputs."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.decoding import SourceIds
from pipejax.decoding.drafters import Draft, TargetModel, Written

MOST = 8  # source tokens that a drafter remembers


@dataclasses.dataclass(frozen=True)
class Ranked:
    """Drafts the source tokens with the highest scores in each row: products of the encoder's outputs and a vector.

    The tokens are found when a source begins.
    """

    odds: tuple[float, ...] = (0.9,)
    wants: ClassVar[frozenset[str]] = frozenset({"parameters", "encoded"})

    def load(self, directory: str, target: TargetModel) -> dict[str, np.ndarray]:
        """The vector f32 [D] that was saved in a directory."""
        assert target.fingerprint or target.config.model is not None
        return {"vector": np.load(Path(directory) / "vector.npy")}

    def init(self, source: SourceIds, rows: int) -> Any:
        """i32 [B, MOST], the tokens in the order of their scores."""
        return rank(source)

    def propose(self, state: Any, written: Written, most: int) -> tuple[Any, Draft]:
        """The tokens from the place of the row and its length on."""
        return state, draft_from(state, written, most)


@dataclasses.dataclass(frozen=True)
class RankedOnce(Ranked):
    """A `Ranked` whose `read` finds the tokens once for each source."""

    def read(self, source: SourceIds) -> jax.Array:
        """i32 [B, MOST], the tokens in the order of their scores."""
        return rank(source)

    def init(self, source: SourceIds, rows: int) -> Any:
        """No state."""
        assert source.encoded is None, "the outputs of the encoder are for `read`"
        return ()

    def propose(self, state: Any, written: Written, most: int) -> tuple[Any, Draft]:
        """See `Ranked`."""
        assert written.source is not None
        return state, draft_from(written.source.memory, written, most)


def rank(source: SourceIds) -> jax.Array:
    """The tokens i32 [B, MOST] of sources by descending scores; the first tokens are repeated."""
    ids, length = jnp.asarray(source.ids), jnp.asarray(source.length)
    assert source.encoded is not None and source.encoded.shape[:2] == ids.shape
    scores = source.encoded.astype(jnp.float32) @ source.parameters["vector"]
    order = jnp.argsort(-jnp.where(jnp.arange(ids.shape[1]) < length[:, None], scores, -jnp.inf), axis=1)
    places = jnp.arange(MOST) % length[:, None]
    return jnp.take_along_axis(ids, jnp.take_along_axis(order, places, axis=1), axis=1)


def draft_from(tokens: jax.Array, written: Written, most: int) -> Draft:
    """A draft of the tokens i32 [B, MOST] in cyclic order, from the sum of the row's number and its length on."""
    rows = jnp.arange(written.length.shape[1])[:, None]
    places = (written.length[:, :, None] + rows + jnp.arange(most)) % MOST
    drafted = jnp.take_along_axis(tokens[:, None], places, axis=2)
    return Draft(drafted, jnp.full_like(written.length, most), jnp.zeros_like(written.length))
