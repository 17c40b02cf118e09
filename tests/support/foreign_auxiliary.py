"""Auxiliary parameters of a user: a vector that predicts for each source token whether its id is even."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pipejax.decoding.drafters import TargetModel
from pipejax.model.auxiliary import Auxiliary, Outputs
from pipejax.model.backbone import Backbone
from pipejax.system.errors import UserError
from pipejax.system.fields import setting
from support.foreign_drafters import Ranked


@dataclasses.dataclass(frozen=True)
class Even(Auxiliary):
    """A vector [D] whose product with the output of the encoder is 1 at even ids, and 0 at others."""

    scale: float = setting(0.1, above=0.0)  # of the initial vector

    sharding: ClassVar[Any] = (("vector", ("fsdp",)),)

    def init_params(self, rng: jax.Array, backbone: Backbone) -> dict[str, jax.Array]:
        """The initial vector."""
        width: int = backbone.d_model  # type: ignore[attr-defined]
        return {"vector": self.scale * jax.random.normal(rng, (width,))}

    def loss(self, params: Any, outputs: Outputs) -> tuple[jax.Array, jax.Array]:
        """The squared errors of all source tokens."""
        source = outputs.batch["source"]
        real = jnp.arange(source.shape[1]) < outputs.batch["source_length"][:, None]
        errors = outputs.encoded.astype(jnp.float32) @ params["vector"] - (source % 2 == 0)
        return jnp.where(real, errors**2, 0).sum(), real.sum()


@dataclasses.dataclass(frozen=True)
class FromEven(Ranked):
    """Drafts the source tokens that the vector scores highest."""

    def load(self, directory: str, target: TargetModel) -> Any:
        """The vector of the run."""
        if target.auxiliary is None:
            raise UserError("Even", found="no auxiliary parameters", expected="a run that trained them")
        return target.auxiliary
