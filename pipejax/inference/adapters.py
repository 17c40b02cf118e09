"""Reads adapters for an opened base model: LoRA runs of pipejax, and PEFT directories."""

import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from pipejax import checkpoint
from pipejax.checkpoint import Restored
from pipejax.checkpoint.fingerprint import digest, fingerprints
from pipejax.config import Config
from pipejax.convert import description, generation, peft_adapters
from pipejax.data.tokenizer import FILES, Tokenizer
from pipejax.model import lora
from pipejax.system import Tree
from pipejax.system.errors import UserError
from pipejax.system.files import look
from pipejax.system.strict_json import JsonObject

logger = logging.getLogger(__name__)

CLOSE = 1e-5  # relative tolerance for merged weights, which differ slightly between machines


class Adapter(NamedTuple):
    """The factors of one adapter, and the settings with which the adapter was trained."""

    factors: JsonObject  # arrays by path
    trained: Config
    origin: JsonObject  # its step and params_fp


def read(directory: str | Path, base: Restored, tokenizer: Tokenizer | None) -> Adapter:
    """Reads an adapter. If the directory is a run, its newest intact step is read.

    Args:
      directory: a run with low-rank factors, or a PEFT adapter.
      base: the opened base model.
      tokenizer: the tokenizer of the base. If the adapter has a tokenizer, the two must be equal.

    Raises:
      UserError: the adapter is not valid, or belongs to another base.
    """
    place = Path(directory)
    if peft_adapters.is_adapter(place):
        return _of_peft(place, base, tokenizer)
    restored = checkpoint.open_run(place, packed=True, apart=True)
    if restored.config.model != base.config.model:
        raise UserError(
            f"{place}: model", found="a different architecture", expected=f"the architecture of {base.path.parents[1]}"
        )
    _check_tokenizer(place, checkpoint.tokenizer_of(restored), tokenizer)
    flat = flatten_dict(restored.items["params"], sep="/")
    factors = {path: flat.pop(path) for path in [*flat] if lora.is_factor(path)}
    if not factors:
        raise UserError(place, found="no LoRA factors", expected="a run with train.lora_rank, or a PEFT directory")
    _compare(place, flat, base)
    return Adapter(factors, restored.config, {"step": restored.step, "params_fp": digest(restored.arrays["params"])})


def _of_peft(place: Path, base: Restored, tokenizer: Tokenizer | None) -> Adapter:
    """Reads a PEFT directory, which has no base weights that could be compared with the base model."""
    assert base.config.model is not None  # `open_run` checks it
    factors = peft_adapters.read_factors(place, base.config.model)
    if any(look(place / name) for name in FILES):
        _check_tokenizer(place, Tokenizer.load(place), tokenizer)
    parents, config = base.path.parents[1], base.config
    lines = [f"{place}: base weights not compared with {parents}, because a PEFT directory has only factors"]
    if (
        found := description.read_settings(place, base.config.model, generation.read_generation(place, {}))
    ) is not None:
        config, more = found
        lines += more
    for line in lines:
        logger.info(line)
    return Adapter(factors, config, {"step": 0, "params_fp": digest(fingerprints(factors))})


def _check_tokenizer(place: Path, found: Tokenizer | None, expected: Tokenizer | None) -> None:
    if found and expected and (found.other_pieces(expected) or found.size != expected.size):
        raise UserError(place, found="a different tokenizer", expected="the tokenizer of the base model")


def _compare(place: Path, found: dict[str, Tree], base: Restored) -> None:
    """Raises a UserError unless the base weights of an adapter are the weights of `base`, if these are not rounded."""
    for path, array in flatten_dict(base.items["params"], sep="/").items():
        if array.dtype != np.float32:
            parents = base.path.parents[1]
            logger.info(
                f"{place}: base weights not compared with {parents}, whose weights are rounded to {array.dtype}"
            )
            return
        if not np.allclose(array, found[path], rtol=CLOSE, atol=CLOSE):
            raise UserError(
                f"{place}: {path}",
                found=f"weights that differ from {base.path.parents[1]}",
                expected="the base model of the adapter",
            )
