"""Checks that the config.json of a backbone keeps every field."""

import contextlib
import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.decoding import strategy_checks
from pipejax.model.backbone import Backbone
from pipejax.system import strict_json
from pipejax.system.errors import UserError

# The fields that the caller of `read_facts` reads, from generation_config.json as well.
IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id", "other_eos_token_ids")


class Zeros(NamedTuple):
    """A tensor of a file, as `Backbone.fitted` receives it."""

    name: str
    shape: tuple[int, ...]
    file: Path = Path("model.safetensors")

    def read(self) -> np.ndarray:
        """Returns zeros of the shape."""
        return np.zeros(self.shape, np.float32)


def check_facts(config: Backbone) -> None:
    """Requires that a config.json keeps each field of the backbone, and of its `variants`."""
    for field, other in variants(config):
        try:
            facts = strict_json.loads(json.dumps(other.facts()))
        except UserError:  # the backbone cannot be written as a config.json, or not with this value
            continue
        again = _read(other, facts)
        for part in dataclasses.fields(other):
            here, there = getattr(again, part.name), getattr(other, part.name)
            if part.name not in IDS and here != there:
                changed = f" (with {field} = {getattr(other, field)!r})" if field else ""
                place = f"read_facts: {part.name}{changed}"
                strategy_checks.refuse(config, place, f"{here!r:.80}", f"{there!r:.80}, as in `facts`")


def variants(config: Backbone) -> Iterator[tuple[str, Any]]:
    """Yields the backbone itself, then legal backbones that differ from it in one field.

    There is one such backbone for each field of numbers, flags or choices for which another legal value is found.

    Yields:
      The name of the changed field ("" for the backbone itself), and the backbone.
    """
    yield "", config
    for field in dataclasses.fields(config):  # type: ignore[arg-type]  # a backbone is a dataclass
        if field.name in IDS:
            continue
        for value in _others(getattr(config, field.name), field.metadata.get("choices", ())):
            other: Any = dataclasses.replace(config, **{field.name: value})  # type: ignore[type-var]
            with contextlib.suppress(UserError):
                other.check("")
                if _is_written_alike(other):
                    yield field.name, other
                    break


def _others(value: Any, choices: tuple[str, ...]) -> list[Any]:
    """Returns other values of a field."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2]
    if isinstance(value, float):
        return [value / 2 or 0.25]
    return [choice for choice in choices if choice != value] if isinstance(value, str) else []


def _params(config: Any) -> dict[str, np.ndarray]:
    """Returns parameters of zeros, by path."""
    sizes = {letter: size for letter, (_, size) in config.sizes().items()}
    return {path: np.zeros([sizes[x] for x in axes], np.float32) for path, (_, axes) in config.tensors().items()}


def _is_written_alike(config: Any) -> bool:
    """Returns whether config.json describes this backbone, and not only an equivalent one."""
    with contextlib.redirect_stderr(io.StringIO()):  # notes about the conversion
        found: bool = config.written(_params(config)) == config
    return found


def _read(config: Any, facts: dict[str, Any]) -> Any:
    """Returns the backbone that is read from a config.json and the names and shapes of the tensors."""
    values = type(config).read_facts(facts) | {name: getattr(config, name) for name in IDS if hasattr(config, name)}
    for field in dataclasses.fields(config):
        if field.default is field.default_factory is dataclasses.MISSING and field.name not in values:
            strategy_checks.refuse(config, f"read_facts: {field.name}", "no value", repr(getattr(config, field.name)))
    params, tensors = _params(config), dict[str, Zeros]()
    for path, (name, _) in config.tensors().items():
        shape = params[path].shape
        tensors[name] = Zeros(name, shape[::-1] if path.endswith("kernel") else shape)
    with contextlib.redirect_stderr(io.StringIO()):
        return type(config)(**values).fitted(tensors, Zeros("", ()).file)
