"""Writes a T5 of a larger size that computes what a small trained one does: its answers, at the larger one's cost.

    python -m lab.experiments.widened --checkpoint runs/small --model base --output runs/widened

Where only small T5s can be trained, this shows what a method is worth on answers that a model writes by itself, in a
size that people use. What the small one lacks is filled up with zeros (Chen et al. 2016, arXiv 1511.05641, widen
networks by copies): widths, heads, and whole layers, which then add nothing to what passes them. The scales of the
norms are made smaller, since they divide by the mean over all channels. The vocabulary grows by copies of the padding
token, which have its logit: one could be written only where padding would be.
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
    """Reads a checkpoint, writes another."""
    parser = cli.Parser(prog="python -m lab.experiments.widened", description=__doc__)
    parser.add_checkpoint()
    parser.add_argument("--output", required=True, metavar="DIR", help="where the larger one goes")
    parser.add_argument("--model", default="base", metavar="NAME", help=f"whose sizes, of {', '.join(ARCHITECTURES)}")
    parser.add_argument("--only-vocabulary", action="store_true", help="nothing else grows: for a T5 that drafts")
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
    """The small one's architecture in these sizes.

    Raises:
      UserError: one is less than the small one's.
    """
    for name, size in sizes.items():
        if size < getattr(small, name):
            raise UserError(
                "--model", found=f"{name} {size}", expected=f"at least the checkpoint's {getattr(small, name)}"
            )
    # The mean square is smaller by as much as there are more channels, and so is what is added to it.
    epsilon = small.layer_norm_epsilon * small.d_model / sizes.get("d_model", small.d_model)
    changed: dict[str, Any] = {"layer_norm_epsilon": epsilon, **sizes}
    return dataclasses.replace(small, **changed)


def widened(params: Any, small: T5Config, large: T5Config) -> Any:
    """Parameters of `large` with which it computes what `small` does with `params`, but for rounding.

    Args:
      params: in float32, of `small`.
      small: an architecture.
      large: the same with larger `SIZES`, by `sizes_of`.
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
            if path == "decoder/norm/scale" and large.scale_head:  # what follows is divided by the root of the width
                held = held * (large.d_model / small.d_model) ** 0.5
            held, view = _heads_apart(held, axes, small), _heads_apart(made, axes, large)
            view[tuple(slice(n) for n in held.shape)] = held
            if "V" in axes:
                rows = made if axes[0] == "V" else made.T
                rows[small.vocab_size :] = rows[small.pad_token_id]
        found[path] = made
    return unflatten_dict(found, sep="/")


def _heads_apart(x: np.ndarray, axes: str, model: T5Config) -> np.ndarray:
    """A view with two axes, heads and their width, in the place of "I"."""
    parts = ((model.num_heads, model.d_kv) if axis == "I" else (n,) for axis, n in zip(axes, x.shape, strict=True))
    return x.reshape([n for part in parts for n in part])


if __name__ == "__main__":
    cli.run(main)
