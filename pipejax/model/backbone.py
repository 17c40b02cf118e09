"""The interface of a backbone: one object that describes an encoder-decoder, and is also the config of its model.

A backbone defines its sizes, its parameters, their sharding over a mesh and their names in Hugging Face's files, and it
makes the Flax module that maps token ids to logits. Training, decoding, conversion and planning use only this
interface: their code does not depend on the class of a backbone.

Attention receives a mask and one position for each query and key. On the grid the position is row + time; for every key
that a query sees, the difference of their positions is the distance of the paper (section 4.3). The positions of the
encoder are 0, 1, 2, ...

A custom backbone is a frozen dataclass in a file outside pipejax: see docs/backbones.md. Importing this module does not
import JAX, because configs are read without it.
"""

import functools
import logging
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pipejax import registry
from pipejax.system import Tree
from pipejax.system.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from jax import Array, Device
    from jax.sharding import NamedSharding

    from pipejax.model.slots import Blocks

logger = logging.getLogger(__name__)

Module = Any  # a Flax module with the fields and methods of `pipejax.model.t5.T5`
Axes = tuple[str | None, ...]  # for each axis of a parameter, the mesh axis that splits it; None: it is not split
# Path endings of parameters that are not weight matrices: they stay float32, have no weight decay, and are never int8.
VECTORS = ("norm/scale", "relative_bias/embedding")
ENCODER = ("encoder/", "shared/")  # prefixes of the paths of parameters on which the outputs of the encoder depend


class Backbone:
    """An encoder-decoder. A subclass is a frozen dataclass whose fields are the keys of the section `model` in configs.

    The paths of parameters in the two stacks begin with "encoder/" and "decoder/"; `train.freeze`, `train.remat` and
    low-rank factors rely on this. A weight matrix is called "kernel" and has the axes [in, out]; an embedding table is
    called "embedding".
    """

    vocab_size: int  # the number of token ids
    num_layers: int  # the number of encoder layers
    num_decoder_layers: int
    pad_token_id: int
    eos_token_id: int  # the token that ends rows; it also ends sources if the tokenizer adds it
    other_eos_token_ids: tuple[int, ...] = ()  # further tokens that end a row in decoding
    decoder_start_token_id: int  # bos, the token with which every row begins

    model_types: ClassVar[tuple[str, ...]] = ()  # the values of model_type in the config.json files that it reads
    tables: ClassVar[tuple[str, ...]] = ("shared/embedding",)  # the parameters in which tokens are looked up
    is_relative: ClassVar[bool] = True  # whether logits depend on positions only through their differences
    image_tensors: ClassVar[tuple[str, ...]] = ()  # name prefixes of an image encoder's tensors, which are not read
    # Pairs of a regular expression and axes. The first expression that matches a whole path determines its axes.
    sharding: ClassVar[tuple[tuple[str, Axes], ...]] = (
        (r"(.*/)?(shared|embedder)/embedding", ("tensor", "fsdp")),
        (r"lm_head/kernel", ("fsdp", "tensor")),
        (r".*/(query|key|value|wi|wi_0|wi_1)/kernel", ("fsdp", "tensor")),
        (r".*/(output|wo)/kernel", ("tensor", "fsdp")),
        (r".*/lora_[ab]", ()),
        (r".*/relative_bias/embedding", ()),
        (r".*norm/scale", ()),
    )

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a row: `eos_token_id`, which training writes, and `other_eos_token_ids`."""
        return self.eos_token_id, *self.other_eos_token_ids

    @property
    def eos_fact(self) -> int | list[int]:
        """The value of `eos_token_id` in config.json and generation_config.json: an id, or a list of several ids."""
        return [*self.end_token_ids] if self.other_eos_token_ids else self.eos_token_id

    def module(self, **options: Any) -> Module:
        """Returns the Flax module, with the fields and methods of `pipejax.model.t5.T5`.

        Args:
          options: values of the fields of `T5` beside `config`: `dtype`, `dropout`, `remat`, `pin`, `shards`, and
            `blocks` if `head_width` is not 0.
        """
        raise NotImplementedError(f"{type(self).__name__}.module")

    def tensors(self) -> dict[str, tuple[str, str]]:
        """Returns a map from the path of each parameter to its name in Hugging Face's files and its axes.

        The axes are letters of `sizes`. They describe the parameter here: a kernel is [in, out], and its transpose in
        the files.
        """
        raise NotImplementedError(f"{type(self).__name__}.tensors")

    def module_name(self, name: str) -> str:
        """Returns the name that transformers' module and PEFT adapters use for the tensor `name` of weight files."""
        return name

    def sizes(self) -> dict[str, tuple[str, int]]:
        """Returns a map from the letter of each axis to its config key, for messages, and its size."""
        raise NotImplementedError(f"{type(self).__name__}.sizes")

    def head_width(self) -> int:
        """Returns the head width of attention if the module supports the field `blocks` of `T5`, otherwise 0.

        With `blocks`, the module is called with `Slots` instead of masks, and its attention must be
        `block_attention.attend_in_blocks`.
        """
        return 0

    def training_flops(self, lengths: "np.ndarray") -> float:
        """Returns the floating-point operations of a training step; 0: unknown, so that reports omit them.

        Args:
          lengths: [B, 2], the source tokens and target slots of each example.
        """
        return 0.0

    def like_t5(self) -> "Backbone":
        """Returns a T5 with activations of about the same size, for memory estimates.

        Raises:
          UserError: there is no such T5.
        """
        raise UserError("model", found=type(self).__name__, expected="a T5, since the estimate is for a T5")

    def check(self, where: str) -> None:
        """Raises a UserError if fields contradict each other. The message begins with `where` and the key."""

    @classmethod
    def read_facts(cls, facts: Mapping[str, object]) -> dict[str, object]:
        """Reads the values of the backbone's fields from a config.json. The caller determines the special token ids.

        Args:
          facts: the content of config.json.

        Raises:
          UserError: a key is missing or has a wrong value; the message begins with the key.
        """
        raise UserError(
            "model_type", found=f"{facts.get('model_type')!r}, but {cls.__name__} does not read a config.json"
        )

    def facts(self) -> dict[str, object]:
        """Returns the content of a config.json for the backbone.

        Raises:
          UserError: the backbone cannot write one.
        """
        raise UserError("model", found=type(self).__name__, expected="a backbone that can write a config.json")

    def fitted(self, tensors: MutableMapping[str, Any], weights: Path) -> Self:
        """Returns the backbone with corrections of fields that a file's tensors determine better than config.json.

        The method may remove tensors that the backbone does not use.

        Args:
          tensors: the tensors by name. Each has a `shape` and a `file`; `read()` returns its values.
          weights: the file of the tensors, for messages.
        """
        return self

    def without_copies(self, params: "MutableMapping[str, np.ndarray]") -> Self:
        """Returns the backbone without parameters that are copies of other parameters.

        The copies are removed from `params`, a map by path. For example, a head that equals the embedding table is
        removed, and the result has a tied head.
        """
        return self

    def written(self, params: "MutableMapping[str, np.ndarray]") -> Self:
        """Returns an equivalent backbone that config.json can describe.

        The method may add copies of parameters to `params`, a map by path.
        """
        return self

    def earlier_doubts(self) -> str:
        """Returns a description of the settings that an earlier version's conversion may have read wrongly; "": none.

        Called for checkpoints without `conversion` in their metadata (`pipejax.checkpoint.run.CONVERSION`).
        """
        return ""

    def check_names(self, names: "frozenset[str]", where: Path, weights: Path) -> None:
        """Raises a UserError that names the key of config.json that the tensors contradict, if it can be determined.

        Args:
          names: the names of all tensors.
          where: the path of config.json, for messages.
          weights: the file of the tensors, for messages.
        """

    def init_params(self, rng: "Array") -> Tree:
        """Returns newly initialised float32 parameters. The method can be traced by `jax.jit`."""
        return self.module().init(rng, *smallest_batch())["params"]


def choose_blocks(backbone: Backbone, device: "Device", split: "NamedSharding | None" = None) -> "Blocks | None":
    """Returns the `Blocks` with which a model attends in blocks on a device, or None if this is not possible.

    If the device is a GPU, the reason for None is logged as a warning.

    Args:
      backbone: the backbone.
      device: a device of the platform on which the model runs.
      split: the sharding of batches over the mesh on which the model is trained; None: it only decodes.
    """
    if device.platform not in ("gpu", "cuda"):
        return None
    block_attention = registry.find(registry.BLOCK_ATTENTION)
    from pipejax.model.slots import Blocks

    if not (width := backbone.head_width()):
        why = f"{type(backbone).__name__} has no head_width, or a part of it was changed"
    elif split and (tensor := split.mesh.shape["tensor"]) > 1:
        why = f"mesh.tensor={tensor} splits heads"
    else:
        why = block_attention.misfit(width, trains=split is not None)
    if split:  # all processes of a run must compile the same step
        from pipejax.system import distributed

        why = next(filter(None, distributed.gather_texts(why)), "")
    if not why:
        return Blocks(split)
    _warn(f"attention keeps arrays of queries by keys, which is slow: {why}")
    return None


@functools.cache
def _warn(line: str) -> None:
    """Logs a warning once for each line, even if it applies to several programs."""
    logger.warning(line)


def smallest_batch() -> "tuple[Array, ...]":
    """Returns the arguments of a teacher-forced call of a module with one source token and one target slot."""
    import jax.numpy as jnp

    token, seen = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    return token, seen, token, seen[:, None], token


def with_encoder_outputs(apply: "Callable[..., Any]", *given: Any, **options: Any) -> "tuple[Any, Array]":
    """Calls a module in a way that runs its encoder, and returns the outputs of the encoder as well.

    Args:
      apply: the method `apply` of a module, with or without its first arguments.
      *given: its arguments.
      **options: its keyword arguments, such as `method`.

    Returns:
      The result of the call, and the outputs of the submodule `encoder`, [B, L, D].
    """
    result, kept = apply(
        *given,
        mutable=["intermediates"],
        capture_intermediates=lambda module, name: module.path == ("encoder",) and name == "__call__",
        **options,
    )
    return result, kept["intermediates"]["encoder"]["__call__"][0]
