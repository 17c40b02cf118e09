"""Writes a checkpoint again with weights in a smaller dtype."""

import dataclasses
from pathlib import Path

import jax
from flax.traverse_util import flatten_dict

from pipejax.checkpoint import check_place, open_run, require_free, save_params
from pipejax.checkpoint.manifest import on_host
from pipejax.checkpoint.student import report_own_encoder
from pipejax.convert.tensor_files import check_finite
from pipejax.model import quantization
from pipejax.model.auxiliary import ITEM


def quantize(checkpoint: str | Path, out: str | Path, *, weights: str = "int8", best: bool = False) -> None:
    """Writes the parameters of a run as a new run in fewer bytes, with step 0 only.

    The new config decodes with these weights.

    Args:
      checkpoint: the run directory.
      out: the run directory to write.
      weights: "int8", with one scale per output column, or "bfloat16".
      best: use the step of the best evaluation instead of the newest one.
    """
    require_free(Path(out))
    check_place(Path(out))
    restored = open_run(checkpoint, best=best)
    report_own_encoder(checkpoint)
    params = restored.items["params"]
    for path, array in flatten_dict(params, sep="/").items():
        check_finite(f"{restored.path}: {path}", array)
    with jax.default_device(next(iter(on_host().device_set))):
        held = jax.jit(quantization.cast_or_quantize, static_argnames=("dtype", "weights"))(
            params, dtype="float32", weights=weights
        )
    config = dataclasses.replace(restored.config, decode=dataclasses.replace(restored.config.decode, weights=weights))
    conversion = restored.metadata.get("conversion")
    files, own = restored.tokenizer_files(), restored.items.get(ITEM)  # small, and not rounded
    save_params(out, config, held, tokenizer_source=files, conversion=conversion, auxiliary=own)
    before, after = (sum(x.nbytes for x in jax.tree.leaves(tree)) / 1e6 for tree in (params, held))
    print(f"{out}: {after:.1f} MB of parameters in {weights}; in float32 they have {before:.1f} MB")
