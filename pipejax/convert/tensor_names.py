"""Checks the names of a backbone's tensors in a file, and removes the prefixes of wrapper classes from them."""

import re
from pathlib import Path

from pipejax.convert.tensor_files import Stored
from pipejax.model.backbone import Backbone
from pipejax.system.cli import note
from pipejax.system.errors import UserError

# Parts that torch.compile, DataParallel, FSDP and checkpointing insert in the names of tensors.
WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def unwrapped(model: Backbone, weights: Path, tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Returns the tensors under the backbone's names.

    torch's wrappers insert parts in the names, and other programs add a prefix to all names; both are removed.

    Raises:
      UserError: two tensors have the same name, or the file has separate LoRA factors.
    """
    factors = [name for name in tensors if re.search(r"\.lora_[AB]\.|\.lora_embedding_[AB]", name)]
    if factors:
        raise UserError(
            f"{weights}: {min(factors)}",
            found=f"{len(factors)} LoRA factors",
            expected="factors merged into the matrices",
            hint="use merge_and_unload of peft",
        )
    names = {name: WRAPPERS.sub("", name) for name in tensors}
    last = names_of_decoder(model)[-1:]
    prefix = next((x.removesuffix(y) for x in names.values() for y in last if x.endswith(f".{y}")), "")
    names = {name: inner.removeprefix(prefix) for name, inner in names.items()}
    changed = {name: inner for name, inner in names.items() if name != inner}
    if len({*names.values()}) < len(names):
        twice = max(names.values(), key=[*names.values()].count)
        raise UserError(
            f"{weights}: {twice}", found=f"twice, as {' and '.join((n for n, x in names.items() if x == twice))}"
        )
    if changed:
        name = min(changed)
        note(f"{weights}: wrappers changed the names of {len(changed)} tensors: {name} is read as {changed[name]}")
    return {inner: tensors[name] for name, inner in names.items()}


def names_of_decoder(model: Backbone) -> list[str]:
    """Returns the names of the decoder's tensors.

    Raises:
      UserError: two parameters have the same name, so a file would keep only one of them.
    """
    paths = dict[str, str]()
    for path, (name, _) in model.tensors().items():
        if path != paths.setdefault(name, path):
            raise UserError(
                f"model: {type(model).__name__}.tensors",
                found=f"{name} for {paths[name]} and {path}",
                expected="different names",
            )
    return [name for name, path in paths.items() if path.startswith("decoder/")]


def check_names(file: Path, model: Backbone, weights: Path, tensors: dict[str, Stored]) -> None:
    """Raises a UserError unless the file has exactly the tensors of the architecture in config.json."""
    own = names_of_decoder(model)
    if not any(name in own or re.search(r"\bdecoder\b", name) for name in tensors):
        raise UserError(
            weights,
            found=f"{len(tensors)} tensors, none of a decoder (as in T5EncoderModel)",
            expected="an encoder and a decoder",
        )
    model.check_names(frozenset(tensors), file, weights)
    names = {name for name, _ in model.tensors().values()}
    for name in sorted(names - tensors.keys()):
        raise UserError(f"{weights}: {name}", "missing", expected=f"{len(names)} tensors, found {len(tensors)}")
    for name in sorted(tensors.keys() - names):
        raise UserError(
            f"{tensors[name].file}: {name}",
            found="an unknown tensor",
            expected=f"the {len(names)} tensors that config.json implies",
        )
