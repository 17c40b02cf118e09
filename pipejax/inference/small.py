"""The small T5 that drafts for another one: opened, checked, and ready to run (`decoding.drafters.model` asks it)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from pipejax import checkpoint
from pipejax.config import Config, GridConfig
from pipejax.inference import backends
from pipejax.inference.backends import Backend, Xla
from pipejax.inference.programs import Programs
from pipejax.system.errors import UserError


@dataclasses.dataclass(frozen=True)
class Small:
    """What `decode.draft_checkpoint` names."""

    directory: str
    config: Config
    programs: Programs

    def check(self, strategy: str, grid: GridConfig) -> None:
        """Raises a UserError if it is known to have been trained for another strategy or delay."""
        trained = self.config.train.objective
        where = f"decode.draft_checkpoint: {self.directory}"
        if trained not in ("none", strategy):
            raise UserError(f"{where}: found a T5 trained for {trained} decoding; expected {strategy}")
        if trained == "pipelined" and self.config.grid.delay != grid.delay:
            raise UserError(f"{where}: found a T5 trained with delay {self.config.grid.delay}; expected {grid.delay}")


def load(config: Config, dtype: Any, *, devices: Sequence[jax.Device], backend: Backend) -> Small:
    """Opens the newest good step of `decode.draft_checkpoint`.

    Args:
      config: of the large T5.
      dtype: of the computation.
      devices: that decode.
      backend: of the large T5: this one has the fastest for it too, unless that is XLA's products alone.

    Raises:
      UserError: there is no such checkpoint, or its vocabulary is another one.
    """
    assert config.model is not None, "checked by the generator"
    directory = config.decode.draft_checkpoint
    try:
        restored = checkpoint.open_run(directory, packed=True)
    except UserError as error:
        raise UserError(f"decode.draft_checkpoint: {error}") from error
    model = restored.config.model
    assert model is not None, "checked by open_run"
    for key in ("vocab_size", "eos_token_id", "decoder_start_token_id"):
        found, expected = getattr(model, key), getattr(config.model, key)
        if found != expected:
            raise UserError(
                f"decode.draft_checkpoint: {directory}: found a T5 with {key} = {found}; expected {expected}, that of "
                "the T5 for which it drafts"
            )
    if type(backend) is not Xla:
        backend = backends.fastest(model, dtype, config.decode.weights)
    programs = Programs(model, dtype, devices=devices, backend=backend)
    programs.set_params(restored.items["params"])
    return Small(directory, restored.config, programs)
