"""A small T5 that drafts tokens for a larger one: opens, checks and prepares it (`decoding.drafters.model` uses it)."""

import dataclasses
import logging

import jax.numpy as jnp

from pipejax import checkpoint, methods
from pipejax.config import Config
from pipejax.decoding import Strategy
from pipejax.inference import backends
from pipejax.inference.backends import Xla
from pipejax.inference.programs import Programs
from pipejax.methods import Method
from pipejax.system import Tree
from pipejax.system.errors import UserError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """The checkpoint of `decode.draft_checkpoint`."""

    directory: str
    config: Config
    params: Tree = dataclasses.field(repr=False, compare=False)


def load(config: Config) -> DraftModel | None:
    """Opens the newest intact step of `decode.draft_checkpoint`; returns None if `decode.draft` is not "model".

    Raises:
      UserError: the checkpoint cannot be used, or has another vocabulary.
    """
    directory = config.decode.draft_checkpoint
    if config.decode.draft != "model":
        if directory:
            logger.warning(f"decode.draft_checkpoint: found {directory}, which is used only with decode.draft = model")
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
                expected=f"{expected}, as in the model that it drafts for",
            )
    return DraftModel(directory, restored.config, restored.items["params"])


def bind_draft_model(small: DraftModel, large: Programs, weights: str) -> None:
    """Creates the programs of the small T5 and attaches them to the programs of the large one.

    `weights` is `decode.weights`, the dtype in which the small T5's weights are stored.
    """
    model = small.config.model
    assert model is not None, "checked by open_run"
    dtype = jnp.dtype(large.model.dtype)
    # A caller that asked for XLA's products gets them for the small T5 as well.
    backend = backends.choose(large.backend if type(large.backend) is Xla else None, model, dtype, weights)
    large.small = Programs(model, dtype, devices=large.devices, backend=backend)
    large.small.set_params(small.params)


def check(small: DraftModel | None, made: Strategy, method: Method) -> None:
    """Raises a UserError if the drafting T5 is missing, or is known to be trained for another method."""
    if not made.needs_draft_model:
        return
    if small is None:
        raise UserError(
            "decode.draft",
            found="a drafter that is a T5",
            expected="model, with the checkpoint in decode.draft_checkpoint",
        )
    trained, where = methods.trained(small.config), f"decode.draft_checkpoint: {small.directory}"
    if small.config.method is None and small.config.train.method == "none":
        return
    if trained.name != method.name:
        raise UserError(where, found=f"a T5 trained for {trained.label}", expected=f"{method.name}")
    found = trained.learned()
    for key, wanted in method.learned().items():
        if found.get(key) != wanted:
            raise UserError(where, found=f"a T5 trained with {key} = {found.get(key)}", expected=f"{wanted}")
