"""The names of a T5's tensors in a file: which there must be, and what others put around them."""

import re
from pathlib import Path

import numpy as np

from pipejax.config import T5Config
from pipejax.convert.tensor_files import Stored
from pipejax.model.parameters import SHARED, mapping
from pipejax.system.cli import note
from pipejax.system.errors import UserError

# What torch.compile, DataParallel, FSDP and checkpointing put into the names of tensors, and a name that every T5 has.
WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
LAST = "decoder.final_layer_norm.weight"


def unwrapped(weights: Path, tensors: dict[str, Stored]) -> dict[str, Stored]:
    """The tensors under a T5's names: torch puts its wrappers' names into those, and others a prefix before all.

    Raises:
      UserError: the weights are factors of LoRA, or two tensors get one name.
    """
    factors = [name for name in tensors if re.search(r"\.lora_[AB]\.|\.lora_embedding_[AB]", name)]
    if factors:
        raise UserError(
            f"{weights}: {min(factors)}: found {len(factors)} factors of LoRA; expected them merged into the matrices "
            "(merge_and_unload of peft does that)"
        )
    names = {name: WRAPPERS.sub("", name) for name in tensors}
    prefix = next((x.removesuffix(LAST) for x in names.values() if x.endswith(f".{LAST}")), "")
    names = {name: inner.removeprefix(prefix) for name, inner in names.items()}
    changed = {name: inner for name, inner in names.items() if name != inner}
    if len({*names.values()}) < len(names):
        twice = max(names.values(), key=[*names.values()].count)
        raise UserError(
            f"{weights}: {twice}: found twice, as {' and '.join(n for n, x in names.items() if x == twice)}"
        )
    if changed:
        name = min(changed)
        note(f"{weights}: names of {len(changed)} tensors without their wrapper's: {name} is {changed[name]}")
    return {inner: tensors[name] for name, inner in names.items()}


def merge_shared(tensors: dict[str, Stored]) -> None:
    """Reduces the three names of the embedding table to one; raises a UserError if their tensors differ."""
    present = [name for name in SHARED if name in tensors]
    for name in present[1:]:
        alias = tensors.pop(name)
        if not np.array_equal(alias.read(), tensors[present[0]].read()):
            raise UserError(f"{alias.file}: {name}: differs from {present[0]}; expected one table")
    if present:
        tensors[SHARED[0]] = tensors.pop(present[0])


def check_names(file: Path, model: T5Config, weights: Path, tensors: dict[str, Stored]) -> None:
    """Raises a UserError unless the tensors are exactly those of the architecture in config.json.

    Args:
      file: config.json, for messages.
      model: its architecture.
      weights: the file of the tensors, for messages.
      tensors: by name.
    """
    if not any(name.startswith("decoder.") for name in tensors):
        raise UserError(
            f"{weights}: found {len(tensors)} tensors, none of a decoder (as in T5EncoderModel); "
            "expected an encoder and a decoder"
        )
    dense = min((name for name in tensors if ".DenseReluDense.wi" in name), default=None)
    if dense and (".wi." in dense) != (model.feed_forward == "relu"):
        raise UserError(
            f"{file}: feed_forward_proj: found {model.feed_forward}; expected "
            f"{'relu' if '.wi.' in dense else 'gated-gelu'}, as {weights.name} holds {dense}"
        )
    for stack, key in (("encoder", "num_layers"), ("decoder", "num_decoder_layers")):
        blocks = {name.split(".")[2] for name in tensors if name.startswith(f"{stack}.block.")}
        if len(blocks) != getattr(model, key):
            raise UserError(
                f"{file}: {key}: found {getattr(model, key)}; expected {len(blocks)}, the number "
                f"of {stack} blocks in {weights.name}"
            )
    names = {name for name, _ in mapping(model).values()}
    for name in sorted(names - tensors.keys()):
        raise UserError(f"{weights}: {name}: missing; expected {len(names)} tensors, found {len(tensors)}")
    for name in sorted(tensors.keys() - names):
        raise UserError(
            f"{tensors[name].file}: {name}: found a tensor without a place; expected the "
            f"{len(names)} that follow from config.json"
        )
