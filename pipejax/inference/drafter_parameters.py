"""The drafter of `decode.draft` with its parameters: opened with a checkpoint, and laid out when they are needed."""

import dataclasses
import logging

import flax.struct
import jax
import jax.numpy as jnp

from pipejax import checkpoint, methods
from pipejax.checkpoint.student import shared_encoder
from pipejax.config import Config
from pipejax.decoding import Model, SourceIds, Strategy, drafters
from pipejax.decoding.drafters import Drafter, FromModel, TargetModel
from pipejax.inference import backends
from pipejax.inference.backends import Backend, Xla
from pipejax.inference.programs import Programs, prepare
from pipejax.methods import Method
from pipejax.model.backbone import Backbone, Module
from pipejax.model.t5 import Memory
from pipejax.system import Tree
from pipejax.system.errors import UserError, first_line

logger = logging.getLogger(__name__)

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class OpenDrafter:
    """The drafter of `decode.draft`."""

    drafter: Drafter
    directory: str = ""  # `decode.draft_checkpoint`
    config: Config | None = None  # the config of the small T5 in this directory
    params: Tree = dataclasses.field(default=None, repr=False, compare=False)  # None: the drafter has no parameters
    shares_encoder: bool = False  # whether the small T5 uses the encoder of the model that it drafts for


@flax.struct.dataclass
class SmallModel:
    """The parameters of a small T5; see `drafters.SmallModel`."""

    encoding: Tree  # parameters for `Backend.encode`; for `Backend.memorize` if `shares_encoder`
    decoding: Tree
    module: Module = flax.struct.field(pytree_node=False)
    backend: Backend = flax.struct.field(pytree_node=False)
    shares_encoder: bool = flax.struct.field(pytree_node=False, default=False)  # whether it uses the large T5's encoder

    def read(self, source: SourceIds) -> Memory:
        """See `drafters.SmallModel`."""
        length = jnp.asarray(source.length)
        if self.shares_encoder:
            assert source.encoded is not None, "the drafter wants it"
            return self.backend.memorize(self.module, self.encoding, source.encoded, length)
        return self.backend.encode(self.module, self.encoding, jnp.asarray(source.ids), length)

    def widen(self, memory: Memory, slots: int) -> Memory:
        """See `drafters.SmallModel`."""
        return self.backend.widen(memory, slots)

    def decoder(self, memory: Memory) -> Model[Tree]:
        """See `drafters.SmallModel`."""
        return self.backend.decoder(self.module, self.decoding, memory)


def load(target: TargetModel) -> OpenDrafter | None:
    """Opens the drafter of `decode.draft` and its parameters; returns None if `decode.draft` is "none".

    Args:
      target: the model for which the drafter drafts.

    Raises:
      UserError: the drafter or its parameters cannot be used.
    """
    decode = target.config.decode
    directory = decode.draft_checkpoint
    drafter = None if decode.draft == "none" else drafters.make(decode.draft)
    if not drafters.wants(drafter, "parameters"):
        if directory:
            hint = "a drafter with parameters, such as model"
            logger.warning(f"decode.draft_checkpoint: found {directory}, which is used only with {hint}")
        return None if drafter is None else OpenDrafter(drafter)
    assert drafter is not None
    if isinstance(drafter, FromModel):
        return _load_small(drafter, target)
    read = getattr(drafter, "load", None)
    if not callable(read):
        name = type(drafter).__name__
        raise UserError(f"{name}.load", "no such method", expected="a method load, since the drafter wants parameters")
    try:
        params = jax.tree.map(jnp.asarray, read(directory, target))
    except UserError as error:
        raise error.within("decode.draft") from error
    except Exception as error:  # code of a user may raise any exception
        found = f"{type(drafter).__name__}.load, which raises {type(error).__name__}: {first_line(error)}"
        expected = f"parameters in decode.draft_checkpoint = {directory!r}"
        raise UserError("decode.draft", found=found, expected=expected) from error
    return OpenDrafter(drafter, directory, params=params)


def _load_small(drafter: FromModel, target: TargetModel) -> OpenDrafter:
    """Opens the newest intact step of `decode.draft_checkpoint`.

    Raises:
      UserError: the checkpoint cannot be used, has another vocabulary, or shares the encoder of another model.
    """
    config = target.config
    directory = config.decode.draft_checkpoint
    try:
        restored = checkpoint.open_run(directory, packed=True)
    except UserError as error:
        raise error.within("decode.draft_checkpoint") from error
    assert config.model is not None and restored.config.model is not None
    check_vocabulary(f"decode.draft_checkpoint: {directory}", restored.config.model, config.model)
    shared = shared_encoder(directory)
    if shared and target.encoder_fingerprint not in ("", shared):
        raise UserError(
            f"decode.draft_checkpoint: {directory}",
            found=f"a T5 that shares the encoder with fingerprint {shared}",
            expected=f"{target.encoder_fingerprint}, the encoder of the model that it drafts for",
            hint="pipejax teach --student trains one for this model",
        )
    return OpenDrafter(drafter, directory, restored.config, restored.items["params"], bool(shared))


def check_vocabulary(where: str, small: Backbone, large: Backbone) -> None:
    """Raises a UserError that begins with `where` if a small T5 has another vocabulary than the large one."""
    for key in ("vocab_size", "eos_token_id", "decoder_start_token_id"):
        found, expected = getattr(small, key), getattr(large, key)
        if found != expected and not (key == "eos_token_id" and found in large.end_token_ids):
            expected = f"{expected}, as in the model that it drafts for"
            raise UserError(where, found=f"a T5 with {key} = {found}", expected=expected)


def lay_out(opened: OpenDrafter, large: Programs, weights: str) -> Tree:
    """Returns the drafter's parameters in the form that its methods get.

    Args:
      opened: the drafter.
      large: the programs of the model that it drafts for.
      weights: `decode.weights`, the dtype in which the weights of a small T5 are stored.
    """
    if opened.config is None:
        return opened.params
    model = opened.config.model
    assert model is not None, "checked by open_run"
    dtype = jnp.dtype(large.model.dtype)
    # A caller that asked for XLA's products gets them for the small T5 as well.
    backend = backends.choose(large.backend if type(large.backend) is Xla else None, model, dtype, weights)
    made = Programs(model, dtype, devices=large.devices, backend=backend)
    ready = prepare(backend, made.model, opened.params)
    encoding = backend.projections(ready.encoding) if opened.shares_encoder else ready.encoding
    return SmallModel(encoding, ready.decoding, made.model, backend, opened.shares_encoder)


def check(opened: OpenDrafter | None, made: Strategy, method: Method) -> None:
    """Raises a UserError if the parameters of a strategy's drafter are missing or do not fit the method.

    Parameters of a small T5 do not fit if the small T5 was trained for another method.

    Args:
      opened: the drafter of `decode.draft`.
      made: the strategy.
      method: the method whose strategy it is.
    """
    drafter = made.drafter
    if not drafters.wants(drafter, "parameters"):
        return
    if opened is None or type(opened.drafter) is not type(drafter):
        name = type(drafter).__name__
        setting = "model, with the checkpoint in decode.draft_checkpoint"
        if not isinstance(drafter, FromModel):
            setting = f"decode.draft={type(drafter).__module__}:{name} when the checkpoint is opened"
        raise UserError("decode.draft", found=f"the drafter {name}, which needs parameters", expected=setting)
    small = opened.config
    if small is None or (small.method is None and small.train.method == "none"):
        return
    trained, where = methods.trained(small), f"decode.draft_checkpoint: {opened.directory}"
    if trained.name != method.name:
        raise UserError(where, found=f"a T5 trained for {trained.label}", expected=f"{method.name}")
    found = trained.learned()
    for key, wanted in method.learned().items():
        if found.get(key) != wanted:
            raise UserError(where, found=f"a T5 trained with {key} = {found.get(key)}", expected=f"{wanted}")
