"""The small T5 that drafts for another one: opened, checked, and ready to run (`decoding.drafters.model` asks it)."""

import dataclasses
import logging
from typing import Any

import jax.numpy as jnp

from pipejax import checkpoint, methods
from pipejax.config import Config
from pipejax.decoding import Strategy
from pipejax.inference import backends
from pipejax.inference.backends import Xla
from pipejax.inference.programs import Programs
from pipejax.methods import Method
from pipejax.system.errors import UserError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """The checkpoint that `decode.draft_checkpoint` names."""

    directory: str
    config: Config
    params: Any = dataclasses.field(repr=False, compare=False)


def load(config: Config) -> DraftModel | None:
    """Opens the newest good step of `decode.draft_checkpoint`, if it has the same vocabulary; None: no T5 drafts."""
    directory = config.decode.draft_checkpoint
    if config.decode.draft != "model":
        if directory:
            logger.warning(f"decode.draft_checkpoint: found {directory}, which only decode.draft = model reads")
        return None
    try:
        restored = checkpoint.open_run(directory, packed=True)
    except UserError as error:
        raise error.within("decode.draft_checkpoint") from error
    assert config.model is not None
    ends = config.model.end_token_ids
    for key in ("vocab_size", "eos_token_id", "decoder_start_token_id"):
        found, expected = getattr(restored.config.model, key), getattr(config.model, key)
        if found != expected and not (key == "eos_token_id" and found in ends):
            raise UserError(
                f"decode.draft_checkpoint: {directory}",
                found=f"a T5 with {key} = {found}",
                expected=f"{expected}, that of the T5 for which it drafts",
            )
    return DraftModel(directory, restored.config, restored.items["params"])


def bind_draft_model(small: DraftModel, large: Programs, weights: str) -> None:
    """Gives the programs of the large T5 those of the small one, which holds its weights as `decode.weights` says."""
    model = small.config.model
    assert model is not None, "checked by open_run"
    dtype = jnp.dtype(large.model.dtype)
    # Whoever asked for XLA's products alone gets them.
    backend = backends.choose(large.backend if type(large.backend) is Xla else None, model, dtype, weights)
    large.small = Programs(model, dtype, devices=large.devices, backend=backend)
    large.small.set_params(small.params)


def check(small: DraftModel | None, made: Strategy, method: Method) -> None:
    """Raises a UserError if a T5 is to draft that is not there, or is known to be trained for something else."""
    if not made.needs_draft_model:
        return
    if small is None:
        raise UserError("decode.draft", found="a drafter that is a T5", expected="model and its checkpoint there")
    trained, where = methods.trained(small.config), f"decode.draft_checkpoint: {small.directory}"
    if small.config.method is None and small.config.train.objective == "none":
        return
    if trained.name != method.name:
        raise UserError(where, found=f"a T5 trained for {trained.label}", expected=f"{method.name}")
    found = trained.learned()
    for key, wanted in method.learned().items():
        if found.get(key) != wanted:
            raise UserError(where, found=f"a T5 trained with {key} = {found.get(key)}", expected=f"{wanted}")
