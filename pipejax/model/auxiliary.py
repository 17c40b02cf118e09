"""Parameters beside a backbone, which are trained while the backbone is frozen: the base class of their description.

A run whose config has an `auxiliary` object trains these parameters alone (`train.freeze=backbone`), and keeps them as
an item of its checkpoints beside the parameters of the backbone. A drafter reads them as `TargetModel.auxiliary`.

Shapes: B batch, L source length, G sequences (packed targets), N slots of a sequence, D width of the backbone.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from pipejax.model.backbone import Axes, Backbone
from pipejax.system import Tree

ITEM = "auxiliary"  # the name of the item in checkpoints, and of the subtree beside the backbone's parameters


class Outputs(NamedTuple):
    """The outputs of a frozen backbone for a training batch, without dropout."""

    encoded: Any  # [B, L, D], the outputs of the encoder
    hidden: Any  # [G, N, D], the outputs of the decoder, teacher-forced; not computed if they are not used
    batch: Mapping[str, Any]  # the arrays of the batch: see `training.step.batch_loss`


class Auxiliary:
    """Describes parameters beside a backbone. A subclass is a frozen dataclass; its fields are settings of the run."""

    # Pairs of a regular expression and axes, as `Backbone.sharding`, for paths below "auxiliary/".
    sharding: ClassVar[tuple[tuple[str, Axes], ...]] = ((".*", ()),)

    def init_params(self, rng: Any, backbone: Backbone) -> Tree:
        """Returns newly initialised float32 parameters, a nested dict.

        Args:
          rng: a key of `jax.random`.
          backbone: the architecture of the backbone.
        """
        raise NotImplementedError(f"{type(self).__name__}.init_params")

    def loss(self, params: Tree, outputs: Outputs) -> tuple[Any, Any]:
        """Returns the summed loss f32 of a batch, and its divisor f32, such as a number of tokens."""
        raise NotImplementedError(f"{type(self).__name__}.loss")


def split(params: Tree) -> tuple[Tree, Tree]:
    """Splits the parameters of a training into a pair: of the backbone, and auxiliary (None without `auxiliary`)."""
    return {name: tree for name, tree in params.items() if name != ITEM}, params.get(ITEM)


def join(params: Tree, auxiliary: Tree) -> Tree:
    """Returns the parameters of a backbone together with auxiliary parameters, if these are not None."""
    return params if auxiliary is None else {**params, ITEM: auxiliary}
