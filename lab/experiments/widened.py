"""Writes a T5 of a larger size that computes the same function as a small trained T5: its answers at a larger cost.

    python -m lab.experiments.widened --checkpoint runs/small --model base --output runs/widened

If only small T5s can be trained, the larger T5 shows the speed of a method on real answers of a model, in a size that
people use. Additional widths, heads and layers are zero (Chen et al. 2016, arXiv 1511.05641, widen networks by copies),
so that they add nothing to the hidden states. The scales of the norms are reduced, since norms divide by the mean over
all channels. The vocabulary grows by copies of the padding token, which have its logit: such a token could be written
only if padding would be.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from pipejax import checkpoint
from pipejax.config import T5Config
from pipejax.model.t5_config import ARCHITECTURES, architecture
from pipejax.system import cli
from pipejax.system.errors import UserError

SIZES = ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads", "num_layers", "num_decoder_layers")


def main(argv: Sequence[str]) -> int:
    """Reads a checkpoint, and writes the widened one."""
    parser = cli.Parser(prog="python -m lab.experiments.widened", description=__doc__)
    parser.add_checkpoint()
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the larger T5")
    parser.add_argument(
        "--model", default="base", metavar="NAME", help=f"the larger size, one of {', '.join(ARCHITECTURES)}"
    )
    parser.add_argument(
        "--only-vocabulary", action="store_true", help="widen only the vocabulary, for a T5 that drafts"
    )
    flags = parser.parse_args(argv)
    restored = checkpoint.open_run(flags.checkpoint, best=flags.best)
    small, wanted = restored.config.model, architecture(flags.model)
    if not isinstance(small, T5Config):
        parser.error(f"--checkpoint: found {type(small).__name__}; expected a T5")
    grown = SIZES[:1] if flags.only_vocabulary else SIZES
    large = sizes_of(small, {name: getattr(wanted, name) for name in grown})
    config = dataclasses.replace(restored.config, model=large)
    params = widened(restored.items["params"], small, large)
    checkpoint.save_params(flags.output, config, params, tokenizer_source=restored.tokenizer_files())
    cli.note(f"{flags.output}: {sum(x.size for x in jax.tree.leaves(params)) / 1e6:.1f} M parameters")
    return 0


def sizes_of(small: T5Config, sizes: dict[str, int]) -> T5Config:
    """The architecture of the small T5 with these sizes.

    Raises:
      UserError: a size is less than the small T5's.
    """
    for name, size in sizes.items():
        if size < getattr(small, name):
            raise UserError(
                "--model", found=f"{name} {size}", expected=f"at least the checkpoint's {getattr(small, name)}"
            )
    # The mean square shrinks by the ratio of the channels, and so must the epsilon that is added to it.
    epsilon = small.layer_norm_epsilon * small.d_model / sizes.get("d_model", small.d_model)
    changed: dict[str, Any] = {"layer_norm_epsilon": epsilon, **sizes}
    return dataclasses.replace(small, **changed)


def widened(params: Any, small: T5Config, large: T5Config) -> Any:
    """Parameters of `large` with which it computes the function of `small` with `params`, except for rounding.

    Args:
      params: the parameters of `small` in float32.
      small: an architecture.
      large: the same architecture with larger `SIZES`, from `sizes_of`.
    """
    given = flatten_dict(params, sep="/")
    inner = large.num_heads * large.d_kv
    sizes = {"V": large.vocab_size, "D": large.d_model, "F": large.d_ff, "H": large.num_heads, "I": inner}
    sizes["B"] = large.relative_attention_num_buckets
    found: dict[str, np.ndarray] = {}
    for path, (_, axes) in large.tensors().items():
        made = np.zeros([sizes[axis] for axis in axes], np.float32)
        if path in given:
            held = np.asarray(given[path], np.float32)
            if path.endswith("norm/scale"):
                held = held * (small.d_model / large.d_model) ** 0.5
            if path == "decoder/norm/scale" and large.scale_head:  # the head divides by the root of the width
                held = held * (large.d_model / small.d_model) ** 0.5
            held, view = _heads_apart(held, axes, small), _heads_apart(made, axes, large)
            view[tuple(slice(n) for n in held.shape)] = held
            if "V" in axes:
                rows = made if axes[0] == "V" else made.T
                rows[small.vocab_size :] = rows[small.pad_token_id]
        found[path] = made
    return unflatten_dict(found, sep="/")


def _heads_apart(x: np.ndarray, axes: str, model: T5Config) -> np.ndarray:
    """A view of `x` in which the axis "I" is split into heads and their width."""
    parts = ((model.num_heads, model.d_kv) if axis == "I" else (n,) for axis, n in zip(axes, x.shape, strict=True))
    return x.reshape([n for part in parts for n in part])


if __name__ == "__main__":
    cli.run(main)
