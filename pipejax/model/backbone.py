"""The interface of a backbone: one object from token ids to logits, which is also its own config.

A backbone names its sizes, its parameters, their places on a mesh and their names in Hugging Face's files, and it makes
the Flax module that computes with them. Training, decoding, converting and planning ask it; none asks for its class.

Queries and keys are told by a mask and by one position each: on the grid it is row + time, and on every pair that a
query sees the difference of positions is the distance of the paper (section 3.2). The encoder's are 0, 1, 2, ...

A backbone of your own is a frozen dataclass in a file of your own: see docs/backbones.md. Importing this module does
not import JAX: configs are read without it.
"""

import functools
import logging
from collections.abc import Mapping, MutableMapping
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

Module = Any  # a Flax module that has the fields and methods of `pipejax.model.t5.T5`
Axes = tuple[str | None, ...]  # of a parameter: the axis of the mesh that splits each of its own
# How the paths of parameters end that are no weight matrices: they stay float32, never decay, and are never int8.
VECTORS = ("norm/scale", "relative_bias/embedding")


class Backbone:
    """An encoder-decoder. A subclass is a frozen dataclass, whose fields are the keys of `model` in a config.

    The paths of its parameters begin with "encoder/" or "decoder/" within its stacks, which `train.freeze`,
    `train.remat` and low-rank factors go by; a weight matrix is "kernel" [in, out], a table "embedding".
    """

    vocab_size: int  # tokens
    num_layers: int  # of the encoder
    num_decoder_layers: int
    pad_token_id: int
    eos_token_id: int  # ends rows, and sources as the tokenizer says
    other_eos_token_ids: tuple[int, ...] = ()  # end rows as well, in decoding
    decoder_start_token_id: int  # the token that every row begins with

    model_types: ClassVar[tuple[str, ...]] = ()  # of the config.json that it reads
    tables: ClassVar[tuple[str, ...]] = ("shared/embedding",)  # the parameters in which tokens are looked up
    is_relative: ClassVar[bool] = True  # whether logits depend on differences of positions alone
    image_tensors: ClassVar[tuple[str, ...]] = ()  # prefixes of names in files: of an image encoder, which is not read
    # From a parameter's path, by the first expression that matches the whole of it, to its axes.
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
        """The `eos_token_id` of config.json and generation_config.json: an id, or a list of several."""
        return [*self.end_token_ids] if self.other_eos_token_ids else self.eos_token_id

    def module(self, **options: Any) -> Module:
        """The Flax module, with the fields and methods of `pipejax.model.t5.T5`.

        Args:
          options: any of T5's fields: `dtype` of the computation, `dropout`, `remat`, `pin`, `shards`; and `blocks`,
            if `head_width` is not 0.
        """
        raise NotImplementedError(f"{type(self).__name__}.module")

    def tensors(self) -> dict[str, tuple[str, str]]:
        """The path of each parameter -> its name in Hugging Face's files, and its axes by letters of `sizes`."""
        raise NotImplementedError(f"{type(self).__name__}.tensors")

    def module_name(self, name: str) -> str:
        """The name in transformers' module, which PEFT adapters use, of the tensor with this name in files."""
        return name

    def sizes(self) -> dict[str, tuple[str, int]]:
        """The letter of each axis -> the key of the config, for messages, and the size."""
        raise NotImplementedError(f"{type(self).__name__}.sizes")

    def head_width(self) -> int:
        """The width of attention's heads, if the module takes `blocks` as T5 does; 0: it does not.

        Then its attention, given `Slots` in the place of masks, is `block_attention.attend_in_blocks`.
        """
        return 0

    def training_flops(self, lengths: "np.ndarray") -> float:
        """Operations of a training step for lengths [B, 2], of sources and targets; 0: unknown, none is reported."""
        return 0.0

    def like_t5(self) -> "Backbone":
        """A T5 whose activations are about as large, for estimates of memory."""
        raise UserError(f"model: found {type(self).__name__}; expected a T5, whose arithmetic this is")

    def check(self, where: str) -> None:
        """Raises a UserError that begins with `where` and the key if its fields contradict each other."""

    @classmethod
    def read_facts(cls, facts: Mapping[str, object]) -> dict[str, object]:
        """The values of its fields from a config.json; the special ids are looked for elsewhere.

        Raises:
          UserError: a key is missing or wrong; the message begins with the key.
        """
        raise UserError(f"model_type: found {facts.get('model_type')!r}; {cls.__name__} reads no config.json")

    def facts(self) -> dict[str, object]:
        """The values of config.json."""
        raise UserError(f"model: found {type(self).__name__}; expected a backbone that writes a config.json")

    def fitted(self, tensors: MutableMapping[str, Any], weights: Path) -> Self:
        """The backbone as the tensors of a file show it to be; may take tensors away that it does not use.

        Args:
          tensors: by name; each has a `shape` and a `file`, and `read()` gives its numbers.
          weights: their file, for messages.
        """
        return self

    def without_copies(self, params: "MutableMapping[str, np.ndarray]") -> Self:
        """The backbone as its parameters, by path, show it to be; may take those away that are copies of others."""
        return self

    def written(self, params: "MutableMapping[str, np.ndarray]") -> Self:
        """The backbone in a form that config.json can describe; may add copies of parameters, by path, for it."""
        return self

    def earlier_doubts(self) -> str:
        """A description of the settings that an earlier version's conversion may have read wrongly; "": none.

        Called for checkpoints without `conversion` in their metadata (`pipejax.checkpoint.run.CONVERSION`).
        """
        return ""

    def check_names(self, names: "frozenset[str]", where: Path, weights: Path) -> None:
        """Raises a UserError that explains which key of config.json the names of tensors contradict, if one is known.

        Args:
          names: of all tensors.
          where: config.json.
          weights: the file of the tensors.
        """

    def init_params(self, rng: "Array") -> Tree:
        """Fresh float32 parameters; jit-able."""
        return self.module().init(rng, *smallest_batch())["params"]


def choose_blocks(backbone: Backbone, device: "Device", split: "NamedSharding | None" = None) -> "Blocks | None":
    """The way in which attention runs in blocks on such devices; None: it does not, which is said if it is a GPU.

    `split`: of batches over the mesh on which it trains; None: it only decodes.
    """
    if device.platform not in ("gpu", "cuda"):
        return None
    block_attention = registry.find(registry.BLOCK_ATTENTION)
    from pipejax.model.slots import Blocks

    if not (width := backbone.head_width()):
        why = f"{type(backbone).__name__} names no head_width, or a part of it was changed"
    elif split and (tensor := split.mesh.shape["tensor"]) > 1:
        why = f"mesh.tensor={tensor} splits heads"
    else:
        why = block_attention.misfit(width, trains=split is not None)
    if not why:
        return Blocks(split)
    _warn(f"attention keeps arrays of queries by keys, which is slow: {why}")
    return None


@functools.cache
def _warn(line: str) -> None:
    """Once, however many programs it concerns."""
    logger.warning(line)


def smallest_batch() -> "tuple[Array, ...]":
    """The arguments of a teacher-forced call with one token on both sides."""
    import jax.numpy as jnp

    token, seen = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    return token, seen, token, seen[:, None], token
